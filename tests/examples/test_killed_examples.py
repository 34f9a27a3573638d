"""Programs that were moved to Chainring: each continues bit for bit after SIGKILL, and is shorter than its original."""

import ast

import pytest
from running import EXAMPLES

from chainring.cli import main

SMALL = {
    "text/train_text.py": ("--characters", "8000", "--unit", "16", "--batchsize", "16", "--length", "25", "--epoch", "4"),
    "gpt/train_gpt.py": ("--characters", "20000", "--unit", "16", "--layer", "1", "--block", "16", "--evaluate", "5"),
    "mixup/train_mixup.py": ("--unit", "4", "--epoch", "2", "--batchsize", "128"),
    "byol/train_byol.py": ("--unit", "8", "--epoch", "2"),
    "ppo/train_ppo.py": ("--unit", "8", "--step", "16"),
}
STATEMENTS = {  # of the originals: Chainer's ptb, nanoGPT's and torchvision's train.py, cleanrl's ppo.py
    "text/train_text.py": 112,
    "gpt/train_gpt.py": 203,
    "mixup/train_mixup.py": 140,
    "ppo/train_ppo.py": 137,
}


@pytest.mark.parametrize("script", SMALL)
@pytest.mark.usefixtures("forked_scripts")
def test_a_killed_example_continues_bit_for_bit(script, capsys):
    """`chainring verify-resume` kills it several times, compares everything but times, and finds no unsaved state."""
    status = main(["verify-resume", "--iterations", "40", str(EXAMPLES / script), *SMALL[script]])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    assert "nothing has changed that no state holds" in printed.out


@pytest.mark.parametrize("script", STATEMENTS)
def test_an_example_is_shorter_than_its_original(script):
    """Counted in statements, without imports and docstrings; here the model is in the count, which most originals import."""
    tree = ast.parse((EXAMPLES / script).read_text())
    statements = [
        node for node in ast.walk(tree) if isinstance(node, ast.stmt) and not isinstance(node, ast.Import | ast.ImportFrom)
    ]
    docstrings = [node for node in statements if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    assert len(statements) - len(docstrings) < STATEMENTS[script]
