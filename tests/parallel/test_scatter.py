"""scatter and gather: every row once, in order, whatever the number of devices, rows and levels."""

import copy
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest
import torch
from nets import GRID, hosts
from torch.nn.utils.rnn import pack_padded_sequence

from chainring.parallel import gather, scatter

Pair = namedtuple("Pair", "x t")


@dataclass(frozen=True)
class Example:
    x: torch.Tensor
    name: str


def rows_of(number):
    """Each row tells which it is."""
    return torch.arange(number * 3, dtype=torch.float64).reshape(number, 3)


@GRID
def test_every_row_is_in_one_part_in_order_and_no_part_is_empty(number, rows):
    """There are min(n, rows) parts of nearly equal length, and of no rows one part without any."""
    parts = scatter(rows_of(rows), hosts(number))
    expected = np.array_split(rows_of(rows).numpy(), max(1, min(number, rows)))
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]


@GRID
def test_gather_is_the_inverse_of_scatter(number, rows):
    """Nested in every kind of container, with None and values that are not tensors."""
    x = rows_of(rows)
    inputs = {"pair": Pair(x, [x + 1, None]), "rest": ((x.int(),), "name", 3, 0.5, {}, []), "example": Example(x, "a")}
    outputs = gather(scatter(inputs, hosts(number)), "cpu")
    torch.testing.assert_close(outputs["pair"], Pair(x, [x + 1, None]), rtol=0, atol=0)
    torch.testing.assert_close(outputs["rest"][0], (x.int(),), rtol=0, atol=0)
    assert outputs["rest"][1:] == inputs["rest"][1:]
    assert torch.equal(outputs["example"].x, x)


@pytest.mark.parametrize("dim", [1, -2])
def test_rows_may_lie_in_another_dimension(dim):
    """Both ways; a negative one is counted from the end."""
    x = torch.randn(2, 5, 4)
    parts = scatter((x, x), hosts(3), dim)
    assert [tuple(part[0].shape) for part in parts] == [(2, 2, 4), (2, 2, 4), (2, 1, 4)]
    assert torch.equal(gather(parts, "cpu", dim)[1], x)


def test_parts_go_to_the_first_devices_when_there_are_fewer_rows():
    """Part k is on device k, not on the last."""
    parts = scatter(rows_of(2), ["cpu", "meta", "meta"])
    assert [(part.device.type, len(part)) for part in parts] == [("cpu", 1), ("meta", 1)]


def test_what_has_no_rows_goes_to_every_part():
    """None, strings, numbers, objects and tensors without dimensions, on the part's device."""
    scalar, thing = torch.tensor(2.0), object()
    parts = scatter([rows_of(2), None, "a", 1, scalar, thing, np.ones(3)], ["cpu", "meta"])
    assert all(part[1:4] == [None, "a", 1] and part[5] is thing and len(part[6]) == 3 for part in parts)
    assert parts[0][4] is scalar
    assert (parts[1][4].device.type, parts[1][4].shape) == ("meta", ())


def test_without_anything_to_divide_every_device_gets_all():
    """Nothing says into how many parts."""
    assert scatter((None, "a"), hosts(3)) == [(None, "a")] * 3


def test_tensors_that_disagree_in_length_are_refused_by_name():
    """Not divided into fewer parts, which lost rows."""
    inputs = {"x": (rows_of(4), [rows_of(4)]), "example": Example(torch.ones(1, 3), "")}
    with pytest.raises(
        ValueError, match=r"inputs\['x'\]\[0\] has 4.*inputs\['x'\]\[1\]\[0\] has 4.*inputs\['example'\]\.x has 1"
    ):
        scatter(inputs, hosts(2))


def test_gradients_flow_back_through_both():
    """Moves that autograd records, so that the gradient arrives where the input is."""
    x = rows_of(5).requires_grad_()
    parts = scatter({"x": x}, hosts(3))
    gathered = gather([part["x"] ** 2 for part in parts], "cpu")
    (gathered * rows_of(5)).sum().backward()
    assert torch.equal(x.grad, 2 * rows_of(5) ** 2)
    moved = scatter(x, ["meta", "meta"])[0]
    assert moved.requires_grad
    assert not moved.is_leaf
    assert x.device.type == "cpu"


def test_a_part_may_be_changed_in_place_by_a_model():
    """As the whole batch may be: each part is a view of its own."""
    bias = torch.ones(3, dtype=torch.float64, requires_grad=True)
    parts = scatter(rows_of(4), hosts(2))
    for part in parts:
        part += bias
    gather(parts, "cpu").sum().backward()
    assert bias.grad.tolist() == [4.0, 4.0, 4.0]


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda pairs: defaultdict(list, pairs)])
def test_mappings_keep_their_type(kind):
    """Also one whose constructor takes something else; what is inside the caller's stays."""
    inputs = kind([("x", rows_of(2)), ("b", None)])
    before = copy.copy(inputs)
    outputs = gather(scatter(inputs, hosts(2)), "cpu")
    assert type(outputs) is type(inputs)
    assert list(outputs) == ["x", "b"]
    assert all(inputs[key] is before[key] for key in before)


def test_a_mapping_that_cannot_be_changed_becomes_a_dict():
    """It cannot be made anew otherwise."""
    parts = scatter(MappingProxyType({"x": rows_of(2)}), hosts(2))
    assert [part["x"].tolist() for part in parts] == [[[0, 1, 2]], [[3, 4, 5]]]


def test_what_torch_functions_return_keeps_its_names():
    """torch.max(x, 1) has values and indices."""
    gathered = gather([torch.max(part, 1) for part in scatter(rows_of(3), hosts(2))], "cpu")
    assert gathered.values.tolist() == [2, 5, 8]
    assert gathered.indices.tolist() == [2, 2, 2]


def test_tensors_without_dimensions_are_stacked():
    """One entry a part, as torch.nn.DataParallel has it; gradients reach each."""
    losses = [torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)]
    gathered = gather(losses, "cpu")
    assert gathered.tolist() == [1.0, 2.0]
    (gathered * torch.tensor([3.0, 4.0])).sum().backward()
    assert [loss.grad.item() for loss in losses] == [3.0, 4.0]


def test_other_values_are_one_where_all_parts_agree_and_else_a_list():
    """Numbers and arrays too, of which nothing is lost."""
    array = np.ones(2)
    outputs = gather([(1.5, 1, "a", None, array, array), (1.5, 2, "a", None, array, array + 1)], "cpu")
    assert outputs[:4] == (1.5, [1, 2], "a", None)
    assert outputs[4] is array
    assert [entry.tolist() for entry in outputs[5]] == [[1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([{"a": 1, "b": 1}, {"a": 1, "c": 1}], r"outputs is dict of \[.*'b'.* in part 0 and dict of \[.*'c'.* in part 1"),
        ([(1, [2]), (1, [2, 3])], r"outputs\[1\] is list of"),
        ([(1, torch.ones(2)), (1, None)], r"outputs\[1\] is a tensor in part 0 and None in part 1"),
        ([Pair(1, (2,)), Pair(1, [2])], r"outputs\.t is tuple of"),
        ([torch.ones(1, 2), torch.ones(1, 3)], r"outputs has the shapes \(1, 2\), \(1, 3\)"),
        ([torch.ones(2), torch.tensor(1.0)], r"outputs has the shapes \(2,\), \(\)"),
        ([], "at least one part"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(outputs, words):
    """Equal numbers of keys are not enough; the place is named."""
    with pytest.raises(ValueError, match=words):
        gather(outputs, "cpu")


def test_gather_without_a_device_stays_where_the_first_part_is():
    """None leaves tensors where they are, as everywhere."""
    assert gather(scatter(rows_of(2), ["meta", "meta"]), None).device.type == "meta"
    assert gather(scatter(rows_of(2), hosts(2)), "meta").device.type == "meta"


def test_a_tensor_without_the_dimension_is_refused():
    """One could not say which of its rows belong to which part."""
    with pytest.raises(ValueError, match=r"dimension 1, which inputs\[1\] of shape \(2,\) lacks"):
        scatter((rows_of(2), torch.ones(2)), hosts(2), 1)


def test_a_packed_sequence_is_refused():
    """It is a named tuple by accident; its rows lie all over it."""
    packed = pack_padded_sequence(torch.ones(2, 1, 3), torch.tensor([1, 1]), batch_first=True)
    with pytest.raises(TypeError, match=r"inputs\[0\] is a PackedSequence.*pass the padded tensor"):
        scatter([packed], hosts(2))
    with pytest.raises(TypeError, match=r"outputs is a PackedSequence"):
        gather([packed, packed], "cpu")


@pytest.mark.parametrize(
    ("devices", "error", "words"),
    [
        ([], ValueError, "at least one device"),
        ("cpu", TypeError, "devices is a sequence.*got 'cpu'"),
        (["cpu", None], TypeError, "must name each device"),
        (2, TypeError, "devices is a sequence.*got 2"),
    ],
)
def test_devices_that_are_none_are_refused(devices, error, words):
    """Rule, value and remedy."""
    with pytest.raises(error, match=words):
        scatter(rows_of(2), devices)


def test_devices_are_spelled_as_everywhere():
    """A negative integer is the host."""
    parts = scatter(rows_of(3), [-1, "cpu", torch.device("cpu")])
    assert [part.device.type for part in parts] == ["cpu"] * 3
