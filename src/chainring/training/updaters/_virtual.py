"""Virtual ranks: an update computed in a fixed number of parts, one after the other, whichever ranks compute them."""

from __future__ import annotations

import contextvars
import ctypes
import pickle
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chainring import _random
from chainring._distributed.sharding import shard_like, to_local
from chainring._distributed.virtual_ranks import Deal, Exchange, TreeSum, absent_of
from chainring.datasets._batches import Batch, count_examples, require_count, take_examples
from chainring.reporting._metrics import uncounted
from chainring.reporting.media import report_media
from chainring.reporting.reporter import Reporter, current
from chainring.serializers.protocol import own_states, unwrap
from chainring.training.updaters._balance import Balance
from chainring.training.updaters._carried import Carried
from chainring.training.updaters._means import BucketedSum, list_trained, unstash
from chainring.training.updaters._memory import Memory
from chainring.training.updaters._ranks import check_strided
from chainring.training.updaters._update import Update
from chainring.training.updaters._virtual_state import (
    Agreement,
    ChangeWatch,
    Findings,
    Means,
    RunningStatistics,
    ShardedGradients,
    list_keys,
    whole_like,
)
from chainring.training.updaters.callbacks import UpdateContext, meeting

if TYPE_CHECKING:
    from chainring.training.updaters._update import Scheme

_LARGE = 1 << 24  # bytes of gradients, whose freed memory is given back each time so many virtual ranks were computed:
_BETWEEN = 4
_MEET = (
    "every virtual rank runs update_core, and all meet in self.step(): they must call it for the same optimizers in the "
    "same order"
)


@dataclass(slots=True, eq=False)
class Part:
    """What one virtual rank computes of an update."""

    whole: VirtualUpdate  # the update of all virtual ranks of this rank
    number: int  # of the virtual rank; their count, for a part whose results are thrown away
    index: int  # in the rows of its rank,
    size: int  # which are those of so many virtual ranks
    counts: bool  # False if its results are thrown away
    update: Update
    has_rows: bool  # its last batch has rows that count
    observation: dict[str, Any] = field(default_factory=dict)
    weight: Any = 0  # of what it has reported, in a mean
    pinned: dict[str, Any] = field(default_factory=dict)  # the weights of what it has reported of earlier batches
    rows: int = 1  # the examples of its batches; 1 in an update that takes none
    epoch: Any = 0  # of the main iterator after the last batch that it has taken, as `epoch_detail`
    epoch_detail: Any = 0.0
    taken: dict[str, int] = field(default_factory=dict)  # the number of batches of each iterator
    steps: list[tuple[list[str], list[Any]]] = field(default_factory=list)  # optimizers, and weights of their gradients
    call: Callable[[], Any] | None = None  # which it has come to, and which runs once for all
    is_bound: bool = False  # it has come to something beyond itself, and is not computed again
    leaf: list[Tensor | None] | None = None  # the gradients of the last part, which are sent without being added before
    # What belongs to it, kept here while another part is computed:
    gradients: list[Tensor | None] = field(default_factory=list)
    buffers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    generators: Any = None
    reported: dict[str, Any] = field(default_factory=dict)  # the observation of the reporter when it was left
    shown: dict[str, Any] = field(default_factory=dict)  # the images, texts and histograms, where ranks may be lost

    def list_batches(self) -> list[Any]:
        return [item.batch for fetched in self.whole._fetched.values() for item in fetched if item.error is None]

    def find_obstacle(self) -> str | None:
        """Return why this part cannot be computed again to the same bits after it has failed, if so."""
        ranks, scheme, sending = self.whole._ranks, self.whole._scheme, self.whole._sending
        if self.is_bound:
            return "it has come to a step, or to what happens once for all virtual ranks"
        if ranks.sharded or (scheme.wrapped.parameters and ranks.comm.size > 1):
            return "DDP and fully_shard exchange in a forward, which other ranks would not repeat; leave the model plain"
        if sending is not None and sending[0].started != sending[1].started:
            return "its gradients were being sent to the other ranks"
        if any(ranks.statistics.find_reshaped()):
            return "a forward has made or reshaped a buffer; call the model with a batch before the updater is made"
        trained = set(map(id, list_trained(scheme.optimizers.values())))
        if any(parameter.grad is not None and id(parameter) not in trained for parameter in ranks.parameters):
            return "a parameter of no optimizer has a gradient; requires_grad_(False) leaves it out"
        own = [path or "a model" for model in scheme.models.values() for path, _ in own_states(unwrap(model))]
        carried = Carried()
        carried.add_updater(scheme.updater)
        own += [key for key, objects in carried.items() if any(not isinstance(obj, nn.Module) for obj in objects.values())]
        if own:
            return f"{own[0]} keeps a state of its own, which may have changed"
        changed = ranks.watch.find_change()
        return None if changed is None else f"{changed} has changed"

    def restart(self, epochs: tuple[Any, Any], put_back_metrics: Callable[[], None]) -> None:
        """Put back what this part has changed before it failed, so that it begins again as it has begun."""
        whole = self.whole
        whole._uncounted.close()
        put_back_metrics()
        whole._ranks.statistics.undo()
        for parameter in whole._ranks.parameters:
            parameter.grad = None
        self.epoch, self.epoch_detail = epochs
        self.observation.clear()
        self.taken.clear()
        self.rows, self.has_rows = 1, self.counts
        context = UpdateContext(self.update.scheme.updater, self.update.context.iteration, 0)
        self.update = whole._scheme.update = Update(self.update.scheme, context, self.update.epoch)
        self.update.part = self
        whole._report_into(self.observation, self)
        whole._let_metrics_count(self.has_rows)


class VirtualRanks:
    """Computes updates for one virtual rank after the other, and joins them where an optimizer steps.

    Each virtual rank has its rows of the batch, its own random numbers, gradients and running statistics.
    """

    def __init__(self, scheme: Scheme, count: int, may_continue: bool) -> None:
        self.scheme, self.comm = proxy(scheme), scheme.updater.comm
        self.deal = Deal.even(self.comm.size, count)
        self.seed: int | None = None
        self.may_continue = may_continue  # an update_core may continue after a step
        self._is_started = False

    @property
    def count(self) -> int:
        return self.deal.count

    @property
    def block(self) -> range:
        """The virtual ranks that this rank computes."""
        return self.deal.block(self.comm.rank)

    def start(self) -> None:
        """Prepare for a run: all ranks take the seed of rank 0, if none was loaded."""
        if self.seed is None:
            self.seed = self.comm.broadcast_object(torch.initial_seed())
        self._is_started = True
        self.deal = Deal.even(self.comm.size, self.count)
        models = list(self.scheme.models.values())
        self.sharded = ShardedGradients(models)
        self.parameters = [parameter for model in models for parameter in model.parameters()]
        device = next((parameter.device for parameter in self.parameters), torch.device("cpu"))
        self.balance = Balance(self.comm, device, self.scheme.balance == "speed")
        self.statistics = RunningStatistics(self.scheme.models, self.count)
        self.watch = ChangeWatch(self.scheme, self.count)
        self.agreements = defaultdict[int, Agreement](partial(Agreement, self.comm, device))
        self.overlaps = not self.sharded  # gradients are sent while the last backward runs
        if self.scheme.audit is not None:
            self.scheme.audit.start(self)
        self.memory = Memory(models, self.parameters, self.watch, self.comm.is_main)
        size = sum(parameter.nbytes for parameter in self.parameters if parameter.device.type == "cpu")
        is_large = size >= _LARGE and sys.platform == "linux"
        self.trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None) if is_large else None

    def run(self, update: Update) -> Any:
        """Compute an update; return its weight, on one rank only: all have what all have reported."""
        if not self._is_started:  # of an updater that no trainer has started
            self.scheme.updater.start()
        if (deal := self.balance.begin(self.deal)) != self.deal:
            self.deal = deal
            self.balance.tell(deal, self.scheme.iterators)
        generators = _random.take_generators()

        def compute() -> Any:
            return VirtualUpdate(self, update, generators).run()

        weight, pins = compute() if self.scheme.audit is None else self.scheme.audit.run(update, generators, compute)
        self.balance.end()
        if self.comm.rank > 0 and not self.comm.survives:  # else any rank may be lost, and each has what counts
            return 0
        update.pins = pins
        return weight


class VirtualUpdate:
    """One update of the virtual ranks of this rank, made anew each time."""

    def __init__(self, ranks: VirtualRanks, update: Update, generators: tuple[_random.Restore, ...]) -> None:
        self._ranks, self._scheme, self._outer_generators = ranks, ranks.scheme, generators
        self._reports, self._reporter = current.reporter is not None, current.reporter or Reporter()
        self._outer, self._media_watchers = self._reporter.observation, self._reporter.media_watchers
        self._fetched: dict[str, list[_Fetched]] = {}
        self._positions = {name: _position(iterator) for name, iterator in self._scheme.iterators.items()}
        share, again = (list(ranks.block), []) if self._scheme.audit is None else self._scheme.audit.share()
        if ranks.sharded and len(ranks.block) * ranks.comm.size < ranks.count:
            # Each forward gathers parameters from all ranks, and other ranks run one forward more.
            again = [ranks.count]
        self._parts: list[Part] = []
        # Those that do not count come first, since the gradients of the last are sent while its backward runs.
        for counts, number in [*((False, number) for number in again), *((True, number) for number in ranks.block)]:
            context = UpdateContext(update.context.updater, update.context.iteration, 0)
            index, part_update = share.index(number) if number in share else 0, Update(self._scheme, context, update.epoch)
            part = Part(self, number, index, len(share), counts, part_update, has_rows=counts)
            part.update.part, part.reported = part, part.observation
            part.epoch, part.epoch_detail = self._positions.get("main", (0, 0))
            self._parts.append(part)
        self._threads: _Threads | None = None
        # Of the gradients of each step.
        self._sums = defaultdict[int, TreeSum](partial(TreeSum, ranks.deal, ranks.comm.rank))
        self._sending: tuple[Exchange, BucketedSum] | None = None
        self._result: tuple[Findings, Means] | None = None
        self._uncounted = ExitStack()
        ranks.statistics.begin(ranks.deal, ranks.comm.rank)
        ranks.watch.begin()
        ranks.sharded.drop()
        main = self._scheme.iterators.get("main")
        for _ in range(0 if self._scheme.has_own_core or main is None else self._scheme.updater.accumulate):
            has_ended = self._fetch("main", main).error is not None
            if has_ended or (self._scheme.ends_with_epoch and getattr(main, "epoch", 0) != update.epoch):
                break

    @property
    def _counted_parts(self) -> list[Part]:
        return [part for part in self._parts if part.counts]

    def run(self) -> tuple[Tensor, dict[str, tuple[Any, Any]]]:
        """Compute the parts of this rank, and combine the results of all ranks.

        Return the weight of the update, and what was reported of earlier batches than the last, with its weights.
        """
        running, may_continue = list(self._parts), self._ranks.may_continue
        measured = self._ranks.balance.choose(self._counted_parts)
        try:
            self._threads = _Threads(running) if may_continue and len(running) > 1 else None
            while running:
                for part in list(running):
                    self._enter(part)
                    with self._ranks.balance.computing() if part in measured else nullcontext():
                        has_ended = self.compute(part) if self._threads is None else self._threads.resume(part)
                    self._leave(part)
                    if part.index % _BETWEEN == _BETWEEN - 1 and self._ranks.trim is not None:
                        # Where a gradient was and little things are now, glibc has no room for the next.
                        self._ranks.trim(0)
                    if has_ended:
                        running.remove(part)
                if running or (self._parts[0].steps and not may_continue):
                    self._step()
            if may_continue:
                self._put_gradients(self._parts[-1])
        except BaseException:
            self._ranks.statistics.undo()  # each rank has changed them in its own way
            raise
        finally:
            if self._threads is not None:
                self._threads.finish()
            self._uncounted.close()
            _random.put_generators(self._outer_generators)
            self._report_into(self._outer)
            self._scheme.epochs = self._scheme.iterators.get("main", self._scheme.epochs)
        if self._result is None:
            self._check_other_ranks([names for names, _ in self._parts[0].steps], ends=True)
            self._result = self._ranks.agreements[len(self._sums)].start(
                self._end_parts(), self._counted_parts, self._ranks.deal
            )()
            self._complete(self._result[0])
        findings, means = self._result
        for key, media in pickle.loads(findings.shown).items() if findings.shown else ():
            report_media(key, media)
        self._ranks.statistics.finish(self._ranks.comm, findings.changed, means.rows)
        for part in reversed(self._counted_parts):  # of values that have no mean, those of the first are kept
            self._outer.update({key: value for key, value in part.observation.items() if key not in means.values})
        self._outer.update(means.values)
        pinned = {key for part in self._parts for key in part.pinned}
        while self._parts:  # which refer to one another, and would keep batches on the device until the collector comes
            self._parts.pop().update.part = None
        return means.weight, {key: (value, means.weights[key]) for key, value in means.values.items() if key in pinned}

    def compute(self, part: Part) -> bool:
        """Compute a part to its end, again if memory runs out."""
        self._ranks.memory.compute(part)
        return True

    def compute_once(self, part: Part) -> None:
        """Compute a part to its end, or until it fails."""
        update, updater = part.update, self._scheme.updater
        token = meeting.set(partial(self.meet_for, part))
        with ExitStack() as stack:
            stack.callback(meeting.reset, token)
            stack.enter_context(self._reporter.scope(part.observation) if self._reports else nullcontext())
            if updater.accumulate > 1:
                part.weight = update.run()
            else:
                self.seed_generators(part)
                updater.update_core()
                part.weight = require_count(update.weights.get(0, update.examples))
            part.pinned = update.take_pins(part.observation) if update.pins else {}
            part.observation |= {key: (part.observation[key], weight) for key, weight in part.pinned.items()}

    def seed_generators(self, part: Part) -> None:
        context = part.update.context
        _random.seed_all("virtual rank", self._ranks.seed or 0, context.iteration, context.micro_step, part.number)

    def _end_parts(self) -> Findings:
        """Return the keys of what the parts of this rank have reported, and the buffers that they have changed."""
        for part in self._counted_parts:
            self._ranks.statistics.add(part.number, part.rows, part.buffers)
        shown = next((pickle.dumps(part.shown) for part in self._counted_parts if part.shown), b"")
        return Findings(list_keys(self._counted_parts), tuple(sorted(self._ranks.statistics.changed)), shown=shown)

    # --- parts ---

    def _enter(self, part: Part) -> None:
        if part.counts and self._scheme.audit is not None:
            self._scheme.audit.decide()
        self._scheme.update = part.update
        if "main" in self._positions:  # the batch of the part, and not the one that was fetched for all
            self._scheme.epochs = part
        self._ranks.statistics.put(part.buffers)
        self._put_gradients(part)
        if part.generators is not None:
            _random.put_generators(part.generators)
        self._report_into(part.reported, part)
        self._let_metrics_count(part.has_rows)

    def _leave(self, part: Part) -> None:
        """Put aside what a part has changed, so that the next begins as it did."""
        self._check_positions()
        self._ranks.watch.check()
        self._uncounted.close()
        part.buffers = self._ranks.statistics.take(part.buffers)
        self._ranks.sharded.collect()
        part.gradients = [parameter.grad for parameter in self._ranks.parameters]
        for parameter in self._ranks.parameters:
            parameter.grad = None
        part.reported = self._reporter.observation

    def _put_gradients(self, part: Part) -> None:
        for parameter, gradient in zip(self._ranks.parameters, part.gradients, strict=False):
            parameter.grad = gradient

    def _report_into(self, observation: dict[str, Any], part: Part | None = None) -> None:
        """Let a part, or the update, report into an observation; of images and texts, those of virtual rank 0 are kept."""
        self._reporter.observation = observation
        is_shown = part is None or (part.number == 0 and part.counts)
        self._reporter.media_watchers = self._media_watchers if is_shown else ()
        if is_shown and part is not None and self._ranks.comm.survives:
            self._reporter.media_watchers = (part.shown.__setitem__,)

    def _let_metrics_count(self, counts: bool) -> None:
        """Let the metrics of the models count from now on, or undo when the part is left what they count."""
        self._uncounted.close()
        if not counts:
            self._uncounted.enter_context(uncounted(list(self._scheme.models.values())))

    # --- batches ---

    def take_rows(self, part: Part, name: str, iterator: Any) -> tuple[Any, Any, Any]:
        """Return the rows of a part of the next batch of an iterator, how many of them count, and the epoch of the batch."""
        position, fetched = part.taken.get(name, 0), self._fetched.setdefault(name, [])
        if position == len(fetched):  # the first part to ask for a batch fetches it, with the generators of all
            generators = _random.take_generators()
            _random.put_generators(self._outer_generators)
            was_bound, part.is_bound = part.is_bound, True  # if the fetch fails, the iterator may have gone on
            self._fetch(name, iterator)
            part.is_bound = was_bound
            self._outer_generators = _random.take_generators()
            _random.put_generators(generators)
        batch, epochs, error, first_epoch = fetched[position]
        part.taken[name] = position + 1
        if error is not None:
            raise error
        size = part.size
        rows = batch if size == 1 else take_examples(batch, slice(part.index, None, size))
        examples = count_examples(rows)
        is_empty = isinstance(examples, int) and examples == 0
        if is_empty and size > 1:  # the first example is repeated, and does not count
            rows = take_examples(batch, slice(0, 1))
            if isinstance(rows, Batch):
                rows.weight = 0
        if name == "main":
            part.epoch, part.epoch_detail = epochs
            part.rows = (part.rows if position else 0) + (examples if isinstance(examples, int) else 1)
            if part.has_rows != (part.counts and not is_empty):
                part.has_rows = not part.has_rows
                self._let_metrics_count(part.has_rows)
        return rows, examples, first_epoch

    def _fetch(self, name: str, iterator: Any) -> _Fetched:
        error = batch = None
        if self._scheme.audit is not None:
            self._scheme.audit.ask(name, iterator, len(self._fetched.get(name, ())))
        first_epoch = getattr(iterator, "epoch", 0)
        try:
            with self._ranks.balance.paused():
                batch = next(iterator)
                self._ranks.balance.check_rows(name, iterator, batch)
        except StopIteration as end:
            error = end
        self._positions[name] = _position(iterator)
        fetched = _Fetched(batch, self._positions[name], error, first_epoch)
        self._fetched.setdefault(name, []).append(fetched)
        return fetched

    def _check_positions(self) -> None:
        for name, iterator in self._scheme.iterators.items() if self._ranks.may_continue else ():
            if _position(iterator) != self._positions[name]:
                raise RuntimeError(
                    f"update_core has taken a batch from iterator {name!r} itself, with the rows of all virtual ranks of "
                    f"this rank; write self.next_batch({'' if name == 'main' else repr(name)}), which returns those of one"
                )

    # --- gradients and steps ---

    def sending(self, update: Update) -> AbstractContextManager[None]:
        """Return the context of a backward of a part, in which gradients are sent as soon as they are final."""
        ranks, part = self._ranks, update.part
        if ranks.sharded:
            return ranks.sharded.backward()
        is_final = update.is_last and not self._scheme.updater.callbacks.backward_on_finish and not ranks.may_continue
        is_last = is_final and part is self._parts[-1] and part.rows and not update.is_empty and self._sending is None
        # Where the backward is measured, it does not wait for others.
        is_measured = ranks.balance.span is not None and ranks.balance.span.is_running
        if not is_last or not ranks.overlaps or ranks.comm.size == 1 or is_measured:
            return nullcontext()
        self._sending = self._start_exchange(0, list_trained(self._scheme.optimizers.values()))
        return self._sending[1].sending()

    def _start_exchange(self, number: int, parameters: list[Tensor]) -> tuple[Exchange, BucketedSum]:
        """Return the sums of a step over all ranks, and what sends the last leaf to them while its backward runs."""
        exchange = Exchange(self._ranks.comm, self._sums[number], list(map(whole_like, parameters)))
        return exchange, BucketedSum(parameters, exchange.buckets, exchange.start)

    def meet(self, part: Part, names: list[str]) -> None:
        """Bring a part to a step of optimizers; return when they have stepped.

        A single part continues at once. If no ``update_core`` of your own may continue after the step, the parts end first,
        and the optimizers step then.
        """
        update, may_continue, gradients = part.update, self._ranks.may_continue, list[Tensor | None]()
        optimizers = [self._scheme.optimizers[name] for name in names]
        for optimizer in optimizers if update.stashed else ():
            unstash(optimizer, update.stashed)
        weights = [update.totals.pop(name) for name in names]
        self._check_positions()
        self._ranks.sharded.collect()
        for parameter in (trained := list_trained(optimizers)):
            check_strided(parameter.grad)
            gradients.append(to_local(parameter.grad) if part.rows else None)
            parameter.grad = None
        if self._scheme.audit is not None:
            gradients = self._scheme.audit.note(part, trained, gradients)
        number = len(part.steps)
        part.steps.append((names, weights))
        part.is_bound = True
        if part.counts and (may_continue or self._ranks.comm.size == 1 or part is not self._parts[-1]):
            self._sums[number].add(gradients)
        elif part.counts:
            part.leaf = gradients
        del gradients  # which would live in this frame while the part waits
        if may_continue:
            self._wait(part)
        update.stepped += optimizers

    def meet_for(self, part: Part, function: Callable[[], Any]) -> None:
        """Bring a part to a function that runs once for all of them; return when it has."""
        if not self._ranks.may_continue:
            raise RuntimeError(
                f"{function.__qualname__} runs once an update, and a loss once for each virtual rank: call it at the end of "
                "an update_core of your own, or leave it to the extension, trainer.extend(average)"
            )
        part.call, part.is_bound = function, True
        self._wait(part)

    def _wait(self, part: Part) -> None:
        """Let all parts meet where one has come to."""
        if self._threads is not None:
            self._threads.wait(part)
            return
        generators, observation, token = _random.take_generators(), self._reporter.observation, meeting.set(None)
        self._ranks.watch.check()
        part.buffers = self._ranks.statistics.take(part.buffers)
        with self._ranks.balance.paused():
            self._step()
        self._ranks.statistics.put(part.buffers)
        meeting.reset(token)
        _random.put_generators(generators)
        self._report_into(observation, part)

    def _step(self) -> None:
        """Let the optimizers step, or a function run, after all parts of this rank have called the same."""
        if (call := next((part.call for part in self._parts if part.call is not None), None)) is not None:
            if any(part.call != call for part in self._parts):
                raise RuntimeError(f"{_MEET}, and the same in what runs once an update; only some have called {call}")
            for part in self._parts:
                part.call = None
            call()
            self._ranks.watch.note()
            return
        steps = [[names for names, _ in part.steps] for part in self._parts]
        if (other := next((names for names in steps if names != steps[0]), None)) is not None:
            raise RuntimeError(f"{_MEET}; virtual rank {self._ranks.block[0]} has called {steps[0]}, another {other}")
        self._check_other_ranks(steps[0])
        self._report_into(self._outer)
        last = self._parts[-1].update
        _random.seed_all("step", self._ranks.seed or 0, last.context.iteration, len(steps[0]))
        self._scheme.update = last
        last.step(steps[0][-1], is_due=True)
        self._ranks.watch.note()
        for part in self._parts:  # each continues with the gradients of the step, and its own ones for other optimizers
            pairs = zip(self._ranks.parameters, part.gradients, strict=False)
            part.gradients = [gradient if parameter.grad is None else parameter.grad for parameter, gradient in pairs]

    def _check_other_ranks(self, steps: Sequence[Sequence[str]], ends: bool = False) -> None:
        """Refuse ranks whose ``update_core`` has not come to the same step, or to its end."""
        comm = self._ranks.comm
        if not self._ranks.may_continue or comm.size == 1:
            return
        number = _random.stable_hash(int(ends), *(name for names in steps for name in (*names, "")))
        waits = [comm.start_max(number), comm.start_max(-number)]
        if [wait() for wait in waits] != [number, -number]:
            called = comm.gather_object((self._ranks.block[0], steps, " and has ended" if ends else ""))
            said = ", ".join(f"virtual rank {first} has called {names}{ended}" for first, names, ended in called)
            raise RuntimeError(f"{_MEET}; {said}")

    def sum_gradients(self, optimizers: list[Optimizer]) -> list[Tensor]:
        """Set the gradients of optimizers to the sums over all virtual ranks; return the sums of their weights."""
        ranks, comm, parameters = self._ranks, self._ranks.comm, list_trained(optimizers)
        last, counting = self._parts[-1], self._counted_parts
        number, leaf = len(last.steps) - 1, last.leaf
        total = self._sums[number]
        exchange, sending = self._sending or self._start_exchange(number, parameters)
        self._sending = last.leaf = None
        ended = Findings() if ranks.may_continue else self._end_parts()
        absent = tuple(absent_of([*total.nodes.values(), *([] if leaf is None else [leaf])]))
        findings = Findings(ended.keys, ended.changed, absent, sending.is_stale(leaf), ended.shown)  # of this rank
        if comm.size > 1:
            exchange.start_all(leaf)
        audit = self._scheme.audit
        digests = () if audit is None else audit.pieces()
        finish = exchange.finish if comm.size > 1 else lambda: next(iter(total.nodes.values()))  # without a copy
        gradients = finish() if comm.may_lack else None  # then who completes the agreement knows that all have the sums
        wait = ranks.agreements[number].start(findings, counting, ranks.deal, at_step=True, digests=digests)
        gradients = finish() if gradients is None else gradients
        findings, means = wait()  # of all ranks
        if audit is not None:
            audit.compare(means.digests)
        if findings.is_stale:
            ranks.overlaps = False
            exchange, _ = self._start_exchange(number, parameters)
            exchange.start_all(leaf)
            gradients = exchange.finish()
        if not ranks.may_continue:
            self._complete(findings)
        for index, parameter in enumerate(parameters):
            parameter.grad = None
            if index not in findings.absent:
                parameter.grad = shard_like(gradients[index], parameter)
        total.nodes.clear()
        if not ranks.may_continue:
            self._result = findings, means
        return means.step_weights

    def _complete(self, findings: Findings) -> None:
        """Exchange the last of what ranks need, if some may be lost: none goes on before all have it."""
        comm = self._ranks.comm
        if comm.survives and comm.size > 1:
            self._ranks.statistics.exchange(comm, findings.changed)
            if comm.may_lack and (findings.is_stale or findings.changed):
                comm.barrier()


class _Fetched(NamedTuple):
    """A batch of an iterator, or the ``StopIteration`` that it has raised instead."""

    batch: Any
    position: tuple[Any, Any]  # of the iterator after it
    error: BaseException | None
    first_epoch: Any  # before it


def _position(iterator: Any) -> Any:
    """Return the position of an iterator that counts epochs, which every batch changes."""
    return getattr(iterator, "epoch", 0), getattr(iterator, "epoch_detail", 0)


class _Abandoned(BaseException):
    """Ends the thread of a part, because another part has failed."""


class _Threads:
    """Runs each part in a thread of its own, from step to step, one at a time."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._turn_is_over = threading.Semaphore(0)
        self._turns = {id(part): threading.Semaphore(0) for part in parts}
        self._ended: set[int] = set()
        self._error: BaseException | None = None
        self._is_abandoned = False
        settings, self._threads = _thread_settings(), dict[int, threading.Thread]()
        for part in parts:  # each starts when it is resumed first, so that one which an interrupt prevents is not left
            target, name = contextvars.copy_context().run, f"chainring-virtual-rank-{part.number}"
            arguments = self._run_part, part, settings
            self._threads[id(part)] = threading.Thread(target=target, args=arguments, name=name, daemon=True)

    def resume(self, part: Part) -> bool:
        """Let a part continue to its next step, or to its end; return True if it has ended."""
        if self._threads[id(part)].ident is None:
            self._threads[id(part)].start()
        else:
            self._turns[id(part)].release()
        self._turn_is_over.acquire()
        if self._error is not None:
            raise self._error
        return id(part) in self._ended

    def wait(self, part: Part) -> None:
        """Wait, in the thread of a part, until all have stepped."""
        part.generators = _random.take_generators()
        self._turn_is_over.release()
        self._turns[id(part)].acquire()
        if self._is_abandoned:
            raise _Abandoned

    def finish(self) -> None:
        """End all threads; parts that have not ended are abandoned."""
        self._is_abandoned = True
        for key in self._turns.keys() - self._ended:
            self._turns[key].release()
        for thread in self._threads.values():
            if thread.is_alive():
                thread.join()

    def _run_part(self, part: Part, settings: Callable[[], ExitStack]) -> None:
        try:
            with settings():
                part.whole.compute(part)
        except _Abandoned:
            return
        except BaseException as error:
            self._error = error
        self._ended.add(id(part))
        self._turn_is_over.release()


def _thread_settings() -> Callable[[], ExitStack]:
    """Return the context in which another thread has what PyTorch keeps for each thread, as it is in this one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    index = None if accelerator is None else torch.accelerator.current_device_index()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    autocasts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
    is_grad_enabled, device = torch.is_grad_enabled(), torch.get_default_device()

    def apply() -> ExitStack:
        if index is not None:
            torch.accelerator.set_device_index(index)
        stack = ExitStack()
        for kind, dtype in autocasts:
            stack.enter_context(torch.autocast(kind, dtype))
        stack.enter_context(torch.set_grad_enabled(is_grad_enabled))
        stack.enter_context(torch.device(device))
        return stack

    return apply
