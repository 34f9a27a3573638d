"""Names of submodules in reports and in saved state: ``main``, ``main/predictor``, ``main/predictor/l1``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_STATELESS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
"""Wrapper classes that have no state of their own, and the attribute that holds the model."""
_WRAPPERS = {**_STATELESS, "AveragedModel": "module"}


def unwrap(model: Any) -> Any:
    """Return the module inside the wrappers of ``torch.compile`` and DDP; any other object is returned as it is.

    A wrapper changes how a model runs, not the names of its submodules, so its prefix must not reach a name.
    """
    while (attribute := _wrapped_attribute(model, _STATELESS)) is not None:
        model = getattr(model, attribute)
    return model


def name_cleaner(model: nn.Module) -> Callable[[str], str]:
    """Return a function from the dotted name of a submodule, parameter or buffer to its name without wrappers."""
    wrapped = [
        (path, attribute)
        for path, module in model.named_modules()
        if (attribute := _wrapped_attribute(module, _WRAPPERS)) is not None
    ]
    prefixes = [(f"{path}.{attribute}".removeprefix("."), path) for path, attribute in reversed(wrapped)]  # innermost first

    def clean(name: str) -> str:
        for prefix, path in prefixes:
            if name == prefix or name.startswith(prefix + "."):
                name = (path + name[len(prefix) :]).removeprefix(".")
        return name

    return clean


def named_submodules(name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every submodule of ``model`` with its path below ``name``, the model itself first; dots become slashes."""
    clean = name_cleaner(model)
    for path, module in model.named_modules():
        yield f"{name}/{clean(path).replace('.', '/')}".removesuffix("/"), module


def _wrapped_attribute(module: object, wrappers: dict[str, str]) -> str | None:
    return next((wrappers[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in wrappers), None)
