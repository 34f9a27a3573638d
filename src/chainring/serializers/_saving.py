"""`save`, what is collected for a checkpoint, and the copies of state that a thread writes while the training goes on."""

from __future__ import annotations

import errno
import itertools
import operator
import os
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from chainring import _random
from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import assign_writers, is_sharded
from chainring._files import Sink, SizedSink, atomic_write, below_home, is_url
from chainring._version import versions
from chainring.serializers import _safetensors, _values
from chainring.serializers._store import STATE, Place, SavedSnapshot, Snapshots, WriteFile, Written, split
from chainring.serializers._values import TENSORS, copy_value, digest_value, find_aliases, move
from chainring.serializers.protocol import (
    ENTRIES,
    DictionarySerializer,
    entry_names,
    is_module,
    name_cleaner,
    own_states,
    state_entries,
    unwrap,
)

if TYPE_CHECKING:
    from chainring._distributed.gathering import Load

_PART = 8 << 20  # bytes that are copied at once
_CONTAINERS = (dict, list, tuple, OrderedDict)
BY_RANK = "by_rank/"
"""Begins the paths of what differs by rank, followed by the rank and the path: at this alone lies that of rank 0."""
K = TypeVar("K")
T = TypeVar("T")


class StateCollector(DictionarySerializer):
    """Saves into ``target`` without copying, for state that is written or copied before the training continues."""

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__()
        self._given = self.target
        self.directory = directory
        self.referred: list[Path] = []  # the files to which the state refers

    def refer(self, path: Path) -> None:
        self.referred.append(path)

    def gather_own(self) -> None:
        """Add what classes of the script have saved otherwise on the other ranks than on rank 0, below `BY_RANK`."""
        own = {
            path: value
            for path, value in self.target.items()
            if may_differ_by_rank(self._owners[path][0]) and not (hasattr(value, "detach") and is_sharded(value))
        }
        digests = self.comm.gather_object({path: digest_value(path, value) for path, value in own.items()})
        differing = [{path for path in digest if digest[path] != digests[0].get(path)} for digest in digests]
        if not any(differing):
            return
        mine = {path: copy_value(own[path]) for path in sorted(differing[self.comm.rank])}
        self.target[f"{BY_RANK}size"] = self.comm.size
        for rank, values in enumerate(self.comm.gather_object(move(mine, torch.device("cpu")))):
            self.target |= {f"{BY_RANK}{rank}/{path}": value for path, value in values.items()}

    def own_paths(self) -> list[str]:
        """Return the paths of what modules have saved beside their parameters and buffers."""
        below = tuple(self._called)
        return [path for path, (_, part) in self._owners.items() if part != ENTRIES and path.startswith(below)]


def may_differ_by_rank(owner: Any) -> bool:
    """Return whether each rank may have other state in an object: the library's own state is the same, or gathered."""
    from chainring._callables import defined_by  # which few programs need

    return defined_by(type(owner)) != "library" or hasattr(owner, "may_differ_by_rank")


def capture(obj: Any, directory: Path | None = None, comm: Any = None) -> StateCollector:
    """Return the state of an object as a flat dictionary, not copied, for a snapshot that will lie in ``directory``.

    All ranks call it together; the result of rank 0 is complete, except for sharded tensors, of which each has its shard.
    """
    serializer = StateCollector(directory)
    serializer.comm = serializer.comm if comm is None else comm
    serializer.visit("", unwrap(obj))
    if serializer.comm.size > 1:
        serializer.gather_own()
    return serializer


class StagingBuffers:
    """Memory of the host for a copy of tensors, kept from one copy to the next; pinned where there is an accelerator."""

    # hot path: "chainring, asynchronous" in benchmarks/snapshot.py, "stop for a snapshot" in benchmarks/growth.py
    # Fresh memory costs a page fault every 4 kB, which takes longer than the copy itself.

    def __init__(self) -> None:
        self._last: tuple[list[int], list[Any]] = [], []
        self._distinct: list[int] = []  # of the tensors that were copied last, those that no earlier one is, by position
        self._devices: set[torch.device] = set()  # the accelerators that hold some of the tensors
        self._buffers: list[Tensor] = []  # one for each that is distinct
        self._copies: list[Tensor] = []  # the buffer of each

    def copy(self, tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Return copies on the host, which the next call overwrites; tensors that share memory share it there too."""
        originals = list(tensors.values())
        if (description := _describe(originals)) != self._last:
            self._distinct = list(dict.fromkeys(description[0]))
            last = itertools.chain(self._buffers, itertools.repeat(None))
            self._buffers = [_buffer_of(originals[i], buffer) for i, buffer in zip(self._distinct, last, strict=False)]
            buffers = dict(zip(self._distinct, self._buffers, strict=True))
            self._copies, self._last = [buffers[first] for first in description[0]], description
            self._devices = {tensor.device for tensor in originals if not tensor.is_cpu}
        self._fill(originals)
        for device in self._devices:
            torch.accelerator.synchronize(device)
        return dict(zip(tensors, self._copies, strict=True))

    def copy_beside(
        self, tensors: Mapping[K, Tensor], call: Callable[[], T], thread: BackgroundWriter
    ) -> tuple[dict[K, Tensor], T]:
        """Do as `copy` does while ``call``, which must change nothing, runs in an idle thread; return what both return.

        The copy begins before it is known that the tensors have the layouts of those that were copied last, which is found
        out beside it. Where they have others, it is repeated.
        """
        originals, answer = list(tensors.values()), None
        if len(originals) == len(self._copies) and not self._devices:
            # The tensors are described after the call, which may refuse some.
            answer = thread.submit(lambda: (call(), _describe(originals) == self._last))
        if answer is None:
            result = call()
            return self.copy(tensors), result
        with suppress(RuntimeError):  # of shapes that differ, as will be found
            self._fill(originals)
        result, is_same = answer.result()
        return dict(zip(tensors, self._copies, strict=True)) if is_same else self.copy(tensors), result

    def _fill(self, originals: Sequence[Tensor]) -> None:
        if self._buffers:
            with torch.no_grad():  # one call for all, since a call for each takes longer than to copy a small one
                torch._foreach_copy_(self._buffers, [originals[i] for i in self._distinct], non_blocking=True)


def _buffer_of(tensor: Tensor, last: Tensor | None) -> Tensor:
    """Return memory for a tensor: the last buffer, if that has its layout."""
    like = torch.empty_like(tensor, device="meta")  # for its strides, which clone() would choose
    if last is not None and (last.dtype, last.shape, last.stride()) == (like.dtype, like.shape, like.stride()):
        return last
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")


def _describe(tensors: Sequence[Tensor]) -> tuple[list[int], list[Any]]:
    """Return what must be the same of tensors for them to be copied to where the last were.

    By position that of the first tensor that is the same view of the same memory; and the devices, dtypes and shapes of all,
    and then their strides.
    """
    first = list(find_aliases(dict(enumerate(tensors))).values())
    return first, [*map(_form, tensors), *map(Tensor.stride, tensors)]


_form = operator.attrgetter("device", "dtype", "shape")


class BackgroundWriter:
    """Runs one call at a time in a thread of its own. A failure is raised by the next call, or at the end."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def start(self, call: Callable[[], None], after: Iterable[BackgroundWriter] = ()) -> None:
        """Do as `wait` does, and start a call, which begins when those under way in ``after`` have ended."""
        self.wait()
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="chainring-snapshot")
        earlier = [other._running for other in after if other._running is not None]

        def begin() -> None:
            futures.wait(earlier)
            call()

        self._running = self._thread.submit(begin)

    def submit(self, call: Callable[[], T]) -> Future[T] | None:
        """Start a call whose result is needed soon; return ``None`` if there is no thread yet, or it is busy."""
        return self._thread.submit(call) if self._thread is not None and self._running is None else None

    @staticmethod
    def wait_for(others: Iterable[BackgroundWriter]) -> None:
        """Wait until the current call of another writer has ended; that writer raises its error, if it has failed."""
        futures.wait([other._running for other in others if other._running is not None])

    def wait(self) -> None:
        """Wait until nothing is running; what the last call has raised is raised here, once."""
        if (running := self._running) is not None:
            try:
                running.result()
            finally:
                if running.done():  # and not interrupted while it waited
                    self._running = None

    def close(self) -> None:
        """Wait as `wait` does, and end the thread."""
        thread, self._thread = self._thread, None
        try:
            self.wait()
        finally:
            if thread is not None:
                thread.shutdown()


def save(path: str | os.PathLike[str], obj: Any) -> None:
    """Save the state of an object as a file or a directory, which is complete or absent at every moment.

    A model that is sharded over ranks is saved whole: every rank calls this function, the first rank writes, the others
    send it one tensor after the other, and all return when it is complete. If the model becomes a directory, the first
    rank of the process group writes it.

    Example::

        serializers.save("mlp.model", model)
        serializers.load("mlp.model", model)

    Args:
        path: for a module, a file in the safetensors format, which replaces an existing one; for a module with its own
            state, in a ``serialize`` of any of its submodules, and for anything else, a directory that must not exist
            yet. It can also be an address in an object store, such as ``"s3://bucket/mlp.model"``.
        obj: a module, or anything with ``serialize`` or PyTorch's ``state_dict`` and ``load_state_dict``.

    Raises:
        TypeError: the object has no state, or contains a value that could not be restored; the error names its path.
        ValueError: two values have the same path; or the ranks save different models, or pass different paths.
        FileExistsError: the directory already exists.
        OSError: the file or directory cannot be written.
    """
    path = below_home(path)
    if not is_url(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    if is_saved_as_file(obj):
        save_tensors(path, module_tensors(obj))
        return
    files, name = split(path)
    state = capture(obj, Path(path).parent if files.is_local else None)
    count = state.target.get("updater/iteration", state.target.get("iteration", 0))
    iteration = count if isinstance(count, int) else 0

    def commit(values: dict[str, Any], load: Load | None = None) -> None:
        state.target |= values
        Checkpoint(state).commit(Snapshots(files), name, iteration, load=load)

    if is_module(obj) and any(map(is_sharded, state.target.values())):
        from chainring._distributed.gathering import write_on_one_rank  # which few programs need

        write_on_one_rank(state.target, commit, _identity(path))
    elif not is_module(obj) or process_rank() == 0:  # a directory is never written over, not even by the same
        commit(state.target)


def _identity(path: Place) -> str:
    """Return a key that is the same on all ranks that write to one place."""
    return os.fspath(path) if is_url(path) else os.path.realpath(path)


def process_rank() -> int:
    """Return the rank of this process, 0 without a process group."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


class Checkpoint:
    """A state ready to be written: its tensors in one file of each rank, everything else as typed JSON.

    ``tensors`` are those that this rank writes, not copied. Where they will change before `commit`, put copies there.

    Raises:
        TypeError: a value cannot be restored; the error names its path.
        ValueError: the shards that the ranks hold of a tensor are not the whole of it, once.
    """

    def __init__(self, state: StateCollector) -> None:
        self._values, tensors = _values.encode(state.target)
        self._referred, self._comm = state.referred, (comm := state.comm.world)
        others = [name for name, tensor in tensors.items() if type(tensor) is not Tensor]  # of parts, and of parameters
        sharded = {name: tensors[name] for name in sorted(others) if is_sharded(tensors[name])}
        self.tensors = {name: tensor for name, tensor in tensors.items() if name not in sharded} if comm.rank == 0 else {}
        self.is_sharded, self._offsets = bool(sharded), dict[str, _safetensors.ShardOffsets]()
        if sharded:
            busy = sum(tensor.numel() for tensor in self.tensors.values())
            for name, shards in assign_writers(sharded, comm, busy).items():
                for number, shard in enumerate(shards):
                    key = f"{name}\0{number}" if number else name  # names of tensors have no zero
                    self.tensors[key], self._offsets[key] = shard.tensor, (shard.offsets, shard.shape)
        self.about = {"versions": versions(), "epoch": state.target.get("updater/iterator:main/epoch")}
        if own := state.own_paths():
            self.about["own state of modules"] = own
        inexact = state.target.get("updater/communication_hooks/inexact")
        if (reason := inexact or _random.nondeterminism_reason()) is not None:
            self.about["not bit-exact"] = reason

    def commit(
        self,
        store: Snapshots,
        name: str,
        iteration: int,
        about: Mapping[str, Any] | None = None,
        comm: Any = None,
        load: Load | None = None,
    ) -> None:
        """Write it into a store, see `Snapshots.commit`; the files to which it refers are flushed first.

        Of several ranks, rank 0 writes; all do where each holds parts of tensors, and then need a ``comm`` for that alone.
        ``load`` returns the values of a tensor when it is written, if these stand for others.
        """

        def write(file: Sink) -> Written:
            return _safetensors.write(file, self.tensors, self._offsets, load)

        def write_text(file: Sink) -> Written:
            text = _values.to_text(self._values)
            file.write(text)
            return len(text), zlib.crc32(text)

        about = {**self.about, **(about or {})}
        files: dict[str, WriteFile] = {STATE: write_text}
        if self.is_sharded and self._comm.size > 1:
            if self._comm.rank == 0:
                coordinate(comm, store, name, write, files, iteration, about, self._referred)
            else:
                participate(comm, store, write)
        elif self._comm.rank == 0:
            store.commit(name, {_rank_file(0, 1): write, **files}, iteration, about, self._referred)


def checkpoint_of_copies(state: StateCollector, staging: StagingBuffers, thread: BackgroundWriter) -> Checkpoint:
    """Return a checkpoint of copies, which lie in the staging buffers: training may continue while it is committed."""
    # hot path: "stop for a snapshot" in benchmarks/growth.py; tensors are copied while the thread encodes the values
    found = _find_tensors(state.target.values()) if state.comm.world.rank == 0 else None
    if found is None:  # the other ranks write their parts of sharded tensors alone, which all of them agree on first
        checkpoint = Checkpoint(state)
        checkpoint.tensors = staging.copy(checkpoint.tensors)
        return checkpoint
    copies, checkpoint = staging.copy_beside({id(tensor): tensor for tensor in found}, partial(Checkpoint, state), thread)
    find, given = copies.get, checkpoint.tensors.items()  # with others, which were made of arrays, or are keys
    checkpoint.tensors = {name: tensor.clone() if (copy := find(id(tensor))) is None else copy for name, tensor in given}
    return checkpoint


def _find_tensors(values: Iterable[Any], depth: int = 0) -> list[Tensor] | None:
    """Return the tensors in values and their containers, but for sets and keys; ``None`` if they are not all plain."""
    # hot path: "stop for a snapshot" in benchmarks/growth.py
    if depth > _values.MAX_DEPTH:
        return None
    found: list[Tensor] = []
    for value in values:
        cls = type(value)
        if cls in TENSORS:
            found.append(value)
        elif cls in _CONTAINERS:
            below = _find_tensors(value if cls is list or cls is tuple else value.values(), depth + 1)
            if below is None:
                return None
            found += below
        elif isinstance(value, Tensor):
            return None
    return found


def coordinate(
    comm: Communicator,
    store: Snapshots,
    name: str,
    write: WriteFile,
    files: Mapping[str, WriteFile],
    iteration: int,
    about: Any,
    beside: Sequence[Path] = (),
) -> None:
    """Commit a snapshot with the files of all ranks: the side of rank 0 of a two-phase commit, beside `participate`."""

    def write_all(draft: str) -> dict[str, Written]:
        comm.broadcast_object((draft, None))
        results = comm.gather_object(_try_to_write(store, draft, _rank_file(0, comm.size), write))
        failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, str)]
        if failures:
            raise OSError(errno.EIO, f"the snapshot could not be written by {'; '.join(failures)}")
        others = {file: store.write(draft, file, write_other) for file, write_other in files.items()}
        return {_rank_file(rank, comm.size): result for rank, result in enumerate(results)} | others

    try:
        store.commit(name, write_all, iteration, about, beside)
    except BaseException as error:
        comm.broadcast_object((None, f"{type(error).__name__}: {error}"))
        raise
    comm.broadcast_object((None, None))


def participate(comm: Communicator, store: Snapshots, write: WriteFile) -> None:
    """Write this rank's file of the snapshot that rank 0 commits by `coordinate`; an error says which rank has failed."""
    draft, failure = comm.broadcast_object(None)
    if draft is not None:
        comm.gather_object(_try_to_write(store, draft, _rank_file(comm.rank, comm.size), write))
        _, failure = comm.broadcast_object(None)
    if failure is not None:
        raise OSError(errno.EIO, failure)


def _try_to_write(store: Snapshots, draft: str, file: str, write: WriteFile) -> Written | str:
    """Return the size and the checksums of the file that a rank has written, or why it could not write it."""
    try:
        return store.write(draft, file, write)
    except BaseException as error:  # whatever it is, the other ranks must not wait
        return f"{type(error).__name__}: {error}"


def _rank_file(rank: int, size: int) -> str:
    return f"rank{rank:05d}-of-{size:05d}.safetensors"


def is_saved_as_file(obj: Any) -> bool:
    """Return whether an object is a module that has parameters and buffers alone, which is saved as one file."""
    return is_module(obj) and not own_states(unwrap(obj))


def module_tensors(module: Any) -> dict[str, Tensor]:
    """Return the entries of a model's state, not copied; of sharded ones each rank has its part."""
    entries, clean = state_entries(module), name_cleaner(module)
    entry_names(module, entries)  # refuses two with one path
    tensors: dict[str, Tensor] = {clean(name): value for name, value in entries.items()}
    if others := {name: type(value).__name__ for name, value in tensors.items() if not isinstance(value, Tensor)}:
        raise TypeError(
            f"a model's file holds tensors, and {type(module).__name__} has {others}; "
            "register a buffer instead, or save the trainer, whose snapshot holds plain values too"
        )
    return tensors


def save_tensors(target: Place, tensors: Mapping[str, Tensor], place: str | None = None) -> None:
    """Write a model's file; where ranks hold parts of the tensors, all call this, and the first writes.

    They must have the same tensors and the same ``place``, by default the path.
    """

    def write(whole: Mapping[str, Tensor], load: Load | None = None) -> None:
        with replacing(target) as file:
            _safetensors.write_with_checksum(file, whole, load)

    if any(map(is_sharded, tensors.values())):
        from chainring._distributed.gathering import write_on_one_rank

        write_on_one_rank(tensors, write, _identity(target) if place is None else place)
    else:
        write(tensors)


@contextmanager
def replacing(target: Place) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of what is at a path or an address when the block ends."""
    if not is_url(target):
        with atomic_write(Path(target), durable=True) as file:
            yield file
        return
    files, name = split(target)
    if SavedSnapshot(files, name).exists():
        raise FileExistsError(f"{target} is a snapshot, and is not replaced by a file; choose another name")
    with tempfile.TemporaryFile(prefix="chainring-") as content:  # whoever writes it may go back in it
        yield content
        size = content.seek(0, os.SEEK_END)
        content.seek(0)
        with files.create(name) as upload:
            if isinstance(upload, SizedSink):
                upload.expect(size)
            while chunk := content.read(_PART):
                upload.write(chunk)
