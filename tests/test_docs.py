"""The manual's examples run, page by page, as a reader would type them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import pareback as pb

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _reader(tmp_path: Path) -> dict[str, object]:
    """Return the names a page takes for granted: a model, its optimizer, a few batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    batches = [(torch.randn(8, 32), torch.randn(8, 32)) for _ in range(5)]
    return {
        "epochs": 1,
        "loader": batches,
        "loss_fn": nn.MSELoss(),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        "path": tmp_path / "checkpoint.pt",
        "pb": pb,
        "torch": torch,
        "x": batches[0][0],
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:finish\\(\\) was called after")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every python block of a page runs, in order, in one session."""
    monkeypatch.chdir(tmp_path)  # what an example writes is not left behind
    monkeypatch.setenv("PAREBACK_CACHE", str(tmp_path))
    names = _reader(tmp_path)
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert blocks or page.name in ("architecture.md", "index.md", "licences.md", "method.md", "paper.md")


def test_every_public_name_is_on_its_page() -> None:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert [name for name in pb.__all__ if not re.search(rf"`pb\.{name}\b", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page points to a file that exists."""
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_paper_leads_to_code_and_tests_that_are_there() -> None:
    """Every dotted name of docs/paper.md can be imported, every test and recipe that it names is a file."""
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(pareback(?:\.\w+)+)`", text))
    assert len(names) > 8
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    for pattern in re.findall(r"`((?:tests|recipes)/[^`]+)`", text):
        assert list(ROOT.glob(pattern)), pattern
    cells = [cell.strip() for line in text.splitlines() if line.startswith("| ") for cell in line.split("|")[1:-1]]
    assert all(cells)
