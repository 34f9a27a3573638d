"""A condition on a reported value, and what the files of a run tell about it without a replay."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from chainring._checks import is_number
from chainring._runs.finished import FinishedRun, read_values, saved_trainers, start_in_force
from chainring.serializers._safetensors import read_header, to_tensor
from chainring.serializers._store import SavedSnapshot
from chainring.training._ledger import loss_value

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
        """Return the condition that a text is; raise a `ValueError` if it is none."""
        if (match := _CONDITION.fullmatch(text)) is not None:
            with suppress(ValueError):
                number = float(match[3])
                if match[2] == "==" or not math.isnan(number):  # == nan, as == inf, holds for what is not finite alone
                    return cls(match[1], match[2], number)
        raise ValueError(
            f'a condition is KEY <, <=, >, >= or == NUMBER, such as "main/loss > 10", got {text!r}; a value that is not '
            "finite satisfies every one"
        )

    def holds(self, value: float | None) -> bool:
        return value is not None and (not math.isfinite(value) or _OPERATORS[self.operator](value, self.number))

    def __str__(self) -> str:
        return f"{self.key} {self.operator} {self.number:g}"


@dataclass
class Evidence:
    """What is known of a key without a replay."""

    begin: int  # the iteration with which the run began
    last: int  # that it is known to have reached
    values: dict[int, float | None] = field(default_factory=dict)  # by iteration; None where it was not reported
    means: list[tuple[int, int, float]] = field(default_factory=list)  # of intervals: the iteration before, and the last
    logged: set[str] = field(default_factory=set)  # the keys in the rows of the logs

    def first_unknown(self, condition: Condition) -> int:
        """Return the first iteration in which the condition may hold."""
        iteration = self.begin + 1
        while iteration in self.values and not condition.holds(self.values[iteration]):
            iteration += 1
        return iteration

    def bounds(self, condition: Condition) -> tuple[int, int]:
        """Return the last iteration for which it does not hold before the first for which it does, and that one."""
        shown = [iteration for iteration, value in self.values.items() if condition.holds(value)]
        for _, end, mean in self.means:  # one that equals a number does not tell that a value does
            if condition.holds(mean) and (condition.operator != "==" or not math.isfinite(mean)):
                shown.append(end)
        end = min(shown, default=self.last)
        known = [i for i, value in self.values.items() if value is not None and i < end and not condition.holds(value)]
        return max(known, default=self.begin), end


def collect(run: FinishedRun, key: str, *, looks_into_snapshots: bool = False) -> Evidence:
    """Return the values of a key in the recorder and the logs of a run, and its snapshots."""
    begin = start_in_force(run.record, 0).get("iteration", 0)  # above 0 after another run
    last = max((manifest.iteration for _, manifest in run.store.listing() if manifest is not None), default=0)
    evidence = Evidence(begin, last)
    # Rows that tell something else.
    postprocessed = {name for start in run.record.get("starts", ()) for name in start.get("postprocessed", ())}
    for name, rows in run.logs.items():
        for row in rows:
            evidence.last = max(evidence.last, row.iteration)
            evidence.logged.update(row.values)
            value = None if name in postprocessed else row.values.get(key)
            if is_number(value) and row.iteration > 0:  # 0 is before the first
                mean = float(str(value))  # an integer beyond floats becomes an infinity
                evidence.means.append((row.after, row.iteration, mean))
                if row.iteration == row.after + 1:
                    evidence.values[row.iteration] = mean
    for saved, manifest, _ in saved_trainers(run.store) if looks_into_snapshots else ():
        if (value := _observed(saved, f"observation/{key}")) is not None:
            evidence.values[manifest.iteration] = value
    ledger = run.sound_recorder()
    if ledger is not None and len(ledger.iterations):
        evidence.last = max(evidence.last, int(ledger.iterations[-1]))
        if key in ledger.names:
            column = ledger.names.index(key)
            bits, types = ledger.bits[:, column].tolist(), ledger.types[:, column].tolist()
            for iteration, each, kind in zip(ledger.iterations.tolist(), bits, types, strict=True):
                evidence.values[iteration] = loss_value(each, kind) if kind else None
    return evidence


def _observed(snapshot: SavedSnapshot, path: str) -> float | None:
    """Return a number in a snapshot, which may be a tensor; ``None`` if it has none of that path."""
    value = read_values(snapshot).get(path)
    if value is None or isinstance(value, (int, float)):
        return None if value is None else float(value)
    manifest = snapshot.read_manifest()  # `opened_state` would read every byte
    for file in (snapshot.open(name, manifest) for name in sorted(manifest.files) if name.endswith(".safetensors")):
        if (stored := read_header(file)[1].get(path)) is not None:
            start, end = stored.span
            return float(to_tensor(file.read(start, end - start), stored.dtype, stored.shape, stored.strides))
    return None
