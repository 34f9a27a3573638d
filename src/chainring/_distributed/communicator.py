"""Communicator: the exchange between ranks; by default for a world of one, which needs none."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from chainring._messages import warn
from chainring.converters import Device, as_device, is_auto

RUNNING_ALONE, WAITING = "alone", "waiting"  # keys of the store of runs
_PATIENCE = 5.0  # seconds in which a rank that runs by itself looks for others, once in a process
_has_looked = _is_alone = False


class Communicator:
    """Base class of communicators, and the communicator of a single process: rank 0 in a world of size 1.

    Every part of a run uses it, so that a run of several ranks is the same run with another communicator. One of your own
    overrides `all_reduce`, `broadcast`, `gather_object` and `barrier`; the other methods are based on them.

    Every rank must call the same methods in the same order: each waits for the others.

    Example::

        total = torch.tensor([1.0])
        comm.all_reduce([total], average=False)  # in place: the world size

    On a mesh, ``rank`` and ``size`` count the ranks that share the data, and `gather_object` returns one object of each;
    ``world`` contains all ranks.

    Attributes:
        rank: the rank of this process, from 0.
        size: the world size; on a mesh the number of ranks that share the data.
        local_rank: the rank of this process on its machine.
        device: the device on which this rank computes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")
    survives: ClassVar[bool] = False  # True if it goes on without ranks that are lost
    lost: Collection[tuple[int, str]] = ()  # the processes of those that were, each by its number and its host

    @property
    def may_lack(self) -> bool:
        """True if, after a loss, ranks may be left of which one lacks what another has; of two ranks only one is left."""
        return self.survives and self.size > 2

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and prints."""
        return self.rank == 0

    @property
    def world(self) -> Communicator:
        """The communicator of all ranks, which is this one unless some compute one model together on the same data."""
        return self

    @property
    def data_ranks(self) -> Sequence[int]:
        """The numbers in the world of the ranks that share a batch among them, in their order; this rank is one of them."""
        return range(self.size)

    @property
    def model_ranks(self) -> Sequence[int]:
        """The numbers in the world of the ranks that see the same rows as this one, and compute the model together."""
        return (self.rank,)

    def begin(self, computes_with_others: Callable[[], bool]) -> None:
        """Start a run; a world of one warns if other processes were started that it does not know of.

        Ranks that compute a model together, each on all data, need no communicator.

        Raises:
            ValueError: only some of the ranks have a communicator of several ranks.
        """
        global _has_looked, _is_alone
        count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if count == 1 or self.world.size > 1 or computes_with_others():
            return
        warn(
            f"{count} ranks have been started, and every rank trains on all data by itself, because "
            "the updater has no comm: StandardUpdater(..., comm=chainring.parallel.create_communicator())",
        )
        if (store := store_of_group()) is None:
            return
        rank = str(dist.get_rank())
        store.set(RUNNING_ALONE, rank)
        alone, until = store.add(f"{RUNNING_ALONE}/count", 1), time.monotonic() + (0 if _has_looked else _PATIENCE)
        _has_looked = True
        while not store.add(WAITING, 0):
            if alone >= count or time.monotonic() > until:
                _is_alone = True
                return
            time.sleep(0.05)
            alone = store.add(f"{RUNNING_ALONE}/count", 0)
        raise ValueError(describe_alone(rank))

    def end(self) -> None:
        """End a run."""
        global _is_alone
        if _is_alone and self.world.size == 1:
            _is_alone = False
            if (store := store_of_group()) is not None:
                store.set(RUNNING_ALONE, "")

    def all_reduce(self, tensors: Sequence[Tensor], average: bool = True) -> None:
        """Replace each tensor, in place, by its mean over the ranks, or with ``average=False`` by its sum."""

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        """Replace each tensor, in place, by the one of rank ``root``."""

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to replace a tensor by its sum over the ranks; what this returns waits for that, and returns it."""
        self.all_reduce([tensor], average=False)
        return lambda: tensor

    def start_all_to_all(self, sent: Tensor | Sequence[Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Start to send row r to rank r; what this returns waits for those of the others, of these sizes, by rank."""
        device = sent[0].device
        received = [rows[self.rank].to(device) for rows in self.gather_object(list(sent))]
        return lambda: received

    def start_all_gather(self, tensor: Tensor, gives: bool = True) -> Callable[[], Tensor]:
        """Start to exchange tensors of one shape; what this returns waits for them, and returns them stacked by rank.

        With ``gives=False`` ranks that are left after a loss are not given what others have gathered: it is followed by
        another exchange before anything changes by it, and is done again.
        """
        gathered = torch.stack([other.to(tensor.device) for other in self.gather_object(tensor)])
        return lambda: gathered

    def gather_object(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of the ranks, on every rank."""
        return [obj] * self.size

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return the object of rank ``root`` on every rank."""
        return self.gather_object(obj)[root]

    def start_max(self, number: int) -> Callable[[], int]:
        """Start to find the maximum over the ranks; the function that it returns waits for it."""
        largest = max(self.gather_object(number))
        return lambda: largest

    def barrier(self) -> None:
        """Wait until every rank has called this."""

    def beside(self) -> Communicator:
        """Return a communicator of the same ranks for another thread, whose calls do not mix with those of this one."""
        return self

    def failed(self, error: BaseException) -> BaseException:
        """Tell the others why the run fails; return the error to raise, which may be a `RankFailed` of who failed first."""
        return error

    def close(self) -> None:
        """End the exchange; afterwards the communicator must not be used."""


def device_of_rank(device: Device, comm: Communicator) -> torch.device | None:
    """Return the device that a setting names, where ``"auto"`` is that of the rank if there are several."""
    return comm.device if is_auto(device) and comm.world.size > 1 else as_device(device)


def as_communicator(comm: Any) -> Communicator:
    """Return a communicator; one of another class may have only some of its attributes."""
    if isinstance(comm, Communicator):
        return comm
    adapted = Communicator()
    names = ("rank", "size", "local_rank", "device", "all_reduce", "broadcast", "gather_object", "barrier", "close")
    vars(adapted).update({name: getattr(comm, name) for name in names if hasattr(comm, name)})
    return adapted


class RankFailed(RuntimeError):  # noqa: N818 - the rank has failed
    """Another rank has failed, so this one stops too; the text is the traceback of that rank.

    Example::

        try:
            trainer.run()
        except RankFailed as error:
            print(f"rank {comm.rank} stops, because another has failed: {error}")
    """


class RanksLost(BaseException):  # not an Exception, which a script may handle as an error of its own
    """Some ranks were lost, and this one is one of fewer from now on: what it did has to be done again."""


def store_of_group(prefix: str = "runs") -> Any:
    """Return the store of the process group, by default where all ranks say how they begin a run; ``None`` without one."""
    store = getattr(dist.distributed_c10d, "_get_default_store", lambda: None)() if dist.is_initialized() else None
    return None if store is None else dist.PrefixStore(f"chainring/{prefix}", store)  # type: ignore[attr-defined]


def describe_alone(rank: str) -> str:
    """Return that a rank runs by itself where others wait for it."""
    return (
        f"all ranks train together, and rank {rank} runs its trainer without the communicator by which others wait for it: "
        "give StandardUpdater comm=create_communicator() on every rank. Where one rank trains something by itself, let the "
        "others wait for it by comm.barrier() before they begin"
    )
