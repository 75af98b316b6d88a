"""A Slurm cluster of one node in a folder: slurmctld and slurmd as Debian ships them, without munge."""

import contextlib
import getpass
import shutil
import socket
import subprocess
import time

from waiting import PATIENCE

CONFIGURATION = """\
ClusterName=exports
SlurmctldHost=localhost
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={controller}
SlurmdPort={daemon}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
{exported} NodeHostname=localhost NodeAddr=localhost CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""


def write(folder, gres_conf, node_line):
    """Write gres.conf and slurm.conf, and return the latter's path."""
    folder.mkdir()
    for name in ("state", "spool"):
        (folder / name).mkdir()
    with socket.socket() as first, socket.socket() as second:
        first.bind(("localhost", 0))
        second.bind(("localhost", 0))
        ports = {"controller": first.getsockname()[1], "daemon": second.getsockname()[1]}
    (folder / "gres.conf").write_text(gres_conf)
    text = CONFIGURATION.format(user=getpass.getuser(), folder=folder, exported=node_line.rstrip(), **ports)
    (folder / "slurm.conf").write_text(text)
    return folder / "slurm.conf"


def read_back(configuration, node="node-1"):
    """What slurmd reads out of gres.conf: one dict per line that it prints, and its complaints."""
    done = subprocess.run(
        ["slurmd", "-G", "-N", node, "-f", str(configuration)], capture_output=True, text=True, timeout=60, check=False
    )
    lines = [line.partition("Gres ")[2] for line in done.stderr.splitlines() if "Gres Name=" in line]
    complaints = [line for line in done.stderr.splitlines() if "error" in line or "fatal" in line or "warn" in line]
    found = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]
    return found, [*complaints, *([f"exit status {done.returncode}"] if done.returncode else [])]


class Cluster:
    """Commands that speak to the daemons."""

    def __init__(self, configuration):
        self.environ = {"SLURM_CONF": str(configuration), "PATH": "/usr/bin:/usr/sbin:/bin:/sbin"}

    def call(self, *command):
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60, check=False)

    def node(self, name="node-1"):
        """What the controller says of the node."""
        shown = self.call("scontrol", "show", "node", name, "--oneliner", "--details").stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)


@contextlib.contextmanager
def running(configuration, node="node-1"):
    """Start both daemons, wait until the node has registered, and stop them."""
    daemons = []
    cluster = Cluster(configuration)
    log = configuration.parent / "log"
    try:
        with log.open("w") as output:
            for command in (["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", node]):
                path = shutil.which(command[0])
                daemons.append(
                    subprocess.Popen([path, *command[1:], "-f", str(configuration)], stdout=output, stderr=output)
                )
        until = time.monotonic() + PATIENCE
        while cluster.node(node).get("State") != "IDLE":
            assert time.monotonic() < until, f"{cluster.node(node)}\n{log.read_text()}"
            assert [daemon.poll() for daemon in daemons] == [None, None], log.read_text()
            time.sleep(0.1)
        yield cluster
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
