"""Detached jobs, sweeps, reports, metrics and the live view of anyaccel, for people on a shared machine."""
