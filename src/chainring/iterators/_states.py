"""The states that loaders, and iterators over them, have by themselves.

PyTorch's ``state_dict`` and ``load_state_dict`` are those of torchdata, Hugging Face, litData and MosaicML Streaming;
``save_state_rank`` and ``restore_state_rank`` those of Megatron Energon; ``get_state`` and ``set_state`` those of Grain's
iterators. One that has another pair is one name more here.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from chainring.iterators._order import is_defined_in

_PAIRS = (("state_dict", "load_state_dict"), ("save_state_rank", "restore_state_rank"), ("get_state", "set_state"))
_CLASS, _FIELDS = "chainring.class", "chainring.fields"
_START = "chainring.start"  # around the state of where a pass began


class StateMethods(NamedTuple):
    """How an object tells where it stands, and goes there."""

    owner: Any
    save: Callable[[], Any]
    load: Callable[[Any], Any]
    holds_generators: bool  # of its workers

    def get(self) -> Any:
        """Return the state in values that a snapshot can hold."""
        return _to_values(self.save())

    def set(self, state: Any) -> None:
        """Go to a state that `get` returned."""
        dataset: Any = getattr(self.owner, "dataset", None)
        if is_defined_in(self.owner, "streaming.") and hasattr(dataset, "next_epoch") and isinstance(state, dict):
            # By itself it takes up the epoch that it is in, or a later one, and ignores an earlier one.
            dataset.next_epoch = max(state["epoch"], 0)
        if is_defined_in(self.owner, "litdata."):
            vars(self.owner)["restore"] = False  # which it leaves True where a pass that was restored is broken off
        try:
            self.load(_from_values(state, type(self.owner).__module__.split(".")[0]))
        except Exception as error:
            error.add_note(
                f"raised by {type(self.owner).__name__}.{self.load.__name__}, which was given the state that was saved of "
                "it. A run that is resumed gives it to a loader just made, with the data and settings of the saved run; "
                "one that refuses to be put back once it was used, as Megatron Energon's, cannot be rehearsed"
            )
            raise


def state_methods(owner: Any) -> StateMethods | None:
    """Return an object's pair of methods: one that takes nothing, and one that takes what the first returns."""
    for names in _PAIRS:
        save, load = (getattr(owner, name, None) for name in names)
        if _takes(save) and _takes(load, None):
            return StateMethods(owner, save, load, names[0] != "state_dict")  # type: ignore[arg-type]
    return None


def _takes(method: Any, *arguments: Any) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:  # also where it cannot be called
        return False
    except ValueError:  # of code in C, which has none
        return callable(method)
    return True


def counts_elsewhere(dataset: Any) -> bool:
    """Return whether it is a dataset of MosaicML Streaming, whose position is counted by its own loader alone."""
    method = getattr(dataset, "state_dict", None)
    return inspect.ismethod(method) and {"num_samples", "from_beginning"} <= {*inspect.signature(method).parameters}


def at_start(state: Any) -> dict[str, Any]:
    """Mark a state as that of the beginning of a pass, of which batches are to be fetched again."""
    return {_START: state}


def split_start(state: Any) -> tuple[Any, bool]:
    """Return a state without its mark, and whether it has it."""
    is_marked = isinstance(state, dict) and [*state] == [_START]
    return (state[_START], True) if is_marked else (state, False)


def _to_values(state: Any) -> Any:
    """Return a state in which a dataclass, or a subclass of dict, is its name and its fields."""
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    elif isinstance(state, dict):
        fields = {**state}
    else:
        is_plain = type(state) in (list, tuple)
        return type(state)(_to_values(item) for item in state) if is_plain else state
    fields = {key: _to_values(value) for key, value in fields.items()}
    cls = type(state)
    return fields if cls is dict else {_CLASS: f"{cls.__module__}:{cls.__qualname__}", _FIELDS: fields}


def _from_values(state: Any, package: str) -> Any:
    """Return a state with the objects that it had; a class is one that the package of the loader has brought."""
    if type(state) in (list, tuple):
        return type(state)(_from_values(item, package) for item in state)
    if not isinstance(state, dict):
        return state
    if _CLASS not in state:
        return {key: _from_values(value, package) for key, value in state.items()}
    module, _, name = state[_CLASS].partition(":")
    cls: Any = vars(sys.modules[module]).get(name) if module in sys.modules else None
    is_data = isinstance(cls, type) and (dataclasses.is_dataclass(cls) or issubclass(cls, dict))
    if not is_data or module.split(".")[0] not in (package, "collections"):
        raise ValueError(
            f"the saved state of a loader has an object of {state[_CLASS]}, which {package} has not brought as a dataclass "
            "or a subclass of dict; resume with the version of it with which the state was saved"
        )
    value, fields = cls.__new__(cls), _from_values(state[_FIELDS], package)
    if issubclass(cls, dict):
        value.update(fields)
    else:
        for key, item in fields.items():
            object.__setattr__(value, key, item)
    return value
