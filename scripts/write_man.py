"""Write the man pages of each distribution from the same declarations as the commands' help. A test compares.

python scripts/write_man.py
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from anyaccel import extras
from anyaccel._version import __version__
from anyaccel.cli import commands as cli
from anyaccel.cli.arguments import Parser
from anyaccel.cli.help import EXIT_STATUSES
from anyaccel.cli.parser import add_common

ROOT = Path(__file__).parent.parent
FILES = (
    ("/etc/anyaccel/config.toml", "settings of the machine, for all users; root's alone to write"),
    ("~/.config/anyaccel/config.toml", "defaults of your own; 'anyaccel config --template user' prints one"),
    ("/run/anyaccel", "leases that all users of the machine share; 'anyaccel setup' makes it"),
)


def escaped(text: str) -> str:
    """Escape text for roff: hyphens that can be copied, no requests."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return "\n".join(f"\\&{line}" if line.startswith(".") else line for line in plain.splitlines())


def heading(name: str, summary: str) -> Iterator[str]:
    """The beginning of a page."""
    yield f'.TH "{name.upper()}" "1" "" "anyaccel {__version__}" "anyaccel"'
    yield ".SH NAME"
    yield f"{escaped(name)} \\- {escaped(summary)}"


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The arguments of a parser."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to name them
        if action.help == argparse.SUPPRESS:
            continue
        value = str(action.metavar or "|".join(map(str, action.choices or ())))
        forms = [f"{form} {value}".strip() if action.nargs != 0 else form for form in action.option_strings]
        yield ".TP"
        yield f".B {escaped(', '.join(forms) or value or action.dest)}"
        yield escaped((action.help or "") % {"default": action.default})


def examples(module: object) -> Iterator[str]:
    """Yield command lines with their explanations."""
    yield ".SH EXAMPLES"
    for line, told in module.EXAMPLES:  # type: ignore[attr-defined]
        yield from (".TP", f".B {escaped(line)}", escaped(told))


def page(name: str) -> str:
    """The page of a command."""
    module = cli.module_of(name)
    parser = Parser(prog=f"anyaccel {name}", add_help=False)
    module.add_arguments(parser)
    title, listed = parser.listed or ("", {})
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    lines = [*heading(f"anyaccel-{name}", cli.COMMANDS[name])]
    lines += [".SH SYNOPSIS", f".B {escaped(usage)}", ".SH DESCRIPTION"]
    for number, paragraph in enumerate((module.__doc__ or "").strip().split("\n\n")):
        lines += [".PP"] * (number > 0) + [escaped(" ".join(paragraph.split()))]
    lines += [f".SH {title.upper()}"] * bool(listed)
    for each, summary in listed.items():
        lines += [".TP", f".B {escaped(each)}", escaped(summary)]
    common = argparse.ArgumentParser(add_help=False)
    add_common(common, name)
    shared = list(options(common))
    lines += [".SH OPTIONS", *options(parser), *[".SS Common options"] * bool(shared), *shared, *examples(module)]
    lines += [".SH SEE ALSO", ".BR anyaccel (1)", "for the exit statuses"]
    return "\n".join(lines) + "\n"


def index() -> str:
    """The page of the program."""
    lines = [*heading("anyaccel", "find, hand out and hold the accelerators of a machine")]
    lines += [".SH SYNOPSIS", ".B anyaccel [OPTIONS] [COMMAND] [REQUEST ...] [\\-\\- CMD ...]", ".SH COMMANDS"]
    for title, group in cli.GROUPS.items():
        lines += [f".SS {escaped(title)}"]
        for name, summary in group.items():
            lines += [".TP", f".BR anyaccel\\-{name} (1)", escaped(summary)]
    lines += [".SH FILES"]
    for path, told in FILES:
        lines += [".TP", f".I {escaped(path)}", escaped(told)]
    lines += [".SH EXIT STATUS", escaped(" ".join(EXIT_STATUSES.split()).removeprefix("exit status: "))]
    return "\n".join(lines) + "\n"


def place(name: str) -> Path:
    """The file of a command's page, in the folder of the distribution that brings the command."""
    extra = extras.COMMANDS.get(name)
    return (ROOT / "extras" / extra if extra else ROOT / "core") / "man" / f"anyaccel-{name}.1"


def pages() -> dict[Path, str]:
    """Return the text of each page, by its file."""
    return {ROOT / "core" / "man" / "anyaccel.1": index()} | {place(name): page(name) for name in cli.COMMANDS}


if __name__ == "__main__":
    made = pages()
    for old in {old for folder in {path.parent for path in made} for old in folder.glob("*.1")}:
        old.unlink()
    for path, text in made.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
