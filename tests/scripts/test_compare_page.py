"""scripts/compare.py --html: what the page holds, and what a browser without a network makes of it."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from scripts import compare
from scripts.comparison import page, published
from scripts.comparison.groups import make_groups
from scripts.comparison.runs import read_run
from tests.scripts.written_runs import write_run

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """One run of adamw, whose name is no HTML, and two seeds of muon: 20 updates of ten minutes."""
    adamw = [(tmp_path / "cheap <b> & %{x}", "adamw", 1, 2.5, 2.0)]
    muon = [(tmp_path / f"m{i}", "muon", i, 2.2, end) for i, end in ((1, 1.8), (2, 1.9))]
    return [
        write_run(folder, [(0, 5.0), (10, middle), (20, end)], optimizer, seconds=600, seed=seed)
        for folder, optimizer, seed, middle, end in adamw + muon
    ]


def figure_in(text: str) -> dict[str, Any]:
    (found,) = re.findall(r"^const figure = (.*);$", text, flags=re.MULTILINE)
    return json.loads(found)


# --- what the page holds ---


def test_the_page_is_whole_and_asks_for_nothing(folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "deep" / "page.html"
    assert compare.main([*map(str, folders), "--html", str(out), "--loss", "2.5", "--title", "a < b"]) == 0
    text = out.read_text(encoding="utf-8")
    assert "<h1>a &lt; b</h1>" in text
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)=", text)
    assert "plotly.js v" in text
    assert 4_000_000 < len(text) < 7_000_000
    for part in ("m1", "2 seeds", "to a validation loss of 2.5", "muon reaches adamw&#x27;s final loss"):
        assert part in text
    assert "cheap <b>" not in text
    assert "cheap &lt;b&gt; &amp; %{x}" in text


def test_every_point_carries_its_update_tokens_and_seconds(folders: list[Path]) -> None:
    groups = make_groups([read_run(folder) for folder in folders])
    traces = figure_in(page.page(groups, None, [], None))["data"]
    (adamw,) = [t for t in traces if t.get("name") == "adamw" and t["yaxis"] == "y"]
    assert adamw["x"] == [0, 10_000, 20_000]
    assert adamw["y"] == [5.0, 2.5, 2.0]
    assert adamw["customdata"] == [[0, 0, 0.0], [10, 10_000, 6000.0], [20, 20_000, 12_000.0]]
    (mean,) = [t for t in traces if t.get("name") == "muon, 2 seeds" and t["yaxis"] == "y"]
    assert mean["y"] == [5.0, 2.2, 1.85]
    (band,) = [t for t in traces if t.get("fill") == "toself"]
    assert band["y"] == [5.0, 2.2, 1.9, 1.8, 2.2, 5.0]
    assert band["x"] == [0, 10_000, 20_000, 20_000, 10_000, 0]
    assert {t.get("name") for t in traces if t["yaxis"] == "y2"} >= {"adamw", "adamw, single rows", "m1", "m2"}


def test_long_curves_are_thinned_and_gaps_stay(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [(0, 5.0), (10, float("nan")), (9000, 2.0)], train_rows=9000)
    traces = figure_in(page.page(make_groups([read_run(folder)]), None, [], None))["data"]
    assert traces[1]["y"] == [5.0, None, 2.0]
    rows = traces[0]
    assert rows["name"] == "adamw, single rows"
    assert 1000 < len(rows["x"]) <= page.MOST_POINTS + 2
    assert (rows["customdata"][0][0], rows["customdata"][-1][0]) == (1, 9000)


def test_a_run_without_evaluations_is_in_the_legend_too(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", [], train_rows=3), write_run(tmp_path / "b", [(0, 5.0), (3, 2.0)], "muon")]
    traces = figure_in(page.page(make_groups([read_run(run) for run in runs]), None, [], None))["data"]
    assert [t["name"] for t in traces if t["showlegend"] and t["x"]] == ["adamw", "muon"]


def test_published_curves_have_no_time(tmp_path: Path) -> None:
    evals = [(0, 9.0), (10_000, 3.2)]
    groups = make_groups([read_run(write_run(tmp_path / "a", evals, train_rows=0, tokens_per_update=491_520))])
    text = page.page(groups, None, [], published.load("small"))
    curves = {t["name"]: t for t in figure_in(text)["data"]}
    muon = curves["Muon, published"]
    assert muon["customdata"][-1] == [10_000, 4_915_200_000, None]
    assert muon["y"][-1] == 3.1604
    assert curves["MARS-AdamW, published table"]["y"] == [3.108]
    assert "MARS-AdamW, published (older recipe)" in curves
    assert "Against the published gpt2-small" in text


def test_a_page_that_cannot_be_written(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    out = folders[0] / "config.json" / "x.html"
    assert compare.main([str(folders[0]), "--html", str(out)]) == 2
    assert f"error: {out} cannot be written" in capsys.readouterr().err


# --- in a browser ---


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    """Debian's Chromium, without a network."""
    if BROWSER is None or DRIVER is None:
        pytest.skip("no chromium and chromedriver on the PATH (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1300,1500"):
        options.add_argument(argument)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield chrome
    finally:
        chrome.quit()


def place(browser: webdriver.Chrome, x: float, y: float) -> tuple[int, int]:
    """Where a point of the upper panel lies in the window."""
    where = browser.execute_script(
        "const l = document.getElementById('curves')._fullLayout, r = document.getElementById('curves')"
        ".getBoundingClientRect(); return [r.left + l._size.l + l.xaxis.d2p(arguments[0]),"
        " r.top + l.yaxis._offset + l.yaxis.d2p(arguments[1])];",
        *(x, y),
    )
    return round(where[0]), round(where[1])


def move(browser: webdriver.Chrome, *places: tuple[int, int]) -> ActionChains:
    chain = ActionChains(browser, duration=50)
    for x, y in places:
        chain.w3c_actions.pointer_action.move_to_location(x, y)
    return chain


def axis(browser: webdriver.Chrome, name: str) -> list[float]:
    return browser.execute_script(f"return document.getElementById('curves')._fullLayout.{name}.range.slice();")


def hover_text(browser: webdriver.Chrome) -> str:
    return " ".join(element.text for element in browser.find_elements(By.CSS_SELECTOR, "#curves .hovertext"))


@pytest.mark.slow
def test_a_browser_shows_hovers_and_zooms(folders: list[Path], browser: webdriver.Chrome, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert compare.main([*map(str, folders), "--html", str(out)]) == 0
    browser.get(out.as_uri())
    wait = WebDriverWait(browser, 30)
    wait.until(lambda b: b.find_elements(By.CSS_SELECTOR, "#curves .scatterlayer .trace"))

    x, y = place(browser, 10_000, 2.5)
    move(browser, (x + 30, y - 30), (x + 1, y + 1)).perform()
    wait.until(hover_text)
    assert "adamw" in hover_text(browser)
    assert "update 10" in hover_text(browser)
    assert "10,000 tokens" in hover_text(browser)
    assert "loss 2.5000" in hover_text(browser)
    x, y = place(browser, 20_000, 1.8)
    move(browser, (x - 30, y - 30), (x - 1, y)).perform()
    wait.until(lambda b: "loss 1.8000" in hover_text(b))
    assert "m1" in hover_text(browser)

    before = axis(browser, "xaxis"), axis(browser, "yaxis")
    corners = place(browser, 9_000, 2.7), place(browser, 16_000, 2.1)
    chain = move(browser, corners[0])
    chain.w3c_actions.pointer_action.pointer_down()
    for share in (0.5, 1):
        chain.w3c_actions.pointer_action.move_to_location(
            *(round(a + share * (b - a)) for a, b in zip(*corners, strict=True))
        )
    chain.w3c_actions.pointer_action.pointer_up()
    chain.perform()
    wait.until(lambda b: axis(b, "xaxis") != before[0])
    assert axis(browser, "xaxis") == pytest.approx([9_000, 16_000], abs=100)
    assert axis(browser, "xaxis2") == axis(browser, "xaxis")
    assert axis(browser, "yaxis") == pytest.approx([2.1, 2.7], abs=0.02)

    for button, title, end in (("updates", "updates", 20), ("time", "training time (h)", 3.33), ("tokens", "", 20_000)):
        next(b for b in browser.find_elements(By.CSS_SELECTOR, ".axes button") if b.text == button).click()
        wait.until(lambda b, end=end: end <= axis(b, "xaxis2")[1] < 1.3 * end)
        assert title in browser.find_element(By.CSS_SELECTOR, "#curves .x2title").text

    picture = tmp_path / "page.png"
    assert browser.save_screenshot(str(picture))
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3)
    assert len(pixels) > 1_000_000
    assert 0.005 < (pixels != 255).any(axis=1).mean() < 0.5
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):  # the two lines are there
        assert (pixels == colour).all(axis=1).sum() > 100
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
