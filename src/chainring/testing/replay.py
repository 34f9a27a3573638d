"""replay: restores a trainer as it was at any iteration of an earlier run."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from chainring._checks import is_integer
from chainring._runs.finished import FinishedRun
from chainring.testing._replaying import NoReplay, Replay, compare_with_record
from chainring.testing._resumed_runs import call_make_trainer
from chainring.training._run_directory import read_record
from chainring.training.trainer import Trainer


class ReplayDiffers(AssertionError):  # noqa: N818 - it is read as a finding
    """The replay differs from the recorded run; the text names the iteration and what differs.

    Example::

        with pytest.raises(ReplayDiffers):
            replay(make_trainer_with_another_learning_rate, "result", 100)
    """


def replay(make_trainer: Callable[..., Any], out: str | os.PathLike[str], iteration: int) -> Trainer:
    """Return the trainer as it was after an iteration of an earlier run, bit for bit.

    It is a new trainer, which starts from the last snapshot of the run at or before that iteration, or from the beginning
    if there is none, and repeats the iterations from there, with its own extensions. The run may have ended, been killed,
    or still be running: it is only read, and the trainer's ``out`` is a separate directory, which is removed with it. No
    rows are sent to services, such as Weights & Biases. If a `Recorder` has recorded the run, each iteration is compared
    with the record.

    The returned trainer has run: its gradients and its observation are those of the iteration, and Python's, NumPy's and
    torch's generators are in the same states, so ``trainer.updater.update()`` computes the next update. To continue
    training, load ``trainer.state_dict()`` into a new trainer.

    Example::

        trainer = replay(make_trainer, "result", 48_123)
        trainer.updater.get_model("main").predictor.l1.weight.grad.abs().max()

    Args:
        make_trainer: a function that returns a trainer that has not run, created as in the run. It is called with the
            ``out`` to use, or without arguments if it has no such parameter; the trainer's ``out`` is set in any case.
        out: the directory of the run, or its address in an object store.
        iteration: the iteration; 0 is the state before the first.

    Raises:
        ReplayDiffers: the replay differs from a recorded iteration.
        NoReplay: the run, or the new trainer, does not reach that iteration; or the run had several ranks and computed
            other bits than one process does.
        FileNotFoundError: there is no such run.
        TypeError: the function does not return a trainer, or the iteration is not an integer.
        ValueError: the iteration is negative.
    """
    if not is_integer(iteration):
        raise TypeError(f"an iteration is an integer, got {iteration!r}")
    if iteration < 0:
        raise ValueError(f"an iteration is 0, the state before the first, or more; got {iteration}")
    directory = Path(os.path.realpath(tempfile.mkdtemp(prefix="chainring-replay-")))
    try:
        earlier = _open(out, directory / "run")
        earlier.copy_nearest(int(iteration))
        run = earlier.directory
        with recorded_threads(read_record(run).get("threads")):
            trainer = call_make_trainer(make_trainer, str(directory / "out"))
            if not isinstance(trainer, Trainer):
                raise TypeError(f"make_trainer returns a Trainer that has not run, and returned a {type(trainer).__name__}")
            replaying = _replay(trainer, run, directory, int(iteration))
        comparison = compare_with_record(earlier, trainer, replaying.origin, int(iteration))
        if comparison is not None and comparison.difference is not None:
            raise ReplayDiffers(comparison.difference)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    weakref.finalize(trainer, shutil.rmtree, directory, ignore_errors=True)
    return trainer


def _open(out: str | os.PathLike[str], copies: Path) -> FinishedRun:
    try:
        run = FinishedRun.open(out, copies)
    except ValueError as error:  # it is a snapshot
        raise NoReplay(str(error)) from error
    run.copy_files()
    return run


def _replay(trainer: Trainer, run: Path, directory: Path, iteration: int) -> Replay:
    with tqdm(desc=f"replay to iteration {iteration}", unit="it", delay=3.0, mininterval=0.5, disable=None) as bar:
        replaying = Replay(
            trainer, run, directory, latest=iteration, until=iteration,
            on_iteration=lambda reached: _advance(bar, reached - replaying.origin.iteration),
        )  # fmt: skip
        bar.total = iteration - replaying.origin.iteration
        replaying.run(type(trainer).run)
    return replaying


def _advance(bar: Any, count: int) -> None:
    bar.update(count - bar.n)


@contextmanager
def recorded_threads(threads: Any) -> Iterator[None]:
    """Inside, let torch use as many threads as the run did, because sums over other numbers of them round otherwise."""
    before = torch.get_num_threads()
    if isinstance(threads, int) and threads > 0 and threads != before:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
