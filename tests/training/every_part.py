"""Every public part in a training of its own: the table that the resume tests go through.

A key is the name of the part; behind a colon stands what is peculiar about this use of it. A value are settings of
`interrupted.Made`, or a function of a folder that returns them.
"""

import functools
import itertools
import zipfile

import numpy as np
import torch
from every_extension import EXTENSIONS, OFTEN, TRIGGERS, alone, firing, labels, points
from interrupted import BATCH, letters, loss_of
from torch.utils.data import DataLoader, TensorDataset

from chainring import datasets, iterators, report, training
from chainring.converters import concat_examples
from resume_program import Net, Noisy


class Plain(training.Updater):
    """An updater of one's own, with state of its own."""

    def __init__(self, iterator, optimizer, net):
        self.iterator, self.optimizer, self.net, self.norm = iterator, optimizer, net, 0.0

    def get_iterator(self, name):
        return {"main": self.iterator}[name]

    def get_model(self, name):
        return {"main": self.net}[name]

    def get_optimizer(self, name):
        return {"main": self.optimizer}[name]

    def update_core(self):
        x, t = zip(*next(self.iterator), strict=True)
        self.optimizer.zero_grad()
        loss = self.net(torch.stack(x), torch.tensor(t)) * (1 + self.norm / 100)
        loss.backward()
        self.norm = 0.5 * self.norm + float(loss.detach())
        self.optimizer.step()

    def serialize(self, serializer):
        super().serialize(serializer)
        self.norm = serializer("norm", self.norm)


class Two(training.StandardUpdater):
    """Two models, two optimizers, two iterators; the second model learns what the first has learned."""

    def __init__(self, iterator, optimizer, net, **settings):
        other = Net()
        super().__init__(
            {"main": iterator, "other": iterators.SerialIterator(Noisy(), BATCH)},
            {"main": optimizer, "other": torch.optim.Adam(other.parameters())},
            {"main": net, "other": other},
            **settings,
        )

    def update_core(self):
        for name in ("main", "other"):
            with self.autocast():
                loss = self.get_model(name)(*self.next_batch(name))
            self.backward(loss)
            self.step(name)


def in_replicas(iterator, optimizer, net, **settings):
    return training.ParallelUpdater(iterator, optimizer, net, devices={"main": "cpu", "second": "cpu"}, **settings)


class Counting(training.Extension):
    """An extension of one's own, with state of its own."""

    def __init__(self):
        self.total = 0.0

    def __call__(self, trainer):
        self.total += float(trainer.observation["main/loss"])
        report({"total": self.total})

    def serialize(self, serializer):
        self.total = serializer("total", self.total)


def clipped(clip):
    """A callback with the context as its only argument, in an update of two parts."""
    return {"accumulate": 2, "callbacks": training.UpdateCallbacks(update_on_start=clip)}


TRAINING = {
    "Extension": alone(Counting),
    "ParallelUpdater": {"update": in_replicas},
    "StandardUpdater": {},
    "StandardUpdater: accumulate": {"accumulate": 3},
    "StandardUpdater: bf16": {"precision": "bf16"},
    "StandardUpdater: fp16": {"precision": "fp16"},
    "StandardUpdater: fp16 accumulate": {"precision": "fp16", "accumulate": 2},
    "StandardUpdater: two models": {"update": Two},
    "StandardUpdater: two models in parts": {"update": Two, "accumulate": 2, "precision": "bf16"},
    "StandardUpdater: virtual ranks": {"virtual_ranks": 3, "accumulate": 2},
    "StandardUpdater: virtual ranks of two models": {"update": Two, "virtual_ranks": 3},
    "Trainer": {},
    "UpdateCallbacks": {"callbacks": training.UpdateCallbacks(backward_on_finish=lambda c: report({"part": c.micro_step}))},
    "UpdateContext": clipped(lambda context: report({"at": context.iteration, "of": float(context.loss.detach())})),
    "Updater": {"update": Plain},
    "clip_grad_norm": clipped(training.clip_grad_norm(0.1)),
    "clip_grad_value": clipped(training.clip_grad_value(0.01)),
    "get_trigger": firing(lambda: training.get_trigger((0.7, "epoch"))),
    "make_extension": alone(lambda: training.make_extension(OFTEN)(lambda trainer: report({"drawn": torch.rand(())}))),
}


def batches():
    """A function that returns a fresh iterable, which is a loader too."""
    return iter(zip(torch.from_numpy(points()).split(5), torch.from_numpy(labels()).split(5), strict=True))


def loaded(data):
    return DataLoader(TensorDataset(torch.from_numpy(points()), torch.from_numpy(labels())), 8, shuffle=True)


def drawn(index):
    x = torch.rand(BATCH, 4) + index
    return x, (x.sum(1) * 10).long() % 3


def of_rows(batch, device):
    """Inputs of the network, and labels, of packed rows."""
    columns = concat_examples(batch, device)
    return columns["input_ids"].float(), columns["document_ids"].amax(1) % 3


ITERATORS = {
    "FunctionIterator": {"iterate": lambda data: iterators.FunctionIterator(drawn, 4)},
    "Iterator": {"iterate": lambda data: EndlessDigits()},
    "LoaderIterator": {"iterate": lambda data: iterators.LoaderIterator(batches)},
    "LoaderIterator: an epoch of another length": {
        "iterate": lambda data: iterators.LoaderIterator(batches, epoch_length=3)
    },
    "MixtureIterator": {
        "iterate": lambda data: iterators.MixtureIterator(
            {"first": data, "second": Noisy()}, BATCH, weights=lambda count: {"first": 1 + count / 9, "second": 2}
        )
    },
    "PackingIterator": {
        "iterate": lambda data: iterators.PackingIterator([np.arange(1 + n) for n in range(7)], 4, BATCH, separator=9),
        "converter": of_rows,
    },
    "MultiprocessIterator": {"iterate": lambda data: iterators.MultiprocessIterator(data, BATCH, n_processes=2)},
    "SerialIterator": {"iterate": lambda data: iterators.SerialIterator(data, BATCH, seed=3)},
    "SerialIterator: no generators": {"iterate": lambda data: iterators.SerialIterator(data, BATCH, example_rng=False)},
    "as_iterator": {"iterate": lambda data: iterators.as_iterator(loaded(data))},
}


class EndlessDigits(iterators.Iterator):
    """An iterator of one's own: points that nobody has seen before."""

    batch_size = BATCH

    def __init__(self):
        self.number = 0

    def __next__(self):
        self.number += 1
        x = torch.full((BATCH, 4), self.number / 10)
        return iterators.Batch(columns=(x, torch.arange(BATCH) % 3), length=BATCH)

    def serialize(self, serializer):
        self.number = serializer("number", self.number)


def sampled(make):
    return {"iterate": lambda data: iterators.SerialIterator(data, BATCH, order_sampler=make(len(data)))}


SAMPLERS = {
    "Batch": {"update": Plain},  # whose examples are taken one by one
    "BucketOrderSampler": sampled(lambda n: iterators.BucketOrderSampler(np.arange(n) % 5, BATCH, pool=2)),
    "NoRepeatOrderSampler": sampled(lambda n: iterators.NoRepeatOrderSampler(BATCH)),
    "TokenOrderSampler": sampled(lambda n: iterators.TokenOrderSampler(np.arange(n) % 5 + 1, 12)),
    "WeightedOrderSampler": sampled(lambda n: iterators.WeightedOrderSampler(np.arange(n) + 1)),
    "epoch_order": sampled(lambda n: iterators.epoch_order),
}


def of(make, **settings):
    """A training on a dataset; its examples may have any form."""
    return {"data": make, "loss_func": loss_of, **settings}


def pairs(n=20):
    return datasets.TupleDataset(points(n), labels(n))


@functools.cache
def digits():
    return datasets.get_digits()[1]


def images(folder):
    """The names of twenty files of 2 x 2 grey pixels."""
    from PIL import Image

    names = [f"{number}.png" for number in range(20)]
    for number, name in enumerate(names):
        Image.fromarray(np.arange(number, number + 4, dtype=np.uint8).reshape(2, 2)).save(folder / name)
    return names


def lines(folder):
    path = folder / "lines.txt"
    path.write_text("".join(f"{''.join(word)}\n" for word in itertools.islice(itertools.permutations("abcde", 4), 20)))
    return path


def text(folder):
    path = lines(folder)
    return of(lambda: datasets.TextDataset([path, path]), converter=letters)


def labeled(folder):
    names = images(folder)
    return of(lambda: datasets.LabeledImageDataset(list(zip(names, range(20), strict=True)), folder))


def pictures(folder):
    names = images(folder)
    return of(lambda: datasets.ImageDataset(names, folder))


def zipped(folder):
    names = images(folder)
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for name in names:
            archive.write(folder / name, name)
    (folder / "labels.txt").write_text("".join(f"{name} {number}\n" for number, name in enumerate(names)))
    return folder / "images.zip"


def zipped_pictures(folder):
    archive = zipped(folder)
    return of(lambda: datasets.ZippedImageDataset(archive))


def zipped_labeled(folder):
    archive = zipped(folder)
    return of(lambda: datasets.LabeledZippedImageDataset(archive, folder / "labels.txt"))


DATASETS = {
    "ConcatenatedDataset": of(lambda: datasets.ConcatenatedDataset(pairs(7), pairs(13))),
    "DatasetMixin": {"data": Noisy},
    "DictDataset": of(lambda: datasets.DictDataset(x=points(), t=labels())),
    "ImageDataset": pictures,
    "LabeledImageDataset": labeled,
    "LabeledZippedImageDataset": zipped_labeled,
    "ZippedImageDataset": zipped_pictures,
    "SubDataset": of(lambda: datasets.SubDataset(pairs(), 2, 17)),
    "TextDataset": text,
    "TransformDataset": of(
        lambda: datasets.TransformDataset(pairs(), lambda pair: (pair[0] + torch.rand(4).numpy(), pair[1]))
    ),
    "TupleDataset": of(pairs),
    "get_cross_validation_datasets": of(lambda: datasets.get_cross_validation_datasets(pairs(), 4)[1][0]),
    "get_cross_validation_datasets_random": of(lambda: datasets.get_cross_validation_datasets_random(pairs(), 4, 1)[1][0]),
    "get_digits": of(digits),
    "split_dataset": of(lambda: datasets.split_dataset(pairs(), 13)[0]),
    "split_dataset_n": of(lambda: datasets.split_dataset_n(pairs(), 2)[1]),
    "split_dataset_n_random": of(lambda: datasets.split_dataset_n_random(pairs(), 2, 5)[1]),
    "split_dataset_random": of(lambda: datasets.split_dataset_random(pairs(), 13, 5)[0]),
}

PARTS = {
    "chainring.training": TRAINING,
    "chainring.training.extensions": EXTENSIONS,
    "chainring.training.triggers": TRIGGERS,
    "chainring.iterators": {**ITERATORS, **SAMPLERS},
    "chainring.datasets": DATASETS,
}

APART = {
    "CIFAR10", "CIFAR100", "FASHION_MNIST", "MNIST", "RemoteFiles", "get_cifar10", "get_cifar100", "get_fashion_mnist",
    "get_mnist",  # a TupleDataset, once it is downloaded
    "CorruptionError", "Interrupted", "NonNumberError", "RollBack",  # end a run
    "PRIORITY_EDITOR", "PRIORITY_READER", "PRIORITY_WRITER",  # numbers
    "find_learning_rate", "LearningRates", "predict",  # before it, and after it
}  # fmt: skip
