"""Notebooks: the magic and the tables, in a real kernel. What needs none is in test_magic.py."""

import getpass
import json
import os
from pathlib import Path

import anyaccel
import pytest

NEEDS = "notebooks need nbclient and ipykernel (try: tox -e notebooks)"
nbclient = pytest.importorskip("nbclient", reason=NEEDS)
nbformat = pytest.importorskip("nbformat", reason=NEEDS)
pytest.importorskip("ipykernel", reason=NEEDS)

pytestmark = pytest.mark.timeout(300)  # a kernel takes its time to start on a busy machine

EXAMPLE = Path(__file__).parents[3] / "examples" / "notebook.ipynb"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run cells in a kernel of their own, as Jupyter does; returns what each printed and showed."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")

    def run(notebook):
        # The messages of a kernel travel over sockets in this directory, of which the path must be short.
        client = nbclient.NotebookClient(notebook, timeout=250, startup_timeout=250, kernel_name="python3")
        client.execute()
        shown = []
        for cell in notebook.cells:
            stream = ""
            for output in cell.get("outputs", ()):
                if stream and output.get("name") == stream:  # a line may come in two messages
                    shown[-1] += output["text"]
                    continue
                stream = output.get("name", "")
                data = output.get("data", {})
                told = "\n".join(output.get("traceback", ()))
                shown.append(output.get("text") or data.get("text/html") or data.get("text/plain") or told)
        return shown

    return run


def cells(*sources):
    """A notebook of these cells; those that begin with an exclamation mark may fail."""
    notebook = nbformat.v4.new_notebook()
    for source in sources:
        cell = nbformat.v4.new_code_cell(source.removeprefix("!"))
        if source.startswith("!"):
            cell.metadata["tags"] = ["raises-exception"]
        notebook.cells.append(cell)
    return notebook


def test_a_kernel_gets_devices_by_a_line(run, acme, monkeypatch):
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    shown = run(
        cells(
            "%load_ext anyaccel",
            "%accel",
            "%accel APU:1 --note 'a first try'",
            "import os; print(os.environ['ACME_VISIBLE'])",
            "!%accel APU:2",
            "!%accel APU:x",
            "%accel",
            "%accel release",
            "print('ACME_VISIBLE' in os.environ)",
            "!%accel APU:9",
            "!%accel APU:1 --wait",
            "!%accel APU:1 --nte x",
            "%accel --help",
            "import anyaccel\ntry:\n    %accel APU:9\nexcept anyaccel.NeverFitsError:\n    print('caught')",
        )
    )
    assert "<caption>2 devices, 2 free on sim:A1:2</caption>" in shown[0]
    assert "<th>USER</th>" not in shown[0]
    assert "<caption>APU:1 held as " in shown[1]
    assert shown[2].strip() in shown[1]
    assert "already" in shown[3]
    assert "%accel release" in shown[3]
    assert "anyaccel: " in shown[4]
    assert "<caption>2 devices, 1 free on sim:A1:2; this kernel holds acme/" in shown[5]
    assert f"<td>{getpass.getuser()}</td>" in shown[5]
    assert "<td>a first try</td>" in shown[5]
    assert "<td>hidden</td>" not in shown[5]
    assert shown[6] == "False\n"
    assert shown[7].splitlines()[0].startswith("anyaccel: APU:9 can never fit")
    assert shown[8:10] == [
        "anyaccel: argument --wait: expected one argument\nanyaccel: see '%accel --help'",
        "anyaccel: unrecognized arguments: --nte x; did you mean --note?\nanyaccel: see '%accel --help'",
    ]
    assert "--note TEXT" in shown[10]
    assert shown[11] == "caught\n"
    assert "Traceback" not in "".join(shown)
    assert "notebook.py" not in "".join(shown)


def test_a_line_that_fails_stops_the_notebook(run, acme, monkeypatch):
    """Else the cells below would run with every device of the machine."""
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    notebook = cells("%load_ext anyaccel", "%accel APU:9", "print('trained')")
    with pytest.raises(nbclient.exceptions.CellExecutionError) as caught:
        run(notebook)
    assert caught.value.ename == "NeverFitsError"
    assert caught.value.evalue.startswith("APU:9 can never fit")
    (output,) = notebook.cells[1].outputs
    assert output.output_type == "error"
    assert [line.startswith("anyaccel: ") for line in output.traceback] == [True] * len(output.traceback)
    assert len(output.traceback) <= 2
    assert notebook.cells[2].execution_count is None
    assert not notebook.cells[2].outputs


def test_a_cell_that_is_run_again_changes_nothing(run, acme, monkeypatch):
    """Also with a runtime loaded meanwhile, which could not be shown other devices."""
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    shown = run(
        cells(
            "%load_ext anyaccel",
            "%accel APU:1",
            "%accel APU:1",
            "%reload_ext anyaccel\nimport gc; gc.collect();",
            "%accel APU:1",
        )
    )
    assert "held as" in shown[0]
    assert shown == [shown[0]] * 3


def test_a_kernel_that_waits_says_for_whom(run, acme, monkeypatch):
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    with anyaccel.acquire("APU:2", note="a training"):
        shown = run(cells("%load_ext anyaccel", "!%accel APU:1 --wait 2s", "!%accel APU:1 --no-wait", "%accel"))
    text = "".join(shown)
    assert "anyaccel: waiting (1st): you have 2" in text
    assert "a training" in text
    assert text.count("does not fit now") == 2
    assert "2 devices, 0 free on sim:A1:2" in shown[-1]
    assert shown[-1].count("<td>a training</td>") == 2


def test_a_cell_that_keeps_nothing_uses_devices_until_the_kernel_ends(run, acme, monkeypatch):
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    shown = run(
        cells(
            "%load_ext anyaccel",
            "import anyaccel, os\nanyaccel.use('APU:1')\nprint(os.environ['ACME_VISIBLE'])",
            "anyaccel.use('APU:1')",
            "anyaccel.use('APU:1');",
            "Out.clear(); _ = __ = ___ = None",
            "print(os.environ['ACME_VISIBLE'])",
            "%accel APU:1",
            "%accel release",
            "print('ACME_VISIBLE' in os.environ)",
        )
    )
    seen, again, later, held, after = shown
    assert seen == later
    assert again == held
    assert seen.strip() in held
    assert after == "False\n"


def test_the_example_notebook_runs(run, acme):
    """It asks for H100; the machine here has another vendor's devices, so the request changes."""
    text = EXAMPLE.read_text().replace("GPU:1", "APU:1").replace("sim:H100:2", "sim:A1:2")
    text = text.replace("CUDA_VISIBLE_DEVICES", "ACME_VISIBLE")
    shown = run(nbformat.reads(text, 4))
    assert any("<table><caption>2 devices, 2 free on " in each for each in shown)
    assert any("held as" in each for each in shown)


def test_the_example_is_stored_without_what_it_printed():
    for cell in json.loads(EXAMPLE.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_hostile_text_in_a_table_is_text(acme, record):
    machine = record({"model": "<script>alert(1)</script>"})
    shown = anyaccel.detect(machine)._repr_html_()
    assert "<script>" not in shown
    assert os.linesep not in repr(anyaccel.detect(machine))


@pytest.mark.parametrize("ours", [True, False])
def test_a_kernel_shows_how_far_calls_are_and_awaits_them(run, acme, monkeypatch, ours):
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    without = "import sys; sys.modules |= dict.fromkeys(('tqdm', 'tqdm.auto'))"
    shown = run(
        cells(
            without if ours else "import sys",
            "import anyaccel\npool = anyaccel.Pool('A1:1')",
            "done = list(pool.map(abs, range(4), progress=True))",
            "print(await pool.submit(abs, -3), [x async for x in pool.map(abs, [-1, -2])])",
            "pool.shutdown()",
        )
    )
    text = "".join(shown)
    assert any(line in text for line in (["4 of 4 done in "] if ours else ["4/4", "100%", "4 of 4"]))
    assert "3 [1, 2]\n" in text
