"""Gangs of one, on this machine."""

import anyaccel as aa
import pytest
from engine_gangs import *  # noqa: F403
from engine_gangs import place


def test_this_machine_is_one(pool):
    with pytest.raises(aa.UsageError, match=r"hosts must be 1 with engine='local'.*engine='ray' has those"):
        pool("A1:1").gang(2, place)
