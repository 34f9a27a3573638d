"""Virtual ranks: an update computed in a fixed number of parts, one after the other, whichever ranks compute them."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from chainring import _random
from chainring._checks import is_integer
from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import to_local
from chainring._distributed.virtual_ranks import Exchange, TreeSum, absent_of, block_of
from chainring._messages import warn
from chainring._naming import unwrap
from chainring.datasets._columns import Batch, count_examples, take_examples
from chainring.reporting._metrics import uncounted
from chainring.reporting.reporter import current
from chainring.serializers.protocol import own_states
from chainring.training.updaters._closures import NO_VIRTUAL_RANKS, needs_closure
from chainring.training.updaters._gradients import list_trained, unstash
from chainring.training.updaters._means import BucketedSum, WeightedMean
from chainring.training.updaters._update import Update
from chainring.training.updaters._virtual_means import Agreement, Found, Means, Reported, list_keys
from chainring.training.updaters._virtual_state import (
    RunningStatistics,
    ShardedGradients,
    check_sharded_parameters,
    set_gradient,
    whole_like,
)
from chainring.training.updaters.callbacks import UpdateContext

if TYPE_CHECKING:
    from chainring.training.updaters._update import Scheme

_MEET = (
    "every virtual rank runs update_core, and all meet in self.step(): they must call it for the same optimizers in the "
    "same order"
)


@dataclass(slots=True, eq=False)
class Part:
    """What one virtual rank computes of an update.

    Attributes:
        joint: the update of all virtual ranks of this rank.
        number: of the virtual rank; the number of all of them for a part whose results are thrown away.
        index: in the block of its rank.
        update: its micro-batches.
        observation: what it has reported.
        weight: of that in a mean.
        rows: the examples of its batches; 1 in an update that takes none.
        has_rows: True if its last batch has rows that count.
        epoch: of the main iterator after the last batch that it has taken.
        taken: the number of batches that it has taken of each iterator.
        steps: the names of the optimizers at each of its steps, with the weights of their gradients in a mean.
        gradients, buffers, generators, reports_into: its own, while another part is computed.
    """

    joint: VirtualUpdate
    number: int
    index: int
    update: Update
    observation: dict[str, Any] = field(default_factory=dict)
    weight: Any = 0
    rows: int = 1
    has_rows: bool = False
    epoch: Any = 0
    taken: dict[str, int] = field(default_factory=dict)
    steps: list[tuple[list[str], list[Any]]] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    buffers: dict[int, Tensor] = field(default_factory=dict)
    generators: Any = None
    reports_into: dict[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """False if its results are thrown away."""
        return self.number < self.joint.ranks.count

    def seed_generators(self, micro_step: int) -> None:
        """Seed all generators for a micro-batch."""
        ranks = self.joint.ranks
        _random.seed_all("virtual rank", ranks.seed or 0, self.update.context.iteration, micro_step, self.number)

    def take_rows(self, name: str, iterator: Any) -> tuple[Any, Any]:
        """Return its rows of the next batch of an iterator, and how many of them count.

        Raises:
            StopIteration: the data have run out.
        """
        position = self.taken.get(name, 0)
        batch, epoch, error = self.joint.fetched(name, iterator, position)
        self.taken[name] = position + 1
        if error is not None:
            raise error
        size = len(self.joint.ranks.block)
        rows, examples = batch, count_examples(batch)
        if size > 1:
            rows = take_examples(batch, slice(self.index, None, size))
            examples = count_examples(rows)
        is_empty = isinstance(examples, int) and examples == 0
        if is_empty and size > 1:  # the first example is repeated, and does not count
            rows = take_examples(batch, slice(0, 1))
            if isinstance(rows, Batch):
                rows.weight = 0
        if name == "main":
            self.epoch = epoch
            self.rows = (self.rows if position else 0) + (examples if isinstance(examples, int) else 1)
            self.has_rows = self.counts and not is_empty
            self.joint.let_metrics_count(self.has_rows)
        return rows, examples

    def meet(self, names: list[str]) -> None:
        """Come to a step of optimizers, and wait until they have stepped.

        A single part continues at once. If no ``update_core`` of your own may continue after the step, all parts end first.
        """
        update = self.update
        optimizers = [update.scheme.optimizers[name] for name in names]
        for optimizer in optimizers if update.stashed else ():
            unstash(optimizer, update.stashed)
        self.joint.meet(self, names, optimizers, [update.totals.pop(name) for name in names])
        update.stepped += optimizers


class VirtualRanks:
    """Computes updates for one virtual rank after the other, and joins them where an optimizer steps.

    Each virtual rank has its rows of the batch, its own random numbers, gradients and running statistics.

    Attributes:
        scheme: how the updater computes updates.
        count: the number of virtual ranks, of all ranks together.
        block: those that this rank computes.
        seed: from which their random numbers are derived.
        goes_on: True if an ``update_core`` may continue after a step.
        overlaps: True if gradients are sent while the last backward runs.
    """

    def __init__(self, scheme: Scheme, count: int, goes_on: bool) -> None:
        self.scheme, self.comm = scheme, scheme.updater.comm
        self.count = count
        self.block = block_of(self.comm.rank, self.comm.size, count)
        self.seed: int | None = None
        self.goes_on = goes_on

    def start(self) -> None:
        """Prepare for a run: all ranks take the seed of rank 0, if none was loaded."""
        if self.seed is None:
            self.seed = self.comm.broadcast_object(torch.initial_seed())
        models = list(self.scheme.models.values())
        self.sharded = ShardedGradients(models)
        self.parameters = [parameter for model in models for parameter in model.parameters()]
        self._device = next((parameter.device for parameter in self.parameters), torch.device("cpu"))
        self.statistics = RunningStatistics(models, self.count)
        self._agreements: list[Agreement] = []  # at each step of an update, and at its end
        self.overlaps = not self.sharded

    def agreement(self, number: int) -> Agreement:
        """Return what finds the means of all ranks at that step of an update, or at its end."""
        while len(self._agreements) <= number:
            self._agreements.append(Agreement(self.comm, self.block, self.count, self._device))
        return self._agreements[number]

    def run(self, update: Update) -> Any:
        """Compute an update; return its weight, on one rank only: all have what all have reported."""
        weight = VirtualUpdate(self, update).run()
        return weight if self.comm.rank == 0 else 0


class VirtualUpdate:
    """One update of the virtual ranks of this rank, made anew each time.

    Attributes:
        ranks: the virtual ranks.
    """

    def __init__(self, ranks: VirtualRanks, update: Update) -> None:
        self.ranks, self._scheme = ranks, ranks.scheme
        self._outer_generators = _random.take_generators()
        self._reports = _Reports()
        self._fetched: dict[str, list[_Fetched]] = {}
        self._positions = {name: _position(iterator) for name, iterator in self._scheme.iterators.items()}
        numbers = [(number, index) for index, number in enumerate(ranks.block)]
        if ranks.sharded and len(ranks.block) * ranks.comm.size < ranks.count:
            # Parameters are gathered from all ranks in each forward, of which other ranks have one more.
            numbers.insert(0, (ranks.count, 0))
        self._parts = [self._make_part(update, number, index) for number, index in numbers]
        self._threads: _Threads | None = None
        self._sums: list[TreeSum] = []
        self._sending: GradientSum | None = None
        self._last_leaf: list[Tensor | None] | None = None
        self._settled: tuple[Found, Means] | None = None
        self._uncounted = ExitStack()
        ranks.statistics.begin(ranks.block)
        ranks.sharded.drop()
        if not self._scheme.has_own_core:
            self._fetch_micro_batches(update)

    def _make_part(self, update: Update, number: int, index: int) -> Part:
        context = UpdateContext(self._scheme.updater, self._scheme.updater.iteration, 0)
        part = Part(self, number, index, Update(self._scheme, context, update.epoch))
        part.update.part, part.reports_into, part.has_rows = part, part.observation, part.counts
        return part

    @property
    def _counting(self) -> list[Part]:
        return [part for part in self._parts if part.counts]

    def run(self) -> Tensor:
        """Compute the parts of this rank, combine the results of all ranks, and return the weight of the update."""
        running, goes_on = list(self._parts), self.ranks.goes_on
        self._threads = _Threads(running) if goes_on and len(running) > 1 else None
        try:
            while running:
                for part in list(running):
                    self._enter(part)
                    has_ended = self.compute(part) if self._threads is None else self._threads.resume(part)
                    self._leave(part)
                    if self._threads is not None:
                        self._threads.raise_error()
                    if has_ended:
                        running.remove(part)
                if running or (self._parts[0].steps and not goes_on):
                    self._step()
            if goes_on:
                self._put_gradients(self._parts[-1])
        except BaseException:
            self.ranks.statistics.undo()  # which ranks have changed each in its own way
            raise
        finally:
            if self._threads is not None:
                self._threads.finish()
            self._uncounted.close()
            _random.put_generators(self._outer_generators)
            self._reports.go_outside()
        return self._combine()

    def compute(self, part: Part) -> bool:
        """Compute a part to its end."""
        with self._reports.of(part):
            part.weight = part.update.run()
        return True

    def _combine(self) -> Tensor:
        """Set running statistics and reported values to those of all virtual ranks."""
        counting, comm = self._counting, self.ranks.comm
        if self._settled is None:
            self._check_other_ranks([names for names, _ in self._parts[0].steps], ends=True)
            own = Found(*self._end_parts())
            reported = [Reported(part.observation, part.weight, part.rows) for part in counting]
            self._settled = self.ranks.agreement(len(self._sums)).start(own, reported)()
        found, means = self._settled
        self.ranks.statistics.finish(comm, found.changed, means.rows)
        for part in reversed(counting):  # of values that have no mean, those of the first are kept
            other = {key: value for key, value in part.observation.items() if key not in means.values}
            self._reports.outer.update(other)
        self._reports.outer.update(means.values)
        return means.weight

    def _end_parts(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the keys of what the parts of this rank have reported, and the buffers that they have changed."""
        for part in self._counting:
            self.ranks.statistics.add(part.number, part.rows, part.buffers)
        keys = list_keys([Reported(part.observation, part.weight, part.rows) for part in self._counting])
        return keys, self.ranks.statistics.changed

    # --- parts ---

    def _enter(self, part: Part) -> None:
        """Let a part begin, or continue."""
        self._scheme.update = part.update
        self.ranks.statistics.put(part.buffers)
        self._put_gradients(part)
        if part.generators is not None:
            _random.put_generators(part.generators)
        self._reports.go_into(part.reports_into, part)
        self.let_metrics_count(part.has_rows)

    def _leave(self, part: Part) -> None:
        """Put aside what a part has changed, so that the next begins as it did."""
        self._check_positions()
        self._uncounted.close()
        part.buffers = self.ranks.statistics.take(part.buffers)
        self.ranks.sharded.collect()
        part.gradients = [parameter.grad for parameter in self.ranks.parameters]
        for parameter in self.ranks.parameters:
            parameter.grad = None
        part.reports_into = self._reports.observation(part)

    def _put_gradients(self, part: Part) -> None:
        for parameter, gradient in zip(self.ranks.parameters, part.gradients, strict=False):
            parameter.grad = gradient

    def let_metrics_count(self, counts: bool) -> None:
        """Let metrics of the models count what comes next, or undo it when the part is left."""
        self._uncounted.close()
        if not counts:
            self._uncounted.enter_context(uncounted(list(self._scheme.models.values())))

    def sending(self, update: Update) -> AbstractContextManager[None]:
        """Return the context of a backward of a part, in which gradients are sent that it makes final."""
        ranks, part = self.ranks, update.part
        if ranks.sharded:
            return ranks.sharded.backward()
        is_final = update.is_last and not self._scheme.updater.callbacks.backward_on_finish and not ranks.goes_on
        is_last = is_final and part is self._parts[-1] and part.rows
        if not is_last or not ranks.overlaps or ranks.comm.size == 1:
            return nullcontext()
        self._sending = GradientSum(ranks.comm, self._sum(0), list_trained(self._scheme.optimizers.values()))
        return self._sending.sending()

    # --- batches ---

    def _fetch_micro_batches(self, update: Update) -> None:
        main = self._scheme.iterators.get("main")
        for _ in range(self._scheme.updater.accumulate if main is not None else 0):
            has_ended = self._fetch("main", main).error is not None
            if has_ended or (self._scheme.ends_with_epoch and getattr(main, "epoch", 0) != update.epoch):
                break

    def _fetch(self, name: str, iterator: Any) -> _Fetched:
        """Fetch a batch of which each part will take its rows."""
        error = batch = None
        try:
            batch = next(iterator)
        except StopIteration as end:
            error = end
        fetched = _Fetched(batch, getattr(iterator, "epoch", 0), error)
        self._fetched.setdefault(name, []).append(fetched)
        self._positions[name] = _position(iterator)
        return fetched

    def fetched(self, name: str, iterator: Any, position: int) -> _Fetched:
        """Return a batch of the update, which the first part to ask for it fetches with the generators of all."""
        fetched = self._fetched.setdefault(name, [])
        if position == len(fetched):
            generators = _random.take_generators()
            _random.put_generators(self._outer_generators)
            self._fetch(name, iterator)
            self._outer_generators = _random.take_generators()
            _random.put_generators(generators)
        return fetched[position]

    def _check_positions(self) -> None:
        for name, iterator in self._scheme.iterators.items() if self.ranks.goes_on else ():
            if _position(iterator) != self._positions[name]:
                raise RuntimeError(
                    f"update_core has taken a batch from iterator {name!r} itself, with the rows of all virtual ranks of "
                    f"this rank; write self.next_batch({'' if name == 'main' else repr(name)}), which returns those of one"
                )

    # --- steps ---

    def meet(self, part: Part, names: list[str], optimizers: list[Optimizer], weights: list[Any]) -> None:
        """Take the gradients of a part to a step of optimizers, and return when they have stepped."""
        goes_on = self.ranks.goes_on
        self._check_positions()
        self.ranks.sharded.collect()
        gradients = _take_gradients(optimizers)
        number = len(part.steps)
        part.steps.append((names, weights))
        leaf: list[Tensor | None] = gradients if part.rows else [None] * len(gradients)
        if part.counts and (goes_on or self.ranks.comm.size == 1 or part is not self._parts[-1]):
            self._sum(number).add(leaf)
        elif part.counts:
            self._last_leaf = leaf
        if self._threads is not None:
            self._threads.wait(part)
        elif goes_on:
            generators, observation = _random.take_generators(), self._reports.observation(part)
            self._step()
            _random.put_generators(generators)
            self._reports.go_into(observation, part)

    def _sum(self, number: int) -> TreeSum:
        """Return the sum of the gradients of a step."""
        if number == len(self._sums):
            self._sums.append(TreeSum(self.ranks.block, self.ranks.count))
        return self._sums[number]

    def _step(self) -> None:
        """Let the optimizers step at which all parts of this rank have come.

        Raises:
            RuntimeError: the parts have come to steps of different optimizers.
        """
        steps = [[names for names, _ in part.steps] for part in self._parts]
        if (other := next((names for names in steps if names != steps[0]), None)) is not None:
            raise RuntimeError(f"{_MEET}; virtual rank {self.ranks.block[0]} has called {steps[0]}, another {other}")
        self._check_other_ranks(steps[0])
        self._reports.go_outside()
        last = self._parts[-1].update
        _random.seed_all("step", self.ranks.seed or 0, last.context.iteration, len(steps[0]))
        self._scheme.update = last
        last.step_optimizers(steps[0][-1])
        for part in self._parts:  # which find the gradients of the step, and their own of other optimizers
            pairs = zip(self.ranks.parameters, part.gradients, strict=False)
            part.gradients = [own if parameter.grad is None else parameter.grad for parameter, own in pairs]

    def _check_other_ranks(self, steps: Sequence[Sequence[str]], ends: bool = False) -> None:
        """Compare with other ranks whether their ``update_core`` has come to the same step, or to its end.

        Raises:
            RuntimeError: it has not.
        """
        comm = self.ranks.comm
        if not self.ranks.goes_on or comm.size == 1:
            return
        number = _random.stable_hash(int(ends), *(name for names in steps for name in (*names, "")))
        waits = [comm.start_max(number), comm.start_max(-number)]
        if [wait() for wait in waits] != [number, -number]:
            called = comm.gather_object((self.ranks.block[0], steps, " and has ended" if ends else ""))
            said = ", ".join(f"virtual rank {first} has called {names}{ended}" for first, names, ended in called)
            raise RuntimeError(f"{_MEET}; {said}")

    def sum_gradients(self, optimizers: list[Optimizer]) -> list[Tensor]:
        """Set the gradients of optimizers to the sums over all virtual ranks; return the sums of their weights."""
        ranks, counting, parameters = self.ranks, self._counting, list_trained(optimizers)
        number, leaf = len(counting[-1].steps) - 1, self._last_leaf
        total = self._sum(number)
        sending = self._sending or GradientSum(ranks.comm, total, parameters)
        self._sending = self._last_leaf = None
        keys, changed = ((), ()) if ranks.goes_on else self._end_parts()
        own = Found(keys, changed, sending.absent(leaf), sending.is_stale(leaf))
        sending.start(leaf)
        reported = [Reported(part.observation, part.weight, part.rows, part.steps[-1][1]) for part in counting]
        wait = ranks.agreement(number).start(own, reported)
        gradients = sending.finish()
        found, means = wait()
        if found.is_stale:
            ranks.overlaps = False
            gradients = sending.repeat(leaf)
        for index, parameter in enumerate(parameters):
            set_gradient(parameter, None if index in found.absent else gradients[index])
        total.nodes.clear()
        if not ranks.goes_on:
            self._settled = found, means
        return means.step_weights


class VirtualMean(WeightedMean):
    """Turns gradients into means over the virtual ranks of all ranks, which are summed in one order."""

    def __init__(self, scheme: Scheme, comm: Communicator | None) -> None:
        super().__init__(scheme, comm, frozenset(), sends=True)

    def sending(self, update: Update) -> AbstractContextManager[None]:
        return nullcontext() if update.part is None else update.part.joint.sending(update)

    def _sum(self, update: Update, names: list[str], optimizers: list[Optimizer]) -> Sequence[Any]:
        assert update.part is not None
        return update.part.joint.sum_gradients(optimizers)


class GradientSum(BucketedSum):
    """The sums of gradients over the virtual ranks of all ranks.

    Those of the last virtual rank of this rank, a leaf of the tree, may be sent while its backward runs.
    """

    def __init__(self, comm: Communicator, total: TreeSum, parameters: Sequence[Tensor]) -> None:
        self._comm, self._total = comm, total
        self._exchange = Exchange(comm, total, list(map(whole_like, parameters)))
        super().__init__(parameters, self._exchange.buckets, self._exchange.start)

    def absent(self, leaf: Sequence[Tensor | None] | None) -> tuple[int, ...]:
        """Return the positions of parameters that no virtual rank of this rank has a gradient of."""
        return tuple(absent_of([*self._total.nodes.values(), *([] if leaf is None else [leaf])]))

    def start(self, leaf: Sequence[Tensor | None] | None) -> None:
        """Send what was not sent yet."""
        if self._comm.size > 1:
            self._exchange.start_all(leaf)

    def finish(self) -> Sequence[Tensor | None]:
        """Return the sums, after all ranks have sent what they have; of a world of one, which has them, without a copy."""
        if self._comm.size > 1:
            return self._exchange.finish()
        (sums,) = self._total.nodes.values()
        return sums

    def repeat(self, leaf: Sequence[Tensor | None] | None) -> Sequence[Tensor | None]:
        """Return the sums, of the gradients as they are now."""
        self.finish()
        exchange = Exchange(self._comm, self._total, list(map(whole_like, self.parameters)))
        exchange.start_all(leaf)
        return exchange.finish()


class _Fetched(NamedTuple):
    """A batch of an iterator, or what it has raised in its place."""

    batch: Any
    epoch: Any
    error: BaseException | None


class _Reports:
    """Where the current reporter writes: into the observation of the update, or into that of a part."""

    def __init__(self) -> None:
        self._reporter = current.reporter
        self.outer: dict[str, Any] = {} if self._reporter is None else self._reporter.observation
        self._media_watchers = () if self._reporter is None else self._reporter.media_watchers

    def of(self, part: Part) -> AbstractContextManager[Any]:
        """Return the context in which a part reports, if there is a current reporter."""
        return nullcontext() if self._reporter is None else self._reporter.scope(part.observation)

    def observation(self, part: Part) -> dict[str, Any]:
        """Return that in which the part reports now."""
        return part.reports_into if self._reporter is None else self._reporter.observation

    def go_into(self, observation: dict[str, Any], part: Part) -> None:
        """Let the part report into an observation; of images and texts, those of the first virtual rank are kept."""
        if self._reporter is not None:
            self._reporter.observation = observation
            self._reporter.media_watchers = self._media_watchers if part.number == 0 else ()

    def go_outside(self) -> None:
        """Let what is reported be reported of the update."""
        if self._reporter is not None:
            self._reporter.observation, self._reporter.media_watchers = self.outer, self._media_watchers


class _Abandoned(BaseException):
    """Ends the thread of a part, because another part has failed."""


class _Threads:
    """Runs each part in a thread of its own, from step to step, one at a time."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._turn_is_over = threading.Semaphore(0)
        self._turns = {part.number: threading.Semaphore(0) for part in parts}
        self._ended: set[int] = set()
        self._error: BaseException | None = None
        self._is_abandoned = False
        settings = _ThreadSettings()
        self._threads = []
        for part in parts:
            arguments, name = (self._live, part, settings), f"chainring-virtual-rank-{part.number}"
            context = contextvars.copy_context()
            self._threads.append(threading.Thread(target=context.run, args=arguments, name=name, daemon=True))
            self._threads[-1].start()

    def resume(self, part: Part) -> bool:
        """Let a part continue to its next step, or to its end; return True if it has ended."""
        self._turns[part.number].release()
        self._turn_is_over.acquire()
        return part.number in self._ended

    def raise_error(self) -> None:
        """Raise what a part has raised."""
        if self._error is not None:
            raise self._error

    def wait(self, part: Part) -> None:
        """Wait, in the thread of a part, until all have stepped."""
        part.generators = _random.take_generators()
        self._turn_is_over.release()
        self._turns[part.number].acquire()
        if self._is_abandoned:
            raise _Abandoned

    def finish(self) -> None:
        """End all threads; parts that have not ended are abandoned."""
        self._is_abandoned = True
        for number in self._turns.keys() - self._ended:
            self._turns[number].release()
        for thread in self._threads:
            thread.join()

    def _live(self, part: Part, settings: _ThreadSettings) -> None:
        self._turns[part.number].acquire()
        if self._is_abandoned:
            return
        try:
            with settings.applied():
                part.joint.compute(part)
        except _Abandoned:
            return
        except BaseException as error:
            self._error = error
        self._ended.add(part.number)
        self._turn_is_over.release()


class _ThreadSettings:
    """What PyTorch keeps for each thread, as it is in this one."""

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._index = None if accelerator is None else torch.accelerator.current_device_index()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        self._autocasts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        self._grad_enabled, self._device = torch.is_grad_enabled(), torch.get_default_device()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let another thread compute as that one."""
        if self._index is not None:
            torch.accelerator.set_device_index(self._index)
        with ExitStack() as stack:
            for kind, dtype in self._autocasts:
                stack.enter_context(torch.autocast(kind, dtype))
            stack.enter_context(torch.set_grad_enabled(self._grad_enabled))
            stack.enter_context(torch.device(self._device))
            yield


def _position(iterator: Any) -> Any:
    """Return what changes with every batch of an iterator that counts epochs."""
    return getattr(iterator, "epoch", 0), getattr(iterator, "epoch_detail", 0)


def _take_gradients(optimizers: list[Optimizer]) -> list[Tensor | None]:
    """Return the gradients of optimizers, which then have none.

    Raises:
        TypeError: one is sparse.
    """
    gradients: list[Tensor | None] = []
    for parameter in list_trained(optimizers):
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise TypeError(
                f"virtual ranks add gradients in one order, and that of a parameter of shape {tuple(parameter.shape)} is "
                f"{parameter.grad.layout}; give its layer sparse=False"
            )
        gradients.append(to_local(parameter.grad))
        parameter.grad = None
    return gradients


def check_virtual_ranks(
    count: Any, comm: Communicator, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> None:
    """Refuse a number of virtual ranks, and models and optimizers with which they cannot give the same bits.

    Raises:
        TypeError: the number is not an integer.
        ValueError: it is below 1 or below the number of ranks, a module communicates by itself or is lazy, or an optimizer
            needs a closure or has sharded parameters with which it cannot.
    """
    if not is_integer(count):
        raise TypeError(f"virtual_ranks is the number of parts of an update, an integer, got {count!r}")
    if count < max(1, comm.size):
        raise ValueError(
            f"virtual_ranks is the number of parts of an update, of which each rank computes at least one, got {count} with "
            f"{comm.size} ranks; take at least {comm.size}, such as the largest number of devices that the run may ever have"
        )
    if comm.world.size > comm.size:
        raise ValueError(
            f"virtual_ranks are computed by ranks that have the whole model, or are sharded by fully_shard alone, and on "
            f"this mesh {comm.world.size // comm.size} ranks compute one model together, whose number its bits depend on: "
            "leave virtual_ranks out, or give all ranks of the mesh to the data"
        )
    for name, model in models.items():
        for path, module in model.named_modules():
            _check_module(f"model {name!r} has {path or 'itself'} of type {type(module).__name__}", module)
        _warn_of_own_state(name, model)
    for name, optimizer in optimizers.items():
        if needs_closure(optimizer):
            raise ValueError(f"optimizer {name!r} is {type(optimizer).__name__}; {NO_VIRTUAL_RANKS}")
    check_sharded_parameters(optimizers)


def _warn_of_own_state(name: str, model: nn.Module) -> None:
    """Warn of modules that save a state of their own, such as the hidden state of a recurrent network."""
    if own := [path or "itself" for path, _ in own_states(unwrap(model))]:
        warn(
            f"model {name!r} has {', '.join(own)}, which keeps a state of its own, since it has serialize(); the virtual "
            "ranks of one process share it. What changes in it from batch to batch, as the hidden state of a recurrent "
            "network does, makes the bits depend on the number of ranks: leave virtual_ranks out then",
        )


def _check_module(what: str, module: nn.Module) -> None:
    if isinstance(module, nn.SyncBatchNorm):
        raise ValueError(
            f"with virtual_ranks each virtual rank has its own statistics of the batch, and {what}, which exchanges them "
            "between ranks by itself; take nn.BatchNorm, whose running statistics are averaged"
        )
    if getattr(module, "_comm_hooks", None):
        raise ValueError(
            f"with virtual_ranks gradients are exchanged in one fixed order, and {what} with a communication hook of its "
            "own, which would not be called; leave it out"
        )
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if any(map(is_lazy, own)):
        raise ValueError(f"{what}, whose shape is not known yet; call the model with one batch before the updater is made")
