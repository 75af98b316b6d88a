"""Write the parts of docs/reference that the code knows best: commands, exit statuses and errors.

They stand between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``. A test compares them with the code.

    python scripts/write_reference.py
"""

import argparse
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from anyaccel import errors
from anyaccel.cli import parser as cli

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"


def commands() -> Iterator[str]:
    """Every command with its own arguments."""
    for name, summary in cli.COMMANDS.items():
        module = import_module(f"anyaccel.cli.{name}")
        parser = argparse.ArgumentParser(add_help=False, description="")
        module.add_arguments(parser)
        yield f"### anyaccel {name}"
        yield f"{summary[0].upper()}{summary[1:]}."
        yield from table(parser)
        if parser.description:  # what the command itself adds to its help
            yield f"```text\n{parser.description.strip()}\n```"


def common_options() -> Iterator[str]:
    """What every command understands."""
    parser = argparse.ArgumentParser(add_help=False)
    cli.add_common(parser)
    yield from table(parser)


def table(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The arguments of a parser as a table; nothing when it has none."""
    rows = [row(action) for action in parser._actions if action.help != argparse.SUPPRESS]  # noqa: SLF001
    if rows:
        yield "\n".join(["| argument | |", "| --- | --- |", *rows])


def row(action: argparse.Action) -> str:
    """One argument: its forms, and what it does."""
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
    forms = [f"{form} {value}".strip() for form in action.option_strings] or [str(value or action.dest)]
    text = (action.help or "") % {"default": action.default}
    return f"| {', '.join(f'`{escaped(form)}`' for form in forms)} | {escaped(text)} |"


def escaped(text: str) -> str:
    """Text of a docstring or a help message that may stand in a table."""
    plain = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"`\1`", text).replace("``", "`")
    return plain.replace("|", "\\|").replace("<", "&lt;")


def exit_statuses() -> Iterator[str]:
    """What the errors make the command line return."""
    by_status: dict[int, list[str]] = {}
    for error in error_classes():
        by_status.setdefault(error.exit_code, []).append(f"`{error.__name__}`")
    rows = [f"| {status} | {', '.join(names)} |" for status, names in sorted(by_status.items())]
    yield "\n".join(["| status | errors |", "| --- | --- |", *rows])


def error_table() -> Iterator[str]:
    """Every error."""
    rows = []
    for error in error_classes():
        sentence = (error.__doc__ or "").partition("\n")[0].removeprefix("Raised when ").rstrip(".")
        parent = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        sentence = escaped(f"{sentence[0].lower()}{sentence[1:]}")
        rows.append(f"| `{error.__name__}` | {parent} | {sentence} | `{error.code}` | {error.exit_code} |")
    yield "\n".join(["| error | is a | raised when | `code` | exit status |", "| --- | --- | --- | --- | --- |", *rows])


def error_classes() -> list[type[errors.AnyaccelError]]:
    """The errors in the order of their module."""
    found = vars(errors).values()
    return [item for item in found if isinstance(item, type) and issubclass(item, errors.AnyaccelError)]


PARTS: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "commands": ("commands.md", commands),
    "common options": ("commands.md", common_options),
    "exit statuses": ("commands.md", exit_statuses),
    "errors": ("errors.md", error_table),
}


def pages() -> dict[Path, str]:
    """The pages as they must be.

    Raises:
        SystemExit: When a page lacks the place for a part.
    """
    texts: dict[Path, str] = {}
    for name, (file, write) in PARTS.items():
        path = REFERENCE / file
        text = texts.get(path) or path.read_text(encoding="utf-8")
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{path} must have one place for {name!r}, between {begin.strip()} and {end}")
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        texts[path] = "\n".join([before + begin, *(f"{block}\n" for block in write()), end + after])
    return texts


if __name__ == "__main__":
    for page, content in pages().items():
        page.write_text(content, encoding="utf-8")
