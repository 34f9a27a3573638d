"""chainring thin: digests in place of snapshots, which a replay makes again and compares with them."""

import gc
import json
import os
import shutil
import zlib
from dataclasses import replace

import pytest
import torch

import resume_program
from chainring import serializers
from chainring._files import DirectoryLock
from chainring._runs.finished import FinishedRun
from chainring.cli import main
from chainring.serializers._loading import read_state
from chainring.serializers._store import CorruptError, Thinned, format_manifest, open_store, parse_manifest
from chainring.serializers._values import is_same_value
from chainring.testing import ReplayDiffers, replay
from chainring.training import extensions, triggers
from chainring.training._digests import leaves
from chainring.training._entry import Observer

LENGTH, LR = 24, 0.005
GOES = [3, 4, 7, 8, 9, 11, 13, 14, 16, 17, 19, 21, 22, 23]  # with --every "5 iteration"


def make_trainer(out, length=LENGTH, lr=LR, **settings):
    """A trainer that takes a snapshot after each iteration but every sixth, and a best one."""
    trainer, *_ = resume_program.build(str(out), stop=(length, "iteration"), seed=torch.seed() % 2**31, **settings)
    trainer.updater.get_optimizer("main").param_groups[0]["lr"] = lr
    best = triggers.MinValueTrigger("main/loss", (8, "iteration"))
    trainer.extend(extensions.snapshot("best"), trigger=best)
    taken = triggers.ManualScheduleTrigger([i for i in range(2, 50) if i % 6], "iteration")
    trainer.extend(extensions.snapshot("s_{.updater.iteration}", autoload=True), trigger=taken)
    return trainer


class Stop(Observer):
    """Ends a run after an iteration, as a signal does, without another setting."""

    def __init__(self, iteration):
        self.iteration = iteration

    def ends(self, trainer, ends):
        return trainer.updater.iteration == self.iteration or ends()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run without a seed."""
    out = tmp_path_factory.mktemp("thin") / "result"
    make_trainer(out).run()
    return out


@pytest.fixture
def out(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "result", symlinks=True)


def thin(out, capsys, *arguments, status=0):
    """What the command says, as JSON."""
    assert main(["thin", "--json", str(out), "--every", "5 iteration", *arguments]) == status
    return json.loads(capsys.readouterr().out)


def thinned(out):
    """The iterations of the thinned snapshots; all others are sound."""
    found = []
    for name in open_store(out).names():
        try:
            open_store(out).snapshot(name).verify()
        except Thinned as error:
            found.append(error.manifest.iteration)
            assert os.listdir(out / name) == ["manifest.json"]
    return sorted(found)


def rewrite(snapshot, *, about=None, state=(b"", b"")):
    """Change what a snapshot says of itself, and a text in its state, as another run would have written it."""
    path, text = snapshot / "manifest.json", (snapshot / "state.json").read_bytes().replace(*state, 1)
    (snapshot / "state.json").write_bytes(text)
    manifest = parse_manifest(path.read_bytes(), str(snapshot))
    files = {**manifest.files, "state.json": (len(text), zlib.crc32(text))}
    path.write_bytes(format_manifest(replace(manifest, files=files, about={**manifest.about, **(about or {})})))


def differing(one, other):
    """The paths at which two snapshots differ, but for times, and where a log stands in its file."""
    first, second = (
        {at: leaf for key, item in read_state(each).items() for at, leaf in leaves(key, item)} for each in (one, other)
    )
    assert first.keys() ^ second.keys() <= {path for path in first.keys() | second.keys() if "LogReport" in path}
    same = {path for path in first.keys() & second.keys() if is_same_value(first[path], second[path])}
    return {path for path in first.keys() & second.keys() if "LogReport" not in path and "elapsed" not in path} - same


def test_one_snapshot_of_each_interval_stays_and_the_others_keep_digests(finished, out, capsys):
    """The first at or after each multiple; a second call finds nothing to do."""
    facts = thin(out, capsys)
    assert facts["thinned"] == [f"s_{iteration}" for iteration in GOES]
    assert thinned(out) == GOES
    assert [name for name, reason in facts["stay"].items() if not reason] == ["s_2", "s_5", "s_10", "s_15", "s_20"]
    files = [file for iteration in GOES for file in (finished / f"s_{iteration}").iterdir() if file.name != "manifest.json"]
    assert facts["bytes"] == sum(file.stat().st_size for file in files)
    assert thin(out, capsys)["thinned"] == []
    assert thinned(out) == GOES


def test_a_thinned_snapshot_is_made_again_with_all_that_it_held(finished, out, tmp_path, capsys):
    """By a script with another seed, from the snapshot that stays before it; each of them."""
    thin(out, capsys)
    for iteration in GOES:
        trainer = replay(make_trainer, out, iteration)
        serializers.save(tmp_path / f"made_{iteration}", trainer)
        assert differing(tmp_path / f"made_{iteration}", finished / f"s_{iteration}") == set()


def test_another_state_than_the_thinned_one_is_named(out, capsys):
    """Where the script has another learning rate now, which the nearest snapshot does not restore."""
    thin(out, capsys)
    with pytest.raises(
        ReplayDiffers, match=r"differs from the snapshot of iteration 14 that was thinned: updater/.* and \d+ more of"
    ):
        replay(lambda out: make_trainer(out, accumulate=2), out, 14)


def test_a_replay_to_a_later_iteration_goes_past_thinned_ones(out, capsys):
    """From the nearest that stays."""
    whole = replay(make_trainer, out, 18).state_dict()
    thin(out, capsys)
    again = replay(make_trainer, out, 18).state_dict()
    assert all(is_same_value(whole[path], again[path]) for path in whole if path.startswith(("updater/", "generators/")))


def test_a_dry_run_changes_nothing(out, capsys):
    """It says what would go, and how many bytes that is."""
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    facts = thin(out, capsys, "--dry-run")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert facts["thinned"] == [f"s_{iteration}" for iteration in GOES]
    assert facts["bytes"] == thin(out, capsys)["bytes"] > 0


def test_links_and_what_has_a_fixed_name_or_an_error_stay(out, capsys):
    """What a person has put there, too: copies, links, and states that were saved by hand."""
    (out / "good").symlink_to("s_13")
    shutil.copytree(out / "s_14", out / "copied")
    serializers.save(out / "by_hand", replay(make_trainer, out, 17))
    capsys.readouterr()
    rewrite(out / "s_9", about={"error": "OSError: full"})
    rewrite(out / "s_8", about={"series": "fixed"})
    rewrite(out / "s_7", about={"values": {"main/loss": 0.5}})
    facts = thin(out, capsys)
    assert facts["thinned"] == [f"s_{iteration}" for iteration in GOES if iteration not in (7, 8, 9, 13)]
    assert set(os.listdir(out)) >= {"best", "good", "copied", "by_hand"}
    for name in ("best", "good", "copied", "by_hand", "s_9", "s_8", "s_7", "s_24"):
        open_store(out).snapshot(name).verify()
    assert facts["stay"]["s_13"] == "good is a link to it"


def test_what_a_replay_may_not_make_again_stays(out, capsys):
    """States of several ranks, and inexact ones; nor is anything made from these, so that the next one stays."""
    rewrite(out / "s_7", state=(b'"generators/0"', b'"generators/1": null, "generators/0"'))
    rewrite(out / "s_13", about={"not bit-exact": "a kernel adds in any order"})
    facts = thin(out, capsys)
    assert facts["thinned"] == [f"s_{iteration}" for iteration in GOES if iteration not in (7, 8, 13, 14)]
    assert "of 2 ranks" in facts["stay"]["s_7"]
    assert "a kernel adds in any order" in facts["stay"]["s_13"]


def test_a_damaged_snapshot_stays_and_is_named(out, capsys):
    """With the exit status of damage; another one begins its interval."""
    for name, file in (("s_14", "state.json"), ("s_10", "rank00000-of-00001.safetensors")):
        content = bytearray((out / name / file).read_bytes())
        content[-1] ^= 1
        (out / name / file).write_bytes(content)
    (out / "s_22" / "manifest.json").write_bytes(b"{}")
    facts = thin(out, capsys, status=1)
    assert sorted(facts["damaged"]) == ["s_10", "s_14", "s_22"]
    assert all(
        "is not what was written" in facts["stay"][name] or "other bytes" in facts["stay"][name] for name in facts["damaged"]
    )
    assert [name for name, reason in facts["stay"].items() if not reason] == ["s_2", "s_5", "s_11", "s_15", "s_20"]
    assert (out / "s_14" / "state.json").exists()


def test_the_first_state_after_a_start_with_other_settings_stays(tmp_path, capsys):
    """Of the iterations before that start a replay has other settings; a start without changes does not count."""
    out = tmp_path / "result"
    for iteration, settings in ((8, {}), (11, {}), (LENGTH, {"accumulate": 2})):
        trainer = make_trainer(out, **settings)
        trainer.watch(Stop(iteration))
        trainer.run()
    capsys.readouterr()
    facts = thin(out, capsys)
    assert facts["stay"]["s_13"] == "the run has started again with other settings before it"
    assert facts["thinned"] == [f"s_{iteration}" for iteration in GOES if iteration != 13]
    replay(make_trainer, out, 9)
    replay(lambda out: make_trainer(out, accumulate=2), out, 14)


def test_a_run_that_is_going_on_is_refused(out, capsys):
    """And one without a record, of which nobody knows the settings."""
    lock = DirectoryLock(out)
    assert main(["thin", str(out), "--every", "5 iteration"]) == 2
    assert f"is being written by another run: process {os.getpid()}" in capsys.readouterr().err
    lock.release()
    (out / "run.json").unlink()
    assert main(["thin", str(out), "--every", "5 iteration"]) == 2
    assert "has no run.json" in capsys.readouterr().err
    assert thinned(out) == []


def test_what_reads_a_thinned_snapshot_says_how_it_is_made_again(out, capsys):
    """Loading it is an error with the command; inspect, verify, export and report tell it from damage."""
    thin(out, capsys)
    command = f"chainring replay {out} --to 14 --save s_14 SCRIPT"
    with pytest.raises(CorruptError, match="was thinned: it has digests of what it held") as error:
        serializers.load(out / "s_14", make_trainer(out.parent / "new"))
    assert command in str(error.value)
    assert main(["verify", str(out)]) == 0
    assert f"{out}/s_14 was thinned: it has the digests of iteration 14" in capsys.readouterr().out
    assert main(["inspect", str(out / "s_14")]) == 0
    shown = capsys.readouterr().out
    assert command in shown
    assert "updater/model:main/body/0/weight" in shown
    assert main(["export", str(out / "s_14"), str(out / "model")]) == 2
    assert command in capsys.readouterr().err
    assert main(["report", str(out)]) == 0
    assert "thinned" in (out / "report.html").read_text()
    assert main(["inspect", "--json", str(out)]) == 0
    assert '"iteration": 24' in capsys.readouterr().out


def test_a_run_goes_on_after_it_was_thinned(out, capsys):
    """From the newest; if it goes back, thinned ones are moved aside as others are."""
    thin(out, capsys)
    make_trainer(out, LENGTH + 1).run()
    assert json.loads((out / "run.json").read_text())["starts"][-1]["iteration"] == LENGTH
    trainer = make_trainer(out, 16)
    serializers.load(out / "s_15", trainer)
    trainer.run()
    assert thinned(out) == [iteration for iteration in GOES if iteration < 16]
    (archive,) = (out / "abandoned").iterdir()
    assert thinned(archive) == [iteration for iteration in GOES if iteration > 15]


@pytest.mark.parametrize("text", ["5 iteration", "5 iterations", '(5, "iteration")', "5,iteration", "5iteration"])
def test_an_interval_is_written_in_several_ways(out, text, capsys):
    """As in a script, too."""
    assert main(["thin", str(out), "--dry-run", "--every", text]) == 0
    assert f"{len(GOES)} of 21 snapshots would be thinned" in capsys.readouterr().out


def test_an_interval_of_epochs_counts_those_that_are_completed(out, capsys):
    """Five iterations are an epoch here, but for the fraction of one."""
    assert main(["thin", "--json", str(out), "--every", "2 epoch"]) == 0
    stay = [name for name, reason in json.loads(capsys.readouterr().out)["stay"].items() if not reason]
    epochs = [open_store(out).snapshot(name).read_manifest().about["epoch"] for name in stay]
    assert epochs == [0, 2, 4]


@pytest.mark.parametrize("text", ["5", "epoch", "0 epoch", "1.5 epoch", "5 seconds"])
def test_an_interval_of_something_else_is_refused(out, text, capsys):
    """With an example."""
    with pytest.raises(SystemExit):
        main(["thin", str(out), "--every", text])
    assert f'an interval is written "10 epoch" or "1000 iteration", got {text!r}' in capsys.readouterr().err


class Killed(BaseException):
    """In place of a SIGKILL."""


@pytest.mark.parametrize("operation", range(6))
def test_a_kill_leaves_a_snapshot_or_its_digests(out, operation, monkeypatch, capsys):
    """At each operation on the file system; what it leaves over is removed by the next call."""
    calls = 0
    gc.collect()  # so that no directory of an earlier replay is removed meanwhile

    def counting(call):
        def counted(*arguments, **settings):
            nonlocal calls
            calls += 1
            if calls > operation:  # and whatever follows, since a killed process does nothing more
                raise Killed
            return call(*arguments, **settings)

        return counted

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink", "fsync"):
            patch.setattr(os, name, counting(getattr(os, name)))
        with pytest.raises(Killed):
            main(["thin", str(out), "--every", "5 iteration"])
    state = (out / "s_3" / "state.json").exists(), (out / "s_3" / "rank00000-of-00001.safetensors").exists()
    digests = FinishedRun(out).thinned(3)
    if operation < 2:
        assert (digests, state) == (None, (True, True))
        open_store(out).snapshot("s_3").verify()
    else:
        assert "updater/model:main/body/0/weight" in digests
    thin(out, capsys)
    assert thinned(out) == GOES
    replay(make_trainer, out, 3)
