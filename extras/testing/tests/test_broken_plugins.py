"""A plug-in with one fault fails exactly the check of the fault, with a remedy in the message."""

from __future__ import annotations

from pathlib import Path

import pytest
from anyaccel_testing import CHECKS, State, run_checks
from broken_plugins import BROKEN, PRESENCE, handing_over
from lengths import length

ACME = (Path(__file__).parents[3] / "tests" / "vendors" / "acme.py").read_text()
WHOLE = length([], [*BROKEN][::6])
"""Faults on which every check runs, to see that exactly one fails; a sample, since each takes a process per check."""
NOT_BY_A_PLUGIN = {"C23", "C29"}
"""Checks of a test class and of the kit's catalog, which the plug-in acme has not."""
OF_SEVERAL = {"C24"}
"""Checks of several vendors, which a single plug-in cannot break."""


def ends(results, state):
    return {result.check for result in results if result.state is state}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_plugin_fails_exactly_its_check(fault, install, recordings):
    broken = BROKEN[fault]
    source = broken.source(ACME)
    install("acme", source).with_suffix(".presence.json").write_text(broken.presence)
    directory = recordings(source if broken.inventory else ACME)
    # A fault of detection changes inventories: the author would have written them with the fault.
    only = [] if fault in WHOLE else [broken.check]
    results = run_checks("acme", directory, only=only, seconds=broken.seconds, timeout=broken.timeout)
    failures = {result.check: result.message for result in results if result.state is State.FAILED}
    assert list(failures) == [broken.check], failures
    messages = " ".join(result.message for result in results if result.state is State.FAILED)
    assert broken.message in messages
    assert "Traceback" not in messages


def test_every_check_has_a_plugin_that_breaks_it():
    assert {broken.check for broken in BROKEN.values()} == {check.id for check in CHECKS} - NOT_BY_A_PLUGIN - OF_SEVERAL


def test_the_well_behaved_plugin_passes_every_check(install, recordings):
    install("acme", ACME).with_suffix(".presence.json").write_text(PRESENCE)
    results = run_checks("acme", recordings(ACME))
    assert [result for result in results if result.state is State.FAILED] == []
    assert ends(results, State.SKIPPED) == {*NOT_BY_A_PLUGIN, "C30"}


def test_a_plugin_that_undoes_what_it_does_passes(install, recordings):
    lines = [
        "for device in devices:",
        "    ctx.write(f'/sys/class/acme/{device.index}/cap', '250' if given else '400')",
        "    if ctx.run(['acme-smi', '--daemon', 'start' if given else 'stop']).returncode: raise OSError('no')",
    ]
    source = ACME
    for old, new in handing_over(*lines):
        source = source.replace(old, new, 1)
    install("acme", source)
    results = run_checks("acme", recordings(source), only=["C13", "C22", "C25", "C30"])
    assert [result for result in results if result.state is State.FAILED] == []


def test_a_plugin_without_optional_hooks_passes(install, recordings):
    for hook in ("visible", "validate", "stats", "products"):
        assert f"@hookimpl\ndef anyaccel_{hook}(" in ACME
    source = ACME
    for hook in ("visible", "validate", "stats", "products"):
        source = source.replace(f"@hookimpl\ndef anyaccel_{hook}(", f"def unused_{hook}(")
    install("acme", source)
    results = run_checks("acme", recordings(source))
    assert [result for result in results if result.state is State.FAILED] == []
    assert {"C19", "C20", "C21", "C26", "C28"} <= ends(results, State.SKIPPED)


def test_two_vendors_that_set_one_variable_differently(install, recordings):
    rival = ACME.replace('vendor="acme"', 'vendor="zeta"').replace("acme-{", "zeta-{").replace("Acme-", "Zeta-")
    rival = rival.replace("Acme One", "Zeta One").replace("Acme Whole", "Zeta Whole").replace('"A1"', '"Z1"')
    install("acme", ACME)
    install("zeta", rival)
    results = run_checks("acme", recordings(ACME))
    failures = {result.check: result.message for result in results if result.state is State.FAILED}
    assert list(failures) == ["C24"]
    assert "acme and zeta set the variable ACME_VISIBLE differently" in failures["C24"]


def test_a_vendor_that_says_that_it_has_no_mask_passes_with_a_word(install, recordings):
    edits = {
        'env_vars=("ACME_VISIBLE", "ACME_ORDER")': "env_vars=(), maskable=False",
        'EnvEdits(set={"ACME_VISIBLE": ",".join(names)}, unset=frozenset({"ACME_ORDER"}))': "EnvEdits()",
        '    mask = environ.get("ACME_VISIBLE")\n': "    mask = None\n",
    }
    source = ACME
    for old, new in edits.items():
        assert old in source
        source = source.replace(old, new)
    install("acme", source)
    results = run_checks("acme", recordings(ACME), only=["C16", "C17", "C18", "C19", "C20"])
    assert {result.state for result in results if result.check != "C17"} <= {State.OK, State.SKIPPED}
    ended = {(result.state, result.message) for result in results if result.check == "C17"}
    said = "PluginInfo.maskable is False: its devices are open to all workers, and launches say so"
    assert ended == {(State.SKIPPED, said)}


def test_a_variable_that_is_borrowed_is_no_conflict(install, recordings):
    rival = ACME.replace('vendor="acme"', 'vendor="zeta", borrowed=("ACME_VISIBLE",)').replace("acme-{", "zeta-{")
    rival = rival.replace("Acme-", "Zeta-").replace("Acme One", "Zeta One").replace("Acme Whole", "Zeta Whole")
    rival = rival.replace("/dev/acme{", "/dev/zeta{")
    install("acme", ACME)
    install("zeta", rival.replace('"A1"', '"Z1"'))
    (result,) = {(result.check, result.state) for result in run_checks("acme", recordings(ACME), only=["C24"])}
    assert result == ("C24", State.OK)


def test_a_name_that_another_plugin_claims_as_well(install, recordings):
    rival = ACME.replace('vendor="acme"', 'vendor="zeta"').replace("ACME_VISIBLE", "ZETA_VISIBLE")
    install("acme", ACME)
    install("zeta", rival)
    (result,) = [each for each in run_checks("acme", recordings(ACME), only=["C24"]) if each.check == "C24"]
    assert result.state is State.FAILED
    assert "must be no tag and no product, since it is a product of zeta; choose another name" in result.message


def test_a_device_that_another_plugin_lists_as_well(install, recordings):
    rival = ACME.replace('vendor="acme"', 'vendor="zeta"').replace("ACME_VISIBLE", "ZETA_VISIBLE")
    rival = rival.replace("Acme-", "Zeta-").replace("Acme One", "Zeta One").replace("Acme Whole", "Zeta Whole")
    install("acme", ACME)
    install("zeta", rival.replace('"A1"', '"Z1"'))
    (result,) = [each for each in run_checks("acme", recordings(ACME), only=["C24"]) if each.check == "C24"]
    assert result.state is State.FAILED
    assert "would be given to no request: the plug-ins acme and zeta both list " in result.message


def test_what_is_not_installed(monkeypatch):
    monkeypatch.setenv("ANYACCEL_PLUGINS", "none")
    first, *rest = run_checks("acme")
    assert (first.check, first.state) == ("C01", State.FAILED)
    assert "no plug-in for 'acme' is installed" in first.message
    assert {result.state for result in rest} == {State.SKIPPED}
    assert [first.check, *(result.check for result in rest)] == [check.id for check in CHECKS]


def test_only_the_checks_that_are_asked_for(install, recordings):
    install("acme", ACME)
    results = run_checks("acme", recordings(ACME), only=["C06", "C17"])
    assert {result.check for result in results} == {"C06", "C17"}
    assert {result.machine for result in results} == {"", "driver-only", "pair", "quad", "products"}


def test_a_plugin_may_read_its_own_data_at_any_time(install, recordings, tmp_path):
    (tmp_path / "site" / "quark").mkdir()
    reads = 'open(__file__.replace("__init__.py", "data.txt")).read()'
    source = ACME.replace("    names = [", f"    {reads}\n    names = [", 1)
    assert source != ACME
    (tmp_path / "site" / "quark" / "__init__.py").write_text(source)
    (tmp_path / "site" / "quark" / "data.txt").write_text("")
    install("acme", "", entry="quark")
    (result,) = {(result.check, result.state) for result in run_checks("acme", recordings(ACME), only=["C22"])}
    assert result == ("C22", State.OK)
