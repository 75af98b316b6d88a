"""Configuration: the machine's file and the user's file, both in TOML.

The machine's file applies to every user, so it must belong to root. No variable and no argument of a command selects
another file. The table of settings is in :mod:`anyaccel.settings`, which is loaded if there is a file.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Mapping
from functools import cache

from anyaccel.errors import ConfigurationError
from anyaccel.model import Value, field
from anyaccel.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MACHINE_FILE = "/etc/anyaccel/config.toml"
"""The machine's file. Tests mount a directory of their own there, in a private mount namespace."""
_MOST_BYTES = 1 << 20


DEFAULTS: Mapping[str, Any] = {
    "queue.backfill": 0.0,
    "queue.fair_shares": False,
    "queue.patience": 86400.0,
    "journal.keep": True,
    "journal.sample_every": 60.0,
}
"""Values of settings without an entry in the file, by key; None for other settings."""


class Configuration(Value):
    """Content of one file.

    Attributes:
        path: The file.
        found: Whether the file exists.
        values: The settings in the file, by key.
    """

    path: str
    found: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """Return the value of a setting from the file, else from :data:`DEFAULTS`; None for a setting without default.

        Args:
            key: Key of the setting, with a name in place of ``*``.
        """
        return self.values.get(key, DEFAULTS.get(key))

    def names(self, table: str) -> tuple[str, ...]:
        """Return the names that have settings in a table, such as the users in ``users``, in the order of the file."""
        # Up to the last dot, since the name of a user may have dots.
        within = (key.removeprefix(f"{table}.") for key in self.values if key.startswith(f"{table}."))
        return tuple(dict.fromkeys(key.rpartition(".")[0] for key in within))


def machine(path: str = MACHINE_FILE) -> Configuration:
    """Read the machine's configuration; the result is remembered until the file changes.

    Args:
        path: The file; only tests pass another file.

    Returns:
        The configuration; empty if there is no file.

    Raises:
        ConfigurationError: When the file cannot be read, has a wrong entry, or can be written by other users than root.
    """
    return _read(path, "machine", {0})


def user(environ: Mapping[str, str] | None = None) -> Configuration:
    """Read the configuration of the user; the result is remembered until the file changes.

    Args:
        environ: The environment, whose ``XDG_CONFIG_HOME`` or ``HOME`` says where the file is; the environment of this
            process when None.

    Returns:
        The configuration; empty if there is no file.

    Raises:
        ConfigurationError: When the file cannot be read, has a wrong entry, or belongs to neither the user nor root.
    """
    path = user_file(environ)
    return _read(path, "user", {0, os.geteuid()}) if path else _nothing(path)


def find_reader(path: str) -> tuple[str, Callable[[], Configuration]]:
    """Return the kind of a configuration file, ``machine`` or ``user``, and the function that reads the file.

    A file in its place is read like :func:`machine` or :func:`user`. Elsewhere the tables decide, and a file without a
    known table counts as the machine's; any user may own such a file, but no other user may write to it.

    Args:
        path: The file.
    """
    import tomllib

    from anyaccel.settings import settings_of

    for kind, place, read in (("machine", MACHINE_FILE, machine), ("user", user_file(), user)):
        if place and os.path.realpath(path) == os.path.realpath(place):
            return kind, read
    tables: set[str] = set()
    if os.path.isfile(path):
        with contextlib.suppress(OSError, ValueError, RecursionError), open(path, "rb") as file:  # reading reports it
            tables = set(tomllib.loads(file.read(_MOST_BYTES).decode()))
    of_machine, of_user = ({each.key.partition(".")[0] for each in settings_of(kind)} for kind in ("machine", "user"))
    kind = "user" if tables & of_user and not tables & of_machine else "machine"
    return kind, lambda: _read(path, kind, None)


def user_file(environ: Mapping[str, str] | None = None) -> str:
    """Return the path of the user's configuration, existing or not; empty without a home directory."""
    directory = user_directory("XDG_CONFIG_HOME", ".config", environ)
    return f"{directory}/config.toml" if directory else ""


def user_directory(variable: str, usual: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the user's directory for one kind of files, after the XDG Base Directory Specification.

    Args:
        variable: Variable with the parent, such as ``XDG_STATE_HOME``; a relative path in it is ignored.
        usual: Default parent below the home directory, such as ``.local/state``.
        environ: The environment; that of this process when None.

    Returns:
        Absolute path of our directory there; empty without a home directory.
    """
    found = os.environ if environ is None else environ
    home = found.get(variable, "")
    if not home.startswith("/"):  # as the specification demands
        home = f"{found['HOME']}/{usual}" if found.get("HOME", "").startswith("/") else ""
    return f"{home}/anyaccel" if home else ""


def _read(path: str, kind: str, owners: set[int] | None) -> Configuration:
    """Check and parse a file, or return the result of the last call if the file has not changed.

    Args:
        path: The file; a missing file gives an empty configuration.
        kind: Kind of the file, ``machine`` or ``user``.
        owners: Users who may own the file, beside the owner of ``/``; None for any user.

    Raises:
        ConfigurationError: When the file cannot be read or trusted, is over 1 MiB, or has a wrong entry.
    """
    try:
        os.stat(path)  # mostly there is no file, and stat works without free descriptors
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
        try:
            found = os.fstat(descriptor)
            if owners is None:
                _trust(path, "user", found, {found.st_uid})
            else:
                # In a user namespace where root has no number, root's files seem to belong to an unmapped number.
                _trust(path, kind, found, {*owners, os.stat("/").st_uid})
            # With ctime: mtime can be set back, and an editor may keep the inode.
            identity = found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
            known = _KNOWN.get(path)
            if known is not None and known[0] == identity:
                return known[1]
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(_MOST_BYTES + 1)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        return _nothing(path)
    except OSError as error:
        raise ConfigurationError(
            f"{printable(path)!r} cannot be read: {error.strerror}", hint="let its owner make it readable for all"
        ) from error
    if len(content) > _MOST_BYTES:
        raise ConfigurationError(f"{printable(path)!r} must be at most 1 MiB", hint="is it the right file?")
    from anyaccel.settings import read_values  # most users have no file

    values = read_values(printable(path), kind, content, MACHINE_FILE)
    made = Configuration(path=path, found=True, values=values)
    _KNOWN[path] = identity, made
    return made


@cache
def _nothing(path: str) -> Configuration:
    """Return the configuration of a missing file."""
    return Configuration(path=path)


_KNOWN: dict[str, tuple[tuple[int, ...], Configuration]] = {}
"""Configurations by path, with the identity of the file: a waiting process reads the policy at each look."""


def _trust(path: str, kind: str, found: os.stat_result, owners: set[int]) -> None:
    """Check that a file is regular, belongs to one of ``owners``, and cannot be written by other users.

    The user's own private group, and root's group, may write.

    Raises:
        ConfigurationError: When the file fails a check; the hint is the command that mends it.
    """
    whose = "root" if kind == "machine" else "the user or root"
    if not stat.S_ISREG(found.st_mode):
        raise ConfigurationError(f"{printable(path)!r} must be a regular file", hint="remove what has its name")
    if found.st_uid not in owners:
        raise ConfigurationError(
            f"{printable(path)!r} must belong to {whose} (it belongs to user {found.st_uid})",
            hint=f"look at what it says, then: sudo chown {0 if kind == 'machine' else os.geteuid()} {printable(path)}",
        )
    private = kind == "user" and found.st_gid == found.st_uid  # many systems give each user a private group
    wrong = stat.S_IWOTH | (0 if private or found.st_gid == 0 else stat.S_IWGRP)
    if found.st_mode & wrong:
        raise ConfigurationError(
            f"{printable(path)!r} must be writable by {whose} only (its mode is {stat.S_IMODE(found.st_mode):04o})",
            hint=f"{'sudo ' * (kind == 'machine')}chmod go-w {printable(path)}",
        )
