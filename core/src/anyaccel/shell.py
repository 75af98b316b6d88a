"""Lines and words for a shell: quoting, and statements that set and remove variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping

from anyaccel.errors import UsageError
from anyaccel.text import shown


def shell_quote(text: str) -> str:
    """Quote a text for any POSIX shell.

    Raises:
        UsageError: When the text is not one line of printable text: only some shells have a notation for it, and
            readers would not see its effect.
    """
    if not text.isprintable():
        raise UsageError(
            f"a shell command takes printable text only (got {shown(text)})",
            hint="rename what has this name, or read the value from JSON (--json)",
        )
    return shlex.quote(text)


def statements(variables: Mapping[str, str], unset: Collection[str]) -> str:
    """Write the lines that set and remove variables of a shell.

    Raises:
        UsageError: When a value is not printable.
    """
    lines = [f"unset {name}" for name in sorted(unset)]
    lines += [f"export {name}={shell_quote(value)}" for name, value in sorted(variables.items())]
    return "".join(f"{line}\n" for line in lines)


def exports(variables: Mapping[str, str], unset: Collection[str]) -> str:
    """Write lines that set and remove variables of a shell that may be bash, zsh, fish or any POSIX shell.

    Fish has no ``unset``, so each removal has a form for fish as well.

    Raises:
        UsageError: When a value is not printable.
    """
    lines = [
        f"command -v unset >/dev/null && unset {name}; command -v unset >/dev/null || set -e {name}"
        for name in sorted(unset)
    ]
    lines += [f"export {name}={_quote_for_all(value)}" for name, value in sorted(variables.items())]
    return "".join(f"{line};\n" for line in lines)


def _quote_for_all(text: str) -> str:
    """Quote a text for fish, too, where a backslash is special in single quotes."""
    shell_quote(text)  # refuses text that is not printable
    parts = re.split(r"([\\']+)", text)
    quoted = (
        f"'{part}'" if number % 2 == 0 else '"' + part.replace("\\", "\\\\") + '"'
        for number, part in enumerate(parts)
        if part
    )
    return "".join(quoted) or "''"
