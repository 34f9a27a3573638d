"""Names of submodules in reports and in saved state: ``main``, ``main/predictor``, ``main/predictor/l1``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_STATELESS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
"""Wrapper classes that have no state of their own, and the attribute that holds the model."""
_WRAPPERS = {**_STATELESS, "AveragedModel": "module", "ActivationWrapper": "_checkpoint_wrapped_module"}


def unwrap(model: Any) -> Any:
    """Return the module inside the wrappers of ``torch.compile`` and DDP; any other object is returned as it is.

    A wrapper changes how a model runs, not the names of its submodules, so its prefix must not reach a name.
    """
    while attributes := [_STATELESS[base.__name__] for base in type(model).__mro__ if base.__name__ in _STATELESS]:
        model = getattr(model, attributes[0])
    return model


def name_of_model(model: Any, models: Mapping[str, Any]) -> str:
    """Return the name that a model has among several, of one that is not among them its class."""
    model = unwrap(model)
    return next((name for name, registered in models.items() if unwrap(registered) is model), type(model).__name__)


def name_cleaner(model: nn.Module) -> Callable[[str], str]:
    """Return a function from the dotted name of a submodule, parameter or buffer to its name without wrappers."""
    attributes = {
        cls: _WRAPPERS[base.__name__]
        for cls in set(map(type, submodules(model)))
        for base in reversed(cls.__mro__)  # the most derived one decides
        if base.__name__ in _WRAPPERS
    }
    if not attributes:
        return str
    wrapped = [(path, attributes[type(module)]) for path, module in model.named_modules() if type(module) in attributes]
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


def submodules(model: nn.Module) -> list[nn.Module]:
    """Return a model and its submodules, each once."""
    # hot path: "chainring, asynchronous" in benchmarks/snapshot.py; modules() takes three times as long
    if not hasattr(model, "_modules"):  # another class with the methods of a module
        return [module for _, module in model.named_modules()]
    visited: dict[nn.Module, None] = {}
    to_visit = [model]
    while to_visit:
        module = to_visit.pop()
        if module not in visited:
            visited[module] = None
            to_visit += [child for child in module._modules.values() if child is not None]
    return list(visited)


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the name of each parameter by its id, such as ``main/predictor/l1/weight``; of a tied one the first."""
    names: dict[int, str] = {}
    for model_name, model in models.items():
        clean = name_cleaner(model)
        for path, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{model_name}/{clean(path).replace('.', '/')}")
    return names
