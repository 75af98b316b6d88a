"""The port at which the processes of a job meet belongs to the job."""

import contextlib
import errno
import socket

import pytest
from anyaccel.launcher import Rendezvous
from waiting import PATIENCE


def test_a_port_is_the_jobs_own_and_no_other_programs():
    with contextlib.closing(Rendezvous()) as one, contextlib.closing(Rendezvous()) as other:
        assert one.port != other.port
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")):
            with socket.socket(family) as rival, pytest.raises(OSError, match="in use") as refused:
                rival.bind((address, one.port))  # a program that does not know of it
            assert refused.value.errno == errno.EADDRINUSE
        with socket.create_server(("127.0.0.1", one.port)) as server:  # as the ranks do
            socket.create_connection(server.getsockname()[:2], PATIENCE).close()
            server.accept()[0].close()


def test_the_kernel_gives_a_kept_port_to_no_program():
    with contextlib.closing(Rendezvous()) as kept:
        ports = set()
        for _ in range(3000):
            with socket.socket() as rival:
                rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                rival.bind(("", 0))
                ports.add(rival.getsockname()[1])
        assert kept.port not in ports
