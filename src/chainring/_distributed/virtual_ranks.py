"""Virtual ranks: the deal of them among ranks, and sums over them in one fixed binary tree, whichever rank has them.

The leaves of the tree are the virtual ranks 0 to count - 1, filled up to a power of two by leaves that are not there. A
node is the sum of its left and its right half; where the right half has no leaf, it is the left half. So the order of the
additions, and with it every bit of a sum, depends on the number of virtual ranks alone. A contiguous block of leaves is at
most 2 * log2(count) whole nodes, and these are all that another rank has to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from chainring._distributed.communicator import Communicator
from chainring._distributed.group import gradient_buckets

T = TypeVar("T")
_AHEAD = 1  # buckets that are sent before the sum of the first of them


class Node(NamedTuple):
    """A node of the tree: the leaves ``position * 2**level`` up to those of the next one."""

    level: int
    position: int


@dataclass(frozen=True)
class Deal:
    """Which rank computes which virtual ranks: rank r those from ``bounds[r]`` to ``bounds[r + 1] - 1``, at least one.

    It may differ from one update to the next, and changes no bit of any.
    """

    bounds: tuple[int, ...]

    @classmethod
    def even(cls, size: int, count: int) -> Deal:
        """Return the one that gives ``size`` ranks equally many of ``count`` virtual ranks, as far as that goes."""
        return cls(tuple(rank * count // size for rank in range(size + 1)))

    @property
    def count(self) -> int:
        """The number of virtual ranks."""
        return self.bounds[-1]

    def block(self, rank: int) -> range:
        """Return the virtual ranks of a rank."""
        return self.blocks[rank]

    @cached_property
    def blocks(self) -> list[range]:
        """The virtual ranks of each rank."""
        return [range(first, end) for first, end in pairwise(self.bounds)]

    @cached_property
    def nodes(self) -> list[list[Node]]:
        """The nodes of the tree that those of each rank add up to."""
        return [nodes_of(block, self.count) for block in self.blocks]


@dataclass(frozen=True)
class Audits:
    """Which virtual ranks are computed a second time in an update: so many, in turn, each by another rank if there is one.

    Every rank knows them of any update, and so of any batch ahead.
    """

    count: int
    update: int  # the number of updates before it
    batches: int = 1  # of an iterator in each update, as far as that is known ahead
    taken: int = 0  # of them in this update
    disputed: tuple[int, ...] = ()  # computed by all ranks, and no others again

    def auditors(self, deal: Deal, ahead: int = 0) -> dict[int, int]:
        """Return, by virtual rank, the rank that computes it again in the update of the batch so many batches ahead."""
        update = self.update + ((self.taken + ahead) // self.batches if ahead else 0)
        ranks, count = len(deal.blocks), 0 if self.disputed and not ahead else self.count
        auditors = {}
        for number in sorted((update * count + shift) % deal.count for shift in range(count)):
            owner = next(rank for rank, block in enumerate(deal.blocks) if number in block)
            shift = 1 + (number + update * count // deal.count) % (ranks - 1) if ranks > 1 else 0
            auditors[number] = (owner + shift) % ranks
        return auditors

    def share(self, deal: Deal, rank: int, ahead: int = 0) -> tuple[list[int], list[int]]:
        """Return the virtual ranks whose rows a rank needs in that update, and those of them that it computes again."""
        auditors = self.auditors(deal, ahead)
        again = [number for number, auditor in auditors.items() if auditor == rank] if auditors else list(self.disputed)
        return sorted({*deal.block(rank), *again}), again


def fold(nodes: dict[Node, T], count: int, add: Callable[[T, T], T]) -> dict[Node, T]:
    """Combine nodes whose siblings are there as well; return those that remain: the root alone if all leaves are there."""
    remaining: dict[Node, T] = {}
    level = 0
    nodes = dict(nodes)
    while nodes:
        for node in sorted(node for node in nodes if node.level == level):
            if node not in nodes:  # combined with its left sibling
                continue
            value, sibling = nodes.pop(node), Node(level, node.position ^ 1)
            is_root = node.position == 0 and 1 << level >= count
            if is_root or (sibling not in nodes and sibling.position << level < count):
                remaining[node] = value
            else:
                parent = Node(level + 1, node.position >> 1)
                nodes[parent] = add(value, nodes.pop(sibling)) if sibling in nodes else value
        level += 1
    return remaining


def nodes_of(block: range, count: int) -> list[Node]:
    """Return the whole nodes that the leaves of a block add up to."""
    return sorted(fold({Node(0, leaf): None for leaf in block}, count, lambda left, _: left))


class TreeSum:
    """The sum over the virtual ranks that a rank has of a deal, whose lists of tensors are added in their order.

    ``None`` stands for a tensor that a virtual rank does not have; it adds nothing. No more lists are held at once than the
    block has nodes, and one that is being added. The tensors that are added belong to the sum, which changes them.
    """

    def __init__(self, deal: Deal, rank: int) -> None:
        self.deal, self._rank = deal, rank
        self.nodes: dict[Node, list[Tensor | None]] = {}  # of the virtual ranks that were added
        self._added = 0

    @property
    def next_leaf(self) -> Node:
        """The leaf of the virtual rank that comes next."""
        return Node(0, self.deal.block(self._rank)[self._added])

    def add(self, leaf: Sequence[Tensor | None]) -> None:
        """Add what the next virtual rank of the block has."""
        self.nodes[self.next_leaf] = list(leaf)
        self._added += 1
        self.nodes = fold(self.nodes, self.deal.count, _add_lists)

    def select(self, indices: Sequence[int], like: Sequence[Tensor]) -> TreeSum:
        """Return the sum of the tensors at these indices of each list; missing ones are zeros ``like`` these."""
        selected = TreeSum(self.deal, self._rank)
        for node, tensors in self.nodes.items():
            selected.nodes[node] = [*_fill([tensors[index] for index in indices], like)]
        return selected

    def finish(self, comm: Communicator, like: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the sums over the virtual ranks of all ranks, all of which call this; ``None`` where none has the tensor.

        Those that this rank does not have are ``like`` these in shape, dtype and device.
        """
        if comm.size == 1:
            (sums,) = self.nodes.values()
            return sums
        absent_here = absent_of(list(self.nodes.values()))
        wait_for_any = comm.start_max(len(absent_here))
        exchange = Exchange(comm, self, like)
        exchange.start_all()
        absent = set.intersection(*map(set, comm.gather_object(absent_here))) if wait_for_any() else set()
        return [None if index in absent else total for index, total in enumerate(exchange.finish())]

    @torch.no_grad()
    def start_gather(self, comm: Communicator) -> Callable[[], Tensor]:
        """Start to sum over the virtual ranks of all ranks, each with a vector of a few numbers: all go to all at once."""
        nodes = [tensors[0] for _, tensors in sorted(self.nodes.items())]
        of_ranks = self.deal.nodes
        filling = [torch.zeros_like(nodes[0])] * (max(map(len, of_ranks)) - len(nodes))  # type: ignore[arg-type]
        wait = comm.start_all_gather(torch.stack([*nodes, *filling]))  # type: ignore[list-item]

        def finish() -> Tensor:
            parts: dict[Node, Tensor] = {}
            for of_rank, values in zip(of_ranks, wait(), strict=True):
                parts.update(zip(of_rank, values, strict=False))
            (total,) = fold(parts, self.deal.count, Tensor.add_).values()
            return total

        return finish


def absent_of(lists: Sequence[Sequence[Tensor | None]]) -> list[int]:
    """Return the indices at which no list has a tensor."""
    return [index for index, tensors in enumerate(zip(*lists, strict=True)) if all(tensor is None for tensor in tensors)]


class Exchange:
    """Sums lists of tensors over the virtual ranks of all ranks, in buckets from the last tensor to the first.

    Of each bucket, a rank sums a slice of the nodes of all ranks and gives it to the others. All ranks start the same
    messages in the same order, each as soon as it has what is sent.
    """

    def __init__(self, comm: Communicator, total: TreeSum, like: Sequence[Tensor]) -> None:
        self.buckets = list(gradient_buckets(like))  # of indices in the lists
        self.started = 0  # of the buckets, how many
        self._comm, self._total, self._like = comm, total, like
        self._count, self._nodes = total.deal.count, total.deal.nodes
        # A sum of two is the same in either order, so that of two nodes needs no order of ours.
        self._adds_two = [len(nodes) for nodes in self._nodes] == [1, 1]
        self._sent: dict[int, Callable[[], list[Tensor]]] = {}  # by the number of the bucket
        self._summed: dict[int, Callable[[], Tensor]] = {}

    @torch.no_grad()
    def start(self, leaf: Sequence[Tensor | None] | None = None) -> None:
        """Send the next bucket; ``leaf`` are the tensors in it of the next virtual rank, which were not added before."""
        number, indices = self.started, self.buckets[self.started]
        nodes = {node: [tensors[index] for index in indices] for node, tensors in self._total.nodes.items()}
        if leaf is not None:
            nodes[self._total.next_leaf] = list(leaf)
        like = [self._like[index] for index in indices]
        rows = {node: _flatten(tensors, like, self._comm.size) for node, tensors in nodes.items()}
        remaining = sorted(fold(rows, self._count, Tensor.add_).items())
        self.started += 1
        if self._adds_two and like[0].dtype in (torch.float32, torch.float64):  # which every library adds to the same bits
            self._summed[number] = self._comm.start_sum(remaining[0][1])
            return
        sent = remaining[0][1] if len(remaining) == 1 else torch.cat([row for _, row in remaining], dim=1)
        width = sent.shape[1] // len(remaining)
        self._sent[number] = self._comm.start_all_to_all(sent, [len(nodes) * width for nodes in self._nodes])
        if len(self._sent) > _AHEAD:
            self._sum()

    @torch.no_grad()
    def start_all(self, leaf: Sequence[Tensor | None] | None = None) -> None:
        """Send all buckets that were not sent yet, and the sums of all."""
        for indices in self.buckets[self.started :]:
            self.start(None if leaf is None else [leaf[index] for index in indices])
        while self._sent:
            self._sum()

    def finish(self) -> list[Tensor]:
        """Return the sums, after all were sent."""
        sums: dict[int, Tensor] = {}
        for number, indices in enumerate(self.buckets):
            flat, start = self._summed[number]().view(-1), 0
            for index in indices:
                tensor = self._like[index]
                sums[index] = flat[start : start + tensor.numel()].view(tensor.shape)
                start += tensor.numel()
        return [sums[index] for index in range(len(self._like))]

    def _sum(self) -> None:
        """Sum the slice of this rank of the first bucket whose sum was not sent yet, and send it."""
        number = min(self._sent)
        received = self._sent.pop(number)()
        parts = {
            node: part
            for nodes, values in zip(self._nodes, received, strict=True)
            for node, part in zip(nodes, values.view(len(nodes), -1), strict=True)
        }
        (total,) = fold(parts, self._count, Tensor.add_).values()
        self._summed[number] = self._comm.start_all_gather(total, gives=False)  # as large as a model


def _add_lists(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    """Return the sums of two lists, tensor by tensor; where both have one, the left one is changed to the sum.

    ``None`` counts as zeros, which are really added: they turn -0.0 into 0.0, on one rank as between ranks.
    """
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
    sums = list(left)
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        if (a is None) != (b is None):
            sums[index] = (b if a is None else a).add_(0)  # type: ignore[union-attr]
    return sums


def _fill(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors, with zeros for those that are missing."""
    return [torch.zeros_like(zero) if tensor is None else tensor for tensor, zero in zip(tensors, like, strict=True)]


def _flatten(node: Sequence[Tensor | None], like: Sequence[Tensor], ranks: int) -> Tensor:
    """Return a copy of the elements of a node's tensors, in one row for each rank."""
    filling = like[0].new_zeros(-sum(map(Tensor.numel, like)) % ranks)
    return torch.cat([*(value.reshape(-1) for value in _fill(node, like)), filling]).view(ranks, -1)
