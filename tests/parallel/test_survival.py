"""Ranks that go on in their processes when others are lost: to the bits and rows of the run that loses none."""

import functools
import json
import os
import signal
import sys
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import nn

import audits
from chainring import iterators, report, report_text, training
from chainring._distributed.communicator import Communicator, RanksLost
from chainring.nn import Classifier
from chainring.parallel import create_communicator
from chainring.training import extensions
from chainring.writers import CsvWriter, TensorBoardWriter
from ports import free_port
from survivors import EXAMPLES, Killing, Showing, end_of


def log(comm, out, order):
    """A log with writers, of which one kills rank 0 before or after the others have a row."""
    torch.manual_seed(0)
    model = Showing(nn.Linear(4, 3))
    iterator = iterators.SerialIterator(EXAMPLES, 8, shuffle=True, seed=0)
    updater = training.StandardUpdater(iterator, torch.optim.Adam(model.parameters()), model, comm=comm, virtual_ranks=4)
    writers = [CsvWriter(), TensorBoardWriter(), Killing(4 if comm is not None and comm.rank == 0 else -1)][::order]
    report = extensions.LogReport(trigger=(2, "iteration"), writers=writers)
    trainer = training.Trainer(updater, (9, "iteration"), out, [report])
    trainer.extend(extensions.Evaluator(iterators.SerialIterator(EXAMPLES, 6, repeat=False, shuffle=False), model))
    trainer.run()


@pytest.mark.parametrize("order", [1, -1], ids=["after", "before"])
def test_no_row_that_a_lost_rank_0_was_writing_is_missing_or_twice(tmp_path, order):
    """Nor is an image, text or histogram: the files of the log and its writers are those of one process."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # which no rank imports

    log(None, str(tmp_path / "alone"), order)
    assert end_of(3, log, str(tmp_path / "three"), order) == [-signal.SIGKILL, 0, 0]
    found = []
    for name in ("alone", "three"):
        rows = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        table = (tmp_path / name / "log.csv").read_text().splitlines()
        assert [row["elapsed_time"] for row in rows] == [float(line.split(",")[2]) for line in table[1:]]
        reader = EventAccumulator(str(tmp_path / name / "tensorboard"), {"images": 0, "histograms": 0}).Reload()
        tags = {tag: [event.step for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
        shown = [[event.step for event in events] for events in (reader.Images("image"), reader.Histograms("weights"))]
        names = {file.name for file in (tmp_path / name).iterdir()}
        values = [{key: value for key, value in row.items() if key != "elapsed_time"} for row in rows]
        found.append((values, tags, shown, names, (tmp_path / name / "log.media.jsonl").read_text()))
    assert found[0] == found[1]
    assert len(found[0][0]) == 4


def kill_where_media_are_written(rank):
    """Kills rank 0 when it makes the file with what the first row of a log shows."""

    def hear(event, arguments):
        if event == "open" and str(arguments[0]).endswith("log.media.jsonl") and arguments[2] & os.O_CREAT:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        sys.addaudithook(hear)


def test_the_first_row_of_a_file_that_a_lost_rank_0_has_not_made_is_there(tmp_path):
    """The others have it in memory: they make the file."""
    log(None, str(tmp_path / "alone"), 1)
    codes = end_of(3, log, str(tmp_path / "three"), 1, before=kill_where_media_are_written)
    assert codes == [-signal.SIGKILL, 0, 0]
    alone, three = ((tmp_path / name / "log.media.jsonl").read_text() for name in ("alone", "three"))
    assert alone == three


def record(comm, out, dying=None, at=0):
    torch.manual_seed(0)
    is_dying = comm is not None and comm.rank == dying
    model = Classifier(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)))
    iterator = iterators.SerialIterator(EXAMPLES, 8, shuffle=True, seed=0)
    updater = training.StandardUpdater(iterator, torch.optim.Adam(model.parameters()), model, comm=comm, virtual_ranks=4)
    torch.manual_seed(0 if comm is None else comm.rank)
    trainer = training.Trainer(updater, (80, "iteration"), str(out))
    trainer.extend(extensions.Recorder((10, "iteration")))
    trainer.extend(extensions.snapshot(autoload=True), trigger=(20, "iteration"))

    def draw(trainer):
        torch.rand(3)
        if is_dying and trainer.updater.iteration == at:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.extend(draw, trigger=(1, "iteration"), priority=2000)
    trainer.run()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Returns where a run of one process is, of a function and its arguments, which is made once."""

    @functools.cache
    def made(function, *arguments):
        out = tmp_path_factory.mktemp("alone")
        function(None, out, *arguments)
        return out

    return made


@pytest.mark.parametrize(("dying", "at"), [(0, 5), (0, 33), (0, 64), (1, 40)])
def test_the_recorder_goes_on_to_the_same_bytes(alone, tmp_path, dying, at):
    """Also where a rank is lost before it has recorded an iteration, the first of a block, and where extensions draw."""
    codes = end_of(3, record, str(tmp_path / "three"), dying, at)
    assert codes == [-signal.SIGKILL if rank == dying else 0 for rank in range(3)]
    assert (tmp_path / "three" / "recorder.bin").read_bytes() == (alone(record) / "recorder.bin").read_bytes()
    assert not (tmp_path / "three" / "abandoned").exists()


def show_alone(comm, out):
    def sample(trainer):
        if trainer.comm.is_main:
            report_text("sample", "of rank 0")

    model = Classifier(nn.Linear(4, 3))
    iterator = iterators.SerialIterator(EXAMPLES, 8)
    updater = training.StandardUpdater(iterator, torch.optim.Adam(model.parameters()), model, comm=comm, virtual_ranks=4)
    trainer = training.Trainer(updater, (2, "iteration"), out=out)
    trainer.extend(sample, trigger=(1, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    with pytest.raises((ValueError, RuntimeError), match="rank 1 has not reported 'sample': report images, texts"):
        trainer.run()


def test_what_rank_0_alone_shows_is_refused(tmp_path):
    """It would be lost with that rank; the error says to report it on every rank."""
    assert end_of(2, show_alone, str(tmp_path)) == [0, 0]


class Dying(torch.utils.data.Dataset):
    """Kills its process when an example is fetched for the given time."""

    def __init__(self, at):
        self.left = at

    def __len__(self):
        return len(EXAMPLES)

    def __getitem__(self, i):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return EXAMPLES[i]


class Busy(Classifier):
    """Takes the longer the higher a rank is."""

    def forward(self, x, t):
        for _ in range(20 * self.rank):
            torch.ones(50, 50) @ torch.ones(50, 50)
        return super().forward(x, t)


class TwoSteps(training.StandardUpdater):
    """Steps with one optimizer after the other, on a batch each, and averages the model between the steps."""

    def update_core(self):
        for name in self.get_all_optimizers():
            self.backward(self.get_model("main")(*self.next_batch()))
            self.step(name)
            self.average.update()


class Counted(iterators.Iterator):
    """Without a mark to which it could return: its position is its state."""

    serves_virtual_ranks = True

    def __init__(self, dataset):
        self.dataset, self.batch_size, self.at = dataset, 8, 0

    def __next__(self):
        self.at += 1
        self.epoch, self.is_new_epoch = self.at // 3, self.at % 3 == 0
        positions = torch.arange(8 * self.at, 8 * self.at + 8) % len(self.dataset)
        return self.take_share(iterators.Batch([self.dataset[i] for i in positions]))

    def serialize(self, serializer):
        self.at = serializer("at", self.at)
        self.epoch = self.at // 3


class Growing:
    """A loss with a state, which a forward changes."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, x, t):
        self.calls += 1
        return model(x, t) * (1 + self.calls)

    def serialize(self, serializer):
        self.calls = serializer("calls", self.calls)


def run(comm, out, kind=None, dying=None, at=0, after=None):
    """A rank dies when it fetches for the given time, or after an iteration."""
    torch.manual_seed(0)
    rank = 0 if comm is None else comm.rank
    dataset = Dying(at if rank == dying else -1)
    is_plain = kind is not None and kind.startswith(
        "plain"
    )  # without what the number of ranks changes by more than rounding
    body = nn.Sequential(nn.Linear(4, 8), *([nn.Tanh()] if is_plain else [nn.BatchNorm1d(8), nn.Dropout(0.2)]))
    model, head = Busy(nn.Sequential(*body, last := nn.Linear(8, 3))), last
    model.rank = rank
    iterator = Counted(dataset) if kind == "without a mark" else iterators.SerialIterator(dataset, 8, shuffle=True, seed=0)
    optimizer, cls = torch.optim.Adam(model.parameters()), training.StandardUpdater
    settings = {"virtual_ranks": 4, "balance": "speed" if kind == "balance" else "even"}
    if is_plain:
        settings = {"loss_func": Growing()}
    if kind in ("two steps", "plain two steps"):
        cls, settings["precision"] = TwoSteps, "fp16"
        optimizer = {"body": torch.optim.AdamW(body.parameters()), "head": torch.optim.SGD(head.parameters(), 0.1, 0.9)}
    if kind == "after the step":
        done = training.UpdateCallbacks(update_on_finish=lambda _: (comm or Communicator()).gather_object(dataset[0]))
        settings["callbacks"] = done
    updater = cls(iterator, optimizer, model, comm=comm, **settings)
    updater.average = extensions.ExponentialMovingAverage(model, 0.9)
    trainer = training.Trainer(updater, (12, "iteration"), out=str(out))
    trainer.extend(updater.average)
    trainer.extend(extensions.Evaluator(iterators.SerialIterator(EXAMPLES, 6, repeat=False, shuffle=False), model))
    trainer.extend(extensions.LogReport(trigger=(2, "iteration")))
    if after is not None:
        die = partial(os.kill, os.getpid(), signal.SIGKILL if rank == dying else 0)
        trainer.extend(lambda _: die(), trigger=(after, "iteration"))
    trainer.run()
    if comm is None or comm.is_main:
        torch.save({**model.state_dict(), **updater.average.model.state_dict(prefix="average.")}, out / "model")


def run_with_rows(comm, out, dying=None, at=None):
    """A rank dies with a row that it has made and not told."""
    torch.manual_seed(0)
    model = Classifier(nn.Linear(4, 3))
    iterator = iterators.SerialIterator(EXAMPLES, 8, shuffle=True, seed=0)
    updater = training.StandardUpdater(iterator, torch.optim.Adam(model.parameters()), model, comm=comm, virtual_ranks=4)

    rank = 0 if comm is None else comm.rank  # others have it later

    def die(row):
        if rank == dying and row["iteration"] == at:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = training.Trainer(updater, (8, "iteration"), out=str(out))
    trainer.extend(extensions.LogReport(trigger=(2, "iteration"), postprocess=die))
    trainer.run()


def rows_of(out):
    """Of the log, but for the time."""
    return [
        {key: value for key, value in row.items() if key != "elapsed_time"} for row in json.loads((out / "log").read_text())
    ]


@pytest.mark.parametrize("dying", [0, 2])
def test_the_other_ranks_train_on_to_the_same_bits(alone, tmp_path, dying):
    """A rank is killed while it fetches: the others end with the parameters and rows of one process, and name the rank."""
    codes = end_of(3, run, tmp_path / "three", None, dying, 20)
    assert codes == [-signal.SIGKILL if rank == dying else 0 for rank in range(3)]
    expected, found = (torch.load(out / "model") for out in (alone(run), tmp_path / "three"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert rows_of(alone(run)) == rows_of(tmp_path / "three")
    (begun, again) = json.loads((tmp_path / "three" / "run.json").read_text())["starts"]
    assert "lost" not in begun
    assert again["lost"].startswith(f"rank {dying} (process ")


@pytest.mark.parametrize(
    ("kind", "at", "after"),
    [
        ("balance", 20, None),
        ("balance", 0, 5),
        ("two steps", 19, None),
        ("after the step", 15, None),
        ("without a mark", 35, None),
    ],
    ids=[
        "dealt by speed",
        "dealt by speed, before speeds are exchanged",
        "an update_core of two optimizers, between their steps",
        "a callback that exchanges after the step",
        "an iterator that returns to no mark",
    ],
)
def test_an_update_begins_again_as_it_has_begun(alone, tmp_path, kind, at, after):
    """What it has changed is put back: parameters, states of optimizers, loss scale, average, position in the data."""
    assert end_of(3, run, tmp_path / "three", kind, 0, at, after) == [-signal.SIGKILL, 0, 0]
    expected, found = (torch.load(out / "model") for out in (alone(run, kind), tmp_path / "three"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert rows_of(alone(run, kind)) == rows_of(tmp_path / "three")


@pytest.mark.parametrize("dying", [0, 1])
def test_a_row_that_is_made_again_is_that_of_its_interval(alone, tmp_path, dying):
    """A rank is lost after the means of an interval were exchanged, and before all have the row."""
    assert end_of(3, run_with_rows, tmp_path / "three", dying, 4).count(-signal.SIGKILL) == 1
    assert rows_of(tmp_path / "three") == rows_of(alone(run_with_rows))


@pytest.mark.parametrize(("kind", "at"), [("plain", 17), ("plain two steps", 28)])
def test_ranks_without_virtual_ones_go_on_to_rounding(tmp_path, kind, at):
    """No rank steps before all can, and what the lost one has reported in the open interval counts in the next row."""
    run(None, tmp_path / "alone", kind)
    assert end_of(3, run, tmp_path / "three", kind, 0, at) == [-signal.SIGKILL, 0, 0]
    expected, found = (torch.load(tmp_path / name / "model") for name in ("alone", "three"))
    assert all(torch.allclose(found[name], value, atol=1e-4) for name, value in expected.items())
    for row, known in zip(rows_of(tmp_path / "three"), rows_of(tmp_path / "alone"), strict=True):
        assert row == {key: pytest.approx(value, rel=1e-4) for key, value in known.items()}


def time_ranks(comm, out):
    iterator = iterators.SerialIterator(EXAMPLES, 8)
    model = Classifier(nn.Linear(4, 3))
    updater = training.StandardUpdater(iterator, torch.optim.Adam(model.parameters()), model, comm=comm, virtual_ranks=2)
    trainer = training.Trainer(updater, (6, "iteration"), out)
    trainer.extend(extensions.RankTimes((3, "iteration")))
    trainer.extend(extensions.LogReport(trigger=(3, "iteration")))

    def die(trainer):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.extend(die, trigger=(4, "iteration"))
    trainer.run()


def test_the_only_rank_that_is_left_waits_for_nobody(tmp_path):
    """What `RankTimes` reports of it, though it goes on to exchange with itself."""
    assert end_of(2, time_ranks, str(tmp_path)) == [0, -signal.SIGKILL]
    of_both, of_last = (row["rank_times/waiting"] for row in rows_of(tmp_path))
    assert (of_both > 0, of_last) == (True, 0)


class Fatal(training.Extension):
    """Kills its process where it is told to, in the start or at the end of a run."""

    trigger = (100, "iteration")
    autoload = True
    invoke_before_training = True

    def __init__(self, where):
        self.where = where

    def die(self, where):
        if self.where == where:
            os.kill(os.getpid(), signal.SIGKILL)

    def newest(self, trainer):
        self.die("while state is looked for")

    def initialize(self, trainer):
        self.die("in an initialize")

    def __call__(self, trainer):
        self.die("in a call before training")

    def finalize(self):
        self.die("in a finalize")


def start_and_end(comm, out, dying=None, where=None, iterations=6):
    torch.manual_seed(0)
    rank = 0 if comm is None else comm.rank
    model = Classifier(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)))
    iterator = iterators.SerialIterator(EXAMPLES, 8, shuffle=True, seed=0)
    updater = training.StandardUpdater(iterator, torch.optim.Adam(model.parameters()), model, comm=comm, virtual_ranks=4)
    torch.manual_seed(rank)
    trainer = training.Trainer(updater, (iterations, "iteration"), out)
    trainer.extend(extensions.Evaluator(iterators.SerialIterator(EXAMPLES, 6, repeat=False, shuffle=False), model))
    average = extensions.ExponentialMovingAverage(model, 0.9)
    trainer.extend(average)
    trainer.extend(extensions.LogReport(trigger=(2, "iteration"), writers=[CsvWriter()]))
    trainer.extend(extensions.Recorder())
    trainer.extend(extensions.snapshot(autoload=True), trigger=(4, "iteration"))
    trainer.extend(Fatal(where if rank == dying else None), priority=-200)  # when the others have been initialized
    trainer.run()
    if comm is None or comm.is_main:
        torch.save({**model.state_dict(), **average.model.state_dict(prefix="average.")}, f"{out}/model")


@pytest.mark.parametrize(
    ("where", "saved", "dying"),
    [
        ("while state is looked for", 0, 0),
        ("while state is looked for", 4, 0),
        ("in an initialize", 0, 0),
        ("in an initialize", 0, 1),
        ("in an initialize", 4, 0),
        ("in a call before training", 0, 0),
        ("in a finalize", 0, 0),
    ],
)
def test_the_start_and_the_end_of_a_run_are_done_again(tmp_path, where, saved, dying):
    """Of a new run, and of one that continues from a snapshot: to the bits, the rows and the files of one process."""
    found = []
    for name in ("alone", "three"):
        out = str(tmp_path / name)
        if saved:
            start_and_end(None, out, iterations=saved)
        if name == "alone":
            start_and_end(None, out)
        else:
            codes = end_of(3, start_and_end, out, dying, where)
            assert codes == [-signal.SIGKILL if rank == dying else 0 for rank in range(3)]
        files = {file.relative_to(out).as_posix(): file for file in sorted((tmp_path / name).rglob("*"))}
        table = [line.split(",")[:2] for line in files["log.csv"].read_text().splitlines()]
        found.append((list(files), rows_of(tmp_path / name), table, files["recorder.bin"].read_bytes()))
    assert found[0] == found[1]
    expected, model = (torch.load(tmp_path / name / "model") for name in ("alone", "three"))
    assert all(torch.equal(model[name], value) for name, value in expected.items())
    if where != "in a finalize" or dying == 0:
        again = json.loads((tmp_path / "three" / "run.json").read_text())["starts"][-1]
        assert again["lost"].startswith(f"rank {dying} (process ")


def exchange(comm, out):
    pid, first = os.getpid(), comm.rank
    total = torch.tensor([1.0])
    comm.all_reduce([total], average=False)
    if first == 1:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RanksLost, match=r"rank 1 \(process \d+ on .*\) was lost"):
        comm.gather_object(first)
    told = [comm.rank, comm.size, comm.gather_object((first, pid == os.getpid())), total.item()]
    (out / str(first)).write_text(json.dumps(told))
    comm.close()


def test_ranks_are_numbered_anew_in_their_order(tmp_path):
    """After a loss the communicator is that of the ranks that are left, in the same processes."""
    assert end_of(4, exchange, tmp_path) == [0, -signal.SIGKILL, 0, 0]
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 2, 3)]
    assert told == [[rank, 3, [[0, True], [2, True], [3, True]], 4.0] for rank in range(3)]


def test_ranks_meet_where_their_torchruns_do(tmp_path):
    """If a variable says where, and not at the torchrun of rank 0, which may be lost; here nothing is at its port."""
    where = {"MASTER_PORT": free_port()}
    codes = end_of(4, exchange, tmp_path, told=lambda port: {**where, "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}"})
    assert codes == [0, -signal.SIGKILL, 0, 0]


def test_where_the_torchruns_meet_has_to_be_an_address(monkeypatch):
    """As torchrun itself takes it; the error says how it is given."""
    where = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PET_RDZV_ENDPOINT": "node1"}
    for name, value in {**where, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="PET_RDZV_ENDPOINT is 'node1', where a store is: give it as HOST:PORT"):
        create_communicator("cpu", survive=True)


class Breaking:
    """An exchange of PyTorch whose last message reaches all but this rank."""

    def __init__(self, work):
        self._work, self.is_completed = work, work.is_completed

    def wait(self, timeout):
        self._work.wait()
        raise RuntimeError("gloo: Connection closed by peer")


def count(comm, out):
    (out / str(comm.rank)).write_text(str(comm.gather_object(os.environ["RANK"])))
    comm.close()


def die_in(name, rank):
    if rank == 0:
        setattr(torch.distributed, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("function", ["init_process_group", "new_group", "all_gather"])
def test_the_first_group_is_formed_again(tmp_path, function):
    """Without a rank that is lost while all of them form it."""
    assert end_of(3, count, tmp_path, before=partial(die_in, function)) == [-signal.SIGKILL, 0, 0]
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["['1', '2']"] * 2


def form_in_vain(rank):
    """On rank 1 a group before, whose other rank does not come."""
    if rank == 1:
        settings = {"rank": 1, "world_size": 2, "timeout": timedelta(seconds=0.1)}
        with pytest.raises(torch.distributed.DistError):
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), **settings)


def test_a_group_that_could_not_be_formed_does_not_count(tmp_path):
    """PyTorch names groups by their number, by which ranks would miss one another for ever."""
    assert end_of(2, count, tmp_path, before=form_in_vain) == [0, 0]


def break_last(rank):
    """On rank 1 the last of the six messages by which ranks form a group."""
    left, start = [6], torch.distributed.all_gather

    def gather(*arguments, **settings):
        left[0] -= 1
        return start(*arguments, **settings) if left[0] else Breaking(start(*arguments, **settings))

    if rank == 1:
        torch.distributed.all_gather = gather


def begin(comm, out):
    if os.environ["RANK"] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    start_and_end(comm, out)


def test_the_first_group_is_formed_again_with_ranks_that_had_it(tmp_path):
    """One has formed it and begins the run, another has not: they form one and begin."""
    assert end_of(3, begin, str(tmp_path / "three"), before=break_last) == [0, 0, -signal.SIGKILL]
    start_and_end(None, str(tmp_path / "alone"))
    assert rows_of(tmp_path / "three") == rows_of(tmp_path / "alone")


def gather_much(comm, out, numbers):
    first, start = comm.rank, torch.distributed.all_gather
    if first == 1:
        torch.distributed.all_gather = lambda *arguments, **settings: Breaking(start(*arguments, **settings))
    wait = comm.start_all_gather(torch.full([numbers], float(first)))
    torch.distributed.all_gather = start
    if first == 2:
        wait()
        os.kill(os.getpid(), signal.SIGKILL)
    (out / str(first)).write_text(json.dumps(wait().mean(1).tolist()))
    with pytest.raises(RanksLost):
        comm.barrier()
    comm.close()


@pytest.mark.parametrize("numbers", [10, 1_000_000])
def test_what_one_rank_has_gathered_is_given_to_one_that_has_failed_to(tmp_path, numbers):
    """However much it is: otherwise the one would go on, to a step say, that the other does not make."""
    assert end_of(3, gather_much, tmp_path, numbers) == [0, 0, -signal.SIGKILL]
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [[0.0, 1.0, 2.0]] * 2


def test_a_store_inside_of_rank_0_is_refused(monkeypatch):
    """It would end with that rank; the error says how to start the ranks."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(ValueError, match="is that of rank 0, and ends with it: start each rank by a torchrun"):
        create_communicator("cpu", survive=True)


def with_exchanges_in_a_forward(comm, out):
    model = nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))
    with pytest.raises(ValueError, match=r"keeps to the ranks with which the run has begun: take nn\.BatchNorm") as error:
        training.StandardUpdater(EXAMPLES, torch.optim.SGD(model.parameters()), model, comm=comm)
    (out / str(comm.rank)).write_text(str(error.value))


def test_what_could_not_go_on_is_refused_by_the_updater(tmp_path):
    """A module that exchanges by itself would do so with the ranks that were lost."""
    assert end_of(2, with_exchanges_in_a_forward, tmp_path) == [0, 0]
    assert len(list(tmp_path.iterdir())) == 2


class Death:
    """Ends a rank when it computes a virtual rank in an update for the given time."""

    def __init__(self, rank, iteration, number, time):
        self.moment, self.left = (rank, iteration, number), time

    def comes(self, place, comm, iteration, number):
        if comm is None or place != "activation" or self.moment != (int(os.environ["RANK"]), iteration, number):
            return False
        self.left -= 1
        return not self.left

    def flip(self, tensor):
        os.kill(os.getpid(), signal.SIGKILL)


def audited(comm, out, *faults):
    faults = [fault for fault in faults if isinstance(fault, Death) or fault[1] == int(os.environ["RANK"])]
    bits, said, error = audits.train(comm, f"{out}/run", *faults, audit=audits.COUNT, snapshots=3)
    if comm is None or comm.rank == 0:
        torch.save((bits, len(said), error), f"{out}/bits")


@pytest.mark.parametrize(
    ("rank", "number", "time", "faults"),
    [(0, 0, 1, ()), (0, 3, 1, ()), (0, 3, 2, [("gradient", 1, 4, 3)]), (2, 3, 1, [("gradient", 1, 4, 3)])],
    ids=["its own", "the second", "the third, of the auditor", "the third, of another"],
)
def test_audited_updates_begin_again(alone, tmp_path, rank, number, time, faults):
    """A rank is lost in a computation of a virtual rank: an audit goes on by the deal of the others, and gives no alarm."""
    codes = end_of(3, audited, tmp_path, *faults, Death(rank, 4, number, time))
    assert codes == [-signal.SIGKILL if each == rank else 0 for each in range(3)]
    assert torch.load(tmp_path / "bits") == torch.load(alone(audited) / "bits")
    files = [out / "run" / "recorder.bin" for out in (alone(audited), tmp_path)]
    assert files[0].read_bytes() == files[1].read_bytes()


class Right:
    """A metric: how many predictions are right, and of how many."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.right, self.count = torch.zeros((), dtype=torch.int64), 0

    def add(self, scores, t):
        self.right, self.count = self.right + (scores.argmax(1) == t).sum(), self.count + len(t)

    def compute(self):
        return self.right / self.count


class Counting(Classifier):
    """Counts by a metric of its own: in training too, which it reports where ``reports`` says so."""

    def __init__(self, reports):
        super().__init__(nn.Linear(4, 3))
        self.metric, self.reports = Right(), reports

    def forward(self, x, t):
        self.metric.add(self.predictor(x), t)
        if self.reports or not self.training:
            report({"right": self.metric}, self)
        return super().forward(x, t)


def count_right(comm, out, dying=None, reports=False, refusal=None):
    torch.manual_seed(0)
    model, outer = Counting(reports), Right()
    if refusal is not None and not reports:
        outer.sync = print  # as those of torchmetrics
    iterator = iterators.SerialIterator(EXAMPLES, 8, shuffle=True, seed=0)
    updater = training.StandardUpdater(iterator, torch.optim.Adam(model.parameters()), model, comm=comm, virtual_ranks=4)
    trainer = training.Trainer(updater, (6, "iteration"), out=str(out))
    held_out = Dying(15 if comm is not None and comm.rank == dying else -1)  # in the second evaluation

    def evaluate(x, t):
        outer.add(model.predictor(x), t)
        report({"outer": outer})
        return model(x, t)

    held = iterators.SerialIterator(held_out, 6, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(held, model, eval_func=evaluate), trigger=(2, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(2, "iteration")))
    with nullcontext() if refusal is None else pytest.raises((ValueError, RuntimeError), match=refusal):
        trainer.run()


@pytest.mark.parametrize("dying", [0, 1])
def test_metrics_of_an_interrupted_evaluation_count_again_from_its_start(alone, tmp_path, dying):
    """That of the model, and one of the script."""
    assert end_of(3, count_right, tmp_path / "three", dying).count(-signal.SIGKILL) == 1
    rows = rows_of(alone(count_right))
    assert rows_of(tmp_path / "three") == rows
    assert {"validation/main/right", "validation/outer"} <= rows[-1].keys()


@pytest.mark.parametrize(
    ("reports", "refusal"),
    [(True, "has counted for the metric 'main/right'"), (False, "'outer' .Right. would exchange .* sync_on_compute=False")],
    ids=["counts while the model trains", "exchanges by itself"],
)
def test_a_metric_whose_counts_would_be_lost_is_refused(tmp_path, reports, refusal):
    """By name and with a remedy: no other rank has what the lost one has counted, or all wait for it."""
    assert end_of(2, count_right, tmp_path, None, reports, refusal) == [0, 0]
