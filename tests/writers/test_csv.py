"""CsvWriter: a table that is valid whenever it is opened, and holds each row once."""

import csv
import math

import pandas
import pytest
from written import LATE, LOSSES, KilledError, train

from chainring.writers import CsvWriter, Record, Run


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_rows_of_a_run_are_a_table_that_pandas_reads(tmp_path):
    """A column a key, one that comes late too, and NaN and infinity in words."""
    log = train(tmp_path, CsvWriter())
    table = pandas.read_csv(tmp_path / "log.csv")
    assert list(table) == ["epoch", "iteration", "elapsed_time", "main/loss", "odd", "main/late"]
    assert list(zip(table["iteration"], table["main/loss"], strict=True)) == LOSSES
    assert list(zip(table["iteration"], table["main/late"], strict=True))[2:] == LATE
    assert table["main/late"][:2].isna().all()
    assert [row["odd"] for row in rows_of(tmp_path / "log.csv")] == ["0.5", "0.5", "NaN", "Infinity"]
    assert list(table["elapsed_time"]) == pytest.approx([row["elapsed_time"] for row in log.log], rel=1e-12)  # pandas rounds


def test_a_row_is_in_the_file_at_once(tmp_path):
    """And the header is that of all rows, before and after a new key."""
    writer = CsvWriter(str(tmp_path / "x.csv"))
    writer.write(Record(0, 1, 0.5, {"a": 1.0}))
    assert (tmp_path / "x.csv").read_text() == "epoch,iteration,elapsed_time,a\n0,1,0.5,1.0\n"
    writer.write(Record(0, 2, 0.75, {"b,c": -math.inf}))
    writer.write(Record(1, 3, 1.0, {"a": 3.0}))
    assert (tmp_path / "x.csv").read_text() == (
        'epoch,iteration,elapsed_time,a,"b,c"\n0,1,0.5,1.0,\n0,2,0.75,,-Infinity\n1,3,1.0,3.0,\n'
    )


@pytest.mark.parametrize("text", ["=1+1", "=cmd|' /C calc'!A0", "+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_text_or_key_is_a_formula(tmp_path, text):
    """A spreadsheet would compute it; numbers and words stay as they are, and a resumed run finds the rows that it wrote."""
    record = Record(0, 1, 0.5, {text: -1.0, "name": text, "word": "a=b", "least": -math.inf})
    for records in ((), (record,)):  # the second continues the table
        writer = CsvWriter()
        writer.begin(Run(tmp_path, {}, len(records), records))
        writer.write(Record(0, 1 + len(records), 0.5, record.values))
        writer.close()
    row, other = rows_of(tmp_path / "log.csv")
    assert (row[f"'{text}"], row["name"], row["word"], row["least"]) == ("-1.0", f"'{text}", "a=b", "-Infinity")
    assert (row.pop("iteration"), other.pop("iteration")) == ("1", "2")
    assert row == other
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_a_relative_name_lies_in_the_directory_of_the_run(tmp_path):
    """In a folder within it, which is made."""
    train(tmp_path / "out", CsvWriter("tables/rows.csv"))
    assert len(rows_of(tmp_path / "out" / "tables" / "rows.csv")) == 4


def test_another_run_in_the_directory_moves_the_table_away(tmp_path):
    """To ``previous/1``, with the log."""
    with pytest.raises(KilledError):
        train(tmp_path, CsvWriter("a/{b}.csv"), kill=3)
    train(tmp_path, CsvWriter("a/{b}.csv"), length=4)
    assert [len(rows_of(tmp_path / place / "a" / "{b}.csv")) for place in (".", "previous/1")] == [2, 1]


def test_rows_after_the_snapshot_are_cut_off_and_come_once(tmp_path):
    """The table of the interrupted run is that of the uninterrupted one, but for the seconds."""
    with pytest.raises(KilledError):
        train(tmp_path / "cut", CsvWriter(), kill=7)
    assert len(rows_of(tmp_path / "cut" / "log.csv")) == 3
    train(tmp_path / "cut", CsvWriter())
    train(tmp_path / "whole", CsvWriter())
    cut, whole = (pandas.read_csv(tmp_path / name / "log.csv") for name in ("cut", "whole"))
    pandas.testing.assert_frame_equal(cut.drop(columns="elapsed_time"), whole.drop(columns="elapsed_time"))
    assert not (tmp_path / "cut" / "abandoned").exists()


def test_a_half_written_row_is_cut_off(tmp_path):
    """As a full disk leaves one."""
    with pytest.raises(KilledError):
        train(tmp_path, CsvWriter(), kill=5)
    with open(tmp_path / "log.csv", "a") as file:
        file.write("0,")
    train(tmp_path, CsvWriter())
    assert [row["iteration"] for row in rows_of(tmp_path / "log.csv")] == ["2", "4", "6", "8"]


def test_a_table_that_the_run_does_not_continue_is_set_aside(tmp_path):
    """It is not overwritten, and the new one begins with the rows that the run has."""
    own = "epoch,iteration,elapsed_time,a\n0,1,0.5,9.0\n"
    (tmp_path / "x.csv").write_text(own)
    CsvWriter("x.csv").begin(Run(tmp_path, {}, 3, [Record(0, 1, 0.5, {"a": 1.0})]))
    assert (tmp_path / "abandoned" / "1" / "x.csv").read_text() == own
    assert [row["a"] for row in rows_of(tmp_path / "x.csv")] == ["1.0"]


@pytest.mark.parametrize("iteration", [0, 5])
def test_a_table_is_kept_where_the_run_has_no_rows_of_it(tmp_path, iteration):
    """A new run beside an old table, and one whose log was lost."""
    own = "epoch,iteration,elapsed_time,a\n0,1,0.5,9.0\n"
    (tmp_path / "x.csv").write_text(own)
    CsvWriter(str(tmp_path / "x.csv")).begin(Run(tmp_path, {}, iteration, ()))
    assert (tmp_path / "abandoned" / "1" / "x.csv").read_text() == own


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_file_name_is_a_path(name):
    """Anything else is refused at construction."""
    with pytest.raises(TypeError, match="filename is a name in the run's out"):
        CsvWriter(name)
