"""Tensor files: every bit, dtype and stride comes back; a damaged or hostile file is an error."""

import json
import zlib

import pytest
import safetensors.torch
import torch

from chainring.serializers import _safetensors

LATER = [getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)]  # than torch 2.6
VIEWED = [torch.complex128, *LATER]  # stored as a view of another dtype
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, *VIEWED,
]  # fmt: skip
SHAPES = [(), (0,), (2, 0, 3), (1,), (5,), (2, 3, 4, 5)]


def random_bits(shape, dtype):
    """Any bits, so that NaN come with all their payloads."""
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(a, b):
    assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    assert torch.equal(bits(a), bits(b))


def write(path, tensors):
    with open(path, "xb") as file:
        return _safetensors.write(file, tensors)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_and_shape_comes_back_to_the_bit(path, dtype, shape):
    """Also beside a tensor of odd length, transposed and in steps; what is returned describes the file."""
    whole = random_bits(shape, dtype)
    tensors = {"odd": torch.ones(3, dtype=torch.uint8), "whole": whole}
    if len(shape) == 4:
        tensors |= {"last": whole.contiguous(memory_format=torch.channels_last), "turned": whole.permute(3, 1, 0, 2)}
    assert write(path, tensors)[:2] == (path.stat().st_size, zlib.crc32(path.read_bytes()))
    found = _safetensors.read(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same(found[name], tensor)


def test_a_file_of_tensors_on_a_device_has_their_values(path, device):
    write(path, {"x": torch.arange(999, device=device)})
    assert _safetensors.read(path)["x"].tolist() == list(range(999))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_reader_of_safetensors_opens_the_file(path, dtype):
    """It sees every value in row-major order; a viewed dtype as what it is stored as."""
    tensor = random_bits((2, 3, 4, 5), dtype)
    write(path, {"a": tensor, "b": tensor.contiguous(memory_format=torch.channels_last)})
    for found in safetensors.torch.load_file(path).values():
        assert torch.equal(bits(found), bits(tensor))
        assert (found.dtype == dtype) == (dtype not in VIEWED)


def test_the_data_begin_at_a_multiple_of_eight_bytes(path):
    """And every tensor at a multiple of its item, whatever the order of the names."""
    for length in range(1, 9):
        file = path.with_name(str(length))
        write(file, {"n" * length: torch.ones(3, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.float64)})
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        assert size % 8 == 0
        assert json.loads(content[8 : 8 + size])["b"]["data_offsets"] == [0, 8]


def test_a_view_comes_back_dense_as_a_clone_would(path):
    """A slice, an expanded, a conjugated and a negated view hold their values; holes of the storage are not stored."""
    base = torch.randn(100, 4, dtype=torch.complex64)
    views = {"slice": base[::2, 1:3], "expanded": base[:1].expand(3, 4), "conj": base.conj(), "imag": base.conj().imag}
    size, _, _ = write(path, views)
    assert size < 8000
    for name, tensor in _safetensors.read(path).items():
        assert_same(tensor, views[name].clone().resolve_conj().resolve_neg())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("shape", [(3, 1000, 1200), (1, 2, 1_500_000), (1_500_000, 2, 1)], ids=str)
def test_tensors_of_many_chunks_come_back(path, shape, order):
    """More than one write per tensor, in row-major and in another order."""
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape).permute(order)
    assert tensor.nbytes > _safetensors.CHUNK
    size, crc, parts = write(path, {"a": tensor, "b": tensor[:1, :1]})
    content = path.read_bytes()
    assert (size, crc) == (len(content), zlib.crc32(content))
    ends = [8 + int.from_bytes(content[:8], "little"), size - tensor[:1, :1].nbytes, size]
    assert parts == "".join(f"{zlib.crc32(content[a:b]):08x}" for a, b in zip([0, *ends], ends, strict=False))
    assert_same(_safetensors.read(path)["a"], tensor)


def test_tied_tensors_are_stored_once_and_come_back_tied(path):
    """The same view of the same storage; another view of it is stored for itself."""
    weight = torch.nn.Parameter(torch.randn(10, 10))
    size, _, _ = write(path, {"a": weight, "b": weight, "c": weight.detach(), "t": weight.T})
    assert size < 1300
    found = _safetensors.read(path)
    assert found["a"] is found["b"] is found["c"]
    assert found["a"].data_ptr() != found["t"].data_ptr()
    for name in found:
        assert_same(found[name], weight.T if name == "t" else weight.detach())


def test_what_was_read_does_not_follow_the_file(path):
    """It is a copy in memory of its own: the file may be overwritten."""
    write(path, {"a": torch.ones(4)})
    found = _safetensors.read(path)["a"]
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert found.tolist() == [1, 1, 1, 1]


UNSTORABLE = {
    "dtype": lambda: torch.ones(4, dtype=torch.uint8).view(torch.bits8),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.empty(1, device="meta"),
    "subclass": lambda: torch.ones(1).as_subclass(type("Mine", (torch.Tensor,), {})),
    "list": lambda: [1.0],
}


@pytest.mark.parametrize("kind", UNSTORABLE)
def test_a_tensor_that_the_format_lacks_is_refused_by_name(path, kind):
    """Before anything is written."""
    with pytest.raises(TypeError, match=r"^model/w: "):
        write(path, {"a": torch.ones(1), "model/w": UNSTORABLE[kind]()})
    assert path.read_bytes() == b""


def test_the_name_of_the_metadata_is_refused(path):
    """It is taken by the format."""
    with pytest.raises(ValueError, match="give it another"):
        write(path, {"__metadata__": torch.ones(1)})


def file_of(header, data=bytes(16), size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def marked(mark, **entries):
    notes = mark if isinstance(mark, str) else json.dumps(mark)
    return file_of({"__metadata__": {"chainring": notes}, **(entries or {"a": entry([2, 2], 0, 16)})})


HOSTILE = {
    "empty": b"", "short": b"\x08", "pickle": b"\x80\x04\x95" + bytes(50), "zip": b"PK\x03\x04" + bytes(50),
    "huge header": file_of(b"{}", size=2**62), "longest header": file_of(b"{}", size=2**64 - 1),
    "header past the end": file_of({"a": entry([4], 0, 16)}, size=1000), "no JSON": file_of(b"{{{{"),
    "deep": file_of(b"[" * 1_000_000), "not UTF-8": file_of(b'{"\xff": 1}'),
    "truncated": file_of({"a": entry([4], 0, 16)}, bytes(15)),
    "trailing": file_of({"a": entry([4], 0, 16)}, bytes(17)),
    "overlap": file_of({"a": entry([3], 0, 12), "b": entry([2], 8, 16)}), "same place": file_of(
        {"a": entry([4], 0, 16), "b": entry([4], 0, 16)}), "hole": file_of({"a": entry([1], 0, 4), "b": entry([2], 8, 16)}),
    "backwards": file_of({"a": entry([4], 16, 0)}), "negative": file_of({"a": entry([-4], 0, 16)}),
    "wrong shape": file_of({"a": entry([5], 0, 16)}), "overflow": file_of({"a": entry([2**62, 2**62], 0, 16)}),
    "huge": file_of({"a": entry([2**40], 0, 2**42)}), "dtype": file_of({"a": entry([4], 0, 16, "OBJ")}),
    "marks no JSON": marked("{"), "marks deep": marked("[" * 1_000_000), "marks list": marked([]),
    "mark list": marked({"a": []}),
    "mark unknown": marked({"a": {"import": "os"}}), "mark of none": marked({"x": {"strides": [1]}}),
    "strides huge": marked({"a": {"strides": [2**50, 1]}}), "strides overlap": marked({"a": {"strides": [1, 1]}}),
    "strides zero": marked({"a": {"strides": [0, 0]}}), "strides negative": marked({"a": {"strides": [-1, 1]}}),
    "strides few": marked({"a": {"strides": [1]}}), "strides float": marked({"a": {"strides": [2.0, 1]}}),
    "strides beyond 64 bits": marked({"a": {"strides": [2**70, 1]}}), "view unknown": marked({"a": {"dtype": "float32"}}),
    "view of another": marked({"a": {"dtype": "complex128"}}), "view of no pairs": marked(
        {"a": {"dtype": "complex128"}}, a=entry([2, 1], 0, 16, "F64")),
    "tied to none": marked({"b": {"same_as": "x"}}),
    "tied in a circle": marked({"b": {"same_as": "c"}, "c": {"same_as": "b"}}),
    "tied to itself": marked({"a": {"same_as": "a"}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_damaged_or_hostile_file_is_a_clear_error(path, kind):
    """A ValueError that names the file, without asking for the memory that a header claims."""
    path.write_bytes(HOSTILE[kind])
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged or not a tensor file: .*\. Use another snapshot"):
        _safetensors.read(path)
