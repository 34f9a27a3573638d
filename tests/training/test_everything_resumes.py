"""Every public part takes part in a training that is cut after every iteration, alone and all together."""

import contextlib
import importlib
import resource
import types

import pytest
from every_extension import together
from every_part import APART, PARTS, Two
from interrupted import BATCH, LENGTH, assert_resumes_everywhere, assert_resumes_from_the_disk

from chainring import iterators, training
from chainring.testing import ManualClock
from chainring.training import extensions
from still_machine import hold_still

CASES = [(package, name) for package, parts in PARTS.items() for name in parts]


@pytest.fixture(autouse=True)
def _same_memory(monkeypatch):
    """What `Throughput` and `SystemMetrics` report of the process and the machine is no matter of the training."""
    hold_still(monkeypatch)
    monkeypatch.setattr(resource, "getrusage", lambda who: types.SimpleNamespace(ru_maxrss=1024))


@pytest.mark.parametrize("package", PARTS)
def test_no_public_name_is_forgotten(package):
    """A name that is added to a package is added to the table, or to what takes no part in a training."""
    public = set(importlib.import_module(package).__all__)
    assert public - APART == {name.partition(":")[0] for name in PARTS[package]}


@pytest.mark.filterwarnings("ignore:.* fetches .* batches again and skips them")
@pytest.mark.parametrize(("package", "name"), CASES, ids=[f"{package}.{name}" for package, name in CASES])
def test_a_part_resumes_after_every_iteration(tmp_path, package, name):
    """Parameters, optimizer, rows, fires, observations, batches, state and files are the whole run's, bit for bit."""
    settings, clock = PARTS[package][name], ManualClock()
    with contextlib.nullcontext() if name == "MultiprocessIterator" else clock:  # worker processes have a clock of their own
        whole = assert_resumes_everywhere(tmp_path, clock, **(settings(tmp_path) if callable(settings) else settings))
    assert len(whole.watch.rows) >= LENGTH - 2


def all_parts():
    """One training of many parts."""

    def iterate(data):
        sampler = iterators.NoRepeatOrderSampler(BATCH)
        return iterators.SerialIterator(data, BATCH, order_sampler=sampler)

    return {
        "iterate": iterate,
        "update": Two,
        "accumulate": 2,
        "precision": "bf16",
        "callbacks": training.UpdateCallbacks(update_on_start=training.clip_grad_norm(1.0)),
        "extra": together,
    }


def test_all_parts_together_resume_after_every_iteration(tmp_path):
    """One training with all of them."""
    with ManualClock() as clock:
        whole = assert_resumes_everywhere(tmp_path, clock, **all_parts())
    assert len(whole.watch.rows) == LENGTH


def test_all_parts_together_resume_from_the_disk(tmp_path):
    """From the snapshot of each iteration, in the directory of the run; at its end that holds the same files."""

    def extra(net, optimizer):
        return [*together(net, optimizer), (extensions.snapshot(), (1, "iteration"))]

    with ManualClock() as clock:
        assert_resumes_from_the_disk(tmp_path, clock, **{**all_parts(), "extra": extra})
