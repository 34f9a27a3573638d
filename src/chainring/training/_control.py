"""Commands that change a run while it trains: how they are written, recorded, and carried out between two iterations.

The file ``control.jsonl`` in ``out`` has a line for each, which `chainring.control` appends and the run only reads: an id,
the run that it is for, and the command. What was carried out or refused is in ``run.json``, on the disk before it changes
anything.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chainring._files import atomic_write, open_regular
from chainring._messages import info, printable
from chainring._progress import Trainer
from chainring.reporting.summary import is_scalar
from chainring.serializers._models import filled
from chainring.training._run_directory import CONTROL, RECORD, mixtures_of, parse_record
from chainring.training.triggers.base import describe, get_stop_trigger

LARGEST = 1 << 20
"""The most bytes of a file of commands."""
FORMS = 'lr=1e-4, lr:NAME=1e-4, stop, stop=(30, "epoch"), snapshot, call=EXTENSION or weights=web:0.5,code:0.5'
_STOP = re.compile(r"""\(?\s*([\d.e+-]+)\s*,\s*["']?(iteration|epoch|second)["']?\s*\)?""")
_KEYS = ("id", "run", "time", "command")


class Command(NamedTuple):
    kind: str  # "lr", "stop", "stop at", "snapshot", "call", "weights"
    name: str = ""  # of an optimizer, which may be left out, or an extension
    value: Any = None


def parse(text: str) -> Command:
    """Return what a command means; a `ValueError` says how one is written."""
    start, is_set, value = (part.strip() for part in text.partition("="))
    kind, has_name, name = start.partition(":")
    if kind == "lr" and value and bool(has_name) == bool(name):
        return Command("lr", name, _number(text, value))
    if text.strip() in ("stop", "snapshot"):
        return Command(text.strip())
    if start == "stop" and (match := _STOP.fullmatch(value)):
        length = _number(text, match[1])
        return Command("stop at", value=(int(length) if length.is_integer() else length, match[2]))
    if start == "call" and value:
        return Command("call", value)
    if start == "weights" and value:
        pairs = [part.rpartition(":") for part in value.split(",")]
        weights = {source.strip(): _number(text, weight) for source, _, weight in pairs}
        if all(weights) and len(weights) == len(pairs):
            return Command("weights", value=weights)
    raise ValueError(f"a command is {FORMS}; got {text!r}{'' if is_set else ', which is none of these'}")


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"a number of at least 0 is needed, such as 1e-4; got {value!r} in {text!r}")
    return number


def choose(what: str, name: str, names: Iterable[str]) -> str:
    """Return the name of an optimizer or an extension; without one, that of the only one there is."""
    known = list(names)
    if name not in (known if name or len(known) != 1 else ("",)):
        given = f"there is no {what} {name!r}" if name else f"there are {len(known)} {what}s; write lr:NAME="
        raise ValueError(f"{given}; this run has {', '.join(map(repr, known)) or 'none'}")
    return name or known[0]


def choose_mixture(weights: Mapping[str, float], mixtures: Mapping[str, Sequence[str]]) -> str:
    """Return the name of the iterator that has the sources of these weights."""
    matching = [name for name, sources in mixtures.items() if sorted(sources) == sorted(weights)]
    if len(matching) != 1:
        known = "; ".join(f"iterator {name!r} has {', '.join(sources)}" for name, sources in mixtures.items())
        raise ValueError(
            f"weights are given for each source of one MixtureIterator, and those are for {', '.join(weights)}; "
            f"{known or 'this run has no MixtureIterator'}"
        )
    if not any(weights.values()):
        raise ValueError("at least one weight is above 0")
    return matching[0]


def identity_of(record: Mapping[str, Any]) -> str:
    """Return by what commands know a run, which another one in the same ``out`` has not."""
    first: Mapping[str, Any] = next(iter(record.get("starts", ())), {})
    return str(first.get("run"))


def parse_requests(content: bytes, record: Mapping[str, Any]) -> tuple[list[dict[str, str]], int]:
    """Return the commands to a run that it has neither carried out nor refused, and the number of lines that are none."""
    requests, wrong = [], 0
    known = {command["id"] for command in record.get("commands", ())}
    for line in content.split(b"\n")[:-1]:  # what follows the last end of a line is being written
        try:
            request = json.loads(line)
            if not all(isinstance(request[key], str) for key in _KEYS):
                raise TypeError
        except (ValueError, TypeError, LookupError, RecursionError):
            wrong += 1
            continue
        if request["run"] == identity_of(record) and request["id"] not in known:
            known.add(request["id"])
            requests.append(request)
    return requests, wrong


def read_owned(path: Path) -> bytes:
    """Return the content of a file of commands that nobody but the user of this process can have written."""
    with open(open_regular(path), "rb") as file:
        status = os.fstat(file.fileno())
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            raise ValueError(f"it belongs to the user {status.st_uid}, and not to the one who trains")
        if hasattr(os, "geteuid") and status.st_mode & 0o022:
            raise ValueError("others than its owner can write it")
        if status.st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        return file.read(LARGEST)


def describe_entry(entry: Mapping[str, Any]) -> str:
    command = printable(entry["command"])
    if "refused" in entry:
        return f"{command} is refused: {printable(entry['refused'])}"
    was = f" (was {printable(entry['was'])})" if "was" in entry else ""
    return f"{command}{was} after iteration {entry['iteration']}"


# --- in the run ---


def due_commands(trainer: Trainer, commands: Any, has_news: bool) -> Iterator[tuple[str, str]]:
    """Carry out what is due before the next iteration; yield the kind and the name of what the trainer carries out.

    Those of the record come first, and with ``has_news`` those that nobody has read yet, which all ranks learn here.
    """
    iteration, recorded = trainer.updater.iteration, len(commands.again)
    if has_news:
        news = _record_news(trainer, commands.again) if trainer.comm.is_main else []
        commands.again += trainer.comm.world.broadcast_object(news) if trainer.comm.world.size > 1 else news
    while commands.again and commands.again[0]["iteration"] <= iteration:
        entry, recorded = commands.again[0], recorded - 1
        try:
            command = parse(entry["command"])
            if recorded >= 0:  # another script may lack what it is about
                _check(trainer, command)
        except ValueError as error:
            info(f"control: {printable(entry['command'])} is recorded, and left out: {printable(error)}")
            commands.done.append(commands.again.pop(0))
            continue
        info(f"control: {describe_entry(entry)}{', as recorded' if recorded >= 0 else ''}")
        if command.kind == "call":
            before = dict(trainer.observation)
            yield command.kind, command.name
            _print_reported(trainer, before)
        commands.done.append(commands.again.pop(0))  # before a snapshot, which has it, and after what may be repeated
        if command.kind in ("snapshot", "stop"):
            yield command.kind, ""
        elif command.kind == "stop at":
            restore_stop_trigger(trainer, [entry])
            trainer.initialize_trigger(trainer.stop_trigger)
        elif command.kind == "lr":
            optimizers = trainer.updater.get_all_optimizers()
            for group in optimizers[choose("optimizer", command.name, optimizers)].param_groups:
                group["lr"] = filled(group["lr"], command.value)
        elif command.kind == "weights":
            _mixture_of(trainer, command.value).change_weights(command.value)


def restore_stop_trigger(trainer: Trainer, done: Iterable[Mapping[str, Any]]) -> None:
    """Let the stop triggers hold that were commanded, unless the script gives another one than it did then."""
    for entry in done:
        command = parse(entry["command"])
        if command.kind == "stop at" and entry.get("was") == describe(trainer.stop_trigger, as_setting=True):
            trainer.stop_trigger = get_stop_trigger(command.value)


def _record_news(trainer: Trainer, again: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the commands that nobody has carried out yet, when they are recorded; say which are refused.

    They come after those that are to be carried out ``again``.
    """
    path, files = Path(trainer.out) / RECORD, trainer.store.files
    try:
        if not files.is_local and files.open(CONTROL).size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        content = read_owned(path.parent / CONTROL) if files.is_local else files.read(CONTROL)
        requests, wrong = parse_requests(content, record := parse_record(path))
        if wrong:
            info(f"control: {wrong} line{'s' * (wrong > 1)} of {CONTROL} are no commands, and are ignored")
        entries = list[dict[str, Any]]()
        for request in requests:
            entries.append(_judge(trainer, request, [*again, *(entry for entry in entries if "refused" not in entry)]))
        if entries:
            with atomic_write(path, durable=True) as file:
                record["commands"] = [*record.get("commands", ()), *entries]
                file.write((json.dumps(record, indent=1) + "\n").encode())
            files.persist(path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        info(f"control: {CONTROL} is ignored: {printable(error)}")
        return []
    for entry in entries:
        if "refused" in entry:
            info(f"control: {describe_entry(entry)}")
    return [entry for entry in entries if "refused" not in entry]


def _judge(trainer: Trainer, request: Mapping[str, str], before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry of a command in the record; those ``before`` it are not carried out yet."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    iteration = max([trainer.updater.iteration, *(entry["iteration"] for entry in before)])
    entry = {"id": request["id"], "time": now, "iteration": iteration, "command": request["command"].strip()}
    try:
        command = parse(request["command"])
        was = _check(trainer, command)
    except ValueError as error:
        return {**entry, "refused": str(error)}
    for earlier in map(parse, (entry["command"] for entry in before)):
        if earlier.kind == command.kind == "stop at":
            was = describe(get_stop_trigger(earlier.value), as_setting=True)
        elif earlier.kind == command.kind and was is not None:
            was = earlier.value
    if isinstance(was, Mapping):  # as a command writes them
        was = ",".join(f"{source}:{weight}" for source, weight in was.items())
    return entry if was is None else {**entry, "was": was}


def _check(trainer: Trainer, command: Command) -> Any:
    """Return what a command replaces, if that can be told; a `ValueError` says why it cannot be carried out."""
    entries = {entry.name: entry for entry in trainer.entries}
    if command.kind == "stop at":
        trainer.initialize_trigger(get_stop_trigger(command.value))  # which refuses epochs that nobody counts
        return describe(trainer.stop_trigger, as_setting=True)
    if command.kind == "call":
        choose("extension", command.name, entries)
    if command.kind == "snapshot" and not any(entry.is_snapshot for entry in entries.values()):
        raise ValueError("no snapshot extension is registered; extend the trainer by extensions.snapshot()")
    if command.kind == "weights":
        iterator = _mixture_of(trainer, command.value)
        copy.copy(iterator).change_weights(command.value)
        return dict(iterator.weights)
    if command.kind == "lr":
        optimizers = trainer.updater.get_all_optimizers()
        optimizer = optimizers[choose("optimizer", command.name, optimizers)]
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups if "lr" in group})
        if len(rates) != 1:
            raise ValueError(
                f"the groups of the optimizer have the learning rates {rates}, and one cannot replace them: stop the run, "
                "change them in the script, and resume"
            )
        for name, entry in entries.items():
            if entry.optional("sets_lr")(optimizer):
                raise ValueError(
                    f"extension {name!r} sets the learning rate, and would overwrite it: stop the run, change the schedule "
                    "in the script, and resume"
                )
        return rates[0]
    return None


def _mixture_of(trainer: Trainer, weights: Mapping[str, float]) -> Any:
    mixtures = mixtures_of(trainer)
    return mixtures[choose_mixture(weights, {name: mixture.sources.names for name, mixture in mixtures.items()})]


def _print_reported(trainer: Trainer, before: Mapping[str, Any]) -> None:
    """Print what an extension has reported, which comes too late for the log of its iteration."""
    if not trainer.comm.is_main:
        return
    reported = {key: value for key, value in trainer.observation.items() if value is not before.get(key)}
    values = [f"{key} {float(value):.6g}" for key, value in reported.items() if is_scalar(value)]
    if values:
        info(f"control: {', '.join(values)}")
