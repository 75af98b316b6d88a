"""Mistakes in the project that ``anyaccel new`` writes: data beside the code, foreign functions, foreign names."""

from __future__ import annotations

import json
import os

import pytest
from anyaccel_testing import State, run_checks
from anyaccel_testing.new_command import main as new

PLUGIN, PRESENCE, CATALOG = "__init__.py", "presence.json", "products.toml"
READ = "    def read_card"
ELSEWHERE = """    def detect(self, ctx):
        from anyaccel.plugin import replace
        found = super().detect(ctx)
        if found is None or len(found.devices) != 2:
            return found
        return replace(found, devices=(found.devices[0], replace(found.devices[1], pci_bus_id="0000:00:02.0")))

"""
HANGS = """    def fractional(self, device):
        import time
        time.sleep(3600)

"""
ONE, TWO = "pci = [0x0001] # PCI device ids\n", "pci = [0x0002]\n"

MISTAKES = {
    "another PCI vendor": (PRESENCE, "ace0", "ace1", "C28", "must list the vendor ace0 and the class 1200, of acme"),
    "another module": (PRESENCE, "/sys/module/acme", "/sys/module/akme", "C28", "none of 'paths' of presence.json"),
    "a number for a list": (CATALOG, ONE, "pci = 0x0001\n", "C29", "product 1 (Acme One): 'pci' must be a list"),
    "text for a number": (CATALOG, ONE, 'pci = ["0x0001"]\n', "C29", "product 1 (Acme One): 'pci' must be a list"),
    "an id twice": (CATALOG, TWO, "pci = [0x0001]\n", "C29", "'Acme Two' is never detected: 'Acme One' has"),
    "no expression": (CATALOG, TWO, TWO + 'names = "(("\n', "C29", "product 2 (Acme Two): 'names' must be a"),
    "a negative link": (CATALOG, TWO, TWO + "link = -3\n", "C29", "product 2 (Acme Two): 'link' must be a number"),
    "a key with a slip": (CATALOG, "memory =", "memroy =", "C29", "'memroy' is no key of the kit; did you mean"),
    "no size": (CATALOG, "16GiB", "16 gigs", "C29", "product 1 (Acme One): 'memory' must be bytes, or text such as"),
    "no model": (CATALOG, 'model = "Acme Two"\n', "", "C29", "products.toml: product 2 must have 'model'"),
    "no TOML": (CATALOG, "[defaults]", "[defaults", "C29", "products.toml: "),
    "a foreign function": (PLUGIN, READ, ELSEWHERE + READ, "C09", "0000:00:02.0 of a function of the vendor 1af4"),
    "a foreign tag": (CATALOG, '"Acme-Two", "Acme"', '"Acme-Two", "H100"', "C24", "'H100' must be no tag"),
}  # fmt: skip


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Write a project, and install it by hand."""

    def project(file, old, new_text):
        # The function of the command, not a process: a project is written in a millisecond.
        arguments = {"vendor": "acme", "resource": None, "kind": "npu", "brand": None, "variant": "sysfs", "json": True}
        arguments |= {"driver": None, "pci": "ace0", "mask": None}
        new(type("Arguments", (), {**arguments, "directory": str(tmp_path / "project")}))
        path = tmp_path / "project" / "src" / "anyaccel_acme" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new_text, 1))
        source = str(tmp_path / "project" / "src")
        monkeypatch.syspath_prepend(source)
        monkeypatch.setenv("PYTHONPATH", f"{source}:{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.setenv("ANYACCEL_PLUGINS", "acme=anyaccel_acme:plugin")
        return tmp_path / "project" / "recordings"

    return project


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_beside_the_code_is_named_with_its_place(mistake, project):
    *edit, check, message = MISTAKES[mistake]
    results = run_checks("acme", project(*edit), only=[check])
    messages = " ".join(result.message for result in results if result.state is State.FAILED)
    assert message in messages


def test_the_project_as_it_is_has_none_of_them(project):
    results = run_checks("acme", project(PLUGIN, "Acme", "Acme"), only=["C09", "C24", "C28", "C29"])
    assert {result.state for result in results} == {State.OK}


def test_a_hang_is_told_and_named_before_the_time_is_over(anyaccel, project):
    directory = project(PLUGIN, READ, HANGS + READ)
    # C27 ends the hook after 1 s; the other checks are given up after 2 s instead of 100 s.
    done = anyaccel("check", "acme", "--recordings", str(directory), "--probe-timeout", "1", "--json", timeout=250)
    failed = {
        result["check"]: result["message"]
        for result in json.loads(done.stdout)["results"]
        if result["state"] == "failed"
    }
    assert failed["C27"].startswith("anyaccel_fractional takes longer than its deadline of 1 s (it was at ")
    assert failed.keys() <= {"C27", "C01", "C07"}
    assert "checks still run after 1 s; each may take 100 s" in done.stderr
