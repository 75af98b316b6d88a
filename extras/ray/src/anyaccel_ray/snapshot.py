"""Snapshots: the inventory of a node, written by ``anyaccel ray start`` and read by processes that Ray starts there.

These processes cannot detect the devices themselves, because Ray may have written masks into their environment. The
file is named after its content, so that starting a node again with the same devices leaves one file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping

from anyaccel import detect
from anyaccel.errors import StateDirectoryError, UsageError
from anyaccel.model import Inventory, decode, encode
from anyaccel_cluster import without_durations

VARIABLE = "ANYACCEL_RAY_NODE"
SCHEMA = "anyaccel.ray-node/1"
_LARGEST = 64 << 20
_RAYS_OWN = re.compile(rb"RAY_|PYTHON|SPT_")
"""Prefixes of variables that Ray sets for its own processes."""


def write_snapshot(inventory: Inventory, environ: Mapping[str, str] | None = None) -> str:
    """Write the inventory of a node into the state directory, readable by its owner alone.

    Args:
        inventory: The inventory.
        environ: The environment that determines the state directory; None for that of this process.

    Returns:
        The file's path, for :data:`VARIABLE`.

    Raises:
        StateDirectoryError: When the state directory must not be used, or the file cannot be written.
    """
    from anyaccel.ledger import find

    state = find(os.environ if environ is None else environ)
    state.close(state.open(make=True))
    directory = state.path
    content = {"schema": SCHEMA, "inventory": encode(without_durations(inventory))}
    data = json.dumps(content, separators=(",", ":"), sort_keys=True).encode()
    path = os.path.join(directory, f"ray-{os.geteuid()}-{hashlib.sha256(data).hexdigest()[:16]}.json")
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix="ray-", suffix=".new", delete=False) as file:
            temporary = file.name
            file.write(data)
        os.replace(temporary, path)  # atomic: a process that starts now reads the old file or the new one
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        raise StateDirectoryError(
            f"the inventory of this node cannot be written to {path}: {error.strerror}",
            hint="make room or give the directory back to its owner, or set ANYACCEL_STATE_DIR to another one",
        ) from error
    return path


def read_snapshot(path: str) -> Inventory:
    """Read a file of :func:`write_snapshot`, if no other user could have written it.

    Raises:
        UsageError: When the file is missing or damaged, or another user could have written it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _refused(path, "must be a regular file")
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            raise _refused(path, "must be writable by you alone, and belong to you or to root")
        if found.st_size > _LARGEST:
            raise _refused(path, f"must have at most {_LARGEST} bytes (got {found.st_size})")
        data = file.read()
    try:
        content = json.loads(data)
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"the schema must be {SCHEMA}")  # noqa: TRY301 - all damage is reported in one place
        return decode(Inventory, content.get("inventory"), "inventory")
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"is damaged: {error}") from error


def _refused(path: str, reason: str) -> UsageError:
    return UsageError(
        f"the file {path!r} that {VARIABLE} names {reason}; start the node anew with 'anyaccel ray start'"
    )


@functools.cache
def started_with() -> Mapping[str, str]:
    """Return the environment at the start of this process, before Ray's masks."""
    return {os.fsdecode(name): os.fsdecode(value) for name, value in _started_with().items()}


@functools.cache
def _started_with() -> dict[bytes, bytes]:
    with open("/proc/self/environ", "rb") as file:
        pairs = [pair.partition(b"=") for pair in file.read().split(b"\0") if pair]
    return {name: value for name, _, value in pairs if name}


def restore_environ() -> None:
    """Undo Ray's changes of the environment for a call: masks, and the number of OpenMP threads."""
    # The private dict: reading each variable through os.environb takes longer than all the rest of a call.
    before, now = _started_with(), os.environb._data  # type: ignore[attr-defined]  # noqa: SLF001
    differing = [name for name, value in now.items() if before.get(name) != value]
    for name in differing:
        if name not in before and not _RAYS_OWN.match(name):
            del os.environb[name]
    for name in (*differing, *(before.keys() - now.keys())):
        if name in before:
            os.environb[name] = before[name]


@functools.cache
def node_inventory() -> Inventory:
    """Return the inventory of this node: the snapshot of ``anyaccel ray start``, or what is detected now.

    Raises:
        AnyaccelError: When there is neither.
    """
    environ = started_with()
    path = environ.get(VARIABLE)
    return read_snapshot(path) if path else detect(environ=environ)
