"""Sums over virtual ranks: one tree, whichever ranks have its leaves."""

from math import log2

import pytest
import torch

from chainring._distributed.communicator import Communicator
from chainring._distributed.virtual_ranks import Deal, Node, TreeSum, fold, nodes_of
from rank_pair import on_two_ranks

COUNTS = range(1, 17)
SHAPES = [(), (5,), (3, 2), (1,)]


def blocks(size, count):
    return Deal.even(size, count).blocks


def tree(leaves, add, start=0, width=None):
    """The sum of leaves in the order of the perfect tree over them, halves without a leaf left out."""
    width = 1 << (len(leaves) - 1).bit_length() if width is None else width
    if width == 1:
        return leaves[start]
    left, middle = tree(leaves, add, start, width // 2), start + width // 2
    return left if middle >= len(leaves) else add(left, tree(leaves, add, middle, width // 2))


@pytest.mark.parametrize("count", COUNTS)
def test_blocks_of_all_ranks_are_the_virtual_ranks_in_their_order(count):
    for size in range(1, count + 1):
        assert [leaf for block in blocks(size, count) for leaf in block] == list(range(count))


@pytest.mark.parametrize("count", COUNTS)
def test_sizes_of_blocks_differ_by_one_at_most(count):
    for size in range(1, count + 1):
        lengths = list(map(len, blocks(size, count)))
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("count", COUNTS)
def test_block_is_no_more_nodes_than_twice_the_depth_of_the_tree(count):
    for size in range(1, count + 1):
        assert all(1 <= len(nodes_of(block, count)) <= max(1, 2 * log2(count)) for block in blocks(size, count))


@pytest.mark.parametrize("count", COUNTS)
def test_order_of_additions_does_not_depend_on_the_number_of_ranks(count):
    def add(left, right):
        return f"({left}+{right})"

    expected = tree([str(leaf) for leaf in range(count)], add)
    for size in range(1, count + 1):
        held = [fold({Node(0, leaf): str(leaf) for leaf in block}, count, add) for block in blocks(size, count)]
        assert [sorted(nodes) for nodes in held] == [nodes_of(block, count) for block in blocks(size, count)]
        together = {node: said for nodes in held for node, said in nodes.items()}
        assert list(fold(together, count, add).values()) == [expected]


@pytest.mark.parametrize("count", [3, 6, 7, 8])
def test_eight_virtual_ranks_and_fewer_are_added_in_pairs_of_neighbours(count):
    sums = fold({Node(0, leaf): str(leaf) for leaf in range(count)}, count, lambda left, right: f"({left}{right})")
    assert list(sums.values()) == [
        {3: "((01)2)", 6: "(((01)(23))(45))", 7: "(((01)(23))((45)6))", 8: "(((01)(23))((45)(67)))"}[count]
    ]


def leaves_of(count):
    """A list of tensors for each virtual rank: of all magnitudes, with negative zeros; some are missing, one everywhere."""
    generator = torch.Generator().manual_seed(count)

    def random(shape):
        values = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)
        values = torch.where(torch.rand(shape, generator=generator) < 0.3, -0.0, values)
        return values if torch.rand((), generator=generator) < 0.7 else None

    return [[*map(random, SHAPES), None] for _ in range(count)]


def add_as_said(left, right):
    """One tensor more in a sum; a missing one adds zeros to one that is there."""
    if left is None and right is None:
        return None
    return (0.0 if left is None else left) + (0.0 if right is None else right)


def expected_sum(count):
    return [tree(list(column), add_as_said) for column in zip(*leaves_of(count), strict=True)]


def bits(tensors):
    return [None if tensor is None else (tuple(tensor.shape), tensor.numpy().tobytes()) for tensor in tensors]


def summed(comm, counts):
    """The bits of the sum of `leaves_of` each count, of which this rank has a block."""
    like = [torch.empty(shape) for shape in (*SHAPES, (4,))]
    found = []
    for count in counts:
        deal = Deal.even(comm.size, count)
        total = TreeSum(deal, comm.rank)
        for leaf in deal.block(comm.rank):
            total.add(leaves_of(count)[leaf])
        found.append(bits(total.finish(comm, like)))
    return found


def test_sum_of_one_rank_is_that_of_the_tree_to_the_last_bit():
    assert summed(Communicator(), COUNTS) == [bits(expected_sum(count)) for count in COUNTS]


def test_sum_of_two_ranks_is_that_of_the_tree_to_the_last_bit():
    counts = range(2, 17)
    expected = [bits(expected_sum(count)) for count in counts]
    assert on_two_ranks(summed, counts) == [expected, expected]


def test_sums_of_several_dtypes_are_each_in_their_own():
    total = TreeSum(Deal.even(1, 3), 0)
    for number in (1, 2, 2**40):
        total.add([torch.tensor(number), torch.tensor(0.1, dtype=torch.float64), torch.tensor(2.0**-number % 1).bfloat16()])
    integers, doubles, halves = total.finish(Communicator(), [])
    assert integers.item() == 2**40 + 3
    assert doubles.item() == 0.1 + 0.1 + 0.1
    assert (halves.item(), halves.dtype) == (0.75, torch.bfloat16)
