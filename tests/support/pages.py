"""The commands of a page of the documentation, and whether they print what it shows; see tests/docs/test_pages.py."""

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
RUN = {"console", "sh", "python"}
LEFT_OUT = {"command: tests": "this is what runs the tests"}
INSTALLS = re.compile(
    r"python3 -m venv (\S+) && \. \1/bin/activate && pip install uv && uv pip install '\./core\[[\w,]+\]'(?: && |\n)"
)
"""The README's first command, which tests/packaging/test_clone.py types."""


@dataclass
class Step:
    """One command, and what it should print; None when the page does not show that."""

    line: int
    command: str
    output: str | None
    users: tuple[str, ...] = ()


def steps_of(page: Path) -> list[Step]:
    text = page.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    following = {block: after for block, after in pairwise(blocks) if not text[block.end() : after.start()].strip()}
    steps = []
    for block in blocks:
        note, language, body = block["note"] or "", block["language"], block["text"]
        line = text.count("\n", 0, block.start("text")) + 1
        if note.startswith("file: "):
            steps.append(Step(line, f"cat > {note.removeprefix('file: ')} <<'__END__'\n{body}__END__", None))
        elif note.startswith("not run: ") or note in LEFT_OUT or language not in RUN:
            continue
        elif language == "console":
            users = tuple(note.removeprefix("user: ").split(", ")) if note.startswith("user: ") else ()
            steps += [replace(step, users=users) for step in console_steps(body, line)]
        elif language == "sh":
            commands = INSTALLS.sub("", body).replace("\\\n", "").splitlines()
            steps += [Step(line, command, None) for command in commands]
        else:
            after = following.get(block)
            shown = after["text"] if after is not None and after["language"] == "text" else None
            steps.append(Step(line, f"python -W error - <<'__END__'\n{body}__END__", shown))
    return steps


def console_steps(body: str, line: int) -> list[Step]:
    steps: list[Step] = []
    for number, text in enumerate(body.splitlines(), line):
        if text.startswith("$ "):
            steps.append(Step(number, text[2:], ""))
        elif text.startswith("> ") and not steps[-1].output:
            steps[-1].command += "\n" + text[2:]
        else:
            steps[-1].output += text + "\n"
    return steps


def matches(shown: str, printed: str) -> bool:
    pattern = "".join(
        r"(?:.*\n)*" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n"
        for line in shown.splitlines()
    )
    return re.fullmatch(pattern, re.sub(r" +$", "", printed, flags=re.MULTILINE)) is not None
