"""The snapshots of one file name: what they are called, which of those there belong to it, which are kept."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any

from chainring.serializers.manifest import Manifest
from chainring.serializers.store import Store
from chainring.training._directory import pattern_of

if TYPE_CHECKING:
    from chainring.serializers.saving import Encoded
    from chainring.training.trainer import Trainer

KEY = "series"
"""Under this key a manifest says to which series a snapshot belongs."""
OUT_OF_TURN = "out of turn"
"""Under this key it says that it was taken because the run ended."""


class Series:
    """A name that holds ``{.updater.iteration}`` is a snapshot's own; any other is a link to ``<name>_iter_<iteration>``.

    Args:
        filename: a format string of the trainer, or a function of it.
        n_retains: how many to keep, -1 for all, or for one where the name is fixed.

    Attributes:
        label: by which manifests name the series; that of a function is given when a run starts.
        is_fixed: whether every snapshot has the same name.

    Raises:
        TypeError: the name is neither a string nor a function.
        ValueError: the name is no format string or leads elsewhere, or ``n_retains`` is neither -1 nor at least 1.
    """

    def __init__(self, filename: Any, n_retains: int = -1) -> None:
        fields = [] if callable(filename) else fields_of(filename)
        if isinstance(n_retains, bool) or not isinstance(n_retains, int) or (n_retains != -1 and n_retains < 1):
            raise ValueError(f"n_retains is how many snapshots to keep, at least 1, or -1 for all; got {n_retains!r}")
        self.filename = filename
        self.label: str | None = None if callable(filename) else filename
        self.is_fixed = not fields and not callable(filename)
        self._has_links = not any(field.endswith(".iteration") for field in fields)
        self._n_retains = 1 if self.is_fixed and n_retains == -1 else n_retains

    @property
    def templates(self) -> Sequence[str]:
        """The names of all that it writes, with fields; of a function none is known, and the manifests tell."""
        if callable(self.filename):
            return ()
        return [self.filename, f"{self.filename}_iter_{{.iteration}}"] if self._has_links else [self.filename]

    def name(self, trainer: Trainer) -> str:
        """What a snapshot is called that is taken now."""
        return str(self.filename(trainer) if callable(self.filename) else self.filename.format(trainer))

    def own(self, store: Store) -> list[str]:
        """The snapshots that may be continued from: first those that cannot be read, then the newest, and so on."""
        return [name for name, _ in self._listing(store)]

    def _listing(self, store: Store, without: str | None = None) -> list[tuple[str, Manifest | None]]:
        """Its snapshots in that order but the one ``without``, each with its manifest if that can be read."""
        patterns = [pattern_of(template) for template in self.templates]
        found = []
        for name, manifest in store.listing(without):
            if manifest is None:
                is_own = any(pattern.fullmatch(name) for pattern in patterns)
            else:
                is_own = manifest.about.get(KEY) == self.label and "error" not in manifest.about
            if is_own:
                found.append((name, manifest))
        return found

    def real(self, name: str, iteration: int) -> str:
        """The directory of the snapshot of that name."""
        return f"{name}_iter_{iteration}" if self._has_links else name

    def publish(
        self, store: Store, encoded: Encoded, name: str, iteration: int, in_turn: bool = True, comm: Any = None
    ) -> None:
        """Writes a snapshot, links it, and then removes those that are not to be kept.

        One that is taken because the run ends, and not because it is the best, does not take the fixed name.
        """
        real = self.real(name, iteration)
        takes_name = in_turn or not self.is_fixed
        about = {KEY: self.label} if takes_name else {KEY: self.label, OUT_OF_TURN: True}
        encoded.commit(store, real, iteration, about, comm)
        if not takes_name:
            return
        replaced = None
        if real != name:
            replaced = store.linked(name)
            store.link(name, real)
        self._retain(store, real, None if self.is_fixed else replaced)

    def mend(self, store: Store) -> None:
        """Leads a fixed name to its newest snapshot, where a kill came between the two, or the link went with later ones."""
        if not self.is_fixed:
            return
        newest = next((name for name, is_named in self._readable(store) if is_named), None)
        if newest is not None and store.linked(self.filename) != newest:
            store.link(self.filename, newest)

    def _retain(self, store: Store, newest: str, replaced: str | None) -> None:
        """Removes what is older than the ``n_retains`` newest, and what a link has left; never the one just committed."""
        own = self._readable(store, without=newest)
        named = [name for name, is_named in own if is_named]
        old = named[self._n_retains - 1 :] if self._n_retains > 0 else []
        for name, is_named in own:
            if name in old or name == replaced or not is_named:
                link = name.rpartition("_iter_")[0]
                if self._has_links and store.linked(link) == name:
                    os.unlink(store.root / link)
                store.remove(name)

    def _readable(self, store: Store, without: str | None = None) -> list[tuple[str, bool]]:
        """Its snapshots but the one ``without``, the newest first, and whether each has had the fixed name in its turn."""
        listed = self._listing(store, without)
        return [(name, OUT_OF_TURN not in manifest.about) for name, manifest in listed if manifest is not None]


def fields_of(filename: Any) -> list[str]:
    """The fields of a format string that names a file in ``out``.

    Raises:
        TypeError: it is no string.
        ValueError: it is no format string, or leads elsewhere.
    """
    rule = 'filename is a name in out, such as "snapshot_iter_{.updater.iteration}" or "best", or a function of the trainer'
    if not isinstance(filename, str):
        raise TypeError(f"{rule}; got {filename!r}")
    try:
        parts = list(Formatter().parse(filename))
    except ValueError as error:
        raise ValueError(f"{rule}; got {filename!r}: {error}") from None
    if not filename or filename.startswith(".") or any("/" in literal for literal, *_ in parts):
        raise ValueError(f"{rule}; without a slash or a dot at its beginning; got {filename!r}")
    fields = [field for _, field, _, _ in parts if field is not None]
    heads = [re.split(r"[.\[]", field)[0] for field in fields]
    if not set(heads) <= {"", "0"} or (len(heads) > 1 and "" in heads):
        raise ValueError(
            f"{rule}; several fields of it are written {{0.updater.epoch}}_{{0.updater.iteration}}; got {filename!r}"
        )
    return fields
