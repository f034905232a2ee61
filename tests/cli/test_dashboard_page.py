"""The page in a real browser: what people see, live, in light and dark and on a phone, and no word of complaint."""

from __future__ import annotations

import os
import re

import pytest
from browser import chromium, why_not
from small_run import Run

DESKTOP, PHONE = {"width": 1180, "height": 900}, {"width": 390, "height": 844}
if (missing := why_not()) and not os.environ.get("DELTA_SYNC_BROWSER_REQUIRED"):
    pytest.skip(missing, allow_module_level=True)


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def visit(browser):
    """Opens a page and fails the test for anything in its console."""
    opened, said = [], []

    def open_page(server, viewport=DESKTOP, scheme="light"):
        context = browser.new_context(viewport=viewport, color_scheme=scheme)
        opened.append(context)
        tab = context.new_page()
        tab.set_default_timeout(60_000)
        tab.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(server.url)
        tab.wait_for_selector("html[data-ready]")
        return tab

    yield open_page
    for context in opened:
        context.close()
    assert said == []


def shows(tab, selector, text, seconds=60):
    """Wait until an element has a text in it."""
    tab.locator(selector).filter(has_text=re.compile(text)).first.wait_for(timeout=1000 * seconds)


def overflow(tab):
    """How far the page is wider than the window."""
    return tab.evaluate("document.documentElement.scrollWidth - innerWidth")


def overlaps(tab):
    """Texts of charts that lie on one another."""
    return tab.evaluate("""() => [...document.querySelectorAll("svg")].flatMap((svg) => {
        const boxes = [...svg.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
        return boxes.flatMap(([a, p], i) => boxes.slice(i + 1)
            .filter(([b, q]) => p.left < q.right - 1 && q.left < p.right - 1)
            .filter(([b, q]) => p.top < q.bottom - 3 && q.top < p.bottom - 3)
            .map(([b]) => [a, b]));
    })""")


def test_a_publish_and_a_refusal_appear_by_themselves(run, page, visit):
    run.acknowledge("east", 6)
    tab = visit(page(run.uri))
    shows(tab, "#fact-version", "^6$")
    shows(tab, "#fleet tr", "east.*current")
    shows(tab, "#link", "live")
    assert tab.title().startswith("6 ·")
    run.keep(run.publisher.step(9))
    shows(tab, "#fact-version", "^7$")
    shows(tab, "#newest tbody tr:first-child", "^7delta")
    shows(tab, "#fleet tr", "east.*behind")
    run.acknowledge("east", 6, state="refused", refused_version=7, error="<b>not</b> its sums")
    shows(tab, "#fleet tr.error", "refused 7: <b>not</b> its sums")  # text, not markup
    shows(tab, "#health", "1 refused")
    assert "layer" in tab.locator("#heat canvas").get_attribute("aria-label")
    assert overlaps(tab) == []


def test_an_empty_run_says_what_will_fill_it(tmp_path, page, visit):
    tab = visit(page(tmp_path / "run"))
    shows(tab, "#fact-version-more", "first publish")
    shows(tab, "#timeline-note", "No version yet")
    shows(tab, "#fleet", "No replica has acknowledged")
    shows(tab, "#commits-note", "No replica has told")
    assert not tab.locator("#timeline").is_visible()
    Run(tmp_path / "run")
    shows(tab, "#fact-version", "^6$")
    assert tab.locator("#timeline svg").is_visible()


def test_light_and_dark_are_readable(run, page, visit):
    """Every text's contrast with what is behind it is at least 4.5, as WCAG AA asks."""
    server = page(run.uri)
    run.acknowledge("east", 6)
    run.acknowledge("west", 4, state="refused", refused_version=5, error="no")
    run.acknowledge("south", 4)
    backgrounds = []
    for scheme in ("light", "dark"):
        tab = visit(server, scheme=scheme)
        shows(tab, "#fleet tr", "south")
        shows(tab, "#timeline svg text", "Bytes a version")
        backgrounds.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert tab.evaluate(CONTRAST) == []
    assert backgrounds[0] != backgrounds[1]


def test_a_phone_scrolls_one_way_only(run, page, visit):
    run.acknowledge("a-replica-with-a-name-that-is-longer-than-a-phone-is-wide-0123456789", 6)
    run.acknowledge("west", 4, state="refused", refused_version=5, error="x" * 600)
    tab = visit(page(run.uri), PHONE)
    shows(tab, "#fleet tr", "west")
    shows(tab, "#timeline svg text", "Bytes a version")
    assert overflow(tab) == 0
    assert overlaps(tab) == []
    assert tab.locator("#fleet td[data-name='version']").first.is_visible()


def test_charts_are_read_with_the_keyboard(run, page, visit):
    tab = visit(page(run.uri))
    shows(tab, "#timeline .readout", "version 6 ")
    tab.locator("#timeline svg").focus()
    for _ in range(2):
        tab.keyboard.press("ArrowLeft")
    shows(tab, "#timeline .readout", "version 4 .*anchor")
    tab.keyboard.press("Home")
    shows(tab, "#timeline .readout", "version 1 .*origin")
    run.keep(run.publisher.step(9))  # drawn again, it keeps the focus and the place
    shows(tab, "#fact-version", "^7$")
    tab.keyboard.press("ArrowRight")
    shows(tab, "#timeline .readout", "version 2 ")
    shows(tab, "#heat .readout", "most changed")
    tab.locator("#heat canvas").focus()
    tab.keyboard.press("ArrowLeft")
    shows(tab, "#heat .readout", "^embed at version 7: [0-9.]+ % changed")
    tab.locator("#by").select_option("kind")
    shows(tab, "#heat .readout", "^embed at version 7")


def test_five_thousand_versions_and_a_hundred_replicas(long_run, page, visit):
    tab = visit(page(long_run.folder))
    print(f"all parts drawn {tab.evaluate('performance.now()') / 1000:.2f} s after the page was asked for")
    shows(tab, "#fact-version", "^5,000$")
    shows(tab, "#fact-fleet", "^99 of 100$")
    shows(tab, "#timeline-key", "each point: 32 versions", 120)
    shows(tab, "#timeline svg", "epoch 2", 120)
    assert tab.locator("#fleet tbody tr").count() == 13  # twelve, and what is wrong with the first
    tab.locator("#fleet button").click()
    assert tab.locator("#fleet tbody tr").count() == 101
    assert tab.evaluate("document.querySelectorAll('*').length") < 4000
    tab.locator("#window").select_option("50")
    shows(tab, "#timeline svg", "4,951")
    assert overflow(tab) == 0
    assert overlaps(tab) == []


def test_a_server_that_went_away_is_said_and_one_that_came_back_found(run, page, visit):
    server = page(run.uri)
    tab = visit(server)
    shows(tab, "#link", "live")
    server.shutdown()
    server.server_close()
    server.live.__exit__()  # ends its streams
    shows(tab, "#link", "no answer")
    page(run.uri, port=server.server_address[1])
    shows(tab, "#link", "live")


CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.getClientRects().length || node.closest("noscript")) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(parse(node.closest("svg") ? style.fill : style.color)), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push([node.textContent.slice(0, 40), ratio.toFixed(2)]);
  }
  return bad;
}"""
