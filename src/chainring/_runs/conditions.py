"""A condition on a reported value, and what the files of a run tell about it without a replay."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from safetensors import safe_open

from chainring._runs.finished import FinishedRun, first_iteration, read_values, recorder_of, saved_trainers
from chainring._runs.rows import Rows, read_rows
from chainring.serializers._loading import opened_state
from chainring.serializers._store import SavedSnapshot
from chainring.serializers._values import read_stored
from chainring.training._ledger import loss_value
from chainring.training._run_directory import read_record

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_CONDITION = re.compile(r"\s*(\S.*?[^\s<>=!]|[^\s<>=!])\s*(<=|>=|==|<|>)\s*(\S+)\s*")


@dataclass(frozen=True)
class Condition:
    """A condition such as ``main/loss > 10``. A value that is not finite satisfies every one."""

    key: str
    operator: str
    number: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Return the condition that a text is.

        Raises:
            ValueError: it is not one.
        """
        match = _CONDITION.fullmatch(text)
        try:
            number = float(match[3]) if match else math.nan
        except ValueError:
            number = math.nan
        if match is None or math.isnan(number):
            raise ValueError(
                f'a condition is KEY <, <=, >, >= or == NUMBER, such as "main/loss > 10", got {text!r}; a value that is not '
                "finite satisfies every one"
            )
        return cls(match[1], match[2], number)

    def holds(self, value: float) -> bool:
        return not math.isfinite(value) or _OPERATORS[self.operator](value, self.number)

    def holds_in_one_of(self, mean: float) -> bool:
        """Return whether a mean shows that it holds for one of the values."""
        return not math.isfinite(mean) or (self.operator != "==" and _OPERATORS[self.operator](mean, self.number))

    def __str__(self) -> str:
        return f"{self.key} {self.operator} {self.number:g}"


@dataclass
class Evidence:
    """What is known of a key without a replay.

    Attributes:
        values: by iteration the value; ``None`` where it was not reported.
        means: the means of intervals, each with the iterations before its first and with which it ends.
        last: the last iteration that the run is known to have reached.
        logged: the keys in the rows of the logs.
        begin: the iteration with which the run began.
    """

    values: dict[int, float | None] = field(default_factory=dict)
    means: list[tuple[int, int, float]] = field(default_factory=list)
    last: int = 0
    logged: set[str] = field(default_factory=set)
    begin: int = 0

    def first_unknown(self, condition: Condition) -> int:
        """Return the first iteration of which it is not known that the condition does not hold."""
        iteration = self.begin + 1
        while iteration in self.values and not self.holds(iteration, condition):
            iteration += 1
        return iteration

    def holds(self, iteration: int, condition: Condition) -> bool:
        """Return whether the condition is known to hold for an iteration."""
        value = self.values.get(iteration)
        return value is not None and condition.holds(value)

    def bounds(self, condition: Condition) -> tuple[int, int]:
        """Return the last iteration for which it does not hold before the first for which it does, and that one."""
        shown = [iteration for iteration in self.values if self.holds(iteration, condition)]
        shown += [end for _, end, mean in self.means if condition.holds_in_one_of(mean)]
        end = min(shown, default=self.last)
        known = [i for i, value in self.values.items() if value is not None and i < end and not condition.holds(value)]
        return max(known, default=self.begin), end


def collect(run: FinishedRun, key: str, *, looks_into_snapshots: bool = False) -> Evidence:
    """Return what the recorder and the logs of a run tell of a key, and its snapshots."""
    found = Evidence(begin=first_iteration(read_record(run.directory)))
    found.last = max((manifest.iteration for _, manifest in run.store.listing() if manifest is not None), default=0)
    for path in filter(None, map(run.file, run.log_names)):
        _add_rows(found, read_rows(path), key)
    for saved, manifest, _ in saved_trainers(run.store) if looks_into_snapshots else ():
        if (value := _observed(saved, f"observation/{key}")) is not None:
            found.values[manifest.iteration] = value
    ledger = recorder_of(run)
    if ledger is not None and len(ledger.iterations):
        found.last = max(found.last, int(ledger.iterations[-1]))
        if key in ledger.names:
            column = ledger.names.index(key)
            bits, types = ledger.bits[:, column].tolist(), ledger.types[:, column].tolist()
            for iteration, each, kind in zip(ledger.iterations.tolist(), bits, types, strict=True):
                found.values[iteration] = loss_value(each, kind) if kind else None
    return found


def _observed(snapshot: SavedSnapshot, path: str) -> float | None:
    """Return a number in a snapshot, which may be a tensor; ``None`` if it has none of that path."""
    value = read_values(snapshot).get(path)
    if isinstance(value, (int, float)):
        return float(value)
    if value is None:
        return None
    if not snapshot.is_local:
        with opened_state(snapshot) as state:
            return float(read_stored(state[path]))
    manifest = snapshot.read_manifest()
    for name in sorted(name for name in manifest.files if name.endswith(".safetensors")):
        with safe_open(snapshot.path_of(name, manifest), framework="pt") as tensors:
            if path in tensors.keys():  # noqa: SIM118 - it is not a mapping
                return float(tensors.get_tensor(path))
    return None


def _add_rows(found: Evidence, rows: Rows, key: str) -> None:
    """Add the means of a log; a line that a person has changed, or that goes back, is passed over."""
    before = 0
    for row in rows:
        iteration = None if row is None else row.get("iteration")
        if row is None or not isinstance(iteration, int) or iteration < before:
            continue
        found.last = max(found.last, iteration)
        found.logged.update(row)
        mean = row.get(key)
        if isinstance(mean, (int, float)) and iteration > 0:  # 0 is before the first
            found.means.append((before, iteration, float(mean)))
            if iteration == before + 1:
                found.values[iteration] = float(mean)
        before = iteration
