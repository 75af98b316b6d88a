"""The application behind ``anyaccel top``.

Texts of other users become plain text with styles, never markup.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

import anyaccel
from anyaccel.cli import Column, cancel_by_id, lay_out, megahertz, memory_use, output, since, table_lines
from anyaccel.cli import sample as samples
from anyaccel.errors import AnyaccelError
from anyaccel.ledger import Ledger, TicketRecord
from anyaccel.linux import process
from anyaccel.model import Device, write_labels
from anyaccel.text import cells, clock, elapsed, memory, printable
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from anyaccel_jobs.jobs import Job
from anyaccel_jobs.jobs_command import written_job

TYPE_CHECKING = False
if TYPE_CHECKING:
    Line = Sequence[output.Span]
    Groups = Sequence[tuple[str, Sequence[Line]]]
    """Groups of lines, each with its key."""

_STYLES = {"": "", "bold": "bold", "dim": "dim", "bad": "red", "good": "green", "warn": "yellow", "accent": "cyan"}
_HISTORY = 240
_LOAD = 45
"""Width of the column of the load: the line of its history, and the number."""
_LEVELS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_WAITING = (
    Column(heading="WAITING", turn=0),
    Column(heading="USER", turn=1, least=8),
    Column(heading="REQUEST", turn=2, least=10),
    Column(heading="WAITED", turn=4),
    Column(heading="STARTS BY", turn=5),
    Column(heading="REASON", turn=3, least=16),
    Column(heading="NOTE", turn=6, least=8),
)
_JOBS = (
    Column(heading="JOB", turn=0),
    Column(heading="STATE", turn=1),
    Column(heading="REQUEST", turn=3, least=10),
    Column(heading="TOOK", turn=4),
    Column(heading="DEVICES", turn=5, least=8),
    Column(heading="COMMAND", turn=2, least=12),
)
_OF_TICKET = ("id", "user", "pid", "priority", "request", "note", "command")
SORTS = ("device", "load", "mem", "free")


def sparkline(history: Sequence[float | None], width: int) -> str:
    """Draw the latest ratios of a history, one column each; an unknown ratio is blank."""
    found = list(history)[-width:]
    drawn = (
        " " if ratio is None else _LEVELS[min(int(min(max(ratio, 0.0), 1.0) * len(_LEVELS)), len(_LEVELS) - 1)]
        for ratio in found
    )
    return "".join(drawn).rjust(width)


class Lines(OptionList):
    """A list whose options are groups of lines."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "cursor_up", show=False),
        Binding("j", "cursor_down", show=False),
        Binding("g", "first", show=False),
        Binding("G", "last", show=False),
    ]
    DEFAULT_CSS = """
    Lines {
        height: auto; min-height: 1; padding: 0; border: none; scrollbar-size-vertical: 1;
        &:focus { border: none; background-tint: transparent; }
        & > .option-list--option { padding: 0; }
        & > .option-list--option-hover { background: transparent; }
        & > .option-list--option-highlighted { color: $foreground; background: transparent; text-style: none; }
        &:focus > .option-list--option-highlighted { color: $background; background: $foreground; text-style: none; }
    }
    """

    def __init__(self, groups: Groups = (), *, id: str | None = None) -> None:  # noqa: A002 - as of every widget
        super().__init__(id=id)
        self._groups: Groups = ()
        self.show(groups)

    @property
    def chosen(self) -> str:
        """Key of the highlighted group; empty for none."""
        return "" if self.highlighted is None else self._groups[self.highlighted][0]

    @property
    def text(self) -> str:
        """The text without styles."""
        return "\n".join(_text(lines).plain for _, lines in self._groups)

    def show(self, groups: Groups) -> None:
        """Show groups of lines; the cursor stays at the same key."""
        keys = [key for key, _ in groups]
        # Replacing all options would lose the cursor and the scroll position.
        if keys == [key for key, _ in self._groups]:
            for number, (_, lines) in enumerate(groups):
                if lines != self._groups[number][1]:
                    self.replace_option_prompt_at_index(number, _text(lines))
        else:
            before, at = self.chosen, self.highlighted or 0
            self.clear_options()
            self.add_options([Option(_text(lines), id=key) for key, lines in groups])
            self.highlighted = keys.index(before) if before in keys else min(at, len(keys) - 1) if keys else None
        self._groups = groups


class Words(Static):
    """Static lines of text."""

    DEFAULT_CSS = "Words { min-height: 1; }"

    def __init__(self, *lines: Line, id: str | None = None) -> None:  # noqa: A002 - as of every widget
        super().__init__(_text(lines), id=id)

    def tell(self, *lines: Line) -> None:
        """Show lines of text."""
        self.update(_text(lines))


def _text(lines: Sequence[Line]) -> Text:
    """Return lines as Textual renders them, without interpreting markup."""
    made = Text(no_wrap=True)
    for number, line in enumerate(lines):
        made.append("\n" * (number > 0))
        for text, style in line:
            # append() takes text as it is; from_markup() would read the markup of other users.
            made.append(printable(text), _STYLES[style])
    return made


class Details(ModalScreen[None]):
    """A screen with the details of a device, a request or a job."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss_it", "back")]
    CSS = "Details Vertical { background: $surface; } Details VerticalScroll { height: 1fr; }"

    def __init__(self, lines: Sequence[Line]) -> None:
        super().__init__()
        self._told = lines

    def compose(self) -> ComposeResult:
        """Return the widgets."""
        with Vertical():
            with VerticalScroll():
                yield Words(*self._told)
            yield Footer()

    def action_dismiss_it(self) -> None:
        """Close the screen."""
        self.dismiss(None)


class Confirm(ModalScreen[str]):
    """A question before a lease, a request or a job is ended."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "yes", "yes"),
        Binding("n,escape,q", "no", "no"),
    ]
    CSS = "Confirm { align: center middle; } Confirm Vertical { height: auto; width: 76; background: $surface; }"

    def __init__(self, question: str, among: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._question = question
        self._among = among

    def compose(self) -> ComposeResult:
        """Return the widgets."""
        with Vertical():
            yield Words([(self._question, "bold")])
            yield Lines([(key, [[(f"  {text}", "")]]) for key, text in self._among], id="among")
            yield Footer()

    def action_yes(self) -> None:
        """Close the screen with the highlighted key."""
        self.dismiss(self.query_one("#among", Lines).chosen)

    def action_no(self) -> None:
        """Close the screen without a key."""
        self.dismiss("")


class Ask(ModalScreen[str | None]):
    """A question for a line of text; None for no answer."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "back")]
    CSS = "Ask { align: center middle; } Ask Vertical { height: auto; width: 76; background: $surface; }"

    def __init__(self, question: str, text: str = "") -> None:
        super().__init__()
        self._question = question
        self._text = printable(text)

    def compose(self) -> ComposeResult:
        """Return the widgets."""
        with Vertical():
            yield Words([(self._question, "bold")])
            yield Input(self._text)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close the screen with the text."""
        self.dismiss(event.value)

    def action_leave(self) -> None:
        """Close the screen without an answer."""
        self.dismiss(None)


class Top(App[None]):
    """The live view of a machine.

    Args:
        look: Returns a sample; called in a thread.
        look_for_jobs: Returns the active jobs; called in that thread.
        interval: Seconds between two samples.
    """

    TITLE = "anyaccel top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("s", "sort", "sort"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("enter", "details", "look into", show=True),
        Binding("x", "end", "release/cancel"),
        Binding("w", "why", "why"),
        Binding("tab", "focus_next", "next list", show=True),
    ]
    CSS = """
    Screen { layout: vertical; }
    Lines { background: $background; }
    #devices { height: auto; max-height: 60%; }
    #waiters { height: 1fr; }
    #jobs { max-height: 30%; }
    """

    def __init__(
        self,
        look: Callable[[], samples.Sample],
        look_for_jobs: Callable[[], tuple[Job, ...]] = tuple,
        *,
        interval: float = 2.0,
    ) -> None:
        super().__init__()
        self._look = look
        self._look_for_jobs = look_for_jobs
        self._interval = interval
        self._sample: samples.Sample | None = None
        self._jobs: tuple[Job, ...] = ()
        self._history: dict[str, deque[float | None]] = {}
        self._sort = SORTS[0]
        self._filter = ""
        self._told = ""
        self._waiting: list[tuple[str, list[str]]] = []
        self._busy = False

    def compose(self) -> ComposeResult:
        """Return the widgets."""
        yield Words([("looking ...", "dim")], id="summary")
        yield Words(id="heading")
        yield Lines(id="devices")
        yield Words(id="line")
        yield Lines(id="waiters")
        yield Words(id="joblist")
        yield Lines(id="jobs")
        yield Words(id="told")
        yield Footer()

    def on_mount(self) -> None:
        """Start sampling."""
        self._at_terminal = os.isatty(0)
        self.set_interval(self._interval, self._begin)
        self._begin()

    def on_resize(self) -> None:
        """Redraw for the new size."""
        # The new size is known after the refresh.
        self.call_after_refresh(self._draw)

    def _begin(self) -> None:
        """Start a sample in a thread, unless the last one is still under way."""
        if self._at_terminal and not os.isatty(0):  # without SIGHUP, reading a terminal that is gone would spin
            self.exit()
            return
        if not self._busy:
            self._busy = True
            # Vendors may take seconds: the keys must work meanwhile.
            self.run_worker(self._take, thread=True, group="look")

    def _take(self) -> None:
        """Take a sample, in a thread."""
        try:
            sample, jobs = self._look(), self._look_for_jobs()
            self._from_thread(self._took, sample, jobs, _waiting(sample))
        except AnyaccelError as error:
            self._from_thread(self._tell, str(error))
        finally:
            self._busy = False

    def _from_thread(self, call: Callable[..., object], *arguments: object) -> None:
        """Call a function in the application's thread, unless the application has ended."""
        try:
            # Widgets belong to the application's thread.
            self.call_from_thread(call, *arguments)
        except RuntimeError:
            if self.is_running:
                raise

    def _took(self, sample: samples.Sample, jobs: tuple[Job, ...], waiting: list[tuple[str, list[str]]]) -> None:
        for state in sample.states():
            self._history.setdefault(state.device.id, deque(maxlen=_HISTORY)).append(state.seen.utilization)
        self._sample = sample
        self._jobs = jobs
        self._waiting = waiting
        self._draw()

    def _tell(self, text: str) -> None:
        """Show a message in the line above the keys."""
        self._told = text
        self._draw()

    def _shown(self, sample: samples.Sample) -> list[samples.DeviceState]:
        """Return the devices, filtered and sorted."""
        wanted = self._filter.lower()
        found = [state for state in sample.states() if wanted in _searched(state).lower()]
        if self._sort == "load":
            found.sort(key=lambda state: -(state.seen.utilization or 0.0))
        elif self._sort == "mem":
            found.sort(key=lambda state: -(state.seen.memory_used_bytes or 0))
        elif self._sort == "free":
            found.sort(key=lambda state: -(state.free or 0))
        return found

    def _draw(self) -> None:
        """Redraw the widgets."""
        if not self.is_running:
            return
        sample = self._sample
        base = self.screen_stack[0]
        # A message of the last key stays until the next one.
        told = self._told or "; ".join(samples.notes(sample)[:1] if sample else [])
        base.query_one("#told", Words).tell([(told, "warn")])
        if sample is None:
            return
        room = max(20, self.size.width - 1)
        devices = self._shown(sample)
        heading, rows, _ = lay_out(devices, room, draw=self._drawn, load=_LOAD)
        base.query_one("#heading", Words).tell(heading)
        base.query_one("#devices", Lines).show(
            [(state.device.id, lines) for state, lines in zip(devices, rows, strict=True)]
        )
        words = f"{samples.summary(sample)}, {len(sample.tickets)} waiting"
        more = f"  sorted by {self._sort}" + (f", only {self._filter!r}" if self._filter else "")
        where = f"  {sample.inventory.machine}" if sample.inventory.machine != "host" else ""
        base.query_one("#summary", Words).tell(
            [
                (f"{time.strftime('%H:%M:%S', time.localtime(sample.at))}  ", "dim"),
                (words, "bold"),
                (more + where, "dim"),
            ]
        )
        waiting = [row for _, row in self._waiting]
        head, *waiters = table_lines(_WAITING, waiting, room) if waiting else ["no request waits"]
        base.query_one("#line", Words).tell([(head, "bold")])
        base.query_one("#waiters", Lines).show(
            [(ticket, [[(line, "")]]) for (ticket, _), line in zip(self._waiting, waiters, strict=True)]
        )

        jobs = [_job_row(job) for job in self._jobs]
        head, *lines = table_lines(_JOBS, jobs, room) if jobs else [""]
        base.query_one("#joblist", Words).tell([(head, "bold")])
        base.query_one("#joblist", Words).display = base.query_one("#jobs", Lines).display = bool(jobs)
        base.query_one("#jobs", Lines).show(
            [(_job_key(job), [[(line, "")]]) for job, line in zip(self._jobs, lines, strict=True)]
        )

    def _drawn(self, row: samples.DeviceState, width: int) -> str:
        return sparkline(self._history.get(row.device.id, ()), width)

    def _chosen(self) -> Device | TicketRecord | Job | None:
        """Return the device, the request or the job at the cursor of the focused list."""
        if self._sample is None:
            return None
        focused = self.focused
        key = focused.chosen if isinstance(focused, Lines) else ""
        among: dict[str, Device | TicketRecord | Job] = {_job_key(job): job for job in self._jobs}
        among |= {device.id: device for device in self._sample.inventory.devices}
        among |= {ticket.id: ticket for ticket in self._sample.tickets}
        return among.get(key)

    def on_option_list_option_selected(self) -> None:
        """Show details, unless a question is open."""
        if len(self.screen_stack) == 1:
            self.action_details()

    def action_sort(self) -> None:
        """Sort by the next key."""
        self._sort = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)]
        self._draw()

    def action_filter(self) -> None:
        """Ask for a filter of the devices."""

        def use(text: str | None) -> None:
            if text is not None:
                self._filter = text
                self._draw()

        self.push_screen(Ask("Show devices with this in their name, type, id or holders:", self._filter), use)

    def action_details(self) -> None:
        """Show the details of the device, request or job at the cursor."""
        chosen = self._chosen()
        if chosen is None or self._sample is None:
            return
        room = max(20, self.size.width - 2)
        if isinstance(chosen, Device):
            lines = device_details(chosen, self._sample, room)
        elif isinstance(chosen, TicketRecord):
            facts = [(name, str(getattr(chosen, name))) for name in _OF_TICKET]
            starts = "unknown" if chosen.starts is None else clock(chosen.starts)
            facts += [("waited", elapsed(chosen.waited)), ("starts by", starts), ("reason", chosen.reason)]
            lines = _facts(facts, room)
        else:
            names = ("id", "state", "request", "note", "directory", "lease", "log")
            facts = [(name, str(getattr(chosen, name))) for name in names]
            lines = _facts([*facts, ("devices", " ".join(chosen.devices)), ("command", " ".join(chosen.command))], room)
        self.push_screen(Details(lines))

    def action_why(self) -> None:
        """Ask for a request, and show whether it fits."""
        chosen = self._chosen()
        known = "" if chosen is None else chosen.name if isinstance(chosen, Device) else chosen.request
        self.push_screen(Ask("Does this request fit, and why not?", known), self._say_why)

    def _say_why(self, request: str | None) -> None:
        sample = self._sample
        if not request or sample is None:
            return

        def ask() -> None:
            try:
                verdict = anyaccel.why(request.split(), inventory=sample.inventory)
                told = [verdict.message, *verdict.hint.splitlines()]
            except AnyaccelError as error:
                told = [str(error), *error.hint.splitlines()]
            room = max(20, self.size.width - 2)
            lines = [[(line, "")] for text in told for line in output.folded(text, room)]
            self._from_thread(self.push_screen, Details(lines))

        self.run_worker(ask, thread=True, group="why")

    def action_end(self) -> None:
        """Release a lease of this user on the device at the cursor, or cancel the user's request or job."""
        chosen, sample = self._chosen(), self._sample
        if chosen is None or sample is None:
            return
        if isinstance(chosen, TicketRecord):
            told = f"{chosen.request} of {chosen.user}, process {chosen.pid}"
            mine = [(chosen.id, told)] if chosen.uid == os.geteuid() else []
            question, what = "Cancel this wait? y/n", "waits"
        elif isinstance(chosen, Job):
            mine = [(chosen.id, f"job {chosen.id}, {chosen.state}: {' '.join(chosen.command)}")]
            question, what = "Cancel this job, and end its processes? y/n", "jobs"
        else:
            mine = [
                (holder.lease, f"{holder.lease}  {holder.share}  {holder.program}  {holder.note}")
                for holder in samples.DeviceState(chosen, sample).holders
                if holder.mine and holder.lease
            ]
            question, what = "Release this lease, and end its processes? y/n", "leases"
        if not mine:
            self._tell(f"none of the {what} here is yours")
            return
        self.push_screen(Confirm(question, mine), self._end)

    def _end(self, key: str | None) -> None:
        """Cancel by identity in a thread, and show the result."""
        if not key:
            return

        def work() -> None:
            try:
                told = cancel_by_id(Ledger.open(), key)
            except AnyaccelError as error:
                told = f"{error} {error.hint}".strip()
            self._from_thread(self._tell, told)
            self._from_thread(self._begin)

        self.run_worker(work, thread=True, group="end")


def device_details(device: Device, sample: samples.Sample, room: int) -> list[Line]:
    """Return the lines about a device: facts, health, holders, processes, links."""
    state = samples.DeviceState(device, sample)
    seen = state.seen
    is_now, reason, remedy = state.health
    names = {each.id: each.name for each in sample.inventory.devices}
    facts = [
        ("device", f"{device.name}  {device.type}  {device.model}"),
        ("id", device.id),
        ("health", " ".join(filter(None, (is_now.value, reason, f"-> {remedy}" if remedy else "")))),
        ("memory", f"{memory_use(seen.memory_used_bytes, device.memory_bytes)} GiB"),
        ("load", output.percent(seen.utilization)),
        ("clocks", f"{megahertz(seen.clock_hz)}, of the memory {megahertz(seen.memory_clock_hz)}"),
        ("ecc", f"{_known(seen.ecc_errors_corrected)} corrected, {_known(seen.ecc_errors_uncorrected)} not"),
        ("pci", device.pci_bus_id or "-"),
        ("numa", _known(device.numa_node)),
        ("nodes", " ".join(device.nodes) or "-"),
        *([("labels", ", ".join(write_labels(device.labels)))] if device.labels else []),
        *((f"{name}", str(value)) for name, value in sorted(device.attributes.items())),
    ]
    links = [(names.get(other, other), str(strength)) for other, strength in device.links.items()]
    people = [
        (holder.user, f"{holder.share or 'no lease'}  {holder.command}  process {holder.pid}  {_of_lease(holder)}")
        for holder in state.holders
    ]
    processes = [
        (str(each.pid), f"{memory(each.memory_bytes)}  {process.read_name(each.pid)}") for each in seen.processes or ()
    ]
    found: list[Line] = [*_facts(facts, room)]
    for title, rows in (("Held and used by", people), ("Processes", processes), ("Links", links)):
        found += [[("", "")], [(f"{title}:", "bold")], *(_facts(rows, room) or [[("  -", "")]])]
    return found


def _searched(state: samples.DeviceState) -> str:
    """Return the text in which a filter is looked for."""
    device = state.device
    people = " ".join(f"{record.user} {record.note} {record.command}" for record in state.records or ())
    return f"{device.name} {device.type} {device.model} {device.id} {people}"


def _facts(facts: Sequence[tuple[str, str]], room: int) -> list[Line]:
    """Return a line for each name and its value, folded to a width."""
    facts = [(printable(name), text) for name, text in facts]
    width = max((cells(name) for name, _ in facts), default=0)
    found: list[Line] = []
    for name, text in facts:
        head = f"  {name}{' ' * (width - cells(name))}  "
        for number, line in enumerate(output.folded(text, room - width - 4)):
            found.append([(head if number == 0 else " " * (width + 4), "dim"), (line, "")])
    return found


def _of_lease(holder: samples.Holder) -> str:
    return f"lease {holder.lease}  for {since(holder.since)}  {holder.note}" if holder.lease else ""


def _known(value: object) -> str:
    return "-" if value is None else str(value)


def _waiting(sample: samples.Sample) -> list[tuple[str, list[str]]]:
    """Return the cells of each waiting request, by ticket."""
    return [
        (
            ticket.id,
            [
                str(place),
                ticket.user,
                ticket.request or "-",
                since(sample.at - ticket.waited),
                clock(ticket.starts),
                ticket.reason,
                ticket.note or "-",
            ],
        )
        for place, ticket in enumerate(sample.tickets, start=1)
    ]


def _job_key(job: Job) -> str:
    return f"job {job.id}"


def _job_row(job: Job) -> tuple[str, ...]:
    ran = "-" if job.started is None else since(job.started)
    return (job.id, job.state, job.request or "-", ran, output.device_names(job.devices), written_job(job))
