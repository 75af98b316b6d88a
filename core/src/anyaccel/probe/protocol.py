"""What the two sides of guarded calls agree on."""

from __future__ import annotations

import struct

HEADER = struct.Struct("=BQ")
"""Before every message on a call's socket: its kind, and the number of bytes that follow."""
CALL, BEGUN, ANSWER = 1, 2, 3
IDLE_SECONDS = 60.0
"""A process that was not called for so long ends, and so does an interpreter without processes."""
CHUNK = 1 << 16
"""Bytes that are received at once."""
PRINTED_LIMIT = 8192
"""Bytes of what a process prints that are kept: the last ones."""
PACKET_LIMIT = 1 << 17
"""Bytes that a packet on the control socket may have."""
DESCRIPTOR = struct.Struct("i")
"""A descriptor that comes with a packet."""
