"""What other schedulers and container engines want to be told about a machine: one module per target, pure text.

:mod:`~anyaccel_export.targets` lists the targets; :mod:`~anyaccel_export.source` holds what they are made of.
"""
