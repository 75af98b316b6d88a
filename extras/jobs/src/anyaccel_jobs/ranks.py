"""Run a command once per device, with ranks, as ``torchrun`` does on a single machine.

Each process sees all devices of the job and chooses its own by ``LOCAL_RANK``, as programs for ``torchrun`` do.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Sequence

from anyaccel.launcher import Launch, Rendezvous, make_rank_variables, make_start_error, time_limit
from anyaccel.linux import GRACE_SECONDS, Teardown, describe_left, find_tree, process
from anyaccel.model import replace
from anyaccel.probe import processors
from anyaccel.vendors import close as close_vendors

from anyaccel_jobs.rank_output import RankOutput

LOOK_SECONDS = 1.0
FORWARDED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT
)  # fmt: skip
_STOP = signal.SIGTSTP
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_ranks(
    launch: Launch,
    command: Sequence[str],
    rendezvous: Rendezvous,
    *,
    grace: float = GRACE_SECONDS,
    limit: time_limit.TimeLimit | None = None,
) -> int:
    """Run a command once per device, and wait for the ranks. Ranks of a NUMA node divide the node's processors.

    Signals go to all ranks and their children; SIGTSTP also stops this process. If a rank fails, the others get
    SIGTERM, and SIGKILL after the grace period, and standard error names the rank. The process should exit afterwards:
    signal mask and SIGINT of this thread stay changed, it keeps adopting orphans, and the vendors' processes have
    ended.

    Args:
        launch: The start plan of the job.
        command: The command and its arguments.
        rendezvous: The port of the ranks, which the caller keeps open until they have exited.
        grace: Seconds between SIGTERM and SIGKILL.
        limit: The time limit, which the monitor or the supervisor enforces; None for none.

    Returns:
        0 if all ranks exited with 0, 124 if the time limit ended them, else the exit status of the first rank that
        failed: 128 plus its number for a signal.

    Raises:
        EnforcementError: If the processes cannot be confined.
        CommandNotFoundError, CommandNotRunnableError: If the command cannot be started.
        KeyboardInterrupt: If SIGINT to this process ended a rank.
    """
    close_vendors()
    # A signal that is ignored, as SIGHUP is under nohup, stays ignored. The others stay pending until sigtimedwait().
    signals = {number for number in (*FORWARDED, _STOP) if signal.getsignal(number) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals | {signal.SIGCHLD})
    if signal.SIGINT in signals:
        # The early signal goes to processes with a handler: not to this one.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        process.adopt_orphans()  # so that a failure also ends the processes that a rank leaves behind
    ranks = _RankGroup(grace, limit)
    allocation = launch.environment.allocation
    count = max(1, len(allocation.devices))
    parts = divide_processors([device.numa_node for device in allocation.devices], allocation.processors) or [()]
    try:
        for rank in range(count):
            variables = make_rank_variables(rank, count, local=(rank, count)) | rendezvous.variables
            environment = launch.environment.with_variables(variables)
            if parts[rank]:
                environment = environment.with_allocation(replace(allocation, processors=parts[rank]))
            ranks.start(replace(launch, environment=environment), command, rank)
        ranks.output.start()
        status = ranks.wait(signals)
        if ranks.interrupted and status == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        return time_limit.STATUS if ranks.asked and limit is not None and limit.over else status
    finally:
        ranks.kill()
        ranks.output.finish()


def divide_processors(devices_nodes: Sequence[int | None], among: Collection[int]) -> list[tuple[int, ...]]:
    """Divide processors among the ranks of a job, by whole cores.

    Args:
        devices_nodes: The NUMA node of each rank's device, in the order of the ranks; None if unknown.
        among: The processors of the job; empty if the job is not bound.

    Returns:
        The processors of each rank: its part of its node's processors, or all of them if the node has fewer cores than
        ranks. An empty tuple for a rank of an unknown node.
    """
    of_node = {node: sorted({*numbers} & {*among}) for node, numbers in processors.by_node().items()}
    found = []
    for rank, node in enumerate(devices_nodes):
        cores = _group_by_core(of_node.get(node, []) if node is not None else [])
        ranks = [other for other, theirs in enumerate(devices_nodes) if theirs == node]
        place, count = ranks.index(rank), len(ranks)
        if len(cores) >= count:  # else a rank would get no core at all
            cores = cores[place * len(cores) // count : (place + 1) * len(cores) // count]
        found.append(tuple(sorted(processor for core in cores for processor in core)))
    return found


def _group_by_core(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Group processors by core; a processor without known siblings is a core."""
    cores: dict[tuple[int, ...], list[int]] = {}
    for processor in numbers:
        cores.setdefault(processors.siblings(processor) or (processor,), []).append(processor)
    return [tuple(core) for core in cores.values()]


class _RankGroup:
    """The processes of a job; each leads a process group, so a signal also reaches the children.

    Attributes:
        asked: Whether SIGTERM came from outside.
        interrupted: Whether SIGINT came from outside.
        output: Marks the output at a terminal.
    """

    def __init__(self, grace: float, limit: time_limit.TimeLimit | None) -> None:
        self.asked = self.interrupted = False
        self.output = RankOutput()
        self._limit = limit
        self._ended_from_outside = False
        self._running: dict[int, int] = {}
        self._status = 0
        self._end = Teardown(find_tree(dict([process.me()])), grace=grace)  # it has no other children

    def start(self, launch: Launch, command: Sequence[str], rank: int) -> None:
        """Start a rank, by a plan, as the leader of a process group.

        Only rank 0 reads standard input, and only if that is no terminal. Signals ignored by Python get their default
        action.

        Raises:
            EnforcementError: If the process cannot be confined.
            CommandNotFoundError, CommandNotRunnableError: If the command cannot be started.
        """
        # The kernel stops a process outside the terminal's foreground group when it reads from the terminal.
        with_input = rank == 0 and not os.isatty(0)
        actions: list[tuple[object, ...]] = [*self.output.open(rank)]
        if not with_input:
            actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
        ignored = signal.SIGPIPE, signal.SIGXFSZ  # by Python
        try:
            pid = launch.spawn(command, file_actions=actions, setpgroup=0, setsigmask=(), setsigdef=ignored)
        except OSError as error:
            raise make_start_error(command[0], error) from error
        self._running[pid] = rank

    def wait(self, signals: set[signal.Signals]) -> int:
        """Wait for the exit of the ranks; after a failure, end the other ranks and all descendants.

        Args:
            signals: The blocked signals, which are passed on to the ranks; SIGTSTP also stops this process.

        Returns:
            The exit status of the first rank that failed; 0 for none. Processes that remain are named on standard
            error.
        """
        while True:
            self._reap()
            pause = self._end.step() if self._status else LOOK_SECONDS
            if pause is None or not (self._running or self._status):
                break
            came = signal.sigtimedwait(signals | {signal.SIGCHLD}, pause)
            if came is None or came.si_signo == signal.SIGCHLD:
                continue
            self.asked = self.asked or came.si_signo == signal.SIGTERM
            self.interrupted = self.interrupted or came.si_signo == signal.SIGINT
            self._ended_from_outside = self._ended_from_outside or came.si_signo in _ENDING
            self._pass_on(signal.Signals(came.si_signo))
            if came.si_signo == _STOP:
                os.kill(os.getpid(), signal.SIGSTOP)  # the shell waits for this process, not for the ranks
        # Such as processes of another user, or in an uninterruptible sleep.
        for line in describe_left(self._end, "the ranks"):
            time_limit.print_line(line)
        return self._status

    def kill(self) -> None:
        """Kill all descendants of this process, if a rank still runs, and wait for their exit."""
        if self._running:
            self._end.kill()
            self._end.run()

    def _reap(self) -> None:
        """Forget exited ranks, keep and print the first failure, and reap orphans of the ranks; never waits."""
        for pid in tuple(self._running):
            # Without reaping it: until the table is updated, no other process may get its id.
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                rank = self._running.pop(pid)
                status = process.reap(pid)
                if status and not self._status:
                    self._report(rank, end)
                self._status = self._status or status
        process.reap_children(self._running)

    def _report(self, rank: int, end: os.waitid_result) -> None:
        """Print which rank has failed first, unless the time limit or a signal to end the job came before."""
        killed = end.si_code != os.CLD_EXITED
        over = self._limit is not None and self._limit.over
        if over or self._ended_from_outside or (killed and end.si_status in _ENDING):
            return
        time_limit.print_line(
            f"rank {rank} {process.describe_end(-end.si_status if killed else end.si_status)}, which ends the job"
        )

    def _pass_on(self, number: signal.Signals) -> None:
        """Send a signal to the process group of each running rank; SIGTERM also lets stopped processes continue."""
        for leader in self._running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, number)
                if number == signal.SIGTERM:
                    os.killpg(leader, signal.SIGCONT)  # a stopped process gets SIGTERM only after it continues
