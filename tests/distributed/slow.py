"""Ranks that are slow: which of them is named, and how virtual ranks are dealt among them. Sleep stands for their work."""

import contextlib
import io
import itertools
import re
import statistics
import time

import torch
from torch import nn
from worlds import Row

from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions
from rank_pair import on_ranks
from slow_stages import Data, Model, Steps, rest
from tries import WrongEndError

USUAL = 8  # milliseconds of a stage
NAMED = {"data": "data", "forward": "forward", "backward": "backward", "step": "step", "disk": "other"}
REPORTED, LASTS = 10, 20  # iterations
VIRTUAL, FOLLOWED = 8, 50
FASTEST = 10  # milliseconds for a virtual rank
SPEEDS = [((1, 3), (3, 1)), ((1, 1, 2), (2, 1, 1)), ((1, 1), (1, 1))]  # before and after a change


def be_slow(comm, out, plan, virtual_ranks):
    """What is printed in each part of a plan of slow-downs: (rank, stage, milliseconds more)."""
    milliseconds = dict.fromkeys(NAMED, USUAL)
    torch.manual_seed(0)
    model = Model(milliseconds, rest)
    data = Data(milliseconds, torch.randn(32, 3), spend=rest)
    optimizer = Steps(model.parameters(), milliseconds, rest)
    updater = StandardUpdater(SerialIterator(data, 4 * comm.size), optimizer, model, comm=comm, virtual_ranks=virtual_ranks)
    trainer = Trainer(updater, (len(plan) * LASTS, "iteration"), out=str(out))
    printed, texts = io.StringIO(), []

    def write(trainer):
        with open(f"{out}/of_rank_{comm.rank}", "w") as file:
            rest(milliseconds["disk"])
            file.write(str(trainer.updater.iteration))

    def change(trainer):
        """Begin the next part of the plan; the texts are those of the part before."""
        texts.append(printed.getvalue())
        printed.truncate(printed.seek(0))
        milliseconds.update(dict.fromkeys(NAMED, USUAL))
        rank, stage, more = plan[trainer.updater.iteration // LASTS % len(plan)]
        if comm.rank == rank:
            milliseconds[stage] += more

    trainer.extend(write, trigger=(1, "iteration"))
    trainer.extend(extensions.RankTimes(trigger=(REPORTED, "iteration")))
    trainer.extend(change, trigger=(LASTS, "iteration"), priority=-1)
    with contextlib.redirect_stdout(printed):
        trainer.run()
    return texts


def named(bench, number, draw, place):
    """Only the slow rank is named, with its stage, and nobody while all are alike."""
    size, virtual = number % 3 + 2, number // 3 % 2
    stages = draw.sample(sorted(NAMED), len(NAMED))
    plan = [(None, "data", 0)] + [(draw.randrange(size), stage, draw.randrange(20, 41)) for stage in stages]
    told = on_ranks(size, be_slow, place, plan, size if virtual else None)
    if isinstance(told[0], str):
        raise WrongEndError(told[0])
    for (rank, stage, more), text in zip(plan, told[0], strict=True):
        found = re.findall(r"rank (\d+) \(.*others wait for it; most of it is (\w+),", text)
        if found != ([] if rank is None else [(str(rank), NAMED[stage])]):
            raise WrongEndError(f"{size} ranks, rank {rank} slow in {stage} by {more} ms; named was: {found}")
    return f"runs of {size} ranks"


class Rested(nn.Module):
    """A model for a virtual rank of which a rank takes a time that changes; it counts them."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.milliseconds = self.computed = 0

    def forward(self, x, t):
        rest(self.milliseconds)
        self.computed += 1
        return nn.functional.cross_entropy(self.net(x), t)


def be_dealt(comm, out, speeds, balance, rests=True):
    """The milliseconds of each update, the virtual ranks that this rank computed in it, and the bits of the parameters."""
    torch.manual_seed(0)
    model, times, computed = Rested(), [], []
    data = TupleDataset(torch.randn(96, 5), torch.randint(0, 3, (96,)))
    updater = StandardUpdater(
        SerialIterator(data, 4 * VIRTUAL, seed=1),
        torch.optim.Adam(model.parameters()),
        model,
        comm=comm,
        virtual_ranks=VIRTUAL,
        balance=balance,
    )
    trainer = Trainer(updater, (2 * len(speeds) * FOLLOWED, "iteration"), out=str(out))

    def change(trainer=None):
        times.append(time.perf_counter())
        computed.append(model.computed)
        of_ranks = speeds[updater.iteration // (2 * FOLLOWED) % len(speeds)]
        model.milliseconds = rests * FASTEST * max(of_ranks) / of_ranks[comm.rank]

    trainer.extend(change, trigger=(1, "iteration"))
    change()
    trainer.run()
    took = [1000 * (after - before) for before, after in itertools.pairwise(times)]
    counts = [after - before for before, after in itertools.pairwise(computed)]
    return took, counts, [value.numpy().tobytes() for value in model.state_dict().values()]


def unequal(bench, number, draw, place):
    """A deal with 0.9 of the ideal throughput from the 50th update on, and from the 50th after a change."""
    speeds = SPEEDS[number % len(SPEEDS)]
    size = len(speeds[0])
    alike = all(len(set(of_ranks)) == 1 for of_ranks in speeds)
    told = {"speed": on_ranks(size, be_dealt, place / "speed", speeds, "speed")}
    told["even"] = on_ranks(size, be_dealt, place / "even", speeds, "even", alike)
    if texts := [text for of_ranks in told.values() for text in of_ranks if isinstance(text, str)]:
        raise WrongEndError(texts[0])
    if len({str(bits) for of_ranks in told.values() for *_, bits in of_ranks}) > 1:
        raise WrongEndError(f"speeds {speeds}: the bits are not those of the even deal")
    reached, measured = [], []
    for index, of_ranks in enumerate(speeds):
        at = slice((2 * index + 1) * FOLLOWED, (2 * index + 2) * FOLLOWED)
        took, ideal = (statistics.median(told[balance][0][0][at]) for balance in ("speed", "even"))
        if not alike:  # what an update takes without resting is not dealt
            ideal += VIRTUAL * FASTEST * max(of_ranks) / sum(of_ranks)
        measured.append(round(ideal / took, 3))
        counts = [statistics.median(counts[at]) for _, counts, _ in told["speed"]]
        longest = max(count / speed for count, speed in zip(counts, of_ranks, strict=True))
        reached.append(round(VIRTUAL / sum(of_ranks) / longest, 3))
    print(f"| speeds {speeds}: deals with {reached} of the ideal throughput, measured {measured}", flush=True)
    if min(reached) < 0.9:
        raise WrongEndError(f"speeds {speeds}: the deals have {reached} of the ideal throughput")
    return ", then ".join(":".join(map(str, of_ranks)) for of_ranks in dict.fromkeys(speeds))


ROWS = [
    Row(
        "named",
        f"{len(NAMED)} slow-downs in a run of 2 to 4 ranks, one after the other: of one rank, in data, forward, backward, "
        "step or what it writes to the disk",
        "`RankTimes` names that rank and the stage at its next report; a rank that only waits is never named",
        20,
        named,
        2,
    ),
    Row(
        "unequal",
        "two or three ranks of different speeds, which change in mid-run",
        'no bit differs; within 50 updates `balance="speed"` deals with 0.9 of the ideal throughput',
        6,
        unequal,
    ),
]
