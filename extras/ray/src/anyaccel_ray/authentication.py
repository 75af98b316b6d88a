"""Ray's token authentication: find the user's token, and recognize a cluster with a different token.

Ray supports tokens since 2.52, and a cluster that requires one refuses every client without it. If ``RAY_AUTH_MODE`` is
not set, Ray 2.60 uses an existing token in ``ray start --head`` and in a program that discovers a cluster. In ``ray
start --address`` and in a program that names an address, Ray does not, and is refused after 20 seconds. Here an
existing token is used in all four cases. Only Ray reads the token: no command line, message or variable of ours
contains it.
Sources: ``ray/_private/authentication`` of Ray 2.60, and the page "Ray token authentication" of its documentation.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pwd
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anyaccel.errors import UsageError

MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  # noqa: S105 - the name of a variable
DEFAULT_PATH = "~/.ray/auth_token"
_WITH_TOKEN = "token"  # noqa: S105 - a value of the mode
_MAKE_ONE = f"make one with 'ray get-auth-token --generate', or take that of the cluster: copy its {DEFAULT_PATH} here"
_CONNECT_SECONDS = 3.0


def token_source(environ: Mapping[str, str]) -> str:
    """Return where Ray finds its token: the name of a variable, or the path of a file; empty if there is no token.

    Raises:
        UsageError: When ``RAY_AUTH_TOKEN_PATH`` names a file without a token, which Ray refuses.
    """
    if environ.get(TOKEN, "").strip():
        return TOKEN
    named = environ.get(TOKEN_PATH)
    if named:
        if not _holds_text(named):
            raise UsageError(
                f"{TOKEN_PATH} must name a file that holds a token and can be read (got {named!r})",
                hint=f"correct it, or unset it to use {DEFAULT_PATH}",
            )
        return named
    home = environ["HOME"] if "HOME" in environ else _home_of_account()
    return DEFAULT_PATH if home and _holds_text(os.path.join(home, DEFAULT_PATH.removeprefix("~/"))) else ""


def _home_of_account() -> str:
    """Return the home directory that Ray uses without HOME."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a process of Ray uses the existing token; none if the user has set a mode.

    Raises:
        UsageError: When the environment requires a token, and there is none.
    """
    source = token_source(environ)
    if environ.get(MODE, "").lower() == _WITH_TOKEN and not source:
        raise UsageError(f"{MODE}={_WITH_TOKEN} is set and there is no token of Ray's", hint=_MAKE_ONE)
    return {MODE: _WITH_TOKEN} if source and MODE not in environ else {}


def use_token() -> None:
    """Make Ray in this process use the existing token, also for a cluster whose address is named.

    Raises:
        UsageError: When ``RAY_AUTH_TOKEN_PATH`` names a file that holds none.
    """
    if MODE in os.environ or not token_source(os.environ):
        return
    raylet = _raylet()
    if not hasattr(raylet, "get_authentication_mode"):  # a version that knows no tokens
        return
    os.environ[MODE] = _WITH_TOKEN
    raylet.Config.initialize("")  # again: Ray reads its variables when it is imported


def check_admission(address: str) -> None:
    """Check that a cluster accepts our token; return without a result if there is no cluster, or Ray is too old.

    Ray itself retries for 20 seconds and then reports only that it could not connect.

    Args:
        address: Address of the cluster, as ``ray.init`` takes it.

    Raises:
        UsageError: When the cluster requires a token that we do not have, or the environment requires one and there is
            none.
    """
    raylet = _raylet()
    refusal = getattr(raylet, "AuthenticationError", None)
    found = _host_and_port(address)
    if refusal is None or found is None or not _listens(found):
        return
    variables(os.environ)
    try:
        raylet.GcsClient(address=found)
    except refusal as error:
        raise _refused(address, os.environ) from error
    except Exception:  # noqa: BLE001 - Ray reports any other problem when it connects
        return


def _raylet() -> Any:
    """Return Ray's compiled module, which has no types; None without Ray."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("ray._raylet")
    return None


def _refused(address: str, environ: Mapping[str, str]) -> UsageError:
    source = token_source(environ)
    if environ.get(MODE, _WITH_TOKEN).lower() != _WITH_TOKEN:
        return UsageError(
            f"the Ray cluster at {address!r} wants an authentication token, and {MODE}={environ[MODE]} keeps Ray from"
            " using one",
            hint=f"unset {MODE}",
        )
    what = f"the one in {source} is another" if source else "there is none here"
    return UsageError(
        f"the Ray cluster at {address!r} wants its authentication token, and {what}",
        hint=f"copy {DEFAULT_PATH} of the user who started the cluster here, or name a copy with {TOKEN_PATH};"
        " address='local' makes a cluster of your own",
    )


def _host_and_port(address: str) -> str | None:
    """Return host and port of the cluster's control process; None if there are none, as for ``ray://`` addresses."""
    if "://" in address:
        return None
    with contextlib.suppress(Exception):  # a private function, which may change with Ray's versions
        from ray._private import services  # type: ignore[import-not-found, unused-ignore]

        found: Any = services.canonicalize_bootstrap_address(address)
        return found if isinstance(found, str) else None
    return None


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def _holds_text(path: str) -> bool:
    """Return whether a file contains more than white space. A pipe counts without a look: it can be read only once."""
    try:
        file = Path(path)
        if file.exists() and not file.is_file():
            return not file.is_dir()
        with file.open("rb") as content:
            return bool(content.read(4096).strip())
    except OSError:
        return False
