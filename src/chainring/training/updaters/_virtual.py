"""Virtual ranks: an update computed in a fixed number of parts, one after the other, whichever ranks compute them."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from chainring import _random
from chainring._checks import is_integer
from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import to_local
from chainring._distributed.virtual_ranks import TreeSum, block_of
from chainring._messages import warn
from chainring._naming import unwrap
from chainring.datasets._columns import Batch, count_examples, take_examples
from chainring.reporting._metrics import uncounted
from chainring.reporting.reporter import current
from chainring.serializers._objects import own_states
from chainring.training.updaters._closures import needs_closure
from chainring.training.updaters._gradient_exchange import GradientExchange
from chainring.training.updaters._gradients import list_parameters
from chainring.training.updaters._running_statistics import RunningStatistics
from chainring.training.updaters._sharded_gradients import ShardedGradients, check_sharded_parameters, set_gradient
from chainring.training.updaters._virtual_means import Agreement, Found, Means, Reported, Vectors, list_keys

MEET = (
    "every virtual rank runs update_core, and all meet in self.step(): they must call it for the same optimizers in the "
    "same order"
)
NO_CLOSURES = (
    "virtual_ranks computes the gradients of a step once, and an optimizer whose step needs a closure computes them as "
    "often as it likes; take another optimizer, or leave virtual_ranks out"
)


class Part:
    """The state of one virtual rank in an update.

    Attributes:
        number: of the virtual rank.
        counts: False if its results are thrown away.
        state: the updater's.
        observation: what it has reported.
        weight: of that in a mean.
        rows: the examples of its batches; 1 in an update that takes none.
        epoch: of the main iterator after the last batch that it has taken.
        steps: the names of the optimizers at each of its steps.
        step_weights: of their gradients, in a mean.
    """

    def __init__(self, number: int, index: int, counts: bool = True) -> None:
        self.number = number
        self.counts = counts
        self.has_rows = counts  # in the batch that it has taken last
        self.index = index  # in the block of its rank
        self.state: Any = None
        self.observation: dict[str, Any] = {}
        self.weight: Any = 0
        self.rows = 1
        self.epoch: Any = 0
        self.steps: list[list[str]] = []
        self.step_weights: list[list[Any]] = []
        self.taken: dict[str, int] = {}  # batches of each iterator
        # While another part is computed:
        self.reports_into = self.observation
        self.gradients: list[Tensor | None] = []
        self.buffers: dict[int, Tensor] = {}
        self.generators: Any = None


class _Fetched(NamedTuple):
    """A batch of an iterator, or what it has raised in its place."""

    batch: Any
    epoch: Any
    error: BaseException | None


class VirtualRanks:
    """Computes an update for one virtual rank after the other, and joins them where an optimizer steps.

    Each virtual rank has its rows of the batch, its own random numbers, gradients and running statistics. If an
    ``update_core`` may continue after a step, each runs in its own thread, one at a time.

    Attributes:
        count: the number of virtual ranks, of all ranks together.
        block: those that this rank computes.
        seed: from which their random numbers are derived.
        part: the one that is being computed.
    """

    def __init__(
        self,
        count: int,
        comm: Communicator,
        models: Iterable[nn.Module],
        iterators: Mapping[str, Any],
        goes_on: bool,
    ) -> None:
        self.count = count
        self.block = block_of(comm.rank, comm.size, count)
        self.seed: int | None = None
        self.part = Part(0, 0)
        self._comm = comm
        self._models = list(models)
        self._iterators = iterators
        self._goes_on = goes_on
        self._uncounted = ExitStack()

    def start(self) -> None:
        """Prepare for a run: all ranks take the seed of rank 0, if none was loaded."""
        if self.seed is None:
            self.seed = self._comm.broadcast_object(torch.initial_seed())
        self._sharded = ShardedGradients(self._models)
        self._parameters = [parameter for model in self._models for parameter in model.parameters()]
        self._device = next((parameter.device for parameter in self._parameters), torch.device("cpu"))
        self._statistics = RunningStatistics(self._models, self.count)
        self._agreements: list[Agreement] = []  # at each step of an update, and at its end
        self._overlaps = not self._sharded
        self._vectors = Vectors(self._comm, self.block, self.count, self._device)

    def begin(self, iteration: int, finish: Callable[[list[str]], None], activate: Callable[[Part], None]) -> None:
        """Begin an update.

        Args:
            iteration: updates completed.
            finish: lets optimizers step, after all parts of all ranks have come to that step.
            activate: makes a part the one that the updater works on.
        """
        self._iteration, self._finish, self._activate = iteration, finish, activate
        self._outer_generators = _random.take_generators()
        self._fetched: dict[str, list[_Fetched]] = {}
        self._sums: list[TreeSum] = []
        self._exchange: GradientExchange | None = None
        self._last_leaf: list[Tensor | None] | None = None
        self._settled: tuple[Found, Means] | None = None
        self._reporter = current.reporter
        self._outer_observation = {} if self._reporter is None else self._reporter.observation
        self._media_watchers = () if self._reporter is None else self._reporter.media_watchers
        self._positions = {name: _position(iterator) for name, iterator in self._iterators.items()}
        self._counting = [Part(number, index) for index, number in enumerate(self.block)]
        self._parts = list(self._counting)
        if self._sharded and len(self.block) * self._comm.size < self.count:
            # Parameters are gathered from all ranks in each forward, of which other ranks have one more.
            self._parts.insert(0, Part(self.count, 0, counts=False))
        self._statistics.begin(self.block)
        self._sharded.drop()

    def run(self, compute: Callable[[Part], None]) -> Tensor:
        """Compute the parts of this rank, combine the results of all ranks, and return the weight of the update."""
        try:
            if self._goes_on and len(self._parts) > 1:
                self._threads = _Threads(self, self._parts, compute)
                self._threads.run()
                self._put_gradients(self._parts[-1])
            else:
                self._run_in_turn(compute)
        except BaseException:
            self._statistics.undo()  # which ranks have changed each in its own way
            raise
        finally:
            self._uncounted.close()
            _random.put_generators(self._outer_generators)
            self._report_into(self._outer_observation)
        return self._combine()

    def _run_in_turn(self, compute: Callable[[Part], None]) -> None:
        for part in self._parts:
            self.enter(part)
            with self.reporting(part):
                compute(part)
            self.leave(part)
        if self._parts[0].steps and not self._goes_on:
            self.step()

    def _combine(self) -> Tensor:
        """Set running statistics and reported values to those of all virtual ranks."""
        if self._settled is None:
            self._check_other_ranks(self._parts[0].steps, ends=True)
            own = Found(*self._end_parts())
            self._settled = self._agree(len(self._sums), own, [[]] * len(self._counting))()
        found, means = self._settled
        self._statistics.finish(self._comm, found.changed, means.rows)
        for part in reversed(self._counting):  # of values that have no mean, those of the first are kept
            other = {key: value for key, value in part.observation.items() if key not in means.values}
            self._outer_observation.update(other)
        self._outer_observation.update(means.values)
        return means.weight

    def _end_parts(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the keys of what the parts of this rank have reported, and the buffers that they have changed."""
        for part in self._counting:
            self._statistics.add(part.number, part.rows, part.buffers)
        keys = list_keys([Reported(part.observation, part.weight, part.rows) for part in self._counting])
        return keys, self._statistics.changed

    def _agree(self, number: int, own: Found, step_weights: Sequence[Sequence[Any]]) -> Callable[[], tuple[Found, Means]]:
        """Start to find what all ranks have found together at a step, or at the end, and the means of what they report."""
        while len(self._agreements) <= number:
            self._agreements.append(Agreement(self._comm, self._device))
        pairs = zip(self._counting, step_weights, strict=True)
        reported = [Reported(part.observation, part.weight, part.rows, weights) for part, weights in pairs]
        return self._agreements[number].start(own, partial(self._vectors.start, reported))

    # --- parts ---

    def enter(self, part: Part) -> None:
        """Let a part begin, or continue."""
        self.part = part
        self._activate(part)
        self._statistics.put(part.buffers)
        self._put_gradients(part)
        if part.generators is not None:
            _random.put_generators(part.generators)
        self._report_into(part.reports_into, part)
        self._let_metrics_count(part.has_rows)

    def leave(self, part: Part) -> None:
        """Put aside what a part has changed, so that the next begins as it did."""
        self._check_positions()
        self._uncounted.close()
        part.buffers = self._statistics.take(part.buffers)
        self._sharded.collect()
        part.gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        if self._reporter is not None:
            part.reports_into = self._reporter.observation

    def _put_gradients(self, part: Part) -> None:
        for parameter, gradient in zip(self._parameters, part.gradients, strict=False):
            parameter.grad = gradient

    def reporting(self, part: Part) -> Any:
        """Return the context in which a part reports, if there is a current reporter."""
        return nullcontext() if self._reporter is None else self._reporter.scope(part.observation)

    def _report_into(self, observation: dict[str, Any], part: Part | None = None) -> None:
        if self._reporter is not None:
            self._reporter.observation = observation
            self._reporter.media_watchers = self._media_watchers if part is None or part.number == 0 else ()

    def _let_metrics_count(self, counts: bool) -> None:
        """Let metrics of the models count what comes next, or undo it when the part is left."""
        self._uncounted.close()
        if not counts:
            self._uncounted.enter_context(uncounted(self._models))

    def seed_generators(self, micro_step: int) -> None:
        """Seed all generators for a micro-batch of the part."""
        _random.seed_all("virtual rank", self.seed or 0, self._iteration, micro_step, self.part.number)

    def backward(self, optimizers: list[Optimizer]) -> AbstractContextManager[None]:
        """Return the context of a backward.

        Args:
            optimizers: those that step after it, if no other backward comes before.
        """
        if self._sharded:
            return self._sharded.backward()
        is_last = optimizers and self.part is self._parts[-1] and self.part.rows and not self._goes_on
        if not is_last or not self._overlaps or self._comm.size == 1:
            return nullcontext()
        self._exchange = GradientExchange(self._comm, self._sum(0), _list_trained(optimizers))
        return self._exchange.backward()

    # --- batches ---

    def fetch(self, name: str, iterator: Any) -> bool:
        """Fetch a batch of which each part will take its rows; return False if the data have run out."""
        error = batch = None
        try:
            batch = next(iterator)
        except StopIteration as end:
            error = end
        self._fetched.setdefault(name, []).append(_Fetched(batch, getattr(iterator, "epoch", 0), error))
        self._positions[name] = _position(iterator)
        return error is None

    def _check_positions(self) -> None:
        for name, iterator in self._iterators.items() if self._goes_on else ():
            if _position(iterator) != self._positions[name]:
                raise RuntimeError(
                    f"update_core has taken a batch from iterator {name!r} itself, with the rows of all virtual ranks of "
                    f"this rank; write self.next_batch({'' if name == 'main' else repr(name)}), which returns those of one"
                )

    def take(self, name: str, iterator: Any) -> tuple[Any, Any]:
        """Return the rows of the part in the next batch of an iterator, and how many of them count.

        Raises:
            StopIteration: the data have run out.
        """
        part, fetched = self.part, self._fetched.setdefault(name, [])
        position = part.taken.get(name, 0)
        if position == len(fetched):
            generators = _random.take_generators()
            _random.put_generators(self._outer_generators)
            self.fetch(name, iterator)
            self._outer_generators = _random.take_generators()
            _random.put_generators(generators)
        batch, epoch, error = fetched[position]
        part.taken[name] = position + 1
        if error is not None:
            raise error
        rows, examples = _take_rows(batch, part.index, len(self.block))
        if name == "main":
            part.epoch = epoch
            part.rows = (part.rows if position else 0) + (examples if isinstance(examples, int) else 1)
            part.has_rows = part.counts and not (isinstance(examples, int) and examples == 0)
            self._let_metrics_count(part.has_rows)
        return rows, examples

    # --- steps ---

    def meet(self, names: list[str], optimizers: list[Optimizer], weights: list[Any]) -> None:
        """Come to a step of optimizers with the gradients of the part, and wait until they have stepped.

        A single part continues at once. If no ``update_core`` of your own may continue after the step, all parts end first.

        Args:
            names: of the optimizers.
            optimizers: those of these names, whose gradients are taken away.
            weights: of the gradients of each, in a mean.
        """
        self._check_positions()
        self._sharded.collect()
        gradients = _take_gradients(optimizers)
        part = self.part
        number = len(part.steps)
        part.steps.append(names)
        part.step_weights.append(weights)
        leaf: list[Tensor | None] = gradients if part.rows else [None] * len(gradients)
        if part.counts and (self._goes_on or self._comm.size == 1 or part is not self._counting[-1]):
            self._sum(number).add(leaf)
        elif part.counts:
            self._last_leaf = leaf
        if self._goes_on and len(self._parts) == 1:
            generators = _random.take_generators()
            observation = part.observation if self._reporter is None else self._reporter.observation
            self.step()
            _random.put_generators(generators)
            self._report_into(observation, part)
        elif self._goes_on:
            self._threads.wait(part)

    def _sum(self, number: int) -> TreeSum:
        """Return the sum of the gradients of a step."""
        if number == len(self._sums):
            self._sums.append(TreeSum(self.block, self.count))
        return self._sums[number]

    def step(self) -> None:
        """Let the optimizers step at which all parts of this rank have come.

        Raises:
            RuntimeError: the parts have come to steps of different optimizers.
        """
        steps = [part.steps for part in self._parts]
        if (other := next((names for names in steps if names != steps[0]), None)) is not None:
            raise RuntimeError(f"{MEET}; virtual rank {self.block[0]} has called {steps[0]}, another {other}")
        self._check_other_ranks(steps[0])
        number = len(steps[0])
        self._report_into(self._outer_observation)
        _random.seed_all("step", self.seed or 0, self._iteration, number)
        self._activate(self._parts[-1])
        self._finish(steps[0][-1])
        for part in self._parts:  # which find the gradients of the step, and their own of other optimizers
            pairs = zip(self._parameters, part.gradients, strict=False)
            part.gradients = [own if parameter.grad is None else parameter.grad for parameter, own in pairs]

    def _check_other_ranks(self, steps: Sequence[Sequence[str]], ends: bool = False) -> None:
        """Compare with other ranks whether their ``update_core`` has come to the same step, or to its end.

        Raises:
            RuntimeError: it has not.
        """
        if not self._goes_on or self._comm.size == 1:
            return
        number = _random.stable_hash(int(ends), *(name for names in steps for name in (*names, "")))
        waits = [self._comm.start_max(number), self._comm.start_max(-number)]
        if [wait() for wait in waits] != [number, -number]:
            found = self._comm.gather_object((self.block[0], steps, " and has ended" if ends else ""))
            said = ", ".join(f"virtual rank {first} has called {called}{ended}" for first, called, ended in found)
            raise RuntimeError(f"{MEET}; {said}")

    def sum_gradients(self, optimizers: list[Optimizer]) -> list[Tensor]:
        """Set the gradients of optimizers to the sums over all virtual ranks; return the sums of their weights."""
        parameters = _list_trained(optimizers)
        number, leaf = len(self._counting[-1].steps) - 1, self._last_leaf
        total = self._sum(number)
        exchange = self._exchange or GradientExchange(self._comm, total, parameters)
        self._exchange = self._last_leaf = None
        keys, changed = ((), ()) if self._goes_on else self._end_parts()
        own = Found(keys, changed, exchange.absent(leaf), exchange.is_stale(leaf))
        exchange.start(leaf)
        wait = self._agree(number, own, [part.step_weights[-1] for part in self._counting])
        gradients = exchange.finish()
        found, means = wait()
        if found.is_stale:
            self._overlaps = False
            gradients = exchange.repeat(leaf)
        for place, parameter in enumerate(parameters):
            set_gradient(parameter, None if place in found.absent else gradients[place])
        total.nodes.clear()
        if not self._goes_on:
            self._settled = found, means
        return means.step_weights


class _Abandoned(BaseException):
    """Ends the thread of a part, because another part has failed."""


class _Threads:
    """Runs each part in a thread of its own, from step to step, one at a time."""

    def __init__(self, ranks: VirtualRanks, parts: list[Part], compute: Callable[[Part], None]) -> None:
        self._ranks, self._parts, self._compute = ranks, parts, compute
        self._turn_is_over = threading.Semaphore(0)
        self._turns = {part.number: threading.Semaphore(0) for part in parts}
        self._running = {part.number for part in parts}
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._settings = _ThreadSettings()

    def run(self) -> None:
        """Run all parts to their ends."""
        threads = []
        for part in self._parts:
            context = contextvars.copy_context()
            name = f"chainring-virtual-rank-{part.number}"
            threads.append(threading.Thread(target=context.run, args=(self._live, part), name=name, daemon=True))
            threads[-1].start()
        try:
            while self._running:
                for part in self._parts:
                    self._continue(part)
                if self._running:
                    self._ranks.step()
        finally:
            self._is_abandoned = True
            for number in self._running:
                self._turns[number].release()
            for thread in threads:
                thread.join()

    def _continue(self, part: Part) -> None:
        """Let a part continue to its next step, or to its end."""
        if part.number in self._running:
            self._ranks.enter(part)
            self._turns[part.number].release()
            self._turn_is_over.acquire()
            self._ranks.leave(part)
            if self._error is not None:
                raise self._error

    def wait(self, part: Part) -> None:
        """Wait, in the thread of a part, until all have stepped."""
        part.generators = _random.take_generators()
        self._turn_is_over.release()
        self._turns[part.number].acquire()
        if self._is_abandoned:
            raise _Abandoned

    def _live(self, part: Part) -> None:
        self._turns[part.number].acquire()
        if self._is_abandoned:
            return
        try:
            with self._settings.applied(), self._ranks.reporting(part):
                self._compute(part)
        except _Abandoned:
            return
        except BaseException as error:
            self._error = error
        self._running.discard(part.number)
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


def _take_rows(batch: Any, index: int, size: int) -> tuple[Any, Any]:
    """Return every size-th example of a batch; where there is none the first one, which does not count."""
    if size == 1:
        return batch, count_examples(batch)
    rows = take_examples(batch, slice(index, None, size))
    examples = count_examples(rows)
    if isinstance(examples, int) and examples == 0:
        rows = take_examples(batch, slice(0, 1))
        if isinstance(rows, Batch):
            rows.weight = 0
    return rows, examples


def _list_trained(optimizers: list[Optimizer]) -> list[Tensor]:
    return [parameter for parameter in list_parameters(optimizers) if parameter.requires_grad]


def _take_gradients(optimizers: list[Optimizer]) -> list[Tensor | None]:
    """Return the gradients of optimizers, which then have none.

    Raises:
        TypeError: one is sparse.
    """
    gradients: list[Tensor | None] = []
    for parameter in _list_trained(optimizers):
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
            raise ValueError(f"optimizer {name!r} is {type(optimizer).__name__}; {NO_CLOSURES}")
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
