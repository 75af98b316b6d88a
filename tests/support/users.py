"""A machine of several users for a moment: runs their commands, each in a shell of their own, and tells what they did.

Run by root with ``unshare --mount --pid``: what it makes is gone when it ends, and so is every process. Standard input
is JSON: the users' names with their numbers, paths that have to be readable for everybody, the environment, and the
commands with the user who types each. Standard output is JSON: exit status and output of each, or why there are none.
"""

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

from empty_folders import empty, mount

_EMPTY = {"/run", "/dev/shm", "/tmp", "/home", "/root", "/var/lib"}


def closed(path: str) -> str | None:
    """Return the topmost directory above a path that others may not enter."""
    above = [str(each) for each in reversed(Path(path).parents)]
    return next((each for each in above if not os.stat(each).st_mode & 0o001), None)


def make_machine(users: dict[str, int], keep: list[str]) -> None:
    """Give it empty directories and users; keep paths where they are, and let everybody get there."""
    etc = subprocess.run(["tar", "-C", "/etc", "-c", "."], capture_output=True, check=True).stdout
    empty([*(_EMPTY | set(filter(None, map(closed, keep))))], keep)
    mount("none", "/etc", "tmpfs", options="mode=755")
    subprocess.run(["tar", "-C", "/etc", "-x"], input=etc, check=True)
    for name, uid in users.items():
        home = f"/home/{name}"
        # In front: the first line of a name counts, and the machine may have a user of this name.
        for path, line in (("passwd", f"{name}:x:{uid}:{uid}::{home}:/bin/bash"), ("group", f"{name}:x:{uid}:")):
            file = Path("/etc", path)
            file.write_text(f"{line}\n{file.read_text()}")
        os.mkdir(home)
        os.chown(home, uid, uid)


class Shell:
    """A shell of one user, which lasts."""

    def __init__(self, name: str, environ: dict[str, str]) -> None:
        entry = pwd.getpwnam(name)
        self._process = subprocess.Popen(
            ["bash", "--norc"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], cwd=entry.pw_dir,
            env=environ | {"HOME": entry.pw_dir, "USER": name, "LOGNAME": name},
        )  # fmt: skip
        self._out = f"{entry.pw_dir}/.out"

    def do(self, command: str) -> tuple[int, str]:
        """Type a command; returns its exit status, and what it has printed until it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{{ {command}\n}} >{self._out} 2>&1 </dev/null; echo $?\n")
        self._process.stdin.flush()
        status = self._process.stdout.readline()
        return int(status or 1), Path(self._out).read_text()


def main() -> None:
    """Do what standard input says."""
    told = json.load(sys.stdin)
    try:
        make_machine(told["users"], told["keep"])
    except OSError as error:
        json.dump({"skip": f"no machine of several users can be made here: {error}"}, sys.stdout)
        return
    shells = {name: Shell(name, told["environ"]) for name in ("root", *told["users"])}
    for name in told["users"]:
        status, printed = shells[name].do(told["check"])
        if status:
            json.dump({"skip": f"other users cannot run {told['check']} here: {printed}"}, sys.stdout)
            return
    json.dump({"results": [shells[name].do(command) for name, command in told["commands"]]}, sys.stdout)


if __name__ == "__main__":
    main()
