"""How the parts of a model are called in reports and in saved state: ``main``, ``main/predictor``, ``main/predictor/l1``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def unwrapped(model: Any) -> Any:
    """The module inside ``torch.compile``'s wrapper; anything else is returned as it is.

    A wrapper changes how a model runs, not what its parts are called, so its prefix must not reach a name.
    """
    while (inner := getattr(model, "_orig_mod", None)) is not None:
        model = inner
    return model


def named_parts(name: str, model: Any) -> Iterator[tuple[str, Any]]:
    """Every submodule of ``model`` with its name under ``name``, the model itself first; dots become slashes."""
    inner = unwrapped(model)
    if inner is not model:
        yield name, model
    for path, module in inner.named_modules():
        yield (f"{name}/{path.replace('.', '/')}" if path else name), module
