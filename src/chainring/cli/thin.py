"""``chainring thin RUN --every "10 epoch"``: digests in place of snapshots that a replay makes again."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from chainring._files import DirectoryLock
from chainring._messages import list_names, printable
from chainring._runs.comparison import differing_digests, digests_of
from chainring._runs.finished import FinishedRun, is_like_first, saved_trainers, starts_between
from chainring.cli._common import add_command, show
from chainring.cli.replay import RecordedRun
from chainring.serializers._store import THINNED, CorruptError, SavedSnapshot, Thinned, find_snapshot

_EVERY = re.compile(r"""\(?\s*(\d+)\s*,?\s*["']?(epoch|iteration)s?["']?\s*\)?""")
_MOST_SHOWN = 5
_HELP = """
Free the disk of snapshots that can be made again. Of those that were taken at
intervals, one in each --every stays; the others keep digests of what they had:
`chainring replay` makes any of them again, and compares it with the digests.
These stay too: the first and the newest, links and what they lead to, those
with a fixed name, and what a replay may not make again: after a start with
other settings, of several ranks, not bit-exact.

examples:
  chainring thin result --every "10 epoch" --dry-run           what would go
  chainring thin result --every "10 epoch" --script train.py   try one first
  chainring thin result --every "1000 iteration"

exit status:
  0  it is done
  1  a snapshot is damaged, and stays; or SCRIPT makes another state
  2  there is no run, it is going on, or it is in an object store"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "thin", run, "free the disk of snapshots that a replay makes again", _HELP)
    text = 'the interval in which one stays, such as "10 epoch"'
    parser.add_argument("--every", type=_every, required=True, metavar="INTERVAL", help=text)
    parser.add_argument("--dry-run", action="store_true", help="only say what would go, and how many bytes; change nothing")
    text = "first make one of them again with the script that trained it; if it is another, nothing goes"
    parser.add_argument("--script", metavar="SCRIPT", help=text)
    parser.add_argument("run_directory", metavar="RUN", help="the directory of the run (its out), which is not going on")


def _every(text: str) -> tuple[int, str]:
    match = _EVERY.fullmatch(text.strip())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f'an interval is written "10 epoch" or "1000 iteration", got {text!r}')
    return int(match[1]), match[2]


@dataclass(frozen=True)
class _Choice:
    """A snapshot, and what becomes of it."""

    saved: SavedSnapshot
    size: int  # bytes of its files
    iteration: int = 0
    origin: int | None = None  # the iteration from which it is made again; None if it stays
    reason: str = ""  # why it stays, where it is not the one of its interval
    is_damaged: bool = False


def run(options: argparse.Namespace) -> int:
    run = FinishedRun.open(options.run_directory)
    if not run.store.files.is_local:
        raise ValueError(f"{run.place} is in an object store, and a run in a directory can be thinned: copy it to one first")
    if not run.record:
        raise ValueError(f"{run.place} has no run.json, so that it is not known with which settings its states were made")
    choices: list[_Choice] = []
    lock = None if options.dry_run else DirectoryLock(run.directory)
    try:
        for name, manifest in run.store.listing() if lock else ():
            if manifest is not None and THINNED in manifest.about:
                run.store.thin(name, None)  # removes what a kill has left
        chosen = _choose(run, *options.every, reads_content=lock is not None)
        for choice in tqdm(chosen, "thin", delay=2.0, file=sys.stderr, disable=None):
            choices.append(choice)
            if choice.origin is None or lock is None:
                continue
            try:
                digests = digests_of(choice.saved)
            except CorruptError as error:
                choices[-1] = replace(choice, origin=None, reason=str(error), is_damaged=True)
                continue
            if options.script is not None and (difference := _try(options, choice, digests)) is not None:
                print(f"chainring: nothing has gone: {printable(difference)}", file=sys.stderr)
                return 1
            options.script = None  # one is enough
            run.store.thin(choice.saved.name, digests)
    finally:
        if lock is not None:
            lock.release()
    _show(options, choices)
    return int(any(choice.is_damaged for choice in choices))


def _choose(run: FinishedRun, count: int, unit: str, *, reads_content: bool) -> Iterator[_Choice]:
    """Yield what becomes of each snapshot of the trainer, the earliest first, and then the damaged ones.

    One is made again from the one before it that stays, which has the settings of the run and the states of its generators,
    whatever their seeds were; so both have to be of one rank and exact, and no other settings may hold in between.
    """
    trainers = list(reversed([*saved_trainers(run.store)]))
    leading = {target: link for link, target in run.store.files.links().items()}
    newest = {manifest.about.get("series"): saved.name for saved, manifest, _ in trainers}
    origin, interval = 0, -1  # of the last that stays and is exact; -1 if there is none
    for saved, manifest, ranks in trainers:
        about, choice = manifest.about, _Choice(saved, sum(size for size, _ in manifest.files.values()))
        inexact = f"it is of {ranks} ranks, and a replay is of one" if ranks > 1 else about.get("not bit-exact")
        reason = ""
        if inexact is not None:
            interval, reason = -1, f"a replay may not make it again: {inexact}"
        elif "values" in about:
            reason = "it is kept as one of the best"
        elif saved.name in leading:
            reason = f"{leading[saved.name]} is a link to it"
        elif manifest.name != saved.name or "series" not in about or "{" not in (about["series"] or "{"):
            reason = "its name is fixed, or a person has put it there"
        elif newest[about["series"]] == saved.name:
            reason = "it is the newest"
        if reason:
            yield replace(choice, reason=reason)
            continue
        position = about.get("epoch") if unit == "epoch" else manifest.iteration
        if type(position) is not int:
            raise ValueError(f'{saved} does not tell its epoch; give an interval such as --every "1000 iteration"')
        is_next = position // count != interval
        if not is_next and is_like_first(starts_between(run.record, origin, manifest.iteration)):
            yield replace(choice, origin=origin, iteration=manifest.iteration)
            continue
        try:
            saved.verify(content=reads_content)
        except CorruptError as error:
            yield replace(choice, reason=str(error), is_damaged=True)
            continue
        origin, interval = manifest.iteration, position // count
        yield replace(choice, reason="" if is_next else "the run has started again with other settings before it")
    for name in sorted({*run.store.names()} - {saved.name for saved, _, _ in trainers}):
        try:
            run.store.snapshot(name).verify(content=reads_content)
        except Thinned:
            continue
        except CorruptError as error:
            yield _Choice(run.store.snapshot(name), 0, reason=str(error), is_damaged=True)


def _try(options: argparse.Namespace, choice: _Choice, digests: Mapping[str, str]) -> str | None:
    """Make a snapshot again; return in words how it differs."""
    recorded = RecordedRun(options.run_directory, options.script)
    with tempfile.TemporaryDirectory(prefix="chainring-thin-") as folder:
        place = Path(folder, "made")
        replayed = recorded.replay(choice.iteration, latest=choice.origin or 0, save=str(place))
        names = differing_digests(digests, digests_of(find_snapshot(place)))
    if replayed["same"] is False or not names:
        return replayed["difference"]  # type: ignore[no-any-return]
    return f"{options.script} makes {choice.saved} again with another {names[0]}, and {len(names) - 1} more values differ"


def _show(options: argparse.Namespace, choices: list[_Choice]) -> None:
    gone = [choice for choice in choices if choice.origin is not None]
    stay = {choice.saved.name: choice.reason for choice in choices if choice.origin is None}
    size = sum(choice.size for choice in gone)
    facts = {
        "run": options.run_directory, "dry_run": options.dry_run, "thinned": [choice.saved.name for choice in gone],
        "bytes": size, "stay": stay, "damaged": [choice.saved.name for choice in choices if choice.is_damaged],
    }  # fmt: skip
    verb = "would be" if options.dry_run else "are"
    lines = [f"thinned: {choice.saved.name}, {choice.size:,} bytes" for choice in gone]
    by_reason: dict[str, list[str]] = {}
    for name, reason in stay.items():
        by_reason.setdefault(reason or "one of each interval", []).append(name)
    lines += [f"stay: {list_names(names, _MOST_SHOWN)}: {reason}" for reason, names in by_reason.items()]
    lines.append(f"{len(gone)} of {len(choices)} snapshots {verb} thinned, {size:,} bytes")
    show(options, facts, map(printable, lines))
