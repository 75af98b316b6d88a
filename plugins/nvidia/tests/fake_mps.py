"""A stand-in for the control daemon of MPS and its tool, for both documented protocols.

The daemon listens at the Unix socket ``control`` of the pipe directory, and leaves the socket behind when it ends, as
the daemons of drivers 535 and 580 do. The file ``clients`` beside the socket holds the process ids of its clients.
"""

import json
import os
import socket
import sys

PIPE = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
CONTROL = os.path.join(PIPE, "control")
NOTED = os.path.join(PIPE, "nvidia-cuda-mps-control.pid")
SERVER = 7001


def main():
    if "-d" in sys.argv[1:]:
        return start(int(os.environ.get("CUDA_MPS_PROTOCOL_VERSION", "2")))
    text = "" if sys.argv[1:] else sys.stdin.read()
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(CONTROL)
    except OSError:
        print("Cannot find MPS control daemon process", file=sys.stderr)
        return 1
    with client, client.makefile("rw") as file:
        print(json.dumps([sys.argv[1:], text]), file=file, flush=True)
        status, said = json.loads(file.readline())
    sys.stdout.write(said)
    return status


def start(protocol):
    listening = socket.socket(socket.AF_UNIX)
    if os.path.exists(CONTROL):  # of a daemon that has ended
        os.unlink(CONTROL)
    listening.bind(CONTROL)
    listening.listen()
    if os.fork():
        return 0
    os.setsid()
    if "KEEPS_OUTPUT" not in os.environ:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
    with open(NOTED, "w") as file:
        file.write(str(os.getpid()))
    while True:
        connection, _ = listening.accept()
        with connection, connection.makefile("rw") as file:
            if not (line := file.readline()):  # a look whether a daemon listens
                continue
            arguments, text = json.loads(line)
            goes_on, answer = (legacy if protocol == 2 else scripted)(arguments, text)
            if not goes_on:
                listening.close()
                os.unlink(NOTED)
            print(json.dumps(answer), file=file, flush=True)
        if not goes_on:
            os._exit(0)


def clients():
    try:
        with open(os.path.join(PIPE, "clients")) as file:
            return file.read().split()
    except FileNotFoundError:
        return []


def legacy(arguments, text):
    if arguments:
        return True, (1, "unknown option\n")
    match text.split():
        case ["get_server_list"]:
            return True, (0, f"{SERVER}\n" if clients() else "")
        case ["get_client_list", number] if int(number) == SERVER:
            return True, (0, "".join(f"{pid}\n" for pid in clients()))
        case ["quit"]:
            return False, (0, "")
    return True, (0, "Unrecognized command\n")


def scripted(arguments, _):
    match arguments:
        case ["server", "list", "--format=csv"]:
            return True, (0, f"name, pid, uid\ndefault, {SERVER}, {os.getuid()}\n")
        case ["client", "list", "--all", "--format=csv"]:
            rows = [f"default, {SERVER}, default, {pid}" for pid in clients()]
            return True, (0, "\n".join(["server, server_pid, namespace, pid", *rows]) + "\n")
        case ["--quit"]:
            return False, (0, "")
    return True, (1, "unknown module\n")


sys.exit(main())
