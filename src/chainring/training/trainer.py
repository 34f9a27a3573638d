"""The training loop."""

from __future__ import annotations

import contextlib
import difflib
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

from chainring import _hints, _random
from chainring._distributed.communicator import Communicator, as_communicator
from chainring._distributed.progress import reporting_position
from chainring._hints import hinting
from chainring._messages import Place, info, warn
from chainring._progress import raise_unless_end
from chainring.iterators._workers import unguarded
from chainring.iterators.base import check_epoch_period
from chainring.reporting.reporter import Reported, Reporter
from chainring.reporting.summary import is_scalar
from chainring.serializers._models import try_loading
from chainring.serializers._saving import StateCollector
from chainring.serializers._store import Snapshots, open_store
from chainring.serializers._values import encode
from chainring.serializers.protocol import (
    AbstractSerializer,
    Deserializer,
    Serializer,
    Stateful,
    announce_change,
    printing_changes,
    visit_if_stateful,
    visit_setting,
)
from chainring.training import _preview
from chainring.training._entry import Entry, Observer, RollBack, surround
from chainring.training._run import Interruption, Run
from chainring.training._run_directory import resolve_out
from chainring.training.triggers.base import (
    ReachedTrigger,
    TriggerLike,
    count_progress,
    describe,
    get_stop_trigger,
    serialize_inner_trigger,
)
from chainring.training.updaters.base import Updater

_E = TypeVar("_E")
_Step: TypeAlias = tuple[Entry, Callable[[], Any] | None, Callable[["Trainer"], bool] | None, Callable[[], Any]]
"""What an iteration does with an extension: observe, ask the trigger, call; ``None`` where there is nothing to do."""


def _hint_at_second(given: Any) -> str | None:
    """Return where what is given in the place of the stop trigger belongs, if it is data or an extension."""
    if isinstance(given, type(Entry.defaults)):  # an Extension
        return "trainer.extend(extension) adds an extension"
    is_data = hasattr(given, "__iter__") or hasattr(given, "__len__")
    is_trigger = callable(given) or isinstance(given, (tuple, list, str))
    return f"for data to validate on, {_hints.EVALUATOR}" if is_data and not is_trigger else None


class Trainer(Stateful):
    """Runs an updater until the stop trigger fires, and each extension whenever its trigger fires.

    Example::

        trainer = Trainer(StandardUpdater(iterator, optimizer, model), (20, "epoch"), out="result")
        trainer.extend(LogReport())
        trainer.extend(snapshot(autoload=True), trigger=(1, "epoch"))
        trainer.run()

    Args:
        updater: runs one update of the parameters in each iteration.
        stop_trigger: when training ends. A pair is a length to be *reached*: ``(20, "epoch")``, ``(1000, "iteration")``
            or ``(3600, "second")``, counted from the start of training, including the runs before a resume. ``None``
            trains until the data run out.
        out: the directory in which the run writes; it is created when the run starts. ``~`` is the home directory, and a
            relative path is resolved at construction. It can also be an address in an object store, such as
            ``"s3://bucket/run"`` (or ``gs``, ``az``, ``memory``), which requires ``chainring[remote]``.
        extensions: extensions to register, as with `extend`.
        config: the settings of the run, such as ``vars(args)``, which are recorded with its results.
        continue_after_sigusr1: True if SIGUSR1 takes all snapshots at the end of the iteration, and the run continues;
            otherwise it ends the run, as SIGTERM does.

    Attributes:
        url: the address of the run, if it is in an object store.
        reporter: collects the reported values.
        reported: what the updater and the extensions have reported in this iteration so far, and how it is kept.
        extension_name: the name of the extension that is being initialized, called or finalized, ``None`` outside of
            extensions.
        is_rehearsing: True during `rehearse`.
        is_final_snapshot: True while snapshots are taken because the run ends or a signal has come, whether or not their
            triggers fire.
        interruption: the signal that requested the end of the run, if there was one.

    Raises:
        TypeError: the updater has no ``update``; the stop trigger, ``out`` or ``config`` has the wrong type.
        ValueError: the unit of the stop trigger is unknown, or its length is negative.
        OSError: ``out`` is not a writable directory and cannot be made one.
    """

    @hinting(_hints.TRAINER_KEYWORDS)
    def __init__(
        self,
        updater: Updater,
        stop_trigger: TriggerLike = None,
        out: str = "result",
        extensions: Iterable[Callable[[Trainer], Any]] = (),
        *,
        config: Mapping[str, Any] | None = None,
        continue_after_sigusr1: bool = False,
    ) -> None:
        if not callable(getattr(updater, "update", None)):
            raise TypeError(f"a trainer takes an updater, such as StandardUpdater, first; got {type(updater).__name__}")
        if (hint := _hint_at_second(stop_trigger)) is not None:
            rule = 'a trainer takes the stop trigger second, such as (20, "epoch")'
            raise TypeError(f"{rule}; got {type(stop_trigger).__name__}: {hint}")
        if not isinstance(config, (Mapping, type(None))):
            raise TypeError(f"config is a mapping of settings, such as vars(args); got {type(config).__name__}")
        if not isinstance(extensions, Iterable):
            raise TypeError(f"extensions=[...] takes a list, such as extensions.defaults(evaluator); got {extensions!r}")
        if not isinstance(continue_after_sigusr1, bool):
            raise TypeError(f"continue_after_sigusr1 is True or False, got {continue_after_sigusr1!r}")
        self.updater = updater
        self.stop_trigger = get_stop_trigger(stop_trigger)
        self.out = out
        self.config = dict(config or {})
        self.reporter = Reporter()
        self.reported = Reported()
        self.extension_name: str | None = None
        self.is_rehearsing = False
        self.is_final_snapshot = False
        self.interruption = Interruption(continues_after_sigusr1=continue_after_sigusr1)
        self._entries: dict[str, Entry] = {}
        self._observers: list[Observer] = []
        self._run = Run()
        self._run.carried.add_updater(updater)
        self._run.carried.add("stop_trigger", self.stop_trigger, is_visited=True)
        for extension in extensions:
            self.extend(extension)
        if hasattr(updater, "connect_trainer"):
            updater.connect_trainer(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise an `AttributeError`, with a hint if the name is one of another library's trainer."""
            if name in _hints.TRAINER:
                raise AttributeError(f"a Trainer has no attribute {name!r}: {_hints.TRAINER[name]}", name=name, obj=self)
            return object.__getattribute__(self, name)  # again, for the error that a property has raised

    @property
    def observation(self) -> dict[str, Any]:
        """The values that the updater and the extensions have reported in this iteration so far, by key."""
        return self.reported.observation()

    @observation.setter
    def observation(self, values: dict[str, Any]) -> None:
        self.reported = Reported(values)

    @property
    def comm(self) -> Communicator:
        """The updater's communicator, through which the ranks of the run exchange values."""
        comm = self.updater.comm
        return comm if isinstance(comm, Communicator) else as_communicator(comm)

    @property
    def out(self) -> str:
        """The directory in which the run writes.

        For a run in an object store, this is a directory on this machine; its files are uploaded next to the snapshots.
        """
        return self._out

    @out.setter
    def out(self, out: str) -> None:
        self._out, self.url = resolve_out(out)

    @property
    def store(self) -> Snapshots:
        """The snapshots of the run, in ``out`` or in an object store."""
        return self._run.store or open_store(self.url or self.out)

    @property
    def elapsed_time(self) -> float:
        """Seconds of training, including the runs before a resume; 0.0 before the first run."""
        run = self._run
        return run.earlier_time + (0.0 if run.started_at is None else (run.ended_at or time.monotonic()) - run.started_at)

    @property
    def is_before_training(self) -> bool:
        """True until the first update of a run that does not continue an earlier one."""
        return not self.is_resumed and self.updater.iteration == 0

    @property
    def is_resumed(self) -> bool:
        """True if the run continues an earlier one."""
        return self._run.loaded_state.exists

    @property
    def is_replaying(self) -> bool:
        """True if the run repeats iterations of an earlier one, so that no results are sent to services."""
        return any(observer.is_replay for observer in self._observers)

    @property
    def entries(self) -> list[Entry]:
        """The registered extensions in the order in which they run, each with its name, trigger and priority."""
        return sorted(self._entries.values(), key=lambda entry: -entry.priority)

    @property
    def place_of_extension(self) -> Place | None:
        """The line of the script that registered the running extension, for warnings; ``None`` outside of extensions."""
        return None if self.extension_name is None else self._entries[self.extension_name].place

    @hinting(_hints.EXTEND)
    def extend(
        self,
        extension: Callable[[Trainer], Any],
        name: str | None = None,
        trigger: TriggerLike = None,
        priority: int | None = None,
        invoke_before_training: bool | None = None,
    ) -> None:
        """Register an extension. State that was loaded before is given to it when the run starts.

        Args:
            extension: any callable of one argument, the trainer.
            name: by default the extension's ``default_name``, ``__name__`` or class name. A second extension of the same
                name becomes ``name_1``, a third ``name_2``.
            trigger: when it is called; by default the extension's own, or every iteration.
            priority: extensions of higher priority run first, those of equal priority in the order of registration; by
                default the extension's own, or 100.
            invoke_before_training: True to call it also once just before the loop; by default the extension's own.

        Raises:
            TypeError: the extension is not a callable of one argument; the trigger or the priority has the wrong type.
            ValueError: the name is ``"training"``; the unit of the trigger is unknown, or its period is not above 0.
            RuntimeError: the run has begun.
        """
        if self._run.has_begun:
            raise RuntimeError("extensions must be registered before run(), which has started; call extend before it")
        entry = Entry(extension, name, trigger, priority, invoke_before_training)
        if entry.name == "training":
            raise ValueError('the name "training" is reserved for the training itself; give name= to extend')
        suffix = 0
        while entry.name in self._entries:
            suffix += 1
            entry.name = f"{entry.base_name}_{suffix}"
        self._entries[entry.name] = entry
        for key, function in (("extensions", extension), ("extension_triggers", entry.trigger)):
            self._run.carried.add(f"{key}/{entry.name}", function, is_visited=True)

    @overload
    def get_extension(self, name: type[_E]) -> _E: ...

    @overload
    def get_extension(self, name: str) -> Any: ...

    def get_extension(self, name: str | type[Any]) -> Any:
        """Return the extension registered as ``name``, or the one of a class.

        Example::

            trainer.get_extension(LogReport).log[-1]["main/loss"]
            trainer.get_extension("LogReport_1")  # the second that was registered

        Args:
            name: the name of an extension, or its class. If no extension is of exactly this class, those of its
                subclasses are searched.

        Raises:
            KeyError: there is no extension of that name or class.
            ValueError: several extensions are of that class.
            TypeError: ``name`` is neither a name nor a class.
        """
        if isinstance(name, str):
            if name not in self._entries:
                near = difflib.get_close_matches(name, self._entries, n=1)
                meant = f": did you mean {near[0]!r}?" if near else ";"
                raise KeyError(f"no extension {name!r}{meant} registered: {list(self._entries)}")
            return self._entries[name].extension
        if not isinstance(name, type):
            raise TypeError(f"an extension is known by its name or its class, such as LogReport; got {name!r}")
        entries = self._entries.values()
        matching = [entry for entry in entries if type(entry.extension) is name]
        matching = matching or [entry for entry in entries if isinstance(entry.extension, name)]
        if not matching:
            registered = ", ".join(f"{entry.name} ({type(entry.extension).__name__})" for entry in entries)
            raise KeyError(f"no extension of class {name.__name__}; registered: {registered or 'none'}")
        if any(entry.extension is not matching[0].extension for entry in matching):
            raise ValueError(
                f"get_extension({name.__name__}) returns the only extension of that class, and there are {len(matching)}: "
                f"{', '.join(entry.name for entry in matching)}; give the name of one of them"
            )
        return matching[0].extension

    def __repr__(self) -> str:
        names, until = ", ".join(entry.name for entry in self.entries) or "no extensions", describe(self.stop_trigger)
        return f"<Trainer after iteration {self.updater.iteration} of {until}, out={self.out!r}, with {names}>"

    def run(self) -> None:
        """Train until the stop trigger fires or the data run out.

        Each iteration starts an empty observation, runs one update, and calls every extension whose trigger fires,
        highest priority first. Snapshots are taken last, after all triggers have been checked; `Extension` shows the loop.
        A trainer can run only once.

        After SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or the first SIGINT, the current iteration is completed; then all snapshots
        are taken and everything is finalized. A signal that is ignored, as SIGHUP is under ``nohup``, stays ignored. A
        handler that the script has set is called too.

        Raises:
            RuntimeError: it has run before; or it is called in a process that imports the script, which lacks its
                ``if __name__ == "__main__":``.
            Interrupted: a signal has ended the run; if it is not caught, the process exits with 128 + its number.
        """
        run, failure = self._run, None
        if run.has_begun:
            raise RuntimeError("a trainer can run only once; make a new one, and load a snapshot or state_dict to continue")
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # what multiprocessing itself asks
            raise unguarded()
        with contextlib.ExitStack() as stack:
            continues = self.interruption.continues_after_sigusr1
            self.interruption = stack.enter_context(Interruption(self.comm, continues_after_sigusr1=continues))
            if self.comm.world.size > 1:  # a rank that waits too long for this one shows where it is
                stack.enter_context(reporting_position(lambda: (self.updater.iteration, self.extension_name)))
            try:
                run.open_again(self, run.open) if self.comm.survives else run.open(self)
                with self.reporter.scope(self.observation):
                    while True:
                        try:
                            _iterate(self)
                            break
                        except RollBack as reason:
                            run.roll_back(self, reason)
                    run.repeat(self, self.interruption.settle)
                    _save_end(self)
            except BaseException as error:
                failure = run.explain(self, error)
            failure = run.close(self, failure, partial(_save_end, self))
        if failure is not None:
            raise failure

    def stop_at_epoch_end(self) -> None:
        """Let the run end with the epoch that is under way, as if the stop trigger fired there; at its end, at once.

        It is saved with the run, so one that is killed before ends there too, and the same command does not train further:
        as after the stop trigger, give another one for that. All of several ranks call it after the same iteration.

        Example::

            @make_extension(trigger=(100, "iteration"))
            def watch_for_a_file(trainer):  # rank 0 looks, and all ranks learn what it has seen
                if trainer.comm.broadcast_object(Path("enough").exists()):
                    trainer.stop_at_epoch_end()

        Raises:
            ValueError: the updater or its iterator counts no epochs.
            RuntimeError: the run has not begun.
        """
        if self.is_rehearsing or self._run.commands.last_epoch:
            return
        if self._run.started_at is None:
            raise RuntimeError(
                'stop_at_epoch_end() is for a run under way; give a stop trigger: Trainer(updater, (1, "epoch"))'
            )
        check_epoch_period(self.updater, Fraction(1))
        self.comm.world.barrier()  # a rank that calls it alone waits here, where it is named, and not in the last update
        last = max(1, math.ceil(count_progress(self.updater, "epoch")))
        self._run.commands.last_epoch = [last, describe(self.stop_trigger, as_setting=True)]
        self.interruption.needs_answer = True

    def watch(self, observer: Observer) -> Callable[[], None]:
        """Let an observer look on from the beginning of the loop, and return a function that ends this.

        An extension that looks on adds itself when it is initialized.
        """
        self._observers = [*self._observers, observer]
        self._run.commands.replayed += observer.commands
        return lambda: setattr(self, "_observers", [other for other in self._observers if other is not observer])

    def initialize_trigger(self, trigger: Callable[[Trainer], bool]) -> None:
        """Initialize a trigger that another one calls: once per run, however many extensions and triggers share it."""
        self._run.initialize_trigger(trigger, self)

    def rehearse(self) -> None:
        """Test the whole run in seconds: run two updates and every extension once, then restore all state.

        A bug in the validation shows at once instead of after the first epoch. Extensions are initialized and finalized
        as in a run, and write to a scratch directory. The run that follows is bit-exact with a run without a rehearsal.
        Changes to attributes that are not part of the saved state cannot be undone; a warning gives the path of each,
        such as ``updater.model:main.encoder.counter``, and says how to add it to the state.

        On an accelerator it prints the peak memory of an update, of each evaluation and of a snapshot, and about how many
        examples would fit; above 90 % of the device it warns.

        Raises:
            RuntimeError: the run has started, or the data run out before two updates.
            ValueError: a lazy module has uninitialized parameters; or a trigger or an extension needs a key that was not
                reported, such as a misspelled one; the error names the closest reported key.
        """
        _preview.rehearse(self, partial(preserved, self, "rehearse()"))

    def explain(self, iterations: int = 100) -> str:
        """Return the plan of the run as text: which extensions run, in which order, and in which of the next iterations.

        Interval, schedule and once triggers are predicted; for all others the plan says "asked each iteration".

        Raises:
            ValueError: ``iterations`` is not an integer of at least 1.
        """
        self._run.loaded_state.restore(self)  # of extensions that were registered after it was loaded
        return _preview.explain(self, iterations, self._run.started_at is not None)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load all state of a run: updater, triggers, extensions, observation, time, random generators.

        Settings are not part of it: a run may be resumed with another stop trigger, batch size or set of extensions.

        Raises:
            RuntimeError: state is loaded after the run has started.
        """
        run, entries, is_loading = self._run, list(self._entries.values()), isinstance(serializer, Deserializer)
        if is_loading and run.started_at is not None:
            raise RuntimeError("state must be loaded before run(), which has started; make a new trainer and load into that")
        loaded = run.loaded_state
        if loaded.exists and not is_loading:
            loaded.restore(self)  # a trainer that is loaded and saved, without a run, keeps all state
        loaded.changes = {} if is_loading else loaded.changes
        with printing_changes(loaded.unprinted, loaded.changes) if is_loading else contextlib.nullcontext():
            serializer.visit("updater", self.updater)
            elapsed_time = serializer("elapsed_time", self.elapsed_time)
            weight = serializer("weight", getattr(self.updater, "weight", 1))  # of the observation in a mean
            here = [] if is_loading else [entry.identify(self) for entry in entries]
            identities = serializer("extension_identities", {row.name: row[1:] for row in here})
            run.commands.done = serializer("commands", run.commands.done)
            if is_loading and run.commands.done:
                from chainring.training._control import restore_stop_trigger  # which few runs need

                restore_stop_trigger(self, run.commands.done)
            serialize_inner_trigger(serializer, "stop_trigger", self.stop_trigger)
            stop_setting = describe(self.stop_trigger, as_setting=True)
            visit_setting(serializer, "stop_trigger_setting", stop_setting, "stop trigger")
            last_epoch = serializer("last_epoch", run.commands.last_epoch)
            if is_loading:  # with another stop trigger the run trains on
                run.commands.last_epoch = last_epoch if last_epoch[1:] == [stop_setting] else []
            generators = _visit_generators(serializer["generators"], self, loaded.generators)
            observation = serializer["observation"]
            if isinstance(serializer, Deserializer):
                self.reported = Reported({key: observation(key, None) for key in serializer["observation"].paths()})
                run.earlier_time = elapsed_time
                with contextlib.suppress(AttributeError):  # an updater may compute it, in a property
                    self.updater.weight = weight
                for key in run.carried:
                    if not key.startswith("extension"):
                        run.carried.load(serializer[key], key)
                loaded.begin(serializer, identities, generators, self)
                return  # extensions are loaded by `LoadedState`, now or when they are registered
            for key, value in self.reported.observation().items():
                if is_scalar(value):
                    observation(key, value if hasattr(value, "detach") or not hasattr(value, "item") else value.item())
            for entry in entries:
                visit_if_stateful(serializer["extensions"], entry.name, entry.extension)
                visit_if_stateful(serializer["extension_triggers"], entry.name, entry.trigger)
            if run.carried and isinstance(serializer, Serializer):
                run.carried.save(serializer, self)


def preserved(trainer: Trainer, trial: str) -> contextlib.AbstractContextManager[None]:
    """Save all state, and return the context of a trial before the run, at whose end it and every generator are put back.

    In the context ``out`` is a scratch directory. ``trial`` is what it is called in errors, such as ``"rehearse()"``.

    Raises:
        RuntimeError: the run has started, or this is a process that imports the script.
        ValueError: a lazy module has uninitialized parameters.
    """
    if trainer._run.has_begun:
        raise RuntimeError(f"{trial} must be called before run(), which has started; make a new trainer")
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # what multiprocessing itself asks
        raise unguarded()
    trainer._run.loaded_state.restore(trainer)  # now, since a trial that saves would do so within, and it would be put back
    return _preview.preserved(trainer, trainer._run.carried, trial)


def _visit_generators(serializer: AbstractSerializer, trainer: Trainer, loaded: Any) -> Any:
    """Save the random generators of all ranks, or return those that were saved, by the rank.

    They are put back immediately before the first update, because a script may draw between load and run. Until then, the
    ``loaded`` ones are saved.
    """
    comm = trainer.comm
    if isinstance(serializer, Deserializer):
        ranks = {path.partition("/")[0] for path in serializer.paths()}
        if comm.is_main and len(ranks) != comm.size:
            consequence = "examples and their order are the same, and the last bits are not"
            if getattr(trainer.updater, "virtual_ranks", None) is not None:
                consequence = "virtual ranks compute the same bits"
            announce_change("number of ranks", len(ranks), comm.size, consequence)
        return {rank: serializer(rank, None) for rank in sorted(ranks)}  # all, because ranks read alike
    generators = (loaded or {}).get(str(comm.rank)) or _random.get_rng_state(trainer.updater)
    if serializer.comm.size == 1:
        serializer(str(comm.rank), generators)
    else:
        for rank, state in enumerate(serializer.comm.gather_object(generators)):
            serializer(str(rank), state)
    return generators


def _iterate(trainer: Trainer) -> None:
    """Train until the run ends, or an extension sends it back to a snapshot."""
    # hot path: "no extension", "an idle extension more"
    first, spent = trainer.updater.iteration, trainer._run.spent
    ends = surround(trainer._observers, "ends", trainer, call=partial(_ends, trainer))
    update = surround(trainer._observers, "around_update", trainer, call=trainer.updater.update)
    if trainer.comm.survives:  # both are done again, by the ranks that are left, if some are lost meanwhile
        from chainring.training._repeat import RepeatableUpdate  # which few programs need

        ends = partial(trainer._run.repeat, trainer, ends)
        update = partial(trainer._run.repeat, trainer, RepeatableUpdate(trainer, trainer._run.carried, update))
    steps = [_step_of(entry, trainer) for entry in trainer.entries if not entry.is_snapshot]
    snapshots = [_step_of(entry, trainer) for entry in trainer.entries if entry.is_snapshot]
    if not trainer.is_replaying and any(entry.optional("target") is None for entry, *_ in snapshots):
        tries = partial(trainer._run.repeat, trainer, partial(_try_state, snapshots))
        snapshots.append((snapshots[0][0], None, tries, snapshots[0][3]))
    while not ends():
        previous = trainer.reported
        trainer.reported = trainer.reporter.reported = Reported()
        try:
            update()
        except StopIteration as error:
            raise_unless_end(trainer.updater, error)
            trainer.reported = previous
            if trainer.stop_trigger is not get_stop_trigger(None):
                warn(
                    f"the training iterator ended after {trainer.updater.iteration} iterations, before the stop trigger "
                    f"{trainer.stop_trigger} fired. A DataLoader itself, instead of iter(loader), and an iterator with "
                    "repeat=True start a new epoch instead",
                )
            return
        for entry, observe, fires, call in steps:
            if observe is not None:
                observe()
            if fires is None:
                trainer.extension_name = entry.name
                call()
                trainer.extension_name = None
            elif fires(trainer):
                trainer.extension_name, began = entry.name, time.perf_counter()
                call()
                trainer.extension_name = None
                spent[entry.name] += time.perf_counter() - began
        due = []
        for step in snapshots:  # all of them are asked before the first is taken
            _, observe, fires, _ = step
            if observe is not None:
                observe()
            if fires is None or fires(trainer):
                due.append(step)
        if due:
            _take_snapshots(trainer, due)
    if trainer.is_resumed and trainer.updater.iteration == first and not trainer.interruption.ends_run:
        info(_describe_finished(trainer))


def _ends(trainer: Trainer) -> bool:
    """Return True if a signal or the stop trigger ends the run before the next iteration."""
    interruption = trainer.interruption
    if interruption.is_shared:
        interruption.compare()
    if interruption.needs_answer and _answer(trainer):
        return True
    return trainer.stop_trigger(trainer)


def _answer(trainer: Trainer) -> bool:
    """React to a signal or a command: return True if it ends the run, else do what it asks for."""
    interruption, commands = trainer.interruption, trainer._run.commands
    interruption.needs_answer = False  # at first, since another signal may come while snapshots are taken
    if interruption.ends_run and not interruption.is_nested:
        interruption.needs_answer = True
        return True
    wants = interruption.wants.copy()  # to which a signal or a thread may add
    interruption.wants -= wants
    if interruption.ends_run and not interruption.is_acknowledged:  # inside another run, which will end
        interruption.is_acknowledged = True
        text = "this run is inside another one, and continues to its end"
        _take_final_snapshots(trainer, _signal_name(interruption), text)
    elif "snapshot" in wants:
        _take_final_snapshots(trainer, signal.SIGUSR1.name, "the run continues")
    elif "lost snapshot" in wants:
        _take_final_snapshots(trainer, None)
    if ("commands" in wants or commands.again) and _carry_out(trainer, "commands" in wants):
        return True
    last_epoch = commands.last_epoch
    if last_epoch and count_progress(trainer.updater, "epoch") >= last_epoch[0]:
        return True
    interruption.needs_answer |= bool(commands.again or last_epoch)
    return interruption.ends_run and not interruption.is_nested


def _carry_out(trainer: Trainer, has_news: bool) -> bool:
    """Carry out the commands that are due before the next iteration; return True if one of them ends the run."""
    from chainring.training._control import due_commands  # which few runs need

    ends = False
    for kind, name in due_commands(trainer, trainer._run.commands, has_news):
        if kind == "call" and not trainer._entries[name].is_snapshot:
            trainer.extension_name = name
            _step_of(trainer._entries[name], trainer)[3]()
            trainer.extension_name = None
        elif kind in ("call", "snapshot") or not trainer.is_replaying:  # a replay goes on to where the run was resumed
            ends |= kind == "stop"
            _take_final_snapshots(trainer, f"control: {kind}", "" if kind == "stop" else "the run continues", name)
    return ends


def _try_state(snapshots: list[_Step], trainer: Trainer) -> bool:
    """Try after the first update whether all state can be saved, rather than let the first snapshot end the run.

    What writes files is left out: to save it, it writes them.
    """
    state = StateCollector()
    state.comm = trainer.comm
    state.visit("updater", trainer.updater)
    for key, value in trainer.observation.items():
        if hasattr(value, "detach") and is_scalar(value):
            state["observation"](key, value)
    for entry in trainer.entries:
        if not entry.is_snapshot and not entry.optional("writes"):
            visit_if_stateful(state["extensions"], entry.name, entry.extension)
        visit_if_stateful(state["extension_triggers"], entry.name, entry.trigger)
    encode(state.target)
    for optimizer in trainer.updater.get_all_optimizers().values():
        try_loading(optimizer)
    snapshots.pop()
    return False


def _step_of(entry: Entry, trainer: Trainer) -> _Step:
    observe: Callable[[], Any] | None = entry.observe and partial(entry.observe, trainer)
    call: Callable[[], Any] = partial(entry.call, trainer)
    if observers := trainer._observers:
        observe = observe and surround(observers, "around_observe", trainer, entry, call=observe)
        call = surround(observers, "around_call", trainer, entry, call=call)
    fires = entry.fires
    if trainer.comm.survives:
        call = partial(trainer._run.repeat, trainer, call)
        if fires is not None and not getattr(entry.trigger, "predictable", False):  # which asks nobody, nor draws
            fires = partial(trainer._run.repeat, trainer, fires)
    return entry, observe, fires, call


def _take_snapshots(trainer: Trainer, due: list[_Step]) -> None:
    for entry in trainer.entries:
        if entry.before_snapshot is not None and not entry.is_snapshot:
            trainer._run.repeat(trainer, entry.before_snapshot, trainer)
    for entry, *_ in due:
        entry.is_due = True
    # Those with `autoload` last: a run resumed from one does not take the others of that iteration again.
    due.sort(key=lambda step: (bool(step[0].optional("autoload")), not step[0].optional("has_fixed_name")))
    try:
        for entry, _, _, call in due:
            trainer.extension_name, began = entry.name, time.perf_counter()
            call()
            trainer.extension_name = None
            trainer._run.spent[entry.name] += time.perf_counter() - began
            entry.is_due = False
    finally:
        for entry, *_ in due:
            entry.is_due = False


def _signal_name(interruption: Interruption) -> str | None:
    return None if interruption.signum is None else signal.Signals(interruption.signum).name


def _save_end(trainer: Trainer) -> None:
    _take_final_snapshots(trainer, None if trainer.interruption.is_nested else _signal_name(trainer.interruption))


def _take_final_snapshots(trainer: Trainer, cause: str | None, continuation: str = "", name: str = "") -> None:
    """Take all snapshots, or that of a name, if a signal or a command is the cause, and tell what they have saved.

    Without a cause those with ``autoload`` are taken.
    """
    snapshots = [entry for entry in trainer.entries if entry.is_snapshot]
    due = [entry for entry in snapshots if (cause is not None or entry.optional("autoload")) and name in ("", entry.name)]
    trainer.is_final_snapshot = True
    try:
        if due:
            _take_snapshots(trainer, [_step_of(entry, trainer) for entry in due])
        for entry in due if cause is not None else ():  # only what is on the disk is reported as saved
            entry.optional("wait")()
    finally:
        trainer.is_final_snapshot = False
        if cause is not None:
            iteration, ends = trainer.updater.iteration, "comes in" if continuation else "ends the run after"
            text = f"{cause} {ends} iteration {iteration}: {_describe_saved(snapshots, iteration)}"
            info(f"{text}; {continuation}" if continuation else text, follows_signal=True)


def _describe_saved(snapshots: list[Entry], iteration: int) -> str:
    """Return in words whether the state of an iteration is saved."""
    if not snapshots:
        return "nothing is saved, because no snapshot extension is registered"
    written = [number for entry in snapshots if (number := entry.optional("saved_iteration")) is not None]
    if iteration in written:
        return "its state is saved"
    newest = f"; the newest that this run has written is of iteration {max(written)}" if written else ""
    return (
        "its state is not saved, because no snapshot extension has written one of the trainer: they save other objects, "
        f"their condition was false, or the write failed{newest}"
    )


def _describe_finished(trainer: Trainer) -> str:
    """Return in words why a resumed run makes no update, and what lets it train further."""
    updater, trigger = trainer.updater, trainer.stop_trigger
    epoch = f"epoch {updater.epoch}, " if getattr(updater, "counts_epochs", True) else ""
    position = f"already finished at {epoch}iteration {updater.iteration}"
    if trainer._run.commands.last_epoch:
        return f"{position}: stop_at_epoch_end() has ended the training here; give another stop trigger to train further"
    if not isinstance(trigger, ReachedTrigger):
        return f"{position}: {describe(trigger)} stops the training here; give another stop trigger to train further"
    seconds = f", {trainer.elapsed_time:.0f} seconds" if trigger.unit == "second" else ""
    reached = math.ceil(trainer.elapsed_time) if trigger.unit == "second" else getattr(updater, trigger.unit)
    more = 2 * (trigger.length if 2 * trigger.length > reached else reached) or 1
    further = f'raise the stop trigger to train further, for example to ({more:g}, "{trigger.unit}"), '
    further += "or give another out= for a new run"
    return f'{position}{seconds}: the stop trigger is ({trigger.length:g}, "{trigger.unit}"); {further}'
