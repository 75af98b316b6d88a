"""Cost of importing the kit in a vendor's process, which starts for every detection."""

from __future__ import annotations

import json
import subprocess
import sys

LOADED = """
import contextlib, json, sys  # what vendors' processes are forked from has these, too
import anyaccel.plugin
before = set(sys.modules)
import anyaccel.kit
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_nothing_is_loaded_that_the_contract_does_not_load_but_the_kit_itself():
    done = subprocess.run([sys.executable, "-I", "-c", LOADED], capture_output=True, text=True, check=True)

    assert [name for name in json.loads(done.stdout) if not name.startswith("anyaccel.kit")] == []


def test_what_is_public_is_named_and_described():
    from anyaccel import kit

    assert kit.__all__ == sorted(kit.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    constants = {name for name in kit.__all__ if name.isupper()}
    assert [name for name in kit.__all__ if name not in constants and not getattr(kit, name).__doc__] == []
