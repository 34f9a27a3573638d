"""WandbWriter: what the real wandb writes in its offline mode."""

import math
import sys

import pytest
from offline import folders, read
from written import LATE, LOSSES, SEEN, KilledError, Showing, train

from chainring.writers import Record, WandbWriter

pytestmark = pytest.mark.usefixtures("offline")


def losses(rows, key="main/loss"):
    return [(row["iteration"], row[key]) for row in rows if key in row]


def test_each_row_is_a_row_there_keyed_by_iteration(tmp_path):
    """With epoch and time; NaN and infinity are themselves; the config is the trainer's."""
    log = train(tmp_path, WandbWriter(), config={"lr": 0.5, "sizes": [1, 2]})
    (folder,) = folders(tmp_path)
    _, config, rows = read(folder)
    assert (losses(rows), losses(rows, "main/late")) == (LOSSES, LATE)
    assert [row["_step"] for row in rows] == [2, 4, 6, 8]
    assert [row["elapsed_time"] for row in rows] == [row["elapsed_time"] for row in log.log]
    assert math.isnan(rows[2]["odd"])
    assert rows[3]["odd"] == math.inf
    assert (config["lr"], config["sizes"]) == (0.5, [1, 2])
    assert sys.modules["wandb"].run is None


def test_a_resumed_run_goes_on_under_its_id(tmp_path):
    """Its new folder has all rows so far; the earlier one is put where ``wandb sync`` does not look."""
    with pytest.raises(KilledError):
        train(tmp_path, WandbWriter(), kill=7)
    train(tmp_path, WandbWriter())
    (second, _, after), (first, _, before) = map(read, [*folders(tmp_path), *folders(tmp_path, "wandb/abandoned/1")])
    assert first == second
    assert (losses(before), losses(after)) == (LOSSES[:3], LOSSES)
    assert len(list((tmp_path / "wandb").glob("*/*.wandb"))) == 2  # of one file: latest-run leads there too


def test_a_run_that_was_sent_has_another_id_when_it_is_resumed(tmp_path):
    """``wandb sync`` leaves a mark beside what it has sent; that folder stays."""
    with pytest.raises(KilledError):
        train(tmp_path, WandbWriter(), kill=7)
    (folder,) = folders(tmp_path)
    (log,) = folder.glob("*.wandb")
    log.with_suffix(".wandb.synced").touch()
    train(tmp_path, WandbWriter())
    (first, _, before), (second, _, after) = sorted(map(read, folders(tmp_path)), key=lambda found: len(found[2]))
    assert first != second
    assert (losses(before), losses(after)) == (LOSSES[:3], LOSSES)


def test_rows_that_w_and_b_cannot_take_back_are_warned_about(tmp_path):
    """A run that stays open has rows of iterations that are computed again."""
    own = sys.modules["wandb"].init(dir=str(tmp_path), id="mine")
    with pytest.raises(KilledError):
        train(tmp_path / "out", WandbWriter(), kill=7)
    with pytest.warns(
        UserWarning, match="has those of run mine up to step 6; .* back to iteration 4, so later ones will be"
    ):
        train(tmp_path / "out", WandbWriter())
    own.finish()


def test_another_run_in_the_directory_has_another_id(tmp_path):
    """What W&B keeps of the earlier one stays."""
    for _ in range(2):
        with pytest.raises(KilledError):
            train(tmp_path, WandbWriter(), kill=3)
    first, second = (read(folder)[0] for folder in folders(tmp_path))
    assert first != second
    assert (tmp_path / "previous" / "1" / "wandb_run.json").exists()


def test_a_run_of_the_script_is_used_and_left_open(tmp_path):
    """Rows that go behind its step come under the next one, with their own iteration."""
    own = sys.modules["wandb"].init(dir=str(tmp_path), id="mine")
    own.log({"before": 1.0}, step=6, commit=True)
    train(tmp_path / "out", WandbWriter(project="elsewhere"))
    assert sys.modules["wandb"].run is own
    own.finish()
    (folder,) = folders(tmp_path)
    name, _, rows = read(folder)
    assert (name, losses(rows), [row["_step"] for row in rows]) == ("mine", LOSSES, [6, 7, 8, 9, 10])


def test_settings_of_init_come_first(tmp_path):
    """The directory, the id, the config."""
    (tmp_path / "other").mkdir()
    train(tmp_path, WandbWriter(id="mine", dir=str(tmp_path / "other"), config={"own": 1}), config={"lr": 0.5})
    (folder,) = folders(tmp_path / "other")
    name, config, _ = read(folder)
    assert (name, config["own"], "lr" in config) == ("mine", 1, False)


def test_a_writer_by_itself_keeps_nothing_but_what_wandb_does(tmp_path, monkeypatch):
    """Outside a run there is no directory for its id."""
    monkeypatch.chdir(tmp_path)
    writer = WandbWriter(dir=str(tmp_path))
    writer.write(Record(0, 3, 0.5, {"a": 1.0}))
    writer.close()
    assert losses(read(folders(tmp_path)[0])[2], "a") == [(3, 1.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["wandb"]


def test_without_the_package_the_extra_is_named(monkeypatch):
    """At construction."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"WandbWriter writes with wandb.*pip install 'chainring\[wandb\]'"):
        WandbWriter()


def test_images_texts_and_histograms_are_its_own_of_these_kinds(tmp_path):
    """A text is shown as it is, also if it looks like HTML; after a resume those of earlier rows are sent again."""
    with pytest.raises(KilledError):
        train(tmp_path, WandbWriter(), kill=7, updater=Showing())
    train(tmp_path, WandbWriter(), updater=Showing())
    (folder,) = folders(tmp_path)
    _, _, rows = read(folder)
    assert losses(rows) == LOSSES
    assert [row["iteration"] for row in rows] == SEEN
    for row, step in zip(rows, SEEN, strict=True):
        kinds = row["seen/image/_type"], row["main/loss/text/_type"], row["weights/_type"]
        assert kinds == ("image-file", "html-file", "histogram")
        assert (row["seen/image/width"], row["seen/image/height"]) == (4, 2)
        assert sum(row["weights/values"]) == step
        text = (folder / "files" / row["main/loss/text/path"]).read_text()
        assert f"<pre>&lt;b&gt; of {step}</pre>" in text
