"""PackingIterator packs documents into rows: each token once a pass, documents apart, through any resume."""

import random
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from chainring.datasets import TransformDataset
from chainring.iterators import LoaderIterator, MixtureIterator, MultiprocessIterator, PackingIterator, SerialIterator


@cache
def documents(count, longest=1000, seed=0):
    """Lengths as those of web pages: log-normal, with a median of 245 tokens."""
    drawn = np.random.default_rng(seed)
    lengths = np.clip(drawn.lognormal(5.5, 1.0, count), 1, longest).astype(int)
    return [drawn.integers(1, 50_000, length) for length in lengths]


def tokens_of(batches):
    """The tokens of each document by its position in it, and how many places are used of all."""
    found, used, places = {}, 0, 0
    for batch in batches:
        columns = [batch.columns[name].reshape(-1) for name in ("document_ids", "positions", "input_ids")]
        assert all(column.dtype == np.int64 for column in columns)
        is_used = columns[0] >= 0
        assert not columns[1][~is_used].any()
        assert not columns[2][~is_used].any()
        used, places = used + is_used.sum(), places + len(is_used)
        for document, position, token in zip(*(column[is_used].tolist() for column in columns), strict=True):
            found.setdefault(document, []).append((position, token))
    return found, used / places


def whole(found):
    """Each document's tokens in their order; every position is there once."""
    texts = {}
    for document, tokens in found.items():
        ordered = sorted(tokens)
        assert [position for position, _ in ordered] == list(range(len(ordered)))
        texts[document] = [token for _, token in ordered]
    return texts


@pytest.mark.parametrize("separator", [None, 0])
@pytest.mark.parametrize("split", [True, False])
def test_each_token_comes_once_a_pass(split, separator):
    """With its separator; and at least 0.97 of all places are used, with whole documents too."""
    data = documents(3000)
    found, fill = tokens_of(PackingIterator(data, 1024, 8, separator=separator, split=split, repeat=False, seed=1))
    ends = [] if separator is None else [separator]
    assert whole(found) == {number: [*document.tolist(), *ends] for number, document in enumerate(data)}
    assert fill >= (0.999 if split else 0.97)


def test_split_documents_follow_one_another_in_the_order_of_a_serial_iterator():
    """And a row goes on where the one before has ended; the last of a pass is not used up."""
    data = documents(40, 30)
    order = [int(number) for batch in SerialIterator(np.arange(40), 8, seed=3, repeat=False) for number in batch.columns]
    stream = [(number, position) for number in order for position in range(len(data[number]))]
    iterator = PackingIterator(data, 16, 1, seed=3)
    rows = -(-len(stream) // 16)
    taken = [next(iterator).columns for _ in range(rows)]
    places = [
        (int(number), int(position))
        for columns in taken
        for number, position in zip(columns["document_ids"][0], columns["positions"][0], strict=True)
    ]
    assert places == stream + [(-1, 0)] * (16 * rows - len(stream))
    assert (iterator.epoch, iterator.is_new_epoch) == (1, True)
    next(iterator)
    assert not iterator.is_new_epoch


def test_whole_documents_never_cross_a_row():
    """And the first that fits is taken, so that none waits for ever."""
    data = documents(500, 100)
    iterator = PackingIterator(data, 128, 4, split=False, shuffle=False, repeat=False)
    first = next(iterator).columns
    assert first["document_ids"][0, 0] == 0
    for batch in iterator:
        for ids, positions in zip(batch.columns["document_ids"], batch.columns["positions"], strict=True):
            for number in set(ids.tolist()) - {-1}:
                assert positions[ids == number].tolist() == list(range(len(data[number])))


def test_a_row_takes_the_first_that_fits_of_the_next_thousand_and_goes_on_from_any_state():
    """Compared with a plain loop over the documents that wait, which are fetched 256 at a time until there are 1,024."""
    data = [*documents(2000, 300), *[np.empty(0, np.int64)] * 9]
    order = [int(number) for batch in SerialIterator(np.arange(2009), 1, seed=3, repeat=False) for number in batch.columns]
    waiting, rows = [], []
    while order or any(len(data[number]) for number in waiting):
        while len(waiting) < 1024 and order:
            waiting, order = waiting + order[:256], order[256:]
        row, left = [], 300
        for number in waiting:
            if len(data[number]) <= left:
                row.append(number)
                left -= len(data[number])
        waiting = [number for number in waiting if number not in row]
        rows.append([number for number in row if len(data[number])])
    iterator, packed = PackingIterator(data, 300, 4, split=False, repeat=False, seed=3), []
    for batch in iterator:
        packed += [list(dict.fromkeys(ids[ids >= 0].tolist())) for ids in batch.columns["document_ids"]]
        if len(packed) % 20 == 8:
            state = iterator.state_dict()
            iterator.load_state_dict(state)
            assert str(iterator.state_dict()) == str(state)
    assert packed == rows


@pytest.mark.parametrize("split", [True, False])
def test_cut_anywhere_no_token_is_lost_or_comes_twice(split):
    """Hundreds of cuts of streams, on 1 to 4 ranks, of a dataset and of a mixture: the same batches as without."""
    drawn = random.Random(4)

    def make(kind):
        data = documents(60, 40, seed=kind)
        if kind % 2:
            data = MixtureIterator({"a": data, "b": documents(9, 40)}, 7, weights={"a": 2, "b": 1}, seed=kind)
        return PackingIterator(data, 48, 4, split=split, separator=kind % 3 or None, seed=kind)

    for kind in range(10 if split else 4):
        uncut, iterator = make(kind), make(kind)
        for _ in range(50 if split else 5):
            size = drawn.randrange(1, 5)
            state, batches = iterator.state_dict(), []
            for rank in range(size):
                iterator = make(kind)
                iterator.load_state_dict(state)
                iterator.share(rank, size)
                batches.append(next(iterator).columns)
            expected = next(uncut).columns
            for name, column in expected.items():
                assert all(np.array_equal(batch[name], column[rank::size]) for rank, batch in enumerate(batches))
            state = iterator.state_dict()
            iterator = make(kind)
            iterator.load_state_dict(state)


@pytest.mark.parametrize("split", [True, False])
def test_thousands_of_documents_into_a_mixture_rows_go_on_where_they_were_cut(split):
    """Where the mixture computes thousands of examples at once, and no longer the few of its beginning."""

    def make():
        sources = {"a": documents(60, 8), "b": documents(9, 8)}
        return PackingIterator(MixtureIterator(sources, 7, weights={"a": 2, "b": 1}, seed=0), 48, 8, split=split)

    uncut = make()
    for number in range(60):
        state = uncut.state_dict() if number % 6 == 5 else None
        columns = next(uncut).columns
        if state is not None:
            iterator = make()
            iterator.load_state_dict(state)
            assert np.array_equal(next(iterator).columns["input_ids"], columns["input_ids"])


def page():
    """The names that the blocks of Python of the page define."""
    text = (Path(__file__).parents[2] / "docs" / "several-sources.md").read_text()
    names = {}
    for block in re.findall("```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    return names


def test_the_model_of_the_page_computes_of_packed_documents_what_it_computes_of_each():
    """The loss and the gradients, up to rounding: attention stays inside, and no first token is a target."""
    names, data = page(), [document % 50 for document in documents(30, 60)]
    torch.manual_seed(0)
    model = names["Attention"](50, 16, 60).double()
    (batch,) = PackingIterator(data, 64, 100, split=False, repeat=False)
    packed = model(**{name: torch.from_numpy(column) for name, column in batch.columns.items()})
    packed["loss"].backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    total, losses = sum(len(document) - 1 for document in data), 0.0
    for document in data:
        ids = torch.from_numpy(document)[None]
        if ids.shape[1] > 1:
            alone = model(ids, torch.zeros_like(ids), torch.arange(ids.shape[1])[None])
            loss = alone["loss"] * alone["weight"] / total
            loss.backward()
            losses += loss.item()
    assert packed["weight"] == total
    assert packed["loss"].item() == pytest.approx(losses)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_the_other_masks_of_the_page_are_the_same():
    """That of FlexAttention, and the places where documents begin."""
    names = page()
    columns = next(PackingIterator(documents(30, 60), 64, 3)).columns
    ids = torch.from_numpy(columns["document_ids"])
    expected = (ids[:, :, None] == ids[:, None]).tril()
    mask = names["document_mask"](ids)
    places = torch.arange(64)
    seen = mask.mask_mod(torch.arange(3)[:, None, None], None, places[None, :, None], places[None, None])
    assert torch.equal(seen, expected)
    ends = names["beginnings"](ids).tolist()
    firsts = [
        row * 64 + place for row in range(3) for place in range(64) if not place or ids[row, place] != ids[row, place - 1]
    ]
    assert ends == [*firsts, 3 * 64]


def test_documents_in_any_form_are_packed():
    """Arrays of any integers, tensors and lists, also empty ones; from workers and through a transform."""
    data = documents(20, 30)
    forms = [
        [torch.from_numpy(document) for document in data],
        [document.tolist() for document in data],
        [document.astype(np.uint16) for document in data],
        TransformDataset([{"input_ids": document} for document in data], lambda example: example["input_ids"]),
        SerialIterator(data, 3, seed=0, repeat=False),
        MultiprocessIterator(data, 5, n_processes=1, seed=0, repeat=False),
    ]
    expected = whole(tokens_of(PackingIterator(data, 16, 2, seed=0, repeat=False))[0])
    for form in forms:
        with PackingIterator(form, 16, 2, seed=0, repeat=False) as iterator:
            assert whole(tokens_of(iterator)[0]) == expected
    with_empty = [np.array([], np.int64), np.arange(3), []]
    assert whole(tokens_of(PackingIterator(with_empty, 4, 1, repeat=False))[0]) == {1: [0, 1, 2]}
    assert whole(tokens_of(PackingIterator(with_empty, 4, 1, separator=9, repeat=False))[0])[0] == [9]


@pytest.mark.parametrize("split", [True, False])
def test_behind_thousands_of_empty_documents_the_others_are_found(split):
    """More of them than are looked at for one row; the first row of each pass has the tokens."""
    data = [*([np.empty(0, np.int64)] * 3000), np.arange(1, 5)]
    single = PackingIterator(data, 4, 1, split=split, repeat=False, shuffle=False)
    assert [batch.columns["input_ids"].tolist() for batch in single] == [[[1, 2, 3, 4]]]
    mixture = MixtureIterator({"a": data[:5], "b": data[-1:]}, 8, weights={"a": 0.99, "b": 0.01}, seed=0)
    repeated = PackingIterator(mixture, 4, 1, split=split)
    assert all(next(repeated).columns["input_ids"].tolist() == [[1, 2, 3, 4]] for _ in range(4))


@pytest.mark.parametrize(
    ("example", "settings", "error", "text"),
    [
        (np.zeros(3), {}, TypeError, "one dimension of integers"),
        (np.zeros((2, 3), int), {}, TypeError, r"shape \(2, 3\)"),
        ({"input_ids": [1]}, {}, TypeError, "TransformDataset"),
        ("text", {}, TypeError, "example 0 is a str"),
        ((1, 2), {}, TypeError, "example 0 is a tuple"),
        (np.int64(1), {}, TypeError, r"an array of int64 and shape \(\)"),
        (np.ma.array([1, 2], mask=[True, False]), {}, TypeError, "example 0 is a MaskedArray"),
        (torch.zeros(2, dtype=torch.bfloat16), {}, TypeError, r"example 0 is an array of torch.bfloat16 and shape \(2,\)"),
        (torch.zeros(2, dtype=int, device="meta"), {}, TypeError, "example 0 is an array of torch.int64"),
        (np.array([1, 2**63], np.uint64), {}, ValueError, r"has 9223372036854775808; .* take tokens\.astype\(np\.int64\)"),
        ([2**64 - 1], {}, ValueError, "document 0 has 18446744073709551615"),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), {}, ValueError, "below 2"),
        (([1, 2], 3), {}, TypeError, "one dimension of integers"),
        ([], {}, ValueError, "which is all of a pass"),
        ([], {"split": False}, ValueError, "which is all of a pass"),
        (np.arange(9), {"split": False}, ValueError, "document 0 has 9 tokens, a row 8"),
        (np.arange(8), {"split": False, "separator": 0}, ValueError, "9 tokens with its separator"),
    ],
)
def test_what_is_no_document_is_refused_with_its_number(example, settings, error, text):
    """And again at the next try, since nothing was taken."""
    iterator = PackingIterator([example], 8, 1, **settings)
    for _ in range(2):
        with pytest.raises(error, match=text):
            next(iterator)


@pytest.mark.parametrize("split", [True, False])
def test_weights_that_change_at_a_resume_lose_and_repeat_no_document_that_waits(split):
    """Neither do those that change again at the next: each source's documents come in its order, with all their tokens."""
    sources = {"a": documents(50, 40, seed=1), "b": documents(20, 40, seed=2)}
    drawn, found, iterator = random.Random(0), [], None
    for _ in range(12):
        state = None if iterator is None else iterator.state_dict()
        weights = {"a": drawn.randrange(1, 9), "b": drawn.randrange(1, 9)}
        iterator = PackingIterator(MixtureIterator(sources, 5, weights=weights, seed=0), 48, 3, split=split)
        if state is not None:
            iterator.load_state_dict(state)
        found += [next(iterator) for _ in range(drawn.randrange(4))]
    numbers, positions, ids = (
        np.concatenate([batch.columns[name].reshape(-1) for batch in found])
        for name in ("document_ids", "positions", "input_ids")
    )
    mixture, order = MixtureIterator(sources, 1, weights={"a": 1, "b": 1}, seed=0), [*dict.fromkeys(numbers[numbers >= 0])]
    for number, shown in zip(order, mixture.names_of(np.array(order)), strict=True):
        source, index = shown[0], int(shown[2:-1])
        length = (numbers == number).sum()
        assert length == len(sources[source][index]) or (split and number == order[-1])
        assert positions[numbers == number].tolist() == list(range(length))
        assert ids[numbers == number].tolist() == sources[source][index][:length].tolist()
    if split:
        for source in range(2):
            counts = [number // 2 for number in order if number % 2 == source]
            assert counts == list(range(len(counts)))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("sizes", [(13, 300), (300, 13), (7, 5), (5, 7)])
def test_batches_of_the_source_of_another_size_at_a_resume_lose_and_repeat_no_document(sizes, split):
    """Also where more are fetched again than had been fetched."""
    data = documents(1500, 40)
    first, other = (PackingIterator(SerialIterator(data, size, seed=0, repeat=False), 64, 4, split=split) for size in sizes)
    batches = [next(first) for _ in range(5)]
    other.load_state_dict(first.state_dict())
    assert whole(tokens_of([*batches, *other])[0]) == {number: document.tolist() for number, document in enumerate(data)}


def test_set_back_right_after_a_resume_it_has_the_order_that_comes_without_one():
    """That of the pass behind all that it has looked at."""
    uncut, iterator = (PackingIterator(documents(60, 40), 64, 4, seed=0) for _ in range(2))
    for _ in range(3):
        next(uncut)
    iterator.load_state_dict(uncut.state_dict())
    for each in (uncut, iterator):
        each.reset()
    assert np.array_equal(next(iterator).columns["input_ids"], next(uncut).columns["input_ids"])


def test_back_at_a_mark_it_goes_on_as_from_there_though_a_state_was_loaded_since():
    """Whose documents are forgotten."""
    iterator, other = (PackingIterator(documents(60, 40), 64, 4, seed=0) for _ in range(2))
    next(iterator)
    mark, expected = iterator.mark(), next(iterator).columns["input_ids"]
    iterator.load_state_dict(other.state_dict())
    iterator.return_to(mark)
    assert np.array_equal(next(iterator).columns["input_ids"], expected)


def test_another_seed_is_refused_where_documents_of_the_next_pass_wait():
    """They were fetched in the order of the first seed."""
    first, other = (PackingIterator(documents(9, 40), 48, 1, seed=seed) for seed in (0, 1))
    for _ in range(5):
        next(first)
    other.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="Resume with the same seed"):
        next(other)


@pytest.mark.parametrize("split", [True, False])
def test_a_fetch_that_fails_at_a_resume_is_tried_again(split):
    """And rows go on where they were cut, as if it had not failed."""
    data, fails = documents(30, 16), []
    uncut = PackingIterator(SerialIterator(data, 4, seed=1), 16, 2, split=split)
    next(uncut)

    def fetch(document):
        if fails and fails.pop():
            raise OSError("the disk is away")
        return document

    iterator = PackingIterator(SerialIterator(TransformDataset(data, fetch), 4, seed=1), 16, 2, split=split)
    iterator.load_state_dict(uncut.state_dict())
    fails += [True, False]  # the second of those that waited
    with pytest.raises(OSError, match="the disk is away"):
        next(iterator)
    assert np.array_equal(next(iterator).columns["input_ids"], next(uncut).columns["input_ids"])


def test_a_document_that_is_shorter_at_a_resume_than_what_is_packed_of_it_is_refused():
    """With its number; again at the next try."""
    iterator, other = (PackingIterator([np.ones(length, int)], 8, 1) for length in (10, 3))
    next(iterator)
    other.load_state_dict(iterator.state_dict())
    for _ in range(2):
        with pytest.raises(ValueError, match="document 0 has 3 tokens, and the saved run had packed 8 of it"):
            next(other)


@pytest.mark.parametrize(
    ("arguments", "settings", "error"),
    [
        ((LoaderIterator([np.arange(3)]), 8, 1), {}, TypeError),
        ((iter([]), 8, 1), {}, TypeError),
        (([np.arange(3)], 0, 1), {}, ValueError),
        (([np.arange(3)], 8, 0), {}, ValueError),
        (([np.arange(3)], 8, 1), {"separator": "</s>"}, TypeError),
        (([np.arange(3)], 8, 1), {"separator": 2**63}, ValueError),
        (([np.arange(3)], 2**62, 1), {}, ValueError),
        (([np.arange(3)], 8, 2**50), {"split": False}, ValueError),
    ],
)
def test_wrong_settings_are_refused(arguments, settings, error):
    """When it is made, in its own words."""
    with pytest.raises(error, match=r", got |; got |smaller length or batch size"):
        PackingIterator(*arguments, **settings)
