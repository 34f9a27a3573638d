"""Virtual ranks: which of them a rank computes, and sums over them in one fixed binary tree, whichever rank has them.

The leaves of the tree are the virtual ranks 0 to count - 1, filled up to a power of two by leaves that are not there. A
node is the sum of its left and its right half; where the right half has no leaf, it is the left half. So the order of the
additions, and with it every bit of a sum, depends on the number of virtual ranks alone. A contiguous block of leaves is at
most 2 * log2(count) whole nodes, and these are all that another rank has to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from chainring._distributed.communicator import Communicator

T = TypeVar("T")
_BUCKET = 25 << 20  # bytes of gradients that are exchanged at once


class Node(NamedTuple):
    """A node of the tree: the leaves ``position * 2**level`` up to those of the next one."""

    level: int
    position: int


def block_of(rank: int, size: int, count: int) -> range:
    """Return the virtual ranks, of ``count``, that rank ``rank`` of ``size`` computes."""
    return range(rank * count // size, (rank + 1) * count // size)


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
    """The sum over a block of virtual ranks, whose lists of tensors are added in their order.

    ``None`` stands for a tensor that a virtual rank does not have; it adds nothing. No more lists are held at once than the
    block has nodes, and one that is being added. The tensors that are added belong to the sum, which changes them.
    """

    def __init__(self, block: range, count: int) -> None:
        self._leaves = iter(block)
        self._count = count
        self._nodes: dict[Node, list[Tensor | None]] = {}

    def add(self, leaf: Sequence[Tensor | None]) -> None:
        """Add what the next virtual rank of the block has."""
        self._nodes[Node(0, next(self._leaves))] = list(leaf)
        self._nodes = fold(self._nodes, self._count, _add_lists)

    def select(self, places: Sequence[int], like: Sequence[Tensor]) -> TreeSum:
        """Return the sum of the tensors at these places of each list; those that are missing are zeros ``like`` these."""
        selected = TreeSum(range(0), self._count)
        for node, tensors in self._nodes.items():
            chosen = [tensors[place] for place in places]
            pairs = zip(chosen, like, strict=True)
            selected._nodes[node] = [torch.zeros_like(zero) if tensor is None else tensor for tensor, zero in pairs]
        return selected

    def finish(self, comm: Communicator, like: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the sums over the virtual ranks of all ranks; ``None`` where no virtual rank has the tensor.

        Args:
            comm: the communicator of the ranks, all of which call this.
            like: tensors of the same shapes, dtypes and devices, for those that this rank does not have.
        """
        nodes = [self._nodes[node] for node in sorted(self._nodes)]
        if comm.size == 1:
            return nodes[0]
        sums: list[Tensor | None] = []
        for bucket in _buckets(like):
            columns = [node[len(sums) : len(sums) + len(bucket)] for node in nodes]
            sums += _sum_over_ranks(comm, columns, bucket, self._count)
        return sums


def _add_lists(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    pairs = [(one, other) for one, other in zip(left, right, strict=True) if one is not None and other is not None]
    if pairs:
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
    return [_add(one, other) for one, other in zip(left, right, strict=True)]


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the sum of two tensors, of which that of two that are there lies in the left one.

    ``None`` counts as zeros, which are really added: they turn -0.0 into 0.0, on one rank as between ranks.
    """
    if left is not None and right is not None:
        return left
    present = right if left is None else left
    return None if present is None else present.add_(0)


def _sum_over_ranks(
    comm: Communicator, nodes: Sequence[Sequence[Tensor | None]], like: Sequence[Tensor], count: int
) -> list[Tensor | None]:
    """Sum the nodes of all ranks: each rank sums a slice of all of them, and gives it to the others."""
    present = [any(node[i] is not None for node in nodes) for i in range(len(like))]
    slices = torch.stack([_flatten(node, like, comm.size) for node in nodes], dim=1)  # (ranks, nodes, elements)
    blocks = [nodes_of(block_of(rank, comm.size, count), count) for rank in range(comm.size)]
    width = slices.shape[2]
    received = comm.all_to_all(list(slices.flatten(1)), [len(block) * width for block in blocks])
    parts = {
        node: part
        for block, values in zip(blocks, received, strict=True)
        for node, part in zip(block, values.view(-1, width), strict=True)
    }
    (total,) = fold(parts, count, Tensor.add_).values()
    flat = torch.cat(comm.all_gather(total))
    elements = list(map(Tensor.numel, like))
    *values, flags = torch.split(flat, [*elements, len(flat) - sum(elements)])
    touched = present if all(present) else [bool(flag) for flag in flags.tolist()]  # only then is the device waited for
    return [
        value.view_as(tensor) if is_touched else None
        for value, tensor, is_touched in zip(values, like, touched[: len(like)], strict=True)
    ]


def _flatten(node: Sequence[Tensor | None], like: Sequence[Tensor], ranks: int) -> Tensor:
    """Return the elements of a node's tensors, and for each whether it is there, as one row for each rank."""
    values = [torch.zeros_like(one) if tensor is None else tensor for tensor, one in zip(node, like, strict=True)]
    flags = like[0].new_tensor([tensor is not None for tensor in node])
    missing = -(sum(map(Tensor.numel, like)) + len(like)) % ranks
    return torch.cat([*(value.reshape(-1) for value in values), flags, flags.new_zeros(missing)]).view(ranks, -1)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield neighbours of one dtype and device, as many as are exchanged at once."""
    for _, group in groupby(tensors, lambda tensor: (tensor.dtype, tensor.device)):
        bucket: list[Tensor] = []
        for tensor in group:
            if bucket and sum(map(_size, bucket)) + _size(tensor) > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


def _size(tensor: Tensor) -> int:
    return tensor.nbytes
