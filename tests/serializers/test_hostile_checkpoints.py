"""Checkpoints of other libraries may come from anybody: of each format some thirty that mean harm do nothing.

They are loaded in a process of their own under an audit hook, see `hostile_checkpoints` and `guarded_loading`.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from guarded_loading import CONTROLS, ROOM
from hostile_checkpoints import TRACE

from chainring import serializers

CLEAR = {"ValueError", "TypeError", "RuntimeError", "KeyError", "OSError"}
OF_OPTIMIZERS = ("moments of", "entries of nothing", "a learning rate of text")
FORMATS = ["accelerate", "chainer", "distributed", "hugging_face", "lightning", "pfn_extras", "torch"]


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """What became of each attempt."""
    place, tests = tmp_path_factory.mktemp("hostile"), Path(__file__).parent
    search = os.pathsep.join([str(tests), str(tests.parent), str(Path(serializers.__file__).parents[2])])
    program = [sys.executable, str(tests / "hostile_checkpoints.py"), str(place)]
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout[-300:] + ended.stderr
    assert not list(place.rglob(TRACE))
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_the_guard_sees_what_it_is_there_for(attempts):
    """Unpickling, running, importing, calling out, and files outside."""
    controls = {attempt["way"]: attempt["seen"] for attempt in attempts if attempt["name"] == "control"}
    for name, event in CONTROLS.items():
        assert any(seen.startswith(event) for seen in controls[name]), name


@pytest.mark.parametrize("kind", FORMATS)
def test_hostile_checkpoints_do_nothing_and_are_refused_in_words(attempts, kind):
    """Nothing runs, nothing outside the directory is opened, nothing hangs or takes memory; what is sound is taken."""
    own = [attempt for attempt in attempts if attempt["name"].startswith(f"{kind}/")]
    assert min(Counter(attempt["way"] for attempt in own).values()) > 30
    for attempt in own:
        # NumPy parses the header of an array by ast.literal_eval, which compiles and does not run it.
        known = ("ctypes.dlopen ('libnvidia-ml", *["compile"] * (kind == "chainer"))  # a build for CUDA looks for devices
        assert [seen for seen in attempt["seen"] if not seen.startswith(known)] == [], attempt
        assert attempt["memory"] < ROOM, attempt
        assert attempt["seconds"] < 10, attempt
        is_of_optimizer = attempt["way"] == "model" and any(name in attempt["name"] for name in OF_OPTIMIZERS)
        if attempt["name"].endswith("/sound"):
            assert "result" in attempt, attempt
        elif not is_of_optimizer:  # a model takes nothing of it
            assert CLEAR & set(attempt.get("kinds", ())), attempt
            assert len(attempt["message"]) > 20, attempt
