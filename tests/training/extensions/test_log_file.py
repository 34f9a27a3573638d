"""LogFile: a writer whose two files hold the same rows, and go on with those of the run that is continued."""

import json

from chainring.training.extensions.log_report import LogFile
from chainring.writers import Record, Run


def record(iteration):
    return Record(0, iteration, 0.5, {"iteration": iteration, "loss": 1 / iteration})


def rows_of(directory):
    """The rows of both files, which are the same."""
    rows = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    assert json.loads((directory / "log").read_text()) == rows
    return [row["iteration"] for row in rows]


def test_rows_beyond_those_of_the_continued_run_are_cut_off(tmp_path):
    """The file itself is written on, as a snapshot refers to it."""
    first = LogFile("log")
    first.begin(Run(tmp_path))
    for iteration in (1, 2, 3):
        first.write(record(iteration))
    first.close()
    inode = (tmp_path / "log.jsonl").stat().st_ino
    second = LogFile("log")
    second.begin(Run(tmp_path, iteration=2, records=[record(1), record(2)]))
    second.write(record(4))
    second.close()
    assert rows_of(tmp_path) == [1, 2, 4]
    assert (tmp_path / "log.jsonl").stat().st_ino == inode


def test_a_file_with_other_rows_is_set_aside(tmp_path):
    """It does not begin with the rows of the run that is continued."""
    (tmp_path / "log.jsonl").write_text('{"iteration": 7}\n')
    log = LogFile("log")
    log.begin(Run(tmp_path, iteration=1, records=[record(1)]))
    assert rows_of(tmp_path) == [1]
    assert (tmp_path / "abandoned" / "1" / "log.jsonl").read_text() == '{"iteration": 7}\n'
