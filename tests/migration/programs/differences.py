"""What differs: each program returns one thing in Chainer and another here, and stands in the page."""

import os

import numpy as np
from either import (
    IS_CHAINER,
    DatasetMixin,
    Line,
    Reporter,
    as_input,
    datasets,
    extensions,
    iterators,
    make_trainer,
    make_updater,
    points,
    report,
    rows,
    serializers,
    setting,
    sgd,
    to_list,
    training,
    triggers,
)  # fmt: skip


def _refused(function):
    """The name of the error, or the result."""
    try:
        return function()
    except Exception as error:
        return type(error).__name__


def evaluation_weights():
    """An `Evaluator` over batches of 4 and 1 examples: a mean of means, or one of examples."""
    trainer, model = make_trainer((1, "iteration"))
    values = [np.array([float(i)], np.float32) for i in range(5)]
    test = iterators.SerialIterator(values, 4, repeat=False, shuffle=False)
    mean = lambda x: report({"mean": x.mean()}, model)  # noqa: E731
    evaluator = extensions.Evaluator(test, model, eval_func=mean)
    trainer.extend(evaluator, trigger=(1, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.run()
    return rows(trainer)[0]["validation/main/mean"]


def parallel_gradients():
    """`ParallelUpdater` with two devices: what one update of lr 0.1 changes, over what one device changes."""
    changes = []
    for parallel in (True, False):
        model = Line()
        iterator = iterators.SerialIterator(points(8), 8, shuffle=False)
        if not parallel:
            updater = make_updater(iterator, sgd(model, 0.1), model)
        elif IS_CHAINER:
            updater = training.updaters.ParallelUpdater(
                iterator, sgd(model, 0.1), devices={"main": "@numpy", "second": "@numpy"}
            )
        else:
            updater = training.ParallelUpdater(iterator, sgd(model, 0.1), model, devices={"main": -1, "second": -1})
        training.Trainer(updater, (1, "iteration")).run()
        changes.append(np.asarray(to_list(model.w)))
    return round(float((changes[0] / changes[1]).mean()), 4)


def stop_after_a_resume():
    """`Trainer(updater, (20, "epoch"))`, but with 3 epochs, then started again with 2: the iterations of both."""
    ends = []
    for epochs in (3, 2):
        trainer, _ = make_trainer((epochs, "epoch"), count=8, out="result")
        trainer.extend(extensions.snapshot(autoload=True), trigger=(1, "epoch"))
        trainer.run()
        ends.append(trainer.updater.iteration)
    return ends


def rate_after_autoload():
    """`snapshot(autoload=True)` in the middle of an epoch, beside a shift by the epoch: the rate of each update."""
    rates = []
    for stop in (3, 6):
        trainer, _ = make_trainer((stop, "iteration"), count=8, out="result")
        trainer.extend(extensions.ExponentialShift("lr", 0.5), trigger=(1, "epoch"))
        trainer.extend(extensions.snapshot(autoload=True), trigger=(1, "iteration"))
        look = lambda trainer: rates.append(setting(trainer.updater.get_optimizer("main"), "lr"))  # noqa: E731
        trainer.extend(look, name="look", priority=400)
        trainer.run()
    return [round(rate, 6) for rate in rates]


def plot_report_name():
    """`PlotReport(file_name=)`, and `PlotReport.available()`."""
    make = lambda: extensions.PlotReport(["a"], file_name="loss.png") and "made"  # noqa: E731
    return [_refused(make), hasattr(extensions.PlotReport, "available")]


def silent_run():
    """`run(show_loop_exception_msg=False)`."""
    trainer, _ = make_trainer((1, "iteration"))
    return _refused(lambda: trainer.run(show_loop_exception_msg=False) or "ran")


def shared_memory():
    """`MultiprocessIterator(shared_mem=, maxtasksperchild=)`."""

    def make(**settings):
        iterators.MultiprocessIterator([1, 2], 1, n_processes=1, **settings).finalize()
        return "made"

    return [_refused(lambda: make(shared_mem=1000)), _refused(lambda: make(maxtasksperchild=5))]


def batch_is_a_list():
    """`batch == [...]`, `batch + [...]`, `batch.append(...)`."""
    batch = next(iterators.SerialIterator([1, 2, 3], 2, shuffle=False))
    return [
        batch == [1, 2],
        _refused(lambda: batch.__add__([3])),
        _refused(lambda: batch.append(3) or "appended"),
        list(batch),
    ]


def device_of_a_converter():
    """`device >= 0` in a converter of one's own, with `device=-1`."""
    given = []

    def convert(batch, device):
        given.append(_refused(lambda: device >= 0) if IS_CHAINER else type(device).__name__)
        return tuple(as_input(np.stack([example[i] for example in batch])) for i in (0, 1))

    model = Line()
    iterator = iterators.SerialIterator(points(), 4, shuffle=False)
    training.Trainer(make_updater(iterator, sgd(model, 0.1), model, converter=convert, device=-1), (1, "iteration")).run()
    return given


def end_of_a_line():
    """`TextDataset`: an example, and what its filter is given."""
    with open("text", "w") as file:
        file.write("one\n\ntwo\n")
    return [datasets.TextDataset("text")[0], len(datasets.TextDataset("text", filter_func=lambda line: line)),
            _refused(lambda: datasets.TextDataset("text", errors="ignore")[0])]  # fmt: skip


def rest_of_a_split():
    """`split_dataset_n` of 11 examples into 3."""
    return [len(part) for part in datasets.split_dataset_n(list(range(11)), 3)]


def name_of_an_extension():
    """`evaluator.name` after `extend`."""
    trainer, model = make_trainer((1, "iteration"))
    evaluator = extensions.Evaluator(iterators.SerialIterator(points(), 4, repeat=False, shuffle=False), model)
    trainer.extend(evaluator, name="val")
    return [getattr(evaluator, "name", None), "val" if trainer.get_extension("val") is evaluator else None]


def evaluate_alone():
    """`evaluator.evaluate()`: without a reporter, and with one that names its target."""
    model = Line()
    evaluator = extensions.Evaluator(iterators.SerialIterator(points(), 5, repeat=False, shuffle=False), model)
    alone = _refused(lambda: sorted(evaluator.evaluate()))
    reporter = Reporter()
    reporter.add_observer("target", model)
    with reporter.scope({}):
        named = sorted(evaluator.evaluate())
    return [alone if isinstance(alone, list) else "an error", named]


def statistics():
    """`ParameterStatistics`: a list of links, `statistics=None`, `skip_nan_params`."""
    make = lambda *args, **settings: _refused(lambda: extensions.ParameterStatistics(*args, **settings) and "made")  # noqa: E731
    trainer, model = make_trainer((1, "iteration"))
    trainer.extend(extensions.ParameterStatistics(model, None, trigger=(1, "iteration")))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.run()
    keys = [key for key in rows(trainer)[0] if "/data/" in key]
    return [make([Line()]), make(Line(), skip_nan_params=True), len(keys)]


def negative_rate():
    """`PolynomialShift` with a negative rate."""
    return _refused(lambda: extensions.PolynomialShift("lr", -1, 10) and "made")


def nothing_concatenated():
    """`ConcatenatedDataset()` of nothing."""
    return _refused(lambda: len(datasets.ConcatenatedDataset()))


def patients():
    """`EarlyStoppingTrigger(patients=5)`."""
    return _refused(lambda: triggers.EarlyStoppingTrigger(patients=5) and "made")


def unclear_mode():
    """`EarlyStoppingTrigger(monitor="reward")` without a mode."""
    return _refused(lambda: triggers.EarlyStoppingTrigger(monitor="reward") and "made")


def one_file_in_a_list():
    """`TextDataset(["a.txt"])`: the type of an example."""
    with open("a.txt", "w") as file:
        file.write("one\n")
    return type(datasets.TextDataset(["a.txt"])[0]).__name__


def batches_of_workers():
    """`MultiprocessIterator.next()`: the kind of its examples."""
    iterator = iterators.MultiprocessIterator([np.zeros(2, np.float32)] * 4, 2, shuffle=False, n_processes=1)
    try:
        return type(iterator.next()[0]).__name__
    finally:
        iterator.finalize()


def default_percentiles():
    """`ParameterStatistics(link)`: the statistics that it reports by default."""
    model = Line()
    return sorted(extensions.ParameterStatistics(model).default_statistics)


def slashes_of_a_key():
    """`serializer["/a/"]("/b/", value)`: the key under which it is saved."""
    if IS_CHAINER:
        from chainer.serializers import DictionarySerializer
    else:
        from chainring.serializers import DictionarySerializer
    target = {}
    DictionarySerializer(target)["/a/"]("/b/", 1)
    return list(target)


def parameter_of_another_kind():
    """`load_npz` into a parameter of another dtype, and of another shape."""

    class One:
        def __init__(self, array):
            self.array = array

        def serialize(self, serializer):
            serializer("w", self.array)

    results = []
    for array in (np.ones((2, 1)), np.ones((1, 1), np.float32)):
        serializers.save_npz("one.npz", One(array))
        results.append(_refused(lambda: serializers.load_npz("one.npz", Line()) or "loaded"))
    return results


def with_reporter():
    """`with reporter:`."""

    def enter():
        with Reporter() as _:
            return "entered"

    return _refused(enter)


def leading_slash():
    """`add_observers(prefix, links)`: Chainer's paths begin with a slash; PyTorch's do not."""
    reporter, model, observation = Reporter(), Line(), {}
    reporter.add_observers("main", [("/part" if IS_CHAINER else "part", model)])
    with reporter.scope(observation):
        report({"a": 1.0}, model)
    parts = [("part", model)]
    reporter.add_observers("main", parts)
    with reporter.scope(observation):
        report({"b": 1.0}, model)
    return sorted(observation)


def negative_index():
    """`dataset[-1]` of a `DatasetMixin`: what `get_example` is given."""

    class Given(DatasetMixin):
        def __len__(self):
            return 6

        def get_example(self, i):
            return i

    return [Given()[-1], _refused(lambda: datasets.ConcatenatedDataset([1], [2])[-1])]


def several_examples():
    """`TupleDataset(a, b)[[2, 0]]` of two arrays: examples 2 and 0."""
    dataset = datasets.TupleDataset(np.arange(3), np.arange(3) + 10)
    return [[int(number) for number in example] for example in dataset[[2, 0]]]


def label_dtype():
    """The dtype of a label of `LabeledImageDataset`."""
    from PIL import Image

    Image.fromarray(np.zeros((2, 2), np.uint8)).save("a.png")
    return str(datasets.LabeledImageDataset([("a.png", 3)])[0][1].dtype)


def batches_without_length():
    """`ValueError` at the first update, of an iterator whose batches have no length."""

    class Counting:
        batch_size, epoch, is_new_epoch, epoch_detail, previous_epoch_detail = 1, 0, False, 0.0, 0.0

        def __next__(self):
            return iter([(np.zeros(2, np.float32), np.zeros(1, np.float32))])

        next = __next__

        def finalize(self):
            pass

        def serialize(self, serializer):
            pass

    if IS_CHAINER:
        base = type("Counting", (Counting, __import__("chainer").dataset.Iterator), {})
    else:
        base = type("Counting", (Counting, iterators.Iterator), {})
    model = Line()
    convert = lambda batch, device: tuple(as_input(part[None]) for part in next(batch))  # noqa: E731
    updater = make_updater(base(), sgd(model, 0.1), model, converter=convert)
    return _refused(lambda: training.Trainer(updater, (1, "iteration")).run() or "ran")


def observed_rate_of_adam():
    """`observe_lr` of Adam with its defaults, in the first row."""
    model = Line()
    if IS_CHAINER:
        import chainer

        optimizer = chainer.optimizers.Adam().setup(model)
    else:
        import torch

        optimizer = torch.optim.Adam(model.parameters())
    iterator = iterators.SerialIterator(points(), 4, shuffle=False)
    trainer = training.Trainer(make_updater(iterator, optimizer, model), (1, "iteration"))
    trainer.extend(extensions.observe_lr(), trigger=(1, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.run()
    return round(rows(trainer)[0]["lr"], 6)


def once_at_iteration_0():
    """`OnceTrigger`, asked before the first update."""
    return triggers.OnceTrigger()(make_trainer((1, "iteration"))[0])


def names_in_a_file():
    """What `save_npz` calls a number and an array in the file."""

    class Two:
        def serialize(self, serializer):
            serializer("number", 3)
            serializer["part"]("array", np.zeros(2))

    serializers.save_npz("two.npz", Two())
    return sorted(np.load("two.npz").files)


def array_of_another_shape():
    """`serializer("a", array)` without an assignment, of a saved scalar and an array of 3."""

    class One:
        def __init__(self, array):
            self.array = array

        def serialize(self, serializer):
            serializer("a", self.array)

    serializers.save_npz("one.npz", One(np.float64(2.0)))
    one = One(np.zeros(3))
    refused = _refused(lambda: serializers.load_npz("one.npz", one))
    return [refused, one.array.tolist()]


def files_of_a_snapshot():
    """`snapshot()` writes a file, or a directory: is it a directory?"""
    trainer, _ = make_trainer((1, "iteration"))
    trainer.extend(extensions.snapshot(), trigger=(1, "iteration"))
    trainer.run()
    return os.path.isdir(os.path.join(trainer.out, "snapshot_iter_1"))
