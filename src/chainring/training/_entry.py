"""Entry: an extension as a trainer registers it; LoadedState: those of a saved run; Observer: looks on unregistered."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from chainring._checks import find_call_error, is_number, plain
from chainring._hints import CALLED, EXTENSIONS
from chainring._messages import user_place, warn
from chainring._progress import Trainer
from chainring.serializers.protocol import (
    ChangedSetting,
    Deserializer,
    DictionaryDeserializer,
    announce_change,
    printing_changes,
    visit_if_stateful,
)
from chainring.training.triggers.base import IntervalTrigger, Trigger, TriggerLike, describe, get_trigger
from chainring.training.triggers.best_value import RankingTrigger
from chainring.training.updaters._carried import Carried


class RollBack(RuntimeError):  # noqa: N818 - a request, and an error only where there is no snapshot
    """Raised by an extension to return the run to its newest snapshot and continue from there.

    If there is no snapshot, the run ends with this error, or with the one given as ``otherwise``.

    Example::

        if math.isnan(trainer.observation["main/loss"]):
            raise RollBack("the loss is NaN")
    """

    def __init__(self, *arguments: object, otherwise: BaseException | None = None) -> None:
        super().__init__(*arguments)
        self.otherwise = otherwise


class Identity(NamedTuple):
    """What an extension of one run is recognized by in another."""

    name: str
    kind: tuple[str, str]  # the name without the number that made it unique, and the class
    texts: tuple[str, ...]  # that identify the extension, most significant first
    trigger_class: str
    trigger_texts: tuple[str, ...]
    trigger: str


class Entry:
    """An extension as it is registered in one trainer: its name, its trigger and its priority there.

    Arguments that are ``None`` are looked up on the extension; see `Trainer.extend`.

    Attributes:
        name: unique in the trainer. It lives here and not on the extension, which may be registered twice.
        base_name: the name without the number that made it unique.
        fires: the call of the trigger, or ``None`` if it fires in every iteration.
        observe, observe_start, before_snapshot: methods of the extension, or ``None`` if it does not define them.
        call: calls the extension.
        place: the line of the script that has registered it, to which warnings point.
        is_due: True while the snapshots of an iteration are taken, if this is one of them and has not been called yet.
        defaults: an `Extension`, whose attributes stand in for those that a user's extension lacks.
    """

    defaults: ClassVar[Any]

    def __init__(
        self,
        extension: Callable[[Trainer], Any],
        name: str | None,
        trigger: TriggerLike,
        priority: int | None,
        invoke_before_training: bool | None,
    ) -> None:
        own_names = (getattr(extension, attribute, None) for attribute in ("default_name", "__name__"))
        self.name = self.base_name = str(first_given(name, *own_names, type(extension).__name__))
        if isinstance(extension, type):
            raise TypeError(
                f"an extension is an object, got the class {extension.__name__}: write {extension.__name__}(...)"
            )
        if not callable(extension):
            hint = next((hint for method, hint in EXTENSIONS.items() if hasattr(extension, method)), None)
            hint = CALLED if extension is None else hint
            rule = f"an extension is a callable of one argument, the trainer; got {type(extension).__name__}"
            raise TypeError(rule if hint is None else f"{rule}: {hint}")
        if isinstance(extension, Trigger):
            raise TypeError(
                f"a trigger is not an extension, and {type(extension).__name__} is a trigger: give it as the stop trigger, "
                "Trainer(updater, trigger), or with an extension, extend(extension, trigger=trigger)"
            )
        if error := find_call_error(extension, None):
            raise TypeError(f"an extension is called with one argument, the trainer, and {self.name!r} cannot be: {error}")
        if callable(on_error := getattr(extension, "on_error", None)):
            check_on_error(on_error, f"of extension {self.name!r}")
        check_priority(priority)
        self.extension: Any = extension
        self.call: Callable[[Trainer], Any] = _bound(extension)
        given, key = get_trigger(first_given(trigger, self.optional("trigger"))), self.optional("ranked_key")
        self.trigger = RankingTrigger(key, given) if isinstance(key, str) else given
        # By type: a trigger around another may pass the attributes of that one on.
        always = isinstance(self.trigger, IntervalTrigger) and self.trigger.is_every_iteration
        self.fires: Callable[[Trainer], bool] | None = None if always else _bound(self.trigger)
        self.priority: int = plain(first_given(priority, self.optional("priority")))
        self.invoke_before_training: bool = first_given(invoke_before_training, self.optional("invoke_before_training"))
        self.is_snapshot: bool = self.optional("is_snapshot")
        self.place = user_place()
        self.is_due = False
        # Of the extension and of its trigger, unless it is inherited, or something else of the user's.
        own_trigger = getattr(type(self.trigger), "identity", None) is not Trigger.identity
        named = self._defined("identity"), getattr(self.trigger, "identity", None) if own_trigger else None
        self._identities = [call if callable(call) and not find_call_error(call, None) else None for call in named]
        self.observe = self._defined("observe")
        self.observe_start = self._defined("observe_start")
        self.before_snapshot = self._defined("before_snapshot")

    def optional(self, name: str) -> Any:
        """Return an attribute or a method of the extension, or that of `Extension`, because a user's need not have it."""
        value = getattr(self.extension, name, None)
        is_other = value is None or (callable(getattr(type(self.defaults), name)) and not callable(value))
        return getattr(self.defaults, name) if is_other else value

    def identify(self, trainer: Trainer) -> Identity:
        """Return what the extension is recognized by in another run."""
        identity, trigger_identity = self._identities
        given = identity(trainer) if identity else self.optional("writes")
        trigger_given = trigger_identity(trainer) if trigger_identity else ()
        texts, trigger_texts = (
            tuple(map(str, each)) if isinstance(each, (tuple, list)) else () for each in (given, trigger_given)
        )
        kind, trigger = (self.base_name, type(self.extension).__name__), describe(self.trigger, as_setting=True)
        return Identity(self.name, kind, texts, type(self.trigger).__name__, trigger_texts, trigger)

    def on_error(self, trainer: Trainer, exception: BaseException) -> None:
        """Call the extension's ``on_error``, if it has one, with the traceback if it demands three arguments."""
        on_error = self.optional("on_error")
        arguments = (trainer, exception, exception.__traceback__)
        on_error(*arguments[: 3 if find_call_error(on_error, trainer, exception) else 2])

    def _defined(self, name: str) -> Callable[[Trainer], Any] | None:
        """Return an optional method, unless it is the one of `Extension`, which does nothing."""
        is_inherited = getattr(type(self.extension), name, None) is getattr(type(self.defaults), name)
        return None if is_inherited else getattr(self.extension, name, None)


def _bound(function: Any) -> Any:
    # hot path: "an idle extension more": Python calls a bound method in half the time of an object with __call__
    return function if inspect.isroutine(function) else function.__call__


def check_priority(priority: Any) -> None:
    """Refuse what is no number."""
    if priority is not None and not is_number(priority):
        raise TypeError(f"a priority is a number, such as PRIORITY_WRITER (300); got {priority!r}")


def check_on_error(on_error: Callable[..., None], where: str) -> None:
    """Refuse a function that cannot be called with the trainer and the error, or with the traceback too."""
    if (error := find_call_error(on_error, None, None)) and find_call_error(on_error, None, None, None):
        rule = "on_error is called with the trainer and the exception, or with the traceback as a third argument"
        raise TypeError(f"{rule}, and that {where} cannot be: {error}; write on_error(trainer, exception)")


def first_given(*values: Any) -> Any:
    """Return the first value that is not ``None``."""
    return next(value for value in values if value is not None)


class Observer:
    """Looks on while a trainer runs; see `Trainer.watch`.

    Each method stands around a call of the trainer's, and here makes that call and nothing else. A subclass can look
    before and after it, see it fail, or leave it out. An observer that was added later stands around the earlier ones.

    Example::

        class Counter(Observer):
            count = 0

            def around_update(self, trainer, update):
                update()
                self.count += 1

    Attributes:
        is_replay: True if the run repeats iterations of an earlier one, so that no results are sent to services.
        commands: those that the earlier run has carried out, as its record has them.
    """

    is_replay = False
    commands: Sequence[dict[str, Any]] = ()

    def ends(self, trainer: Trainer, ends: Callable[[], bool]) -> bool:
        """Return True to end the run before the next iteration; ``ends()`` asks the signals and the stop trigger."""
        return ends()

    def around_update(self, trainer: Trainer, update: Callable[[], None]) -> None:
        """Run one update, ``update()``."""
        update()

    def around_observe(self, trainer: Trainer, entry: Entry, call: Callable[[], None]) -> None:
        """Let an extension observe the iteration, ``call()``."""
        call()

    def around_call(self, trainer: Trainer, entry: Entry, call: Callable[[], None]) -> None:
        """Call an extension in the loop, ``call()``; a snapshot is called at the end of a run, too."""
        call()


def surround(observers: Iterable[Observer], method: str, *arguments: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call with the methods of this name around it, of all observers that define one."""
    for observer in observers:
        if getattr(type(observer), method) is not getattr(Observer, method):
            call = partial(getattr(observer, method), *arguments, call)
    return call


class LoadedState:
    """The saved run that was loaded into a trainer, kept until the run starts, since extensions may be registered later."""

    def __init__(self, carried: Carried) -> None:
        self._carried = carried
        self.exists = False  # True once anything was loaded, so that the run continues an earlier one
        self.gives_way = False  # True if it came from another library: snapshots of the run itself are newer
        self.generators: Any = None  # the states of those of all ranks, put back immediately before the first update
        self.directory: Path | None = None  # with the files beside the snapshot that was loaded, unless it came from memory
        self.place: str | None = None  # of the run that has saved it
        self.changes: dict[str, list[Any]] = {}  # by name, the old and the new value of settings that the script changes
        self.unprinted: list[ChangedSetting] = []  # changes that are not printed yet
        self._source: Deserializer | None = None
        self._saved: dict[str, Identity] = {}  # the extensions of the saved run, by name
        self._names: dict[str, str] = {}  # by the name of an extension here, that of the one in the saved run it continues

    def begin(self, source: Deserializer, identities: Mapping[str, Any], generators: Any, trainer: Trainer) -> None:
        """Take over a saved run, which had these extensions, and restore those that are registered."""
        self.exists = True
        self.gives_way = source.gives_way
        self.generators = generators
        self.directory, self.place = source.directory, source.place
        self._source, self._names = source, {}
        self._saved = {name: Identity(name, *rest) for name, rest in identities.items()}
        self.restore(trainer)

    def restore(self, trainer: Trainer) -> list[Identity]:
        """Load the state of extensions with a certain match in the saved run, and of their triggers of the same class.

        Return what those are recognized by that have no match.
        """
        source = self._source
        if source is None:
            return []
        names, here = dict(self._names), {entry.name: entry.identify(trainer) for entry in trainer.entries}
        for ours, theirs in _pairs(list(here.values()), list(self._saved.values()), names, self._has_state):
            if ours.name not in names and theirs.name not in names.values():
                names[ours.name] = theirs.name
        for entry in trainer.entries:
            if entry.name in names and entry.name not in self._names:
                now, saved = here[entry.name], self._saved[names[entry.name]]
                with printing_changes(self.unprinted, self.changes):
                    visit_if_stateful(source["extensions"], saved.name, entry.extension)
                    if saved.trigger_class == now.trigger_class:
                        visit_if_stateful(source["extension_triggers"], saved.name, entry.trigger)
                    for key in ("extensions", "extension_triggers") if self._carried else ():
                        self._carried.load(source[key][saved.name], f"{key}/{entry.name}")
                    if saved.trigger != now.trigger:
                        announce_change(f"trigger of extension {entry.name!r}", saved.trigger, now.trigger)
        self._names = names
        return [identity for name, identity in here.items() if name not in names]

    def _has_state(self, saved: Identity) -> bool:
        """Return whether the state of an extension of the saved run matters; an interval trigger does without its own."""
        keys = ["extensions"] if saved.trigger_class == IntervalTrigger.__name__ else ["extensions", "extension_triggers"]
        assert self._source is not None
        return any(next(self._source[key][saved.name].paths(), None) is not None for key in keys)

    def conclude(self, trainer: Trainer) -> None:
        """Restore all that can be, and warn of the extensions that differ; called when a run starts."""
        if self._source is None:
            return
        here = self.restore(trainer)
        saved = [identity for name, identity in self._saved.items() if name not in self._names.values()]
        doubtful = {identity.kind for identity in here} & {identity.kind for identity in saved if self._has_state(identity)}
        if doubtful:
            unmatched = [
                ", ".join(f"{row.name!r} ({', '.join([*row.texts, row.trigger])})" for row in side if row.kind in doubtful)
                for side in (here, saved)
            ]
            warn(
                "extensions start without their saved state, because they cannot be matched with certainty: here "
                f"{unmatched[0]}, in the saved run {unmatched[1]}. Register them as in the saved run to restore all; from "
                "now on, a different extend(..., name=) for each avoids this",
            )
        only_there = [identity.name for identity in saved if identity.kind not in doubtful]
        only_here = [identity.name for identity in here if identity.kind not in doubtful]
        if (only_there or only_here) and not self.gives_way:
            warn(
                f"this run has different extensions from the saved run: only there {only_there}, only here {only_here}. "
                "The state of those only there is dropped; those only here start from now",
            )
        if isinstance(self._source, DictionaryDeserializer) and (origin := self._source.origin) is not None:
            origin.__exit__(None, None, None)  # each rank waits until none needs it any more to read for the others
        self._source, self._saved, self._names = None, {}, {}


def _pairs(
    here: list[Identity], there: list[Identity], names: dict[str, str], has_state: Callable[[Identity], bool]
) -> Iterator[tuple[Identity, Identity]]:
    """Yield extensions with those of the saved run that they continue, the most certain first; ``names`` grows meanwhile."""
    # Two extensions match if each is the only one of its run with a key. The keys, from the most to the least certain: all
    # but the number in the name; what identifies the extension; shorter and shorter beginnings of that; name and class.
    longest = max((len(identity.texts) for identity in there), default=0)
    keys: list[Callable[[Identity], Any]] = [
        lambda identity: identity[1:],
        lambda identity: (identity.kind, identity.texts, identity.trigger_texts),
        *(lambda identity, n=n: (identity.kind, identity.texts[:n]) for n in range(longest, -1, -1)),
    ]
    for key in keys:
        counts, saved_counts = Counter(map(key, here)), Counter(map(key, there))
        saved = {key(identity): identity for identity in there}
        for identity in here:
            if counts[key(identity)] == saved_counts[key(identity)] == 1:
                yield identity, saved[key(identity)]
    # Twins, which nothing tells apart, match in their order, if they are as many as before.
    here, there = (sorted(rows, key=lambda row: (len(row.name), row.name)) for rows in (here, there))  # "a_2", then "a_10"
    left = [identity for identity in there if identity.name not in names.values()]
    for kind in dict.fromkeys(identity.kind for identity in left):
        saved_twins = [identity for identity in left if identity.kind == kind]
        twins = [identity for identity in here if identity.kind == kind and identity.name not in names]
        texts = {(identity.texts, identity.trigger_texts) for identity in [*twins, *saved_twins]}
        if len(twins) == len(saved_twins) and len(texts) == len({identity[1:] for identity in saved_twins}) == 1:
            yield from zip(twins, saved_twins, strict=True)
    # Equal names match where no state could go to the wrong extension; or, of another kind, if a number made the name in one
    # of the runs and the script gives it in the other.
    with_state = {identity.kind for identity in left if identity.name not in names.values() and has_state(identity)}
    for ours, theirs in itertools.product(here, there):
        is_same = (
            ours.kind[1] == theirs.kind[1] and ours.texts == theirs.texts and ours.trigger_texts == theirs.trigger_texts
        )
        if ours.name == theirs.name and (is_same if ours.kind != theirs.kind else ours.kind not in with_state):
            yield ours, theirs
