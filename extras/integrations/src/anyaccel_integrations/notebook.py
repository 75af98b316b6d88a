"""The line magic ``%accel`` of IPython and Jupyter, which holds devices for the kernel: ``%load_ext anyaccel``."""

from __future__ import annotations

import shlex
from typing import Any

import anyaccel
from anyaccel.cli import Parser, add_wait, choose_columns, output, plain_rows, table_lines, wait_options
from anyaccel.cli import sample as samples
from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.launcher import get_process_lease
from anyaccel.text import html_table

ALONE = ("release", "status")
"""Words that stand alone on the line, without options."""
EXAMPLES = (
    ("%accel", "the devices of this machine, and who holds them"),
    ("%accel GPU:1", "hold a device for this kernel, and show it to frameworks that are imported later"),
    ("%accel GPU:2 --wait 10m --note 'fine-tuning'", "wait at most ten minutes; the note is for other users"),
    ("%accel release", "give back what this kernel holds"),
)
_COLUMNS = "device,type,mem,load,state,user,share,program,held,until,note,id"


def accel(line: str) -> Any:
    """Hold devices for this kernel.

        %accel GPU:1              hold a device; --wait 1m waits at most a minute, --note TEXT says what for
        %accel                    show the devices of the machine, and their holders
        %accel release            release the devices of the kernel
        %accel --help             all options

    Raises:
        AnyaccelError: When that fails, so that the cell fails and later cells do not run without devices.
    """
    try:
        return _perform(line)
    except (AnyaccelError, KeyboardInterrupt) as error:
        output.drop_traceback(error)
        raise


def _perform(line: str) -> Any:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"the line cannot be split into words: {error}", hint="quote it as in a shell") from None
    try:
        args = _parser().parse_intermixed_args(words)
    except SystemExit:  # of --help, which is printed by then
        return None
    alone = next((word for word in ALONE if word in args.request), "")
    if alone and len(words) > 1:
        raise UsageError(f"{alone!r} stands alone (got {line!r})", hint="see '%accel --help'")
    if words and not args.request:
        raise UsageError(f"options stand beside a request (got {line!r})", hint="see '%accel --help'")
    held = get_process_lease()  # including devices that a cell has taken by anyaccel.use()
    if alone == "release":
        if held is not None:
            held.release()
        return None
    if alone or not words:
        return _show_machine(held)
    try:
        return anyaccel.use(args.request, **wait_options(args))  # running the cell again changes nothing
    except UsageError as error:
        if held is None:
            raise
        hint = "release that first (%accel release), or ask for all at once, as in %accel GPU:1 TPU:4"
        raise UsageError(str(error), hint=hint) from error


def _parser() -> Parser:
    parser = Parser(
        prog="%accel",
        description="Hold devices for this kernel; without a request, show the devices of the machine and who holds"
        " them.",
        allow_abbrev=False,
    )
    parser.examples = EXAMPLES
    parser.add_argument(
        "request", nargs="*", metavar="REQUEST", help="the devices to hold, such as GPU:1; 'release' releases them"
    )
    add_wait(parser)
    parser.set_defaults(note="notebook", time=None)
    return parser


def _show_machine(held: anyaccel.ProcessLease | None) -> _DeviceTable:
    """Return the table of the whole machine, also while the kernel sees only the devices that it holds."""
    if held is None:
        sample = samples.take_sample(anyaccel.detect())
    else:
        # The kernel's own variables hide the other devices from it, but not from its user.
        sample = samples.take_sample(held.launch.inventory, environ=held.outer_environ())
    for note in samples.all_notes(sample):
        output.say(note)
    return _DeviceTable(sample, "" if held is None else output.device_names(device.name for device in held.devices))


class _DeviceTable:
    """A table of the devices of a machine and their holders.

    Args:
        sample: The machine.
        held: Names of the devices of the kernel.
    """

    def __init__(self, sample: samples.Sample, held: str) -> None:
        self._caption = f"{samples.summary(sample)} on {sample.inventory.machine}"
        if sample.tickets:
            self._caption += f"; {len(sample.tickets)} waiting"
        if held:
            self._caption += f"; this kernel holds {held}"
        # Columns about holders are empty on a machine that is free.
        devices = sample.states()
        busy = any(device.holders for device in devices)
        self._columns = tuple(column for column in choose_columns(_COLUMNS) if busy or column.cell)
        self._rows = plain_rows(devices, self._columns)

    def __repr__(self) -> str:
        if not self._rows:
            return "No accelerators were found: see 'anyaccel doctor'"
        return "\n".join([*table_lines(self._columns, self._rows, None), self._caption])

    def _repr_html_(self) -> str:
        if not self._rows:
            return ""
        return html_table(self._caption, [column.heading for column in self._columns], self._rows)


def load_ipython_extension(shell: Any) -> None:
    """Register the magic ``%accel`` with IPython."""
    shell.register_magic_function(accel, magic_kind="line")
