"""Count what some work needs, where a time would depend on the machine."""

import sys


def count_calls(work):
    """Return how many Python functions are called by a function, itself among them."""
    calls = 0

    def note(_frame, event, _argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls
