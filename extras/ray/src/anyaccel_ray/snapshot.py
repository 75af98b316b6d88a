"""What is on a node: found and kept by ``anyaccel ray start``, and read by the processes that Ray starts there.

Ray's workers cannot detect it anew: by then Ray may have written masks of its own into their environment. The file is
named after its content, so that a node that is started again with the same devices leaves one file, not many.
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
from anyaccel.engines.remote import without_durations
from anyaccel.errors import StateDirectoryError, UsageError
from anyaccel.model import Inventory, decode, encode

VARIABLE = "ANYACCEL_RAY_NODE"
SCHEMA = "anyaccel.ray-node/1"
_LARGEST = 64 << 20
_RAYS_OWN = re.compile(rb"RAY_|PYTHON|SPT_")
"""What Ray adds to the environment of its processes for themselves."""


def write_snapshot(inventory: Inventory, environ: Mapping[str, str] | None = None) -> str:
    """Keep the inventory of a node in the state directory, readable for its owner alone.

    Args:
        inventory: What is on the node.
        environ: The environment that leads to the state directory; that of this process when None.

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
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        raise StateDirectoryError(
            f"what is on this node cannot be kept in {path}: {error.strerror}",
            hint="make room or give the directory back to its owner, or set ANYACCEL_STATE_DIR to another one",
        ) from error
    return path


def read_snapshot(path: str) -> Inventory:
    """Read what :func:`write_snapshot` wrote, and trust nothing that another user could have written.

    Raises:
        UsageError: When the file is missing, could be somebody else's work, or is damaged.
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
            raise _refused(path, "must be writable for nobody but you, and belong to you or to root")
        if found.st_size > _LARGEST:
            raise _refused(path, f"must have at most {_LARGEST} bytes (got {found.st_size})")
        data = file.read()
    try:
        content = json.loads(data)
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ValueError(f"the schema must be {SCHEMA}")  # noqa: TRY301 - all damage is told in one place
        return decode(Inventory, content.get("inventory"), "inventory")
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"is damaged: {error}") from error


def _refused(path: str, reason: str) -> UsageError:
    return UsageError(
        f"the file {path!r} that {VARIABLE} names {reason}; start the node anew with 'anyaccel ray start'"
    )


@functools.cache
def started_with() -> Mapping[str, str]:
    """The environment that this process was started with, before Ray wrote masks of its own into it."""
    return {os.fsdecode(name): os.fsdecode(value) for name, value in _started_with().items()}


@functools.cache
def _started_with() -> dict[bytes, bytes]:
    with open("/proc/self/environ", "rb") as file:
        pairs = [pair.partition(b"=") for pair in file.read().split(b"\0") if pair]
    return {name: value for name, _, value in pairs if name}


def restore_environ() -> None:
    """Undo what Ray has written into the environment for its call: masks, and a number of threads."""
    # Its data, since a look at each variable through the mapping takes longer than all the rest of a call.
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
    """What is on this node: what ``anyaccel ray start`` found, or what is found now.

    Raises:
        AnyaccelError: When that cannot be found out.
    """
    environ = started_with()
    path = environ.get(VARIABLE)
    return read_snapshot(path) if path else detect(environ=environ)
