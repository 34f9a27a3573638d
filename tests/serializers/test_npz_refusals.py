"""What `save_npz` and `load_npz` refuse, and what is left on the disk when they do."""

import errno
import io
import json
import os
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from chainring.serializers.npz import load_npz, save_npz
from chainring.serializers.protocol import Stateful


class Keeper(Stateful):
    """Keeps one value."""

    def __init__(self, value=None):
        self.value = value

    def serialize(self, serializer):
        self.value = serializer("value", self.value)


class Bomb:
    """Unpickled, it would end the process."""

    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def with_json(path, content):
    """An npz file of the array ``a`` whose JSON entry is ``content``."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    np.savez(path, **{"a": np.zeros((2, 3), "f4"), "chainring.json": np.frombuffer(text, "u1")})
    return path


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"a": [1, object()]}, r"value/a/1: builtins.object cannot be saved"),
        (np.array([None]), "dtype object"),
        (np.ma.zeros(2), "MaskedArray"),
        ({"w": torch.eye(2).to_sparse()}, r"value/w: a Tensor of layout torch.sparse_coo, dtype torch.float32"),
        (torch.empty(2, device="meta"), "device meta"),
    ],
    ids=["object", "object array", "masked", "sparse", "meta"],
)
def test_what_could_not_be_put_back_is_refused_by_name(tmp_path, value, kind):
    """At the save, with its path; nothing is written."""
    with pytest.raises(TypeError, match=kind):
        save_npz(tmp_path / "file.npz", Keeper(value))
    assert list(tmp_path.iterdir()) == []


def test_an_object_without_state_is_refused(tmp_path):
    """It says what to give it."""
    with pytest.raises(TypeError, match=r"int has no state .* give it serialize"):
        save_npz(tmp_path / "file.npz", 3)


def test_an_array_of_objects_is_not_unpickled(tmp_path):
    """The error names the entry and says why; parts beside it load."""
    np.savez(tmp_path / "file.npz", **{"bad/value": np.array(Bomb()), "good/value": np.ones(2)})
    with pytest.raises(ValueError, match=r"'bad/value' in .* Python objects, which NumPy pickles, and unpickling can run"):
        load_npz(tmp_path / "file.npz", Keeper(), path="bad")
    keeper = Keeper()
    load_npz(tmp_path / "file.npz", keeper, path="good")
    assert keeper.value.tolist() == [1, 1]


def test_loading_a_directory_names_load(tmp_path):
    """A snapshot is a directory."""
    with pytest.raises(ValueError, match=r"chainring\.serializers\.load"):
        load_npz(tmp_path, Keeper())


def test_a_missing_file_is_said(tmp_path):
    """With its name."""
    with pytest.raises(FileNotFoundError, match=r"no npz file .*nowhere\.npz"):
        load_npz(tmp_path / "nowhere.npz", Keeper())


@pytest.mark.parametrize("content", [b"", b"no zip at all" * 9, b"\x80\x04}."], ids=["empty", "text", "pickle"])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    """It says what an npz file is and names the loader of what `save` wrote."""
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=r"not an npz file, which is a zip.*serializers\.load"):
        load_npz(tmp_path / "file", Keeper())


def test_a_file_of_torch_save_names_its_loader(tmp_path):
    """It is a zip too."""
    torch.save({"a": torch.ones(1)}, tmp_path / "file")
    with pytest.raises(ValueError, match=r"file/data\.pkl.*torch\.load"):
        load_npz(tmp_path / "file", Keeper())


def test_a_truncated_file_is_refused_at_every_length():
    file = io.BytesIO()
    save_npz(file, Keeper((1, torch.arange(4.0))))
    whole = file.getvalue()
    for length in range(len(whole)):
        keeper = Keeper("kept")
        with pytest.raises(ValueError, match="truncated or damaged"):
            load_npz(io.BytesIO(whole[:length]), keeper)
        assert keeper.value == "kept"


@pytest.mark.parametrize("compression", [True, False])
def test_a_flipped_bit_never_changes_an_array(compression):
    """The zip's checksums are compared; only a bit of the compression that means nothing goes unnoticed."""
    file, value = io.BytesIO(), (1, torch.arange(4.0))
    save_npz(file, Keeper(value), compression=compression)
    whole, noticed, bits = file.getvalue(), 0, []
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            start = entry.header_offset + 30 + len(entry.filename) + 20  # the local header has a zip64 field
            bits.extend(range(8 * start, 8 * (start + entry.compress_size), 7))  # one in every byte
    for bit in bits:
        flipped, keeper = bytearray(whole), Keeper("kept")
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            load_npz(io.BytesIO(flipped), keeper)
        except ValueError as error:
            noticed += "damaged" in str(error)
        else:
            assert keeper.value[0] == 1
            assert torch.equal(keeper.value[1], value[1])
    assert compression or noticed == len(bits)


@pytest.mark.parametrize(
    "content",
    [
        b"no json", b"[" * 100_000, b"[]", b"{}", {"version": 1, "parts": 3, "values": {}, "tensors": {}},
        {"version": 1, "parts": [], "values": {}}, {"version": 2, "parts": [], "values": {}, "tensors": {}},
        *({"version": 1, "parts": [], "values": {"value": {"$tensor": "a"}}, "tensors": {"a": facts}} for facts in (
            3, {"dtype": "load"}, {"dtype": "bfloat16"}, {"order": [0, 0]}, {"order": 7},
        )),
        *({"version": 1, "parts": [], "values": {"value": value}, "tensors": {}} for value in (
            {"$tensor": "b"}, {"$array": "a"}, {"$array": ["<f4", [2, 3], "b"]}, {"$array": ["<f4", [3, 2], "a"]},
            {"$array": ["<f8", [2, 3], "a"]}, {"$array": [4, [2, 3], "a"]},
            {"$exec": "exit()"}, {"$dict": [[[], 1]]}, {"$dict": 3}, {"$bytes": "?"}, {"$float": "x"}, {"$tuple": 3},
        )),
    ],
    ids=lambda content: str(content)[:60],
)  # fmt: skip
def test_a_damaged_description_is_an_error_in_words(tmp_path, content):
    """Whatever stands in the JSON entry, it is data: nothing is looked up or called by a name from the file."""
    with pytest.raises(ValueError, match="truncated or damaged"):
        load_npz(with_json(tmp_path / "file.npz", content), Keeper())


def test_an_entry_that_is_there_twice_is_refused(tmp_path):
    """Readers would differ on which counts."""
    file = io.BytesIO()
    save_npz(file, nn.Linear(1, 1))
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(file, "a") as archive:
        archive.writestr("weight.npy", b"")
    with pytest.raises(ValueError, match="each once"):
        load_npz(file, nn.Linear(1, 1))


def test_a_save_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    """A full disk, met at the sync: the old file stays, nothing lies beside it, and the error says which file."""
    save_npz(tmp_path / "file.npz", Keeper(1))

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left.*file\.npz"):
        save_npz(tmp_path / "file.npz", Keeper(2))
    assert [file.name for file in tmp_path.iterdir()] == ["file.npz"]
    keeper = Keeper()
    load_npz(tmp_path / "file.npz", keeper)
    assert keeper.value == 1


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_after(tmp_path, monkeypatch):
    """One rename, of a file whose bytes are on the disk."""
    calls = []
    for call in (os.fsync, os.replace):
        monkeypatch.setattr(os, call.__name__, lambda *given, call=call: (calls.append(call.__name__), call(*given)))
    save_npz(tmp_path / "file.npz", Keeper(1))
    assert calls == ["fsync", "replace", "fsync"]


def test_only_regular_files_are_replaced(tmp_path):
    """A folder is refused; what a link points to is replaced, the link stays; a missing folder is said."""
    with pytest.raises(ValueError, match="is a folder or a device"):
        save_npz(tmp_path, Keeper(1))
    (tmp_path / "link").symlink_to("target")
    save_npz(tmp_path / "link", Keeper(1))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").stat().st_size > 0
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere.* make it first"):
        save_npz(tmp_path / "nowhere" / "file.npz", Keeper(1))


def test_equal_state_makes_equal_files():
    """No date or random name is in a file."""
    files = [io.BytesIO(), io.BytesIO()]
    for file in files:
        save_npz(file, Keeper({"a": torch.ones(2)}))
    assert files[0].getvalue() == files[1].getvalue()


def test_a_file_object_is_read_from_where_it_stands(tmp_path):
    """Written into an open file, read from one; a path is opened once and closed."""
    with open(tmp_path / "file", "w+b") as stream:
        save_npz(stream, Keeper("written"))
        keeper = Keeper()
        load_npz(stream, keeper)
        assert keeper.value == "written"
        assert not stream.closed
