"""The queue policy of this machine, from its configuration; loaded if there is one."""

from __future__ import annotations

from collections.abc import Iterable

from anyaccel.configuration import Configuration
from anyaccel.linux.users import find_groups
from anyaccel.policy import NO_LIMITS, Limits, Policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def read_policy(configuration: Configuration) -> Policy:
    """Read the policy from a machine's configuration.

    Entries of unknown users and groups are left out. The default patience counts only beside fair shares, limits, or an
    entry of a known user or group; a patience in the file always counts. Blocks and past usage are not part of the
    configuration.
    """
    groups = {
        name: _limits(configuration, f"groups.{name}")
        for name in configuration.names("groups")
        if find_group(name) is not None
    }
    members = _GroupNames(groups)
    users = {
        number: _limits(configuration, f"users.{name}", f"groups.{members.get(number, '')}")
        for name in configuration.names("users")
        if (number := find_user(name)) is not None
    }
    limits = _limits(configuration, "limits")
    fair = configuration.get("queue.fair_shares")
    # Without another rule the order is by priority and arrival, and patience would only cost its computation.
    changed = fair or users or groups or limits != NO_LIMITS or "queue.patience" in configuration.values
    return Policy(
        backfill=configuration.get("queue.backfill"),
        fair_shares=fair,
        half_life=configuration.get("queue.half_life"),
        patience=configuration.get("queue.patience") if changed else None,
        limits=limits,
        users=users,
        groups=groups,
        members=members if groups else {},
    )


def _limits(configuration: Configuration, table: str, *further: str) -> Limits:
    """Read each limit from a table of the machine's configuration, else from ``further``, else from ``[limits]``.

    Weight, 1 by default, and total are only read from the first table.
    """
    values = configuration.values

    def value(name: str) -> Any:
        keys = (f"{each}.{name}" for each in (table, *further, "limits"))
        return next((values[key] for key in keys if key in values), None)

    return Limits(
        devices=value("devices"),
        seconds=value("time"),
        priority=value("priority"),
        weight=values.get(f"{table}.weight", 1),
        total=values.get(f"{table}.total_devices"),
    )


class _GroupNames(dict[int, str]):
    """Names of groups by user: the first group of the configuration with the user; looked up once for each user.

    Args:
        groups: Names of the groups, in the order of the configuration.
    """

    def __init__(self, groups: Iterable[str]) -> None:
        super().__init__()
        self._numbers = {find_group(name): name for name in groups}

    def get(self, key: int, default: Any = None) -> Any:
        """Return the name of the group that counts for a user, remembered from the first call; ``default`` for none."""
        if key not in self:
            own = find_groups(key) if self._numbers else ()
            self[key] = next((name for number, name in self._numbers.items() if number in own), "")
        return self[key] or default


def find_user(name: str) -> int | None:
    """Return the number of a user, by name or number; None for an unknown name. A number need not be in use."""
    import pwd

    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):  # ValueError for a name with a NUL
        return None


def find_group(name: str) -> int | None:
    """Return the number of a group, by name or number; None for an unknown name. A number need not be in use."""
    import grp

    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):
        return None


def unknown_names(configuration: Configuration) -> tuple[str, ...]:
    """Return the tables of a configuration without effect, such as ``users.ada``: no user or group has the name.

    A decimal number counts as known, even if no user has it.
    """
    return tuple(
        f"{table}.{name}"
        for table, find in (("users", find_user), ("groups", find_group))
        for name in configuration.names(table)
        if find(name) is None
    )
