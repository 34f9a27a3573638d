"""LoaderIterator on two ranks: loaders that all ranks read, and loaders that give each rank its own share."""

import random
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from chainring import serializers
from chainring.iterators import LoaderIterator
from chainring.training import StandardUpdater, Trainer, extensions

sys.path.append(str(Path(__file__).parents[1] / "training" / "updaters"))

from toys import same_regression

from rank_pair import on_two_ranks

ROWS = 22


class Cut(IterableDataset):
    """A stream of which each rank reads its own rows, in batches of 4: the first 14 of 22 are those of rank 0."""

    def __init__(self, rank, draws=False):
        self.rows, self.draws = ([*range(14)], [*range(14, ROWS)])[rank], draws

    def __iter__(self):
        for start in range(0, len(self.rows), 4):
            x = torch.tensor(self.rows[start : start + 4], dtype=torch.float32)
            yield x[:, None] / ROWS + (random.random() + torch.rand(1) if self.draws else 0)


def updater_over(source, comm=None):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return StandardUpdater(source, optimizer, model, comm=comm, loss_func=lambda model, x: (model(x) ** 2).mean())


def parameters(updater):
    return torch.cat([parameter.detach().flatten() for parameter in updater.get_model("main").parameters()]).tolist()


def whole_batches():
    """What both shares are together: of the second batch on, that of rank 1 has nothing any more."""
    shares = [[*Cut(rank)] for rank in range(2)]
    return [torch.cat([share[k] for share in shares if k < len(share)]) for k in range(4)]


def train(comm, out):
    warnings.simplefilter("ignore")
    updater = updater_over(LoaderIterator(Cut(comm.rank), per_rank=True), comm)
    trainer = Trainer(updater, (2, "epoch"), out=out)
    trainer.extend(extensions.LogReport(trigger=(1, "epoch")))
    trainer.extend(extensions.Evaluator(LoaderIterator(Cut(comm.rank), per_rank=True), updater.get_model("main")))
    trainer.run()
    return parameters(updater), updater.iteration, updater.epoch, losses(trainer)


UNEVEN = {
    "9 and 7": ((9, 7), {}),
    "one and many": ((1, 15), {}),
    "in parts": ((9, 7), {"accumulate": 2}),
    "a loader without a batch size": ((9, None), {}),
    "an update_core": ((9, 7), {"kind": "own"}),
    "twice as many": ((4, 8), {"accumulate": 3}),
    "alike": ((8, 8), {}),
}


def uneven_loader(rank, batch_size):
    """The rows of a rank in batches of a size of its own, or in batches that a sampler makes, of two."""
    rows = torch.arange(rank * 24, rank * 24 + 24)
    data = TensorDataset(torch.stack([rows % 5, rows % 7, rows % 3], 1).double(), (rows % 4)[:, None].double())
    if batch_size is None:
        return DataLoader(data, batch_sampler=[[i, i + 1] for i in range(0, 24, 2)])
    return DataLoader(data, batch_size=batch_size)


def train_uneven(comm, cases):
    found = []
    for sizes, settings in cases:
        settings = dict(settings)
        kind = OwnUpdate if settings.pop("kind", None) else StandardUpdater
        iterator = LoaderIterator(uneven_loader(comm.rank, sizes[comm.rank]), per_rank=True)
        iterator.comm = comm
        iterator.share(comm.rank, comm.size)
        model = same_regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        updater = kind(iterator, optimizer, model, comm=comm, **settings)
        updater.start()
        for _ in range(2):
            updater.update()
        found.append((parameters(updater), iterator.batch_size))
    return found


class OwnUpdate(StandardUpdater):
    def update_core(self):
        self.backward(self.get_model("main")(*self.next_batch()))
        self.step()


def test_ranks_whose_batches_have_different_sizes_keep_the_same_parameters():
    """They are those of one process on the batches of both ranks; the weight of a full update is one for all ranks."""
    first, second = on_two_ranks(train_uneven, list(UNEVEN.values()))
    assert first == second
    for (sizes, settings), (values, _) in zip(UNEVEN.values(), first, strict=True):
        count, model = settings.get("accumulate", 1), same_regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        passes = [list(uneven_loader(rank, size)) for rank, size in enumerate(sizes)]
        for first_batch in (0, count):  # of a rank that has no more batches in this pass, nothing counts
            batches = [batch for batches in passes for batch in batches[first_batch : first_batch + count]]
            x, t = map(torch.cat, zip(*batches, strict=True))
            optimizer.zero_grad()
            model(x, t).backward()
            optimizer.step()
        expected = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), expected, rtol=1e-10, atol=1e-12)


def losses(trainer):
    return [row[key] for row in trainer.get_extension("LogReport").log for key in ("main/loss", "validation/main/loss")]


def test_ranks_with_shares_of_their_own_train_as_one_on_all_rows(tmp_path):
    """Every row counts once, in evaluations too; a rank whose share ends early takes part until all have ended."""
    found = on_two_ranks(train, str(tmp_path / "ranks"))
    whole = updater_over(whole_batches())
    trainer = Trainer(whole, (2, "epoch"), out=tmp_path / "one")
    trainer.extend(extensions.LogReport(trigger=(1, "epoch")))
    trainer.extend(extensions.Evaluator(whole_batches(), whole.get_model("main")))
    trainer.run()
    assert not [result for result in found if isinstance(result, str)]
    for values, iteration, epoch, log in found:
        assert (iteration, epoch) == (8, 2)
        assert values == pytest.approx(parameters(whole), rel=1e-5)
        assert log == pytest.approx(losses(trainer), rel=1e-5)


def read(comm, count):
    iterator = LoaderIterator(Cut(comm.rank), per_rank=True)
    iterator.comm = comm
    iterator.share(comm.rank, comm.size)
    found = []
    for _ in range(count):
        batch = next(iterator)
        found.append(
            ((batch.columns * ROWS).round().flatten().tolist(), batch.weight, iterator.epoch, iterator.is_new_epoch)
        )
    return found


def test_a_rank_whose_share_has_ended_repeats_its_last_batch_with_weight_0():
    """Until all have ended; epochs are counted alike."""
    zero, one = on_two_ranks(read, 5)
    assert [row[0] for row in zero] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13], [0, 1, 2, 3]]
    assert [row[0] for row in one] == [[14, 15, 16, 17], *[[18, 19, 20, 21]] * 3, [14, 15, 16, 17]]
    assert ([row[1] for row in zero], [row[1] for row in one]) == ([4, 4, 4, 2, 4], [4, 4, 0, 0, 4])
    epochs = [(0, False), (0, False), (0, False), (1, True), (1, False)]
    assert [row[2:] for row in zero] == [row[2:] for row in one] == epochs


def resume(comm, out):
    warnings.simplefilter("ignore")

    def make(stop, name):
        torch.manual_seed(comm.rank)
        trainer = Trainer(
            updater_over(LoaderIterator(Cut(comm.rank, draws=True), per_rank=True), comm), stop, out=f"{out}/{name}"
        )
        trainer.extend(extensions.snapshot(asynchronous=False), trigger=(1, "iteration"))
        return trainer

    whole = make((10, "iteration"), "whole")
    whole.run()
    found = []
    for k in (2, 3, 4, 7):
        again = make((10, "iteration"), f"from {k}")
        serializers.load(f"{out}/whole/snapshot_iter_{k}", again)
        again.run()
        found.append(parameters(again.updater) == parameters(whole.updater))
    return found


def test_shares_of_their_own_resume_bit_for_bit(tmp_path):
    """In the middle of an epoch, where one share has ended already, and between epochs; each rank draws its own numbers."""
    assert on_two_ranks(resume, str(tmp_path)) == [[True] * 4] * 2


def refuse_empty(comm, out):
    class Empty(IterableDataset):
        def __iter__(self):
            return iter([torch.ones(2, 1)] if comm.rank == 0 else [])

    Trainer(updater_over(LoaderIterator(Empty(), per_rank=True), comm), (3, "iteration"), out=out).run()


def test_a_rank_without_any_batch_is_an_error_on_all_ranks(tmp_path):
    """Which says what to do; no rank waits."""
    for found in on_two_ranks(refuse_empty, str(tmp_path)):
        assert "gave rank 1 of 2 no batch in a whole pass, and others have some: give every rank a share" in found


def use_uncut(comm, out):
    Trainer(updater_over(DataLoader(Cut(comm.rank), batch_size=None), comm), (3, "iteration"), out=out).run()


def test_a_stream_that_is_cut_by_rank_is_refused_without_per_rank(tmp_path):
    """Half of the data would be lost; seen by the ranks' first batches."""
    for found in on_two_ranks(use_uncut, str(tmp_path)):
        assert "gives them different ones. If it gives each rank its own share, write LoaderIterator(loader, per_ra" in found


def test_what_is_visibly_cut_is_refused_at_construction_without_per_rank():
    """A sampler for ranks, and a stream of split_dataset_by_node; with both remedies."""
    pytest.importorskip("datasets.distributed")  # `datasets` is a folder of tests too
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_dict({"x": [*range(8)]}).to_iterable_dataset(num_shards=2)
    stream = split_dataset_by_node(rows, rank=0, world_size=2)
    data = TensorDataset(torch.arange(8.0)[:, None])
    sampled = DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    for source in (sampled, stream.batch(4), DataLoader(stream, 4)):
        with pytest.raises(
            ValueError, match=r"has already split the data.*leave .* out.*LoaderIterator\(loader, per_rank=T"
        ):
            LoaderIterator(source).check_share(2)
        LoaderIterator(source, per_rank=True).check_share(2)


def test_without_ranks_a_share_of_ones_own_is_all():
    """The same script on one process, without a communicator."""
    iterator = LoaderIterator(Cut(0), per_rank=True)
    assert sum(len(next(iterator)) for _ in range(4)) == 14
    assert (iterator.epoch, iterator.is_new_epoch) == (1, True)


def test_ranks_with_shares_of_their_own_need_a_communicator():
    """To agree on the end of a pass."""
    iterator = LoaderIterator(Cut(0), per_rank=True)
    iterator.share(0, 2)
    with pytest.raises(ValueError, match=r"they need a communicator: StandardUpdater\(..., comm=create_communicator\(\)\)"):
        next(iterator)


@pytest.mark.filterwarnings("ignore:iterator 'main' fetches")
def test_another_number_of_ranks_begins_at_the_end_of_an_epoch_only():
    """In the middle no rank knows what the others have taken."""
    iterator = LoaderIterator(Cut(0), per_rank=True)
    states = []
    for _ in range(4):
        next(iterator)
        states.append(iterator.state_dict())
    for state, refused in ((states[1], True), (states[3], False)):
        other = LoaderIterator(Cut(0), per_rank=True)
        other.load_state_dict(state)
        other.share(0, 2)
        with pytest.raises(ValueError, match="was saved by 1 ranks" if refused else "need a communicator"):
            next(other)
    with pytest.raises(ValueError, match="has per_rank=False, the saved run had True; another setting can begin at the end"):
        LoaderIterator(Cut(0)).load_state_dict(states[1])
