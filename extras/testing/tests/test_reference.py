"""The page on the suite lists every check with the same title as the suite."""

import json
import re
from pathlib import Path

from anyaccel_testing import CHECKS

ROOT = Path(__file__).parents[3]
KNOWN_NAMES = ROOT / "extras" / "testing" / "src" / "anyaccel_testing" / "known_names.json"
PAGE = ROOT / "docs" / "reference" / "conformance.md"


def test_every_check_is_on_the_page_with_its_title_and_a_reason():
    rows = re.findall(r"^\| (C\d\d) \| (.+?) \| (.+?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [row[:2] for row in rows] == [(check.id, check.title) for check in CHECKS]
    # The page gives a full sentence as the reason of each check.
    assert all(reason.endswith(".") for _, _, reason in rows)


def test_the_names_of_other_vendors_are_those_of_their_plugins():
    """``scripts/write_names.py`` writes both."""
    wanted = {}
    for path in sorted(ROOT.glob("plugins/*/src/*/presence.json")):
        told = json.loads(path.read_text())
        wanted[path.parents[2].name] = {"resource": told["resource"], "names": told["names"]}
    assert json.loads(KNOWN_NAMES.read_text()) == wanted


def test_ids_and_names_are_unique():
    assert len({check.id for check in CHECKS}) == len({check.name for check in CHECKS}) == len(CHECKS)
    assert [check.id for check in CHECKS] == [f"C{number:02}" for number in range(1, len(CHECKS) + 1)]
