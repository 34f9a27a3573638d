"""What run.json has to repeat a run: the code, the versions, the variables and the examples; and never a secret."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from counting import DataUpdater
from toys import updater_of

from chainring import serializers, training
from chainring.training import extensions
from chainring.training._ledger import Ledger
from chainring.training._provenance import VARIABLES, provenance


def run(out, stop=1, updater=None, load=None, **config):
    """Trains, and returns the text of the record and its content."""
    updater = updater_of() if updater is None else updater
    trainer = training.Trainer(updater, (stop, "iteration"), str(out), config=config)
    trainer.extend(extensions.snapshot(), trigger=(1, "iteration"))
    if load is not None:
        serializers.load(Path(out) / load, trainer)
    trainer.run()
    return (Path(out) / "run.json").read_text()


def needed(out, **settings):
    return json.loads(run(out, **settings))["reproduction"]


def git(place, *arguments):
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(["git", *who, *arguments], cwd=place, check=True, capture_output=True, text=True, env=environment)
    return done.stdout.strip()


@pytest.fixture
def asked_again(monkeypatch, tmp_path):
    """A process asks once for its code; here a test does."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    provenance.cache_clear()
    yield
    provenance.cache_clear()


@pytest.fixture
def repository(tmp_path, monkeypatch, asked_again):
    """A repository of one commit with the script that runs, and the working directory."""
    place = tmp_path / "repository"
    (place / "lib").mkdir(parents=True)
    (place / "train.py").write_text("steps = 1\n")
    (place / "lib" / "tool.py").write_text("size = 1\n")
    (place / "notes.md").write_text("notes\n")
    git(place, "init", "--quiet")
    git(place, "add", ".")
    git(place, "commit", "--quiet", "--message", "first")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    monkeypatch.chdir(place)
    return place


def imported(monkeypatch, name, path):
    """Lets a module be one that is imported from a file."""
    module = type(sys)(name)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, name, module)


def test_the_record_has_the_commit_and_what_the_work_tree_differs_in(tmp_path, monkeypatch, repository):
    """Applied to the commit, the difference gives the files back, with an imported file that no commit has."""
    (repository / "train.py").write_text("steps = 2\n")
    (repository / "new.py").write_text("value = 3\n")
    imported(monkeypatch, "new", repository / "new.py")
    imported(monkeypatch, "tool", repository / "lib" / "tool.py")
    source = needed(tmp_path / "out")["source"]
    assert (source["commit"], source["script"]) == (git(repository, "rev-parse", "HEAD"), "train.py")
    assert source["text"] == "steps = 2\n"
    assert source["files"] == {"new.py": "value = 3\n"}
    assert {".", "lib"} <= set(source["paths"])
    git(repository, "clone", "--quiet", ".", tmp_path / "clone")
    subprocess.run(["git", "apply"], cwd=tmp_path / "clone", input=source["difference"], text=True, check=True)
    assert (tmp_path / "clone" / "train.py").read_text() == "steps = 2\n"


def test_what_is_left_out_of_the_difference_is_named_with_the_reason(tmp_path, repository):
    """What is beyond a megabyte, is no text, or was not imported."""
    (repository / "notes.md").write_text("x" * (1 << 20) + "\n")
    (repository / "lib" / "tool.py").write_bytes(b"\0\1\2")
    (repository / "data.bin").write_bytes(b"\0")
    found = needed(tmp_path / "out")["source"]
    assert found["difference"] == ""
    reasons = {"notes.md": "too large", "lib/tool.py": "no text", "data.bin": "was not imported"}
    assert {name: reasons[name] in why for name, why in found["left_out"].items()} == dict.fromkeys(reasons, True)


def test_without_a_repository_the_record_has_the_script_and_what_it_imports_beside_it(tmp_path, monkeypatch, asked_again):
    """Their texts are all that there is."""
    (tmp_path / "train.py").write_text("import tool\n")
    (tmp_path / "tool.py").write_text("size = 1\n")
    imported(monkeypatch, "tool", tmp_path / "tool.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    source = needed(tmp_path / "out")["source"]
    assert (source["commit"], source["difference"]) == (None, "")
    assert (source["text"], source["files"]) == ("import tool\n", {"tool.py": "size = 1\n"})


def test_a_git_that_does_not_answer_holds_up_no_run(tmp_path, monkeypatch, repository):
    """After a few seconds the run begins, and the record says that the code is not all there."""
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("chainring.training._provenance.GIT_SECONDS", 0.1)
    before = time.monotonic()
    assert needed(tmp_path / "out")["source"]["commit"] is None
    assert time.monotonic() - before < 60


def test_the_record_has_the_versions_of_all_distributions_and_the_variables_that_change_numbers(
    tmp_path, monkeypatch, asked_again
):
    """Of the environment nothing else."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("HOSTNAME_OF_MINE", "somewhere")
    found = needed(tmp_path)
    assert found["distributions"]["safetensors"]
    assert found["distributions"]["torch"] == torch.__version__
    assert found["environment"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert found["environment"].keys() <= VARIABLES
    assert (found["threads"], found["ranks"], found["virtual_ranks"]) == (1, 1, None)


def test_a_later_start_tells_only_what_it_had_of_its_own(tmp_path, repository):
    """What repeats the run is that with which it has begun."""
    first = json.loads(run(tmp_path / "out"))
    (repository / "train.py").write_text("steps = 2\n")
    provenance.cache_clear()
    second = json.loads(run(tmp_path / "out", 2, load="snapshot_iter_1"))
    assert second["reproduction"] == first["reproduction"]
    assert "differs" not in second["starts"][0]
    assert second["starts"][1]["differs"] == ["code"]


def test_the_record_has_a_digest_of_the_examples_that_the_recorder_has_seen(tmp_path):
    """Of all iterations, also those before a resume."""
    for stop in 2, 5:
        trainer = training.Trainer(updater_of(), (stop, "iteration"), str(tmp_path))
        trainer.extend(extensions.Recorder())
        trainer.extend(extensions.snapshot(autoload=True), trigger=(1, "iteration"))
        trainer.run()
    found = json.loads((tmp_path / "run.json").read_text())["examples"]
    batches = Ledger.read(tmp_path / "recorder.bin").batches
    digest = hashlib.sha256(batches.astype("<u8").tobytes()).hexdigest()
    assert found == {"count": 5, "last": 5, "digest": digest}


KEY = "Zq8f" + "X7w2Lk9Vb3Nc5Rt1Yp6Js4Dh0Gm8" * 2  # of no service
SECRET = "kfhrwzqpx-unguessable"
ARGUMENTS = {
    "an option": ["--token", SECRET],
    "an option with a sign": [f"--password={SECRET}"],
    "a long option": ["--wandb-api-key", SECRET],
    "one that begins as a variable": ["--password", f"${SECRET}"],
    "an override": [f"logging.api_key={SECRET}"],
    "an address with a password": ["--store", f"redis://user:{SECRET}@host:1/0"],
    "a signed address": [f"https://host/data.tar?X-Amz-Signature={SECRET}"],
    "a header": ["--header", f"Authorization: Bearer 1{SECRET}"],
    "JSON": ["--options", json.dumps({"secret": SECRET})],
    "a key of a service": ["sk-" + KEY],
    "a key of GitHub": ["--clone", "ghp_" + KEY],
}
CONFIGS = {
    "a key": {"token": SECRET},
    "one that begins as a variable": {"password": f"${SECRET}"},
    "a nested key": {"logger": {"wandb": {"api_key": SECRET}}},
    "a mapping": {"credentials": {"user": SECRET}},
    "a list": {"passwords": [SECRET, SECRET]},
    "an address": {"database": f"postgres://me:{SECRET}@host/db"},
    "a key of a service": {"hub": "hf_" + KEY[:40]},
    "a number": {"api_key": 1234567890123},
}
LINES = {
    "an assignment": f'API_KEY = "{SECRET}"',
    "an argument": f'wandb.login(key="{KEY}")',
    "a variable": f'os.environ["HF_TOKEN"] = "{SECRET}"',
    "a default": f'parser.add_argument("--password", type=str, default="{SECRET}")',
    "a private key": f'key = """-----BEGIN RSA PRIVATE KEY-----\n{SECRET}"""',
    "an address": f'url = "https://me:{SECRET}@host/x"',
}
FILES = {".env": f"WORD={SECRET}", "config.yaml": f"password: {SECRET}", "id_rsa": SECRET, "secrets.py": f"x = '{SECRET}'"}
FILES["begins_as_a_variable.yaml"] = f"password: ${SECRET}"
PLANTED = [
    *[("arguments", name) for name in ARGUMENTS],
    *[("config", name) for name in CONFIGS],
    *[("script", name) for name in LINES],
    *[("difference", name) for name in FILES],
    ("imported", "secrets.py"),
    ("remote", "an address"),
    ("variables", "any"),
    ("variables", "one of the list"),
]


@pytest.mark.parametrize(("where", "name"), PLANTED)
def test_no_secret_enters_a_record(tmp_path, monkeypatch, repository, where, name):
    """It is neither in the settings nor in the code; where a file has one, the file is named."""
    config, named = {}, None
    if where == "arguments":
        monkeypatch.setattr(sys, "argv", ["train.py", *ARGUMENTS[name], "--epoch", "3"])
    elif where == "config":
        config = CONFIGS[name]
    elif where == "script":
        (repository / "train.py").write_text(LINES[name])
        named = "train.py"
    elif where == "difference":
        (repository / name).write_text("a = 1\n")
        git(repository, "add", "--force", name)
        git(repository, "commit", "--quiet", "--message", "second")
        (repository / name).write_text(FILES[name])
        named = name
    elif where == "imported":
        (repository / name).write_text(FILES[name])
        imported(monkeypatch, "secrets_of_mine", repository / name)
        named = name
    elif where == "remote":
        git(repository, "remote", "add", "origin", f"https://me:{SECRET}@example.org/x.git?token={SECRET}")
    else:
        monkeypatch.setenv("OMP_SCHEDULE" if name == "one of the list" else "WANDB_API_KEY", f"token={SECRET}!")
    text = run(tmp_path / "out", **config)
    assert SECRET not in text
    assert KEY[:40] not in text
    assert "1234567890123" not in text
    assert named is None or "secret" in json.loads(text)["reproduction"]["source"]["left_out"][named]
    assert where != "arguments" or json.loads(text)["argv"][-2:] == ["--epoch", "3"]
    assert where != "remote" or json.loads(text)["reproduction"]["source"]["remote"] == "https://example.org/x.git"


def test_words_that_are_no_secrets_stay_in_a_record(tmp_path, monkeypatch, asked_again):
    """Tokens of a vocabulary, numbers of them and for each, tokenizers, keys of a log."""
    words = [
        "--tokenizer",
        "gpt2",
        "--pad-token",
        "<pad>",
        "--max-tokens=4096",
        "--sort-key",
        "main/loss",
        "--author",
        "Ann",
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    config = {"eos_token": 2, "pad_token": "[PAD]", "tokens": 4096, "tokenizer": "gpt2", "seed": 123456789}
    config["cost_per_token"] = 1.25e-06
    found = json.loads(run(tmp_path, updater=DataUpdater(), **config))
    assert found["argv"][1:] == words
    assert found["config"] == config
