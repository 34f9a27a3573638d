"""Whole objects that Chainer saved come back in the types that they declare, without the entries that are to be ignored."""

import io
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from chainring.serializers import load_npz, save_npz

# The entry of None in a file of Chainer 7.8.1 with NumPy 1.23.5.
NONE = (
    b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (), }" + b" " * 63 + b"\n"
    b"\x80\x03cnumpy.core.multiarray\n_reconstruct\nq\x00cnumpy\nndarray\nq\x01K\x00\x85q\x02C\x01bq\x03\x87q\x04Rq\x05(K\x01)"
    b"cnumpy\ndtype\nq\x06X\x02\x00\x00\x00O8q\x07\x89\x88\x87q\x08Rq\t(K\x03X\x01\x00\x00\x00|q\nNNNJ\xff\xff\xff\xff"
    b"J\xff\xff\xff\xffK?tq\x0bb\x89]q\x0cNatq\rb."
)


class Things:
    """State of many types, as an object of a Chainer program declares it; keys begin with a slash here and there."""

    def __init__(self, **values):
        vars(self).update(values)

    def serialize(self, serializer):
        for name, value in list(vars(self).items()):
            setattr(self, name, serializer(f"/{name}" if name == "count" else name, value))


def saved_by_chainer(**values):
    """A file as `chainer.serializers.save_npz` writes it: each value by `numpy.asarray`, under its path."""
    file = io.BytesIO()
    np.savez(file, **{name: np.asarray(value) for name, value in values.items() if value is not None})
    with zipfile.ZipFile(file, "a") as archive:
        for name in (name for name, value in values.items() if value is None):
            archive.writestr(f"{name}.npy", NONE)
    return file


def test_a_whole_object_comes_back_with_the_types_that_it_declares():
    """Not a tensor for each int and float."""
    values = {"count": 7, "loss": 0.25, "done": True, "log": "[{}]", "order": np.arange(4), "best": None, "keys": ["a", "b"]}
    values |= {"rate": np.float32(0.1), "weight": np.ones(3, np.float32), "pair": (1, 2), "big": np.int64(2**60)}
    order = np.zeros(4, int)
    things = Things(
        count=0, loss=0.0, done=False, log="", order=order, best=3, keys=[], rate=0.0, weight=torch.zeros(3), pair=(), big=0
    )
    load_npz(saved_by_chainer(**values), things)
    assert things.order is order
    assert things.weight.tolist() == [1, 1, 1]
    expected = {**values, "order": order, "weight": things.weight, "rate": float(np.float32(0.1)), "big": 2**60}
    assert {name: (type(value), value) for name, value in vars(things).items()} == {
        name: (type(value), value) for name, value in expected.items()
    }


def test_an_array_is_filled_from_one_of_another_dtype_that_it_holds():
    """As Chainer copies it; what would be rounded is refused."""
    things = Things(order=np.zeros(3, np.int64))
    load_npz(saved_by_chainer(order=np.arange(3, dtype=np.int32)), things)
    assert things.order.tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="'order' is of float64, which an array of float32 does not hold"):
        load_npz(saved_by_chainer(order=np.full(3, 0.1)), Things(order=np.zeros(3, np.float32)))


@pytest.mark.parametrize(
    ("saved", "given"), [(0.5, 0), (3.0, 0), (2**62 + 1, np.float32(0)), (2, False), ("3", 0), (3, ""), (np.ones(2), 0.0)]
)
def test_a_type_that_does_not_hold_what_chainer_saved_is_refused(saved, given):
    """As Chainer refuses an unsafe cast; it names the entry."""
    with pytest.raises(TypeError, match=r"'value' is an array of .* does not\s+hold exactly"):
        load_npz(saved_by_chainer(value=saved), Things(value=given))


def test_an_array_of_another_shape_is_refused():
    """Chainer's form would leave it unfilled without a word."""
    with pytest.raises(ValueError, match=r"'order' has the shape \[5\] in the file, .* \[4\]"):
        load_npz(saved_by_chainer(order=np.arange(5)), Things(order=np.zeros(4, int)))


def test_none_is_known_by_its_bytes_and_anything_else_pickled_is_refused():
    """Nothing is unpickled."""
    things = Things(best=3)
    file = io.BytesIO()
    np.savez(file, best=np.asarray(None))  # by the NumPy at hand
    load_npz(file, things)
    assert things.best is None
    file = io.BytesIO()
    np.savez(file, best=np.asarray({}))
    with pytest.raises(ValueError, match="array of Python objects"):
        load_npz(file, things)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(1, 1), nn.Linear(1, 1)
        self.calls = 0

    def serialize(self, serializer):
        self.calls = serializer("calls", self.calls)


def model_file(path=""):
    names = ("l1/weight", "l1/bias", "l2/weight", "l2/bias")
    arrays = {path + name: np.full((1, 1) if name.endswith("weight") else 1, 7, "f4") for name in names}
    return saved_by_chainer(**arrays, **{f"{path}calls": 7})


def loaded(model):
    """The names of the entries that came out of the file."""
    found = {name.replace(".", "/") for name, value in model.state_dict().items() if value.item() == 7}
    return found | ({"calls"} if model.calls == 7 else set())


ALL = {"l1/weight", "l1/bias", "l2/weight", "l2/bias", "calls"}


@pytest.mark.parametrize(
    ("ignored", "left"),
    [
        (None, set()),
        ([], set()),
        ("l1/weight", {"l1/weight"}),
        ("weight", set()),
        (lambda name: name.startswith("l2"), {"l2/weight", "l2/bias"}),
        (["calls", lambda name: name == "l1/bias"], {"calls", "l1/bias"}),
        (("l1/bias", "not there"), {"l1/bias"}),
    ],
)
def test_ignored_names_stay_as_they_are(ignored, left):
    """A name is the whole one in the file; a function is asked for each; a list may mix them."""
    model = Model()
    load_npz(model_file(), model, ignore_names=ignored)
    assert loaded(model) == ALL - left


def test_a_name_includes_the_path_in_the_file():
    """As in Chainer."""
    model = Model()
    load_npz(model_file("predictor/"), model, path="predictor", ignore_names="predictor/l1/weight")
    assert loaded(model) == ALL - {"l1/weight"}


def test_an_ignored_entry_may_be_missing_and_no_other():
    """Strictness is about the rest; a Chainring file is read in the same way."""
    part = saved_by_chainer(**{"l1/weight": np.full((1, 1), 7, "f4"), "l1/bias": np.full(1, 7, "f4")})
    model = Model()
    load_npz(part, model, ignore_names=["calls", lambda name: name.startswith("l2")])
    assert loaded(model) == {"l1/weight", "l1/bias"}
    with pytest.raises(RuntimeError, match=r"l2\.bias"):
        load_npz(part, Model(), ignore_names=["calls", "l2/weight"])
    with pytest.raises(KeyError, match="calls"):
        load_npz(part, Model(), ignore_names=lambda name: name.startswith("l2"))
    file = io.BytesIO()
    save_npz(file, saved := Model())
    load_npz(file, other := Model(), ignore_names="l2/weight")
    assert torch.equal(other.l1.weight, saved.l1.weight)
    assert not torch.equal(other.l2.weight, saved.l2.weight)


@pytest.mark.parametrize("ignored", [3, [None], ["a", 4]])
def test_another_kind_of_name_is_refused(ignored):
    """Before anything is read."""
    with pytest.raises(ValueError, match="ignore_names is a name, a function"):
        load_npz(io.BytesIO(), Model(), ignore_names=ignored)
