"""The autograd graph behind a tensor as text in DOT, the language of Graphviz (https://graphviz.org/doc/info/lang.html)."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_LEAF = "shape=box, style=filled, fillcolor=lightblue"
_ROOT = "shape=box, style=filled, fillcolor=lightgrey"
_OPERATION = "shape=ellipse"
_NOTE = "shape=plaintext"

# A node that Python has looked at is freed by recursion in torch 2.13: a chain of 64,000 overflows a stack of 8 MB.
_MOST = 10_000


def dot_of(root: Tensor, root_name: str, leaf_names: Mapping[int, str]) -> str:
    """A digraph whose edges run as the forward does: from the leaves through the operations to ``root``.

    Of a graph of more than some 10,000 nodes those next to the root are drawn, and that there are more.

    Args:
        root: a tensor with a ``grad_fn``. That its backward has run does no harm: the nodes are still there.
        root_name: what the box of ``root`` says above its shape.
        leaf_names: what a leaf is called, by its ``id``. Other leaves are called ``leaf``.
    """
    numbers: dict[Any, int] = {root.grad_fn: 0}  # holds the nodes, so that each stays one object
    edges: list[tuple[int, int]] = []
    waiting = deque(numbers)
    while waiting and len(numbers) < _MOST:
        node = waiting.popleft()
        for source, _ in node.next_functions:
            if source is None:  # an input that needs no gradient
                continue
            if source not in numbers:
                numbers[source] = len(numbers)
                waiting.append(source)
            edges.append((numbers[source], numbers[node]))
    lines = [f"  n{number} [{_drawn(node, leaf_names)}];" for node, number in numbers.items()]
    lines.append(f'  root [label="{_quoted(root_name)}\\n{tuple(root.shape)}", {_ROOT}];')
    lines += [f"  n{source} -> n{target};" for source, target in edges]
    if waiting:
        lines.append(f'  more [label="and more: only {len(numbers)} nodes are drawn", {_NOTE}];')
    return "\n".join(["digraph {", *lines, "  n0 -> root;", "}", ""])


def _drawn(node: Any, leaf_names: Mapping[int, str]) -> str:
    name = node.name().rpartition("::")[2]
    if name == "AccumulateGrad":  # where the graph ends
        leaf = node.variable
        return f'label="{_quoted(leaf_names.get(id(leaf), "leaf"))}\\n{tuple(leaf.shape)}", {_LEAF}'
    operation = re.sub(r"Backward\d*$", "", name)
    return f'label="{_quoted(operation)}", {_OPERATION}'


def _quoted(text: str) -> str:
    """Text for between the double quotes of DOT, where a backslash begins an escape and lines may not end."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
