"""The variables by which the processes of a job find each other, and a port reserved for them."""

from __future__ import annotations

import socket

from anyaccel.errors import AnyaccelError

ADDRESS = "127.0.0.1"


class Rendezvous:
    """A port, reserved while this object, or a copy of the descriptor, is open.

    The socket is bound and does not listen. The kernel then gives the port to no program that asks for any free port.
    A server that asks for this very port with ``SO_REUSEADDR``, as those of frameworks do, gets it.

    Args:
        address: Address of this machine, for the processes of the job.

    Attributes:
        port: The port.

    Raises:
        AnyaccelError: If no port is free.
    """

    def __init__(self, address: str = ADDRESS) -> None:
        self._address = address
        try:
            self._socket = _bind_any_port()
        except OSError as error:
            raise AnyaccelError(f"no port is free for the processes of the job to meet at: {error.strerror}") from error
        self.port: int = self._socket.getsockname()[1]

    @property
    def variables(self) -> dict[str, str]:
        """Variables with address and port: ``MASTER_ADDR``, ``MASTER_PORT``; both also with ``PET_`` for torchrun."""
        names = ("MASTER_{}", "PET_MASTER_{}")
        values = {"ADDR": self._address, "PORT": str(self.port)}
        return {name.format(key): value for name in names for key, value in values.items()}

    def inherit(self) -> None:
        """Let child processes, and a program in place of this process, inherit the reservation."""
        self._socket.set_inheritable(True)

    def close(self) -> None:
        """Close the descriptor; the port is free once inherited copies are closed, too."""
        self._socket.close()


def make_rank_variables(rank: int, count: int, *, local: tuple[int, int]) -> dict[str, str]:
    """Return ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE`` of a process, as text.

    Args:
        rank: The rank, from 0.
        count: The number of ranks.
        local: Rank and number of ranks on this machine.
    """
    local_rank, local_count = local
    place = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": local_count}
    return {name: str(value) for name, value in place.items()}


def _bind_any_port() -> socket.socket:
    """Return a socket bound to a free port on every address, of IPv6 and IPv4 if the machine has both, else of IPv4.

    The socket does not listen, and leaves the port to servers with ``SO_REUSEADDR``.

    Raises:
        OSError: If no port or descriptor is free.
    """
    # Bound on every address: a framework may listen on any of them.
    both = socket.has_dualstack_ipv6()
    made = socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(("", 0))
    except BaseException:
        made.close()
        raise
    return made
