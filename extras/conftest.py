"""What every test of an extra may use, as those of the core do."""

from installed import acme, anyaccel, clean_environment, install, record

__all__ = ["acme", "anyaccel", "clean_environment", "install", "record"]
