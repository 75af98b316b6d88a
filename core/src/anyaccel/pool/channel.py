"""One message per packet between the caller and a worker.

The channels are socket pairs of our own, never listening and never named. Packets keep their boundaries, so a message
is there whole or not at all; what does not fit into one travels in shared memory of which the packet carries the
descriptor.
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
"""The kernel passes at most 253 in one packet."""

_HEAD = struct.Struct("=BBQ")
"""What the message is about, whether it is here or in shared memory, and the number of the call that it is about."""
_PACKET = _HEAD.size + MOST_INLINE
_ANCILLARY = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)
_INLINE, _SHARED = 0, 1
# Plain numbers: the constants are enumerations, of which a union takes longer than a system call.
_NO_WAIT = int(socket.MSG_DONTWAIT)
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


class MessageKind(IntEnum):
    """What a message is about."""

    SETUP = 1
    """To the worker: what it needs to know before user code, once."""
    CALL = 2
    """To the worker: call a function."""
    CONSTRUCT = 4
    """To the worker: make the object whose methods are called from now on."""
    METHOD = 5
    """To the worker: call a method of the object."""
    SKIP = 11
    """To the worker: do not call the method of this number, if it has not begun."""
    RESULT = 6
    """From the worker: what the call returned."""
    ERROR = 7
    """From the worker: what the call raised."""
    BROKEN = 8
    """From the worker: it cannot be used, and why."""
    READY = 9
    """From the worker: it is there, and about to run code of the user."""
    PREPARED = 10
    """From the worker: it is confined and initialized, where it was to be; from now on it cannot say otherwise."""


_buffers: list[bytearray] = []
"""Room for packets, used again: as many as there were threads at once that received."""


class Message(NamedTuple):
    """What came out of a channel.

    Attributes:
        kind: What it is about.
        data: The pickle, or whatever the kind says.
        buffers: Memory that the pickle refers to.
        descriptors: What was passed along; the receiver closes them.
        number: Number of the call that it is about, or 0.
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
    """Send one message. It is small in the channel whatever it holds, so an idle receiver never makes us wait.

    Raises:
        OSError: When the other side has gone, or there is no memory.
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


def receive(channel: socket.socket, *, wait: bool = True) -> Message | None:
    """Take one message, or None when the other side has gone.

    Raises:
        BlockingIOError: When there is none and we shall not wait.
        ValueError: When it is not one of ours.
        OSError: When its memory cannot be mapped.
    """
    buffer = _buffers.pop() if _buffers else bytearray(_PACKET)
    flags = _CLOSE_ON_EXEC if wait else _CLOSE_ON_EXEC | _NO_WAIT
    try:
        try:
            size, ancillary, got, _ = channel.recvmsg_into((buffer,), _ANCILLARY, flags)
        except ConnectionResetError:  # it ended without reading all; what it said before is still there
            size, ancillary, got, _ = channel.recvmsg_into((buffer,), _ANCILLARY, flags)
        if size >= _HEAD.size and buffer[1] == _INLINE and not ancillary and not got & _CUT:
            kind, _, number = _HEAD.unpack_from(buffer)
            return Message(kind, bytes(memoryview(buffer)[_HEAD.size : size]), [], [], number)
        packet = bytes(memoryview(buffer)[:size])
    finally:
        _buffers.append(buffer)
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
    return _unpacked(packet, descriptors)


def _unpacked(packet: bytes, descriptors: array[int]) -> Message:
    """A message that came with descriptors, or none of ours."""
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
    channel.sendmsg((packet,), ((socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors)),))


def _hung_up(channel: socket.socket) -> bool:
    """Whether the end of the messages has come: an empty message reads like that."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    return bool(poll.poll(0))


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
