"""LoaderIterator over what others make: torchdata, Hugging Face datasets, and what looks like webdataset."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from chainring.converters import concat_examples
from chainring.iterators import LoaderIterator, MultiprocessIterator, SerialIterator, as_iterator

pytest.importorskip("datasets.distributed")  # not made for NumPy before 2; `datasets` is a folder of tests too
datasets = pytest.importorskip("datasets")

# torchdata 0.11 was made for an earlier torch.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

SIZE, BATCH = 10, 4
ARRAYS = TensorDataset(torch.arange(SIZE), torch.arange(SIZE) * 0.5)


@pytest.fixture(autouse=True)
def _quiet():
    datasets.disable_progress_bars()


def table(size=SIZE):
    """A Hugging Face dataset that is indexed."""
    rows = {"x": [[float(k), k + 0.5] for k in range(size)], "t": list(range(size))}
    return datasets.Dataset.from_dict(rows).with_format("torch")


def stream():
    """A Hugging Face dataset that is only iterated, in three shards."""
    return table().to_iterable_dataset(num_shards=3).with_format("torch")


def values(batch):
    columns = batch.columns
    parts = columns.items() if isinstance(columns, dict) else enumerate(columns)
    return {key: column if isinstance(column, list) else column.tolist() for key, column in parts}


def taken(iterator, number):
    return [values(next(iterator)) for _ in range(number)]


def begun(make):
    """As a script makes it, each time that it starts."""
    torch.manual_seed(0)
    return make()


def assert_resumes_after_every_batch(make, number=8):
    """Over more than two epochs: one batch of each fresh iterator; and from the middle to the end in one."""
    with begun(make) as iterator:
        whole = taken(iterator, number)
    with begun(make) as iterator:
        states = [iterator.state_dict()]
    batches = []
    for _ in range(number):
        with begun(make) as iterator:
            iterator.load_state_dict(states[-1])
            batches += taken(iterator, 1)
            states.append(iterator.state_dict())
    assert batches == whole
    with begun(make) as iterator:
        iterator.load_state_dict(states[2])
        assert taken(iterator, number - 2) == whole[2:]


class TestTorchdata:
    """A StatefulDataLoader, whose own state is saved."""

    @pytest.mark.parametrize("shuffle", [True, False])
    @pytest.mark.parametrize("data", [ARRAYS, table()], ids=["tensors", "Hugging Face"])
    def test_it_resumes_after_every_batch(self, shuffle, data):
        """And fetches nothing again, which would be warned about."""
        assert_resumes_after_every_batch(lambda: LoaderIterator(StatefulDataLoader(data, BATCH, shuffle=shuffle)))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_with_a_generator_of_the_users_it_resumes_after_every_batch(self, workers):
        """Into the next epochs too: torchdata by itself begins another one there."""

        def make():
            generator = torch.Generator().manual_seed(3)
            return LoaderIterator(StatefulDataLoader(ARRAYS, BATCH, shuffle=True, generator=generator, num_workers=workers))

        assert_resumes_after_every_batch(make, number=8 if workers == 0 else 5)

    def test_with_workers_it_resumes_after_every_batch(self):
        """Two, which fetch ahead: the state is that of the batch last returned."""
        assert_resumes_after_every_batch(
            lambda: LoaderIterator(StatefulDataLoader(ARRAYS, BATCH, shuffle=True, num_workers=2)), number=5
        )

    def test_over_a_stream_it_resumes_after_every_batch(self):
        """Through the state of the dataset underneath."""
        assert_resumes_after_every_batch(lambda: LoaderIterator(StatefulDataLoader(stream(), BATCH)))

    def test_epochs_are_counted(self):
        """Three batches are one."""
        iterator = LoaderIterator(StatefulDataLoader(ARRAYS, BATCH))
        rows = [(len(next(iterator)), iterator.epoch_detail, iterator.is_new_epoch) for _ in range(4)]
        assert rows == [(4, 1 / 3, False), (4, 2 / 3, False), (2, 1.0, True), (4, 4 / 3, False)]

    def test_no_generator_is_disturbed(self):
        """Neither by a pass nor by asking for the state."""
        iterator = LoaderIterator(StatefulDataLoader(ARRAYS, BATCH, shuffle=True))
        before = torch.get_rng_state().tolist(), random.getstate()
        taken(iterator, 4)
        iterator.state_dict()
        assert (torch.get_rng_state().tolist(), random.getstate()) == before


class Augmented(Dataset):
    """Examples that draw from all three generators, as augmentation does."""

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return torch.tensor(i), random.random() + float(np.random.rand()) + torch.rand(())


def mixed(examples):
    """A collate_fn that draws, as mixup does."""
    x, t = default_collate(examples)
    return x, t + random.random()


@pytest.mark.filterwarnings("ignore:iterator 'main' fetches")
class TestWorkersThatDraw:
    """What the state of a loader does not hold is fetched again, so that it is the same to the last bit."""

    def test_persistent_workers_resume_after_every_batch(self):
        """Over several passes: each begins with workers of its own, whose generators follow from the seed."""
        assert_resumes_after_every_batch(
            lambda: LoaderIterator(DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2, persistent_workers=True))
        )

    def test_a_loader_is_left_as_it_was(self):
        """Its own settings hold wherever else it is used."""
        loader = DataLoader(Augmented(), BATCH, num_workers=1, persistent_workers=True)
        with LoaderIterator(loader) as iterator:
            taken(iterator, 1)
            assert (loader.persistent_workers, loader.worker_init_fn) == (True, None)

    @pytest.mark.parametrize("persistent", [False, True])
    @pytest.mark.parametrize("collate", [None, mixed])
    def test_a_stateful_loader_with_workers_resumes_after_every_batch(self, persistent, collate):
        """Its state lacks the generators of its workers, which is said when it is resumed."""
        data = Augmented() if collate is None else ARRAYS
        settings = {"shuffle": True, "num_workers": 2, "persistent_workers": persistent, "collate_fn": collate}
        assert_resumes_after_every_batch(lambda: LoaderIterator(StatefulDataLoader(data, BATCH, **settings)), number=5)

    def test_what_the_state_lacks_is_said(self):
        """With the number of batches."""

        def make():
            return LoaderIterator(StatefulDataLoader(Augmented(), BATCH, num_workers=1))

        with make() as iterator, make() as again:
            taken(iterator, 2)
            again.load_state_dict(iterator.state_dict())
            with pytest.warns(UserWarning, match="2 batches again.*StatefulDataLoader lacks the random generators of its"):
                taken(again, 1)

    def test_batches_that_come_as_workers_finish_are_warned_about_at_construction(self):
        """Their order cannot be had again; in an evaluation it does not matter."""
        loader = DataLoader(Augmented(), BATCH, num_workers=2, in_order=False)
        with pytest.warns(UserWarning, match=r"this DataLoader cannot be resumed bit for bit: with in_order=False"):
            LoaderIterator(loader)
        LoaderIterator(loader, repeat=False)


class TestHuggingFaceTables:
    """A dataset by index belongs in an iterator of ours; batched or in a DataLoader it is a loader."""

    def test_examples_are_mappings_of_columns(self):
        """In this process as in workers, exactly resumed."""
        serial = SerialIterator(table(), BATCH, seed=1)
        with MultiprocessIterator(table(), BATCH, n_processes=2, seed=1) as workers:
            for _ in range(4):
                ours, theirs = concat_examples(next(serial)), concat_examples(next(workers))
                assert list(ours) == ["x", "t"]
                assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        again = SerialIterator(table(), BATCH, seed=2)
        again.load_state_dict(workers.state_dict())
        assert torch.equal(concat_examples(next(again))["t"], concat_examples(next(serial))["t"])

    def test_as_it_is_it_is_refused_at_the_door(self):
        """Its items are single examples."""
        with pytest.raises(TypeError, match=r"got the dataset Dataset, .*SerialIterator\(dataset, batch_size\)"):
            as_iterator(table())

    def test_its_batches_are_passed_on(self):
        """`batch` makes a dataset of batches, the last one short; an epoch is one pass."""
        iterator = LoaderIterator(table().batch(BATCH))
        rows = [(next(iterator).columns["t"].tolist(), iterator.epoch_detail) for _ in range(4)]
        assert rows == [([0, 1, 2, 3], 1 / 3), ([4, 5, 6, 7], 2 / 3), ([8, 9], 1.0), ([0, 1, 2, 3], 4 / 3)]

    @pytest.mark.filterwarnings("ignore:iterator 'main' fetches")
    def test_in_a_dataloader_it_resumes_after_every_batch(self):
        """Shuffled; what was taken of the epoch is fetched again."""
        assert_resumes_after_every_batch(lambda: LoaderIterator(DataLoader(table(), BATCH, shuffle=True)))


class TestHuggingFaceStreams:
    """An IterableDataset, which has a state of its own."""

    def test_its_batches_resume_after_every_batch(self):
        """Nothing is fetched again."""
        assert_resumes_after_every_batch(lambda: LoaderIterator(stream().batch(BATCH)))

    def test_an_epoch_is_one_pass_or_epoch_length(self):
        """It has no length, so it is read one batch ahead."""
        iterator = LoaderIterator(stream().batch(BATCH))
        rows = [(len(next(iterator)), iterator.epoch, iterator.is_new_epoch) for _ in range(4)]
        assert rows == [(4, 0, False), (4, 0, False), (2, 1, True), (4, 1, False)]
        iterator = LoaderIterator(stream().batch(BATCH), epoch_length=2)
        assert [(len(next(iterator)), iterator.epoch_detail) for _ in range(3)] == [(4, 0.5), (4, 1.0), (2, 1.5)]

    def test_every_epoch_is_shuffled_anew(self):
        """set_epoch is called: the passes are those of the dataset told so by hand."""
        shuffled = stream().shuffle(seed=1, buffer_size=8)
        iterator = LoaderIterator(shuffled.batch(SIZE))
        orders = [next(iterator).columns["t"].tolist() for _ in range(3)]
        expected = []
        for epoch in range(3):
            by_hand = stream().shuffle(seed=1, buffer_size=8)
            by_hand.set_epoch(epoch)
            expected.append([int(example["t"]) for example in by_hand])
        assert orders == expected
        assert orders[0] != orders[1]


def plain():
    return datasets.Dataset.from_dict({"t": [*range(SIZE)]}).to_iterable_dataset(num_shards=1)


def buffered():
    """A stream whose examples wait in a shuffle buffer, which its own state leaves out."""
    return stream().shuffle(seed=1, buffer_size=6)


def draw_for_many(rows):
    return {**rows, "x": [random.random() for _ in rows["t"]]}


@pytest.mark.filterwarnings("ignore:iterator 'main' fetches")
@pytest.mark.parametrize(
    "make",
    [
        lambda: LoaderIterator(buffered().batch(BATCH)),
        lambda: LoaderIterator(buffered().batch(BATCH), epoch_length=2),
        lambda: LoaderIterator(buffered().repeat(None).batch(BATCH), epoch_length=2),
        lambda: LoaderIterator(DataLoader(buffered(), BATCH)),
        lambda: LoaderIterator(DataLoader(buffered(), BATCH), epoch_length=2),
        lambda: LoaderIterator(StatefulDataLoader(buffered(), BATCH)),
        lambda: LoaderIterator(plain().map(draw_for_many, batched=True, batch_size=6).batch(BATCH)),
    ],
    ids=["bare", "epoch_length", "endless", "DataLoader", "DataLoader, epoch_length", "stateful", "map"],
)
def test_a_stream_whose_state_does_not_hold_all_resumes_after_every_batch(make):
    """A shuffle buffer, and draws for many examples at once; what was taken of the pass is fetched again."""
    assert_resumes_after_every_batch(make, number=7)


def test_a_stream_that_ends_is_not_cut_by_epoch_length():
    """Every example comes as often as any other; one that is repeated for ever begins again with each epoch."""
    for endless, expected in ((False, 0), (True, 3)):
        source = buffered().repeat(None) if endless else buffered()
        iterator = LoaderIterator(DataLoader(source, 1), epoch_length=7)
        seen = [int(next(iterator).columns["t"]) for _ in range(20)]
        assert (len(set(seen[:10])) < 10 or len(set(seen[10:])) < 10) == bool(expected)


def test_a_buffer_that_is_lost_is_said():
    """With the number of batches that are fetched again."""
    iterator = LoaderIterator(buffered().batch(BATCH))
    taken(iterator, 2)
    (again := LoaderIterator(buffered().batch(BATCH))).load_state_dict(iterator.state_dict())
    with pytest.warns(UserWarning, match="fetches 2 batches again.*the state of IterableDataset lacks the examples in its"):
        taken(again, 1)


def test_a_stream_that_is_shuffled_without_a_seed_is_warned_about_at_construction():
    """Each process would shuffle in another way; with the remedy."""
    for source in (stream().shuffle(buffer_size=4).batch(BATCH), DataLoader(stream().shuffle(buffer_size=4), BATCH)):
        with pytest.warns(UserWarning, match=r"cannot be resumed bit for bit: its stream is shuffled without a seed"):
            LoaderIterator(source)


class Shards(IterableDataset):
    """As webdataset's pipelines are: no length, shards and a buffer shuffled by ``random``, batches as lists."""

    def __init__(self, endless=False):
        self.endless = endless

    def __iter__(self):
        while True:
            shards = [list(range(start, start + 4)) for start in (0, 4, 8)]
            random.shuffle(shards)
            samples = [sample for shard in shards for sample in random.sample(shard, 4)]
            for start in range(0, 12, 5):
                keys = torch.tensor(samples[start : start + 5])
                yield [keys, keys * 0.5 + torch.rand(len(keys))]
            if not self.endless:
                return


class TestWebdatasetLike:
    """An iterable that draws from the global generators as it goes."""

    def test_every_pass_is_another_one_of_all_samples(self):
        """Lists are passed on as tuples, the last batch short."""
        iterator = LoaderIterator(Shards())
        passes = [[next(iterator).columns[0].tolist() for _ in range(3)] for _ in range(2)]
        assert [len(batch) for batch in passes[0]] == [5, 5, 2]
        assert all(sorted(key for batch in batches for key in batch) == list(range(12)) for batches in passes)
        assert passes[0] != passes[1]

    @pytest.mark.filterwarnings("ignore:iterator 'main' fetches")
    @pytest.mark.parametrize(
        "make",
        [
            lambda: LoaderIterator(Shards()),
            lambda: LoaderIterator(Shards(endless=True), epoch_length=4),
            lambda: LoaderIterator(DataLoader(Shards(), batch_size=None)),
            lambda: LoaderIterator(DataLoader(Shards(), batch_size=None, num_workers=1)),
        ],
        ids=["bare", "endless", "DataLoader", "a worker"],
    )
    def test_it_resumes_after_every_batch(self, make):
        """What it draws is a function of the seed, the pass and the batch, so skipping leads to the same place."""
        assert_resumes_after_every_batch(make, number=7)

    def test_what_is_skipped_is_said(self):
        """With the number of batches."""
        iterator = LoaderIterator(Shards(endless=True), epoch_length=4)
        taken(iterator, 6)
        (again := LoaderIterator(Shards(endless=True), epoch_length=4)).load_state_dict(iterator.state_dict())
        with pytest.warns(UserWarning, match="fetches 2 batches again and skips them.*Shards has no state_dict"):
            taken(again, 1)

    def test_no_generator_is_disturbed(self):
        """However often it shuffles."""
        before = random.getstate(), torch.get_rng_state().tolist()
        taken(LoaderIterator(Shards()), 7)
        assert (random.getstate(), torch.get_rng_state().tolist()) == before
