"""Print or serve measurements in OpenMetrics, for a monitoring system: anyaccel metrics --serve 127.0.0.1:9464."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import anyaccel
from anyaccel.cli import machine_options, output
from anyaccel.cli import sample as samples
from anyaccel.errors import UsageError
from anyaccel.ledger import BLOCKED
from anyaccel.model import UNITS_PER_DEVICE, Device, Health, Stats, Value, VendorState
from anyaccel.text import printable, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.cli import sample as samples

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_DEFAULT_ADDRESS = "127.0.0.1:9464"
_EXAMPLES = {"systemd": "anyaccel-metrics.service", "prometheus": "prometheus.yml", "grafana": "grafana.json"}
"""Files of the folder ``monitoring`` by the name that the command line has for them."""
_DIGITS = len(str(1 << 16))
FRESH_SECONDS = 2.0
"""Age up to which one sample answers further requests."""
_STATES = {Health.HEALTHY: "ok", Health.UNHEALTHY: "failed", Health.UNKNOWN: "unknown"}
Labels = dict[str, str]


class Family(Value):
    """A metric family of OpenMetrics.

    Attributes:
        name: Its name, without the suffix of its kind.
        kind: ``gauge``, ``counter`` or ``info``.
        help: Its description.
        samples: Values by label.
        unit: Its unit, which ends the name; empty for none.
    """

    name: str
    kind: str
    help: str
    samples: tuple[tuple[Labels, float], ...]
    unit: str = ""


EXAMPLES = (
    ("anyaccel metrics", "one reading in OpenMetrics, for a collector of text files"),
    ("anyaccel metrics --serve 127.0.0.1:9464", "serve them over HTTP"),
    ("anyaccel metrics --example grafana > dashboard.json", "a dashboard to import into Grafana"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--serve",
        metavar="ADDRESS",
        help="serve them over HTTP at HOST:PORT, or at PORT of this host alone, until the command ends",
    )
    parser.add_argument(
        "--example",
        choices=tuple(_EXAMPLES),
        help="print a systemd unit that serves them, a scrape configuration of Prometheus, or a dashboard of Grafana",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.json:
        raise UsageError("'anyaccel metrics' prints OpenMetrics only (got --json)", hint="'anyaccel --json' has it all")
    if args.example is not None:
        output.print_help(_read_example(args.example, args.serve or _DEFAULT_ADDRESS))
        return 0
    if args.serve is None:
        output.print_document(page(args))
        return 0
    return _serve(args, *_address(args.serve))


def _read_example(name: str, address: str) -> str:
    """Return an example file with the address, and this interpreter.

    Args:
        name: Key of :data:`_EXAMPLES`.
        address: HOST:PORT of the server.
    """
    with open(os.path.join(os.path.dirname(__file__), "monitoring", _EXAMPLES[name]), encoding="utf-8") as file:
        text = file.read()
    return text.replace("@ADDRESS@", address).replace("@COMMAND@", f"{sys.executable} -m anyaccel")


def page(args: argparse.Namespace) -> str:
    """Return a document with the current state of the machine."""
    return render(families(samples.take_sample(anyaccel.detect(**machine_options(args)), timeout=args.probe_timeout)))


def families(sample: samples.Sample) -> Iterator[Family]:
    """Yield the metrics of a sample. An unknown value has no sample, unlike a value of 0."""
    states = sample.states()
    devices = [(state.device, _labels(state.device), state.seen) for state in states]

    yield Family(
        name="anyaccel_device",
        kind="info",
        help="A device of this machine.",
        samples=tuple(
            (labels | {"hw_model": device.model or "", "type": device.type, "hw_parent": device.parent or ""}, 1)
            for device, labels, _ in devices
        ),
    )
    for name, unit, about, value in _GAUGES:
        yield _gauge(name, unit, about, ((labels, value(device, seen)) for device, labels, seen in devices))
    errors = [
        (labels | {"error_type": kind}, number)
        for _, labels, seen in devices
        for kind, number in (("corrected", seen.ecc_errors_corrected), ("uncorrected", seen.ecc_errors_uncorrected))
        if number is not None
    ]
    yield Family(name="hw_errors", kind="counter", help="Memory errors.", samples=tuple(errors))
    yield _gauge(
        "hw_status", "", "Whether the device is in a state.",
        (
            (_labels(state.device) | {"hw_state": word}, state.health[0] is health)
            for state in states
            for health, word in _STATES.items()
        ),
    )  # fmt: skip
    yield _gauge(
        "anyaccel_vendor_up", "", "Whether the vendor's plug-in could look for its devices.",
        (({"hw_vendor": report.vendor}, report.state is not VendorState.FAILED) for report in sample.inventory.vendors),
    )  # fmt: skip
    if sample.leases is None:
        return
    yield from _held(devices, sample.leases)
    users: dict[str, list[float]] = {}
    for ticket in sample.tickets:
        users.setdefault(ticket.user, []).append(ticket.waited)
    yield _gauge(
        "anyaccel_queue_length", "", "Requests that wait.",
        (({"user": user}, len(waited)) for user, waited in users.items()),
    )  # fmt: skip
    yield _gauge(
        "anyaccel_queue_wait_duration_seconds", "seconds", "How long the request has waited that waits longest.",
        (({"user": user}, max(waited)) for user, waited in users.items()),
    )  # fmt: skip


def _gauge(name: str, unit: str, text: str, samples: Iterable[tuple[Labels, float | None]]) -> Family:
    """Return a gauge of the known values."""
    known = tuple((labels, value) for labels, value in samples if value is not None)
    return Family(name=name, kind="gauge", unit=unit, help=text, samples=known)


def _held(devices: Sequence[tuple[Device, Labels, Stats]], leases: samples.Leases) -> Iterator[Family]:
    held: list[tuple[Labels, list[int]]] = []
    withheld: list[tuple[Labels, float | None]] = []
    for device, labels, _ in devices:
        by_user: dict[str, list[int]] = {}
        for lease in leases.get(device.id, ()):
            if lease.state in BLOCKED:
                withheld.append((labels | {"state": lease.state}, 1))
            else:
                by_user.setdefault(lease.user, []).append(lease.units)
        held += [(labels | {"user": user}, units) for user, units in by_user.items()]
    yield _gauge("anyaccel_device_withheld", "", "Whether the device is drained, or reserved now.", withheld)
    yield _gauge("anyaccel_lease_active", "", "Leases of the device.", ((labels, len(units)) for labels, units in held))
    yield _gauge(
        "anyaccel_lease_fraction_ratio", "ratio", "How much of the device is held.",
        ((labels, sum(units) / UNITS_PER_DEVICE) for labels, units in held),
    )  # fmt: skip


def _labels(device: Device) -> Labels:
    return {
        "hw_id": device.id,
        "hw_type": "gpu" if device.kind == "gpu" else "accelerator",
        "hw_vendor": device.vendor,
        "hw_name": device.name,
    }


def _used(device: Device, seen: Stats) -> float | None:
    if seen.memory_used_bytes is None or not device.memory_bytes:
        return None
    return seen.memory_used_bytes / device.memory_bytes


_GAUGES: tuple[tuple[str, str, str, Callable[[Device, Stats], float | None]], ...] = (
    ("hw_gpu_utilization_ratio", "ratio", "Share of time that the device was busy.", lambda _, seen: seen.utilization),
    ("hw_gpu_memory_usage_bytes", "bytes", "Device memory in use.", lambda _, seen: seen.memory_used_bytes),
    ("hw_gpu_memory_limit_bytes", "bytes", "Device memory.", lambda device, _: device.memory_bytes),
    ("hw_gpu_memory_utilization_ratio", "ratio", "Share of the device memory in use.", _used),
    ("hw_power_watts", "watts", "Power drawn.", lambda _, seen: seen.power_watts),
    ("hw_temperature_celsius", "celsius", "Temperature.", lambda _, seen: seen.temperature_celsius),
)
"""Gauges of each device: name, unit, description, value."""


def render(families: Iterable[Family]) -> str:
    """Format metrics as OpenMetrics 1.0, for Prometheus and the text-file collector of its node exporter."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# TYPE {family.name} {family.kind}")
        if family.unit:
            lines.append(f"# UNIT {family.name} {family.unit}")
        lines.append(f"# HELP {family.name} {family.help}")
        suffix = {"counter": "_total", "info": "_info"}.get(family.kind, "")
        for labels, value in family.samples:
            written = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            lines.append(f"{family.name}{suffix}{{{written}}} {_number(value)}")
    return "\n".join([*lines, "# EOF", ""])


def _escaped(text: str) -> str:
    return printable(text).replace("\\", r"\\").replace('"', r"\"")


def _number(value: float) -> str:
    # OpenMetrics accepts both forms; whole numbers are shorter.
    return str(int(value)) if value == int(value) else repr(float(value))


def _address(text: str) -> tuple[str, int]:
    # An IPv6 address has colons of its own: [::1]:9464.
    host, _, port = text.rpartition(":")
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= _DIGITS else 1 << 16
    if number >= 1 << 16:
        raise UsageError(f"--serve takes HOST:PORT or PORT, such as 127.0.0.1:9464 (got {shown(text)})")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", number


def _serve(args: argparse.Namespace, host: str, port: int) -> int:
    import socket
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    lock = threading.Lock()
    last: list[tuple[float, bytes]] = []

    def fresh() -> bytes:
        with lock:
            if not last or time.monotonic() - last[0][0] > FRESH_SECONDS:
                last[:] = [(time.monotonic(), page(args).encode())]
            return last[0][1]

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            # Prometheus may add parameters.
            if self.path.partition("?")[0] not in ("/", "/metrics"):
                self.send_error(404)
                return
            try:
                # Several collectors ask at once: vendors are asked once for all of them.
                body = fresh()
            except anyaccel.AnyaccelError as error:
                # In the page, not in the status line: that is Latin 1, and a name on this machine may have any letter.
                self.send_error(500, explain=printable(str(error))[:200])
                return
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the class names it so
            """Say nothing of each request."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # A client that reads slowly must not delay the end.
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Say nothing of a client that has gone: every user can be one, again and again."""
            if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
                super().handle_error(request, client_address)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

    try:
        server = Server((host, port), Handler)
    except (OSError, UnicodeError, TypeError) as error:  # the latter two of a text that no name of a host can be
        reason = getattr(error, "strerror", "") or "it is no name of a host"
        raise UsageError(f"nothing can be served at {host}:{port}: {reason}", hint="name another address") from error
    with server:
        shown = f"[{host}]" if ":" in host else host
        output.say(f"metrics are served at http://{shown}:{server.server_address[1]}/metrics")
        server.serve_forever()
    return 0
