"""What updates of several ranks cost beside those of DDP: as virtual ranks, and of a model that is not in DDP; and options.

Run it on a machine that has nothing else to do::

    python benchmarks/virtual_ranks.py

On several ranks, which are processes over gloo with a thread each, the plain update is that of a model in DDP; on one it is
that of the updater without ``virtual_ranks``. Rows of 0 virtual ranks are of a model that the updater exchanges gradients
of by itself. Rows of an option have the same update without it as the plain one: ``survive=True``, ``audit=1``,
``balance="speed"`` on ranks that are equally fast. Both are made in the same processes and take turns, some updates each,
and a ratio is the median of those of neighbouring turns. A figure is the median of the rounds, each in new processes. The
bytes of an update are those of all ranks together, beside those of a ring all-reduce of the gradients.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _measure import Figure, begin, conclude, figure, parser_of
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.nn.parallel import DistributedDataParallel

from chainring import Reporter
from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.nn import Classifier
from chainring.parallel import create_communicator
from chainring.training.updaters import StandardUpdater

BATCH = 100
WIDTHS = {"10^6": (784, 800, 400, 10), "10^7": (784, 2600, 2600, 500, 10)}
"""Of the layers of perceptrons, by about how many parameters they have."""
ROWS = [("10^6", *row) for row in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 8), (4, 4))]
ROWS += [("10^7", *row) for row in ((1, 1), (1, 8), (2, 2))]
ROWS += [(name, 2, 0) for name in WIDTHS]
ROWS += [("10^6", 2, 0, "survive"), ("10^7", 2, 0, "survive"), ("10^6", 2, 2, "survive"), ("10^6", 2, 8, "balance")]
ROWS += [("10^6", 1, 8, "audit"), ("10^6", 2, 8, "audit")]
OPTIONS: dict[str, dict[str, Any]] = {"": {}, "survive": {}, "balance": {"balance": "speed"}, "audit": {"audit": 1}}
TURNS, UPDATES = 10, 10
"""Of each updater in a round, and of a turn."""
BUDGETS = {(2, 2, ""): 1.05, (2, 0, ""): 1.05, (2, 0, "survive"): 1.01, (2, 2, "survive"): 1.01, (2, 8, "balance"): 1.01}
BUDGETS[1, 8, "audit"] = 1 + 1 / 8 + 0.01  # one of two ranks has five virtual ranks where both had four
"""Of the ratio of the times, by ranks, virtual ranks and option."""
BYTES_BUDGET = 1.1
Result = dict[str, Any]


def perceptron(name: str) -> nn.Module:
    torch.manual_seed(0)
    widths = WIDTHS[name]
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def updater_of(name: str, comm: Any, count: int, is_in_ddp: bool, **options: Any) -> StandardUpdater:
    """Return an updater of a perceptron, whose model may be in DDP where there are ranks."""
    predictor = perceptron(name)
    draw = np.random.default_rng(0)
    data = draw.standard_normal((5000, 784), np.float32), draw.integers(0, 10, 5000)
    optimizer = torch.optim.SGD(predictor.parameters(), lr=0.01)
    model = Classifier(DistributedDataParallel(predictor) if comm.size > 1 and is_in_ddp else predictor)
    iterator = SerialIterator(TupleDataset(*data), BATCH)
    options |= {"comm": comm if comm.size > 1 else None, "virtual_ranks": count or None}
    updater = StandardUpdater(iterator, optimizer, model, **options)
    iterator.share(comm.rank, comm.size)  # as a Trainer does
    updater.start()
    return updater


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Count what this rank sends by functions of ``torch.distributed``, as the usual algorithms send it."""
    sent: list[int] = []
    others = dist.get_world_size() - 1

    def of_sum(tensor: Tensor, *_: Any, **__: Any) -> int:
        return 2 * others * tensor.nbytes // (others + 1)

    def of_gathering(_: Any, tensor: Tensor, *__: Any, **___: Any) -> int:
        return others * tensor.nbytes

    def of_parts(_: Any, tensor: Tensor, __: Any = None, sizes: Any = None, **___: Any) -> int:
        own = tensor.numel() // (others + 1) if sizes is None else sizes[dist.get_rank()]
        return tensor.nbytes - own * tensor.itemsize

    names = {
        "all_reduce": of_sum, "all_gather": of_gathering, "all_gather_into_tensor": of_gathering,
        "all_to_all_single": of_parts,
    }  # fmt: skip
    before = {name: getattr(dist, name) for name in names}

    def counting(name: str, count: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent.append(count(*args, **kwargs))
            return before[name](*args, **kwargs)

        return call

    for name, count in names.items():
        setattr(dist, name, counting(name, count))
    try:
        yield sent
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def live(
    rank: int, size: int, port: int, name: str, count: int, option: str, args: argparse.Namespace, results: Any
) -> None:
    """In the process of a rank: let both updaters take turns."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in where.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    survivor = create_communicator("cpu", survive=True) if option == "survive" else None
    comm = create_communicator("cpu")
    is_compared = bool(option)  # with the same update without it
    plain = updater_of(name, comm, count if is_compared else 0, not is_compared)
    virtual = updater_of(name, survivor or comm, count, not is_compared and count > 0, **OPTIONS[option])
    reporter = Reporter()
    for model in (plain.get_model("main"), virtual.get_model("main")):
        reporter.add_observer("main", model)
    with reporter.scope({}):
        times = {updater: [turn(updater, comm, args) for _ in range(2)] for updater in (plain, virtual)}
        for number in range(args.turns):
            for updater in (plain, virtual) if number % 2 else (virtual, plain):
                times[updater].append(turn(updater, comm, args))
        sent = 0.0
        if size > 1:
            with counted_bytes() as counts:
                virtual.update()
            ring = 2 * (size - 1) * sum(parameter.nbytes for parameter in perceptron(name).parameters())
            sent = sum(comm.gather_object(sum(counts))) / ring
    pairs = zip(times[virtual][2:], times[plain][2:], strict=True)
    if rank == 0:
        ratio = statistics.median(one / other for one, other in pairs)
        results.put((statistics.median(times[plain][2:]) / args.updates, ratio, sent))
    comm.barrier()
    for each in filter(None, (comm, survivor)):
        each.close()


def turn(updater: StandardUpdater, comm: Any, args: argparse.Namespace) -> float:
    """Seconds of some updates, of the processor if that is asked for."""
    comm.barrier()
    clock = time.process_time if args.cpu else time.perf_counter
    began = clock()
    for _ in range(args.updates):
        updater.update()
    return clock() - began


def measured(name: str, size: int, count: int, args: argparse.Namespace, option: str = "") -> Result:
    context = multiprocessing.get_context("fork")
    rounds = []
    for _ in range(args.rounds):
        results = context.Queue()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # that of torchrun is in its agent
        told = size, store.port, name, count, option, args, results
        ranks = [context.Process(target=live, args=(rank, *told), daemon=True) for rank in range(size)]
        for rank in ranks:
            rank.start()
        rounds.append(_first(results, ranks))
        for rank in ranks:
            rank.join()
    plain, ratios, sent = zip(*rounds, strict=True)
    return {
        "row": f"{name} parameters{option and f', {option}'}",
        "ranks": size, "virtual": count, "plain_ms": 1e3 * statistics.median(plain),
        "ratio": vars(figure(ratios)), "rounds": ratios, "budget": BUDGETS.get((size, count, option)),
        "bytes": sent[0] if size > 1 else None,
    }  # fmt: skip


def _first(results: Any, ranks: list[Any]) -> Any:
    while results.empty():
        if any(rank.exitcode for rank in ranks):
            raise RuntimeError("a rank is timed to its end, and one has failed; see above")
        time.sleep(0.1)
    return results.get()


def line_of(result: Result) -> str:
    ratio, budget = Figure(**result["ratio"]), result["budget"]
    spread = f"({ratio.least:.3f} to {ratio.most:.3f})"
    limit = "" if budget is None else f"<= {budget:g} {'met' if ratio.median <= budget else 'exceeded'}"
    sent = "" if result["bytes"] is None else f"{result['bytes']:.4f} x the ring"
    places = f"{result['ranks']:>6}{result['virtual']:>9}{result['plain_ms']:>12.2f}"
    return f"{result['row']:<26}{places}{ratio.median:>9.3f} {spread:<20}{limit:<18}{sent}".rstrip()


def failures(results: list[Result], slack: float) -> list[str]:
    """Return the rows that exceed their budget by more than the slack."""
    failed = []
    for result in results:
        row = f"{result['row']}, {result['ranks']} ranks, {result['virtual']} virtual"
        if result["budget"] is not None and result["ratio"]["median"] > slack * result["budget"]:
            failed.append(f"{row}: {result['ratio']['median']:.3f} of the time, the limit is {slack * result['budget']:g}")
        if result["bytes"] is not None and result["bytes"] > BYTES_BUDGET:
            failed.append(f"{row}: {result['bytes']:.3f} x the bytes of a ring all-reduce, the limit is {BYTES_BUDGET:g}")
    return failed


def options() -> argparse.Namespace:
    parser = parser_of(__doc__, slack=1.2)
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"of a turn (default: {UPDATES})")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of each updater in a round (default: {TURNS})")
    parser.add_argument(
        "--rows", nargs="+", metavar="PARAMETERS/RANKS/VIRTUAL[/OPTION]", help="such as 10^6/2/2 (default: all)"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="the time of the processor of rank 0, on a machine that others use"
    )
    args = parser.parse_args()
    if min(args.rounds, args.updates, args.turns) < 1:
        parser.error("--rounds, --updates and --turns are at least 1")
    args.rows = args.rows or ["/".join(map(str, row)) for row in ROWS]
    if wrong := [row for row in args.rows if row not in {"/".join(map(str, row)) for row in ROWS}]:
        parser.error(f"there is no row {wrong[0]}; there are {', '.join('/'.join(map(str, row)) for row in ROWS)}")
    return args


def main() -> int:
    args = options()
    facts = begin()
    turns = f"{args.turns} turns of {args.updates} updates"
    print(f"median of {args.rounds} rounds of {turns}, batches of {BATCH} over all ranks\n")
    figures = f"{'ratio':>9} {'(least to most)':<20}{'budget':<18}bytes"
    print(f"{'an update of':<26}{'ranks':>6}{'virtual':>9}{'plain, ms':>12}{figures}")
    results = []
    for row in args.rows:
        name, size, count, *option = row.split("/")
        results.append(measured(name, int(size), int(count), args, *option))
        print(line_of(results[-1]), flush=True)
    return conclude(args, {"machine": facts, "rows": results}, failures(results, args.slack) if args.check else [])


if __name__ == "__main__":
    sys.exit(main())
