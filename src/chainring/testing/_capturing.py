"""What the iterations of a replay compute, step by step, and the first step in which two replays differ."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from chainring import _random
from chainring._naming import parameter_names, unwrap
from chainring.reporting.summary import is_scalar
from chainring.testing._parting import Finding
from chainring.training._digests import StateDigests
from chainring.training._unsaved import checksum, describe, describe_leaves

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

Step = dict[str, Any]
"""What is known of an iteration: after its update ``calls``, ``losses`` and ``gradients``, at its end the others."""


class Capture:
    """Takes down what the iterations of a trainer compute: the modules by hooks, losses, gradients, state, generators.

    Args:
        trainer: one that has not run.
        first: the first iteration; of the one before the state at its end is taken down too.
        last: the last.
        in_detail: False to leave out modules and gradients, and keep one digest of all tensors, for many iterations.

    Attributes:
        steps: by iteration what it has computed.
    """

    def __init__(self, trainer: Trainer, first: int, last: int, *, in_detail: bool) -> None:
        self.steps: dict[int, Step] = {}
        self._trainer, self._first, self._last, self._in_detail = trainer, first, last, in_detail
        self._update = trainer.updater.update
        vars(trainer.updater)["update"] = self._watched_update

    def look(self, iteration: int) -> None:
        """Take down the state at the end of an iteration."""
        if not self._first - 1 <= iteration <= self._last:
            return
        updater, comm = self._trainer.updater, self._trainer.comm
        digests = StateDigests(updater, comm)
        state = {name: f"{value:016x}" for name, value in zip(digests.names, digests.read().tolist(), strict=True)}
        step = self.steps.setdefault(iteration, {})
        step["state"] = state if self._in_detail else {"": checksum(state)}
        step["generators"] = {name: checksum(value) for name, value in _random.get_rng_state().items()}
        step["groups"] = {}
        for name, optimizer in updater.get_all_optimizers().items():
            for index, group in enumerate(optimizer.param_groups):
                settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                step["groups"] |= describe_leaves(f"{name}/{index}", settings)

    def _watched_update(self) -> None:
        """Take the place of `Updater.update`."""
        iteration = self._trainer.updater.iteration + 1
        if not self._first <= iteration <= self._last:
            self._update()
            return
        calls: list[list[str]] = []
        with _hooked(self._trainer, calls) if self._in_detail else contextlib.nullcontext():
            self._update()
        step = self.steps.setdefault(iteration, {})
        step["calls"] = calls
        observation = self._trainer.observation
        step["losses"] = {key: describe(float(value)) for key, value in observation.items() if is_scalar(value)}
        step["gradients"] = _gradients(self._trainer) if self._in_detail else {}


def _gradients(trainer: Trainer) -> dict[str, str]:
    models = trainer.updater.get_all_models()
    names = parameter_names(models)
    parameters = {id(p): p for model in models.values() for p in model.parameters()}
    return {names.get(key, "?"): _digest(p.grad) for key, p in parameters.items() if p.grad is not None}


@contextlib.contextmanager
def _hooked(trainer: Trainer, calls: list[list[str]]) -> Iterator[None]:
    """Inside, add to a list for each module that returns its name, and digests of its input and its output."""
    inputs: dict[int, list[str]] = {}

    def before(module: nn.Module, arguments: Any, keywords: Any) -> None:
        inputs.setdefault(id(module), []).append(_digest([arguments, keywords]))

    def after(name: str, module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        calls.append([name, inputs[id(module)].pop(), _digest(output)])

    with contextlib.ExitStack() as stack:
        for name, module in _hookable(trainer):
            with contextlib.suppress(RuntimeError):  # a module of TorchScript takes no hooks
                stack.enter_context(_removing(module.register_forward_pre_hook(before, with_kwargs=True)))
                hook = functools.partial(after, name)
                stack.enter_context(_removing(module.register_forward_hook(hook, with_kwargs=True)))
        yield


@contextlib.contextmanager
def _removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _hookable(trainer: Trainer) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules by their names, without those inside of compiled code, which hooks would change."""
    if getattr(trainer.updater, "compile", False):
        return
    for name, model in trainer.updater.get_all_models().items():
        module = model if _is_compiled(model) else unwrap(model)
        yield from _without_compiled(name, module, set())


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _without_compiled(name: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen or getattr(module, "_compiled_call_impl", None) is not None:
        return
    seen.add(id(module))
    yield name, module
    if not _is_compiled(module):
        for child_name, child in module.named_children():
            yield from _without_compiled(f"{name}/{child_name}", child, seen)


def _digest(value: Any) -> str:
    """Return a checksum of all values in nested containers; the class of what has no bytes to read."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    try:
        return checksum(value)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return type(value).__name__


# --- two of them ---


_WORDS = {"losses": "loss", "gradients": "gradient", "state": "tensor", "generators": "generators"}


def first_difference(one: Mapping[int, Step], other: Mapping[int, Step]) -> Finding | None:
    """Return the first step in which two replays differ, ``None`` if they are the same.

    Generators that differ at the beginning have not been seeded, and do not count.
    """
    iterations = _common(one, other)
    known = _differing_generators(one[iterations[0]], other[iterations[0]]) if iterations else set()
    for iteration in iterations:
        found = _differing_call(one[iteration], other[iteration])
        for kind in _WORDS:
            found = found or _differing_value(kind, one[iteration], other[iteration], known)
        if found is not None:
            return dataclasses.replace(found, iteration=iteration, after=iteration - 1)
    return None


def first_module(one: Mapping[int, Step], other: Mapping[int, Step]) -> Finding | None:
    """Return the first module of which the output differs, ``None`` if there is none."""
    for iteration in _common(one, other):
        if (found := _differing_call(one[iteration], other[iteration])) is not None:
            states = [steps.get(iteration - 1, {}).get("state", {}) for steps in (one, other)]
            own = [path for path in states[0] if path.startswith(f"updater/model:{found.name}/")]
            with_others = any(states[0][path] != states[1].get(path) for path in own)
            text = f"{found.text}{' and with other parameters' if with_others else ''}"
            return dataclasses.replace(found, text=text, iteration=iteration, after=iteration - 1)
    return None


def first_tensor(one: Mapping[int, Step], other: Mapping[int, Step]) -> Finding | None:
    """Return the first tensor of the state that differs, ``None`` if there is none."""
    for iteration in _common(one, other):
        if (found := _differing_value("state", one[iteration], other[iteration])) is not None:
            return dataclasses.replace(found, iteration=iteration, after=iteration - 1)
    return None


def differing_groups(one: Mapping[int, Step], other: Mapping[int, Step]) -> tuple[int, list[str]] | None:
    """Return the first iteration at the end of which settings of the optimizers differ, and which, in words."""
    for iteration in _common(one, other):
        groups, groups_other = one[iteration].get("groups", {}), other[iteration].get("groups", {})
        found = [f"{path}: {groups[path]} -> {groups_other[path]}" for path in groups if path in groups_other
                 and groups[path] != groups_other[path]]  # fmt: skip
        if found:
            return iteration, found
    return None


def _common(one: Mapping[int, Step], other: Mapping[int, Step]) -> list[int]:
    return sorted(one.keys() & other.keys())


def _differing_call(one: Step, other: Step) -> Finding | None:
    """Return the first module that returns something else in an iteration, or is called in place of another one."""
    calls: Sequence[Sequence[str] | None] = one.get("calls", ())
    for call, call_other in itertools.zip_longest(calls, other.get("calls", ())):
        if call is None or call_other is None or call[0] != call_other[0]:
            names = ["nothing" if each is None else each[0] for each in (call, call_other)]
            return Finding(0, "module", names[0] if call else names[1], f"called are {' -> '.join(names)}")
        if call[2] != call_other[2]:
            return Finding(0, "module", call[0], "of the same input" if call[1] == call_other[1] else "of another input")
    return None


def _differing_generators(one: Step, other: Step) -> set[str]:
    states, states_other = one.get("generators", {}), other.get("generators", {})
    return {name for name, state in states.items() if state != states_other.get(name)}


def _differing_value(kind: str, one: Step, other: Step, left_out: Container[str] = ()) -> Finding | None:
    values, values_other = one.get(kind, {}), other.get(kind, {})
    names = [name for name in dict.fromkeys([*values, *values_other]) if values.get(name) != values_other.get(name)]
    if kind == "losses":
        names = [name for name in names if name in values and name in values_other]
    elif kind == "generators":
        names = [name for name in names if name not in left_out]
    if not names:
        return None
    if kind == "losses":
        return Finding(0, _WORDS[kind], names[0], f"{values[names[0]]} -> {values_other[names[0]]}")
    return Finding(0, _WORDS[kind], names[0], f"{len(names)} of {len(values.keys() | values_other.keys())} differ")
