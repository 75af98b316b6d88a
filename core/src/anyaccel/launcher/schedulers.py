"""Schedulers that keep the rules of the vendors' plug-ins, for this process alone or with the machine's leases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import overload

from anyaccel.errors import UsageError
from anyaccel.launcher.choosing import KnownNames, validate
from anyaccel.model import Inventory
from anyaccel.scheduler import Fleet, Scheduler
from anyaccel.text import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.policy import Policy


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
