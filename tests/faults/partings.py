"""Two runs differ by one thing, and `chainring diff` is asked where they part; a witness beside the runs knows it."""

import contextlib
import functools
import io
import json
import random
import shutil
import sys
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from bench import Row
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import planted
import rank_pair
from chainring.cli import main
from chainring.training import make_extension
from tries import WrongEndError

ORDER = ("batch", "loss", "generators", "state", "tensor")  # of several differences in one iteration the first is named
WEIGHTS = ("first.weight", "first.bias", "norm.weight", "last.weight", "last.bias")


@dataclass
class Seen:
    """What a run has computed, by iteration and name; taken down by copies and hooks of PyTorch alone."""

    batches: dict = field(default_factory=dict)
    losses: dict = field(default_factory=dict)
    generators: dict = field(default_factory=dict)  # after the update
    updated: dict = field(default_factory=dict)  # the tensors after the update
    ended: dict = field(default_factory=dict)  # the tensors, generators and settings at the end of the iteration
    calls: dict = field(default_factory=dict)  # the outputs of the modules, in the order of the calls


def content(value):
    """The bytes of a tensor; of anything else its text."""
    return value.detach().numpy().tobytes() if torch.is_tensor(value) else repr(value)


def tensors_of(trainer):
    """The tensors of the model by their paths in a snapshot, and those of the optimizer."""
    model, optimizer = planted.model_of(trainer), planted.optimizer_of(trainer)
    found = {f"updater/model:main/{name.replace('.', '/')}": content(value) for name, value in model.state_dict().items()}
    states = [list(state.items()) for state in optimizer.state.values()]
    return found | {"updater/optimizer:main": [[(key, content(value)) for key, value in state] for state in states]}


def generators():
    return torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), repr(random.getstate())


def witnessed(out, **changes):
    """Trains a run with changes; what it has computed."""
    trainer, seen = planted.make_trainer(str(out), **changes), Seen()
    updater, model, taken, called = trainer.updater, planted.model_of(trainer), [], []
    data = updater.get_iterator("main").dataset
    get_example = data.get_example
    data.get_example = lambda index: taken.append(index) or get_example(index)
    for name, module in model.named_modules():
        path = f"main/{name.replace('.', '/')}".rstrip("/")
        module.register_forward_hook(lambda module, given, output, path=path: called.append((path, content(output))))

    def after_update(trainer):
        iteration = updater.iteration
        seen.batches[iteration], seen.calls[iteration] = [*taken], [*called]
        seen.losses[iteration] = float(trainer.observation["main/loss"])
        seen.generators[iteration], seen.updated[iteration] = generators(), tensors_of(trainer)
        taken.clear(), called.clear()

    def at_end(trainer):
        average = trainer.get_extension("ExponentialMovingAverage").state_dict()
        settings = [{key: value for key, value in group.items() if key != "params"} for group in
                    planted.optimizer_of(trainer).param_groups]  # fmt: skip
        seen.ended[updater.iteration] = {
            "tensor": (tensors_of(trainer), repr(average)), "generators": generators(), "state": repr((settings, len(data))),
        }  # fmt: skip

    seen.updated[0] = tensors_of(trainer)
    trainer.extend(make_extension(priority=10**6)(after_update))
    trainer.extend(make_extension(priority=-(10**6))(at_end))
    trainer.run()
    return seen


@dataclass
class Expected:
    """Where two runs part, by their witnesses.

    Attributes:
        iteration: the first in which a recorder, a row or a snapshot must show it; ``None`` if nothing differs there.
        what: the first that differs in it.
        tensor: the path of the first tensor of which a digest differs, or what it begins with.
        module: the first module of which the output differs, and in which iteration.
        plain: the first row or snapshot that must show it, and what.
    """

    iteration: int | None
    what: str | None
    tensor: str | None
    module: tuple | None
    plain: tuple | None


def expected_of(one, other):
    """Where the runs of two witnesses must be found to part."""
    differ = {
        "batch": [i for i in one.batches if one.batches[i] != other.batches[i]],
        "loss": [i for i in one.losses if repr(one.losses[i]) != repr(other.losses[i])],
        "generators": [i for i in (planted.LENGTH,) if one.generators[i] != other.generators[i]],
        "tensor": [i for i in range(0, planted.LENGTH + 1, planted.DIGESTS) if one.updated[i] != other.updated[i]],
    }
    rows = [(-(-i // planted.ROWS) * planted.ROWS, "loss") for i in differ["loss"]]
    ends = range(planted.SNAPSHOTS, planted.LENGTH + 1, planted.SNAPSHOTS)
    saved = [
        (i, what) for i in ends for what in ("generators", "state", "tensor") if one.ended[i][what] != other.ended[i][what]
    ]
    saved += [(i, "loss") for i in ends if i in differ["loss"]]
    places = [(i, what) for what, found in differ.items() for i in found]
    first, plain = (min(each, key=lambda place: (place[0], ORDER.index(place[1])), default=None)
                    for each in (places + saved, rows + saved))  # fmt: skip
    tensor = None
    if differ["tensor"]:
        tensors = [seen.updated[differ["tensor"][0]] for seen in (one, other)]
        tensor = next(path for path in {**tensors[0], **tensors[1]} if tensors[0].get(path) != tensors[1].get(path))
    return Expected(*(first or (None, None)), tensor, first_module(one, other), plain)


def first_module(one, other):
    """The first module that returns something else, and in which iteration."""
    for iteration, calls in one.calls.items():
        for call, call_other in zip(calls, other.calls[iteration], strict=True):
            if call != call_other:
                return call[0], iteration
    return None


# --- what is planted: by name the changes that are drawn, a part of the name of a setting, and whether a module is named ---


def any_iteration(draw):
    return draw.randint(2, planted.LENGTH - planted.DIGESTS)


def later(*names):
    return lambda draw: {"later": (any_iteration(draw), draw.choice(names))}


PLANTS = {
    "a learning rate": (lambda draw: {"lr": draw.uniform(0.001, 0.1)}, "lr", False),
    "one pixel": (lambda draw: {"pixel": draw.randrange(planted.EXAMPLES)}, "", True),
    "one ulp at a random iteration": (later("ulp weight", "ulp variance", "ulp moment"), "", False),
    "a seed": (lambda draw: {"seed": draw.randint(1, 2**31)}, "seeds.torch", False),
    "a kernel": (lambda draw: {"kernel": any_iteration(draw)}, "", True),
    "one example": (lambda draw: {"example": draw.randrange(planted.EXAMPLES)}, "", False),
    "one ulp at the start": (lambda draw: {"ulp": draw.choice(WEIGHTS), "place": draw.randrange(3)}, "", False),
    "dropout": (lambda draw: {"dropout": draw.uniform(0.0, 0.29)}, "", True),
    "threads": (lambda draw: {"threads": draw.randint(2, 4)}, "threads", False),
    "weight decay": (lambda draw: {"weight_decay": draw.uniform(0.02, 0.5)}, "weight_decay", False),
    "the order of the data": (lambda draw: {"order": draw.randint(2, 2**31)}, "seeds.iterators", False),
    "augmentation": (lambda draw: {"noise": draw.uniform(0.11, 0.2)}, "", True),
    "a dtype": (lambda draw: draw.choice([{"dtype": "float64"}, {"precision": "bf16"}]), "", False),
    "the number of examples": (lambda draw: {"examples": draw.randint(20, 39)}, "iterator:main.size", False),
    "one label": (lambda draw: {"label": draw.randrange(planted.EXAMPLES)}, "", True),
    "weight decay from an iteration on": (later("decay_more"), "", True),
    "a number drawn": (later("draw"), "", False),
    "a number drawn in vain": (later("draw_in_vain"), "", False),
    "a schedule": (lambda draw: {"step": draw.randint(2, 9)}, "", False),
    "an average": (lambda draw: {"decay": draw.uniform(0.91, 0.99)}, "", False),
    "a frozen layer": (lambda draw: {"frozen": draw.choice(["first", "last"])}, "frozen", False),
    "nothing": (lambda draw: {}, "", False),
}  # fmt: skip


def part(bench, number, draw, place):
    """Plants a difference, and compares the answers with what the witnesses have seen, or with what must be so."""
    name, plant = KINDS[number % len(KINDS)]
    try:
        return plant(bench, draw, place) + Counter({"differences": 1, name: 0})
    except AssertionError as error:
        raise WrongEndError(f"{name}: {error}") from error
    finally:
        torch.set_num_threads(1)


def plant_change(make_changes, setting, names_module, bench, draw, place):
    """One run is trained with a change."""
    changes = make_changes(draw)
    base, seen = reference(bench)
    with arguments(place, changes):
        expected = expected_of(seen, witnessed(place / "run", **changes))
        witnessed(place / "plain", recorded=False, **changes)
    found = diff(base / "run", place / "run")
    is_same = expected.iteration is None
    check(found["same"], is_same, changes)
    check((found["iteration"], found["what"]), (expected.iteration, expected.what), changes)
    assert (found["tensor"] or "").startswith(expected.tensor or ""), f"{changes}: {found['tensor']}, not {expected.tensor}"
    assert any(setting in each for each in found["settings"]) or not setting, f"{changes}: {found['settings']}"
    plain = diff(base / "plain", place / "plain")
    check((plain["iteration"], plain["what"]), expected.plain or (None, None), changes)
    counts = Counter({"the same": int(is_same)})
    if names_module:
        named = diff(base / "run", place / "run", "--script", planted.__file__)
        is_near = expected.module is not None and expected.module[1] <= max(expected.iteration, 1) + 1
        check((named["module"], named["module_iteration"]), expected.module if is_near else (None, None), changes)
        counts["modules named"] += is_near
    return counts


def check(found, expected, changes):
    assert found == expected, f"with {changes} found was {found}, not {expected}"


def reference(bench):
    """The directory of the runs without a change, and what they compute."""
    place = bench.root / "parting-reference"
    if place not in _references:
        with arguments(place, {}):
            _references[place] = witnessed(place / "run")
            witnessed(place / "plain", recorded=False)
    return place, _references[place]


_references = {}


@contextlib.contextmanager
def arguments(place, changes):
    """Inside, the arguments are those with which the script trains the run, and nothing is printed."""
    before, sys.argv = sys.argv, [planted.__file__, str(place / "again"), json.dumps(changes)]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        sys.argv = before


def diff(one, other, *options):
    """What is found, after the exit status was compared with it."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = main(["diff", "--json", *options, str(one), str(other)])
    found = json.loads(output.getvalue())
    assert status == (0 if found["same"] else 1), f"the exit status was {status}: {found}"
    return found


def plant_version(bench, draw, place):
    """One run says that it was of another version; all else is the same."""
    base, _ = reference(bench)
    shutil.copytree(base / "run", place / "run")
    record = json.loads((place / "run/run.json").read_text())
    name = draw.choice(sorted(record["versions"]))
    record["versions"][name] = "0.0.1"
    (place / "run/run.json").write_text(json.dumps(record))
    found = diff(base / "run", place / "run")
    check((found["same"], found["settings"].get(f"versions.{name}", [""])[-1]), (True, "0.0.1"), name)
    return Counter({"the same": 1})


def sharded(model):
    """By FSDP2, over both ranks."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def train(comm, out, wrap, changes):
    planted.make_trainer(out, comm=comm, wrap=wrap, **changes).run()


def plant_ranks(is_virtual, bench, draw, place):
    """One run is trained on two ranks: the same with virtual ranks, and otherwise of another mean from the first loss on."""
    changes = {"batch": 8, "virtual_ranks": draw.choice([2, 4, 8]) if is_virtual else None, "order": draw.randint(1, 99)}
    wrap = draw.choice([DistributedDataParallel, sharded])
    for name, size, wrapper in (("one", 1, None), ("two", 2, wrap)):
        told = rank_pair.on_ranks(size, train, str(place / name), wrapper, changes)
        assert told == [None] * size, told
    found = diff(place / "one", place / "two")
    check((found["same"], found["settings"]["ranks"]), (is_virtual, [1, 2]), changes)
    if not is_virtual:
        check((found["iteration"], found["what"], bool(found["tensor"])), (1, "loss", True), changes)
    return Counter({"the same": int(is_virtual)})


KINDS = [(name, functools.partial(plant_change, *settings)) for name, settings in PLANTS.items()]
KINDS[4:4] = [("virtual ranks", functools.partial(plant_ranks, True)), ("a version", plant_version)]
KINDS[8:8] = [("ranks", functools.partial(plant_ranks, False))]


ROWS = [
    Row(
        "parting", "two runs that differ by one thing: a rate, an example, a pixel, a seed, one ulp, a kernel, ranks",
        "`chainring diff` names the first iteration, tensor and module, or finds them the same", "differences", 50, part,
    ),
]  # fmt: skip
