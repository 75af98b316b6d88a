"""Plug-ins: which are installed, which may have hardware here, and one process per vendor that runs its hooks."""
