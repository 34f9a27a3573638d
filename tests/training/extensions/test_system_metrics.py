"""SystemMetrics: the use of processors and memory in the log."""

import sys
import time
from collections import namedtuple

import psutil
import pytest
from regressions import updater_of

from chainring import training
from chainring.training import extensions

OWN = {"cpu_percent", "process_cpu_percent", "memory_percent", "process_memory_mib"}
Times = namedtuple("Times", "user nice system idle iowait guest")


def run(out, length=4, metrics=None, name=None, before=None):
    """What each iteration reports of the system."""
    seen = []
    trainer = training.Trainer(updater_of(), (length, "iteration"), out=str(out))
    if before is not None:
        trainer.extend(before, "before", priority=900, trigger=(1, "iteration"))
    trainer.extend(extensions.SystemMetrics((2, "iteration")) if metrics is None else metrics, name=name)
    prefix = f"{name or 'system'}/"
    trainer.extend(
        lambda trainer: seen.append(
            {k.removeprefix(prefix): v for k, v in trainer.observation.items() if k.startswith(prefix)}
        ),
        "look",
        priority=0,
        trigger=(1, "iteration"),
    )
    trainer.run()
    return seen


def test_shares_are_those_of_the_time_since_the_last_report(tmp_path, monkeypatch):
    """Of the machine those of its processors' time, guests counting once; of the process one processor is 100."""
    now = [Times(*[100.0] * 6), 5.0, 1000.0]

    def work(trainer):
        machine, own, clock = now
        busy = trainer.updater.iteration  # processors, of four
        user, guest = machine.user + busy, machine.guest + busy
        now[:] = machine._replace(user=user, idle=machine.idle + 4 - busy, guest=guest), own + 0.25, clock + 0.5

    monkeypatch.setattr(psutil, "cpu_times", lambda: now[0])
    monkeypatch.setattr(time, "process_time", lambda: now[1])
    monkeypatch.setattr(time, "monotonic", lambda: now[2])
    seen = run(tmp_path, before=work)
    assert [len(values) for values in seen] == [0, 4, 0, 4]
    assert [values["cpu_percent"] for values in seen[1::2]] == [37.5, 87.5]
    assert [values["process_cpu_percent"] for values in seen[1::2]] == [50.0, 50.0]


def test_memory_is_that_of_the_machine_and_of_the_process(tmp_path):
    """As psutil reads it, at the report."""
    (values,) = run(tmp_path, 1, extensions.SystemMetrics((1, "iteration")))
    assert values["process_memory_mib"] == pytest.approx(psutil.Process().memory_info().rss / 2**20, rel=0.2)
    assert 0 < values["memory_percent"] < 100


def test_keys_begin_with_the_name(tmp_path):
    """In the log they are means of the looks in an interval."""
    seen = run(tmp_path, metrics=extensions.SystemMetrics((1, "iteration")), name="machine")
    assert all(values.keys() <= OWN and {"memory_percent", "process_memory_mib"} <= values.keys() for values in seen)


def test_clocks_that_stand_still_give_no_share(tmp_path, monkeypatch):
    """A tick of the machine's clock is 10 ms; the time counts at the next report."""
    monkeypatch.setattr(psutil, "cpu_times", lambda: Times(*[100.0] * 6))
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    assert [values.keys() & OWN for values in run(tmp_path, 2)] == [set(), {"memory_percent", "process_memory_mib"}]


def test_without_psutil_the_extra_is_named(monkeypatch):
    """When the extension is made, not hours later."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ImportError, match=r"SystemMetrics reads with psutil, .* pip install 'chainring\[system\]'"):
        extensions.SystemMetrics()


def test_a_report_takes_less_than_a_millisecond_of_the_processor(tmp_path):
    """On the average of many."""
    metrics = extensions.SystemMetrics()
    run(tmp_path, 1, metrics)
    trainer = training.Trainer(updater_of(), (1, "iteration"), out=str(tmp_path / "2"))
    before = time.process_time()
    for _ in range(200):
        metrics(trainer)
    assert (time.process_time() - before) / 200 < 1e-3
