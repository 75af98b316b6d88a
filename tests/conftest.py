"""What every test of the core may use."""

from installed import acme, anyaccel, clean_environment, install, record

__all__ = ["acme", "anyaccel", "clean_environment", "install", "record"]
