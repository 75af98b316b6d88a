"""Messages between a caller and its workers, one per packet of a socket pair.

A socket pair has no name and no listener, so no other process can connect. Packets keep their boundaries, so a message
arrives whole or not at all. A message that does not fit into a packet travels in shared memory, and the packet carries
its descriptor.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from anyaccel.pool import payload
from anyaccel.pool.payload import Pickled, SharedParts

MOST_INLINE = 1 << 16
MOST_DESCRIPTORS = 250
"""Of one packet; the kernel passes at most 253 (SCM_MAX_FD)."""

_HEAD = struct.Struct("=BBQ")
"""Kind of the message, form of its data (inline or shared), and number of its call."""
_PACKET = _HEAD.size + MOST_INLINE
_ANCILLARY = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)
_INLINE, _SHARED = 0, 1
# Plain numbers: the constants are enumerations, whose union takes longer than a system call.
_NO_WAIT = int(socket.MSG_DONTWAIT)
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


class MessageKind(IntEnum):
    """Kinds of messages. The numbers are those of the protocol."""

    SETUP = 1
    """To the worker, first: environment, sandbox, initializer."""
    CALL = 2
    """To the worker: call a function."""
    CONSTRUCT = 4
    """To the worker: make the object of an actor."""
    METHOD = 5
    """To the worker: call a method of the actor's object."""
    SKIP = 11
    """To the worker: skip the method call of this number, unless it has started."""
    RESULT = 6
    """From the worker: the value that the call returned."""
    ERROR = 7
    """From the worker: the exception that the call raised."""
    BROKEN = 8
    """From the worker: the exception of its setup."""
    READY = 9
    """From the worker: it is about to run user code."""
    PREPARED = 10
    """From the worker: sandbox and initializer are done. A later BROKEN, perhaps of hostile code, is not believed."""


class Message(NamedTuple):
    """A received message.

    Attributes:
        kind: A :class:`MessageKind`, or another number from a faulty worker.
        data: The pickle.
        buffers: Memory that the pickle refers to.
        descriptors: Descriptors that came with it; the receiver closes them.
        number: Number of its call, or 0.
    """

    kind: int
    data: bytes | memoryview
    buffers: list[memoryview]
    descriptors: list[int]
    number: int = 0


def send(
    channel: socket.socket,
    kind: MessageKind,
    body: Pickled | bytes = b"",
    descriptors: Sequence[int] = (),
    *,
    number: int = 0,
) -> None:
    """Send one message. Large data goes to shared memory, so sending to an idle receiver never blocks.

    Args:
        channel: The channel.
        kind: Kind of the message.
        body: The pickle; with buffers or more than :data:`MOST_INLINE` bytes, it travels in shared memory.
        descriptors: Descriptors to pass along; they stay open here.
        number: Number of the call, or 0.

    Raises:
        OSError: When the other side has closed the channel, or no memory or descriptor is left.
    """
    data, buffers, stored = (body, None, None) if isinstance(body, bytes) else body
    if stored is not None or buffers or len(data) > MOST_INLINE:
        stored = stored or SharedParts([data, *(buffers or ())])
        head = _HEAD.pack(kind, _SHARED, number) + array("Q", stored.lengths).tobytes()
        _send(channel, head, (stored.descriptor, *descriptors))
    elif descriptors:
        _send(channel, _HEAD.pack(kind, _INLINE, number) + data, descriptors)
    else:
        channel.send(_HEAD.pack(kind, _INLINE, number) + data)


def receive(channel: socket.socket, *, wait: bool = True, passes: bool = True) -> Message | None:
    """Receive one message; None when the other side has closed the channel.

    Args:
        channel: The channel.
        wait: Whether to wait for a message.
        passes: Whether the other side may pass descriptors along, beside that of a message in shared memory.

    Raises:
        BlockingIOError: When there is none and ``wait`` is False.
        ValueError: When the packet is empty, cut short, not one of our messages, or passes descriptors without leave,
            or its shared memory is too small or not sealed; all descriptors are closed.
        OSError: When its descriptor is not of shared memory, or the memory cannot be mapped.
    """
    flags = _CLOSE_ON_EXEC if wait else _CLOSE_ON_EXEC | _NO_WAIT
    try:
        packet, ancillary, got, _ = channel.recvmsg(_PACKET, _ANCILLARY, flags)
    except ConnectionResetError:  # reported once after the other side exited with unread messages; its own come after
        packet, ancillary, got, _ = channel.recvmsg(_PACKET, _ANCILLARY, flags)
    if not packet:
        if not _hung_up(channel):
            raise ValueError("an empty message")
        return None
    descriptors = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    if len(packet) < _HEAD.size or got & _CUT:
        _close(descriptors)
        raise ValueError("a message was cut short: the process may have no descriptors left (see ulimit -n)")
    message = _unpack(packet, descriptors)
    if message.descriptors and not passes:
        _close(message.descriptors)
        raise ValueError("it passes descriptors along")
    return message


def _unpack(packet: bytes, descriptors: array[int]) -> Message:
    """Make a message of a packet; map its shared memory, and close the memory's descriptor.

    Raises:
        ValueError: When the packet is not one of our messages, or its shared memory is too small or not sealed; all
            descriptors are closed.
        OSError: When its descriptor is not of shared memory, or the memory cannot be mapped; all descriptors are
            closed.
    """
    kind, form, number = _HEAD.unpack_from(packet)
    if form not in (_INLINE, _SHARED) or (form == _SHARED and not descriptors):
        _close(descriptors)
        raise ValueError("a message that is neither here nor in shared memory")
    if form == _INLINE:
        return Message(kind, memoryview(packet)[_HEAD.size :], [], list(descriptors), number)
    try:
        data, *buffers = payload.read_shared(descriptors[0], array("Q", packet[_HEAD.size :]))
    except BaseException:
        _close(descriptors[1:])
        raise
    finally:
        os.close(descriptors[0])
    return Message(kind, data, buffers, list(descriptors[1:]), number)


def _send(channel: socket.socket, packet: bytes, descriptors: Sequence[int]) -> None:
    """Send a packet with descriptors."""
    channel.sendmsg((packet,), ((socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors)),))


def _hung_up(channel: socket.socket) -> bool:
    """Return whether the other side has closed the channel; an empty packet of a faulty worker is no such end."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    return bool(poll.poll(0))


def _close(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
