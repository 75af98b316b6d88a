"""Sweeps on a Ray cluster: each command on devices of its own, its output and its end brought back."""

import pytest
from ray_nodes import needs_ray

pytestmark = [needs_ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(300)]


def test_commands_run_on_the_nodes_and_what_they_print_comes_back(acme, ray_nodes, anyaccel, tmp_path):
    done = anyaccel(
        "sweep", "A1:1", "--engine", "ray", "--address", ray_nodes.address, "--retries", "1", "--each", "n=0..2",
        "--", "sh", "-c", 'echo "{n} $ACME_VISIBLE"; exit {n}', cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, "1 of 3 done, 2 failed" in done.stderr) == (1, True), done.stderr
    logs = [(tmp_path / "anyaccel-sweep" / f"{number}.log").read_text().split() for number in (1, 2, 3)]
    assert [words[0::2] for words in logs] == [["0"], ["1", "1"], ["2", "2"]]
    assert all(len(words) == (2 if words[0] == "0" else 4) for words in logs)
    rows = [line.split("\t") for line in (tmp_path / "anyaccel-sweep" / "jobs.tsv").read_text().splitlines()[1:]]
    assert sorted((row[0], row[6]) for row in rows) == [("1", "0"), ("2", "1"), ("3", "2")]
