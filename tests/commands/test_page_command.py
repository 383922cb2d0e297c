"""``pareback page`` from the command line: the file, the figures, mistakes, and a thousand runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from page_runs import content, curve, write
from PIL import Image

from pareback import cli
from pareback.commands.page import COMMAND
from pareback.page.charts import vega

pytest.importorskip("vl_convert", reason="needs the extra page: pip install 'pareback[page]'")


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command under its name."""
    monkeypatch.setitem(cli.COMMANDS, "page", COMMAND)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library's bundle, which takes seconds to make."""
    monkeypatch.setattr(vega, "bundle", lambda: "window.vegaEmbed = 0;")


@pytest.mark.usefixtures("light")
def test_the_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = write(tmp_path / "runs", *curve()), tmp_path / "report.html"
    (runs / "bad.json").write_text("{")
    assert cli.main(["page", str(runs), "-o", str(out), "--title", "Mine & yours"]) == 0
    text = out.read_text(encoding="utf-8")
    assert "<title>Mine &amp; yours</title>" in text
    said = capsys.readouterr().out
    assert said == f"wrote {out}, {len(text.encode()):,} bytes: 12 runs, 1 entry that could not be used\n"


@pytest.mark.usefixtures("light")
def test_references_are_drawn_or_said_not_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = write(tmp_path / "runs", content()), tmp_path / "report.html"
    points = tmp_path / "points.yaml"
    points.write_text("- {label: theirs, error: 10, nonzeros: 500}\n- {label: far, error: 1, flops: 5, task: VGG*}\n")
    assert cli.main(["page", str(runs), "-o", str(out), "--references", str(points)]) == 0
    assert "No task is called 'VGG*': 1 reference is not drawn." in capsys.readouterr().out
    data = re.search(r'id="report">(.*?)</script>', out.read_text(encoding="utf-8"))
    assert data is not None
    assert [point["label"] for point in json.loads(data[1])["tasks"][0]["references"]] == ["theirs"]


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "There is no folder 'nowhere'."),
        (["empty"], "There are no runs in 'empty'. Train some, or give another folder."),
        (["runs", "-o", "empty"], "'empty' is a folder. Give the name of a file with --out."),
        (["runs", "--figures", "runs/0000.json"], "'runs/0000.json' is a file. Give a folder with --figures."),
        (["runs", "-o", "no/dir/x.html"], "There is no folder 'no/dir'. Make it first."),
        (["runs", "--figures", "no/dir/figures"], "There is no folder 'no/dir'. Make it first."),
        (["runs", "--references", "nothing.yaml"], "There is no file 'nothing.yaml'."),
        (["runs", "--figure", "x"], "There is no option '--figure'. Did you mean '--figures'?"),
    ],
)
def test_mistakes_are_answered_with_a_sentence(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs", content())
    (tmp_path / "empty").mkdir()
    assert cli.main(["page", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_every_figure_is_a_picture_and_a_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PNG files have more than a background in them; SVG files are XML with marks, and name no other file."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs", *curve())
    assert cli.main(["page", "runs", "--figures", "figures"]) == 0
    pictures = sorted(path.stem for path in (tmp_path / "figures").glob("*.png"))
    expected = {"tradeoff-nonzeros", "tradeoff-flops", "tradeoff-bytes", "convergence", "sparsity", "layers"}
    assert expected <= set(pictures)
    assert sum(name.startswith("histograms-") for name in pictures) == len(pictures) - len(expected) > 0
    for name in pictures:
        colours = Image.open(tmp_path / "figures" / f"{name}.png").convert("RGB").getcolors(1_000_000)
        assert colours is not None
        assert len(colours) > 20
        drawing = ElementTree.parse(tmp_path / "figures" / f"{name}.svg").getroot()
        assert sum(element.tag.endswith("path") for element in drawing.iter()) > 10
        assert not any("href" in key for element in drawing.iter() for key in element.attrib)


def _thousand(folder: Path) -> Path:
    """Twenty layers and a hundred epochs each: about the size of the paper's runs."""
    one: Any = content("exact", goal__kind="budget", goal__sparsity=0.9, train__epochs=100)
    one["histograms"] = [one["histograms"][0] | {"name": f"l{at}.weight", "counts": [1234] * 81} for at in range(20)]
    one["tensors"] = [one["tensors"][0] | {"name": f"l{at}.weight"} for at in range(20)]
    for number in range(1000):
        run = folder / f"run-{number}"
        run.mkdir(parents=True)
        share, seed = round(0.5 + number // 5 / 500, 4), number % 5
        goal, accuracy = one["recipe"]["goal"] | {"sparsity": share}, 90.0 - 20.0 * share + seed / 10
        recipe = one["recipe"] | {"seed": seed, "goal": goal}
        found = one | {"seed": seed, "accuracy": accuracy, "nonzeros": 3000 - number, "recipe": recipe}
        whole = {key: value for key, value in found.items() if key not in ("metrics", "histograms")}
        (run / "result.json").write_text(json.dumps(whole))
        (run / "record.json").write_text(json.dumps(found))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's peak memory as Linux counts it")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_thousand_runs_take_less_than_a_gigabyte(tmp_path: Path) -> None:
    """From a fresh process, as a user starts it: under 1 GB of memory and 5 MB of page."""
    runs, out = _thousand(tmp_path / "runs"), tmp_path / "report.html"
    code = (
        "import sys; from pathlib import Path; from pareback import cli; code = cli.main(sys.argv[1:]); "
        # Not ru_maxrss, which a process inherits from the one that started it.
        "status = Path('/proc/self/status').read_text(); "
        "print(status.partition('VmHWM:')[2].split()[0]); sys.exit(code)"
    )
    # Lines are not counted there: that would take most of the time.
    plain = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, "-c", code, "page", str(runs), "-o", str(out)],
        capture_output=True,
        text=True,
        check=False,
        env=plain,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 1_000_000
    assert out.stat().st_size < 5_000_000
    assert "of 100 of the 1,000 runs are in it" in out.read_text(encoding="utf-8")
