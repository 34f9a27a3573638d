"""Ranks that train together, as threads of this process: n ranks equal one, whatever the sizes of their parts."""

import threading

import pytest
import torch
from toys import Regression, assert_close, observed_update, parameters_of, regression_data, same_regression, updater_of

from chainring import report
from chainring.iterators import SerialIterator
from chainring.parallel import Communicator
from chainring.training import StandardUpdater


class ThreadCommunicator(Communicator):
    """Rank of a world whose ranks are threads: they lay their tensors side by side and wait for one another."""

    def __init__(self, rank, size, table, barrier):
        self.rank, self.size, self._table, self._barrier = rank, size, table, barrier
        self.reductions = 0

    def all_reduce(self, tensors, average=True):
        self.reductions += 1
        self._table[self.rank] = [tensor.clone() for tensor in tensors]
        self._barrier.wait(timeout=120)
        for number, tensor in enumerate(tensors):
            total = sum(self._table[rank][number] for rank in range(self.size))
            tensor.copy_(total / self.size if average else total)
        self._barrier.wait(timeout=120)


def on_ranks(size, work):
    """``work(communicator)`` on every rank at once; the results in the order of the ranks."""
    table, barrier, results, errors = [None] * size, threading.Barrier(size), [None] * size, []

    def run(rank):
        try:
            results[rank] = work(ThreadCommunicator(rank, size, table, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def build(models, batch_size, comm=None, *, data=None, repeat=True, kind=StandardUpdater, **settings):
    model = models[0 if comm is None else comm.rank]
    iterator = SerialIterator(regression_data() if data is None else data, batch_size, repeat, shuffle=False)
    if comm is not None:
        iterator.share(comm.rank, comm.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return kind(iterator, optimizer, model, comm=comm, **settings)


def compare(size, batch_size, updates, **settings):
    """The updaters of all ranks, and the one that trains alone, after some updates; checks that parameters agree."""
    models = [same_regression() for _ in range(size + 1)]  # made here: generators are the process's, not the thread's

    def work(comm):
        updater = build(models, batch_size, comm, **settings)
        seen = [observed_update(updater) for _ in range(updates)]
        return updater, seen, updater.weight

    ranks = on_ranks(size, work)
    alone = build([models[size]], batch_size, **settings)
    expected = [observed_update(alone) for _ in range(updates)]
    for updater, _, _ in ranks:
        assert_close(parameters_of(updater), parameters_of(alone))
    return ranks, alone, expected


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("batch_size", "accumulate"), [(4, 1), (5, 1), (3, 2)])
def test_parameters_follow_the_path_of_one_rank(size, batch_size, accumulate):
    """The batch size is global; shares of unequal length are weighted."""
    compare(size, batch_size, 4, accumulate=accumulate)


def test_a_rank_whose_share_is_empty_takes_part_with_weight_zero():
    """A last batch of one example: the second rank repeats it, and it does not count twice."""
    data = regression_data(9)
    ranks, alone, _ = compare(2, 4, 3, data=data, repeat=False)
    assert [weight for _, _, weight in ranks] == [1, 0]
    assert alone.weight == 1


@pytest.mark.parametrize("as_number", [True, False])
def test_a_repeated_example_has_weight_zero_also_where_the_loss_brings_its_own(as_number):
    """A token-weighted loss of an empty share does not count either."""

    def loss_func(model, x, t):
        weight = (x[:, 0] * 0 + 3.0).sum()
        return {"loss": model(x, t), "weight": weight.item() if as_number else weight}

    ranks, _, _ = compare(2, 4, 3, data=regression_data(9), repeat=False, loss_func=loss_func)
    assert [float(weight) for _, _, weight in ranks] == [3.0, 0.0]


def test_data_that_end_after_an_empty_share_end_on_every_rank_alike():
    """An update of one part of one example with accumulate=2: the rank without a share of it divides by no zero."""
    ranks, _, _ = compare(2, 4, 2, data=regression_data(9), repeat=False, accumulate=2)
    assert [weight for _, _, weight in ranks] == [1, 0]
    assert all(torch.isfinite(seen[-1]["main/loss"]) for _, seen, _ in ranks)


@pytest.mark.parametrize("as_number", [True, False])
@pytest.mark.parametrize(("size", "accumulate"), [(1, 2), (2, 1), (2, 2), (3, 2)])
def test_a_weight_beside_a_loss_is_logged_as_its_sum_over_micro_batches_and_ranks(size, accumulate, as_number):
    """As one batch of all examples reports it: the tokens of an update, say."""

    def three_for_each_row(model, x, t):
        weight = (x[:, 0] * 0 + 3).sum()
        return {"loss": model(x, t), "weight": weight.item() if as_number else weight}

    def work(comm):
        updater = build(
            [same_regression() for _ in range(size)], 4, comm, loss_func=three_for_each_row, accumulate=accumulate
        )
        return [float(observed_update(updater)["main/weight"]) for _ in range(2)]

    assert on_ranks(size, work) == [[4 * 3 * accumulate] * 2] * size


def test_a_weight_that_the_model_reports_by_itself_is_averaged():
    """It is a value as any other; the one beside a loss is what the mean in the loss counts."""

    class Heavy(Regression):
        def forward(self, x, t):
            report({"weight": float(len(x))}, self)
            return super().forward(x, t)

    updater = updater_of(4, data=regression_data(6), model=Heavy(), repeat=False, accumulate=2)
    assert observed_update(updater)["main/weight"] == (4 * 4 + 2 * 2) / 6


def test_weighted_means_over_ranks_are_the_means_of_one_batch():
    """Each rank reports its own part; by the updaters' weights they give the whole batch's loss."""
    ranks, _, expected = compare(2, 5, 3)
    for number, whole in enumerate(expected):
        parts = [(seen[number]["main/loss"], share) for (_, seen, _), share in zip(ranks, (3, 2), strict=True)]
        assert_close(sum(value * share for value, share in parts) / 5, whole["main/loss"])


def test_gradients_are_exchanged_once_an_update_however_many_parts_it_has():
    """Parts are summed on their rank first."""
    ranks, _, _ = compare(2, 4, 3, accumulate=3)
    assert [updater.comm.reductions for updater, _, _ in ranks] == [3, 3]


class Branching(Regression):
    """Has a part that only positive first inputs reach, and one that nothing reaches."""

    def __init__(self):
        super().__init__()
        self.branch = torch.nn.Linear(3, 1).double()
        self.unused = torch.nn.Linear(3, 1).double()

    def forward(self, x, t):
        y = self.predictor(x)
        positive = x[:, 0] > 0
        if positive.any():
            y = y + self.branch(x) * positive[:, None]
        return (y - t).square().mean()


def test_a_parameter_that_only_one_rank_touches_is_trained_and_one_that_none_touches_is_left_alone():
    """As in a world of one: AdamW decays nothing that has no gradient."""
    x = torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]] * 3, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, x[:, :1] * 2)
    models = []
    for _ in range(3):
        torch.manual_seed(4)
        models.append(Branching())
    before = [parameter.detach().clone() for parameter in models[0].unused.parameters()]

    def work(comm):
        updater = build(models, 4, comm, data=data)
        for _ in range(3):
            updater.update()
        return updater

    first, second = on_ranks(2, work)
    alone = build([models[2]], 4, data=data)
    for _ in range(3):
        alone.update()
    assert_close(parameters_of(first), parameters_of(alone))
    assert_close(parameters_of(second), parameters_of(alone))
    assert all(map(torch.equal, before, first.get_model("main").unused.parameters()))


def test_without_a_communicator_the_updater_is_a_world_of_one():
    """A comm is always there, so nothing needs to ask."""
    updater = updater_of()
    assert (updater.comm.rank, updater.comm.size, updater.comm.gather_object("a")) == (0, 1, ["a"])


def test_a_communicator_of_one_changes_nothing():
    """The same numbers come out with the comm stage and without, to float tolerance."""
    ours, plain = updater_of(comm=Communicator()), updater_of()
    for _ in range(3):
        assert_close(observed_update(ours), observed_update(plain))
    assert_close(parameters_of(ours), parameters_of(plain))
