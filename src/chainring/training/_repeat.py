"""Updates that are computed again by fewer ranks: what an interrupted one has changed is put back first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from chainring._distributed.communicator import RanksLost
from chainring._distributed.virtual_ranks import Deal
from chainring._progress import Trainer
from chainring.reporting.reporter import Reported
from chainring.serializers.protocol import DictionaryDeserializer, DictionarySerializer, own_states, unwrap
from chainring.training.updaters._arguments import needs_closure
from chainring.training.updaters._carried import Carried
from chainring.training.updaters._virtual_state import RunningStatistics
from chainring.training.updaters.callbacks import keeping, taken_back
from chainring.training.updaters.standard import StandardUpdater


class _ButMarked:
    """Leaves out iterators that return to a mark, which is less than their state."""

    def visit(self, key: str, obj: Any) -> None:
        if not (key.startswith("iterator:") and hasattr(obj, "mark")):
            super().visit(key, obj)  # type: ignore[misc]


class _Saved(_ButMarked, DictionarySerializer):
    pass


class _Loaded(_ButMarked, DictionaryDeserializer):
    pass


class RepeatableUpdate:
    """An update that puts back what it has changed if ranks are lost in it: all that a snapshot holds of the updater.

    Where nothing is exchanged after the first step, as in most updates, parameters and optimizers are as they were when
    ranks are lost, and are not copied.
    """

    def __init__(self, trainer: Trainer, carried: Carried, update: Callable[[], Any]) -> None:
        self._trainer, self._updater, self._update, self._carried = trainer, trainer.updater, update, carried.of_updater()
        models = [model for model in self._updater.get_all_models().values() if isinstance(model, nn.Module)]
        self._is_usual = (
            type(self._updater) is StandardUpdater
            and not any(map(needs_closure, self._updater.get_all_optimizers().values()))
            and not any(own_states(unwrap(model)) for model in models)
            and all(type(part).get_extra_state is nn.Module.get_extra_state for model in models for part in model.modules())
        )
        self._buffers = RunningStatistics({str(number): model for number, model in enumerate(models)}, 1)

    def __call__(self) -> None:
        trainer, is_whole = self._trainer, not self._changes_last()
        before = dict(trainer.observation) if trainer.reported.values else None
        kept, undo = set[int](), list[Callable[[], Any]]([self._remember(is_whole)])

        def keep(obj: Any) -> None:
            if id(obj) not in kept:
                kept.add(id(obj))
                saved = DictionarySerializer()
                saved.visit("", obj)
                undo.append(lambda: DictionaryDeserializer(saved.target).visit("", obj))

        tokens = taken_back.set(undo), keeping.set(keep if is_whole else None)
        try:
            self._update()
        except RanksLost:
            for function in reversed(undo):
                function()
            trainer.reported = trainer.reporter.reported = Reported(before)
            raise
        finally:
            taken_back.reset(tokens[0])
            keeping.reset(tokens[1])

    def _changes_last(self) -> bool:
        """Return whether all is exchanged before the update begins to change parameters and states."""
        optimizers = self._updater.get_all_optimizers().values() if self._is_usual else ()
        hooks = [optimizer._optimizer_step_post_hooks for optimizer in optimizers]  # each may exchange
        hooks += [optimizer._optimizer_step_pre_hooks for optimizer in optimizers if len(optimizers) > 1]
        return self._is_usual and not self._updater.callbacks.update_on_finish and not any(hooks)

    def _remember(self, is_whole: bool) -> Callable[[], None]:
        """Return what puts back the updater, or what of it an update changes before its last exchange."""
        updater, saved = self._updater, _Saved()
        iterators = updater.get_all_iterators()
        marks = [(iterator, iterator.mark()) for iterator in iterators.values() if hasattr(iterator, "mark")]
        objects = {"updater": updater} if is_whole else {f"iterator:{name}": item for name, item in iterators.items()}
        for key, obj in objects.items():
            saved.visit(key, obj)
        if self._carried:
            self._carried.save(saved, self._trainer, is_whole=True)
        are_kept = is_whole or getattr(updater, "virtual_ranks", None) is None  # virtual ranks put back buffers themselves
        if are_kept:
            self._buffers.begin(Deal.even(1, 1), 0)

        def put_back() -> None:
            loaded = _Loaded(saved.target)
            for key, obj in objects.items():
                loaded.visit(key, obj)
            for key in self._carried:
                self._carried.load(loaded[key], key)
            if are_kept:
                self._buffers.undo()
            for iterator, mark in marks:
                iterator.return_to(mark)

        return put_back
