"""The directory of a run: one run at a time, no rubbish of killed ones, and an earlier run's files out of the way."""

import os
import shutil
import socket
from pathlib import Path

import pytest
from counting import CountingUpdater, a_trainer
from torch import nn

import forked
from chainring import serializers, training
from chainring.training import extensions

HOLDER = """
import os, sys
sys.path.insert(0, sys.argv[2])
from counting import a_trainer

def wait(trainer):
    if os.fork() == 0:
        sys.stdin.read()  # a worker, which outlives the trainer
        os._exit(0)
    print(os.getpid(), flush=True)
    sys.stdin.read()

trainer = a_trainer(sys.argv[1], stop=(1, "iteration"))
trainer.extend(wait)
trainer.run()
"""


class Writes(training.Extension):
    """Writes files of its own names."""

    def __init__(self, *names):
        self.names = names

    @property
    def writes(self):
        return self.names

    def __call__(self, trainer):
        for name in self.names:
            (Path(trainer.out) / name.format(trainer)).write_text(f"of iteration {trainer.updater.iteration}")


def run(out, *own, stop=2):
    trainer = a_trainer(out, stop=(stop, "iteration"))
    for extension in own:
        trainer.extend(extension, trigger=(1, "iteration"))
    trainer.run()
    return trainer


def names(directory):
    return sorted(entry.name for entry in Path(directory).iterdir())


def failing(where):
    """An extension that fails at one place of a run."""
    extension = training.make_extension()(lambda trainer: None)

    def fail(*_):
        raise ValueError(f"failed at {where}")

    setattr(extension, where, fail)
    return extension


def test_a_second_trainer_in_the_same_process_is_refused_and_the_first_goes_on(tmp_path):
    """The error names process, host and remedy; the second has written nothing."""
    seen = []

    def second(trainer):
        before = names(tmp_path)
        with pytest.raises(BlockingIOError, match=f"process {os.getpid()} on {socket.gethostname()}.*choose another out"):
            run(tmp_path, Writes("theirs"))
        seen.append(before == names(tmp_path))

    assert run(tmp_path, second).updater.iteration == 2
    assert seen == [True, True]


def test_a_run_begins_though_another_begins_and_ends_between_its_first_steps(tmp_path, monkeypatch):
    """That one removes what is unfinished, also the file by which this one tries whether it may write there."""
    touch, others = Path.touch, []

    def touch_beside_another(path, *arguments, **keywords):
        touch(path, *arguments, **keywords)
        if not others:
            others.append(path)
            run(tmp_path)

    monkeypatch.setattr(Path, "touch", touch_beside_another)
    assert run(tmp_path).updater.iteration == 2
    assert [path.parent for path in others] == [tmp_path]


def test_a_trainer_may_run_within_another_in_another_directory(tmp_path):
    """What is locked is the directory."""
    inner = []
    run(tmp_path / "outer", lambda trainer: inner.append(run(tmp_path / f"inner-{trainer.updater.iteration}")))
    assert [trainer.updater.iteration for trainer in inner] == [2, 2]


def test_another_process_is_refused_while_one_runs_and_let_in_at_once_when_that_is_killed(tmp_path):
    """Though a worker process of the killed trainer lives on."""
    with forked.Forked(["-c", HOLDER, tmp_path, Path(__file__).parent]) as holder:
        pid = int(holder.stdout.readline())
        with pytest.raises(BlockingIOError, match=f"process {pid} on {socket.gethostname()}"):
            run(tmp_path)
        holder.kill()
        holder.wait()
        assert run(tmp_path).updater.iteration == 2


def test_the_directory_is_free_when_a_run_has_ended(tmp_path):
    """And its lock file stays where it is, for no run to lock a file that another has replaced."""
    run(tmp_path)
    inode = (tmp_path / ".lock").stat().st_ino
    run(tmp_path)
    assert (tmp_path / ".lock").stat().st_ino == inode


@pytest.mark.parametrize("where", ["offer", "initialize", "__call__", "on_error", "finalize"])
def test_the_directory_is_free_wherever_a_run_has_failed(tmp_path, where):
    """At the choice of a snapshot, before the loop, in it, and after it."""

    class Fails(training.Extension):
        def __call__(self, trainer):
            raise ValueError("failed in the loop")

    extension = Fails()
    if where != "__call__":
        setattr(extension, where, getattr(failing(where), where))
    with pytest.raises(ValueError, match="failed"):
        run(tmp_path, extension)
    assert run(tmp_path).updater.iteration == 2


def test_the_directory_is_free_when_its_sweep_has_failed(tmp_path, monkeypatch):
    """What cannot be removed stops the run before it has begun."""
    (tmp_path / ".chainring-0123456789abcdef.tmp").mkdir()

    def refuse(path):
        raise PermissionError("not yours")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(PermissionError, match="not yours"):
            run(tmp_path)
    assert run(tmp_path).updater.iteration == 2


def test_what_killed_runs_have_left_unfinished_is_removed_before_the_first_write(tmp_path):
    """Directories, files, links and what was being removed, by our mark; nothing else, and no dot files of others."""
    (tmp_path / ".chainring-0123456789abcdef.tmp").mkdir()
    (tmp_path / ".chainring-0123456789abcdef.tmp" / "state.json").touch()
    (tmp_path / ".chainring-0123456789abcdef.old").mkdir()
    (tmp_path / ".chainring-0123456789abcde0.tmp").touch()
    (tmp_path / "target").mkdir()
    (tmp_path / ".chainring-0123456789abcde1.tmp").symlink_to("target")
    others = [
        ".gitignore",
        ".x.tmp",
        ".x-1.tmp",
        ".x-1-2.tmp",
        ".x-41-1700000000.tmp",
        "x-1-2.tmp",
        ".chainring-1.tmp",
        "target",
        ".venv",
    ]
    for name in set(others) - {"target"}:
        (tmp_path / name).touch()
    seen = []
    run(tmp_path, training.make_extension(initializer=lambda trainer: seen.append(names(tmp_path)))(lambda trainer: None))
    assert seen == [sorted([*others, ".lock", "run.json"])]


@pytest.fixture
def everything():
    """Extensions that write all that a run can leave behind, fresh ones at each call."""

    def make():
        return [
            extensions.LogReport(),
            extensions.snapshot(snapshot_on_error=True),
            extensions.snapshot("best"),
            extensions.snapshot_object(nn.Linear(1, 1), "model_iter_{.updater.iteration}"),
            extensions.snapshot_object(nn.Linear(1, 1), "model"),
            extensions.snapshot_object(CountingUpdater(), "updater"),
            extensions.snapshot(lambda trainer: f"own-{trainer.updater.iteration}"),
            Writes("cg.dot", "image_{.updater.iteration}"),
        ]

    return make


OWN = [
    "best", "best_iter_2", "cg.dot", "image_1", "image_2", "log", "log.jsonl", "model", "model_iter_1", "model_iter_2",
    "own-1", "own-1_iter_1", "own-2", "own-2_iter_2", "run.json", "snapshot_iter_1", "snapshot_iter_2", "updater",
    "updater_iter_2",
]  # fmt: skip


def test_a_fresh_start_moves_all_of_an_earlier_run_out_of_the_way_and_says_so(tmp_path, everything, capsys):
    """To previous/1, then to previous/2; links point to what they pointed to."""
    run(tmp_path, *everything())
    assert names(tmp_path) == sorted([".lock", *OWN])
    assert capsys.readouterr().out == ""
    run(tmp_path, *everything())
    assert names(tmp_path / "previous" / "1") == OWN
    assert names(tmp_path) == sorted([".lock", "previous", *OWN])
    printed = capsys.readouterr().out
    assert printed.startswith(f"{tmp_path} holds an earlier run: best, best_iter_2, cg.dot")
    assert printed.endswith(f"and 13 more moved to {tmp_path / 'previous' / '1'}\n")
    run(tmp_path)
    assert names(tmp_path / "previous" / "2") == OWN
    assert names(tmp_path) == [".lock", "previous", "run.json"]
    assert (tmp_path / "previous" / "2" / "best" / "manifest.json").samefile(
        tmp_path / "previous" / "2" / "best_iter_2" / "manifest.json"
    )


def test_a_run_that_saved_nothing_begins_anew_and_says_what_saves_sooner(tmp_path, capsys):
    """It was killed before its first snapshot, and the same command is given again."""
    for _ in range(2):
        with pytest.raises(ValueError, match="failed at initialize"):
            run(tmp_path, extensions.snapshot(autoload=True), failing("initialize"))
    printed = capsys.readouterr().out
    assert "ended before anything was saved: this one begins anew, and run.json moved to" in printed
    assert 'give snapshot() a shorter trigger, such as (300, "second")' in printed


def test_what_others_have_put_there_stays_where_it_is(tmp_path, everything):
    """Also under names that are nearly those of the run, and in dot files."""
    others = [".env", "image_x", "image_1.bak", "log.txt", "mlp.model", "notes", "snapshot_iter_old", "snapshot_iter_1.bak"]
    run(tmp_path, *everything())
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / "best_of").mkdir()
    run(tmp_path)
    assert names(tmp_path) == sorted([".lock", "best_of", "previous", "run.json", *others])
    assert all((tmp_path / name).read_text() == "mine" for name in others)


def test_files_in_folders_are_moved_into_folders_of_the_same_name(tmp_path):
    """Those of others in these folders stay."""
    (tmp_path / "images" / "of").mkdir(parents=True)
    (tmp_path / "images" / "of" / "mine_1.txt").touch()
    run(tmp_path, Writes("images/of/{.updater.iteration}.txt", "images/last"), extensions.LogReport(filename="logs/log"))
    run(tmp_path)
    moved = tmp_path / "previous" / "1"
    assert names(moved) == ["images", "logs", "run.json"]
    assert names(moved / "logs") == ["log", "log.jsonl"]
    assert names(moved / "images") == ["last", "of"]
    assert names(moved / "images" / "of") == ["1.txt", "2.txt"]
    assert names(tmp_path / "images" / "of") == ["mine_1.txt"]


def test_error_snapshots_are_moved_with_their_run(tmp_path):
    """They are of the run by what their manifests say."""
    with pytest.raises(ValueError, match="failed"):
        run(tmp_path, extensions.snapshot(snapshot_on_error=True), failing_at_2)
    assert "snapshot_iter_2_error" in names(tmp_path)
    run(tmp_path)
    assert names(tmp_path / "previous" / "1") == ["run.json", "snapshot_iter_1", "snapshot_iter_2_error"]


def failing_at_2(trainer):
    if trainer.updater.iteration == 2:
        raise ValueError("failed")


def test_each_run_moves_what_the_one_before_has_written_whatever_it_writes_itself(tmp_path):
    """Which names are of a run is what it has recorded, and not what the next one would write."""
    run(tmp_path, Writes("first"))
    run(tmp_path, Writes("second"))
    run(tmp_path, Writes("third"))
    assert names(tmp_path / "previous" / "1") == ["first", "run.json"]
    assert names(tmp_path / "previous" / "2") == ["run.json", "second"]
    assert names(tmp_path) == [".lock", "previous", "run.json", "third"]


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00\xff", "[]", '{"format": 7}', '{"format": 1, "files": null}'])
def test_a_record_that_cannot_be_read_is_warned_about_and_moved_with_what_is_known(tmp_path, text):
    """Names that this run will write, and snapshots, whose manifests tell."""
    run(tmp_path, extensions.snapshot(), Writes("both", "only there"))
    (tmp_path / "run.json").write_text(text, encoding="latin-1")
    with pytest.warns(UserWarning, match=r"run\.json is skipped"):
        run(tmp_path, Writes("both"))
    assert names(tmp_path / "previous" / "1") == ["both", "run.json", "snapshot_iter_1", "snapshot_iter_2"]
    assert (tmp_path / "previous" / "1" / "run.json").read_text(encoding="latin-1") == text
    assert names(tmp_path) == [".lock", "both", "only there", "previous", "run.json"]


def test_a_name_of_any_text_takes_nothing_of_others(tmp_path):
    """A file name that is nothing but a field of unknown form is not a claim to the whole directory."""
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "data").mkdir()
    for _ in range(3):
        run(tmp_path, extensions.snapshot("{.updater.epoch_detail}"))
    assert names(tmp_path) == [".lock", "0.1", "0.1_iter_1", "0.2", "0.2_iter_2", "data", "notes", "previous", "run.json"]
    assert names(tmp_path / "previous") == ["1", "2"]


HOMES = {
    "a folder": ("~/run", "run"),
    "of two names": ("~/runs/run", "runs/run"),
    "the folder itself": ("~", ""),
    "with a slash": ("~/", ""),
    "a Path": (Path("~/run"), "run"),
    "upwards": ("~/runs/../run", "run"),
}


@pytest.mark.parametrize("form", HOMES)
def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch, form):
    """As in a shell, which does not see it in ``--out=~/run``; no folder of that name is made."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    given, expected = HOMES[form]
    trainer = run(given)
    assert os.path.realpath(trainer.out) == str(tmp_path / "home" / expected)
    assert names(tmp_path) == ["home"]


def test_models_and_arrays_are_saved_there_too(tmp_path, monkeypatch):
    """And loaded from there."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    for save, load, name in (
        (serializers.save, serializers.load, "~/a/model"), (serializers.save_npz, serializers.load_npz, "~/a/model.npz")
    ):  # fmt: skip
        save(name, model)
        load(name, nn.Linear(2, 2))
    assert names(tmp_path) == ["home"]


@pytest.mark.parametrize("out", ["~nobody-of-that-name/run", "~nobody-of-that-name"])
def test_the_home_of_a_user_who_does_not_exist_is_refused(tmp_path, monkeypatch, out):
    """The error says how a folder of that name is written, which works."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"write \./{out}"):
        a_trainer(out)
    assert os.path.realpath(run(f"./{out}").out) == str(tmp_path / out)


def test_a_process_of_several_that_trains_alone_is_told_of_the_communicator(tmp_path, monkeypatch):
    """Where another has the directory: under torchrun, another `out` would train two models."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)

    def second(trainer):
        with pytest.raises(BlockingIOError, match=r"another of the 2 processes .* comm=create_communicator\(\)") as told:
            a_trainer(tmp_path, stop=(1, "iteration")).run()
        assert "choose another out" not in str(told.value)

    trainer = a_trainer(tmp_path, stop=(1, "iteration"))
    trainer.extend(second)
    trainer.run()
    assert trainer.updater.iteration == 1
