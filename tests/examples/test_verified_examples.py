"""chainring verify-resume finds the script of the README and the examples exact, as they stand."""

import re

import pytest
from running import EXAMPLES
from test_killed_examples import SMALL

from chainring.cli import main

ARGUMENTS = {
    "mnist/train_mnist.py": (),
    "loader/step1_trainer.py": (),
    "loader/step2_extensions.py": (),
    "loader/step3_iterator.py": (),
    "gan/train_gan.py": ("--unit", "16"),
    "gpt/train_packed.py": ("--batchsize", "8", "--length", "32", "--unit", "16"),
    "preemptible/train.py": (),
    "images/train_images.py": (),
    "same_bits/train_same_bits.py": (),
    "sweep/sweep.py": ("--epoch", "3"),
    "distributed/train_digits.py": (),
    "distributed/train_language_model.py": ("--sentences", "500"),
    "transformers/train_adapters.py": ("--sentences", "300", "--batchsize", "50"),
}


pytestmark = pytest.mark.usefixtures("forked_scripts")


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """Returns what the command prints of a script that is exact."""
    monkeypatch.chdir(tmp_path)

    def verify(*arguments):
        status = main(["verify-resume", *map(str, arguments)])
        printed = capsys.readouterr()
        assert status == 0, printed.out + printed.err
        return printed.out

    return verify


def test_the_script_of_the_readme_is_exact_as_it_stands(tmp_path, report):
    """Killed after the end of an epoch and an evaluation, within an epoch, later, and shortly before the end."""
    readme = (EXAMPLES.parent / "README.md").read_text()
    (tmp_path / "train.py").write_text(re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1))
    text = report("--seconds", "100", "train.py")  # of which it takes a few, also where attributes are compared slowly
    assert "exact: killed 4 times" in text
    assert "Not reached" not in text
    assert "nothing has changed that no state holds" in text


@pytest.mark.parametrize("script", ARGUMENTS)
def test_an_example_is_exact_and_nothing_lies_outside_its_state(script, report):
    """Over a few iterations."""
    few = ("--iterations", "6", "--kill-after", "4")
    assert "nothing has changed that no state holds" in report(*few, EXAMPLES / script, *ARGUMENTS[script])


LAUNCHED = {"distributed/launch_ray.py"}  # what workers of Ray do: test_launcher_examples.py
OF_README = {"demo/train.py"}  # the script of the README, above, which test_demo_example.py compares


def test_no_example_that_trains_is_left_out():
    """Each that runs a trainer is verified, here, or among those that are killed or that another program launches."""
    scripts = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py") if "trainer.run()" in path.read_text()}
    assert scripts == {*ARGUMENTS, *SMALL, *LAUNCHED, *OF_README}
