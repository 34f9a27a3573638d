"""Bits that are flipped on one rank, in every update of a run whose virtual ranks are audited."""

from worlds import Row

from audits import COUNT, train_all
from rank_pair import on_ranks
from tries import WrongEndError

FLIPS = 60  # in a run
NUMBERS = {"gradient": 24, "activation": 32, "batch": 24, "parameter": 40, "moment": 40}  # of which one is spoilt
OF_STATE = ("parameter", "moment")
AT_ONCE = ("gradient", "activation", "batch")


def faults_of(draw, size):
    """Flips in so many updates, one in each; what spoils a state is given two updates more to be found."""
    faults, iteration, spoilt = [], 2, draw.randrange(size)  # one rank, since a state may spoil nothing for a while
    while len(faults) < FLIPS:
        kind = draw.choice([*AT_ONCE, *OF_STATE] if size > 2 else AT_ONCE)
        rank, number = draw.randrange(size), -1 if kind == "moment" else draw.randrange(COUNT)
        rank = spoilt if kind in OF_STATE else rank
        index = draw.randrange(NUMBERS[kind])
        if kind == "batch" and index % 6 == 0:
            index += 1  # not the number of the row
        lasts = size > 2 and kind in AT_ONCE and draw.random() < 0.3
        faults.append((kind, rank, iteration, number, lasts, index, draw.randrange(32)))
        iteration += 3 if kind in OF_STATE else 1
    return faults, iteration + 3


def flipped(bench, number, draw, place):
    """All virtual ranks are audited: the run ends with the parameters and moments of one without a fault."""
    size = number % 3 + 1
    faults, stop = faults_of(draw, size)
    settings = {"stop": stop, "has_norm": False}
    runs = [((), settings), (tuple(faults), {**settings, "audit": COUNT})]
    if size == 1:
        results = train_all(None, place, runs)
    else:
        told = on_ranks(size, train_all, place, runs, seconds=300)
        if texts := [text for text in told if isinstance(text, str)]:
            raise WrongEndError(texts[0])
        results = told[0]
    ((right, _), *_), ((bits, _), said, error) = results
    if error is not None or bits != right:
        raise WrongEndError(f"{size} ranks: {error or 'a flip has reached a step'}; {faults}")
    for kind, rank, iteration, *_ in faults:
        texts = [text for text in said if text.startswith(f"in iteration {iteration + 1} ")]
        spoilt = {kind_rank[1] for kind_rank in faults if kind_rank[0] in OF_STATE}  # which may show later
        if not all(any(f"rank {each} (" in text for each in {rank, *spoilt}) for text in texts):
            raise WrongEndError(f"not rank {rank} is named for {kind} in {iteration + 1}: {texts}")
    return f"runs of {size} rank{'s' * (size > 1)}"


ROWS = [
    Row(
        "flipped",
        f"{FLIPS} bits flipped in a run of 1, 2 or 3 ranks, one in an update: in a gradient, an activation, a batch, with "
        "three ranks also a parameter or moment, once or each time",
        "`audit` finds it before the step and names the rank; parameters and moments end as without a fault",
        167,
        flipped,
    )
]
