"""Models and whole objects in npz files: what goes in comes back, NumPy reads it, and nothing is unpickled."""

import copy
import io
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import resume_program
from chainring.nn import Classifier
from chainring.serializers.npz import load_npz, save_npz
from chainring.serializers.protocol import Stateful


class Keeper(Stateful):
    """Keeps one value; as an extension it does nothing."""

    def __init__(self, value=None):
        self.value = value

    def __call__(self, trainer):
        pass

    def serialize(self, serializer):
        self.value = serializer("value", self.value)


class Pair:
    """State by the pair of PyTorch alone."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)


class Trainerlike(Stateful):
    def __init__(self):
        self.iteration, self.model = 7, Classifier(Net())

    def serialize(self, serializer):
        self.iteration = serializer("iteration", self.iteration)
        serializer["updater"].visit("model:main", self.model)


def same(one, two):
    """Equal in value and in kind, all the way down; tensors and arrays also in dtype, shape and bits."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == two.dtype and one.shape == two.shape and one.stride() == two.stride()
        return alike and torch.equal(one.nan_to_num(), two.nan_to_num())
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return same([list(item) for item in one.items()], [list(item) for item in two.items()])
    return repr(one) == repr(two)


def returned(value):
    """What a value is after a save and a load."""
    file, keeper = io.BytesIO(), Keeper()
    save_npz(file, Keeper(value))
    load_npz(file, keeper)
    return keeper.value


def same_parameters(one, two):
    ours, theirs = one.state_dict(), two.state_dict()
    return list(ours) == list(theirs) and all(same(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("compression", [True, False])
def test_a_model_comes_back(tmp_path, compression):
    """Parameters and buffers of another instance become those that were saved."""
    saved, other = Net(), Net()
    save_npz(tmp_path / "model", saved, compression=compression)
    load_npz(str(tmp_path / "model"), other)
    assert same_parameters(saved, other)
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_the_file_of_a_model_is_plain_arrays_by_path(tmp_path):
    """NumPy, and so Chainer, reads it without knowing of Chainring."""
    model = Net()
    save_npz(tmp_path / "model.npz", model)
    with np.load(tmp_path / "model.npz", allow_pickle=False) as arrays:
        assert sorted(arrays.files) == sorted(name.replace(".", "/") for name in model.state_dict())
        assert np.array_equal(arrays["l1/weight"], model.l1.weight.detach().numpy())


@pytest.mark.parametrize("swapped", [False, True])
def test_a_file_that_numpy_wrote_loads_into_a_model(tmp_path, swapped):
    """Plain arrays by path, as Chainer writes them, also with the bytes of another machine or by columns."""
    model = Net()
    arrays = {name.replace(".", "/"): np.full(value.shape, 2.0, "f4", "F") for name, value in model.state_dict().items()}
    np.savez(tmp_path / "model.npz", **{key: a.astype(">f4") if swapped else a for key, a in arrays.items()})
    load_npz(tmp_path / "model.npz", model)
    assert all((value == 2).all() for value in model.state_dict().values())


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(10**40), 0.1, -0.0, float("inf"), float("-inf"), float("nan"), 1j, "", "aé\0", b"\0\xff", (),
        [], {}, (1, (2.0, [None])), {"a": {"b": (1,)}}, {1: 2, None: 3, (1, 2): 4, "1": 5}, {"$tuple": [1]},
        {"$array": "value"},
        {1, 2}, frozenset({3}), torch.Size([2]), Counter({30: 1, 80: 2}), OrderedDict(b=1, a=2),
        np.float64(0.1), np.int8(3), np.bool_(True),
        np.arange(6.0).reshape(2, 3), np.array(2), np.array(["a", "bc"]), np.zeros((2, 0), ">i2"),
        np.zeros(2, [("x", "f4"), ("y", "i8")]), np.array("2020-01-01", "M8[D]"),
        {"a": torch.ones(2), "b/a": [torch.zeros(1), {"c": torch.ones(1)}], "\0": torch.ones(3), "": torch.ones(4)},
        {1: torch.ones(2), "1": torch.zeros(2)},
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_comes_back_in_its_kind(value):
    """Plain values, containers and arrays are what they were, to the type of a key and the sign of a zero."""
    assert same(returned(value), value)


NUMPY_HAS = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]
NUMPY_LACKS = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
NUMPY_LACKS += ["float8_e8m0fnu"] if hasattr(torch, "float8_e8m0fnu") else []  # not in torch 2.6


@pytest.mark.parametrize("dtype", [*NUMPY_HAS, "complex64", "complex128", *NUMPY_LACKS])
def test_a_tensor_of_any_dtype_comes_back(dtype):
    """Also of those that NumPy lacks, without dimensions, or empty; alone and inside a container."""
    tensor = torch.tensor([[1, 0, 1], [1, 1, 0]]).to(getattr(torch, dtype))
    for value in (tensor, tensor[0, 0], tensor[:0]):
        back, [inside] = returned((value, [value]))
        assert back.dtype == value.dtype
        assert back.shape == value.shape
        assert same(back.float(), value.float()) if not value.is_complex() else same(back, value)
        assert same(inside.cfloat(), back.cfloat())
        assert returned(value).dtype == value.dtype


def test_a_file_of_tensors_on_a_device_has_their_values(tmp_path, device):
    model = nn.Linear(64, 64)
    save_npz(tmp_path / "a.npz", copy.deepcopy(model).to(device))
    with np.load(tmp_path / "a.npz") as arrays:
        np.testing.assert_array_equal(arrays["weight"], model.weight.detach().numpy())


def test_the_order_of_dimensions_in_memory_comes_back():
    """Channels last stays channels last, a conjugate view is resolved, an expanded tensor is written out."""
    tensor = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert same(returned(tensor), tensor)
    assert same(returned([tensor.permute(3, 1, 0, 2)]), [tensor.permute(3, 1, 0, 2)])
    assert torch.equal(returned(torch.tensor([1j]).conj()), torch.tensor([-1j]))
    assert torch.equal(returned(torch.ones(1).expand(3)), torch.ones(3))


def test_names_that_look_like_others_stay_apart():
    """Keys with suffixes, slashes, zeros, and the names of the format itself."""
    names = ["file", "allow_pickle", "a", "a.npy", "a/0", "../b", "chainring.json", "a/0_", "z\0", "z", "é"]
    state = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}

    class Named(Stateful):
        got = None

        def serialize(self, serializer):
            self.got = {name: serializer(name, value) for name, value in state.items()}
            self.inner = serializer("a\\", [torch.zeros(1)]), serializer("b", {"": 1, "x": torch.ones(1)})

    file, named = io.BytesIO(), Named()
    save_npz(file, Named())
    load_npz(file, named)
    assert same(named.got, state)
    assert same(named.inner, ([torch.zeros(1)], {"": 1, "x": torch.ones(1)}))


def test_an_optimizer_and_a_scheduler_come_back():
    """Any object with PyTorch's pair: tuples, integer keys and counters survive."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 2])
    model.norm(model.l1(torch.ones(2, 3))).square().sum().backward()
    optimizer.step()
    scheduler.step()
    for saved in (optimizer, scheduler):
        file, other = io.BytesIO(), Pair(None)
        save_npz(file, saved)
        load_npz(file, other)
        assert same(other.state, saved.state_dict())


@pytest.mark.parametrize("k", [0, 3, 7])
def test_a_trainer_continues_from_an_npz_file(tmp_path, k):
    """A whole trainer: what runs after the load is what would have run."""

    def run(out, stop, load=None):
        made = resume_program.build(str(tmp_path / out), stop=(stop, "iteration"))
        if load is not None:
            load_npz(load, made[0])
        made[0].run()
        return made

    save_npz(tmp_path / "run.npz", run("first", k)[0])
    whole, resumed = (
        resume_program.outcome(*run("whole", 9)),
        resume_program.outcome(*run("second", 9, tmp_path / "run.npz")),
    )
    for part in ("iteration", "parameters", "adam", "log", "observation", "generators"):
        assert resumed[part] == whole[part], part


def test_an_extension_registered_after_the_load_gets_its_state(tmp_path):
    """State that waits for its extension outlives the reading of the file."""
    first, *_ = resume_program.build(str(tmp_path / "a"), stop=(3, "iteration"))
    first.extend(Keeper((1, torch.ones(2))), name="late")
    first.run()
    save_npz(tmp_path / "run.npz", first)
    second, *_ = resume_program.build(str(tmp_path / "b"), stop=(3, "iteration"))
    load_npz(tmp_path / "run.npz", second)
    late = Keeper()
    second.extend(late, name="late")
    second.run()
    assert same(late.value, (1, torch.ones(2)))


@pytest.mark.parametrize("path", ["updater/model:main/predictor", "/updater/model:main/predictor/"])
def test_a_part_loads_by_its_path(tmp_path, path):
    """With or without slashes at its ends."""
    whole, part = Trainerlike(), Net()
    save_npz(tmp_path / "run.npz", whole)
    load_npz(tmp_path / "run.npz", part, path=path)
    assert same_parameters(part, whole.model.predictor)


def test_a_path_that_is_not_there_is_named(tmp_path):
    """So is what the file holds; without strict too, because nothing would be loaded."""
    save_npz(tmp_path / "run.npz", Trainerlike())
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"nothing under 'updater/model:mian'; it holds updater/model:main/pred"):
            load_npz(tmp_path / "run.npz", Net(), path="updater/model:mian", strict=strict)


def test_a_model_that_lies_deeper_is_found(tmp_path):
    """A trainer's file given to a model without a path says which path."""
    save_npz(tmp_path / "run.npz", Trainerlike())
    with pytest.raises(ValueError, match=r"pass one of these as path: updater/model:main/predictor/"):
        load_npz(tmp_path / "run.npz", Net())


def test_missing_and_unexpected_parameters_raise_unless_not_strict(tmp_path):
    """Not strict, what is missing stays as it is."""
    save_npz(tmp_path / "small.npz", nn.ModuleDict({"l1": nn.Linear(3, 4)}))
    save_npz(tmp_path / "large.npz", Net())
    model = Net()
    before = model.norm.weight.clone()
    with pytest.raises(RuntimeError, match=r"Missing.*norm\.weight"):
        load_npz(tmp_path / "small.npz", model)
    with pytest.raises(RuntimeError, match=r"Unexpected.*norm\.weight"):
        load_npz(tmp_path / "large.npz", nn.ModuleDict({"l1": nn.Linear(3, 4)}))
    load_npz(tmp_path / "small.npz", model, strict=False)
    assert torch.equal(model.norm.weight, before)
    with np.load(tmp_path / "small.npz") as arrays:
        assert np.array_equal(model.l1.weight.detach().numpy(), arrays["l1/weight"])


def test_a_missing_value_raises_unless_not_strict(tmp_path):
    """The file of a model given to an object of another kind names the first entry that is not there."""
    save_npz(tmp_path / "model.npz", Net())
    keeper = Keeper("kept")
    with pytest.raises(KeyError, match=r"no 'value'"):
        load_npz(tmp_path / "model.npz", keeper)
    load_npz(tmp_path / "model.npz", keeper, strict=False)
    assert keeper.value == "kept"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own, where it imports its compiler
def test_the_file_of_a_compiled_model_is_that_of_the_model(tmp_path):
    """The wrapper of torch.compile does not reach the names."""
    model, other = Net(), Net()
    save_npz(tmp_path / "model.npz", torch.compile(model, backend="eager"))
    load_npz(tmp_path / "model.npz", other)
    assert same_parameters(model, other)
