"""The code of a recorded run, checked out into a directory of its own, the environment there, and the run made again in it.

``python -m chainring.testing._workspace TASK SCRIPT`` makes all of a run again, or one rank of it, in another ``out``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch

from chainring._messages import list_names
from chainring.testing._processes import ProcessTask, Start, command_starter, moved_argument, run_script
from chainring.testing.replay import NoReplay, ends_by_the_clock, recorded_threads
from chainring.training._entry import Observer
from chainring.training._provenance import LEFT_OUT, UNUSED, VARIABLES
from chainring.training.trainer import Trainer

_MODULE = "chainring.testing._workspace"
_OF_GIT = ("git", "-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")
_WHEELS = "https://download.pytorch.org/whl/"  # by the local version of PyTorch, such as cpu or cu128
_BUILD = re.compile(r"==[^ ]*\+(cpu|cu\d+|rocm[\d.]+|xpu)$")
_NOT_INSTALLED = ("pip", "uv")  # of an environment, which has its own
_LAUNCHER = re.compile(r"(LOCAL_)?(RANK|WORLD_SIZE)|GROUP_.*|ROLE_.*|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
_MOST_SHOWN = 8
_LINES = 12  # of what a program has printed


class Workspace:
    """What a run needs to be made again, in a new directory; nothing is changed where the run was.

    What lies beside the code, and is in no commit, such as data, is linked as it is now. Where the directory of the recorded
    run was, that of the new one is.

    Attributes:
        notes: sentences about what is not as it was.

    Args:
        needed: what the record has for it.
        run: the directory of the run.
        out: that of the new one.
        directory: an empty one.
        began: when the run began, by the clock.
    """

    def __init__(self, needed: Mapping[str, Any], run: str, out: str, directory: Path, began: float) -> None:
        self.notes: list[str] = []
        self._needed, self._source, self._run, self._out = needed, _source_of(needed), run, out
        self._directory, self._code = directory, directory / "code"
        self._python = sys.executable
        self._path = [os.environ.get("PYTHONPATH", "")]
        self._working = self._code
        self._check_out()
        self._check_script()
        self._link_the_rest(began)

    # --- the code ---

    def _check_out(self) -> None:
        source = self._source
        if source["commit"] is None:
            self._code.mkdir(parents=True)
        else:
            repository, is_near = self._find_repository()
            shared = ("--shared",) if is_near else ()
            _call([*_OF_GIT, "clone", "--quiet", "--no-checkout", *shared, "--", repository, str(self._code)], "the clone")
            checkout = [*_OF_GIT, "-C", str(self._code), "checkout", "--quiet", "--detach", source["commit"], "--"]
            _call(checkout, f"the checkout of commit {source['commit']}")
            if source["difference"]:
                command = [*_OF_GIT, "-C", str(self._code), "apply", "--whitespace=nowarn", "-"]
                _call(command, "applying the recorded difference to the commit", source["difference"])
        files = dict(source["files"])
        if source["text"] is not None:
            files.setdefault(source["script"], source["text"])
        root = self._code.resolve()
        for name, text in files.items():
            path = self._code / name
            if not path.resolve().is_relative_to(root) or ".git" in Path(name).parts:
                raise NoReplay(f"the record has a file of a name outside of its directory: {name!r}")
            if name != source["script"] or source["commit"] is None or not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text.encode())

    def _find_repository(self) -> tuple[str, bool]:
        """Return a repository that has the commit, and whether it is on this machine: that of the run, or one at hand."""
        commit, remote = self._source["commit"], self._source["remote"]
        for place in (self._source["root"], os.getcwd()):
            command = [*_OF_GIT, "-C", place, "rev-parse", "--git-common-dir", f"{commit}^{{commit}}"]
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode == 0:
                return os.path.join(place, done.stdout.splitlines()[0]), True
        if remote is None or not re.match(r"(https|ssh|git)://|git@|/", remote):
            raise NoReplay(
                f"commit {commit} is neither in {self._source['root']} nor in the repository of this directory: start the "
                "command in a clone that has it"
            )
        return remote, False

    def _check_script(self) -> None:
        source = self._source
        left_out = {name: why for name, why in source["left_out"].items() if why != UNUSED}
        for name, why in left_out.items():
            if not name.endswith(".py") or (name == source["script"] and (self._code / name).exists()):
                continue  # the script is that of the commit
            raise NoReplay(f"the record does not have all of the code: {name} was left out, because {why}")
        script = self._code / source["script"]
        if not script.is_file():
            raise NoReplay(f"{source['script']} is not in the record, nor in commit {source['commit']}")
        if source["text"] is not None and script.read_bytes() != source["text"].encode():
            raise NoReplay(f"{source['script']} in commit {source['commit']} and the difference is not the script that ran")
        if left_out:
            others = [f"{name} ({why})" for name, why in left_out.items()]
            self.notes.append(f"left out of the record: {list_names(others, _MOST_SHOWN, '; ')}")

    def _link_the_rest(self, began: float) -> None:
        """Link what lies where the run was started, and in its repository, and is in no commit."""
        linked = dict[str, str]()  # by its name there the file or directory
        root, directory = self._source["root"], self._source["directory"]
        for original in dict.fromkeys([root, directory]):
            if not os.path.isdir(original):
                self.notes.append(f"{original}, where the run was, is not there: nothing but the recorded code is used")
        if os.path.isdir(root):
            self._link(root, self._code, linked)
        if f"{directory}{os.sep}".startswith(os.path.join(root, "")):
            self._working = self._code / os.path.relpath(directory, root)
        else:
            self._working = self._directory / "working" / os.path.basename(directory)
            self._working.mkdir(parents=True)
            if os.path.isdir(directory):
                self._link(directory, self._working, linked)
        self._working.mkdir(parents=True, exist_ok=True)
        if linked:
            self.notes.append(f"in no commit, and used as it is now: {list_names(sorted(linked), _MOST_SHOWN)}")
        files = {name: path for name, path in linked.items() if os.path.isfile(path)}
        if changed := sorted(name for name, path in files.items() if os.path.getmtime(path) > began + 1):
            self.notes.append(f"changed since the run began: {list_names(changed, _MOST_SHOWN)}")

    def _link(self, original: str, copy: Path, linked: dict[str, str]) -> None:
        for entry in os.scandir(original):
            target, real = copy / entry.name, os.path.realpath(entry.path)
            if entry.name in (".git", "__pycache__") or self._directory.is_relative_to(real):
                continue
            is_above = f"{self._run}{os.sep}".startswith(f"{real}{os.sep}")
            if real == self._run:
                if not os.path.lexists(target):
                    target.symlink_to(self._out)
            elif is_above or (target.is_dir() and not target.is_symlink() and entry.is_dir(follow_symlinks=False)):
                target.mkdir(exist_ok=True)
                self._link(entry.path, target, linked)
            elif not os.path.lexists(target):
                target.symlink_to(os.path.abspath(entry.path))
                linked[os.path.relpath(entry.path, original)] = entry.path

    # --- the environment ---

    def search_path(self) -> list[str]:
        """Return the directories from which the run imported code that no distribution has."""
        paths = [str(self._code / path) for path in self._source["paths"] if not os.path.isabs(path)]
        outside = [path for path in self._source["paths"] if os.path.isabs(path)]
        if gone := [path for path in outside if not os.path.isdir(path)]:
            raise NoReplay(f"the run imported code from {', '.join(gone)}, which is not there")
        if outside:
            self.notes.append(f"in no distribution, and used as it is now: {list_names(outside, _MOST_SHOWN)}")
        return [*paths, *outside]

    def use_this_environment(self) -> None:
        """Let the run be made again by the Python that runs now."""
        self._path = [*self.search_path(), *self._path]

    def build_environment(self) -> None:
        """Install the recorded versions into a new environment: by uv where it is there, else by venv and pip."""
        wanted, environment = self._needed["python"], self._directory / "environment"
        python = str(environment / "bin" / "python")
        self._path = self.search_path()
        requirements = self._directory / "requirements.txt"
        stubs, lines = self._requirements()
        requirements.write_text("".join(f"{line}\n" for line in lines))
        builds = {line: match[1] for line in lines if (match := _BUILD.search(line))}
        indexes = [f"--extra-index-url={_WHEELS}{each}" for each in sorted({*builds.values()})]
        if uv := shutil.which("uv"):
            _call([uv, "venv", "--quiet", "--python", wanted, str(environment)], f"an environment of Python {wanted}")
            install = [uv, "pip", "install", "--quiet", "--python", python, "--index-strategy", "unsafe-best-match"]
        else:
            base = _find_python(wanted)
            _call([base, "-m", "venv", str(environment)], f"an environment of Python {wanted}")
            install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        install, what = [*install, "--no-deps"], "the installation of the recorded versions"
        if builds:
            try:
                _call([*install, *builds], what)
            except NoReplay:  # a request to this index for all others, too, would cost minutes where it cannot be reached
                _call([*install, *builds, *indexes], what)
        _call([*install, "-r", str(requirements)], what)
        asked = "import platform, sysconfig; print(platform.python_version(), sysconfig.get_path('purelib'))"
        version, packages = _call([python, "-c", asked], "the new Python").split(maxsplit=1)
        if version != wanted:
            self.notes.append(f"differs here: python {wanted} -> {version}")
        for name, text in stubs.items():  # of code that is imported from where it lies
            number, _, address = text.partition(" @ ")
            folder = Path(packages.strip(), f"{name.replace('-', '_')}-{number}.dist-info")
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
            (folder / "direct_url.json").write_text(json.dumps({"url": address}))
        self._python = python

    def _requirements(self) -> tuple[dict[str, str], list[str]]:
        """Return the distributions of which the code is imported from where it lies, and the lines of what is installed."""
        stubs, lines = dict[str, str](), []
        imported = [os.path.join(self._source["root"], path) for path in self._source["paths"]]
        for name, text in self._needed["distributions"].items():
            version, _, address = text.partition(" @ ")
            if name in _NOT_INSTALLED:
                continue
            if not re.fullmatch(r"[a-z0-9.-]+ [\w.!+-]+( @ [a-z+]+:\S+)?", f"{name} {text}"):
                raise NoReplay(f"the record has a distribution that is none: {name} {text}")
            if not address:
                lines.append(f"{name}=={version}")
                continue
            if address.startswith("file:"):
                folder = unquote(urlsplit(address).path)
                if any(f"{os.path.normpath(path)}{os.sep}".startswith(os.path.join(folder, "")) for path in imported):
                    stubs[name] = text
                    continue
                if folder.startswith(os.path.join(self._source["root"], "")) or folder == self._source["root"]:
                    address = (self._code / os.path.relpath(folder, self._source["root"])).as_uri()
                elif not os.path.exists(folder):
                    raise NoReplay(f"{name} {version} was installed from {folder}, which is not there")
                else:
                    self.notes.append(f"{name} is installed from {folder} as it is now")
            if LEFT_OUT in address:
                raise NoReplay(f"{name} {version} was installed from an address that was left out of the record")
            lines.append(f"{name} @ {address}")
        return stubs, lines

    # --- the run ---

    def starter(self, arguments: Sequence[str], ranks: int) -> Start:
        """Return a function that starts the script with arguments, once for each rank, for a `Reproduction`."""
        prefix = [self._python, "-m"]
        if ranks > 1:
            prefix += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        kept = {k: v for k, v in os.environ.items() if k not in VARIABLES and not _LAUNCHER.fullmatch(k)}
        if self._python != sys.executable:
            kept |= {"VIRTUAL_ENV": str(self._directory / "environment"), "PYTHONNOUSERSITE": "1"}
            kept["PATH"] = os.pathsep.join([os.path.dirname(self._python), kept.get("PATH", os.defpath)])
        given = {k: v for k, v in self._needed["environment"].items() if k in VARIABLES}
        environment = kept | given | {"PYTHONPATH": os.pathsep.join(filter(None, self._path))}
        script = os.path.relpath(self._code / self._source["script"], self._working)
        moved = [moved_argument(argument, self._run, self._out, absolute_only=True) for argument in arguments]
        if any(LEFT_OUT in argument for argument in moved):
            self.notes.append(f"arguments that look like secrets are not recorded, and are {LEFT_OUT!r} here")
        return command_starter([*prefix, _MODULE], [script], environment, place=str(self._working), arguments=moved)


def ranks_to_start(needed: Mapping[str, Any]) -> int:
    """Return on how many ranks a run is made again: on one, if virtual ranks compute the same bits there."""
    ranks, device = needed["ranks"], str(needed["device"]).partition(" ")[0]
    if ranks == 1 or needed["virtual_ranks"] is not None:
        return 1
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if device != "cpu" and count < ranks:
        raise NoReplay(
            f"the run had {ranks} ranks, each with an accelerator ({device}), and {count} are here: other numbers of ranks "
            "compute other bits; with StandardUpdater(..., virtual_ranks=) they are the same on any"
        )
    return int(ranks)


def _source_of(needed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the code of a record, which may come from anywhere; refuse it if it is not of the types that are written."""
    source: Any = needed.get("source")
    texts, optional = ("directory", "root", "difference"), ("commit", "remote", "text", "script")
    is_sound = isinstance(source, dict) and (
        all(isinstance(source.get(name), str) for name in texts)
        and all(isinstance(source.get(name), str | None) for name in optional)
        and all(_is_of_texts(source.get(name)) for name in ("files", "left_out"))
        and all(_is_of_texts(needed.get(name)) for name in ("distributions", "environment"))
        and isinstance(source.get("paths"), list)
        and all(isinstance(path, str) for path in source["paths"])
        and all(type(needed.get(name)) is int for name in ("ranks", "threads"))
        and re.fullmatch(r"[0-9a-f]{40,64}", source["commit"] or "0" * 40)
        and re.fullmatch(r"\d+(\.\w+)+\+?", str(needed.get("python")))
    )
    if not is_sound:
        raise NoReplay("what run.json has to repeat the run is not of the types that were written")
    if source["script"] is None:
        raise NoReplay("the program was no file: it ran in a notebook, or was typed in, and nothing of it is recorded")
    return dict(source)


def _is_of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _call(command: Sequence[str], what: str, given: str | None = None) -> str:
    """Return what a command prints; say in words what failed."""
    try:
        done = subprocess.run(
            command, input=(given or "").encode(), capture_output=True, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        )
    except OSError as error:
        raise NoReplay(f"{what} failed: {command[0]}: {error.strerror}") from error
    if done.returncode:
        shown = "\n".join((done.stderr or done.stdout).decode(errors="replace").splitlines()[-_LINES:])
        raise NoReplay(f"{what} failed:\n{shown}")
    return done.stdout.decode(errors="replace")


def _find_python(wanted: str) -> str:
    """Return a Python of the wanted version, except for its last number."""
    minor = wanted.rpartition(".")[0]
    if sys.version.startswith(f"{minor}."):
        return sys.executable
    if (found := shutil.which(f"python{minor}")) is None:
        raise NoReplay(f"the run had Python {wanted}, and python{minor} is not here; uv, if it is installed, fetches it")
    return found


@dataclass(frozen=True)
class Reproduction(ProcessTask):
    """One start of the script that is made again, up to the iteration with which the run ended or was started again."""

    until: int
    threads: int | None = None  # of torch
    arguments: list[str] = field(default_factory=list, kw_only=True)  # of the script, some of which torchrun would take
    commands: list[Any] = field(default_factory=list, kw_only=True)  # that the run has carried out


class _End(Observer):
    """Ends a run after an iteration as a signal would, with a snapshot; nothing is sent to services meanwhile."""

    is_replay = True

    def __init__(self, until: int, commands: list[Any]) -> None:
        self._until, self.commands = until, commands

    def ends(self, trainer: Trainer, ends: Callable[[], bool]) -> bool:
        would_end = ends()
        if trainer.updater.iteration < self._until:
            return would_end and not ends_by_the_clock(trainer)
        if not would_end and not trainer.interruption.is_shared:
            signal.raise_signal(signal.SIGTERM)
            ends()  # which answers the signal
        return True


def main() -> None:
    """Run the script of the command line up to the end of its trainer's run."""
    task = Reproduction(**json.loads(sys.argv[1]))
    sys.argv += task.arguments

    def run(trainer: Trainer, run_trainer: Callable[[Trainer], None]) -> None:
        trainer.out = task.out
        if not trainer.is_resumed:  # what a replay leaves out
            found = [entry.optional("newest")(trainer) for entry in trainer.entries if entry.optional("autoload")]
            if newest := max(filter(None, found), key=lambda state: state[0], default=None):
                newest[1]()
        trainer.watch(_End(task.until, task.commands))
        try:
            run_trainer(trainer)
        except SystemExit:
            if trainer.updater.iteration < task.until:
                raise
        task.path("done").touch()

    with recorded_threads(task.threads):
        run_script(task, run, "replay")


if __name__ == "__main__":
    main()
