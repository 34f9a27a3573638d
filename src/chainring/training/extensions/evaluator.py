"""Evaluator and predict: run a model on data on which it is not trained."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Iterator as PythonIterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from chainring import _random
from chainring._checks import find_call_error, is_integer, plain
from chainring._distributed.communicator import Communicator, RanksLost, as_communicator, device_of_rank
from chainring._distributed.sharding import is_sharded
from chainring._distributed.virtual_ranks import Deal
from chainring._hints import EVALUATION, hinting
from chainring._messages import warn
from chainring.converters import Converter, Device, as_device, concat_examples, is_auto
from chainring.datasets._batches import count_examples, require_count, take_examples
from chainring.iterators.base import Iterator, require_virtual_ranks, share_among_ranks
from chainring.iterators.loader import LoaderIterator, as_iterator
from chainring.reporting._metrics import all_over_ranks, fresh_metrics, is_metric, restored, uncounted
from chainring.reporting.media import Media, report_media
from chainring.reporting.reporter import Reporter, report
from chainring.reporting.summary import DictMeans, is_scalar
from chainring.serializers._models import weights_to_use
from chainring.serializers.protocol import AbstractSerializer, name_of_model, named_submodules, unwrap, visit_optional
from chainring.training.extension import PRIORITY_WRITER, Extension
from chainring.training.extensions.progress_bar import bar_of_batches
from chainring.training.trainer import Trainer
from chainring.training.triggers.base import describe
from chainring.training.updaters._arguments import Loss, check_call, check_loss_func
from chainring.training.updaters._ranks import WrappedModules
from chainring.training.updaters._update import Precision, arguments, loss_and_weight


class Evaluator(Extension):
    """Evaluates the model on validation data; reports the mean of each of its values, such as ``validation/main/loss``.

    No gradients are computed, and the training flags of all submodules and the random generators are restored. Means are
    weighted by the number of examples, so they do not depend on the batch size. Metrics that are attributes of the model
    are computed over this evaluation only; a metric object that the function reports or returns is computed at the end.

    A model of the updater is evaluated as it is trained: in the updater's precision and with its ``loss_func``. Any other
    target, such as an average of the parameters, is called as it is, unless ``precision`` and ``loss_func`` are given. Of a
    schedule-free optimizer the weights of its ``eval()`` are evaluated, and those that it trains put back bit for bit.

    Ranks share the examples. A subclass with a loop of its own over the iterator has all of them on every rank.

    Example::

        test_iter = iterators.SerialIterator(test, 100, repeat=False, shuffle=False)
        trainer.extend(extensions.Evaluator(test_iter, model))

    Args:
        iterator: makes one pass over the data; a ``DataLoader`` or another iterable of batches is wrapped. Either a single
            one, or a dict of several by name, of which ``"main"`` is evaluated.
        target: the model, or a dict of several by name; a single one is called ``"main"``.
        converter: ``converter(batch, device)`` turns a batch of examples into tensors.
        device: the device of the batches; ``None`` leaves them where they are, ``"auto"`` works as for `StandardUpdater`.
        eval_hook: called with the evaluator before each evaluation.
        eval_func: called with a batch instead of the main target; like it, returns a loss, or a mapping with ``"loss"``.
        precision: the precision of the forward pass, as for `StandardUpdater`; by default that of the updater for one of
            its models, otherwise ``"fp32"``, which uses the dtypes of the model.
        loss_func: ``loss_func(model, *inputs)`` is called with the main target; by default that of the updater for one of
            its models, unless ``eval_func`` is given.
        progress_bar: True to show a progress bar of the batches in a terminal or notebook during an evaluation.
        limit: the number of batches after which an evaluation ends, the first ones of the pass; ``None`` for all of them.
        virtual_ranks: the number of parts in which each batch is evaluated, the examples ``batch[v::virtual_ranks]`` in
            part v, so that the results are equal to the last bit on 1 to ``virtual_ranks`` ranks; by default that of the
            updater. Changes of buffers are undone; images, texts and histograms are those of part 0. A torchmetrics object
            is exact if its states are counts; one of your own without ``sync`` must count in integers.

    Raises:
        ValueError: the iterator repeats, or can be used for one pass only; or there is no function to call, or two.
    """

    trigger = (1, "epoch")
    priority = PRIORITY_WRITER
    skip_on_resume = True
    default_name = "validation"
    _updater: Any = None
    _initial_seed: int | None = None  # of the parts, if the updater has none

    @hinting(EVALUATION)
    def __init__(
        self,
        iterator: Iterable[Any] | dict[str, Iterable[Any]],
        target: nn.Module | dict[str, nn.Module],
        converter: Converter = concat_examples,
        device: Device = None,
        eval_hook: Callable[..., None] | None = None,
        eval_func: Callable[..., Loss] | None = None,
        *,
        precision: Literal["fp32", "bf16", "fp16"] | None = None,
        loss_func: Callable[..., Loss] | None = None,
        progress_bar: bool = False,
        limit: int | None = None,
        virtual_ranks: int | None = None,
    ) -> None:
        if isinstance(iterator, nn.Module):
            rule = "an Evaluator takes the iterator first and the model second"
            raise TypeError(f"{rule}, got {type(iterator).__name__} first")
        iterators = dict(iterator) if isinstance(iterator, dict) else {"main": iterator}
        self._iterators = {name: _one_pass_iterator(name, source, converter) for name, source in iterators.items()}
        self._targets: dict[str, nn.Module] = dict(target) if isinstance(target, dict) else {"main": target}
        for name, model in self._targets.items():
            if not isinstance(model, nn.Module):
                rule = "an Evaluator takes the model second, an nn.Module"
                raise TypeError(f"{rule}; target {name!r} is {type(model).__name__}")
        for name, function in (("converter", converter), ("eval_hook", eval_hook), ("eval_func", eval_func)):
            if not callable(function) and (function is not None or name == "converter"):
                raise TypeError(f"{name} of an Evaluator is a function, got {function!r}")
        if "main" not in self._iterators or (eval_func is None and "main" not in self._targets):
            raise ValueError('an Evaluator needs an iterator "main", and a target "main" or an eval_func')
        if loss_func is not None:
            check_loss_func(loss_func)
            if eval_func is not None:
                raise ValueError("an evaluation calls loss_func(model, *inputs) or eval_func(*inputs), and both were given")
        if precision is not None:
            Precision(precision)  # refuses an unknown name
        self.converter = converter
        self._device = device if is_auto(device) else as_device(device)
        self.eval_hook, self.eval_func, self.loss_func = eval_hook, eval_func, loss_func
        self.precision = precision
        if limit is not None and not (is_integer(limit) and limit > 0):
            raise ValueError(f"limit is the number of batches of an evaluation, an integer above 0, or None; got {limit!r}")
        self.progress_bar, self.limit = progress_bar, plain(limit)
        self.virtual_ranks = None if virtual_ranks is None else require_virtual_ranks(virtual_ranks)
        self._comm: Communicator = Communicator()
        self._given = _Given()

    @property
    def device(self) -> torch.device | None:
        """The device of the batches; ``None`` leaves them where they are."""
        return device_of_rank(self._device, self._comm)

    def get_iterator(self, name: str) -> Any:
        """Return the iterator registered as ``name``."""
        return self._iterators[name]

    def get_all_iterators(self) -> dict[str, Any]:
        """Return all iterators by name."""
        return dict(self._iterators)

    def get_target(self, name: str) -> nn.Module:
        """Return the model registered as ``name``."""
        return self._targets[name]

    def get_all_targets(self) -> dict[str, nn.Module]:
        """Return all models by name."""
        return dict(self._targets)

    def identity(self, trainer: Trainer) -> Sequence[str]:
        models = trainer.updater.get_all_models()
        names = [name_of_model(model, models) for model in self._targets.values()]
        return (*names, describe(self.eval_func), *map(_describe_data, self._iterators.values()))

    def initialize(self, trainer: Trainer) -> None:
        self._comm, self._updater, self._given = trainer.comm, trainer.updater, _Given()
        *_, virtual_ranks = self._find_settings()
        if virtual_ranks is not None and self._initial_seed is None:
            self._initial_seed = trainer.comm.broadcast_object(torch.initial_seed())
        for source in self._iterators.values():
            share_among_ranks(source, trainer.comm, virtual_ranks)
        self._share(Communicator())

    def _share(self, comm: Communicator) -> None:
        """Let each rank have its rows, or all: a loop that a subclass or an extension writes knows nothing of ranks."""
        for source in self._iterators.values() if self._comm.size > 1 else ():
            if hasattr(source, "share"):
                source.share(comm.rank, comm.size)

    def _find_settings(self) -> tuple[Any, Callable[..., Any] | None, int | None]:
        """Return precision, loss function and virtual ranks: where they were not given, as the updater trains its model."""
        updater, target = self._updater, unwrap(self._targets.get("main"))
        is_trained = updater is not None and any(unwrap(model) is target for model in updater.get_all_models().values())
        precision, loss_func, virtual_ranks = self.precision, self.loss_func, self.virtual_ranks
        if precision is None:
            precision = getattr(updater, "precision", "fp32") if is_trained else "fp32"
        if loss_func is None and self.eval_func is None and is_trained:
            loss_func = getattr(updater, "loss_func", None)
        if virtual_ranks is None:
            virtual_ranks = getattr(updater, "virtual_ranks", None)
        return precision, loss_func, virtual_ranks

    def __call__(self, trainer: Trainer | None = None) -> dict[str, float]:
        """Evaluate, report the means with the name of the extension in the trainer as prefix, and return them."""
        means = self.evaluate()
        if not isinstance(means, Mapping) or not all(isinstance(key, str) for key in means):
            raise TypeError(
                f"{type(self).__qualname__}.evaluate() returns a mapping of names to means, such as {{'main/loss': 0.5}}, "
                f"got {means!r}; let it end with: return means"
            )
        prefix = "" if trainer is None or trainer.extension_name is None else f"{trainer.extension_name}/"
        if trainer is not None and isinstance(means, _WithoutBatch):
            trainer.reporter.said.add(prefix)
        means = {prefix + key: value for key, value in means.items()}
        report(means)
        for key, media in self._given.media.items():
            report_media(prefix + key, media)
        self._given.media = {}
        return means

    def evaluate(self) -> dict[str, float]:
        """Return the mean of each reported value over one pass by key, such as ``main/loss``, without reporting them.

        Warns:
            UserWarning: the iterator gave no batch.
        """
        if self.eval_hook is not None:
            self.eval_hook(self)
        iterator = self._iterators["main"]
        self._share(self._comm)
        getattr(iterator, "rewind", iterator.reset)()
        models, reporter, self._given.media = list(self._targets.values()), Reporter(), {}
        for name, model in self._targets.items():
            for path, module in named_submodules(name, model):
                reporter.add_observer(path, module)
        if self._comm.size > 1:  # in training, each rank has computed running statistics of its own share
            self._comm.broadcast([buffer for model in models for buffer in model.buffers() if not is_sharded(buffer)])
        precision_name, loss_func, virtual_ranks = self._find_settings()
        precision = Precision(precision_name, models)
        have_weights: list[bool] = []  # of each forward
        counting: dict[str, Any] = {}  # the metrics that were reported

        def forward(batch: Any, shows: bool = True) -> tuple[dict[str, Any], Any]:
            observation: dict[str, Any] = {}
            reporter.media_watchers = (self._given.media.__setitem__,) if shows else ()
            with reporter.scope(observation), precision.autocast():
                loss_weight, examples = self._evaluate_batch(batch, loss_func), count_examples(batch)
            have_weights.append(loss_weight is not None)
            counting.update((key, value) for key, value in observation.items() if is_metric(value))
            return observation, require_count(examples) if loss_weight is None or examples == 0 else loss_weight

        summary, is_shown = DictMeans(set()), self.progress_bar and self._comm.is_main
        shown = bar_of_batches(iterator, self.default_name, sys.stdout) if is_shown else nullcontext(iterator)
        modes = [(module, module.training) for model in models for module in model.modules()]
        try:
            weights = nullcontext() if self._updater is None else weights_to_use(self._updater)
            with torch.no_grad(), _random.preserve_rng(), weights, fresh_metrics(models), shown as all_batches:
                for model in models:
                    model.eval()
                batches = islice(all_batches, self.limit)
                if virtual_ranks is None:
                    self._add_forwards(summary, batches, forward)
                else:
                    self._add_virtual_forwards(summary, batches, forward, virtual_ranks)
                summary = summary.over_ranks(self._comm)
                if self._comm.survives:  # the rank that has seen the images may be lost before they are in a log
                    self._given.media = self._comm.broadcast_object(self._given.media)
                means = summary.compute_mean()
        except RanksLost:
            for metric in counting.values():  # all is evaluated again
                metric.reset()
            raise
        finally:
            self._share(Communicator())
            for module, training in modes:
                module.training = training
        if any(have_weights):
            means["main/weight"] = summary.total_weight("main/weight")  # of all batches and ranks, and not their mean
        if not have_weights and not means:  # on no rank
            self._tell(
                f"the {self.default_name} has no data, because its iterator gave no batch; check that they are not empty, "
                "and not fewer than a batch with drop_last"
            )
            return _WithoutBatch()
        return self._given.note(getattr(self._updater, "iteration", 0), means)

    def _tell(self, text: str) -> None:
        """Say that there was nothing to evaluate; a run goes on without."""
        warn(text)

    def _add_forwards(self, summary: DictMeans, batches: Iterable[Any], forward: Any) -> None:
        """Evaluate batches, and add what is reported; an example that keeps this rank in step counts in no metric either."""
        metrics: dict[str, Any] = {}  # that were reported
        for batch in batches:
            if self._comm.size == 1 or count_examples(batch) != 0:
                observation, weight = forward(batch)
            else:
                with uncounted(self._targets.values(), but=("_modules", "_parameters")), restored(metrics.values()):
                    observation, weight = forward(batch, False)
                for key, value in observation.items():
                    if is_metric(value) and key not in metrics:
                        value.reset()
            summary.add(observation, weight)
            metrics |= {key: value for key, value in observation.items() if is_metric(value)}

    def _add_virtual_forwards(self, summary: DictMeans, batches: Iterable[Any], forward: Any, count: int) -> None:
        """Evaluate batches on this rank's block of virtual ranks, and add what is reported, metrics with the counts of all.

        A share without examples is skipped. Modules that are wrapped exchange parameters or buffers in a forward: of these
        all ranks run equally many, some of which do not count; so they do in the first batch, to learn which metrics there
        are. Every forward finds buffers, but for those of metrics, as they were at the beginning.
        """
        comm, seed = self._comm, getattr(self._updater, "virtual_seed", None)
        if seed is None:
            seed = torch.initial_seed() if self._initial_seed is None else self._initial_seed
        modules = [module for model in self._targets.values() for module in model.modules()]
        of_metrics = {id(child) for module in modules if is_metric(module) for child in module.modules()}
        owners = [module for module in modules if id(module) not in of_metrics]
        named = [(owner._buffers, *item) for owner in owners for item in owner.named_buffers(recurse=False)]
        slots = [(buffers, name, buffer, buffer.clone()) for buffers, name, buffer in named]
        versions = [buffer._version for _, _, buffer, _ in slots]

        def forward_and_restore(share: Any, shows: bool) -> tuple[dict[str, Any], Any]:
            result: tuple[dict[str, Any], Any] = forward(share, shows)
            for index, (buffers, name, buffer, initial) in enumerate(slots):
                buffers[name] = buffer
                if buffer._version != versions[index]:
                    buffer.copy_(initial)
                    versions[index] = buffer._version
            return result

        block = Deal.even(comm.size, count).block(comm.rank)
        exchanges = comm.size > 1 and bool(WrappedModules(list(self._targets.values())).parameters)
        least = -(-count // comm.size) if exchanges else 0  # forwards of each batch
        metrics: dict[str, Any] = {}
        for index, batch in enumerate(batches):
            done = 0
            for position, virtual in enumerate(block):
                share = batch if len(block) == 1 else take_examples(batch, slice(position, None, len(block)))
                if count_examples(share) == 0:
                    break  # nor have those after it
                _random.seed_all("evaluation", int(seed), index, virtual)
                observation, weight = forward_and_restore(share, virtual == 0)
                metrics |= {key: value for key, value in observation.items() if is_metric(value)}
                summary.add({key: value for key, value in observation.items() if not is_metric(value)}, weight)
                done += 1
            for _ in range(max(least, int(index == 0)) - done):
                with restored(metrics.values()):
                    observation, _ = forward_and_restore(take_examples(batch, slice(0, 1)), False)
                for key, value in observation.items():
                    if is_metric(value) and key not in metrics:
                        value.reset()
                        metrics[key] = value
        summary.add(all_over_ranks(metrics, comm))

    def _evaluate_batch(self, batch: Any, loss_func: Callable[..., Any] | None) -> Any:
        """Return the weight that the loss has beside it, or ``None``."""
        inputs = self.converter(batch, self.device)
        args, kwargs = arguments(inputs)
        try:
            if loss_func is not None:
                output = loss_func(self._targets["main"], *args, **kwargs)
            else:
                output = (self.eval_func or self._targets["main"])(*args, **kwargs)
        except TypeError:  # say what is wrong, if it is the call
            check_call(self._targets["main"], loss_func, args, kwargs, self.eval_func)
            raise
        if isinstance(output, Mapping):  # beside or in place of a loss: metric objects, and numbers
            is_wanted = is_metric if "loss" in output else lambda value: is_metric(value) or is_scalar(value)
            report({f"main/{key}": value for key, value in output.items() if is_wanted(value)})
        return loss_and_weight(output)[1]

    def finalize(self) -> None:
        for iterator in self._iterators.values():
            if hasattr(iterator, "finalize"):
                iterator.finalize()
        if self._updater is not None and self.eval_func is None and self._comm.is_main:
            self._given.warn_of_copy(self._targets.values(), self._updater.get_all_models().values())

    def serialize(self, serializer: AbstractSerializer) -> None:
        for name, iterator in self._iterators.items():
            serializer.visit(f"iterator:{name}", iterator)
        if self.virtual_ranks is not None:
            self._initial_seed = visit_optional(serializer, "seed", self._initial_seed)


class _Given:
    """What evaluations have given: the media of the last one, and whether all of a run gave the same, to the last bit."""

    def __init__(self) -> None:
        self.media: dict[str, Media] = {}
        self._means: dict[str, float] | None = None  # of the first
        self._iterations: list[int] = []  # of the first and of the last, as long as they give the same

    def note(self, iteration: int, means: dict[str, float]) -> dict[str, float]:
        """Compare the means of an evaluation with those of the first, and return them."""
        if self._means is None:
            self._means, self._iterations = means, [iteration, iteration]
        elif self._iterations:
            self._iterations = [self._iterations[0], iteration] if means == self._means else []
        return means

    def warn_of_copy(self, evaluated: Iterable[nn.Module], trained: Iterable[nn.Module]) -> None:
        """Warn if they have, and of no model that is trained; an average, which is not trained either, changes."""
        ids = [{id(each) for model in models for each in model.parameters()} for models in (evaluated, trained)]
        if len({*self._iterations}) == 2 and all(ids) and ids[0].isdisjoint(ids[1]):
            first, last = self._iterations
            warn(
                f"all evaluations, after iterations {first} to {last}, gave the same to the last bit: the model that is "
                "evaluated shares no parameter with those that are trained, as a copy of one; give the Evaluator the model "
                "of the updater"
            )


def _one_pass_iterator(name: str, source: Any, converter: Callable[..., Any]) -> Any:
    if isinstance(source, PythonIterator) and not hasattr(source, "epoch_detail"):
        raise ValueError(
            f"every evaluation needs a new pass, and iterator {name!r}, a {type(source).__name__}, can be used only "
            "once; pass its source: the list or DataLoader, or a function that returns a new iterator"
        )
    iterator: Any = as_iterator(source, repeat=False)
    if isinstance(source, LoaderIterator):
        iterator = LoaderIterator(source.loader, epoch_length=source.epoch_length, per_rank=source.per_rank, repeat=False)
    if getattr(iterator, "repeat", False):
        raise ValueError(
            f"an evaluation needs an iterator that ends after one pass, and {name!r} ({type(iterator).__name__}) repeats "
            "forever; make it with repeat=False, shuffle=False"
        )
    if isinstance(iterator, Iterator):  # whose methods raise
        can_reset = any(getattr(type(iterator), name) is not getattr(Iterator, name) for name in ("reset", "rewind"))
    else:
        can_reset = callable(getattr(iterator, "reset", None))
    if not can_reset:
        raise ValueError(
            f"every evaluation starts with reset() of the iterator, and iterator {name!r} ({type(iterator).__name__}) "
            "has none; define reset(), which goes back to the first batch"
        )
    if isinstance(iterator, Iterator):
        iterator.name = f"validation/{name}"  # from which, with the initial seed, a seed of None is derived
        iterator.use_converter(converter)
    return iterator


def _describe_data(iterator: Any) -> str:
    data = getattr(iterator, "dataset", getattr(iterator, "loader", iterator))
    try:
        return f"{type(data).__name__} of {len(data)}"
    except (TypeError, NotImplementedError):
        return type(data).__name__


def predict(
    model: nn.Module,
    iterator: Iterable[Any],
    converter: Converter = concat_examples,
    device: Device = None,
    *,
    predict_func: Callable[..., Any] | None = None,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    comm: Communicator | None = None,
) -> Any:
    """Return what a trained model computes for each example of one pass, in the order of the iterator, on the host.

    The model is in evaluation mode meanwhile and no gradients are computed; modes, metrics and random generators are
    restored, and what is reported goes nowhere. Several ranks share the examples, and each returns all of them.

    Example::

        scores = predict(model, test_iter, predict_func=lambda model, x, t: model.predictor(x))

    Args:
        model: returns a row for each example: a tensor, or a tuple, a list or a mapping of tensors, also nested.
        iterator: makes one pass over the data, as for an `Evaluator`; without shuffling, rows have the order of the data.
        converter: ``converter(batch, device)`` turns a batch of examples into tensors.
        device: the device of the batches; ``None`` leaves them where they are, ``"auto"`` works as for `StandardUpdater`.
        predict_func: ``predict_func(model, *inputs)`` is called instead of the model.
        precision: the precision of the forward pass, as for `StandardUpdater`.
        comm: the communicator; every rank calls this function, with the same data.

    Returns:
        What the model returns, of all batches; ``tensor[i]`` belongs to example i.

    Raises:
        ValueError: the iterator repeats, or gives no batch; what the model returns has not a row for each example, or rows
            of several shapes; or each rank has a loader of its own, so that there is no common order.
        TypeError: the model does not take the inputs, or returns something else than tensors.
    """
    comm = Communicator() if comm is None else as_communicator(comm)
    prediction = _Prediction(iterator, model, converter, device=device, precision=precision)
    outputs = prediction.run(comm, partial(predict_func, model) if predict_func else model)
    by_batch = [part for batch in zip(*comm.gather_object(outputs), strict=True) for part in batch]
    return _map(partial(_join, size=comm.size), *by_batch)


class _WithoutBatch(dict[str, float]):
    """What an evaluation of no batch returns: no means."""


class _Prediction(Evaluator):
    """An evaluation that keeps what the function returns, in place of means."""

    default_name = "prediction"

    def _tell(self, text: str) -> None:
        raise ValueError(text)

    def run(self, comm: Communicator, function: Callable[..., Any]) -> list[Any]:
        """Return what this rank computes for its rows of each batch."""
        self._function, self._outputs = function, list[Any]()
        source = self.get_iterator("main")
        if comm.size > 1 and (getattr(source, "per_rank", False) or not hasattr(source, "share")):
            raise ValueError("ranks that predict together share the batches of one loader; give all the same, not per_rank")
        virtual_ranks = getattr(source, "virtual_ranks", None)  # of the evaluations of a run
        if virtual_ranks is not None:
            source.virtual_ranks = None
        self._comm = comm
        try:
            share_among_ranks(source, comm)
            self.evaluate()
        finally:
            if virtual_ranks is not None:
                source.virtual_ranks = virtual_ranks
        return self._outputs

    def _evaluate_batch(self, batch: Any, loss_func: Callable[..., Any] | None) -> None:
        args, kwargs = arguments(self.converter(batch, self.device))
        try:
            output = self._function(*args, **kwargs)
        except TypeError as error:
            forward = self._function
            if problem := find_call_error(getattr(unwrap(forward), "forward", forward), *args, **kwargs):
                rule = f"predict calls the model with the {len(args) or len(kwargs)} inputs of a batch"
                remedy = "give predict_func=lambda model, x, t: model(x), which takes all and uses some"
                raise TypeError(f"{rule}, which it does not take: {problem}; {remedy}") from error
            raise
        self._outputs.append(_map(partial(_rows, count=count_examples(batch)), output))


def _map(function: Callable[..., Any], *trees: Any) -> Any:
    """Return the structure of these trees, of what the function returns for their tensors at each position."""
    all_leaves, structures = zip(*map(tree_flatten, trees), strict=True)
    are_alike = all(structure == structures[0] for structure in structures)
    if not are_alike or not all(isinstance(leaf, Tensor) for leaves in all_leaves for leaf in leaves):
        kinds = ", ".join(sorted({type(tree).__name__ for tree in trees}))
        rule = "predict joins tensors, or tuples, lists and dicts of them that are alike in every batch"
        raise TypeError(f"{rule}; the model returned {kinds}")
    return tree_unflatten([function(*tensors) for tensors in zip(*all_leaves, strict=True)], structures[0])


def _rows(tensor: Tensor, count: Any) -> Tensor:
    """Return a copy of the rows of a share on the host; one of no examples repeats one, which counts nothing."""
    rows = len(tensor) if tensor.ndim else None
    if rows != count and (count or not rows):
        raise ValueError(
            f"predict needs a row for each of the {count} examples of a batch, and the model returned a tensor of the "
            f"shape {list(tensor.shape)}; give predict_func=lambda model, *inputs: ..., which returns rows"
        )
    return tensor[:count].detach().to("cpu", copy=True)


def _join(*tensors: Tensor, size: int) -> Tensor:
    """Return the rows in their order; rank r of ``size`` has the rows r, r + size, ... of each batch."""
    if len(shapes := {tuple(tensor.shape[1:]) for tensor in tensors}) > 1:
        remedy = "let predict_func return rows of one shape, padded or reduced"
        raise ValueError(f"rows of the shapes {sorted(shapes)} cannot be joined; {remedy}")
    batches = []
    for parts in (tensors[index : index + size] for index in range(0, len(tensors), size)):
        batches.append(torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=parts[0].dtype))
        for rank, part in enumerate(parts):
            batches[-1][rank::size] = part
    return torch.cat(batches)
