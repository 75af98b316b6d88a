"""Where facts come from: this host, a recording of a machine, or a simulated one."""

from __future__ import annotations

import os
from collections.abc import Mapping

from anyaccel.errors import MachineError
from anyaccel.model import Value
from anyaccel.probe import HOST, MACHINE_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.probe.context import Facts

SIMULATION = "sim:"
MOST_SIMULATED = 65_536


class Simulated(Value):
    """Some devices of one product.

    Attributes:
        product: Name or alias of the product; ``PRODUCT/PART`` for the parts of devices that are divided.
        count: Number of devices.
    """

    product: str
    count: int = 1


class Machine(Value):
    """A machine, as ``--machine`` names it.

    Attributes:
        text: ``host``, ``sim:PRODUCT[:COUNT],...`` or the directory of a recording.
        recording: Path of the recording's file, or None.
        products: Simulated products, in order; empty when nothing is simulated.
    """

    text: str = HOST
    recording: str | None = None
    products: tuple[Simulated, ...] = ()

    @property
    def simulated(self) -> bool:
        """Whether the machine's devices are made up."""
        return bool(self.products)

    def facts(self, environ: Mapping[str, str]) -> Facts:
        """What shows the machine: its recording, with the environment that was recorded, or this host with ours.

        Raises:
            MachineError: When the recording cannot be read.
        """
        if self.recording is None:
            from anyaccel.probe.host import HostFacts

            return HostFacts(environ)
        from anyaccel.probe.loading import load
        from anyaccel.probe.recording import RecordedFacts

        return RecordedFacts(load(self.recording))


def parse_machine(machine: str | Machine | None = None, environ: Mapping[str, str] | None = None) -> Machine:
    """Understand the name of a machine.

    Args:
        machine: ``host``, ``sim:H100:8,TPU-V4:4``, or a directory that ``anyaccel record`` wrote; when None, what the
            variable ``ANYACCEL_MACHINE`` says, or the host. A machine is returned as it is.
        environ: The environment; that of this process when None.

    Raises:
        MachineError: When it names no machine, or a recording that is damaged.
    """
    if isinstance(machine, Machine):
        return machine
    text = machine or (os.environ if environ is None else environ).get(MACHINE_VARIABLE) or HOST
    if text == HOST:
        return Machine()
    if text.startswith(SIMULATION):
        items = text[len(SIMULATION) :].split(",")
        return Machine(text=text, products=tuple(_parse_product(item, text) for item in items))
    from anyaccel.probe.loading import FILE_NAME, load

    path = os.path.join(text, FILE_NAME) if os.path.isdir(text) else text
    if not os.path.lexists(path):
        raise MachineError(
            f"there is no machine {text!r}: it must be 'host', 'sim:PRODUCT:COUNT,...' or a directory with"
            f" a {FILE_NAME} as 'anyaccel record DIR' writes it"
        )
    load(path)  # a damaged recording is the caller's mistake, not every vendor's
    return Machine(text=os.path.abspath(text), recording=os.path.abspath(path))


def _parse_product(item: str, text: str) -> Simulated:
    name, colon, count = item.strip().partition(":")
    number = int(count) if count.isascii() and count.isdigit() and len(count) <= len(str(MOST_SIMULATED)) else 0
    if not name or (colon and not 1 <= number <= MOST_SIMULATED):
        raise MachineError(
            f"a simulated machine is 'sim:PRODUCT:COUNT,...' with counts from 1 to {MOST_SIMULATED}"
            f" (got {item!r} in {text!r}), for example sim:ACME-1:8"
        )
    return Simulated(product=name, count=number if colon else 1)
