"""Snapshots, resumes, and objects saved by Chainer."""

import os
import re

import numpy as np
from either import (
    IS_CHAINER,
    Line,
    exchange,
    extensions,
    iterators,
    make_trainer,
    make_updater,
    points,
    rows,
    serializers,
    sgd,
    to_list,
    training,
)


def snapshot_names():
    """`snapshot(n_retains=2)` and `snapshot_object`: the names in `out`."""
    trainer, model = make_trainer((5, "epoch"))
    trainer.extend(extensions.snapshot(n_retains=2), trigger=(1, "epoch"))
    trainer.extend(extensions.snapshot_object(model, "model_{.updater.iteration}"), trigger=(5, "iteration"))
    trainer.extend(extensions.snapshot(filename="epoch_{.updater.epoch}"), trigger=(2, "epoch"), name="other")
    trainer.run()
    return sorted(name for name in os.listdir(trainer.out) if re.fullmatch(r"(snapshot_iter|model|epoch)_\d+", name))


def _run(stop, out):
    trainer, model = make_trainer(stop, out=out)
    trainer.extend(extensions.snapshot(autoload=True), trigger=(1, "iteration"))
    trainer.extend(extensions.LogReport())
    trainer.run()
    return [trainer.updater.iteration, trainer.updater.epoch_detail, rows(trainer), to_list(model.w)]


def autoload():
    """`snapshot(autoload=True)`: a run of 4 iterations and one that continues it to 10."""
    return [_run((4, "iteration"), "result"), _run((10, "iteration"), "result")]


def load_trainer():
    """`load_npz("result/snapshot_iter_3", trainer)`, here `serializers.load`, before `run`."""
    trainer, _ = make_trainer((3, "iteration"), out="result")
    trainer.extend(extensions.snapshot(), trigger=(3, "iteration"))
    trainer.run()
    trainer, model = make_trainer((8, "iteration"), out="again")
    load = serializers.load_npz if IS_CHAINER else serializers.load
    load("result/snapshot_iter_3", trainer)
    at = [trainer.updater.iteration, trainer.updater.epoch]
    trainer.run()
    return [at, trainer.updater.iteration, to_list(model.w)]


class _Counter(training.Extension):
    """An extension with state: a number, assigned, and an array, filled in place without an assignment."""

    def __init__(self):
        self.number, self.array = 0, np.zeros(3)

    def __call__(self, trainer):
        self.number += 1
        self.array += self.number

    def serialize(self, serializer):
        self.number = int(serializer("number", self.number))
        serializer("array", self.array)


def extension_with_state():
    """`serialize` of an extension of one's own: assigned, and an array filled without an assignment."""
    seen = []
    for stop in (4, 6):
        trainer, _ = make_trainer((stop, "iteration"), out="result")
        counter = _Counter()
        trainer.extend(counter)
        trainer.extend(extensions.snapshot(autoload=True), trigger=(2, "iteration"))
        trainer.run()
        seen.append([counter.number, counter.array.tolist()])
    return seen


class _Keeper(Line):
    """A model with state of its own."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def serialize(self, serializer):
        if IS_CHAINER:
            super().serialize(serializer)
        self.seen = int(serializer("seen", self.seen))


def model_with_state():
    """A model with a `serialize` of its own: `save_npz` and `load_npz` keep its number and its parameters."""
    model, other = _Keeper(), _Keeper()
    model.seen = 7
    weights = np.array([[3.0], [4.0]], np.float32)
    if IS_CHAINER:
        model.w.array[...] = weights
    else:
        import torch

        model.load_state_dict({"w": torch.from_numpy(weights)})
    serializers.save_npz("model.npz", model)
    serializers.load_npz("model.npz", other)
    return [other.seen, to_list(other.w)]


class _Object:
    """An object with state of many types."""

    def __init__(self, *values):
        self.values = values

    def serialize(self, serializer):
        names = ("int", "float", "bool", "none", "array", "large")
        self.values = [serializer(name, value) for name, value in zip(names, self.values, strict=True)]
        self.inner = serializer["inner"]("depth", getattr(self, "inner", 2))


def object_saved_by_chainer():
    """`load_npz(file, obj)` of an object that Chainer saved: the values, in the types that the object declares."""
    path = exchange / "object.npz"
    values = [5, 0.25, True, None, np.arange(3.0), 2**40]
    if IS_CHAINER:
        serializers.save_npz(path, _Object(*values))
    loaded = _Object(0, 0.0, False, None, np.zeros(3), 0)
    loaded.inner = 0
    serializers.load_npz(path, loaded)
    *numbers, array, large = loaded.values
    types = [] if IS_CHAINER else [type(value).__name__ for value in (*numbers, large)]
    assert types in ([], ["int", "float", "bool", "NoneType", "int"]), types
    return [*numbers, array.tolist(), large, loaded.inner]


def part_of_a_file():
    """`load_npz(path=)` of one part, `strict=False`, and `ignore_names`."""

    class Pair:
        def __init__(self, a, b):
            self.a, self.b = a, b

        def serialize(self, serializer):
            self.a = int(serializer["x"]("a", self.a))
            self.b = int(serializer["y"]("b", self.b))

    class One:
        a = 0

        def serialize(self, serializer):
            self.a = int(serializer("a", self.a))

    serializers.save_npz("pair.npz", Pair(1, 2))
    one, ignored = One(), Pair(0, 0)
    serializers.load_npz("pair.npz", one, path="x/")
    serializers.load_npz("pair.npz", ignored, ignore_names=["y/b"])
    return [one.a, ignored.a, ignored.b]


def resumed_at_its_end():
    """A run of 6 iterations that is started again without another stop trigger does nothing more."""
    return [_run((6, "iteration"), "result")[0], _run((6, "iteration"), "result")[0]]


def evaluation_iterator():
    """The iterator of an `Evaluator` begins again at each evaluation, also after a resume."""
    seen = []
    for stop in (2, 4):
        trainer, model = make_trainer((stop, "iteration"), out="result")
        test = iterators.SerialIterator(list(range(5)), 2, repeat=False, shuffle=False)
        evaluate = lambda x: seen.append(np.asarray(to_list(x)).tolist())  # noqa: E731
        trainer.extend(extensions.Evaluator(test, model, eval_func=evaluate), trigger=(2, "iteration"))
        trainer.extend(extensions.snapshot(autoload=True), trigger=(1, "iteration"))
        trainer.run()
    return seen


class _Outer(Line):
    """A model whose part has state of its own."""

    def __init__(self):
        super().__init__()
        if IS_CHAINER:
            with self.init_scope():
                self.part = _Keeper()
        else:
            self.part = _Keeper()


def part_with_state():
    """A part of a model with a `serialize` of its own is saved with the run, and comes back in the next."""
    seen = []
    for stop in (3, 5):
        model = _Outer()
        iterator = iterators.SerialIterator(points(), 4, shuffle=False)
        updater = make_updater(iterator, sgd(model, 0.1), model, loss_func=_loss(model))
        trainer = training.Trainer(updater, (stop, "iteration"))
        trainer.extend(extensions.snapshot(autoload=True), trigger=(1, "iteration"))
        trainer.run()
        seen.append([model.part.seen, trainer.updater.iteration])
    return seen


def _loss(model):
    def loss_func(*inputs):
        model.part.seen += 1
        return model.part(*inputs[-2:]) + model(*inputs[-2:])

    return loss_func
