"""The page's text: whole, the same every time, and with nothing of a run in it that a browser would take for markup."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from page_runs import HOSTILE, bundle_once, content, curve, page_of, write

from pareback.page.charts import vega
from pareback.page.document import page
from pareback.page.references import Reference
from pareback.page.report import collect

pytest.importorskip("vl_convert", reason="needs the extra page: pip install 'pareback[page]'")


class Reader(HTMLParser):
    """Collects elements and the text of scripts, as a browser finds them."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        else:
            self.text.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The page of some records."""
    monkeypatch.setattr(vega, "bundle", bundle_once)
    return functools.partial(page_of, tmp_path)


@pytest.mark.slow
def test_the_same_runs_give_the_same_page(made: Any) -> None:
    runs = curve()
    assert made(*runs) == made(*runs)


def test_the_page_is_small(made: Any) -> None:
    assert len(made(*curve()).encode()) < 1_300_000


def test_nothing_is_loaded_from_elsewhere(made: Any) -> None:
    """No element names another file, but for the empty icon that keeps browsers from asking for one."""
    found = read(made(*curve()))
    sources = [attributes.get(name) for _, attributes in found.tags for name in ("src", "href", "action", "srcset")]
    assert {source for source in sources if source} == {"data:,", "#main"}
    assert not any(tag in ("iframe", "object", "embed", "base", "form") for tag, _ in found.tags)


def test_the_policy_names_both_scripts_and_allows_nothing_else(made: Any) -> None:
    found = read(made(*curve()))
    policy = next(a["content"] for tag, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found.scripts[1:]]
    assert re.findall(r"'sha256-([^']+)'", policy) == digests
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy


@pytest.mark.parametrize("name", HOSTILE)
def test_names_stay_text(name: str, made: Any) -> None:
    """A run, a model, an environment, a title and a reference of that name add no element to the page."""
    plain, hostile = (
        made(
            content(word, goal__kind="fixed", goal__sparsity=0.9, goal__include=(word,), model__name=word)
            | {"environment": {"device": word}},
            content(
                word, seed=1, goal__kind="fixed", goal__sparsity=0.9, goal__include=(word + "x",), model__name=word
            ),
            title=word,
            references=[Reference(word, 1.0, {"nonzeros": 5.0}, word, "*")],
        )
        for word in ("plain", name)
    )
    expected, found = read(plain), read(hostile)
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in expected.tags]
    assert len(found.scripts) == 3
    report = json.loads(found.scripts[0])
    assert report["runs"][0]["label"] == name
    assert report["tasks"][0]["references"][0]["label"] == name
    assert name in found.text


def test_broken_entries_are_listed_with_their_names_escaped(tmp_path: Path, made: Any) -> None:
    made(content())
    root = tmp_path / "runs"
    (root / "half.json").write_text('{"name": "half", "acc')
    (root / "list.json").write_text("[]")
    (root / "<b>bold").mkdir()
    unfinished = root / "unfinished"
    unfinished.mkdir()
    (unfinished / "recipe.yaml").write_text("name: digits\n")
    found = collect(root)
    text = page(found)
    assert [(p.path, p.state) for p in found.problems] == [
        ("<b>bold", "foreign"),
        ("half.json", "broken"),
        ("list.json", "foreign"),
        ("unfinished", "unfinished"),
    ]
    assert "Not among the runs (4)" in text
    assert "&lt;b&gt;bold" in text
    assert "<b>bold" not in text
    assert "pareback train --resume runs/unfinished" in text
    assert str(tmp_path) not in text


def test_results_that_make_no_sense_are_reported(tmp_path: Path) -> None:
    """A recipe's section that is a number, and an accuracy that is none."""
    odd = content("odd", goal__kind="budget", goal__sparsity=0.9)
    odd["recipe"]["goal"]["sparsity"] = "much"
    endless = content("endless") | {"accuracy": float("inf")}
    found = collect(write(tmp_path / "runs", content(), odd, endless))
    assert len(found.runs) == 1
    assert [problem.state for problem in found.problems] == ["broken", "broken"]
    assert all(problem.about.startswith("The result cannot be read: ") for problem in found.problems)


@pytest.mark.usefixtures("made")
def test_a_run_whose_layers_cannot_be_read_is_still_listed(tmp_path: Path) -> None:
    odd = content("odd", goal__kind="fixed", goal__sparsity=0.9)
    odd["tensors"] = [{"pruned": True}]
    found = collect(write(tmp_path / "runs", odd))
    assert (len(found.runs), len(found.details)) == (1, 0)
    assert "its epochs and layers cannot be drawn" in found.problems[0].about
    assert "<tr data-run" in page(found)


def test_a_page_without_finished_runs_says_so(made: Any) -> None:
    assert "There are no finished runs here." in made()


def test_tiles_say_what_came_out(made: Any) -> None:
    """Dense: 10 % error with 3,100; the exact budget of 90 % is half a point worse with 400, 7.75 times smaller."""
    found = " ".join(read(made(*curve(seeds=1))).text)
    assert "10.00\u00a0%" in found  # no line begins with the sign
    assert "7.8× smaller" in found
    assert "exact budget, 90\u00a0% zeros: 10.50\u00a0% error, 400 non-zeros" in found


def test_bytes_are_set_against_the_dense_network(made: Any) -> None:
    """A thinned network of 3,600 bytes is 29 % of the dense one's 12,400, though all of what it could be itself."""
    found = read(made(*curve(seeds=1))).text
    assert "29.0" in found


def test_the_table_states_budgets_and_bytes(made: Any) -> None:
    found = read(made(content(nonzeros=153, goal__kind="budget", goal__sparsity=0.95)))
    assert "+2.00\u00a0%" in found.text
    assert "3 weights over 150" in [attributes.get("title") for _, attributes in found.tags]
    assert "1.387 k" in found.text


def test_a_run_with_two_limits_is_named_by_both_and_told_of_both(made: Any) -> None:
    """Of 3,100 parameters 620 are allowed and there, of 62,000 FLOPs 31,000 are allowed and 12,400 there."""
    both = content(nonzeros=520, goal__kind="budget", goal__params=0.2, goal__flops=0.5)
    found = read(made(both)).text
    assert "exact budget of parameters and FLOPs" in found
    assert "20\u00a0% of parameters, 50\u00a0% of FLOPs" in found
    assert "parameters exact, FLOPs −60.00\u00a0%" in found


def test_several_tasks_can_be_chosen_from(made: Any) -> None:
    text = made(content(), content(model__name="conv"))
    assert text.count("<option") == 2
    assert text.count("data-summary=") == 2


def test_every_chart_has_a_title_words_and_a_table(made: Any) -> None:
    found = read(made(*curve()))
    charts = [attributes for _, attributes in found.tags if attributes.get("role") == "img"]
    ids = {attributes.get("id") for _, attributes in found.tags}
    assert len(charts) == 5
    for chart in charts:
        assert chart["aria-labelledby"] in ids
        assert chart["aria-describedby"] in ids
    tables = {attributes["data-table"] for _, attributes in found.tags if "data-table" in attributes}
    assert tables == {chart["id"] for chart in charts}


def test_what_the_page_is_made_of_is_shipped() -> None:
    """Template, style and script are among the files that a wheel takes along."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["pareback.page"] == ["assets/*"]


def test_licences_travel_with_the_bundle(made: Any) -> None:
    text = made(content())
    assert "University of Washington Interactive Data Lab" in text
    assert "Redistributions in binary form must reproduce" in text
    assert "Mike Bostock" in text
    assert "permission notice appear in all copies" in text


def test_without_the_library_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(
        RuntimeError, match=r"The page needs the package 'vl-convert-python': pip install 'pareback\[page\]'"
    ):
        vega.bundle()
