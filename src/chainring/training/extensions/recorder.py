"""Recorder: records fingerprints of every iteration in a compact file, to compare runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chainring import _random
from chainring._distributed.digests import read_together
from chainring._files import AppendOnly, make_folder, set_rows_aside
from chainring.reporting.summary import is_scalar
from chainring.serializers.protocol import AbstractSerializer, Serializer
from chainring.training._digests import Batches, StateDigests
from chainring.training._ledger import HEAD, LOSS_TYPES, MARK, ROWS, Bits, Block, Ledger
from chainring.training.extension import Extension
from chainring.training.trainer import Trainer
from chainring.training.triggers import TriggerLike, get_trigger

_RESERVED = (".lock", "run.json")  # that every run has in its out
_MAX_LOSSES = 2  # in a row: with more of them it could take more than 48 bytes
_TYPES = {getattr(torch, name): index for index, name in enumerate(LOSS_TYPES) if index}
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class Recorder(Extension):
    """Records fingerprints of every iteration, to compare runs: the loss, the batch, the random numbers, the parameters.

    The file, whose format is described under "The black box", takes at most 48 bytes per iteration: the bits of the loss,
    and a 64-bit digest of the indices of the batch's examples. Every 32 iterations, and when a snapshot is taken or the run
    ends, a digest of the random generators from which was drawn is added; when the trigger fires, and before the first
    update, one of every parameter, buffer and optimizer tensor, which does not depend on how they are sharded.

    - The loss is ``main/loss`` as the updater reports it, and the first other key, in alphabetical order, of which the last
      part is ``loss``. With several ranks, the loss and the generators are those of rank 0.
    - The indices are those of the whole batch, of all iterators. For a batch from a loader, which has none, the digest is
      of 1,024 evenly spaced numbers of each array on the host; batches of other iterators, and those that a loader creates
      on a device, are not recorded.

    Values stay on their device and are read every 32 iterations, and when a snapshot is taken; up to that many iterations
    may be missing from the file of a killed run. A run that resumes from a snapshot truncates the file to it.

    Example::

        trainer.extend(extensions.Recorder(parameters=(100, "iteration")))

    Args:
        parameters: when the digests of parameters and optimizers are taken; ``None`` for never.
            ``extend(Recorder(), trigger=t)`` means the same and takes precedence.
        filename: the name of the file in the trainer's ``out``.

    Raises:
        ValueError: the file is not in ``out``, or another one of the run.
    """

    priority = 1100  # above FailOnNonNumber, so that the iterations are there with which that ends a run
    skip_on_resume = True

    def __init__(self, parameters: TriggerLike = (1, "epoch"), filename: str = "recorder.bin") -> None:
        if not isinstance(filename, str) or not filename:
            raise TypeError(f'filename is a name in out, such as "recorder.bin"; got {filename!r}')
        path = PurePath(filename)
        if path.is_absolute() or ".." in path.parts or str(path) in _RESERVED:
            raise ValueError(f'filename is a name in out, such as "recorder.bin", and not one of the run; got {filename!r}')
        self.trigger = get_trigger(parameters)
        self._filename = filename
        self._not_drawn: list[int] = []  # the digests of the generators when the run began
        self._generators = 0  # their digest after the last iteration; 0 if it was not taken there
        self._batches: Batches | None = None
        self._batch_ends: list[Any] = []  # when the values were read last
        self._is_writing = False  # during a run on the main rank, and on each that may have to go on with the file
        self._file = AppendOnly()  # the head and the blocks that are complete
        self._count = 0  # of these blocks
        self._block: Block | None = None  # the next one, as far as its values have been read
        self._names: list[str] = []  # of the tensors in the digests that were written last
        self._rows: list[tuple[list[Any], dict[str, Any]]] = []  # of iterations to be read: ends of the batches, losses
        self._keys: tuple[list[str], list[str]] = [], []  # of the last observation, and of the losses in it
        self._digests: dict[int, StateDigests] = {}  # by iteration, not read yet either
        self._last = 0

    @property
    def writes(self) -> Sequence[str]:
        return (self._filename,)

    def initialize(self, trainer: Trainer) -> None:
        for entry in trainer.entries:
            if entry.extension is not self and self._filename in getattr(entry.extension, "writes", ()):
                raise ValueError(
                    f"extension {entry.name!r} writes {self._filename!r} too; give the Recorder another filename, or leave "
                    "one of them out"
                )
        self._not_drawn = self._not_drawn or _random.generator_digests(trainer.updater)
        if trainer.comm.survives:
            if getattr(trainer.updater, "virtual_ranks", None) is None:
                raise ValueError(
                    "with create_communicator(survive=True) rank 0 may be lost, and the loss and the random numbers that a "
                    "Recorder records are its own: give StandardUpdater(..., virtual_ranks=), or leave the Recorder out"
                )
            self._not_drawn = trainer.comm.broadcast_object(self._not_drawn)
        self._batches = Batches(trainer.updater)
        self._batch_ends = self._batches.take()
        if trainer.comm.is_main:  # go on in the file that has the earlier iterations, or in a new one
            path = Path(trainer.out) / self._filename
            make_folder(Path(trainer.out), Path(self._filename).parent)
            if not self._file.size:
                set_rows_aside(path)
            self._file.begin(path, loss="the recorder continues without its earlier iterations")
        else:
            self._file.path, self._file.keeps = None, trainer.url is not None  # an object may be an older state
        if trainer.comm.is_main or trainer.comm.survives:  # any rank may have to go on with the file
            if not self._file.size:
                self._file.append(HEAD)
                self._names, self._count = [], 0
            if self._block is not None:
                self._block.number = self._count
            self._is_writing = True
            self._write_block()
        if not trainer.updater.iteration:
            self(trainer)

    def observe(self, trainer: Trainer) -> None:
        iteration = trainer.updater.iteration
        if not self._is_writing or not iteration:
            return
        if iteration <= self._last:
            raise ValueError(
                f"a recorder has one row for each iteration, and updater.iteration is {iteration} after {self._last}; an "
                "update() of your own must add 1 to it"
            )
        # The block of the iteration before is complete now, and not then: its digests came after its row.
        is_complete = self._last and (iteration % ROWS == 1 or iteration != self._last + 1)
        if is_complete and (block := self._read()) is not None:
            if self._last % ROWS:  # only for a snapshot; equal runs may take theirs elsewhere, and have equal files
                block.generators = 0
            self._file.append(block.encode(self._names))
            self._count += 1
            self._names = next((list(names) for names, _ in reversed(block.digests.values())), self._names)
            self._block = None
        self._last = iteration
        reported = trainer.reported
        if list(reported.values) != self._keys[0]:
            keys = list(reported.values)
            losses = [key for key in keys if key.endswith("loss") and (key == "loss" or key[-5] == "/")]
            self._keys = keys, sorted(losses, key=lambda key: (key != "main/loss", key))  # the recorded ones first
        assert self._batches is not None
        faults = (fault for fault in getattr(trainer.updater, "faults", ()) if fault["iteration"] == iteration)
        marks = {MARK + ", ".join(f"{name} {value}" for name, value in fault.items()): 1 for fault in faults}
        self._rows.append((self._batches.take(), {name: reported[name] for name in self._keys[1]} | marks))
        self._generators = 0 if iteration % ROWS else _random.digest_generators(self._not_drawn, trainer.updater)

    def __call__(self, trainer: Trainer) -> None:
        digests = StateDigests(trainer.updater, trainer.comm)
        if self._is_writing:
            self._digests[trainer.updater.iteration] = digests

    def _read(self) -> Block | None:
        """Read what waits on a device, and return the block that is not complete; ``None`` if it has no row yet."""
        if self._rows and self._block is None:
            self._block = Block(self._count, self._last + 1 - len(self._rows))
        if self._block is None or not (self._rows or self._digests):
            return self._block
        all_losses: list[dict[str, Bits]] = []
        groups = defaultdict[tuple[torch.dtype, torch.device], list[tuple[dict[str, Bits], str, Tensor]]](list)
        for _, reported in self._rows:
            losses: dict[str, Bits] = {}
            for name, value in reported.items():
                number = value[0] if type(value) is tuple and len(value) == 2 else value
                if len(losses) < _MAX_LOSSES and is_scalar(number):
                    losses[name] = 0, 0
                    tensor = _as_tensor(number)
                    groups[tensor.dtype, tensor.device].append((losses, name, tensor))
            all_losses.append(losses)
        stacked = [torch.stack([tensor for _, _, tensor in group]) for group in groups.values()]
        bits = [values.view(_INTEGERS[values.dtype.itemsize]) for values in stacked]
        integers = iter(read_together([*bits, *(sums for digests in self._digests.values() for sums in digests.sums)]))
        for (dtype, _), group in groups.items():
            for (losses, name, _), number in zip(group, next(integers).tolist(), strict=True):
                losses[name] = number & (1 << 8 * dtype.itemsize) - 1, _TYPES[dtype]
        assert self._batches is not None
        for (batch_ends, _), losses in zip(self._rows, all_losses, strict=True):
            self._block.add_row(self._batches.digest(self._batch_ends, batch_ends), losses)
            self._batch_ends = batch_ends
        if self._rows:
            self._block.generators = self._generators
        for iteration, digests in self._digests.items():
            self._block.digests[iteration] = digests.names, digests.finish([next(integers) for _ in digests.sums])
        self._rows, self._digests = [], {}
        return self._block

    def finalize(self) -> None:
        if self._is_writing:
            self._is_writing = False
            self._write_block()

    def _write_block(self) -> None:
        """Write the block that is not complete, as far as it has come."""
        if self._rows and self._last % ROWS:
            self._generators = _random.digest_generators(self._not_drawn, self._batches and self._batches.updater)
        block = self._read()
        self._file.append(b"" if block is None else block.encode(self._names), counts=False)

    def serialize(self, serializer: AbstractSerializer) -> None:
        in_file = content = rows = None
        if isinstance(serializer, Serializer):
            if self._is_writing:
                self._write_block()
            if (block := self._read()) is not None:
                rows = HEAD + replace(block, number=0).encode([])
            if (state := self._file.state(serializer.directory, serializer.refer)) is not None:
                in_file = [*state, self._count]
            elif self._file.size:
                content = [self._file.read(), self._count]
        in_file, content = serializer("file", in_file), serializer("content", content)
        rows, names = serializer("rows", rows), serializer("names", self._names)
        last = serializer("last", self._last)
        self._not_drawn = list(serializer("not drawn", self._not_drawn))
        if not isinstance(serializer, Serializer):
            self._rows, self._digests, self._names, self._last, self._block = [], {}, list(names), last, None
            if rows is not None:
                ledger = Ledger.parse(rows, Path("the snapshot"))
                self._block = ledger.block(0, *ledger.iterations[[0, -1]].tolist())
            if in_file is not None:
                self._file, self._count = AppendOnly.restore(in_file, serializer.directory), in_file[3]
            elif content is not None and content[0] is not None:
                self._file, self._count = AppendOnly.of(content[0]), content[1]
            elif content is None or self._file.path is not None:  # else another process writes it, and goes on
                self._file, self._count = AppendOnly(), 0


def _as_tensor(value: Any) -> Tensor:
    """Return a number as a tensor of a type that a ledger has."""
    if isinstance(value, Tensor):
        tensor = value.detach() if value.requires_grad else value
    elif isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "iuf" and value.dtype.itemsize <= 8:
        tensor = torch.from_numpy(np.array(value))
    elif isinstance(value, Integral) and -(2**63) <= int(value) < 2**63:
        tensor = torch.tensor(int(value))
    else:
        tensor = torch.tensor(float(value), dtype=torch.float64)
    if tensor.dtype in _TYPES:
        return tensor
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)
