"""The page in a real Chromium: it draws without a complaint or a request, and does what its controls say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_runs import HOSTILE, bundle_once, content, curve, page_of

from pareback.page.charts import vega
from pareback.page.references import Reference

pytest.importorskip("vl_convert", reason="needs the extra page: pip install 'pareback[page]'")
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install 'pareback[dev]'")
CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs a browser: apt-get install chromium chromium-driver"),
]

CHARTS = ("tradeoff", "convergence", "sparsity", "layers", "histograms")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
)


class Browser:
    """A tab, with words for what the tests ask of it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, width: int = 1280, dark: bool = False) -> Browser:
        """Show a file in a window of some width, by day or by night, and wait until it is drawn."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)  # what came before is nobody's
        self.driver.get(path.as_uri())
        self.until("document.documentElement.dataset.drawn === 'yes'")
        return self

    def ask(self, expression: str) -> Any:
        """Return what an expression of JavaScript is worth in the page."""
        return self.driver.execute_script(f"return {expression}")

    def until(self, expression: str) -> None:
        """Wait for an expression to become true."""
        waiting = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait(self.driver, 20, 0.05)
        waiting.until(lambda _: self.ask(expression), f"never true: {expression}")

    def click(self, selector: str) -> None:
        """Click on the first element that fits."""
        self.driver.execute_script(f"document.querySelector({json.dumps(selector)}).click()")

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements that fit and can be seen."""
        found: list[str] = self.ask(
            f"[...document.querySelectorAll({json.dumps(selector)})].filter(e => e.offsetParent || "
            "e instanceof SVGElement).map(e => e.textContent.trim())"
        )
        return found

    def tooltips(self, selector: str) -> list[str]:
        """Point at every element that fits and return what is said of it."""
        told = []
        for mark in self.driver.find_elements("css selector", selector):
            self.driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", mark)
            webdriver.ActionChains(self.driver).move_to_element(mark).pause(0.1).perform()
            told.append(self.ask("document.querySelector('#vg-tooltip-element.visible')?.textContent ?? ''"))
        return told

    def complaints(self) -> list[str]:
        """Return what the page wrote to the console."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for, itself included."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests, closed at the end."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The page of some records as a file."""
    monkeypatch.setattr(vega, "bundle", bundle_once)

    def make(*contents: Any, references: Any = ()) -> Path:
        path = tmp_path / "report.html"
        path.write_text(page_of(tmp_path, *contents, references=references), encoding="utf-8")
        return path

    return make


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (1280, True)], ids=["desk", "phone", "night"])
def test_charts_draw_without_a_complaint_or_a_request(browser: Browser, made: Any, width: int, dark: bool) -> None:
    """Every chart has marks, nothing is wider than the window, and the file itself is all that is loaded."""
    path = made(*curve(), references=[Reference("theirs", 12.0, {"nonzeros": 700.0}, "elsewhere")])
    browser.open(path, width, dark)
    assert browser.complaints() == []
    assert browser.requests() == [path.as_uri()]
    for chart in CHARTS:
        marks = f"#{chart} .mark-line path, #{chart} .mark-rect path"
        assert browser.ask(f"document.querySelectorAll('{marks}').length") > 0
    assert browser.ask("document.documentElement.scrollWidth") == width
    ground = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(15, 18, 22)" if dark else "rgb(245, 246, 248)")
    assert browser.ask("document.querySelector('#tradeoff svg').outerHTML.includes('#171b21')") is dark


def test_points_bars_and_references_are_in_the_chart(browser: Browser, made: Any) -> None:
    """Six points over two seeds, a bar for each, and one point from elsewhere; legends name every line."""
    browser.open(made(*curve(), references=[Reference("theirs", 12.0, {"nonzeros": 700.0}, "elsewhere")]))
    assert browser.ask("document.querySelectorAll('#tradeoff .mark-symbol.role-mark path').length") == 7
    rules = browser.ask("document.querySelectorAll('#tradeoff .mark-rule.role-mark line').length")
    assert rules == 6 + 1  # and the dense network's level
    legend = browser.texts("#tradeoff .role-legend-label text")
    lines = ["dense, thinned", "exact budget", "fixed-GA", "unconstrained", "elsewhere"]
    assert legend == [*lines, "Pareto front", "dense level"]


def test_the_axis_counts_what_is_chosen(browser: Browser, made: Any) -> None:
    browser.open(made(*curve()))
    title = "[...document.querySelectorAll('#tradeoff .role-axis-title text')].map(e => e.textContent)"
    assert "non-zero parameters" in browser.ask(title)
    browser.click("input[name=quantity][value=flops]")
    browser.until(f"{title}.includes('FLOPs per input')")
    browser.click("input[name=quantity][value=bytes]")
    browser.until(f"{title}.includes('bytes on disk')")
    before = browser.ask("document.querySelector('#tradeoff .mark-line path').getAttribute('d')")
    browser.click("input[name=scale][value=log]")
    browser.until(f"document.querySelector('#tradeoff .mark-line path').getAttribute('d') !== {json.dumps(before)}")
    assert browser.complaints() == []


def test_a_network_at_chance_does_not_flatten_the_others(browser: Browser, made: Any) -> None:
    """Errors of 10 to 20 % fill the linear axis; the one of 99 % is named above it, and on the logarithmic axis."""
    fallen = content("ga-0.02", 0, 1.0, 60, goal__kind="fixed", goal__bound="gaussian", goal__sparsity=0.98)
    browser.open(made(*curve(seeds=1), fallen))
    labels = "[...document.querySelectorAll('#tradeoff .role-axis-label text')].map(e => Number(e.textContent))"
    highest = f"Math.max(...{labels}.filter(n => n <= 100))"
    named = "[...document.querySelectorAll('#tradeoff .role-title text')].map(e => e.textContent).join('')"
    assert browser.ask(highest) <= 21
    assert browser.ask(named) == "above: fixed-GA, 98 % zeros (99.0 %)"
    browser.click("input[name=scale][value=log]")
    browser.until(f"{named} === ''")
    assert browser.ask(highest) > 21
    assert browser.complaints() == []


def test_a_click_on_the_legend_shows_one_line_alone(browser: Browser, made: Any) -> None:
    browser.open(made(*curve(seeds=1)))
    faint = "[...document.querySelectorAll('#tradeoff .mark-symbol.role-mark path')].filter(e => "
    faint += "Number(e.getAttribute('opacity') ?? 1) < 0.5).length"
    assert browser.ask(faint) == 0
    entry = browser.driver.find_elements("css selector", "#tradeoff .role-legend-symbol path")[1]
    webdriver.ActionChains(browser.driver).move_to_element(entry).click().perform()
    browser.until(f"{faint} === 4")  # all but the two of the exact budget


def test_a_count_that_no_run_has_cannot_be_chosen(browser: Browser, made: Any) -> None:
    old = content()
    del old["flops"]
    browser.open(made(old, content(goal__kind="fixed", goal__sparsity=0.9) | {"flops": None}))
    assert browser.ask("document.querySelector('input[name=quantity][value=flops]').disabled") is True
    assert browser.ask("document.querySelector('input[name=quantity][value=bytes]').disabled") is False


def test_headings_sort_by_mouse_and_by_keyboard(browser: Browser, made: Any) -> None:
    browser.open(made(*curve(seeds=1)))
    heading = "#runs thead th:nth-child(6)"
    column = "#runs tbody td:nth-child(6)"
    browser.click(f"{heading} button")
    errors = [float(text) for text in browser.texts(column)]
    assert errors == sorted(errors)
    assert browser.ask(f"document.querySelector('{heading}').getAttribute('aria-sort')") == "ascending"
    browser.ask(f"document.querySelector('{heading} button').focus()")
    browser.driver.switch_to.active_element.send_keys("\ue007")  # Enter
    assert [float(text) for text in browser.texts(column)] == sorted(errors, reverse=True)
    assert browser.ask(f"document.querySelector('{heading}').getAttribute('aria-sort')") == "descending"
    browser.click("#runs thead th:nth-child(1) button")
    assert browser.texts("#runs tbody th") == ["dense", "exact-0.05", "exact-0.1", "free", "ga-0.1", "thin"]
    assert browser.ask("document.querySelectorAll('#runs [aria-sort]').length") == 1


def test_unknown_numbers_are_last_whichever_way_is_sorted(browser: Browser, made: Any) -> None:
    """Dense runs have no share of zeros."""
    browser.open(made(*curve(seeds=1)))
    for _ in range(2):
        browser.click("#runs thead th:nth-child(9) button")
        assert browser.texts("#runs tbody td:nth-child(9)")[-2:] == ["–", "–"]


def test_runs_are_found_by_words_and_by_the_front(browser: Browser, made: Any) -> None:
    browser.open(made(*curve(seeds=1)))
    browser.driver.find_element("id", "find").send_keys("EXACT 95")
    assert browser.texts("#runs tbody th") == ["exact-0.05"]
    browser.driver.find_element("id", "find").clear()
    browser.click("#only-front")
    assert browser.texts("#runs tbody th") == ["dense", "exact-0.1", "exact-0.05"]


def test_checked_runs_are_drawn(browser: Browser, made: Any) -> None:
    """Unchecking all empties the charts of single runs; a run that is checked comes back alone."""
    browser.open(made(*curve(seeds=1)))
    labels = "[...document.querySelectorAll('#convergence .role-legend-label text')].map(e => e.textContent).join()"
    assert browser.ask(labels) == "dense,exact-0.1,ga-0.1,free,thin,exact-0.05"
    browser.click("#none")
    browser.until("document.querySelector('#convergence').textContent.startsWith('Check runs in the table')")
    browser.click("#runs tbody tr:nth-child(4) input")
    browser.until(f"{labels} === 'exact-0.05'")
    browser.until("document.querySelector('#histogram-run').textContent === 'exact-0.05'")
    assert browser.complaints() == []


def test_histograms_follow_their_picker(browser: Browser, made: Any) -> None:
    browser.open(made(*curve(seeds=1)))
    headings = (
        "[...document.querySelectorAll('#histograms .mark-text.role-mark text')].map(e => e.textContent).join('|')"
    )
    assert "10 % kept" in browser.ask(headings)
    picker = browser.driver.find_element("id", "histogram-run")
    pytest.importorskip("selenium.webdriver.support.ui").Select(picker).select_by_visible_text("exact-0.05")
    browser.until(f"{headings}.includes('5 % kept') && !{headings}.includes('10 % kept')")


def test_recipes_unfold(browser: Browser, made: Any) -> None:
    browser.open(made(*curve(seeds=1)))
    browser.click("#runs tbody tr:nth-child(3) button")
    assert browser.ask("document.querySelector('#runs button[aria-expanded=true]') !== null")
    recipe = dict(zip(browser.texts(".recipe dt"), browser.texts(".recipe dd"), strict=True))
    assert (recipe["goal.sparsity"], recipe["train.epochs"], recipe["goal.ramp"]) == ("0.9", "30", "null")
    assert "goal.sparsity" in browser.texts(".recipe .own dt")
    browser.click("#runs tbody tr:nth-child(3) button")
    assert browser.texts(".recipe") == []


def test_every_chart_has_its_numbers_as_a_table(browser: Browser, made: Any) -> None:
    browser.open(made(*curve(seeds=1)))
    for chart in CHARTS:
        browser.click(f"details[data-table={chart}] summary")
        browser.until(f"document.querySelectorAll('details[data-table={chart}] tbody tr').length > 2")
        assert browser.ask(f"document.getElementById('{chart}-words').textContent.length") > 10
    assert browser.texts("details[data-table=tradeoff] tbody tr:nth-child(1) td") == [
        *("dense", "dense", "1", "10.00", "10.00", "10.00", "3,100", "yes")
    ]


def test_tasks_are_switched(browser: Browser, made: Any) -> None:
    browser.open(made(*curve(seeds=1), content("other", model__name="conv", goal__kind="fixed", goal__sparsity=0.9)))
    assert len(browser.texts("#runs tbody th")) == 6
    picker = browser.driver.find_element("id", "task")
    pytest.importorskip("selenium.webdriver.support.ui").Select(picker).select_by_index(1)
    assert browser.texts("#runs tbody th") == ["other"]
    browser.until("document.querySelector('#tradeoff .role-legend-label text').textContent === 'fixed-BS'")
    assert len(browser.texts("[data-summary]")) == 1
    assert browser.complaints() == []


def test_charts_follow_the_night_and_the_window(browser: Browser, made: Any) -> None:
    browser.open(made(*curve(seeds=1)))
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.until("document.querySelector('#tradeoff svg').outerHTML.includes('#171b21')")
    size = {"width": 500, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.until("document.querySelector('#tradeoff svg').clientWidth < 500")
    assert browser.complaints() == []


def test_no_name_runs_a_script(browser: Browser, made: Any) -> None:
    """Hostile names in every place that takes text: tables, charts, tooltips, recipes and pickers."""
    runs = [
        content(name, seed, 80.0 - 5 * at + seed, goal__kind="fixed", goal__sparsity=0.9, goal__include=(name,))
        for at, name in enumerate(HOSTILE)
        for seed in range(2)
    ]
    runs.append(content("dense", model__name=HOSTILE[0]))
    browser.open(made(*runs, references=[Reference(HOSTILE[1], 21.0, {"nonzeros": 500.0}, HOSTILE[0])]))
    for chart in CHARTS:
        browser.click(f"details[data-table={chart}] summary")
    browser.click("#runs tbody button")
    told = browser.tooltips("#tradeoff .mark-symbol.role-mark path")
    assert any("<img src=x onerror=window.pwned=1>" in text for text in told)
    assert browser.ask("window.pwned === undefined")
    assert browser.ask("document.images.length") == 0
    assert browser.ask("document.scripts.length") == 3
    assert set(HOSTILE) <= set(browser.texts("#runs tbody th"))
    assert browser.complaints() == []
    assert len(browser.requests()) == 1


def test_a_page_without_runs_is_quiet(browser: Browser, made: Any) -> None:
    browser.open(made())
    assert browser.complaints() == []


# -- as a designer would have it --------------------------------------------------------------------------------------


def _uneven(**changes: Any) -> Any:
    """A run whose layers count from tens to millions of weights, with latent ones, and a Gaussian above all bars."""
    found = content("uneven", goal__kind="budget", goal__sparsity=0.9, **changes)
    for entry, size in zip(found["histograms"], (50, 40_000, 30_000_000), strict=True):
        entry |= {"size": size, "counts": [0, size // 40, 0, size // 40, 0], "sigma": 0.05, "threshold": 0.1}
        entry["latents"] = [0, size // 40, size // 20, size // 40, 0]
    return found


def test_histograms_stand_in_a_grid_and_hold_all_they_show(browser: Browser, made: Any) -> None:
    """Plots are as wide as each other at equal steps, names stand level, and no bell or bar leaves its panel."""
    browser.open(made(_uneven()), 1400)
    boxes = "[...document.querySelectorAll('#histograms {}')].map(e => e.getBoundingClientRect())"
    axes = browser.ask(
        f"{boxes.format('.role-axis-domain line')}.filter(b => b.width > b.height).map(b => [b.x, b.width])"
    )
    assert len(axes) == 3
    assert len({round(width) for _, width in axes}) == 1
    assert axes[1][0] - axes[0][0] == pytest.approx(axes[2][0] - axes[1][0], abs=1)
    names = browser.ask(f"{boxes.format('.mark-text.role-mark text')}.map(b => b.y)")
    assert max(names) - min(names) < 1
    tops = browser.ask(f"{boxes.format('.role-axis-domain line')}.filter(b => b.height > b.width).map(b => b.y)")
    bells = browser.ask(f"{boxes.format('.mark-line path')}.map(b => b.y)")
    assert min(bells) >= min(tops) - 2  # half of the line's width
    bars = browser.ask("document.querySelectorAll('#histograms .mark-rect path[aria-roledescription=bar]').length")
    assert bars == 3 * (5 + 5)  # kept ones before latent ones
    parts = browser.texts("#histograms .role-legend-label text")
    assert parts == ["latent, pruned", "kept", "Gaussian of all weights", "bound"]
    labels = browser.texts("#histograms .role-axis-label text")
    assert "0" in labels  # not 0k
    assert [label for label in labels if label.endswith("M")]


def test_the_axis_of_weights_per_bin_is_chosen(browser: Browser, made: Any) -> None:
    browser.open(made(_uneven()))
    bell = "document.querySelector('#histograms .mark-line path').getAttribute('d')"
    before = browser.ask(bell)
    browser.click("input[name=counted][value=linear]")
    browser.until(f"{bell} !== {json.dumps(before)}")
    assert browser.complaints() == []


def test_a_run_of_one_epoch_can_be_seen(browser: Browser, made: Any) -> None:
    """A line of one point shows nothing: there is a point, and the axis has whole epochs."""
    browser.open(made(content("one", train__epochs=1, goal__kind="fixed", goal__sparsity=0.9)))
    for chart in ("convergence", "sparsity"):
        assert browser.ask(f"document.querySelectorAll('#{chart} .mark-symbol.role-mark path').length") == 1
    assert {"0", "1"} <= set(browser.texts("#convergence .role-axis-label text"))
    assert "0.5" not in browser.texts("#convergence .role-axis-label text")


def test_all_lines_are_named_in_full_and_ticks_are_round(browser: Browser, made: Any) -> None:
    """Of 33 lines the legend cuts no name and leaves none out; counts from 0.4 to 3.1 thousand are read at 1k."""
    long = [
        content(
            f"run-{at}", 0, 80.0, 300 + at, goal__kind="budget", goal__sparsity=0.9, optimizer__weight_decay=at / 1e4
        )
        for at in range(1, 33)
    ]
    browser.open(made(content("dense", 0, 85.0), *long), 800)
    legend = browser.texts("#tradeoff .role-legend-label text")
    assert len(legend) == 33 + 2
    assert not [name for name in legend if "…" in name]
    assert "exact budget, weight decay 0.0032" in legend
    names = "[...document.querySelectorAll('#tradeoff .role-legend-label text')]"
    frame = browser.ask("document.querySelector('#tradeoff').getBoundingClientRect().right")
    assert max(browser.ask(f"{names}.map(e => e.getBoundingClientRect().right)")) <= frame
    assert browser.texts("#tradeoff .role-axis-label text")[:3] == ["500", "1k", "2k"]


def test_the_table_of_runs_fits_a_window_of_1400(browser: Browser, made: Any) -> None:
    both = content("two-limits-at-once", nonzeros=520, goal__kind="budget", goal__params=0.2, goal__flops=0.5)
    browser.open(made(*curve(), both, content("one-cycle-dense-120", optimizer__lr=0.25)), 1400)
    frame = "document.querySelector('#runs').parentNode"
    assert browser.ask(f"{frame}.scrollWidth - {frame}.clientWidth") <= 0


def test_the_band_of_the_front_stays_in_the_chart(browser: Browser, made: Any) -> None:
    """A tiny network far above the axis is on the front, and the band does not run up to it."""
    fallen = content("tiny", 0, 30.0, 20, goal__kind="fixed", goal__sparsity=0.99)
    browser.open(made(*curve(seeds=1), fallen))
    inside = (
        "(() => { const band = [...document.querySelectorAll('#tradeoff .mark-line path')].find(e => "
        "e.getAttribute('stroke-width') === '9').getBoundingClientRect();"
        "const top = Math.min(...[...document.querySelectorAll('#tradeoff .role-axis-grid line')]"
        ".map(e => e.getBoundingClientRect().y)); return band.y - top; })()"
    )
    assert browser.ask("document.querySelector('#tradeoff .role-title text').textContent").startswith("above: fixed-BS")
    assert browser.ask(inside) > 0


def test_paper_holds_the_charts_and_the_whole_table(browser: Browser, made: Any) -> None:
    browser.open(made(*curve()), 1400)
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        browser.driver.execute_script("document.body.style.width = '760px'")
        right = (
            "Math.max(...[...document.querySelectorAll('#runs, .chart svg')].map(e => e.getBoundingClientRect().right))"
        )
        assert browser.ask(right) <= 761
        assert browser.texts(".controls") == []
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
