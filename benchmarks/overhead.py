"""What an iteration costs over the raw PyTorch loop that does the same work, beside other libraries in the same run.

Run it on a machine that has nothing else to do::

    python benchmarks/overhead.py

A figure is the median of the rounds. All loops take turns, a quarter of an epoch each, and a round is the median of its
epochs, of each of which that of the loop it is compared with is subtracted. "the raw loop again" is the raw loop against
itself: what it shows is noise. Where other programs run, `--clock cpu` leaves out the time that the machine gives to them.

The budgets in microseconds were set on a machine whose raw loop took 96 us. Beside each stands whether the same part of
the raw loop's time is kept to, which can be compared between machines; `--check` holds to the microseconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import _chainring
import _loops
import _peers
from _measure import Figure, Plan, Row, Times, begin, conclude, differences, figure, measure, parser_of, seconds

RAW, RAW_WITH_LOG, RAW_BF16, BARE = "raw loop", "raw loop with means, evaluation and log", "raw loop in bf16", "no extension"
RAW_WITH_SAVE = "the same raw loop and torch.save an epoch"
REFERENCE = 96.0
"""Microseconds that the raw loop took on the machine on which the budgets were set."""
NOISE = 2.0
"""Microseconds by which equal rows differ on a machine of two shared cores; `--check` does not count them."""
FIRST_UPDATE_MS = 50.0
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def rows_of(out: Path, peers: dict[str, _peers.Loop]) -> list[Row]:
    """Every row, those of one comparison side by side; budgets in microseconds an iteration."""
    return [
        Row(RAW, _loops.raw),
        Row(BARE, partial(_chainring.bare, out=out), over=RAW, budget=0.0),
        Row("an idle extension more", partial(_chainring.idle, out=out), over=BARE, budget=0.3, share=_chainring.IDLE),
        Row("a recorder", partial(_chainring.recorded, out=out), over=BARE, budget=30.0),
        Row("a callback", partial(_chainring.with_callback, out=out), over=BARE, budget=8.0),
        Row("in stages (an own update_core)", partial(_chainring.staged, out=out), over=BARE, budget=8.0),
        Row("the raw loop again", _loops.raw, over=RAW),
        Row(RAW_WITH_LOG, partial(_loops.raw_with_log, out=out)),
        Row("the script's extensions", partial(_chainring.with_log, out=out), over=RAW_WITH_LOG, budget=5.0),
        Row(RAW_WITH_SAVE, partial(_loops.raw_with_log, out=out, saves=True)),
        Row(
            "the same and a snapshot an epoch",
            partial(_chainring.with_log, out=out, saves=True),
            over=RAW_WITH_SAVE,
            budget=12.0,
        ),
        Row(RAW_BF16, _loops.raw_bf16),
        Row("bf16", partial(_chainring.bare, out=out, precision="bf16"), over=RAW_BF16),
        *[Row(name, loop, over=RAW) for name, loop in peers.items()],
    ]


MICROSECONDS = 1e6 / _loops.EPOCH
"""An iteration, of a second an epoch."""


def more(row: Row, times: Times) -> Figure:
    """Microseconds an iteration beyond the row that it is over."""
    assert row.over is not None
    return figure([MICROSECONDS * each / row.share for each in differences(row.name, row.over, times)])


def result_of(row: Row, times: Times) -> dict[str, Any]:
    """Return a row's figures, as they go into the table and the file."""
    rounds = [MICROSECONDS * each for each in seconds(row.name, times)]
    result: dict[str, Any] = {"row": row.name, "us": figure(rounds).median, "rounds": rounds}
    if row.over is None:
        return result
    beyond, raw = more(row, times), MICROSECONDS * figure(seconds(RAW, times)).median
    own = {"over": row.over, "more": vars(beyond), "ratio": beyond.median / raw, "budget": row.budget, "share": row.share}
    return result | own


def verdict(value: float, budget: float | None) -> str:
    if budget is None:
        return ""
    return "met" if value <= budget else "exceeded"


def line_of(result: dict[str, Any]) -> str:
    head = f"{result['row']:<42}{result['us']:>9.1f}"
    if "more" not in result:
        return head
    more, budget = Figure(**result["more"]), result["budget"]
    spread = f"({more.least:+.2f} to {more.most:+.2f})"
    limit = "" if budget is None else f"<= {budget:g} {verdict(more.median, budget)}"
    part = "" if budget is None else f"<= {budget / REFERENCE:.3f} {verdict(result['ratio'], budget / REFERENCE)}"
    return f"{head}{more.median:>+10.2f} {spread:<22}{limit:<16}{result['ratio']:>+8.3f}  {part:<18} over {result['over']}"


def print_table(results: list[dict[str, Any]], missing: list[str], first: Figure) -> None:
    print(f"{'us an iteration':<42}{'whole':>9}{'more':>10} {'(least to most)':<22}{'budget':<16}{'ratio':>8}  as a ratio")
    for result in results:
        print(line_of(result).rstrip())
    for name in missing:
        print(f"{name:<42}  missing: pip install --group bench")
    spread = f"({first.least:.1f} to {first.most:.1f})"
    print(
        f"{'from run() to the first update, ms':<42}{'':>9}{first.median:>10.1f} {spread:<22}"
        f"<= {FIRST_UPDATE_MS:<4g} {verdict(first.median, FIRST_UPDATE_MS)}"
    )
    print(f'"ratio" is "more" as a part of the raw loop; so are budgets, where that takes {REFERENCE:g} us.')


def failures(results: list[dict[str, Any]], first: Figure, slack: float) -> list[str]:
    """Return the rows that exceed their budget by more than the slack, noise not counted."""
    failed = []
    for result in results:
        if result.get("budget") is None:
            continue
        limit = slack * (result["budget"] + NOISE / result["share"])
        if result["more"]["median"] > limit:
            failed.append(f"{result['row']}: {result['more']['median']:+.2f} us an iteration, the limit is {limit:g}")
    if first.median > slack * FIRST_UPDATE_MS:
        failed.append(f"from run() to the first update: {first.median:.1f} ms, the limit is {slack * FIRST_UPDATE_MS:g}")
    return failed


def options() -> argparse.Namespace:
    parser = parser_of(__doc__, slack=2.0, limit=f"SLACK x (budget + {NOISE:g} us of noise)")
    parser.add_argument("--epochs", type=int, default=8, help="of a round (default: 8)")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="(default: wall)")
    args = parser.parse_args()
    if min(args.rounds, args.epochs) < 1:
        parser.error(f"--rounds and --epochs are at least 1, got {args.rounds} and {args.epochs}")
    return args


def main() -> int:
    args = options()
    facts = begin()
    print(
        f"median of {args.rounds} rounds of {args.epochs} epochs, {args.clock} clock, batches of {_loops.BATCH}, "
        f"{_loops.EPOCH} an epoch\n"
    )
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
        out = Path(directory)
        first = figure([_chainring.time_to_first_update(out) for _ in range(args.rounds)])
        loops, missing = _peers.installed(out)
        rows = rows_of(out, loops)
        times = measure(rows, Plan(_loops.EPOCH, args.rounds, args.epochs, CLOCKS[args.clock]))
    results = [result_of(row, times) for row in rows]
    print_table(results, missing, first)
    report = {"machine": facts, "rows": results, "missing": missing, "first_update_ms": vars(first)}
    return conclude(args, report, failures(results, first, args.slack) if args.check else [])


if __name__ == "__main__":
    sys.exit(main())
