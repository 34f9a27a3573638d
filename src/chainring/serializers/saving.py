"""`save` and `load`: a model as one file, anything else as a directory; nothing is ever unpickled."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from chainring._version import __version__
from chainring.names import unwrapped
from chainring.serializers import tensor_file, typed_json
from chainring.serializers.base import has_state, serialize_method
from chainring.serializers.dictionary import DictionaryDeserializer, DictionarySerializer
from chainring.serializers.store import CorruptError, Store, flush_directory, verify, write_bytes

STATE = "state.json"
TENSORS = "rank00000-of-00001.safetensors"
_MODEL = "updater/model:"


def save(path: str | os.PathLike[str], obj: Any) -> None:
    """Saves the state of an object; what is there under that name is complete at every moment.

    Args:
        path: of a module the file, in the safetensors format, which replaces one that is there; of anything else a
            directory that is not there yet.
        obj: a module, or anything with ``serialize`` or PyTorch's ``state_dict`` and ``load_state_dict``.

    Raises:
        TypeError: the object has no state, or a value in it cannot be restored; the error names the value's path.
        FileExistsError: the directory is there already.
        OSError: it cannot be written.
    """
    target = Path(path)
    if _is_module(obj):
        _save_module(target, obj)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    state = state_of(obj)
    iteration = state.get("updater/iteration", state.get("iteration", 0))
    commit(Store(target.parent), target.name, state, iteration if isinstance(iteration, int) else 0)


def commit(
    store: Store, name: str, state: Mapping[str, Any], iteration: int, about: Mapping[str, Any] | None = None
) -> None:
    """Writes a flat state into a store: its tensors in one file, everything else as typed JSON."""
    text, tensors = typed_json.encode(state)
    files = {
        TENSORS: lambda place: tensor_file.write(place, tensors),
        STATE: lambda place: write_bytes(place, text),
    }
    epoch = state.get("updater/iterator:main/epoch")
    store.commit(name, files, iteration, {"versions": versions(), "epoch": epoch, **(about or {})})


def versions() -> dict[str, str]:
    """What the state was written with."""
    return {
        "chainring": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def state_of(obj: Any) -> dict[str, Any]:
    """The state of an object as a flat dictionary, its tensors not copied further than they must be.

    Raises:
        TypeError: the object has none.
    """
    serializer = DictionarySerializer()
    method = serialize_method(obj)
    if method is not None:
        method(serializer)
    elif has_state(obj):
        serializer("state_dict", obj.state_dict())
    else:
        raise TypeError(f"{type(obj).__name__} has no state to save: it needs serialize, or state_dict and load_state_dict")
    return serializer.target


def load(path: str | os.PathLike[str], obj: Any, path_in_snapshot: str = "", strict: bool = True) -> None:
    """Puts saved state into an object, after every byte has been verified.

    Args:
        path: what `save` or a snapshot wrote.
        obj: the object; its shapes must fit.
        path_in_snapshot: the part to load, such as ``"updater/model:main/predictor"``; a module without one gets the only
            model of the snapshot, or the main one.
        strict: whether a missing or unexpected entry is an error; otherwise what is missing stays as it is.

    Raises:
        FileNotFoundError: nothing is there.
        CorruptError: a file is not what was written.
        ValueError, TypeError: a model was given where a trainer is wanted, or the snapshot has no such part.
        KeyError, RuntimeError: entries are missing, unexpected, or of another shape.
    """
    source = Path(path)
    if source.is_dir():
        _put(read_state(source), obj, path_in_snapshot, strict, source)
        return
    if not source.exists():
        raise FileNotFoundError(f"there is no {source}; give the path of a snapshot directory, or of a model's file")
    tensor_file.check_seal(source)
    tensors = tensor_file.read(source)
    if not _is_module(obj):
        raise TypeError(
            f"{source} holds a model, and a {type(obj).__name__} is continued from a snapshot directory; "
            "a model is loaded by load(path, model)"
        )
    prefix = path_in_snapshot.strip("/").replace("/", ".")
    part = {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}
    unwrapped(obj).load_state_dict(part if prefix else tensors, strict=strict)


def read_state(directory: Path) -> dict[str, Any]:
    """The flat state in a snapshot directory, verified.

    Raises:
        CorruptError: it is not what was written.
    """
    manifest = verify(directory)
    tensors: dict[str, Tensor] = {}
    for name in manifest.files:
        if name.endswith(".safetensors"):
            tensors |= tensor_file.read(directory / name)
    if STATE not in manifest.files:
        raise CorruptError(f"{directory} has no {STATE}")
    return typed_json.decode((directory / STATE).read_bytes(), tensors)


def _put(state: dict[str, Any], obj: Any, part: str, strict: bool, source: Path) -> None:
    if part or _is_module(obj):
        prefix = f"{part.strip('/')}/" if part else only_model(state, source)
        state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if not state:
            raise ValueError(f"{source} has nothing under {prefix!r}; `chainring inspect` lists what it has")
    if _is_module(obj):
        unwrapped(obj).load_state_dict({key.replace("/", "."): value for key, value in state.items()}, strict=strict)
        return
    method = serialize_method(obj)
    if method is not None:
        method(DictionaryDeserializer(state, strict))
    else:
        obj.load_state_dict(state["state_dict"])


def only_model(state: Mapping[str, Any], source: Path) -> str:
    """The prefix of the only model in a snapshot, or of the main one."""
    names = sorted({key.removeprefix(_MODEL).partition("/")[0] for key in state if key.startswith(_MODEL)})
    if not names:
        return ""
    if len(names) > 1 and "main" not in names:
        raise ValueError(f"{source} has the models {names}; name one by path_in_snapshot, such as {_MODEL + names[0]!r}")
    return f"{_MODEL}{'main' if 'main' in names else names[0]}/"


def _is_module(obj: Any) -> bool:
    return hasattr(obj, "named_parameters") and has_state(obj) and not hasattr(obj, "serialize")


def _save_module(target: Path, module: Any) -> None:
    """One file, written beside and renamed over what is there."""
    tensors = unwrapped(module).state_dict()
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"a model's file holds tensors, and {name!r} of {type(module).__name__} is {type(value).__name__}; "
                "register it as a buffer, or save the trainer, whose snapshot holds plain values too"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}-{os.getpid()}-{time.monotonic_ns()}.tmp")
    try:
        tensor_file.write_sealed(beside, tensors)
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    flush_directory(target.parent)
