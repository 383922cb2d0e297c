"""Points from elsewhere: the paper's, and those of a file, with a sentence for each mistake in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pareback.page.references import Reference, references


def test_table_2_is_built_in() -> None:
    """Six rows; the dense network has 11.012 M parameters and 78.52 % accuracy."""
    found = references("table2")
    assert len(found) == 6
    assert found[0] == Reference(
        "dense WRN-16-8", 21.48, {"nonzeros": 11_012_000.0}, "paper, Table 2", "WRN-16-8 on *100*"
    )
    assert found[0].fits("WRN-16-8 on cifar100, 100 classes")
    assert not found[0].fits("lenet-300-100 on digits, 10 classes")


def test_a_yaml_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "- {label: theirs, accuracy: 78.5, nonzeros: 1.6M}\n- {error: 30, flops: 1000000, bytes: 2.0e6, series: them}\n"
    )
    assert references(str(path)) == [
        Reference("theirs", 21.5, {"nonzeros": 1_600_000.0}),
        Reference("reference", 30.0, {"flops": 1e6, "bytes": 2e6}, "them"),
    ]


def test_json_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps([{"label": "a", "error": 1.5, "nonzeros": 10, "task": "WRN*"}]))
    assert references(str(path)) == [Reference("a", 1.5, {"nonzeros": 10.0}, task="WRN*")]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is neither YAML nor JSON. Write entries such as"),
        ("a: 1", "is not a list of points. Write entries such as"),
        ("- 1", "Point 1 of .* is not a mapping"),
        ("- {eror: 1, nonzeros: 5}", "has an unknown field 'eror'. Did you mean 'error'?"),
        ("- {nonzeros: 5}", "needs an error or an accuracy, one of them"),
        ("- {error: 5, accuracy: 95, nonzeros: 5}", "needs an error or an accuracy, one of them"),
        ("- {error: 5}", "has none of nonzeros, flops, bytes"),
        ("- {error: 500, nonzeros: 5}", "has 500 for its error or accuracy. Write a percentage"),
        ("- {error: yes, nonzeros: 5}", "has True for its error or accuracy"),
        ("- {error: 5, nonzeros: 0.5}", "has 0.5 for nonzeros. Write a count such as"),
        ("- {error: 5, nonzeros: many}", "has 'many' for nonzeros. Write a count such as"),
    ],
)
def test_mistakes_are_answered_with_a_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "points.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence.replace("?", "\\?")):
        references(str(path))


def test_a_missing_file_is_said_to_be_missing() -> None:
    with pytest.raises(FileNotFoundError, match="There is no file 'tabel2'. Did you mean 'table2'\\?"):
        references("tabel2")
