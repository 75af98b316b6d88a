"""Shells: the variables by which what is started sees the exported devices and no other."""

from __future__ import annotations

import shlex

from anyaccel.exports.source import Export, Source
from anyaccel.model import EnvEdits


def export(source: Source) -> Export:
    """Write ``unset`` and ``export`` lines for a shell, such as for .envrc or /etc/profile.d."""
    edits = source.everything
    lines = [f"unset {name}" for name in sorted(edits.unset)]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(edits.set.items())]
    return Export(text="".join(f"{line}\n" for line in lines))


def assignments(edits: EnvEdits) -> str:
    """Write edits as arguments of the command ``env``."""
    words = [f"--unset={name}" for name in sorted(edits.unset)]
    names = sorted(edits.set, key=lambda name: (name.startswith("ANYACCEL_"), name))  # what people look for comes first
    return shlex.join([*words, *(f"{name}={edits.set[name]}" for name in names)])
