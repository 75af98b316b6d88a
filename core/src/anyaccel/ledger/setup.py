"""Setup by the administrator: the files with which the users of a machine share its devices."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable

from anyaccel import configuration, settings
from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.ledger.directory import MACHINE_WIDE, MODE_SHARED
from anyaccel.ledger.journal import MACHINE_DIRECTORY
from anyaccel.ledger.ledger import Ledger
from anyaccel.linux import write_whole
from anyaccel.model import Value

TMPFILES = "/etc/tmpfiles.d/anyaccel.conf"
"""File from which systemd and others read the directories to make at boot: tmpfiles.d(5)."""


class Step(Value):
    """A file or directory to set up.

    Attributes:
        path: Path to make.
        summary: Purpose.
        done: Whether the path exists already, as it must be.
        make: Makes the path.
    """

    path: str
    summary: str
    done: bool
    make: Callable[[], None]

    def perform(self) -> None:
        """Make the path.

        Raises:
            LedgerError: When the machine's directory cannot be made, or leases cannot be moved.
            AnyaccelError: When another path cannot be made.
        """
        try:
            self.make()
        except OSError as error:
            raise AnyaccelError(
                f"{self.path} cannot be made: {error.strerror}", hint="make room, or run setup as root"
            ) from error


def steps(root: str = "") -> list[Step]:
    """Return each step of the setup, in order, also steps that are done; nothing is made before a step is performed.

    Args:
        root: A directory that is another system's ``/``, such as an image that is being built; this system when empty.
            There, nothing is made below ``/run``, which is made anew at each boot.
    """
    directory = f"{root}{MACHINE_WIDE}"
    tmpfiles, config = f"{root}{TMPFILES}", f"{root}{configuration.MACHINE_FILE}"
    journal = f"{root}{MACHINE_DIRECTORY}"
    line = os.path.join(os.path.dirname(__file__), "tmpfiles.conf")
    with open(line, encoding="utf-8") as file:
        setting = file.read()
    made = [
        Step(
            path=tmpfiles,
            summary="makes that directory at each boot",
            done=_holds(tmpfiles, setting),
            make=lambda: _write(tmpfiles, setting),
        ),
        Step(
            path=config,
            summary="settings for all users, with comments",
            done=os.path.lexists(config),  # with any content: the file belongs to the administrator
            make=lambda: _write(config, settings.template("machine")),
        ),
        Step(
            path=journal,
            summary="journals of ended leases, for reports about all users",
            done=_is_shared(journal),
            make=lambda: _make_journal(journal),
        ),
    ]
    if not root:
        shared = Step(
            path=directory,
            summary="where all users keep their leases",
            done=_is_shared(directory),
            make=_share,
        )
        made.insert(0, shared)
    return made


def check_user(root: str) -> None:
    """Check that this user may set up a system: root alone if ``root`` is empty, any user for any other ``root``.

    Raises:
        UsageError: When only root may.
    """
    if not root and os.geteuid() != 0:
        raise UsageError(
            f"setup makes files of the machine, for which it must be run by root (this is user {os.geteuid()})",
            hint="sudo anyaccel setup; 'anyaccel setup --dry-run' shows what that does",
        )


def _is_shared(path: str) -> bool:
    """Return whether a path is a directory of root with mode 1777; False for a missing path and a symbolic link."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        return found.st_uid == 0 and found.st_mode == stat.S_IFDIR | MODE_SHARED
    return False


def _share() -> None:
    """Make the machine's directory, or correct owner and mode, and move the active leases of users there.

    The users' own directories are removed after the move, unless other files are left there. ``ANYACCEL_STATE_DIR`` is
    ignored. A symbolic link is not corrected, but refused.

    Raises:
        LedgerError: When the directory cannot be made, or leases cannot be moved.
        OSError: When owner or mode cannot be changed.
    """
    if os.path.isdir(MACHINE_WIDE) and not os.path.islink(MACHINE_WIDE):
        os.chown(MACHINE_WIDE, 0, 0)
        os.chmod(MACHINE_WIDE, MODE_SHARED)
    environ = {name: value for name, value in os.environ.items() if name != "ANYACCEL_STATE_DIR"}
    Ledger.open(environ).make()


def _make_journal(path: str) -> None:
    """Make the directory in which each user appends to a file of their own, with its parents, or correct the mode.

    The owner of an existing directory is not changed.

    Raises:
        OSError: When that fails.
    """
    os.makedirs(path, mode=0o755, exist_ok=True)
    os.chmod(path, MODE_SHARED)  # makedirs applies the umask


def _holds(path: str, text: str) -> bool:
    """Return whether a file has exactly this text; False if the file cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read() == text
    except (OSError, ValueError):
        return False


def _write(path: str, text: str) -> None:
    """Write a file of the machine, atomically in place of a present file or link, and make its directories.

    Raises:
        OSError: When that fails.
    """
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    write_whole(path, text)
