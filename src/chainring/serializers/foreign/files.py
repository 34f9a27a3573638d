"""Files of other libraries: those of ``torch.save``, read by torch's reader of weights alone, and npz files of Chainer.

A file of ``torch.save`` holds a checkpoint of a Lightning ``Trainer``, a snapshot of pytorch-pfn-extras, or the state dict
of a model, alone or with others under the names that scripts and tutorials give them. Nothing in any of them is run.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickletools
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from chainring._checks import is_number
from chainring.serializers.foreign.content import (
    Entries,
    ForeignCheckpoint,
    SavedOptimizer,
    count,
    is_entries,
    is_optimizer_state,
    to_entries,
    to_optimizer,
)
from chainring.serializers.npz import read_arrays

_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The beginning of a file of ``torch.save`` before 1.6: a number in a pickle."""
_PICKLES_BEFORE = 4  # at the beginning of a file of this kind: two numbers, what is known of the system, and the value
_DEEPEST_TUPLE = 16
PATHS = {
    f"{module}.{name}"
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path", "PurePath")
}
_NUMBERS = {
    order + code
    for order in ("", "<", ">")
    for code in ("b1", *(f"{kind}{size}" for kind in "iuf" for size in (1, 2, 4, 8)))
}
_LIGHTNING, _PFN_EXTRAS = "pytorch-lightning_version", "_start_iteration"
_SCALER_OF_LIGHTNING = "MixedPrecision"
_TAKEN_OF_LIGHTNING = {"state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", "loops", _LIGHTNING}
_TAKEN_OF_PFN_EXTRAS = {_PFN_EXTRAS, "_start_execution", "models", "optimizers", "extensions", "ppe_version"}
_MODEL = ("model", "state_dict", "model_state_dict", "model_state", "net", "module")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_state", "optim", "optim_state_dict")
_SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")
_SCALER = ("scaler", "grad_scaler", "scaler_state_dict")
_ITERATION = ("iteration", "global_step", "step", "iter", "iter_num", "num_updates")
_EPOCH = ("epoch", "epochs")


def read(path: Path) -> ForeignCheckpoint | None:
    """Return what a file holds; ``None`` if it is of no format that is known here, or there is no model in it."""
    if not path.is_file():  # to open a pipe would be to wait for ever
        return None
    with path.open("rb") as file:
        start = file.read(len(_LEGACY))
    is_of_torch = start == _LEGACY
    if start.startswith(_ZIP):
        damage = (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, RuntimeError)
        with contextlib.suppress(*damage), zipfile.ZipFile(path) as archive:
            is_of_torch = any(name.endswith("/data.pkl") for name in archive.namelist())
    if not is_of_torch:
        return _read_chainer(path)
    content = read_torch(path)
    if isinstance(content, Mapping):
        if _LIGHTNING in content and is_entries(content.get("state_dict")):
            return _of_lightning(str(path), content)
        if _PFN_EXTRAS in content and isinstance(content.get("models"), Mapping):
            return _of_pfn_extras(str(path), content)
    return from_dictionary("a file of torch.save", content, str(path))


# --- files of torch.save ---


def read_torch(source: Path | BinaryIO, where: str | None = None) -> Any:
    """Return what ``torch.save`` has written: tensors on the CPU, plain values, and paths as text."""
    try:
        sizes = _check_archive(source)
        with torch.serialization.safe_globals(_STAND_INS):
            content = torch.load(source, map_location="cpu", weights_only=True)
        if sizes is not None and _storage_sizes(content) - sizes:  # torch 2.6 would read whatever lies behind it
            raise ValueError("it ends within a tensor")
    except Exception as error:  # of a damaged file torch's reader raises whatever its parts raise
        text = str(error)
        lines = (text.partition("WeightsUnpickler error: ")[2] or text).split("\n")  # before it torch advises to unpickle
        reason = f"{type(error).__name__}: {next(filter(None, lines), '')}"
        reason = f"it is damaged, or not of plain tensors and values ({reason})"
        if "GLOBAL " in text:
            name = text.partition("GLOBAL ")[2].split()[0]
            reason = f"it holds {name}, which only unpickling could make, and that can run any code: save plain values there"
        raise ValueError(f"{where or source} cannot be read: {reason}") from error
    return content


def _check_archive(source: Path | BinaryIO) -> Counter[int] | None:
    """Return the sizes of the members of an archive, none of them compressed; ``None`` for the form before torch 1.6."""
    with open(source, "rb") if isinstance(source, Path) else contextlib.nullcontext(source) as file:
        is_archive = file.read(len(_ZIP)) == _ZIP
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if not is_archive:
            for _ in range(_PICKLES_BEFORE):
                _check_tuples(file)
            file.seek(0)
            return None
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("it is compressed: unpack and pack it without compression")
            if sum(member.file_size for member in members) > size:
                raise ValueError("its entries are larger than the file")
            for member in members:
                if member.filename.endswith(".pkl"):
                    _check_tuples(io.BytesIO(archive.read(member)))
        file.seek(0)
    return Counter(member.file_size for member in members)


def _check_tuples(file: BinaryIO) -> None:
    """Refuse tuples in tuples in tuples before torch makes a key of them: its hash could take for ever."""
    depths, marks, memo = list[int](), list[int](), dict[Any, int]()  # of each value, how many tuples are in one another
    for code, argument, _ in pickletools.genops(file):
        name = code.name
        if name == "MARK":
            marks.append(len(depths))
        elif name.startswith("TUPLE"):
            start = marks.pop() if name == "TUPLE" else len(depths) - int(name[-1])
            depths[start:] = [1 + max(depths[start:], default=0)]
            if depths[-1] > _DEEPEST_TUPLE:
                raise ValueError("it has tuples in tuples without end")
        elif name.endswith("PUT"):
            memo[argument] = depths[-1]
        elif name.endswith("GET"):
            depths.append(memo[argument])
        elif name in ("REDUCE", "NEWOBJ"):  # as of a torch.Size, which is a tuple too
            depths[-2:] = depths[-1:]
        elif name in ("BUILD", "APPEND", "SETITEM"):
            del depths[-2 if name == "SETITEM" else -1 :]
        elif name in ("APPENDS", "SETITEMS"):
            del depths[marks.pop() :]
        elif name == "BINPERSID":
            depths[-1] = 0
        elif name not in ("PROTO", "STOP"):
            depths.append(0)


def _storage_sizes(content: Any) -> Counter[int]:
    """Return how many storages of each size the tensors in a value have."""
    storages: dict[int, int] = {}
    values, seen = [content], set[int]()
    while values:
        value = values.pop()
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, (dict, list, tuple, set)) and id(value) not in seen:
            seen.add(id(value))
            values += value.values() if isinstance(value, dict) else value
    return Counter(filter(None, storages.values()))


class _NumPy:
    """What stands for a dtype of NumPy, and for an array, which nothing is taken from."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">"):
            self.code = f"{state[1]}{self.code}"


def _to_number(dtype: Any, content: Any) -> Any:
    """Return a number of NumPy as one of Python."""
    if not isinstance(dtype, _NumPy) or dtype.code not in _NUMBERS or not isinstance(content, bytes):
        raise ValueError("it has a value of NumPy that is no number")
    return np.frombuffer(content, dtype.code, 1).item()


def _to_text(*parts: Any) -> str:
    """Return a path as text; the system's own class would be another one on another system."""
    return os.path.join(*parts) if parts and all(isinstance(part, str) for part in parts) else ""


_STAND_INS: list[Any] = [
    *((_to_text, name) for name in PATHS),
    *((_to_number, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *((_NumPy, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    (_NumPy, "numpy.ndarray"),
    (_NumPy, "numpy.dtype"),
]
"""What torch's reader makes in place of paths and of values of NumPy: text, numbers of Python, and nothing of arrays."""


def _of_lightning(where: str, content: Mapping[Any, Any]) -> ForeignCheckpoint:
    checkpoint = ForeignCheckpoint("a Lightning checkpoint", {"main": to_entries(content["state_dict"], where)})
    optimizers = _part(where, content, "optimizer_states", list)
    names = ["main"] if len(optimizers) == 1 else list(map(str, range(len(optimizers))))
    checkpoint.optimizers = {
        name: to_optimizer(state, f"{where}: 'optimizer_states'") for name, state in zip(names, optimizers, strict=True)
    }
    checkpoint.schedulers = _part(where, content, "lr_schedulers", list)
    scaler = content.get(_SCALER_OF_LIGHTNING)
    checkpoint.scaler = scaler if _is_scaler(scaler) else None
    checkpoint.iteration = count(content.get("global_step"), f"{where}: 'global_step'")
    try:
        loop = content["loops"]["fit_loop"]
        batches = loop["epoch_loop.batch_progress"]
        # Lightning counts a batch as processed when its update is done, and an epoch as ready when it begins.
        begun = count(loop["epoch_progress"]["current"]["ready"], f"{where}: epochs")
        processed = count(batches["current"]["processed"], f"{where}: batches")
        is_last = batches["is_last_batch"]
    except (KeyError, TypeError):  # of versions that saved no loops
        checkpoint.epoch = count(content.get("epoch"), f"{where}: 'epoch'")
    else:
        checkpoint.epoch, checkpoint.batches = (begun, 0) if not begun or is_last else (begun - 1, processed)
    taken = _TAKEN_OF_LIGHTNING | ({_SCALER_OF_LIGHTNING} if checkpoint.scaler is not None else set())
    checkpoint.left = [str(key) for key in content if key not in taken]
    return checkpoint


def _of_pfn_extras(where: str, content: Mapping[Any, Any]) -> ForeignCheckpoint:
    models, optimizers, extensions = (_part(where, content, key, dict) for key in ("models", "optimizers", "extensions"))
    if not models or not all(map(is_entries, models.values())):
        raise ValueError(f"{where} has no models in 'models': it is damaged, or none was given to the manager")
    entries = {str(name): to_entries(model, where) for name, model in models.items()}
    checkpoint = ForeignCheckpoint("a snapshot of pytorch-pfn-extras", entries)
    checkpoint.optimizers = {
        str(name): to_optimizer(state, f"{where}: optimizer {name!r}") for name, state in optimizers.items()
    }
    checkpoint.iteration = count(content[_PFN_EXTRAS], f"{where}: {_PFN_EXTRAS!r}")
    checkpoint.left = [str(key) for key, value in content.items() if key not in _TAKEN_OF_PFN_EXTRAS and value]
    for name, saved in extensions.items():
        state = saved.get("extension") if isinstance(saved, Mapping) else None
        if isinstance(state, Mapping) and state.get("scheduler") is not None:
            checkpoint.schedulers.append(state["scheduler"])
        else:
            checkpoint.left.append(f"extension {name}")
    return checkpoint


def _part(where: str, content: Mapping[Any, Any], key: str, cls: type) -> Any:
    value = content.get(key, cls())
    if not isinstance(value, Mapping if cls is dict else cls):
        raise ValueError(f"{where} is damaged: {key!r} is a {type(value).__name__} and no {cls.__name__}")
    return value


def from_dictionary(kind: str, content: Any, where: str) -> ForeignCheckpoint | None:
    """Return what a state dict, or a dictionary of several, holds under the usual names; ``None`` if there is no model."""
    if is_entries(content):
        return ForeignCheckpoint(kind, {"main": to_entries(content, where)})
    models = [key for key, value in content.items() if is_entries(value)] if isinstance(content, Mapping) else []
    if not models:
        return None
    usual = [key for key in models if key in _MODEL]  # beside, such as an average of its parameters
    model = models[0] if len(models) == 1 else usual[0] if len(usual) == 1 else None

    def find(names: tuple[str, ...], fits: Callable[[Any], bool]) -> str | None:
        return next((name for name in names if name in content and fits(content[name])), None)

    optimizer, scaler = find(_OPTIMIZER, is_optimizer_state), find(_SCALER, _is_scaler)
    scheduler = find(_SCHEDULER, lambda value: isinstance(value, Mapping) and "last_epoch" in value)
    iteration, epoch = find(_ITERATION, is_number), find(_EPOCH, is_number)
    return ForeignCheckpoint(
        kind,
        {str(key): to_entries(content[key], where) for key in models},
        main=str(model),
        optimizers={} if optimizer is None else {"main": to_optimizer(content[optimizer], f"{where}: {optimizer!r}")},
        schedulers=[] if scheduler is None else [content[scheduler]],
        scaler=None if scaler is None else content[scaler],
        iteration=count(content.get(iteration), f"{where}: {iteration!r}"),
        epoch=count(content.get(epoch), f"{where}: {epoch!r}"),
        left=[str(key) for key in content if key not in (*models, optimizer, scheduler, scaler, iteration, epoch)],
    )


def _is_scaler(value: Any) -> bool:
    return isinstance(value, Mapping) and "scale" in value


# --- npz files of Chainer: a model, or a snapshot of a trainer ---

_NAMES_OF_CHAINER = {
    "W": "weight", "b": "bias", "gamma": "weight", "beta": "bias",
    "avg_mean": "running_mean", "avg_var": "running_var", "N": "num_batches_tracked",
}  # fmt: skip
_MODELS, _OPTIMIZERS, _ITERATOR = "updater/model:", "updater/optimizer:", "updater/iterator:main/"
_RULES: dict[frozenset[str], tuple[str, dict[str, str]]] = {
    frozenset("mv"): ("betas", {"m": "exp_avg", "v": "exp_avg_sq"}),
    frozenset(("m", "v", "vhat")): ("betas", {"m": "exp_avg", "v": "exp_avg_sq", "vhat": "max_exp_avg_sq"}),
    frozenset("v"): ("momentum", {"v": "momentum_buffer"}),
    frozenset(("ms",)): ("alpha", {"ms": "square_avg"}),
    frozenset("h"): ("lr_decay", {"h": "sum"}),
    frozenset(("msg", "msdx")): ("rho", {"msg": "square_avg", "msdx": "acc_delta"}),
    frozenset(): ("lr", {}),
}
"""By the names of the arrays of a parameter in Chainer: a setting by which torch's optimizer is known, and its names."""


def _read_chainer(path: Path) -> ForeignCheckpoint | None:
    arrays = read_arrays(
        path, lambda names: any(name.startswith(_MODELS) or name.rpartition("/")[2] in _NAMES_OF_CHAINER for name in names)
    )
    if arrays is None:
        return None
    models, optimizers = _below(arrays, _MODELS), _below(arrays, _OPTIMIZERS)
    if not models:
        return ForeignCheckpoint("a model of Chainer", {"main": _entries(arrays)}, is_ordered=False)

    def find(name: str) -> int | None:
        return None if arrays.get(name) is None else count(_tensor(name, arrays[name]), f"{path}: {name!r}")

    places = (f"{_ITERATOR}{key}" for key in ("epoch", "current", "previous", "is_new"))
    taken = (_MODELS, _OPTIMIZERS, "updater/iteration", *places)
    return ForeignCheckpoint(
        "a snapshot of Chainer",
        {name: _entries(below) for name, below in models.items()},
        optimizers={name: _optimizer(f"{path}: optimizer {name!r}", below) for name, below in optimizers.items()},
        iteration=find("updater/iteration"),
        epoch=find(f"{_ITERATOR}epoch"),
        examples=find(f"{_ITERATOR}current_position"),
        left=list(dict.fromkeys("/".join(name.split("/")[:2]) for name in arrays if not name.startswith(taken))),
        is_ordered=False,
    )


def _below(arrays: Mapping[str, Any], start: str) -> dict[str, dict[str, Any]]:
    """Return by the name of a model or an optimizer the arrays below it."""
    parts: dict[str, dict[str, Any]] = {}
    for path, array in arrays.items():
        if path.startswith(start):
            name, _, below = path.removeprefix(start).partition("/")
            parts.setdefault(name, {})[below] = array
    return parts


def _name(path: str) -> str:
    """Return the dotted name that PyTorch's modules have for a parameter."""
    *parents, last = path.split("/")
    return ".".join([*parents, _NAMES_OF_CHAINER.get(last, last)])


def _entries(arrays: Mapping[str, Any]) -> Entries:
    """Return parameters and buffers; one that is ``None``, not yet initialized, is left out."""
    return {_name(path): _tensor(path, array) for path, array in arrays.items() if array is not None}


def _tensor(path: str, array: Any) -> Tensor:
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{path!r} is an array of {array.dtype}, and a model of Chainer holds numbers")
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _optimizer(where: str, arrays: Mapping[str, Any]) -> SavedOptimizer:
    """Return the state by PyTorch's names. Chainer saves no settings: those of the script hold.

    Of MomentumSGD and NesterovAG Chainer keeps the negative step, ``-lr`` times PyTorch's buffer.
    """
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for path, array in arrays.items():
        parameter, _, key = path.rpartition("/")
        if parameter and array is not None:
            by_parameter.setdefault(_name(parameter), {})[key] = _tensor(path, array)
    state: dict[str, dict[str, Tensor]] = {}
    settings = set()
    for name, entries in by_parameter.items():
        step = entries.pop("t", torch.tensor(0))
        if frozenset(entries) not in _RULES:
            raise ValueError(
                f"{where} has {sorted(entries)} of {name!r}, as no optimizer of torch has: start with a new one"
            )
        setting, names = _RULES[frozenset(entries)]
        settings.add(setting)
        state[name] = {names[key]: value for key, value in entries.items()}
        if setting == "momentum":
            state[name]["momentum_buffer"] = -state[name]["momentum_buffer"]
        elif names:
            state[name]["step"] = step.to(torch.float32)
    if len(settings) > 1:
        raise ValueError(f"{where} has parameters with several update rules: start with a new optimizer")
    kept = {name: entries for name, entries in state.items() if entries}
    return SavedOptimizer(kept, [], [list(state)], required=next(iter(settings), None))
