"""PyTorch keeps to a share: capped when a program imports it, with no device touched, whatever its version."""

import json
import subprocess
import sys

import anyaccel as aa
import cloudpickle
import pytest

FAKE = """
import os
__version__ = "{version}"
IMPORTED = dict(os.environ)
class _Backend:
    def __init__(self):
        self.calls, self.fractions, self.initialized = [], {{}}, False
        self._lazy_call = lambda call: call() if self.initialized else self.calls.append(call)
        self.set_per_process_memory_fraction = self._set
    def device_count(self): return 1
    def _set(self, fraction, device):
        assert self.initialized, "a cap that is put on now would initialize the device"
        self.fractions[device] = fraction
    def init(self):
        self.initialized = True
        for call in self.calls: call()
device = _Backend()
class _C:
    @staticmethod
    def _accelerator_setAllocatorSettings(text):
        if {refuses}: raise ValueError("Unrecognized key")
if not {settable}: del _C._accelerator_setAllocatorSettings
"""
SHOW = """
import json, os, sys
import torch
before = torch.device.initialized
torch.device.init()
print(json.dumps({"before": before, "fractions": torch.device.fractions,
    "conf": {name: os.environ[name] for name in os.environ if name.endswith("ALLOC_CONF")}}))
"""


@pytest.fixture(autouse=True)
def functions_travel_by_value(request):
    cloudpickle.register_pickle_by_value(request.module)  # test modules cannot be imported by workers
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def fake(acme, monkeypatch):
    """Put a PyTorch of some version beside the plug-in, on the module path."""

    def fake(version, *, refuses=False, settable=True):
        package = acme.parent / "torch"
        package.mkdir()
        source = FAKE.format(version=version, refuses=refuses, settable=settable)
        (package / "__init__.py").write_text(source)

    return fake


def shown(environ, source=SHOW, *options):
    done = subprocess.run(
        [sys.executable, *options, "-c", source], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def environment(request="A1:0.25", **options):
    return aa.prepare(request, machine="sim:A1:2", cap=True, **options).environment


def test_an_old_version_is_capped_when_it_initializes_its_device(fake):
    fake("2.9.1+x", settable=False)
    seen, said = shown(environment().values)
    assert seen == {"before": False, "fractions": {"0": 0.25}, "conf": {}}
    assert said == ""


def test_a_version_that_knows_the_variable_has_it_for_what_it_starts(fake):
    fake("2.10.0")
    seen, _ = shown(environment().values)
    assert seen["fractions"] == {"0": 0.25}
    assert seen["conf"] == {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.25"}


@pytest.mark.parametrize(
    ("name", "text", "merged", "fraction"),
    [
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64", "max_split_size_mb:64,per_process_memory_fraction:0.25", 0.25),
        ("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:0.9", "per_process_memory_fraction:0.25", 0.25),
        ("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:0.1", "per_process_memory_fraction:0.1", 0.1),
        ("PYTORCH_ACME_ALLOC_CONF", "backend:native", "backend:native,per_process_memory_fraction:0.25", 0.25),
    ],
)
def test_what_the_user_has_set_stays_and_the_tighter_cap_counts(fake, name, text, merged, fraction):
    fake("2.10.0")
    seen, _ = shown({**environment().values, name: text})
    assert seen["conf"] == {name: merged}
    assert seen["fractions"] == {"0": fraction}


def test_a_build_that_refuses_the_key_is_not_given_it(fake):
    fake("2.10.0", refuses=True)
    seen, said = shown(environment().values)
    assert (seen["conf"], seen["fractions"]) == ({}, {"0": 0.25})
    assert "Unrecognized key" in said


def test_looking_for_the_module_first_does_not_lose_the_cap(fake):
    fake("2.9.1", settable=False)
    seen, _ = shown(environment().values, "import importlib.util\nassert importlib.util.find_spec('torch')\n" + SHOW)
    assert seen["fractions"] == {"0": 0.25}


def test_the_sitecustomize_of_the_user_runs_and_is_the_one_that_is_imported(fake, acme):
    fake("2.9.1", settable=False)
    (acme.parent / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = __file__\n")
    source = "import sitecustomize\nassert sitecustomize.__file__ == theirs\n" + SHOW
    seen, said = shown(environment().values, source)
    assert seen["fractions"] == {"0": 0.25}
    assert said == ""


def test_an_isolated_interpreter_is_not_capped(acme):
    """``-I`` reads neither PYTHONPATH nor this hook: the documentation says so."""
    seen, _ = shown(environment().values, "import json, sys\nprint(json.dumps(len(sys.meta_path)))", "-I")
    plain, _ = shown({}, "import json, sys\nprint(json.dumps(len(sys.meta_path)))", "-I")
    assert seen == plain


def test_the_share_says_what_limits_itself_and_that_nothing_enforces_it(acme):
    made = environment()
    (share,) = made.allocation.shares
    assert (share.limited_by, share.memory_by, share.compute_by) == (("PyTorch",), "by agreement", "by agreement")
    assert made.values["ANYACCEL_MEMORY_FRACTION"] == "0.25"
    assert aa.prepare("A1:0.25", machine="sim:A1:2").environment.allocation.shares[0].limited_by == ()


@pytest.mark.parametrize("request_", ["A1:1", "A1:2", "A1:0.75 A1:0.5"])
def test_what_is_no_share_of_one_device_is_not_capped(acme, request_):
    made = environment(request_.split(), environ={"ANYACCEL_MEMORY_FRACTION": "0.1", "PYTHONPATH": "/mine"})
    assert "ANYACCEL_MEMORY_FRACTION" not in made.values
    assert made.values["PYTHONPATH"] == "/mine"


def test_a_command_is_capped_on_wish(fake, anyaccel):
    fake("2.9.1", settable=False)
    seen = {}
    for option in ((), ("--cap",)):
        done = anyaccel("run", "A1:0.5", *option, "--machine", "sim:A1:2", "--", sys.executable, "-c", SHOW)
        assert done.returncode == 0, done.stderr
        seen[option] = json.loads(done.stdout)["fractions"]
    assert seen == {(): {}, ("--cap",): {"0": 0.5}}


def test_a_wish_that_changes_nothing_is_answered(acme, anyaccel):
    done = anyaccel("run", "A1:1", "--cap", "--machine", "sim:A1:2", "--", "true")
    assert done.returncode == 0
    assert "--cap changes nothing" in done.stderr


def test_the_command_line_says_what_holds_a_share(acme, anyaccel):
    done = anyaccel("run", "A1:0.5", "--cap", "-v", "--machine", "sim:A1:2", "--", "true")
    assert "acme/0: a share of 0.5, by agreement, limits of PyTorch set" in done.stderr


def torch_fractions():
    import torch

    before = torch.device.initialized
    torch.device.init()
    return before, torch.device.fractions, [share.limited_by for share in aa.current().shares]


@pytest.mark.parametrize("preload", [(), ("torch",)])
def test_workers_of_a_pool_are_capped(fake, preload):
    fake("2.9.1", settable=False)
    with aa.Pool("A1:0.5", machine="sim:A1:2", preload=preload) as pool:
        assert pool.submit(torch_fractions).result(60) == (False, {0: 0.5}, [("PyTorch",)])


def test_workers_of_a_pool_are_not_capped_against_the_wish(fake):
    fake("2.9.1", settable=False)
    with aa.Pool("A1:0.5", machine="sim:A1:2", cap=False) as pool:
        assert pool.submit(torch_fractions).result(60) == (False, {}, [()])


REAL = """
import json, os, sys
import torch
backends = [module for module in map(sys.modules.get, ("torch.cuda", "torch.xpu"))
    if module and hasattr(module, "set_per_process_memory_fraction")]
ours = [len([call for call, _ in each._queued_calls if "anyaccel" in call.__code__.co_filename]) for each in backends]
print(json.dumps({"version": torch.__version__, "initialized": [each.is_initialized() for each in backends],
    "queued": ours, "conf": os.environ.get("PYTORCH_ALLOC_CONF"),
    "read": torch._C._accelerator_getAllocatorSettings() if hasattr(torch._C, "_accelerator_getAllocatorSettings")
        else None, "sum": float(torch.ones(3).sum())}))
"""


def test_the_real_pytorch_takes_the_cap(acme):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    seen, said = shown(environment().values, REAL)
    assert set(seen["initialized"]) == {False}
    assert set(seen["queued"]) == {1}, "the cap waits in PyTorch's own queue"
    assert (seen["sum"], said) == (3.0, "")
    if tuple(map(int, seen["version"].split(".")[:2])) >= (2, 10):
        assert seen["conf"] == seen["read"] == "per_process_memory_fraction:0.25"
    else:
        assert seen["conf"] is None
