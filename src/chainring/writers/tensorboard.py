"""TensorBoardWriter: logs to TensorBoard, one curve per key."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from chainring._files import make_folder, open_regular
from chainring.reporting.media import Histogram, Image, Media
from chainring.writers.base import Record, Run, Writer, check_path, escape_fields, import_optional, media_of, scalars

_PREFIX = "events.out.tfevents."  # TensorBoard recognises its files by it


class TensorBoardWriter(Writer):
    """Writes each row at once to an event file, for ``tensorboard --logdir result``.

    Each number of a row, including its epoch and elapsed time, is a scalar under its key, with the iteration as the step,
    in TensorBoard's single precision. Images, texts and histograms appear in the tabs of these names. The run's config is
    shown under HPARAMS. A resumed run writes another file, which tells TensorBoard to discard later iterations of the
    earlier files, so that each row is shown exactly once.

    Example::

        trainer.extend(extensions.LogReport(writers=[TensorBoardWriter()]))

    Args:
        directory: the directory of the event files, in the run's ``out``, or an absolute path.

    Raises:
        TypeError: the directory is not a path.
        ImportError: tensorboard is not installed.
    """

    def __init__(self, directory: str = "tensorboard") -> None:
        import_optional("tensorboard", "tensorboard", "TensorBoardWriter")
        self._directory = check_path("directory", directory)
        self.writes = (escape_fields((Path(self._directory) / _PREFIX).as_posix()) + "{}",)
        self._file: BinaryIO | None = None
        self._records: Any = None

    def begin(self, run: Run) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory = make_folder(run.out, self._directory)
        earlier = sorted(path.name for path in directory.glob(f"{_PREFIX}*"))
        # A name that sorts after the earlier ones, because TensorBoard reads files in the order of their names.
        last = earlier[-1][len(_PREFIX) :].partition(".")[0] if earlier else ""
        seconds = max(int(time.time()), int(last) + 1 if last.isdecimal() else 0)
        name = f"{_PREFIX}{seconds:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(directory / name, "xb")  # noqa: SIM115 - it stays open until the run ends
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        self._add(step=run.iteration + 1, session_log=SessionLog(status=SessionLog.START))  # later steps are forgotten
        if run.config:
            taken = (bool, int, float, str)  # the settings that TensorBoard takes
            settings = {str(key): value if isinstance(value, taken) else str(value) for key, value in run.config.items()}
            self._add(summary=hparams_pb(settings))
        there = {step for file in earlier for step in _steps(directory / file)}
        for record in run.records:
            if record.iteration not in there:  # a machine that was lost has not written the last
                self.write(record)

    def write(self, record: Record) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._file is None:
            self.begin(Run())
        values = [Summary.Value(tag=key, simple_value=value) for key, value in scalars(record).items()]
        values += [_media_value(key, media) for key, media in media_of(record).items()]
        self._add(step=record.iteration, summary=Summary(value=values))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **event).SerializeToString())
        self._records.flush()


def _steps(path: Path) -> Iterator[int]:
    """Yield the steps of the rows in an event file, as far as it is whole."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    with suppress(OSError, DecodeError), open(open_regular(path), "rb") as file:
        while len(head := file.read(12)) == 12:  # the length of an event and its checksum; another one follows the event
            size = int.from_bytes(head[:8], "little")
            if len(data := file.read(size + 4)) < size + 4:
                return
            event = Event.FromString(data[:size])
            if any(value.tag == "epoch" for value in event.summary.value):  # not in that of the config
                yield event.step


def _media_value(key: str, media: Media) -> Any:
    """Return an image, a text or a histogram as TensorBoard's summary of it."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    if isinstance(media, Image):
        height, width, channels = media.pixels.shape
        image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=media.png())
        return Summary.Value(tag=key, image=image)
    if isinstance(media, Histogram):
        limits = {"bucket_limit": media.edges[1:] or (0.0,), "bucket": media.counts or (0,)}
        ends = {"min": media.edges[0], "max": media.edges[-1]} if media.edges else {}
        sums = {"num": sum(media.counts), "sum": media.sum, "sum_squares": media.sum_of_squares}
        return Summary.Value(tag=key, histo=HistogramProto(**limits, **ends, **sums))
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    text = TensorProto(dtype=DT_STRING, string_val=[media.text.encode("utf-8", "backslashreplace")])
    return Summary.Value(tag=key, metadata=SummaryMetadata(plugin_data=plugin), tensor=text)
