"""Snapshots that mean harm are refused, or are data: nothing in them is run, imported or followed out of the snapshot.

`hostile_snapshots` makes them, `guarded_loading` tries every way to read them in a process of its own.
"""

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import hostile_snapshots as hostile
import numpy as np
import pytest
from guarded_loading import CONTROLS, ROOM

from chainring import serializers
from chainring.serializers.protocol import Stateful

CLEAR = {"ValueError", "TypeError", "KeyError", "RuntimeError", "OSError"}
LOADS = {"module", "object", "model"}


class Holder(Stateful):
    """Takes whatever it is given."""

    def __init__(self):
        self.value = "untouched"

    def serialize(self, serializer):
        self.value = serializer("value", self.value)


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """What became of each attempt, by the name of the snapshot."""
    place, tests = tmp_path_factory.mktemp("hostile"), Path(__file__).parent
    search = os.pathsep.join([str(tests), str(Path(serializers.__file__).parents[2])])
    program = [sys.executable, "-W", "error", str(tests / "guarded_loading.py"), str(place)]
    ended = subprocess.run(
        program, env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout[-300:] + ended.stderr
    assert not list(place.rglob(hostile.TRACE))
    found = {}
    for line in ended.stdout.splitlines():
        attempt = json.loads(line)
        found.setdefault(attempt["name"], {})[attempt["way"]] = attempt
    return found


def test_the_guard_sees_what_it_is_there_for(attempts):
    """Unpickling, running, importing, calling out, and files outside; else the tests below would prove nothing."""
    for name, event in CONTROLS.items():
        assert any(seen.startswith(event) for seen in attempts["control"][name]["seen"]), name


def test_what_is_sound_loads_and_is_shown(attempts):
    """So a refusal below is for what is hostile, and not for how it was made."""
    assert {way: attempt.get("result", attempt) for way, attempt in attempts["sound"].items()} == {
        "module": None, "object": None,
        "inspect": 0, "inspect --json": 0, "inspect run": 0, "verify": 0, "export": 0,
    }  # fmt: skip


@pytest.mark.parametrize("name", hostile.SNAPSHOTS, ids=lambda name: ascii(name)[1:-1][:70])
def test_a_hostile_snapshot_does_nothing(attempts, name):
    """Loading it into a module or an object, and each command of the command line, ends as an error in words, or as data."""
    part, ways = hostile.SNAPSHOTS[name], attempts[name]
    for way, attempt in ways.items():
        assert attempt["seen"] == [], way
        assert attempt["memory"] < ROOM, way
        assert attempt["seconds"] < 10, way
        if way in LOADS:
            assert "result" in attempt or CLEAR & set(attempt["kinds"]), attempt
            assert "result" in attempt or attempt["kinds"][0] != "RecursionError", attempt
        else:
            assert attempt.get("result") in (0, 1, 2), attempt
            assert attempt["said"].replace("\n", "").isprintable(), attempt
            assert (attempt["result"] > 0) == attempt["said"].startswith("chainring: "), attempt
    refused = {way for way, attempt in ways.items() if way not in LOADS and attempt["result"]}
    failed = {way for way in LOADS & ways.keys() if "result" not in ways[way]}
    if part == "manifest":
        assert refused == ways.keys() - LOADS
        kind = "NewerFormat" if name == "manifest format 2" else "CorruptError"
        assert {ways[way]["kinds"][0] for way in failed} == {kind}
    if part in ("state", "tensors"):
        assert refused >= {"export"}
    if part in ("manifest", "state", "tensors"):
        assert failed == LOADS & ways.keys()
    assert failed or part in ("target", "data")
    assert not failed or part != "data"
    assert "module" in failed or part != "target"


def huge_claim():
    """An npz file whose array says that it has more elements than any memory."""
    np.lib.format.write_array_header_1_0(head := io.BytesIO(), {"descr": "<f8", "fortran_order": False, "shape": (2**60,)})
    return {"value.npy": head.getvalue() + bytes(80)}


def array(value):
    np.lib.format.write_array(file := io.BytesIO(), np.asarray(value))
    return file.getvalue()


NPZ = {
    "pickle for an array": {"value.npy": hostile.PICKLES["a pickle"]},
    "pickle beside": {"value.npy": array(1), "value.pkl": hostile.PICKLES["a pickle"]},
    "object array": {"value.npy": array(np.array([hostile.Bomb()], object))},
    "structured objects": {"value.npy": array(np.zeros(1, [("a", "O")]))},
    "object array in the description": {"chainring.json.npy": array(np.array([hostile.Bomb()], object))},
    "header that is code": {"value.npy": b"\x93NUMPY\x01\x00\x20\x00" + b"__import__('os').mkdir('x')".ljust(31) + b"\n"},
    "header with a huge shape": huge_claim(),
    "name outside": {"../value.npy": array(1)},
    "description 1e5 deep": {"chainring.json.npy": array(np.frombuffer(hostile.DEEP["100000 lists"].encode(), "u1"))},
    "description 1e6 deep": {"chainring.json.npy": array(np.frombuffer(hostile.DEEP["1000000 objects"].encode(), "u1"))},
}


@pytest.mark.parametrize("kind", NPZ)
def test_a_hostile_npz_file_is_refused(tmp_path, monkeypatch, kind):
    """With an error in words, before anything is put into the object; nothing is unpickled, evaluated or extracted."""
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("file.npz", "w") as archive:
        for name, content in NPZ[kind].items():
            archive.writestr(name, content)
    holder = Holder()
    with pytest.raises((ValueError, KeyError), match=r"file\.npz|has no 'value'|has no '/value'"):
        serializers.load_npz("file.npz", holder)
    assert holder.value == "untouched"
    assert os.listdir(tmp_path) == ["file.npz"]
