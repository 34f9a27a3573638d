"""The loop: nothing else."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from chainring._distributed.communicator import as_communicator
from chainring._messages import info
from chainring.reporting.reporter import Reporter
from chainring.serializers.base import AbstractSerializer, Deserializer, Stateful
from chainring.training import _plan, _rehearsal, _trainer_state
from chainring.training._run import Run
from chainring.training._run_directory import check_out
from chainring.training._signals import Interruption
from chainring.training.extension import Entry, RollBack, name_of
from chainring.training.triggers import get_stop_trigger

if TYPE_CHECKING:
    from chainring.training.updaters.base import Updater


class Trainer(Stateful):
    """Runs an updater until the stop trigger says so, and extensions whenever theirs do.

    Args:
        updater: does one update of the parameters when asked.
        stop_trigger: when training ends. A pair means *reached*: ``(20, "epoch")``, ``(1000, "iteration")``,
            ``(3600, "second")``, those before a resume included. ``None`` trains until the data end.
        out: the directory of what the run writes; it is made when the run starts.
        extensions: extensions to begin with, as by `extend`.
        config: the settings of the run, such as ``vars(args)``, to be recorded beside its results.

    Attributes:
        observation: what was reported in this iteration, by the updater and by the extensions so far.
        extension_name: while an extension is initialised or called, the name under which it is registered.
        is_rehearsing: whether `rehearse` is under way.
        is_final_snapshot: True while snapshots are taken because the run ends, whatever their triggers say.
        interruption: the signal that asks the run to end, if one came.

    Raises:
        TypeError: the updater has no ``update``, or the stop trigger is of another form.
        ValueError: the stop trigger's unit or length is none.
        OSError: ``out`` can be no directory that is written to.
    """

    def __init__(
        self,
        updater: Updater,
        stop_trigger: Any = None,
        out: str = "result",
        extensions: Iterable[Any] = (),
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(getattr(updater, "update", None)):
            raise TypeError(f"a trainer takes an updater, such as StandardUpdater, first; got {type(updater).__name__}")
        if not isinstance(config, (Mapping, type(None))):
            raise TypeError(f"config is a mapping of settings, such as vars(args); got {type(config).__name__}")
        check_out(out)
        self.updater = updater
        self.stop_trigger = get_stop_trigger(stop_trigger)
        self.out = out
        self.config = dict(config or {})
        self.reporter = Reporter()
        self.observation: dict[str, Any] = {}
        self.extension_name: str | None = None
        self.is_rehearsing = False
        self.is_final_snapshot = False
        self.interruption = Interruption()
        self._entries: dict[str, Entry] = {}
        self._run = Run()
        for extension in extensions:
            self.extend(extension)
        if hasattr(updater, "connect_trainer"):
            updater.connect_trainer(self)

    @property
    def comm(self) -> Any:
        """The communicator of the ranks that train together, which is the updater's."""
        return as_communicator(self.updater.comm)

    @property
    def elapsed_time(self) -> float:
        """Seconds of training, those of the runs before a resume included; 0.0 before the first run."""
        return self._run.elapsed_time

    @property
    def is_before_training(self) -> bool:
        """Whether no update has been made yet, in a run that does not continue an earlier one."""
        return not self.is_resumed and self.updater.iteration == 0

    @property
    def is_resumed(self) -> bool:
        """Whether this run continues an earlier one."""
        return self._run.restored.happened

    @property
    def entries(self) -> list[Entry]:
        """The registered extensions in the order in which they run, each with its name, trigger and priority."""
        return sorted(self._entries.values(), key=lambda entry: -entry.priority)

    @property
    def snapshots(self) -> list[Any]:
        """The extensions that save the state of the run."""
        return [entry.extension for entry in self._entries.values() if entry.is_snapshot]

    def extend(
        self,
        extension: Callable[[Trainer], Any],
        name: str | None = None,
        trigger: Any = None,
        priority: int | None = None,
        invoke_before_training: bool | None = None,
    ) -> None:
        """Registers an extension.

        Args:
            extension: any callable of one argument, the trainer.
            name: by default the extension's ``default_name``, ``__name__`` or class name. The second of a name becomes
                ``name_1``, the third ``name_2``.
            trigger: when it is called; by default the extension's own, or every iteration.
            priority: extensions of higher priority run first, of equal priority in the order of registration; by default
                the extension's own, or 100.
            invoke_before_training: whether it is also called once just before the loop; by default the extension's own.

        Raises:
            TypeError: the extension is not a callable of one argument, or the trigger of another form.
            ValueError: the name is ``"training"``, or the trigger's unit or period is none.
            RuntimeError: the run has begun.
        """
        if self._run.has_begun:
            raise RuntimeError("extensions are registered before run(), which has begun; call extend before it")
        _check_extension(extension)
        base = name_of(extension, name)
        if base == "training":
            raise ValueError('the name "training" is reserved for the training itself; give name= to extend')
        unique, number = base, 0
        while unique in self._entries:
            number += 1
            unique = f"{base}_{number}"
        entry = Entry(extension, unique, trigger, priority, invoke_before_training)
        self._entries[unique] = entry
        self._run.restored.claim(entry)

    def get_extension(self, name: str) -> Any:
        """The extension registered as ``name``.

        Raises:
            KeyError: there is none.
        """
        if name not in self._entries:
            raise KeyError(f"no extension {name!r}; registered: {list(self._entries)}")
        return self._entries[name].extension

    def initialize_trigger(self, trigger: Any) -> None:
        """Initialize a trigger that another one asks: once a run, however many extensions and triggers share it."""
        self._run.initialize_trigger(trigger, self)

    def run(self) -> None:
        """Trains until the stop trigger fires or the data end.

        Each iteration is a fresh observation, one update, and every extension whose trigger fires, highest priority
        first; snapshots come last, when every trigger has been asked. A trainer runs once.

        SIGTERM and the first SIGINT let the iteration end; then every snapshot is taken and everything is finalized.

        Raises:
            RuntimeError: it has run before.
            Interrupted: a signal has ended it; left alone, the process exits with 143 or 130.
        """
        if self._run.has_begun:
            raise RuntimeError("a trainer runs once; make a new one, and load a snapshot or state_dict to go on")
        entries = [entry for entry in self.entries if not entry.is_snapshot]
        snapshots = [entry for entry in self.entries if entry.is_snapshot]
        with self._run.session(self), self.reporter.scope(self.observation):
            while not self.interruption.asks_to_end() and not self.stop_trigger(self):
                try:
                    if not self._iterate(entries, snapshots):
                        self._warn_of_the_end()
                        break
                except RollBack as reason:
                    self._run.roll_back(self, reason)
            self.interruption.settle()
            self._take_final_snapshots(entries, snapshots)

    def _iterate(self, entries: list[Entry], snapshots: list[Entry]) -> bool:
        """One iteration; false when there was no more data for it."""
        before = self.observation
        self.observation = self.reporter.observation = {}
        try:
            self.updater.update()
        except StopIteration:
            self.observation = before
            return False
        for entry in entries:
            if entry.observe is not None:
                entry.observe(self)
            if entry.asks is None or entry.asks(self):
                self.extension_name = entry.name
                entry.call(self)
                self.extension_name = None
        due = list(filter(self._is_due, snapshots))
        if due:
            self._take_snapshots(due, entries)
        return True

    def _take_snapshots(self, due: list[Entry], entries: list[Entry]) -> None:
        for entry in entries:
            entry.method("before_snapshot")(self)
        for entry in sorted(due, key=_continues):
            self.extension_name = entry.name
            entry.call(self)
            self.extension_name = None

    def _take_final_snapshots(self, entries: list[Entry], snapshots: list[Entry]) -> None:
        """Take all snapshots when a signal ends the run, else those with ``autoload``."""
        self.is_final_snapshot = True
        signalled = self.interruption.received is not None
        due = [entry for entry in snapshots if signalled or getattr(entry.extension, "autoload", False)]
        if due:
            self._take_snapshots(due, entries)
        if signalled:
            saved = "its state is saved" if snapshots else "nothing is saved, because no snapshot extension is registered"
            info(f"{self.interruption.name} ends the run after iteration {self.updater.iteration}: {saved}")

    def _is_due(self, entry: Entry) -> bool:
        """Lets a snapshot observe and asks its trigger: both for all snapshots before the first of them is taken."""
        if entry.observe is not None:
            entry.observe(self)
        return entry.asks is None or entry.asks(self)

    def _warn_of_the_end(self) -> None:
        if self.stop_trigger is not get_stop_trigger(None):
            warnings.warn(
                f"the training iterator ended after {self.updater.iteration} iterations, before the stop trigger "
                f"{self.stop_trigger} fired; an iterator with repeat=True begins a new epoch instead",
                stacklevel=3,
            )

    def rehearse(self) -> None:
        """Tries everything in seconds: two updates and a call of every extension, then all state is put back.

        So the bug in the validation shows now and not after the first epoch. What extensions write goes to a scratch
        directory. The run that follows is bit for bit the run without a rehearsal. An extension is initialized and
        finalized as in a run; what it remembers beside its ``serialize`` cannot be put back.

        Raises:
            RuntimeError: the run has begun, or the data end before two updates.
            ValueError: a lazy module has no parameters yet.
        """
        if self._run.has_begun:
            raise RuntimeError("a rehearsal comes before run(), which has begun; make a new trainer")
        _rehearsal.rehearse(self)

    def explain(self, iterations: int = 100) -> str:
        """The plan of the run as text: which extensions run, in which order, and at which of the next iterations.

        Interval, schedule and once triggers are foretold; of the others it says that they are asked each iteration.
        """
        return _plan.explain(self, iterations, self._run.is_started)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Everything that changes in a run: updater, triggers, extensions, observation, time and random generators.

        Settings are not part of it: a run may be resumed with another stop trigger, batch size or set of extensions.
        """
        if isinstance(serializer, Deserializer) and self._run.is_started:
            raise RuntimeError("state is loaded into a trainer before it runs; make a new trainer and load into that")
        _trainer_state.serialize(self, self._run, serializer, list(self._entries.values()))


def _continues(entry: Entry) -> tuple[bool, bool]:
    """Puts snapshots last from which a run continues: it does not take the others of that iteration again."""
    fixed = getattr(entry.extension, "has_fixed_name", False)
    return bool(getattr(entry.extension, "autoload", False)), not fixed


def _check_extension(extension: Any) -> None:
    if isinstance(extension, type):
        raise TypeError(f"an extension is an object, got the class {extension.__name__}: write {extension.__name__}(...)")
    if not callable(extension):
        raise TypeError(f"an extension is a callable of one argument, the trainer; got {type(extension).__name__}")
    try:
        inspect.signature(extension).bind(None)
    except ValueError:
        return  # some callables of C have no signature
    except TypeError as error:
        raise TypeError(
            f"an extension is called with one argument, the trainer, and {name_of(extension, None)!r} cannot be: {error}"
        ) from None
