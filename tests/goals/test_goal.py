"""Goals: what quantities mean, which values are accepted, and what is said about the others."""

from __future__ import annotations

import dataclasses
import pickle
from fractions import Fraction

import pytest

import pareback as pb
from pareback.costs.amounts import Amount, amount, exact

# ---------------------------------------------------------------- quantities


@pytest.mark.parametrize(
    ("option", "written", "value"),
    [
        ("params", 1, 1),
        ("params", 500_000, 500_000),
        ("params", "500000", 500_000),
        ("params", "0.5M", 500_000),
        ("params", "0.5m", 500_000),
        ("params", " 1.25 K ", 1_250),
        ("params", ".5k", 500),
        ("flops", "100M", 10**8),
        ("flops", "2.5G", 25 * 10**8),
        ("flops", "1T", 10**12),
        ("flops", "1Ki", 1024),
        ("bytes", "1MB", 10**6),
        ("bytes", "1 mb", 10**6),
        ("bytes", "1MiB", 2**20),
        ("bytes", "2GiB", 2**31),
        ("bytes", "1TiB", 2**40),
        ("bytes", "4KiB", 4096),
        ("bytes", "4KB", 4000),
        ("bytes", "12B", 12),
        ("bytes", "0.1K", 100),
    ],
)
def test_absolute_quantities(option: str, written: object, value: int) -> None:
    """Ints and strings are absolute: M is 10⁶, Mi is 2²⁰, B is allowed on bytes."""
    assert amount(option, written) == Amount(Fraction(value), relative=False)


@pytest.mark.parametrize(("written", "value"), [(0.1, Fraction(1, 10)), (1.0, Fraction(1)), (0.3, Fraction(3, 10))])
def test_a_float_is_the_decimal_fraction_that_was_typed(written: float, value: Fraction) -> None:
    """0.1 is one tenth of the dense model exactly, not the nearest binary number; 1.0 is all of it, 1 a single one."""
    assert amount("params", written) == Amount(value, relative=True)
    assert amount("params", 1) != amount("params", 1.0)


def test_exact_reads_numbers_as_typed() -> None:
    """1 − 0.95 is one twentieth; ints are themselves."""
    assert 1 - exact(0.95) == Fraction(1, 20)
    assert exact(1e-7) == Fraction(1, 10**7)
    assert exact(3) == 3


@pytest.mark.parametrize("written", ["", "many", "50%", "-3", "1e6", "0.5MM", "M", "1.", "1,000", "0x10", "nan"])
@pytest.mark.parametrize("option", ["params", "flops", "bytes"])
def test_strings_that_are_no_quantity(option: str, written: str) -> None:
    """The message repeats what was written and shows what to write."""
    with pytest.raises(ValueError, match=rf"{option}=.* is not a quantity. Write a fraction .* or an absolute"):
        amount(option, written)


@pytest.mark.parametrize(
    ("option", "example"), [("params", "500_000 or '0.5M'"), ("flops", "'100M'"), ("bytes", "'1MB'")]
)
def test_each_option_shows_its_own_example(option: str, example: str) -> None:
    """The example has the option's unit."""
    with pytest.raises(ValueError, match=example):
        amount(option, "?")


@pytest.mark.parametrize("option", ["params", "flops"])
def test_only_bytes_are_counted_in_bytes(option: str) -> None:
    """'1MB' of parameters is a misunderstanding."""
    with pytest.raises(ValueError, match=f"{option}='1MB' is not a quantity"):
        amount(option, "1MB")


@pytest.mark.parametrize("written", [0, -5, "0", "0.0K"])
def test_nothing_is_no_budget(written: object) -> None:
    """Zero and less leave nothing."""
    with pytest.raises(ValueError, match=r"leaves nothing. Write a fraction of the dense model in \(0, 1\]"):
        amount("params", written)


@pytest.mark.parametrize("written", [0.0, -0.1, 1.0001, 5e5, float("nan"), float("inf")])
def test_fractions_outside_their_range(written: float) -> None:
    """A float above one is likely an absolute number: the message says to write an int or a string."""
    with pytest.raises(ValueError, match=r"is outside \(0, 1\]. Write .* or an absolute 500_000 or '0.5M'"):
        amount("params", written)


@pytest.mark.parametrize("written", [True, [1], None, 1j])
def test_other_types_are_refused(written: object) -> None:
    """A bool is no count, though Python would take it for one."""
    with pytest.raises(TypeError, match=r"params=.* is a \w+. Write a fraction"):
        amount("params", written)


# ---------------------------------------------------------------- Fixed


def test_fixed_keeps_what_was_written() -> None:
    """Sparsity and bound; the search is the default, zero is allowed."""
    assert (pb.Fixed(0.85).sparsity, pb.Fixed(0.85).bound) == (0.85, "search")
    assert pb.Fixed(sparsity=0, bound="gaussian").sparsity == 0


@pytest.mark.parametrize("sparsity", [1.0, -0.01, 95, 1])
def test_sparsity_out_of_range(sparsity: float) -> None:
    """Both goals with a sparsity refuse what is not in [0, 1) and show a value; 95 was meant as a percentage."""
    for goal in (pb.Fixed, pb.Budget):
        with pytest.raises(
            ValueError, match=r"is outside \[0, 1\). Write the fraction of weights to remove, such as 0.95"
        ):
            goal(sparsity=sparsity)


@pytest.mark.parametrize("sparsity", ["0.9", True, [0.9]])
def test_sparsity_of_another_type(sparsity: object) -> None:
    """A sparsity is a number."""
    for goal in (pb.Fixed, pb.Budget):
        with pytest.raises(TypeError, match=r"is not a number. Write the fraction"):
            goal(sparsity=sparsity)  # type: ignore[arg-type]


@pytest.mark.parametrize("sparsity", [float("nan"), float("inf")])
def test_sparsity_must_be_finite(sparsity: float) -> None:
    """NaN compares false with everything and still does not pass."""
    with pytest.raises(ValueError, match=r"is not finite. Write the fraction"):
        pb.Fixed(sparsity=sparsity)


def test_unknown_bound_is_answered_with_the_known_ones() -> None:
    """A misspelt choice gets the list and the nearest."""
    with pytest.raises(
        ValueError, match=r"bound='gausian' is not known. Write one of 'search', 'gaussian'. Did you mean"
    ):
        pb.Fixed(0.5, bound="gausian")


# ---------------------------------------------------------------- Unconstrained


def test_unconstrained_defaults_to_the_papers_weight() -> None:
    """λ = 10 by size."""
    assert pb.Unconstrained() == pb.Unconstrained(weight=10.0, cost="params")
    assert pb.Unconstrained(weight=0).weight == 0


def test_unconstrained_refuses_what_makes_no_sense() -> None:
    """A negative λ rewards density; a cost has three names; a weight is a finite number."""
    with pytest.raises(ValueError, match=r"would reward density. Write λ >= 0, such as 10.0"):
        pb.Unconstrained(weight=-1.0)
    with pytest.raises(ValueError, match=r"cost='param' is not known. Write one of 'params', 'flops', 'mean'"):
        pb.Unconstrained(cost="param")
    with pytest.raises(TypeError, match=r"weight='10' is not a number. Write λ"):
        pb.Unconstrained(weight="10")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weight=inf is not finite. Write λ"):
        pb.Unconstrained(weight=float("inf"))


# ---------------------------------------------------------------- Budget


def test_budget_lists_its_limits_in_declared_order() -> None:
    """Whatever the order of writing, sparsity, params, flops and bytes follow each other."""
    goal = pb.Budget(bytes="1MB", flops=0.5, params=100, sparsity=0)
    assert goal.limits() == {"sparsity": 0, "params": 100, "flops": 0.5, "bytes": "1MB"}
    assert list(goal.limits()) == ["sparsity", "params", "flops", "bytes"]


def test_budget_needs_a_limit() -> None:
    """An empty budget is answered with an example."""
    with pytest.raises(ValueError, match=r"Budget needs a limit. Write Budget\(sparsity=0.95\), or params=, flops= or"):
        pb.Budget()


@pytest.mark.parametrize("option", ["params", "flops", "bytes"])
def test_budget_checks_its_quantities_when_written(option: str) -> None:
    """The limits are read at once, not at training time."""
    with pytest.raises(ValueError, match=f"{option}=1.5 is outside"):
        pb.Budget(**{option: 1.5})  # type: ignore[arg-type]


@pytest.mark.parametrize(("option", "value"), [("enforce", "exactly"), ("average", "sizes")])
def test_budget_choices(option: str, value: str) -> None:
    """Unknown choices are answered with the known ones."""
    with pytest.raises(ValueError, match=f"{option}='{value}' is not known. Write one of .* Did you mean"):
        pb.Budget(sparsity=0.5, **{option: value})  # type: ignore[arg-type]


def test_plain_average_belongs_to_the_penalties() -> None:
    """The paper's budget-avg has no exact form: a limit counts weights."""
    assert pb.Budget(sparsity=0.5, enforce="hinge", average="mean").average == "mean"
    with pytest.raises(ValueError, match=r"average='mean' belongs to the penalties. Add enforce='squared' or 'hinge'"):
        pb.Budget(sparsity=0.5, average="mean")


@pytest.mark.parametrize("option", ["extremes", "layer_density"])
def test_pairs(option: str) -> None:
    """Both pairs are in order and within [0, 1]; the message says so with their own names."""
    assert getattr(pb.Budget(sparsity=0.5, **{option: (0.1, 0.9)}), option) == (0.1, 0.9)  # type: ignore[arg-type]
    for value in (0.5, "ab", (0.1,), (0.1, 0.2, 0.3)):
        with pytest.raises(TypeError, match=rf"{option}=.* is not a pair. Write a pair \("):
            pb.Budget(sparsity=0.5, **{option: value})  # type: ignore[arg-type]
    for value in ((0.9, 0.1), (-0.1, 0.5), (0.5, 1.1)):
        with pytest.raises(ValueError, match=rf"{option}=.* is out of order or range. Write a pair \("):
            pb.Budget(sparsity=0.5, **{option: value})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"is not a number. Write a pair"):
        pb.Budget(sparsity=0.5, **{option: ("a", "b")})  # type: ignore[arg-type]


def test_pairs_show_their_own_names() -> None:
    """The examples of the two pairs differ."""
    with pytest.raises(ValueError, match=r"\(s_l, s_u\) with 0 <= s_l <= s_u <= 1"):
        pb.Budget(sparsity=0.5, extremes=(1, 0))
    with pytest.raises(ValueError, match=r"\(min, max\) with 0 <= min <= max <= 1"):
        pb.Budget(sparsity=0.5, layer_density=(1, 0))


def test_layer_density_may_not_empty_every_tensor() -> None:
    """A maximum of zero leaves nothing."""
    with pytest.raises(ValueError, match=r"leaves every tensor empty. Write a max above 0"):
        pb.Budget(sparsity=0.5, layer_density=(0.0, 0.0))


def test_weight_is_one_number_or_one_per_limit() -> None:
    """λ_p and λ_f of Eq. 10 by name."""
    assert pb.Budget(params=0.5, flops=0.5).weight_of("flops") == 10.0
    goal = pb.Budget(params=0.5, flops=0.5, enforce="squared", weight={"params": 2, "flops": 3.0})
    assert (goal.weight_of("params"), goal.weight_of("flops")) == (2.0, 3.0)
    for weight in ({"params": 1.0}, {"params": 1.0, "flop": 1.0}, {"params": 1.0, "flops": 1.0, "bytes": 1.0}):
        with pytest.raises(ValueError, match="must name each limit once: params, flops"):
            pb.Budget(params=0.5, flops=0.5, weight=weight)
    with pytest.raises(ValueError, match=r"is negative. Write λ >= 0"):
        pb.Budget(params=0.5, flops=0.5, weight={"params": 1.0, "flops": -1.0})
    with pytest.raises(TypeError, match=r"weight='1' is not a number. Write λ"):
        pb.Budget(params=0.5, weight="1")  # type: ignore[arg-type]


# ---------------------------------------------------------------- all of them

GOALS = [pb.Fixed(0.5), pb.Unconstrained(3.0), pb.Budget(params="1K", layer_density=(0.1, 0.9))]


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: type(goal).__name__)
def test_goals_are_frozen_values(goal: pb.Goal) -> None:
    """A goal cannot change after it was checked, compares by value and survives pickling."""
    assert isinstance(goal, pb.Goal)
    field = dataclasses.fields(goal)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(goal, field, 0.1)
    assert pickle.loads(pickle.dumps(goal)) == goal
    assert dataclasses.replace(goal) == goal  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("goal", "wrong", "right"),
    [(pb.Fixed, "sparsty", "sparsity"), (pb.Unconstrained, "wieght", "weight"), (pb.Budget, "param", "params")],
)
def test_misspelt_options_are_answered_with_the_right_one(goal: type, wrong: str, right: str) -> None:
    """A typo in a keyword names the keyword that was meant."""
    with pytest.raises(TypeError, match=rf"{goal.__name__} has no option '{wrong}'. Did you mean '{right}'\?"):
        goal(**{wrong: 0.5})


def test_an_option_unlike_any_is_answered_with_the_list() -> None:
    """Where nothing is near, all options are shown."""
    with pytest.raises(TypeError, match=r"Fixed has no option 'zzz'. It takes 'sparsity', 'bound'"):
        pb.Fixed(zzz=1)  # type: ignore[call-arg]
