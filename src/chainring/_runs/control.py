"""control: writes commands to a run while it trains, and tells which were carried out."""

from __future__ import annotations

import datetime
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from chainring._files import DirectoryLock, open_regular
from chainring._messages import printable
from chainring._places.bucket import MISSING
from chainring._places.connection import ChangedError
from chainring._places.index import is_held
from chainring._runs.finished import FinishedRun
from chainring.training import _control
from chainring.training._run_directory import CONTROL


def control(run: str, *commands: str) -> str:
    """Give commands to a run while it trains, and return what was done so far and what waits, a line for each.

    A command is carried out between two iterations, in the same one on all ranks, within two seconds or an iteration; it is
    printed and recorded there, so that a resumed run and a replay do the same without it being said again. What the run has
    not carried out when it ends waits until it is resumed.

    ==============================  ==================================================================================
    command                         what it does
    ==============================  ==================================================================================
    ``lr=1e-4``, ``lr:NAME=1e-4``   sets the learning rate of the optimizer, or of that of a name
    ``stop``                        takes all snapshots, and ends the run
    ``stop=(30, "epoch")``          replaces the stop trigger, until the script gives another one than it did then
    ``snapshot``                    takes all snapshots
    ``call=EXTENSION``              calls the extension of this name now
    ``weights=web:0.5,code:0.5``    changes the weights of a `MixtureIterator`
    ==============================  ==================================================================================

    Args:
        run: the directory of the run, its ``out``, or its address in an object store.
        commands: the commands; without any, nothing is written.

    Raises:
        ValueError: a command is none, or the run has no such optimizer, extension or source. Then none is written.
        FileNotFoundError: there is no run, or it has no ``run.json``.
        PermissionError: the run is another user's.
        ProcessLookupError: the run has ended, or was killed. What it did so far is told without commands.
    """
    finished = FinishedRun.open(run)
    record = finished.record
    if not record:
        raise FileNotFoundError(f"{run} has no run.json, by which a run is known; give the out= of a run that has begun")
    for command in commands:
        _refuse(command, record)
    if commands:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        about = {"run": _control.identity_of(record), "time": now}
        lines = [{"id": secrets.token_hex(8), **about, "command": command} for command in commands]
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        if finished.store.files.is_local:
            _append(finished.directory, text)
        else:
            _append_object(finished.store.files, text)
    return "\n".join(lines_of(finished))


def lines_of(finished: FinishedRun) -> Iterator[str]:
    """Yield what was commanded to a run in words: first what was done, then what waits."""
    record = finished.record
    yield from map(_control.describe_entry, record.get("commands", ()))
    yield from (f"{printable(request['command'])} waits" for request in waiting(finished))


def waiting(finished: FinishedRun) -> list[dict[str, str]]:
    """Return the commands that a run has not read yet."""
    with suppress(OSError, ValueError):  # of somebody else's: the run does not take them
        is_local = finished.store.files.is_local
        content = _control.read_owned(finished.directory / CONTROL) if is_local else finished.store.files.read(CONTROL)
        return _control.parse_requests(content, finished.record)[0]
    return []


def _refuse(text: str, record: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for a command that the run would refuse, as far as its record tells."""
    command, plan = _control.parse(text), record.get("plan", {})
    extensions = {entry["name"]: entry["class"] for entry in plan.get("extensions", ())}
    if command.kind == "lr" and record.get("optimizers"):
        _control.choose("optimizer", command.name, record["optimizers"])
    elif command.kind == "call":
        _control.choose("extension", command.name, extensions)
    elif command.kind == "snapshot" and "Snapshot" not in extensions.values():
        raise ValueError("this run has no snapshot extension; extend the trainer by extensions.snapshot()")
    elif command.kind == "weights":
        _control.choose_mixture(command.value, record.get("mixtures", {}))


def _refuse_ended(run: object, is_written: bool) -> None:
    if not is_written:
        raise ProcessLookupError(
            f"the run in {run} has ended, and a command is for one that trains: start it again, and command it then"
        )


def _append(directory: Path, text: bytes) -> None:
    path = directory / CONTROL
    if hasattr(os, "geteuid") and (owner := os.stat(directory).st_uid) != os.geteuid():
        raise PermissionError(f"{directory} is that of the user {owner}, who alone can command the run")
    _refuse_ended(directory, DirectoryLock.is_held(directory))
    if os.path.lexists(path):
        try:
            if len(_control.read_owned(path)) + len(text) > _control.LARGEST:
                raise ValueError(f"it would have more than {_control.LARGEST:,} bytes")
        except ValueError as error:
            raise ValueError(f"{path}: {error}, so that the run would ignore it; move it away") from error
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with open(descriptor, "ab") as file:
        if hasattr(os, "fchmod"):
            os.fchmod(descriptor, 0o600)
        file.write(text)
        file.flush()
        os.fsync(descriptor)


def _append_object(files: Any, text: bytes) -> None:
    _refuse_ended(files.bucket.url, is_held(files.bucket))
    while True:
        stored = None
        with suppress(FileNotFoundError):
            stored = files.bucket.get(CONTROL)
        content, tag = (b"", MISSING) if stored is None else (stored.content, stored.tag)
        with suppress(ChangedError):  # somebody else has written meanwhile
            files.bucket.put(CONTROL, content + text, tag)
            return
