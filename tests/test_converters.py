"""concat_examples and to_device: from examples to tensors."""

import dataclasses
import pickle
from collections import namedtuple
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from chainring.converters import concat_examples, to_device
from chainring.iterators import Batch, SerialIterator

Pair = namedtuple("Pair", "x t")


def same(tensor, values, dtype):
    expected = torch.tensor(values, dtype=dtype)
    return tensor.dtype == dtype and torch.equal(tensor, expected)


@pytest.mark.parametrize(
    ("batch", "values", "dtype"),
    [
        ([1, 2], [1, 2], torch.int64),
        ([1.5, 2.5], [1.5, 2.5], torch.float32),
        ([True, False], [True, False], torch.bool),
        ([1, 2.5], [1.0, 2.5], torch.float32),
        ([2.5, 1], [2.5, 1.0], torch.float32),
        ([True, 2], [1, 2], torch.int64),
        ([1, np.float32(0.5)], [1.0, 0.5], torch.float32),
        ([1, np.int32(5)], [1, 5], torch.int64),
        ([np.int32(1), np.int32(5)], [1, 5], torch.int32),
        ([np.float64(1), np.float64(5)], [1.0, 5.0], torch.float64),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]], torch.int64),
        ([[0.5], [1.5]], [[0.5], [1.5]], torch.float32),
        ([np.arange(2), np.arange(2)], [[0, 1], [0, 1]], torch.int64),
        ([np.zeros(1, np.float16)] * 2, [[0], [0]], torch.float16),
        ([np.ones(1, ">f4")] * 2, [[1], [1]], torch.float32),
        ([torch.tensor(1.0), torch.tensor(2.0)], [1.0, 2.0], torch.float32),
        ([torch.zeros(2, dtype=torch.bfloat16)] * 2, [[0, 0], [0, 0]], torch.bfloat16),
    ],
)
def test_one_part_becomes_one_tensor(batch, values, dtype):
    """Python floats float32, ints int64; arrays keep their dtype; a number is never truncated to the first's."""
    assert same(concat_examples(batch), values, dtype)


@pytest.mark.parametrize(
    "batch",
    [
        [1.5, 2.5],
        [1, 2.5],
        [[0.5], [1.5]],
        [(0.1, 1), (0.2, 2)],
        [{"x": 0.1}, {"x": 0.2}],
        [[[0.1]], [[0.2]]],
        [1, np.float32(0.5)],
    ],
)
def test_python_floats_get_the_precision_of_torchs_default(batch):
    """Those of a default of float64 are float64, as torch.tensor makes them; of 16 bits they keep float32."""
    before = torch.get_default_dtype()
    try:
        for default, expected in {torch.float64: torch.float64, torch.bfloat16: torch.float32}.items():
            torch.set_default_dtype(default)
            joined = concat_examples(batch)
            first = joined[0] if isinstance(joined, tuple) else joined["x"] if isinstance(joined, dict) else joined
            value = batch[0]
            while isinstance(value, (list, tuple, dict)):
                value = value["x"] if isinstance(value, dict) else value[0]
            assert first.dtype == expected
            assert first.flatten()[0] == torch.tensor(value, dtype=expected)
        padded = concat_examples([[1, 2], [0.1]], padding=0)
        assert padded.dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_tuples_give_a_tuple_of_tensors():
    """Each element of the tuple is stacked by itself."""
    x, t = concat_examples([(np.zeros(2, np.float32), 1), (np.ones(2, np.float32), 2)])
    assert same(x, [[0, 0], [1, 1]], torch.float32)
    assert same(t, [1, 2], torch.int64)


def test_named_tuples_stay_named():
    """The kind is the first example's."""
    joined = concat_examples([Pair(1, 2.0), Pair(3, 4.0)])
    assert type(joined) is Pair
    assert same(joined.t, [2, 4], torch.float32)


def test_mappings_give_a_dict_in_the_order_of_the_first():
    """Later examples may have another order."""
    joined = concat_examples([{"x": 1, "t": 2}, {"t": 4, "x": 3}])
    assert list(joined) == ["x", "t"]
    assert same(joined["t"], [2, 4], torch.int64)


def test_structures_nest():
    """A mapping of a tuple."""
    joined = concat_examples([{"a": (1, [2.0])}, {"a": (3, [4.0])}])
    assert same(joined["a"][1], [[2], [4]], torch.float32)


def test_columns_are_passed_through():
    """Columns that a batch holds already are not stacked again: the same memory."""
    columns = (torch.zeros(3, 2), np.arange(3))
    x, t = concat_examples(Batch(columns=columns, length=3))
    assert x is columns[0]
    assert t.data_ptr() == columns[1].ctypes.data


def test_a_read_only_array_is_copied():
    """Torch has no tensors that cannot be written to."""
    array = np.arange(3)
    array.flags.writeable = False
    assert same(to_device(None, array), [0, 1, 2], torch.int64)


class TestPadding:
    def test_one_number_fills_all_up_at_their_ends(self):
        """To the largest size in each dimension."""
        joined = concat_examples([np.ones((1, 3), np.int32), np.ones((2, 1), np.int32)], padding=-1)
        assert same(joined, [[[1, 1, 1], [-1, -1, -1]], [[1, -1, -1], [1, -1, -1]]], torch.int32)

    def test_lists_of_different_lengths_are_filled_up(self):
        """As sequences of tokens are."""
        assert same(concat_examples([[1, 2, 3], [4]], padding=0), [[1, 2, 3], [4, 0, 0]], torch.int64)

    def test_each_part_of_a_tuple_has_its_own(self):
        """A slot without one must fit as it is."""
        batch = [([1], [1.0], 5), ([1, 2], [1.0, 2.0], 6)]
        x, y, t = concat_examples(batch, padding=(0, 9.5, None))
        assert same(x, [[1, 0], [1, 2]], torch.int64)
        assert same(y, [[1, 9.5], [1, 2]], torch.float32)
        assert same(t, [5, 6], torch.int64)

    def test_each_part_of_a_mapping_has_its_own(self):
        """By key."""
        joined = concat_examples([{"x": [1], "y": [1]}, {"x": [1, 2], "y": [1, 2]}], padding={"x": -1, "y": -2})
        assert [joined[key].tolist()[0] for key in "xy"] == [[1, -1], [1, -2]]

    def test_the_dtype_holds_every_example(self):
        """An integer first does not truncate what follows."""
        assert same(concat_examples([[1, 2], [0.5]], padding=0), [[1, 2], [0.5, 0]], torch.float32)

    def test_tensors_are_padded_too(self):
        """As arrays are."""
        assert same(concat_examples([torch.ones(2), torch.ones(1)], padding=7), [[1, 1], [1, 7]], torch.float32)

    @pytest.mark.parametrize("padding", [0.5, -1, 300])
    def test_a_padding_that_the_dtype_cannot_hold_is_refused(self, padding):
        """It would be changed in silence."""
        with pytest.raises(ValueError, match=f"padding {padding} does not fit into the torch.uint8 of example"):
            concat_examples([np.ones(2, np.uint8), np.ones(1, np.uint8)], padding=padding)

    @pytest.mark.parametrize("padding", [(0,), {"x": 0}])
    def test_a_padding_of_another_structure_is_refused(self, padding):
        """One number, or one for each part."""
        with pytest.raises(ValueError, match="padding must be one number or one for each item of example"):
            concat_examples([(1, 2)], padding=padding)

    def test_parts_of_a_padding_for_examples_without_parts_are_refused(self):
        """An array has no parts."""
        with pytest.raises(TypeError, match="padding of example is a number"):
            concat_examples([[1], [1, 2]], padding=(0, 1))

    def test_other_numbers_of_dimensions_are_refused(self):
        """With the position of the one that differs."""
        with pytest.raises(ValueError, match=r"of 1 dimensions.*example 1 is of shape \(1, 1\).*not dimensions"):
            concat_examples([np.ones(2), np.ones((1, 1))], padding=0)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([(1, 2), (1, 2, 3)], "example 0 is a tuple of 2.*example 1 is a tuple of 3"),
        ([(1, 2), (1, 2), (1,)], "example 2 is a tuple of 1"),
        ([(1, 2), [1, 2]], "example 1 is list"),
        ([{"x": 1}, {"x": 1, "y": 2}], r"keys \['x'\].*example 1 is a mapping with the keys \['x', 'y'\]"),
        ([{"x": 1}, {}], "example 1 is a mapping with the keys"),
        ([(1, np.ones(2)), (1, np.ones(3))], r"item 1 of example 0 is of shape \(2,\).*example 1 is of shape \(3,\)"),
        ([{"x": [1]}, {"x": [1, 2]}], "'x' of example 0.*example 1.*pass padding="),
        ([1, 2, np.ones(2)], r"example 0 is a number.*example 2 is of shape \(2,\)"),
        ([1, (1,)], "example 1 is a tuple of 1"),
        ([np.ones(1), (1.0,)], "example 0 is an array.*example 1 is a tuple of 1"),
        ([[1, 2], [[1], [1, 2]]], "example 1 is a ragged list"),
        ([], "at least one example"),
    ],
)
def test_differing_structures_are_refused_by_position(batch, message):
    """Nothing is truncated to the first example's form."""
    with pytest.raises(ValueError, match=message):
        concat_examples(batch)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (["cat", "dog"], "example 0 is str 'cat'"),
        ([(1, "cat")], "item 1 of example 0 is str 'cat'"),
        ([np.ones(1), "cat"], "example 1 is str"),
        ([["a", "b"]], "example 0 is list"),
        ([None], "NoneType"),
        ([np.datetime64("2020-01-01")], "datetime64"),
        ([object()], "object"),
    ],
)
def test_what_is_no_number_is_refused_with_the_remedy(batch, message):
    """A dataset of strings, say: the position, the value and where to turn it into numbers."""
    with pytest.raises(TypeError, match=message):
        concat_examples(batch)


def test_a_dataset_of_strings_says_where_to_make_numbers_of_them():
    """Through an iterator, as a user meets it."""
    batch = SerialIterator(["good", "bad"], 2, shuffle=False).next()
    with pytest.raises(TypeError, match=r"'good'; turn it into numbers in the dataset .*converter="):
        concat_examples(batch)


class TestToDevice:
    def test_containers_are_entered(self):
        """Tuples, named tuples, lists and mappings keep their kind; what is no data passes."""
        moved = to_device(-1, {"a": (np.ones(1), "text"), "b": Pair([np.zeros(1)], None), "c": 3})
        assert torch.is_tensor(moved["a"][0])
        assert moved["a"][1:] == ("text",)
        assert type(moved["b"]) is Pair
        assert torch.is_tensor(moved["b"].x[0])
        assert moved["c"] == 3

    @pytest.mark.parametrize("device", [None, -1, "cpu", torch.device("cpu")])
    def test_a_tensor_already_there_is_not_copied(self, device):
        """None leaves it; a negative integer is the host."""
        tensor = torch.ones(2)
        assert to_device(device, tensor) is tensor

    def test_another_device_is_moved_to(self):
        """The meta device stands in for an accelerator."""
        assert concat_examples([1, 2], "meta").device.type == "meta"

    def test_what_comes_to_the_host_is_there(self, device):
        """A copy from an accelerator has arrived when it is returned."""
        assert to_device("cpu", {"x": torch.arange(9, device=device)})["x"].tolist() == list(range(9))

    @pytest.mark.parametrize("device", [True, 1.0, ["cpu"]])
    def test_what_is_no_device_is_refused(self, device):
        """With the forms that there are."""
        with pytest.raises(TypeError, match="a device is None, an integer, a string"):
            to_device(device, torch.ones(1))

    def test_an_accelerator_that_is_not_there_is_refused(self):
        """With the number of those that are."""
        with pytest.raises(ValueError, match=f"this machine has {torch.accelerator.device_count()}; -1 is the CPU"):
            to_device(torch.accelerator.device_count(), torch.ones(1))


def test_the_converter_can_be_pickled():
    """Worker processes are handed it."""
    assert pickle.loads(pickle.dumps(concat_examples)) is concat_examples


@pytest.mark.parametrize("name", ["gpu", "autos", ""])
def test_a_name_that_is_no_device_is_refused_with_those_that_are(name):
    """People try "gpu" first."""
    with pytest.raises(ValueError, match=f"device '{name}' is none that PyTorch knows.*\"auto\" takes the accelerator"):
        to_device(name, torch.ones(1))


@dataclasses.dataclass
class Record:
    x: Any
    t: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    t: Any


@attrs.frozen
class OfAttrs:
    x: Any
    t: Any


@pytest.mark.parametrize("cls", [Pair, Record, Frozen, OfAttrs])
@pytest.mark.parametrize("wrap", [lambda batch: batch, lambda batch: Batch(columns=batch, length=2)])
def test_the_fields_of_a_record_are_moved_and_the_record_itself_stays(cls, wrap):
    """Arrays become tensors, as in a mapping, at any depth; what is no tensor is kept."""
    given = cls(np.ones(2, np.float32), {"of": cls(torch.ones(2), "text")})
    moved = concat_examples(wrap(given), "meta")
    assert type(moved) is type(moved.t["of"]) is cls
    assert moved.x.is_meta
    assert moved.t["of"].x.is_meta
    assert moved.t["of"].t == "text"
    assert type(given.x) is np.ndarray
    assert to_device(None, given).x.tolist() == [1, 1]


def test_what_has_a_method_to_is_asked_to_move_itself():
    """A packed sequence keeps the sizes of its steps on the host."""
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device("meta", Record(packed, 1)).x
    assert moved.data.is_meta
    assert not moved.batch_sizes.is_meta
    assert to_device(None, packed) is packed
