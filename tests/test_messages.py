"""Error messages: lists, suggestions and the decorator that answers misspelt keywords."""

from __future__ import annotations

import inspect

import pytest

from pareback.messages import did_you_mean, listed, one_of, suggests_options


def test_lists_are_cut() -> None:
    """The first few are quoted, the rest counted; a full list says nothing of more."""
    assert listed(["a", "b"]) == "'a', 'b'"
    assert listed("abcde") == "'a', 'b', 'c', 'd', 'e'"
    assert listed("abcdefg") == "'a', 'b', 'c', 'd', 'e' and 2 more"
    assert listed(x for x in "ab") == "'a', 'b'"


def test_suggestions_are_near_or_none() -> None:
    """A typo finds its word; something else finds nothing."""
    assert did_you_mean("sparsty", ["sparsity", "params"]) == " Did you mean 'sparsity'?"
    assert did_you_mean("zzz", ["sparsity", "params"]) == ""


def test_choices() -> None:
    """A known choice passes in silence; an unknown one, of whatever type, is answered with the list."""
    one_of("mode", "fast", ["fast", "slow"])
    with pytest.raises(
        ValueError, match=r"mode='fsat' is not known. Write one of 'fast', 'slow'. Did you mean 'fast'\?"
    ):
        one_of("mode", "fsat", ["fast", "slow"])
    with pytest.raises(ValueError, match=r"mode=3 is not known. Write one of 'fast', 'slow'.$"):
        one_of("mode", 3, ["fast", "slow"])


@suggests_options
def bake(flour: int, *, water: int = 2) -> int:
    """Bake."""
    return flour + water


class Oven:
    @suggests_options
    def __init__(self, heat: int = 1) -> None:
        self.heat = heat


def test_right_keywords_pass() -> None:
    """Results, names and signatures are those of the function."""
    assert bake(1, water=5) == 6
    assert Oven(heat=3).heat == 3
    assert bake.__name__ == "bake"
    assert list(inspect.signature(bake).parameters) == ["flour", "water"]


def test_misspelt_keywords_are_answered() -> None:
    """By the name of the function, or of the class that is being made."""
    with pytest.raises(TypeError, match=r"bake has no option 'watr'. Did you mean 'water'\?"):
        bake(1, watr=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Oven has no option 'haet'. Did you mean 'heat'\?"):
        Oven(haet=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"bake has no option 'x'. It takes 'flour', 'water'."):
        bake(1, x=5)  # type: ignore[call-arg]
