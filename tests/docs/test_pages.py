"""Every command and every program on the pages does what the page says.

A page is one session of one shell, in a folder that looks like a checkout. Blocks run in order:

- ``console``: lines with ``$`` are commands (``>`` continues one), what follows is their output; ``...`` is anything.
- ``sh``: commands, one a line, that must succeed.
- ``python``: a program; a ``text`` block right below is its output.

A comment right above a block changes that: ``<!-- file: NAME -->`` makes it a file, ``<!-- not run: REASON -->`` leaves
it out. Commands must succeed; to show one that fails, show its exit status too: ``$ false; echo "exit status $?"``.
``<!-- needs: MODULE -->`` anywhere leaves the page out where the module is not installed.
Pages with ``<!-- user: NAMES -->`` are sessions of several users: see test_lab.py.

The README's first command is left out, wherever it stands: tests/packaging/test_clone.py types it. The environment of
the tests, which has the distributions of this workspace, stands for the one that it makes.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import Step, matches, steps_of
from ray_nodes import MARK, end, short_directory

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "core" / "README.md", *ROOT.glob("docs/**/*.md")], key=str)
READMES = sorted({*ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")} - set(PAGES))
NEEDS = re.compile(r"^<!-- needs: (\w+) -->$", re.MULTILINE)
INSIDE = "RUN_BY_A_PAGE"
LONG = {
    *("accelerators.md", "ci.md", "commands.md", "configure.md", "conformance.md", "dask.md", "enforce.md"),
    *("export.md", "fractions.md", "frameworks.md", "jobs.md", "kubernetes-mixed-node.md", "kubernetes.md"),
    *("maintenance.md", "masks.md", "policy.md", "pool.md", "recordings.md", "report.md", "scheduler.md"),
    *("shared-machine.md", "time-limits.md", "tutorial-plugin.md", "use.md", "warm-models.md"),
}
"""Pages that take half a second of processor time, but for the README and two tutorials. What they show, tests/cli,
examples, engines, integrations, launcher, ledger, pool, the extras and the conformance suite show as well."""
OF_SEVERAL_USERS = {"docs/how-to/lab.md"}
MACHINE_IN_A_FILE = "defaults]\\nmachine = "
"""Written by a page that names its machine in the configuration: the variable would win."""
RUN_PAGES = [
    pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.full] * (page.name in LONG))
    for page in PAGES
    if str(page.relative_to(ROOT)) not in OF_SEVERAL_USERS
]

BUSY = r".* - distributed\.nanny - WARNING - Worker process still alive after .*, killing\n"
"""What Dask says of its own workers where a busy machine takes more than four seconds to end one."""


def run_session(steps: list[Step], where: Path) -> list[tuple[int, str]]:
    """Run the commands in one shell, in a folder with the entries of the checkout; exit status and output of each.

    The machine without accelerators that tests see stands for the reader's host: that it is another one is left out.
    """
    machine = os.environ["ANYACCEL_MACHINE"]
    work, out = where / "anyaccel", where / "out"
    for directory in (work, out, where / "state"):
        directory.mkdir()
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (work / entry.name).symlink_to(entry)
    script = "\n".join(
        f"{{ {step.command}\n}} >{out}/{number} 2>&1 </dev/null; echo $? >{out}/{number}.status"
        for number, step in enumerate(steps)
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ANYACCEL_", "PYTEST_"))}
    environ |= {
        "PATH": f"{Path(sys.executable).parent}:{environ['PATH']}",
        "HOME": str(where),
        "ANYACCEL_MACHINE": machine,
        "ANYACCEL_STATE_DIR": str(where / "state"),  # no other leases
        "XDG_STATE_HOME": str(where / "state"),  # nor jobs
        "PYTHONUNBUFFERED": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "COLUMNS": "100",
        INSIDE: "1",
        MARK: str(where),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if any(MACHINE_IN_A_FILE in step.command for step in steps):
        del environ["ANYACCEL_MACHINE"]
    with short_directory() as files:
        try:
            # 'timeout' ends what is in the foreground; on success it returns what the last 'echo' did.
            command = ["timeout", "--kill-after=5", "330", "bash", "-c", script]
            subprocess.run(command, cwd=work, env=environ | {"RAY_TMPDIR": files}, check=True)
        finally:
            end(str(where))  # what the page has left running
    return [
        (
            int((out / f"{number}.status").read_text()),
            re.sub(
                rf"anyaccel: (simulated|recorded) machine {re.escape(machine)}\n|{BUSY}",
                "",
                (out / str(number)).read_text(),
            ),
        )
        for number in range(len(steps))
    ]


@pytest.mark.skipif(INSIDE in os.environ, reason="a page must not run the pages")
@pytest.mark.timeout(370)
@pytest.mark.parametrize("page", RUN_PAGES)
def test_a_page_does_what_it_says(page, tmp_path):
    for module in NEEDS.findall(page.read_text(encoding="utf-8")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}, which is not installed here (try: pip install {module})")
    steps = steps_of(page)
    faults = []
    for step, (status, printed) in zip(steps, run_session(steps, tmp_path) if steps else [], strict=True):
        if status != 0 or (step.output is not None and not matches(step.output, printed)):
            faults.append(f"{page.name}:{step.line}: $ {step.command}\n{printed}(exit status {status})")
    assert not faults, "\n\n".join(faults)


def test_links_lead_somewhere():
    missing = []
    for page in [*PAGES, *READMES]:
        targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        missing += [f"{page.relative_to(ROOT)}: {each}" for each in targets if not (page.parent / each).exists()]
    assert missing == []


def test_tests_and_recordings_that_a_page_names_are_there():
    sources = [each for pattern in ("tests", "*/*/tests") for each in ROOT.glob(f"{pattern}/**/*.py")]
    there = {name for each in sources for name in re.findall(r"^ *def (test_\w+)", each.read_text(), re.MULTILINE)}
    missing = []
    for page in [*PAGES, *READMES]:
        text = page.read_text(encoding="utf-8")
        recordings = re.findall(r"\brecordings? `([\w.-]+)`", text) if page.parent.parent.name == "plugins" else []
        missing += [f"{page.parent.name}: {name}" for name in re.findall(r"`(test_\w+)`", text) if name not in there]
        missing += [
            f"{page.parent.name}: {name}" for name in recordings if not (page.parent / "recordings" / name).is_dir()
        ]
    assert missing == []


def test_every_page_is_reached_from_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} - {"README.md"}
    assert pages - set(re.findall(r"\]\(([^)#]+)", index)) == set()
