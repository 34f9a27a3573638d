"""PlotReport: reported values as curves in an image."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from chainring._files import atomic_write
from chainring._hints import hinting
from chainring._messages import OneTimeWarning
from chainring.reporting.summary import IntervalMeans
from chainring.serializers.protocol import AbstractSerializer
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
        path = Path(filename) if isinstance(filename, str) else None
        if path is None or path.name != filename or not path.stem or filename.startswith("."):
            raise ValueError(f"{rule}; got {filename!r}")
        formats = _figure_class()().canvas.get_supported_filetypes()
        self._format = path.suffix[1:].lower()
        if self._format not in formats:
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
        """Add a point of each key, and draw the figure."""
        x = trainer.updater.iteration if self._x_key == "iteration" else trainer.updater.epoch_detail
        for key, mean in means.items():
            self._points[key].append((x, mean))
        if not trainer.comm.is_main or not any(self._points.values()):
            return
        figure = _figure_class()()  # not one of pyplot's, whose list and backend stay as they are
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
        with atomic_write(Path(trainer.out) / self.writes[0]) as file:
            file.write(image.getvalue())

    def serialize(self, serializer: AbstractSerializer) -> None:
        saved = serializer("points", self._points)
        self._points = {key: [(x, y) for x, y in saved.get(key, ())] for key in self.watched_keys}  # the keys are a setting
        self._warning.serialize(serializer)
        self._means.serialize(serializer)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"PlotReport draws with matplotlib, which cannot be imported ({error}): pip install 'chainring[plot]'"
        ) from error
    return Figure
