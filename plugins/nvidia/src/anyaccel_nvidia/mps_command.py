"""Start, stop or inspect your own MPS daemon, which enforces shares of NVIDIA GPUs. No root is needed.

The daemon serves programs of the user who started it. Programs started by anyaccel with a share find the daemon by
themselves.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from typing import Any

from anyaccel.cli import output
from anyaccel.errors import CommandNotRunnableError

from . import mps

EXAMPLES = (
    ("anyaccel mps start", "a daemon of your own; 'anyaccel run GPU:0.5 -- ...' uses it from then on"),
    ("anyaccel mps status", "which processes it serves"),
)
START_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("action", choices=("start", "stop", "status"), metavar="ACTION", help="start, stop or status")
    parser.add_argument(
        "--protocol", type=int, choices=(2, 3), default=2, help="what a daemon that is started speaks (default: 2)"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    places, pipes = mps.directories(os.environ), mps.listening(os.environ, os.path.exists)
    if (pipes or args.action == "start") and not shutil.which(mps.TOOL):
        reason = f"{mps.TOOL} is not on PATH; it comes with NVIDIA's driver"
        raise CommandNotRunnableError(reason, hint="install the driver's compute utilities")
    silent = []
    for pipe in pipes:
        try:
            found = mps.query_daemon(pipe)
        except OSError as error:  # such as a daemon of another user
            silent.append(_unusable(pipe, error))
            continue
        if found:
            return _use(args, pipe, found)
    if args.action == "start":
        # Without XDG_RUNTIME_DIR, CUDA's own default, which programs search without a variable.
        return _start(args, places[0] if len(places) != len(mps.DIRECTORIES) else places[-1])
    if silent:
        raise silent[0]
    output.say(f"no MPS daemon listens in {' or '.join(places)}")
    return 0 if args.action == "stop" else _print_status(args, "", None)


def _use(args: argparse.Namespace, pipe: str, found: dict[str, Any]) -> int:
    if args.action == "stop":
        mps.stop(pipe, found["protocol"])
        output.say(f"the MPS daemon in {pipe} has been ended")
        return 0
    if args.action == "start":
        output.say(f"an MPS daemon listens in {pipe} already")
    return _print_status(args, pipe, found)


def _start(args: argparse.Namespace, pipe: str) -> int:
    try:
        mps.start(pipe, os.environ, args.protocol)
        found = _await_daemon(pipe)
    except OSError as error:
        raise _unusable(pipe, error) from error
    return _print_status(args, pipe, found)


def _await_daemon(pipe: str) -> dict[str, Any]:
    """Wait for the answer of a daemon that was just started."""
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            if found := mps.query_daemon(pipe):
                return found
            reason = OSError(f"no daemon listens there {START_SECONDS:g} s after its start")
        except OSError as error:
            reason = error
        if time.monotonic() > until:
            raise reason
        time.sleep(0.05)


def _unusable(pipe: str, error: OSError) -> CommandNotRunnableError:
    hint = f"end its daemon, or name another directory with {mps.PIPE}"
    return CommandNotRunnableError(f"the MPS daemon in {pipe} cannot be used: {error}", hint=hint)


def _print_status(args: argparse.Namespace, pipe: str, found: dict[str, Any] | None) -> int:
    if args.json:
        facts = found or {"protocol": None, "servers": [], "clients": []}
        output.print_json("mps/1", {"directory": pipe or None, **facts})
    elif found is not None:
        names = ", ".join(map(str, found["clients"])) or "none"
        output.print_line(f"MPS daemon in {pipe}, protocol {found['protocol']}, clients: {names}")
    return 0 if found is not None else 1
