"""`serializers.save` and `load` on addresses in an object store do what they do on a disk."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from object_server import environment_for
from synced import keys, read, remove, sync_down, sync_up, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import report_runs
from chainring import iterators, serializers, training
from chainring._distributed.communicator import Communicator
from chainring.serializers._saving import Checkpoint, capture
from chainring.serializers._store import open_store
from rank_pair import on_two_ranks


@pytest.fixture
def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def fresh():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def same(one, other):
    """Whether two models have the same entries to the bit."""
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run of two epochs, and the trainer that has ended."""
    out = tmp_path_factory.mktemp("out")
    trainer = report_runs.part(out, 2, 0.1)
    trainer.run()
    return out, trainer


def test_a_model_is_one_object_that_is_replaced_whole(s3, model):
    """A safetensors file with its checksum, which a later save takes the place of."""
    place = f"{s3}/models/mlp.model"
    serializers.save(place, fresh())
    serializers.save(place, model)
    loaded = fresh()
    serializers.load(place, loaded)
    assert same(loaded, model)
    assert keys(s3) == ["models/mlp.model"]
    assert b'"crc32":"' in read(place)


def test_a_file_of_any_size_has_no_more_parts_than_stores_take(monkeypatch):
    """The parts of one that would have more than 10,000 of the usual size are larger."""
    monkeypatch.setattr("chainring._places.bucket.PART", 1)
    torch.manual_seed(1)
    model, loaded = nn.Linear(200, 200), nn.Linear(200, 200)
    updater = training.StandardUpdater([torch.ones(2, 200)], torch.optim.SGD(model.parameters(), lr=0.1), model)
    for name, saved in (("model", model), ("state", training.Trainer(updater))):
        serializers.save(f"memory:///large/{name}", saved)
        serializers.load(f"memory:///large/{name}", loaded, *(["updater/model:main"] if name == "state" else []))
        assert torch.equal(loaded.weight, model.weight)
        nn.init.zeros_(loaded.weight)


def test_of_a_models_object_a_part_is_loaded(s3, model):
    """By its path; what is missing or unexpected is an error unless it is not strict."""
    place = f"{s3}/mlp.model"
    serializers.save(place, model)
    last = nn.Linear(3, 2)
    serializers.load(place, last, "2")
    assert torch.equal(last.weight, model[2].weight)
    more = nn.Sequential(*fresh(), nn.Linear(2, 2))
    with pytest.raises((KeyError, RuntimeError), match=r"3.weight"):
        serializers.load(place, more)
    serializers.load(place, more, strict=False)
    assert same(more[:3], model)


def test_a_store_in_memory_does_for_one_process(model, run):
    """A model's file and a snapshot."""
    serializers.save("memory:///models/mlp.model", model)
    loaded = fresh()
    serializers.load("memory:///models/mlp.model", loaded)
    assert same(loaded, model)
    _, trainer = run
    serializers.save("memory:///state", trainer)
    again = report_runs.part("unused", 3, 0.1)
    serializers.load("memory:///state", again)
    assert again.updater.iteration == 6
    with pytest.raises(FileExistsError, match="memory:///state is there already"):
        serializers.save("memory:///state", trainer)


def test_a_snapshot_has_its_manifest_last(s3, proxy, run):
    """Its files lie in a folder that the manifest names, and the manifest is put if there is none yet."""
    _, trainer = run
    serializers.save(f"{s3}/run/state", trainer)
    written = [request for request in proxy.requests if request.method in ("PUT", "POST")]
    assert written[-1].path == "/run/state/manifest.json"
    assert written[-1].headers["if-none-match"] == "*"
    manifest = json.loads(read(f"{s3}/run/state/manifest.json").rpartition(b"\n")[0])
    folder = manifest["folder"]
    names = ["manifest.json", f"{folder}/rank00000-of-00001.safetensors", f"{folder}/state.json"]
    assert keys(f"{s3}/run/state") == sorted(names)


def test_a_snapshot_is_never_written_over(s3, run, model):
    """Nor is one written where a file is, or a file where a snapshot is."""
    _, trainer = run
    serializers.save(f"{s3}/run/state", trainer)
    serializers.save(f"{s3}/run/mlp.model", model)
    before = keys(s3)
    for name, obj in (("state", trainer), ("mlp.model", trainer), ("state", model)):
        with pytest.raises(FileExistsError, match=f"{s3}/run/{name}"):
            serializers.save(f"{s3}/run/{name}", obj)
    assert keys(s3) == before


def test_a_trainer_continues_from_a_snapshot_in_a_store(s3, run, tmp_path):
    """With the bits and the rows of the run that was never stopped."""
    _, trainer = run
    serializers.save(f"{s3}/run/state", trainer)
    ends = []
    for name in ("resumed", "whole"):
        continued = report_runs.part(tmp_path / name, 4, 0.1)
        if name == "resumed":
            serializers.load(f"{s3}/run/state", continued)
        continued.run()
        rows = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        ends.append((continued.updater.get_model("main"), [{**row, "elapsed_time": 0} for row in rows]))
    (resumed, rows), (whole, expected) = ends
    assert same(resumed, whole)
    assert rows == expected
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]


def test_a_run_copied_up_is_continued_with_the_rows_of_its_log(s3, run, tmp_path):
    """Its snapshot refers to the log beside it, which is read from the store too."""
    out, trainer = run
    sync_up(out, f"{s3}/copied")
    continued = report_runs.part(tmp_path / "out", 3, 0.1)
    serializers.load(f"{s3}/copied/snapshot_iter_6", continued)
    assert same(continued.updater.get_model("main"), trainer.updater.get_model("main"))
    continued.run()
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [3, 6, 9]
    assert rows[:2] == [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_a_snapshot_copied_down_is_one_on_the_disk(s3, run, tmp_path):
    """Also after it has lain in a store, where its files have a folder of their own."""
    _, trainer = run
    serializers.save(f"{s3}/run/state", trainer)
    copy = sync_down(f"{s3}/run", tmp_path / "copy")
    loaded = report_runs.part(tmp_path / "out", 3, 0.1)
    serializers.load(copy / "state", loaded)
    assert loaded.updater.iteration == 6
    assert same(loaded.updater.get_model("main"), trainer.updater.get_model("main"))
    sync_up(copy, f"{s3}/again")
    serializers.load(f"{s3}/again/state", model := report_runs.part(tmp_path / "out", 3, 0.1).updater.get_model("main"))
    assert same(model, trainer.updater.get_model("main"))


def test_a_model_is_loaded_from_a_snapshot_in_a_store(s3, run):
    """Or a part of it by its path; through a link too."""
    _, trainer = run
    serializers.save(f"{s3}/run/state", trainer)
    write(f"{s3}/run/best", json.dumps({"chainring": "link", "target": "state"}))
    saved = trainer.updater.get_model("main")
    for name in ("state", "best"):
        loaded = report_runs.part("unused", 1, 0.1).updater.get_model("main")
        loaded.predictor[0].weight.data.zero_()
        serializers.load(f"{s3}/run/{name}", loaded)
        assert same(loaded, saved)
        layer = nn.Linear(4, 8)
        serializers.load(f"{s3}/run/{name}", layer, "updater/model:main/predictor/0")
        assert same(layer, saved.predictor[0])
    with pytest.raises(ValueError, match="nothing under 'updater/model:gen/'"):
        serializers.load(f"{s3}/run/state", loaded, "updater/model:gen")


def test_what_is_not_there_is_named_with_what_is(s3, run, model):
    """Nothing, a run, a run without a snapshot, a link to nothing, files without a manifest, a whole bucket."""
    out, trainer = run
    serializers.save(f"{s3}/run/state", trainer)
    write(f"{s3}/run/best", json.dumps({"chainring": "link", "target": "snapshot_iter_9"}))
    write(f"{s3}/young/run.json", (out / "run.json").read_bytes())
    write(f"{s3}/cut/state/0123456789abcdef/state.json", b"{}")
    said = {
        "nothing": f"there is no {s3}/nothing",
        "run": f"a run, not a snapshot; give one of its own, such as {s3}/run/state",
        "run/best": "is a link to snapshot_iter_9, which is not there",
        "young": "belongs to a run that has taken no snapshot",
        "cut/state": "files of a snapshot and no manifest.json",
    }
    for name, words in said.items():
        for obj in (trainer, model):
            with pytest.raises((FileNotFoundError, serializers.CorruptError)) as caught:
                serializers.load(f"{s3}/{name}", obj)
            assert words in str(caught.value), name
    for function in (serializers.save, serializers.load):
        with pytest.raises(ValueError, match="is a whole bucket; give what lies in it"):
            function(s3, model)


def test_an_address_as_a_path_is_refused(model):
    """Pathlib has joined its slashes."""
    for function in (serializers.save, serializers.load):
        with pytest.raises(ValueError, match=r"given as text.*: s3://bucket/mlp\.model"):
            function(Path("s3://bucket/mlp.model"), model)


def test_a_trainer_is_not_loaded_from_a_models_object(s3, run, model):
    """As on a disk."""
    serializers.save(f"{s3}/mlp.model", model)
    with pytest.raises(TypeError, match=r"mlp\.model holds a model"):
        serializers.load(f"{s3}/mlp.model", report_runs.part("unused", 1, 0.1))


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_in_a_store_is_not_opened(s3, model, tmp_path):
    """Nothing of it runs; tensors that torch has saved are read by its reader of weights."""
    write(f"{s3}/hostile", pickle.dumps({"weight": Payload(str(tmp_path / "ran"))}))
    torch.save({"0.weight": Payload(str(tmp_path / "ran"))}, tmp_path / "zip")
    write(f"{s3}/zip", (tmp_path / "zip").read_bytes())
    for name in ("hostile", "zip"):
        with pytest.raises(ValueError):  # noqa: PT011 - several words for one thing
            serializers.load(f"{s3}/{name}", model)
    assert not (tmp_path / "ran").exists()
    torch.save(fresh().state_dict(), tmp_path / "weights.pt")
    write(f"{s3}/weights.pt", (tmp_path / "weights.pt").read_bytes())
    serializers.load(f"{s3}/weights.pt", model)
    assert same(model, fresh())


def truncated(url):
    write(url, read(url)[:-1])


def flipped(url):
    content = bytearray(read(url))
    content[len(content) // 2] ^= 1
    write(url, bytes(content))


def emptied(url):
    write(url, b"")


def lengthened(url):
    write(url, read(url) + b"\0")


def pickled(url):
    write(url, pickle.dumps({"a": 1}))


HARMS = (remove, truncated, flipped, emptied, lengthened, pickled)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("file", ["state.json", "rank00000-of-00001.safetensors", "manifest.json"])
def test_damage_is_noticed_and_its_object_named(s3, run, file, harm):
    """Also where its manifest is gone: its files are there."""
    _, trainer = run
    serializers.save(f"{s3}/run/state", trainer)
    (key,) = (key for key in keys(f"{s3}/run/state") if key.endswith(file))
    harm(f"{s3}/run/state/{key}")
    with pytest.raises(serializers.CorruptError) as caught:
        serializers.load(f"{s3}/run/state", report_runs.part("unused", 3, 0.1))
    assert f"{s3}/run/state" in str(caught.value)
    assert file in str(caught.value)


@pytest.mark.parametrize("harm", [truncated, flipped, emptied, lengthened])
def test_a_models_object_that_is_damaged_is_noticed(s3, model, harm):
    """And what was to be loaded stays as it is."""
    serializers.save(f"{s3}/mlp.model", model)
    harm(f"{s3}/mlp.model")
    loaded = fresh()
    with pytest.raises(ValueError, match=f"{s3}/mlp.model is damaged"):
        serializers.load(f"{s3}/mlp.model", loaded)
    assert same(loaded, fresh())


def test_a_manifest_of_another_snapshot_is_noticed(s3, run):
    """It names files that are not there."""
    _, trainer = run
    serializers.save(f"{s3}/run/one", trainer)
    serializers.save(f"{s3}/run/two", trainer)
    write(f"{s3}/run/one/manifest.json", read(f"{s3}/run/two/manifest.json"))
    with pytest.raises(serializers.CorruptError, match=f"{s3}/run/one is not what was written: missing"):
        serializers.load(f"{s3}/run/one", report_runs.part("unused", 3, 0.1))


def a_trainer(comm, is_sharded):
    """A trainer with a state of megabytes, sharded over the ranks or not."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(300, 500), nn.Tanh(), nn.Linear(500, 301), *(nn.Linear(301, 301) for _ in range(4)))
    if is_sharded:
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=init_device_mesh("cpu", (comm.size,)))
    optimizer = torch.optim.Adam(model.parameters())
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    iterator = iterators.SerialIterator([torch.ones(300)] * 4, 4)
    updater = training.StandardUpdater(iterator, optimizer, model, loss_func=loss, comm=comm)
    return training.Trainer(updater, (1, "iteration"), "unused")


def whole(tensors):
    """A number for each of the tensors, which ranks hold in parts, that another order or bit would change."""
    full = [(each.full_tensor() if isinstance(each, DTensor) else each).detach().double().reshape(-1) for each in tensors]
    return [each.dot(torch.arange(1.0, len(each) + 1).double()).item() for each in full]


def facts_of(trainer):
    """Facts of all parameters and moments of a trainer, by which another is known to be the same."""
    states = trainer.updater.get_optimizer("main").state.values()
    moments = [value for state in states for value in state.values()]
    return whole([*trainer.updater.get_model("main").parameters(), *moments])


def save_on_ranks(comm, variables, url):
    os.environ.update(variables)
    trainer = a_trainer(comm, is_sharded=True)
    trainer.updater.update()
    serializers.save(f"{url}/mlp.model", trainer.updater.get_model("main"))
    store = open_store(url)
    Checkpoint(capture(trainer, comm=comm)).commit(store, "state", 1, comm=comm)
    return facts_of(trainer)


def load_on_ranks(comm, variables, url, what):
    os.environ.update(variables)
    trainer = a_trainer(comm, is_sharded=True)
    model = trainer.updater.get_model("main")
    if what == "trainer":
        serializers.load(f"{url}/state", trainer)
        return facts_of(trainer)
    serializers.load(f"{url}/{'state' if what == 'model' else 'mlp.model'}", model)
    return whole(model.parameters())


@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("what", ["trainer", "model", "file"])
def test_ranks_read_a_snapshot_once_together(s3, proxy, writers, what):
    """Into shards: ranges of bytes, over both ranks at most 1.1 times what is loaded, whoever has written it."""
    variables = environment_for(proxy.url)
    if writers == 2:
        expected = on_two_ranks(save_on_ranks, variables, s3)[0]
    else:
        trainer = a_trainer(Communicator(), is_sharded=False)
        trainer.updater.update()
        serializers.save(f"{s3}/state", trainer)
        serializers.save(f"{s3}/mlp.model", trainer.updater.get_model("main"))
        expected = facts_of(trainer)
    size = len(read(f"{s3}/mlp.model"))
    del proxy.requests[:]
    found = on_two_ranks(load_on_ranks, variables, s3, what)
    sent = sum(request.sent for request in proxy.requests)
    assert not isinstance(found[0], str), found[0]
    assert found[0] == found[1] == expected[: len(found[0])]
    assert sent <= 1.1 * size * (3 if what == "trainer" else 1)


def test_an_error_in_a_file_of_another_library_names_its_address(s3, model, tmp_path):
    """It is read from a copy, which is gone afterwards."""
    torch.save({"weight": torch.ones(2), "other": torch.ones(3)}, tmp_path / "weights.pt")
    write(f"{s3}/weights.pt", (tmp_path / "weights.pt").read_bytes())
    with pytest.raises((ValueError, RuntimeError, KeyError)) as caught:
        serializers.load(f"{s3}/weights.pt", model)
    (note,) = caught.value.__notes__
    copy, _, address = note.partition(" was a copy of ")
    assert address == f"{s3}/weights.pt"
    assert not os.path.exists(copy)


def test_many_small_tensors_take_few_requests(s3, proxy):
    """They are read in the order in which they lie, many at a time."""
    model = nn.Sequential(*(nn.Linear(60, 60) for _ in range(100)))
    updater = training.StandardUpdater(iterators.SerialIterator([0], 1), torch.optim.Adam(model.parameters()), model)
    trainer = training.Trainer(updater, (1, "iteration"), "unused")
    sum(parameter.sum() for parameter in model.parameters()).backward()
    updater.get_optimizer("main").step()
    serializers.save(f"{s3}/state", trainer)
    del proxy.requests[:]
    serializers.load(f"{s3}/state", trainer)
    assert proxy.count("GET") < 60  # of 800 tensors
