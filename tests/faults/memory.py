"""Memory runs out on one rank, somewhere in an update, an evaluation or a snapshot."""

from collections import Counter

from bench import Row

import memory_errors
from memory_errors import BITS, STAGES, Plan, trained
from rank_pair import on_ranks
from tries import WrongEndError

PLANS_OF_A_TRY = 10


def out_of_memory(bench, number, draw, place):
    """Plants errors into runs of one to three ranks, each of which ends with the bits of the run without, or is refused."""
    size, accumulate = number % 3 + 1, draw.choice([1, 2])
    settings = {
        "accumulate": accumulate,
        "updater_class": draw.choice([memory_errors.training.StandardUpdater, memory_errors.Own]),
    }
    calls = (reference := trained(None, Plan(), **settings))["calls"]
    plans = [
        (stage, draw.randint(1, calls[stage] // size), draw.choice([1, 1, 2, 3]), draw.randrange(3))
        for stage in draw.choices(STAGES, k=PLANS_OF_A_TRY)
    ]
    failing = draw.randrange(size)
    if size == 1:
        found = [[trained(None, Plan(*plan), **settings) for plan in plans]]
    else:
        # After an error that ends a run, its communicator is not used again.
        runs = [on_ranks(size, memory_errors.trained_on_ranks, failing, [plan], settings) for plan in plans]
        found = [[outcomes[rank][0] for outcomes in runs] for rank in range(size)]
    counts = Counter()
    for plan, *outcomes in zip(plans, *found, strict=True):
        counts["errors"] += 1
        if all(isinstance(outcome, dict) for outcome in outcomes):
            keys = BITS if size == 1 else ("rows", "recorded")  # of the first rank; it may hold a part of the counts
            wrong = [key for key in keys if outcomes[0][key] != reference[key]]
            wrong += ["tensors of a rank" for outcome in outcomes if outcome["tensors"] != reference["tensors"]]
            if wrong:
                raise WrongEndError(f"after {plan} on rank {failing} of {size} these differ: {wrong}")
            counts["with the same bits"] += 1
            continue
        said = "".join(map(str, outcomes))
        if "hint: this machine has" not in said or "take less memory" not in said:
            raise WrongEndError(f"after {plan} on rank {failing} of {size} no numbers and no remedy: {said[:2000]}")
        if plan[0] in memory_errors.RETRIED and plan[2] == 1:
            raise WrongEndError(f"{plan} on rank {failing} of {size} was refused: {said[:2000]}")
        counts["refused with numbers and a remedy"] += 1
    return counts


ROWS = [
    Row(
        "memory", "memory runs out once to three times on one of 1 to 3 ranks: in batch, forward, backward, step, "
        "evaluation, snapshot", "the bits of the run without, or a refusal with the numbers and what helps", "errors",
        500, out_of_memory,
    ),
]  # fmt: skip
