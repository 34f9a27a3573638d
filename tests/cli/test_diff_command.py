"""chainring diff: where two runs part, by what they have left."""

import json
import math
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import planted
import replay_program
from chainring import iterators
from chainring._runs.finished import FinishedRun, collect
from chainring.cli import main
from chainring.training import extensions

DIFFERENCES = planted.DIFFERENCES
SAME = {
    "nothing": ({}, ""),
    "a number of NumPy's that an example draws": ({"draws": "numpy"}, ""),
    "a number of Python's that an example draws": ({"draws": "python"}, ""),
    "a note in config": ({"config": {"note": "again"}}, "config.note"),
    "a value that only one run reports": ({"evaluated": 6, "score": 1.0}, "once"),
    "a run that ends before": ({"length": 20}, "stop_trigger"),
}
ULPS = {"weight": (planted.LAST, 24), "variance": (planted.VARIANCE, 8), "moment": (planted.MOMENT, 3)}  # tensors, sizes


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run with a recorder and one without, to which others are compared."""
    root = tmp_path_factory.mktemp("runs")
    planted.make_trainer(str(root / "recorded")).run()
    planted.make_trainer(str(root / "plain"), recorded=False).run()
    return root


def diff(capsys, one, other):
    """The exit status, and what is printed with --json."""
    capsys.readouterr()
    status = main(["diff", "--json", str(one), str(other)])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_found_where_it_is_first_felt(base, tmp_path, capsys, name):
    """The first iteration, what differs in it, the first tensor; and the setting, of those that a run records."""
    changes, iteration, what, tensor, setting = DIFFERENCES[name]
    planted.make_trainer(str(tmp_path / "run"), **changes).run()
    status, found = diff(capsys, base / "recorded", tmp_path / "run")
    assert (status, found["same"]) == (1, False)
    assert (found["iteration"], found["what"]) == (iteration, what) if what else 0 < found["iteration"] <= iteration
    assert found["tensor"] == tensor
    assert any(setting in name for name in found["settings"]) or not setting


@pytest.mark.parametrize(("name", "tensor"), [(name, tensor) for name, (tensor, _) in ULPS.items()])
def test_one_ulp_is_found_by_the_digests_of_its_iteration(base, tmp_path, capsys, name, tensor):
    """Whatever becomes of it in the iterations that follow, which depends on how a processor rounds."""
    planted.make_trainer(str(tmp_path / "run"), later=(16, f"ulp {name}")).run()
    status, found = diff(capsys, base / "recorded", tmp_path / "run")
    assert (status, found["iteration"], found["what"], found["tensor"]) == (1, 16, "tensor", tensor)


def test_times_of_ranks_are_no_difference(tmp_path, capsys):
    """No two runs share them, as they share no speed."""
    for name in ("one", "two"):
        trainer = planted.make_trainer(str(tmp_path / name))
        trainer.extend(extensions.RankTimes(trigger=(2, "iteration")), name="times")
        trainer.run()
    assert diff(capsys, tmp_path / "one", tmp_path / "two")[0] == 0


@pytest.mark.parametrize("name", DIFFERENCES)
def test_without_a_recorder_logs_and_snapshots_tell_it(base, tmp_path, capsys, name):
    """In the interval of a row, or by a snapshot; a tensor is named as well."""
    changes, iteration, _, _, _ = DIFFERENCES[name]
    planted.make_trainer(str(tmp_path / "run"), recorded=False, **changes).run()
    status, found = diff(capsys, base / "plain", tmp_path / "run")
    assert (status, found["same"]) == (1, False)
    if name != "a kernel":
        assert (found["after"] or 0) <= iteration <= found["iteration"] <= iteration + planted.SNAPSHOTS
        assert found["tensor"] is not None or found["what"] == "generators"


@pytest.mark.parametrize("name", SAME)
def test_what_changes_nothing_is_the_same_and_said(base, tmp_path, capsys, name):
    """Settings that differ are listed all the same, and of a longer run what both have is compared."""
    changes, setting = SAME[name]
    planted.make_trainer(str(tmp_path / "run"), **changes).run()
    status, found = diff(capsys, base / "recorded", tmp_path / "run")
    assert (status, found["same"], found["iteration"], found["tensor"]) == (0, True, None, None)
    assert any(setting in name for name in found["settings"]) if setting else found["settings"] == {}


def test_another_version_and_another_commit_are_settings(base, tmp_path, capsys):
    """A run of the same numbers is the same run; the versions are listed."""
    shutil.copytree(base / "recorded", tmp_path / "run")
    record = json.loads((tmp_path / "run/run.json").read_text())
    record["versions"]["torch"], record["git_commit"] = "2.6.0", "0" * 40
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    status, found = diff(capsys, base / "recorded", tmp_path / "run")
    assert (status, found["same"]) == (0, True)
    assert found["settings"]["versions.torch"][1] == "2.6.0"
    assert found["settings"]["git_commit"][1] == "0" * 40


def test_another_number_of_threads_is_a_setting(base, tmp_path, capsys):
    """Whether sums round otherwise depends on the machine."""
    planted.make_trainer(str(tmp_path / "run"), threads=2).run()
    torch.set_num_threads(1)
    status, found = diff(capsys, base / "recorded", tmp_path / "run")
    assert found["settings"]["threads"] == [1, 2]
    assert status == 0 or found["tensor"] is not None


def test_the_first_line_is_the_answer(base, tmp_path, capsys):
    """Then come settings, and what was compared and what was not."""
    planted.make_trainer(str(tmp_path / "run"), lr=0.5, length=20).run()
    assert main(["diff", str(base / "recorded"), str(tmp_path / "run")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("different from iteration 2 on: the loss main/loss: ")
    assert lines[1].startswith(f"the first tensor that differs, after iteration 4: {planted.FIRST}: ")
    assert lines[2:5] == [
        "settings that differ:",
        "  optimizers.main[0].lr: 0.02 -> 0.5",
        "  plan.stop_trigger: \"ReachedTrigger(24, 'iteration')\" -> \"ReachedTrigger(20, 'iteration')\"",
    ]
    assert "compared: batches, main/loss of iterations 1 to 20, as recorded" in lines
    assert "not compared: generators, which were recorded after different iterations" in lines
    assert lines[-1] == f"not compared: iterations 21 to 24, which only {base / 'recorded'} has"
    assert main(["diff", str(base / "recorded"), str(base / "plain")]) == 0
    assert capsys.readouterr().out.startswith("same up to iteration 24\n")


def test_a_value_that_recorder_log_and_snapshot_have_is_printed_once(base, tmp_path, capsys):
    """Here the difference is first felt in the iteration of a snapshot."""
    batches = iterators.SerialIterator(range(planted.EXAMPLES), planted.BATCH, seed=1)
    example = next(batch for number, batch in enumerate(batches, 1) if number == planted.SNAPSHOTS)[0]
    planted.make_trainer(str(tmp_path / "run"), example=int(example)).run()
    assert main(["diff", str(base / "recorded"), str(tmp_path / "run")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"different from iteration {planted.SNAPSHOTS} on: the loss main/loss: ")
    assert not any(line.startswith("  the loss main/loss: ") for line in lines)


def unseed(*names):
    """Put generators into states that no other run begins with."""
    for name in names:
        {"python": random.seed, "numpy": np.random.seed}[name]()


UNSEEDED = [("python",), ("numpy",), ("python", "numpy")]


@pytest.mark.parametrize("names", UNSEEDED, ids=" and ".join)
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "plain"])
@pytest.mark.parametrize("end", [24, 11], ids=["at once", "resumed"])
def test_a_generator_from_which_nobody_draws_need_not_be_seeded(base, tmp_path, capsys, names, recorded, end):
    """As in a script that seeds torch alone: neither the recorder nor the snapshots tell two equal runs apart."""
    for length in sorted({end, 24}):
        trainer = planted.make_trainer(str(tmp_path / "run"), recorded=recorded, length=length)
        unseed(*names)
        trainer.run()
    shutil.rmtree(tmp_path / "run/snapshot_iter_11", ignore_errors=True)
    status, found = diff(capsys, base / ("recorded" if recorded else "plain"), tmp_path / "run")
    assert (status, found["same"], found["iteration"]) == (0, True, None)


def drawing(trainer, names):
    """Draw from generators once, in the midst of the run."""

    def draw(trainer):
        if trainer.updater.iteration == 5:
            for name in names:
                {"python": random.random, "numpy": np.random.rand}[name]()

    trainer.extend(draw, trigger=(1, "iteration"))
    return trainer


@pytest.mark.parametrize("names", UNSEEDED, ids=" and ".join)
def test_generators_that_are_drawn_from_and_not_seeded_are_found_and_nothing_else_is_hidden(tmp_path, capsys, names):
    """From their first draw on they count; the words say which, and where the first loss differs."""
    for name, changes in (("one", {}), ("same", {}), ("pixel", {"pixel": 3})):
        trainer = drawing(planted.make_trainer(str(tmp_path / name), **changes), names)
        unseed(*names)
        trainer.run()
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "same")]) == 1
    lines = capsys.readouterr().out.splitlines()
    answer = f"different by iteration {planted.SNAPSHOTS}, the first to compare: the random generators "
    assert lines[0].startswith(answer)
    (rest,) = (line for line in lines if line.startswith("all else that was compared is the same: what was drawn from them"))
    assert all(name in rest for name in names)
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "pixel")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(answer)
    assert any(line.startswith("the first loss that differs, in iteration 10: main/loss: ") for line in lines)


def test_a_run_that_was_killed_and_resumed_is_the_same(base, tmp_path, capsys):
    """From a snapshot before the end; the start is not a difference."""
    planted.make_trainer(str(tmp_path / "run"), length=11).run()
    shutil.rmtree(tmp_path / "run/snapshot_iter_11")
    planted.make_trainer(str(tmp_path / "run")).run()
    assert len(json.loads((tmp_path / "run/run.json").read_text())["starts"]) == 2
    status, found = diff(capsys, base / "recorded", tmp_path / "run")
    assert (status, found["same"], found["iterations"]) == (0, True, [24, 24])


@pytest.mark.filterwarnings("ignore:.*running_mean is NaN in snapshot")  # of the forward of the update that is skipped
@pytest.mark.parametrize("length", [30, 17])
def test_a_run_that_went_back_to_a_snapshot_is_compared_by_what_it_has_kept(tmp_path, capsys, length):
    """After NaN in an update; also where the run was stopped in between, or is shorter."""
    for name, ends in (("one", [30]), ("other", [11, length])):
        for end in ends:
            replay_program.make_trainer(str(tmp_path / name), workers=0, length=end).run()
    assert len(json.loads((tmp_path / "one/run.json").read_text())["starts"]) > 1
    status, found = diff(capsys, tmp_path / "one", tmp_path / "other")
    assert (status, found["same"], found["iterations"]) == (0, True, [30, length])


@pytest.mark.parametrize(("name", "tensor", "elements"), [(name, *place) for name, place in ULPS.items()])
def test_by_how_much_a_tensor_of_a_snapshot_differs_is_said(base, tmp_path, capsys, name, tensor, elements):
    """In numbers, in elements, and in units of the last place."""
    planted.make_trainer(str(tmp_path / "other"), recorded=False, later=(24, f"ulp {name}")).run()
    assert main(["diff", str(base / "plain"), str(tmp_path / "other")]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"different by iteration 24, and the same in iteration 16: the tensor {tensor}: by at most ")
    assert first.endswith(f" in 1 of {elements} elements, at most 1 ulp")


def nothing_recorded(run):
    for name in ("log.jsonl", "recorder.bin"):
        (run / name).unlink()
    for snapshot in run.glob("snapshot_iter_*"):
        shutil.rmtree(snapshot)


def write(name, content):
    return lambda run: (run / name).write_bytes(content)


def in_the_middle(run):
    path = run / "recorder.bin"
    content = bytearray(path.read_bytes())
    content[40] ^= 255
    path.write_bytes(content)


def pipe(run):
    (run / "log.jsonl").unlink()
    os.mkfifo(run / "log.jsonl")


HOSTILE = {
    "nothing in common": (nothing_recorded, "not known: the two runs have left nothing that can be compared"),
    "an empty directory": (lambda run: [shutil.rmtree(run), run.mkdir()], "holds no run"),
    "no directory": (shutil.rmtree, "there is no directory"),
    "a record that is no JSON": (write("run.json", b"{"), "run.json"),
    "a record that is nested too deep": (write("run.json", b"[" * 10**6), "nested too deep"),
    "a record of something else": (write("run.json", b"[]"), "not a record"),
    "a record that leads elsewhere": (write("run.json", b'{"format": 1, "files": 3}'), "not of the type"),
    "a log of something else": (write("log.jsonl", b'{"iteration": 6}\nnull\n'), "line 2 is not a row"),
    "a log that goes back": (write("log.jsonl", b'{"iteration": 6}\n{"iteration": 5}\n'), "line 2 is not a row"),
    "a log without iterations": (write("log.jsonl", b'{"iteration": "6"}\n'), "line 1 is not a row"),
    "a log that is nested too deep": (write("log.jsonl", b"[" * 10**6 + b"\n"), "line 1 is not a row"),
    "a log of bytes": (write("log.jsonl", b"\xff\xfe\0\n"), "line 1 is not a row"),
    "a ledger of something else": (write("recorder.bin", b"something else"), "is not a ledger"),
    "a damaged ledger": (in_the_middle, "damaged"),
    "a ledger that is cut off": (write("recorder.bin", b"\x89led"), "cut off"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_were_not_written_so_are_trouble_and_no_answer(base, tmp_path, capsys, name):
    """The status is 2, and the words say which file."""
    damage, words = HOSTILE[name]
    shutil.copytree(base / "recorded", tmp_path / "run")
    damage(tmp_path / "run")
    for pair in ((base / "recorded", tmp_path / "run"), (tmp_path / "run", base / "recorded")):
        assert main(["diff", *map(str, pair)]) == 2
        printed = capsys.readouterr()
        assert words in printed.out + printed.err
        assert "Traceback" not in printed.err


@pytest.mark.parametrize("number", [10**400, -(10**400), 10**308, 2**1024])
def test_a_whole_number_beyond_floats_is_known_to_bisect_as_infinite(base, tmp_path, number):
    shutil.copytree(base / "plain", tmp_path / "run")
    (tmp_path / "run/log.jsonl").write_text(json.dumps({"main/loss": number, "iteration": 1}) + "\n")
    values = collect(FinishedRun(tmp_path / "run"), "main/loss").values
    assert values == {1: 1e308 if number == 10**308 else math.copysign(math.inf, number > 0 or -1)}


def test_a_record_of_strange_values_is_compared_all_the_same(base, tmp_path, capsys):
    """They are settings that differ, whatever they are."""
    shutil.copytree(base / "recorded", tmp_path / "run")
    record = json.loads((tmp_path / "run/run.json").read_text())
    entries = [3, {"name": ["a"], "class": {"b": 1}}, {"class": None}]
    record |= {
        "plan": {"extensions": entries},
        "ranks": "two",
        "argv": {"a": [1]},
        "models": [[]],
        "optimizers": {"main": 3},
    }
    record["starts"] = [{"iteration": [], "changed": 3}, {"changed": {"x": {}}}]
    record["config"] = {"\ud800\x1b[31m": 10**400, "deep": json.loads("[" * 200 + "]" * 200)}
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    for pair in ((base / "recorded", tmp_path / "run"), (tmp_path / "run", base / "recorded")):
        assert main(["diff", *map(str, pair)]) == 0
        printed = capsys.readouterr()
        assert printed.out.startswith("same up to iteration 24\n")
        assert "\x1b" not in printed.out
        assert printed.err == ""
        assert diff(capsys, *pair)[0] == 0


def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(base, tmp_path, capsys):
    """It is left out, as what is no file."""
    shutil.copytree(base / "recorded", tmp_path / "run")
    pipe(tmp_path / "run")
    assert main(["diff", str(base / "recorded"), str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert f"not compared: the rows of log.jsonl, which only {base / 'recorded'} has\n" in printed
    assert "rows of log.jsonl, of iterations" not in printed


def test_a_damaged_snapshot_is_not_compared_and_said(base, tmp_path, capsys):
    """The others are."""
    shutil.copytree(base / "plain", tmp_path / "run")
    file = next((tmp_path / "run/snapshot_iter_8").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    status, found = diff(capsys, base / "plain", tmp_path / "run")
    assert (status, found["same"]) == (0, True)
    assert any("the snapshots of iteration 8: " in text for text in found["not_compared"])
    assert any("the snapshots of iterations 16, 24" in text for text in found["compared"])


def test_a_run_that_is_being_written_is_read_as_far_as_it_is_there(base, tmp_path, capsys):
    """The last row and the last block may be incomplete."""
    shutil.copytree(base / "recorded", tmp_path / "run")
    log, ledger = tmp_path / "run/log.jsonl", tmp_path / "run/recorder.bin"
    log.write_bytes(log.read_bytes()[:-20])
    ledger.write_bytes(ledger.read_bytes()[:-20])
    status, found = diff(capsys, base / "recorded", tmp_path / "run")
    assert (status, found["same"]) == (0, True)
    assert any("is incomplete" in text for text in found["not_compared"])


def test_a_snapshot_in_place_of_a_run_is_refused_with_the_run(base, capsys):
    """Two snapshots have no iterations between them."""
    assert main(["diff", str(base / "plain"), str(base / "plain/snapshot_iter_8")]) == 2
    assert f"give its run, such as {base / 'plain'}" in capsys.readouterr().err


def test_names_in_a_record_lead_nowhere_else(base, tmp_path, capsys):
    """A log outside of the run is not read."""
    shutil.copytree(base / "recorded", tmp_path / "run")
    (tmp_path / "other.jsonl").write_text("not a row\n")
    record = json.loads((tmp_path / "run/run.json").read_text())
    record["files"] += ["../other", "../other.jsonl", str(tmp_path / "other"), str(tmp_path / "other.jsonl")]
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    assert Path(tmp_path / "run/../other.jsonl").exists()
    assert main(["diff", str(base / "recorded"), str(tmp_path / "run")]) == 0
