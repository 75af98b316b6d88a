"""PyTorch and TensorFlow keep to a share: capped when a program imports them, with no device touched."""

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile

import anyaccel as aa
import cloudpickle
import pytest
from anyaccel.launcher import caps
from installed import ACME

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
def _register_device_module(kind, module):
    globals()[kind] = module
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

    def fake(version):
        package = acme.parent / "torch"
        package.mkdir()
        (package / "__init__.py").write_text(FAKE.format(version=version))

    return fake


def shown(environ, source=SHOW, *options):
    done = subprocess.run(
        [sys.executable, *options, "-c", source], env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def environment(request="A1:0.25", **options):
    return aa.prepare(request, machine="sim:A1:2", cap=True, **options).environment


def test_pytorch_is_capped_when_it_initializes_its_device(fake):
    fake("2.9.1+x")
    seen, said = shown(environment().values)
    assert seen == {"before": False, "fractions": {"0": 0.25}, "conf": {}}
    assert said == ""


@pytest.mark.parametrize(
    ("name", "text", "fraction"),
    [
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64", 0.25),
        ("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:0.9", 0.25),
        ("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:0.1", 0.1),
        ("PYTORCH_ACME_ALLOC_CONF", "backend:native,per_process_memory_fraction:0.1", 0.1),
        ("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:[256:1,>:4]", 0.25),
    ],
)
def test_what_the_user_has_set_stays_and_the_tighter_cap_counts(fake, name, text, fraction):
    fake("2.10.0")
    seen, _ = shown({**environment().values, name: text})
    assert seen["conf"] == {name: text}
    assert seen["fractions"] == {"0": fraction}


def test_a_child_process_is_capped_by_its_own_import(fake):
    fake("2.10.0")
    run = f"subprocess.run([sys.executable, '-c', {SHOW!r}], check=True)"
    child = f"import subprocess, sys, torch\ntorch.device.init()\n{run}"
    seen, _ = shown(environment().values, child)
    assert seen["fractions"] == {"0": 0.25}


@pytest.mark.parametrize("stream", ["None", "open(os.devnull)"])
def test_a_report_that_cannot_be_printed_breaks_no_import(fake, stream):
    fake("2.10.0")
    broken = f"import os, sys, torch\ntorch._Backend.device_count = None\nsys.stderr = {stream}\n"
    seen, said = shown(environment().values, broken + SHOW)
    assert (seen["fractions"], said) == ({}, "")


def test_a_backend_that_is_put_in_later_is_capped_too(fake):
    fake("2.4.0")
    put_in = "import torch\ntorch._register_device_module('other', torch._Backend())\ntorch.device = torch.other\n"
    seen, said = shown(environment().values, put_in + SHOW)
    assert (seen["fractions"], said) == ({"0": 0.25}, "")


def test_interpreters_from_3_8_on_can_read_it():
    for path in (caps.__file__, os.path.join(caps.STARTUP, "sitecustomize.py")):
        with open(path, encoding="utf-8") as file:
            ast.parse(file.read(), feature_version=(3, 8))


def test_looking_for_the_module_first_does_not_lose_the_cap(fake):
    fake("2.9.1")
    seen, _ = shown(environment().values, "import importlib.util\nassert importlib.util.find_spec('torch')\n" + SHOW)
    assert seen["fractions"] == {"0": 0.25}


HOOKS = {
    "asks all others": """
import sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                return spec
sys.meta_path.insert({place}, Hook())
""",
    "one loader for all": """
import importlib.util, sys
from importlib.machinery import PathFinder
class Loader:
    __slots__ = ()
    def create_module(self, spec): return None
    def exec_module(self, module):
        if module.__name__ == "torch": import json.tool
        with open(module.__spec__.origin) as file: exec(file.read(), module.__dict__)
LOADER = Loader()
class Hook:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name.partition(".")[0] in ("torch", "json") else None
        if spec: spec.loader = LOADER
        return spec
sys.meta_path.insert({place}, Hook())
""",
    "late": """
import importlib.util, sys
spec = importlib.util.find_spec("torch")
spec.loader = importlib.util.LazyLoader(spec.loader)
sys.modules["torch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["torch"])
""",
    "twice": "from anyaccel.launcher import caps; caps.install()",
}


@pytest.mark.parametrize(
    ("hook", "place"),
    [("asks all others", 0), ("asks all others", 1), ("one loader for all", 1), ("late", 0), ("twice", 0)],
)
def test_other_import_hooks_get_along_with_it(fake, hook, place):
    fake("2.9.1")
    source = SHOW.replace("before =", "assert torch.__spec__.loader is torch.__loader__\nbefore =")
    seen, said = shown(environment().values, HOOKS[hook].replace("{place}", str(place)) + source)
    assert (seen["fractions"], said) == ({"0": 0.25}, "")


def test_a_pytorch_in_an_archive_is_capped(fake, acme):
    fake("2.9.1")
    archive = acme.parent / "packed.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.write(acme.parent / "torch/__init__.py", "torch/__init__.py")
        packed.writestr("torch/part.py", "")
        packed.writestr("first.py", "")
    shutil.rmtree(acme.parent / "torch")
    made = environment().values
    made["PYTHONPATH"] += f"{os.pathsep}{archive}"
    seen, said = shown(made, "import importlib.util\nimportlib.util.find_spec('torch')\nimport first\n" + SHOW)
    assert (seen["fractions"], said) == ({"0": 0.25}, "")


def test_the_sitecustomize_of_the_user_runs_and_is_the_one_that_is_imported(fake, acme):
    fake("2.9.1")
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


@pytest.mark.parametrize(
    ("request_", "fraction", "limit"),
    [("A1:0.25 A1:0.25", "0.5", str(8 << 30)), ("A1:0.5 A1:1", None, None), ("A1:0.5 A1:0.5", None, None)],
)
def test_the_limit_is_that_of_the_only_device(acme, request_, fraction, limit):
    """A framework is told by the one or by the other, and both count for all devices that it sees."""
    values = aa.prepare(request_.split(), machine="sim:A1:2", cap=True).environment.values
    assert values.get("ANYACCEL_MEMORY_FRACTION") == fraction
    assert values.get("ANYACCEL_MEMORY_LIMIT") == limit


@pytest.mark.parametrize(
    ("theirs", "left"),
    [(None, []), ("", []), ("/mine", ["/mine"]), (":/mine", ["", "/mine"]), ("/a::/b:", ["/a", "", "/b", ""])],
)
def test_the_module_path_of_the_user_stays_behind_ours(acme, theirs, left):
    """An empty entry is the working directory."""
    once = environment(environ={} if theirs is None else {"PYTHONPATH": theirs}).values["PYTHONPATH"]
    assert once.split(os.pathsep)[1:] == left
    assert environment(environ={"PYTHONPATH": once}).values["PYTHONPATH"] == once


def test_a_command_is_capped_on_wish(fake, anyaccel):
    fake("2.9.1")
    seen = {}
    for option in ((), ("--cap",)):
        done = anyaccel("run", "A1:0.5", *option, "--machine", "sim:A1:2", "--", sys.executable, "-c", SHOW)
        assert done.returncode == 0, done.stderr
        seen[option] = json.loads(done.stdout)["fractions"]
    assert seen == {(): {}, ("--cap",): {"0": 0.5}}


HELD = """
import anyaccel as aa
held = aa.use("A1:0.5", machine="sim:A1:2", cap=True)
assert held.allocation.shares[0].limited_by == ("PyTorch",)
"""


@pytest.mark.parametrize(("then", "fractions"), [("", {"0": 0.5}), ("held.release()", {})])
def test_this_process_is_capped_on_wish_while_it_has_the_share(fake, then, fractions):
    fake("2.9.1")
    seen, said = shown(dict(os.environ), HELD + SHOW.replace("before =", f"{then}\nbefore ="))
    assert (seen["fractions"], said) == (fractions, "")


def test_a_wish_that_changes_nothing_is_answered(acme, anyaccel):
    done = anyaccel("run", "A1:1", "--cap", "--machine", "sim:A1:2", "--", "true")
    assert done.returncode == 0
    assert "--cap has no effect" in done.stderr


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
    fake("2.9.1")
    with aa.Pool("A1:0.5", machine="sim:A1:2", preload=preload) as pool:
        assert pool.submit(torch_fractions).result(60) == (False, {0: 0.5}, [("PyTorch",)])


def test_workers_of_a_pool_are_not_capped_against_the_wish(fake):
    fake("2.9.1")
    with aa.Pool("A1:0.5", machine="sim:A1:2", cap=False) as pool:
        assert pool.submit(torch_fractions).result(60) == (False, {}, [()])


REAL = """
import json, os, sys
import torch
backends = [module for module in map(sys.modules.get, ("torch.cuda", "torch.xpu"))
    if module and hasattr(module, "set_per_process_memory_fraction")]
ours = [len([call for call, _ in each._queued_calls if "anyaccel" in call.__code__.co_filename]) for each in backends]
initialized = [each.is_initialized() for each in backends]
for each in backends:
    for call, _ in each._queued_calls:
        if "anyaccel" in call.__code__.co_filename: call()  # as if there were devices, of which there are none
print(json.dumps({"version": torch.__version__, "initialized": initialized,
    "queued": ours, "sum": float(torch.ones(3).sum())}))
"""


def test_the_real_pytorch_takes_the_cap(acme):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    seen, said = shown(environment().values, REAL)
    assert set(seen["initialized"]) == {False}
    assert set(seen["queued"]) == {1}, "the cap waits in PyTorch's own queue"
    assert (seen["sum"], said) == (3.0, "")


TENSORFLOW = {
    "__init__.py": "__version__ = '2.21'; from tensorflow import config; from tensorflow.python.eager import context",
    "config.py": """
from types import SimpleNamespace
class LogicalDeviceConfiguration:
    def __init__(self, memory_limit=None): self.memory_limit = memory_limit
growing, logical, initialized = {}, {}, []
def list_physical_devices(kind=None): return ["gpu"] if kind == "GPU" else ["cpu", "gpu"]
def get_logical_device_configuration(device): return logical.get(device)
def set_logical_device_configuration(device, configuration):
    assert device == "gpu" and not initialized and not growing.get(device)
    logical[device] = configuration
def set_memory_growth(device, enable):
    if device in logical: raise ValueError("Cannot set memory growth on device when virtual devices configured")
    growing[device] = enable
experimental = SimpleNamespace(get_memory_growth=growing.get, set_memory_growth=set_memory_growth)
""",
    "python/__init__.py": "",
    "python/eager/__init__.py": "",
    "python/eager/context.py": """
from tensorflow import config
class Context:
    def ensure_initialized(self): config.initialized.append(True)
""",
}
USE = """
import json, os, tensorflow
{before}
from tensorflow.python.eager.context import Context
for _ in range(2): Context().ensure_initialized()
config = tensorflow.config
print(json.dumps([[each.memory_limit for each in config.logical.get("gpu", ())], config.growing,
    os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH"), len(config.initialized)]))
"""


@pytest.fixture
def tensorflow(install):
    """A TensorFlow that has the documented calls, and a vendor whose devices it knows."""
    source = ACME.replace('"ACME_VISIBLE": ', '"TF_FORCE_GPU_ALLOW_GROWTH": "true", "ACME_VISIBLE": ', 1)
    assert source != ACME
    site = install("acme", source.replace('env_vars=("', 'env_vars=("TF_FORCE_GPU_ALLOW_GROWTH", "', 1)).parent
    for name, text in TENSORFLOW.items():
        path = site / "tensorflow" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("before", "limits", "growing"),
    [
        ("", [8 << 10], {}),
        ("tensorflow.config.experimental.set_memory_growth('gpu', True)", [8 << 10], {"gpu": False}),
        (
            "C = tensorflow.config; C.set_logical_device_configuration('gpu', [C.LogicalDeviceConfiguration(5)])",
            [5],
            {},
        ),
        (
            """
C = tensorflow.config
C.set_logical_device_configuration('gpu', [C.LogicalDeviceConfiguration(n << 10) for n in (4, 12)])
""",
            [2 << 10, 6 << 10],
            {},
        ),
    ],
)
def test_tensorflow_is_capped_before_it_initializes_a_device(tensorflow, before, limits, growing):
    program = [sys.executable, "-c", USE.format(before=before)]
    done = aa.run("acme/0:0.5", program, machine="sim:A1:2", cap=True, capture_output=True, text=True)
    assert done.stderr == ""
    assert json.loads(done.stdout) == [limits, growing, None, 2]


def test_the_share_says_that_tensorflow_limits_itself(tensorflow):
    capped = aa.prepare("acme/0:0.5", machine="sim:A1:2", cap=True).environment
    assert capped.allocation.shares[0].limited_by == ("PyTorch", "TensorFlow")
    assert capped.allocation.shares[0].enforced_by == "by agreement"


def test_a_tensorflow_without_the_place_for_a_cap_goes_on(tensorflow, install, tmp_path):
    (tmp_path / "site/tensorflow/python/eager/context.py").write_text("")
    program = [sys.executable, "-c", "import tensorflow; print('goes on')"]
    done = aa.run("acme/0:0.5", program, machine="sim:A1:2", cap=True, capture_output=True, text=True)
    assert done.stdout == "goes on\n"
    assert "anyaccel: TensorFlow takes no cap on memory here" in done.stderr


REAL_TENSORFLOW = """
import json, os
import tensorflow
from tensorflow.python.eager import context
before = context.context()._context_handle is None
devices = tensorflow.config.list_physical_devices()
gpu = context.PhysicalDevice("/physical_device:GPU:0", "GPU")  # as if there were one, until the context is made
context.context()._physical_devices.append(gpu)
context.context()._memory_growth_map[gpu] = None
asked = {}
compute = context.Context.config.fget
def config(self):
    asked["limits"] = [each.memory_limit for each in self._virtual_device_map.get(gpu, ())]
    self._virtual_device_map.pop(gpu, None)
    self._physical_devices.remove(gpu)
    self._memory_growth_map.pop(gpu)
    return compute(self)
context.Context.config = property(config)
total = float(tensorflow.reduce_sum(tensorflow.ones(3)))
print(json.dumps([before, asked["limits"], total, os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH")]))
"""


def test_the_real_tensorflow_takes_the_cap(tensorflow, tmp_path):
    python = os.environ.get("TENSORFLOW_PYTHON", sys.executable)
    shutil.rmtree(tmp_path / "site/tensorflow")
    if subprocess.run([python, "-c", "import tensorflow"], capture_output=True, check=False).returncode:
        pytest.skip("TensorFlow is not installed; TENSORFLOW_PYTHON may name an interpreter that has it")
    program = [python, "-c", REAL_TENSORFLOW]
    done = aa.run("acme/0:0.5", program, machine="sim:A1:2", cap=True, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, [8 << 10], 3.0, None]
    assert "anyaccel" not in done.stderr
