"""Commands change a run while it trains; a resumed run and a replay do the same without it being said again."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from commanded import Commands, bits, build, commanded_at_its_end, recorded

import chainring
from chainring.cli import main
from chainring.iterators import MixtureIterator, PackingIterator
from chainring.testing import replay
from chainring.training import StandardUpdater, Trainer, extensions

GIVEN = ("lr=0.05", "call=count", "weights=web:0.9,code:0.1", "lr:nobody=1")


@pytest.fixture(scope="module")
def commanded(tmp_path_factory):
    """A run that got commands while it trained, its directory, and what it printed."""
    out, printed = tmp_path_factory.mktemp("commanded") / "out", []
    # Of another name, so that a run that is not commanded has the same names.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chainring.training._control.info", printed.append)
        commands = Commands(out, *GIVEN[:3])
        trainer = build(out, commands.ends, commands)
        trainer.run()
    return trainer, out, printed


def again(commanded, out, at=None):
    """The run to the same iteration, in an ``out`` of its own; with ``at`` a function does there what was commanded."""
    trainer, _, _ = commanded

    def do(trainer):
        if trainer.updater.iteration == at:
            for group in trainer.updater.get_optimizer("main").param_groups:
                group["lr"] = 0.05
            trainer.get_extension("count").calls += 1
            trainer.updater.get_iterator("main").change_weights({"web": 0.9, "code": 0.1})

    return build(out, trainer.updater.iteration, do, loads="early")


def test_commands_are_carried_out_between_two_iterations(commanded, tmp_path):
    """All before the same one, and to the bits of a script that does there what they say; they are printed and recorded."""
    trainer, out, printed = commanded
    entries = recorded(out)
    at = entries[0]["iteration"]
    assert [(entry["command"], entry["iteration"], entry.get("was")) for entry in entries] == [
        (GIVEN[0], at, 0.1), (GIVEN[1], at, None), (GIVEN[2], at, "web:0.5,code:0.5")
    ]  # fmt: skip
    assert printed[0] == f"control: lr=0.05 (was 0.1) after iteration {at}"
    assert printed[2] == "control: calls 1"  # what the extension has reported
    plain = again(commanded, tmp_path / "plain", at)
    plain.run()
    assert bits(plain) == bits(trainer)
    recorders = [(place / "recorder.bin").read_bytes() for place in (out, tmp_path / "plain")]
    assert recorders[0] == recorders[1]


def test_a_run_that_goes_back_to_a_snapshot_before_does_them_again(commanded, tmp_path):
    """As after a kill: each once, after the iteration of the record."""
    trainer, out, _ = commanded
    shutil.copytree(out, tmp_path / "out", symlinks=True)
    resumed = again(commanded, tmp_path / "out")
    resumed.run()
    assert resumed.is_resumed
    assert bits(resumed) == bits(trainer)
    assert recorded(tmp_path / "out") == recorded(out)


def test_a_snapshot_after_them_has_what_they_changed(commanded, tmp_path):
    """Then nothing is done again."""
    trainer, out, _ = commanded
    shutil.copytree(out, tmp_path / "out", symlinks=True)
    resumed = build(tmp_path / "out", trainer.updater.iteration)
    resumed.run()
    assert resumed.updater.iteration == resumed.get_extension("later").saved_iteration
    assert bits(resumed) == bits(trainer)


def test_a_replay_does_them_again(commanded):
    """Of an iteration before, right after and long after them."""
    trainer, out, _ = commanded
    at = recorded(out)[0]["iteration"]
    for iteration, rate in ((at, 0.1), (at + 1, 0.05), (trainer.updater.iteration, 0.05)):
        replayed = replay(lambda out: build(out, 10**9), out, iteration)
        assert bits(replayed)[:3:2] == (iteration, [rate])
    assert bits(replayed) == bits(trainer)


def test_a_commanded_stop_trigger_holds_until_the_script_changes(tmp_path):
    """A run that is resumed with the same script goes to where it was commanded, one with another script to its own."""
    commands = Commands(tmp_path, 'stop=(1, "iteration")', after=3)
    trainer = build(tmp_path, 10**6, commands)
    trainer.run()
    reached = trainer.updater.iteration
    assert reached == recorded(tmp_path)[0]["iteration"] < 10**6
    for stop, end in ((10**6, reached), (reached + 5, reached + 5)):
        resumed = build(tmp_path, stop)
        resumed.run()
        assert resumed.updater.iteration == end


def test_of_commands_given_together_the_last_holds(tmp_path):
    """Each says what the one before has left; a stop trigger replaces that of the command before."""
    given = ('stop=(2, "iteration")', "lr=0.05", 'stop=(1000000000, "iteration")', "lr=0.01", 'stop=(1, "iteration")')
    trainer = build(tmp_path, 10**6, Commands(tmp_path, *given))
    trainer.run()
    entries = recorded(tmp_path)
    assert trainer.updater.iteration == entries[0]["iteration"]
    assert bits(trainer)[2] == [0.01]
    assert [entry["was"] for entry in entries] == [
        "ReachedTrigger(1000000, 'iteration')", 0.1, "ReachedTrigger(2, 'iteration')", 0.05,
        "ReachedTrigger(1000000000, 'iteration')",
    ]  # fmt: skip


def test_stop_takes_all_snapshots_and_ends_the_run(tmp_path, capsys):
    """And a snapshot is taken where one is asked for; a run that is started again goes on."""
    commands = Commands(tmp_path, "snapshot", "stop")
    trainer = build(tmp_path, 10**6, commands)
    trainer.run()
    at = recorded(tmp_path)[0]["iteration"]
    assert trainer.updater.iteration == at
    assert f"control: stop ends the run after iteration {at}: its state is saved" in capsys.readouterr().out
    assert {trainer.get_extension(name).saved_iteration for name in ("early", "later")} == {at}


def test_a_wrong_command_is_refused_where_it_is_given(commanded, tmp_path, capsys):
    """Nothing is written then, also not the right ones beside it."""
    out = tmp_path / "out"
    shutil.copytree(commanded[1], out, symlinks=True)
    before = (out / "control.jsonl").read_bytes()
    wrong = {
        "lr=fast": "a number of at least 0", "lr=-1": "a number of at least 0", "lr:gen=1": "there is no optimizer 'gen'",
        "call=counter": "there is no extension 'counter'", "weights=web:1": "are given for each source",
        "weights=web:0,code:0": "at least one weight is above 0", "stop=(3, days)": "a command is", "halt": "a command is",
        "snapshot=1": "a command is", "lr:=1": "a command is", "weights=web:1,web:2": "a command is", "": "a command is",
    }  # fmt: skip
    for command, reason in wrong.items():
        with pytest.raises(ValueError, match=reason):
            chainring.control(str(out), "lr=1", command)
    assert main(["control", str(out), "lr:gen=1"]) == 2
    assert "this run has 'main'" in capsys.readouterr().err
    assert (out / "control.jsonl").read_bytes() == before
    with pytest.raises(FileNotFoundError):
        chainring.control(str(tmp_path / "nothing"), "stop")


def test_the_command_line_shows_what_was_done_and_what_waits(tmp_path, capsys):
    """What a run did not read before it ended waits for it."""
    commands = Commands(tmp_path, "lr=0.05")
    build(tmp_path, commanded_at_its_end(tmp_path, commands.ends, "lr=1e-3"), commands).run()
    capsys.readouterr()
    assert main(["control", str(tmp_path)]) == 0
    at = recorded(tmp_path)[0]["iteration"]
    assert capsys.readouterr().out.splitlines() == [f"lr=0.05 (was 0.1) after iteration {at}", "lr=1e-3 waits"]
    assert main(["control", "--json", str(tmp_path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [[entry["command"] for entry in facts[key]] for key in ("done", "waiting")] == [["lr=0.05"], ["lr=1e-3"]]


def test_a_run_that_has_ended_takes_no_command(commanded, capsys):
    """That is said, with an error; what was done is shown as before."""
    out = commanded[1]
    before = (out / "control.jsonl").read_bytes()
    assert main(["control", str(out), "stop"]) == 2
    assert "has ended, and a command is for one that trains: start it again" in capsys.readouterr().err
    with pytest.raises(ProcessLookupError):
        chainring.control(str(out), "lr=0.01")
    assert (out / "control.jsonl").read_bytes() == before
    assert len(chainring.control(str(out)).splitlines()) == 3


def test_what_waits_is_carried_out_when_the_run_is_resumed(tmp_path):
    """Once, also if it is started three times."""
    build(tmp_path, commanded_at_its_end(tmp_path, lambda trainer: trainer.updater.iteration == 30, "lr=0.01")).run()
    for _ in range(2):
        commands = Commands(tmp_path, "lr=0.01", after=-1)
        trainer = build(tmp_path, commands.ends)
        trainer.run()
        assert bits(trainer)[2] == [0.01]
    assert len(recorded(tmp_path)) == 1


def test_a_learning_rate_that_a_schedule_sets_is_refused_by_the_run(tmp_path, capsys):
    """It says so, records it, and goes on."""
    commands = Commands(tmp_path, "lr=0.05")
    trainer = build(tmp_path, commands.ends, commands, scheduled=True)
    trainer.run()
    assert "refused" in recorded(tmp_path)[0]
    assert bits(trainer)[2] == [0.1]
    text = "lr=0.05 is refused: extension 'LRScheduler' sets the learning rate, and would overwrite it"
    assert text in capsys.readouterr().out
    assert text in chainring.control(str(tmp_path))


def link(path):
    (path.parent / "elsewhere").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to("elsewhere")


def folder(path):
    path.unlink()
    path.mkdir()


SPOILT = {
    "others than its owner can write it": lambda path: path.chmod(0o666),
    "not a regular file": link,
    "a regular file": folder,
    "more than 1,048,576 bytes": lambda path: os.truncate(path, 100 << 20),
    "1 line of control.jsonl are no commands": lambda path: path.write_bytes(b"\x00{]\n"),
}


@pytest.mark.parametrize("reason", SPOILT)
def test_a_file_that_somebody_else_may_have_written_is_ignored(tmp_path, capsys, reason):
    """With one line, and the run goes on."""
    build(tmp_path, commanded_at_its_end(tmp_path, lambda trainer: trainer.updater.iteration == 5, "lr=0.01")).run()
    SPOILT[reason](tmp_path / "control.jsonl")
    trainer = build(tmp_path, lambda trainer: trainer.updater.iteration >= 50_000 or reason in told(capsys))
    trainer.run()
    assert trainer.updater.iteration < 50_000
    assert bits(trainer)[2] == [0.1]
    assert recorded(tmp_path) == []


def told(capsys, seen=[]):  # noqa: B006 - what was printed so far
    seen.append(capsys.readouterr().out)
    return "".join(seen)


def test_commands_for_an_earlier_run_are_not_those_of_a_new_one(tmp_path):
    """Which begins in the same directory."""
    build(tmp_path, commanded_at_its_end(tmp_path, lambda trainer: trainer.updater.iteration == 5, "lr=0.01")).run()
    trainer = build(tmp_path, 2_000, loads=None)
    trainer.run()
    assert bits(trainer)[2] == [0.1]
    assert chainring.control(str(tmp_path)) == ""


def test_changed_weights_lose_and_repeat_nothing():
    """Also with workers that were ahead; the batch before is that of the weights before."""
    data = {"a": np.arange(50), "b": np.arange(50) + 1000}
    taken = {}
    for workers in (0, 2):
        iterator = MixtureIterator(data, 10, weights={"a": 1, "b": 1}, shuffle=False, n_processes=workers)
        batches = []
        for number in range(9):
            if number == 4:
                start = iterator.batch_end()
                iterator.change_weights({"a": 0.8, "b": 0.2})
            batch = next(iterator)
            batches.append(np.array(list(batch)).tolist())
            if number == 4:
                assert iterator.names_of(iterator.indices_since(start)) == [
                    f"{'b' if value >= 1000 else 'a'}[{value % 1000}]" for value in batches[-1]
                ]
        iterator.finalize()
        taken[workers] = batches
    assert taken[0] == taken[2]
    values = np.concatenate(taken[0])
    for first, last, share in ((0, 40, 0.5), (40, 90, 0.8)):
        counts = np.cumsum(values[first:last] < 1000)
        assert np.abs(counts - share * np.arange(1, last - first + 1)).max() <= 1
    for name in ("a", "b"):
        ours = values[(values >= 1000) == (name == "b")] % 1000
        assert (ours == np.arange(len(ours)) % 50).all()


def packing_run(out, stop, extension=lambda trainer: None, autoload=False):
    """A training on packed documents of two sources, which other tokens tell apart."""
    torch.manual_seed(0)
    lengths = np.random.default_rng(0).integers(3, 20, size=(2, 50))
    texts = {name: [np.arange(n) % 8 + 8 * i for n in lengths[i]] for i, name in enumerate(("web", "code"))}
    rows = PackingIterator(MixtureIterator(texts, 8, weights={"web": 1, "code": 1}, seed=0), 32, 4)
    model = torch.nn.EmbeddingBag(16, 1)
    updater = StandardUpdater(
        rows, torch.optim.SGD(model.parameters(), lr=0.1), model,
        loss_func=lambda model, input_ids, document_ids, positions: model(input_ids).mean(),
    )  # fmt: skip
    trainer = Trainer(updater, stop if callable(stop) else (stop, "iteration"), out=str(out))
    trainer.extend(extensions.snapshot(autoload=autoload), trigger=lambda trainer: trainer.updater.iteration == 2)
    trainer.extend(lambda trainer: extension(trainer), name="extension")  # which a run with another one recognizes
    return trainer


def test_weights_of_a_mixture_whose_documents_are_packed_are_commanded(tmp_path):
    """They hold for the documents that are fetched from then on, also where the run goes back to a snapshot before."""
    out = tmp_path / "out"
    commands = Commands(out, "weights=web:0.9,code:0.1")
    trainer = packing_run(out, commands.ends, commands)
    trainer.run()
    (entry,), end = recorded(out), trainer.updater.iteration
    at = entry["iteration"]
    assert entry["was"] == "web:0.5,code:0.5"

    def change(trainer):
        if trainer.updater.iteration == at:
            trainer.updater.get_iterator("main").source.change_weights({"web": 0.9, "code": 0.1})

    plain, unchanged = packing_run(tmp_path / "plain", end, change), packing_run(tmp_path / "unchanged", end)
    resumed = packing_run(out, end, autoload=True)
    for run in (plain, unchanged, resumed):
        run.run()
    parameters = [run.updater.get_model("main").weight.tolist() for run in (trainer, plain, resumed, unchanged)]
    assert parameters[0] == parameters[1] != parameters[3]
    assert parameters[0] == parameters[2]
    assert resumed.is_resumed


def test_weights_of_a_function_are_not_changed():
    """It would overwrite them."""
    iterator = MixtureIterator({"a": torch.arange(5), "b": torch.arange(5)}, 2, weights=lambda count: {"a": 1, "b": 1})
    with pytest.raises(ValueError, match="function"):
        iterator.change_weights({"a": 1, "b": 2})
