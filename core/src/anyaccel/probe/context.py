"""The gate through which a plug-in sees the machine.

Every fact passes through the context. So any machine can be recorded and replayed, for a plug-in that uses its context
alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence

from anyaccel.errors import QueryError
from anyaccel.model import PCI_ADDRESS, PCI_DEVICES, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    Json = Any
else:
    Json = Protocol = object
"""Plain data: None, bool, int, float, str, and lists and string-keyed dicts of these."""


class DeviceNode(Value):
    """A character or block device node.

    Attributes:
        path: Path of the node.
        major: Major number.
        minor: Minor number.
        readable: Whether this user may open the node for reading.
        writable: Whether this user may open the node for writing.
        group: Number of the owning group; None when unknown, as in older recordings.
    """

    path: str
    major: int
    minor: int
    readable: bool = True
    writable: bool = True
    group: int | None = None


class PciFunction(Value):
    """A PCI function as sysfs shows it.

    Attributes:
        address: ``dddd:bb:dd.f`` in lower case; a domain has up to 8 digits.
        vendor: Vendor id.
        device: Device id.
        class_code: Base class and subclass, 16 bits: 0x0302 for a 3D controller.
        subsystem_vendor: Subsystem vendor id, or None.
        subsystem_device: Subsystem id, or None.
        driver: Name of the bound kernel driver, or None.
        numa_node: NUMA node, or None when the firmware names none.
        iommu_group: Number of the IOMMU group, or None.
        bridges: Addresses of the bridges above the function, root port first.
    """

    address: str
    vendor: int
    device: int
    class_code: int
    subsystem_vendor: int | None = None
    subsystem_device: int | None = None
    driver: str | None = None
    numa_node: int | None = None
    iommu_group: str | None = None
    bridges: tuple[str, ...] = ()


class CommandResult(Value):
    """The result of a command.

    Attributes:
        returncode: Exit status; the negative number of a signal that ended the command.
        stdout: Standard output as text.
        stderr: Standard error as text.
    """

    returncode: int
    stdout: str
    stderr: str = ""


class Facts(Protocol):
    """A source of facts: this host, or a recording. Paths are absolute, as the machine's own kernel names them.

    The methods are those of :class:`ProbeContext`.
    """

    @property
    def environ(self) -> Mapping[str, str]: ...
    def read(self, path: str) -> str | None: ...
    def glob(self, pattern: str) -> list[str]: ...
    def readlink(self, path: str) -> str | None: ...
    def is_dir(self, path: str) -> bool: ...
    def exists(self, path: str) -> bool: ...
    def node(self, path: str) -> DeviceNode | None: ...
    def run(self, argv: Sequence[str], timeout: float) -> CommandResult | None: ...
    def write(self, path: str, text: str) -> None: ...
    def query(self, name: str, fn: Callable[[], Json]) -> Json: ...


class ProbeContext:
    """A plug-in's view of one machine.

    Attributes:
        environ: The environment of the detection. Plug-ins must not read ``os.environ``.
        deadline: Deadline of the hook, by ``time.monotonic()``.
    """

    def __init__(self, facts: Facts, deadline: float) -> None:
        self._facts = facts
        self._functions: dict[object, list[PciFunction]] = {}
        self.environ = facts.environ
        self.deadline = deadline

    @property
    def root(self) -> str:
        """Directory in place of ``/``; empty for a recording without a directory."""
        return getattr(self._facts, "root", "")

    def remaining(self) -> float:
        """Return the seconds until the deadline, never negative."""
        return max(0.0, self.deadline - time.monotonic())

    def read(self, path: str) -> str | None:
        """Read a file, at most 1 MiB.

        Returns:
            The text, with undecodable bytes replaced; None without such a file.

        Raises:
            OSError: When the file exists and cannot be read.
        """
        return self._facts.read(path)

    def read_int(self, path: str) -> int | None:
        """Read a file with one number, decimal or ``0x`` hexadecimal; None without the file, or without a number.

        Raises:
            OSError: When the file exists and cannot be read.
        """
        text = self.read(path)
        try:
            return int(text.strip(), 0) if text is not None else None
        except ValueError:
            return None

    def glob(self, pattern: str) -> list[str]:
        """Return the paths that match a shell pattern, in numeric order: ``/dev/x2`` before ``/dev/x10``."""
        return self._facts.glob(pattern)

    def readlink(self, path: str) -> str | None:
        """Return the target of a symbolic link, as written; None without such a link."""
        return self._facts.readlink(path)

    def exists(self, path: str) -> bool:
        """Return whether a path exists."""
        return self._facts.exists(path)

    def is_dir(self, path: str) -> bool:
        """Return whether a path is a directory."""
        return self._facts.is_dir(path)

    def node(self, path: str) -> DeviceNode | None:
        """Return a device node; None where the path is no device node."""
        return self._facts.node(path)

    def run(self, argv: Sequence[str], timeout: float | None = None) -> CommandResult | None:
        """Run a vendor's tool, without a shell and without input.

        Args:
            argv: The command; a name without a slash is looked up in the ``PATH`` of :attr:`environ`.
            timeout: Time limit in seconds, at most until the deadline.

        Returns:
            The result, or None when the command does not exist.

        Raises:
            CommandTimeoutError: When the command exceeded its time limit and was killed.
            OSError: When the command exists and cannot be run.
        """
        left = self.remaining()
        return self._facts.run(argv, left if timeout is None else min(timeout, left))

    def write(self, path: str, text: str) -> None:
        """Replace the content of an existing file of this host, such as a setting of the driver in sysfs.

        For ``anyaccel_handover`` alone.

        Raises:
            OSError: When the file is missing or cannot be written, or on a recording.
        """
        self._facts.write(path, text)

    def query(self, name: str, fn: Callable[[], Json]) -> Json:
        """Call a function of a vendor's library; a recording replays the result by name, without a call.

        Args:
            name: Name of the query, unique for the vendor; it should begin with the library's name.
            fn: Calls the library and returns plain JSON data.

        Returns:
            The result of ``fn``, from now or from the recording.

        Raises:
            QueryError: When ``fn`` raised; ``kind`` is the name of the exception's class.
        """
        return self._facts.query(name, fn)

    def pci(self, vendor: int | None = None, classes: Sequence[int] = ()) -> list[PciFunction]:
        """Return PCI functions in the order of their addresses, read once: a call of a hook sees one state of the bus.

        Args:
            vendor: Vendor id; None for any.
            classes: Accepted base classes with subclass (16 bits); empty for any.

        Raises:
            OSError: When sysfs lists a function whose files cannot be read.
            ValueError: When the device id of a function is no number.
        """
        asked = vendor, tuple(classes)
        if asked not in self._functions:
            self._functions[asked] = self._find_functions(vendor, classes)
        return list(self._functions[asked])

    def _find_functions(self, vendor: int | None, classes: Sequence[int]) -> list[PciFunction]:
        found = []
        for path in self.glob(f"{PCI_DEVICES}/*"):
            # The vendor first: the other files of a function are read, and recorded, only where it may matter.
            vendor_id = self.read_int(f"{path}/vendor")
            if vendor_id is None or (vendor is not None and vendor_id != vendor):
                continue
            class_code = (self.read_int(f"{path}/class") or 0) >> 8  # without the programming interface
            if not classes or class_code in classes:
                found.append(self._pci_function(path, vendor_id, class_code))
        # Addresses are hexadecimal: 09 comes before 0a, which the numeric order of paths would not say.
        return sorted(found, key=lambda function: [int(part, 16) for part in re.split("[:.]", function.address)])

    def _pci_function(self, path: str, vendor: int, class_code: int) -> PciFunction:
        address = path.rpartition("/")[2].lower()
        numa_node = self.read_int(f"{path}/numa_node")
        # The link leads through the bridges: ../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0
        above = (self.readlink(path) or "").split("/")[:-1]
        return PciFunction(
            address=address,
            vendor=vendor,
            device=self._pci_id(f"{path}/device"),
            class_code=class_code,
            subsystem_vendor=self.read_int(f"{path}/subsystem_vendor"),
            subsystem_device=self.read_int(f"{path}/subsystem_device"),
            driver=_name(self.readlink(f"{path}/driver")),
            numa_node=numa_node if numa_node is not None and numa_node >= 0 else None,  # -1: not known to the firmware
            iommu_group=_name(self.readlink(f"{path}/iommu_group")),
            bridges=tuple(each for each in above if re.fullmatch(PCI_ADDRESS, each)),
        )

    def _pci_id(self, path: str) -> int:
        """Read the device id of a PCI function; without it, the function cannot be identified."""
        number = self.read_int(path)
        if number is None:
            raise ValueError(f"{path} must hold a PCI id such as 0x1234 (got {self.read(path)!r})")
        return number


def _name(link: str | None) -> str | None:
    return link.rpartition("/")[2] if link else None


def ask(fn: Callable[[], Json]) -> Json:
    """Call the function of a query; every exception becomes a :class:`~anyaccel.errors.QueryError`."""
    try:
        return fn()
    except Exception as error:
        value = getattr(error, "value", None)  # bindings of C libraries keep the error code there
        raise QueryError(type(error).__name__, str(error), value if isinstance(value, int) else None) from error
