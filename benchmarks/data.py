"""Examples a second through each iterator, beside ``DataLoader`` with as many workers over the same data set.

Run it on a machine that has nothing else to do::

    python benchmarks/data.py

Both give tensors of batches of 100 in a random order, with nothing computed on them. Chainring seeds the generators of the
host for each example, unless ``example_rng=False``, so that augmentation does not depend on the number of workers; a
``DataLoader`` does not. So images are read three times: as both do by default, without seeding, and with it in both.
A mixture is read beside a ``SerialIterator`` over one array as well. Of documents it is the rows of 1,024 tokens that are
counted, which the other side packs by hand, cutting documents at the ends of rows, without a state.
A figure is the median of the rounds; a round reads each row for some epochs after a first one, in which workers are
started; a ratio is taken round by round.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _measure import Figure, begin, conclude, figure, parser_of
from PIL import Image
from torch.utils.data import DataLoader

from chainring.converters import concat_examples
from chainring.datasets import DatasetMixin, TupleDataset
from chainring.iterators import MixtureIterator, MultiprocessIterator, PackingIterator, SerialIterator

BATCH = 100
BUDGET = 1.0
"""Of the examples a second of the DataLoader, at least."""
BUDGET_BESIDE_SERIAL = 1 / 1.2
"""Of those of a SerialIterator: the rows of two sources are taken at once, in an order that is computed from two."""
LENGTH = 1024  # of a row of packed tokens
TURN = 0.05
"""Seconds, at least: longer than it takes to fill the caches again, shorter than most of what disturbs a machine."""
Stream = Iterator[Any]
Make = Callable[[Any, int], Stream]


class Images(DatasetMixin):
    """PNG files of 32 x 32 pixels, decoded by Pillow when they are asked for."""

    def __init__(self, directory: Path, examples: int) -> None:
        draw = np.random.default_rng(0)
        self.paths = [directory / f"{number}.png" for number in range(min(examples, 500))]
        self.examples = examples
        for path in self.paths:
            Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)

    def __len__(self) -> int:
        return self.examples

    def get_example(self, i: int) -> tuple[np.ndarray, int]:
        with Image.open(self.paths[i % len(self.paths)]) as image:
            return np.asarray(image, dtype=np.float32).transpose(2, 0, 1), i % 10


class Slow(DatasetMixin):
    """A transform of about a millisecond an example: an image of 128 x 128 pixels is turned and made smaller."""

    def __init__(self, examples: int) -> None:
        self.pixels = np.random.default_rng(0).integers(0, 256, (examples, 128, 128, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.pixels)

    def get_example(self, i: int) -> np.ndarray:
        image = Image.fromarray(self.pixels[i]).rotate(17, Image.Resampling.BICUBIC).resize((32, 32))
        return np.asarray(image, dtype=np.float32).transpose(2, 0, 1)


class Indexed:
    """The same data set as a ``DataLoader`` wants it: an example at a time."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Any:
        return self.dataset[i]


class Seeded(Indexed):
    """With the generators of the host seeded for each example, by hand."""

    def __getitem__(self, i: int) -> Any:
        random.seed(i)
        np.random.seed(i)
        torch.manual_seed(i)
        return self.dataset[i]


def loaded(dataset: Any, workers: int, kind: type[Indexed] = Indexed) -> Stream:
    loader: DataLoader[Any] = DataLoader(kind(dataset), BATCH, True, num_workers=workers, persistent_workers=workers > 0)
    while True:
        yield from loader


def loaded_seeded(dataset: Any, workers: int) -> Stream:
    """Seed a stream of random numbers for each example, as Chainring gives it (and alas the same in every epoch)."""
    return loaded(dataset, workers, Seeded)


def iterated(dataset: Any, workers: int, example_rng: bool = True) -> Stream:
    source = SerialIterator(dataset, BATCH, example_rng=example_rng)
    if workers:
        source = MultiprocessIterator(dataset, BATCH, n_processes=workers, example_rng=example_rng)
    try:
        yield from map(concat_examples, source)  # which keeps no batch while the next is made, as an update does not
    finally:
        source.finalize()


def mixture_of(*columns: np.ndarray, by_function: bool = False) -> Make:
    """Return what reads two halves of the rows by weights of 7 and 3, or by a function that returns these."""
    half = len(columns[0]) // 2
    halves = {str(part): TupleDataset(*(column[part] for column in columns)) for part in (np.s_[:half], np.s_[half:])}

    def mixed(_: Any, workers: int) -> Stream:
        weights = dict(zip(halves, (7, 3), strict=True))
        given = (lambda _: weights) if by_function else weights
        source = MixtureIterator(halves, BATCH, weights=given, n_processes=workers)
        try:
            yield from map(concat_examples, source)
        finally:
            source.finalize()

    return mixed


def packed(documents: Sequence[np.ndarray], workers: int) -> Stream:
    yield from map(concat_examples, PackingIterator(documents, LENGTH, BATCH))


def packed_whole(documents: Sequence[np.ndarray], workers: int) -> Stream:
    yield from map(concat_examples, PackingIterator(documents, LENGTH, BATCH, split=False))


def packed_by_hand(documents: Sequence[np.ndarray], workers: int) -> Stream:
    """Documents of a DataLoader one after the other, cut into rows."""
    loader: DataLoader[Any] = DataLoader(Indexed(documents), None, True)
    parts: list[list[torch.Tensor]] = [[], [], []]
    count, number = 0, 0
    while True:
        for tokens in loader:
            number += 1
            new = tokens, torch.full_like(tokens, number), torch.arange(len(tokens))
            for part, tensor in zip(parts, new, strict=True):
                part.append(tensor)
            if (count := count + len(tokens)) >= BATCH * LENGTH:
                whole = list(map(torch.cat, parts))
                yield tuple(tensor[: BATCH * LENGTH].view(BATCH, LENGTH) for tensor in whole)
                parts = [[tensor[BATCH * LENGTH :]] for tensor in whole]
                count -= BATCH * LENGTH


def unseeded(dataset: Any, workers: int) -> Stream:
    """Without a stream of random numbers for each example, which the DataLoader does not give either."""
    return iterated(dataset, workers, example_rng=False)


def speeds(makes: Sequence[Make], dataset: Any, workers: int, epochs: int) -> list[float]:
    """Examples a second of each, in the order of ``makes``, from at least so many epochs.

    Without workers they take turns, so that what else the machine does slows all of them down alike. Workers would run
    ahead while it is the other's turn, so with them one comes after the other.
    """
    found: dict[Make, float] = {}
    batches = len(dataset) // BATCH
    for group in [[make] for make in makes] if workers else [makes]:
        streams = {make: make(dataset, workers) for make in group}
        taking_turns(streams, batches)  # workers start, memory is got
        found |= taking_turns(streams, epochs * batches)
        for stream in streams.values():
            stream.close()  # type: ignore[attr-defined]
    return [found[make] for make in makes]


def taking_turns(streams: dict[Make, Stream], batches: int) -> dict[Make, float]:
    """Read at least so many batches of each; return examples a second."""
    seconds, read = dict.fromkeys(streams, 0.0), dict.fromkeys(streams, 0)
    kept = {}  # until the next batch is there, as a loop keeps it
    while min(read.values()) < batches:
        for make, stream in streams.items():
            began = now = time.perf_counter()
            while now - began < TURN:
                kept[make] = next(stream)
                read[make] += 1
                now = time.perf_counter()
            seconds[make] += now - began
    return {make: BATCH * read[make] / seconds[make] for make in streams}


def measured(
    name: str,
    dataset: Any,
    workers: int,
    epochs: int,
    rounds: int,
    makes: tuple[Make, Make] = (loaded, iterated),
    budget: float = BUDGET,
) -> dict[str, Any]:
    pairs = []
    for number in range(rounds):
        step = 1 if number % 2 == 0 else -1
        pairs.append(speeds(makes[::step], dataset, workers, epochs)[::step])
    theirs, ours = (figure(column).median for column in zip(*pairs, strict=True))
    ratio = figure([mine / other for other, mine in pairs])
    figures = {"loader": theirs, "ours": ours, "ratio": vars(ratio), "budget": budget, "rounds": pairs}
    return {"data": name, "workers": workers, **figures}


def line_of(result: dict[str, Any]) -> str:
    ratio = Figure(**result["ratio"])
    spread = f"({ratio.least:.2f} to {ratio.most:.2f})"
    verdict = "met" if ratio.median >= result["budget"] else "missed"
    return (
        f"{result['data']:<28}{result['workers']:>8}{result['loader']:>14,.0f}{result['ours']:>14,.0f}"
        f"{ratio.median:>9.2f} {spread:<18}>= {result['budget']:g} {verdict}"
    )


def options() -> argparse.Namespace:
    parser = parser_of(__doc__, slack=1.25, limit="budget / SLACK")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="worker processes (default: 0 2)")
    args = parser.parse_args()
    if args.rounds < 1 or min(args.workers) < 0:
        parser.error(f"--rounds is at least 1 and --workers at least 0, got {args.rounds} and {args.workers}")
    return args


def main() -> int:
    args = options()
    facts = begin()
    print(f"median of {args.rounds} rounds, batches of {BATCH}\n")
    print(f"{'examples a second':<28}{'workers':>8}{'DataLoader':>14}{'Chainring':>14}{'ratio':>9} (least to most)")
    draw = np.random.default_rng(0)
    results = []
    with tempfile.TemporaryDirectory() as directory:
        columns = draw.standard_normal((20_000, 784), dtype=np.float32), draw.integers(0, 10, 20_000)
        arrays = TupleDataset(*columns)
        asking = mixture_of(*columns, by_function=True)
        images = Images(Path(directory), 4_000)
        lengths = np.exp(draw.normal(5.5, 1, 20_000)).astype(int).clip(1, LENGTH)
        documents = [draw.integers(0, 50_000, length) for length in lengths]
        sets = {
            "arrays in memory": (arrays, 5, (loaded, iterated)),
            "a mixture of arrays": (arrays, 5, (loaded, mixture_of(*columns))),
            "the same, beside one array": (arrays, 5, (iterated, mixture_of(*columns)), BUDGET_BESIDE_SERIAL, (0,)),
            "the same, by a function": (arrays, 5, (iterated, asking), BUDGET_BESIDE_SERIAL, (0,)),
            "documents, packed": (documents, 1, (packed_by_hand, packed), BUDGET, (0,)),
            "whole documents, packed": (documents, 1, (packed_by_hand, packed_whole), BUDGET, (0,)),
            "images, Pillow": (images, 2, (loaded, iterated)),
            "the same, example_rng=False": (images, 2, (loaded, unseeded)),
            "the same, seeded in both": (images, 1, (loaded_seeded, iterated)),
            "slow transform": (Slow(1_000), 2, (loaded, iterated)),
        }
        for name, (dataset, epochs, makes, *more) in sets.items():
            budget, only = more or (BUDGET, args.workers)
            for workers in [count for count in args.workers if count in only]:
                results.append(measured(name, dataset, workers, epochs, args.rounds, makes, budget))
                print(line_of(results[-1]), flush=True)
    missed = [
        f"{result['data']}, {result['workers']} workers: {result['ratio']['median']:.2f} of the DataLoader"
        for result in results
        if args.check and result["ratio"]["median"] * args.slack < result["budget"]
    ]
    return conclude(args, {"machine": facts, "rows": results}, missed)


if __name__ == "__main__":
    sys.exit(main())
