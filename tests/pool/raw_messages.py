"""What user code in a worker can send through the worker's channel."""

import array
import contextlib
import os
import socket
import struct


def channels():
    """The worker's own end of its channel, among the descriptors that it has."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            found = socket.socket(fileno=os.dup(descriptor))
            if (found.family, found.type & 0xF) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
                yield found


def say(packet, passed=()):
    """Send something as a worker, then answer as if nothing had been."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
    for channel in channels():
        channel.sendmsg([packet], rights)
    return "said"


def head(kind, form=0, number=0):
    """What a message begins with."""
    return struct.pack("=BBQ", kind, form, number)
