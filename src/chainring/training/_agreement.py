"""What all ranks must share before they train together: their settings, their ``out``, and their generators."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as _Replicated
from torch.nn.parameter import is_lazy

from chainring import _random, _version
from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import describe_fsdp, is_sharded
from chainring._progress import Trainer
from chainring.iterators.base import Iterator
from chainring.serializers._models import hyperparameters
from chainring.serializers._store import Snapshots
from chainring.serializers.protocol import Stateful, name_cleaner, parameter_names, unwrap
from chainring.training._entry import Entry
from chainring.training._run_directory import Settings, as_json
from chainring.training.triggers.base import Trigger, describe
from chainring.training.updaters.callbacks import UpdateCallbacks

_TORCH_SETTINGS = (
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
_DDP_SETTINGS = (
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
    "bucket_bytes_cap",
)
_PLAIN = (bool, int, float, str, tuple, list, type(None))
_MAY_DIFFER = {"progress_bar", "dataset", "loader", "iterator", "n_processes", "n_prefetch", "dataset_timeout"}
"""Arguments that may differ between ranks: what is shown, and how data are fetched, of which the length is compared."""


def check_agreement(trainer: Trainer) -> None:
    """Refuse ranks whose settings differ, which would compute other results than one process does, or wait forever."""
    world, settings = trainer.comm.world, _shared_settings(trainer)
    digest = {owner: hashlib.sha256(repr(sorted(group.items())).encode()).hexdigest() for owner, group in settings.items()}
    digests = world.gather_object(digest)  # the settings themselves only where these differ
    for owner in dict.fromkeys(itertools.chain(*digests)):
        if len({of_rank.get(owner) for of_rank in digests}) == 1:
            continue
        first, *others = (Settings(group) for group in world.gather_object(settings.get(owner, {})))
        rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
        path, *values = first.differences(other)[0]
        is_stage = owner.startswith("model") and None in values
        stages = "; the stages of a pipeline, of which each rank has one, are not supported" if is_stage else ""
        texts = _shorten(values[0] or "absent", values[1] or "absent")
        raise ValueError(
            f"all ranks train the same way, and {owner} {path} is {texts[0]} on rank 0 and {texts[1]} on "
            f"rank {rank}; let every rank run the same script with the same settings (what is printed or written "
            f"by rank 0 alone needs no condition on the rank){stages}"
        )


def _shorten(first: str, second: str, limit: int = 200) -> list[str]:
    """Cut two texts down to the characters around their first difference."""
    shortest, longest = sorted(map(len, (first, second)))
    common = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), shortest)
    start = max(0, common - limit // 4) if longest > limit else 0
    before = "..." if start else ""
    return [before + text[start : start + limit] + ("..." if len(text) > start + limit else "") for text in (first, second)]


def _shared_settings(trainer: Trainer) -> dict[str, dict[str, str]]:
    """Return what must be the same on all ranks, as texts by name, for each object whose settings they are."""
    updater = trainer.updater
    models, optimizers = updater.get_all_models(), updater.get_all_optimizers()
    names, cleaners = parameter_names(models), {name: name_cleaner(model) for name, model in models.items()}
    settings: dict[str, Mapping[str, Any]] = {
        "the version of": _version.versions(),
        "the process's": {f"torch.{path}": _read_setting(path) for path in _TORCH_SETTINGS},
        "the communicator's": {"size": trainer.comm.size, "timeout": getattr(trainer.comm.world, "timeout", None)},
        "the updater's": _updater_settings(updater),
        **{f"iterator {name!r}'s": _iterator_settings(source) for name, source in updater.get_all_iterators().items()},
        **{f"model {name!r}'s": _model_settings(model) for name, model in models.items()},
        **{
            f"the order of model {name!r}'s": {  # in which ranks exchange gradients, parameters and buffers
                "parameters": [cleaners[name](path) for path, _ in model.named_parameters()],
                "buffers": [cleaners[name](path) for path, _ in model.named_buffers()],
            }
            for name, model in models.items()
        },
        **{f"optimizer {name!r}'s": _optimizer_settings(optimizer, names) for name, optimizer in optimizers.items()},
        "the trainer's": {
            "stop trigger": describe(trainer.stop_trigger, as_setting=True),
            "extensions": [entry.name for entry in trainer.entries],
            "saved run": "is continued" if trainer.is_resumed else "is not loaded",
            "iteration": updater.iteration,
        },
        **{f"extension {entry.name!r}'s": _extension_settings(entry, trainer) for entry in trainer.entries},
    }
    return {owner: {key: repr(as_json(value)) for key, value in group.items()} for owner, group in settings.items()}


def _read_setting(path: str) -> Any:
    """Return a setting of PyTorch; ``None`` where its version has none."""
    try:
        value = attrgetter(path)(torch)
        return value() if callable(value) else value
    except AttributeError:
        return None
    except RuntimeError:  # PyTorch refuses to read an old name of a setting once its new name was used
        return "set by fp32_precision"


def _updater_settings(updater: Any) -> dict[str, Any]:
    settings = {
        "class": type(updater).__qualname__,
        "type of device": getattr(getattr(updater, "device", None), "type", None),
        **{name: getattr(updater, name, None) for name in ("precision", "balance", "audit")},
        **_arguments(updater),
    }
    callbacks = getattr(updater, "callbacks", None)
    for stage, functions in vars(callbacks).items() if isinstance(callbacks, UpdateCallbacks) else ():
        if isinstance(functions, tuple):  # only functions of the library: one of the user may be for one rank, to print
            ours = [function for function in functions if _is_ours(function)]
            settings[stage] = [(function.__qualname__, *_closed_over(function)) for function in ours]
    return settings


def _closed_over(function: Any) -> list[Any]:
    """Return the plain values that a function closes over, such as the limit of a clipping."""
    variables = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    return [(name, value) for name, value in variables.items() if isinstance(value, _PLAIN)]


def _iterator_settings(iterator: Any) -> dict[str, Any]:
    settings = {"class": type(iterator).__qualname__, "per_rank": getattr(iterator, "per_rank", False)}
    if settings["per_rank"]:  # each rank has its own data, for which the others need not hold
        return settings
    values = {name: getattr(iterator, name, None) for name in ("batch_size", "repeat", "epoch_length")}
    progress = getattr(iterator, "progress", None)
    length = progress[2] if isinstance(progress, tuple) and len(progress) == 3 else None
    loader = getattr(iterator, "loader", None)
    if loader is not None and hasattr(loader, "drop_last"):
        values |= {"drop_last": loader.drop_last, "sampler": type(getattr(loader, "sampler", None)).__qualname__}
    if hasattr(iterator, "change_weights"):  # a mixture
        sources = iterator.sources
        values |= {"sources": list(zip(sources.names, sources.sizes, strict=True)), "weights": iterator.weights}
    if isinstance(source := getattr(iterator, "source", None), Iterator):  # of the documents that are packed
        values |= {f"{key} of the documents": value for key, value in _iterator_settings(source).items()}
    return {**settings, **values, "length of an epoch": length, **_arguments(iterator)}


def _model_settings(model: Any) -> dict[str, Any]:
    clean = name_cleaner(model)
    settings: dict[str, Any] = {
        "class": type(unwrap(model)).__qualname__,
        **{f"parameter {clean(name)}": _tensor_settings(tensor) for name, tensor in model.named_parameters()},
        **{f"buffer {clean(name)}": _tensor_settings(tensor) for name, tensor in model.named_buffers()},
        "modules in evaluation mode": [clean(name) for name, module in model.named_modules() if not module.training],
        **{f"fully_shard of {clean(name)}": text for name, text in describe_fsdp(model).items()},
    }
    for name, module in model.named_modules():
        if isinstance(module, _Replicated):
            hooks = [_name_of_function(hook) for hook, _ in getattr(module, "_comm_hooks", ())]
            values = {key: getattr(module, key, None) for key in _DDP_SETTINGS}
            settings[f"{clean(name)} in DDP"] = {**values, "hooks": hooks}
    return settings


def _tensor_settings(tensor: Any) -> tuple[Any, ...]:
    shape = "lazy" if is_lazy(tensor) else tuple(tensor.shape)
    placed = (tensor.placements, tuple(tensor.device_mesh.shape)) if is_sharded(tensor) else ()
    return (shape, str(tensor.dtype), "trained" if tensor.requires_grad else "frozen", *placed)


def _optimizer_settings(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    settings: dict[str, Any] = {"class": type(optimizer).__qualname__}
    for index, group in enumerate(hyperparameters(optimizer)):
        settings |= {f"{key} of group {index}": value for key, value in group.items()}
    for index, group in enumerate(optimizer.param_groups):
        settings[f"parameters of group {index}"] = [names.get(id(parameter)) for parameter in group["params"]]
    return settings


def _extension_settings(entry: Entry, trainer: Trainer) -> dict[str, Any]:
    """Return the settings of an extension; those of a user's class may differ between ranks, such as the name of a file."""
    extension = entry.extension
    settings = {
        "classes": [type(extension).__name__, type(entry.trigger).__name__],
        "trigger": describe(entry.trigger, as_setting=True),
        "priority": entry.priority,
        "invoke_before_training": entry.invoke_before_training,
        **_arguments(extension),
    }
    if isinstance(extension, Stateful) and callable(iterators_of := getattr(extension, "get_all_iterators", None)):
        for name, iterator in iterators_of().items():
            settings |= {f"{key} of iterator {name!r}": value for key, value in _iterator_settings(iterator).items()}
    scheduler: Any = getattr(extension, "scheduler", None)
    if type(scheduler).__module__ == torch.optim.lr_scheduler.__name__:
        settings |= {f"{key} of the scheduler": value for key, value in scheduler.state_dict().items()}
    if _is_ours(type(extension)):
        settings["identity"] = entry.identify(trainer).texts
    return settings


def _arguments(obj: Any) -> dict[str, Any]:
    """Return the arguments with which a class of the library was constructed, as far as its attributes tell them."""
    classes = [cls for cls in type(obj).__mro__ if _is_ours(cls) and "__init__" in vars(cls)]
    names = {name for cls in classes for name in inspect.signature(vars(cls)["__init__"]).parameters} - _MAY_DIFFER
    arguments = {name: value for name, value in getattr(obj, "__dict__", {}).items() if name in names}
    return {
        **{name: value for name, value in arguments.items() if isinstance(value, _PLAIN)},
        **{name: _name_of_function(value) for name, value in arguments.items() if callable(value)},
        **{name: describe(value, as_setting=True) for name, value in arguments.items() if isinstance(value, Trigger)},
    }


def _is_ours(definition: Any) -> bool:
    return str(getattr(definition, "__module__", "")).startswith("chainring.")


def _name_of_function(function: Any) -> str:
    function = function.func if isinstance(function, functools.partial) else function
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def check_out(store: Snapshots, comm: Communicator) -> None:
    """Refuse an ``out`` that is not the same place for all ranks, which a resumed run could not read."""
    comm = comm.world
    with store.files.probe() if comm.is_main else nullcontext("") as probe:
        probe = comm.broadcast_object(probe)
        is_seen = comm.gather_object(store.files.exists(probe))
    blind = [rank for rank, seen in enumerate(is_seen) if not seen]
    if blind and is_seen[0]:
        raise ValueError(
            f"out is one directory for all ranks, from which each of them resumes, and {str(store)!r} of rank {blind[0]} is "
            "not that of rank 0: give a path on storage that all machines share"
        )


def check_generators(trainer: Trainer) -> None:
    """Let ranks that compute a model together begin with the same random numbers, which PyTorch's seed must have given them.

    Those of Python and NumPy, which nobody may have seeded, and of accelerators become those of the first of them.
    """
    comm, updater = trainer.comm, trainer.updater
    states = comm.world.gather_object((comm.rank, torch.initial_seed(), _random.get_rng_state(updater)))
    first: dict[int, tuple[int, int, Any]] = {}  # by the number of the data rank
    for number, (rank, seed, state) in enumerate(states):
        before, its_seed, its_state = first.setdefault(rank, (number, seed, state))
        if not torch.equal(state["torch"], its_state["torch"]):
            raise ValueError(
                f"ranks that compute a model together draw the same random numbers, and PyTorch's generator has others on "
                f"rank {number} (its seed is {seed}) than on rank {before} ({its_seed}): call torch.manual_seed(seed) with "
                "the same seed on all of them before the model is made, or again before trainer.run()"
            )
    _random.set_rng_state(first[comm.rank][2], updater)
