"""A run's directory is read as it lies there: while it is written, damaged, edited by a person."""

import math

import pytest

from chainring._runs.finished import FinishedRun
from chainring.html_report._run import read_run
from report_runs import falling, logged, recorded, trained


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(trained(tmp_path_factory.mktemp("out") / "result"))


def test_a_trained_run_is_read_whole(run):
    """Rows, starts, models, phases, graph and snapshots."""
    (log,) = run.logs
    assert [row["iteration"] for row in log.rows] == [3, 6, 9, 12, 15, 18]
    assert [start["iteration"] for start in run.starts] == [0, 9]
    assert run.starts[1]["changed"] == {
        "config.lr": [0.1, 0.5],
        "lr of optimizer 'main', group 0": [0.1, 0.5],
        "stop trigger": ["ReachedTrigger(3, 'epoch')", "ReachedTrigger(6, 'epoch')"],
    }
    (model,) = run.models
    assert (model.name, model.class_name, model.count(), model.count(trainable=True)) == ("main", "Classifier", 67, 67)
    assert model.shapes["predictor/0/weight"] == (8, 4)
    assert run.profile.iterations == 9
    assert {"forward", "backward", "extension:LogReport"} <= run.profile.seconds.keys()
    assert run.graph.name == "cg.json"
    assert list(run.graph.inputs)[-1] == "main/loss ()"
    assert "main/predictor/0/weight (8, 4)" in {label for inputs in run.graph.inputs.values() for label in inputs}
    expected = [(3 * epoch, epoch, "verified") for epoch in (6, 5, 4, 3, 2, 1)]
    assert [(each.iteration, each.epoch, each.state) for each in run.snapshots] == expected


def test_the_keys_of_a_log_begin_with_the_counters(run):
    """Then come the others as they first occur."""
    assert run.logs[0].keys[:4] == ["epoch", "iteration", "elapsed_time", "main/loss"]


@pytest.mark.parametrize("end", ['{"main/loss": 0.1, "itera', '{"main/loss": 0.1}', "\xff"])
def test_a_last_line_that_is_being_written_does_not_count(tmp_path, end):
    """A line is whole when its end is there."""
    (log,) = read_run(logged(tmp_path, falling(3), end)).logs
    assert (log.count, log.unreadable) == (3, 0)


@pytest.mark.parametrize("line", ["{", "[1]", "3", '"x"', "[" * 100_000, '{"a": %s}' % ("9" * 5000), "", "\x00"])
def test_a_damaged_line_is_counted_and_left_out(tmp_path, line):
    """The rows before and after it are there."""
    out = logged(tmp_path, falling(2))
    with open(out / "log.jsonl", "a") as file:
        file.write(f'{line}\n{{"main/loss": 1.0, "iteration": 3}}\n')
    (log,) = read_run(out).logs
    assert [row["iteration"] for row in log.rows] == [1, 2, 3]
    assert log.unreadable == 1


def test_the_words_for_what_json_lacks_become_numbers(tmp_path):
    """As in the reader of the log itself."""
    (log,) = read_run(logged(tmp_path, [{"a": "NaN", "b": "-Infinity", "c": "word"}])).logs
    assert math.isnan(log.rows[0]["a"])
    assert (log.rows[0]["b"], log.rows[0]["c"]) == (-math.inf, "word")


def test_every_log_of_the_run_is_read(tmp_path):
    """`LogReport(filename="other")` beside the one of the default name; no other file of lines."""
    out = logged(tmp_path, falling(2))
    for name in ("other.jsonl", "foreign.jsonl"):
        (out / name).write_text('{"x": 1}\n')
    recorded(out, files=["a", "a.jsonl", "log", "log.jsonl", "other", "other.jsonl", "foreign.jsonl"])
    assert [log.name for log in read_run(out).logs] == ["log.jsonl", "other.jsonl"]


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "link", "a\0b", "x" * 5000, ".", ""])
def test_a_name_in_the_record_leads_nowhere_else(tmp_path, name):
    """Neither out of the directory, nor to what is no plain file."""
    (tmp_path / "secret").write_text("secret")
    out = tmp_path / "out"
    out.mkdir()
    (out / "link").symlink_to(tmp_path / "secret")
    assert FinishedRun(out).file(name) is None


def test_a_damaged_snapshot_is_found_damaged_and_the_others_verified(tmp_path):
    """One with a flipped bit, one without its manifest, and one that a link leads to."""
    out = trained(tmp_path / "out")
    state = out / "snapshot_iter_6" / "state.json"
    state.write_bytes(bytes([state.read_bytes()[0] ^ 1]) + state.read_bytes()[1:])
    (out / "snapshot_iter_3" / "manifest.json").unlink()
    (out / "best").symlink_to("snapshot_iter_18")
    states = {each.name: (each.state, each.iteration, each.links) for each in read_run(out).snapshots}
    assert states["snapshot_iter_6"] == ("damaged", 6, [])
    assert states["snapshot_iter_3"] == ("damaged", None, [])
    assert states["snapshot_iter_18"] == ("verified", 18, ["best"])


def test_without_reading_the_bytes_a_snapshot_is_complete_and_not_verified(tmp_path):
    """A flipped bit is not seen then, a missing file is."""
    out = trained(tmp_path / "out")
    (out / "snapshot_iter_3" / "state.json").unlink()
    states = {each.iteration: each.state for each in read_run(out, verify=False).snapshots}
    assert (states[3], states[6]) == ("damaged", "complete")


@pytest.mark.parametrize(
    "parts",
    [
        {"files": ["a{b", 3, None, "{0.x[}.jsonl"]},
        {"starts": [1, None, {"iteration": "x", "changed": [1], "host": {}}]},
        {"models": [1], "plan": "x"},
        {"models": {"main": {"parameters": {"w": [1], "v": "3xx"}, "frozen": 3}, "other": 3}},
        {"plan": {"extensions": [1, {"trigger": None}], "stop_trigger": 3}},
        {"optimizers": [1], "seeds": 3, "argv": 3, "git_commit": {}, "device": []},
    ],
)
def test_a_record_that_a_person_has_edited_is_read_as_far_as_it_goes(tmp_path, parts):
    """No value of another type stops it."""
    from chainring import html_report

    out = recorded(tmp_path, **parts)
    assert html_report.write(out).size > 1000


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 9}', "[" * 100_000])
def test_a_record_that_cannot_be_read_is_said_so(tmp_path, text):
    """The rest of the run is shown."""
    out = logged(tmp_path, falling(2))
    (out / "run.json").write_text(text)
    run = read_run(out)
    assert run.record_error
    assert len(run.logs[0].rows) == 2


@pytest.mark.parametrize(
    "content",
    [
        "", "x", "\udcff", "[]", "{}", "[" * 100_000, '{"iterations": 0, "seconds": {}}', '{"iterations": 3, "seconds": 1}',
        '{"iterations": 3, "seconds": {"a": "b", "c": -1, "d": NaN, "e": null, "f": true}}', '{"nodes": 3}',
        '{"nodes": {"a": 1}, "edges": []}', '{"nodes": [3], "edges": []}', '{"nodes": [], "edges": [[0, 1]]}',
        '{"nodes": [{"kind": "leaf", "label": 3, "shape": 3}], "edges": []}', '{"nodes": [], "edges": [3]}',
    ],
)  # fmt: skip
def test_another_file_of_the_name_of_a_profile_or_graph_is_passed_over(tmp_path, content):
    """It may be anybody's."""
    out = logged(tmp_path, falling(2))
    for name in ("profile.json", "cg.json"):
        (out / name).write_text(content, errors="surrogateescape")
    run = read_run(out)
    assert run.graph is None
    assert run.profile is None or run.profile.seconds == {}
