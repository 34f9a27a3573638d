"""A directory of results that somebody has prepared who means harm."""

import collections
import json

import hostile_out

import forked

CASES, SEED, SECONDS = 200, 0, 600
REFUSALS = {
    "OSError",
    "FileExistsError",
    "IsADirectoryError",
    "NotADirectoryError",
    "FileNotFoundError",
    "CorruptError",
    "ValueError",
}


def test_a_hostile_directory_changes_nothing_outside_runs_nothing_and_hangs_nothing(tmp_path):
    """Links, pipes, devices, folders, huge and deep files, names without end: under every name that a run writes.

    A run goes on, or is refused by an error that names what is in the way.
    """
    done = forked.run([hostile_out.__file__, str(tmp_path), str(CASES), str(SEED)], timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    cases = json.loads(done.stdout)
    assert [case for case in cases if case[4] or case[5]] == []
    assert len(cases) == CASES
    assert {error for _, _, error, *_ in cases} <= REFUSALS | {None}
    ends = collections.Counter((way, error is None) for way, _, error, *_ in cases)
    assert min(ends[way, True] for way in ("anew", "autoload", "load")) > 10, ends
    assert {kind for _, put, *_ in cases for kind in put.values()} == hostile_out.KINDS.keys()
    assert {name for _, put, *_ in cases for name in put} == set(hostile_out.NAMES)
