"""The pages of docs/ in Chromium: on a telephone and on a desk, light and dark, with search and copy buttons."""

from pathlib import Path

import pytest

import forked

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(
    page.relative_to(DOCS).with_suffix(".html").as_posix()
    for page in DOCS.rglob("*.md")
    if page.stem not in ("versions-table", "growth-table")
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages as `make docs` makes them."""
    folder = tmp_path_factory.mktemp("docs")
    forked.run(["-m", "sphinx", "-q", DOCS, folder])
    return folder.as_uri()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_scrolls_sideways(chromium, site, scheme, width):
    """Tables, code and pictures that are wider than the screen scroll by themselves, or shrink."""
    context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(240_000)
    widths = {}
    for name in PAGES:
        page.goto(f"{site}/{name}")
        widths[name] = page.evaluate("document.documentElement.scrollWidth")
    context.close()
    assert {name: wide for name, wide in widths.items() if wide > width} == {}


def test_the_search_lists_pages_and_marks_the_word(chromium, site):
    """Without a server: the index is a script."""
    page = chromium.new_page()
    page.set_default_timeout(240_000)
    page.goto(f"{site}/search.html?q=gradient+accumulation")
    page.wait_for_selector("#search-results li")
    assert "Gradient accumulation and clipping" in page.inner_text("#search-results")
    page.close()


def test_a_block_of_code_has_a_button_that_copies_it(chromium, site):
    """The first script of the documents; what is copied begins with its first line."""
    page = chromium.new_page()
    page.set_default_timeout(240_000)
    page.goto(f"{site}/index.html")
    page.wait_for_selector("button.copybtn", state="attached")
    target = page.get_attribute("button.copybtn >> nth=0", "data-clipboard-target")
    assert page.inner_text(target).startswith("pip install")
    page.close()
