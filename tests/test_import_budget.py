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
PROGRAMS = {"chainring": "import chainring", "a script": SCRIPT, "everything": EVERYTHING}
OPTIONAL = {
    "IPython", "PIL", "boto3", "botocore", "comet_ml", "datasets", "ipywidgets", "matplotlib", "mlflow", "obstore", "pandas",
    "psutil", "scipy", "sklearn", "tensorboard", "torchvision", "tqdm.auto", "tqdm.autonotebook", "tqdm.notebook",
    "trackio", "transformers", "wandb",
}  # fmt: skip


@pytest.fixture(scope="module")
def imported():
    """The modules that a fresh process has after each of these programs, each of which contains the one before."""
    shown = "\nprint(json.dumps(sorted(sys.modules)))\n"
    program = "import json, sys\n" + shown.join([FOUNDATION, *PROGRAMS.values(), ""])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return dict(zip(["foundation", *PROGRAMS], map(set, map(json.loads, done.stdout.splitlines())), strict=True))


@pytest.mark.parametrize(
    ("program", "own", "others"), [("chainring", 26, 4), ("a script", 103, 12), ("everything", 144, 30)]
)
def test_an_import_stays_within_its_budget(imported, program, own, others):
    """Modules of Chainring, and of anything else that torch has not imported already."""
    more = imported[program] - imported["foundation"]
    ours = {name for name in more if name.partition(".")[0] == "chainring"}
    assert len(ours) <= own
    assert len(more - ours) <= others, sorted(more - ours)


def test_nothing_optional_is_imported_before_it_is_used(imported):
    """Writers, plots, notebooks and examples import what they need when they need it."""
    more = imported["everything"] - imported["foundation"]
    assert not {name for name in more if name in OPTIONAL or name.partition(".")[0] in OPTIONAL}
