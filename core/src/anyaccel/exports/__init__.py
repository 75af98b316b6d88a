"""What other schedulers and container engines want to be told about a machine: one module per target, pure text.

:mod:`~anyaccel.exports.targets` lists the targets; :mod:`~anyaccel.exports.source` holds what they are made of.
"""
