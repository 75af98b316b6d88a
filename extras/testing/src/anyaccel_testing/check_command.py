"""Check a plug-in against the contract, on recorded machines or on this host, without pytest.

With --write-expected, run no check: write the expected.json of each recording without one, from the current detection.
Compare the file with the output of the vendor's own tool on that machine.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from anyaccel.cli import output
from anyaccel.errors import AnyaccelError, MachineError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from anyaccel_testing import Check, Result


LOADING = ("C01", "C03", "C05")
"""Checks that a plug-in must pass before its answers mean anything."""
EXAMPLES = (
    ("anyaccel check acme", "on the plug-in's own recordings"),
    ("anyaccel check acme --real", "on this host"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("vendor", metavar="VENDOR", help="vendor whose plug-in to check")
    parser.add_argument(
        "--recordings",
        type=Path,
        metavar="DIR",
        help="directory of recordings, or one recording (default: the plug-in's own)",
    )
    parser.add_argument("--real", action="store_true", help="check on this host instead of recordings")
    parser.add_argument(
        "--write-expected",
        action="store_true",
        help="run no check; write the expected.json of recordings without one, and print a summary",
    )
    parser.add_argument("--force", action="store_true", help="with --write-expected: replace existing files too")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from anyaccel_testing.suite import find, list_recordings, run_checks
    from anyaccel_testing.table import CHECKS

    if args.real and args.recordings:
        raise UsageError("--real checks on this host and --recordings on recorded machines: choose one")
    if args.real and args.write_expected:
        raise UsageError("--write-expected is for recordings; record this host: anyaccel record DIR")
    if args.force and not args.write_expected:
        raise UsageError("--force goes with --write-expected")
    if args.machine:
        raise UsageError(f"'anyaccel check' takes --recordings DIR or --real instead of --machine {args.machine}")
    source, reason = find(args.vendor)
    if source is None:
        raise UsageError(reason)
    directory = args.recordings or _find_recordings(source.target)
    if args.recordings and not list_recordings(directory):
        raise UsageError(f"{args.recordings} must hold recordings, one directory with a machine.json each")
    if args.write_expected:
        return _write_expected(args, list_recordings(directory))
    results = run_checks(args.vendor, directory, real=args.real, timeout=args.probe_timeout, tell=output.say)
    failed = any(result.state.value == "failed" for result in results)
    if args.json:
        told = [output.take_fields(result, "check", "state", "machine", "message", "details") for result in results]
        output.print_json("check/1", {"vendor": args.vendor, "passed": not failed, "results": told})
        return int(failed)
    output.print_lines(
        _format_check(check, [result for result in results if result.check == check.id]) for check in CHECKS
    )
    output.say(_summarize(results))
    if not args.real:
        _warn_if_unusable(args.vendor, list_recordings(directory))
    return int(failed)


def _write_expected(args: argparse.Namespace, recordings: Mapping[str, str]) -> int:
    """Write the missing ``expected.json`` files (with ``--force``: the existing too), and print a summary."""
    from anyaccel.inventory import EXPECTED

    from anyaccel_testing.suite import run_checks

    if not recordings:
        raise UsageError(f"no recording of {args.vendor} is found; name their directory with --recordings DIR")
    # A plug-in that does not load would replace every inventory by a failure.
    for result in run_checks(args.vendor, only=LOADING):
        if result.state.value == "failed":
            raise AnyaccelError(
                f"the plug-in of {args.vendor} does not load: {result.message}", hint="nothing was written"
            )
    written: dict[str, str] = {}
    kept: list[str] = []
    for directory in recordings.values():
        path = os.path.join(directory, EXPECTED)
        if os.path.lexists(path) and not args.force:
            kept.append(path)
            continue
        written[path] = _summarize_inventory(_replay(directory, args.vendor, args.probe_timeout), args.vendor)
    if args.json:
        output.print_json("check/1", {"vendor": args.vendor, "written": written, "kept": kept})
        return 0
    output.print_lines(f"{path}: {said}" for path, said in written.items())
    if kept:
        output.say(f"{len(kept)} of {len(recordings)} have one already, which --force replaces")
    if written:
        _warn_if_unusable(args.vendor, recordings)
        output.say("compare the written files with the output of the vendor's own tool on these machines")
    return 0


def _replay(directory: str, vendor: str, timeout: float) -> dict[str, Any]:
    """Replay a recording, and update the part of a vendor in its ``expected.json``; return what the replay found.

    A file that holds the vendor's inventory without the keys around it stays like that, unless detection fails.
    """
    from anyaccel.inventory import EXPECTED, expect, write_json
    from anyaccel.probe import read_json

    path = os.path.join(directory, EXPECTED)
    found = expect(directory, timeout=timeout, vendors=[vendor])
    try:
        before = read_json(path, "")
    except MachineError:
        before = found
    content: Any = found
    if isinstance(before, dict) and "vendors" in before:
        content = {part: _others(before.get(part), vendor) | said for part, said in found.items() if part != "schema"}
        content = {"schema": found["schema"], **content}
    elif vendor in found["vendors"]:
        content = found["vendors"][vendor]
    write_json(path, content)
    return found


def _others(part: Any, vendor: str) -> dict[str, Any]:
    """Return the other vendors' entries of a part of ``expected.json``."""
    return {name: said for name, said in part.items() if name != vendor} if isinstance(part, dict) else {}


def _warn_if_unusable(vendor: str, recordings: Mapping[str, str]) -> None:
    """Warn if no recording is expected to have a usable device: then most checks have nothing to try."""
    from anyaccel.inventory import EXPECTED
    from anyaccel.probe import read_json

    for directory in recordings.values():
        try:
            wanted = read_json(os.path.join(directory, EXPECTED), "")
        except MachineError:  # C07 reports it
            return
        if isinstance(wanted, dict) and "vendors" in wanted:
            wanted = wanted["vendors"].get(vendor)
        devices = wanted.get("devices", ()) if isinstance(wanted, dict) else ()
        if any(device.get("health") != "unhealthy" for device in devices):
            return
    if recordings:
        output.say(f"warning: no recording of {vendor} has a usable device, so nothing that needs one was checked")


def _summarize_inventory(expected: Mapping[str, Any], vendor: str) -> str:
    """Summarize an expected inventory in a line."""
    if vendor in expected["failed"]:
        return f"detection fails: {expected['failed'][vendor]}"
    found = expected["vendors"][vendor]
    if found is None:
        return f"no trace of {vendor}"
    devices = found.get("devices", [])
    models = Counter(device["model"] for device in devices)
    unhealthy = sum(device.get("health") == "unhealthy" for device in devices)
    said = ", ".join(f"{count} {model}" for model, count in models.items()) or "no device"
    return said + f", {unhealthy} of them unhealthy" * bool(unhealthy)


def _format_check(check: Check, results: list[Result]) -> str:
    """Format the line of a check: state, and first reason or title."""
    failed = [result for result in results if result.state.value == "failed"]
    skipped = [result for result in results if result.state.value == "skipped"]
    expected = [result for result in results if result.state.value == "expected"]
    if failed:
        others = len(failed) - 1
        more = f" (and on {others} more machine{'s' * (others > 1)}, see --json)" if others else ""
        return f"{check.id}  failed   {_format_reason(failed[0])}{more}"
    if expected:
        return f"{check.id}  expected {_format_reason(expected[0])}"
    if skipped and len(skipped) == len(results):
        return f"{check.id}  skipped  {skipped[0].message}"
    return f"{check.id}  ok       {check.title}"


def _format_reason(result: Result) -> str:
    text = " ".join(result.message.split())
    return f"{result.machine}: {text}" if result.machine else text


def _summarize(results: Iterable[Result]) -> str:
    ends: dict[str, set[str]] = {}
    for result in results:
        ends.setdefault(result.check, set()).add(result.state.value)
    failed = sum("failed" in states for states in ends.values())
    expected = sum("expected" in states and "failed" not in states for states in ends.values())
    skipped = sum(states == {"skipped"} for states in ends.values())
    told = f"{len(ends)} checks: {len(ends) - failed - expected - skipped} ok, {failed} failed"
    return told + f", {expected} failed as expected" * bool(expected) + f", {skipped} skipped"


def _find_recordings(target: str) -> Path | None:
    """Find the ``recordings`` directory beside a plug-in's package, or of its project; None when there is neither."""
    from importlib.util import find_spec

    # Only the top-level name: for 'a.b', find_spec would import 'a', and with it code of the plug-in.
    spec = find_spec(target.partition(":")[0].partition(".")[0])
    if spec is None or spec.origin is None:
        return None
    places = [parent / "recordings" for parent in Path(spec.origin).parents[:4]]
    return next((place for place in places if place.is_dir()), None)
