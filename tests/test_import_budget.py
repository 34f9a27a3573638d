"""What importing Chainring costs on top of torch, counted in modules, which are the same on every machine."""

import json
import subprocess
import sys

import pytest

FOUNDATION = "import numpy, safetensors, torch"
SCRIPT = (
    "from chainring import datasets, iterators, serializers, training\n"
    "from chainring.nn import Classifier\n"
    "from chainring.training import extensions, triggers\n"
)
EVERYTHING = SCRIPT + "import chainring.cli, chainring.parallel, chainring.testing, chainring.writers\n"
OPTIONAL = {
    "IPython", "PIL", "datasets", "ipywidgets", "matplotlib", "mlflow", "pandas", "scipy", "sklearn", "tensorboard",
    "torchvision", "tqdm.auto", "tqdm.autonotebook", "tqdm.notebook", "transformers", "wandb",
}  # fmt: skip


def imported(program):
    """The modules that a fresh process has after it."""
    show = "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program + show], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.fixture(scope="module")
def foundation():
    return imported(FOUNDATION)


@pytest.mark.parametrize(
    ("program", "own", "others"),
    [("import chainring", 30, 4), (SCRIPT, 155, 12), (EVERYTHING, 200, 30)],
    ids=["chainring", "a script", "everything"],
)
def test_an_import_stays_within_its_budget(foundation, program, own, others):
    """Modules of Chainring, and of anything else that torch has not imported already."""
    more = imported(f"{FOUNDATION}\n{program}") - foundation
    ours = {name for name in more if name.partition(".")[0] == "chainring"}
    assert len(ours) <= own
    assert len(more - ours) <= others, sorted(more - ours)


def test_nothing_optional_is_imported_before_it_is_used(foundation):
    """Writers, plots, notebooks and examples import what they need when they need it."""
    more = imported(f"{FOUNDATION}\n{EVERYTHING}") - foundation
    assert not {name for name in more if name in OPTIONAL or name.partition(".")[0] in OPTIONAL}
