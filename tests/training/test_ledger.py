"""The ledger of a run: what was written is read again to the bit, and what was not written is not made up."""

import os
import re
import struct
import zlib

import numpy as np
import pytest

from chainring.training._ledger import HEAD, LOSS_TYPES, MAGIC, ROWS, Block, Ledger, LedgerError, cut_back, loss_value

FLOAT32 = LOSS_TYPES.index("float32")
TENSORS = ["updater/model:main/weight", "updater/model:main/bias"]


def block(number, rows=ROWS, losses=("main/loss",), digests=()):
    first = number * ROWS + 1
    content = [(first + i, dict.fromkeys(losses, (0x3F800000 + i, FLOAT32))) for i in range(rows)]
    tensors = {iteration: (TENSORS, np.array([iteration, 2**64 - iteration], np.uint64)) for iteration in digests}
    return Block(number, first, content, tensors, 2**64 - 1 - number)


def write(tmp_path, *blocks, known=()):
    path = tmp_path / "recorder.bin"
    text = HEAD
    for each in blocks:
        text += each.encode(known)
        known = TENSORS if each.digests else known
    path.write_bytes(text)
    return path


def test_what_was_written_is_read(tmp_path):
    """Bits, digests and the names of tensors come back as they were, the names from where they were last said."""
    ledger = Ledger.read(write(tmp_path, block(0), block(1, digests=[40, 64]), block(2, 5, digests=[66])))
    assert ledger.note is None
    assert ledger.iterations.tolist() == list(range(1, 70))
    assert ledger.names == ("main/loss",)
    row = ledger.row(66)
    assert (row.batch, row.generators, row.losses) == (66, None, {"main/loss": (0x3F800001, FLOAT32)})
    assert {i: ledger.row(i).generators for i in (32, 64, 69)} == {32: 2**64 - 1, 64: 2**64 - 2, 69: 2**64 - 3}
    assert np.flatnonzero(ledger.generators).tolist() == [31, 63, 68]
    assert loss_value(*row.losses["main/loss"]) == np.nextafter(np.float32(1), np.float32(2))
    assert ledger.row(0) is None
    assert ledger.row(70) is None
    expected = {i: {TENSORS[0]: i, TENSORS[1]: 2**64 - i} for i in (40, 64, 66)}
    assert ledger.digests == expected


@pytest.mark.parametrize("iteration", [0, 1, 31, 32, 33, 40, 63, 64, 65, 69, 70, 10**6])
def test_a_ledger_is_cut_back_to_any_iteration(tmp_path, iteration):
    """What is of it and before stays as it was, and more can be appended."""
    whole = Ledger.read(
        path := write(tmp_path, block(0, digests=[7]), block(1, digests=[40, 64]), block(2, 5, digests=[66]))
    )
    path.write_bytes(cut_back(path.read_bytes(), path, iteration))
    cut = Ledger.read(path)
    assert cut.note is None
    assert cut.iterations.tolist() == [i for i in whole.iterations.tolist() if i <= iteration]
    for i in cut.iterations.tolist():
        assert cut.row(i).losses == whole.row(i).losses
        assert cut.row(i).batch == whole.row(i).batch
    assert cut.digests == {i: tensors for i, tensors in whole.digests.items() if i <= iteration}


def test_a_file_that_no_recorder_has_written_is_not_read_whole(tmp_path):
    """A sparse one takes no space on the disk, and would take all memory."""
    path = write(tmp_path, block(0))
    os.truncate(path, 10 << 30)
    with pytest.raises(LedgerError, match="has 10,737,418,240 bytes, and at most 2,147,483,648 are read"):
        Ledger.read(path)


def test_every_type_of_a_loss_is_read_as_its_number():
    """NaN of any bits is NaN, and -0.0 has its sign."""
    halves = {"float16": 0xBE00, "bfloat16": 0xBFC0, "float32": 0xBFC00000, "float64": 0xBFF8 << 48}
    assert {name: loss_value(bits, LOSS_TYPES.index(name)) for name, bits in halves.items()} == dict.fromkeys(halves, -1.5)
    assert loss_value(2**64 - 3, LOSS_TYPES.index("int64")) == -3
    assert np.isnan(loss_value(0x7FC00001, FLOAT32))
    assert np.signbit(loss_value(0x80000000, FLOAT32))


def test_losses_that_come_and_go_have_columns_of_their_own(tmp_path):
    """A loss that an iteration did not report is absent there, and 0.0 is not in its place."""
    one, other = block(0, losses=["gen/loss"]), block(1, losses=["dis/loss", "gen/loss"])
    ledger = Ledger.read(write(tmp_path, one, other))
    assert ledger.names == ("gen/loss", "dis/loss")
    assert list(ledger.row(3).losses) == ["gen/loss"]
    assert sorted(ledger.row(33).losses) == ["dis/loss", "gen/loss"]


def test_a_batch_that_is_not_known_is_none(tmp_path):
    """0 stands for no digest."""
    ledger = Ledger.read(write(tmp_path, Block(0, 1, [(0, {})])))
    assert ledger.row(1).batch is None
    assert ledger.row(1).losses == {}


def test_a_file_that_was_cut_off_anywhere_has_the_blocks_before(tmp_path):
    """A killed run leaves any number of bytes of its last block: what precedes it is read, and the note names it."""
    path = write(tmp_path, block(0), block(1, digests=[40]))
    whole = path.read_bytes()
    end_of_first = len(HEAD) + len(block(0).encode([]))
    for size in range(end_of_first + 1, len(whole)):
        path.write_bytes(whole[:size])
        ledger = Ledger.read(path)
        assert len(ledger.iterations) == ROWS
        assert re.search("block 1.*incomplete", ledger.note)
    path.write_bytes(whole[:end_of_first] + bytes(1000))  # as after a loss of power
    assert "incomplete" in Ledger.read(path).note
    path.write_bytes(whole[:end_of_first])
    assert Ledger.read(path).note is None


def test_no_flipped_bit_is_taken_for_data(tmp_path):
    """Each bit of three blocks, flipped: the reader names the block, and leaves it out only if it is the last."""
    path = write(tmp_path, block(0, 3), block(1, 3, digests=[34]), block(2, 3))
    whole = path.read_bytes()
    last = len(whole) - len(block(2, 3).encode(TENSORS))
    for position in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        found = outcome(path)
        assert str(path) in found
        assert "block" in found or position < 8 * len(HEAD)
        assert "LedgerError" in found or (position >= 8 * last and "block 2" in found)


def outcome(path):
    """The error that reading a file raises, or the note about its last block."""
    try:
        return Ledger.read(path).note
    except LedgerError as error:
        return f"LedgerError: {error}"


def test_a_block_that_is_missing_or_stands_elsewhere_is_named(tmp_path):
    """Every block is sound, and the file is not."""
    texts = [block(number).encode([]) for number in range(3)]
    path = tmp_path / "recorder.bin"
    for order in ((0, 2), (1, 0, 2), (0, 0), (0, 1, 1)):
        path.write_bytes(HEAD + b"".join(texts[number] for number in order))
        with pytest.raises(LedgerError, match="missing or were moved"):
            Ledger.read(path)


def sealed(payload, rows=1, first=1):
    head = struct.pack("<IIQII", len(payload), 0, first, rows, zlib.crc32(payload))
    return HEAD + head + struct.pack("<I", zlib.crc32(head)) + payload


@pytest.mark.parametrize(
    "content",
    [
        sealed(b""),
        sealed(b"\xff\xff[]"),
        sealed(b"\x02\x00{}" + bytes(16)),
        sealed(b"\x03\x00[1]" + bytes(25)),
        sealed(b'\x07\x00["a","a"]' + bytes(34)),
        sealed(b'\x05\x00["a"]' + bytes(24) + b"\x63"),
        sealed(b"\x02\x00[]" + bytes(8)),
        sealed(b"\x02\x00[]" + bytes(17)),
        sealed(b"\x02\x00[]" + bytes(16) + struct.pack("<QII", 1, 2**32 - 1, 0)),
        sealed(b"\x02\x00[]" + bytes(16) + struct.pack("<QII", 9, 0, 2) + b"[]"),
        sealed(b"\x02\x00[]" + bytes(16), rows=0),
        sealed(b"\x02\x00[]" + bytes(16) * 33, rows=33),
        sealed(b"\x02\x00[]" + bytes(16), first=2**64 - 1),
        sealed(b"\x02\x00[]" + bytes(16), first=0),
        b"",
        b"not a ledger",
        MAGIC,
        MAGIC + struct.pack("<II", 2, zlib.crc32(MAGIC + struct.pack("<I", 2))),
        HEAD[:-1] + b"\0",
    ],
)
def test_a_hostile_file_is_refused_by_name(tmp_path, content):
    """Checksums that are right do not help lengths and types that are wrong; nothing but a LedgerError comes out."""
    path = tmp_path / "recorder.bin"
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"recorder\.bin"):
        Ledger.read(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    """What is no regular file is an error at once."""
    os.mkfifo(tmp_path / "recorder.bin")
    with pytest.raises(OSError, match="regular"):
        Ledger.read(tmp_path / "recorder.bin")
