"""Processes that run Python functions on devices: the fork server that forks them, pools and actors."""
