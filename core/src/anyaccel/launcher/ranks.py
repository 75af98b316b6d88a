"""One process per device, each of which knows its rank: what ``torchrun`` does for one machine.

All see all devices of the job and choose theirs by ``LOCAL_RANK``, as programs that are written for ``torchrun`` do.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

from anyaccel.launcher.bind import divided
from anyaccel.launcher.environment import amended
from anyaccel.launcher.launch import Launch
from anyaccel.launcher.rendezvous import Rendezvous
from anyaccel.launcher.start import make_start_error
from anyaccel.launcher.time_limit import STATUS, TimeLimit, say
from anyaccel.linux import process
from anyaccel.linux.teardown import GRACE_SECONDS, Teardown, describe_left, find_tree
from anyaccel.model import replace
from anyaccel.vendors import close as close_vendors

LOOK_SECONDS = 1.0
FORWARDED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT
)  # fmt: skip
_STOP = signal.SIGTSTP


def run_ranks(
    launch: Launch,
    command: Sequence[str],
    rendezvous: Rendezvous,
    *,
    grace: float = GRACE_SECONDS,
    limit: TimeLimit | None = None,
) -> int:
    """Run a command once for each device, and wait for all of them. Ranks of one NUMA node divide its processors.

    Signals are passed on to all ranks and what they started. When one fails, the others are asked to end, and killed if
    they do not. The signal mask of this thread stays changed: the process should end afterwards.

    Args:
        launch: What was prepared for the job.
        command: The command and its arguments.
        rendezvous: Where the ranks meet; it is kept until they have ended.
        grace: Seconds between asking a rank to end and killing it.
        limit: The time limit, by which the monitor or the supervisor ends all of this; None for none.

    Returns:
        0 when all have ended well, 124 when the time limit has ended them, else the exit status of the first that did
        not end well; 128 and its number for a signal.

    Raises:
        EnforcementError: When they cannot be confined.
        CommandNotFoundError, CommandNotRunnableError: When the command cannot be started.
    """
    close_vendors()
    # What is ignored, as SIGHUP is under nohup, stays ignored. All others wait until we ask for them.
    signals = {number for number in (*FORWARDED, _STOP) if signal.getsignal(number) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals | {signal.SIGCHLD})
    if signal.SIGINT in signals:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an early signal goes to what catches it: the ranks, not to us
    with contextlib.suppress(OSError):
        process.adopt_orphans()  # what a rank leaves behind ends with the others where one fails
    ranks = _Ranks(grace)
    allocation = launch.environment.allocation
    count = max(1, len(allocation.devices))
    parts = divided([device.numa_node for device in allocation.devices], allocation.processors) or [()]
    try:
        for rank in range(count):
            place = make_rank_variables(rank, count, local=(rank, count)) | rendezvous.variables
            environment = launch.environment.with_variables(place)
            if parts[rank]:
                environment = amended(environment, replace(allocation, processors=parts[rank]))
            ranks.start(replace(launch, environment=environment), command, first=rank == 0)
        status = ranks.wait(signals)
        return STATUS if ranks.asked and limit is not None and limit.over else status
    finally:
        ranks.kill()


def make_rank_variables(rank: int, count: int, *, local: tuple[int, int]) -> dict[str, str]:
    """What a process learns of its place among those of a job.

    Args:
        rank: Its number, from 0.
        count: How many there are.
        local: The same among those on its machine.
    """
    local_rank, local_count = local
    place = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": local_count}
    return {name: str(value) for name, value in place.items()}


class _Ranks:
    """The processes, each the leader of a process group of its own, so that a signal reaches what it started, too.

    Attributes:
        asked: Whether they were asked to end (SIGTERM) from outside.
    """

    def __init__(self, grace: float) -> None:
        self.asked = False
        self._running: list[int] = []
        self._status = 0
        self._end = Teardown(find_tree(dict([process.me()])), grace=grace)  # this process has no other children

    def start(self, launch: Launch, command: Sequence[str], *, first: bool) -> None:
        # Another process group than the terminal's would be stopped when it reads from there.
        with_input = first and not os.isatty(0)
        actions = [] if with_input else [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        ignored = signal.SIGPIPE, signal.SIGXFSZ  # by Python
        try:
            pid = launch.spawn(command, file_actions=actions, setpgroup=0, setsigmask=(), setsigdef=ignored)
        except OSError as error:
            raise make_start_error(command[0], error) from error
        self._running.append(pid)

    def wait(self, signals: set[signal.Signals]) -> int:
        """Wait until all have ended, and where one has failed until all that they started has."""
        while True:
            self._reap()
            pause = self._end.step() if self._status else LOOK_SECONDS
            if pause is None or not (self._running or self._status):
                break
            came = signal.sigtimedwait(signals | {signal.SIGCHLD}, pause)
            if came is None or came.si_signo == signal.SIGCHLD:
                continue
            self.asked = self.asked or came.si_signo == signal.SIGTERM
            self._pass_on(signal.Signals(came.si_signo))
            if came.si_signo == _STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
        for line in describe_left(self._end, "the ranks"):
            say(line)
        return self._status

    def kill(self) -> None:
        """Let nothing be left where they have not ended."""
        if self._running:
            self._end.kill()
            self._end.run()

    def _reap(self) -> None:
        """Note which ranks have ended, and reap the orphans of which this process has become the parent."""
        for pid in tuple(self._running):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._running.remove(pid)
                status = process.reap(pid)
                self._status = self._status or status
        process.reap_children(self._running)

    def _pass_on(self, number: signal.Signals) -> None:
        for leader in self._running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, number)
                if number == signal.SIGTERM:
                    os.killpg(leader, signal.SIGCONT)  # a stopped process hears only once it goes on
