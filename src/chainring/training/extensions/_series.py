"""The snapshots of one file name: what they are called, which of those there belong to it, which are kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any

from chainring.serializers.store import Store
from chainring.training._directory import pattern_of

if TYPE_CHECKING:
    from chainring.serializers.saving import Encoded
    from chainring.training.trainer import Trainer

KEY = "series"
"""Under this key a manifest says to which series a snapshot belongs."""


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
        patterns = [pattern_of(template) for template in self.templates]
        found = []
        for name, manifest in store.listing():
            if manifest is None:
                is_own = any(pattern.fullmatch(name) for pattern in patterns)
            else:
                is_own = manifest.about.get(KEY) == self.label and "error" not in manifest.about
            if is_own:
                found.append(name)
        return found

    def real(self, name: str, iteration: int) -> str:
        """The directory of the snapshot of that name."""
        return f"{name}_iter_{iteration}" if self._has_links else name

    def publish(self, store: Store, encoded: Encoded, name: str, iteration: int) -> None:
        """Writes a snapshot, links it, and then removes those that are not to be kept."""
        real = self.real(name, iteration)
        encoded.commit(store, real, iteration, {KEY: self.label})
        replaced = None
        if real != name:
            replaced = store.linked(name)
            store.link(name, real)
        self._retain(store, real, None if self.is_fixed else replaced)

    def _retain(self, store: Store, newest: str, replaced: str | None) -> None:
        """Removes what is older than the ``n_retains`` newest, and what a link has left; never the one just committed."""
        readable = {name for name, manifest in store.listing() if manifest is not None}
        own = [name for name in self.own(store) if name in readable and name != newest]
        old = own[self._n_retains - 1 :] if self._n_retains > 0 else []
        for name in own:
            if name in old or name == replaced:
                link = name.rpartition("_iter_")[0]
                if self._has_links and store.linked(link) == name:
                    os.unlink(store.root / link)
                store.remove(name)


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
    return [field for _, field, _, _ in parts if field is not None]
