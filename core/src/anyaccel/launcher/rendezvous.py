"""A port at which the processes of one job find each other, and that no other job on the machine gets."""

from __future__ import annotations

import errno
import socket

from anyaccel.errors import AnyaccelError

ADDRESS = "127.0.0.1"


class Rendezvous:
    """A port that is kept from everybody else for as long as this, or a copy of its descriptor, is open.

    It is bound and does not listen. The kernel then gives it to nobody who takes any free port, while a server that
    asks for this very port with ``SO_REUSEADDR``, as those of frameworks do, gets it.

    Args:
        address: Of this machine, for the processes of the job.

    Attributes:
        port: The port.

    Raises:
        AnyaccelError: When there is none.
    """

    def __init__(self, address: str = ADDRESS) -> None:
        self._address = address
        try:
            self._socket = _bound()
        except OSError as error:
            raise AnyaccelError(f"no port is free for the processes of the job to meet at: {error.strerror}") from error
        self.port: int = self._socket.getsockname()[1]

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which programs learn of it; those with PET are read by ``torchrun`` itself."""
        names = ("MASTER_{}", "PET_MASTER_{}")
        values = {"ADDR": self._address, "PORT": str(self.port)}
        return {name.format(key): value for name in names for key, value in values.items()}

    def inherit(self) -> None:
        """Let the program that replaces this process keep the port, and all that this process starts."""
        self._socket.set_inheritable(True)

    def close(self) -> None:
        """Keep it no longer."""
        self._socket.close()


def _bound() -> socket.socket:
    """A socket that is bound to one port of all addresses."""
    try:
        return _bind(socket.AF_INET6, "::")
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENOPROTOOPT):
            raise
        return _bind(socket.AF_INET, "0.0.0.0")  # noqa: S104 - it never listens


def _bind(family: socket.AddressFamily, address: str) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((address, 0))
    except BaseException:
        made.close()
        raise
    return made
