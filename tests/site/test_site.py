"""The site as readers have it: what is in its files, and what a real browser shows of each page at two widths.

``tox -e site`` builds the site and runs this. The browser is Chromium or Chrome, as installed, or Playwright's own.
What it shows of each page is kept beside the site, in ``screenshots/``, for people to look at.
"""

import functools
import html
import http.server
import io
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("ANYACCEL_TEST_SITE", ""))
if not os.environ.get("ANYACCEL_TEST_SITE"):
    pytest.skip("'tox -e site' builds the site and says where it is", allow_module_level=True)
PAGES = sorted(str(path.parent.relative_to(SITE)) + "/" for path in SITE.glob("**/index.html"))
VENDORS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDE, NARROW = (1280, 900), (400, 800)
MODES = [(WIDE, "light"), (NARROW, "dark")]
HERE = "http://127.0.0.1:"
LEFT = "net::ERR_ABORTED"
"""What becomes of a request when the reader has gone to the next page."""
SEARCHES = {
    "install": "how-to/install/",
    "time limit": "how-to/time-limits/",
    "queue priority": "how-to/policy/",
    "history": "how-to/report/",
    "jupyter": "how-to/use/",
    "checkpoint": "how-to/time-limits/",
    "multi-user": "how-to/shared-machine/",
    "MPS": "how-to/fractions/",
    "fair share": "how-to/policy/",
}
"""The page that must come first for what people search for."""


class Reader(HTMLParser):
    """What a page loads, where it links, what can be linked, and its text outside of code."""

    def __init__(self):
        super().__init__()
        self.loads, self.links, self.ids, self.texts, self.highlighted, self.languages = [], [], set(), [], 0, []
        self._code = 0

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("script", "img", "iframe", "source", "video") and found.get("src"):
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") != "canonical" and found.get("href"):
            self.loads.append(found["href"])
        if tag in ("code", "script", "style"):
            self._code += 1
        if tag == "div" and (language := re.search(r"\blanguage-(\w+)", found.get("class") or "")):
            self.languages.append(language[1])

    def handle_endtag(self, tag):
        if tag in ("code", "script", "style"):
            self._code -= 1

    def handle_data(self, data):
        if not self._code:
            self.texts.append(data)


@functools.cache
def read(page):
    reader = Reader()
    reader.feed((SITE / page / "index.html").read_text(encoding="utf-8"))
    return reader


def outside(link):
    return bool(urlsplit(link).scheme) or link.startswith("//")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_nothing_from_elsewhere(page):
    assert [each for each in read(page).loads if outside(each) and not each.startswith("data:")] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_within_the_site_lead_somewhere(page):
    broken = []
    for link in {link for link in read(page).links if not outside(link)}:
        parts = urlsplit(urljoin(f"/{page}", link))
        path = unquote(parts.path).lstrip("/")
        target = SITE / path
        if target.is_dir():
            target /= "index.html"
        if not target.is_file():
            broken.append(link)
        elif parts.fragment and target.name == "index.html":
            found = read(str(target.parent.relative_to(SITE)) + "/").ids
            broken += [link] if unquote(parts.fragment) not in found | {"__skip"} else []
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_no_markdown_is_left_in_the_text(page):
    text = "".join(read(page).texts)
    left = r"^(?:::: .*|\|.*\|.*|#+ .*|[-*] .*|```.*)$|\]\([\w./#-]+\)|:(?:func|class|meth|mod|attr|exc):|<!--|\*\*\w"
    assert [found[0] for found in re.finditer(left, text, re.MULTILINE)] == []


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_vendor_has_a_page_of_its_plugin(vendor):
    text = (SITE / "vendors" / vendor / "index.html").read_text(encoding="utf-8")
    headings = re.findall(r"<h2 id=\"([^\"]+)\"", text)
    assert {"at-a-glance", "products", "recordings"} <= set(headings)
    assert [heading for heading in headings if "tested" in heading]
    names = [path.parent.name for path in (ROOT / "plugins" / vendor).glob("recordings/*/machine.json")]
    assert [name for name in names if f"<code>{name}</code>" not in text] == []


def test_code_has_its_language():
    languages = {language for page in PAGES for language in read(page).languages}
    assert {"python", "console", "toml", "json", "text"} <= languages


def test_every_public_name_is_there():
    import anyaccel

    shown = {name for page in PAGES if page.startswith("reference/python") for name in read(page).ids}
    errors = "".join(read("reference/errors/").texts) + (SITE / "reference/errors/index.html").read_text()
    names = set(anyaccel.__all__) - {"__version__"}
    assert [name for name in names if f"anyaccel.{name}" not in shown and name not in errors] == []


@pytest.fixture(scope="module")
def address():
    """The site, served to this machine alone."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=SITE)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"{HERE}{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    with api.sync_playwright() as playwright:
        installed = next(filter(None, map(shutil.which, BROWSERS)), None)
        if not installed and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("needs Chromium: apt-get install chromium, or playwright install chromium")
        # The sandbox needs user namespaces, which containers and root lack; what is shown is our own site.
        browser = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: f"{mode[0][0]}-{mode[1]}")
def view(request, browser, address):
    """A window of one size in one scheme, and its faults since the list was cleared."""
    (width, height), scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.faults = []
    page.on("console", lambda said: page.faults.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("requestfailed", lambda failed: page.faults.append(failed.url) if failed.failure != LEFT else None)
    page.on("request", lambda made: None if made.url.startswith((address, "data:")) else page.faults.append(made.url))
    page.width, page.scheme = width, scheme
    yield page
    context.close()


def picture(data):
    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB")


def brightness(image):
    counts = grey(image)
    return sum(value * count for value, count in enumerate(counts)) / sum(counts)


def grey(image):
    """How many pixels have each brightness, of 256."""
    return image.convert("L").histogram()


TOO_WIDE = """() => [...document.querySelectorAll('.md-content *')].filter(each => {
  if (each.getBoundingClientRect().right <= innerWidth + 1) return false;
  for (let box = each; box; box = box.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(box).overflowX)) return false;
  return true;
}).map(each => each.outerHTML.slice(0, 100))"""
BROKEN_IMAGES = "() => [...document.images].filter(each => !each.complete || !each.naturalWidth).map(each => each.src)"
BROKEN_CODE = """() => [...document.querySelectorAll('td code, th code')].filter(each =>
  each.textContent.match(/^[a-z]{1,12}$/) && each.getClientRects().length > 1
).map(each => each.outerHTML)"""
CUT_COMMANDS = """() => [...document.querySelectorAll('.language-sh pre > code')].filter(each =>
  each.scrollWidth > each.clientWidth
).map(each => each.textContent)"""
PLAIN_CODE = """() => [...document.querySelectorAll('[class*=language-]')].filter(each =>
  !each.className.match(/language-(text|console)/) && !each.querySelector('code span[class]')
).map(each => each.textContent)"""


@pytest.mark.parametrize("path", PAGES)
def test_a_page_in_a_browser(view, address, path):
    view.faults.clear()
    view.goto(address + path.removeprefix("./"), wait_until="load")
    assert view.evaluate("document.documentElement.scrollWidth") <= view.width
    assert view.evaluate(TOO_WIDE) == []
    assert view.evaluate(BROKEN_IMAGES) == []
    assert view.evaluate(PLAIN_CODE) == []
    assert view.evaluate(BROKEN_CODE) == []
    assert view.evaluate(CUT_COMMANDS) == []
    assert view.faults == []
    shot = view.screenshot()
    name = path.removeprefix("./").strip("/").replace("/", "-") or "index"
    file = SITE.parent / "screenshots" / f"{name}-{view.width}.png"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(shot)
    image = picture(shot)
    assert image.width == view.width
    assert sum(map(bool, grey(image))) > 20, "an empty page"
    assert (brightness(image) > 150) == (view.scheme == "light")


@pytest.mark.parametrize("name", ["idea.svg", "recording.svg"])
def test_a_picture_of_the_landing_page_can_be_read(view, address, name):
    view.goto(address)
    there, end, contrast = view.locator(f"img[src$='{name}']"), time.monotonic() + 60, 0
    while contrast <= 120:  # a recording begins with an empty terminal
        assert time.monotonic() < end, "its ink is not told from its ground"
        image = picture(there.screenshot())
        common = [value for value, count in enumerate(grey(image)) if count > image.width * image.height / 1000]
        contrast = max(common) - min(common)
    dark_ground = name == "recording.svg" or view.scheme == "dark"  # a terminal is dark on any page
    assert (brightness(image) < 128) == dark_ground


def test_the_recording_moves(view, address):
    view.goto(address)
    there = view.locator("img[src$='recording.svg']")
    there.scroll_into_view_if_needed()
    first, end = there.screenshot(), time.monotonic() + 60
    while there.screenshot() == first:  # it stands still where there is something to read
        assert time.monotonic() < end


def test_the_search_finds_without_a_server(view, address):
    view.faults.clear()
    view.goto(address)
    if view.width < 960:
        view.locator("label[for=__search].md-header__button").click()
    view.locator("input.md-search__input").fill("quarantined")
    view.wait_for_selector(".md-search-result__item a", timeout=30_000)
    assert view.faults == []


@pytest.mark.parametrize("words", SEARCHES)
def test_a_search_leads_to_the_page_that_helps_first(browser, address, words):
    page = browser.new_page(viewport={"width": WIDE[0], "height": WIDE[1]})
    page.goto(address)
    page.locator("input.md-search__input").fill(words)
    page.wait_for_selector(".md-search-result__item a", timeout=60_000)
    found = page.locator(".md-search-result__item a").first.get_attribute("href")
    page.close()
    assert urlsplit(found).path.lstrip("/") == SEARCHES[words]


def test_a_page_links_to_the_repository(view, address):
    view.goto(address)
    where = "https://github.com/anyaccel/anyaccel"
    assert view.locator(f".md-content a[href='{where}']").count() == 1
    assert view.locator(f"a.md-source[href='{where}']").count() >= 1


def test_the_home_page_shows_what_it_is_and_how_to_install_it_at_once(view, address):
    """Without scrolling, in a window as people have it."""
    view.goto(address)
    height = view.viewport_size["height"]
    for selector in (".language-sh", "img[src$='recording.svg']"):
        box = view.locator(f".md-content {selector}").first.bounding_box()
        assert box["y"] + min(box["height"], 100) <= height, selector


def test_a_reader_chooses_the_scheme(view, address):
    view.goto(address)
    scheme = "() => document.body.dataset.mdColorScheme"
    before = view.evaluate(scheme)
    view.locator("form[data-md-component=palette] label:visible").click()
    assert {before, view.evaluate(scheme)} == {"default", "slate"}
    chosen = view.evaluate(scheme)
    view.goto(address + "tutorial/")
    assert view.evaluate(scheme) == chosen
    view.evaluate("localStorage.clear()")


def test_the_script_records_what_the_commands_print(tmp_path):
    """The SVG of the landing page is made anew, from real commands on a real pseudo-terminal."""
    command = [sys.executable, str(ROOT / "scripts" / "recording.py"), str(tmp_path / "recording.svg")]
    subprocess.run(command, check=True, timeout=200)
    texts = re.findall(r">([^<]+)</text>", (tmp_path / "recording.svg").read_text(encoding="utf-8"))
    shown = html.unescape("\n".join(texts))
    for text in (
        "4 devices, 4 free",
        "sees GPU-",
        "training",
        "does not fit now",
        "fits now: GPU:1",
        "job 1 is cancelled",
    ):
        assert text in shown, text
    kept = (ROOT / "docs" / "images" / "recording.svg").read_text(encoding="utf-8")
    assert re.findall("<title>.*</title>", kept) == re.findall(
        "<title>.*</title>", (tmp_path / "recording.svg").read_text()
    )
