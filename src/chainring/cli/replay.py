"""``chainring replay RUN --to K SCRIPT`` and ``chainring batch RUN K SCRIPT``: a run at any iteration, and its examples."""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from chainring._messages import printable
from chainring._runs.finished import FinishedRun, is_like_first, start_in_force, starts_between
from chainring.cli._common import add_command, ended_by_sigterm, new_directory, show
from chainring.testing._replay_process import replay_script
from chainring.testing.replay import UNCHECKED, NoReplay

_REPLAY = """
Repeat a run from its nearest snapshot up to any iteration, bit for bit, with
the script that trained it. The run may have ended, been killed, or still be
running; nothing is changed in its directory, and no rows go to services such
as W&B. What extensions.Recorder has recorded is compared, and a state of which
`chainring thin` has left digests with these. The script ends with the run of
its trainer. Options come before SCRIPT.

examples:
  chainring replay result --to 48123 train.py
  chainring replay result --to 48123 --save state train.py
  chainring replay result --to 48123 train.py --lr 0.1    with its arguments

exit status:
  0  the iteration was reached
  1  the replay differs from the recording
  2  there is no run, or the script fails or ends before"""
_BATCH = """
Print the indices, in the dataset, of the examples that an iteration of a run
was trained on. The iteration is replayed with the script that trained the run,
from the nearest snapshot before; see `chainring replay`. Options come before
SCRIPT.

With --losses, also the loss of each, alone and in evaluation mode, without
dropout and with running statistics, with the parameters before the update.

examples:
  chainring batch result 48123 train.py
  chainring batch result 48123 train.py --lr 0.1    with its arguments
  chainring batch result 48123 --losses train.py    and the loss of each
  chainring batch --json result 48123 train.py | jq .indices

exit status:
  0  they are printed
  1  the replay differs from the recording
  2  there is no run, the script fails, its loader does not tell them, or one
     example alone has no loss"""


def add_to(commands: Any) -> None:
    parser = add_command(commands, "replay", _replay, "the state of a run at any iteration, repeated bit for bit", _REPLAY)
    text = "the iteration; 0 is the state before the first"
    parser.add_argument("--to", type=iteration_number, required=True, metavar="K", help=text)
    parser.add_argument("--save", metavar="DIR", help="save the state as a snapshot in this directory, new or empty")
    add_run(parser)
    add_script(parser)
    parser = add_command(commands, "batch", _batch, "the indices of the examples of an iteration", _BATCH)
    add_run(parser)
    parser.add_argument("iteration", type=iteration_number, metavar="K", help="the iteration; the first is 1")
    parser.add_argument("--losses", action="store_true", help="print the loss of each example too, the largest first")
    add_script(parser)


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", metavar="RUN", help="the directory or address of a run (its out); it is only read")


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the script and its arguments, which come last."""
    parser.add_argument("script", metavar="SCRIPT", help="the script that trained it")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its own (default: those in run.json)")


def iteration_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"an iteration is a whole number of 0 or more, got {text!r}")
    return int(text)


def _replay(options: argparse.Namespace) -> int:
    recorded = RecordedRun(options.run_directory, options.script, options.arguments)
    save = options.save
    path = save and new_directory(save, recorded.directory)
    replayed = recorded.replay(options.to, latest=options.to, save=path, checks_last=True)
    differs = replayed["same"] is False
    if differs and save is not None:
        shutil.rmtree(save)
        save = None
    comparison, notes, observation = (replayed[name] for name in ("comparison", "notes", "observation"))
    facts = {
        "run": options.run_directory, "iteration": options.to, "from": replayed["origin"]["snapshot"],
        "replayed": options.to - replayed["origin"]["iteration"], "same": replayed["same"],
        "difference": replayed["difference"], "differs_at": comparison and comparison["iteration"],
        "observation": observation, "saved": save, "notes": notes,
    }  # fmt: skip
    lines = [f"iteration {options.to}, replayed {describe_replay(replayed)}", *notes]
    lines += [f"  {printable(key)}: {value!r}" for key, value in observation.items()]
    lines += [] if save is None else [f"saved in {printable(save)}"]
    show(options, facts, lines)
    return 1 if differs else 0


def _batch(options: argparse.Namespace) -> int:
    iteration = options.iteration
    if iteration == 0:
        raise ValueError("the first iteration is 1; 0 is the state before it, which had no batch")
    recorded = RecordedRun(options.run_directory, options.script, options.arguments)
    replayed = recorded.replay(iteration, latest=iteration - 1, needs_same_bits=options.losses, losses=options.losses)
    batches, is_same, of_examples = replayed["batches"], replayed["same"], replayed["losses"]
    indices, of_iterators = indices_of(batches), batch_lines(batches)
    facts = {
        "run": options.run_directory, "iteration": iteration, "indices": indices, "batches": batches,
        "from": replayed["origin"]["snapshot"], "same": is_same,
        "difference": replayed["difference"], "notes": replayed["notes"], "losses": of_examples,
    }  # fmt: skip
    lines = []
    if indices is not None:
        lines = [" ".join(map(str, indices)), *(of_iterators if len(of_iterators) > 1 else [])]
        lines += [f"iteration {iteration}, replayed {describe_replay(replayed)}", *replayed["notes"]]
        lines += loss_lines(indices, of_examples) if of_examples else []
    show(options, facts, lines)
    if is_same is False:
        return 1
    if indices is None:
        raise NoReplay("\n".join(of_iterators) or "the updater takes no examples from an iterator")
    return 0


class RecordedRun:
    """A run with its record, of which iterations are replayed by a script."""

    def __init__(self, place: str, script: str, arguments: Sequence[str] = ()) -> None:
        self.place = place
        self.run = FinishedRun.open(place)
        self.run.copy_files()
        self.directory = self.run.directory  # of a run in an object store a copy of what is needed of it
        self.replays = 0
        self._script, self._given = script, arguments
        self._record = self.run.record

    def replay(self, until: int, *, latest: int, checks_last: bool = False, **settings: Any) -> dict[str, Any]:
        """Replay with the arguments with which the run computed an iteration; see `replay_script`.

        What is returned has besides: ``same``, whether it is the recorded run, ``None`` if nothing of it is recorded; how it
        differs, if it does; and ``notes``, sentences about it.
        """
        arguments = self._given or [str(each) for each in start_in_force(self._record, until).get("argv", ())][1:]
        settings["threads"] = self._record.get("threads")
        if checks_last:  # by the iteration after it, where the same start computed that
            recorder, of_both = self.run.sound_recorder(), [start_in_force(self._record, at) for at in (until, until + 1)]
            settings["checks_last"] = bool(recorder and recorder.row(until + 1)) and of_both[0] == of_both[1]
        self.replays += 1
        self.run.copy_nearest(latest)
        try:
            with contextlib.redirect_stdout(sys.stderr), ended_by_sigterm():
                replayed = replay_script(self.directory, self._script, arguments, latest=latest, until=until, **settings)
        except NoReplay as error:  # about what was copied
            raise NoReplay(str(error).replace(str(self.directory), self.place)) from error
        comparison, origin = replayed["comparison"], replayed["origin"]
        compared = [each for each in (comparison, replayed["thinned"]) if each is not None]
        difference = next(filter(None, (each["difference"] for each in compared)), None)
        replayed |= {"difference": difference, "same": difference is None if compared else None, "notes": []}
        if not origin["is_exact"]:
            replayed["notes"].append(
                f"The run was one of {origin['ranks']} ranks: one process computes the same examples with other last bits"
            )
        if comparison is not None and comparison["unchecked"] is not None and "capture" not in settings:
            replayed["notes"].append(f"Not checked: {UNCHECKED.format(comparison['unchecked'])}")
        starts = starts_between(self._record, origin["iteration"], until)
        if not is_like_first(starts):
            places = ", ".join(str(start["iteration"]) for start in starts[1:])
            text = f"The run was started again in between, at iteration {places}, with other settings or arguments"
            replayed["notes"].append(text)
        return replayed


def describe_replay(replayed: Mapping[str, Any]) -> str:
    """Return in words where a replay began, and how it was compared with the recorder."""
    name, same = replayed["origin"]["snapshot"], []
    if (comparison := replayed["comparison"]) is not None:
        count, last = comparison["count"], comparison["last"]
        rest = f", which ends with iteration {last}" if last < replayed["iteration"] else ""
        same.append(f"the same as the recorder says in {count} iteration{'s' * (count != 1)}{rest}")
    if replayed["thinned"] is not None:
        same.append(f"the same as the digests of its {replayed['thinned']['count']} values say")
    nothing = "nothing of it is recorded to compare it with (extensions.Recorder does that)"
    text = replayed["difference"] or ", and ".join(same) or nothing
    return f"from {'the beginning' if name is None else printable(name)}: {text}"


def indices_of(batches: Mapping[str, Any]) -> list[int] | None:
    """Return the indices of the main iterator, or of the only one; ``None`` if they are not known."""
    taken = batches.get("main", next(iter(batches.values()), None))
    return taken if isinstance(taken, list) else None


def batch_lines(batches: Mapping[str, Any]) -> list[str]:
    """Return a line for each iterator from which examples were taken."""
    lines = []
    for name, taken in batches.items():
        if isinstance(taken, list):
            text = " ".join(map(str, taken))
        elif taken is None:
            text = "not known"
        else:
            (epoch, begin), (last, end) = taken["from"], taken["to"]
            text = f"from position {begin} of epoch {epoch} to {end} of {last}; its loader does not tell the indices"
        if taken != []:
            lines.append(f"{printable(name)}: {text}")
    return lines


def loss_lines(indices: Sequence[Any], of_examples: Mapping[str, Any]) -> list[str]:
    """Return a table of the losses of the examples of a batch, the largest first, and what their mean says."""
    losses = of_examples["losses"]
    if len(indices) != len(losses):
        raise NoReplay(f"the batch has {len(losses)} rows of {len(indices)} examples: which loss is whose is not known")
    order = sorted(range(len(losses)), key=lambda row: (not math.isnan(losses[row]), -losses[row]))
    width = max(7, *(len(str(index)) for index in indices))
    lines = ["the loss of each in evaluation mode, before the update:", f"  {'example':>{width}}    row  loss"]
    lines += [f"  {indices[row]!s:>{width}}  {row:>5}  {losses[row]:.6g}" for row in order]
    lines.append(f"mean: {of_examples['mean']:.6g}; of the batch at once: {of_examples['batch']:.6g}")
    if not of_examples["is_mean"]:
        lines.append(
            "The loss of this batch is not the mean of its examples: it sums or compares them, or weighs them itself"
        )
    return lines
