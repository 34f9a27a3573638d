"""The saved run that a trainer continues, and which of its extensions is which here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chainring import _random
from chainring._distributed.communicator import Communicator
from chainring._messages import warn
from chainring.serializers.protocol import (
    AbstractSerializer,
    ChangedSetting,
    Deserializer,
    announce_change,
    conclude_reading,
    recording_changes,
    visit_if_stateful,
)
from chainring.training.triggers import IntervalTrigger
from chainring.training.triggers.base import describe_setting, serialize_extension_trigger

if TYPE_CHECKING:
    from chainring.training.extension import Entry
    from chainring.training.trainer import Trainer


class LoadedState:
    """The saved run that was loaded into a trainer, as far as it waits: for extensions not registered yet, for the start."""

    def __init__(self) -> None:
        self.exists = False  # True once anything was loaded, so that the run continues an earlier one
        self.gives_way = False  # True if it came from another library: snapshots of the run itself are newer
        self.generators: Any = None  # the state of the random generators, put back immediately before the first update
        self.directory: Path | None = None  # with the files beside the snapshot that was loaded, unless it came from memory
        self.place: str | None = None  # of the run that has saved it
        self.changes: dict[str, list[Any]] = {}  # by name, the old and the new value of settings that the script changes
        self.untold: list[ChangedSetting] = []  # changes that are not printed yet
        self._source: Deserializer | None = None
        self._saved: list[Identity] = []  # the extensions of the saved run
        self._names: dict[str, str] = {}  # by the name of an extension here, that of the one in the saved run it continues

    def begin(self, source: Deserializer, saved: list[Identity], generators: Any, trainer: Trainer) -> None:
        """Take over a saved run, which had these extensions, and restore those that are registered."""
        self.exists = True
        self.gives_way = source.gives_way
        self.generators = generators
        self.directory, self.place = source.directory, source.place
        self._source, self._saved, self._names = source, saved, {}
        self.restore(trainer)

    def restore(self, trainer: Trainer, *, is_complete: bool = True) -> None:
        """Load the state of extensions and triggers where it is certain whose it is, each unless its class has changed.

        With ``is_complete=False`` more of them may be registered, and only what is the same in everything is certain.
        """
        source = self._source
        if source is None:
            return
        here = [identify(entry, trainer) for entry in trainer.entries]
        names = _match(here, self._saved, self._names, self._has_state if is_complete else None)
        saved = {identity.name: identity for identity in self._saved}
        for entry in trainer.entries:
            if entry.name in names and entry.name not in self._names:
                earlier = saved[names[entry.name]]
                with recording_changes(self.changes):
                    visit_if_stateful(source["extensions"], earlier.name, entry.extension)
                    is_same = earlier.trigger_class == type(entry.trigger).__name__
                    serialize_extension_trigger(
                        source, entry.name, entry.trigger, saved_name=earlier.name, is_same_class=is_same
                    )
        self._names = names

    def _has_state(self, saved: Identity) -> bool:
        """Return whether the state of an extension of the saved run matters; an interval trigger does without its own."""
        keys = ["extensions"] if saved.trigger_class == IntervalTrigger.__name__ else ["extensions", "extension_triggers"]
        assert self._source is not None
        return any(next(self._source[key][saved.name].paths(), None) is not None for key in keys)

    def conclude(self, trainer: Trainer) -> None:
        """Restore all that can be, and warn of the extensions that differ; called when a run starts."""
        if self._source is None:
            return
        self.restore(trainer)
        there = [identity for identity in self._saved if identity.name not in self._names.values()]
        here = [identify(entry, trainer) for entry in trainer.entries if entry.name not in self._names]
        doubtful = {identity.kind for identity in here} & {identity.kind for identity in there if self._has_state(identity)}
        if doubtful:
            unmatched = [_describe([one for one in side if one.kind in doubtful]) for side in (here, there)]
            warn(
                "extensions start without their saved state, because they cannot be matched with certainty: here "
                f"{unmatched[0]}, in the saved run {unmatched[1]}. Register them as in the saved run to restore all; from "
                "now on, a different extend(..., name=) for each avoids this",
            )
        only_there = [identity.name for identity in there if identity.kind not in doubtful]
        only_here = [identity.name for identity in here if identity.kind not in doubtful]
        if (only_there or only_here) and not self.gives_way:
            warn(
                f"this run has different extensions from the saved run: only there {only_there}, only here {only_here}. "
                "The state of those only there is dropped; those only here start from now",
            )
        conclude_reading(self._source)
        self._source, self._saved, self._names = None, [], {}


class Identity(NamedTuple):
    """What an extension of one run is recognized by in another."""

    name: str
    base_name: str  # without the number of the second of a name
    extension_class: str
    trigger_class: str
    texts: tuple[str, ...]  # that identify the extension, the most significant first
    trigger_texts: tuple[str, ...]
    trigger: str

    @property
    def kind(self) -> tuple[str, str]:
        return self.base_name, self.extension_class

    @property
    def identifiers(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.texts, self.trigger_texts


def identify(entry: Entry, trainer: Trainer) -> Identity:
    """Return what an extension is recognized by in another run."""
    classes = type(entry.extension).__name__, type(entry.trigger).__name__
    return Identity(entry.name, entry.base_name, *classes, *entry.identify(trainer), describe_setting(entry.trigger))


def visit_identities(serializer: AbstractSerializer, identities: list[Identity]) -> list[Identity]:
    """Save what each extension is recognized by; when loading, return that of each extension of the saved run."""
    classes = serializer("extension_types", {row.name: [row.extension_class, row.trigger_class] for row in identities})
    others = {row.name: [row.base_name, *map(list, row.identifiers), row.trigger] for row in identities}
    others = serializer("extension_identities", others)
    return [
        Identity(name, base_name, extension_class, trigger_class, tuple(texts), tuple(trigger_texts), trigger)
        for name, (extension_class, trigger_class) in classes.items()
        for base_name, texts, trigger_texts, trigger in [others[name]]
    ]


def visit_generators(serializer: AbstractSerializer, comm: Communicator, loaded: Any) -> Any:
    """Save the random generators of all ranks, or return those of this rank; ``None`` if fewer ranks have saved.

    They are put back immediately before the first update, because a script may draw between load and run. Until then, the
    ``loaded`` ones are saved.
    """
    if isinstance(serializer, Deserializer):
        ranks = {path.partition("/")[0] for path in serializer.paths()}
        if comm.is_main and len(ranks) != comm.size:
            consequence = "examples and their order are the same, and the last bits are not"
            announce_change("number of ranks", len(ranks), comm.size, consequence)
        saved = {rank: serializer(rank, None) for rank in sorted(ranks)}  # all, because ranks read alike
        return saved.get(str(comm.rank))
    generators = loaded or _random.get_rng_state()
    if serializer.comm.size == 1:
        serializer(str(comm.rank), generators)
    else:
        for rank, state in enumerate(serializer.comm.gather_object(generators)):
            serializer(str(rank), state)
    return generators


def _match(
    here: list[Identity], there: list[Identity], known: Mapping[str, str], has_state: Callable[[Identity], bool] | None
) -> dict[str, str]:
    """Return by the name of each extension that of the one in the saved run which it continues, where that is certain.

    Without ``has_state``, more extensions may be registered.
    """
    names, kind = dict(known), attrgetter("kind")

    def pair(ours: Identity, theirs: Identity) -> None:
        if ours.name not in names and theirs.name not in names.values():
            names[ours.name] = theirs.name

    # An extension is known by what it has to itself, the most certain first: all but its number, what identifies it, the
    # beginning of that, its name and class.
    longest = max((len(identity.texts) for identity in there), default=0)
    keys: list[Callable[[Identity], Any]] = [
        lambda identity: identity[1:],
        lambda identity: any(identity.identifiers) and (identity.kind, identity.identifiers),
        *(lambda identity, n=n: identity.texts and (identity.kind, identity.texts[:n]) for n in range(longest, 0, -1)),
        kind,
    ]
    for key in keys if has_state is not None else keys[:1]:
        groups, saved_groups = _group(here, key), _group(there, key)
        for value in filter(None, groups):
            if len(groups[value]) == len(saved_groups.get(value, ())) == 1:
                pair(groups[value][0], saved_groups[value][0])
    if has_state is None:
        return names
    # Twins that nothing tells apart are known by their order, if they are as many as before.
    left = _group((identity for identity in there if identity.name not in names.values()), kind)
    for twins_kind, twins in _group((identity for identity in here if identity.name not in names), kind).items():
        saved_twins = left.get(twins_kind, [])
        identifiers = {identity.identifiers for identity in [*twins, *saved_twins]}
        if len(twins) == len(saved_twins) and len(identifiers) == len({identity[1:] for identity in saved_twins}) == 1:
            for ours, theirs in zip(twins, saved_twins, strict=True):
                pair(ours, theirs)
    # A name decides where nothing is lost, and where it was a number's before and is given by the script now.
    with_state = {identity.kind for identity in there if identity.name not in names.values() and has_state(identity)}
    for ours, theirs in itertools.product(here, there):
        is_same = ours.extension_class == theirs.extension_class and ours.identifiers == theirs.identifiers
        if ours.name == theirs.name and (is_same if ours.kind != theirs.kind else ours.kind not in with_state):
            pair(ours, theirs)
    return names


def _group(identities: Iterable[Identity], key: Callable[[Identity], Any]) -> dict[Any, list[Identity]]:
    groups: dict[Any, list[Identity]] = {}
    for identity in sorted(identities, key=lambda identity: (len(identity.name), identity.name)):  # "log_2" before "log_10"
        groups.setdefault(key(identity), []).append(identity)
    return groups


def _describe(identities: list[Identity]) -> str:
    return ", ".join(f"{identity.name!r} ({', '.join([*identity.texts, identity.trigger])})" for identity in identities)
