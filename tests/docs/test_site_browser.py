"""Pages of the built site in a real browser: no errors, nothing too wide, no pale text."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from browser import NEEDS_BROWSER, Browser

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = (
    "index.html",  # a picture, tables, code
    "ARCHITECTURE.html",  # a diagram, paths in the second of three columns
    "docs/concepts.html",  # drawings
    "docs/coverage.html",  # the widest text in a table
    "docs/papers.html",  # many columns
    "docs/scale.html",  # nine columns
    "docs/ko/index.html",
    "reference/settings/optimizer.html",
    "reference/commands/train.html",
)
pytestmark = [
    NEEDS_BROWSER,
    pytest.mark.skipif(not SITE.exists(), reason="needs build/site, which `make docs` builds"),
]


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_the_screen_and_reports_no_error(
    browser: Browser, address: str, page: str
) -> None:
    for width, dark in ((1280, False), (390, True)):
        browser.visit(address + page, width=width, dark=dark)
        browser.wait("window.document$ !== undefined")  # the scripts of the theme have run
        scheme = "slate" if dark else "default"
        assert browser.value("document.body.dataset.mdColorScheme") == scheme
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.value(SQUEEZED) == []
        assert browser.value(CLIPPED) == []
        assert browser.value(BROKEN) == []
        assert browser.value(PALE) == []
        assert browser.complaints(address) == []


SQUEEZED = """
[...document.querySelectorAll('.md-typeset td')]
  .filter(cell => cell.getBoundingClientRect().width < 90 && cell.innerText.length > 60)
  .map(cell => cell.innerText)
"""
"""Cells of tables that break their text into a column of words."""

CLIPPED = r"""
[...document.querySelectorAll('pre code')]
  .filter(code => /^(groupwise|make|python) /.test(code.innerText))
  .filter(code => code.scrollWidth > code.clientWidth + 1)
  .map(code => code.innerText)
"""
"""Commands that have to be scrolled to be read."""

BROKEN = """
[
  ...[...document.querySelectorAll('.md-typeset td')]
    .filter(cell => cell.getBoundingClientRect().width < 60 && cell.innerText.length > 12),
  ...[...document.querySelectorAll('pre code')]
    .filter(code => /[─│►]/.test(code.innerText) && getComputedStyle(code).whiteSpace !== 'pre'),
].map(element => element.innerText)
"""
"""Cells that break words into a column of letters, and diagrams whose lines wrap."""

PALE = """
(() => {
  const parts = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b]
    .map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const over = (top, under) => top.slice(0, 3).map((c, i) => c * top[3] + under[i] * (1 - top[3]));
  const whole = colour => { const p = parts(colour); return p.length < 4 ? [...p, 1] : p; };
  const behind = element => {
    const layers = [];
    for (let e = element; e; e = e.parentElement)
      layers.push(whole(getComputedStyle(e).backgroundColor));
    return layers.reduceRight((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const pale = [];
  const written = e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  const texts = document.querySelectorAll('.md-content :is(p, li, td, th, a, code, span, h1, h2)');
  for (const e of texts) {
    if (!written(e) || !e.offsetParent || e.matches('.headerlink')) continue;
    const under = behind(e), text = light(over(whole(getComputedStyle(e).color), under));
    const [a, b] = [text, light(under)].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) pale.push([e.textContent.slice(0, 40), contrast]);
  }
  return pale.slice(0, 5);
})()
"""
"""Text whose contrast with what is behind it is below 4.5 to 1 (WCAG AA)."""


def lists_as_text(page: str) -> list[str]:
    """Items of lists that a page shows as part of a paragraph."""
    article = page.partition("<article")[2].partition("</article>")[0]
    article = re.sub(r"<pre.*?</pre>", "", article, flags=re.DOTALL)
    return re.findall(r"\n\s*(?:[*+-]|\d+\.) (?:<\w+>)?\w[^\n<]{0,40}", article)


def test_no_page_shows_a_list_as_text() -> None:
    pages = {page.name: page.read_text(encoding="utf-8") for page in SITE.rglob("*.html")}
    assert {name: lists for name, text in pages.items() if (lists := lists_as_text(text))} == {}
    assert lists_as_text("<article><p>One:\n* two</p>") == ["\n* two"]


def test_the_checks_can_fail(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    cell = f"<td style='max-width: 40px'>{'word ' * 20}</td>"
    page.write_text(
        "<div class='md-content md-typeset'><p style='color: #888'>pale</p>"
        f"<table><tr>{cell}</tr></table><div style='width: 2000px'>wide</div>"
        "<pre><code style='white-space: pre-wrap'>a ─► b</code></pre><pre><code>a ─► b</code></pre>"
        "</div>"
        "<script>console.error('bad'); nowhere();</script><img src='https://example.invalid/a'>",
        encoding="utf-8",
    )
    browser.visit(page.as_uri())
    assert browser.value("document.documentElement.scrollWidth") > 1280
    assert len(browser.value(SQUEEZED)) == 1
    assert browser.value(BROKEN) == ["word " * 19 + "word", "a ─► b"]
    assert [text for text, _ in browser.value(PALE)] == ["pale"]
    assert len(browser.complaints()) >= 3
