"""Mistakes of authors, each a small change to one correct plug-in, with the check that finds it.

The vendor is invented: boards on PCI, numbered by address, described by files of the driver and by a tool.
"""

from __future__ import annotations

import json
from typing import NamedTuple

NOT_FOUND = ""
"""In place of a check: the mistake is a fact about hardware that no check can know, or harmless."""

CORRECT = """
import json, os, sys
from anyaccel.plugin import (ContainerEdits, Detected, Device, EnvEdits, Finding, Fractional, Health, Mount, PluginInfo,
    Product, Severity, Stats, hookimpl)

BOARDS = "/sys/bus/pci/devices/"


@hookimpl
def anyaccel_info():
    shared = ("/dev/voltctl",)
    return PluginInfo(vendor="volt", resource="VPU", kind="vpu", env_vars=("VOLT_VISIBLE",), control_nodes=shared)


def board(ctx, index, function, told):
    folder = BOARDS + function.address
    node = ctx.node(f"/dev/volt{index}")
    closed = node is not None and not node.writable
    serial = (ctx.read(f"{folder}/serial") or "").strip()
    memory = told.get(function.address)
    return Device(
        id=f"VOLT-{serial}",
        index=index,
        model="Volt One",
        memory_bytes=memory << 20 if memory else None,
        pci_bus_id=function.address,
        numa_node=function.numa_node,
        nodes=(f"/dev/volt{index}", "/dev/voltctl"),
        health=Health.UNHEALTHY if closed else Health.HEALTHY,
        health_reason="you may not open its node" if closed else "",
        health_remedy="join the group volt" if closed else "",
    )


def ask(ctx):
    try:
        done = ctx.run(["volt-smi", "--json"])
        return {row["address"]: row["mebibytes"] for row in json.loads(done.stdout)} if done else {}
    except Exception:
        return {}


@hookimpl
def anyaccel_detect(ctx):
    functions = ctx.pci(0xB017, [0x1200])
    if not functions:
        return Detected() if ctx.exists("/sys/module/volt") else None
    told = ask(ctx)
    return Detected(
        devices=tuple(board(ctx, index, function, told) for index, function in enumerate(functions)),
        notes=() if told else ("volt-smi does not answer, so the memory is unknown",),
    )


@hookimpl
def anyaccel_fractional(device):
    return Fractional.NO


@hookimpl
def anyaccel_tags(device):
    return [device.model.replace(" ", "-"), "Volt"]


@hookimpl
def anyaccel_env(devices, ctx):
    return EnvEdits(set={"VOLT_VISIBLE": ",".join(str(device.index) for device in devices)})


@hookimpl
def anyaccel_visible(environ, devices):
    value = environ.get("VOLT_VISIBLE")
    if value is None:
        return None
    found = []
    for entry in value.split(",") if value else []:
        number = int(entry) if entry.isascii() and entry.isdigit() and len(entry) < 9 else -1
        named = [device.id for device in devices if device.index == number]
        if not named:
            raise ValueError(f"VOLT_VISIBLE must list indexes of devices (got {value[:40]!r})")
        found += named
    return list(dict.fromkeys(found))


@hookimpl
def anyaccel_stats(devices, ctx):
    return {device.id: seen(ctx, device) for device in devices}


def seen(ctx, device):
    folder = BOARDS + str(device.pci_bus_id)
    millidegrees = ctx.read_int(f"{folder}/temp")
    return Stats(
        memory_used_bytes=1 << 30,
        utilization=0.5,
        temperature_celsius=millidegrees / 1000 if millidegrees is not None else None,
        power_watts=75.0,
        clock_hz=1_500_000_000,
    )


@hookimpl
def anyaccel_container(devices):
    tools = Mount(source="/opt/volt", target="/opt/volt")
    return ContainerEdits(nodes=tuple(node for device in devices for node in device.nodes), mounts=(tools,))


@hookimpl
def anyaccel_diagnose(ctx):
    return [Finding(severity=Severity.OK, reason="the firmware is new")]


@hookimpl
def anyaccel_products():
    return [Product(name="Volt-One", model="Volt One", memory_bytes=16 << 30, counts=(1, 4), id_template="VOLT-{uuid}",
        node_templates=("/dev/volt{index}",))]
"""
PRESENCE = '{"resource": "VPU", "pci": [{"vendor": "b017", "classes": ["1200"]}], "paths": ["/sys/module/volt"]}'
SERIALS = ("S7", "S2", "S9", "S4")


def machine(serials: tuple[str, ...] = SERIALS) -> dict[str, object]:
    """Return a recorded machine with boards, a sound function of the same vendor, and another vendor's card."""
    paths: dict[str, object] = {"/sys/module/volt": {"dir": True}, "/dev/voltctl": {"char": [511, 255], "access": "rw"}}

    def function(address: str, vendor: int, device: int, kind: int, **files: str) -> None:
        folder = f"/sys/bus/pci/devices/{address}"
        known = {"vendor": f"0x{vendor:04x}", "device": f"0x{device:04x}", "class": f"0x{kind:04x}00", **files}
        paths.update({f"{folder}/{name}": {"text": f"{text}\n"} for name, text in known.items()})

    for index, serial in enumerate(serials):
        function(f"0000:0{index + 1}:00.0", 0xB017, 1, 0x1200, serial=serial, temp="41000", numa_node="0")
        paths[f"/dev/volt{index}"] = {"char": [511, index], "access": "rw"}
    function("0000:00:02.0", 0x1AF4, 0x1041, 0x0200)
    function("0000:00:03.0", 0xB017, 2, 0x0403)
    # The well-behaved neighbour's device, below a class of its own: see test_careless_author.
    paths["/sys/class/acme/0/facts"] = {"text": json.dumps({"serial": "n0", "model": "Acme One", "memory": 16 << 30})}
    rows = [{"address": f"0000:0{index + 1}:00.0", "mebibytes": 16384} for index in range(len(serials))]
    tool = {"argv": ["volt-smi", "--json"], "returncode": 0, "stdout": json.dumps(rows), "stderr": ""}
    return {"schema": "anyaccel.recording/1", "paths": paths, "commands": [tool]}


class Mistake(NamedTuple):
    """A mistake.

    Attributes:
        check: Id of a check that fails; :data:`NOT_FOUND` if none does.
        message: Part of the check's message; the reason why no check can find it.
        edits: Pairs of old and new text of the plug-in; an empty old text puts the new text in front.
        presence: Content of ``presence.json``.
    """

    check: str
    message: str
    edits: tuple[tuple[str, str], ...]
    presence: str = PRESENCE


def _at(hook: str, *lines: str) -> tuple[str, str]:
    """Put lines at the beginning of a hook."""
    head = next(line for line in CORRECT.splitlines() if line.startswith(f"def {hook}("))
    return head, "\n    ".join((head, *lines))


ID, INDEX, ADDRESS = 'id=f"VOLT-{serial}"', "        index=index,", "pci_bus_id=function.address"
ENV = 'EnvEdits(set={"VOLT_VISIBLE": ",".join(str(device.index) for device in devices)})'
MEMORY = "memory << 20 if memory else None"
TAGS = '[device.model.replace(" ", "-"), "Volt"]'
PRODUCT = 'Product(name="Volt-One"'
FUNCTIONS = "ctx.pci(0xB017, [0x1200])"
VARS = 'env_vars=("VOLT_VISIBLE",)'
MOUNT = 'Mount(source="/opt/volt", target="/opt/volt")'
NOTES = "notes=() if told"

THREAD = "\nimport threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"

MISTAKES: dict[str, Mistake] = {
    # Units.
    "memory in mebibytes": Mistake(
        "C15", "Device.memory_bytes of VOLT-S7 must be bytes, near the 17179869184 of", ((MEMORY, "memory"),)
    ),
    "memory in use in kibibytes of kibibytes": Mistake(
        "C25",
        "Stats.memory_used_bytes must be bytes, at most Device.memory_bytes (go",
        (("memory_used_bytes=1 << 30", "memory_used_bytes=1 << 40"),),
    ),
    "load in percent": Mistake(
        "C25", "Stats.utilization must be a part of one, from 0 to 1", (("utilization=0.5", "utilization=50.0"),)
    ),
    "temperature in millidegrees": Mistake(
        "C25",
        "Stats.temperature_celsius must be degrees Celsius, from -100 to 300 (g",
        (("millidegrees / 1000 if", "millidegrees / 1 if"),),
    ),
    "power in milliwatts": Mistake(
        "C25", "Stats.power_watts must be watts, from 0 to 100000", (("power_watts=75.0", "power_watts=350_000.0"),)
    ),
    "clock in megahertz": Mistake(
        "C25", "Stats.clock_hz must be hertz, from 1000000 to 100000000000", (("1_500_000_000", "1500"),)
    ),
    "a temperature that is no number": Mistake(
        "C25",
        "anyaccel_stats: stats['VOLT-S7'].temperature_celsius must be float | N",
        (("millidegrees / 1000 if", "float('nan') if"),),
    ),
    # Identity and order.
    "the node's name as the id": Mistake("C09", "ids must not be indexes", ((ID, 'id=f"volt{index}"'),)),
    "one id for two boards": Mistake(
        "C09", "anyaccel_detect: Device.id must be unique", ((ID, 'id=f"VOLT-{len(serial)}"'),)
    ),
    "a new id each time": Mistake(
        "C08", "the second answer.devices[0].id must be 'VOLT-", ((ID, 'id=f"VOLT-{os.urandom(4).hex()}"'),)
    ),
    "an id with a blank": Mistake(
        "C09", "anyaccel_detect: Device.id must match [!#-&(-+\\--~]{1,128}", ((ID, 'id=f"VOLT {serial}"'),)
    ),
    "one index for two boards": Mistake(
        "C09", "anyaccel_detect: Device.index must be unique", ((INDEX, "        index=index // 2,"),)
    ),
    "an address in capitals": Mistake(
        "C09",
        "anyaccel_detect: Device.pci_bus_id must match [0-9a-f]{4,8}:[0-9a-f]{2",
        ((ADDRESS, "pci_bus_id=function.address.upper() + 'A'"),),
    ),
    "another vendor's function": Mistake(
        "C09",
        "VOLT-S2 has the PCI address 0000:00:02.0 of a function of the vendor 1",
        ((ADDRESS, 'pci_bus_id="0000:00:02.0" if index == 1 else function.address'),),
    ),
    "a sound function as a device": Mistake(
        "C28", "'pci' of presence.json must list the vendor b017 and the class 0403", ((FUNCTIONS, "ctx.pci(0xB017)"),)
    ),
    "an order that changes": Mistake(
        "C08",
        "the second answer.devices[0].index must be ",
        (
            ("", "TURNS = []\n"),
            # Every other time from behind: by chance, two orders could be the same.
            ("enumerate(functions)", "enumerate(TURNS.append(0) or functions[:: 1 if len(TURNS) % 2 else -1])"),
        ),
    ),
    "devices of the machine seen before": Mistake(
        "C09",
        "Device.id must be unique",
        (
            ("", "SEEN = []\n"),
            (
                "    told = ask(ctx)",
                "    SEEN.extend(() if SEEN else functions)\n    functions = list(SEEN)\n    told = ask(ctx)",
            ),
        ),
    ),
    "a neighbour's node": Mistake(
        "C24",
        "the plug-ins acme and volt both list device node /dev/acme0",
        (('nodes=(f"/dev/volt{index}",', 'nodes=("/dev/acme0" if index == 1 else f"/dev/volt{index}",'),),
    ),
    "a device that is its own part": Mistake(
        "C09",
        "anyaccel_detect: Device.parent must not be the device or a part of it",
        ((INDEX, INDEX + '\n        parent=f"VOLT-{serial}",'),),
    ),
    "five parts of eight": Mistake(
        "C09",
        "anyaccel_detect: Device.slots must be one of 1, 2, 4, 5, 8, 10, 16, 20",
        ((INDEX, INDEX + "\n        slots=3,"),),
    ),
    "ill without a reason": Mistake(
        "C25",
        "an unhealthy device must say why",
        (("health=Health.UNHEALTHY if closed else Health.HEALTHY", "health=Health.UNHEALTHY"),),
    ),
    # Exceptions, hangs, deaths.
    "an exception for one product": Mistake(
        "C15", "anyaccel_tags: it raised KeyError: 'series'", (_at("anyaccel_tags", 'device.attributes["series"]'),)
    ),
    "all errors swallowed": Mistake(
        "C10",
        "when /sys/bus/pci/devices/0000:01:00.0/serial cannot be opened, 3 of 4",
        (
            (
                "board(ctx, index, function, told) for index, function in enumerate(functions)",
                "each for index, function in enumerate(functions) if (each := safe(ctx, index, function, told))",
            ),
            ("", "def safe(*args):\n    try: return board(*args)\n    except Exception: return None\n"),
        ),
    ),
    "an exit in a hook": Mistake(
        "C16",
        "anyaccel_env for VOLT-S7 by id: it raised SystemExit: 1",
        (_at("anyaccel_env", "if devices: sys.exit(1)"),),
    ),
    "a death in a hook": Mistake(
        "C19",
        "the plug-in did not survive the check: its process ended with exit sta",
        (_at("anyaccel_visible", "os._exit(0)"),),
    ),
    "an endless recursion": Mistake(
        "C17",
        "anyaccel_visible refuses what anyaccel_env hides all with: it raised RecursionError",
        (_at("anyaccel_visible", "return anyaccel_visible(environ, devices)"),),
    ),
    "a hook that hangs": Mistake(
        "C27",
        "anyaccel_stats takes longer than its deadline of ",
        (_at("anyaccel_stats", "__import__('time').sleep(3600)"),),
    ),
    "an exit in the import": Mistake(
        "C01",
        "raised SystemExit: no driver",
        (("import json, os, sys", "import json, os, sys\nsys.exit('no driver')"),),
    ),
    "an interrupt as an error": Mistake(
        "C26",
        "the plug-in did not survive the check: KeyboardInterrupt",
        (_at("anyaccel_stats", "raise KeyboardInterrupt"),),
    ),
    "an error that cannot be printed": Mistake(
        "C26",
        "it raised Odd: its text cannot be read",
        (
            ("", "class Odd(Exception):\n    def __str__(self): raise ValueError('odd')\n"),
            _at("anyaccel_stats", "raise Odd"),
        ),
    ),
    "a hook that is a coroutine": Mistake(
        "C15",
        "anyaccel_tags: it must return a list or tuple of tags (got <coroutine",
        (("def anyaccel_tags(device)", "async def anyaccel_tags(device)"),),
    ),
    # The process.
    "a line on standard output": Mistake(
        "C13", "the hooks change what was printed: ", (_at("anyaccel_tags", "print('volt: asked')"),)
    ),
    "a line on descriptor 1": Mistake(
        "C13", "the hooks change what was printed: ", (_at("anyaccel_detect", "os.write(1, b'\\xff\\x00volt\\n')"),)
    ),
    "a variable set by the import": Mistake(
        "C13",
        "(os.environ): CUDA_VISIBLE_DEVICES='0'",
        (("import json, os, sys", "import json, os, sys\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'"),),
    ),
    "a signal handler set by the import": Mistake(
        "C13",
        "the hooks change signal handlers: 15=",
        (("import json, os, sys", "import json, os, sys, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)"),),
    ),
    "a thread started by the import": Mistake(
        "C13",
        "the hooks change threads: ",
        (
            (
                "import json, os, sys",
                "import json, os, sys" + THREAD,
            ),
        ),
    ),
    "a child left behind": Mistake(
        "C13",
        "the hooks change child processes: ",
        (_at("anyaccel_detect", "import subprocess; subprocess.Popen(['sleep', '30'])"),),
    ),
    "a socket left open": Mistake(
        "C13",
        "the hooks change open file descriptors: ",
        (("", "KEPT = []\n"), _at("anyaccel_detect", "import socket; KEPT.append(socket.socket())")),
    ),
    "a file mode for everything": Mistake(
        "C13", "the hooks change the umask: ", (_at("anyaccel_detect", "os.umask(0)"),)
    ),
    "descriptors of others closed": Mistake(
        "C08",
        "the plug-in did not survive the check: its process ended with exit sta",
        (_at("anyaccel_detect", "os.closerange(3, 4096)"),),
    ),
    "a cache in the home directory": Mistake(
        "C22",
        ".volt-cache', 'a') by itself",
        (_at("anyaccel_detect", "open(os.path.expanduser('~/.volt-cache'), 'a').close()"),),
    ),
    "a fork that returns twice": Mistake(
        "C13", "the hooks change child processes: ", (_at("anyaccel_detect", "os.fork()"),)
    ),
    "another working directory": Mistake(
        "C13", "the hooks change the working directory: ", (_at("anyaccel_detect", "os.chdir('/tmp')"),)
    ),
    "another locale": Mistake(
        "C13",
        "the hooks change the locale: ",
        (_at("anyaccel_detect", "import locale; locale.setlocale(locale.LC_ALL, 'C')"),),
    ),
    "a recursion limit": Mistake(
        "C13", "the hooks change the recursion limit: ", (_at("anyaccel_detect", "sys.setrecursionlimit(700)"),)
    ),
    "blocked signals": Mistake(
        "C13",
        "the hooks change blocked signals: ",
        (_at("anyaccel_detect", "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})"),),
    ),
    "an alarm": Mistake(
        "C13",
        "the hooks change the alarm: ",
        (_at("anyaccel_detect", "import signal; signal.setitimer(signal.ITIMER_REAL, 600)"),),
    ),
    "a limit of memory": Mistake(
        "C13",
        "the hooks change resource limits: RLIMIT_AS=",
        (_at("anyaccel_detect", "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 38, 1 << 38))"),),
    ),
    "standard output closed": Mistake(
        "C13", "the hooks change open standard streams: ", (_at("anyaccel_detect", "sys.stdout.close()"),)
    ),
    "a file behind the back of ctx": Mistake(
        NOT_FOUND,
        "os.stat raises no audit event, so nothing sees it",
        (("    closed = node", "    os.path.exists('/dev/volt0')\n    closed = node"),),
    ),
    # Masks.
    "numbers among the given": Mistake(
        "C19",
        "anyaccel_visible of {'VOLT_VISIBLE': '0'} must be VOLT-S2 by id",
        ((ENV, ENV.replace("str(device.index) for device in devices", "str(i) for i, _ in enumerate(devices)")),),
    ),
    "no value for nothing": Mistake(
        "C17",
        "anyaccel_env for no device must hide all of them (visible after {}: al",
        (_at("anyaccel_env", "if not devices: return EnvEdits()"),),
    ),
    "a number for a text": Mistake(
        "C18",
        "anyaccel_env for no device: EnvEdits.set['VOLT_VISIBLE'] must be str (",
        (_at("anyaccel_env", 'return EnvEdits(set={"VOLT_VISIBLE": len(devices)})'),),
    ),
    "indexes read as ids": Mistake(
        "C19",
        "anyaccel_visible of {'VOLT_VISIBLE': '0'} must be VOLT-S7 by id",
        (("return list(dict.fromkeys(found))", "return [str(n) for n, _ in enumerate(found)]"),),
    ),
    "a variable of a neighbour": Mistake(
        "C24",
        "volt and acme set the variable ACME_VISIBLE differently",
        ((VARS, 'env_vars=("VOLT_VISIBLE", "ACME_VISIBLE")'), (ENV, ENV.replace("})", ', "ACME_VISIBLE": "7"})'))),
    ),
    "a variable of the shell": Mistake(
        "C05",
        "PluginInfo.env_vars must not hold 'PATH': that variable belongs to the system",
        ((VARS, 'env_vars=("VOLT_VISIBLE", "PATH")'), (ENV, ENV.replace("})", ', "PATH": "/opt/volt/bin"})'))),
    ),
    "blanks that the runtime may not know": Mistake(
        NOT_FOUND,
        "only the vendor's runtime knows whether it takes blanks",
        (
            (ENV, ENV.replace('","', '", "')),
            ('value.split(",") if value', "value.replace(' ', '').split(\",\") if value"),
        ),
    ),
    # Names, products, presence, answers.
    "a tag of another vendor": Mistake(
        "C24",
        "'H100' must be no tag and no product, since it is a product of nvidia;",
        ((TAGS, TAGS.replace('"Volt"', '"H100"')),),
    ),
    "a product of another vendor": Mistake(
        "C24",
        "'MI300X' must be no tag and no product, since it is a product of amd",
        ((PRODUCT, PRODUCT + ', aliases=("MI300X",)'),),
    ),
    "a tag with a blank": Mistake(
        "C15",
        "anyaccel_tags: a tag must match [A-Za-z0-9][A-Za-z0-9._-]{0,127}",
        ((TAGS, TAGS.replace('"Volt"', '"Volt board"')),),
    ),
    "no product that is found": Mistake(
        "C15", "the first tag of a Volt-1 must be 'Volt-1'", ((PRODUCT, PRODUCT.replace("One", "1")),)
    ),
    "a mount of everything": Mistake(
        "C25",
        "anyaccel_container must not mount '/' of the host, which shows a conta",
        ((MOUNT, 'Mount(source="/", target="/host")'),),
    ),
    "present everywhere": Mistake(
        "C28",
        "'/sys/bus/pci' in 'paths' of presence.json exists on machines without",
        (),
        PRESENCE.replace("/sys/module/volt", "/sys/bus/pci"),
    ),
    "present with any card": Mistake(
        "C28",
        "'pci' of presence.json must give 'classes' for 8086: functions of Inte",
        (),
        PRESENCE.replace('"pci": [', '"pci": [{"vendor": "8086"}, '),
    ),
    "bytes that are no text": Mistake(
        "C15", "a tag must match", (('        model="Volt One"', '        model="Volt \\udcff"'),)
    ),
    "a huge answer": Mistake(
        "C27",
        "anyaccel_detect answers 9437968 bytes, and at most 8388608 are taken",
        ((NOTES, "notes=('x' * (9 << 20),) if told"),),
    ),
    "a generator of devices": Mistake(
        "C09", "anyaccel_detect: Detected.devices must be tuple", (("devices=tuple(board(", "devices=(board("),)
    ),
    "a set among the attributes": Mistake(
        "C09",
        "anyaccel_detect: Detected.devices[0].attributes['series'] must be str",
        ((INDEX, INDEX + '\n        attributes={"series": {1, 2}},'),),
    ),
}
"""Mistakes by what the author did."""


def source(edits: tuple[tuple[str, str], ...]) -> str:
    """Return the plug-in with some edits."""
    text = CORRECT
    for old, new in edits:
        assert not old or text.count(old) == 1, f"the correct plug-in must hold {old!r} once (found {text.count(old)})"
        text = text.replace(old, new) if old else new + text
    return text
