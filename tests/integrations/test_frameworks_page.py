"""The page on frameworks names the tests that show what it says: they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)))


@pytest.mark.parametrize(("file", "test"), NAMED, ids=lambda value: value)
def test_a_named_test_is_there(file: str, test: str) -> None:
    (found,) = (ROOT / "tests").rglob(file)
    assert re.search(rf"^def {test}\(", found.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_file_of_tests_is_named() -> None:
    """Each file of this folder shows something that the page speaks of, but for these two, on imports and the page."""
    others = {"test_missing_frameworks.py", "test_frameworks_page.py"}
    files = {file.name for file in Path(__file__).parent.glob("test_*.py")} - others
    assert files - {file for file, _ in NAMED} == set()


@pytest.mark.parametrize("framework", ["your own", "Lightning", "Transformers", "Accelerate"])
def test_loop_resume_and_processes_of_each_are_shown(framework: str) -> None:
    table = PAGE.split("| framework | what | test |\n|---|---|---|\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    first = next(i for i, row in enumerate(rows) if row[0] == framework)
    last = next((i for i in range(first + 1, len(rows)) if rows[i][0]), len(rows))
    shown = [row[1] for row in rows[first:last]]
    for part in ("loop", "resume", "DDP"):
        assert any(part in what for what in shown), part
