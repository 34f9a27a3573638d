"""A rehearsal: a few iterations of a run with every extension, after which all state is put back."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from chainring import _random
from chainring.serializers.base import DictionaryDeserializer, DictionarySerializer, visit_if_stateful
from chainring.training import _run

if TYPE_CHECKING:
    from chainring.serializers.base import AbstractSerializer
    from chainring.training.trainer import Trainer


def rehearse(trainer: Trainer) -> None:
    """Update twice and call every extension once, see `Trainer.rehearse`. Triggers are not asked."""
    for name, model in trainer.updater.get_all_models().items():
        if lazy := [path for path, parameter in model.named_parameters() if is_lazy(parameter)]:
            raise ValueError(
                f"a rehearsal puts parameters back, and those of a lazy module are uninitialized before its first batch: "
                f"{lazy} of model {name!r}; call the model once with a batch under torch.no_grad() before"
            )
    with _state_put_back(trainer), ExitStack() as stack:
        _run.prepare(trainer)
        for entry in trainer.entries:
            trainer.extension_name = entry.name
            entry.method("initialize")(trainer)
            stack.callback(entry.method("finalize"))
        trainer.extension_name = None
        try:
            _iterate(trainer, calls_extensions=False)
            _iterate(trainer, calls_extensions=True)
        except StopIteration:
            raise RuntimeError("the data ended before 2 updates, so there is nothing to rehearse") from None


def _iterate(trainer: Trainer, calls_extensions: bool) -> None:
    trainer.observation = {}
    with trainer.reporter.scope(trainer.observation):
        trainer.updater.update()
        for entry in trainer.entries:
            if entry.observe is not None:
                entry.observe(trainer)
            if calls_extensions:
                trainer.extension_name = entry.name
                entry.extension(trainer)
                trainer.extension_name = None


@contextmanager
def _state_put_back(trainer: Trainer) -> Generator[None]:
    """Give the trainer a scratch directory as ``out``, and put all state back at the end come what may."""
    saved = DictionarySerializer()
    _visit_state(saved, trainer)
    out, observation = trainer.out, trainer.observation
    try:
        with _random.preserve_rng(), tempfile.TemporaryDirectory(prefix="chainring-rehearsal-") as scratch:
            trainer.out, trainer.is_rehearsing = scratch, True
            yield
    except BaseException as error:
        position = "" if trainer.extension_name is None else f", in extension {trainer.extension_name!r}"
        error.add_note(f"raised in the rehearsal{position}; all state has been put back")
        raise
    finally:
        trainer.out, trainer.observation, trainer.extension_name = out, observation, None
        trainer.is_rehearsing = False
        _visit_state(DictionaryDeserializer(saved.target), trainer)


def _visit_state(serializer: AbstractSerializer, trainer: Trainer) -> None:
    serializer.visit("updater", trainer.updater)
    for entry in trainer.entries:
        visit_if_stateful(serializer["extensions"], entry.name, entry.extension)
