"""Hooks of MkDocs that make the site, and an extension of the reader of docstrings.

- The navigation is made from ``docs/README.md``, so that there is one list of pages.
- A linked file outside of ``docs/`` becomes a page below ``repository/``.
- The page of a vendor is the README of its plug-in, with tables of the plug-in's data.
- Comments that tests read (a file's name, a user's name) become titles of blocks.
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
A vendor is a plug-in that is installed beside the core. These pages are made from the plug-ins: the files that each one
reads, the variables that it writes, its products, and the machines that its tests replay. NVIDIA's was run on a
real H100 and H200, the others on no real accelerator yet;
[you can change that](../repository/CONTRIBUTING.md#i-have-hardware-and-one-hour)."""

Row = tuple[str, ...]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation from the list of pages: a tab for each section, a group for each heading in it."""
    text = (ROOT / CONTENTS).read_text(encoding="utf-8")
    nav: list[dict[str, Any]] = []
    for title, body in split_headings(2, text):
        groups: list[Any] = [*list_links(body.partition("\n### ")[0])]
        groups += [{name: list_links(listed)} for name, listed in split_headings(3, body)]
        nav.append({title: groups})
    nav[0][next(iter(nav[0]))].append({"All pages": find_place(CONTENTS)})
    for section in nav:
        if "Vendors" in section:
            section["Vendors"].insert(0, "vendors/index.md")
    config.nav = nav
    return config


def split_headings(level: int, text: str) -> list[tuple[str, str]]:
    """Split a text at headings of one level; return each heading with its section."""
    parts = re.split(rf"^{'#' * level} (.+)$", text, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def list_links(text: str) -> list[dict[str, str]]:
    """List the pages that a section names, in its order."""
    return [{name: find_place(join_path(CONTENTS, target))} for name, target in re.findall(PAGE, text, re.MULTILINE)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages, and files outside of ``docs/`` that pages link to."""
    names = {target: name for name, target in list_brands()}
    known = {CONTENTS, *(f"docs/{file.src_uri}" for file in files)}
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in sorted(known) if path.endswith(".md")}
    waiting = [path for source, text in texts.items() for path in find_targets(source, text)]
    add_page(files, config, find_place(CONTENTS), texts[CONTENTS])
    while waiting:
        path = waiting.pop()
        if path in known:
            continue
        known.add(path)
        if not (ROOT / path).exists():
            continue  # MkDocs says which link leads nowhere
        if path.endswith(PICTURES):
            files.append(File.generated(config, find_place(path), abs_src_path=str(ROOT / path)))
            continue
        text = make_vendor_page(path, names[path]) if path in names else make_outside_page(path)
        waiting += find_targets(find_source(path), text)
        add_page(files, config, find_place(path), text)
    add_page(files, config, "vendors/index.md", make_vendors_page())
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links for the site, and turn comments into titles."""
    del config, files
    uri = page.file.src_uri
    boost = next((weight for start, weight in FOUND_FIRST.items() if uri.startswith(start)), 1.0)
    page.meta.setdefault("search", {"exclude": True} if uri.startswith(NOT_FOUND) else {"boost": boost})
    source = SOURCES.get(uri, f"docs/{uri}")
    shown = MARK.sub(lambda mark: f'```{mark[2]} title="{mark[1]}"', markdown)
    shown = shown.replace("<details>", '<details markdown="1">')
    parts = FENCE.split(shown)
    parts[::2] = [LINK.sub(lambda link: move_link(link, source, uri), part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the backslash that Markdown needs before a bar in a table, and that MkDocs leaves in code."""
    del page, config, files
    return re.sub(r"<td[^>]*>.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)


class PlainRoles(griffe.Extension):
    """Links of Markdown for roles of docstrings such as ``:func:`anyaccel.detect```."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite roles as links for public names, and as code for other names."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(link_name, obj.docstring.value)


def link_name(found: re.Match[str]) -> str:
    """Return the Markdown for a role: a link for a public name, else code."""
    name = found[1].removeprefix("anyaccel.")
    known = name.partition(".")[0] in anyaccel.__all__ and name.partition(".")[0] not in error_names()
    return f"[`{name}`][anyaccel.{name}]" if known else f"`{name}`"


def error_names() -> set[str]:
    """Return the names of errors, which have a table of their own."""
    return {name for name in anyaccel.__all__ if name.endswith("Error") and name != "AnyaccelError"}


SOURCES: dict[str, str] = {}
"""Source file of each generated page, by the page's path on the site."""


def add_page(files: Files, config: MkDocsConfig, uri: str, text: str) -> None:
    """Add a generated page."""
    files.append(File.generated(config, uri, content=text))


def join_path(source: str, target: str) -> str:
    """Return the path in the repository for a link of a file."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def find_targets(source: str, text: str) -> list[str]:
    """List the files of the repository to which a text links."""
    return [join_path(source, link[1]) for part in FENCE.split(text)[::2] for link in LINK.findall(part)]


def find_source(path: str) -> str:
    """Return the file to which links of a path are relative: in a folder, its README."""
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def find_place(path: str) -> str:
    """Return the place on the site of a file or folder of the repository."""
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
    SOURCES[uri] = find_source(path)
    return uri


def move_link(link: re.Match[str], source: str, uri: str) -> str:
    """Rewrite a link for the site."""
    target = find_place(join_path(source, link[2]))
    return f"{link[1]}{posixpath.relpath(target, posixpath.dirname(uri))}{link[3]}"


def make_outside_page(path: str) -> str:
    """Return the page of a file or folder outside of ``docs/``."""
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
        return "\n\n".join(read_cells(json.loads(text)))
    language = LANGUAGES.get(file.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n````{language}\n{text.rstrip()}\n````\n"


def read_cells(notebook: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cells of a notebook as Markdown, without output."""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"


def list_brands() -> Iterator[tuple[str, str]]:
    """Yield name and README of each vendor in the list of pages."""
    for name, target in re.findall(
        r"^- \[(.+)\]\((.+)\)$", (ROOT / CONTENTS).read_text(encoding="utf-8"), re.MULTILINE
    ):
        path = join_path(CONTENTS, target)
        if re.fullmatch(r"plugins/\w+/README\.md", path):
            yield name, path


def load_plugin(vendor: str) -> Any:
    """Load the plug-in of a vendor.

    Raises:
        PluginError: When the plug-in is not installed.
    """
    found = entry_points(group="anyaccel", name=vendor)
    if not found:
        raise PluginError(f"the plug-in for {vendor} is not installed: pip install -e plugins/{vendor}")
    return next(iter(found)).load()


def make_table(head: Row, rows: list[Row]) -> str:
    """Return a table of Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def quote_code(words: Iterator[str] | tuple[str, ...] | list[str]) -> str:
    """Return words as code, separated by commas."""
    return ", ".join(f"`{word}`" for word in words)


def make_vendors_page() -> str:
    """Return the page of all vendors."""
    rows = []
    for name, path in list_brands():
        folder = ROOT / Path(path).parent
        found = load_plugin(folder.name)
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
            make_table(
                ("vendor", "asked for as", "variables that it writes", "products", "recordings"), sorted(rows, key=str)
            ),
            "Is yours missing? [The tutorial](../tutorial-plugin.md) builds a plug-in.",
        )
    )


def make_vendor_page(path: str, name: str) -> str:
    """Return the page of a vendor: the README of its plug-in, and tables of the plug-in's data."""
    folder = ROOT / Path(path).parent
    text = re.sub(r"\A# .+\n", f"# {name}\n", (ROOT / path).read_text(encoding="utf-8"))
    before, _, after = text.partition("\n## ")
    parts = (
        before.rstrip(),
        describe_vendor(folder),
        f"## {after.rstrip()}",
        list_products(folder),
        list_recordings(folder),
    )
    return "\n\n".join(parts) + "\n"


def describe_vendor(folder: Path) -> str:
    """Return the table of a plug-in's identity, variables and presence data."""
    vendor = folder.name
    info = load_plugin(vendor).anyaccel_info()
    presence = json.loads((folder / "src" / f"anyaccel_{vendor}" / "presence.json").read_text(encoding="utf-8"))
    ids = [
        each["vendor"] + (f" (class {', '.join(each['classes'])})" if "classes" in each else "")
        for each in presence["pci"]
    ]
    looked = [
        f"PCI vendor {', '.join(f'`{each}`' for each in ids)}",
        quote_code(presence["paths"]),
        quote_code(presence.get("variables", [])),
    ]
    rows = [
        ("install", f"`pip install 'anyaccel[{vendor}]'`"),
        ("ask for", f"`{info.resource}:1`; of this vendor alone `{vendor}:1`"),
        ("variables that it writes or removes", quote_code(info.env_vars)),
        ("of these another vendor's", quote_code(info.borrowed + info.cleared)),
        ("how many one job may have", ", ".join(map(str, info.counts)) or "any number"),
        ("held by one process, since", info.exclusive),
        ("looked at before it is asked", "; ".join(filter(None, looked))),
        ("of the vendor", f"<{info.url}>" if "anyaccel" not in info.url else ""),
    ]
    return f"## At a glance\n\n{make_table(('', ''), [row for row in rows if row[1]])}"


def list_products(folder: Path) -> str:
    """Return the table of a plug-in's products."""
    vendor = folder.name
    ids: dict[str, list[str]] = {}
    for entry in Catalog(str(folder / "src" / f"anyaccel_{vendor}" / "__init__.py")).entries:
        ids.setdefault(entry.tags[0], []).extend(f"{number:04x}" for number in entry.facts.get("pci", ()))
    rows = []
    for product in load_plugin(vendor).anyaccel_products():
        memory = f"{product.memory_bytes / (1 << 30):.1f}" if product.memory_bytes else ""
        found = list(dict.fromkeys(ids.get(product.name, ())))
        rows.append((f"`{product.name}`", quote_code(product.aliases), product.model, memory, quote_code(found)))
    shown = [index for index in range(5) if any(row[index] for row in rows)]
    head = ("type", "also asked for as", "name", "GiB", "PCI id")
    note = "Memory is that of one device; if it is empty, the driver reports it. Each can be simulated: "
    return "\n\n".join(
        (
            "## Products",
            f"{note}`anyaccel --machine sim:{rows[0][0].strip('`')}:2`.",
            make_table(tuple(head[index] for index in shown), [tuple(row[index] for index in shown) for row in rows]),
        )
    )


def list_recordings(folder: Path) -> str:
    """Return the table of a plug-in's recordings."""
    rows = []
    for file in sorted(folder.glob("recordings/*/machine.json")):
        comment = json.loads(file.read_text(encoding="utf-8")).get("comment", "")
        expected = json.loads((file.parent / "expected.json").read_text(encoding="utf-8"))
        rows.append((f"`{file.parent.name}`", describe_result(folder.name, expected), " ".join(comment.split())))
    return "\n\n".join(
        (
            "## Recordings",
            "Machines that the tests replay, as files that the plug-in reads. A description names invented parts.",
            make_table(("recording", "what is found", "what it is"), rows),
        )
    )


def describe_result(vendor: str, expected: Mapping[str, Any] | None) -> str:
    """Describe the devices of a recording in words."""
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
