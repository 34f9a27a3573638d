"""The page on the black box: its commands are run, and its pictures are drawn once more."""

import contextlib
import importlib.util
import io
import re
import shlex
from pathlib import Path

import pytest

import forked
from chainring.cli import main

pytestmark = pytest.mark.usefixtures("forked_scripts")
DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "black-box.md").read_text()
STATUS = {"chainring diff": 1, "chainring replay result --to 43 train.py --lr 0.1": 1}
NEVER = 'chainring bisect result --bad "main/loss == inf" train.py'


@pytest.fixture(scope="module")
def drawing():
    """The program that draws the pictures."""
    spec = importlib.util.spec_from_file_location("black_box", DOCS / "pictures" / "black_box.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.call = call
    return module


def call(command, folder):
    """The exit status of a command of the page in a folder, and what it prints; nothing imports PyTorch for it anew."""
    program, *arguments = shlex.split(command)
    with contextlib.chdir(folder):
        if program == "python":
            done = forked.run(arguments)
            return done.returncode, done.stdout + done.stderr
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            status = main(arguments)
    return status, out.getvalue() + err.getvalue()


@pytest.fixture(scope="module")
def place(drawing, forked_scripts):
    """The run of the page, and the other one with which it is compared."""
    with drawing.trained() as folder:
        assert drawing.call("python train.py --out other --lr 0.004", folder)[0] == 0
        yield folder


def without_fractions(text):
    """A text in which a number with a fraction, whose last digits depend on the processor, is a star."""
    return re.sub(r"-?\d+\.\d+(e-?\d+)?", "*", text)


def test_every_command_of_the_page_does_what_the_page_says(drawing, place):
    """It ends with the exit status that it has there, and prints what is shown."""
    commands = drawing.commands_of(PAGE)
    assert {command.split()[1] for command in commands} == {"replay", "batch", "bisect", "diff"}
    for command in commands:
        status, output = drawing.call(command, place)
        expected = next((status for start, status in STATUS.items() if command.startswith(start)), 0)
        assert status == (1 if command == NEVER else expected), output
        shown = re.search(rf"^\$ {re.escape(command)}\n((?:[^$`].*\n)*)", PAGE, re.MULTILINE)
        if shown is not None:
            assert without_fractions(output) == without_fractions(shown[1])


def test_diff_with_the_script_says_what_the_page_says(drawing, place):
    """The first module whose output differs, and the setting."""
    assert "`chainring diff --script train.py result other`" in PAGE
    _, output = drawing.call("chainring diff --script train.py result other", place)
    lines = re.findall(r"^(?:the first module|settings of the optimizer) .*$", PAGE, re.MULTILINE)
    assert len(lines) == 2
    assert set(lines) <= set(output.splitlines())


def test_the_pictures_are_those_of_the_run(drawing, place):
    """Their words and images, but for the last digits of numbers."""
    for name, content in drawing.draw(place).items():
        kept = (DOCS / "pictures" / name).read_text()
        found = [re.findall(r'>([^<]+)<|href="([^"]+)"', each) for each in (content, kept)]
        assert without_fractions(str(found[0])) == without_fractions(str(found[1]))
        assert len(kept) < 20_000
        assert f":file: pictures/{name}\n" in PAGE
