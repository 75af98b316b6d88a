"""Words that no sentence needs: a sentence names its subject, such as a request, a caller, a user or a process."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A sentence goes on in the next line, behind what marks a comment, a quotation or a cell.
BANNED = re.compile(
    r"(?<![a-z])(?:nobody|somebody|anybody|whoever|(?:those|one)(?:[ _]|\n[ #*>|]*)who)(?![a-z])", re.IGNORECASE
)
THE_USER = re.compile(r"[\"']nobody[\"']")
"""The account of that name, as a text of its own."""
SUFFIXES = {
    ".py",
    ".pyi",
    ".md",
    ".toml",
    ".ini",
    ".yml",
    ".yaml",
    ".sh",
    ".txt",
    ".in",
    ".conf",
    ".1",
    ".svg",
    ".ipynb",
}


def files() -> list[Path]:
    """Return the files of the project that people write, this one left out."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"git does not list the files of the project: {listed.stderr.strip()}")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.suffix in SUFFIXES and path.name != Path(__file__).name and path.is_file()]


def test_a_sentence_names_its_subject():
    found = []
    for path in files():
        text = THE_USER.sub("", path.read_text(encoding="utf-8"))
        found += [
            f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}"
            for match in BANNED.finditer(text)
        ]
    assert found == [], "say: a request that, a user who, another process"


@pytest.mark.parametrize("words", ["nobody", "Whoever", "those who", "test_one_who_waits", "NOBODY", "somebody's"])
def test_the_pattern_finds_the_words(words):
    assert BANNED.search(words)


@pytest.mark.parametrize("words", ["no user", "antibody", "those whose", "someone whole", "one whole device"])
def test_the_pattern_leaves_other_words(words):
    assert not BANNED.search(words)
