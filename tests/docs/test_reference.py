"""The reference knows everything that is there: commands, errors, hooks, variables, reasons and keys of JSON."""

import importlib.util
import inspect
import json
import re
import tomllib
from pathlib import Path

import anyaccel as anyaccel_library
import jsonschema
import pytest
from anyaccel import hookspecs, plugin
from anyaccel.configuration import MACHINE_FILE
from anyaccel.extras import COMMANDS
from anyaccel.ledger import setup
from anyaccel.ledger.directory import MACHINE_WIDE, PRIVATE
from anyaccel.ledger.journal import MACHINE_DIRECTORY
from anyaccel.ledger.machine_policy import KEPT
from anyaccel.model.verdict import ReasonCode
from anyaccel.plugin import ProbeContext
from anyaccel.settings import SETTINGS
from anyaccel.vendors.process import known
from anyaccel.vendors.tasks import REQUIRED
from anyaccel_export.targets import TARGETS

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
SOURCES = [path for folder in ("core", "extras/*") for path in sorted(ROOT.glob(f"{folder}/src/**/*.py"))]
PLUGINS = sorted(ROOT.glob("plugins/*/src/**/*.py"))
HOOKS = [name for name in vars(hookspecs) if name.startswith("anyaccel_")]


def page(name):
    return (REFERENCE / name).read_text(encoding="utf-8")


def test_what_is_written_by_the_script_is_what_it_writes():
    path = ROOT / "scripts" / "write_reference.py"
    spec = importlib.util.spec_from_file_location("write_reference", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    stale = [str(path) for path, text in script.pages().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run: python scripts/write_reference.py"


def test_help_of_what_authors_import_names_all_of_it_and_every_hook():
    text = inspect.getdoc(plugin)
    missing = [name for name in [*plugin.__all__, *HOOKS] if not re.search(rf"\b{name}\b", text)]
    assert missing == []
    assert all(text.index(name) < text.index("These five are required") for name in REQUIRED)


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_described_with_its_arguments(name):
    arguments = ", ".join(inspect.signature(getattr(hookspecs, name)).parameters)
    need = "required" if name in REQUIRED else "optional"
    assert f"| `{name}({arguments})` | {need} |" in page("hooks.md")
    assert f"\n## `{name}({arguments}) -> " in page("hooks.md")


@pytest.mark.parametrize("name", TARGETS)
def test_every_export_target_has_its_row(name):
    rows = [line.split("|")[1] for line in page("exports.md").splitlines() if line.startswith("| `")]
    assert any(f"`{name}`" in row for row in rows)


def test_every_question_to_the_machine_is_described():
    names = [name for name in dir(ProbeContext) if not name.startswith("_")]
    assert [name for name in names if not re.search(rf"`{name}[(`]", page("hooks.md"))] == []


def test_every_variable_of_ours_is_described():
    sources = [path.read_text(encoding="utf-8") for path in SOURCES + PLUGINS]
    used = {name for text in sources for name in re.findall(r"\b(?:ANYACCEL|XDG)_[A-Z][A-Z_]*[A-Z]\b", text)}
    described = set(re.findall(r"^\| `((?:ANYACCEL|XDG)_[A-Z_]+)` \|", page("environment.md"), re.MULTILINE))
    assert used == described


def test_each_distribution_names_its_commands():
    text = (ROOT / "docs" / "explanation" / "distributions.md").read_text(encoding="utf-8")
    rows = {name: row for row, name in re.findall(r"^(\| `anyaccel-(\w+)` .*)$", text, re.MULTILINE)}
    missing = [each for each, extra in COMMANDS.items() if not re.search(rf"`(anyaccel )?{each}\b", rows[extra])]
    assert missing == []


def test_the_readme_of_a_plugin_names_each_of_its_variables():
    found, _ = known()
    assert found
    missing = []
    for info in (each.info for each in found if (ROOT / "plugins" / each.info.vendor).is_dir()):
        text = (ROOT / "plugins" / info.vendor / "README.md").read_text(encoding="utf-8")
        missing += [f"{info.vendor}: {name}" for name in info.env_vars if not re.search(rf"`{name}[`=]", text)]
    assert missing == []


def test_every_metric_is_described(anyaccel):
    printed = anyaccel(
        "metrics", "--machine", str(ROOT / "plugins" / "nvidia" / "recordings" / "h100-1gpu-real")
    ).stdout
    names = re.findall(r"^# TYPE (\w+) ", printed, re.MULTILINE)
    text = (ROOT / "docs" / "how-to" / "report.md").read_text(encoding="utf-8")
    assert names
    assert [name for name in names if not re.search(rf"`{name}(_total|_info)?`", text)] == []


def test_every_file_is_described():
    paths = {MACHINE_FILE, setup.TMPFILES, MACHINE_WIDE, f"{PRIVATE}/anyaccel-UID", MACHINE_DIRECTORY, KEPT}
    described = set(re.findall(r"`((?:/|~/)[^`]+)`", page("environment.md").partition("\n## Files\n")[2]))
    assert paths - described == set()


def test_every_extra_is_described():
    extras = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    vendors = {path.name for path in (ROOT / "plugins").iterdir()}
    text = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8").partition("\n## Extras\n")[2]
    assert [name for name in extras if name not in vendors and f"`{name}`" not in text] == []


def test_every_setting_is_described():
    pages = "".join(
        (ROOT / "docs" / "how-to" / f"{name}.md").read_text(encoding="utf-8") for name in ("configure", "policy")
    )
    names = {key.rpartition(".")[2] for key in SETTINGS}
    assert [name for name in sorted(names) if not re.search(rf"`{name}\b|^{name} = ", pages, re.MULTILINE)] == []


def test_every_code_of_an_error_is_described():
    codes = {
        code for path in SOURCES for code in re.findall(r"^    code = \"([a-z-]+)\"$", path.read_text(), re.MULTILINE)
    }
    text = page("errors.md")
    assert len(codes) > 20
    assert [code for code in sorted(codes) if f"`{code}`" not in text] == []


def test_every_reason_is_described():
    described = re.findall(r"^\| `([a-z-]+)` \| \w", page("errors.md"), re.MULTILINE)
    assert sorted(described) == sorted(code.value for code in ReasonCode)


def keys(value):
    """Every key of a document that is ours: not those below ``attributes``, ``links``, ``set`` and ``variables``."""
    if isinstance(value, list):
        return {key for item in value for key in keys(item)}
    if not isinstance(value, dict):
        return set()
    ours = {key: item for key, item in value.items() if key not in {"attributes", "links", "set", "variables"}}
    return set(value) | {key for item in ours.values() for key in keys(item)}


def test_every_schema_is_described():
    sources = [path.read_text(encoding="utf-8") for path in SOURCES]
    printed = {name for text in sources for name in re.findall(r"print_json\(\s*\"(\w+/\d+)\"", text)}
    described = re.findall(r"^## anyaccel\.(\S+)$", page("json.md"), re.MULTILINE)
    assert sorted(described) == sorted(printed)


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--declare", "GPU=1"),
        ("status", "--machine", str(ROOT / "plugins" / "nvidia" / "recordings" / "h100-8gpu-one-lost")),
        ("why", "GPU:2", "--declare", "GPU=1"),
        ("select", "GPU:0.5", "--declare", "GPU=1"),
        ("env", "GPU:0.5", "--declare", "GPU=1"),
        ("plugins",),
        ("doctor",),
        ("check", "gaudi", "--recordings", str(ROOT / "plugins" / "gaudi" / "recordings" / "driver-without-device")),
        ("export", "ray", "--machine", "sim:H100:1"),
        ("kubernetes", "status", "--machine", "sim:H100:1"),
        ("record", "DIRECTORY"),
        ("queue",),
        ("jobs",),
        ("cancel", "--all"),
        ("run", "GPU:1", "--declare", "GPU=1", "--detach", "--", "true"),
        ("sweep", "GPU:1", "--declare", "GPU=1", "--", "false"),
        ("ray", "start", "--dry-run", "--declare", "GPU=1"),
    ],
    ids=" ".join,
)
def test_every_key_is_described_under_its_schema(arguments, tmp_path, monkeypatch, anyaccel):
    monkeypatch.chdir(tmp_path)
    document = json.loads(anyaccel("--json", *arguments).stdout)
    _, _, section = page("json.md").partition(f"\n## {document['schema']}\n")
    section = section.partition("\n## ")[0]
    assert section, document["schema"]
    assert {key for key in keys(document) - {"schema", "time"} if f"`{key}`" not in section} == set()
    name = document["schema"].removeprefix("anyaccel.").partition("/")[0]
    if name in COMMAND_SCHEMA["$defs"]:
        validate(document, name)


def close(schema):
    """Return the schema without room for other keys; the published one leaves a later version room for more."""
    if isinstance(schema, list):
        return [close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: close(item) for key, item in schema.items()}
    return {"additionalProperties": False, **closed} if "properties" in closed else closed


COMMAND_SCHEMA = close(json.loads((ROOT / "docs" / "reference" / "commands.schema.json").read_text(encoding="utf-8")))


def validate(document, name):
    schema = {"$ref": f"#/$defs/{name}", "$defs": COMMAND_SCHEMA["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(document)


def test_documents_about_a_held_device_have_their_published_schema(tmp_path, monkeypatch, anyaccel):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:H100:1")
    held = json.loads(anyaccel("--json", "hold", "GPU:0.5", "--note", "schema").stdout)
    validate(held, "hold")
    try:
        for name, *arguments in (["status"], ["why", "GPU:1"], ["queue"], ["doctor"]):
            document = json.loads(anyaccel("--json", name, *arguments).stdout)
            validate(document, name)
            assert name != "status" or document["devices"][0]["holders"][0]["note"] == "schema"
    finally:
        validate(json.loads(anyaccel("--json", "release", held["lease"]).stdout), "release")


def test_documents_about_a_lease_on_behalf_have_their_published_schema(tmp_path, monkeypatch, anyaccel):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:H100:1")
    monkeypatch.setenv("ANYACCEL_STATE_DIR", str(tmp_path / "state"))
    lease = anyaccel_library.acquire_on_behalf("GPU:1", "kubernetes/claim/u-1", seconds=600, note="pod default/train")
    try:
        for name, *arguments in (["status"], ["why", "GPU:1"], ["queue"], ["doctor"]):
            validate(json.loads(anyaccel("--json", name, *arguments).stdout), name)
        document = json.loads(anyaccel("--json", "kubernetes", "status").stdout)
        validate(document, "kubernetes")
        validate(json.loads(anyaccel("--json", "kubernetes", "classes").stdout), "kubernetes_classes")
        (pod,) = document["pods"]
        assert (pod["pod"], pod["lease"]) == ("pod default/train", lease.id)
    finally:
        lease.release()


def test_errors_have_their_published_schema(anyaccel):
    validate(json.loads(anyaccel("--json", "why", "GPX").stdout), "error")
    refused = json.loads(anyaccel("--json", "run", "GPU:2", "--declare", "GPU=1", "--", "true").stdout)
    validate(refused, "error")
    assert refused["error"]["nearest"] == "GPU:1"
