"""A run previewed: its plan as text, and a rehearsal after which all state is restored."""

from __future__ import annotations

import copy
import difflib
import tempfile
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fractions import Fraction
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from chainring import _random
from chainring._checks import is_integer
from chainring._messages import Text, info, warn
from chainring._progress import Trainer
from chainring.iterators.base import find_main_iterator
from chainring.iterators.loader import LoaderIterator, check_state
from chainring.serializers.protocol import (
    AbstractSerializer,
    Deserializer,
    DictionaryDeserializer,
    DictionarySerializer,
    Serializer,
    named_submodules,
    visit_if_stateful,
)
from chainring.training._run import prepare
from chainring.training.triggers.base import describe, keys_of, never
from chainring.training.updaters._arguments import origin_of
from chainring.training.updaters._carried import Carried
from chainring.training.updaters._memory import LESS, capacity, explain_out_of_memory, is_out_of_memory, sized
from chainring.training.updaters.base import Updater
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext

if TYPE_CHECKING:
    from chainring.training._unsaved import Attributes

_MAX_SHOWN = 12
_FULL = 0.9  # of the memory of a device, of which its driver and the cache of PyTorch need some
_RESTORED = "raised in {}{}; all state has been restored"


def explain(trainer: Trainer, iterations: int, is_started: bool) -> str:
    """Return the plan as text, see `Trainer.explain`. If the run has started, its triggers are already initialized."""
    if not is_integer(iterations) or iterations < 1:
        raise ValueError(f"explain plans a number of iterations, an integer of at least 1, got {iterations!r}")
    entries = sorted(trainer.entries, key=lambda entry: entry.is_snapshot)  # as they run
    updater = SimulatedUpdater(trainer.updater)
    first, limit = updater.iteration + 1, updater.iteration + iterations
    copies = {}
    for trigger in (trainer.stop_trigger, *(entry.trigger for entry in entries)):
        unknown = ("second",) if updater.counts_epochs else ("second", "epoch")
        if getattr(trigger, "predictable", False) and getattr(trigger, "unit", None) not in unknown:
            copies[id(trigger)] = copy.deepcopy(trigger)
    simulated: Any = SimpleNamespace(updater=updater, elapsed_time=trainer.elapsed_time, observation={})
    simulated.initialize_trigger = lambda trigger: hasattr(trigger, "initialize") and trigger.initialize(simulated)
    if not is_started:
        for trigger in copies.values():
            simulated.initialize_trigger(trigger)
    stop_trigger, end = copies.get(id(trainer.stop_trigger)), None
    fires: dict[int, list[int]] = {key: [] for key in copies}
    while updater.iteration < limit and end is None:
        if stop_trigger is not None and stop_trigger(simulated):
            end = describe(trainer.stop_trigger)
        elif updater.has_ended:
            end = "the end of the data"
        else:
            updater.update()
            for key, trigger in copies.items():
                if trigger(simulated):
                    fires[key].append(updater.iteration)
    if updater.iteration < first:
        headline = f"No more iterations: {end} has stopped training after iteration {updater.iteration}."
    else:
        until = "the data end" if trainer.stop_trigger is never else describe(trainer.stop_trigger)
        ending = f"then {end} stops training" if end is not None else f"until {until}"
        headline = f"Iterations {first} to {updater.iteration}, {ending}. Each is an update, then in this order:"
    rows = [("extension", "priority", "trigger", "fires")]
    for entry in entries:
        text, fired = "asked each iteration", fires.get(id(entry.trigger))
        if fired is not None:
            text = "at " + (", ".join(map(str, fired[:_MAX_SHOWN])) or "none of them")
            text += f", ... ({len(fired)} times)" if len(fired) > _MAX_SHOWN else ""
        is_skipped = trainer.is_resumed and entry.optional("skip_on_resume")
        text += "; once before training" if entry.invoke_before_training and not is_skipped else ""
        text += "; observes each" if entry.observe is not None else ""
        rows.append((entry.name, str(entry.priority), describe(entry.trigger), text))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return Text("\n".join([headline, *("  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in rows)]))


class SimulatedUpdater:
    """Counts iterations and epochs from where an updater is, as the updater would, and updates nothing."""

    def __init__(self, updater: Updater) -> None:
        iterator = find_main_iterator(updater)
        epoch, position, size = getattr(iterator, "progress", None) or (0, 0, None)
        self.iteration = updater.iteration
        self.previous_epoch_detail: float | None = None
        self.is_new_epoch = False
        self.counts_epochs = bool(size)
        self._repeat = getattr(iterator, "repeat", True)
        self._batches = getattr(updater, "accumulate", 1)
        self._crosses_epochs = getattr(updater, "accumulate_across_epochs", True)
        self._epochs = epoch + Fraction(position, size) if size else Fraction(0)
        self._epochs_per_batch = Fraction(iterator.step, size) if size else Fraction(0)

    @property
    def epoch(self) -> int:
        return int(self._epochs)

    @property
    def epoch_detail(self) -> float:
        return float(self._epochs)

    @property
    def has_ended(self) -> bool:
        return self.counts_epochs and not self._repeat and self._epochs >= 1

    def update(self) -> None:
        self.iteration += 1
        self.previous_epoch_detail, epoch = self.epoch_detail, self.epoch
        for _ in range(self._batches):
            self._epochs += self._epochs_per_batch
            if not self._crosses_epochs and self.epoch != epoch:
                break
        if not self._repeat:
            self._epochs = min(self._epochs, Fraction(1))
        self.is_new_epoch = self.epoch != epoch


def rehearse(trainer: Trainer, preserve: Callable[[], AbstractContextManager[None]]) -> None:
    """Update twice and call every extension once, see `Trainer.rehearse`. Triggers are not checked."""
    from chainring.training import _unsaved  # which imports NumPy's generators, for a rehearsal alone

    seen: list[Attributes] = []
    memory = _PeakMemory(trainer.updater)
    with ExitStack() as stack:
        with memory.kept():
            stack.enter_context(preserve())
        prepare(trainer)
        for entry in trainer.entries:
            trainer.extension_name = entry.name
            entry.optional("initialize")(trainer)
            stack.callback(entry.optional("finalize"))
        trainer.extension_name = None
        callbacks = getattr(trainer.updater, "callbacks", None)
        if isinstance(callbacks, UpdateCallbacks) and not getattr(trainer.updater, "compile", False):
            callbacks.add("backward_on_start", warn_of_softmax := _warn_of_softmax(trainer.updater))
            stack.callback(callbacks.remove, "backward_on_start", warn_of_softmax)
        try:
            with memory.kept():
                seen.append(_unsaved.attributes_of(trainer))
            reported = {*keys_of(trainer.updater, "reported_keys"), *trainer.observation}
            for calls_extensions in (False, True):
                _iterate(trainer, calls_extensions, memory)
                reported.update(trainer.observation)
                with memory.kept():
                    seen.append(_unsaved.attributes_of(trainer))
            for iterator in trainer.updater.get_all_iterators().values():
                if isinstance(iterator, LoaderIterator):
                    check_state(iterator)
        except StopIteration:
            raise RuntimeError("the data ran out before 2 updates, so there is nothing to rehearse") from None
        if problem := trainer.comm.broadcast_object(_find_unknown_keys(trainer, reported)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # extensions may warn of the same key when they are finalized
                stack.close()
    memory.tell(trainer)
    # All saved state has been restored now, so what is still as the updates have changed it is not saved.
    if (unsaved := list_unsaved(trainer, *seen)) and trainer.comm.is_main:
        warn(
            "two updates and a call of each extension have changed values that are not saved, so a resumed run would "
            f"start with those of the script (a value that is set again before each use need not be saved):{unsaved}",
        )
    if problem:
        error = ValueError(problem)
        error.add_note(_RESTORED.format("rehearse()", ""))
        raise error


def list_unsaved(trainer: Trainer, before: Attributes, between: Attributes, after: Attributes) -> str:
    """Return lines with what a trial has changed and not put back, given what there was before, amid and after updates."""
    from chainring.training import _unsaved

    unsaved = _unsaved.unsaved(_unsaved.changed(before, between, after), before, _unsaved.attributes_of(trainer))
    shown = "".join(f"\n  {path}: {_unsaved.remedy(path, unsaved[path])}" for path in list(unsaved)[:_MAX_SHOWN])
    return shown + (f"\n  and {len(unsaved) - _MAX_SHOWN} more" if len(unsaved) > _MAX_SHOWN else "")


def _warn_of_softmax(updater: Any) -> Callable[[UpdateContext], None]:
    """Return a callback that warns once of a loss that takes the softmax of a softmax, which its graph shows."""
    is_warned = False

    def look(context: UpdateContext) -> None:
        nonlocal is_warned
        assert context.loss is not None
        nodes, seen = [context.loss.grad_fn], set[Any]()
        while nodes and not is_warned:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            following = [following for following, _ in node.next_functions]
            nodes += following
            if node.name() == "LogSoftmaxBackward0" and "SoftmaxBackward0" in [each and each.name() for each in following]:
                is_warned = True
                named = named_submodules("main", updater.get_all_models().get("main", nn.Identity()))
                paths = [path for path, module in named if isinstance(module, nn.Softmax)]
                where = ", ".join(paths) or origin_of(updater.loss_func or updater.get_model("main"))
                warn(
                    "the loss takes the softmax of a softmax, and so learns slowly: cross_entropy is given the outputs of a "
                    f"layer, not probabilities; leave the softmax out, see {where}"
                )

    return look


def _find_unknown_keys(trainer: Trainer, reported: set[str]) -> str | None:
    """Return a message that names the keys that are watched and not reported, each with the nearest that is reported."""
    for keys in trainer.comm.gather_object(sorted(reported, key=str)):
        reported.update(keys)
    for entry in trainer.entries:
        reported.update(keys_of(entry.extension, "reported_keys"))
    known = sorted(filter(lambda key: isinstance(key, str), reported))
    watched = [(f"stop trigger {describe(trainer.stop_trigger)}", keys_of(trainer.stop_trigger))]
    for entry in trainer.entries:
        watched.append((f"extension {entry.name!r}", keys_of(entry.extension)))
        watched.append((f"trigger {describe(entry.trigger)} of extension {entry.name!r}", keys_of(entry.trigger)))
    unknown = [(watcher, key) for watcher, keys in watched for key in keys if key not in reported]
    if not unknown:
        return None
    shown = ""
    for watcher, key in dict.fromkeys(unknown):
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        shown += f"\n  {watcher} watches {key!r}" + (f"; the nearest is {nearest[0]!r}" if nearest else "")
    return (
        f"these keys are needed, and neither an update nor an extension has reported them:{shown}\nReported were {known}. "
        "Correct the key, or add the extension that reports it. If a key is only reported later, name it in the extension "
        'or updater that reports it: its attribute reported_keys = ("key",)'
    )


def _iterate(trainer: Trainer, calls_extensions: bool, memory: _PeakMemory) -> None:
    trainer.observation = {}
    with trainer.reporter.scope(trainer.observation):
        with memory.counted("an update"):
            trainer.updater.update()
        for entry in trainer.entries:
            if entry.observe is not None:
                entry.observe(trainer)
            if calls_extensions:
                trainer.extension_name = entry.name
                with memory.counted(repr(entry.name), is_asked_for=entry.is_snapshot):
                    entry.extension(trainer)
                trainer.extension_name = None


class _PeakMemory:
    """The most memory of the models' accelerator in what a rehearsal does, less what the rehearsal alone keeps there."""

    def __init__(self, updater: Updater) -> None:
        parameters = [parameter for model in updater.get_all_models().values() for parameter in model.parameters()]
        self._device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        self._module: Any = torch.get_device_module(self._device)
        self._is_counted = self._device.type != "cpu" and hasattr(self._module, "max_memory_allocated")
        self._gradients = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        self._kept, self._beside = 0, 0  # by the rehearsal; by model, optimizer and extensions between two updates
        self._peaks: dict[str, int] = {}

    @contextmanager
    def kept(self) -> Generator[None]:
        """Count what lies there at the end of the context, and not at its beginning, as what only the rehearsal keeps."""
        before = self._module.memory_allocated(self._device) if self._is_counted else 0
        yield
        self._kept += self._module.memory_allocated(self._device) - before if self._is_counted else 0

    @contextmanager
    def counted(self, name: str, *, is_asked_for: bool = True) -> Generator[None]:
        """Count the peak in the context; with ``is_asked_for=False`` only where it takes any."""
        if not self._is_counted:
            yield
            return
        self._module.reset_peak_memory_stats(self._device)
        before = self._module.memory_allocated(self._device)
        yield
        peak = self._module.max_memory_allocated(self._device)
        if is_asked_for or peak > before:
            self._peaks[name] = max(peak - self._kept, self._peaks.get(name, 0))
        if not self._beside or name == "an update":
            self._beside = before - self._kept - self._gradients

    def tell(self, trainer: Trainer) -> None:
        """Print the peaks of the rank that takes most, and how many examples would fit; warn above 90 % of the device."""
        free_and_total = capacity(self._device) if self._is_counted else None
        total = 0 if free_and_total is None else free_and_total[1]
        ranks = trainer.comm.gather_object((str(self._device), self._peaks, self._beside, total))
        device, peaks, beside, total = max(ranks, key=lambda rank: max(rank[1].values(), default=0))
        if not trainer.comm.is_main or not peaks:
            return
        text = f"{device} has at the peak of {', '.join(f'{name} {sized(peak)}' for name, peak in peaks.items())}"
        text += f", of {sized(total)}" if total else ""
        size, most = getattr(find_main_iterator(trainer.updater), "batch_size", None), peaks["an update"] - beside
        if isinstance(size, int) and total and most > 0:
            fitting = float(f"{max(0, size * (_FULL * total - beside) / most):.2g}")
            text += f"; a batch of {size} takes {sized(most)} beside model and optimizer, and about {fitting:,.0f} would fit"
        info(text)
        name = max(peaks, key=peaks.__getitem__)
        if total and peaks[name] > _FULL * total:
            warn(f"{name} takes {peaks[name] / total:.0%} of the memory of {device}, and the run may end by it; {LESS}")


@contextmanager
def preserved(trainer: Trainer, carried: Carried, trial: str) -> Generator[None]:
    """Save the state, give the trainer a scratch directory as ``out``, and put all back, see `trainer.preserved`."""
    for name, model in trainer.updater.get_all_models().items():
        if lazy := [path for path, parameter in model.named_parameters() if is_lazy(parameter)]:
            raise ValueError(
                f"{trial} restores parameters, and those of a lazy module are uninitialized before its first batch: "
                f"{lazy} of model {name!r}; call the model once with a batch under torch.no_grad() before"
            )
    saved = DictionarySerializer()
    _visit_state(saved, trainer, carried)
    out, observation = trainer.url or trainer.out, trainer.observation
    try:
        with _random.preserve_rng(), tempfile.TemporaryDirectory(prefix="chainring-rehearsal-") as scratch:
            trainer.out, trainer.is_rehearsing = scratch, True
            yield
    except BaseException as error:
        position = "" if trainer.extension_name is None else f", in extension {trainer.extension_name!r}"
        error.add_note(_RESTORED.format(trial, position))
        if is_out_of_memory(error):
            error.add_note(explain_out_of_memory(trainer.updater, trainer.extension_name))
        raise
    finally:
        trainer.out, trainer.observation, trainer.extension_name = out, observation, None
        trainer.is_rehearsing = False
        _visit_state(DictionaryDeserializer(saved.target), trainer, carried)


def _visit_state(serializer: AbstractSerializer, trainer: Trainer, carried: Carried) -> None:
    serializer.visit("updater", trainer.updater)
    for entry in trainer.entries:
        visit_if_stateful(serializer["extensions"], entry.name, entry.extension)
    if isinstance(serializer, Serializer):
        carried.save(serializer, trainer, is_whole=True)
    elif isinstance(serializer, Deserializer):
        for key in carried:
            carried.load(serializer[key], key)
