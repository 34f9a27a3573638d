"""TensorBoardWriter: what TensorBoard's own reader finds."""

import math
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from written import LATE, LOSSES, SEEN, KilledError, Showing, train

from chainring.writers import Record, Run, TensorBoardWriter


def read(directory):
    """The points of each scalar, and the reader."""
    reader = EventAccumulator(str(directory), {"histograms": 0}).Reload()  # all of them, as of scalars
    points = {key: [(event.step, event.value) for event in reader.Scalars(key)] for key in reader.Tags()["scalars"]}
    return points, reader


def test_each_number_of_a_row_is_a_scalar_at_its_iteration(tmp_path):
    """In the folder ``tensorboard`` of the run; NaN and infinity are themselves."""
    log = train(tmp_path, TensorBoardWriter())
    points, _ = read(tmp_path / "tensorboard")
    assert points["main/loss"] == LOSSES
    assert points["main/late"] == LATE
    assert [step for step, _ in points["odd"]] == [2, 4, 6, 8]
    assert math.isnan(points["odd"][2][1])
    assert points["odd"][3][1] == math.inf
    assert points["epoch"] == [(k, 0) for k in (2, 4, 6, 8)]
    seconds = [np.float32(row["elapsed_time"]) for row in log.log]
    assert [value for _, value in points["elapsed_time"]] == seconds


def test_a_row_can_be_read_at_once(tmp_path):
    """While the run goes on; what is no number is left out."""
    writer = TensorBoardWriter(str(tmp_path))
    writer.write(Record(0, 1, 0.5, {"a": np.float32(0.25), "note": "text"}))
    points, _ = read(tmp_path)
    assert points == {"a": [(1, 0.25)], "epoch": [(1, 0)], "elapsed_time": [(1, 0.5)]}
    writer.close()


def test_the_config_is_shown_as_hyperparameters(tmp_path):
    """Numbers, truth values and texts as such, anything else as text."""
    train(
        tmp_path,
        TensorBoardWriter(),
        config={"lr": 0.5, "n": 3, "fast": True, "name": "x", "sizes": [1, 2], 3: np.float32(1)},
    )
    _, reader = read(tmp_path / "tensorboard")
    content = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    assert (found["lr"].number_value, found["n"].number_value, found["fast"].bool_value) == (0.5, 3, True)
    assert (found["name"].string_value, found["sizes"].string_value) == ("x", "[1, 2]")
    assert found["3"].string_value == "1.0"


def test_after_a_resume_each_row_is_found_once(tmp_path):
    """Rows after the snapshot are forgotten where they were, and come again."""
    with pytest.raises(KilledError):
        train(tmp_path, TensorBoardWriter(), kill=7)
    assert [step for step, _ in read(tmp_path / "tensorboard")[0]["main/loss"]] == [2, 4, 6]
    train(tmp_path, TensorBoardWriter())
    points, _ = read(tmp_path / "tensorboard")
    assert (points["main/loss"], points["main/late"]) == (LOSSES, LATE)


def test_files_are_read_in_the_order_in_which_they_were_begun(tmp_path):
    """Also where several starts fall into one second, and where a clock was ahead."""
    (tmp_path / "events.out.tfevents.4000000000.host.1").touch()
    for iteration in range(4):
        writer = TensorBoardWriter(str(tmp_path))
        writer.begin(Run(tmp_path, {}, iteration))
        for step in (iteration + 1, iteration + 2):
            writer.write(Record(0, step, 0.0, {"a": 10.0 * iteration + step}))
        writer.close()
    assert read(tmp_path)[0]["a"] == [(1, 1.0), (2, 12.0), (3, 23.0), (4, 34.0), (5, 35.0)]


def test_a_record_that_a_kill_has_torn_does_not_hide_those_after_it(tmp_path):
    """As a full disk leaves one."""
    with pytest.raises(KilledError):
        train(tmp_path, TensorBoardWriter(), kill=7)
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    train(tmp_path, TensorBoardWriter())
    assert read(tmp_path / "tensorboard")[0]["main/loss"] == LOSSES


def test_a_run_resumed_elsewhere_shows_its_earlier_rows_too(tmp_path):
    """They come from the log in the snapshot."""
    earlier = [Record(0, 2, 0.5, {"a": 1.0}), Record(0, 4, 1.0, {"a": 2.0})]
    writer = TensorBoardWriter()
    writer.begin(Run(tmp_path, {}, 5, earlier))
    writer.close()
    assert read(tmp_path / "tensorboard")[0]["a"] == [(2, 1.0), (4, 2.0)]


def test_another_run_in_the_directory_moves_the_files_away(tmp_path):
    """To ``previous/1``; what else lies in the folder stays."""
    train(tmp_path, TensorBoardWriter("t"), length=2)
    (tmp_path / "t" / "mine.txt").touch()
    for path in tmp_path.glob("snapshot*"):
        path.rename(tmp_path.parent / path.name)
    train(tmp_path, TensorBoardWriter("t"), length=4)
    assert read(tmp_path / "t")[0]["main/loss"] == LOSSES[:2]
    assert read(tmp_path / "previous" / "1" / "t")[0]["main/loss"] == LOSSES[:1]
    assert (tmp_path / "t" / "mine.txt").exists()


def test_without_the_package_the_extra_is_named(monkeypatch):
    """At construction."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(
        ImportError, match=r"TensorBoardWriter writes with tensorboard.*pip install 'chainring\[tensorboard\]'"
    ):
        TensorBoardWriter()


def test_images_texts_and_histograms_are_in_their_tabs_once_after_a_resume(tmp_path):
    """The text has the key of a number too, so its kind is added."""
    with pytest.raises(KilledError):
        train(tmp_path, TensorBoardWriter(), kill=7, updater=Showing())
    train(tmp_path, TensorBoardWriter(), updater=Showing())
    points, reader = read(tmp_path / "tensorboard")
    assert points["main/loss"] == LOSSES
    images = reader.Images("seen/image")
    assert [(each.step, each.width, each.height) for each in images] == [(step, 4, 2) for step in SEEN]
    assert images[0].encoded_image_string.startswith(b"\x89PNG")
    whole = plugin_event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()  # what TensorBoard shows
    texts = [(each.step, each.tensor_proto.string_val[0]) for each in whole.Tensors("main/loss/text")]
    assert texts == [(step, f"<b> of {step}".encode()) for step in SEEN]
    assert reader.SummaryMetadata("main/loss/text").plugin_data.plugin_name == "text"
    histograms = [(each.step, each.histogram_value) for each in reader.Histograms("weights")]
    assert [(step, value.num, value.min, value.max, value.sum) for step, value in histograms] == [
        (step, step, 0, step - 1, step * (step - 1) / 2) for step in SEEN
    ]
