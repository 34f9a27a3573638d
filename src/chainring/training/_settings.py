"""The settings of a run by path: those that all ranks must share, those that its record tells, and how two runs differ."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel as _Replicated
from torch.nn.parameter import is_lazy

from chainring import _environment
from chainring._distributed.sharding import describe_fsdp, is_sharded
from chainring._files import to_json
from chainring._naming import name_cleaner, parameter_names, unwrap
from chainring.serializers._models import hyperparameters
from chainring.training.extension import Extension
from chainring.training.triggers.base import Trigger, describe, describe_setting
from chainring.training.updaters.callbacks import UpdateCallbacks

if TYPE_CHECKING:
    from chainring.training.extension import Entry
    from chainring.training.trainer import Trainer

_OF_TORCH = (
    "get_default_dtype",
    "are_deterministic_algorithms_enabled",
    "get_float32_matmul_precision",
    "backends.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_tf32",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.allow_tf32",
    "backends.cudnn.deterministic",
    "backends.cudnn.benchmark",
)
_PLAIN = (bool, int, float, str, tuple, list, type(None))
_OWN = {"progress_bar", "dataset", "loader", "iterator", "n_processes", "n_prefetch", "dataset_timeout"}
"""Arguments that may differ: what a rank shows, and how it fetches data, whose length is compared."""
_RECORDED = ("argv", "git_commit", "device", "threads", "ranks", "config", "versions", "seeds", "optimizers", "models")
_DEEPEST = 20


class Change(NamedTuple):
    """A setting in which two runs, or two ranks, differ; ``None`` where one of them has none."""

    path: str
    value: Any
    other: Any


class Settings(dict[str, Any]):
    """Settings by path, such as ``config.lr``."""

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> Settings:
        """Return those that the record of a run has, with those that a resume has changed."""
        settings = cls(leaf for name in _RECORDED for leaf in _leaves(name, record.get(name)))
        plan = record.get("plan")
        if isinstance(plan, dict):
            settings["plan.stop_trigger"] = plan.get("stop_trigger")
            entries = plan.get("extensions")
            for entry in entries if isinstance(entries, list) else ():
                if isinstance(entry, dict):
                    text = f"{entry.get('class')} with {entry.get('trigger')}, priority {entry.get('priority')}"
                    settings[f"plan.{entry.get('name')}"] = text
        for start in record.get("starts", ()):
            changed = start.get("changed")
            for name, values in changed.items() if isinstance(changed, dict) else ():
                settings[f"{name}, changed at iteration {start.get('iteration')}"] = values
        return settings

    def differences(self, other: Mapping[str, Any]) -> list[Change]:
        """Return the settings in which another run differs."""
        pairs = (Change(path, self.get(path), other.get(path)) for path in dict.fromkeys([*self, *other]))
        return [pair for pair in pairs if pair.value != pair.other]


def _leaves(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested containers by their paths; a list of plain values is one value."""
    if isinstance(value, dict) and value and depth < _DEEPEST:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item, depth + 1)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value) and depth < _DEEPEST:
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item, depth + 1)
    elif value != {}:
        yield path, value


def to_record(trainer: Trainer) -> dict[str, Any]:
    """Return what the record of a run tells of its settings, as JSON values; `Settings.recorded` reads it."""
    updater = trainer.updater
    iterators, device = updater.get_all_iterators(), getattr(updater, "device", None)
    seeds = {name: iterator.seed for name, iterator in iterators.items() if hasattr(iterator, "seed")}
    extensions = [
        {
            "name": entry.name,
            "class": type(entry.extension).__name__,
            "priority": entry.priority,
            "trigger": describe(entry.trigger),
            "before_training": entry.invoke_before_training,
            "observes": entry.observe is not None,
        }
        for entry in sorted(trainer.entries, key=lambda entry: entry.is_snapshot)  # in the order in which they run
    ]
    return {
        "config": as_json(trainer.config),
        "argv": list(sys.argv),
        "git_commit": _environment.git_commit(),
        "versions": _environment.versions(),
        "device": _environment.device_name(device if isinstance(device, torch.device) else None),
        "threads": torch.get_num_threads(),
        "ranks": trainer.comm.world.size,
        "seeds": as_json({"torch": torch.initial_seed(), "iterators": seeds}),
        "optimizers": as_json(getattr(updater, "constructed", {})),
        "models": {name: _describe_model(model) for name, model in updater.get_all_models().items()},
        "plan": {"stop_trigger": describe(trainer.stop_trigger), "extensions": extensions},
    }


def _describe_model(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model's class, the shape of each parameter, such as ``"50x64"``, and which of them need no gradient."""
    clean = name_cleaner(model)
    parameters = {clean(name).replace(".", "/"): parameter for name, parameter in model.named_parameters()}
    lazy = "not known before the first update"
    shapes = {path: lazy if is_lazy(p) else "x".join(map(str, p.shape)) or "scalar" for path, p in parameters.items()}
    frozen = [path for path, parameter in parameters.items() if not parameter.requires_grad]
    return {"class": type(model).__name__, "parameters": shapes, "frozen": frozen}


def as_json(value: Any) -> Any:
    """Return a value as JSON has it; any other as a text that is the same in every process."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((as_json(item) for item in value), key=repr)
    if hasattr(value, "__qualname__"):  # the text of a class or a function has its address, which is new each time
        return ".".join(filter(None, (value.__module__, value.__qualname__)))
    return json.loads(json.dumps(to_json(value), default=lambda other: re.sub(r" at 0x[0-9a-f]+", "", str(other))))


def shared_settings(trainer: Trainer) -> dict[str, Settings]:
    """Return as texts what must be the same on all ranks, by what it belongs to."""
    updater = trainer.updater
    models, optimizers = updater.get_all_models(), updater.get_all_optimizers()
    names = parameter_names(models)
    settings: dict[str, Mapping[str, Any]] = {
        "the version of": _environment.versions(),
        "the process's": {f"torch.{path}": _read_setting(path) for path in _OF_TORCH},
        "the communicator's": {"size": trainer.comm.size, "timeout": getattr(trainer.comm.world, "timeout", None)},
        "the updater's": _of_updater(updater),
        **{f"iterator {name!r}'s": _of_iterator(source) for name, source in updater.get_all_iterators().items()},
        **{f"model {name!r}'s": _of_model(model) for name, model in models.items()},
        **{f"the order of model {name!r}'s": _order_of(model) for name, model in models.items()},
        **{f"optimizer {name!r}'s": _of_optimizer(optimizer, names) for name, optimizer in optimizers.items()},
        "the trainer's": {
            "stop trigger": describe_setting(trainer.stop_trigger),
            "extensions": [entry.name for entry in trainer.entries],
            "saved run": "is continued" if trainer.is_resumed else "is not loaded",
            "iteration": updater.iteration,
        },
        **{f"extension {entry.name!r}'s": _of_extension(entry, trainer) for entry in trainer.entries},
    }
    return {owner: Settings((key, _as_text(value)) for key, value in group.items()) for owner, group in settings.items()}


def _read_setting(path: str) -> Any:
    """Return a setting of PyTorch; ``None`` where its version has none."""
    try:
        value = attrgetter(path)(torch)
        return value() if callable(value) else value
    except AttributeError:
        return None
    except RuntimeError:  # by a name that cannot be read together with this one
        return "set by fp32_precision"


def _of_updater(updater: Any) -> dict[str, Any]:
    names = ("accumulate", "precision", "accumulate_across_epochs", "virtual_ranks", "compile")
    functions = ("loss_func", "converter")
    device = getattr(updater, "device", None)
    return {
        "class": type(updater).__qualname__,
        **{name: getattr(updater, name, None) for name in names},
        **{name: _name_of_function(getattr(updater, name, None)) for name in functions},
        "type of device": getattr(device, "type", None),
        **_of_callbacks(getattr(updater, "callbacks", None)),
    }


def _of_callbacks(callbacks: Any) -> dict[str, Any]:
    """Return the callbacks of the library, such as those that clip; what others do may be for one rank, such as to print."""
    stages = vars(callbacks) if isinstance(callbacks, UpdateCallbacks) else {}
    return {
        stage: [(function.__qualname__, *_closure_of(function)) for function in functions if _is_ours(function)]
        for stage, functions in stages.items()
        if isinstance(functions, tuple)
    }


def _closure_of(function: Any) -> list[Any]:
    """Return the numbers with which a function was made."""
    variables = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    return [(name, value) for name, value in variables.items() if isinstance(value, _PLAIN)]


def _of_iterator(iterator: Any) -> dict[str, Any]:
    own = {"class": type(iterator).__qualname__, "per_rank": getattr(iterator, "per_rank", False)}
    if own["per_rank"]:  # each rank has data of its own
        return own
    progress = getattr(iterator, "progress", None)
    values = {name: getattr(iterator, name, None) for name in ("batch_size", "repeat", "epoch_length")}
    length = progress[2] if isinstance(progress, tuple) and len(progress) == 3 else None
    loader = getattr(iterator, "loader", None)
    if loader is not None and hasattr(loader, "drop_last"):
        values |= {"drop_last": loader.drop_last, "sampler": type(getattr(loader, "sampler", None)).__qualname__}
    return {**own, **values, "length of an epoch": length, **_arguments(iterator)}


def _of_model(model: Any) -> dict[str, Any]:
    clean = name_cleaner(model)
    return {
        "class": type(unwrap(model)).__qualname__,
        **{f"parameter {clean(name)}": _of_tensor(tensor) for name, tensor in model.named_parameters()},
        **{f"buffer {clean(name)}": _of_tensor(tensor) for name, tensor in model.named_buffers()},
        "modules in evaluation mode": [clean(name) for name, module in model.named_modules() if not module.training],
        **{f"{clean(name)} in DDP": _of_ddp(m) for name, m in model.named_modules() if isinstance(m, _Replicated)},
        **{f"fully_shard of {clean(name)}": text for name, text in describe_fsdp(model).items()},
    }


def _order_of(model: Any) -> dict[str, Any]:
    """Return the order in which ranks exchange gradients, parameters and buffers."""
    clean = name_cleaner(model)
    return {
        "parameters": [clean(name) for name, _ in model.named_parameters()],
        "buffers": [clean(name) for name, _ in model.named_buffers()],
    }


def _of_tensor(tensor: Any) -> tuple[Any, ...]:
    shape = "lazy" if is_lazy(tensor) else tuple(tensor.shape)
    placed = (tensor.placements, tuple(tensor.device_mesh.shape)) if is_sharded(tensor) else ()
    return (shape, str(tensor.dtype), *(["trained" if tensor.requires_grad else "frozen"]), *placed)


def _of_ddp(module: Any) -> dict[str, Any]:
    names = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers", "bucket_bytes_cap")
    hooks = [_name_of_function(hook) for hook, _ in getattr(module, "_comm_hooks", ())]
    return {**{name: getattr(module, name, None) for name in names}, "hooks": hooks}


def _of_optimizer(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    settings: dict[str, Any] = {"class": type(optimizer).__qualname__}
    for index, group in enumerate(hyperparameters(optimizer)):
        settings |= {f"{key} of group {index}": value for key, value in group.items()}
    for index, group in enumerate(optimizer.param_groups):
        settings[f"parameters of group {index}"] = [names.get(id(parameter)) for parameter in group["params"]]
    return settings


def _of_extension(entry: Entry, trainer: Trainer) -> dict[str, Any]:
    """Return the settings of an extension; one of a user's own may have others for each rank, such as the name of a file."""
    extension = entry.extension
    settings = {
        "classes": [type(extension).__name__, type(entry.trigger).__name__],
        "trigger": describe_setting(entry.trigger),
        "priority": entry.priority,
        "invoke_before_training": entry.invoke_before_training,
        **_arguments(extension),
    }
    if isinstance(extension, Extension) and callable(iterators_of := getattr(extension, "get_all_iterators", None)):
        for name, iterator in iterators_of().items():
            settings |= {f"{key} of iterator {name!r}": value for key, value in _of_iterator(iterator).items()}
    scheduler: Any = getattr(extension, "scheduler", None)
    if type(scheduler).__module__ == torch.optim.lr_scheduler.__name__:
        settings |= {f"{key} of the scheduler": value for key, value in scheduler.state_dict().items()}
    if _is_ours(type(extension)):
        settings["identity"] = entry.identify(trainer)
    return settings


def _arguments(obj: Any) -> dict[str, Any]:
    """Return the arguments with which a class of the library was constructed, as far as its attributes tell them."""
    classes = [cls for cls in type(obj).__mro__ if _is_ours(cls) and "__init__" in vars(cls)]
    names = {name for cls in classes for name in inspect.signature(vars(cls)["__init__"]).parameters} - _OWN
    arguments = {name: value for name, value in getattr(obj, "__dict__", {}).items() if name in names}
    return {
        **{name: value for name, value in arguments.items() if isinstance(value, _PLAIN)},
        **{name: _name_of_function(value) for name, value in arguments.items() if inspect.isroutine(value)},
        **{name: describe_setting(value) for name, value in arguments.items() if isinstance(value, Trigger)},
    }


def _is_ours(definition: Any) -> bool:
    return str(getattr(definition, "__module__", "")).startswith("chainring.")


def _name_of_function(function: Any) -> str:
    function = function.func if isinstance(function, functools.partial) else function
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _as_text(value: Any) -> str:
    """Return a setting as text that is the same in every process."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_as_text, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_as_text(key)}: {_as_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        texts = ", ".join(map(_as_text, value))
        return f"[{texts}]" if isinstance(value, list) else f"({texts}{',' * (len(value) == 1)})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
