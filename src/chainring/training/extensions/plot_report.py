"""PlotReport: reported values as curves in an image."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chainring._files import atomic_write
from chainring._messages import OneTimeWarning
from chainring.serializers.base import AbstractSerializer
from chainring.training.extension import Extension
from chainring.training.triggers import get_trigger
from chainring.training.triggers._interval_means import IntervalMeans

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

X_KEYS = ("iteration", "epoch")


class PlotReport(Extension):
    """Draws the means of reported values over intervals, a curve a key, and keeps an image of them in the trainer's ``out``.

    It observes each iteration what has been reported when its turn comes; when its trigger fires it adds a point to each
    curve whose key was reported since, and draws the image anew. The image is replaced by a rename, so a viewer never sees
    half of one. Matplotlib draws without a window, and its settings of the process are left alone.

    Args:
        y_keys: the key of a value, or several.
        x_key: ``"iteration"`` or ``"epoch"``; epochs with their fraction.
        trigger: when a point is added. ``extend(..., trigger=t)`` means the same and comes first.
        postprocess: called with the figure, its axes and the means of the interval before the image is written; it may
            change the figure.
        filename: of the image in ``out``; its suffix is the format: png, pdf, svg or another of matplotlib's.
        marker: of the points, as in ``matplotlib.markers``.
        grid: whether there are lines behind the curves.

    Raises:
        TypeError: the keys are none, ``postprocess`` cannot be called, or the trigger is of another form.
        ValueError: ``x_key``, the file name or its format, or the trigger's unit or period is out of range.
        ImportError: matplotlib is not installed.
    """

    skip_on_resume = True

    def __init__(
        self,
        y_keys: str | Iterable[str],
        x_key: str = "iteration",
        trigger: Any = (1, "epoch"),
        postprocess: Callable[..., None] | None = None,
        filename: str = "plot.png",
        marker: str = "x",
        grid: bool = True,
    ) -> None:
        if x_key not in X_KEYS:
            raise ValueError(f'x_key is "iteration" or "epoch", got {x_key!r}; keys to be drawn go into a list: [...]')
        if postprocess is not None and not callable(postprocess):
            raise TypeError(f"postprocess is a function of figure, axes and means; got {postprocess!r}")
        self.trigger = get_trigger(trigger)
        self._y_keys = _keys(y_keys)
        self._x_key = x_key
        self._postprocess = postprocess
        self._filename = filename
        self._format = _format_of(filename)
        self._marker = marker
        self._grid = grid
        self._means = IntervalMeans(self._y_keys)
        self._points: dict[str, list[tuple[float, float]]] = {key: [] for key in self._y_keys}
        self._warning = OneTimeWarning()

    @property
    def writes(self) -> Sequence[str]:
        return (self._filename,)

    def observe(self, trainer: Trainer) -> None:
        self._means.observe(trainer)

    def __call__(self, trainer: Trainer) -> None:
        means = self._means.end(trainer)
        updater = trainer.updater
        x = updater.iteration if self._x_key == "iteration" else updater.epoch_detail
        means = {key: mean for key, mean in means.items() if key in self._points}  # half an interval of other keys is loaded
        for key, mean in means.items():
            self._points[key].append((x, mean))
        self._warn_of_missing(trainer)
        if trainer.comm.rank == 0 and any(self._points.values()):
            image = self._drawn(means)
            with atomic_write(Path(trainer.out) / self._filename) as file:
                file.write(image)

    def _warn_of_missing(self, trainer: Trainer) -> None:
        """Says once which curves have no point yet, because a key that is never reported would otherwise go unnoticed."""
        missing = [key for key, points in self._points.items() if not points]
        if missing:
            self._warning.give(
                f"{self._filename} has no point yet of {missing} at iteration {trainer.updater.iteration}: reported were "
                f"{sorted(trainer.observation, key=str)}. Check the keys; give an interval in which they are reported. "
                "This is said once",
                stacklevel=3,
            )

    def _drawn(self, means: dict[str, float]) -> bytes:
        """The image. The figure is no pyplot figure, so that neither its list nor the backend of the process is touched."""
        figure_type, canvas_type = _matplotlib()
        figure = figure_type()
        canvas_type(figure)
        axes = figure.add_subplot(111)
        axes.set_xlabel(self._x_key)
        axes.grid(self._grid)
        for key, points in self._points.items():
            if points:
                axes.plot(*zip(*points, strict=True), marker=self._marker, label=key)
        if self._postprocess is not None:
            self._postprocess(figure, axes, means)
        legend = axes.legend(bbox_to_anchor=(1.05, 1), loc="upper left", borderaxespad=0)
        image = io.BytesIO()
        figure.savefig(image, format=self._format, bbox_extra_artists=(legend,), bbox_inches="tight")
        return image.getvalue()

    def serialize(self, serializer: AbstractSerializer) -> None:
        saved = serializer("points", self._points)
        self._points = {key: [(x, y) for x, y in saved.get(key, ())] for key in self._y_keys}  # the keys are a setting
        self._warning.serialize(serializer)
        self._means.serialize(serializer)


def _keys(given: Any) -> list[str]:
    rule = 'y_keys is the key of a reported value, such as "main/loss", or a list of several'
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable):
        raise TypeError(f"{rule}; got {given!r}")
    keys = list(given)
    if not keys or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"{rule}; got {keys!r}")
    return keys


def _format_of(filename: Any) -> str:
    rule = 'filename is a name in out whose suffix is the format of the image, such as "plot.png"'
    path = Path(filename) if isinstance(filename, str) else None
    if path is None or path.name != filename or not path.stem or filename.startswith("."):
        raise ValueError(f"{rule}; got {filename!r}")
    known = _matplotlib()[1].get_supported_filetypes()
    suffix = path.suffix[1:].lower()
    if suffix not in known:
        raise ValueError(f"{rule}; got {filename!r}, and the formats are {', '.join(sorted(known))}")
    return suffix


def _matplotlib() -> tuple[Any, Any]:
    """Matplotlib's figure, and the canvas on which it is drawn into memory."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"PlotReport draws with matplotlib, which cannot be imported ({error}): pip install 'chainring[plot]'"
        ) from error
    return Figure, FigureCanvasAgg
