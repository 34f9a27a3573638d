"""Ranks whose scripts differ are stopped before the first update, and told what differs."""

import functools
import random
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from chainring.iterators import LoaderIterator, MixtureIterator, PackingIterator, SerialIterator
from chainring.parallel import Communicator, RankFailed, create_communicator
from chainring.training import Extension, StandardUpdater, Trainer, UpdateCallbacks, clip_grad_norm, extensions
from rank_pair import on_two_ranks

CASES = {
    "batch_size": ("6", "8"),
    "length of an epoch": ("24", "30"),
    "shuffle": ("True", "False"),
    "drop_last": ("True", "False"),
    "seed": ("3", "4"),
    "weights": ("0.5", "0.25"),
    "sources": ("['a', 12], ['b', 12]", "['a', 11], ['b', 13]"),
    "weights of the documents": ("0.5", "0.25"),
    "accumulate": ("1", "2"),
    "accumulate_across_epochs": ("True", "False"),
    "precision": ("fp32", "bf16"),
    "virtual_ranks": ("None", "2"),
    "compile": ("False", "True"),
    "loss_func": ("squared", "absolute"),
    "update_on_start": ("1.0", "2.0"),
    "class": ("SGD", "Adam"),
    "lr of group 0": ("0.1", "0.2"),
    "parameters of group 0": ("weight", "bias"),
    "weight": ("[1, 3]", "[2, 3]"),
    "more.weight": ("absent", "[1, 1]"),
    "dtype of bias": ("float32", "float64"),
    "bias is frozen": ("trained", "frozen"),
    "buffer count": ("[2]", "[3]"),
    "order of model 'main''s parameters": ("'weight', 'bias'", "'bias', 'weight'"),
    "modules in evaluation mode": ("[]", "['']"),
    "find_unused_parameters": ("False", "True"),
    "reshard_after_forward": ("True", "False"),
    "stop trigger": ("2, 'iteration'", "3, 'iteration'"),
    "extensions": ("LogReport", "observe_lr"),
    "one extension more": ("LogReport", "MicroAverage"),
    "no Evaluator": ("validation", "extensions"),
    "trigger": ("1, 'epoch'", "2, 'epoch'"),
    "policy": ("stop", "skip"),
    "n_retains": ("2", "3"),
    "autoload": ("False", "True"),
    "decay": ("0.9", "0.99"),
    "gamma of the scheduler": ("0.5", "0.1"),
    "batch_size of iterator 'main'": ("4", "2"),
    "length of an epoch of iterator 'main'": ("8", "12"),
    "default_dtype": ("float32", "float64"),
    "deterministic": ("False", "True"),
    "float32_matmul_precision": ("highest", "high"),
    "cudnn.benchmark": ("False", "True"),
    "tf32 by its newer name": ("'highest'", "'set by fp32_precision'"),
    "iteration": ("0", "7"),
    "saved run": ("is not loaded", "is continued"),
    "timeout": ("1800", "900"),
}
"""What differs, and what is said of rank 0 and of rank 1."""


class Net(nn.Linear):
    """A layer, in which one more, another order or other buffers may make ranks differ."""

    def __init__(self, setting):
        super().__init__(3, setting("weight", 1, 2))
        self.register_buffer("count", torch.zeros(setting("buffer count", 2, 3)))
        if setting("more.weight", False, True):
            self.more = nn.Linear(1, 1)
        if setting("order of model 'main''s parameters", False, True):
            weight = self.weight
            del self.weight
            self.weight = weight
        if setting("dtype of bias", False, True):
            self.bias = nn.Parameter(self.bias.double())
        self.bias.requires_grad_(setting("bias is frozen", True, False))


def squared(net, x, t):
    return (net(x) - t).square().mean()


def absolute(net, x, t):
    return (net(x) - t).abs().mean()


def a_model(comm, different, setting):
    net = Net(setting)
    net.train(setting("modules in evaluation mode", True, False))
    if different == "find_unused_parameters":
        return nn.parallel.DistributedDataParallel(net, find_unused_parameters=setting(different, False, True))
    if different == "reshard_after_forward":
        mesh = torch.distributed.init_device_mesh("cpu", (comm.size,))
        return fully_shard(net, mesh=mesh, reshard_after_forward=setting(different, True, False))
    return net


def an_iterator(different, setting):
    data = [(torch.ones(3), torch.ones(1))] * setting("length of an epoch", 24, 30)
    if different in ("weights", "sources", "weights of the documents"):
        at = setting("sources", 12, 11)
        weights = {"a": 1, "b": setting(different, 1, 3) if different != "sources" else 1}
        mixture = MixtureIterator({"a": data[:at], "b": data[at:]}, 6, weights=weights)
        return PackingIterator(mixture, 4, 6) if different == "weights of the documents" else mixture
    if different == "drop_last":
        return DataLoader(data, 6, drop_last=setting("drop_last", True, False))
    return SerialIterator(
        data, setting("batch_size", 6, 8), shuffle=setting("shuffle", True, False), seed=setting("seed", 3, 4)
    )


def a_trainer(comm, out, different):
    """A run in which rank 1 differs in one setting."""
    differs = comm.rank == 1 and different
    setting = lambda name, one, other: other if differs == name else one  # noqa: E731
    torch.manual_seed(0)
    model = a_model(comm, different, setting)
    parameters = list(model.parameters())
    trained = (
        parameters[setting("parameters of group 0", slice(1), slice(1, 2))] if "of group 0" in str(different) else parameters
    )
    cls = setting("class", torch.optim.SGD, torch.optim.Adam)
    optimizer = cls(trained, lr=setting("lr of group 0", 0.1, 0.2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=setting("gamma of the scheduler", 0.5, 0.1))
    updater = StandardUpdater(
        an_iterator(different, setting),
        optimizer,
        model,
        loss_func=setting("loss_func", squared, absolute),
        precision=setting("precision", "fp32", "bf16"),
        accumulate=setting("accumulate", 1, 2),
        accumulate_across_epochs=setting("accumulate_across_epochs", True, False),
        virtual_ranks=setting("virtual_ranks", None, 2),
        compile=setting("compile", False, True),
        callbacks=UpdateCallbacks(update_on_start=clip_grad_norm(setting("update_on_start", 1.0, 2.0))),
        comm=comm,
    )
    trainer = Trainer(updater, (setting("stop trigger", 2, 3), "iteration"), out=out)
    extend(trainer, model, different, setting)
    trainer.extend(extensions.LRScheduler(scheduler))
    if setting("iteration", False, True):
        updater.iteration = 7
    if setting("saved run", False, True):
        trainer.load_state_dict(trainer.state_dict())
    return trainer


def extend(trainer, model, different, setting):
    trainer.extend(setting("extensions", extensions.LogReport, extensions.observe_lr)())
    if setting("one extension more", False, True):
        trainer.extend(extensions.MicroAverage("a", "b", "c"))
    trainer.extend(
        extensions.FailOnNonNumber(setting("policy", "stop", "skip")), trigger=(setting("trigger", 1, 2), "epoch")
    )
    trainer.extend(extensions.snapshot(n_retains=setting("n_retains", 2, 3), autoload=setting("autoload", False, True)))
    if different == "decay":
        trainer.extend(extensions.ExponentialMovingAverage(model, setting(different, 0.9, 0.99)))
    if setting("no Evaluator", True, False):
        held_out = [(torch.ones(3), torch.ones(1))] * setting("length of an epoch of iterator 'main'", 8, 12)
        size = setting("batch_size of iterator 'main'", 4, 2)
        trainer.extend(extensions.Evaluator(SerialIterator(held_out, size, repeat=False, shuffle=False), model))


def change_process(comm, different):
    """Change a setting of the process on rank 1."""
    if comm.rank == 1:
        torch.set_default_dtype(torch.float64 if different == "default_dtype" else torch.float32)
        torch.use_deterministic_algorithms(different == "deterministic")
        torch.set_float32_matmul_precision("high" if different == "float32_matmul_precision" else "highest")
        if hasattr(torch.backends, "fp32_precision"):
            torch.backends.cuda.matmul.fp32_precision = "tf32" if different == "tf32 by its newer name" else "none"
        torch.backends.cudnn.benchmark = different == "cudnn.benchmark"


def run(comm, different, out):
    """What a run ends with: its error, or its iterations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = a_trainer(comm, out[comm.rank], different)
        change_process(comm, different)
        try:
            trainer.run()
        except (ValueError, RankFailed) as error:
            return str(error)
    return trainer.updater.iteration


def run_all(comm, out):
    """How the run of each case ends, and its seconds; a communicator is closed by the run that fails."""
    ends = {}
    for different in CASES:
        comm.barrier()
        began = time.monotonic()
        own = create_communicator("cpu", timeout=900 if different == "timeout" and comm.rank == 1 else None)
        ends[different] = run(own, different, [f"{out}/{list(CASES).index(different)}"] * 2), time.monotonic() - began
        own.close()
        change_process(comm, None)
    return ends


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """On each rank, how the run of each case ends. One pair of processes runs them all."""
    return on_two_ranks(run_all, str(tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize("different", CASES)
def test_a_setting_that_differs_is_named_on_both_ranks_before_the_first_update(ends, different):
    """With both values, in less than a minute."""
    title = {
        "dtype of bias": "bias",
        "bias is frozen": "bias",
        "one extension more": "extensions",
        "no Evaluator": "extensions",
        "tf32 by its newer name": "get_float32_matmul_precision",
    }
    for of_rank in ends:
        assert isinstance(of_rank, dict), of_rank
        words, seconds = of_rank[different]
        assert isinstance(words, str), f"{words} iterations"
        assert seconds < 60
        assert "ValueError" in words or words.startswith("all ranks")
        for text in (title.get(different, different), *CASES[different], "rank 0", "rank 1"):
            assert text in words, words


def test_ranks_that_agree_train(tmp_path):
    """To the end."""
    assert on_two_ranks(run, None, [str(tmp_path)] * 2) == [2, 2]


class Heard(Extension):
    """An extension with attributes, a file and a trigger of its rank."""

    def __init__(self, rank):
        self.place = f"/local/{rank}"
        self.anything = object()
        self.listener = lambda trainer: rank

    @property
    def writes(self):
        return [f"heard_by_{self.place}"]

    def __call__(self, trainer):
        self.heard = trainer.updater.iteration


def apart(comm, out):
    """A run in which each rank has what must not be the same: data, paths, functions at other addresses, a bar."""
    held = [object() for _ in range(1000 * comm.rank)]  # what is made after them has another address
    torch.manual_seed(comm.rank)
    net = nn.Linear(3, 1)
    loader = LoaderIterator(DataLoader([(torch.ones(3), torch.ones(1))] * (12 + 4 * comm.rank), 2), per_rank=True)
    loss = functools.partial(squared_of, held, net=object())
    print_norm = lambda context: None  # noqa: E731
    callbacks = UpdateCallbacks(update_on_start=[print_norm] * comm.rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    updater = StandardUpdater(loader, optimizer, net, loss_func=loss, callbacks=callbacks, comm=comm)
    place = out if comm.rank == 0 else f"{out}/../{Path(out).name}"
    trainer = Trainer(updater, (2, "iteration"), out=place, config={"rank": comm.rank})
    trainer.extend(Heard(comm.rank), trigger=Every(comm.rank))
    trainer.extend(Heard(comm.rank), trigger=lambda trainer: trainer.updater.iteration == comm.rank)
    held_out = SerialIterator([(torch.ones(3), torch.ones(1))] * 4, 2, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(held_out, net, loss_func=loss, progress_bar=comm.rank == 0))
    trainer.run()
    return trainer.updater.iteration


class Every:
    """A trigger whose text has an address and a rank."""

    def __init__(self, rank):
        self.rank = rank

    def __repr__(self):
        return f"<Every of {self.rank} at {hex(id(self))}>"

    def __call__(self, trainer):
        return True


def squared_of(held, model, x, t, net):
    return (model(x) - t).square().mean()


def test_what_is_of_a_rank_by_its_nature_may_differ(tmp_path):
    """Shares of data, paths, addresses in texts, functions that print, names of one directory, what is shown."""
    assert on_two_ranks(apart, str(tmp_path)) == [2, 2]


def without_comm(comm, out, alone_first):
    """What is said where rank 1 is given no communicator, and begins first or last."""
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = a_trainer(comm, f"{out}/{comm.rank}", None)
        if comm.rank == 1:
            trainer.updater.comm = Communicator()
        own = create_communicator("cpu")  # through which the other rank tells when it begins
        if (comm.rank == 1) is alone_first:
            threading.Timer(0.5, own.barrier).start()
        else:
            own.barrier()
        try:
            trainer.run()
        except (ValueError, RankFailed) as error:
            return str(error), time.monotonic() - began
    return f"{trainer.updater.iteration} iterations", 0


@pytest.mark.parametrize("alone_first", [True, False])
def test_a_rank_without_a_communicator_is_named_where_others_wait_for_it(tmp_path, alone_first):
    """On both, whichever begins first."""
    for words, seconds in on_two_ranks(without_comm, str(tmp_path), alone_first):
        assert "rank 1 runs its trainer without the communicator" in words
        assert seconds < 60


def each_alone(comm, out):
    """Runs without a communicator, on all ranks, and then one with it."""
    began = time.monotonic()
    for number in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = a_trainer(Communicator(), f"{out}/{number}-{comm.rank}", None)
            trainer.run()
        assert any("every rank trains on all data by itself" in str(warning.message) for warning in caught)
    comm.barrier()
    return run(comm, None, [out] * 2), time.monotonic() - began


def test_ranks_that_all_train_by_themselves_are_only_warned(tmp_path):
    """And may train together afterwards."""
    for iterations, seconds in on_two_ranks(each_alone, str(tmp_path)):
        assert iterations == 2
        assert seconds < 60


def test_stages_of_a_pipeline_are_refused_as_such(ends):
    """Ranks with parameters of other names."""
    for of_rank in ends:
        assert "the stages of a pipeline" in of_rank["more.weight"][0]


def test_an_out_that_is_not_shared_is_refused(tmp_path):
    """Before anything is written there: a rank could not resume from it."""
    for words in on_two_ranks(run, None, [str(tmp_path / "one"), str(tmp_path / "two")]):
        assert "out is one directory for all ranks" in words
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".chainring")]


def drawing(comm, out, seeds, on_mesh=True):
    """How a run ends whose ranks were seeded so; what they draw in it from each generator. On a mesh all have one model."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    shared = comm
    if on_mesh:
        mesh = torch.distributed.init_device_mesh("cpu", (1, comm.size), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        shared = create_communicator("cpu", mesh=mesh["dp"])
    torch.manual_seed(seeds[comm.rank])  # and Python's and NumPy's generators are what they are in each process
    data = [(torch.ones(3), torch.ones(1))] * 8
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    updater = StandardUpdater(SerialIterator(data, 4), optimizer, net, loss_func=squared, comm=shared)
    trainer, drawn = Trainer(updater, (1, "iteration"), out=out), []
    trainer.extend(lambda trainer: drawn.extend([random.random(), np.random.rand(), torch.rand(1).item()]))
    try:
        trainer.run()
    except (ValueError, RankFailed) as error:
        return str(error)
    return drawn


def drawing_twice(comm, out):
    return [drawing(comm, f"{out}/{on_mesh}", (3, 3), on_mesh) for on_mesh in (True, False)]


def test_ranks_that_compute_a_model_together_draw_the_same_numbers_and_others_their_own(tmp_path):
    """Of generators that the script has not seeded too, and where it has seeded all alike."""
    (together, alone), (other_together, other_alone) = on_two_ranks(drawing_twice, str(tmp_path))
    assert len(together) == len(alone) == 3
    assert together == other_together
    assert not set(alone) & set(other_alone)


def test_ranks_that_compute_a_model_together_and_were_seeded_differently_are_refused(tmp_path):
    """On both, with what to write."""
    for words in on_two_ranks(drawing, str(tmp_path), (3, 4)):
        assert "rank 1 (its seed is 4) than on rank 0 (3)" in words
        assert "torch.manual_seed(seed)" in words
