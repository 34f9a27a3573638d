"""What a run continues from is on the disk after everything that it will not take again."""

import os

import pytest

import resume_program
from chainring.training import extensions


@pytest.mark.parametrize("autoload", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("first", ["best", "snapshot"])
def test_the_best_of_an_iteration_is_linked_before_its_snapshot_is_there(
    tmp_path, monkeypatch, autoload, asynchronous, first
):
    """Whichever was registered first: killed between the two, the resumed run would believe that the best was taken."""
    names, rename = [], os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: (rename(a, b), names.append(os.path.basename(b))))
    trainer, *_ = resume_program.build(str(tmp_path), stop=(3, "iteration"))
    taken = {
        "best": extensions.snapshot("best", asynchronous=asynchronous),
        "snapshot": extensions.snapshot(autoload=autoload, asynchronous=asynchronous),
    }
    for name in sorted(taken, key=lambda name: name != first):
        trainer.extend(taken[name], name=name, trigger=(1, "iteration"))
    trainer.run()
    for k in (1, 2, 3):
        at = names.index(f"best_iter_{k}")
        assert "best" in names[at : names.index(f"snapshot_iter_{k}")]
