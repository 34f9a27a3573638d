"""What a batch is, whatever its form: how many examples it has, and which of them are a rank's share.

A new form is a line of `FORMS`, of `REFUSED_SHARES` or of `UNCOUNTED`.
"""

import dataclasses
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, default_collate

from chainring.converters import to_device
from chainring.iterators import Batch, FunctionIterator, Iterator, LoaderIterator
from chainring.training import StandardUpdater, extensions
from chainring.training.updaters import ParallelUpdater

CHANNELS = 3


def example_of(index):
    """An image of three channels, and a target of any number of boxes."""
    boxes = torch.full((index % 4, 4), float(index))
    return torch.full((CHANNELS, 2, 2), float(index)), {"boxes": boxes, "label": torch.tensor(index)}


def stack(images):
    return torch.stack(tuple(images))


@dataclasses.dataclass
class Detection:
    images: object
    targets: object
    scale: float = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    images: object
    weight: object  # of which Batch has an attribute of that name


class OnlyItems:
    def __init__(self, **values):
        self.values = values

    def items(self):
        return self.values.items()


class Table:
    """Rows that are taken by number, as those of a table or of a tensor of another library."""

    def __init__(self, rows):
        self.rows = np.asarray(rows)

    shape = property(lambda self: self.rows.shape)
    ndim = property(lambda self: self.rows.ndim)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return Table(self.rows[index])


Pair = namedtuple("Pair", ["images", "targets"])


def columns_of(examples):
    images, targets = zip(*examples, strict=True)
    return images, targets


def collate(make):
    return lambda examples: make(*columns_of(examples))


# A function of a loader by which examples become a batch, and one that returns the images of a batch.
FORMS = {
    "tuple(zip(*examples))": (lambda examples: tuple(zip(*examples, strict=True)), lambda batch: batch[0]),
    "lists in a list": (collate(lambda x, t: [list(x), list(t)]), lambda batch: batch[0]),
    "a dict of lists": (collate(lambda x, t: {"x": list(x), "t": list(t)}), lambda batch: batch["x"]),
    "a dict of tuples with numbers": (
        collate(lambda x, t: {"x": x, "t": tuple(int(of["label"]) for of in t)}),
        lambda batch: batch["x"],
    ),
    "images and tensors of numbers": (collate(lambda x, t: (x, tuple(of["label"] for of in t))), lambda batch: batch[0]),
    "images alone": (collate(lambda x, t: x), lambda batch: batch),
    "a list of images": (collate(lambda x, t: list(x)), lambda batch: batch),
    "a list of mappings": (lambda examples: [{"x": x, **t} for x, t in examples], lambda batch: [of["x"] for of in batch]),
    "a list of named tuples": (lambda examples: [Pair(x, t) for x, t in examples], lambda batch: [of[0] for of in batch]),
    "a named tuple of lists": (collate(lambda x, t: Pair(list(x), list(t))), lambda batch: batch.images),
    "a dataclass of lists": (collate(lambda x, t: Detection(list(x), list(t))), lambda batch: batch.images),
    "a dataclass of tensors": (collate(lambda x, t: Detection(stack(x), None)), lambda batch: batch.images),
    "a frozen dataclass": (collate(lambda x, t: Frozen(stack(x), stack(x))), lambda batch: batch.images),
    "a mapping of dataclasses": (collate(lambda x, t: {"d": Detection(stack(x), t)}), lambda batch: batch["d"].images),
    "a class with items()": (
        collate(lambda x, t: OnlyItems(x=stack(x), t=list(t))),
        lambda batch: dict(batch.items())["x"],
    ),
    "a UserDict": (collate(lambda x, t: UserDict(x=stack(x), t=list(t))), lambda batch: batch["x"]),
    "a tensor and a list of boxes": (
        collate(lambda x, t: (stack(x), [of["boxes"] for of in t])),
        lambda batch: batch[0],
    ),
    "a tensor and names": (collate(lambda x, t: (stack(x), [str(of["label"]) for of in t])), lambda batch: batch[0]),
    "names alone": (collate(lambda x, t: [str(int(of["label"])) for of in t]), lambda batch: batch),
    "a tensor and what all share": (collate(lambda x, t: (stack(x), 0.5, "train", None)), lambda batch: batch[0]),
    "nested columns": (collate(lambda x, t: [[stack(x), stack(x)], stack(x)]), lambda batch: batch[0][1]),
    "tensors in a list": (collate(lambda x, t: [stack(x), stack(x)]), lambda batch: batch[1]),
    "an array": (collate(lambda x, t: stack(x).numpy()), torch.as_tensor),
    "rows of another class": (
        collate(lambda x, t: (Table([float(of["label"]) for of in t]), list(x))),
        lambda batch: batch[0].rows,
    ),
    "stacked by a function of one's own": (lambda examples: default_collate([x for x, _ in examples]), lambda batch: batch),
    "a Batch of columns": (
        lambda examples: Batch(columns=(list(columns_of(examples)[0]), 1), length=len(examples)),
        lambda batch: batch[0],
    ),
    "a Batch of examples": (Batch, lambda batch: [of[0] for of in batch]),
}
SIZES = [7, CHANNELS, 2]


def numbers_of(images):
    return [float(image[0, 0, 0] if getattr(image, "ndim", 0) == 3 else image) for image in images]


def batches_of(collate_fn, share=None, size=None, indices=None):
    """The batches of a loader: of 7 examples, and a last one of as many as there are channels, or columns."""
    for last in SIZES[1:] if size is None else [None]:
        data = [example_of(index) for index in (range(7 + last) if size is None else range(size))]
        iterator = LoaderIterator(DataLoader(data, 7 if size is None else size, collate_fn=collate_fn), repeat=False)
        if share is not None:
            iterator.share(*share)
        yield from iterator


def content_of(batch):
    return [*batch] if batch.columns is None else batch.columns


@pytest.mark.parametrize(("collate_fn", "images_of"), FORMS.values(), ids=FORMS)
def test_a_batch_has_as_many_examples_as_were_collated(collate_fn, images_of):
    """Also where an image has as many channels, or the batch as many columns."""
    assert [len(batch) for batch in batches_of(collate_fn)] == [7, CHANNELS, 7, 2]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("collate_fn", "images_of"), FORMS.values(), ids=FORMS)
def test_ranks_share_the_examples_of_a_batch(collate_fn, images_of, rank):
    """Rank r has every second one from r on, whole, and in the form of the batch."""
    for whole, share in zip(batches_of(collate_fn), batches_of(collate_fn, (rank, 2)), strict=True):
        every = numbers_of(images_of(content_of(whole)))
        assert numbers_of(images_of(content_of(share))) == every[rank::2]
        assert len(share) == share.weight == len(every[rank::2])
        assert type(content_of(share)) is type(content_of(whole)) or isinstance(content_of(share), dict)


class Mean(nn.Module):
    """Its loss is the mean of the numbers of the images, times a parameter of 1."""

    def __init__(self, images_of, weight=None):
        super().__init__()
        self.factor, self.images_of, self.weight = nn.Parameter(torch.ones(())), images_of, weight

    def forward(self, batch):
        loss = self.factor * torch.tensor(numbers_of(self.images_of(batch))).mean()
        return loss if self.weight is None else {"loss": loss, "weight": self.weight}


def converter(batch, device):
    return [to_device(device, content_of(batch) if isinstance(batch, Batch) else batch)]


def converted(batch, device):
    return (converter(batch, device)[0],)


def updater_of(source, model, kind=StandardUpdater, **settings):
    return kind(source, torch.optim.SGD(model.parameters(), lr=0.0), model, converter=converted, **settings)


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"accumulate": 2, "virtual_ranks": 2}], ids=["plain", "virtual"])
@pytest.mark.parametrize(("collate_fn", "images_of"), FORMS.values(), ids=FORMS)
def test_micro_batches_and_virtual_ranks_are_weighed_by_examples(collate_fn, images_of, settings):
    """Of 7 examples and then 3, whose mean is that of all."""
    model = Mean(images_of)
    loader = DataLoader([example_of(index) for index in range(10)], 7, collate_fn=collate_fn)
    updater = updater_of(loader, model, **settings)
    updater.start()
    updater.update()
    assert model.factor.grad.item() == pytest.approx(4.5)
    assert float(updater.weight) == 10


@pytest.mark.parametrize("virtual_ranks", [None, 3], ids=["plain", "virtual"])
@pytest.mark.parametrize(("collate_fn", "images_of"), FORMS.values(), ids=FORMS)
def test_an_evaluation_is_a_mean_over_examples(collate_fn, images_of, virtual_ranks):
    """Whatever the sizes of its batches."""
    loader = DataLoader([example_of(index) for index in range(10)], 7, collate_fn=collate_fn)
    evaluator = extensions.Evaluator(loader, Mean(images_of), converted, virtual_ranks=virtual_ranks)
    assert evaluator.evaluate()["main/loss"] == pytest.approx(4.5)


@pytest.mark.parametrize("form", ["tuple(zip(*examples))", "a dataclass of tensors", "a dict of lists", "a list of images"])
def test_replicas_share_the_examples_of_a_batch(form):
    """As ranks do."""
    collate_fn, images_of = FORMS[form]
    loader = DataLoader([example_of(index) for index in range(7)], 7, collate_fn=collate_fn)
    model = Mean(images_of)
    updater = updater_of(loader, model, ParallelUpdater, devices={"main": "cpu", "second": "cpu"})
    updater.update()
    assert (updater.weight, model.factor.grad.item()) == (7, pytest.approx(3))


class Graphs:
    """Graphs in one, as torch_geometric and DGL make them: rows are nodes."""

    def __init__(self, examples):
        self.num_graphs = len(examples)
        self.x = torch.cat([target["boxes"] for _, target in examples])
        self.batch = torch.repeat_interleave(torch.tensor([len(target["boxes"]) for _, target in examples]))

    def __len__(self):
        return self.num_graphs

    def __getitem__(self, index):
        return [*range(self.num_graphs)][index]


class Images:
    """Tensors in an object of one's own, such as images with their mask."""

    def __init__(self, examples):
        self.tensors = stack(columns_of(examples)[0])
        self.mask = self.tensors[:, 0] > 0
        self.size = len(examples)


def flat(examples):
    targets = columns_of(examples)[1]
    return torch.cat([of["boxes"] for of in targets])


# A collate_fn, and what is said where several ranks share its batches of 7.
REFUSED_SHARES = {
    "graphs": (Graphs, "the batch is a Graphs"),
    "graphs and labels": (lambda examples: (Graphs(examples), torch.arange(7)), r"\[0\] of the batch is a Graphs"),
    "an object of one's own": (Images, "the batch is a Images"),
    "a packed sequence": (
        lambda examples: pack_sequence([x.flatten() for x, _ in examples]),
        "the batch is a PackedSequence",
    ),
    "flat targets": (
        lambda examples: Batch(columns=(stack(columns_of(examples)[0]), flat(examples)), length=len(examples)),
        r"\[1\] of the batch has 9 rows",
    ),
    "a list of another length": (
        collate(lambda x, t: {"x": stack(x), "classes": ["cat", "dog"]}),
        r"\['classes'\] of the batch has 2 items",
    ),
    "features of several sizes": (
        collate(lambda x, t: {"x": stack(x), "features": [torch.ones(28), torch.ones(14)]}),
        r"\['features'\] of the batch has 2 items",
    ),
}
REMEDY = r"; return a tuple, mapping or dataclass of arrays with 7 rows, or let the loader return the examples, DataLoader\("


@pytest.mark.parametrize(("collate_fn", "said"), REFUSED_SHARES.values(), ids=REFUSED_SHARES)
def test_what_cannot_be_cut_into_examples_is_counted_and_not_shared(collate_fn, said):
    """One process takes it whole. The error has the remedy."""
    (whole,) = batches_of(collate_fn, size=7)
    assert len(whole) == whole.weight == 7
    with pytest.raises(ValueError, match=said + ".*" + REMEDY):
        [*batches_of(collate_fn, (0, 2), size=7)]


@pytest.mark.parametrize(("form", "size"), [("tuple(zip(*examples))", CHANNELS), ("nested columns", 2)])
def test_a_first_batch_that_could_be_cut_in_two_ways_is_not_shared(form, size):
    """An image has as many rows as there are images, or there are as many columns as rows: neither is guessed."""
    collate_fn, _ = FORMS[form]
    with pytest.raises(ValueError, match=f"has {size} items of {size} rows, either of which could be the examples"):
        [*batches_of(collate_fn, (0, 2), size=size)]


def test_examples_are_shared_by_the_remedy_of_the_error():
    """The converter makes the graphs of each share."""
    share = next(iter(batches_of(Batch, (1, 2), size=7)))
    assert Graphs([*share]).num_graphs == 3


class Raw(Iterator):
    """An iterator of one's own, which returns a batch as it is given."""

    batch_size = 4

    def __init__(self, batch):
        self.batch = batch

    def __next__(self):
        return self.batch


SOURCES = {
    "an own iterator": Raw,
    "a list of batches": lambda batch: [batch],
    "a function": lambda batch: FunctionIterator(lambda index: batch),
}


class Opaque:
    pass


class TwoMinds:
    """Has six rows, and the length of what it consists of."""

    def __init__(self):
        self.x = self.y = torch.ones(6)

    def __len__(self):
        return 2


IMAGES = tuple(example_of(index)[0] for index in range(4))
BOXES = tuple(torch.ones(1 + index, 4) for index in range(4))
# Structures of four examples that any source returns, of which nothing else is known, and the number that they have.
KNOWN = {
    "images and boxes": ((IMAGES, BOXES), 4),
    "images and numbers": ((IMAGES, (5, 1, 2, 7)), 4),
    "a dataclass of tensors": (Detection(stack(IMAGES), None), 4),
    "a dataclass of lists": (Detection([*IMAGES], [*BOXES]), 4),
    "a tensor beside nested columns": (([stack(IMAGES)] * 2, stack(IMAGES)), 4),
    "two tensors": ((torch.ones(4, 2), torch.ones(4)), 4),
    "arrays of another library": ((Table(range(4)), Table(range(4))), 4),
    "an object of one's own": (Images([example_of(index) for index in range(4)]), 4),
    "an object of one's own in a tuple": ((Images([example_of(index) for index in range(4)]), None), 4),
    "a tensor beside an object that is no array": ((stack(IMAGES), TwoMinds()), 4),
    "lists of names": ({"x": ["a", "b", "c", "d"], "y": ["e", "f", "g", "h"]}, 4),
}
UNCOUNTED = {
    "images alone": ((IMAGES, IMAGES), "a sequence of 4 with arrays of 3 rows"),
    "patches and ids": ((torch.ones(24, 2), torch.ones(6)), "arrays of 24 and 6 rows"),
    "sequences of two lengths": ({"x": [*BOXES], "y": [*BOXES[:2]]}, "a sequence of 4 .*, a sequence of 2"),
    "an object without a number": (Opaque(), "a Opaque, which has no array and no length"),
    "an object of two minds": (TwoMinds(), "arrays of 6 and 2 rows"),
}


def weighed(source, weight=None):
    updater = updater_of(source, Mean(lambda batch: [1.0], weight))
    updater.update()
    return updater.weight


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize(("batch", "number"), KNOWN.values(), ids=KNOWN)
def test_the_examples_of_a_structure_are_counted_where_it_has_one_reading(batch, number, source):
    """From an iterator of one's own as from a loader."""
    assert weighed(source(batch)) == number


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize(("batch", "said"), UNCOUNTED.values(), ids=UNCOUNTED)
def test_a_structure_with_two_readings_or_none_is_refused_where_its_number_is_needed(batch, said, source):
    """The remedies are in the error, and a weight beside the loss is one."""
    with pytest.raises(ValueError, match=said + '.*let the model return a "weight" beside "loss"'):
        weighed(source(batch))
    assert weighed(source(batch), weight=5) == 5


def test_a_tuple_of_examples_is_shared_by_virtual_ranks():
    """And each does not have all of them."""
    updater = updater_of(Raw((0.0, 1.0, 2.0, 3.0)), Mean(lambda batch: batch), virtual_ranks=2)
    updater.start()
    updater.update()
    assert float(updater.weight) == 4


class Loader:
    """A loader of another library, with a batch size."""

    def __init__(self, batch_size, *batches):
        self.batch_size, self.batches = batch_size, batches

    def __iter__(self):
        return iter(self.batches)


def test_the_batch_size_of_a_loader_decides_between_two_readings_and_the_last_batch_follows():
    """Of four images at first, and at the end of two."""
    loader = Loader(4, (IMAGES, IMAGES), (IMAGES[:2], IMAGES[:2]))
    assert [len(batch) for batch in LoaderIterator(loader, repeat=False)] == [4, 2]


def test_a_last_batch_of_as_many_tensors_as_the_batch_size_follows_the_first():
    """Two tensors of two rows at first, and at the end of one."""
    loader = Loader(2, (torch.ones(2, 3), torch.ones(2, 1)), (torch.ones(1, 3), torch.ones(1, 1)))
    assert [len(batch) for batch in LoaderIterator(loader, repeat=False)] == [2, 1]
    data = [(torch.ones(3), torch.ones(1))] * 3
    assert [len(batch) for batch in LoaderIterator(DataLoader(data, 2), repeat=False)] == [2, 1]


def test_a_batch_size_that_contradicts_the_rows_is_refused():
    """Four images in a tuple have three rows each, and the loader says that a batch is of four."""
    with pytest.raises(ValueError, match="from a loader with batch_size=4"):
        weighed(Loader(4, IMAGES))


def test_workers_say_how_many_examples_they_have_collated():
    """As the process itself does."""
    data = [example_of(index) for index in range(10)]
    loader = DataLoader(data, 7, collate_fn=columns_of, num_workers=1)
    assert [len(batch) for batch in LoaderIterator(loader, repeat=False)] == [7, 3]
    assert loader.collate_fn is columns_of
