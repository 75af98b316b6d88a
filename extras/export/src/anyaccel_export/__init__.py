"""Configuration of other schedulers and container engines for a machine: one module per target, pure text.

:mod:`~anyaccel_export.targets` lists the targets; :mod:`~anyaccel_export.source` holds what they are made of.
"""
