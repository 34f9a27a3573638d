"""Summary and DictSummary: weighted means and deviations that depend on the values alone."""

import math
import random
from decimal import Decimal
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import torch

from chainring import DictSummary, Summary
from chainring.reporting.summary import DictMeans
from chainring.serializers import DictionaryDeserializer, DictionarySerializer


def summary_of(values, weights=None):
    summary = Summary()
    for number, value in enumerate(values):
        summary.add(value, 1 if weights is None else weights[number])
    return summary


def saved_and_loaded(summary):
    fresh = type(summary)()
    fresh.load_state_dict(summary.state_dict())
    return fresh


def weighted(values, weights):
    """Mean and population deviation, by NumPy."""
    mean = np.average(values, weights=weights)
    return mean, math.sqrt(np.average((np.asarray(values) - mean) ** 2, weights=weights))


DRAWN = np.random.default_rng(3).normal(5, 2, 200)
WEIGHTS = np.random.default_rng(4).integers(1, 9, 200)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 65, 200])
@pytest.mark.parametrize("of", [float, np.float64, np.asarray, torch.tensor])
def test_mean_and_deviation_are_those_of_numpy(count, of):
    """For any kind of scalar and any number of them; the deviation is the population's."""
    mean, deviation = summary_of([of(value) for value in DRAWN[:count]]).make_statistics()
    assert mean == pytest.approx(DRAWN[:count].mean(), rel=1e-6)
    assert deviation == pytest.approx(DRAWN[:count].std(), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("of", [int, float, np.int64, torch.tensor])
def test_means_and_deviations_are_weighted(of):
    """A weight is how often a value counts; tensors will do."""
    statistics = summary_of(DRAWN, [of(weight) for weight in WEIGHTS]).make_statistics()
    assert statistics == pytest.approx(weighted(DRAWN, WEIGHTS), rel=1e-12)


@pytest.mark.parametrize("of", [float, lambda value: torch.tensor(value, dtype=torch.float64)])
def test_equal_large_values_have_no_deviation(of):
    """Three times 1e8 + 0.1; as mean of squares less square of mean it came out 1.41."""
    mean, deviation = summary_of([of(1e8 + 0.1)] * 3).make_statistics()
    assert mean == pytest.approx(1e8 + 0.1, rel=1e-15)
    assert deviation < 1e-7


def test_small_deviations_of_large_values_are_kept():
    """Neither negative under the root nor lost."""
    values = [1e9, 1e9 + 1, 1e9 + 2]
    assert summary_of(values).make_statistics()[1] == pytest.approx(math.sqrt(2 / 3), rel=1e-12)


def test_long_sums_of_float32_lose_nothing():
    """20,000 tensors of 0.1 have the mean of one, to the last bit."""
    tenth = torch.tensor(0.1)
    assert summary_of([tenth] * 20000).compute_mean() == float(tenth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_few_bits_or_integers_do_not_overflow(dtype):
    """Values are taken as float64 before they are added."""
    value = torch.tensor(60000).to(dtype)
    assert summary_of([value] * 100, [1000] * 100).compute_mean() == float(value)


def test_huge_values_have_an_infinite_deviation_and_no_error():
    """The square of 1e200 is past the largest float."""
    assert summary_of([1e200, -1e200]).make_statistics() == (0.0, math.inf)


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([1.0, math.nan], math.nan),
        ([1.0, math.inf], math.inf),
        ([1.0, -math.inf], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([1e308, 1e308, 1e308], math.inf),
        ([], math.nan),
    ],
)
@pytest.mark.parametrize("of", [float, lambda value: torch.tensor(value, dtype=torch.float64)])
def test_nan_and_infinity_come_out_as_they_do_in_ieee_arithmetic(values, mean, of):
    """A diverged loss is seen, and raises nothing."""
    summary = summary_of([of(value) for value in values])
    assert summary.compute_mean() == pytest.approx(mean, nan_ok=True)
    assert len(summary.make_statistics()) == 2


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_of_no_weight_does_not_count_even_if_it_is_not_finite(value):
    """Neither in the mean nor in the saved sums: several ranks report the same, and one of them counts."""
    summary = summary_of([value, 3.0], [0, 2])
    assert summary.compute_mean() == 3.0
    assert summary.make_statistics() == (3.0, 0.0)
    infinite = summary_of([math.inf, math.inf], [2, 0])
    assert infinite.compute_mean() == math.inf


def test_weights_that_are_all_zero_have_no_mean():
    """NaN, not a division by zero."""
    assert math.isnan(summary_of([1.0, 2.0], [0, 0]).compute_mean())


@pytest.mark.parametrize("value", ["abc", np.ones(2), torch.ones(1), None, torch.tensor(1j), Decimal(1)])
def test_what_is_no_single_real_number_is_refused(value):
    """With the remedy."""
    with pytest.raises(TypeError, match=r"takes single numbers.*\.mean\(\)"):
        Summary().add(value)


@pytest.mark.parametrize("weight", [np.ones(2), torch.ones(2), "1"])
def test_a_weight_that_is_no_single_number_is_refused(weight):
    """Summary and DictSummary both refuse it."""
    for summary, value in ((Summary(), 1.0), (DictSummary(), {"a": 1.0})):
        with pytest.raises(ValueError, match="a weight is a single number"):
            summary.add(value, weight)


def test_a_weight_that_a_value_brings_must_be_one_number_too():
    """Found at the latest when the mean is asked for."""
    summary = DictSummary()
    summary.add({"a": (1.0, np.ones(2))})
    with pytest.raises(ValueError, match="a weight is a single number"):
        summary.compute_mean()


@pytest.mark.parametrize("value", [True, np.bool_(True), Fraction(1, 1), np.int8(1), 1])
def test_any_real_number_is_a_value(value):
    """Also after many have been gathered."""
    summary = DictSummary()
    for _ in range(40):
        summary.add({"a": value})
    assert summary.compute_mean() == {"a": 1.0}


def test_a_tensor_that_changes_afterwards_counts_as_it_was():
    """It is copied, out of its graph; its weight too."""
    value, weight, summary = torch.ones((), requires_grad=True) * 1, torch.tensor(2.0), Summary()
    summary.add(value, weight)
    with torch.no_grad():
        value += 5
    weight *= 0
    assert summary.compute_mean() == 1.0


@pytest.mark.parametrize("stops", [[], [1], [31], [32], [33], [5, 6, 40, 64, 120], list(range(200))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, None])
def test_a_mean_does_not_depend_on_where_state_was_saved(stops, dtype):
    """Bit for bit, for a run that was saved and restored at any places."""

    def scalar(value):
        return float(value) if dtype is None else torch.tensor(value, dtype=dtype)

    whole, cut = DictSummary(), DictSummary()
    for number, (value, weight) in enumerate(zip(DRAWN, WEIGHTS.tolist(), strict=True)):
        row = {"a": scalar(value), "b": value, "sometimes" if number % 3 else "else": scalar(value)}
        whole.add(row, weight)
        if number in stops:
            cut = saved_and_loaded(cut)
        cut.add(row, weight)
    assert cut.compute_mean() == whole.compute_mean()
    assert cut.make_statistics() == whole.make_statistics()


def test_a_mean_does_not_depend_on_the_order_of_the_values():
    """The sum is the correctly rounded one."""
    values = [1e16, 1.0, -1e16, 1.0]
    assert {summary_of(np.roll(values, shift).tolist()).compute_mean() for shift in range(4)} == {0.5}


@pytest.mark.parametrize("values", sorted(set(permutations([1e308, 1e308, -1e308, -1e308, -1e308]))))
def test_nor_where_a_sum_on_the_way_is_past_the_largest_float(values):
    """The mean is of the exact sum: Python's own refuses some of the orders."""
    assert summary_of(values).compute_mean() == -1e308 / 5


@pytest.mark.parametrize(
    ("values", "mean"), [([1e308] * 3, math.inf), ([-1e308] * 3, -math.inf), ([math.inf, -1e308, -1e308], math.inf)]
)
def test_what_no_float_holds_is_infinite(values, mean):
    """With its sign."""
    assert summary_of(values).compute_mean() == mean


def test_asking_for_a_mean_changes_nothing():
    """More can be added, and the mean asked for again."""
    summary = summary_of([1.0, 2.0])
    assert (summary.compute_mean(), summary.compute_mean()) == (1.5, 1.5)
    summary.add(6.0)
    assert summary.compute_mean() == 3.0


def test_a_key_that_an_observation_lacks_does_not_count_as_zero():
    """A key that was reported once is its own mean; keys come in the order in which they were first seen."""
    summary = DictSummary()
    for row in ({"a": 1.0}, {"a": 2.0, "b": 10}, {"c": 5.0, "a": 6.0}):
        summary.add(row)
    assert list(summary.compute_mean().items()) == [("a", 3.0), ("b", 10.0), ("c", 5.0)]


MIXES = {
    "dtypes": ["loss", "tokens"],
    "one key's dtypes": ["changing"],
    "tensors and numbers": ["loss", "lr"],
    "numbers and words": ["lr", "name"],
    "now and then": ["loss", "validation"],
    "everything": ["loss", "tokens", "changing", "lr", "name", "validation"],
}


def observation(number, keys):
    """Of some of these keys; one of them only now and then, and in another order now and then."""
    large = 2**24 + 1 + number  # which float32 cannot hold
    row = {
        "loss": torch.tensor(number / 7, dtype=torch.float32),
        "tokens": torch.tensor(large),
        "changing": torch.tensor(number / 7) if number % 2 else torch.tensor(large),
        "lr": 0.1 / (number + 1),
        "name": "train",
        "validation": torch.tensor(number / 3, dtype=torch.float64),
    }
    kept = {key: row[key] for key in keys if key != "validation" or number % 3 == 0}
    return dict(reversed(kept.items())) if number % 5 == 0 else kept


@pytest.mark.parametrize("kind", [int, float, torch.tensor], ids=["int", "float", "tensor"])
@pytest.mark.parametrize("keys", MIXES.values(), ids=MIXES)
def test_the_mean_of_each_key_is_that_of_its_values_however_they_are_mixed(keys, kind):
    """To the last bit: what is stacked together is never rounded to a common dtype."""
    summary, products = DictSummary(), {}
    for number in range(700):
        row, weight = observation(number, keys), kind(1 + number % 4)
        summary.add(row, weight)
        for key, value in row.items():
            if key != "name":
                products.setdefault(key, []).append((float(value), float(weight)))
    expected = {
        key: math.fsum(value * weight for value, weight in pairs) / math.fsum(weight for _, weight in pairs)
        for key, pairs in products.items()
    }
    assert summary.compute_mean() == expected
    assert saved_and_loaded(summary).compute_mean() == expected


@pytest.mark.parametrize("keys", MIXES.values(), ids=MIXES)
def test_saved_state_does_not_depend_on_where_state_was_saved_before(keys):
    """Bit for bit: what is stacked together depends on it, what is saved does not."""
    states = []
    for stops in ((), (1, 2, 7, 64)):
        summary = DictSummary()
        for number in range(100):
            summary.add(observation(number, keys), 1 + number % 4)
            if number in stops:
                summary = saved_and_loaded(summary)
        states.append(summary.state_dict())
    assert states[0] == states[1]


def test_an_observation_of_nothing_counts_for_nothing():
    """However many there are."""
    summary = DictSummary()
    for _ in range(1000):
        summary.add({}, 2)
    summary.add({"a": 3.0})
    assert summary.compute_mean() == {"a": 3.0}


def test_a_value_may_bring_its_own_weight():
    """(value, weight) goes before the weight of the observation."""
    summary = DictSummary()
    summary.add({"a": (1.0, 3), "b": 1.0}, 1)
    summary.add({"a": (5.0, torch.tensor(1)), "b": 5.0}, 3)
    assert summary.compute_mean() == {"a": 2.0, "b": 4.0}


def test_a_key_may_hold_now_a_number_and_now_something_else():
    """Only the numbers count."""
    summary = DictSummary()
    for value in (1.0, "abc", torch.ones(2), torch.tensor(3.0), None, ("a", "b"), (1, 2, 3), torch.tensor(1j)):
        summary.add({"a": value})
    with pytest.warns(UserWarning, match="'a' is not averaged") as caught:
        assert summary.compute_mean() == {"a": 2.0}
    assert len(caught) == 1


def test_statistics_have_a_mean_and_a_deviation_for_each_key():
    """Under the key and under key.std, weighted."""
    summary = DictSummary()
    for value, weight in zip(DRAWN, WEIGHTS, strict=True):
        summary.add({"a": value}, weight)
    mean, deviation = weighted(DRAWN, WEIGHTS)
    assert summary.make_statistics() == {"a": pytest.approx(mean), "a.std": pytest.approx(deviation)}


def test_names_that_differ_in_slashes_are_saved_apart():
    """The keys a/b, /a/b and a/b/ stay three keys."""
    names, summary = ["a/b", "/a/b", "a/b/", "a//b", ""], DictSummary()
    for number, name in enumerate(names):
        summary.add({name: float(number)})
    assert saved_and_loaded(summary).compute_mean() == {name: float(number) for number, name in enumerate(names)}


def test_loading_replaces_what_was_there():
    """Other names and values are gone, also those not yet folded."""
    saved, target = DictSummary(), DictSummary()
    saved.add({"a": 1.0})
    target.add({"b": 2.0, "a": 7.0})
    state = DictionarySerializer()
    saved.serialize(state)
    target.serialize(DictionaryDeserializer(state.target))
    assert target.compute_mean() == {"a": 1.0}


def test_a_summary_of_nothing_goes_round():
    """Saved before the first value."""
    assert saved_and_loaded(DictSummary()).compute_mean() == {}
    assert math.isnan(saved_and_loaded(Summary()).compute_mean())


class Share:
    """A metric as torchmetrics has them."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.right, self.all = 0, 0

    def update(self, right, number):
        self.right, self.all = self.right + right, self.all + number

    def compute(self):
        return torch.tensor(self.right / self.all)


def test_a_metric_is_computed_at_the_end_of_the_interval_and_starts_anew():
    """Whatever has compute() and reset() is reported as it is and read once."""
    metric, summary = Share(), DictSummary()
    for right, number in ((1, 2), (5, 6)):
        metric.update(right, number)
        summary.add({"share": metric, "loss": 1.0})
    assert summary.compute_mean() == {"loss": 1.0, "share": 0.75}
    assert summary.compute_mean() == {"loss": 1.0, "share": 0.75}
    assert metric.all == 0


def test_a_metric_that_gives_no_single_number_is_passed_over():
    """As any other value that is none; a warning says so."""

    class Confusion(Share):
        def compute(self):
            return torch.ones(2, 2)

    summary = DictSummary()
    summary.add({"confusion": Confusion()})
    with pytest.warns(UserWarning, match="'confusion' is not averaged"):
        assert summary.compute_mean() == {}


@pytest.mark.parametrize("kind", [DictSummary, DictMeans])
def test_the_state_of_an_open_interval_does_not_grow_with_it(kind):
    """As many numbers for ten values a key as for seven thousand, however they alternate."""
    sizes = []
    for count in (10, 7000):
        summary = kind()
        for number in range(count):
            turn = number if number % 2 else torch.tensor(number)
            summary.add({"a": torch.tensor(number / 3), "b": number / 7, "c": turn})
        sizes.append({key: len(sums) for key, sums in summary.state_dict()["folded"].items()})
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("kind", [DictSummary, DictMeans])
@pytest.mark.parametrize("stops", [(), (1, 3000), range(0, 5000, 700)])
def test_the_mean_of_a_long_interval_is_that_of_the_exact_sum(kind, stops):
    """To the last bit, for values of any size and both signs, whatever was folded and saved on the way."""
    draws = np.random.default_rng(7)
    values = (draws.normal(size=5000) * 10.0 ** draws.integers(-300, 300, 5000)).tolist()
    values += [0.0, -0.0, 5e-324]
    weights = draws.integers(1, 9, len(values)).tolist()
    summary = kind()
    for number, (value, weight) in enumerate(zip(values, weights, strict=True)):
        summary.add({"a": value}, weight)
        if number in stops:
            summary = saved_and_loaded(summary)
    products = [value * weight for value, weight in zip(values, weights, strict=True)]
    assert summary.compute_mean() == {"a": math.fsum(products) / math.fsum(weights)}


@pytest.mark.parametrize(
    "special", [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf], [1e308] * 3, [1e308, 1e308, -1e308, -1e308]]
)
def test_what_is_not_finite_comes_out_the_same_after_it_was_saved(special):
    """Before, between and after it; and a sum that was past the largest float on the way can come back."""
    whole, cut = summary_of([1.0, *special, 2.0]), Summary()
    for value in [1.0, *special, 2.0]:
        cut.add(value)
        cut = saved_and_loaded(cut)
    assert cut.compute_mean() == pytest.approx(whole.compute_mean(), rel=0, nan_ok=True)
    assert cut.make_statistics() == pytest.approx(whole.make_statistics(), rel=0, nan_ok=True)


def test_the_state_with_what_is_not_a_number_does_not_depend_on_when_it_was_saved():
    """The other values of a block that has NaN count for its limits as they do in another block."""
    values = [3.0, math.nan, 1.0, -math.inf, 2.0, math.nan, 5.0]
    whole, cut = DictMeans(), DictMeans()
    for number, value in enumerate(values):
        whole.add({"a": value})
        cut.add({"a": value})
        cut = saved_and_loaded(cut) if number % 2 else cut
    state, expected = cut.state_dict(), whole.state_dict()
    assert str(state["folded"]["a"]) == str(expected["folded"]["a"])  # with NaN


@pytest.mark.parametrize("cut", [0, 1, 77, 200])
@pytest.mark.parametrize("folds", [False, True])
def test_the_sum_of_two_summaries_is_the_summary_of_all_values(cut, folds):
    """To the last bit, also where one is empty or its values are folded already; neither of them changes."""
    first, second = summary_of(DRAWN[:cut], WEIGHTS[:cut]), summary_of(DRAWN[cut:], WEIGHTS[cut:])
    if folds:
        first, second = saved_and_loaded(first), saved_and_loaded(second)
    before = [str(summary.make_statistics()) for summary in (first, second)]  # NaN of an empty one too
    total = first + second
    assert total.make_statistics() == summary_of(DRAWN, WEIGHTS).make_statistics()
    total.add(100.0)
    assert [str(summary.make_statistics()) for summary in (first, second)] == before


def test_the_sum_of_two_dict_summaries_has_the_keys_of_both():
    """In the order in which they were first added; a key that one lacks does not count as zero."""
    first, second, whole = DictSummary(), DictSummary(), DictSummary()
    for number, (value, weight) in enumerate(zip(DRAWN, WEIGHTS, strict=True)):
        seen = {"b": value, "a": torch.tensor(value)} if number < 70 else {"a": value, "c": 1}
        (first if number < 90 else second).add(seen, int(weight))
        whole.add(seen, int(weight))
    total = (first + second).make_statistics()
    assert total == whole.make_statistics()
    assert list(total) == ["b", "b.std", "a", "a.std", "c", "c.std"]


def test_summaries_of_other_kinds_are_not_added():
    """Nor a number, nor metrics, whose values are not there yet."""

    class Metric:
        compute = reset = lambda self: 1.0

    for one, other in ((Summary(), DictSummary()), (Summary(), 0), (DictSummary(), DictMeans())):
        with pytest.raises(TypeError, match="unsupported operand"):
            one + other
    holds_metric = DictSummary()
    holds_metric.add({"f1": Metric()})
    with pytest.raises(ValueError, match=r"metrics \['f1'\] are computed .*; add their values, not the metrics"):
        DictSummary() + holds_metric


def extreme(draw):
    """A float of any size, or none at all."""
    kinds = [
        lambda: draw.gauss(0, 1),
        lambda: draw.gauss(0, 1) * 10.0 ** draw.randint(-300, 300),
        lambda: math.ldexp(draw.random(), -1060),
        lambda: draw.choice([0.0, -0.0, 1e308, -1e308, 5e-324, 0.1, 1e16]),
    ]
    return draw.choice(kinds)()


@pytest.mark.parametrize("special", [(), (math.nan,), (math.inf,), (math.inf, -math.inf)], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_statistics_are_equal_to_the_last_bit_whatever_was_saved_when(seed, special):
    """Of values that cancel and overflow, saved and loaded never, often, or after each; and the mean is rounded once."""
    draw = random.Random(seed)
    rows = [({f"key{number}": extreme(draw) for number in range(3)}, draw.choice([1, 0.5, 0.25])) for _ in range(300)]
    for value in special:
        rows[draw.randrange(300)][0]["key0"] = value
    results, means = [], []
    for saves in ((), sorted(draw.sample(range(300), 20)), range(300)):
        summary = DictSummary()
        for number, (row, weight) in enumerate(rows):
            summary.add({key: torch.tensor(value, dtype=torch.float64) for key, value in row.items()}, weight)
            if number in saves:
                summary = saved_and_loaded(summary)
        means.append({key: value.hex() for key, value in summary.compute_mean().items()})
        results.append({key: value.hex() for key, value in summary.make_statistics().items()})
    assert means[0] == means[1] == means[2]
    assert results[0] == results[1] == results[2]
    products = [Fraction(row["key1"] * weight) for row, weight in rows]
    exact = sum(products)
    if abs(exact) < Fraction(1.7e308):
        assert means[0]["key1"] == (float(exact) / sum(weight for _, weight in rows)).hex()
