"""Files that are replaced as a whole."""

import os

import pytest
from anyaccel.linux import write_whole


def test_of_two_writers_at_once_neither_spoils_the_others_file(tmp_path, monkeypatch):
    """The second writer comes when the first one has written its content, and not yet given it the name."""
    path, replace, seen = tmp_path / "record", os.replace, []

    def replace_late(source, target):
        monkeypatch.setattr(os, "replace", replace)
        write_whole(str(path), "second")
        seen.append(path.read_text())
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_late)
    write_whole(str(path), "first")
    assert (seen, path.read_text(), os.listdir(tmp_path)) == (["second"], "first", ["record"])


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "record"
    write_whole(str(path), "old", 0o600)
    with pytest.raises(UnicodeEncodeError):
        write_whole(str(path), "\udcff")
    assert (path.read_text(), os.listdir(tmp_path), path.stat().st_mode & 0o777) == ("old", ["record"], 0o600)


def test_an_interrupt_right_after_the_opening_leaves_no_file(tmp_path, monkeypatch):
    opening = os.open

    def interrupted(*arguments, **options):
        os.close(opening(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(str(tmp_path / "settings"), "new")
    assert os.listdir(tmp_path) == []
