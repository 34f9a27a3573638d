"""Extensions that draw: PlotReport, reported values as curves, and dump_graph, the autograd graph of one of them."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from chainring._files import atomic_write, replace_file
from chainring._hints import hinting
from chainring._messages import OneTimeWarning, warn
from chainring.reporting.reporter import Reporter
from chainring.reporting.summary import IntervalMeans
from chainring.serializers.protocol import AbstractSerializer, parameter_names
from chainring.training.extension import Extension
from chainring.training.extensions.log_report import key_list
from chainring.training.trainer import Trainer
from chainring.training.triggers import TriggerLike, get_trigger


class PlotReport(Extension):
    """Plots the means of reported values over intervals, one curve per key, as an image in the trainer's ``out``.

    In every iteration it reads the values that were reported before it runs. When its trigger fires, it adds a point to
    each curve whose key was reported since the last firing, and replaces the image at once. Matplotlib draws without a
    window, and its global settings are not changed.

    Example::

        trainer.extend(extensions.PlotReport(["main/loss", "validation/main/loss"], filename="loss.png"))

    Args:
        y_keys: the key of a value, or several.
        x_key: ``"iteration"`` or ``"epoch"``, which includes the fraction of an epoch.
        trigger: when a point is added. ``extend(..., trigger=t)`` means the same and takes precedence.
        postprocess: called with the figure, its axes and the means of the interval before the image is written.
        filename: the name of the image in ``out``; its suffix is the format: png, pdf, svg or another of matplotlib's.
        marker: the marker of the points, as in ``matplotlib.markers``.
        grid: True to draw grid lines behind the curves.

    Raises:
        ImportError: matplotlib is not installed.
    """

    skip_on_resume = True
    writes: Sequence[str] = ()
    watched_keys: Sequence[str] = ()

    @hinting({"file_name": "that is Chainer's; write filename="})
    def __init__(
        self,
        y_keys: str | Iterable[str],
        x_key: str = "iteration",
        trigger: TriggerLike = (1, "epoch"),
        postprocess: Callable[..., None] | None = None,
        filename: str = "plot.png",
        marker: str = "x",
        grid: bool = True,
    ) -> None:
        if x_key not in ("iteration", "epoch"):
            raise ValueError(f'x_key is "iteration" or "epoch", got {x_key!r}; keys to be drawn go into a list: [...]')
        if postprocess is not None and not callable(postprocess):
            raise TypeError(f"postprocess is a function of figure, axes and means; got {postprocess!r}")
        self.trigger = get_trigger(trigger)
        self.watched_keys = keys = key_list("y_keys", [y_keys] if isinstance(y_keys, str) else y_keys)
        if not keys:
            raise ValueError("y_keys is at least one key; got []")
        rule = 'filename is a name in out whose suffix is the format of the image, such as "plot.png"'
        path = Path(filename) if isinstance(filename, str) else Path()
        if path.name != filename or filename.startswith("."):
            raise ValueError(f"{rule}; got {filename!r}")
        formats = figure_class("PlotReport")().canvas.get_supported_filetypes()
        if path.suffix[1:].lower() not in formats:
            raise ValueError(f"{rule}; got {filename!r}, and the formats are {', '.join(sorted(formats))}")
        self.writes = (filename,)
        self._x_key = x_key
        self._postprocess = postprocess
        self._marker = marker
        self._grid = grid
        self._means = IntervalMeans(keys)
        self._points: dict[str, list[tuple[float, float]]] = {key: [] for key in keys}
        self._warning = OneTimeWarning()

    def identity(self, trainer: Trainer) -> Sequence[str]:
        return (*self.writes, *self.watched_keys)

    def observe(self, trainer: Trainer) -> None:
        self._means.observe(trainer)

    def observe_start(self, trainer: Trainer) -> None:
        """Draw the points of iteration 0, separate from the first interval."""
        if means := self._means.take(trainer):
            self._add(trainer, means)

    def __call__(self, trainer: Trainer) -> None:
        # A loaded interval may have begun with other keys.
        self._add(trainer, {key: mean for key, mean in self._means.end(trainer).items() if key in self._points})
        # A key that is never reported would otherwise go unnoticed.
        missing = [key for key, points in self._points.items() if not points]
        if missing and not trainer.is_rehearsing:  # which raises where one is not reported
            self._warning.give(
                f"{self.writes[0]} has no point yet for {missing} at iteration {trainer.updater.iteration}: reported were "
                f"{sorted(trainer.observation, key=str)}. Check the keys; use an interval in which they are reported. "
                "This warning is given once",
            )

    def _add(self, trainer: Trainer, means: dict[str, float]) -> None:
        x = trainer.updater.iteration if self._x_key == "iteration" else trainer.updater.epoch_detail
        for key, mean in means.items():
            self._points[key].append((x, mean))
        if not trainer.comm.is_main or not any(self._points.values()):
            return
        figure = figure_class("PlotReport")()  # not one of pyplot's, whose list and backend stay as they are
        axes = figure.add_subplot(111)
        axes.set_xlabel(self._x_key)
        axes.grid(self._grid)
        for key, points in self._points.items():
            if points:
                axes.plot(*zip(*points, strict=True), marker=self._marker, label=key)
        if self._postprocess is not None:
            self._postprocess(figure, axes, means)
        legend = axes.legend(bbox_to_anchor=(1.05, 1), loc="upper left", borderaxespad=0)
        save_figure(figure, Path(trainer.out) / self.writes[0], bbox_extra_artists=(legend,), bbox_inches="tight")

    def serialize(self, serializer: AbstractSerializer) -> None:
        saved = serializer("points", self._points)
        self._points = {key: [(x, y) for x, y in saved.get(key, ())] for key in self.watched_keys}  # the keys are a setting
        self._warning.serialize(serializer)
        self._means.serialize(serializer)


def figure_class(name: str) -> Any:
    """Return matplotlib's class of a figure, for what has this name."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{name} draws with matplotlib, which cannot be imported ({error}): pip install 'chainring[plot]'"
        ) from error
    return Figure


def save_figure(figure: Any, path: Path, **settings: Any) -> None:
    """Write an image, which replaces an earlier one at once; its suffix is the format."""
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:].lower() or "png", **settings)
    with atomic_write(path) as file:
        file.write(image.getvalue())


_MAX_TRIES = 10
_DOT_TIMEOUT = 30.0  # seconds in which the training waits for Graphviz
_STYLES = {
    "root": "shape=box, style=filled, fillcolor=lightgrey",
    "operation": "shape=ellipse",
    "leaf": "shape=box, style=filled, fillcolor=lightblue",
}

# A node that Python has looked at is freed by recursion in torch 2.13: a chain of 64,000 overflows a stack of 8 MB.
_MAX_NODES = 10_000


class DumpGraph(Extension):
    """Writes the autograd graph of a reported value once, after the first iteration in which it is reported.

    The file is in DOT, the language of Graphviz; if its program ``dot`` is installed, an SVG is written too, and for
    programs a JSON. Boxes are parameters, with their shapes and the names under which they are saved, such as
    ``main/predictor/l1/weight``; ellipses are operations. With ``accumulate`` it is the graph of the last micro-batch; for
    a compiled model the one that remains after compilation. If the value is missing or has no graph, there is one warning,
    and up to 10 attempts are made, one at each call: with a less frequent trigger graphs are held until it fires.

    Example::

        trainer.extend(extensions.dump_graph("main/loss"))  # result/cg.dot, result/cg.json

    Args:
        root_name: the key under which the value is reported, such as ``"main/loss"``.
        filename: the name of the DOT file in the trainer's ``out``; the others have the suffixes ``.json`` and ``.svg``.

    Raises:
        ValueError: the file would have the name of the SVG or of the JSON.
    """

    default_name = "dump_graph"
    writes: Sequence[str] = ()

    def __init__(self, root_name: str, filename: str = "cg.dot") -> None:
        for argument, value in (("root_name", root_name), ("filename", filename)):
            if not isinstance(value, str):
                raise TypeError(f'{argument} is a string, such as "main/loss" or "cg.dot"; got {value!r}')
        if not Path(filename).name or Path(filename).suffix in (".svg", ".json"):
            raise ValueError(
                f'filename is that of the DOT file, such as "cg.dot", beside which are a .svg and a .json; got {filename!r}'
            )
        self.writes = (filename, *(str(Path(filename).with_suffix(suffix)) for suffix in (".json", ".svg")))
        self._root_name = root_name
        self._is_written = False
        self._tries = 0
        self._root: Tensor | None = None
        self._reporter: Reporter | None = None

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
                names = parameter_names(trainer.updater.get_all_models())
                _write_graph(Path(trainer.out) / self.writes[0], root, self._root_name, names)
        elif self._tries == 1:
            reported = sorted(trainer.observation)
            reason, remedy = f"was not reported; reported were {reported}", "give one of these as root_name"
            if self._root_name in reported:
                reason, remedy = "was reported without a graph", "report the tensor itself, not its item() or detach()"
            warn(
                f"dump_graph draws the graph behind a reported loss, and {self._root_name!r} {reason}. If it does not come "
                f"in the next {_MAX_TRIES - 1} iterations either, no graph is written; {remedy}",
            )
        if self._is_written or self._tries == _MAX_TRIES:
            self.finalize()

    def finalize(self) -> None:
        self._root = None
        if self._reporter is not None:
            self._reporter.watchers = tuple(watcher for watcher in self._reporter.watchers if watcher != self._watch)
            self._reporter = None

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._is_written = serializer("is_written", self._is_written)
        self._tries = serializer("tries", self._tries)


dump_graph = DumpGraph


def _write_graph(path: Path, root: Tensor, root_name: str, leaf_names: Mapping[int, str]) -> None:
    """Write the graph behind a tensor, whose backward may have run, as DOT, as JSON and, with Graphviz's program, as SVG.

    Its edges run as the forward does: from the leaves through the operations to the root, the first node. Of a graph of
    more than some 10,000 nodes it has those next to the root. Leaves are labelled by their ``id``.
    """
    indices: dict[Any, int] = {root.grad_fn: 1}  # holds the functions, so that each stays one object
    edges = [(1, 0)]
    queue = deque(indices)
    while queue and len(indices) < _MAX_NODES:
        function = queue.popleft()
        for source, _ in function.next_functions:
            if source is None:  # an input that needs no gradient
                continue
            if source not in indices:
                indices[source] = len(indices) + 1
                queue.append(source)
            edges.append((indices[source], indices[function]))
    nodes: list[dict[str, Any]] = [{"kind": "root", "label": root_name, "shape": list(root.shape)}]
    for function in indices:
        name = function.name().rpartition("::")[2]
        if name == "AccumulateGrad":  # where the graph ends
            leaf = function.variable
            nodes.append({"kind": "leaf", "label": leaf_names.get(id(leaf), "leaf"), "shape": list(leaf.shape)})
        else:
            nodes.append({"kind": "operation", "label": re.sub(r"Backward\d*$", "", name)})
    lines = []
    for index, node in enumerate(nodes):
        shape = f"\\n{tuple(node['shape'])}" if "shape" in node else ""
        label = node["label"].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")  # between double quotes
        lines.append(f'  n{index} [label="{label}{shape}", {_STYLES[node["kind"]]}];')
    lines += [f"  n{source} -> n{target};" for source, target in edges]
    if queue:
        lines.append(f'  more [label="and more: only {len(nodes) - 1} nodes are drawn", shape=plaintext];')
    replace_file(path, "\n".join(["digraph {", *lines, "}", ""]))
    content = {"nodes": nodes, "edges": edges, "is_truncated": bool(queue)}
    replace_file(path.with_suffix(".json"), json.dumps(content) + "\n")
    if (program := shutil.which("dot")) is None:
        return
    try:
        done = subprocess.run([program, "-Tsvg", path], capture_output=True, timeout=_DOT_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        stderr = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        warn(f"{path} is written, and drawing it failed: {error}. {stderr}".rstrip())
    else:
        replace_file(path.with_suffix(".svg"), done.stdout)
