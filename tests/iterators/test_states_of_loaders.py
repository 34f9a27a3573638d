"""LoaderIterator: states of other protocols, and states that do not hold what they should."""

import warnings
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from chainring import serializers
from chainring.iterators import LoaderIterator
from chainring.serializers import DictionaryDeserializer, DictionarySerializer
from chainring.training import StandardUpdater, Trainer

LENGTH = 4


class Steps:
    """An iterator that knows where it is, as Grain's do."""

    def __init__(self, length=LENGTH):
        self.length, self.at = length, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return torch.full((2,), float(self.at))

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


class WithSteps:
    """A loader that has no state, over which iterators have one."""

    def __init__(self, steps=Steps, length=LENGTH):
        self.steps, self.length = steps, length

    def __iter__(self):
        return self.steps(self.length)


class InBytes(Steps):
    """Whose state is no mapping."""

    def get_state(self):
        return str(self.at).encode()

    def set_state(self, state):
        self.at = int(state)


class InAList(Steps):
    def get_state(self):
        return [self.at, np.arange(self.at)]

    def set_state(self, state):
        self.at = state[0]
        assert len(state[1]) == self.at


@dataclass
class Rank:
    workers: list[Any]
    next_worker: int


class Flexible(dict):
    pass


class ByRank(WithSteps):
    """A loader with Megatron Energon's pair, whose state has dataclasses and a subclass of dict; it begins where it was."""

    def __init__(self, length=LENGTH):
        super().__init__(length=length)
        self.at = 0

    def __iter__(self):
        while self.at < self.length:
            self.at += 1
            yield torch.full((2,), float(self.at))
        self.at = 0

    def save_state_rank(self):
        return Rank([Flexible(at=self.at, generator=(3, torch.arange(2)))], 1)

    def restore_state_rank(self, state):
        assert [type(state), type(state.workers[0]), type(state.workers[0]["generator"])] == [Rank, Flexible, tuple]
        self.at = state.workers[0]["at"]


class Live(ByRank):
    """Whose state is what it goes on to change, in place."""

    def __init__(self, length=LENGTH):
        super().__init__(length)
        self.state = {"at": torch.tensor(0)}

    def __iter__(self):
        for batch in super().__iter__():
            self.state["at"].fill_(self.at)
            yield batch

    save_state_rank = restore_state_rank = None

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = {"at": state["at"].clone()}
        self.at = int(state["at"])


class NextPass(ByRank):
    """Which goes on, at the end of a pass, with the next at once, as litData's loader does; each has its own batches."""

    def __init__(self, length=LENGTH):
        super().__init__(length)
        self.epoch = 0

    def __iter__(self):
        if self.at == self.length:
            self.at, self.epoch = 0, self.epoch + 1
        while self.at < self.length:
            self.at += 1
            yield torch.full((2,), float(self.at + 10 * self.epoch))

    save_state_rank = restore_state_rank = None

    def __len__(self):
        return self.length

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]


class NextOfUnknownLength(NextPass):
    """Which draws numbers in each batch, those of its pass."""

    __len__ = None

    def __iter__(self):
        for batch in super().__iter__():
            yield batch + torch.rand(())


class EmptyFirst(NextPass):
    """Which gives nothing when it begins at the end of a pass, as MosaicML Streaming's does."""

    is_loaded = False

    def __iter__(self):
        if self.at == self.length and not self.is_loaded:
            self.at, self.epoch = 0, self.epoch + 1
        self.is_loaded = False
        while self.at < self.length:
            self.at += 1
            yield torch.full((2,), float(self.at + 10 * self.epoch))

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.is_loaded = True


class Drawn(ByRank):
    """Which draws the order of a pass when it begins one, and saves how far it is in that."""

    def __iter__(self):
        return self.drawn(1 + torch.randperm(self.length))

    def drawn(self, order):
        while self.at < self.length:
            self.at += 1
            yield torch.full((2,), float(order[self.at - 1]))
        self.at = 0


def firsts(iterator, number):
    return [next(iterator).columns[0].item() for _ in range(number)]


def assert_resumes(make, path, number=10):
    """Within a pass, at its end and in the next, from disk, and in the same object; nothing is fetched again."""
    whole = firsts(make(), number)
    for cut in (0, 1, 3, 4, 5, 8)[:number]:
        firsts(iterator := make(), cut)
        serializers.save(path / f"{cut}", iterator)
        state = iterator.state_dict()
        assert firsts(iterator, number - cut) == whole[cut:]
        serializers.load(path / f"{cut}", again := make())
        assert firsts(again, number - cut) == whole[cut:]
        iterator.load_state_dict(state)
        assert firsts(iterator, number - cut) == whole[cut:]


EXACT = {
    "get_state": WithSteps,
    "bytes": lambda: WithSteps(InBytes),
    "a list": lambda: WithSteps(InAList),
    "of what a function returns": lambda: lambda: Steps(),
    "save_state_rank": ByRank,
    "live": Live,
    "next pass": NextPass,
    "empty pass": EmptyFirst,
    "an order that is drawn": Drawn,
}


@pytest.mark.parametrize("epoch_length", [None, 3])
@pytest.mark.parametrize("source", EXACT.values(), ids=EXACT)
def test_a_state_of_any_protocol_is_exact_and_nothing_is_fetched_again(tmp_path, source, epoch_length):
    """Which would be a warning, and an error here."""
    assert_resumes(lambda: LoaderIterator(source(), epoch_length=epoch_length), tmp_path)


@pytest.mark.parametrize("epoch_length", [None, 3, LENGTH, 2 * LENGTH])
def test_a_loader_of_unknown_length_that_goes_on_with_the_next_pass_draws_the_numbers_of_that(tmp_path, epoch_length):
    """Whether an epoch is a pass or not: a snapshot finds that a pass has ended."""
    assert_resumes(lambda: LoaderIterator(NextOfUnknownLength(), epoch_length=epoch_length), tmp_path)


def test_an_endless_loader_with_get_state_is_not_begun_again_with_each_epoch():
    """Its pass goes on: otherwise each epoch would have the same examples."""
    iterator = LoaderIterator(WithSteps(length=100), epoch_length=3)
    assert firsts(iterator, 7) == [1, 2, 3, 4, 5, 6, 7]
    assert iterator.epoch == 2


def test_an_iterator_with_get_state_is_a_single_pass(tmp_path):
    """As it is given."""
    iterator = LoaderIterator(Steps(8), epoch_length=3)
    firsts(iterator, 4)
    serializers.save(tmp_path / "state", iterator)
    serializers.load(tmp_path / "state", again := LoaderIterator(Steps(8), epoch_length=3))
    assert firsts(again, 4) == [5, 6, 7, 8]


class TwoProtocols(NextPass):
    """Whose state_dict counts; the other pair must not be asked."""

    def get_state(self):
        raise AssertionError

    set_state = get_state


class Half(WithSteps):
    """Whose iterators tell their state, and take none."""

    class Told(Steps):
        set_state = None

    def __init__(self):
        super().__init__(self.Told)


class Asks(NextPass):
    """Whose state_dict needs to be told what is not known here."""

    def state_dict(self, num_samples_yielded):
        raise AssertionError


def test_of_two_protocols_that_of_pytorch_is_used(tmp_path):
    """Of the loader itself."""
    assert_resumes(lambda: LoaderIterator(TwoProtocols()), tmp_path)


@pytest.mark.parametrize("source", [Half, Asks])
def test_half_a_protocol_is_none(source):
    """Batches are fetched again, with the warning."""
    iterator, again = LoaderIterator(source()), LoaderIterator(source())
    firsts(iterator, 2)
    again.load_state_dict(iterator.state_dict())
    with pytest.warns(UserWarning, match="fetches 2 batches again"):
        assert firsts(again, 1) == [3]


class Forgetful(NextPass):
    """Whose state has its settings and its epoch, and no position."""

    def state_dict(self):
        return {"epoch": self.epoch, "settings": [3]}

    def load_state_dict(self, state):
        self.at, self.epoch = 0, state["epoch"]


def test_a_state_that_does_not_tell_the_position_is_not_relied_on(tmp_path):
    """It is the same after two batches as after one; what was taken is fetched again, also after the next snapshot.

    After the first batch of a pass the second is fetched to find that.
    """
    whole = firsts(LoaderIterator(Forgetful()), 10)
    for cut in (1, 2, 3, 5, 6, 7):
        firsts(iterator := LoaderIterator(Forgetful()), cut)
        for turn in range(2):
            serializers.save(tmp_path / f"{cut} {turn}", iterator)
            serializers.load(tmp_path / f"{cut} {turn}", iterator := LoaderIterator(Forgetful()))
            with pytest.warns(UserWarning, match="lacks its position: it is the same after a batch and after several"):
                assert firsts(iterator, 1) == [whole[cut]]
            cut += 1
            if cut % LENGTH == 0:
                break


class Refuses(NextPass):
    def load_state_dict(self, state):
        raise ValueError("made with another seed")


def test_a_loader_that_refuses_its_state_says_what_to_do():
    """Its own error, with a note."""
    iterator, again = LoaderIterator(Refuses()), LoaderIterator(Refuses())
    firsts(iterator, 2)
    again.load_state_dict(iterator.state_dict())
    with pytest.raises(ValueError, match="made with another seed") as caught:
        next(again)
    assert "raised by Refuses.load_state_dict" in caught.value.__notes__[0]


class Unable(NextPass):
    def state_dict(self):
        raise NotImplementedError


def test_a_loader_that_cannot_tell_its_state_says_what_to_do():
    """With its first batch, before an update; the remedy is taken."""
    with pytest.raises(NotImplementedError) as caught:
        next(LoaderIterator(Unable()))
    assert "raised by Unable.state_dict" in caught.value.__notes__[0]
    assert "LoaderIterator(lambda: loader)" in caught.value.__notes__[0]
    assert firsts(LoaderIterator(lambda: Unable()), 2) == [1, 2]


class Misses(NextPass):
    """Whose state is one batch behind."""

    def load_state_dict(self, state):
        super().load_state_dict(state | {"at": max(state["at"] - 1, 0)})


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (self.weight - x).square().mean()


def rehearsed(loader, tmp_path):
    model = Mean()
    updater = StandardUpdater(LoaderIterator(loader), torch.optim.SGD(model.parameters(), 0.01), model)
    trainer = Trainer(updater, (1, "epoch"), out=str(tmp_path))
    trainer.rehearse()
    return trainer, loader


def test_a_rehearsal_refuses_a_state_that_leads_elsewhere(tmp_path):
    """With the batch, and the remedy, which is taken."""
    with pytest.raises(ValueError, match=r"batch 3 of this pass differs.*LoaderIterator\(lambda: loader\)"):
        rehearsed(Misses(), tmp_path)
    rehearsed(lambda: iter(Misses()), tmp_path)


class Noisy(NextPass):
    """With noise from a generator that is in no state, beside the number of each example."""

    def __iter__(self):
        generator = np.random.default_rng(len(self.begun))
        self.begun.append(generator)
        for batch in super().__iter__():
            yield batch + generator.random(), batch.long()

    begun: ClassVar[list] = []


def test_a_rehearsal_refuses_a_state_that_leads_to_other_numbers(tmp_path):
    """Of the same examples, of which a resumed run is only warned."""
    model = Mean()
    updater = StandardUpdater(
        LoaderIterator(Noisy()), torch.optim.SGD(model.parameters(), 0.01), model, loss_func=lambda model, x, _: model(x)
    )
    with (
        pytest.warns(UserWarning, match="other numbers in them"),
        pytest.raises(ValueError, match="batch 1 after its own state differs"),
    ):
        Trainer(updater, (1, "epoch"), out=str(tmp_path)).rehearse()


@pytest.mark.parametrize("loader", [NextPass, EmptyFirst, WithSteps, ByRank])
def test_a_rehearsal_puts_a_loader_with_a_state_back(tmp_path, loader):
    """The run then has the batches that it would have had."""
    trainer, loader = rehearsed(loader(), tmp_path)
    iterator = trainer.updater.get_iterator("main")
    assert firsts(iterator, 6) == firsts(LoaderIterator(type(loader)()), 6)


class Drawing(IterableDataset):
    """Of a library that keeps its position in the loader; its examples draw in workers. Each pass has its own."""

    epoch = 0

    def set_epoch(self, epoch):
        pass

    def __iter__(self):
        return ((10 * self.epoch + k, float(torch.rand(()))) for k in range(6))


class KeepsEpochs(DataLoader):
    """Which counts passes by itself."""

    passes = 0

    def __iter__(self):
        self.dataset.epoch, self.passes = self.passes, self.passes + 1
        return super().__iter__()

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


def test_a_loader_whose_workers_draw_begins_its_pass_again_from_its_own_state():
    """In the third pass as in the first; its state lacks what its workers draw, so batches are fetched again."""

    def make():
        torch.manual_seed(0)
        return LoaderIterator(KeepsEpochs(Drawing(), 2, num_workers=1))

    with make() as iterator:
        whole = [[column.tolist() for column in next(iterator).columns] for _ in range(8)]
    for cut in (2, 3, 6, 7):
        with make() as iterator, make() as again, warnings.catch_warnings(action="ignore"):
            for _ in range(cut):
                next(iterator)
            again.load_state_dict(iterator.state_dict())
            assert [[column.tolist() for column in next(again).columns] for _ in range(8 - cut)] == whole[cut:]


def test_a_class_that_the_library_has_not_brought_is_not_made(tmp_path):
    """A snapshot that names others is refused, and nothing is imported."""
    firsts(iterator := LoaderIterator(ByRank()), 2)
    state = iterator.state_dict()
    state["loader"]["chainring.class"] = "subprocess:Popen"
    again = LoaderIterator(ByRank())
    again.load_state_dict(state)
    with pytest.raises(ValueError, match="resume with the version of it with which the state was saved"):
        next(again)


def test_a_dataset_whose_position_its_own_loader_counts_alone_is_warned_about():
    """As MosaicML Streaming's is."""

    class Dataset(IterableDataset):
        def __iter__(self):
            return iter(count())

        def state_dict(self, num_samples, from_beginning):
            raise AssertionError

        def load_state_dict(self, state):
            raise AssertionError

    for loader in (Dataset(), DataLoader(Dataset(), 2)):
        with pytest.warns(UserWarning, match="counted by a streaming.StreamingDataLoader alone"):
            LoaderIterator(loader)


def batches_of(iterator, number):
    return [next(iterator).columns.tolist() for _ in range(number)]


class ReadingOn(IterableDataset):
    """Begins each pass where the last one ended, as over a queue; counts in an attribute of the class or of itself."""

    position = 0

    def __iter__(self):
        while True:
            self.position += 1
            yield float(self.position)
            if self.position % 6 == 0:
                return

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Elsewhere(IterableDataset):
    """Reads on from where another object stands: an iterator, or a tensor that processes share."""

    def __init__(self, held):
        self.held = held

    def __iter__(self):
        for _ in range(6):
            yield next(self.held) if hasattr(self.held, "__next__") else self.held.add_(1).clone()


class BeginningAgain(ReadingOn):
    def __iter__(self):
        self.position = 0
        return super().__iter__()


READING_ON = {
    "a number of its own": lambda: DataLoader(ReadingOn(), 2),
    "an iterator": lambda: DataLoader(Elsewhere(count()), 2),
    "an own loader": lambda: Elsewhere(torch.zeros(2)),
    "workers that share a tensor": lambda: DataLoader(Elsewhere(torch.zeros(1).share_memory_()), 2, num_workers=1),
}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("make", READING_ON.values(), ids=READING_ON)
def test_a_stream_that_reads_on_without_a_state_is_refused_between_two_passes(make, passes):
    """Wherever its position is; a snapshot has nothing of it, and the run would begin with the first examples again."""
    first, second = LoaderIterator(make()), LoaderIterator(make())
    while first.epoch < passes:
        next(first)
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"begun twice, differs.*give the dataset state_dict\(\).*StatefulDataLoader"):
        next(second)


def test_a_rehearsal_refuses_a_stream_that_reads_on(tmp_path):
    """Before the run, which a resume would end; of one that begins again it names what would save a position."""
    for dataset in (ReadingOn(), BeginningAgain()):
        model, loader = nn.Linear(1, 1), DataLoader(dataset, 2, collate_fn=lambda rows: torch.tensor(rows)[:, None])
        optimizer = torch.optim.SGD(model.parameters())
        updater = StandardUpdater(loader, optimizer, model, loss_func=lambda model, x: model(x).mean())
        trainer = Trainer(updater, (2, "epoch"), str(tmp_path))
        if type(dataset) is ReadingOn:
            with pytest.raises(ValueError, match="begun twice, differs"):
                trainer.rehearse()
        else:
            with pytest.warns(UserWarning, match=r"dataset.position: state_dict\(\) and .* of the dataset, and torchdata's"):
                trainer.rehearse()


@pytest.mark.parametrize("taken", [2, 3, 6])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(BeginningAgain(), 2),
        lambda: DataLoader(ReadingOn(), 2, num_workers=1),
        lambda: DataLoader(BeginningAgain(), 2, collate_fn=torch.tensor),
    ],
    ids=["an own position", "a copy in a worker", "a function of the user"],
)
@pytest.mark.filterwarnings("ignore:.*fetches . batches again")
def test_a_stream_whose_passes_begin_at_the_same_place_goes_on(make, taken):
    """At every batch, the last of a pass too."""
    first, second = LoaderIterator(make()), LoaderIterator(make())
    list(islice(first, taken))
    second.load_state_dict(first.state_dict())
    assert batches_of(second, 5) == batches_of(first, 5)
    first.finalize(), second.finalize()


def test_who_does_not_mind_says_so():
    """A function returns each pass, and what it returns is not asked for a place."""
    first, second = (LoaderIterator(partial(iter, DataLoader(ReadingOn(), 2))) for _ in range(2))
    batches_of(first, 3)
    second.load_state_dict(first.state_dict())
    assert batches_of(second, 1) == [[1.0, 2.0]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata
@pytest.mark.parametrize("taken", [2, 3, 4, 6])
def test_a_loader_of_torchdata_takes_a_stream_that_reads_on_up_where_it_stood(taken):
    """Within a pass and at its end; nothing is fetched again."""
    whole, other = (LoaderIterator(StatefulDataLoader(ReadingOn(), 2)) for _ in range(2))
    batches = batches_of(whole, 12)
    cut = LoaderIterator(StatefulDataLoader(ReadingOn(), 2))
    batches_of(cut, taken)
    saved = DictionarySerializer()
    cut.serialize(saved)
    other.serialize(DictionaryDeserializer(saved.target))
    assert batches_of(other, 12 - taken) == batches[taken:]


class Late(NextPass):
    """Which counts a batch where the next one is asked for. The passes of these loaders have the same batches."""

    def __iter__(self):
        while self.at < self.length:
            yield torch.full((2,), float(self.at))
            self.at += 1
        self.at = 0


class Ahead(NextPass):
    """Which counts what it has prepared, as one does that fetches in a thread."""

    def __iter__(self):
        for number in range(self.at % self.length, self.length):
            self.at = min(number + 2, self.length)
            yield torch.full((2,), float(number))


class BeginsAnew(NextPass):
    """Which forgets at the beginning of a pass what it was given."""

    def __iter__(self):
        self.at = 0
        while self.at < self.length:
            self.at += 1
            yield torch.full((2,), float(self.at))


class InAnOrder(NextPass):
    """Whose order is drawn where a pass begins, and no part of the state."""

    def __iter__(self):
        order = torch.randperm(self.length).tolist()
        while self.at < self.length:
            self.at += 1
            yield torch.full((2,), float(order[self.at - 1]))
        self.at = 0


class Behind(Steps):
    """An iterator that tells the place before."""

    def get_state(self):
        return {"at": max(self.at - 1, 0)}


class Sized(WithSteps):
    def __len__(self):
        return self.length


class Forgotten(SequentialSampler):
    """Whose state is none, in a loader that relies on it."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


LEADING_ELSEWHERE = {
    "late": Late,
    "ahead": Ahead,
    "forgotten": BeginsAnew,
    "without the order": lambda: InAnOrder(12),
    "of the iterators": lambda: Sized(Behind),
    "of a sampler in torchdata": lambda: StatefulDataLoader([*range(8)], 2, sampler=Forgotten([*range(8)])),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata
@pytest.mark.parametrize("source", LEADING_ELSEWHERE.values(), ids=LEADING_ELSEWHERE)
@pytest.mark.parametrize("epoch_length", [None, 5])
def test_a_state_that_leads_elsewhere_is_refused_at_each_resume(source, epoch_length):
    """Before the first update, wherever the run was cut, at the end of a pass too; and as often as it is tried."""
    torch.manual_seed(0)
    for cut in range(1, 7):
        iterator, again = (LoaderIterator(source(), epoch_length=epoch_length) for _ in range(2))
        list(islice(iterator, cut))
        again.load_state_dict(iterator.state_dict())
        for _ in range(2):
            with pytest.raises(ValueError, match=r"other batches than before: .* the whole position, .*lambda: loader"):
                next(again)


@pytest.mark.parametrize("source", [Late, Ahead, BeginsAnew])
def test_without_its_state_the_same_snapshot_goes_on(source):
    """Which is the remedy that is named."""
    for cut in range(1, 7):
        iterator, again = LoaderIterator(source()), LoaderIterator(lambda: source())
        firsts(iterator, cut)
        again.load_state_dict(iterator.state_dict())
        with pytest.warns(UserWarning, match="batches again"):
            assert firsts(again, 5) == firsts(iterator, 5)


class AfterAnother(NextPass):
    """Which goes on rightly, and after a batch is elsewhere."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.length = self.at + 1


def test_a_rehearsal_tries_more_than_the_next_batch(tmp_path):
    """Which a resumed run does not."""
    with pytest.raises(ValueError, match="batch 2 after its own state differs"):
        rehearsed(AfterAnother(7), tmp_path)


@pytest.mark.parametrize("length", [None, LENGTH, LENGTH + 2])
def test_a_snapshot_changes_no_batch_and_no_epoch(length):
    """After each batch, of a loader with a state and a length, a wrong one, or none; each is fetched once."""

    class Loader(NextPass):
        fetched = 0

        def __iter__(self):
            for batch in super().__iter__():
                self.fetched += 1
                yield batch

        __len__ = None if length is None else lambda self: length

    def rows(saves):
        iterator, rows = LoaderIterator(loader := Loader()), []
        for _ in range(3 * LENGTH):
            rows.append((next(iterator).columns[0].item(), iterator.epoch, iterator.is_new_epoch))
            if saves:
                iterator.state_dict()
        return rows, loader.fetched <= 3 * LENGTH + 1

    with warnings.catch_warnings(action="ignore"):
        assert rows(saves=True) == rows(saves=False)


def test_an_evaluation_of_other_data_than_the_first_is_warned_about_once():
    """A run that is resumed would begin with those of the first; what a function makes has the same each time."""
    counting, made = LoaderIterator(NextPass(), repeat=False), LoaderIterator(lambda: NextPass(), repeat=False)
    assert len([*counting]) == len([*made]) == LENGTH
    for iterator in (counting, made):
        iterator.rewind()
    with pytest.warns(UserWarning, match=r"begins this evaluation with another batch.*LoaderIterator\(make_loader, repeat"):
        assert firsts(counting, LENGTH) == [11, 12, 13, 14]
    counting.rewind()
    assert firsts(counting, 1) == [21]
    assert firsts(made, 1) == [1]
