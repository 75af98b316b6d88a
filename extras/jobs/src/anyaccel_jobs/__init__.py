"""Detached jobs, sweeps, drains, reservations, reports, metrics and the live view of anyaccel, on a shared machine."""
