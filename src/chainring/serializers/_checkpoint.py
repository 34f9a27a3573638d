"""`save` and `load`, and the checkpoints of snapshots: a plain model as one file, anything else as a directory.

Nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from chainring import _random
from chainring._distributed.communicator import Communicator, RankFailed, as_communicator
from chainring._distributed.sharding import assign_writers, is_sharded, shard_like
from chainring._environment import versions
from chainring._files import Sink, atomic_write, is_url
from chainring._messages import info, warn
from chainring._naming import name_cleaner, unwrap
from chainring._places import open_place
from chainring._places.base import MANIFEST
from chainring.serializers import _safetensors, _values
from chainring.serializers._models import buffer_layouts, restore_layouts
from chainring.serializers._objects import entry_names, is_module, load_entries, own_states, serialize_method, state_entries
from chainring.serializers._parts import StoredTensors
from chainring.serializers._restoring import read_stored, without_collections
from chainring.serializers._store import (
    Place,
    SavedSnapshot,
    Snapshots,
    WriteFile,
    Written,
    fetched,
    find_snapshot,
    open_file,
    open_store,
    split,
)
from chainring.serializers.protocol import DictionaryDeserializer, StateCollector, capture

if TYPE_CHECKING:
    from chainring._distributed.gathering import Load
    from chainring.serializers._background import BackgroundWriter, StagingBuffers
    from chainring.serializers.foreign import ForeignPlan

STATE = "state.json"
_MODEL = "updater/model:"
_PART = 8 << 20  # bytes that are copied at once

WriteResult = Written | str
"""The size and the checksums of the file that a rank has written, or why it could not write it."""


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
    if not is_url(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    if is_saved_as_file(obj):
        save_tensors(path, module_tensors(obj))
        return
    place, name = split(path)
    state = capture(obj, None if is_url(place) else Path(place))
    iteration = state.target.get("updater/iteration", state.target.get("iteration", 0))

    def commit(values: dict[str, Any], load: Load | None = None) -> None:
        state.target |= values
        count = iteration if isinstance(iteration, int) else 0
        Checkpoint(state).commit(open_store(place), name, count, load=load)

    if is_module(obj) and any(map(is_sharded, state.target.values())):
        from chainring._distributed.gathering import write_on_one_rank  # which few programs need

        write_on_one_rank(state.target, commit, _identity(path))
    elif not is_module(obj) or _rank() == 0:  # a directory is never written over, not even by the same
        commit(state.target)


def _identity(path: Place) -> str:
    """Return what is the same on all ranks that write to one place."""
    return os.fspath(path) if is_url(path) else os.path.realpath(path)


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def load(path: str | os.PathLike[str], obj: Any, path_in_snapshot: str = "", strict: bool = True) -> None:
    """Load a checkpoint into an object, after every byte has been verified.

    Checkpoints of other libraries can be loaded too: into a model its parameters and buffers, into a trainer also the
    states of optimizers and schedulers and the counts, if the checkpoint has them. A summary of what was loaded, and what
    was not, is printed.

    Ranks that train together load a trainer together, and so they do a sharded model from an object store.

    Args:
        path: a file or directory of `save` or of a snapshot; or a checkpoint of Lightning; a directory of Hugging Face's
            ``Trainer``, of ``save_pretrained``, of Accelerate's ``save_state`` or of ``torch.distributed.checkpoint``; a
            snapshot of pytorch-pfn-extras; an npz of Chainer; or a file of ``torch.save`` with one or several state
            dicts. It can also be the address of a snapshot or a file in an object store.
        obj: the object to load into; its shapes must match.
        path_in_snapshot: the part to load, such as ``"updater/model:main/predictor"``; by default, a module gets the only
            model of the snapshot, or the main one.
        strict: True if a missing or unexpected entry is an error; otherwise missing entries stay as they are.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        CorruptError: a file is damaged.
        ValueError, TypeError: a checkpoint of a model is loaded into a trainer, or the snapshot has no such part.
        KeyError, RuntimeError: entries are missing, unexpected, or have another shape.
        RankFailed: another rank of the trainer's ``comm`` could not load it.
    """
    snapshot = find_snapshot(path)
    comm = _find_communicator(obj, snapshot)
    if snapshot.is_local or not snapshot.exists():
        plan = _plan_together(comm.world, path, obj, path_in_snapshot, strict)
        if plan is not None:
            report = plan.apply()
            if comm.is_main if comm.world.size > 1 else _rank() == 0:
                info(report)
            return
        if not snapshot.is_local or not Path(path).is_dir():
            tensors = _read_file(path, Communicator() if snapshot.is_local else comm)
            _load_file(path, tensors, obj, path_in_snapshot, strict)
            return
    load_snapshot(snapshot, obj, comm, path_in_snapshot, strict)


def _read_file(source: Place, comm: Communicator) -> dict[str, Tensor]:
    """Return the tensors of the file of a model, which the first of the ranks reads for all."""
    found: dict[str, Tensor] | None = None
    failure: Exception | None = None
    if comm.rank == 0:
        try:
            found = _safetensors.read(open_file(source))
        except (OSError, ValueError) as error:
            failure = error
    found, failure = comm.broadcast_object((found, failure))
    if found is None:
        assert failure is not None
        raise failure
    return found


def _find_communicator(obj: Any, snapshot: SavedSnapshot) -> Communicator:
    """Return the ranks that load an object together; of a model alone those that hold it, if it is far to the snapshot."""
    if snapshot.is_local or not is_module(obj):
        return as_communicator(getattr(obj, "comm", Communicator()))
    from chainring._distributed.gathering import holders_of

    return as_communicator(getattr(obj, "comm", holders_of(state_entries(obj).values())))


def _load_file(source: Place, tensors: dict[str, Tensor], obj: Any, path_in_snapshot: str, strict: bool) -> None:
    """Load the file of a model."""
    if not is_module(obj):
        raise TypeError(
            f"{source} holds a model, and a {type(obj).__name__} is loaded from a snapshot directory; load a model by "
            "load(path, model)"
        )
    if path_in_snapshot:
        prefix = f"{path_in_snapshot.strip('/').replace('/', '.')}."
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    _load_entries(obj, tensors, strict)
    if parts := own_states(unwrap(obj)):
        paths = ", ".join(f"{type(part).__name__} at {path!r}" for path, part in parts)
        warn(
            f"{source} contains only parameters and buffers: the state that serialize of {paths} declares stays as it is. "
            "serializers.save(path, model) writes a directory with both",
        )


def _plan_together(comm: Communicator, source: Place, obj: Any, path: str, strict: bool) -> ForeignPlan | None:
    """Return how a checkpoint of another library is loaded by all ranks, ``None`` if it is none for any of them.

    Raises:
        RankFailed: another rank cannot load it.
        ValueError: rank 0 has read something else.
    """
    plan, failure, content = None, None, None
    try:
        plan = _plan_foreign(source, obj, path, strict)
        content = None if plan is None or comm.size == 1 else plan.fingerprint()
    except Exception as error:
        failure = error
    answers = comm.gather_object((failure and f"{type(failure).__name__}: {failure}", content))
    if failure is not None:
        raise failure
    for rank, (reason, found) in enumerate(answers):
        if reason is not None:
            raise RankFailed(f"{source} could not be loaded by rank {rank}: {reason}")
        if found != answers[0][1]:
            raise ValueError(f"{source} is not the same on rank {rank} as on rank 0: give all ranks the same checkpoint")
    return plan


def _plan_foreign(place: Place, obj: Any, path: str, strict: bool) -> ForeignPlan | None:
    """Return how a checkpoint of another library is loaded; ``None`` for what `save` wrote."""
    if is_url(place):
        return _plan_object(os.fspath(place), obj, path, strict)
    source = Path(place)
    if not source.exists():
        raise FileNotFoundError(f"there is no {source}; give the path of a snapshot directory, or of a model's file")
    if (source / MANIFEST).exists() or (source.is_file() and not _safetensors.is_pickle(open_file(source))):
        return None
    from chainring.serializers.foreign import plan_loading  # which few programs need

    plan = plan_loading(source, obj, path, strict)
    if plan is None and source.is_file():
        raise ValueError(
            f"{source} is a file such as torch.save or NumPy write, which is not opened, because a pickle can run code; "
            "read it by torch.load(path, weights_only=True) and model.load_state_dict, an npz by serializers.load_npz"
        )
    return plan


def _plan_object(url: str, obj: Any, path: str, strict: bool) -> ForeignPlan | None:
    """Return how an object of another library is loaded, which is copied to the disk; see `_plan_foreign`."""
    from chainring.serializers._absence import explain_absence  # which few programs need

    try:
        file = open_file(url)
    except FileNotFoundError:
        raise explain_absence(url) from None
    if find_snapshot(url).name != split(url)[1]:  # a link, and to nothing
        raise explain_absence(url)
    if not _safetensors.is_pickle(file):
        return None
    with fetched(file) as copy:
        return _plan_foreign(copy, obj, path, strict)


def load_snapshot(
    source: SavedSnapshot, obj: Any, comm: Communicator, path_in_snapshot: str = "", strict: bool = True
) -> None:
    """Load a snapshot into an object by all ranks of a communicator together, see `load`.

    Each part is read and verified by one of them. Where there are several, and where the snapshot lies in an object store,
    what is damaged may show only when some of the object has been filled.
    """
    with without_collections(), StoredTensors(source, STATE, comm.world) as stored:
        state = _values.decode(stored.text, stored.tensors)
        _load_state(state, obj, path_in_snapshot, strict, source, stored)


def _load_entries(module: Any, tensors: Mapping[str, Any], strict: bool) -> None:
    """Load parameters and buffers by their dotted names into a module, whose own may stand below prefixes of wrappers."""
    entries, clean = state_entries(module), name_cleaner(module)
    names = {clean(name): name for name in entries}
    found = {names.get(name, name): value for name, value in tensors.items()}
    load_entries(module, {name: shard_like(value, entries.get(name)) for name, value in found.items()}, strict)


class Checkpoint:
    """A state ready to be written: its tensors in one file of each rank, everything else as typed JSON.

    ``tensors`` are those that this rank writes, not copied. Where they will change before `commit`, put copies there.

    Raises:
        TypeError: a value cannot be restored; the error names its path.
        ValueError: the shards that the ranks hold of a tensor are not the whole of it, once.
    """

    def __init__(self, state: StateCollector) -> None:
        self._values, tensors = _values.encode_values(state.target)
        self._referred, self._comm = state.referred, (comm := state.comm.world)
        others = [name for name, tensor in tensors.items() if type(tensor) is not Tensor]  # of parts, and of parameters
        sharded = {name: tensors[name] for name in sorted(others) if is_sharded(tensors[name])}
        self.tensors = {name: tensor for name, tensor in tensors.items() if name not in sharded} if comm.rank == 0 else {}
        self.is_sharded, self._offsets = bool(sharded), dict[str, _safetensors.ShardOffsets]()
        if sharded:
            busy = sum(tensor.numel() for tensor in self.tensors.values())
            for name, shards in assign_writers(sharded, comm, busy).items():
                for number, shard in enumerate(shards):
                    self.tensors[key := part_key(name, number)] = shard.tensor
                    self._offsets[key] = shard.offsets, shard.shape
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
        if not self.is_sharded or self._comm.size == 1:
            if self._comm.rank == 0:
                store.commit(name, {_rank_file(0, 1): write, **files}, iteration, about, self._referred)
        elif self._comm.rank == 0:
            coordinate(comm, store, name, write, files, iteration, about, self._referred)
        else:
            participate(comm, store, write)


def checkpoint_of_copies(state: StateCollector, staging: StagingBuffers, thread: BackgroundWriter) -> Checkpoint:
    """Return a checkpoint of copies, which lie in the staging buffers: training may continue while it is committed."""
    # hot path: "stop for a snapshot" in benchmarks/growth.py; tensors are copied while the thread encodes the values
    found = _values.find_tensors(state.target.values()) if state.comm.world.rank == 0 else None
    if found is None:  # the other ranks write their parts of sharded tensors alone, which all of them agree on first
        checkpoint = Checkpoint(state)
        checkpoint.tensors = staging.copy(checkpoint.tensors)
        return checkpoint
    copies, checkpoint = staging.copy_beside({id(tensor): tensor for tensor in found}, partial(Checkpoint, state), thread)
    find, given = copies.get, checkpoint.tensors.items()  # with others, which were made of arrays, or are keys
    checkpoint.tensors = {name: each.clone() if (copy := find(id(each))) is None else copy for name, each in given}
    return checkpoint


def part_key(name: str, number: int) -> str:
    """Return the name in a file of one of the shards that a rank writes of a tensor; names of tensors have no zero."""
    return f"{name}\0{number}" if number else name


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
    """Commit a snapshot with the files of all ranks: the side of rank 0 of a two-phase commit, beside `participate`.

    Raises:
        OSError: a rank could not write, or the snapshot could not be published.
    """
    is_announced = False

    def write_all(draft: str) -> dict[str, Written]:
        nonlocal is_announced
        is_announced = True
        comm.broadcast_object(draft)
        results = comm.gather_object(_try_to_write(store, draft, _rank_file(0, comm.size), write))
        failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, str)]
        if failures:
            raise OSError(errno.EIO, f"the snapshot could not be written by {'; '.join(failures)}")
        others = {file: store.write(draft, file, each) for file, each in files.items()}
        return {_rank_file(rank, comm.size): result for rank, result in enumerate(results)} | others

    try:
        store.commit_by(name, write_all, iteration, about, beside)
    except BaseException as error:
        if not is_announced:
            comm.broadcast_object(None)
        comm.broadcast_object(f"{type(error).__name__}: {error}")
        raise
    comm.broadcast_object(None)


def participate(comm: Communicator, store: Snapshots, write: WriteFile) -> None:
    """Write this rank's file of the snapshot that rank 0 commits by `coordinate`.

    Raises:
        OSError: the snapshot is not committed; the error says which rank has failed and why.
    """
    draft: str | None = comm.broadcast_object(None)
    if draft is not None:
        comm.gather_object(_try_to_write(store, draft, _rank_file(comm.rank, comm.size), write))
    failure: str | None = comm.broadcast_object(None)
    if failure is not None:
        raise OSError(errno.EIO, failure)


def _try_to_write(store: Snapshots, draft: str, file: str, write: WriteFile) -> WriteResult:
    try:
        return store.write(draft, file, write)
    except BaseException as error:  # whatever it is, the other ranks must not wait
        return f"{type(error).__name__}: {error}"


def _rank_file(rank: int, size: int) -> str:
    return f"rank{rank:05d}-of-{size:05d}.safetensors"


def read_state(source: SavedSnapshot | Place) -> dict[str, Any]:
    """Return the flat state in a snapshot, verified and with all of its tensors; raise as `opened_state` does."""
    with opened_state(source if isinstance(source, SavedSnapshot) else find_snapshot(source)) as state:
        return read_stored(state)  # type: ignore[no-any-return]


@contextmanager
def opened_state(source: SavedSnapshot) -> Iterator[dict[str, Any]]:
    """Open a snapshot for one process: its flat state, in which `read_stored` reads large tensors during the block.

    Of a snapshot on a disk every byte is verified first, elsewhere what is read.

    Raises:
        CorruptError: it is not what was written.
    """
    with StoredTensors(source, STATE, Communicator()) as stored:
        yield _values.decode(stored.text, stored.tensors)


def _load_state(
    state: dict[str, Any], obj: Any, path: str, strict: bool, source: SavedSnapshot, stored: StoredTensors
) -> None:
    if path or is_module(obj):
        prefix = f"{path.strip('/')}/" if path else model_prefix(state, source)
        if is_module(obj) and prefix.startswith(_MODEL):
            _restore_layouts(unwrap(obj), state, prefix)
        state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if prefix and not state:
            raise ValueError(f"{source} has nothing under {prefix!r}; `chainring inspect` lists what it has")
    if not is_module(obj) and serialize_method(obj) is None and "state_dict" not in state:
        raise ValueError(f"{source} does not hold a {type(obj).__name__}; `chainring inspect` lists what it has")
    saved = DictionaryDeserializer(state, strict)
    saved.place, saved.origin = source.place, stored
    saved.directory = None if is_module(obj) else source.folder_beside(stored.manifest)
    saved.comm = as_communicator(getattr(obj, "comm", saved.comm))
    saved.visit("", unwrap(obj))


def _restore_layouts(module: Any, state: Mapping[str, Any], prefix: str) -> None:
    """Give a model, or a part of one, the buffers whose form the saved run has changed."""
    name, _, below = prefix.removeprefix(_MODEL).partition("/")
    changed = state.get(f"updater/changed_buffers:{name}", {})
    recorded = {path.removeprefix(below): layouts for path, layouts in changed.items() if path.startswith(below)}
    if recorded:
        restore_layouts(module, buffer_layouts(module), recorded, lambda path: read_stored(state.get(prefix + path)))


def is_saved_as_file(obj: Any) -> bool:
    """Return whether an object is a module that has parameters and buffers alone, which is saved as one file."""
    return is_module(obj) and not own_states(unwrap(obj))


def model_prefix(state: Mapping[str, Any], source: object) -> str:
    """Return the prefix of the only model in a snapshot, or of the main one; an empty one where there is no model.

    Raises:
        ValueError: there are several, and none is the main one.
    """
    names = sorted({key.removeprefix(_MODEL).partition("/")[0] for key in state if key.startswith(_MODEL)})
    if len(names) > 1 and "main" not in names:
        raise ValueError(f"{source} has the models {names}; name one by path_in_snapshot, such as {_MODEL + names[0]!r}")
    return f"{_MODEL}{'main' if 'main' in names else names[0]}/" if names else ""


def module_tensors(module: Any) -> dict[str, Tensor]:
    """Return the entries of a model's state, not copied; of sharded ones each rank has its part.

    Raises:
        TypeError: one of them is not a tensor.
        ValueError: two of them have one path.
    """
    entries, clean = state_entries(module), name_cleaner(module)
    entry_names(module, entries)
    tensors: dict[str, Tensor] = {clean(name): value for name, value in entries.items()}
    if others := {name: type(value).__name__ for name, value in tensors.items() if not isinstance(value, Tensor)}:
        raise TypeError(
            f"a model's file holds tensors, and {type(module).__name__} has {others}; "
            "register a buffer instead, or save the trainer, whose snapshot holds plain values too"
        )
    return tensors


def save_tensors(target: Place, tensors: Mapping[str, Tensor], place: str | None = None) -> None:
    """Write a model's file; where ranks hold parts of the tensors, all call this, and the first writes.

    Raises:
        OSError: it cannot be written; on every rank.
        ValueError: the ranks have other tensors, or another ``place``, by default the path.
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
    """Open a new file that takes the place of what is at a path or an address when the block ends.

    Raises:
        FileExistsError: it is the address of a snapshot.
    """
    if not is_url(target):
        with atomic_write(Path(target), durable=True) as file:
            yield file
        return
    above, name = split(target)
    files = open_place(above)
    if SavedSnapshot(files, name).exists():
        raise FileExistsError(f"{target} is a snapshot, and is not replaced by a file; choose another name")
    with tempfile.TemporaryFile(prefix="chainring-") as content:  # whoever writes it may go back in it
        yield content
        content.seek(0)
        with files.create(name) as upload:
            while chunk := content.read(_PART):
                upload.write(chunk)
