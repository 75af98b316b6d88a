"""What the two sides of guarded calls agree on."""

from __future__ import annotations

import struct

HEADER = struct.Struct("=BQ")
"""Before every message on a call's socket: its kind, and the number of bytes that follow."""
CALL, BEGUN, ANSWER = 1, 2, 3
"""Kinds of messages. :data:`BEGUN` says the process id in place of a number of bytes."""
CHUNK = 1 << 16
"""Bytes that are received at once."""
PRINTED_LIMIT = 8192
"""Bytes of what a process prints that are kept: the last ones."""
