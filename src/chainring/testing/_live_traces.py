"""Traces of a trainer while it runs: fingerprints of its state, and what each iteration computes, module by module."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from chainring import _random
from chainring._runs.comparison import Difference, differences, first_difference
from chainring.reporting.summary import is_scalar
from chainring.serializers.protocol import parameter_names, unwrap
from chainring.training._digests import StateDigests, checksum, describe, describe_leaves, leaves
from chainring.training._entry import Observer
from chainring.training._unsaved import is_time

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

Fingerprint = dict[str, dict[str, str]]
"""By category (``"parameters"``), the text of each value by its path."""
Steps = dict[int, dict[str, Any]]
"""A trace of what iterations compute: after an update ``module``, the calls in their order, each with digests of its input
and its output, and ``loss`` and ``gradient``; at the end of the iteration ``tensor``, ``generators`` and ``settings``."""

_COUNTERS = ("progress", "epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch")
_COMPUTED = ("loss", "gradient", "tensor", "generators")  # beside the modules, which come first


def fingerprint(trainer: Trainer, batches: Iterable[Mapping[str, str]] = ()) -> Fingerprint:
    """Return the fingerprint of a trainer's present state and observation, and of described batches."""
    generators, observation = _random.get_rng_state(trainer.updater), trainer.observation
    texts: Fingerprint = {
        "iterator": {
            f"updater/iterator:{name}/{counter}": repr(getattr(iterator, counter, None))
            for name, iterator in trainer.updater.get_all_iterators().items()
            for counter in _COUNTERS
        },
        "batch": {path: text for batch in batches for path, text in batch.items()},
        "observation": {f"observation/{k}": describe(float(v)) for k, v in observation.items() if is_scalar(v)},
        "generators": {f"generators/{trainer.comm.rank}/{name}": checksum(state) for name, state in generators.items()},
        "parameters": {},
        "buffers": {},
        "optimizer": {},
    }
    models = trainer.updater.get_all_models()
    for name, model in models.items():
        module = unwrap(model)
        parameters = {path for path, _ in module.named_parameters(remove_duplicate=False)}
        for path, value in module.state_dict().items():
            category = texts["parameters" if path in parameters else "buffers"]
            for at, leaf in leaves(f"updater/model:{name}/{path.replace('.', '/')}", value):
                category[at] = "a time" if path not in parameters and is_time(leaf) else describe(leaf)
    names = parameter_names(models)
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        prefix = f"updater/optimizer:{name}"
        for parameter, state in optimizer.state.items():
            path = f"{prefix}/state/{names.get(id(parameter), 'parameter')}"
            texts["optimizer"] |= describe_leaves(path, state)
        texts["optimizer"] |= _describe_groups(f"{prefix}/param_groups", optimizer)
    return texts


def _describe_groups(path: str, optimizer: Any) -> dict[str, str]:
    texts: dict[str, str] = {}
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        texts |= describe_leaves(f"{path}/{index}", settings)
    return texts


class Capture(Observer):
    """Takes down what iterations compute, from a first to a last: modules by hooks, losses, gradients, state, generators.

    Of the one before the first, the state at its end is taken down too. Without ``in_detail``, for many iterations, modules
    and gradients are left out, and of all tensors there is one digest.
    """

    def __init__(self, trainer: Trainer, first: int, last: int, *, in_detail: bool) -> None:
        self.steps: Steps = {}
        self._trainer, self._first, self._last, self._in_detail = trainer, first, last, in_detail
        trainer.watch(self)

    def look(self, iteration: int) -> None:
        """Take down the state at the end of an iteration."""
        if not self._first - 1 <= iteration <= self._last:
            return
        updater, comm = self._trainer.updater, self._trainer.comm
        digests = StateDigests(updater, comm)
        tensors = {name: f"{value:016x}" for name, value in zip(digests.names, digests.read().tolist(), strict=True)}
        step = self.steps.setdefault(iteration, {})
        step["tensor"] = tensors if self._in_detail else {"": checksum(tensors)}
        generators = _random.get_rng_state(updater)
        step["generators"] = {name: checksum(value) for name, value in generators.items()}
        step["settings"] = {}
        for name, optimizer in updater.get_all_optimizers().items():
            step["settings"] |= _describe_groups(name, optimizer)

    def around_update(self, trainer: Trainer, update: Callable[[], None]) -> None:
        iteration = trainer.updater.iteration + 1
        if not self._first <= iteration <= self._last:
            update()
            return
        calls: list[list[str]] = []
        with _hooked(trainer, calls) if self._in_detail else contextlib.nullcontext():
            update()
        gradients = {}
        if self._in_detail:
            models = trainer.updater.get_all_models()
            names = parameter_names(models)
            parameters = {id(p): p for model in models.values() for p in model.parameters()}
            gradients = {names.get(key, "?"): _digest(p.grad) for key, p in parameters.items() if p.grad is not None}
        losses = {key: describe(float(value)) for key, value in trainer.observation.items() if is_scalar(value)}
        self.steps.setdefault(iteration, {}).update(module=calls, loss=losses, gradient=gradients)


@contextlib.contextmanager
def _hooked(trainer: Trainer, calls: list[list[str]]) -> Iterator[None]:
    """Inside, add to a list for each module that returns its name, and digests of its input and its output."""
    inputs: dict[int, list[str]] = {}

    def before(module: nn.Module, arguments: Any, keywords: Any) -> None:
        inputs.setdefault(id(module), []).append(_digest([arguments, keywords]))

    def after(name: str, module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        calls.append([name, inputs[id(module)].pop(), _digest(output)])

    with contextlib.ExitStack() as stack:
        models = {} if getattr(trainer.updater, "compile", False) else trainer.updater.get_all_models()
        for model_name, model in models.items():
            for name, module in _without_compiled(model_name, model if _is_compiled(model) else unwrap(model), set()):
                with contextlib.suppress(RuntimeError):  # a module of TorchScript takes no hooks
                    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                    hook = functools.partial(after, name)
                    stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def _without_compiled(name: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules by their names, without those inside of compiled code, which hooks would change."""
    if id(module) in seen or getattr(module, "_compiled_call_impl", None) is not None:
        return
    seen.add(id(module))
    yield name, module
    if not _is_compiled(module):
        for child_name, child in module.named_children():
            yield from _without_compiled(f"{name}/{child_name}", child, seen)


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _digest(value: Any) -> str:
    """Return a checksum of all values in nested containers; the class of what has no bytes to read."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    try:
        return checksum(value)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return type(value).__name__


# --- two of them ---


def first_step_apart(a: Steps, b: Steps) -> Difference | None:
    """Return the first step in which two replays differ, ``None`` if they are the same.

    Generators that differ at the beginning have not been seeded, and do not count.
    """
    start = min(a.keys() & b.keys(), default=0)
    generators = itertools.chain(*differences(a, b, ["generators"]))
    unseeded = [difference.name for difference in generators if difference.iteration == start]
    module, value = first_module(a, b), first_difference(a, b, _COMPUTED, unseeded)
    return min(filter(None, [module, value]), key=lambda found: found.iteration, default=None)


def first_module(a: Steps, b: Steps) -> Difference | None:
    """Return the first module that returns something else, or is called in place of another one; ``None`` if none is."""
    for iteration in sorted(a.keys() & b.keys()):
        for call, other in itertools.zip_longest(a[iteration].get("module", ()), b[iteration].get("module", ())):
            if call is None or other is None or call[0] != other[0]:
                names = ["nothing" if made is None else made[0] for made in (call, other)]
                text = f"called are {' -> '.join(names)}"
                return Difference(iteration, "module", names[0] if call else names[1], text, iteration - 1)
            if call[2] != other[2]:
                before = [steps.get(iteration - 1, {}).get("tensor", {}) for steps in (a, b)]
                parameters = [path for path in before[0] if path.startswith(f"updater/model:{call[0]}/")]
                text = "of the same input" if call[1] == other[1] else "of another input"
                if any(before[0][path] != before[1].get(path) for path in parameters):
                    text += " and with other parameters"
                return Difference(iteration, "module", call[0], text, iteration - 1)
    return None


def differing_settings(a: Steps, b: Steps) -> tuple[int, list[str]] | None:
    """Return the first iteration after which settings of the optimizers differ, and in words which settings."""
    settings = next(differences(a, b, ["settings"]), None)
    return None if settings is None else (settings[0].iteration, [f"{setting.name}: {setting.text}" for setting in settings])
