"""The start of a run on several ranks: all of them train the same way, and write to the same place."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel as _Replicated
from torch.nn.parameter import is_lazy

from chainring import _random
from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import describe_fsdp, is_sharded
from chainring._environment import versions
from chainring._naming import name_cleaner, parameter_names, unwrap
from chainring.serializers._optimizers import hyperparameters
from chainring.training.extension import Extension
from chainring.training.triggers.base import Trigger, describe_setting
from chainring.training.updaters.callbacks import UpdateCallbacks

if TYPE_CHECKING:
    from chainring.serializers._store import Store
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


def check_agreement(trainer: Trainer) -> None:
    """Refuse ranks whose settings differ, which would compute other results than one process does, or wait forever.

    Raises:
        ValueError: a setting differs; the same error on every rank names the first.
    """
    world = trainer.comm.world
    settings = {name: {key: _as_text(value) for key, value in part.items()} for name, part in _settings(trainer).items()}
    digests = world.gather_object({name: _digest(part) for name, part in settings.items()})
    names = dict.fromkeys(name for digest in digests for name in digest)
    for name in names:
        if any(digest.get(name) != digests[0].get(name) for digest in digests):
            _raise_first_difference(name, world.gather_object(settings.get(name)))


def check_out(store: Store, comm: Communicator) -> None:
    """Refuse an ``out`` that is not the same place for all ranks, which a resumed run could not read.

    Raises:
        ValueError: a rank does not see what rank 0 has written there.
    """
    comm = comm.world
    probe = store.leave_probe() if comm.is_main else ""
    try:
        probe = comm.broadcast_object(probe)
        is_seen = comm.gather_object(store.sees_probe(probe))
    finally:
        if comm.is_main:
            store.remove_probe(probe)
    blind = [rank for rank, seen in enumerate(is_seen) if not seen]
    if blind and is_seen[0]:
        raise ValueError(
            f"out is one directory for all ranks, from which each of them resumes, and {str(store)!r} of rank {blind[0]} is "
            "not that of rank 0: give a path on storage that all machines share"
        )


def check_generators(comm: Communicator) -> None:
    """Let ranks that compute a model together begin with the same random numbers, which PyTorch's seed must have given them.

    Those of Python and NumPy, which nobody may have seeded, and of the accelerator become those of the first of them.

    Raises:
        ValueError: PyTorch's generators differ; the same error on every rank.
    """
    states = comm.world.gather_object((comm.rank, torch.initial_seed(), _random.get_rng_state()))
    first: dict[int, tuple[int, int, Any]] = {}  # by the number of the data rank
    for number, (rank, seed, state) in enumerate(states):
        other, other_seed, other_state = first.setdefault(rank, (number, seed, state))
        if not torch.equal(state["torch"], other_state["torch"]):
            raise ValueError(
                f"ranks that compute a model together draw the same random numbers, and PyTorch's generator has others on "
                f"rank {number} (its seed is {seed}) than on rank {other} ({other_seed}): call torch.manual_seed(seed) with "
                "the same seed on all of them before the model is made, or again before trainer.run()"
            )
    _random.set_rng_state(first[comm.rank][2])


def _settings(trainer: Trainer) -> dict[str, Mapping[str, Any]]:
    """Return what must be the same on all ranks, by what it belongs to."""
    updater = trainer.updater
    models = updater.get_all_models()
    names = parameter_names(models)
    return {
        "the version of": versions(),
        "the process's": _of_process(),
        "the communicator's": {"size": trainer.comm.size, "timeout": getattr(trainer.comm.world, "timeout", None)},
        "the updater's": _of_updater(updater),
        **{f"iterator {name!r}'s": _of_iterator(source) for name, source in updater.get_all_iterators().items()},
        **{f"model {name!r}'s": _of_model(model) for name, model in models.items()},
        **{f"the order of model {name!r}'s": _order_of(model) for name, model in models.items()},
        **{f"optimizer {name!r}'s": _of_optimizer(each, names) for name, each in updater.get_all_optimizers().items()},
        "the trainer's": {
            "stop trigger": describe_setting(trainer.stop_trigger),
            "extensions": [entry.name for entry in trainer.entries],
            "saved run": "is continued" if trainer.is_resumed else "is not loaded",
            "iteration": updater.iteration,
        },
        **{f"extension {entry.name!r}'s": _of_extension(entry, trainer) for entry in trainer.entries},
    }


def _of_process() -> dict[str, Any]:
    return {f"torch.{path}": _read_setting(path) for path in _OF_TORCH}


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
    found = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    return [(name, value) for name, value in found.items() if isinstance(value, _PLAIN)]


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
        **{f"fully_shard of {clean(name)}": each for name, each in describe_fsdp(model).items()},
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
    if isinstance(extension, Extension) and callable(of_all := getattr(extension, "get_all_iterators", None)):
        for name, iterator in of_all().items():
            settings |= {f"{key} of iterator {name!r}": value for key, value in _of_iterator(iterator).items()}
    scheduler: Any = getattr(extension, "scheduler", None)
    if type(scheduler).__module__ == torch.optim.lr_scheduler.__name__:
        settings |= {f"{key} of the scheduler": value for key, value in scheduler.state_dict().items()}
    if _is_ours(type(extension)):
        settings["identity"] = entry.identify(trainer)
    return settings


def _arguments(part: Any) -> dict[str, Any]:
    """Return the arguments with which a class of the library was constructed, as far as its attributes tell them."""
    classes = [cls for cls in type(part).__mro__ if _is_ours(cls) and "__init__" in vars(cls)]
    names = {name for cls in classes for name in inspect.signature(vars(cls)["__init__"]).parameters} - _OWN
    found = {name: value for name, value in getattr(part, "__dict__", {}).items() if name in names}
    return {
        **{name: value for name, value in found.items() if isinstance(value, _PLAIN)},
        **{name: _name_of_function(value) for name, value in found.items() if inspect.isroutine(value)},
        **{name: describe_setting(value) for name, value in found.items() if isinstance(value, Trigger)},
    }


def _is_ours(part: Any) -> bool:
    return str(getattr(part, "__module__", "")).startswith("chainring.")


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


def _digest(settings: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()


def _raise_first_difference(name: str, settings: list[Mapping[str, str] | None]) -> None:
    first = settings[0] or {}
    for rank, other in enumerate(settings):
        for key in dict.fromkeys([*first, *(other or {})]):
            one, two = first.get(key, "absent"), (other or {}).get(key, "absent")
            if one != two:
                is_stage = name.startswith("model") and "absent" in (one, two)
                stages = "; the stages of a pipeline, of which each rank has one, are not supported" if is_stage else ""
                one, two = _shorten(one, two)
                raise ValueError(
                    f"all ranks train the same way, and {name} {key} is {one} on rank 0 and {two} on "
                    f"rank {rank}; let every rank run the same script with the same settings (what is printed or written "
                    f"by rank 0 alone needs no condition on the rank){stages}"
                )


def _shorten(one: str, other: str, limit: int = 200) -> tuple[str, str]:
    """Return two texts that differ so short that one can read them, with the place where they differ."""
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, common - limit // 4) if max(len(one), len(other)) > limit else 0

    def cut(text: str) -> str:
        end = "..." if len(text) > start + limit else ""
        return f"{'...' if start else ''}{text[start : start + limit]}{end}"

    return cut(one), cut(other)
