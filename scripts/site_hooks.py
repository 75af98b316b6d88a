"""What the site has beside the pages in ``docs/``: hooks of MkDocs, and one of the reader of docstrings.

- The navigation is made of ``docs/README.md``, so that there is one list of pages.
- What pages link to outside of ``docs/`` is a page of the site, below ``repository/``.
- Each plug-in has a page: its README, and what the plug-in itself says.
- What tests read in comments, readers see: the name of a file, the user who types.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import anyaccel
import griffe
from anyaccel.kit import Catalog
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
CONTENTS = "docs/README.md"
LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)#\s]+)((?:#[^)]*)?\))")
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"^<!-- (?:file|user): (.+?) -->\n```(\w+)$", re.MULTILINE)
ROLE = re.compile(r":\w+:`~?([\w.]+)`")
PAGE = r"^ *- \[(.+)\]\(([^)#]+)\)"
PICTURES = (".svg", ".png")
FOUND_FIRST = {"how-to/": 4.0, "tutorial": 3.0, "vendors/": 0.5, "reference/": 0.5, "explanation/": 0.5}
"""How much a page's place weighs in a search: people search for help first."""
NOT_FOUND = ("decisions/", "repository/", "contents")
"""Pages that a search leaves out. The README's text is on other pages of the site."""
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".yml": "yaml"}

VENDORS = """\
A vendor is a plug-in that is installed beside the core. These pages are made from the plug-ins: what each one reads,
which variables it writes, which products it knows, and which machines its tests replay. None has been run on real
accelerators yet; [you can change that](../repository/CONTRIBUTING.md#i-have-hardware-and-one-hour)."""

Row = tuple[str, ...]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation from the list of pages: a tab for each section, a group for each heading in it."""
    text = (ROOT / CONTENTS).read_text(encoding="utf-8")
    nav: list[dict[str, Any]] = []
    for title, body in headed(2, text):
        groups: list[Any] = [*links(body.partition("\n### ")[0])]
        groups += [{name: links(listed)} for name, listed in headed(3, body)]
        nav.append({title: groups})
    nav[0][next(iter(nav[0]))].append({"All pages": place(CONTENTS)})
    for section in nav:
        if "Vendors" in section:
            section["Vendors"].insert(0, "vendors/index.md")
    config.nav = nav
    return config


def headed(level: int, text: str) -> list[tuple[str, str]]:
    """The headings of one level in a text, each with what follows it."""
    parts = re.split(rf"^{'#' * level} (.+)$", text, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def links(text: str) -> list[dict[str, str]]:
    """The pages that a list names, in its order."""
    return [{name: place(joined(CONTENTS, target))} for name, target in re.findall(PAGE, text, re.MULTILINE)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and whatever outside of ``docs/`` is linked."""
    names = {target: name for name, target in brands()}
    known = {CONTENTS, *(f"docs/{file.src_uri}" for file in files)}
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in sorted(known) if path.endswith(".md")}
    waiting = [path for source, text in texts.items() for path in targets(source, text)]
    add(files, config, place(CONTENTS), texts[CONTENTS])
    while waiting:
        path = waiting.pop()
        if path in known:
            continue
        known.add(path)
        if not (ROOT / path).exists():
            continue  # MkDocs says which link leads nowhere
        if path.endswith(PICTURES):
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
            continue
        text = vendor_page(path, names[path]) if path in names else outside_page(path)
        waiting += targets(source_of(path), text)
        add(files, config, place(path), text)
    add(files, config, "vendors/index.md", vendors_page())
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where things are on the site, and show what comments say."""
    del config, files
    uri = page.file.src_uri
    boost = next((weight for start, weight in FOUND_FIRST.items() if uri.startswith(start)), 1.0)
    page.meta.setdefault("search", {"exclude": True} if uri.startswith(NOT_FOUND) else {"boost": boost})
    source = SOURCES.get(uri, f"docs/{uri}")
    shown = MARK.sub(lambda mark: f'```{mark[2]} title="{mark[1]}"', markdown)
    shown = shown.replace("<details>", '<details markdown="1">')
    parts = FENCE.split(shown)
    parts[::2] = [LINK.sub(lambda link: moved(link, source, uri), part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Take out what Markdown needs to write a bar in a table, and MkDocs leaves in code."""
    del page, config, files
    return re.sub(r"<td[^>]*>.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)


class PlainRoles(griffe.Extension):
    """Docstrings say ``:func:`anyaccel.detect``` where Markdown has links."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Make links of the names that a program imports, and code of all others."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(role, obj.docstring.value)


def role(found: re.Match[str]) -> str:
    """A name that a docstring refers to, as Markdown."""
    name = found[1].removeprefix("anyaccel.")
    known = name.partition(".")[0] in anyaccel.__all__ and name.partition(".")[0] not in error_names()
    return f"[`{name}`][anyaccel.{name}]" if known else f"`{name}`"


def error_names() -> set[str]:
    """Names of errors, which have a table of their own instead."""
    return {name for name in anyaccel.__all__ if name.endswith("Error") and name != "AnyaccelError"}


SOURCES: dict[str, str] = {}
"""What a page that is no file of ``docs/`` is made of."""


def add(files: Files, config: MkDocsConfig, uri: str, text: str) -> None:
    """Add a page that is made."""
    files.append(File.generated(config, uri, content=text))


def joined(source: str, target: str) -> str:
    """The path in the repository to which a link of a file leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def targets(source: str, text: str) -> list[str]:
    """The files of the repository to which a text links."""
    return [joined(source, link[1]) for part in FENCE.split(text)[::2] for link in LINK.findall(part)]


def source_of(path: str) -> str:
    """What links on the page of a path are relative to: a folder's to what is in it."""
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def place(path: str) -> str:
    """Where a file or folder of the repository is on the site."""
    if path == CONTENTS:
        uri = "contents.md"
    elif path.startswith("docs/"):
        return path.removeprefix("docs/")
    elif found := re.fullmatch(r"plugins/(\w+)/README\.md", path):
        uri = f"vendors/{found[1]}.md"
    else:
        plain = posixpath.join("repository", *(part.lstrip(".") for part in path.split("/")))
        if path.endswith(PICTURES):
            return plain
        if (ROOT / path).is_dir():
            plain += "/index.md"
        elif not plain.endswith(".md"):
            plain += ".md"
        uri = plain.replace("/README.md", "/index.md")
    SOURCES[uri] = source_of(path)
    return uri


def moved(link: re.Match[str], source: str, uri: str) -> str:
    """A link as it must be on the site."""
    target = place(joined(source, link[2]))
    return f"{link[1]}{posixpath.relpath(target, posixpath.dirname(uri))}{link[3]}"


def outside_page(path: str) -> str:
    """The page of a file or folder that is not in ``docs/``."""
    file = ROOT / path
    if file.is_dir():
        readme = file / "README.md"
        names = sorted(each.name for each in file.iterdir() if not each.name.startswith((".", "_")))
        listed = "\n".join(f"- [{name}]({name})" for name in names if name != "README.md")
        text = readme.read_text(encoding="utf-8") if readme.exists() else f"# {path}\n"
        return f"{text}\n## Files\n\n{listed}\n"
    text = file.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return "\n\n".join(cells(json.loads(text)))
    language = LANGUAGES.get(file.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n````{language}\n{text.rstrip()}\n````\n"


def cells(notebook: Mapping[str, Any]) -> Iterator[str]:
    """The cells of a notebook, without what they have printed."""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"


def brands() -> Iterator[tuple[str, str]]:
    """Name and README of each vendor, by the list of pages."""
    for name, target in re.findall(
        r"^- \[(.+)\]\((.+)\)$", (ROOT / CONTENTS).read_text(encoding="utf-8"), re.MULTILINE
    ):
        path = joined(CONTENTS, target)
        if re.fullmatch(r"plugins/\w+/README\.md", path):
            yield name, path


def plugin(vendor: str) -> Any:
    """The plug-in of a vendor.

    Raises:
        PluginError: When it is not installed.
    """
    found = entry_points(group="anyaccel", name=vendor)
    if not found:
        raise PluginError(f"the plug-in for {vendor} is not installed: pip install -e plugins/{vendor}")
    return next(iter(found)).load()


def table(head: Row, rows: list[Row]) -> str:
    """A table of Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def code(words: Iterator[str] | tuple[str, ...] | list[str]) -> str:
    """Words as code."""
    return ", ".join(f"`{word}`" for word in words)


def vendors_page() -> str:
    """The page of all vendors."""
    rows = []
    for name, path in brands():
        folder = ROOT / Path(path).parent
        found = plugin(folder.name)
        info = found.anyaccel_info()
        count = len(list(folder.glob("recordings/*/machine.json")))
        first, *others = info.env_vars
        variables = f"`{first}`" + f" and {len(others)} more" * bool(others)
        sold = str(len(list(found.anyaccel_products())))
        rows.append((f"[{name}]({folder.name}.md)", f"`{info.resource}`", variables, sold, str(count)))
    return "\n\n".join(
        (
            "# Vendors",
            VENDORS,
            table(
                ("vendor", "asked for as", "variables that it writes", "products", "recordings"), sorted(rows, key=str)
            ),
            "Is yours missing? [The tutorial](../tutorial-plugin.md) builds a plug-in.",
        )
    )


def vendor_page(path: str, name: str) -> str:
    """The page of a vendor: the README of its plug-in, and what the plug-in says."""
    folder = ROOT / Path(path).parent
    text = re.sub(r"\A# .+\n", f"# {name}\n", (ROOT / path).read_text(encoding="utf-8"))
    before, _, after = text.partition("\n## ")
    parts = (before.rstrip(), at_a_glance(folder), f"## {after.rstrip()}", products(folder), recordings(folder))
    return "\n\n".join(parts) + "\n"


def at_a_glance(folder: Path) -> str:
    """What a plug-in says of itself, and what is looked at before it is asked."""
    vendor = folder.name
    info = plugin(vendor).anyaccel_info()
    presence = json.loads((folder / "src" / f"anyaccel_{vendor}" / "presence.json").read_text(encoding="utf-8"))
    ids = [
        each["vendor"] + (f" (class {', '.join(each['classes'])})" if "classes" in each else "")
        for each in presence["pci"]
    ]
    looked = [
        f"PCI vendor {', '.join(f'`{each}`' for each in ids)}",
        code(presence["paths"]),
        code(presence.get("variables", [])),
    ]
    rows = [
        ("install", f"`pip install 'anyaccel[{vendor}]'`"),
        ("ask for", f"`{info.resource}:1`; of this vendor alone `{vendor}:1`"),
        ("variables that it writes or removes", code(info.env_vars)),
        ("of these another vendor's", code(info.borrowed + info.cleared)),
        ("how many one job may have", ", ".join(map(str, info.counts)) or "any number"),
        ("held by one process, since", info.exclusive),
        ("looked at before it is asked", "; ".join(filter(None, looked))),
        ("of the vendor", f"<{info.url}>" if "anyaccel" not in info.url else ""),
    ]
    return f"## At a glance\n\n{table(('', ''), [row for row in rows if row[1]])}"


def products(folder: Path) -> str:
    """The products that a plug-in knows."""
    vendor = folder.name
    ids: dict[str, list[str]] = {}
    for entry in Catalog(str(folder / "src" / f"anyaccel_{vendor}" / "__init__.py")).entries:
        ids.setdefault(entry.tags[0], []).extend(f"{number:04x}" for number in entry.facts.get("pci", ()))
    rows = []
    for product in plugin(vendor).anyaccel_products():
        memory = f"{product.memory_bytes / (1 << 30):.1f}" if product.memory_bytes else ""
        found = list(dict.fromkeys(ids.get(product.name, ())))
        rows.append((f"`{product.name}`", code(product.aliases), product.model, memory, code(found)))
    shown = [index for index in range(5) if any(row[index] for row in rows)]
    head = ("type", "also asked for as", "name", "GiB", "PCI id")
    note = "Memory is that of one device; where none is known, the driver tells it. Each can be simulated: "
    return "\n\n".join(
        (
            "## Products",
            f"{note}`anyaccel --machine sim:{rows[0][0].strip('`')}:2`.",
            table(tuple(head[index] for index in shown), [tuple(row[index] for index in shown) for row in rows]),
        )
    )


def recordings(folder: Path) -> str:
    """The machines that the tests of a plug-in replay."""
    rows = []
    for file in sorted(folder.glob("recordings/*/machine.json")):
        comment = json.loads(file.read_text(encoding="utf-8")).get("comment", "")
        expected = json.loads((file.parent / "expected.json").read_text(encoding="utf-8"))
        rows.append((f"`{file.parent.name}`", found_there(folder.name, expected), " ".join(comment.split())))
    return "\n\n".join(
        (
            "## Recordings",
            "Machines that the tests replay: what the plug-in reads on them, as files. What was made up is said.",
            table(("recording", "what is found", "what it is"), rows),
        )
    )


def found_there(vendor: str, expected: Mapping[str, Any] | None) -> str:
    """What a recording replays to, in words."""
    told = (expected or {}).get("vendors", {vendor: expected}).get(vendor)
    if (expected or {}).get("failed"):
        return "failure of the vendor's software"
    if not told:
        return "nothing of this vendor" if told is None else "the driver, without a device"
    devices = told.get("devices", ())
    types = Counter((device.get("tags") or [device["model"]])[0] for device in devices)
    bad = sum(device.get("health") == "unhealthy" for device in devices)
    text = ", ".join(f"{count} x {name}" for name, count in types.items()) or "no device, and a note"
    return f"{text}; {bad} unhealthy" if bad else text
