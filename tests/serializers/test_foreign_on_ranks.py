"""Ranks load checkpoints of other libraries as one process does, to the bit, and what they save is exported for these."""

import contextlib
import io
import json
import logging
import shutil
import warnings
from itertools import chain
from typing import ClassVar

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from foreign_runs import assert_same
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from chainring import parallel, serializers
from chainring.cli import main
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions
from rank_pair import on_ranks

LAYOUTS = ["ddp", "fsdp", "tp x fsdp"]


class Net(nn.Module):
    """Layers that four ranks share unevenly, a weight under two names, a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 5)
        self.tied = nn.Linear(5, 8, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("mean", torch.arange(3.0))

    def forward(self, x):
        return self.second(self.first(x) + self.tied(x))


def loss(model, batch):
    return model(batch).square().mean()


def rows(count):
    return list(torch.randn(count, 5, generator=torch.Generator().manual_seed(1)))


def make(seed):
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.Adam(model.parameters(), 1e-2)


def place(model, layout, size):
    """Wrap a model, or shard it over ``size`` ranks; return it and the mesh along which the ranks share the data."""
    if layout == "ddp":
        return DistributedDataParallel(model), None
    if layout == "fsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (size,))), None
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"first": ColwiseParallel(), "tied": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    model.tied.weight = model.first.weight
    return fully_shard(model, mesh=mesh["dp"]), mesh["dp"]


def trainer_of(model, optimizer, out, comm=None):
    updater = StandardUpdater(SerialIterator(rows(8), 4, shuffle=False), optimizer, model, loss_func=loss, comm=comm)
    return Trainer(updater, (4, "iteration"), out=out)


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def state_of(model, optimizer):
    """Parameters and buffers by name, the state of each parameter in order, and the settings."""
    model = getattr(model, "module", model)
    entries = {name: whole(value).clone() for name, value in model.state_dict().items()}
    state = [{key: whole(value) for key, value in optimizer.state[p].items()} for p in model.parameters()]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return entries, state, groups


def save_torch(model, optimizer, path):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": 3}, path)


def save_lightning(model, optimizer, path):
    """By a run of Lightning of three steps, which begins with this model."""
    import lightning as L

    class Lit(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, index):
            return loss(self.net, batch)

        def configure_optimizers(self):
            return optimizer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = L.Trainer(max_steps=3, accelerator="cpu", default_root_dir=path.parent, **quiet)
    trainer.fit(Lit(), torch.utils.data.DataLoader(rows(12), 4))
    trainer.save_checkpoint(path)


def hugging_face_class():
    """A model of its library with the same names."""
    from transformers import PretrainedConfig, PreTrainedModel

    class Saved(PreTrainedModel):
        config_class = PretrainedConfig
        _tied_weights_keys: ClassVar = {"tied.weight": "first.weight"}

        def __init__(self, config, model=None):
            super().__init__(config)
            model = Net() if model is None else model
            self.first, self.second, self.tied = model.first, model.second, model.tied
            self.register_buffer("mean", model.mean)
            self.post_init()

    return Saved


def save_hugging_face(model, optimizer, path):
    """As its Trainer does: by save_pretrained, here into several files, with the optimizer beside them."""
    saved = hugging_face_class()
    saved(saved.config_class(), model).save_pretrained(path, max_shard_size=150)
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 3, "epoch": 1.5}))


def save_dcp(model, optimizer, path):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "iteration": 3}, checkpoint_id=path)


FORMS = {"torch": save_torch, "lightning": save_lightning, "hugging face": save_hugging_face, "dcp": save_dcp}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One of each form, after three updates by Adam."""
    directory = tmp_path_factory.mktemp("foreign")
    for form, save in FORMS.items():
        model, optimizer = make(0)
        for batch in torch.stack(rows(12)).split(4) if form != "lightning" else ():
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(model, optimizer, directory / form)
    assert on_ranks(2, save_shards, str(directory)) == [None, None]
    return directory


def save_shards(comm, directory):
    """Each rank writes its shards of what a checkpoint has."""
    model, _ = place(make(1)[0], "fsdp", comm.size)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    serializers.load(f"{directory}/torch", trainer_of(model, optimizer, directory, comm))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "iteration": 3}, checkpoint_id=f"{directory}/shards")


def loaded(comm, directory, out, layouts):
    """Load each checkpoint into a model in each layout; compare it with what this process loads alone, and go on."""
    for form in (*FORMS, "shards"):
        plain = make(1)
        alone = trainer_of(*plain, f"{out}/alone{comm.rank}")
        serializers.load(f"{directory}/{form}", alone)
        for layout in layouts:
            model, mesh = place(make(1)[0], layout, comm.size)
            along = comm if mesh is None else parallel.create_communicator("cpu", mesh=mesh)
            optimizer = torch.optim.Adam(model.parameters(), 1e-2)
            trainer = trainer_of(model, optimizer, f"{out}/{form} {layout}", along)
            serializers.load(f"{directory}/{form}", trainer)
            assert trainer.updater.iteration == 3
            assert_same(state_of(model, optimizer), state_of(*plain))
            trainer.run()
            assert trainer.updater.iteration == 4
            serializers.load(f"{directory}/{form}", model)
            assert_same(state_of(model, optimizer)[0], state_of(*plain)[0])
    return True


@pytest.mark.parametrize("size", [2, 4])
def test_each_layout_gets_the_parameters_and_moments_of_one_process(checkpoints, tmp_path, size):
    """Of each form, also of tied weights and of shards of other sizes or none; training goes on. So does a model alone."""
    assert on_ranks(size, loaded, str(checkpoints), str(tmp_path), LAYOUTS, seconds=120) == [True] * size


def told(function, *arguments):
    """What a call raises, as text."""
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def load_of_each_rank(comm, directories, out):
    """Load what lies in a directory of this rank, in each of the layouts; return the errors."""
    errors = []
    for layout in LAYOUTS:
        model, mesh = place(make(1)[0], layout, comm.size)
        along = comm if mesh is None else parallel.create_communicator("cpu", mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        before = state_of(model, optimizer)
        errors.append(told(serializers.load, directories[comm.rank], trainer_of(model, optimizer, out, along)))
        assert_same(state_of(model, optimizer), before)
    return errors


def first_file(directory, end):
    return next(path for path in sorted(directory.iterdir()) if path.name.endswith(end))


@pytest.mark.parametrize("form", FORMS)
def test_what_one_rank_lacks_is_an_error_on_every_rank(checkpoints, tmp_path, form):
    """The checkpoint, or a file of its directory; nothing is loaded by any of them, and the others name the rank."""
    shared, own = checkpoints / form, tmp_path / "own"
    if shared.is_dir():
        shutil.copytree(shared, own)
        first_file(own, ".distcp" if form == "dcp" else "00001-of-00003.safetensors").unlink()
    first, second = on_ranks(2, load_of_each_rank, [str(shared), str(own)], str(tmp_path))
    assert all("lacks" in error if shared.is_dir() else "there is no" in error for error in second), second
    assert all(error.startswith(f"RankFailed: {shared} could not be loaded by rank 1: ") for error in first), first


def test_checkpoints_that_differ_between_ranks_are_refused_by_all_of_them(checkpoints, tmp_path):
    """By a single number in a moment; and where one of them is a snapshot of Chainring."""
    model, optimizer = make(0)
    content = torch.load(checkpoints / "torch", weights_only=True)
    content["optimizer"]["state"][0]["exp_avg"][0, 0] += 1
    torch.save(content, tmp_path / "other")
    serializers.save(tmp_path / "snapshot", trainer_of(model, optimizer, tmp_path / "out"))
    for other in ("other", "snapshot"):
        errors = on_ranks(2, load_of_each_rank, [str(checkpoints / "torch"), str(tmp_path / other)], str(tmp_path))
        assert all("is not the same on rank 1 as on rank 0" in error for error in chain(*errors)), errors


def printed(comm, directory, out):
    """What this rank prints when it loads into a trainer, and into a model alone."""
    said = []
    for target in (trainer_of(*make(1), out, comm), make(1)[0]):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            serializers.load(f"{directory}/torch", target)
        said.append(text.getvalue())
    return said


def test_one_rank_alone_prints_what_was_taken(checkpoints, tmp_path):
    """And nothing of another number of ranks, of which the checkpoint does not know."""
    first, second = on_ranks(2, printed, str(checkpoints), str(tmp_path))
    assert second == ["", ""]
    assert all(text.startswith(f"loaded {checkpoints}/torch, a file of torch.save\n") for text in first), first
    assert not any("number of ranks" in text for text in first), first


def save_snapshot(comm, directory, out):
    """A snapshot of a model of which each rank holds a part."""
    model, mesh = place(make(1)[0], "tp x fsdp", comm.size)
    along = parallel.create_communicator("cpu", mesh=mesh)
    trainer = trainer_of(model, torch.optim.Adam(model.parameters(), 1e-2), out, along)
    serializers.load(f"{directory}/torch", trainer)
    trainer.extend(extensions.snapshot(filename="shards"), trigger=(4, "iteration"))
    trainer.run()
    return state_of(model, trainer.updater.get_optimizer("main"))[0]


def read_by_its_library(path, form):
    """What an export holds, read as its users read it."""
    if form == "safetensors":
        return safetensors.torch.load_file(path)
    if form == "torch":
        return torch.load(path, weights_only=True)
    if form == "hf":
        hugging_face_class().config_class(tie_word_embeddings=True).save_pretrained(path)
        return hugging_face_class().from_pretrained(path).state_dict()
    found = {name: torch.zeros_like(value) for name, value in Net().state_dict().items()}
    dcp.load(found, checkpoint_id=path)
    return found


@pytest.mark.filterwarnings("ignore")  # of the readers
def test_other_libraries_read_what_is_exported_from_the_snapshot_of_four_ranks(checkpoints, tmp_path):
    """In every format the plain model that the ranks held together."""
    held = on_ranks(4, save_snapshot, str(checkpoints), str(tmp_path))[0]
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) == 4
    for form in ("safetensors", "torch", "hf", "dcp"):
        assert main(["export", str(tmp_path / "shards"), str(tmp_path / form), "--format", form]) == 0
        found = read_by_its_library(tmp_path / form, form)
        assert found.keys() >= held.keys() - {"tied.weight"}, form
        assert_same(dict(found), {name: held[name] for name in found})
