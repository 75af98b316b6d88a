"""Rules about numbers of devices: as data, or by a hook whose answer is kept for each set."""

from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.launcher.verdicts import why
from anyaccel.model import Term
from anyaccel.vendors import process

QUAD = """
from pathlib import Path

from anyaccel.plugin import Detected, Device, EnvEdits, Fractional, PluginInfo, hookimpl


@hookimpl
def anyaccel_info():
    return PluginInfo(
        vendor="quad", resource="QUAD", kind="quad", env_vars=("QUADS",),
        counts=(1, 2, 4), exclusive="its driver admits one process",
    )


@hookimpl
def anyaccel_detect(ctx):
    return Detected(devices=tuple(Device(id=f"quad-{number}", index=number, model="Quad") for number in range(8)))


@hookimpl
def anyaccel_fractional(device):
    return Fractional.NO


@hookimpl
def anyaccel_tags(device):
    return ()


@hookimpl
def anyaccel_env(devices, ctx):
    return EnvEdits(set={"QUADS": ",".join(device.id for device in devices)})
"""
RULE = """

@hookimpl
def anyaccel_validate(request, devices):
    with Path(%r).open("a") as file:
        print(len(devices), file=file)
    return "two of these must begin at an even one" if len(devices) == 2 and devices[0].index %% 2 else None
"""
REFUSED = "one job can use 1, 2 or 4 QUADs of a machine (got 3); ask for one of these numbers"


NOTED = """    with Path(%r).open("a") as file:
        print(len(devices), ctx.environ.get("QUADS_TEST", ""), file=file)
"""


@pytest.mark.parametrize("rule", [False, True])
def test_other_numbers_never_fit_and_the_sentence_says_which_do(rule, install, tmp_path):
    install("quad", QUAD + (RULE % str(tmp_path / "asked")) * rule)
    with pytest.raises(aa.NeverFitsError, match="one job can use 1, 2 or 4 QUADs") as caught:
        aa.acquire("QUAD:3", wait=0)
    assert [reason.message for reason in caught.value.verdict.reasons] == [REFUSED]
    with aa.acquire("QUAD:4", wait=0) as hold:
        assert len(hold.devices) == 4
    said = why("QUAD:0.5").message
    assert "one QUAD cannot be divided or shared: its driver admits one process" in said


def test_the_rule_is_asked_about_the_numbers_that_are_allowed_only_and_once_for_each_set(install, tmp_path):
    asked = Path(tmp_path / "asked")
    install("quad", QUAD + RULE % str(asked))
    scheduler = aa.open_scheduler(aa.detect())
    assert not scheduler.why("QUAD:3").ever_fits
    first = scheduler.allocate("QUAD:2")
    sets = asked.read_text().split()
    assert set(sets) <= {"1", "2", "4"}  # "why" names the nearest that would fit
    scheduler.release(first)
    assert [device.id for device in scheduler.allocate("QUAD:2").devices] == [device.id for device in first.devices]
    assert asked.read_text().split() == sets


def test_answers_to_ever_new_requests_are_not_kept_for_ever(install, tmp_path, monkeypatch):
    asked = Path(tmp_path / "asked")
    install("quad", QUAD + RULE % str(asked))
    monkeypatch.setattr(process, "MOST_REASONS", 3)
    devices = aa.detect().devices[:1]
    for memory in (1, 1, 2, 3, 3, 4, 1):
        assert process.validate(Term(names=("QUAD",), memory_bytes=memory), devices) is None
    assert asked.read_text().split() == ["1"] * 5
