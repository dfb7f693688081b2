"""`python -m tools.report` in a browser, pages opened as files: search, a variant, two side by side, two widths, both colour schemes."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from report_cases import ARCHS, few_variants

from ssmgen.cache.store import shared_cache
from tools.report import write

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'ssmgen[browser]'")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, and none is on the PATH")

WIDTHS = {"wide": (1280, 900), "narrow": (390, 844)}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("site")
    with few_variants():
        write.write(root, ARCHS, [], shared_cache())
    return root


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if os.getuid() == 0 else [])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """A function that opens a window; the test fails for errors of its scripts, and for requests to anything but files."""
    wrong: list[str] = []
    contexts = []

    def opened(width: str = "wide", scheme: str = "light"):
        across, down = WIDTHS[width]
        contexts.append(chromium.new_context(viewport={"width": across, "height": down}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: request.url.startswith("file:") or wrong.append(request.url))
        page.on("requestfailed", lambda request: wrong.append(request.url))
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def fits(page) -> bool:
    """Whether nothing but code boxes can be scrolled sideways."""
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_from_the_search_to_a_comparison(site, open_page, tmp_path, width, scheme):
    page = open_page(width, scheme)
    page.goto((site / "index.html").as_uri())
    page.fill("#search", "nemotron state=bf16 prefetch=264")
    page.wait_for_function("document.querySelectorAll('#results li').length === 1")
    assert fits(page) and page.inner_text("#found").startswith("1 of ")
    page.screenshot(path=tmp_path / "index.png", full_page=True)

    page.click("#results a")
    page.wait_for_url("**/variants/sm_90a/ssu_h128p64n128g8_bf16_*_pf264_*.html")
    assert "__global__" in page.inner_text("#cu pre") and not page.is_visible("#sass pre")
    page.click("#sass summary")
    assert "LDG.E.128" in page.inner_text("#sass pre")
    assert fits(page)
    page.screenshot(path=tmp_path / "variant.png", full_page=True)

    page.click("#compare td a >> nth=0")
    page.wait_for_selector("#diff .row")
    removed = page.locator("#diff .removed").all_inner_texts()
    assert any("constexpr u32 kPrefetch = 264;" in line for line in removed) and page.locator("#diff .added").count() > 0
    assert fits(page)
    page.screenshot(path=tmp_path / "compare.png", full_page=True)

    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("index", "variant", "compare"))


@pytest.mark.parametrize("folder", ["families", "variants", "compare"])
def test_every_page_fits_a_telephone(site, open_page, folder):
    page = open_page("narrow")
    for path in sorted((site / folder).rglob("*.html")):
        page.goto(path.as_uri())
        assert fits(page), path


def test_a_comparison_shows_both_texts_whole(site, open_page):
    page = open_page()
    page.goto((site / "compare/selective_state_update.html").as_uri())
    page.wait_for_selector("#diff .row")
    for button in page.query_selector_all("#diff .more"):
        button.click()
    for side in ("a", "b"):
        column = 1 if side == "a" else 2
        shown = page.eval_on_selector_all(
            f"#diff .line:nth-child({column}):not(.none) .text", "lines => lines.map(line => line.textContent).join('\\n')"
        )
        assert shown == page.evaluate(f"ssmgen_cu[document.getElementById('{side}').value].trimEnd()")


def test_the_address_says_what_is_compared(site, open_page):
    page = open_page()
    page.goto((site / "compare/selective_state_update.html").as_uri())
    page.select_option("#form", "sass")
    page.select_option("#a", index=2)
    page.wait_for_selector("#diff .row")
    left, right, shown = page.input_value("#a"), page.input_value("#b"), page.inner_text("#summary")
    again = open_page()
    again.goto(page.url)
    again.wait_for_selector("#diff .row")
    assert (again.input_value("#a"), again.input_value("#b"), again.input_value("#form")) == (left, right, "sass")
    assert again.inner_text("#summary") == shown
    again.click("#swap")
    assert again.input_value("#a") == right
    again.select_option("#a", left)
    again.select_option("#b", left)
    again.wait_for_function("document.getElementById('summary').textContent === 'The same text.'")


def longest_common(a: list[int], b: list[int]) -> int:
    """Length of the longest common subsequence, by its definition."""
    if not a or not b:
        return 0
    if a[0] == b[0]:
        return 1 + longest_common(a[1:], b[1:])
    return max(longest_common(a[1:], b), longest_common(a, b[1:]))


def test_rows_are_both_lists_with_as_many_equal_as_can_be(site, open_page):
    page = open_page()
    page.goto((site / "compare/selective_state_update.html").as_uri())
    draw = random.Random(0)
    lists = [[[draw.randrange(4) for _ in range(draw.randrange(9))] for _ in range(2)] for _ in range(300)]
    found = page.evaluate("lists => lists.map(([a, b]) => sideBySide(a, b))", lists)
    for (a, b), rows in zip(lists, found, strict=True):
        assert [i for i, _, _ in rows if i is not None] == list(range(len(a)))
        assert [j for _, j, _ in rows if j is not None] == list(range(len(b)))
        assert all(a[i] == b[j] for i, j, equal in rows if equal)
        assert sum(equal for *_, equal in rows) == longest_common(a, b)


def test_words_that_differ_are_marked(site, open_page):
    page = open_page()
    page.goto((site / "compare/selective_state_update.html").as_uri())
    left, right = page.evaluate("wordDifferences('int kVec = 8;', 'int kVec = 16;')")
    assert [word for word, same in left if not same] == ["8"] and [word for word, same in right if not same] == ["16"]
    assert "".join(word for word, _ in left) == "int kVec = 8;"
