"""Print what a monitoring system collects, in OpenMetrics, or serve it: anyaccel metrics --serve 127.0.0.1:9464."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.options import machine_options
from anyaccel.errors import LedgerError, UsageError
from anyaccel.model import UNITS_PER_DEVICE, Device, Health, Inventory, Stats, Value, VendorState
from anyaccel.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from anyaccel.ledger import LeaseRecord
    from anyaccel.ledger.record import TicketRecord

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
FRESH_SECONDS = 2.0
"""How long one look is given to all who ask."""
_STATES = {Health.HEALTHY: "ok", Health.UNHEALTHY: "failed", Health.UNKNOWN: "unknown"}
Labels = dict[str, str]
Sample = tuple[Labels, float]


class Family(Value):
    """One metric.

    Attributes:
        name: Its name, without what the kind adds.
        kind: ``gauge``, ``counter`` or ``info``.
        unit: Its unit, which ends the name; empty for none.
        help: What it says.
        samples: Its values.
    """

    name: str
    kind: str
    unit: str
    help: str
    samples: tuple[Sample, ...]


EXAMPLES = (
    ("anyaccel metrics", "one reading in OpenMetrics, for a collector of text files"),
    ("anyaccel metrics --serve 127.0.0.1:9400", "serve them over HTTP"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--serve",
        metavar="ADDRESS",
        help="serve it over HTTP at HOST:PORT, or at PORT of this host alone, until it ends",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.json:
        raise UsageError("'anyaccel metrics' prints OpenMetrics only (got --json)", hint="'anyaccel --json' has it all")
    if args.serve is None:
        output.print_document(page(args))
        return 0
    return _serve(args, *_address(args.serve))


def page(args: argparse.Namespace) -> str:
    """What the machine is like now, as a document."""
    inventory = anyaccel.detect(**machine_options(args))
    observed, _ = anyaccel.stats(inventory, timeout=args.probe_timeout)
    try:
        leases, tickets = _books(inventory)
    except LedgerError:  # then what is held is left out, not 0
        return render(families(inventory, observed, None, None))
    return render(families(inventory, observed, leases, tickets))


def _books(inventory: Inventory) -> tuple[tuple[LeaseRecord, ...], tuple[TicketRecord, ...]]:
    from anyaccel.launcher.hold import leases
    from anyaccel.ledger import Ledger

    return (leases(inventory) if inventory.devices else ()), Ledger.open().tickets()


def families(
    inventory: Inventory,
    observed: Mapping[str, Stats],
    leases: Sequence[LeaseRecord] | None,
    tickets: Sequence[TicketRecord] | None,
) -> Iterator[Family]:
    """All metrics. What nobody can tell has no sample.

    Args:
        inventory: The machine.
        observed: What the vendors observe, by device id.
        leases: The leases of its devices; None when unknown.
        tickets: Who waits; None when unknown.
    """
    devices = [(device, _labels(device), observed.get(device.id, Stats())) for device in inventory.devices]

    def gauge(name: str, unit: str, text: str, samples: Iterable[tuple[Labels, float | None]]) -> Family:
        known = tuple((labels, value) for labels, value in samples if value is not None)
        return Family(name=name, kind="gauge", unit=unit, help=text, samples=known)

    yield Family(
        name="anyaccel_device",
        kind="info",
        unit="",
        help="A device of this machine.",
        samples=tuple((labels | _about(device), 1) for device, labels, _ in devices),
    )
    yield gauge(
        "hw_gpu_utilization_ratio", "ratio", "Share of time that the device was busy.",
        ((labels, seen.utilization) for _, labels, seen in devices),
    )  # fmt: skip
    yield gauge(
        "hw_gpu_memory_usage_bytes", "bytes", "Device memory in use.",
        ((labels, seen.memory_used_bytes) for _, labels, seen in devices),
    )  # fmt: skip
    yield gauge(
        "hw_gpu_memory_limit_bytes", "bytes", "Device memory.",
        ((labels, device.memory_bytes) for device, labels, _ in devices),
    )  # fmt: skip
    yield gauge(
        "hw_gpu_memory_utilization_ratio", "ratio", "Share of the device memory in use.",
        ((labels, _used(device, seen)) for device, labels, seen in devices),
    )  # fmt: skip
    yield gauge("hw_power_watts", "watts", "Power drawn.", ((labels, seen.power_watts) for _, labels, seen in devices))
    yield gauge(
        "hw_temperature_celsius", "celsius", "Temperature.",
        ((labels, seen.temperature_celsius) for _, labels, seen in devices),
    )  # fmt: skip
    errors = [
        (labels | {"error_type": kind}, number)
        for _, labels, seen in devices
        for kind, number in (("corrected", seen.ecc_errors_corrected), ("uncorrected", seen.ecc_errors_uncorrected))
        if number is not None
    ]
    yield Family(name="hw_errors", kind="counter", unit="", help="Memory errors.", samples=tuple(errors))
    yield gauge(
        "hw_status", "", "Whether the device is in a state.",
        (
            (labels | {"hw_state": word}, _health(device, seen) is health)
            for device, labels, seen in devices
            for health, word in _STATES.items()
        ),
    )  # fmt: skip
    yield gauge(
        "anyaccel_vendor_up", "", "Whether the vendor's plug-in could look for its devices.",
        (({"hw_vendor": report.vendor}, report.state is not VendorState.FAILED) for report in inventory.vendors),
    )  # fmt: skip
    if leases is not None:
        yield from _held(devices, leases)
    if tickets is not None:
        users: dict[str, list[float]] = {}
        for ticket in tickets:
            users.setdefault(ticket.user, []).append(ticket.waited)
        yield gauge(
            "anyaccel_queue_length", "", "Requests that wait.",
            (({"user": user}, len(waited)) for user, waited in users.items()),
        )  # fmt: skip
        yield gauge(
            "anyaccel_queue_wait_duration_seconds", "seconds", "How long the request has waited that waits longest.",
            (({"user": user}, max(waited)) for user, waited in users.items()),
        )  # fmt: skip


def _held(devices: Sequence[tuple[Device, Labels, Stats]], leases: Sequence[LeaseRecord]) -> Iterator[Family]:
    units: dict[tuple[str, str], tuple[int, int]] = {}
    for lease in leases:
        number, held = units.get((lease.device, lease.user), (0, 0))
        units[lease.device, lease.user] = number + 1, held + lease.units
    by_device = {device.id: labels for device, labels, _ in devices}
    known = [
        (by_device[device] | {"user": user}, found) for (device, user), found in units.items() if device in by_device
    ]
    yield Family(
        name="anyaccel_lease_active",
        kind="gauge",
        unit="",
        help="Leases of the device.",
        samples=tuple((labels, number) for labels, (number, _) in known),
    )
    yield Family(
        name="anyaccel_lease_fraction_ratio",
        kind="gauge",
        unit="ratio",
        help="How much of the device is held.",
        samples=tuple((labels, held / UNITS_PER_DEVICE) for labels, (_, held) in known),
    )


def _labels(device: Device) -> Labels:
    return {
        "hw_id": device.id,
        "hw_type": "gpu" if device.kind == "gpu" else "accelerator",
        "hw_vendor": device.vendor,
        "hw_name": device.name,
    }


def _about(device: Device) -> dict[str, str]:
    return {"hw_model": device.model or "", "type": device.type, "hw_parent": device.parent or ""}


def _used(device: Device, seen: Stats) -> float | None:
    if seen.memory_used_bytes is None or not device.memory_bytes:
        return None
    return seen.memory_used_bytes / device.memory_bytes


def _health(device: Device, seen: Stats) -> Health:
    return seen.health if device.health is Health.UNKNOWN else device.health


def render(families: Iterable[Family]) -> str:
    """Write metrics as OpenMetrics 1.0 text, which Prometheus and its node exporter's text-file collector read."""
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
    return str(int(value)) if value == int(value) else repr(float(value))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) >= 1 << 16:
        raise UsageError(f"--serve takes HOST:PORT or PORT, such as 127.0.0.1:9464 (got {text!r})")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


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
            if self.path.partition("?")[0] not in ("/", "/metrics"):
                self.send_error(404)
                return
            try:
                body = fresh()
            except anyaccel.AnyaccelError as error:
                self.send_error(500, printable(str(error))[:200])
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
        daemon_threads = True

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise UsageError(
            f"nothing can be served at {host}:{port}: {error.strerror or error}", hint="name another address"
        ) from error
    with server:
        shown = f"[{host}]" if ":" in host else host
        output.say(f"metrics are served at http://{shown}:{server.server_address[1]}/metrics")
        server.serve_forever()
    return 0
