"""State as text: the very same values and types come back, and nothing else is read."""

import json
import struct
from collections import Counter, OrderedDict, deque, namedtuple
from enum import IntEnum
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from chainring import serializers
from chainring.serializers import _values
from chainring.serializers._values import MAX_DEPTH, decode


def same(a, b):
    """Equal in type and in every bit, through all containers."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and same(a.numpy(), b.numpy())
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def encode(state):
    values, tensors = _values.encode(state)
    return _values.to_text(values), tensors


def back(value):
    text, tensors = encode({"path/to": value})
    return decode(text, tensors)["path/to"]


VALUES = [
    None, True, False, 0, -1, 2**53 - 1, 2**53, -(2**63), 10**5000, -(10**5000),
    0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, float("inf"), float("-inf"), float("nan"),
    1 + 2j, complex(-0.0, float("nan")), complex(float("-inf"), -0.0),
    "", "text", "é\0\n\U0001f600", "$tensor", '{"$tensor": "a"}',
    b"", b"\x00\xff", bytearray(b"\x01"), (), (1,), (1, (2, [3])), [], [[], [1, "a"]], torch.Size([2, 3]),
    {}, {"a": 1}, {1: "int", "1": "str", None: 0, 2.5: 1, (1, "a"): 2, b"b": 3, 10**5000: 4}, {True: 1},
    {float("nan"): 1}, {np.int64(3): 1}, {"$tensor": "a"}, {"$dict": [[1, 2]]}, {"$": 1, "a": 2}, {"a": {"$tuple": [1]}},
    OrderedDict([("b", 1), ("a", (1,))]), OrderedDict(), Counter({80: 1, 120: 2}), Counter(), Counter("aab"),
    deque(), deque([1, (2,)], 3), [deque([deque(maxlen=0)])], torch.float32, {"dtype": [torch.bfloat16, torch.complex64]},
    {1, "a"}, frozenset({1, (2,)}), {frozenset({1}): 1}, [OrderedDict([(1, Counter())])],
    np.str_("a\0"), np.bytes_(b"b\0"), np.str_(""), np.bool_(True), np.float64("nan"), np.datetime64("NaT", "s"),
    np.datetime64("2026-01-02T03:04:05", "25s"), np.timedelta64(5, "ns"), np.longdouble("0.1"), np.clongdouble(1j),
]  # fmt: skip
NUMBERS = [
    "?",
    "i1",
    "i2",
    "i4",
    "i8",
    "u1",
    "u2",
    "u4",
    "u8",
    "f2",
    "f4",
    "f8",
    "c8",
    "c16",
    ">f4",
    ">i8",
    "M8[ns]",
    "m8[3h]",
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_plain_value_comes_back_with_its_type_and_bits(value):
    """Alone, in a list, and as an item of a dict with keys that are no strings."""
    for wrapped in (value, [value], {1: value}):
        assert same(back(wrapped), wrapped)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_arrays_and_scalars_of_numpy_come_back_as_such(dtype):
    """Scalars, 0-dimensional, empty, transposed, reversed and read-only arrays, in either byte order."""
    array = np.arange(6).astype("u1").astype(dtype).reshape(2, 3)
    read_only = array.copy()
    read_only.flags.writeable = False
    for value in (array, array[0, 1], array[0, 1, ...], array[:0], array.T, array[::-1, ::2], read_only):
        assert same(back(value), value)
        assert same(back([value])[0], value)


@pytest.mark.parametrize("dtype", ["U3", "S3", ">U2"])
def test_arrays_of_strings_come_back(dtype):
    """Fixed-width strings and bytes, of either byte order."""
    array = np.array([["a", "bc"], ["", "def"]]).astype(dtype)
    assert same(back(array), array)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_tensors_are_the_same_if_their_elements_are(dtype):
    """Also of a dtype that NumPy lacks, which settings and counts of metrics may have."""
    one, again, other = (torch.tensor(numbers).to(dtype) for numbers in ([1.0, 2.0], [1.0, 2.0], [1.0, 0.0]))
    found = [_values.is_same_value({"a": one}, {"a": each}) for each in (again, other, one[:1])]
    assert found == [True, False, False]


def test_an_array_that_came_back_is_a_copy():
    """Writing to it changes neither the file's tensor nor what was encoded."""
    array = np.zeros(3)
    text, tensors = encode({"a": array})
    decode(text, tensors)["a"][:] = 1
    assert not decode(text, tensors)["a"].any()
    assert not array.any()


def test_a_column_major_array_stays_column_major():
    """Memory order decides the order of sums, so it is kept for numbers."""
    assert back(np.asfortranarray(np.ones((2, 3)))).flags.f_contiguous


def test_tensors_are_named_by_their_paths():
    """A whole value has the path as its name; one within a container gets a path below."""
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    text, tensors = encode({"model/w": one, "lbfgs": {"state": [(two,), {7: three}]}})
    assert {name: len(tensor) for name, tensor in tensors.items()} == {
        "model/w": 1, "lbfgs/state/0/0": 2, "lbfgs/state/1/7": 3,
    }  # fmt: skip
    assert same(decode(text, tensors), {"model/w": one, "lbfgs": {"state": [(two,), {7: three}]}})


def test_tensors_whose_paths_collide_stay_apart():
    """``{"a": {"b": x}, "a/b": y}``: the whole value keeps its path, in whichever order they come."""
    x, y, z = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    for state in ({"a": {"b": x, 1: y, "1": z}, "a/b": y}, {"a/b": y, "a": {"b": x, 1: y, "1": z}}):
        text, tensors = encode(state)
        assert tensors["a/b"][0] == 1
        assert same(decode(text, tensors), state)


def test_a_parameter_is_saved_as_a_tensor(tmp_path):
    """It is not copied before it is written, and leaves its graph."""
    state = {"w": torch.nn.Parameter(torch.ones(2))}
    assert encode(state)[1]["w"] is state["w"]
    serializers.save(tmp_path / "saved", SimpleNamespace(state_dict=lambda: state, load_state_dict=state.update))
    loaded = {}
    serializers.load(tmp_path / "saved", SimpleNamespace(state_dict=dict, load_state_dict=loaded.update))
    assert type(loaded["w"]) is torch.Tensor
    assert not loaded["w"].requires_grad
    assert loaded["w"].tolist() == [1.0, 1.0]


def test_state_of_schedulers_and_optimizers_comes_back():
    """``MultiStepLR`` holds a Counter, ``ReduceLROnPlateau`` an infinity, Adam and LBFGS tensors."""
    weight = torch.nn.Parameter(torch.ones(2))
    adam, lbfgs = torch.optim.Adam([weight]), torch.optim.LBFGS([weight])
    multistep = torch.optim.lr_scheduler.MultiStepLR(adam, [2, 3])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam)
    weight.grad = torch.ones(2)
    adam.step()
    lbfgs.step(lambda: (weight**2).sum())
    state = {str(i): part.state_dict() for i, part in enumerate((adam, lbfgs, multistep, plateau))}
    text, tensors = encode(state)
    assert same(decode(text, tensors), state)


Point = namedtuple("Point", "x")
Colour = IntEnum("Colour", "RED")
UNSAVABLE = [
    object(), print, int, Point(1), Colour.RED, range(3), type("Text", (str,), {})("a"), torch.device("cpu"),
    np.array([None]), np.array([(1,)], dtype=[("a", int)]), np.ma.masked_array([1]), np.void(b"a"),
    torch.eye(2).to_sparse(), torch.empty(1, device="meta"), torch.ones(1).as_subclass(type("Mine", (torch.Tensor,), {})),
]  # fmt: skip


@pytest.mark.parametrize("value", UNSAVABLE, ids=lambda value: type(value).__name__)
def test_what_cannot_be_restored_is_refused_with_its_path(value):
    """The error at saving names the place within the containers, the type and a remedy."""
    with pytest.raises(TypeError, match=rf"^extensions/mine/key/1: .*{type(value).__name__}.*save"):
        encode({"extensions/mine": {"key": (1, value)}})


@pytest.mark.parametrize("key", [object(), torch.ones(1), (1, object())], ids=["object", "tensor", "within"])
def test_a_key_that_cannot_be_restored_is_refused(key):
    """The error names the path and the type of the key."""
    with pytest.raises(TypeError, match=r"^a/.*(object|Tensor)"):
        encode({"a": {key: 1}})


def test_a_container_that_holds_itself_is_refused():
    """Instead of endless recursion."""
    value = []
    value.append(value)
    with pytest.raises(TypeError, match=r"a/0/0.*holds itself"):
        encode({"a": value})


@pytest.mark.parametrize("kind", ["list", "dict", "keys"])
def test_what_may_be_saved_can_be_read(kind):
    """The deepest nesting that `encode` takes is one that `decode` takes; one more is refused."""
    value = 1
    for _ in range(MAX_DEPTH):
        value = {"list": [value], "dict": {"a": value}, "keys": {1: value}}[kind]
    assert same(back(value), value)
    with pytest.raises(TypeError, match=f"{MAX_DEPTH} containers deep"):
        encode({"a": [value]})


def test_a_path_must_be_text():
    """Other keys of the flat dictionary are refused."""
    with pytest.raises(TypeError, match="a path of state is a str"):
        encode({1: 1})


def test_a_name_that_is_the_path_of_its_place_is_not_written_twice():
    """A long path takes its own length and little more, in dicts with keys of any type too; a name is read as well."""
    path = "updater/model:main/" + "layer/" * 50 + "weight"
    state = {path: torch.ones(2), "a": {path: [torch.zeros(1), {2**60: torch.ones(3), (1, 2): torch.ones(4)}]}}
    text, tensors = encode(state)
    assert len(text) < 2 * len(path) + 200
    assert same(decode(text, tensors), state)
    assert tensors.keys() >= {path, f"a/{path}/0", f"a/{path}/1/{2**60:x}", f"a/{path}/1/(1, 2)"}
    assert same(decode(document('{"b": {"$tensor": "c"}}'), {"c": state[path]}), {"a": {"b": state[path]}})


def test_names_that_a_file_keeps_for_itself_are_not_given_to_tensors():
    """Nor those that a zip would cut."""
    state = {name: torch.ones(1) for name in ("__metadata__", "chainring.json", "a", "a\0")}
    text, tensors = encode(state)
    assert not {"__metadata__", "chainring.json", "a\0"} & tensors.keys()
    assert same(decode(text, tensors), state)


def document(value):
    return b'{"format": 1, "state": {"a": %s}}' % value.encode()


HOSTILE = [
    b"", b"{}", b"[]", b"\xff", b"\xef\xbb\xbf{}", "{}".encode("utf-16"), b"\x80\x04N.", b'{"format": 2, "state": {}}',
    b'{"format": true, "state": {}}', b'{"format": 1, "state": []}', b'{"format": 1, "format": 1, "state": {}}',
    b"[" * 10_000_000, b'{"format": 1, "state": ' * 1_000_000,
    *map(document, [
        "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), '{"$tuple": [' * 200 + "]}" * 200, '{"b": 1, "b": 2}',
        "NaN", "Infinity", "1e999", "1" * 5000, '{"$tensor": "missing"}', '{"$tensor": ["t"]}', '{"$tensor": {"$text": ""}}',
        '{"$here": 0}', '{"$here": 1}', '{"$here": "t"}', '{"$here": 0, "$tensor": "t"}',
        '{"$pickle": "gASVAAA="}', '{"$import": "os.system"}', '{"$tuple": [], "$set": []}', '{"$tuple": [], "a": 1}',
        '{"a": 1, "$tuple": []}', '{"$tuple": 1}', '{"$tuple": {"a": 1}}', '{"$set": [[1]]}', '{"$size": ["a"]}',
        '{"$dict": [[1, 2], [1, 3]]}', '{"$dict": [[1, 2], [true, 3]]}', '{"$dict": [[[1], 2]]}', '{"$dict": [1]}',
        '{"$dict": [[1, 2, 3]]}', '{"$counter": 5}', '{"$int": 5}', '{"$int": "x"}', '{"$float": "1.5"}', '{"$float": 3}',
        '{"$float": "fff80000deadbeef"}', '{"$float": "zzzzzzzzzzzzzzzz"}', '{"$float": []}', '{"$complex": [1]}',
        '{"$complex": ["1", "2"]}', '{"$bytes": "a"}', '{"$bytes": "é"}', '{"$bytes": 1}', '{"$text": "gICA"}',
        '{"$numpy": ["O", "MTIzNDU2Nzg="]}', '{"$numpy": ["|O8", "MTIzNDU2Nzg="]}', '{"$numpy": ["<f8", ""]}',
        '{"$numpy": ["<f7", "MTIzNDU2Nzg="]}', '{"$numpy": ["<M8[os.system]", "MTIzNDU2Nzg="]}',
        '{"$numpy": ["<M8[xx]", "MTIzNDU2Nzg="]}',
        '{"$numpy": ["i4,i4", "MTIzNDU2Nzg="]}', '{"$numpy": ["U", 1]}', '{"$numpy": 1}', '{"$array": ["<f8", [9], "t"]}',
        '{"$array": ["<f4", [2], "t"]}', '{"$array": ["<U99999999", [1], "t"]}', '{"$array": [">f8", [1000000000000], "t"]}',
        '{"$array": ["|O8", [2], "t"]}', '{"$array": ["<f8", [2]]}', '{"$array": ["<f8", [2.0], "t"]}',
        '{"$array": ["<f8", 2, "t"]}', '{"$array": ["<f8", [2], "x"]}', '{"$array": ["<f8", [[2]], "t"]}',
    ]),
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: f"{text[:60]!a}")
def test_text_that_encode_does_not_write_is_refused(text):
    """A ValueError, whatever the text is: no other error, no code that runs."""
    with pytest.raises(ValueError, match=r"\w+"):
        decode(text, {"t": torch.ones(2, dtype=torch.float64)})


def test_the_text_is_strict_json():
    """Any reader of JSON opens it, without NaN or Infinity as bare words."""

    def refuse(word):
        raise AssertionError(word)

    text, _ = encode({"a": [float("nan"), float("inf"), np.float32("nan"), {float("inf"): 1}]})
    assert json.loads(text, parse_constant=refuse)["state"]["a"][0] == {"$float": "nan"}
