"""The protocol between the two sides of guarded calls."""

from __future__ import annotations

import struct

HEADER = struct.Struct("=BQ")
"""Head of every message on the socket: the kind, and the number of bytes that follow."""
CALL, BEGUN, ANSWER = 1, 2, 3
"""Kinds of messages. The head of :data:`BEGUN` has the process id in place of a number of bytes."""
CHUNK = 1 << 16
"""Bytes that are received at once."""
PRINTED_LIMIT = 8192
"""How many of the last printed bytes of a process are kept."""
