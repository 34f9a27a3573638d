"""How the parts of a model are called in reports and in saved state: ``main``, ``main/predictor``, ``main/predictor/l1``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_STATELESS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
"""Wrappers that have no state of their own, and the attribute in which each holds the model."""
_WRAPPERS = {**_STATELESS, "AveragedModel": "module"}


def unwrap(model: Any) -> Any:
    """The module inside the wrappers of ``torch.compile`` and DDP; anything else is returned as it is.

    A wrapper changes how a model runs, not what its parts are called, so its prefix must not reach a name.
    """
    while (inner := _inner_of(model, _STATELESS)) is not None:
        model = getattr(model, inner)
    return model


def _inner_of(module: Any, wrappers: dict[str, str]) -> str | None:
    return next((wrappers[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in wrappers), None)


def name_cleaner(model: Any) -> Callable[[str], str]:
    """A function from the dotted name of a part, parameter or buffer of ``model`` to its name without wrappers."""
    found = [(path, inner) for path, part in model.named_modules() if (inner := _inner_of(part, _WRAPPERS)) is not None]
    prefixes = [(f"{path}.{inner}" if path else inner, path) for path, inner in reversed(found)]  # the inmost first

    def clean(name: str) -> str:
        for prefix, path in prefixes:
            if name == prefix or name.startswith(prefix + "."):
                name = (path + name[len(prefix) :]).removeprefix(".")
        return name

    return clean


def named_submodules(name: str, model: Any) -> Iterator[tuple[str, Any]]:
    """Every submodule of ``model`` with its name under ``name``, the model itself first; dots become slashes."""
    clean = name_cleaner(model)
    for path, module in model.named_modules():
        shown = clean(path).replace(".", "/")
        yield (f"{name}/{shown}" if shown else name), module
