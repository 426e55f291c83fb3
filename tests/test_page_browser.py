"""The page in a real browser: it loads nothing, works without script, at every width and in both schemes."""

from __future__ import annotations

import json
import shutil

import pytest
from synthetic_run import bandwidth, cell, failed, write_run

from spectune.reporting.document import report_document
from spectune.reporting.page import render
from spectune.reporting.summary import summarise
from spectune.sweeping.cell import Excerpt, ExcerptPiece

HOSTILE = """</script><script>window.hit=1</script><img src=x onerror="window.hit=1"><!-- ]]> {{ 7*7 }} \u2028 $x_"""
WIDTHS = (400, 800, 1200, 1600)


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver

    found = next((p for n in ("chromium", "google-chrome", "chrome") if (p := shutil.which(n))), None)
    driver = shutil.which("chromedriver")
    if not found or not driver:
        pytest.skip("no Chromium with its chromedriver here")
    options = webdriver.ChromeOptions()
    options.binary_location = found
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield driver
    driver.quit()


def excerpt(text):
    pieces = [ExcerptPiece(text=text, kind=k, tokens=1) for k in ("prefill", "draft", "correction", "bonus")]
    return Excerpt(id=text, prompt=text, prompt_cut=False, pieces=tuple(pieces), cut=False)


def written(tmp_path_factory, name, *, text=None, other=None):
    """A run of two suites, drafts and batches with a failed cell; `text` is in every name if given."""
    folder = tmp_path_factory.mktemp(name)
    cells = [
        cell(
            k=k, batch=b, suite=text or suite, drafter=text or draft, target=text or "target",
            speedup=1.1 + k / 4 - b / 9, warnings=(f"{text or 'a'}: b; c",),
        ).model_copy(update={"excerpt": excerpt(text or " token"), "bandwidth": bandwidth()})
        for suite in (("code", "math")[: 1 if text else 2])
        for draft in (("ngram", "a-draft-with-a-rather-long-name-of-many-words")[: 1 if text else 2])
        for k in (1, 2, 4)
        for b in (1, 4)
    ]  # fmt: skip
    names = {"suite": text, "drafter": text, "target": text} if text else {}
    run = write_run(folder / "run", cells, [failed(text or "no memory", k=9, **names)], name=text or "run")
    summary = summarise(run)
    others = [summarise(write_run(folder / "other", cells[1:], name=text or "other"))] if other else []
    page = folder / "page.html"
    page.write_text(render(summary, report_document(summary, others)), encoding="utf-8")
    return page.as_uri()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return written(tmp_path_factory, "usual", other=True)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return written(tmp_path_factory, "hostile", text=HOSTILE)


def resize(browser, width):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def test_nothing_is_requested_but_the_file_and_the_console_is_quiet(browser, page):
    browser.get_log("performance")
    browser.get(page)
    events = [json.loads(e["message"])["message"] for e in browser.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert page in asked
    assert all(url == page or url.startswith("data:") for url in asked)
    assert browser.get_log("browser") == []


def test_a_heading_sorts_its_table_both_ways(browser, page):
    browser.get(page)
    read = """
        document.querySelectorAll("details").forEach((d) => (d.open = true));
        const head = [...document.querySelectorAll("#cells th")].find((h) => h.textContent === "AL");
        head.querySelector("button").click();
        const rows = [...head.closest("table").tBodies[0].rows];
        return [head.getAttribute("aria-sort"), rows.map((r) => parseFloat(r.cells[head.cellIndex].textContent))];
    """
    for order in ("ascending", "descending"):
        told, values = browser.execute_script(read)
        assert told == order
        assert len(set(values)) > 1
        assert values == sorted(values, reverse=order == "descending")


def test_the_filter_keeps_the_cells_of_one_suite_draft_and_batch(browser, page):
    browser.get(page)
    shown = browser.execute_script("""
        for (const select of document.querySelectorAll("#filter select")) {
            select.value = "1";
            select.dispatchEvent(new Event("change", {bubbles: true}));
        }
        return [...document.querySelector("#cells table").tBodies[0].rows].filter((r) => !r.hidden)
            .map((r) => [...r.cells].slice(0, 4).map((c) => c.textContent));
    """)
    assert shown == [["math", "4", "a-draft-with-a-rather-long-name-of-many-words", str(k)] for k in (1, 2, 4)]


def test_a_point_of_a_figure_tells_its_value_under_the_pointer(browser, page):
    browser.get(page)
    words, told = browser.execute_script("""
        const point = document.querySelector(".panel svg .p");
        point.scrollIntoView({block: "center"});
        const box = point.getBoundingClientRect();
        const at = {clientX: box.x + box.width / 2, clientY: box.y + box.height / 2, bubbles: true};
        point.dispatchEvent(new PointerEvent("pointermove", at));
        const tip = document.getElementById("tip");
        return [tip.hidden ? "" : tip.textContent, point.firstElementChild.textContent];
    """)
    assert "speedup" in words
    assert words == told


def test_copying_takes_the_command(browser, page):
    browser.get(page)
    text, label = browser.execute_async_script("""
        const done = arguments[0], box = document.querySelector("#answer .command");
        const button = box.querySelector("button");
        button.click();
        setTimeout(() => done([box.querySelector("pre").textContent, button.textContent]), 300);
    """)
    assert text
    assert label in ("Copied", "Selected")


@pytest.mark.parametrize("which", ["page", "hostile"])
def test_the_body_never_scrolls_sideways_and_texts_stay_apart(browser, which, request):
    browser.get(request.getfixturevalue(which))
    browser.execute_script("document.querySelectorAll('details').forEach((d) => (d.open = true));")
    for width in WIDTHS:
        resize(browser, width)
        # What stands in an opened <details> is laid out with the next frame.
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]));")
        wide, overlaps = browser.execute_script("""
            const boxes = [...document.querySelectorAll("main h2, main p, main li, main figure, main .wide, main form")]
                .filter((e) => e.offsetParent && !e.closest(".wide *, #filter, figure *"))
                .map((e) => [e, e.getBoundingClientRect()]);
            const crossing = [];
            for (const [a, r] of boxes)
                for (const [b, s] of boxes)
                    if (a !== b && !a.contains(b) && !b.contains(a) && r.left < s.right - 1 && s.left < r.right - 1
                        && r.top < s.bottom - 1 && s.top < r.bottom - 1) crossing.push(a.outerHTML.slice(0, 80));
            return [document.documentElement.scrollWidth, crossing];
        """)
        assert wide <= width
        assert overlaps == []
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_figures_stand_out_in_both_schemes(browser, page, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page)
    paper, inks = browser.execute_script("""
        const of = (e, name) => getComputedStyle(e)[name];
        const texts = ["body", ".soft", ".verdict", ".panel svg text", "caption"].map((s) => document.querySelector(s));
        const lines = [...document.querySelectorAll(".legend path")];
        const inks = texts.map((e) => (e.closest("svg") ? of(e, "fill") : of(e, "color")));
        return [of(document.body, "backgroundColor"), [...inks, ...lines.map((e) => of(e, "fill"))]];
    """)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert (luminance(paper) < 0.2) == (scheme == "dark")
    # WCAG 2: 4.5 for text, 3 for graphics
    assert [ink for ink in inks[:5] if contrast(ink, paper) < 4.5] == []
    assert [ink for ink in inks if contrast(ink, paper) < 3] == []


def luminance(colour):
    parts = [int(p) / 255 for p in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_without_script_everything_is_there_and_the_filter_is_not(browser, page):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.get(page)
    buttons, filter_shown, rows, figures, titles = browser.execute_script("""
        return [document.querySelectorAll("button").length, !document.getElementById("filter").hidden,
                document.querySelectorAll("#cells tbody tr").length,
                document.querySelectorAll("figure svg[role=img]").length,
                document.querySelectorAll(".panel .p > title").length];
    """)
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert buttons == 0
    assert not filter_shown
    assert rows == 2 * 24
    assert figures >= 5
    assert titles > 24


def test_print_has_what_is_folded_away_and_fits_the_paper(browser, page):
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    resize(browser, 740)  # A4 between Chromium's margins, in CSS pixels
    browser.get(page)
    wide, rows, buttons = browser.execute_script("""
        return [document.documentElement.scrollWidth,
                [...document.querySelectorAll("#cells tbody tr")].filter((r) => r.checkVisibility()).length,
                [...document.querySelectorAll(".command button")].filter((b) => b.offsetParent).length];
    """)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide <= 740
    assert rows == 2 * 24
    assert buttons == 0


def test_hostile_texts_do_nothing_and_are_shown_as_they_are(browser, hostile):
    browser.get(hostile)
    hit, images, scripts, head = browser.execute_script("""
        return [window.hit, document.images.length, document.scripts.length, document.querySelector("h1").textContent];
    """)
    assert hit is None
    assert images == 0
    assert scripts == 1
    assert head == HOSTILE
    assert browser.get_log("browser") == []
