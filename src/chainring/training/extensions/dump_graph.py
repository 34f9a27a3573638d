"""dump_graph: the autograd graph of a reported value, written once."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from chainring._files import replace_file
from chainring._messages import warn
from chainring._naming import parameter_names
from chainring.reporting.reporter import Reporter
from chainring.serializers.protocol import AbstractSerializer
from chainring.training.extension import Extension

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

_MAX_TRIES = 10
_DOT_TIMEOUT = 30.0  # seconds in which the training waits for Graphviz

# A node that Python has looked at is freed by recursion in torch 2.13: a chain of 64,000 overflows a stack of 8 MB.
_MAX_NODES = 10_000


class DumpGraph(Extension):
    """Writes the autograd graph of a reported value once, after the first iteration in which it is reported.

    The file is in DOT, the language of Graphviz; if its program ``dot`` is installed, an SVG is written too. The same
    graph is written as JSON, for programs. Boxes are parameters, with their shapes and the names under which they are
    saved, such as ``main/predictor/l1/weight``; ellipses are operations. The graph is kept in memory for that iteration
    only. A resumed run does not write it again. With ``accumulate`` it is the graph of the last micro-batch; for a
    compiled model it is the graph that remains after compilation.

    If the value is missing or has no graph, there is one warning, and up to 10 attempts are made, one at each call. Do
    not change the trigger: with a less frequent one, the graphs of the iterations in between are held until it fires.

    Example::

        trainer.extend(extensions.dump_graph("main/loss"))  # result/cg.dot, result/cg.json

    Args:
        root_name: the key under which the value is reported, such as ``"main/loss"``.
        filename: the name of the DOT file in the trainer's ``out``; the other files have the suffixes ``.json`` and
            ``.svg``.

    Raises:
        TypeError: a name is not a string.
        ValueError: the file would have the name of the SVG or of the JSON.
    """

    default_name = "dump_graph"

    def __init__(self, root_name: str, filename: str = "cg.dot") -> None:
        for argument, value in (("root_name", root_name), ("filename", filename)):
            if not isinstance(value, str):
                raise TypeError(f'{argument} is a string, such as "main/loss" or "cg.dot"; got {value!r}')
        if not Path(filename).name or Path(filename).suffix in (".svg", ".json"):
            raise ValueError(
                f'filename is that of the DOT file, such as "cg.dot", beside which are a .svg and a .json; got {filename!r}'
            )
        self._root_name = root_name
        self._filename = filename
        self._is_written = False
        self._tries = 0
        self._root: Tensor | None = None
        self._reporter: Reporter | None = None

    @property
    def writes(self) -> Sequence[str]:
        return (self._filename, *(str(Path(self._filename).with_suffix(suffix)) for suffix in (".json", ".svg")))

    def initialize(self, trainer: Trainer) -> None:
        if not self._is_written and self._tries < _MAX_TRIES:
            self._reporter = trainer.reporter
            self._reporter.watchers += (self._watch,)

    def _watch(self, name: str, value: Any) -> None:
        if name == self._root_name:
            self._root = value[0] if type(value) is tuple else value

    def __call__(self, trainer: Trainer) -> None:
        if self._reporter is None:
            return
        root, self._root = self._root, None
        self._tries += 1
        if isinstance(root, Tensor) and root.grad_fn is not None:
            self._is_written = True
            if trainer.comm.is_main:
                graph = _Graph(root, self._root_name, parameter_names(trainer.updater.get_all_models()))
                self._write(graph, Path(trainer.out) / self._filename)
        elif self._tries == 1:
            self._warn(trainer)
        if self._is_written or self._tries == _MAX_TRIES:
            self.finalize()

    def _warn(self, trainer: Trainer) -> None:
        reported = sorted(trainer.observation)
        if self._root_name in reported:
            reason, remedy = "was reported without a graph", "report the tensor itself, not its item() or detach()"
        else:
            reason, remedy = f"was not reported; reported were {reported}", "give one of these as root_name"
        warn(
            f"dump_graph draws the graph behind a reported loss, and {self._root_name!r} {reason}. If it does not come in "
            f"the next {_MAX_TRIES - 1} iterations either, no graph is written; {remedy}",
        )

    def _write(self, graph: _Graph, path: Path) -> None:
        replace_file(path, graph.to_dot())
        content = {"nodes": graph.nodes, "edges": graph.edges, "is_truncated": graph.is_truncated}
        replace_file(path.with_suffix(".json"), json.dumps(content) + "\n")
        if (program := shutil.which("dot")) is None:
            return
        try:
            done = subprocess.run([program, "-Tsvg", path], capture_output=True, timeout=_DOT_TIMEOUT, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            stderr = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
            warn(f"{path} is written, and drawing it failed: {error}. {stderr}".rstrip())
            return
        replace_file(path.with_suffix(".svg"), done.stdout)

    def finalize(self) -> None:
        self._root = None
        if self._reporter is not None:
            self._reporter.watchers = tuple(watcher for watcher in self._reporter.watchers if watcher != self._watch)
            self._reporter = None

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._is_written = serializer("is_written", self._is_written)
        self._tries = serializer("tries", self._tries)


dump_graph = DumpGraph


class _Graph:
    """A directed graph whose edges run as the forward does: from the leaves through the operations to the root.

    Of a graph of more than some 10,000 nodes it has those next to the root, which is the first of ``nodes``. Leaves are
    labelled by their ``id``. Edges are pairs of indices of nodes. The backward of the root may have run.
    """

    def __init__(self, root: Tensor, root_name: str, leaf_names: Mapping[int, str]) -> None:
        indices: dict[Any, int] = {root.grad_fn: 1}  # holds the functions, so that each stays one object
        self.edges = [(1, 0)]
        queue = deque(indices)
        while queue and len(indices) < _MAX_NODES:
            function = queue.popleft()
            for source, _ in function.next_functions:
                if source is None:  # an input that needs no gradient
                    continue
                if source not in indices:
                    indices[source] = len(indices) + 1
                    queue.append(source)
                self.edges.append((indices[source], indices[function]))
        self.is_truncated = bool(queue)
        self.nodes: list[dict[str, Any]] = [{"kind": "root", "label": root_name, "shape": list(root.shape)}]
        self.nodes += [_node(function, leaf_names) for function in indices]

    def to_dot(self) -> str:
        styles = {"root": "shape=box, style=filled, fillcolor=lightgrey", "operation": "shape=ellipse"}
        styles["leaf"] = "shape=box, style=filled, fillcolor=lightblue"
        lines = []
        for index, node in enumerate(self.nodes):
            shape = f"\\n{tuple(node['shape'])}" if "shape" in node else ""
            lines.append(f'  n{index} [label="{_escape(node["label"])}{shape}", {styles[node["kind"]]}];')
        lines += [f"  n{source} -> n{target};" for source, target in self.edges]
        if self.is_truncated:
            lines.append(f'  more [label="and more: only {len(self.nodes) - 1} nodes are drawn", shape=plaintext];')
        return "\n".join(["digraph {", *lines, "}", ""])


def _node(function: Any, leaf_names: Mapping[int, str]) -> dict[str, Any]:
    name = function.name().rpartition("::")[2]
    if name == "AccumulateGrad":  # where the graph ends
        leaf = function.variable
        return {"kind": "leaf", "label": leaf_names.get(id(leaf), "leaf"), "shape": list(leaf.shape)}
    return {"kind": "operation", "label": re.sub(r"Backward\d*$", "", name)}


def _escape(text: str) -> str:
    """Return text for between the double quotes of DOT, where a backslash begins an escape and lines may not end."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
