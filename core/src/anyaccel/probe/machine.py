"""Names of machines: this host, a recording, or a simulated machine."""

from __future__ import annotations

import os
from collections.abc import Mapping

from anyaccel.errors import MachineError
from anyaccel.model import Value
from anyaccel.probe import HOST, MACHINE_VARIABLE
from anyaccel.text import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.probe.context import Facts

SIMULATION = "sim:"
MOST_SIMULATED = 65_536


class Simulated(Value):
    """Simulated devices of one product.

    Attributes:
        product: Name or alias of the product; ``PRODUCT/PART`` for divided devices.
        count: Number of devices.
    """

    product: str
    count: int = 1


class Machine(Value):
    """A machine by its name for ``--machine``.

    Attributes:
        text: ``host``, ``sim:PRODUCT[:COUNT],...`` or the directory of a recording.
        recording: Path of the recording's file, or None.
        products: Simulated products, in order; empty for a real machine.
    """

    text: str = HOST
    recording: str | None = None
    products: tuple[Simulated, ...] = ()

    @property
    def simulated(self) -> bool:
        """Whether the machine is simulated."""
        return bool(self.products)

    def facts(self, environ: Mapping[str, str]) -> Facts:
        """Return the facts of the machine: of the recording with its recorded environment, or of this host.

        Raises:
            MachineError: When the recording cannot be read.
        """
        if self.recording is None:
            from anyaccel.probe.host import HostFacts

            return HostFacts(environ)
        from anyaccel.probe.recording import RecordedFacts, load

        return RecordedFacts(load(self.recording))


def parse_machine(machine: str | Machine | None = None, environ: Mapping[str, str] | None = None) -> Machine:
    """Parse the name of a machine.

    Args:
        machine: ``host``, ``sim:H100:8,TPU-V4:4``, or a directory of ``anyaccel record``; when None, the value of
            ``ANYACCEL_MACHINE``, or the host. A :class:`Machine` is returned unchanged.
        environ: The environment; the environment of this process when None.

    Raises:
        MachineError: When no machine has this name, or the recording is damaged.
    """
    if isinstance(machine, Machine):
        return machine
    given: object = machine  # callers without a type checker may pass any value
    if not isinstance(given, str | None):
        raise MachineError(f"a machine must be text such as 'host' or 'sim:H100:8' (got {shown(given)})")
    text = machine or (os.environ if environ is None else environ).get(MACHINE_VARIABLE) or HOST
    if text == HOST:
        return Machine()
    if text.startswith(SIMULATION):
        items = text[len(SIMULATION) :].split(",")
        return Machine(text=text, products=tuple(_parse_product(item, text) for item in items))
    from anyaccel.probe.recording import FILE_NAME, load

    path = os.path.join(text, FILE_NAME) if os.path.isdir(text) else text
    if not os.path.lexists(path):
        raise MachineError(
            f"there is no machine {shown(text)}: it must be 'host', 'sim:PRODUCT:COUNT,...' or a directory with"
            f" a {FILE_NAME} as 'anyaccel record DIR' writes it"
        )
    load(path)  # here, so that a damaged recording is an error of the caller, not of every vendor
    return Machine(text=os.path.abspath(text), recording=os.path.abspath(path))


def _parse_product(item: str, text: str) -> Simulated:
    name, colon, count = item.strip().partition(":")
    # str.isdigit() accepts "²", for which int() raises.
    number = int(count) if count.isascii() and count.isdigit() and len(count) <= len(str(MOST_SIMULATED)) else 0
    if not name or (colon and not 1 <= number <= MOST_SIMULATED):
        raise MachineError(
            f"a simulated machine is 'sim:PRODUCT:COUNT,...' with counts from 1 to {MOST_SIMULATED}"
            f" (got {item!r} in {text!r}), for example sim:ACME-1:8"
        )
    return Simulated(product=name, count=number if colon else 1)
