"""A vendor that hangs is not asked again for a minute, unless the plug-in changes."""

import os

import anyaccel as aa
import pytest
from anyaccel.inventory import hangs
from anyaccel.model import ProblemKind, VendorState
from anyaccel.vendors import close, installed

HANGING = """
from anyaccel.plugin import *
@hookimpl
def anyaccel_info(): return PluginInfo(vendor="bad", resource="BPU", kind="bpu", env_vars=("BAD_VISIBLE",))
@hookimpl
def anyaccel_fractional(device): return Fractional.NO
@hookimpl
def anyaccel_tags(device): return ("BAD-1",)
@hookimpl
def anyaccel_env(devices, ctx): return EnvEdits(set={"BAD_VISIBLE": ""})
@hookimpl
def anyaccel_detect(ctx):
    BODY
"""
SLEEPS = "import time; time.sleep(1000)"
ANSWERS = "return Detected(devices=(Device(id='bad-0', index=0, model='Bad'),))"


@pytest.fixture
def hanging(install, monkeypatch):
    """Return the file of a plug-in with a hanging detection; the memory outlasts the test."""
    monkeypatch.setattr(hangs, "MEMORY_SECONDS", 3600.0)
    return install("bad", HANGING.replace("BODY", SLEEPS))


def asked(seconds=0.2, **options):
    """Detect, and return whether the vendor was asked."""
    problem = aa.detect(timeout=seconds, **options).report("bad").problem
    assert problem.kind is ProblemKind.TIMEOUT
    assert "it did not answer within" in problem.reason
    return "so it is not asked again" not in problem.reason


def test_a_vendor_that_hung_is_not_asked_again_by_the_next_command(hanging, anyaccel):
    assert asked()
    assert not asked()
    done = anyaccel("--probe-timeout", "0.2", "status")
    told = " ".join(done.stderr.split())
    assert "so it is not asked again for a minute" in told
    assert "'anyaccel doctor' asks at once, and ANYACCEL_DISABLE=bad leaves the vendor out" in told


def test_a_vendor_has_another_chance_with_more_time_and_once_a_minute_is_over(hanging, monkeypatch):
    assert asked()
    assert asked(0.4)
    monkeypatch.setattr(hangs, "MEMORY_SECONDS", 0.0)
    assert asked()


def test_the_doctor_asks_at_once_and_an_answer_ends_the_memory(hanging):
    assert asked()
    assert asked(everybody=True)
    stat = hanging.stat()
    hanging.write_text(HANGING.replace("BODY", ANSWERS))
    os.utime(hanging, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as if it had been another cause, such as the driver
    close()
    assert not asked()
    assert aa.detect(timeout=60, everybody=True).report("bad").state is VendorState.OK
    assert not hangs.recall(installed()[0], 0.2, os.environ)


def test_a_plugin_that_was_changed_is_asked_at_once(hanging):
    assert asked()
    hanging.write_text(HANGING.replace("BODY", ANSWERS))
    close()
    assert aa.detect(timeout=60).report("bad").state is VendorState.OK


def test_other_machines_have_no_memory(hanging, record):
    assert asked()
    assert asked(machine=record({}))


@pytest.mark.parametrize("content", ["", "[]", '{"hangs": [{"vendor": "bad"}]}', "[" * 100_000, "\x00"])
def test_a_damaged_memory_is_none(hanging, content, tmp_path):
    assert asked()
    (file,) = (tmp_path / "cache-home" / "anyaccel").iterdir()
    file.write_text(content)
    assert asked()
    assert not asked()
