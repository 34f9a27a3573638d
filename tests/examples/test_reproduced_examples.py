"""chainring reproduce makes the examples and programs of the pages again from the directories of their runs alone."""

import os
import re
import shutil
import subprocess

import pytest
from running import EXAMPLES
from test_killed_examples import SMALL

import forked
from chainring.cli import main

pytestmark = pytest.mark.usefixtures("forked_scripts")
DOCS = EXAMPLES.parent / "docs"
SHORT = {
    **SMALL,
    "ppo/train_ppo.py": (*SMALL["ppo/train_ppo.py"], "--iteration", "4"),
    "gpt/train_gpt.py": (*SMALL["gpt/train_gpt.py"], "--iteration", "20"),
    "mnist/train_mnist.py": ("--epoch", "2"),
    "loader/step1_trainer.py": ("--epoch", "2"),
    "loader/step2_extensions.py": ("--epoch", "2"),
    "loader/step3_iterator.py": ("--epoch", "2"),
    "gan/train_gan.py": ("--unit", "16", "--epoch", "1"),
    "preemptible/train.py": ("--epoch", "2"),
    "images/train_images.py": ("--epoch", "1"),
    "same_bits/train_same_bits.py": ("--epoch", "2"),
    "distributed/train_digits.py": ("--epoch", "2"),
    "distributed/train_language_model.py": ("--sentences", "500", "--epoch", "1"),
}
PAGES = ["chainer", "delira", "keras", "lightning", "nnabla", "pfn-extras"]
UNCOMMITTED = {"mnist/train_mnist.py", "gan/train_gan.py"}


def git(*arguments):
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", *who, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment)


def check_reproduced(script, arguments, capsys):
    """Runs a script, takes all code away, and makes the run again."""
    done = forked.run([script, *arguments])
    assert done.returncode == 0, done.stderr
    (out,) = [path.parent for path in script.parent.rglob("run.json")]
    for path in script.parent.glob("*.py"):
        path.unlink()
    status = main(["reproduce", "--here", str(out)])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("script", SHORT)
def test_an_example_is_made_again_from_its_record(place, capsys, script):
    """Its folder is in no repository, or in one of which the commit has other code than ran."""
    folder, _, name = script.partition("/")
    shutil.copytree(EXAMPLES / folder, place, dirs_exist_ok=True)
    if script in UNCOMMITTED:
        (place / name).write_text("raise SystemExit('not what ran')\n")
        git("init", "--quiet")
        git("add", ".")
        git("commit", "--quiet", "--message", "first")
        shutil.copy(EXAMPLES / script, place / name)
    check_reproduced(place / name, SHORT[script], capsys)


@pytest.mark.parametrize("page", PAGES)
def test_a_program_of_a_page_is_made_again_from_its_record(place, capsys, page):
    """As a user copies it."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "migration" / f"{page}.md").read_text(), re.DOTALL)
    program = next(block for block in blocks if "trainer.run()" in block and "import" in block)
    (place / "train.py").write_text(re.sub(r'\(\d+, "epoch"\), out', '(2, "epoch"), out', program))
    check_reproduced(place / "train.py", (), capsys)
