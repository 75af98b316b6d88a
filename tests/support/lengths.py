"""How long those tests run that could run for as long as one likes."""

import os


def length(short: int, full: int) -> int:
    """A number of rounds: the full one where ``ANYACCEL_TEST_FULL`` is set, as ``.ci/run`` does."""
    return full if os.environ.get("ANYACCEL_TEST_FULL") else short
