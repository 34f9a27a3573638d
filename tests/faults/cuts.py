"""Streams of mixtures and of packed documents are cut anywhere, and taken up by other ranks and workers."""

import multiprocessing
import os
import signal
from collections import Counter

import numpy as np
from bench import Row

from chainring import serializers
from chainring.iterators import MixtureIterator, PackingIterator
from tries import WrongEndError

BATCH, VIRTUAL, CUTS = 10, 5, 5


def go_on(make, state, ranks, batches):
    """The rows of so many batches from a state on, each rank's in its places, and the state of the last rank after them."""
    rows = [[None] * BATCH for _ in range(batches)]
    for rank in range(ranks):
        block = range(rank * VIRTUAL // ranks, (rank + 1) * VIRTUAL // ranks)
        with make() as iterator:
            iterator.use_virtual_ranks(VIRTUAL)
            iterator.share(rank, ranks)
            if state is not None:
                iterator.load_state_dict(state)
            for row in rows:
                places = [place for place in range(BATCH) if place % VIRTUAL in block]
                for place, value in zip(places, rows_of(next(iterator)), strict=True):
                    row[place] = value
            after = iterator.state_dict()
    return [value for row in rows for value in row], after


def rows_of(batch):
    if isinstance(batch.columns, dict):
        return [tuple(map(tuple, row)) for row in zip(*(item.tolist() for item in batch.columns.values()), strict=True)]
    return [int(example) for example in batch]


def counts_of_passes(kind, seen, whole):
    """Nothing of a pass comes twice while something of it has not come."""
    for name, counts in seen.items():
        numbers = [counts[item] for item in whole[name]]
        if max(numbers) - min(numbers) > 1 or len(counts) > len(whole[name]):
            raise WrongEndError(f"{kind}: of {name}, something came {max(numbers)} times and something {min(numbers)} times")


def packed(bench, number, draw, place):
    """Cuts a stream of rows, in this process, and compares it with that which is not cut."""
    split, separator, uses_mixture = draw.random() < 0.5, draw.choice([None, 1]), draw.random() < 0.4
    length = draw.choice([7, 16, 33])
    longest = length - 1 if not split else 3 * length
    documents = [np.full(draw.randint(0 if split and separator else 1, longest), 7) for _ in range(draw.randint(5, 60))]
    seed, chunk = draw.randrange(1000), draw.randint(1, 9)

    def weights(count):
        return {"a": 1, "b": 1 + count // 20}

    def make():
        source = documents
        if uses_mixture:
            source = MixtureIterator({"a": documents, "b": documents[::2]}, chunk, weights=weights, seed=seed)
        return PackingIterator(source, length, BATCH, separator=separator, split=split, seed=seed)

    most = 60 if uses_mixture and number % 8 < 2 else 4  # batches to a cut; thousands of documents go through a mixture
    lengths = [draw.randint(1, most) for _ in range(CUTS + 1)]
    whole, _ = go_on(make, None, 1, sum(lengths))
    rows, state = [], None
    for batches in lengths:
        piece, state = go_on(make, state, draw.randint(1, VIRTUAL), batches)
        rows += piece
    if rows != whole:
        raise WrongEndError(f"{sum(map(tuple.__ne__, rows, whole))} of {len(rows)} rows are others")
    if not uses_mixture:
        seen = Counter(
            (document, at) for _, marks, ats in rows for document, at in zip(marks, ats, strict=True) if document >= 0
        )
        places = [(i, at) for i, item in enumerate(documents) for at in range(len(item) + (separator is not None))]
        counts_of_passes("packed", {"the documents": seen}, {"the documents": places})
    return Counter({"cuts": CUTS, "streams": 1, "rows": len(rows)})


def mixed(bench, number, draw, place):
    """Cuts a mixture by a kill or an end, and takes it up with other ranks and workers; in half by other weights."""
    sizes = {name: draw.randint(3, 40) for name in ("web", "code", "books")[: draw.randint(2, 3)]}
    datasets = {name: list(range(1000 * i, 1000 * i + size)) for i, (name, size) in enumerate(sizes.items())}
    seed, changes = draw.randrange(1000), number % 2 == 1
    shares = {name: draw.randint(1, 9) for name in sizes}

    def maker(given, workers=0):
        return lambda: MixtureIterator(datasets, BATCH, weights=given, seed=seed, n_processes=workers)

    lengths = [draw.randint(1, 6) for _ in range(CUTS + 1)]
    rows, kills, last = [], 0, dict.fromkeys(sizes, 0)
    for turn, batches in enumerate(lengths):
        if changes and turn == CUTS // 2:
            shares = {name: draw.randint(1, 9) for name in sizes}
            last = {name: sum(row // 1000 == i for row in rows) for i, name in enumerate(sizes)}
            begun = len(rows)
        is_killed, ranks = draw.random() < 0.4, draw.randint(1, VIRTUAL)
        source, target = (place / f"{turn - 1}" if turn else None), place / f"{turn}"
        make = maker(shares, draw.choice([0, 0, 1, 2, 3]))
        rows += (_in_a_process_that_is_killed if is_killed else _to_disk)(make, source, target, ranks, batches)
        kills += is_killed
        counts = {name: sum(row // 1000 == i for row in rows) - last[name] for i, name in enumerate(sizes)}
        count, total = len(rows) - (begun if changes and turn >= CUTS // 2 else 0), sum(shares.values())
        if any(abs(counts[name] - count * shares[name] / total) >= 1 for name in sizes):
            raise WrongEndError(f"of {count} examples of weights {shares}, {counts} came")
    for i, name in enumerate(sizes):
        only = maker({other: float(other == name) for other in sizes})
        got = [row for row in rows if row // 1000 == i]
        expected, _ = go_on(only, None, 1, -(-len(got) // BATCH))
        if got != expected[: len(got)]:
            raise WrongEndError(f"{name} came in another order than by itself")
        counts_of_passes("mixed", {name: Counter(got)}, {name: datasets[name]})
    if not changes and rows != go_on(maker(shares), None, 1, sum(lengths))[0]:
        raise WrongEndError("examples differ from those of the stream that was not cut")
    return Counter({"mixtures": 1, "cuts": CUTS, "kills": kills, "examples": len(rows)})


def _to_disk(make, source, target, ranks, batches):
    state = None
    if source is not None:
        with make() as iterator:
            serializers.load(source, iterator)
            state = iterator.state_dict()
    rows, after = go_on(make, state, ranks, batches)
    with make() as iterator:
        iterator.load_state_dict(after)
        serializers.save(target, iterator)
    return rows


def _in_a_process_that_is_killed(make, source, target, ranks, batches):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def live():
        rows = _to_disk(make, source, target, ranks, batches)
        sender.send(rows)
        with make() as iterator:
            serializers.load(target, iterator)
            next(iterator)  # which is lost
            os.kill(os.getpid(), signal.SIGKILL)

    process = context.Process(target=live)
    process.start()
    sender.close()
    try:
        rows = receiver.recv()
    except EOFError:
        rows = None
    process.join()
    if rows is None or process.exitcode != -signal.SIGKILL:
        raise WrongEndError(f"the process that was to be killed ended with {process.exitcode}")
    return rows


ROWS = [
    Row(
        "packed",
        "rows of packed documents, split or whole, of data or a mixture, are cut anywhere, and taken up by 1 to 5 ranks",
        "the rows of the stream that is not cut; no token comes twice or never",
        "cuts", 1000, packed,
    ),
    Row(
        "mixed",
        "a mixture is ended or killed anywhere, and taken up by 1 to 5 ranks of 0 to 3 workers, half by other weights",
        "each example comes once a pass, in the order of its source, with exact shares from each change on",
        "mixtures", 200, mixed,
    ),
]  # fmt: skip
