"""Start, stop or look at an MPS daemon of your own, which holds programs to shares of NVIDIA GPUs. No root is needed.

The daemon serves programs of the user who started it. Programs that anyaccel starts with a share find it by themselves.
"""

from __future__ import annotations

import argparse
import os
import time

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
    places = mps.directories(os.environ)
    pipe = next((each for each in places if os.path.exists(f"{each}/control")), "")
    try:
        if args.action == "start":
            return _start(args, pipe, places)
        if not pipe:
            output.say(f"no MPS daemon listens in {' or '.join(places)}")
            return 0 if args.action == "stop" else _tell(args, "", None)
        if args.action == "stop":
            mps.stop(pipe)
            output.say(f"the MPS daemon in {pipe} has been ended")
            return 0
        return _tell(args, pipe, mps.look(pipe))
    except FileNotFoundError as error:
        raise CommandNotRunnableError(
            f"{mps.TOOL} is not on PATH; it comes with NVIDIA's driver", hint="install the driver's compute utilities"
        ) from error
    except OSError as error:
        where = pipe or places[0]
        raise CommandNotRunnableError(f"the MPS daemon in {where} cannot be used: {error}") from error


def _start(args: argparse.Namespace, pipe: str, places: tuple[str, ...]) -> int:
    if pipe:
        found = mps.look(pipe)  # a directory that an ended daemon has left answers with an error
        output.say(f"an MPS daemon listens in {pipe} already")
        return _tell(args, pipe, found)
    pipe = places[0] if len(places) != len(mps.DIRECTORIES) else places[-1]
    for directory in (pipe, log := f"{pipe}/log"):
        os.makedirs(directory, mode=0o700, exist_ok=True)
    mps.start(pipe, log, os.environ, args.protocol)
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            return _tell(args, pipe, mps.look(pipe))
        except FileNotFoundError:
            raise
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _tell(args: argparse.Namespace, pipe: str, found: dict[str, object] | None) -> int:
    if args.json:
        facts = found or {"protocol": None, "servers": [], "clients": []}
        output.print_json("mps/1", {"directory": pipe or None, **facts})
    elif found is not None:
        clients = found["clients"]
        names = ", ".join(map(str, clients)) if isinstance(clients, list) and clients else "none"
        output.print_line(f"MPS daemon in {pipe}, protocol {found['protocol']}, clients: {names}")
    return 0 if found is not None else 1
