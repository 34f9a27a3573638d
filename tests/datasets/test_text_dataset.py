"""TextDataset: lines of files, read when asked for."""

import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from chainring.datasets import TextDataset
from chainring.iterators import MultiprocessIterator, SerialIterator


@pytest.fixture
def write(tmp_path):
    def write(data, name="text"):
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        ("a\nbc\n\nd\n", ["a", "bc", "", "d"]),
        ("a\nbc", ["a", "bc"]),
        ("a\r\nb\rc\r\n", ["a", "b\rc"]),
        (" a \n", [" a "]),
        ("\n", [""]),
        ("", []),
        ("ä\u2028ö\x0bü\n漢字\n", ["ä\u2028ö\x0bü", "漢字"]),
    ],
)
def test_an_example_is_a_line_without_its_end(write, data, lines):
    r"""Only \n and \r\n end one; a last line needs no end; empty lines count."""
    dataset = TextDataset(write(data))
    assert len(dataset) == len(lines)
    assert list(dataset) == dataset[:] == lines


def test_lines_are_found_across_the_stretches_in_which_a_file_is_read(write):
    """Three megabytes, with lines of lengths that no power of two divides."""
    lines = ["x" * (k * 7919 % 1013) for k in range(6000)]
    dataset = TextDataset(write("\n".join(lines)))
    assert dataset[:] == lines


def test_every_way_of_indexing(write):
    """Indexing works as for every dataset."""
    dataset = TextDataset(write("a\nb\nc\n"))
    assert dataset[-1] == "c"
    assert dataset[[2, 0]] == dataset[np.array([2, 0])] == ["c", "a"]
    with pytest.raises(IndexError, match="3 examples"):
        dataset[3]


def test_several_files_give_tuples_of_their_lines(write):
    """Sentences and their translations; a list of one file gives tuples of one."""
    paths = [write("a\nb\n", "en"), str(write("x\ny", "ja"))]
    assert list(TextDataset(paths)) == [("a", "x"), ("b", "y")]
    assert list(TextDataset(paths[:1])) == [("a",), ("b",)]


def test_files_of_different_numbers_of_lines_are_refused(write):
    """Each with its own."""
    with pytest.raises(ValueError, match=r"same number of lines, got \{'.*en': 2, '.*ja': 1\}"):
        TextDataset([write("a\nb\n", "en"), write("x", "ja")])


def test_a_filter_leaves_lines_out(write):
    """It is called once for each line, at construction; indices count what it let through."""
    seen = []
    dataset = TextDataset(write("a\n\n \nb\n"), filter_func=lambda line: seen.append(line) or line.strip())
    assert (list(dataset), dataset[-1], len(dataset)) == (["a", "b"], "b", 2)
    assert seen == ["a", "", " ", "b"]


def test_a_filter_of_several_files_sees_a_line_of_each(write):
    """And leaves them out together."""
    paths = [write("a\nb\nc\n", "en"), write("x\n\nz\n", "ja")]
    assert list(TextDataset(paths, filter_func=lambda en, ja: en and ja)) == [("a", "x"), ("c", "z")]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8-sig", "shift_jis", "gb18030"])
def test_a_file_is_read_in_its_encoding(write, encoding):
    """A byte order mark is no part of the first line where the encoding says so."""
    lines = ["café", "ö"] if encoding == "latin-1" else ["abc", "漢字", "ソ表"]
    assert list(TextDataset(write("\n".join(lines).encode(encoding)), encoding)) == lines


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp037"])
def test_an_encoding_with_other_line_ends_is_refused(write, encoding):
    """At construction, with the remedy."""
    with pytest.raises(ValueError, match=f"0x0A, and '{encoding}' does not; convert the file to UTF-8"):
        TextDataset(write("a"), encoding)


def test_an_unknown_encoding_is_refused(write):
    """By its name."""
    with pytest.raises(ValueError, match="one of Python's codecs, got 'utf-9'"):
        TextDataset(write("a"), "utf-9")


def test_a_line_that_is_not_in_the_encoding_is_named(write):
    """By number and file."""
    dataset = TextDataset(write(b"a\n\xff\n"))
    with pytest.raises(UnicodeDecodeError) as error:
        dataset[1]
    assert error.value.__notes__[0].startswith("in line 2 of ")
    assert dataset[0] == "a"


def test_what_is_no_file_and_what_is_no_filter_are_refused(write, tmp_path):
    """At construction."""
    with pytest.raises(ValueError, match="at least one file"):
        TextDataset([])
    with pytest.raises(FileNotFoundError):
        TextDataset(tmp_path / "missing")
    with pytest.raises(TypeError, match="filter_func is a function of one line of each file, got str"):
        TextDataset(write("a"), filter_func="a")


@pytest.mark.parametrize("data", ["a\nbb\nc\n", "a\n"])
def test_a_file_that_has_changed_is_an_error(write, data):
    """Lines would be torn where they were."""
    path = write("a\nb\nc\n")
    dataset = TextDataset(path)
    path.write_text(data)
    with pytest.raises(ValueError, match=f"has {len(data)} bytes and had 6 when its lines were counted"):
        dataset[0]


def test_it_can_be_pickled_and_holds_no_file_open(write):
    """Nor does reading leave one."""
    before = len(os.listdir("/dev/fd"))
    dataset = TextDataset(write("a\n\nb\n"), filter_func=bool)
    copy = pickle.loads(pickle.dumps(dataset))
    assert list(copy) == list(dataset) == ["a", "b"]
    assert len(os.listdir("/dev/fd")) == before


def _read_often(dataset, wrong):
    for _ in range(300):
        for number in range(len(dataset)):
            if dataset[number] != str(number) * (number + 1):
                wrong.set()


def test_forked_processes_do_not_disturb_each_other(write):
    """Three read the same dataset at once."""
    dataset = TextDataset(write("\n".join(str(number) * (number + 1) for number in range(10))))
    context = multiprocessing.get_context("fork")
    wrong = context.Event()
    readers = [context.Process(target=_read_often, args=(dataset, wrong)) for _ in range(2)]
    for reader in readers:
        reader.start()
    _read_often(dataset, wrong)
    for reader in readers:
        reader.join()
    assert [reader.exitcode for reader in readers] == [0, 0]
    assert not wrong.is_set()


def test_workers_give_the_lines_that_one_process_gives(write):
    """In the same order."""
    dataset = TextDataset(write("".join(f"line {k}\n" for k in range(20))))
    serial = SerialIterator(dataset, 4, seed=1)
    with MultiprocessIterator(dataset, 4, n_processes=2, seed=1) as iterator:
        for _ in range(7):
            assert list(next(iterator)) == list(next(serial))


def test_a_path_may_be_of_any_kind(write):
    """A string or a Path."""
    path = write("a\n")
    assert list(TextDataset(str(path))) == list(TextDataset(Path(path))) == ["a"]
