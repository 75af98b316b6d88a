"""What must hold for the core's source as a whole: no vendor in it, rooms that look one way only."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("source")  # in one process, which parses each module once
ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "core" / "src" / "anyaccel"
MODULES = sorted(SOURCE.rglob("*.py"))

VENDOR_WORDS = re.compile(
    r"""(?ix)
    (?<![a-z]) (?:
        nvidia | nvml | nvlink | cuda | geforce
        | amd(?!64) | rocm | rocr | hip | hsa | radeon | instinct
        | intel | xpu | oneapi | level.?zero | sycl
        | habana | hpu | gaudi | hls | synapseai
        | aws | amazon | neuron | trainium | inferentia
        | google | gke | libtpu | jax
        | huawei | ascend | davinci | cann
        | cambricon | mlu | enflame | gcu | kunlunxin | qualcomm | qaic
        | metax | maca | mxsml | iluvatar | corex | hygon | hyhal | hydcu | hycu | moore.?threads | musa | mtgpu
        | furiosa | rngd | warboy | rebellions | rbln | tenstorrent | ttnpu | mobilint | mblt | qbruntime
    ) (?![a-z])
    | [a-z]+-(?:smi|ls)\b | \b(?-i:[A-Z]+_VISIBLE_[A-Z]+)
    | 0x(?:10de|1002|8086|1da3|1d0f|1ae0|19e5|9999|1e3e|1d94|1ed5|1ed2|1eff|1e52|209f)
    """
)

ROOMS = {
    "_version": "",
    "_faces": "",
    "_interrupts": "",
    "_typing": "",
    "linux": "",
    "errors": "",
    "extras": "errors",
    "text": "",
    "durations": "errors",
    "model": "errors",
    "shell": "model errors",
    "settings": "model errors",
    "configuration": "settings model errors",
    "policy": "model errors configuration",
    "backfill": "model policy",
    "forkserver": "linux",
    "probe": "model errors linux",
    "hookspecs": "model probe",
    "plugin": "model errors hookspecs probe",
    "kit": "hookspecs plugin",
    "ledger": "model errors settings configuration policy backfill linux",
    "vendors": "model errors hookspecs probe plugin forkserver linux",
    "inventory": "model errors durations extras configuration probe vendors ledger linux",
    "accelerators": "model errors probe vendors inventory",
    "scheduler": "model errors durations extras inventory policy backfill",
    "launcher": "model errors durations configuration policy probe vendors inventory scheduler ledger linux",
    "pool": "model errors durations extras policy forkserver probe vendors inventory scheduler ledger launcher linux",
}
"""What each room may import, for types too, besides itself, ``text`` and what begins with ``_``; the rest, all."""
FOR_TYPES = {"errors": "model"}
"""Errors carry values of the model, which type checkers alone import."""
LAST_ROOMS = ("cli", "__init__", "__main__")


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(("anyaccel", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, wherever in the file."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "anyaccel" and name != "anyaccel")


def test_no_vendor_is_named_in_the_core():
    found = [
        f"{name_of(path)}:{number}: {match[0]!r}"
        for path in MODULES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in VENDOR_WORDS.finditer(line)
    ]
    assert found == []


def test_the_pattern_knows_a_vendor_when_it_sees_one():
    for word in ("CUDA_VISIBLE_DEVICES", "an AMD card", "npu-smi", "0x10de", "ROCR_VISIBLE_DEVICES", "HIP", "AWS"):
        assert VENDOR_WORDS.search(word), word
    for word in ("amd64", "intelligible", "ship", "GPU:2", "TPU:4", "H100|A100", "scanned", "lawsuit"):
        assert not VENDOR_WORDS.search(word), word


def test_commands_print_through_one_module():
    """There nothing gets through that is not plain text. The version is ours, and must not wait for imports."""
    ours = r'os\.write\(sys\.stdout\.fileno\(\), f"anyaccel {__version__}|file\.write\(|os\.write\(report'
    found = [
        (name_of(path), each)
        for path in MODULES
        if room_of(path) == "cli" and path.name != "output.py"
        for each in re.findall(r"(?<![\w.])print\(|sys\.std(?:out|err)\.|\.write\(", re.sub(ours, "", path.read_text()))
    ]
    assert found == []


def test_rooms_import_only_what_stands_before_them():
    found = set()
    for path in MODULES:
        room = room_of(path)
        if room not in LAST_ROOMS:
            assert room in ROOMS, f"give the new room {room!r} its place in ROOMS"
            allowed = {
                room,
                "_version",
                "_faces",
                "_interrupts",
                "_typing",
                "text",
                *ROOMS[room].split(),
                *FOR_TYPES.get(room, "").split(),
            }
            seen = {name.split(".")[1] for name in imports(path)}
            found |= {(name_of(path), each) for each in seen - allowed}
    assert found == set()


def test_the_room_of_the_kernel_imports_nothing_of_ours():
    of_linux = [path for path in MODULES if room_of(path) == "linux"]
    assert {name.split(".")[1] for path in of_linux for name in imports(path)} == {"linux", "_faces"}


@pytest.mark.parametrize("duty", ["register_at_fork", r"\bprctl\(", r"/children\b", "pidfd_send_signal"])
def test_the_kernel_is_asked_in_its_room_alone(duty):
    of_extras = (path for source in EXTRAS.values() for path in source.rglob("*.py"))
    users = {path for path in (*MODULES, *of_extras) if re.search(duty, path.read_text())}
    assert users == {path for path in users if path.is_relative_to(SOURCE / "linux")} != set()


def test_rooms_stand_in_an_order():
    seen = ["_version", "_faces", "_typing", "text"]
    for room, imported in ROOMS.items():
        assert set(imported.split()) <= set(seen), room
        seen.append(room)


def test_the_documentation_draws_the_rooms_of_the_tree():
    page = (SOURCE.parents[2] / "docs" / "explanation" / "architecture.md").read_text()
    drawn = re.findall(r"^\| `(\w+)` \|", page.partition("| package |")[2].partition("\n\n")[0], re.MULTILINE)
    assert drawn == [room for room in (*ROOMS, *LAST_ROOMS) if not room.startswith("_")]
    assert {room_of(path) for path in MODULES} == {*ROOMS, *LAST_ROOMS}


def imported_at_once(path: Path) -> Iterator[str]:
    """Modules of ours that a module imports outside of its functions, for types too."""
    nodes: list[ast.AST] = [parsed(path)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                yield str(node.module)


def test_no_modules_import_each_other():
    """Not for types either. The imports of a package by its own modules do not count: those come with the name."""
    known = {module_of(path): path for path in MODULES} | OF_EXTRAS
    left = {
        name: {
            other
            for other in imported_at_once(path)
            if other in known and other != name and not name.startswith(f"{other}.")
        }
        for name, path in known.items()
    }
    assert in_circles(left) == [], "these import each other"


def in_circles(left: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, given what each imports."""
    while free := [
        name
        for name, others in left.items()
        if not others & left.keys() or not any(name in others for others in left.values())
    ]:
        for name in free:
            del left[name]
    return sorted(left)


def test_modules_of_the_launcher_import_each_other_in_no_function_either():
    known = {module_of(path): path for path in MODULES if room_of(path) == "launcher"}
    left = {}
    for name, path in known.items():
        seen = {each for imported in imports(path) for each in (imported, imported.rpartition(".")[0])}
        left[name] = seen & known.keys() - {name, "anyaccel.launcher"}
    assert in_circles(left) == []


def test_values_are_made_in_one_way():
    """Dataclasses take 8 ms to import and one more for each class: see docs/decisions/start-up-time.md."""
    users = [
        name_of(path) for path in MODULES if re.search(r"^(from|import) dataclasses", path.read_text(), re.MULTILINE)
    ]
    assert users == []


EXTRAS = {path.parent.name: path.parent / "src" for path in sorted(ROOT.glob("extras/*/pyproject.toml"))}
INSTALLED = [extra for extra in EXTRAS if find_spec(f"anyaccel_{extra}")]
OF_EXTRAS = {
    ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
    for source in EXTRAS.values()
    for path in sorted(source.rglob("*.py"))
}


def test_the_core_imports_no_extra():
    users = {
        name_of(path)
        for path in MODULES
        for node in ast.walk(parsed(path))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
        + ([str(node.module)] if isinstance(node, ast.ImportFrom) else [])
        if name.partition(".")[0].startswith("anyaccel_")
    }
    assert users == set()


def is_public(name: str) -> bool:
    """Whether a dotted name is one that a room of the core offers: a name of its face, or one of a room of one module.

    A room is a package right below ``anyaccel``, or one that stands in a package whose own face is empty.
    """
    module, _, attribute = name.rpartition(".")
    if (SOURCE / Path(*module.split(".")[1:]) / "__init__.py").exists():
        return attribute in getattr(import_module(module), "__all__", ())
    return module.count(".") == 1 and not attribute.startswith("_")


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_imports_what_the_faces_of_rooms_name(extra):
    used = {name for path in EXTRAS[extra].rglob("*.py") for name in imports(path)}
    assert used, "it is made of the core"
    whole = {f"anyaccel.{room_of(path)}" for path in MODULES if path.parent == SOURCE} - {"anyaccel.__init__"}
    assert [name for name in sorted(used) if name not in whole and not is_public(name)] == []


FROM_MODULES = {
    # Called like their module: a face with such a name would hide the module.
    "inventory.current": {"current"},
    "inventory.detect": {"detect"},
    "inventory.diagnose": {"diagnose", "ORDER"},
    "inventory.record": {"record"},
    "probe.sanitize": {"sanitize"},
    "vendors.entry_points": {"entry_points"},
    # Without the name of their module they do not say what they are.
    "linux.process": {"state", "threads"},
    "probe.recording": {"merge"},
    # A room without a face: of its modules, others use this one.
    "forkserver.client": {"ForkServer", "Gone"},
}
"""What a room imports from a module of another one, and not from its face."""


def test_rooms_import_each_other_through_their_faces():
    """At the top of a module; a late import names the module, since it says what it waits for."""
    found: dict[str, set[str]] = {}
    for path, node in ((each, node) for each in MODULES for node in parsed(each).body):
        if isinstance(node, ast.ImportFrom):
            of = re.fullmatch(r"anyaccel\.((\w+)\.\w+)", str(node.module))
            if of and of[2] != room_of(path):
                found.setdefault(of[1], set()).update(alias.name for alias in node.names)
    assert found == FROM_MODULES


FACES = [path.parent for path in MODULES if path.name == "__init__.py" and "face(" in path.read_text()]


@pytest.mark.parametrize("room", FACES, ids=name_of)
def test_type_checkers_see_the_names_of_a_face(room):
    stub = room / "__init__.pyi"
    source = stub if stub.exists() else room / "__init__.py"
    nodes = list(ast.walk(ast.parse(source.read_text())))
    seen = {
        alias.asname: node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    own = {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)} if stub.exists() else set()
    face = import_module(module_of(room / "__init__.py"))
    assert sorted({*seen, *own}) == sorted(name for name in face.__all__ if name in seen or stub.exists())
    for name in face.__all__:
        found = getattr(face, name, None) or import_module(f"{face.__name__}.{name}")
        assert name not in seen or found is getattr(sys.modules[seen[name]], name)
    with pytest.raises(AttributeError, match=f"module '{face.__name__}' has no attribute 'nonsense'"):
        face.nonsense  # noqa: B018
    assert {name for name in face.__all__ if name in seen} <= set(dir(face))


IMPORT_EACH = """
import importlib, importlib.util, os, sys
def alone(name, then=lambda: None):
    pid = os.fork()  # a child has imported as little of ours as an interpreter that has just started
    if pid == 0:
        if name.endswith("__main__"):
            assert importlib.util.find_spec(name)  # to import it is to run it
        else:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name != "distributed":  # what an extra is for is not everywhere; 'tox -e dask' has it
                    raise
        then()
        sys.exit()
    if os.waitpid(pid, 0)[1]:
        print(name, "cannot be imported first", file=sys.stderr)
reader, writer = os.pipe()
alone(sys.argv[1], lambda: os.write(writer, " ".join(sys.modules).encode()))  # what it needs of others is imported once
for name in os.read(reader, 1 << 16).decode().split():
    if not name.startswith(("anyaccel", "__")):
        importlib.import_module(name)
assert not [name for name in sys.modules if name.startswith("anyaccel")]
for name in sys.argv[1:]:
    alone(name)
"""


@pytest.mark.timeout(400)
def test_a_module_can_be_imported_first():
    """Some of them: where no modules import each other, what one needs is imported whole before it goes on."""
    of_extras = [name for name in OF_EXTRAS if name.split(".")[0].removeprefix("anyaccel_") in INSTALLED]
    some = [*map(module_of, MODULES), *of_extras][::9]
    command = [sys.executable, "-W", "error", "-c", IMPORT_EACH, "anyaccel.pool.pool", *some]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_anyaccel_loads_nothing_else_of_ours():
    code = (
        "import sys, anyaccel; print(*sorted(name for name in sys.modules if name.startswith(('anyaccel', 'pluggy'))))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["anyaccel", "anyaccel._faces", "anyaccel._version"]
