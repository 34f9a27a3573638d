"""A rehearsal: a little of everything that a run does, and then as if nothing had been."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from chainring import _random
from chainring.serializers.base import DictionaryDeserializer, DictionarySerializer
from chainring.training import _run
from chainring.training._trainer_state import visit_part

if TYPE_CHECKING:
    from torch import nn

    from chainring.serializers.base import AbstractSerializer
    from chainring.training.extension import Entry
    from chainring.training.trainer import Trainer

_UPDATES = 2


def rehearse(trainer: Trainer) -> None:
    """Updates twice and calls every extension once, see `Trainer.rehearse`. Triggers are not asked."""
    _refuse_lazy(trainer.updater.get_all_models() if hasattr(trainer.updater, "get_all_models") else {})
    entries = trainer.entries
    with _put_back(trainer, entries), ExitStack() as stack:
        _run.prepare(trainer)
        for entry in entries:
            trainer.extension_name = entry.name
            entry.method("initialize")(trainer)
            stack.callback(entry.method("finalize"))
        trainer.extension_name = None
        try:
            for number in range(1, _UPDATES + 1):
                _iterate(trainer, entries, calls=number == _UPDATES)
        except StopIteration:
            raise RuntimeError(f"the data ended before {_UPDATES} updates, so there is nothing to rehearse") from None


def _refuse_lazy(models: Mapping[str, nn.Module]) -> None:
    for name, model in models.items():
        if lazy := [path for path, parameter in model.named_parameters() if is_lazy(parameter)]:
            raise ValueError(
                f"a rehearsal puts parameters back, and those of a lazy module are none before its first batch: {lazy} of "
                f"model {name!r}; call the model once with a batch under torch.no_grad() before"
            )


def _iterate(trainer: Trainer, entries: list[Entry], calls: bool) -> None:
    trainer.observation = {}
    with trainer.reporter.scope(trainer.observation):
        trainer.updater.update()
        for entry in entries:
            if entry.observe is not None:
                entry.observe(trainer)
            if calls:
                trainer.extension_name = entry.name
                entry.extension(trainer)
                trainer.extension_name = None


@contextmanager
def _put_back(trainer: Trainer, entries: list[Entry]) -> Generator[None]:
    """A scratch directory as ``out``; afterwards everything that has changed is what it was, come what may."""
    saved = DictionarySerializer()
    _visit(saved, trainer, entries)
    out, observation = trainer.out, trainer.observation
    try:
        with _random.preserve_rng(), tempfile.TemporaryDirectory(prefix="chainring-rehearsal-") as scratch:
            trainer.out, trainer.is_rehearsing = scratch, True
            yield
    except BaseException as error:
        where = "" if trainer.extension_name is None else f", in extension {trainer.extension_name!r}"
        error.add_note(f"raised in the rehearsal{where}; all state has been put back")
        raise
    finally:
        trainer.out, trainer.observation, trainer.extension_name = out, observation, None
        trainer.is_rehearsing = False
        _visit(DictionaryDeserializer(saved.target), trainer, entries)


def _visit(serializer: AbstractSerializer, trainer: Trainer, entries: list[Entry]) -> None:
    serializer.visit("updater", trainer.updater)
    for entry in entries:
        visit_part(serializer["extensions"], entry.name, entry.extension)
