"""The commands on addresses in an object store show, verify and export what they do on a disk."""

import json
import shutil

import pytest
import safetensors.torch
import torch
from synced import keys, read, remove, sync_down, sync_up, write
from test_saving_to_addresses import HARMS
from torch.distributed.checkpoint import load

import forked
import report_runs
from chainring import html_report, iterators, serializers, training
from chainring.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run of two epochs, and the trainer that has ended."""
    out = tmp_path_factory.mktemp("out") / "result"
    trainer = report_runs.part(out, 2, 0.1)
    trainer.run()
    return out, trainer


@pytest.fixture
def place(s3, run):
    """The address of a run with a snapshot as a store writes it, one that was copied from a disk, a link and a model."""
    out, trainer = run
    sync_up(out, f"{s3}/run")
    for name in ("manifest.json", *(key for key in keys(f"{s3}/run/snapshot_iter_6") if key != "manifest.json")):
        remove(f"{s3}/run/snapshot_iter_6/{name}")
    serializers.save(f"{s3}/run/snapshot_iter_6", trainer)
    write(f"{s3}/run/best", json.dumps({"chainring": "link", "target": "snapshot_iter_3"}))
    serializers.save(f"{s3}/run/mlp.model", trainer.updater.get_model("main"))
    return f"{s3}/run"


def shown(capsys, *arguments, status=0):
    """What a command prints on its output, or where it fails on that of errors."""
    assert main([*arguments]) == status
    printed = capsys.readouterr()
    return printed.err if status else printed.out


def test_inspect_shows_the_newest_snapshot_of_a_run(place, run, capsys):
    """The same tensors as on the disk, and the names of the others; a link leads to its target."""
    assert f"{place}/snapshot_iter_6: iteration 6, epoch 2" in shown(capsys, "inspect", place)
    assert "also there: snapshot_iter_3" in shown(capsys, "inspect", f"{place}/")
    there = json.loads(shown(capsys, "inspect", "--json", place))
    here = json.loads(shown(capsys, "inspect", "--json", str(run[0])))
    sizes = {each["name"]: each["shape"] for each in there["tensors"]}
    assert sizes == {each["name"]: each["shape"] for each in here["tensors"]}
    assert "iteration 3" in shown(capsys, "inspect", f"{place}/best")


def test_a_record_that_the_run_replaces_meanwhile_is_read_again(place, proxy, capsys):
    """A run that is going on writes it with each command."""
    proxy.fail("412 PreconditionFailed", times=2, method="GET", key="run.json")
    assert "snapshot_iter_6" in shown(capsys, "inspect", place)
    assert shown(capsys, "control", place) is not None


def test_inspect_reads_no_more_than_manifests_and_headers(place, proxy, capsys):
    """Of files of any size."""
    big = torch.nn.Linear(1000, 1000)
    serializers.save(f"{place}/big.model", big)
    sent = sum(request.sent for request in proxy.requests)
    assert "1000x1000" in shown(capsys, "inspect", f"{place}/big.model")
    assert sum(request.sent for request in proxy.requests) - sent < 20_000


def test_verify_reads_every_byte_once(place, proxy, capsys):
    """Of the snapshots of a run, of one of them, and of the file of a model."""
    sizes = {key: len(read(f"{place}/{key}")) for key in keys(place)}
    for name, words in (("", "snapshot_iter_3"), ("snapshot_iter_6", "iteration 6, 2 files"), ("mlp.model", "4 tensors")):
        files = [key for key in sizes if key.startswith(name or "snapshot_iter")]
        count = len(proxy.requests)
        lines = shown(capsys, "verify", f"{place}/{name}".rstrip("/"))
        assert "is what was written" in lines
        assert words in lines
        gets = [request for request in proxy.requests[count:] if request.method == "GET" and "?" not in request.path]
        for key in files:
            sent = sum(request.sent for request in gets if request.path == f"/run/{key}")
            if key.endswith("manifest.json"):
                assert sizes[key] <= sent <= 2 * sizes[key]
            else:
                assert sizes[key] <= sent <= sizes[key] + 2000, key  # the header of a model's file is read twice


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("file", ["state.json", "rank00000-of-00001.safetensors", "manifest.json"])
def test_verify_notices_damage_and_goes_on(place, file, harm, capsys):
    """Exit status 1, the object's name, and the verdict on the other snapshot."""
    (key,) = (key for key in keys(f"{place}/snapshot_iter_6") if key.endswith(file))
    harm(f"{place}/snapshot_iter_6/{key}")
    assert f"{place}/snapshot_iter_6" in shown(capsys, "verify", f"{place}/snapshot_iter_6", status=1)
    is_gone = harm is remove and file == "manifest.json"  # of a run these are files that were not finished
    assert main(["verify", place]) == (0 if is_gone else 1)
    printed = capsys.readouterr()
    assert "snapshot_iter_3 is what was written" in printed.out
    assert is_gone or file in printed.err


@pytest.mark.parametrize("harm", [each for each in HARMS if each is not remove])
def test_verify_notices_damage_of_a_models_object(place, harm, capsys):
    """Or says that it is not one."""
    harm(f"{place}/mlp.model")
    status = 2 if harm.__name__ == "pickled" else 1
    assert f"{place}/mlp.model is" in shown(capsys, "verify", f"{place}/mlp.model", status=status)


@pytest.mark.parametrize("form", ["safetensors", "torch", "hf", "dcp"])
def test_export_writes_the_model_of_a_snapshot_in_a_store(place, run, tmp_path, form, capsys):
    """As of one on the disk, to the bit."""
    model, target = run[1].updater.get_model("main"), tmp_path / "exported"
    about = json.loads(shown(capsys, "export", "--json", place, str(target), "--format", form))
    assert about["directory"] == f"{place}/snapshot_iter_6"
    wanted = model.state_dict()
    if form == "dcp":
        found = {name: torch.zeros_like(value) for name, value in wanted.items()}
        with pytest.warns(UserWarning, match="torch.distributed is (disabled|unavailable)"):
            load(found, checkpoint_id=target)
    elif form == "torch":
        found = torch.load(target, weights_only=True)
    else:
        found = safetensors.torch.load_file(target if form == "safetensors" else next(target.glob("*.safetensors")))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_export_writes_a_file_to_an_address(place, run, tmp_path, capsys):
    """Where nothing is yet; a directory only to a disk."""
    target = f"{place}/exported.safetensors"
    assert f"{target}: 4 tensors of {place}/snapshot_iter_6" in shown(capsys, "export", place, target)
    assert "exists and is not overwritten" in shown(capsys, "export", place, target, status=2)
    assert "exists and is not overwritten" in shown(capsys, "export", place, f"{place}/best", status=2)
    assert f"a path, and copy it to {place}/hf" in shown(capsys, "export", place, f"{place}/hf", "--format", "hf", status=2)
    model = run[1].updater.get_model("main")
    assert safetensors.torch.load(read(target)).keys() == model.state_dict().keys()


def test_export_reads_the_model_alone(s3, proxy, tmp_path):
    """And not the moments of its optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(600, 600))
    optimizer = torch.optim.Adam(model.parameters())
    updater = training.StandardUpdater(
        iterators.SerialIterator([torch.ones(600)], 1), optimizer, model, loss_func=lambda model, x: model(x).sum()
    )
    updater.update()
    serializers.save(f"{s3}/run/state", training.Trainer(updater, (1, "iteration"), str(tmp_path / "unused")))
    count = len(proxy.requests)
    assert main(["export", f"{s3}/run/state", str(tmp_path / "model")]) == 0
    sent = sum(request.sent for request in proxy.requests[count:])
    assert sent < 1.1 * (tmp_path / "model").stat().st_size + 20_000


def test_report_shows_a_run_in_a_store(place, run, tmp_path, monkeypatch, capsys):
    """Its rows, record, graph and snapshots, as of the copy on the disk; by default in the current directory."""
    monkeypatch.chdir(tmp_path)
    about = json.loads(shown(capsys, "report", "--json", place))
    assert about["file"] == "report.html"
    assert (about["rows"], about["snapshots"], about["damaged"]) == (2, 2, [])
    page = (tmp_path / "report.html").read_text()
    copy = html_report.write(run[0], tmp_path / "copy.html")
    assert copy.rows == 2
    for words in ("main/loss", "&lt;b&gt;bold", "snapshot_iter_6", "verified", "<title>run"):
        assert words in page
    assert "best" in page
    assert len(page) > 0.9 * copy.size
    assert shown(capsys, "report", place, "--out", "sub/other.html").startswith("sub/other.html: ")


def test_report_lays_a_run_in_a_store_over_one_on_the_disk(place, run, tmp_path, monkeypatch, capsys):
    """And says that they are the same, as far as both go."""
    monkeypatch.chdir(tmp_path)
    about = json.loads(shown(capsys, "report", "--json", place, str(run[0])))
    assert about == {"file": "report.html", "bytes": about["bytes"], "rows": 4, "runs": 2}
    assert ": same up to iteration" in (tmp_path / "report.html").read_text()


def test_report_copies_no_snapshot(place, proxy, tmp_path, monkeypatch, capsys):
    """Without verifying them nothing of them but the manifests is read."""
    monkeypatch.chdir(tmp_path)
    shown(capsys, "report", place, "--no-verify")
    gets = [request.path for request in proxy.requests if request.method == "GET" and "?" not in request.path]
    assert not [path for path in gets if "snapshot_iter" in path and not path.endswith("manifest.json")]
    assert "/run/log.jsonl" in gets


def test_report_names_damaged_snapshots(place, tmp_path, monkeypatch, capsys):
    """And shows what is left of a run."""
    monkeypatch.chdir(tmp_path)
    for key in keys(f"{place}/snapshot_iter_6"):
        if key.endswith("state.json"):
            write(f"{place}/snapshot_iter_6/{key}", b"{}")
    assert "damaged: snapshot_iter_6" in shown(capsys, "report", place)


def test_a_hostile_record_leads_report_nowhere(s3, tmp_path, monkeypatch, capsys):
    """Names that lead out of the run are passed over."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    names = ["../../up.json", "/tmp/abs.json", "a//b.json", "", ".", "..", "\0.json", 3, "x" * 5000 + ".json"]
    record = {"format": 1, "config": {}, "versions": {}, "files": names, "starts": []}
    write(f"{s3}/run/run.json", json.dumps(record))
    shown(capsys, "report", f"{s3}/run")
    assert [path.name for path in tmp_path.rglob("*")] == ["cwd", "report.html"]


def test_what_is_not_a_snapshot_is_described(s3, place, run, tmp_path, capsys):
    """In one line with a remedy, and exit status 2."""
    write(f"{s3}/young/run.json", read(f"{place}/run.json"))
    write(f"{s3}/other/notes.txt", b"no run at all")
    write(f"{place}/lost", json.dumps({"chainring": "link", "target": "snapshot_iter_9"}))
    write(f"{place}/old.pt", b"\x80\x02}q\x00.")
    (state,) = (key for key in keys(f"{place}/snapshot_iter_6") if key.endswith("state.json"))
    said = {
        f"{s3}/nothing": f"there is no {s3}/nothing",
        f"{place}/snapshot_iter_9": f"there is no {place}/snapshot_iter_9; {place} has snapshot_iter_6, snapshot_iter_3",
        f"{s3}/young": "belongs to a run that has taken no snapshot",
        f"{s3}/other": "is not a snapshot and holds none: it has notes.txt, and no manifest.json",
        f"{place}/lost": "is a link to snapshot_iter_9, which is not there",
        f"{place}/old.pt": "because a pickle can run code",
        f"{place}/log": f"is text, not a model; to look at the run it belongs to, give {place}",
        f"{place}/snapshot_iter_6/{state}": f"is one file of the snapshot {place}/snapshot_iter_6; give its address",
        f"{s3}-not": "there is no bucket of that name: create it, or correct the address",
        f"{s3}-not/run": "there is no bucket of that name: create it, or correct the address",
    }
    for url, words in said.items():
        for command in ("inspect", "verify", "export"):
            more = [str(tmp_path / "file")] if command == "export" else []
            line = shown(capsys, command, url, *more, status=2)
            assert words in line, (command, url)
            assert line.count("\n") == 1
    assert "the file of a model, not a snapshot" in shown(capsys, "export", f"{place}/mlp.model", "file", status=2)
    assert f"is a snapshot; give its run, such as {place}" in shown(capsys, "report", f"{place}/best", status=2)
    assert f"{s3}/other holds no run" in shown(capsys, "report", f"{s3}/other", status=2)


def test_a_run_may_be_a_whole_bucket(s3, run, tmp_path, monkeypatch, capsys):
    """Its address has no name."""
    sync_up(run[0], s3)
    monkeypatch.chdir(tmp_path)
    for place in (s3, f"{s3}/"):
        assert "iteration 6" in shown(capsys, "inspect", place)
        assert "snapshot_iter_3 is what was written" in shown(capsys, "verify", place)
        assert "2 rows, 2 snapshots" in shown(capsys, "report", place)


def test_a_run_copied_down_is_a_run(place, tmp_path, capsys):
    """With what a store and what a disk has written."""
    copy = sync_down(place, tmp_path / "copy")
    assert shown(capsys, "verify", str(copy)).count("is what was written") == 2
    assert "iteration 6" in shown(capsys, "inspect", str(copy))
    assert shown(capsys, "export", str(copy / "snapshot_iter_6"), str(tmp_path / "model"))
    assert "2 snapshots" in shown(capsys, "report", str(copy))
    (state,) = copy.glob("snapshot_iter_6/*/state.json")
    assert "give the directory" in shown(capsys, "inspect", str(state), status=2)
    shutil.rmtree(state.parent)
    assert "missing" in shown(capsys, "verify", str(copy / "snapshot_iter_6"), status=1)


def test_credentials_are_in_no_message(s3, monkeypatch, capsys):
    """Neither those of the environment nor those in an address, which is refused."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    for url in (f"{s3}/nothing", f"{s3}-not/run", "s3://key:very-secret@bucket/run", "s3://bucket/run?secret=very-secret"):
        for command in ("inspect", "verify", "report"):
            assert "very-secret" not in shown(capsys, command, url, status=2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    line = shown(capsys, "inspect", f"{s3}/run", status=2)
    assert "nothing answers at the address of the store" in line
    assert "very-secret" not in line


def test_without_obstore_the_remedy_is_named(tmp_path):
    """By the commands, in one line."""
    program = "import sys; sys.modules['obstore'] = None\nfrom chainring.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = forked.run(["-c", program, "inspect", "s3://bucket/run"])
    assert done.returncode == 2
    assert "pip install 'chainring[remote]'" in done.stderr
    assert done.stderr.count("\n") == 1
