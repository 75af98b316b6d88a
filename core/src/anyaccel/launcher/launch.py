"""From a request to everything that a launch needs: devices chosen, environment made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from anyaccel.errors import UsageError
from anyaccel.inventory.detect import detect
from anyaccel.launcher.bind import Bind
from anyaccel.launcher.environment import WorkerEnvironment, worker_environment
from anyaccel.model import Device, Inventory, Request, Term, Value
from anyaccel.probe.machine import Machine
from anyaccel.scheduler import Choice, Fleet, Scheduler, parse_request
from anyaccel.text import shown
from anyaccel.vendors import DEADLINE_SECONDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from anyaccel.policy import Policy

T = TypeVar("T")


class Launch(Value):
    """Everything that a launch needs.

    Attributes:
        inventory: What was found on the machine.
        environment: The environment of the worker; its allocation says what it holds.
    """

    inventory: Inventory
    environment: WorkerEnvironment


def prepare(
    request: str | Sequence[str] | Request,
    *,
    inventory: Inventory | None = None,
    machine: str | Machine | None = None,
    declare: Mapping[str, int] | None = None,
    environ: Mapping[str, str] | None = None,
    unallocated: Literal["hide", "inherit"] = "hide",
    mask: Literal["id", "index"] = "id",
    cap: bool = False,
    bind: Bind = False,
    timeout: float = DEADLINE_SECONDS,
) -> Launch:
    """Choose devices for a request and make the environment of its worker.

    Args:
        request: What the worker needs.
        inventory: The machine's inventory; detected when None, and then the next three count.
        machine: The machine; see :func:`anyaccel.detect`.
        declare: Devices to count by resource name; see :func:`anyaccel.declare`.
        timeout: Seconds that each vendor's detection may take.
        environ: The environment to start from; that of this process when None.
        unallocated: Whether vendors of which nothing was asked for are hidden, or left as they are.
        mask: Whether masks name devices by stable id or by index, where the vendor's runtime takes both.
        cap: Whether PyTorch and TensorFlow are capped at the worker's share of memory as well; see
            :func:`worker_environment`.
        bind: Whether the allocation says on which processors the worker should run; see :func:`worker_environment`.

    Raises:
        RequestError, UnknownNameError: When the request is wrong.
        NeverFitsError, NotFreeError: When it cannot be served.
        EnvConflictError, PluginError: When the environment cannot be made.

    Examples:
        >>> launch = anyaccel.prepare("GPU:1", machine="sim:H100:2", mask="index")
        >>> launch.environment.allocation.devices[0].index
        0
        >>> launch.environment.set["ANYACCEL_DEVICES"] == launch.inventory.devices[0].id
        True
    """
    wanted = parse_request(request)
    inventory = survey(inventory, request=wanted, machine=machine, declare=declare, environ=environ, timeout=timeout)
    allocation = local_scheduler(inventory).allocate(wanted)
    environment = worker_environment(
        allocation, inventory, environ=environ, unallocated=unallocated, mask=mask, cap=cap, bind=bind
    )
    return Launch(inventory=inventory, environment=environment)


def survey(
    inventory: Inventory | None = None,
    *,
    machine: str | Machine | None = None,
    declare: Mapping[str, int] | None = None,
    environ: Mapping[str, str] | None = None,
    timeout: float = DEADLINE_SECONDS,
    request: Request | None = None,
) -> Inventory:
    """The inventory that somebody gave, or that of the machine that they named, for a request if there is one."""
    if inventory is not None:
        return inventory
    return detect(machine, declare=declare, environ=environ, timeout=timeout, request=request)


@overload
def open_scheduler(
    inventory: Inventory,
    *,
    shared: bool = False,
    environ: Mapping[str, str] | None = None,
    policy: Policy | None = None,
) -> Scheduler: ...


@overload
def open_scheduler(inventory: Mapping[str, Inventory], *, policy: Policy | None = None) -> Fleet: ...


def open_scheduler(
    inventory: Inventory | Mapping[str, Inventory],
    *,
    shared: bool = False,
    environ: Mapping[str, str] | None = None,
    policy: Policy | None = None,
) -> Scheduler | Fleet:
    """Make a scheduler that keeps the rules of the vendors' plug-ins.

    Args:
        inventory: The machine; or several machines by name, whose allocations say the machine.
        shared: Whether it takes part in what all processes of the machine do: what others hold counts, and what it
            gives is a lease that others see, which ends when it is released, or when this process and all that it has
            started since the first one have ended. Who waits has a place in the machine's line, among all who want
            the same devices, and only the machine's configuration says who may pass. Its calls raise a
            :class:`~anyaccel.errors.NeverFitsError` where the configuration does not give this user so much, and a
            :class:`~anyaccel.errors.LedgerError` where leases cannot be kept. Else it is for this process alone, and
            nobody else knows of it.
        environ: Our environment, in which ``ANYACCEL_STATE_DIR`` names the leases' directory; that of this process when
            None.
        policy: The order of service, limits of users, and which requests may pass others: an
            :class:`anyaccel.policy.Policy`. None for priority and arrival alone; then no request is known to end.

    Raises:
        StateDirectoryError: When it is to be shared, and there is no directory for leases that can be trusted.
        UsageError: When it is no inventory; when several machines are to be shared: leases are those of one machine; or
            when a shared scheduler is to have a policy: the machine's configuration has it.

    Examples:
        >>> scheduler = anyaccel.open_scheduler(anyaccel.detect("sim:H100:2"))
        >>> half = scheduler.allocate("GPU:0.5")
        >>> scheduler.why("GPU:2").fits_now
        False
        >>> scheduler.release(half)
        >>> len(scheduler.allocate("GPU:2").devices)
        2
    """
    if not isinstance(inventory, Inventory):
        given: object = inventory  # what callers without a type checker may pass
        if not isinstance(given, Mapping) or not all(isinstance(each, Inventory) for each in given.values()):
            raise UsageError(
                f"inventory must be what anyaccel.detect() returns, or a mapping of such by name (got {shown(given)})"
            )
        if shared:
            raise UsageError("a scheduler of several machines cannot be shared: leases are those of one machine")
        return Fleet(inventory, validate=validate, known=KnownNames(), policy=policy)
    if not shared:
        return Scheduler(inventory, validate=validate, known=KnownNames(), policy=policy)
    if policy is not None:
        from anyaccel.configuration import MACHINE_FILE

        raise UsageError(
            "policy cannot be given for shared leases: the machine's configuration is the policy of all programs",
            hint=f"set it in {MACHINE_FILE}",
        )
    from anyaccel.launcher.shared import SharedScheduler

    return SharedScheduler(inventory, environ)


def local_scheduler(inventory: Inventory) -> Scheduler:
    """Make a scheduler for this process alone that keeps the rules of the vendors' plug-ins."""
    return Scheduler(inventory, validate=validate, known=KnownNames())


def validate(term: Term, devices: Sequence[Device]) -> str | None:
    """Ask the devices' vendor whether its hardware can serve a term with exactly these devices."""
    if devices[0].declared:
        return None
    from anyaccel.vendors.process import vendor_process

    return vendor_process(devices[0].vendor).validate(term, devices)


def choice_of(inventory: Inventory, request: Request) -> Choice:
    """What chooses devices for a request by the rules of the vendors' plug-ins; see :func:`remembered`.

    Raises:
        UnknownNameError: When nothing goes by one of the names.
    """
    return remembered(inventory, request, lambda: Choice(inventory, request, validate, KnownNames()))


def remembered(inventory: Inventory, key: object, make: Callable[[], T]) -> T:
    """What was made of an inventory and does not change: who takes devices mostly takes more of the same machine's.

    Args:
        inventory: The machine; that which was asked about last is remembered.
        key: What it is.
        make: Makes it.
    """
    global _last  # noqa: PLW0603 - there is no lock: what is lost is made again
    if _last[0] is not inventory:
        _last = inventory, {}
    known = _last[1]
    found: T | None = known.get(key)
    if found is None:
        found = make()
        if len(known) >= _MOST_REMEMBERED:
            known.clear()
        known[key] = found
    return found


_MOST_REMEMBERED = 64
_last: tuple[Inventory | None, dict[object, Any]] = (None, {})


class KnownNames:
    """Names that installed plug-ins know beside those of the machine; asked for only once somebody iterates."""

    def __iter__(self) -> Iterator[str]:
        from anyaccel.vendors.process import known

        for each in known()[0]:
            yield from (each.info.vendor, each.info.resource)
            for product in each.products:
                yield from (product.name, *product.aliases)
