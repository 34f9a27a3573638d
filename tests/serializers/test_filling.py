"""What an object gives to the serializer says in which form it gets its state back."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from chainring import training
from chainring.serializers import DictionaryDeserializer, DictionarySerializer
from chainring.testing import FakeUpdater


def loaded(saved, given):
    """What an object that gives ``given`` gets back."""
    serializer = DictionarySerializer()
    serializer("value", saved)
    return DictionaryDeserializer(serializer.target)("value", given)


ARRAYS = {
    "array": lambda n: np.full((2, 3), n, np.float32),
    "integers": lambda n: np.full(4, n),
    "big-endian": lambda n: np.full(2, n, ">i2"),
    "text": lambda n: np.array([str(n), "b"]),
    "no dimension": lambda n: np.array(float(n)),
    "empty": lambda n: np.zeros((0, 3)),
    "view": lambda n: np.full((4, 4), n)[::2, 1:3],
    "fortran": lambda n: np.full((2, 3), n, order="F"),
    "tensor": lambda n: torch.full((2, 3), float(n)),
    "bfloat16": lambda n: torch.full((2,), n, dtype=torch.bfloat16),
    "complex": lambda n: torch.full((2,), complex(n, 1)),
    "conjugated": lambda n: torch.full((2,), complex(n, 1)).conj(),
    "zero-dimensional tensor": lambda n: torch.tensor(float(n)),
    "turned": lambda n: torch.full((3, 2), float(n)).t(),
    "parameter": lambda n: nn.Parameter(torch.full((2,), float(n))),
    "leaf that needs a gradient": lambda n: torch.full((2,), float(n), requires_grad=True),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_of_the_saved_shape_and_dtype_is_filled_and_returned(kind):
    """So that Chainer's form without an assignment works; no graph is recorded."""
    saved, given = ARRAYS[kind](1), ARRAYS[kind](2)
    assert loaded(saved, given) is given
    assert given.tolist() == saved.tolist()
    assert getattr(given, "grad_fn", None) is None


def test_a_view_is_filled_and_nothing_beside_it():
    """It stays a part of the whole."""
    whole = np.zeros(6)
    loaded(np.ones(2), whole[2:4])
    assert whole.tolist() == [0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("saved", [np.arange(3.0), torch.arange(3, dtype=torch.float64)])
@pytest.mark.parametrize("given", [np.zeros(3), torch.zeros(3, dtype=torch.float64)])
def test_an_array_fills_a_tensor_and_the_reverse(saved, given):
    """An object that now keeps tensors goes on from a snapshot of the one that kept arrays."""
    assert loaded(saved, given) is given
    assert given.tolist() == [0, 1, 2]


READ_ONLY = np.zeros(3)
READ_ONLY.flags.writeable = False
with torch.inference_mode():
    INFERENCE = torch.zeros(3)


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        (np.ones(3), np.zeros(4)),
        (np.ones(3), np.zeros(3, np.float32)),
        (np.ones(3), np.zeros((3, 1))),
        (np.ones(3), READ_ONLY),
        (np.ones(3), None),
        (np.ones(3), [0, 0, 0]),
        (torch.ones(3), torch.zeros(4)),
        (torch.ones(3), torch.zeros(3, dtype=torch.float64)),
        (torch.ones(3), torch.zeros(1).expand(3)),
        (torch.ones(3), INFERENCE),
        (torch.ones(3), torch.zeros(3, device="meta")),
        (torch.ones(3), nn.UninitializedParameter()),
        (torch.ones(3, dtype=torch.bfloat16), np.zeros(3)),
        (np.array(["a"]), torch.zeros(1)),
    ],
    ids=range(14),
)
def test_an_array_that_does_not_fit_stays_and_the_saved_one_is_returned(saved, given):
    """Whose type, shape and dtype are what was saved."""
    before = given.tolist() if isinstance(given, np.ndarray) else None
    result = loaded(saved, given)
    assert type(result) is type(saved)
    assert (result.dtype, result.shape, result.tolist()) == (saved.dtype, saved.shape, saved.tolist())
    assert before is None or given.tolist() == before


def test_what_was_saved_does_not_follow_the_object():
    """Neither after saving nor after loading into it."""
    array, serializer = np.ones(2), DictionarySerializer()
    serializer("value", array)
    array += 1
    other = np.zeros(2)
    DictionaryDeserializer(serializer.target)("value", other)
    other += 5
    assert serializer.target["value"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("saved", "given", "expected"),
    [
        (3, 0.0, 3.0), (3.0, 0, 3), (True, 0, 1), (1, False, True), (0, True, False), (1.0, False, True),
        (np.int64(3), 0, 3), (np.float32(0.1), 0.0, float(np.float32(0.1))), (np.bool_(True), False, True),
        (3, np.int8(0), np.int8(3)), (0.5, np.float32(0), np.float32(0.5)), (np.str_("a"), "", "a"),
        ("a", np.str_(), np.str_("a")),
        ("a", "", "a"), (-0.0, 0.0, -0.0), (math.nan, 0.0, math.nan), (np.float32(math.nan), 0.0, math.nan),
        (10**40, 0, 10**40), (math.inf, np.float64(0), np.float64(math.inf)),
    ],
    ids=repr,
)  # fmt: skip
def test_a_scalar_comes_back_in_the_type_of_the_one_given(saved, given, expected):
    """Also between the scalars of Python and NumPy."""
    result = loaded(saved, given)
    assert (type(result), repr(result)) == (type(expected), repr(expected))


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        (0.5, 0), (2, False), (-0.0, 0), (math.nan, 0), (2**53 + 1, 0.0), (10**400, 0.0), (0.1, np.float32(0)),
        (300, np.int8(0)),
        (3, ""), ("3", 0), ("", False), (None, 0), (None, "a"), (3, None), (1j, 0.0), (np.timedelta64(3, "s"), 0), ([1], 0),
    ],
    ids=repr,
)  # fmt: skip
def test_a_scalar_that_the_type_does_not_hold_comes_back_as_it_was_saved(saved, given):
    """A count that has become a fraction is never rounded."""
    result = loaded(saved, given)
    assert (type(result), repr(result)) == (type(saved), repr(saved))


@pytest.mark.parametrize(
    ("saved", "given", "expected"),
    [
        (np.array(5), 0, 5), (np.array(5, np.int8), 0, 5), (np.array(2.5), 0.0, 2.5), (np.array(2.5, np.float32), 0.0, 2.5),
        (np.array(5), 0.0, 5.0), (np.array(5.0), 0, 5), (np.array(True), False, True), (np.array("abc"), "", "abc"),
        (np.array(5), np.float32(0), np.float32(5)), (np.array(7, ">i4"), 0, 7), (np.array(math.inf), 0.0, math.inf),
    ],
    ids=repr,
)  # fmt: skip
def test_a_scalar_in_an_array_without_dimensions_comes_back_in_the_type_of_the_one_given(saved, given, expected):
    """Chainer's serializers keep every scalar so, and its npz files have it so."""
    result = DictionaryDeserializer({"value": saved})("value", given)
    assert (type(result), repr(result)) == (type(expected), repr(expected))


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        (np.array(2.5), 0), (np.array(2), False), (np.array("3"), 0), (np.array(3), ""), (np.array([5]), 0),
        (np.array(0.1), np.float32(0)),
    ],
    ids=repr,
)  # fmt: skip
def test_an_array_without_dimensions_that_the_type_does_not_hold_stays_an_array(saved, given):
    result = DictionaryDeserializer({"value": saved})("value", given)
    assert (type(result), repr(result)) == (np.ndarray, repr(saved))


def test_a_running_average_that_became_a_tensor_stays_a_tensor():
    """As a Python number it would be rounded in other places in the next update."""
    result = loaded(torch.tensor(0.1), 0.0)
    assert torch.equal(result, torch.tensor(0.1))


def test_an_extension_in_the_form_of_chainer_continues_without_an_assignment(tmp_path):
    """Its order and its count are arrays, as Chainer's examples write them."""

    class Shuffle(training.Extension):
        def __init__(self, seed):
            self.order, self.count = np.random.default_rng(seed).permutation(6), np.zeros((), np.int64)

        def __call__(self, trainer):
            self.order[:] = np.roll(self.order, 1)
            self.count += 1

        def serialize(self, serializer):
            serializer("order", self.order)
            serializer("count", self.count)

    def trained(seed, stop, state=None):
        trainer = training.Trainer(FakeUpdater(), (stop, "iteration"), out=str(tmp_path / f"{seed}-{stop}"))
        trainer.extend(extension := Shuffle(seed), trigger=(1, "iteration"))
        if state is not None:
            trainer.load_state_dict(state)
        trainer.run()
        return extension, trainer.state_dict()

    whole, _ = trained(0, 5)
    _, state = trained(0, 2)
    resumed, _ = trained(1, 5, state)
    assert resumed.order.tolist() == whole.order.tolist()
    assert resumed.count == 5
