"""dump_graph: the autograd graph of a reported value as a picture, once."""

from __future__ import annotations

import re
import shutil
import subprocess
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from chainring._files import replace
from chainring.reporting.reporter import Reporter
from chainring.serializers.base import AbstractSerializer
from chainring.training.extension import Extension
from chainring.training.updaters._optimizer_state import parameter_names

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


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


_TRIES = 10
_PATIENCE = 30.0  # seconds: what dot may take while the training waits


class DumpGraph(Extension):
    """Writes the autograd graph behind a reported value once, after the first iteration that has reported it.

    The file is in DOT, the language of Graphviz; where its program ``dot`` is installed, an SVG comes beside it. Boxes
    are parameters, under the names by which they are saved, such as ``main/predictor/l1/weight``, with their shapes;
    ellipses are operations. The graph is kept for that iteration only. A resumed run whose earlier part has written the
    file does not write it again. With ``accumulate`` it is the graph of the last part of the update; of a compiled model
    it is what the compiler has left of it.

    If the value is not there, or has no graph, that is warned about once, and it is tried up to 10 times. Each call is a
    try, so leave the trigger as it is: with a rarer one the graphs of the iterations before are held until it fires.

    Args:
        root_name: under which the value is reported, such as ``"main/loss"``.
        filename: of the DOT file, in the trainer's ``out``; the SVG has ``.svg`` for its suffix.

    Raises:
        TypeError: a name is no string.
        ValueError: the file would be named as the SVG beside it.
    """

    default_name = "dump_graph"

    def __init__(self, root_name: str, filename: str = "cg.dot") -> None:
        for what, given in (("root_name", root_name), ("filename", filename)):
            if not isinstance(given, str):
                raise TypeError(f'{what} is a string, such as "main/loss" or "cg.dot"; got {given!r}')
        if not Path(filename).name or Path(filename).suffix == ".svg":
            raise ValueError(f'filename is that of the DOT file, such as "cg.dot", and not of the SVG; got {filename!r}')
        self._root_name = root_name
        self._filename = filename
        self._is_written = False
        self._tries = 0
        self._root: Tensor | None = None
        self._reporter: Reporter | None = None

    @property
    def writes(self) -> Sequence[str]:
        return (self._filename, str(Path(self._filename).with_suffix(".svg")))

    def initialize(self, trainer: Trainer) -> None:
        if not self._is_written and self._tries < _TRIES:
            self._reporter = trainer.reporter
            self._reporter.watchers += (self._see,)

    def _see(self, name: str, value: Any) -> None:
        if name == self._root_name:
            self._root = value[0] if type(value) is tuple else value

    def __call__(self, trainer: Trainer) -> None:
        if self._reporter is None:
            return
        root, self._root = self._root, None
        self._tries += 1
        if isinstance(root, Tensor) and root.grad_fn is not None:
            self._is_written = True
            if trainer.comm.rank == 0:
                names = parameter_names(trainer.updater.get_all_models())
                self._write(dot_of(root, self._root_name, names), Path(trainer.out) / self._filename)
        elif self._tries == 1:
            self._warn(trainer)
        if self._is_written or self._tries == _TRIES:
            self.finalize()

    def _warn(self, trainer: Trainer) -> None:
        seen = sorted(trainer.observation)
        is_there = self._root_name in seen
        what = "was reported without a graph" if is_there else f"was not reported; reported were {seen}"
        remedy = "report the tensor itself, not its item() or detach()" if is_there else "give one of these as root_name"
        warnings.warn(
            f"dump_graph draws the graph behind a reported loss, and {self._root_name!r} {what}. If it does not come in "
            f"the next {_TRIES - 1} iterations either, no graph is written; {remedy}",
            stacklevel=3,
        )

    def _write(self, text: str, path: Path) -> None:
        replace(path, text.encode())
        program = shutil.which("dot")
        if program is None:
            return
        try:
            done = subprocess.run([program, "-Tsvg", path], capture_output=True, timeout=_PATIENCE, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
            warnings.warn(f"{path} is written, and drawing it failed: {error}. {said}".rstrip(), stacklevel=4)
            return
        replace(path.with_suffix(".svg"), done.stdout)

    def finalize(self) -> None:
        self._root = None
        if self._reporter is not None:
            self._reporter.watchers = tuple(watch for watch in self._reporter.watchers if watch != self._see)
            self._reporter = None

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._is_written = serializer("is_written", self._is_written)
        self._tries = serializer("tries", self._tries)


dump_graph = DumpGraph
