"""chainring diff of runs in an object store: what it is on a disk."""

import json

import pytest
from synced import remove, sync_up, write

import planted
from chainring.cli import main


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run on the disk."""
    out = tmp_path_factory.mktemp("runs") / "base"
    planted.make_trainer(str(out)).run()
    return out


def diff(capsys, one, other):
    """The exit status, and what is printed with --json."""
    capsys.readouterr()
    status = main(["diff", "--json", str(one), str(other)])
    return status, json.loads(capsys.readouterr().out)


def test_a_run_that_trained_in_a_store_is_compared_with_one_on_the_disk(s3, base, capsys):
    """By recorder, log and snapshots; that of an address ends with a slash or not."""
    planted.make_trainer(f"{s3}/run").run()
    status, found = diff(capsys, base, f"{s3}/run/")
    assert (status, found["same"], found["iterations"]) == (0, True, [24, 24])
    assert len(found["compared"]) == 5
    assert found["not_compared"] == []


def test_two_runs_in_a_store_that_differ_do_so_where_they_do_on_the_disk(s3, base, tmp_path, capsys):
    """The same answer; a copy by hand is a run too."""
    planted.make_trainer(str(tmp_path / "other"), lr=0.03).run()
    here = diff(capsys, base, tmp_path / "other")
    for path, name in ((base, "one"), (tmp_path / "other", "other")):
        sync_up(path, f"{s3}/{name}")
    assert diff(capsys, f"{s3}/one", f"{s3}/other") == here
    assert here[1]["iteration"] == 2


def test_what_cannot_be_compared_is_trouble(s3, base, capsys):
    """Nothing there, a snapshot, and a damaged record."""
    sync_up(base, f"{s3}/run")
    planted.make_trainer(f"{s3}/other", lr=0.03).run()
    cases = [
        (["diff", str(base), f"{s3}/nothing"], "holds no run"),
        (["diff", f"{s3}/run/snapshot_iter_8", str(base)], f"is a snapshot; give its run, such as {s3}/run"),
    ]
    for arguments, words in cases:
        assert main(arguments) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    remove(f"{s3}/run/run.json")
    write(f"{s3}/run/run.json", b"{")
    assert main(["diff", str(base), f"{s3}/run"]) == 2
    assert f"{s3}/run/run.json" in capsys.readouterr().err
