"""A run of a trainer: what it continues, how it starts, the signals that end it, and how it ends come what may."""

from __future__ import annotations

import copy
import logging
import os
import re
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch.nn.modules.dropout import _DropoutNd

from chainring import _random
from chainring._distributed.communicator import Communicator, RanksLost
from chainring._distributed.sharding import is_tensor_parallel
from chainring._hints import find_hint
from chainring._messages import info, list_names, warn
from chainring._progress import Trainer
from chainring.iterators._workers import END_SIGNALS
from chainring.iterators.base import share_among_ranks
from chainring.iterators.serial import IndexedIterator
from chainring.serializers import CorruptError
from chainring.serializers._store import Snapshots
from chainring.serializers.protocol import (
    AbstractSerializer,
    DictionaryDeserializer,
    DictionarySerializer,
    named_submodules,
    printing_changes,
    visit_if_stateful,
)
from chainring.training._advice import closing_lines, opening_line
from chainring.training._entry import Entry, LoadedState, RollBack
from chainring.training._run_directory import RECORD, RunDirectory, read_record, write_record
from chainring.training.updaters._arguments import origin_of
from chainring.training.updaters._carried import Carried
from chainring.training.updaters._memory import explain_out_of_memory, is_out_of_memory

if TYPE_CHECKING:
    from chainring._places.remote import RemotePlace

logger = logging.getLogger("chainring")
_COMMANDS, _SNAPSHOT = 1, 2  # ranks compare 0 for nothing, or these; or the latter plus a signal that ends the run
_State = tuple[int, Callable[[], None]]
"""The iteration of a saved state, and what loads it."""


class Run:
    """The start and the end of a run, and the saved run that it continues."""

    def __init__(self) -> None:
        self.has_begun = False  # True once Trainer.run was called
        self.carried = Carried()
        self.loaded_state = LoadedState(self.carried)
        self.earlier_time = 0.0  # seconds of training in the runs before a resume
        self.started_at: float | None = None  # on a monotonic clock; None as long as state may be loaded
        self.ended_at: float | None = None
        self.store: Snapshots | None = None  # in which this process alone writes, while the run continues
        self._directory: RunDirectory | None = None
        self._remote: RemotePlace | None = None
        self._initialized: list[Entry] = []  # extensions
        self._started_triggers: list[Any] = []
        self._earlier_record = b""  # `run.json` as it was before this run, where ranks may be lost
        self.spent = defaultdict[str, float](float)  # seconds in extensions that are not called in every iteration, by name
        self._notes: dict[str, str] = {}  # for `run.json`: why the run has begun again by itself
        self.commands = Commands()

    def open(self, trainer: Trainer) -> None:
        """Take ``out`` for this process, compare the ranks, load the newest state, and start from it."""
        self.has_begun = True
        several = trainer.comm.world.size > 1
        models = trainer.updater.get_all_models().values()
        trainer.comm.begin(lambda: any(map(is_tensor_parallel, models)))
        if trainer.comm.survives and getattr(trainer.updater, "virtual_ranks", None) is not None:
            _share_generators(trainer)  # now, since rank 0 may be lost before the first update
        if trainer.comm.is_main:  # the only rank that writes there
            self._take_directory(trainer)
        if several:
            from chainring.training import _agreement  # which few programs need

            _agreement.check_agreement(trainer)
            _agreement.check_out(trainer.store, trainer.comm)
            if trainer.comm.world.size > trainer.comm.size and not trainer.is_resumed:
                _agreement.check_generators(trainer)
        entries, state = [entry for entry in trainer.entries if entry.optional("autoload")], None
        if not trainer.is_replaying and (not trainer.is_resumed or self.loaded_state.gives_way):
            state = _newest_state(trainer, entries)
        self._start(trainer, entries, state)

    def _take_directory(self, trainer: Trainer) -> None:
        """Let this process write in ``out``, unless it does already."""
        if trainer.url is not None and self._remote is None:
            from chainring._places.remote import RemotePlace  # which few programs need

            remote = RemotePlace(trainer.url)
            remote.claim(trainer.out, trainer.comm.lost)
            self._remote, self.store = remote, Snapshots(remote)
        self.store, tell = trainer.store, trainer.interruption.request_commands
        try:
            self._directory = self._directory or RunDirectory(trainer.out, self.store, tell, trainer.comm.lost)
        except BlockingIOError as error:
            from chainring._distributed.launchers import read_rank_info  # which few programs need

            if trainer.comm.world.size > 1 or (ranks := read_rank_info(os.environ).size) == 1:
                raise
            raise BlockingIOError(
                f"{trainer.out} is written by another of the {ranks} processes that were started together, and each "
                "trains alone: give StandardUpdater(..., comm=create_communicator()), of chainring.parallel, so that "
                "they train one model"
            ) from error

    def open_again(self, trainer: Trainer, start: Callable[[Trainer], None]) -> None:
        """Start the run; if ranks are lost before the others have loaded its state, start it again from the beginning."""
        loaded = copy.copy(self.loaded_state)
        if trainer.comm.survives:
            with suppress(FileNotFoundError):
                self._earlier_record = trainer.store.files.read(RECORD)  # rank 0 writes it when all have loaded
        while True:
            try:
                return start(trainer)
            except RanksLost as loss:
                self._tell(trainer, loss)
                self.loaded_state = copy.copy(loaded)

    def roll_back(self, trainer: Trainer, reason: RollBack) -> None:
        """Start the run again from its newest snapshot; raise ``reason`` if there is none."""
        if (state := self.repeat(trainer, _newest_state, trainer, trainer.entries)) is None:
            raise reason
        info(f"{reason}; the run goes back to iteration {state[0]}")
        for entry in trainer.entries:
            entry.optional("finalize")()
        self._notes = {"rollback": str(reason)}
        self.open_again(trainer, partial(self._start, entries=trainer.entries, state=state))

    def repeat(self, trainer: Trainer, call: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call; if ranks are lost in it, go on without them and make it again."""
        if not trainer.comm.survives:
            return call(*arguments)
        while True:
            generators, name = _random.take_generators(), trainer.extension_name
            try:
                return call(*arguments)
            except RanksLost as loss:
                _random.put_generators(generators)
                self._go_on(trainer, loss)
                trainer.extension_name = name

    def _go_on(self, trainer: Trainer, loss: RanksLost) -> None:
        """Begin again with fewer ranks, from the state that they have."""
        while True:
            try:
                self._tell(trainer, loss)
                self.loaded_state.exists |= trainer.updater.iteration > 0
                state = DictionarySerializer()
                _visit_parts(state, trainer)
                for entry in trainer.entries:
                    entry.optional("finalize")()
                _visit_parts(DictionaryDeserializer(state.target), trainer)
                self._initialize(trainer)
                return
            except RanksLost as another:
                loss = another

    def _tell(self, trainer: Trainer, loss: RanksLost) -> None:
        """Say that ranks were lost, and let another take the place of rank 0."""
        info(text := f"{loss}, and do again what comes after iteration {trainer.updater.iteration}")
        self._notes = {"lost": text}
        trainer.interruption.begin_anew()
        if trainer.comm.is_main:
            self._take_directory(trainer)

    def explain(self, trainer: Trainer, error: BaseException) -> BaseException:
        """Return the error that ends the run, with notes that say where it was raised and what helps."""
        otherwise = getattr(error, "otherwise", None) if isinstance(error, RollBack) else None
        reason = error if otherwise is None else otherwise
        reason.__suppress_context__ |= reason is not error  # the RollBack says the same
        reason.add_note(f"raised {_position(trainer)}")
        if is_out_of_memory(reason):
            reason.add_note(explain_out_of_memory(trainer.updater, trainer.extension_name))
        elif (hint := find_hint(reason)) is not None:
            function = getattr(trainer.updater, "loss_func", None) or trainer.updater.get_all_models().get("main")
            reason.add_note(hint.replace("{loss}", "the update" if function is None else origin_of(function)))
        failure: BaseException = trainer.comm.failed(reason)
        return failure

    def close(self, trainer: Trainer, failure: BaseException | None, save: Callable[[], None]) -> BaseException | None:
        """Call every ``on_error`` and every ``finalize``, and give ``out`` back, come what may.

        If rank 0 is lost before it has done that, the others do it, and ``save`` the final snapshots that it has not.

        Return the first error, with the later ones as its notes; without one `Interrupted`, if a signal has ended the run.
        """
        position = _position(trainer)
        for entry in self._initialized if failure is not None else ():
            trainer.extension_name = entry.name
            failure = _try_call(f"on_error of {entry.name!r}", failure, entry.on_error, trainer, failure)
        # Now, because finalizing may take long or hang; without a log, the error is printed once, with its traceback.
        if isinstance(failure, Exception) and logger.hasHandlers():
            logger.error("training stops %s: %s: %s", position, type(failure).__name__, failure)
        while True:
            ended = failure
            for entry in trainer.entries:
                trainer.extension_name = entry.name
                ended = _try_call(f"finalize of {entry.name!r}", ended, entry.optional("finalize"))
            trainer.extension_name = None
            ended = _try_call("finalize of the updater", ended, getattr(trainer.updater, "finalize", lambda: None))
            if self._directory is not None:
                ended = _try_call("the digest of the examples in run.json", ended, self._directory.digest_examples)
            if self._remote is not None and not isinstance(ended, RanksLost):
                ended = _try_call(f"the last files of {trainer.url}", ended, self._remote.release)
            if not isinstance(ended, RanksLost):
                ended = _try_call("the end of the run", ended, trainer.comm.end)
            if failure is not None or not isinstance(ended, RanksLost):
                failure = ended
                break
            try:
                self._go_on(trainer, ended)
                save()
            except BaseException as error:
                failure = trainer.comm.failed(error)
        self.ended_at = time.monotonic()
        if self._directory is not None:
            self._directory.release()
        seconds = 0.0 if self.started_at is None else self.ended_at - self.started_at
        interruption: Interruption = trainer.interruption
        if failure is None and not trainer.is_replaying:
            for line in closing_lines(trainer, seconds, self.spent, interruption.signum is not None):
                info(line)
        ends_run = failure is None and interruption.signum is not None and not interruption.is_nested
        return interruption.error() if ends_run else failure

    def initialize_trigger(self, trigger: Any, trainer: Trainer) -> None:
        """Initialize a trigger once a run, however many extensions and other triggers share it."""
        if hasattr(trigger, "initialize") and all(other is not trigger for other in self._started_triggers):
            self._started_triggers.append(trigger)
            trigger.initialize(trainer)

    def _start(self, trainer: Trainer, entries: list[Entry], state: _State | None) -> None:
        """Load a state of these extensions if there is one, and start from it."""
        self.started_at = None  # state may be loaded until it is set
        self.spent.clear()
        with printing_changes(self.loaded_state.unprinted, is_complete=False):
            tried: list[int] = []
            while state is not None:
                try:
                    state[1]()
                    break
                except CorruptError:  # its extension skips it from now on, and another one is the newest
                    tried.append(state[0])
                    state = _newest_state(trainer, entries)
                    if state is None or tried.count(state[0]) > len(entries):
                        raise
            self.loaded_state.conclude(trainer)
            trainer.comm.barrier()  # until all have loaded, rank 0 must not move snapshots or cut back the log
        self.started_at = time.monotonic()
        generators = _random.take_generators() if trainer.comm.survives else ()
        try:
            self._initialize(trainer)
        except RanksLost as loss:
            _random.put_generators(generators)
            self._go_on(trainer, loss)
        if not trainer.is_resumed and (line := opening_line(trainer)):
            info(line)
        _call_before_training(trainer, self.repeat)
        _restore_generators(trainer, self.repeat, self.loaded_state)

    def _initialize(self, trainer: Trainer) -> None:
        """Record this start in ``out``, and initialize what runs."""
        with printing_changes(self.loaded_state.unprinted):
            recorded = [] if self._directory is None else self._claim_directory(trainer, self._directory)
            if trainer.comm.world.size > 1:
                recorded = trainer.comm.world.broadcast_object(recorded)
        if trainer.is_replaying:
            recorded = self.commands.replayed
        self.commands.again = recorded[len(self.commands.done) :]
        trainer.interruption.needs_answer |= bool(self.commands.again or self.commands.last_epoch)
        prepare(trainer)
        self._started_triggers = []
        self.initialize_trigger(trainer.stop_trigger, trainer)
        for entry in trainer.entries:
            trainer.extension_name = entry.name  # which an error names
            self.initialize_trigger(entry.trigger, trainer)
        for entry in trainer.entries:
            trainer.extension_name = entry.name
            entry.optional("initialize")(trainer)
            if entry not in self._initialized:
                self._initialized.append(entry)
        trainer.extension_name = None
        if self._directory is not None and trainer.comm.survives:  # what no other rank knows: ids of runs in services
            trainer.store.files.persist(self._directory.path)

    def _claim_directory(self, trainer: Trainer, directory: RunDirectory) -> list[dict[str, Any]]:
        """Move away in ``out`` what belongs to other runs, and record this start there; return the commands recorded."""
        targets: dict[str, Any] = {}  # by the name of a snapshot
        for entry in trainer.entries:
            for name in entry.optional("writes") if entry.is_snapshot else ():
                if targets.setdefault(name, entry.optional("target")) is not entry.optional("target"):
                    raise ValueError(f"two snapshots of other targets have the name {name!r}; give filename= to one of them")
        loaded, store, iteration = self.loaded_state, trainer.store, trainer.updater.iteration
        has_begun, record = loaded.exists, directory.path / RECORD
        if trainer.comm.lost and record.is_file():  # in the start perhaps, when one of the ranks had recorded it
            has_begun |= record.read_bytes() != self._earlier_record
        earlier = read_record(directory.path, moves_damaged=has_begun)
        names = {name for entry in trainer.entries for name in entry.optional("writes")} | {RECORD}
        known = names.union(earlier.get("files", ()))
        written, cut_at = directory.find(known), iteration
        if not has_begun:
            if written:
                archive = directory.move(list(written), "previous")
                saves = any(entry.optional("autoload") for entry in trainer.entries)
                if not saves or any(saved_at is not None for saved_at in written.values()):
                    info(f"{store} holds an earlier run: {list_names(written, 6)} moved to {archive}")
                else:
                    info(
                        f"{store} holds an earlier run, which ended before anything was saved: this one begins anew, and "
                        f"{list_names(written, 6)} moved to {archive}. For less to be lost, give snapshot() a shorter "
                        'trigger, such as (300, "second")'
                    )
            write_record(trainer, {}, names, loaded.changes, self._notes)
            return []
        done = self.commands.done
        if loaded.directory is not None and loaded.place not in (None, store.place):
            # A restart with `autoload` would else continue the run that was here, if this one is killed before it has saved.
            cut_at = -1
            if moved := directory.abandon(written, -1):
                info(f"resumed from {loaded.place}: of the run that was in {store}, {moved}")
            earlier = read_record(loaded.directory) or earlier
        elif moved := directory.abandon(written, iteration):
            info(f"resumed at iteration {iteration}: the later {moved}")
        if left := [name for name in written if name not in names and written[name] is None]:
            directory.cut_back(left, cut_at)
        commands = [command for command in earlier.get("commands", ()) if "refused" not in command]
        if cut_at < 0 or [command["id"] for command in commands[: len(done)]] != [command["id"] for command in done]:
            commands = done  # the record is that of a run which has gone another way since
            earlier = {**earlier, "commands": done} if earlier else {}
        write_record(trainer, earlier, known, loaded.changes, self._notes)
        return commands


class Commands:
    """What was commanded to a run that trains, as its record has it; `training._control` carries it out."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []  # those that have acted on the state, and are saved with it
        self.replayed: list[dict[str, Any]] = []  # those of the run that this one repeats
        self.last_epoch: list[Any] = []  # at whose end the run was asked to stop, and the stop trigger that it had then
        self.again: list[dict[str, Any]] = []  # those that come after them in the record, to be carried out again


def _visit_parts(serializer: AbstractSerializer, trainer: Trainer) -> None:
    """Save or load, of this rank alone, what begins again with fewer ranks; models and optimizers stay as they are."""
    for name, iterator in trainer.updater.get_all_iterators().items():
        visit_if_stateful(serializer["iterators"], name, iterator)
    visit_if_stateful(serializer, "stop_trigger", trainer.stop_trigger)
    for entry in trainer.entries:
        visit_if_stateful(serializer["extensions"], entry.name, entry.extension)
        visit_if_stateful(serializer["extension_triggers"], entry.name, entry.trigger)


def prepare(trainer: Trainer) -> None:
    """Prepare what extensions find when they are initialized: the names of models, the ranks, the shares of data."""
    updater, comm = trainer.updater, trainer.comm
    optimizers = updater.get_all_optimizers().values()
    trained = {
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    }
    for name, model in updater.get_all_models().items():
        has_dropout = any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules())
        inner = [*model.modules()][1:] or [model]  # all of what a wrapper such as Classifier holds
        is_evaluating = has_dropout and not any(module.training for module in inner)
        if is_evaluating and not trained.isdisjoint(map(id, model.parameters())):
            text = f"model {name!r} is trained in evaluation mode, without its dropout"
            warn(f"{text}; call {name if name != 'main' else 'model'}.train() before, which from_pretrained() does not")
        for path, module in named_submodules(name, model):
            trainer.reporter.add_observer(path, module)
            if isinstance(module, torch.nn.RNNBase) and _random.draws_in_cudnn(module):
                text = f"{path} is {type(module).__name__}(dropout={module.dropout:g}), for which cuDNN draws from a state"
                warn(f"{text} that no snapshot has, so that a resumed run draws other numbers: {_random.WITHOUT_CUDNN}")
    for iterator in updater.get_all_iterators().values():
        share_among_ranks(iterator, comm, getattr(updater, "virtual_ranks", None))
        size = iterator.progress[2] if isinstance(iterator, IndexedIterator) and iterator.repeat else None
        if size is not None and iterator.batch_size > size:
            text = f"a batch of {iterator.batch_size} is more than an epoch, and has examples of the {size} twice"
            warn(f"{text}; give {type(iterator).__name__} a smaller batch size, or repeat=False")
    if hasattr(updater, "start"):
        updater.start()


def _newest_state(trainer: Trainer, entries: list[Entry]) -> _State | None:
    states, name = [], trainer.extension_name
    for entry in entries:
        trainer.extension_name = entry.name
        states.append(entry.optional("newest")(trainer))
    trainer.extension_name = name
    return max(filter(None, states), key=lambda state: state[0], default=None)


def _share_generators(trainer: Trainer) -> None:
    """Let all ranks draw what rank 0 draws: what is random for each is drawn for virtual ranks."""
    _random.set_rng_state(trainer.comm.broadcast_object(_random.get_rng_state(trainer.updater)), trainer.updater)


def _call_before_training(trainer: Trainer, repeat: Callable[..., Any]) -> None:
    """Call the extensions with ``invoke_before_training``; in a resumed run, what they report is discarded."""
    observation, watchers = trainer.observation, trainer.reporter.media_watchers
    trainer.observation = {}
    with trainer.reporter.scope(trainer.observation):
        for entry in trainer.entries:
            skipped = trainer.is_resumed and entry.optional("skip_on_resume")
            if entry.invoke_before_training and entry.observe_start is None and not skipped:
                if trainer.is_resumed:
                    trainer.reporter.media_watchers = ()
                if entry.observe is not None:
                    entry.observe(trainer)
                trainer.extension_name = entry.name
                repeat(trainer, entry.extension, trainer)
        if trainer.observation and not trainer.is_resumed:
            for entry in filter(lambda entry: entry.observe_start is not None, trainer.entries):
                trainer.extension_name = entry.name
                repeat(trainer, entry.extension.observe_start, trainer)
    trainer.extension_name = None
    if trainer.is_resumed:
        trainer.observation, trainer.reporter.media_watchers = observation, watchers


def _restore_generators(trainer: Trainer, repeat: Callable[..., Any], loaded: LoadedState) -> None:
    """Give each rank its generators, immediately before the first update."""
    comm = trainer.comm
    is_shared = comm.survives and getattr(trainer.updater, "virtual_ranks", None) is not None
    rank = 0 if is_shared else comm.rank
    state = (loaded.generators or {}).get(str(rank))
    loaded.generators = None
    if state is not None:
        _random.set_rng_state(state, trainer.updater)
    elif loaded.exists:  # saved by fewer ranks
        _random.seed_all("rank", rank, trainer.updater.iteration)
    elif rank > 0:  # each rank draws from its own stream, and rank 0 from the one that the script has seeded
        _random.seed_all("rank", rank, torch.initial_seed())
    if is_shared:  # where rank 0 alone has drawn
        repeat(trainer, _share_generators, trainer)


def _position(trainer: Trainer) -> str:
    extension = "" if trainer.extension_name is None else f"in extension {trainer.extension_name!r} "
    return f"{extension}after iteration {trainer.updater.iteration}"


def _try_call(name: str, failure: BaseException | None, call: Callable[..., None], *arguments: Any) -> BaseException | None:
    """Call a function; return the first error so far, with one that the call raises as its note."""
    try:
        call(*arguments)
    except BaseException as error:
        if failure is None:
            failure = error
            failure.add_note(f"raised in {name}")
        elif error is not failure:
            failure.add_note(f"afterwards {name} raised {type(error).__name__}: {error}")
    return failure


class Interrupted(SystemExit):
    """Raised after a signal has ended the run: the iteration is complete, snapshots are saved and everything is finalized.

    If it is not caught, the process exits with the code of one killed by the signal, 128 + its number: 143 for SIGTERM, 130
    for SIGINT, 129 for SIGHUP.

    Example::

        with contextlib.suppress(Interrupted):
            trainer.run()
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)

    def __str__(self) -> str:
        return f"the run was ended by {signal.Signals(int(str(self.code)) - 128).name}"


_CLEAR_LINE = "\r\x1b[K"  # on which a terminal has echoed ^C, and a bar may be, which is drawn again below


class Interruption:
    """While it is entered, the first of `END_SIGNALS` only sets `signum`; the second SIGINT raises KeyboardInterrupt.

    The previous handler is called too, and is restored at the end. An ignored signal stays ignored, and one that code
    outside of Python handles, such as faulthandler, stays with it. In a thread, where Python sets no handlers, nothing is
    changed. Several ranks end after the same iteration: at the beginning of each they start to compare what they have
    received, and at the beginning of the next they read the result, so none waits.

    A run inside an extension or an update of another run is a part of that run's iteration, and this iteration ends. So the
    inner run continues to its end, and the signal ends the outer one.

    Args:
        continues_after_sigusr1: True if SIGUSR1 only asks for a snapshot, and the run continues.
    """

    _entered: ClassVar[list[Interruption]] = []

    def __init__(self, comm: Communicator | None = None, *, continues_after_sigusr1: bool = False) -> None:
        self.signum: int | None = None  # the first signal; of several ranks, the largest that any received
        self.ends_run = False  # True when the run ends because of it: at once in one process, or when the ranks agree
        # What else is asked for: a "snapshot" of a run that continues, a "lost snapshot" again, or to read "commands".
        self.wants = set[str]()
        self.needs_answer = False  # True if there is anything to which the trainer has not reacted yet
        self.continues_after_sigusr1 = continues_after_sigusr1
        self._comm = comm or Communicator()
        self.is_shared = self._comm.world.size > 1  # several ranks have to agree
        self.is_nested = False  # True for a run inside an iteration of another one
        self.is_acknowledged = False  # True once a nested run has saved its state
        self._read_maximum: Callable[[], int] = lambda: 0  # the result of the last comparison
        self._requests: list[int] = []  # of which the other ranks do not know yet
        self._sigint_count = 0
        self._handlers: dict[int, Any] = {}  # by signal, the handlers that this one replaces
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.is_nested = any(outer._pid == self._pid for outer in self._entered)
            self._entered.append(self)
            status = Path("/proc/self/status")
            caught = re.search(r"^SigCgt:\s*(\w+)", status.read_text() if status.exists() else "", re.MULTILINE)
            # The signals with a handler, in Python or, as that of faulthandler, outside of it.
            handled = 0 if caught is None else int(caught[1], 16)
            for signum in END_SIGNALS:
                handler = signal.getsignal(signum)
                if handler is signal.SIG_DFL and handled >> (signum - 1) & 1:
                    continue
                if handler not in (None, signal.SIG_IGN):  # None: not set by Python, which could not restore it
                    self._handlers[signum] = handler
                    signal.signal(signum, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}
        if self in self._entered:
            self._entered.remove(self)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a forked worker has inherited this handler, and its trainer decides
        if signum == signal.SIGUSR1 and self.continues_after_sigusr1:
            self._request(_SNAPSHOT)
        else:
            self._sigint_count += signum == signal.SIGINT
            is_first = self.signum is None
            self.end_run(signum)
            if is_first and not self.is_nested and self._comm.world.is_main:  # not by print, in which it may have come
                again = ", Ctrl-C again ends it at once" if signum == signal.SIGINT else ""
                text = f"{signal.Signals(signum).name}: the run ends after this iteration{again}\n"
                with suppress(OSError):
                    os.write(2, (_CLEAR_LINE * os.isatty(2) + text).encode())
        handler = self._handlers.get(signum)
        if callable(handler) and handler is not signal.default_int_handler:
            handler(signum, frame)
        if self._sigint_count > 1 and signum == signal.SIGINT:
            raise KeyboardInterrupt

    def begin_anew(self) -> None:
        """Forget a comparison that is under way, of more ranks than there are now; what it may have told is told again."""
        self._read_maximum = lambda: 0
        self._requests.append(_SNAPSHOT if self.continues_after_sigusr1 else _COMMANDS)

    def end_run(self, signum: int) -> None:
        """Let the run end as if this signal had come; any thread may call it."""
        self.signum = self.signum or signum
        self.ends_run = self.ends_run or not self.is_shared
        self.needs_answer = self.needs_answer or not self.is_shared

    def replace_snapshot(self) -> None:
        """Let a snapshot be taken before the next iteration, in place of one that rank 0 has not completed."""
        self.wants.add("lost snapshot")
        self.needs_answer = True

    def request_commands(self) -> None:
        """Let commands be read before one of the next iterations; any thread may call it."""
        self._request(_COMMANDS)

    def _request(self, request: int) -> None:
        if self.is_shared:
            self._requests.append(request)
        else:
            self.wants.add("snapshot" if request == _SNAPSHOT else "commands")
            self.needs_answer = True

    def compare(self) -> None:
        """Begin to compare what the ranks have received, and read the result of the comparison before."""
        received = _SNAPSHOT + self.signum if self.signum else 0
        while self._requests:  # to which a signal or a thread may add
            received = max(received, self._requests.pop())
        read, self._read_maximum = self._read_maximum, self._comm.start_max(received)
        agreed = read()
        if agreed > _SNAPSHOT:
            self.signum, self.ends_run = agreed - _SNAPSHOT, True
        elif agreed:  # commands are looked for in any case, which another request may have hidden
            self.wants |= {"snapshot", "commands"} if agreed == _SNAPSHOT else {"commands"}
        self.needs_answer = self.needs_answer or agreed > 0

    def settle(self) -> None:
        """Drop, at the end of the loop, a signal that came too late for several ranks to agree upon."""
        if self.is_shared:
            agreed = self._read_maximum()
            self.signum = agreed - _SNAPSHOT if agreed > _SNAPSHOT else None

    def error(self) -> BaseException:
        """Return what ends the run; in a notebook, whose kernel must continue, SIGINT stays a KeyboardInterrupt."""
        assert self.signum is not None
        shell = sys.modules.get("IPython")
        if self.signum == signal.SIGINT and shell is not None and hasattr(shell.get_ipython(), "kernel"):
            name = signal.Signals(self.signum).name
            return KeyboardInterrupt(f"{name}: the run has ended at the end of an iteration")
        return Interrupted(self.signum)
