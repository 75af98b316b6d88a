"""The checks as plain functions: each takes a subject (and a machine), and returns None or raises CheckFailed."""
