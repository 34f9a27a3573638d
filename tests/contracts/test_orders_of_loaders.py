"""What the order of a loader is made of, form by form: it goes on exactly, or is refused, or it is said that it does not."""

import copy
import functools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from chainring.datasets import ConcatenatedDataset, SubDataset, TransformDataset, TupleDataset
from chainring.iterators import (
    BucketOrderSampler,
    LoaderIterator,
    MultiprocessIterator,
    SerialIterator,
    WeightedOrderSampler,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:iterator 'main' fetches"),
    pytest.mark.filterwarnings("ignore:Neither dataset nor iter"),
]
SIZE, BATCH = 10, 3
DATA = TensorDataset(torch.arange(SIZE), torch.arange(SIZE) * 0.5)


def shuffled(generator):
    """The indices in an order drawn from any kind of generator."""
    order = list(range(SIZE))
    if isinstance(generator, torch.Generator):
        return torch.randperm(SIZE, generator=generator).tolist()
    generator.shuffle(order)
    return order


class Own(Sampler):
    """A sampler of the script's own, with a generator of its own."""

    def __init__(self, generator):
        self.rng = generator

    def __iter__(self):
        return iter(shuffled(self.rng))

    def __len__(self):
        return SIZE


class OwnBatches:
    """A sampler of batches that derives from nothing, and draws in each batch."""

    def __init__(self, generator):
        self.rng = generator

    def __iter__(self):
        order = list(range(SIZE))
        while order:
            yield [order.pop(int(self.rng.integers(len(order)))) for _ in range(min(BATCH, len(order)))]

    def __len__(self):
        return 4


class Hidden(Own):
    """Its generator is out of reach."""

    def __init__(self, generator):
        self.draw = lambda: shuffled(generator)

    def __iter__(self):
        return iter(self.draw())


class Counting(Own):
    """It begins each pass with the number of those before."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(shuffled(random.Random(self.passes)))


class Noisy(Dataset):
    """Its examples have an index, and a number drawn from a generator, or from nowhere that is known."""

    def __init__(self, generator=None):
        self.rng = generator

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return i, (np.random.default_rng() if self.rng is None else self.rng).random()


class Noise:
    """A collate function with a generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(4)

    def __call__(self, examples):
        x, t = default_collate(examples)
        return x, t + self.rng.random()


def rng():
    return np.random.default_rng(3)


def of_sampler(make_sampler, loader=DataLoader, data=DATA, **settings):
    return lambda: loader(data, BATCH, sampler=make_sampler(), **settings)


EXACT = {
    "shuffle": lambda: DataLoader(DATA, BATCH, shuffle=True),
    "a generator of torch": of_sampler(lambda: Own(torch.Generator().manual_seed(3))),
    "a generator of NumPy": of_sampler(lambda: Own(rng())),
    "an older generator of NumPy": of_sampler(lambda: Own(np.random.RandomState(3))),
    "a generator of Python": of_sampler(lambda: Own(random.Random(3))),
    "MT19937": of_sampler(lambda: Own(np.random.Generator(np.random.MT19937(3)))),
    "a generator shared by two": lambda: DataLoader(Noisy(g := rng()), BATCH, sampler=Own(g)),
    "a sampler of batches": lambda: DataLoader(DATA, batch_sampler=OwnBatches(rng())),
    "a sampler in a sampler of batches": lambda: DataLoader(DATA, batch_sampler=BatchSampler(Own(rng()), BATCH, False)),
    "a sampler in two": lambda: DataLoader(DATA, batch_sampler=BatchSampler(WrappedSampler(Own(rng())), BATCH, False)),
    "a dataset that draws": lambda: DataLoader(Noisy(rng()), BATCH, shuffle=True),
    "a subset of one that draws": lambda: DataLoader(Subset(ConcatDataset([Noisy(rng())]), range(SIZE)), BATCH),
    "a collate function that draws": lambda: DataLoader(DATA, BATCH, collate_fn=Noise()),
    "a bound method that draws": lambda: DataLoader(DATA, BATCH, collate_fn=Noise().__call__),
    "a partial that draws": lambda: DataLoader(DATA, BATCH, collate_fn=functools.partial(Noise())),
    "torchdata's shuffle": lambda: StatefulDataLoader(DATA, BATCH, shuffle=True),
    "torchdata over torch's sampler": of_sampler(lambda: RandomSampler(DATA), StatefulDataLoader),
    "torchdata over torch's weights": of_sampler(lambda: WeightedRandomSampler([1.0] * SIZE, SIZE), StatefulDataLoader),
    "torchdata over an own sampler": of_sampler(lambda: Own(rng()), StatefulDataLoader),
    "torchdata over batches": lambda: StatefulDataLoader(DATA, batch_sampler=OwnBatches(rng())),
    "torchdata over torch's batches": lambda: StatefulDataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA), BATCH, False)
    ),
    "torchdata in workers": of_sampler(lambda: RandomSampler(DATA), StatefulDataLoader, num_workers=1),
}


class WrappedSampler(Sampler):
    """A sampler around another, under a name of its own."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)


def taken(iterator, number):
    return [
        [list(map(str, column)) if isinstance(column, list) else column.tolist() for column in next(iterator).columns]
        for _ in range(number)
    ]


def saved_after(make, number):
    torch.manual_seed(0)
    with LoaderIterator(make()) as iterator:
        taken(iterator, number)
        return iterator.state_dict()


def continued(make, state, number):
    """What a new script gives from a saved state on, whatever it seeds and draws itself."""
    torch.manual_seed(1)
    with LoaderIterator(make()) as iterator:
        iterator.load_state_dict(state)
        return taken(iterator, number)


@pytest.mark.parametrize("form", EXACT)
def test_an_order_goes_on_exactly_after_every_batch(form):
    """To the next pass."""
    make, number = EXACT[form], 6
    torch.manual_seed(0)
    with LoaderIterator(make()) as iterator:
        whole = taken(iterator, number)
    for at in (1, 3, 4, 5) if "workers" not in form else (2,):
        assert continued(make, saved_after(make, at), number - at) == whole[at:], at


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (1, 2)])
@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
def test_a_pass_ends_with_as_many_workers_as_it_began(loader, before, after, capsys):
    """Those of the settings begin with the next, and a line says so."""
    make = lambda workers: lambda: loader(Noisy(rng()), BATCH, shuffle=True, num_workers=workers)  # noqa: E731
    torch.manual_seed(0)
    with LoaderIterator(make(before)()) as iterator:
        whole = taken(iterator, 4)
    assert continued(make(after), saved_after(make(before), 2), 3)[:2] == whole[2:]
    assert f"num_workers of iterator 'main'  {before}     -> {after}" in capsys.readouterr().out


def test_another_number_of_workers_begins_at_the_end_of_an_epoch():
    """Of torchdata's loader too, whose own state tells of workers."""
    make = lambda workers: lambda: StatefulDataLoader(DATA, BATCH, shuffle=True, num_workers=workers)  # noqa: E731
    rows = continued(make(1), saved_after(make(0), 4), 4)
    assert sorted(index for columns in rows for index in columns[0]) == list(range(SIZE))


OTHER = TensorDataset(torch.arange(SIZE) + 1, torch.arange(SIZE) * 0.5)
REFUSED = {
    "shuffle turned on": (lambda: DataLoader(DATA, BATCH), lambda: DataLoader(DATA, BATCH, shuffle=True)),
    "shuffle turned off": (lambda: DataLoader(DATA, BATCH, shuffle=True), lambda: DataLoader(DATA, BATCH)),
    "another sampler": (of_sampler(lambda: Own(rng())), of_sampler(lambda: Own(random.Random(0)))),
    "another class of sampler": (of_sampler(lambda: Own(rng())), lambda: DataLoader(DATA, BATCH)),
    "a generator out of reach": (of_sampler(lambda: Hidden(rng())),) * 2,
    "a count of passes": (of_sampler(Counting),) * 2,
    "other data": (lambda: DataLoader(DATA, BATCH), lambda: DataLoader(OTHER, BATCH)),
    "other numbers": (
        lambda: DataLoader(TensorDataset(torch.arange(SIZE) * 1.0), BATCH),
        lambda: DataLoader(TensorDataset(torch.arange(SIZE) * 2.0), BATCH),
    ),
    "other batches": (lambda: [(torch.tensor([k]),) for k in range(9)], lambda: [(torch.tensor([-k]),) for k in range(9)]),
    "other strings": (
        lambda: [(np.array([k]), [f"{k}"]) for k in range(9)],
        lambda: [(np.array([k]), ["x"]) for k in range(9)],
    ),
    "arrays of NumPy": (lambda: [(np.array([k]),) for k in range(9)], lambda: [(np.array([-k]),) for k in range(9)]),
    "torchdata, shuffled": (
        of_sampler(lambda: RandomSampler(DATA), StatefulDataLoader),
        of_sampler(lambda: Hidden(rng()), StatefulDataLoader),
    ),
}


@pytest.mark.parametrize("form", REFUSED)
def test_a_pass_of_other_batches_is_refused(form):
    """Before the first update of the resumed run, amid a pass; from its end another one may begin."""
    before, after = REFUSED[form]
    with pytest.raises(ValueError, match=r"gives other batches than before: the last of the \d .*end of an epoch"):
        continued(after, saved_after(before, 6), 1)
    length = 9 if isinstance(after(), list) else 4
    assert continued(after, saved_after(before, length), 1)


def test_other_numbers_in_the_same_examples_are_said():
    """As of an augmentation that draws from nowhere that is known: the order is right, and the bits are not."""
    make = lambda: DataLoader(Noisy(), BATCH, shuffle=True)  # noqa: E731
    state = saved_after(make, 1)
    with pytest.warns(UserWarning, match="does not continue bit for bit: the last of the 1 batches"):
        continued(make, state, 1)


def in_place(batch):
    batch.columns[1].mul_(2)


def in_inference(batch):
    with torch.inference_mode():
        batch.columns[1].sum()


@pytest.mark.parametrize("use", [in_place, in_inference])
def test_what_an_update_does_with_a_batch_is_no_difference(use):
    """A tensor that it has changed in place says nothing; the others do."""
    iterator = LoaderIterator(DataLoader(DATA, BATCH))
    use(next(iterator))
    assert continued(lambda: DataLoader(DATA, BATCH), iterator.state_dict(), 1)
    with pytest.raises(ValueError, match="gives other batches"):
        continued(lambda: DataLoader(OTHER, BATCH), iterator.state_dict(), 1)


class Boxes:
    """Examples without a number of bytes."""

    __slots__ = ()


@pytest.mark.parametrize(
    "content", [Boxes(), None, "a", {"x": torch.zeros(2, 2).to_sparse()}, torch.zeros(2, device="meta")]
)
def test_any_content_can_be_saved(content):
    """It goes on after what has no bytes, too."""
    iterator = LoaderIterator([(content,)] * 3)
    next(iterator)
    again = LoaderIterator([(content,)] * 3)
    again.load_state_dict(iterator.state_dict())
    assert len([next(again) for _ in range(2)]) == 2


def test_data_that_are_prepared_after_loading_are_fetched_then():
    """As by an extension that is called before training."""

    class Prepared(Dataset):
        def __init__(self):
            self.rows = None

        def __len__(self):
            return SIZE

        def __getitem__(self, i):
            return self.rows[i], 0

    def iterator(rows):
        data = Prepared()
        return LoaderIterator(DataLoader(data, BATCH)), functools.partial(setattr, data, "rows", rows)

    whole, prepare = iterator(list(range(SIZE)))
    prepare()
    expected = taken(whole, 2)
    for rows, is_same in ((list(range(SIZE)), True), ([0] * SIZE, False)):
        again, prepare = iterator(rows)
        again.load_state_dict(whole.state_dict())
        prepare()
        if is_same:
            assert taken(again, 1)[0][0] == [6, 7, 8]
            assert expected[1][0] == [3, 4, 5]
        else:
            with pytest.raises(ValueError, match=r"gives other batches.*in its set_epoch"):
                taken(again, 1)


# --- set_epoch ---


class Told(Dataset):
    """A dataset that is told of each epoch, and gives its number."""

    def __init__(self):
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.tensor(self.epoch)


class ToldStream(Told, IterableDataset):
    def __iter__(self):
        return iter([self[i] for i in range(4)])


class ToldSampler(Told, Sampler):
    def __iter__(self):
        return iter([self.epoch] * 4)


class ToldCollate:
    """A collate function that is told."""

    set_epoch = Told.set_epoch

    def __call__(self, examples):
        return torch.tensor([self.epoch] * len(examples))


class ToldWrapper(Told):
    """A container that gives its content another number."""

    def __init__(self, inner):
        self.inner = inner

    def set_epoch(self, epoch):
        self.inner.set_epoch(10 + epoch)

    def __getitem__(self, i):
        return self.inner[i] - 10


class Wrapper(Dataset):
    """A container of the script's own, which is not told itself."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.inner[i]


class FileOfEpoch:
    """A transform that is told."""

    set_epoch = Told.set_epoch

    def __call__(self, example):
        return torch.tensor(self.epoch)


RANGE = torch.arange(4)
DATASETS = {
    "itself": Told,
    "Subset": lambda: Subset(Told(), range(4)),
    "Subset of Subset": lambda: Subset(Subset(Told(), range(4)), range(4)),
    "ConcatDataset": lambda: Subset(ConcatDataset([Told(), Told()]), range(2, 6)),
    "StackDataset": lambda: StackDataset(Told(), Told()),
    "StackDataset by name": lambda: StackDataset(x=Told()),
    "a container that passes it on": lambda: ToldWrapper(Told()),
    "an own container": lambda: Wrapper(Subset(Told(), range(4))),
    "TupleDataset": lambda: TupleDataset(Told(), RANGE),
    "SubDataset": lambda: SubDataset(Told(), 0, 4),
    "ConcatenatedDataset": lambda: ConcatenatedDataset(SubDataset(Told(), 0, 2), SubDataset(Told(), 0, 2)),
    "TransformDataset": lambda: TransformDataset(Told(), lambda example: example),
    "a transform": lambda: TransformDataset(RANGE, FileOfEpoch()),
}
LOADERS = {
    **{name: functools.partial(lambda make: DataLoader(make(), 2), make) for name, make in DATASETS.items()},
    "a stream": lambda: DataLoader(ToldStream(), 2),
    "ChainDataset": lambda: DataLoader(ChainDataset([ToldStream()]), 2),
    "a sampler": lambda: DataLoader(RANGE, 2, sampler=ToldSampler()),
    "a sampler in BatchSampler": lambda: DataLoader(RANGE, batch_sampler=BatchSampler(ToldSampler(), 2, False)),
    "a sampler in two": lambda: DataLoader(RANGE, batch_sampler=BatchSampler(WrappedSampler(ToldSampler()), 2, False)),
    "a collate function": lambda: DataLoader(RANGE, 2, collate_fn=ToldCollate()),
    "a collate function in partial": lambda: DataLoader(RANGE, 2, collate_fn=functools.partial(ToldCollate())),
    "a method of one": lambda: DataLoader(RANGE, 2, collate_fn=ToldCollate().__call__),
    "torchdata": lambda: StatefulDataLoader(Subset(Told(), range(4)), 2),
    "workers": lambda: DataLoader(Subset(Told(), range(4)), 2, num_workers=1, persistent_workers=True),
}


def epochs(iterator, number=6):
    batches = [[*next(iterator)] for _ in range(number)]
    iterator.finalize()
    return [int(torch.utils._pytree.tree_leaves(batch)[0]) for batch in batches]


@pytest.mark.parametrize("form", LOADERS)
def test_all_in_a_loader_is_told_of_each_epoch(form):
    """At any depth, before the pass begins; and again where a run continues."""
    iterator, again = LoaderIterator(LOADERS[form]()), LoaderIterator(LOADERS[form]())
    assert epochs(iterator, 5) == [0, 0, 1, 1, 2]
    again.load_state_dict(iterator.state_dict())
    assert epochs(again, 2) == [2, 3]


WITH_WORKERS = ("Subset of Subset", "TupleDataset", "a transform")  # one of each kind, since processes start


@pytest.mark.parametrize(
    ("iterator", "form"),
    [*((SerialIterator, form) for form in DATASETS), *((MultiprocessIterator, form) for form in WITH_WORKERS)],
)
def test_all_in_a_dataset_is_told_of_the_epoch_of_each_example(iterator, form):
    """Also in the batch that crosses the end of one, and in workers."""
    settings = {"n_processes": 2} if iterator is MultiprocessIterator else {}
    with iterator(DATASETS[form](), 3, **settings) as batches:
        rows = [[int(torch.utils._pytree.tree_leaves(example)[0]) for example in next(batches)] for _ in range(5)]
    assert rows == [[0, 0, 0], [0, 1, 1], [1, 1, 2], [2, 2, 2], [3, 3, 3]]


@pytest.mark.parametrize("make", [lambda data: SerialIterator(data, 2), lambda data: LoaderIterator(DataLoader(data, 2))])
def test_two_that_take_turns_over_one_dataset_each_tell_their_epoch(make):
    """As an evaluation amid an epoch of training does, over another share of the same data."""
    data = Told()
    training, evaluation = make(Subset(data, range(4))), make(Subset(data, range(4)))
    rows = [[*map(int, next(training))] for _ in range(3)]
    assert [*map(int, next(evaluation))] == [0, 0]
    assert (rows, [*map(int, next(training))]) == ([[0, 0], [0, 0], [1, 1]], [1, 1])


class ToldLoader:
    """A loader that begins anew where it is told of an epoch."""

    def __init__(self):
        self.epoch = self.at = 0

    def set_epoch(self, epoch):
        self.epoch, self.at = epoch, 0

    def __len__(self):
        return 3

    def __iter__(self):
        while self.at < 3:
            self.at += 1
            yield torch.tensor([10 * self.epoch + self.at])


def test_a_loader_is_not_told_again_in_the_middle_of_a_pass_because_another_was_told():
    """As by an evaluation of other data: it would begin its pass again."""
    training, evaluation = LoaderIterator(ToldLoader()), LoaderIterator(DataLoader(Told(), 2))
    rows = []
    for _ in range(5):
        rows.append(next(training).columns.item())
        next(evaluation)
    assert rows == [1, 2, 3, 11, 12]


# --- orders of a dataset ---


def weighted(factor):
    return WeightedOrderSampler(np.arange(1, SIZE + 1) ** factor)


DATASET = [torch.tensor([k]) for k in range(SIZE)]
ORDERS = {
    "shuffle turned on": ({"shuffle": False}, {"shuffle": True}),
    "shuffle turned off": ({}, {"shuffle": False}),
    "a sampler more": ({}, {"order_sampler": BucketOrderSampler(np.arange(SIZE), 2)}),
    "a sampler less": ({"order_sampler": weighted(1)}, {"shuffle": False}),
    "other weights": ({"order_sampler": weighted(1)}, {"order_sampler": weighted(2)}),
    "another sampler": (
        {"order_sampler": BucketOrderSampler(np.arange(SIZE), 2)},
        {"order_sampler": lambda seed, epoch, size: np.arange(size)[::-1]},
    ),
}


@pytest.mark.parametrize("form", ORDERS)
@pytest.mark.parametrize("taken_examples", [4, SIZE])
def test_another_order_of_a_dataset_begins_at_the_end_of_an_epoch_only(form, taken_examples):
    """Amid one its position would mean other examples; nothing is fetched to find that."""
    before, after = ORDERS[form]
    iterator, same = (SerialIterator(DATASET, 2, seed=3, **before) for _ in range(2))
    for _ in range(taken_examples // 2):
        next(iterator)
    same.load_state_dict(iterator.state_dict())
    assert [*map(int, next(same))] == [*map(int, next(copy.deepcopy(iterator)))]
    other = SerialIterator(DATASET, 2, seed=3, **after)
    if taken_examples < SIZE:
        with pytest.raises(ValueError, match=r"another order than in the saved run, which had taken 4.*end of an epoch"):
            other.load_state_dict(iterator.state_dict())
    else:
        other.load_state_dict(iterator.state_dict())
        assert len(next(other)) == 2


@pytest.mark.parametrize("change", [lambda data: data.append(data[0]), lambda data: data.pop(), lambda data: data.clear()])
@pytest.mark.parametrize("settings", [{}, {"shuffle": False}, {"order_sampler": lambda seed, epoch, size: np.arange(size)}])
def test_a_dataset_of_another_length_is_refused_in_the_next_epoch(change, settings):
    """Its orders are those of the length that it had."""
    data = list(DATASET)
    iterator = SerialIterator(data, 2, **settings)
    for _ in range(SIZE // 2):
        next(iterator)
    change(data)
    with pytest.raises(ValueError, match=r"had 10 examples when its iterator was made, and now has \d+: .*DataLoader"):
        next(iterator)
