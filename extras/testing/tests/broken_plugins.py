"""Plug-ins with one fault each, as small changes to the correct plug-in of ``tests/vendors/acme.py``."""

from __future__ import annotations

from dataclasses import dataclass

PRESENCE = '{"resource": "APU", "paths": ["/sys/class/acme"]}'


@dataclass(frozen=True)
class Broken:
    """A change to the source of the correct plug-in.

    Attributes:
        check: Id of the only check that must fail.
        edits: Pairs of old and new text; an empty old text puts the new text in front.
        message: Part of the check's message.
        inventory: True if the recordings' inventories are written with the fault in place.
        seconds: Time limit of each check.
        timeout: Time limit of each hook that touches the machine.
        presence: Content of ``presence.json``.
    """

    check: str
    edits: tuple[tuple[str, str], ...]
    message: str
    inventory: bool = False
    seconds: float = 60.0
    timeout: float = 10.0
    presence: str = PRESENCE

    def source(self, acme: str) -> str:
        for old, new in self.edits:
            if not old:
                acme = new + acme
                continue
            # An edit that matches nothing would test the correct plug-in.
            assert acme.count(old) == 1, f"the well-behaved plug-in must hold {old!r} once"
            acme = acme.replace(old, new)
        return acme


def body(hook: str, *lines: str) -> tuple[str, str]:
    """Put lines at the beginning of a hook."""
    return HEADS[hook], HEADS[hook] + "".join(f"    {line}\n" for line in lines)


HEADS = {
    "info": "def anyaccel_info() -> PluginInfo:\n",
    "detect": "def anyaccel_detect(ctx: ProbeContext) -> Detected | None:\n",
    "fractional": "def anyaccel_fractional(device: Device) -> Fractional:\n",
    "tags": "def anyaccel_tags(device: Device) -> Sequence[str]:\n",
    "env": "def anyaccel_env(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:\n",
    "visible": "def anyaccel_visible(environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:\n",
    "validate": "def anyaccel_validate(request: Term, devices: Sequence[Device]) -> str | None:\n",
    "stats": "def anyaccel_stats(devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:\n",
    "products": "def anyaccel_products() -> Sequence[Product]:\n",
}
ABSENT = '    if not ctx.exists("/sys/class/acme"):\n        return None\n'
TOOL = '["acme-smi", "-L"]'
IDENTITY = "id=f\"acme-{facts['serial']}\","
BY_NAME = 'list(dict.fromkeys(by_name[name] for name in mask.split(",") if name in by_name))'
FACTS = '(facts := json.loads(ctx.read(path) or "{}"))'
MASK = 'environ.get("ACME_VISIBLE")'
TAGS = '(device.model.replace(" ", "-"), *(("A1",) if device.model == "Acme One" else ()), "ACME")'

FAILS = """from anyaccel.plugin import hookimpl
@hookimpl
def anyaccel_diagnose(ctx):
    raise RuntimeError('no log')
"""
DIAGNOSE = """from anyaccel.plugin import Finding, Severity, hookimpl
@hookimpl
def anyaccel_diagnose(ctx):
    return [Finding(severity=Severity.FAIL, reason='it is broken')]
"""


def handing_over(*lines: str) -> tuple[tuple[str, str], ...]:
    """Add a hook that changes devices."""
    head = "from anyaccel.plugin import hookimpl\n@hookimpl\ndef anyaccel_handover(devices, ctx, given):\n"
    return (("", head + "".join(f"    {line}\n" for line in lines)),)


def detecting(*lines: str) -> tuple[str, str]:
    """Put lines where the devices of a machine are about to be listed."""
    return ABSENT, ABSENT + "".join(f"    {line}\n" for line in lines)


BROKEN = {
    "cannot be imported": Broken(
        "C01", (("", "import no_such_library\n"),), "ModuleNotFoundError: No module named 'no_such_library'"
    ),
    "has another key": Broken("C01", (('vendor="acme"', 'vendor="other"'),), "must equal the name of the entry point"),
    # os._exit skips exception handlers, as a crash of a library would.
    "dies when imported": Broken("C01", (("", "import os; os._exit(3)\n"),), "ended with exit status 3"),
    "imports a library": Broken("C02", (("", "import psutil\n"),), "loads psutil; import it inside the function"),
    "imports too much": Broken(
        "C02", (("", "import asyncio, email.mime.text, http.server, xmlrpc.client\n"),), "modules"
    ),
    "maps a library": Broken(
        "C02", (("", "import ctypes; ctypes.CDLL('libBrokenLocale.so.1')\n"),), "libBrokenLocale.so.1"
    ),
    "misspells a hook": Broken(
        "C03", (("def anyaccel_validate(", "def anyaccel_validates("),), "did you mean anyaccel_validate?"
    ),
    "lacks a hook": Broken("C03", (("def anyaccel_tags(", "def other("),), "has no anyaccel_tags, which is required"),
    "annotates a result": Broken(
        "C04",
        (("(device: Device) -> Fractional", "(device: Device) -> bool"),),
        "anyaccel_fractional is annotated to return bool; it must be Fractional",
    ),
    "annotates an argument": Broken(
        "C04",
        (("anyaccel_tags(device: Device)", "anyaccel_tags(device: str)"),),
        "anyaccel_tags annotates 'device' as str; it is passed Device",
    ),
    "reads the machine to say who it is": Broken(
        "C05", (body("info", "import os; os.listdir('/')"),), "must be a pure function, and it causes os.listdir('/')"
    ),
    "says something else each time": Broken(
        "C05",
        (("", "import itertools\nN = itertools.count()\n"), ('kind="apu",', 'kind=f"apu{next(N)}",')),
        "must return the same each time",
    ),
    "writes its kind in capitals": Broken("C05", (('kind="apu"', 'kind="APU"'),), "PluginInfo.kind must match"),
    "says junk": Broken("C05", (('resource="APU"', 'resource="A P U"'),), "PluginInfo.resource must match"),
    "is present everywhere": Broken("C06", ((ABSENT, ""),), "must return None on an empty machine"),
    "asks its library first": Broken(
        "C06",
        (body("detect", "try: ctx.query('acme/count', dict)", "except Exception: pass"),),
        "asks 'acme/count' on an empty machine; look for files or PCI ids first",
    ),
    "imports its library first": Broken(
        "C06", (body("detect", "import psutil"),), "imports psutil on an empty machine"
    ),
    "finds something else": Broken(
        "C07",
        (('model=facts["model"],', 'model=facts["model"].upper(),'),),
        "the inventory.devices[0].model must be 'Acme One' (got 'ACME ONE')",
    ),
    "cannot detect": Broken("C07", (detecting("raise OSError('no bus')"),), "it raised OSError: no bus"),
    # A real segmentation fault: the guarded process must name the signal.
    "crashes": Broken(
        "C07", (detecting("import ctypes; ctypes.string_at(0)"),), "was killed by SIGSEGV before it answered"
    ),
    "hangs": Broken(
        "C07",
        (detecting("import time; time.sleep(3600)"),),
        "did not survive the check: it did not answer within 3 s (it was at ",
        seconds=3,
    ),
    "finds something else the second time": Broken(
        "C08",
        (
            ("", "SEEN = []\n"),
            detecting("paths = ctx.glob('/sys/class/acme/*/facts')", "SEEN.append(paths)"),
            ('(ctx.read("/sys/class/acme/version") or "").strip(),', "str(SEEN.count(paths)),"),
        ),
        "the second answer.driver_version must be '1' (got '2')",
        inventory=True,
    ),
    "takes the index for the identity": Broken(
        "C09",
        ((IDENTITY, "id=f'acme-{index}', pci_bus_id=f'0000:0{index}:00.0',"),),
        "ids must not be indexes (got acme-0, acme-1",
        inventory=True,
    ),
    "takes the bare index for the identity": Broken(
        "C09", ((IDENTITY, "id=str(index),"),), "ids must not be indexes (got 0, 1", inventory=True
    ),
    # Letters, not digits: an id of digits is already refused as an index.
    "takes the order of a directory for the identity": Broken(
        "C09",
        ((IDENTITY, "id=f'acme-{chr(97 + index)}', pci_bus_id=f'0000:0{facts[\"serial\"][1:]}:00.0',"),),
        "with its directories in another order, the id.acme-",
        inventory=True,
    ),
    "gives one id to all": Broken(
        "C09", ((IDENTITY, 'id="acme",'),), "Device.id must be unique (got 'acme'", inventory=True
    ),
    "passes over what it cannot read": Broken(
        "C10",
        (
            ("", "def read(ctx, path):\n    try: return ctx.read(path)\n    except OSError: return None\n"),
            ('json.loads(ctx.read(path) or "{}")', 'json.loads(read(ctx, path) or "{}")'),
        ),
        "/sys/class/acme/0/facts cannot be opened, 1 of 2 devices are left",
    ),
    "takes a missing tool for no device": Broken(
        "C11",
        (detecting(f"if ctx.run({TOOL}) is None: return Detected()"),),
        "when the vendor's tools are not installed, anyaccel_detect returns no device for 2 devices",
    ),
    "takes a failing tool's word": Broken(
        "C11",
        (
            detecting(
                f"told = ctx.run({TOOL})", "if told is None: raise RuntimeError('acme-smi is missing; install it')"
            ),
            (FACTS, FACTS + ' and facts["serial"] in told.stdout'),
        ),
        "when 'acme-smi -L' fails, 0 of 2 devices are left",
    ),
    "takes a hanging tool for no device": Broken(
        "C12",
        (detecting(f"try: ctx.run({TOOL})", "except Exception: return Detected()"),),
        "when the vendor's tools hang, 0 of 2 devices are left",
    ),
    "asks a hanging tool again": Broken(
        "C12",
        (detecting("for _ in range(3):", f"    try: ctx.run({TOOL})", "    except Exception: continue", "    break"),),
        "runs 'acme-smi -L' again after it has hung",
    ),
    # 'except Exception' in an endless loop: only a BaseException of the context gets out of it.
    "asks a hanging tool for ever": Broken(
        "C12",
        (detecting("while True:", f"    try: ctx.run({TOOL})", "    except Exception: continue", "    break"),),
        "runs commands that hang for ever; stop after the first time-out",
    ),
    "sets a variable": Broken(
        "C13", (detecting("import os; os.environ['ACME_INIT'] = '1'"),), "the environment (os.environ): ACME_INIT='1'"
    ),
    "leaves a file open": Broken("C13", (detecting("import os; os.pipe()"),), "open file descriptors: "),
    # A daemon thread: any other would keep the process of the check alive.
    "leaves a thread": Broken(
        "C13",
        (detecting("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"),),
        "threads: ",
    ),
    "changes a signal handler": Broken(
        "C13", (detecting("import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)"),), "signal handlers: 10="
    ),
    "changes the directory": Broken("C13", (detecting("import os; os.chdir('/')"),), "the working directory: "),
    "prints": Broken("C13", (detecting("print('Acme 7.1')"),), "what was printed: "),
    "works in one process only": Broken(
        "C14",
        (
            ("", "import os\nOWNER = []\n"),
            detecting(
                "OWNER.append(os.getpid())",
                "if OWNER[0] != os.getpid(): raise RuntimeError('the handle is of another process')",
            ),
        ),
        "in a forked process: anyaccel_detect fails: it raised RuntimeError: the handle is of another process",
    ),
    "waits for ever in a forked process": Broken(
        "C14",
        (
            ("", "import os, signal\nOWNER = []\n"),
            detecting("OWNER.append(os.getpid())", "if OWNER[0] != os.getpid(): os.kill(os.getpid(), signal.SIGKILL)"),
        ),
        "a forked process that calls the hooks is killed by SIGKILL",
    ),
    "knows no tag for a product": Broken(
        "C15",
        ((TAGS, '{"Acme One": ("Acme-One", "A1", "ACME")}[device.model]'),),
        "sim:Acme-Whole:4: anyaccel_tags: it raised KeyError",
    ),
    "names a product otherwise": Broken(
        "C15", (('name="Acme-One"', 'name="Acme-1"'),), "the first tag of a Acme-1 must be 'Acme-1'"
    ),
    "has no environment for two": Broken(
        "C16",
        (body("env", "if len(devices) > 1: raise ValueError('one at a time')"),),
        "it raised ValueError: one at a time (plug_anyaccel_acme.py, line 65); answer, or"
        " let anyaccel_validate refuse it",
    ),
    "has another environment each time": Broken(
        "C16",
        (
            ("", "import itertools\nN = itertools.count()\n"),
            ('unset=frozenset({"ACME_ORDER"})', 'memory_by=str(next(N)), unset=frozenset({"ACME_ORDER"})'),
        ),
        "must be the same each time",
    ),
    "shows all where it should hide": Broken(
        "C17",
        (body("env", "if not devices: return EnvEdits(unset=frozenset({'ACME_VISIBLE'}))"),),
        "anyaccel_env for no device must hide all of them (visible after {}: all)",
    ),
    "has no mask, and does not say so": Broken(
        "C17",
        (
            ('env_vars=("ACME_VISIBLE", "ACME_ORDER")', "env_vars=()"),
            body("env", "return EnvEdits()"),
            body("visible", "return None"),
        ),
        "PluginInfo.env_vars must name the variable that hides the devices (got none); where the vendor's runtime has"
        " no such variable, say maskable=False",
    ),
    "does not expect no device": Broken(
        "C17", (body("env", "devices[0]"),), "anyaccel_env for no device: it raised IndexError"
    ),
    "sets another's variable": Broken(
        "C18",
        (('set={"ACME_VISIBLE": ",".join(names)}', 'set={"ACME_VISIBLE": ",".join(names), "OTHER": "1"}'),),
        "it may only touch variables that PluginInfo.env_vars lists (got 'OTHER')",
    ),
    "numbers the devices anew": Broken(
        "C19",
        (("[str(device.index) if ctx.mask ==", "[str(devices.index(device)) if ctx.mask =="),),
        "must be acme-s1 by index (got ['acme-s0'])",
    ),
    "keeps to an outer mask": Broken(
        "C19",
        (
            body(
                "env",
                "if devices and 'ACME_VISIBLE' in ctx.environ: return EnvEdits()",
            ),
        ),
        "over an outer launcher's variables (got [])",
    ),
    "chokes on an unknown device": Broken(
        "C20",
        ((BY_NAME, 'list(dict.fromkeys(by_name[name] for name in mask.split(",") if name))'),),
        "return ids, or raise ValueError with one sentence",
    ),
    "does not name the variable": Broken(
        "C20",
        (
            ('[str(device.index) if ctx.mask == "index" else device.id for', "[str(device.index) for"),
            (BY_NAME, 'list(dict.fromkeys(devices[int(name)].id for name in mask.split(",") if name))'),
        ),
        "the ValueError must name the variable",
    ),
    "refuses with a word": Broken(
        "C21", (('"an Acme bus connects 1, 2 or 4 devices, never 3"', '"no"'),), "must give one sentence"
    ),
    "refuses everything": Broken(
        "C21",
        (body("validate", "return 'an Acme device is never given out'"),),
        "accept none of the sets",
    ),
    "opens a file in a pure hook": Broken(
        "C22",
        (body("fractional", "import os; os.scandir('/sys').close()"),),
        "a hook causes os.scandir('/sys') by itself",
    ),
    "goes around its context": Broken(
        "C22", (detecting("import os; os.listdir('/sys/class')"),), "a hook causes os.listdir('/sys/class') by itself"
    ),
    "starts a program by itself": Broken(
        "C22", (detecting("import subprocess; subprocess.run(['true'])"),), "a hook causes subprocess.Popen('true'"
    ),
    "reads the environment of the process": Broken(
        "C22",
        (("", "import os\n"), (MASK, f'os.environ.get("ACME_VISIBLE", {MASK})')),
        "changes with os.environ",
    ),
    "tells of others' devices": Broken(
        "C25",
        (body("stats", "return {'other': Stats()}"),),
        "anyaccel_stats tells of other, which it was not asked about",
    ),
    "measures in percent": Broken(
        "C25",
        (body("stats", "return {device.id: Stats(utilization=42.0) for device in devices}"),),
        "Stats.utilization must be a part of one, from 0 to 1 (got 42 for 'acme-",
    ),
    "measures in millidegrees": Broken(
        "C25",
        (body("stats", "return {device.id: Stats(temperature_celsius=41000.0) for device in devices}"),),
        "Stats.temperature_celsius must be degrees Celsius, from -100 to 300 (got 41000 for 'acme-",
    ),
    "lists junk for products": Broken("C25", (body("products", "return ['Acme One']"),), "Products[0] must be Product"),
    "finds without a way out": Broken(
        "C25",
        (("", DIAGNOSE),),
        "anyaccel_diagnose finds 'it is broken' without a way out",
    ),
    "never has stats": Broken(
        "C26",
        (body("stats", "if devices: raise OSError('no sensors')"),),
        "anyaccel_stats fails on every recorded machine with devices, on pair: it raised OSError: no sensors",
    ),
    "never diagnoses": Broken(
        "C26", (("", FAILS),), "anyaccel_diagnose fails on every recorded machine with devices, on pair: it raised"
    ),
    "takes longer than it may": Broken(
        "C27",
        (detecting("import time; time.sleep(0.15)"),),
        "anyaccel_detect takes longer than its deadline of 0.1 s (it was at ",
        timeout=0.1,
    ),
    # C27 interrupts the hook by a signal; every other check is killed by the parent and skipped.
    "hangs longer than the suite waits": Broken(
        "C27",
        (detecting("import time; time.sleep(3600)"),),
        "in anyaccel_detect), so it always fails on such a machine",
        seconds=3,
        timeout=0.3,
    ),
    "hangs in another hook": Broken(
        "C27",
        (body("tags", "while True: pass"),),
        "anyaccel_tags takes longer than its deadline of 0.3 s (it was at ",
        seconds=3,
        timeout=0.3,
    ),
    "answers more than is taken": Broken(
        "C27",
        (detecting("return Detected(notes=('x' * (9 << 20),))"),),
        "and at most 8388608 are taken",
        inventory=True,
    ),
    # The plug-in itself is correct; the fault is in the file beside it.
    "says junk of its presence": Broken(
        "C28", (), "presence.json must have no field 'path'", presence='{"path": ["/dev/acme"]}'
    ),
    "is present by another resource": Broken(
        "C28",
        (),
        "'resource' of presence.json must be 'APU', as in PluginInfo (got 'GPU')",
        presence=PRESENCE.replace("APU", "GPU"),
    ),
    "rules out where it is": Broken(
        "C28",
        (),
        "presence.json says that the vendor is certainly not on driver-only, where it is found",
        presence='{"paths": ["/dev/acme*"]}',
    ),
    "fails to give": Broken("C30", handing_over("raise OSError('no tool')"), "given=False: it raised OSError: no tool"),
    "gives without an end": Broken(
        "C30", handing_over("while given: pass"), "takes longer than its deadline of 0.3 s", seconds=3, timeout=0.3
    ),
    "says how it went": Broken("C30", handing_over("return 'done'"), "it must return None, and raise an exception"),
    "changes devices by itself": Broken(
        "C30", handing_over("import subprocess; subprocess.run(['true'])"), "by itself: act through ctx.run"
    ),
    "leaves a setting": Broken(
        "C30",
        handing_over("if given: ctx.write('/sys/class/acme/0/cap', '250')"),
        "leaves '250' in /sys/class/acme/0/cap, where the idle state has None",
    ),
    "leaves what a command did": Broken(
        "C30",
        handing_over("if given: ctx.run(['acme-smi', '--cap'])"),
        "runs 'acme-smi --cap' for a holder, and nothing with given=False that undoes it",
    ),
    "undoes what it remembers": Broken(
        "C30",
        (
            ("", "HELD = []\n"),
            *handing_over(
                "if given: HELD.append(devices)",
                "if given or HELD: ctx.write('/sys/class/acme/0/cap', '250' if given else '400')",
            ),
        ),
        "leaves '250' in /sys/class/acme/0/cap",
    ),
}
"""Broken plug-ins by their fault."""
