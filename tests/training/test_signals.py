"""A signal lets the iteration end, saves and finalizes, and ends the run with the code of a killed process."""

import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from extensions.snapshots import differing, fail_rename

import forked
import resume_program
from chainring import iterators, serializers, training
from chainring.serializers._loading import read_state
from chainring.serializers._store import find_snapshot
from chainring.training import Interrupted, extensions, triggers
from rank_pair import on_two_ranks

SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
OTHERS = [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
ALL = SIGNALS + [(number, 128 + number) for number in OTHERS]


def told(number):
    """What a process writes on stderr when a signal comes, before the iteration has ended."""
    again = ", Ctrl-C again ends it at once" if number == signal.SIGINT else ""
    return f"{signal.Signals(number).name}: the run ends after this iteration{again}\n"


def send(number, at, times=1):
    """An extension that sends a signal to this process in an iteration."""

    def send_signal(trainer):
        if trainer.updater.iteration == at:
            for _ in range(times):
                os.kill(os.getpid(), number)

    return send_signal


def build(out, stop=(9, "iteration"), **settings):
    made = resume_program.build(str(out), stop=stop, **settings)
    made[0].extend(lambda trainer: None, name="send", priority=400)
    return made


def interrupted(out, number, at, *more):
    """A run that gets a signal in an iteration, before its evaluation."""
    made = resume_program.build(str(out), stop=(9, "iteration"))
    made[0].extend(send(number, at), name="send", priority=400)
    for extension, trigger in more:
        made[0].extend(extension, trigger=trigger)
    return made


@pytest.mark.parametrize(("number", "code"), ALL)
def test_the_iteration_ends_and_its_state_is_saved(tmp_path, capsys, number, code):
    """One snapshot, at the end of the iteration in which the signal came, its evaluation included; then Interrupted."""
    trainer, *_ = interrupted(tmp_path, number, 4, (extensions.snapshot(), (100, "iteration")))
    with pytest.raises(Interrupted) as caught:
        trainer.run()
    assert isinstance(caught.value, SystemExit)
    assert caught.value.code == code
    assert trainer.updater.iteration == 4
    assert "validation/main/loss" in trainer.observation
    assert [path.name for path in tmp_path.glob("snapshot*")] == ["snapshot_iter_4"]
    assert f"{signal.Signals(number).name} ends the run after iteration 4" in capsys.readouterr().out


@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_the_run_continues_bit_for_bit(tmp_path, at):
    """Parameters, optimizer, logs, fires and generators are those of the run that was not interrupted."""
    whole = build(tmp_path / "whole")
    whole[0].run()
    first, data, fired = interrupted(tmp_path / "cut", signal.SIGTERM, at, (extensions.snapshot(), (2, "iteration")))
    with pytest.raises(Interrupted):
        first.run()
    second = build(tmp_path / "cut", seed=7)
    second[0].extend(extensions.snapshot(autoload=True), trigger=(2, "iteration"))
    second[0].run()
    resumed, expected = resume_program.outcome(*second), resume_program.outcome(*whole)
    resumed["consumed"] = data.consumed + resumed["consumed"]
    resumed["fired"] = fired + resumed["fired"]
    assert {**resumed, "generators": 0} == {**expected, "generators": 0}


def test_a_snapshot_of_that_iteration_is_not_taken_twice(tmp_path):
    """Where its trigger fires in the iteration of the signal."""
    trainer, *_ = interrupted(tmp_path, signal.SIGTERM, 4, (extensions.snapshot(), (2, "iteration")))
    with pytest.raises(Interrupted):
        trainer.run()
    assert sorted(path.name for path in tmp_path.glob("snapshot*")) == ["snapshot_iter_2", "snapshot_iter_4"]


def test_the_best_snapshot_stays_the_best(tmp_path):
    """One that is taken because the run ends does not take the name, and is there to be continued from."""
    best = extensions.snapshot("best", autoload=True)
    trainer, *_ = interrupted(tmp_path, signal.SIGTERM, 5, (best, triggers.ManualScheduleTrigger(2, "iteration")))
    with pytest.raises(Interrupted):
        trainer.run()
    assert os.readlink(tmp_path / "best") == "best_iter_2"
    assert find_snapshot(tmp_path / "best_iter_5").read_manifest().iteration == 5
    resumed, *_ = build(tmp_path, stop=(8, "iteration"))
    resumed.extend(extensions.snapshot("best", autoload=True), trigger=triggers.ManualScheduleTrigger([2, 7], "iteration"))
    resumed.run()
    assert os.readlink(tmp_path / "best") == "best_iter_7"
    assert sorted(path.name for path in tmp_path.glob("best_*")) == ["best_iter_7", "best_iter_8"]


def test_without_a_snapshot_extension_it_says_that_nothing_is_saved(tmp_path, capsys):
    """The run ends all the same."""
    trainer, *_ = interrupted(tmp_path, signal.SIGTERM, 3)
    with pytest.raises(Interrupted):
        trainer.run()
    assert "nothing is saved" in capsys.readouterr().out


UNSAVED = {
    "another object": lambda trainer: extensions.snapshot_object(trainer.updater.get_model("main"), "model"),
    "a part of the state": lambda trainer: extensions.snapshot(target=trainer.updater),
    "a false condition": lambda trainer: extensions.snapshot(condition=lambda: False),
    "a failed write": lambda trainer: failing(extensions.snapshot()),
}


def failing(taken):
    """A snapshot that cannot be written in the iteration of the signal, which its owner lets pass."""
    taken.on_failure = lambda error: None
    return taken


@pytest.mark.parametrize("case", UNSAVED)
def test_it_does_not_say_that_the_state_is_saved_where_it_is_not(tmp_path, capsys, monkeypatch, case):
    """It says so only when a snapshot of the trainer, of that iteration, has been committed."""
    trainer, *_ = interrupted(tmp_path, signal.SIGTERM, 3)
    trainer.extend(UNSAVED[case](trainer), trigger=(100, "iteration"))
    if case == "a failed write":
        fail_rename(monkeypatch, "snapshot_iter_3", OSError(28, "No space left on device"), once=False)
    with pytest.raises(Interrupted):
        trainer.run()
    shown = capsys.readouterr().out
    assert "ends the run after iteration 3: its state is not saved" in shown
    assert "its state is saved" not in shown


def test_a_write_that_fails_is_told_before_it_is_raised(tmp_path, capsys, monkeypatch):
    """The newest snapshot from which the run can be continued is named."""
    fail_rename(monkeypatch, "snapshot_iter_4", OSError(28, "No space left on device"), once=False)
    trainer, *_ = interrupted(tmp_path, signal.SIGTERM, 4, (extensions.snapshot(), (3, "iteration")))
    with pytest.raises(OSError, match="No space left"):
        trainer.run()
    assert "the newest that this run has written is of iteration 3" in capsys.readouterr().out


def test_the_snapshot_is_on_the_disk_when_it_is_said_to_be(tmp_path, monkeypatch):
    """The thread that writes it is waited for first."""
    there = []
    monkeypatch.setattr("builtins.print", lambda text, **_: there.append((text, (tmp_path / "snapshot_iter_4").is_dir())))
    trainer, *_ = interrupted(tmp_path, signal.SIGTERM, 4, (extensions.snapshot(), (100, "iteration")))
    with pytest.raises(Interrupted):
        trainer.run()
    assert there == [("SIGTERM ends the run after iteration 4: its state is saved", True)]


INNER = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import resume_program
from chainring.training import extensions

def inner(trainer):
    run, *_ = resume_program.build({out!r} + "/inner_" + str(trainer.updater.iteration), stop=(6, "iteration"))
    run.extend(extensions.snapshot(), trigger=(100, "iteration"))
    at_two = lambda run: run.updater.iteration == 2 and os.kill(os.getpid(), signal.SIGTERM)
    if trainer.updater.iteration == {at}:
        run.extend(at_two, name="send", priority=400)
    run.run()

trainer, *_ = resume_program.build({out!r} + "/outer", stop=(4, "iteration"))
if {way!r} == "extension":
    trainer.extend(inner, trigger=(2, "iteration"), priority=400)
else:
    update = trainer.updater.update
    trainer.updater.update = lambda: (update(), inner(trainer) if trainer.updater.iteration % 2 == 0 else None)
trainer.extend(extensions.snapshot(autoload=True), trigger=(100, "iteration"))
trainer.run()
"""


@pytest.mark.parametrize("way", ["extension", "update"])
def test_a_run_inside_an_iteration_of_another_saves_its_state_and_the_outer_one_ends(tmp_path, way):
    """The iteration of the outer run ends with it; both say what is on the disk, and the continuation is exact."""

    def run(out, at):
        text = INNER.format(tests=str(Path(resume_program.__file__).parent), out=str(tmp_path / out), at=at, way=way)
        return forked.run(["-c", text])

    ended = run("cut", 2)
    assert (ended.returncode, ended.stderr) == (143, told(signal.SIGTERM))
    assert "SIGTERM comes in iteration 2: its state is saved; this run is inside another one" in ended.stdout
    assert "SIGTERM ends the run after iteration 2: its state is saved\n" in ended.stdout
    assert find_snapshot(tmp_path / "cut/inner_2/snapshot_iter_2").read_manifest().iteration == 2
    assert find_snapshot(tmp_path / "cut/outer/snapshot_iter_2").read_manifest().iteration == 2
    assert (run("cut", 0).returncode, run("whole", 0).returncode) == (0, 0)
    states = [read_state(tmp_path / out / "outer/snapshot_iter_4") for out in ("cut", "whole")]
    assert [key for key in differing(*states) if not key.endswith("/file")] == []  # the log's rows hold times


def test_it_is_no_error(tmp_path):
    """Nobody's on_error is called, everybody is finalized, the lock is free."""
    calls = []

    class Watching(training.Extension):
        def __call__(self, trainer):
            pass

        def on_error(self, trainer, exception):
            calls.append("error")

        def finalize(self):
            calls.append("finalize")

    trainer, *_ = interrupted(tmp_path, signal.SIGTERM, 2, (Watching(), None))
    with pytest.raises(Interrupted):
        trainer.run()
    assert calls == ["finalize"]
    build(tmp_path, stop=(1, "iteration"))[0].run()


def test_a_second_sigint_is_a_keyboard_interrupt_at_once(tmp_path):
    """In the middle of the iteration, whose later extensions do not run."""
    ran = []
    trainer, *_ = interrupted(tmp_path, signal.SIGINT, 3, (lambda trainer: ran.append(trainer.updater.iteration), None))
    trainer.extend(send(signal.SIGINT, 3), name="again", priority=300)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert ran == [1, 2]


def test_first_signal_is_answered_at_once_and_later_ones_are_not(tmp_path, capfd):
    """On stderr, before the iteration has ended, so that nobody presses twice."""
    seen = []
    trainer, *_ = interrupted(tmp_path, signal.SIGTERM, 4)
    trainer.extend(lambda trainer: seen.append(capfd.readouterr().err), name="look", priority=399)
    with pytest.raises(Interrupted):
        trainer.run()
    assert seen == ["", "", "", told(signal.SIGTERM)]


def test_a_second_sigterm_changes_nothing(tmp_path):
    """An impatient scheduler does not cost the snapshot."""
    made = interrupted(tmp_path, signal.SIGTERM, 3, (extensions.snapshot(), None))
    made[0].extend(send(signal.SIGTERM, 3, times=2), name="again", priority=300)
    with pytest.raises(Interrupted):
        made[0].run()
    assert (tmp_path / "snapshot_iter_3").is_dir()


def test_handlers_are_called_too_and_put_back(tmp_path, monkeypatch):
    """The user's own for SIGTERM; afterwards every handler is the one from before, also when the run fails."""
    got = []

    def own(number, frame):
        got.append(number)

    before = signal.signal(signal.SIGTERM, own)
    try:
        trainer, *_ = interrupted(tmp_path / "a", signal.SIGTERM, 2)
        with pytest.raises(Interrupted):
            trainer.run()
        assert got == [signal.SIGTERM]
        trainer, *_ = build(tmp_path / "b")
        trainer.extend(lambda trainer: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.run()
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", [signal.SIGINT, *OTHERS])
def test_what_is_ignored_stays_ignored(tmp_path, number):
    """As under nohup, or in the background of a shell."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        trainer, *_ = interrupted(tmp_path, number, 2)
        trainer.run()
        assert trainer.updater.iteration == 9
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", OTHERS)
def test_a_handler_of_the_script_is_called_too_and_put_back(tmp_path, number):
    """As that for SIGTERM is; the run ends with its state saved."""
    got = []

    def own(number, frame):
        got.append(number)

    before = signal.signal(number, own)
    try:
        trainer, *_ = interrupted(tmp_path, number, 2, (extensions.snapshot(), (100, "iteration")))
        with pytest.raises(Interrupted):
            trainer.run()
        assert got == [number]
        assert signal.getsignal(number) is own
        assert (tmp_path / "snapshot_iter_2").is_dir()
    finally:
        signal.signal(number, before)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell what is handled")
def test_a_signal_that_faulthandler_has_stays_with_it(tmp_path):
    """It writes the stacks, and the run goes on."""
    with open(tmp_path / "stacks", "w+") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            trainer, *_ = interrupted(tmp_path / "out", signal.SIGUSR1, 2)
            trainer.run()
        finally:
            faulthandler.unregister(signal.SIGUSR1)
        file.seek(0)
        assert "most recent call first" in file.read()
    assert trainer.updater.iteration == 9


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("at", [1, 4, 9])
def test_with_continue_after_sigusr1_a_snapshot_is_taken_and_the_run_goes_on_bit_for_bit(tmp_path, capsys, at, times):
    """Once, however often it comes in an iteration; the end is that of a run that got no signal."""
    whole = build(tmp_path / "whole")
    whole[0].run()
    made = build(tmp_path / "cut", continue_after_sigusr1=True)
    made[0].extend(send(signal.SIGUSR1, at, times), name="signal", priority=400)
    made[0].extend(extensions.snapshot(), trigger=(100, "iteration"))
    made[0].run()
    assert [path.name for path in (tmp_path / "cut").glob("snapshot*")] == [f"snapshot_iter_{at}"]
    assert f"SIGUSR1 comes in iteration {at}: its state is saved; the run continues" in capsys.readouterr().out
    outcomes = [{**resume_program.outcome(*each), "generators": 0} for each in (made, whole)]
    assert outcomes[0] == outcomes[1]


def test_a_signal_while_that_snapshot_is_taken_is_not_lost(tmp_path):
    """The run ends in the same iteration."""
    sent = iter([signal.SIGTERM])

    def condition():
        for number in sent:
            os.kill(os.getpid(), number)
        return True

    made = build(tmp_path, continue_after_sigusr1=True)
    made[0].extend(send(signal.SIGUSR1, 2), name="first", priority=400)
    made[0].extend(extensions.snapshot(condition=condition), trigger=(100, "iteration"))
    with pytest.raises(Interrupted):
        made[0].run()
    assert made[0].updater.iteration == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_with_continue_after_sigusr1_every_other_signal_ends_the_run(tmp_path, number):
    """Also one that comes after SIGUSR1."""
    made = build(tmp_path, continue_after_sigusr1=True)
    made[0].extend(send(signal.SIGUSR1, 2), name="first", priority=400)
    made[0].extend(send(number, 4), name="second", priority=400)
    made[0].extend(extensions.snapshot(), trigger=(100, "iteration"))
    with pytest.raises(Interrupted) as caught:
        made[0].run()
    assert caught.value.code == 128 + number
    assert sorted(path.name for path in tmp_path.glob("snapshot*")) == ["snapshot_iter_2", "snapshot_iter_4"]


def on_ranks(comm, out):
    """What one of two ranks gets: first SIGUSR1, then SIGHUP; which snapshots there are, where each rank ends, and how."""
    net = torch.nn.Linear(2, 1)
    loss = lambda net, x: net(x).square().mean()  # noqa: E731
    iterator = iterators.SerialIterator([torch.ones(2)] * 4, 2)
    updater = training.StandardUpdater(iterator, torch.optim.SGD(net.parameters(), 0.1), net, loss_func=loss, comm=comm)
    trainer = training.Trainer(updater, (40, "iteration"), out=out, continue_after_sigusr1=True)
    for number, at in ((signal.SIGUSR1, 3), (signal.SIGHUP, 20)):
        trainer.extend(send(number, at if comm.rank == 1 else None), name=f"send {number}", priority=400)
    trainer.extend(extensions.snapshot(), trigger=(100, "iteration"))
    with pytest.raises(Interrupted) as caught:
        trainer.run()
    return (
        updater.iteration,
        caught.value.code,
        sorted(int(path.name.rpartition("_")[2]) for path in Path(out).glob("snap*")),
    )


def test_a_signal_to_one_rank_is_one_to_all(tmp_path):
    """All take a snapshot after the same iteration and continue, or end there."""
    first, second = on_two_ranks(on_ranks, str(tmp_path))
    assert first[:2] == second[:2], (first, second)
    end, code, taken = first  # of rank 0, which writes
    assert code == 128 + signal.SIGHUP
    assert 3 <= taken[0] <= 5
    assert 20 <= end <= 22
    assert taken[1:] == [end]


@pytest.mark.parametrize("given", [1, "yes", None])
def test_another_value_of_continue_after_sigusr1_is_refused(tmp_path, given):
    """At construction."""
    with pytest.raises(TypeError, match="continue_after_sigusr1 is True or False"):
        build(tmp_path, continue_after_sigusr1=given)


def test_in_another_thread_no_handler_is_set(tmp_path):
    """Python sets handlers in the main thread only; the run goes on without."""
    handlers = []
    trainer, *_ = build(tmp_path, stop=(2, "iteration"))
    trainer.extend(lambda trainer: handlers.append(signal.getsignal(signal.SIGTERM)))
    thread = threading.Thread(target=trainer.run)
    thread.start()
    thread.join(60)
    assert handlers == [signal.SIG_DFL, signal.SIG_DFL]


def test_a_signal_before_the_first_update_ends_the_run_there(tmp_path):
    """While extensions are initialized, say; the state that it began with is saved."""

    class Early(training.Extension):
        def __call__(self, trainer):
            pass

        def initialize(self, trainer):
            os.kill(os.getpid(), signal.SIGTERM)

    trainer, *_ = build(tmp_path)
    trainer.extend(Early())
    trainer.extend(extensions.snapshot())
    with pytest.raises(Interrupted):
        trainer.run()
    assert (tmp_path / "snapshot_iter_0").is_dir()


def test_a_signal_after_the_last_update_is_not_lost(tmp_path):
    """The run is over and everything finalized; the process is still asked to end."""

    class Late(training.Extension):
        def __call__(self, trainer):
            pass

        def finalize(self):
            os.kill(os.getpid(), signal.SIGTERM)

    trainer, *_ = build(tmp_path, stop=(1, "iteration"))
    trainer.extend(Late())
    with pytest.raises(Interrupted):
        trainer.run()


def test_a_snapshot_that_fails_then_is_the_error(tmp_path):
    """What could not be saved is not passed over in silence."""
    taken = extensions.snapshot(condition=lambda: 1 / 0)
    trainer, *_ = interrupted(tmp_path, signal.SIGTERM, 2, (taken, (100, "iteration")))
    with pytest.raises(ZeroDivisionError):
        trainer.run()


WITH_WORKERS = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from chainring import training
from chainring.training import extensions

class Slow(TensorDataset):
    def __getitem__(self, i):
        time.sleep(0.002)
        return super().__getitem__(i)

data = Slow(torch.randn(64, 3), torch.randn(64, 1))
loader = DataLoader(data, 4, num_workers=2, persistent_workers={persistent})
net = nn.Linear(3, 1)
updater = training.StandardUpdater(
    loader, torch.optim.SGD(net.parameters(), 0.01), net, loss_func=lambda net, x, t: ((net(x) - t) ** 2).mean()
)
trainer = training.Trainer(updater, (100000, "iteration"), out={out!r})
trainer.extend(extensions.snapshot(), trigger=(100000, "iteration"))
trainer.extend(lambda trainer: print("running", flush=True), name="ready", trigger=(20, "iteration"))
trainer.run()
"""


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("number", "code"), [*SIGNALS, (signal.SIGHUP, 129)])
def test_the_workers_of_a_data_loader_leave_a_signal_to_the_trainer(tmp_path, number, code, persistent):
    """It comes to the whole group, as from a terminal or a scheduler; the iteration ends, and nobody stays behind."""
    program = WITH_WORKERS.format(out=str(tmp_path), persistent=persistent)
    with forked.Forked(["-c", program], start_new_session=True) as process:
        assert process.stdout.readline() == "running\n"
        os.killpg(process.pid, number)
        _, err = process.communicate()
    assert (process.returncode, err) == (code, told(number))
    assert len(list(tmp_path.glob("snapshot_iter_*"))) == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
import resume_program
from chainring.training import extensions
trainer, *_ = resume_program.build({out!r}, stop=(100000, "iteration"))
trainer.extend(extensions.snapshot(autoload=True, n_retains=1), trigger=(50, "iteration"))
trainer.extend(lambda trainer: print("running", flush=True), name="ready", trigger=(20, "iteration"))
trainer.run()
print("not reached")
"""


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_the_process_exits_with_the_code_of_the_signal_without_a_traceback(tmp_path, number, code):
    """143 or 130, and the newest snapshot loads."""
    program = PROGRAM.format(tests=str(Path(resume_program.__file__).parent), out=str(tmp_path))
    with forked.Forked(["-c", program]) as process:
        assert process.stdout.readline() == "running\n"
        sent = time.monotonic()
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == code
    assert time.monotonic() - sent < 60
    assert "not reached" not in out
    assert err == told(number)
    newest = max(tmp_path.glob("snapshot*"), key=lambda path: find_snapshot(path).read_manifest().iteration)
    trainer, *_ = resume_program.build(str(tmp_path / "elsewhere"))
    trainer.extend(extensions.snapshot(), name="ready")
    serializers.load(newest, trainer)
    assert trainer.updater.iteration == find_snapshot(newest).read_manifest().iteration
