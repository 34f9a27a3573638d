"""Audits: some virtual ranks of each update are computed a second time, so that a device that computes wrong is found."""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import proxy

import numpy as np
import torch
from torch import Tensor, nn

from chainring import _random
from chainring._checks import is_integer
from chainring._distributed.digests import add_words, mix, read_together, sums_to_compare
from chainring._distributed.sharding import is_sharded
from chainring._distributed.virtual_ranks import Audits
from chainring._messages import warn
from chainring.reporting._metrics import list_metrics, remember
from chainring.serializers.protocol import own_states, unwrap
from chainring.training.updaters._arguments import check_dealt
from chainring.training.updaters.callbacks import taken_back

if TYPE_CHECKING:
    from chainring.training.updaters._ranks import WrappedModules
    from chainring.training.updaters._update import Update
    from chainring.training.updaters._virtual import Part, VirtualRanks

_PIECES, _BITS = 4, 16  # of a digest, each of which a sum in any floating-point type has exactly
_ABSENT = -1  # the sum of a gradient that is not there
_LATER = "What it has computed since its last snapshot may be wrong as well, where nobody has audited it"
_NOT_REPEATED = (
    "a device computes wrong each time in another way, or a sound one runs a kernel that is not deterministic, which "
    "torch.use_deterministic_algorithms(True) names, or the loss depends on more than parameters, buffers, rows and the "
    "global generators, as where it draws from numpy.random.default_rng() instead of numpy.random.rand or torch.rand, or "
    "an iterator around another does not write inner.audits = self.audits before next(inner)"
)


class CorruptionError(RuntimeError):
    """A device has computed wrong, by an audit of virtual ranks; no optimizer has stepped with it.

    Example::

        try:
            trainer.run()
        except CorruptionError as error:
            print(error)  # the iteration, virtual rank, rank, host, device, and the first tensor that differs
    """


class _Difference(BaseException):
    """Two computations of some virtual ranks differ; the arguments are their numbers."""


@dataclass(frozen=True)
class _Computation:
    rank: int
    host: str
    device: str
    sums: tuple[int, ...] = ()  # over the gradient of each parameter

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.device})"


class Audit:
    """Compares the gradients of some virtual ranks of each update with those of a second computation.

    On a difference the update is computed again, and the virtual ranks in dispute by every rank: what two ranks agree on is
    used. Where there is only one rank, it is what two of its computations agree on.
    """

    def __init__(self, count: int, policy: str) -> None:
        self.count, self.policy = count, policy
        self.faults: list[dict[str, Any]] = []  # that were found in this run

    def start(self, ranks: VirtualRanks) -> None:
        device = next((parameter.device for parameter in ranks.parameters), torch.device("cpu"))
        self._ranks, self._me = proxy(ranks), _Computation(ranks.comm.rank, socket.gethostname(), str(device))
        if ranks.comm.size > 1:
            ranks.balance.tell(ranks.deal, ranks.scheme.iterators)
        self._metrics = list_metrics(ranks.scheme.models.values())
        self._batches = dict.fromkeys(ranks.scheme.iterators, ranks.scheme.updater.accumulate)  # of the last update
        self._first: dict[int, list[_Computation]] = {}  # by virtual rank in dispute, those before
        self._kept: dict[int, list[Tensor | None]] = {}  # the gradients of virtual ranks in dispute

    # --- what an update asks ---

    def run(self, update: Update, generators: tuple[_random.Restore, ...], compute: Callable[[], Any]) -> Any:
        """Compute an update, and again, with these generators, if it differs from what an audit has computed."""
        ranks, undo = self._ranks, list[Callable[[], Any]]()
        marks = [(source, source.mark()) for source in ranks.scheme.iterators.values() if hasattr(source, "mark")]
        put_back = remember(self._metrics)
        self._before = self._add_parameters() if ranks.comm.size == 1 else None
        token = taken_back.set(undo)
        try:
            return self._attempt(update, compute)
        except _Difference as difference:
            disputed = difference.args
        finally:
            taken_back.reset(token)
        self._begin_again(disputed)
        for source, mark in marks:
            source.return_to(mark)
        _random.put_generators(generators)
        for function in [*reversed(undo), put_back]:
            function()
        overlaps, ranks.overlaps, ranks.balance.span = ranks.overlaps, False, None
        try:
            return self._attempt(update, compute, disputed)
        finally:
            ranks.overlaps = overlaps
            self._kept.clear()

    def _attempt(self, update: Update, compute: Callable[[], Any], disputed: tuple[int, ...] = ()) -> Any:
        ranks = self._ranks
        self._asked = Audits(self.count, update.context.iteration, disputed=disputed)
        self._auditors, self._taken = self._asked.auditors(ranks.deal), dict[str, int]()
        self._sums: dict[tuple[int, bool], Tensor] = {}  # by virtual rank, and whether it counts
        for parameter in ranks.parameters:
            parameter.grad = None
        result = compute()
        self._batches |= self._taken
        return result

    def share(self) -> tuple[list[int], list[int]]:
        """Return the virtual ranks whose rows this rank needs, and those that it computes again, which do not count."""
        return self._asked.share(self._ranks.deal, self._me.rank)

    def ask(self, name: str, iterator: Any, taken: int) -> None:
        """Let an iterator, of which so many batches were taken in this update, return the rows that this rank needs."""
        self._taken[name] = taken + 1
        if self._ranks.comm.size > 1:
            iterator.audits = replace(self._asked, batches=self._batches[name], taken=taken)

    def note(self, part: Part, trained: list[Tensor], gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Note the gradients with which a virtual rank comes to a step of parameters; return those that count."""
        number, is_disputed, self._trained = part.number, part.number in self._asked.disputed, trained
        if is_disputed and part.counts:
            return self._kept.pop(number)
        if is_disputed:
            self._kept[number] = gradients
        if is_disputed or number in self._auditors:
            self._sums[number, part.counts] = self._sum(gradients)
        return gradients

    def pieces(self) -> list[Any]:
        """Return two digests of each virtual rank that is audited, in small numbers: 0 for those of other ranks."""
        numbers: list[Any] = []
        for key in ((number, counts) for number in self._auditors for counts in (True, False)):
            digest: Any = 0
            if (sums := self._sums.get(key)) is not None:
                digest = (sums * _factors(len(sums), sums.device)).sum()
                digest = int(digest) if digest.is_cpu else digest
            numbers += [digest >> _BITS * piece & (1 << _BITS) - 1 for piece in range(_PIECES)]
        return numbers

    def compare(self, pieces: Tensor) -> None:
        """Compare the digests of all ranks, before a step. An accelerator is read here."""
        pairs = pieces.view(len(self._auditors), 2, _PIECES)
        differ = (pairs[:, 0] != pairs[:, 1]).any(1).tolist()
        if any(differ):
            raise _Difference(*(number for number, differs in zip(self._auditors, differ, strict=True) if differs))
        self._check_memory()
        self._before = None  # until a step changes them
        self._sums.clear()

    # --- what is done about a difference ---

    def _begin_again(self, disputed: Sequence[int]) -> None:
        """Learn what the ranks have computed, and refuse to compute again what would not be the same."""
        comm = self._ranks.comm
        mine = [(number, counts, self._computed(number, counts)) for number, counts in self._sums if number in disputed]
        told = sorted((item for of_rank in comm.gather_object(mine) for item in of_rank), key=lambda item: not item[1])
        self._first = {number: [item for v, _, item in told if v == number] for number in disputed}
        if self._ranks.may_continue:
            why = "an update_core or step of your own may go on after a step, and is not computed again"
            self._end(disputed[0], self._first[disputed[0]], why)
        if comm.size > 1:
            self.compare_states()
        self._check_memory()

    def _add_parameters(self) -> Tensor:
        return add_words(self._ranks.parameters, torch.device(self._me.device))

    def _check_memory(self) -> None:
        """Refuse to step, in a run of one process, if parameters have changed since the update began."""
        if self._before is None or not (differs := self._before != self._add_parameters()).any():
            return
        names = _list_parameters(self._ranks.scheme.models)
        changed = next(name for name, each in zip(names, differs.tolist(), strict=False) if each)
        raise CorruptionError(
            f"in iteration {self._ranks.scheme.updater.iteration + 1} the memory of parameter {changed!r} has changed while "
            f"{self._me} has computed the update: by a fault of the device, or by what writes to parameter.data outside "
            "of a step. Resume from the last snapshot, and without the device if it happens again"
        )

    def decide(self) -> None:
        """Decide what is right, after all ranks have computed again what is in dispute, and before the rest is computed."""
        first, self._first = self._first, {}
        if not first:
            return
        told = self._ranks.comm.gather_object({number: self._computed(number, False) for number in first})
        for number, before in first.items():
            again = [of_rank[number] for of_rank in told]
            right = _find_agreed([*before, *again])
            if right is None:
                is_lasting = len(again) > 1 and {item.sums for item in again} == {item.sums for item in before}
                only_two = "each of them does so again: one computes wrong, and only a third rank could tell which"
                self._end(number, before, only_two if is_lasting else _NOT_REPEATED)
            wrong = next(item for item in [*before, *again] if item.sums != right)
            lasts = [str(item) for item in again if item.sums != right]
            self._tell(number, wrong, right, len(again), ", ".join(lasts))
            self._take(number, before[0].rank, again, right)

    def _take(self, number: int, owner: int, again: list[_Computation], right: tuple[int, ...]) -> None:
        """Give the rank whose virtual rank it is the gradients that are right, from a rank that has computed them."""
        comm, source = self._ranks.comm, next(item.rank for item in again if item.sums == right)
        kept = self._kept[number]
        if again[owner].sums != right:
            trained = zip(self._trained, right, strict=True)
            present = [torch.empty_like(parameter) for parameter, total in trained if total != _ABSENT]
            if comm.rank == source:
                present = [gradient for gradient in kept if gradient is not None]
            comm.broadcast(present, root=source)
            values = iter(present)
            kept = [None if total == _ABSENT else next(values) for total in right]
        self._kept[number] = kept

    def compare_states(self) -> None:
        """Compare parameters, buffers and moments of all ranks. Those of a minority become those of the rest."""
        comm, named = self._ranks.comm, _list_state(self._ranks.scheme)
        mine = replace(self._me, sums=_read(self._sum(list(named.values()))))
        of_ranks: list[_Computation] = comm.gather_object(mine)
        (right, votes), *rest = Counter(item.sums for item in of_ranks).most_common()
        if not rest:
            return
        wrong = [item for item in of_ranks if item.sums != right]
        differing = [index for index, pair in enumerate(zip(right, wrong[0].sums, strict=False)) if pair[0] != pair[1]]
        name = list(named)[differing[0]] if differing else "the state of an optimizer"
        iteration = self._ranks.scheme.updater.iteration
        text = f"at iteration {iteration}, {name} of {', '.join(map(str, wrong))} is not that of the other ranks"
        if 2 * votes <= comm.size or len({len(item.sums) for item in of_ranks}) > 1 or self.policy == "stop":
            raise CorruptionError(
                f"{text}: a device has computed wrong, or something sets it on each rank in its own way. Resume from the "
                "snapshot before, without the device"
            )
        self._add(wrong[0], name, None)
        if comm.is_main:
            warn(f"{text}, a majority, and was set to theirs: a device has computed wrong. Take it out at the next stop")
        source = next(item.rank for item in of_ranks if item.sums == right)
        with torch.no_grad():
            comm.broadcast(list(named.values()), root=source)

    def _tell(self, number: int, wrong: _Computation, right: tuple[int, ...], again: int, lasts: str) -> None:
        tensor = self._name_difference(wrong.sums, right)
        update = f"iteration {self._ranks.scheme.updater.iteration + 1}"
        text = f"in {update} {wrong} has computed virtual rank {number} wrong, first in the gradient of {tensor!r}"
        if lasts:
            text += f"; {lasts} did so again, and what it computes beside is wrong too: take it out"
        elif again == 1 and len(self.faults) > 1:
            text += f", and not when it was asked again: {_NOT_REPEATED}"
        else:
            text += ", and right when it was asked again: a transient fault of the device"
        if self.policy == "stop":
            raise CorruptionError(f"{text}. {_LATER}: resume from the snapshot before")
        self._add(wrong, tensor, number)
        if self._ranks.comm.is_main:
            warn(f"{text}. The gradient that others agree on is used. {_LATER}")

    def _add(self, wrong: _Computation, tensor: str, number: int | None) -> None:
        where = {"rank": wrong.rank, "host": wrong.host, "device": wrong.device, "tensor": tensor}
        of_part = {} if number is None else {"virtual rank": number}
        self.faults.append({"iteration": self._ranks.scheme.updater.iteration + 1, **of_part, **where})

    def _end(self, number: int, computed: Sequence[_Computation], why: str) -> NoReturn:
        a, b = computed
        raise CorruptionError(
            f"in iteration {self._ranks.scheme.updater.iteration + 1} two computations of virtual rank {number} differ, "
            f"that of {a} and that of {b}, first in the gradient of {self._name_difference(a.sums, b.sums)!r}, and {why}. "
            "Resume from the last snapshot, and without the device if it happens again"
        )

    def _computed(self, number: int, counts: bool) -> _Computation:
        return replace(self._me, sums=_read(self._sums[number, counts]))

    def _sum(self, tensors: Sequence[Tensor | None]) -> Tensor:
        return sums_to_compare(tensors, _ABSENT, torch.device(self._me.device))

    def _name_difference(self, sums: tuple[int, ...], others: tuple[int, ...]) -> str:
        names = {id(value): name for name, value in _list_parameters(self._ranks.scheme.models).items()}
        trained = [names[id(parameter)] for parameter in self._trained]
        return next((name for name, *pair in zip(trained, sums, others, strict=False) if pair[0] != pair[1]), "?")


def make_audit(
    count: Any,
    policy: Any,
    virtual_ranks: int | None,
    size: int,
    models: Mapping[str, nn.Module],
    iterators: Mapping[str, Any],
    wrapped: WrappedModules,
) -> Audit | None:
    """Return the audit of an updater; ``None`` without one."""
    if policy not in ("correct", "stop"):
        raise ValueError(f'audit_policy is "correct" or "stop", got {policy!r}')
    if not is_integer(count):
        raise TypeError(f"audit is the number of virtual ranks of each update that are computed twice, got {count!r}")
    if count == 0:
        return None
    if virtual_ranks is None:
        raise ValueError(
            "audit computes virtual ranks a second time, and without them each rank has its own rows: give virtual_ranks too"
        )
    if not 0 < count <= virtual_ranks:
        raise ValueError(f"audit is from 0 to virtual_ranks={virtual_ranks}, of which it is a part, got {count}")
    sharded = any(is_sharded(parameter) for model in models.values() for parameter in model.parameters())
    if sharded or (wrapped.parameters and size > 1):
        raise ValueError(
            "with audit one rank computes what another has computed, and DDP and fully_shard exchange between all ranks in "
            "a forward: leave the model plain, whose gradients the updater adds up, or leave audit out"
        )
    for label, model in models.items():
        if own := [path or "itself" for path, _ in own_states(unwrap(model))]:
            raise ValueError(
                f"with audit a virtual rank is computed twice, and model {label!r} has {own[0]}, which keeps a state of its "
                "own from one computation to the next: make it a buffer, or leave audit out"
            )
    if size > 1:
        check_dealt("audit", iterators)
    return Audit(int(count), policy)


def _find_agreed(computations: Sequence[_Computation]) -> tuple[int, ...] | None:
    """Return what most ranks agree on, two or more, or most computations if there is one rank; ``None`` without such."""
    is_alone = len({item.rank for item in computations}) == 1
    supporters = defaultdict[tuple[int, ...], set[int]](set)
    for index, item in enumerate(computations):
        supporters[item.sums].add(index if is_alone else item.rank)
    (votes, right), *rest = sorted(((len(ranks), sums) for sums, ranks in supporters.items()), reverse=True)
    return right if votes > 1 and (not rest or rest[0][0] < votes) else None


def _list_parameters(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{label}.{path}": value for label, model in models.items() for path, value in model.named_parameters()}


def _list_state(scheme: Any) -> dict[str, Tensor]:
    """Return the tensors by name that all ranks have alike."""
    named = _list_parameters(scheme.models)
    named |= {f"{label}.{path}": value for label, model in scheme.models.items() for path, value in model.named_buffers()}
    paths = {value: path for path, value in named.items()}
    for name, optimizer in scheme.optimizers.items():
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if type(value) is Tensor:
                    named[f"{key} of {paths.get(parameter, '?')} in optimizer {name!r}"] = value
    return named


def _read(sums: Tensor) -> tuple[int, ...]:
    return tuple(read_together([sums])[0].tolist())


@lru_cache(64)
def _factors(count: int, device: torch.device) -> Tensor:
    odd = mix(np.arange(count, dtype=np.uint64)) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)
