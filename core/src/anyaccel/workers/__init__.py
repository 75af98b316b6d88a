"""Processes that run Python functions on devices: the nursery that forks them, pools and actors."""
