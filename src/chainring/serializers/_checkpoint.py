"""`save` and `load`: a model as one file, anything else as a directory; nothing is ever unpickled."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chainring import _random
from chainring._distributed.communicator import Communicator, as_communicator
from chainring._distributed.sharding import is_sharded, local_shard, to_full
from chainring._environment import versions
from chainring._files import atomic_write, flush_file, write_bytes
from chainring._naming import name_cleaner, unwrap
from chainring.serializers import _safetensors, _values
from chainring.serializers._store import CorruptError, Store, WriteFile, verify
from chainring.serializers.base import (
    DictionaryDeserializer,
    StateCollector,
    find_aliases,
    has_state,
    load_module,
    save_module,
    serialize_method,
    shard_like,
)

WriteResult = tuple[int, int] | str
"""Size and checksum of a rank's file, or why there is none."""


def rank_file_name(rank: int, size: int) -> str:
    """What a rank's file is called."""
    return f"rank{rank:05d}-of-{size:05d}.safetensors"


def participate(comm: Communicator, write: WriteFile) -> None:
    """Takes part in the snapshot that rank 0 commits.

    Raises:
        OSError: it is not committed; the error says which rank has failed and why.
    """
    place: str | None = comm.broadcast_object(None)
    if place is not None:
        comm.gather_object(_written(write, Path(place) / rank_file_name(comm.rank, comm.size)))
    outcome: str | None = comm.broadcast_object(None)
    if outcome is not None:
        raise OSError(errno.EIO, outcome)


def coordinate(
    comm: Communicator, store: Store, name: str, write: WriteFile, files: Mapping[str, WriteFile], iteration: int, about: Any
) -> None:
    """Commits a snapshot with the files of all ranks; rank 0's call beside the `follow` of the others.

    Raises:
        OSError: a rank could not write, or the snapshot could not be published.
    """
    announced = False
    votes: list[WriteResult] = []

    def together(place: Path) -> tuple[int, int]:
        nonlocal announced, votes
        announced = True
        comm.broadcast_object(str(place.parent))
        votes = comm.gather_object(_written(write, place))
        failed = [f"rank {rank}: {vote}" for rank, vote in enumerate(votes) if isinstance(vote, str)]
        if failed:
            raise OSError(errno.EIO, f"the snapshot could not be written by {'; '.join(failed)}")
        return _numbers(votes[0])

    def of(rank: int) -> WriteFile:
        return lambda place: _numbers(votes[rank])

    others = {rank_file_name(rank, comm.size): of(rank) for rank in range(1, comm.size)}
    try:
        store.commit(name, {rank_file_name(0, comm.size): together, **others, **files}, iteration, about)
    except BaseException as error:
        if not announced:
            comm.broadcast_object(None)
        comm.broadcast_object(f"{type(error).__name__}: {error}")
        raise
    comm.broadcast_object(None)


def _written(write: WriteFile, place: Path) -> WriteResult:
    try:
        return write(place)
    except BaseException as error:  # whatever it is, the others must not wait
        return f"{type(error).__name__}: {error}"


def _numbers(vote: WriteResult) -> tuple[int, int]:
    assert not isinstance(vote, str)
    return vote


class _Part(NamedTuple):
    tensor: Tensor
    offsets: Sequence[int]
    shape: Sequence[int]
    path: Path


def read_all(paths: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of the files of a snapshot, each whole.

    Raises:
        CorruptError: parts of a tensor are missing, too many, or do not fit together.
        ValueError: a file is damaged.
    """
    tensors: dict[str, Tensor] = {}
    parts: dict[str, list[_Part]] = {}
    for path in paths:
        places = _safetensors.read_shard_offsets(path)
        for name, tensor in _safetensors.read(path).items():
            if name in places:
                parts.setdefault(name, []).append(_Part(tensor, *places[name], path))
            elif name in tensors:
                raise CorruptError(f"{path} has {name!r}, which another file of the snapshot has too")
            else:
                tensors[name] = tensor
    if both := parts.keys() & tensors.keys():
        raise CorruptError(f"{min(both)!r} is saved whole and in parts")
    return tensors | {name: _together(name, held) for name, held in parts.items()}


def _together(name: str, parts: list[_Part]) -> Tensor:
    first = parts[0]
    covered = sum(part.tensor.numel() for part in parts)
    fit = all(part.shape == first.shape and part.tensor.dtype == first.tensor.dtype and _is_inside(part) for part in parts)
    if not fit or covered != math.prod(first.shape):  # checked first: the shape alone could ask for any memory
        raise CorruptError(f"the parts of {name!r} in {[part.path.name for part in parts]} are not one whole")
    # Every number is written over unless parts overlap, in which case some would be left: NaN says so, zero elsewhere.
    full = torch.full(tuple(first.shape), math.nan if first.tensor.is_floating_point() else 0, dtype=first.tensor.dtype)
    for part in parts:
        full[_slices(part)] = part.tensor
    return full


def _slices(part: _Part) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(part.offsets, part.tensor.shape, strict=True))


def _is_inside(part: _Part) -> bool:
    sizes = tuple(part.tensor.shape)
    return len(sizes) == len(part.offsets) == len(part.shape) and all(
        0 <= start <= start + size <= whole for start, size, whole in zip(part.offsets, sizes, part.shape, strict=True)
    )


STATE = "state.json"
TENSORS = "rank00000-of-00001.safetensors"
_MODEL = "updater/model:"


def save(path: str | os.PathLike[str], obj: Any) -> None:
    """Saves the state of an object; what is there under that name is complete at every moment.

    A model of which each rank holds a part is saved whole; every rank calls this.

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
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_module(obj):
        save_tensors(target, module_tensors(obj))
        return
    state = capture(obj, target.parent)
    iteration = state.target.get("updater/iteration", state.target.get("iteration", 0))
    Checkpoint(state).commit(Store(target.parent), target.name, iteration if isinstance(iteration, int) else 0)


class Checkpoint:
    """A state ready to be written: its tensors in one file, everything else as typed JSON.

    Attributes:
        tensors: the tensors of the state by name, not copied. Where they will change before `commit`, put copies here.
        about: what the manifest says beside the files.

    Raises:
        TypeError: a value cannot be restored; the error names its path.
    """

    def __init__(self, state: StateCollector) -> None:
        self._text, tensors = _values.encode(state.target)
        self._referred, self._comm = state.referred, state.comm
        chunks = {name: local_shard(tensor) for name, tensor in tensors.items() if is_sharded(tensor)}
        plain = {name: tensor for name, tensor in tensors.items() if name not in chunks and self._comm.rank == 0}
        own = {name: chunk for name, chunk in chunks.items() if chunk is not None}
        self.is_sharded = bool(chunks)
        self.tensors = {**plain, **{name: chunk.tensor for name, chunk in own.items()}}
        self._places = {name: (chunk.offsets, chunk.shape) for name, chunk in own.items()}
        self.about = {"versions": versions(), "epoch": state.target.get("updater/iterator:main/epoch")}
        if (reason := _random.nondeterminism_reason()) is not None:
            self.about["not bit-exact"] = reason

    def commit(
        self, store: Store, name: str, iteration: int, about: Mapping[str, Any] | None = None, comm: Any = None
    ) -> None:
        """Writes it into a store, see `Store.commit`; the files that it refers to are flushed first.

        Of several ranks, rank 0 writes; all do where each holds parts of tensors, and then need a ``comm`` for that alone.
        """
        for path in self._referred:
            flush_file(path)

        def write(place: Path) -> tuple[int, int]:
            return _safetensors.write(place, self.tensors, places=self._places)

        said = {**self.about, **(about or {})}
        files: dict[str, WriteFile] = {STATE: lambda place: write_bytes(place, self._text)}
        if not self.is_sharded or self._comm.size == 1:
            if self._comm.rank == 0:
                store.commit(name, {TENSORS: write, **files}, iteration, said)
        elif self._comm.rank == 0:
            coordinate(comm, store, name, write, files, iteration, said)
        else:
            participate(comm, write)


def capture(obj: Any, directory: Path | None = None, comm: Any = None) -> StateCollector:
    """The state of an object as a flat dictionary, not copied, for a snapshot that will lie in ``directory``.

    Of several ranks each calls it, and the result of rank 0 is that of all, but for tensors of which each holds a part.

    Raises:
        TypeError: the object has none.
    """
    serializer = StateCollector(directory)
    serializer.comm = serializer.comm if comm is None else comm
    method = serialize_method(obj)
    if method is not None:
        method(serializer)
    elif is_module(obj):
        save_module(serializer, unwrap(obj))
    elif has_state(obj):
        serializer("state_dict", obj.state_dict())
    else:
        raise TypeError(f"{type(obj).__name__} has no state to save: it needs serialize, or state_dict and load_state_dict")
    return serializer


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
        _put(read_state(source), obj, path_in_snapshot, strict, source.resolve())
        return
    if not source.exists():
        raise FileNotFoundError(f"there is no {source}; give the path of a snapshot directory, or of a model's file")
    if source.is_file() and _safetensors.is_of_pickle(source):
        raise ValueError(
            f"{source} is a file such as torch.save or NumPy write, which is not opened, because a pickle can run code; "
            "read it by torch.load(path, weights_only=True) and model.load_state_dict, an npz by serializers.load_npz"
        )
    _safetensors.verify_checksum(source)
    tensors = _safetensors.read(source)
    if not is_module(obj):
        raise TypeError(
            f"{source} holds a model, and a {type(obj).__name__} is continued from a snapshot directory; "
            "a model is loaded by load(path, model)"
        )
    prefix = path_in_snapshot.strip("/").replace("/", ".")
    part = {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}
    _load_tensors(obj, part if prefix else tensors, strict)


def _load_tensors(module: Any, tensors: Mapping[str, Tensor], strict: bool) -> None:
    """Puts the entries of a file into a model, whose own may stand below the prefixes of wrappers."""
    own, clean = module.state_dict(), name_cleaner(module)
    names = {clean(name): name for name in own}
    found = {names.get(name, name): value for name, value in tensors.items()}
    module.load_state_dict({name: shard_like(value, own.get(name)) for name, value in found.items()}, strict=strict)


def read_state(directory: Path) -> dict[str, Any]:
    """The flat state in a snapshot directory, verified.

    Raises:
        CorruptError: it is not what was written.
    """
    manifest = verify(directory)
    tensors = read_all([directory / name for name in manifest.files if name.endswith(".safetensors")])
    if STATE not in manifest.files:
        raise CorruptError(f"{directory} has no {STATE}")
    return _values.decode((directory / STATE).read_bytes(), tensors)


def _put(state: dict[str, Any], obj: Any, part: str, strict: bool, source: Path) -> None:
    if part or is_module(obj):
        prefix = f"{part.strip('/')}/" if part else model_prefix(state, source)
        state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if not state:
            raise ValueError(f"{source} has nothing under {prefix!r}; `chainring inspect` lists what it has")
    saved = DictionaryDeserializer(state, strict)
    saved.directory = source.parent
    saved.comm = as_communicator(getattr(obj, "comm", saved.comm))
    method = serialize_method(obj)
    if is_module(obj):
        load_module(saved, unwrap(obj))
    elif method is not None:
        method(saved)
    else:
        if "state_dict" not in state:
            raise ValueError(f"{source} holds no {type(obj).__name__}; `chainring inspect` lists what it has")
        obj.load_state_dict(saved("state_dict", None))


def model_prefix(state: Mapping[str, Any], source: Path) -> str:
    """The prefix of the only model in a snapshot, or of the main one; empty where there is none.

    Raises:
        ValueError: there are several, and none is the main one.
    """
    names = sorted({key.removeprefix(_MODEL).partition("/")[0] for key in state if key.startswith(_MODEL)})
    if not names:
        return ""
    if len(names) > 1 and "main" not in names:
        raise ValueError(f"{source} has the models {names}; name one by path_in_snapshot, such as {_MODEL + names[0]!r}")
    return f"{_MODEL}{'main' if 'main' in names else names[0]}/"


def is_module(obj: Any) -> bool:
    """Whether an object is a model, which is saved as one file."""
    return hasattr(obj, "named_parameters") and has_state(obj) and not hasattr(obj, "serialize")


def module_tensors(module: Any) -> dict[str, Tensor]:
    """The entries of a model's state, not copied. Where each rank holds parts of them, all call this, and all get the whole.

    Raises:
        TypeError: one of them is no tensor.
    """
    clean = name_cleaner(module)
    tensors: dict[str, Tensor] = {clean(name): to_full(value) for name, value in module.state_dict().items()}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"a model's file holds tensors, and {name!r} of {type(module).__name__} is {type(value).__name__}; "
                "register it as a buffer, or save the trainer, whose snapshot holds plain values too"
            )
    return tensors


def save_tensors(target: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the file of a model in the place of what is there."""
    with atomic_write(target, durable=True) as file:
        _safetensors.write_with_checksum(file, tensors)


class StagingBuffers:
    """Memory of the host for a copy of tensors, kept from one copy to the next.

    Fresh memory costs a page fault every 4 kB, which takes longer than the copy itself. Where there is an accelerator the
    memory is pinned, and the copies from there overlap.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the host, which are overwritten by the next call; tensors that share memory share it here too."""
        copies: dict[str, Tensor] = {}
        owners = find_aliases(tensors)
        devices = set()
        for name, tensor in tensors.items():
            owner = owners[name]
            if owner == name:
                copies[name] = self._buffer(name, tensor).copy_(tensor.detach(), non_blocking=True)
                devices.add(tensor.device)
            else:
                copies[name] = copies[owner]
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        self._buffers = {name: copies[name] for name in set(owners.values())}
        return copies

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._buffers.get(name)
        if kept is not None and _layout(kept) == _layout(tensor):
            return kept
        fresh = torch.empty_like(tensor, device="meta")  # for its strides, which clone() would choose
        if kept is not None and _layout(kept) == _layout(fresh):
            return kept
        pinned = tensor.device.type != "cpu"
        return torch.empty_strided(fresh.shape, fresh.stride(), dtype=tensor.dtype, pin_memory=pinned)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


class BackgroundWriter:
    """Runs one call at a time in a thread of its own. A failure is raised by the next call, or at the end."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def start(self, call: Callable[[], None], after: Iterable[BackgroundWriter] = ()) -> None:
        """Waits for the call before, and starts this one, which begins when those under way in ``after`` have ended.

        Raises:
            Exception: what the call before has raised.
        """
        self.wait()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="chainring-snapshot")
        earlier = _running(after)

        def begin() -> None:
            futures.wait(earlier)
            call()

        self._running = self._thread.submit(begin)

    @staticmethod
    def wait_for(others: Iterable[BackgroundWriter]) -> None:
        """Waits until what is under way there has ended; if it has failed, it is raised there."""
        futures.wait(_running(others))

    def wait(self) -> None:
        """Waits until nothing is running.

        Raises:
            Exception: what the last call has raised; once.
        """
        running = self._running
        if running is not None:
            try:
                running.result()
            finally:
                if running.done():  # and not interrupted while it waited
                    self._running = None

    def close(self) -> None:
        """Waits, and ends the thread.

        Raises:
            Exception: what the last call has raised.
        """
        thread, self._thread = self._thread, None
        try:
            self.wait()
        finally:
            if thread is not None:
                thread.shutdown()


def _running(others: Iterable[BackgroundWriter]) -> list[Future[None]]:
    return [other._running for other in others if other._running is not None]
