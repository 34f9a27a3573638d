"""Workers that fail, die, stall or are left alone: said at once, and nothing is left of them."""

import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from examples_in_workers import Dataset, DecodeError, Noisy, for_ever, gone, in_shared_memory, kill_at, what_is_held

import forked
from chainring.converters import concat_examples
from chainring.iterators import MultiprocessIterator, SerialIterator, epoch_order

HERE = Path(__file__).parent


def iterate(get, size=12, **settings):
    settings = {"n_processes": 2, "n_prefetch": 1, "shuffle": False} | settings
    return MultiprocessIterator(Dataset(size, get), 2, **settings)


def workers():
    return [child.pid for child in multiprocessing.active_children()]


def failing_at(number, error):
    def get(i):
        if i == number:
            raise error
        return i

    return get


@pytest.mark.parametrize("number", range(10))
def test_an_exception_of_the_dataset_comes_at_its_batch_and_the_run_resumes_exactly(number):
    """The original type, with the index, the epoch and the worker's traceback as notes; earlier batches come first."""
    index, seed = random.Random(number).randrange(12), number
    at = epoch_order(seed, 0, 12).tolist().index(index) // 2
    with iterate(failing_at(index, OSError(2, "no such image")), seed=seed, shuffle=True) as iterator:
        for k in range(at):
            assert next(iterator).columns.tolist() == epoch_order(seed, 0, 12, 2 * k, 2 * k + 2).tolist()
        for _ in range(2):  # and again, since the batch has not been returned
            with pytest.raises(FileNotFoundError, match="no such image") as caught:
                next(iterator)
            assert f"raised by dataset[{index}], epoch 0, in iterator 'main'" in caught.value.__notes__
            assert any("in get\n    raise error" in note for note in caught.value.__notes__)
        state = iterator.state_dict()
    with iterate(int, seed=None, shuffle=True, n_processes=1) as resumed:
        resumed.load_state_dict(state)
        rest = [i for _ in range(6 - at) for i in next(resumed).columns.tolist()]
    assert rest == epoch_order(seed, 0, 12, 2 * at).tolist()


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (KeyError("label"), KeyError, "label"),
        (DecodeError("a.png", 3), RuntimeError, "DecodeError: a.png:3 is no image"),
        (StopIteration(), RuntimeError, "StopIteration"),
    ],
)
def test_exceptions_keep_their_type_where_they_can(error, kind, says):
    """One that cannot be pickled is told in full; one that would look like the end of the data is no such end."""
    with iterate(failing_at(1, error)) as iterator, pytest.raises(kind, match=says) as caught:
        next(iterator)
    assert any(note.startswith("raised by dataset[1], epoch 0") for note in caught.value.__notes__)


def test_an_example_that_cannot_be_sent_is_an_error():
    """It does not vanish in the queue."""
    with iterate(lambda i: lambda: i) as iterator, pytest.raises(Exception, match="pickle"):
        next(iterator)
    with (
        iterate(lambda i: torch.ones(200_000, requires_grad=True) * i) as iterator,
        pytest.raises(RuntimeError, match="requires_grad"),
    ):
        next(iterator)


def test_a_failing_converter_is_named():
    """It is not the example's fault."""
    with iterate(int, converter=lambda examples, device: 1 // 0) as iterator:
        with pytest.raises(ZeroDivisionError) as caught:
            next(iterator)
        assert "raised by the converter, epoch 0, in iterator 'main'" in caught.value.__notes__


@pytest.mark.parametrize(
    ("get", "says"),
    [
        (kill_at(5), r"was killed by SIGKILL while it was at dataset\[5\]"),
        (kill_at(5, signal.SIGSEGV), r"(SIGSEGV|exit code \d+) while it was at dataset\[5\]"),
        (lambda i: os._exit(3) if i == 5 else i, r"ended with exit code 3 while it was at dataset\[5\]"),
    ],
    ids=["killed", "crashed", "exited"],
)
def test_a_worker_that_dies_is_told_at_once(get, says):
    """With how and where, perhaps before batches that it had ready; the next call tries again from there."""
    start, taken = time.monotonic(), []
    with iterate(get, n_processes=1, dataset_timeout=600) as iterator:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=says):
                taken += (next(iterator).columns.tolist() for _ in range(3))
            assert workers() == []
        state = iterator.state_dict()
    assert time.monotonic() - start < 60  # and not after the timeout
    assert taken == [[0, 1], [2, 3]][: len(taken)]
    serial = SerialIterator(Dataset(12, int), 2, shuffle=False)
    serial.load_state_dict(state)
    assert next(serial)[0] == 2 * len(taken)


@pytest.mark.parametrize("number", range(5))
def test_a_worker_killed_from_outside_is_told_at_the_next_batch_and_the_run_goes_on_exactly(number):
    """Whatever it was doing; no exception strikes anywhere else."""
    serial = SerialIterator(Noisy(12), 2)
    with MultiprocessIterator(Noisy(12), 2, n_processes=3) as iterator:
        for _ in range(number):
            next(iterator), next(serial)
        next(iterator), next(serial)
        pids = workers()
        os.kill(pids[number % 3], signal.SIGKILL)
        assert gone(pids[number % 3 : number % 3 + 1])
        with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
            next(iterator)
        assert gone(pids)
        for _ in range(4):
            ours, theirs = concat_examples(next(iterator)), concat_examples(next(serial))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_stalled_dataset_is_told_after_the_timeout():
    """With the seconds, the example and the batch; the batches before it have come."""

    def stall(seconds):
        with iterate(lambda i: for_ever(i) if i == 5 else i, dataset_timeout=seconds) as iterator:
            assert [next(iterator).columns.tolist() for _ in range(2)] == [[0, 1], [2, 3]]
            start = time.monotonic()
            with pytest.raises(TimeoutError, match=rf"waited {seconds:g} seconds for dataset\[5\] .* indices \[4, 5\]"):
                next(iterator)
            assert seconds * 2 / 3 < time.monotonic() - start < seconds + 60
            assert workers() == []

    try:
        stall(0.3)
    except TimeoutError:  # of the batches before: on a machine that is too busy to start a worker in that time
        stall(30)


def test_a_batch_may_take_longer_than_the_timeout_of_an_example():
    """It is the example that is timed."""

    def load(seconds):
        slow = Dataset(8, lambda i: threading.Event().wait(seconds) or i)
        with MultiprocessIterator(slow, 8, n_processes=1, shuffle=False, dataset_timeout=6 * seconds) as iterator:
            assert next(iterator).columns.tolist() == [*range(8)]

    try:
        load(0.25)
    except TimeoutError:  # on a machine that is too busy to load an example in that time
        load(5)


@pytest.mark.parametrize("state", ["at work", "stuck", "stopped", "stuck and stopped"])
def test_finalize_takes_less_than_five_seconds_and_leaves_nothing(state):
    """No process, thread, open file or file in shared memory; with three workers that do not listen."""

    def finalize():
        before = what_is_held()
        iterator = iterate(lambda i: for_ever(i) if i > 3 and "stuck" in state else torch.ones(90_000), n_processes=3)
        next(iterator)
        pids = workers()
        if "stopped" in state:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        iterator.finalize()
        iterator.finalize()
        seconds = time.monotonic() - start
        assert gone(pids, 0)
        assert what_is_held() == before
        assert in_shared_memory([os.getpid(), *pids]) == []
        return seconds

    assert any(finalize() < 5 for _ in range(3))  # once where the machine has time


def test_an_iterator_that_is_let_go_ends_its_workers():
    """As finalize would."""
    before = what_is_held()
    iterator = iterate(int)
    next(iterator)
    pids = workers()
    del iterator
    assert gone(pids, 0)
    assert what_is_held() == before


def test_finalize_from_another_thread_ends_the_workers_too():
    """Where a worker is stuck, also."""
    iterator = iterate(lambda i: for_ever(i) if i > 3 else i)
    next(iterator)
    thread = threading.Thread(target=iterator.finalize)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert workers() == []


def test_workers_ignore_the_signals_that_the_trainer_acts_on():
    """SIGINT and SIGTERM to every process of the group, again and again."""
    serial = SerialIterator(Noisy(12), 2, seed=1)
    with MultiprocessIterator(Noisy(12), 2, n_processes=2, seed=1) as iterator:
        for _ in range(20):
            assert next(iterator).columns["i"].tolist() == concat_examples(next(serial))["i"].tolist()
            for pid in workers():
                os.kill(pid, signal.SIGINT)
                os.kill(pid, signal.SIGTERM)
        assert len(workers()) == 2


def test_an_interrupted_wait_loses_no_batch():
    """SIGINT while a worker is slow is a KeyboardInterrupt at once; afterwards the same batch comes."""
    is_free = multiprocessing.RawValue("b", 0)
    with iterate(lambda i: i if i != 5 or is_free.value else for_ever(i)) as iterator:
        assert [next(iterator).columns.tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        timer.join()
        is_free.value = 1
        assert [next(iterator).columns.tolist() for _ in range(2)] == [[4, 5], [6, 7]]


PROGRAM = """
import multiprocessing, sys, threading
sys.path.insert(0, {here!r})
from examples_in_workers import Dataset, for_ever
from chainring.iterators import MultiprocessIterator
get = {get}
iterator = MultiprocessIterator(Dataset(100, get), 2, n_processes=2, shuffle=False)
next(iterator)
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
{then}
"""


@pytest.mark.parametrize("get", ["int", "lambda i: for_ever(i) if i > 3 else i", "lambda i: 'x' * 10 ** 6"])
def test_no_worker_outlives_a_trainer_that_is_killed(get):
    """SIGKILL while the workers wait, are stuck, or have a full pipe before them."""
    program = PROGRAM.format(here=str(HERE), get=get, then="threading.Event().wait()")
    with forked.Forked(["-c", program]) as trainer:
        pids = [*map(int, trainer.stdout.readline().split())]
        trainer.kill()
    assert len(pids) == 2
    assert gone(pids)


@pytest.mark.parametrize(
    ("get", "then"),
    [
        ("int", "sys.exit(0)"),
        ("int", "class Holder: pass\nHolder.cycle = [Holder, iterator]"),
        ("lambda i: for_ever(i) if i > 3 else i", ""),
    ],
)
def test_an_interpreter_that_ends_without_finalize_ends_the_workers(get, then):
    """Quickly and without a word."""
    program = PROGRAM.format(here=str(HERE), get=get, then=then)
    start = time.monotonic()
    errors = "import warnings\nwarnings.simplefilter('error')\nwarnings.filterwarnings('ignore', 'Implicitly cleaning up')\n"
    done = forked.run(["-c", f"{errors}{program}"])  # torch 2.6 leaves a temporary directory behind
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - start < 60
    assert gone(map(int, done.stdout.split()), 0)
