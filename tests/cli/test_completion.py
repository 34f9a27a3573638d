"""The completion of commands and options in a shell, and the answer to those that are not there."""

import shutil
import subprocess
import sys

import pytest

from chainring.cli import main

BASH = """
source {script}
COMP_WORDS=(chainring {words})
COMP_CWORD=$(({count}))
_shtab_chainring
printf "%s\\n" "${{COMPREPLY[@]}}"
"""


def script_for(shell, path, capsys):
    """The file of the script."""
    assert main(["completion", shell]) == 0
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bis"], "bisect"),
        (["inspect", "--js"], "--json"),
        (["verify-resume", "--iter"], "--iterations"),
        (["thin", "--ev"], "--every"),
        (["completion", "f"], "fish"),
    ],
)
def test_bash_completes_commands_options_and_choices(tmp_path, capsys, words, expected):
    """In a real shell."""
    script = script_for("bash", tmp_path / "chainring", capsys)
    program = BASH.format(script=script, words=" ".join(words), count=len(words))
    done = subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True, check=True)
    assert expected in done.stdout.split()


def test_bash_completes_paths(tmp_path, capsys):
    """Of runs and snapshots."""
    script = script_for("bash", tmp_path / "chainring", capsys)
    (tmp_path / "result_of_today").mkdir()
    program = BASH.format(script=script, words=f"inspect {tmp_path}/res", count=2)
    done = subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{tmp_path}/result_of_today"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(tmp_path, capsys, shell):
    """Without an error, where they are installed; fish is asked for the commands."""
    script = script_for(shell, tmp_path / "chainring", capsys)
    if shutil.which(shell) is None:
        pytest.skip(f"apt-get install {shell}")
    subprocess.run([shell, "-n", script], check=True)
    if shell == "fish":
        asked = f"source {script}; complete -C 'chainring bis'"
        done = subprocess.run(["fish", "--no-config", "-c", asked], capture_output=True, text=True, check=True)
        assert done.stdout.split()[0] == "bisect"


def test_without_shtab_the_extra_is_named(monkeypatch, capsys):
    """With the exit status of an impossible request."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == 'chainring: chainring completion needs shtab: pip install "chainring[completion]"\n'


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        (["repot", "result"], "there is no command 'repot': did you mean 'report'? `chainring --help` lists all"),
        (
            ["verify_resume"],
            "there is no command 'verify_resume': did you mean 'verify-resume'? `chainring --help` lists all",
        ),
        (["42"], "there is no command '42'; `chainring --help` lists all"),
        (
            ["verify", "result", "--jsn"],
            "`chainring verify` does not take '--jsn': did you mean '--json'? `chainring verify --help` lists what it takes",
        ),
        (
            ["verify", "result", "--quick=1"],
            "`chainring verify` does not take '--quick=1'; `chainring verify --help` lists what it takes",
        ),
    ],
)
def test_what_is_not_there_is_answered_with_the_nearest_that_is(given, answer, capsys):
    """In one line, with the exit status of wrong arguments."""
    assert main(given) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"chainring: {answer}\n")
