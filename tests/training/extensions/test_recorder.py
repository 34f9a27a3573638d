"""The Recorder: what a row says, that it says the same whatever was killed, and that it sees the smallest difference."""

import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from scripted import Counting, run, trainer_of
from torch import nn

import chainring
import forked
from chainring import iterators, serializers, training
from chainring.nn import Classifier
from chainring.training import extensions
from chainring.training._ledger import Ledger, LedgerError, loss_value
from chainring.training.extensions import FailOnNonNumber, Recorder, snapshot


def ledger_of(out, name="recorder.bin"):
    return Ledger.read(Path(out) / name)


def losses_of(out, name="main/loss"):
    ledger = ledger_of(out)
    return [ledger.row(iteration).losses.get(name) for iteration in ledger.iterations.tolist()]


def data(size=20):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, generator=generator), index % 2) for index in range(size)]


def network():
    chainring.deterministic(0)
    layers = nn.Linear(4, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Linear(8, 2)
    return Classifier(nn.Sequential(*layers))


def train(out, length, *others, change=None, examples=None, seed=0, recorder=None, every=7):
    """Train a network with dropout and BatchNorm, from the newest snapshot in ``out`` if there is one."""
    model = network()
    if change is not None:
        change(model)
    optimizer = torch.optim.Adam(model.parameters())
    batches = iterators.SerialIterator(data() if examples is None else examples, 5, seed=seed)
    trainer = training.Trainer(training.StandardUpdater(batches, optimizer, model), (length, "iteration"), out=str(out))
    trainer.extend(snapshot(autoload=True, n_retains=3), trigger=(every, "iteration"))
    trainer.extend(Recorder((5, "iteration")) if recorder is None else recorder)
    for other in others:
        trainer.extend(other)
    return trainer


# --- rows ---


def test_the_bits_of_the_loss_are_recorded_in_its_type(tmp_path):
    """NaN with its payload, -0.0 with its sign, numbers of Python and NumPy, tensors of each type."""
    nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)[0]
    values = [nan, -0.0, np.float32(1), np.float16(1), torch.tensor(1.0, dtype=torch.bfloat16), 3, True, torch.tensor(-1)]
    values += [2**70, torch.tensor(1.0, dtype=torch.float8_e4m3fn), (torch.tensor(2.0), 5)]
    run(Counting([{"main/loss": value} for value in values]), len(values), tmp_path, Recorder())
    assert losses_of(tmp_path) == [
        (0x7FC00001, 2),
        (1 << 63, 1),
        (0x3F800000, 2),
        (0x3C00, 3),
        (0x3F80, 4),
        (3, 5),
        (1, 5),
        (2**64 - 1, 5),
        (0x4450000000000000, 1),
        (0x3FF0000000000000, 1),
        (0x40000000, 2),
    ]


def test_the_main_loss_and_one_more_are_recorded(tmp_path):
    """Keys that only end alike, and values that are no numbers, are not losses; an updater may report none at all."""
    observations = [{"gen/loss": 1.0, "dis/loss": 2.0, "main/loss": 3.0, "gloss": 4.0}, {"gloss": 1.0}]
    observations += [{"a/loss": [1.0, 2.0], "b/loss": 5.0, "loss": 6.0}]
    run(Counting(observations), 4, tmp_path, Recorder())
    ledger = ledger_of(tmp_path)
    rows = [{name: loss_value(*loss) for name, loss in ledger.row(i).losses.items()} for i in range(1, 5)]
    assert rows == [{"main/loss": 3.0, "dis/loss": 2.0}, {}, {"b/loss": 5.0, "loss": 6.0}, {}]


def test_an_updater_that_does_not_count_is_refused(tmp_path):
    """A row of an iteration that was there already would hide one of them."""

    class Standing(Counting):
        def update(self):
            self.iteration = 1

    with pytest.raises(ValueError, match="must add 1 to it"):
        run(Standing(), 3, tmp_path, Recorder())


def test_an_updater_that_skips_iterations_has_rows_of_those_that_there_were(tmp_path):
    """The number of a row is the iteration, and not how many there were."""

    class Double(Counting):
        def update(self):
            super().update()
            self.iteration += 1

    run(Double([{"main/loss": float(i)} for i in range(100)]), 100, tmp_path, Recorder())
    ledger = ledger_of(tmp_path)
    assert ledger.iterations.tolist() == list(range(2, 101, 2))
    assert loss_value(*ledger.row(64).losses["main/loss"]) == 62.0


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        np.random.rand,
        np.random.randn,
        lambda: torch.rand(1),
        lambda: torch.randn(1),
        lambda: random.gauss(0, 1),
        lambda: np.random.seed(3),
        lambda: torch.manual_seed(3),
    ],
)
def test_one_draw_from_a_generator_shows_in_its_block(tmp_path, draw):
    """Also the second of two normals, which were drawn together; a block has the digest after its last iteration."""

    def digests(out, at):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

        class Drawing(Counting):
            def update_core(self):
                if self.iteration in at:
                    draw()

        run(Drawing(), 70, out, Recorder())
        ledger = ledger_of(out)
        assert ledger.iterations[np.flatnonzero(ledger.generators)].tolist() == [32, 64, 70]
        return ledger.generators[[31, 63, 69]].tolist()

    plain, once, twice = digests(tmp_path / "a", []), digests(tmp_path / "b", [63]), digests(tmp_path / "c", [63, 64])
    assert plain == plain[:1] * 3
    assert once[0] == plain[0]
    assert once[1] == once[2] != plain[1]
    assert twice[:2] == once[:2]
    is_seeding = draw() is None or isinstance(draw(), torch.Generator)
    assert (twice[2] == once[2]) is is_seeding


def batches_of(out, iterator, length=8, **settings):
    model = Classifier(nn.Linear(4, 2))
    updater = training.StandardUpdater(iterator, torch.optim.SGD(model.parameters(), 0.1), model, **settings)
    trainer_of(updater, length, out, Recorder(None)).run()
    return ledger_of(out).batches.tolist()


def test_the_digest_of_a_batch_is_that_of_its_indices(tmp_path):
    """Whichever iterator fetches them, by workers too, in one micro-batch or two; of another order it is not."""
    serial = batches_of(tmp_path / "a", iterators.SerialIterator(data(), 6, seed=3))
    assert 0 not in serial
    assert len(set(serial)) == 8
    assert serial == batches_of(tmp_path / "b", iterators.MultiprocessIterator(data(), 6, seed=3, n_processes=1))
    assert set(serial).isdisjoint(batches_of(tmp_path / "d", iterators.SerialIterator(data(), 6, seed=4)))
    joined = batches_of(tmp_path / "e", iterators.SerialIterator(data(), 3, seed=3), accumulate=2)
    assert serial == joined


def test_the_order_of_an_epoch_is_asked_for_once(tmp_path):
    """Also where a block of rows ends in the next epoch, and the batches of both are digested."""
    asked = []

    def order(seed, epoch, size):
        asked.append(epoch)
        return np.random.default_rng((seed, epoch)).permutation(size)

    batches = iterators.SerialIterator(data(200), 5, order_sampler=order)
    asked.clear()
    model = network()
    updater = training.StandardUpdater(batches, torch.optim.Adam(model.parameters()), model)
    trainer = training.Trainer(updater, (5, "epoch"), out=str(tmp_path))
    trainer.extend(Recorder())
    trainer.run()
    assert asked == [0, 1, 2, 3, 4]


def test_the_digest_of_a_batch_of_a_loader_is_that_of_its_content(tmp_path):
    """One changed label of one example shows in its batch alone; a batch without anything on the host is not known."""
    x, y = torch.randn(24, 4), torch.arange(24) % 2
    other = y.clone()
    other[13] = 0

    def digests(name, labels):
        dataset = torch.utils.data.TensorDataset(x, labels)
        return batches_of(tmp_path / name, torch.utils.data.DataLoader(dataset, 4), 6)

    one, another = digests("a", y), digests("b", other)
    assert 0 not in one
    assert [index for index in range(6) if one[index] != another[index]] == [3]


def test_a_batch_of_a_function_is_told_by_its_number_and_seed(tmp_path):
    """As the function is called with both."""

    def make(index):
        return torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)

    one = batches_of(tmp_path / "a", iterators.FunctionIterator(make, seed=1))
    assert len(set(one)) == 8
    assert one == batches_of(tmp_path / "b", iterators.FunctionIterator(make, seed=1))
    assert set(one).isdisjoint(batches_of(tmp_path / "c", iterators.FunctionIterator(make, seed=2)))


def test_a_batch_of_an_iterator_of_ones_own_is_not_known(tmp_path):
    """No digest is better than one of something else."""

    class Own(iterators.Iterator):
        batch_size = 2

        def __next__(self):
            return iterators.Batch(data(2))

    assert batches_of(tmp_path, Own()) == [0] * 8


# --- digests of tensors ---


def first_difference(one, other):
    one, other = ledger_of(one), ledger_of(other)
    names = [name for name, value in one.digests[0].items() if other.digests[0][name] != value]
    return names, int(np.argmax(one.bits != other.bits)) + 1 if (one.bits != other.bits).any() else None


def swap(weight):
    weight[0, 1], weight[2, 3] = weight[2, 3].clone(), weight[0, 1].clone()


def one_ulp(weight):
    weight[7, 3] = torch.nextafter(weight[7, 3], torch.tensor(9.0))


@pytest.mark.parametrize("change", [swap, one_ulp])
def test_the_smallest_change_of_a_parameter_is_named_before_the_first_update(tmp_path, change):
    """Two values exchanged, or one of them the next number: the digest of that tensor alone is another one."""
    train(tmp_path / "a", 3).run()

    def changed(model):
        with torch.no_grad():
            change(model.predictor[0].weight)

    train(tmp_path / "b", 3, change=changed).run()
    names, _ = first_difference(tmp_path / "a", tmp_path / "b")
    assert names == ["updater/model:main/predictor/0/weight"]


def test_zero_and_minus_zero_are_two_numbers(tmp_path):
    """They compare equal, and their digests do not."""

    def zero(sign):
        def change(model):
            nn.init.zeros_(model.predictor[0].weight)
            model.predictor[0].weight.data[3, 2] = sign * 0.0

        return change

    train(tmp_path / "a", 1, change=zero(1)).run()
    train(tmp_path / "b", 1, change=zero(-1)).run()
    assert first_difference(tmp_path / "a", tmp_path / "b")[0] == ["updater/model:main/predictor/0/weight"]


def test_every_tensor_of_models_and_optimizers_has_a_digest_at_the_trigger(tmp_path):
    """By its path in a snapshot: those are the names in its file of tensors."""
    trainer = train(tmp_path, 10)
    trainer.run()
    digests = ledger_of(tmp_path).digests
    assert list(digests) == [0, 5, 10]
    assert len(digests[0]) == 9
    assert len(digests[10]) == 9 + 18
    assert "updater/optimizer:main/state/main/predictor/3/bias/exp_avg" in digests[5]
    changed = {name for name in digests[5] if digests[5][name] != digests[10][name]}
    assert changed == set(digests[5])


def test_without_a_trigger_there_are_digests_of_the_beginning_alone(tmp_path):
    """``parameters=None`` is never."""
    train(tmp_path, 10, recorder=Recorder(None)).run()
    assert list(ledger_of(tmp_path).digests) == [0]


# --- the file ---


def test_a_run_has_at_most_48_bytes_an_iteration(tmp_path):
    """Of two losses with long names too, digests of tensors aside."""
    keys = "discriminator/loss", "generator/loss"
    run(Counting([dict.fromkeys(keys, 1.0)] * 640), 640, tmp_path, Recorder(None))
    assert (tmp_path / "recorder.bin").stat().st_size <= 48 * 640


@pytest.mark.parametrize("stops", [(3, 32, 33, 40, 64), (31, 63, 65), (8,)])
def test_a_run_in_parts_writes_the_file_of_one_that_was_never_stopped(tmp_path, stops):
    """Byte for byte: whichever iterations were done twice, and wherever blocks were cut."""
    train(tmp_path / "whole", 70).run()
    for stop in (*stops, 70):
        train(tmp_path / "parts", stop).run()
    assert (tmp_path / "parts/recorder.bin").read_bytes() == (tmp_path / "whole/recorder.bin").read_bytes()


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[3:]
import torch

from test_recorder import train

torch.set_num_threads(1)

def die(trainer):
    if trainer.updater.iteration == int(sys.argv[2]):
        trainer.get_extension("snapshot").wait()
        os.kill(os.getpid(), signal.SIGKILL)

train(sys.argv[1], 70, die).run()
"""


def test_a_killed_run_has_its_newest_snapshot_and_continues_byte_for_byte(tmp_path):
    """SIGKILL in four iterations: the file reaches the snapshot before, and in the end is the uninterrupted one."""
    train(tmp_path / "whole", 70).run()
    out, folders = tmp_path / "killed", [Path(file).parent for file in (__file__, forked.__file__)]
    for kill in (31, 32, 40, 66, 0):
        done = forked.run(["-c", KILLED, out, str(kill), *folders])
        assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr
        newest = max(int(path.name.rpartition("_")[2]) for path in out.glob("snapshot_iter_*"))
        assert ledger_of(out).iterations[-1] >= newest
    assert (out / "recorder.bin").read_bytes() == (tmp_path / "whole/recorder.bin").read_bytes()


def test_iterations_that_were_rolled_back_are_cut_back(tmp_path):
    """The rows of the way that the run did not continue are not there; the one that was gone is recorded whole."""

    class Spoiled(training.StandardUpdater):
        def update_core(self):
            batch = self.next_batch()
            with self.autocast():
                loss = self.get_model("main")(*batch)
            self.backward(loss * float("nan") if self.iteration == 22 else loss)
            self.step()

    def spoiled(out):
        model = network()
        updater = Spoiled(iterators.SerialIterator(data(), 5, seed=0), torch.optim.SGD(model.parameters(), 0.1), model)
        trainer = training.Trainer(updater, (40, "iteration"), out=str(out))
        trainer.extend(snapshot(), trigger=(10, "iteration"))
        trainer.extend(Recorder((5, "iteration")))
        trainer.extend(FailOnNonNumber("rollback"))
        trainer.run()
        return ledger_of(out)

    ledger = spoiled(tmp_path)
    assert ledger.iterations.tolist() == list(range(1, 41))
    assert list(ledger.digests) == [0, *range(5, 41, 5)]


def test_a_new_run_moves_the_file_of_an_earlier_one_away(tmp_path):
    """It declares what it writes; nothing is added to the rows of another run."""
    run(Counting([{"main/loss": 1.0}] * 3), 3, tmp_path, Recorder())
    run(Counting([{"main/loss": 2.0}] * 2), 2, tmp_path, Recorder())
    assert len(ledger_of(tmp_path).iterations) == 2
    assert [len(Ledger.read(path).iterations) for path in tmp_path.glob("*/*/recorder.bin")] == [3]


def test_a_rehearsal_leaves_nothing(tmp_path):
    """Neither a file nor a row: the run that follows has the file of one without a rehearsal."""
    train(tmp_path / "plain", 12).run()
    trainer = train(tmp_path / "tried", 12)
    trainer.rehearse()
    assert not (tmp_path / "tried/recorder.bin").exists()
    trainer.run()
    assert (tmp_path / "tried/recorder.bin").read_bytes() == (tmp_path / "plain/recorder.bin").read_bytes()


def test_a_damaged_file_is_not_gone_on_with(tmp_path):
    """The run continues, says so, and moves the file away; the new one begins with the rows that the snapshot has."""
    train(tmp_path, 35).run()
    path = tmp_path / "recorder.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(LedgerError):
        ledger_of(tmp_path)
    with pytest.warns(UserWarning, match="continues without its earlier iterations"):
        train(tmp_path, 40).run()
    ledger = ledger_of(tmp_path)
    assert ledger.iterations.tolist() == list(range(33, 41))
    assert list(ledger.digests) == [35, 40]
    assert (tmp_path / "abandoned/1/recorder.bin").read_bytes() == bytes(content)


def test_a_file_without_its_directory_continues_in_another(tmp_path):
    """A snapshot loaded into a run with another ``out`` brings the rows along, and leaves the old file alone."""
    train(tmp_path / "whole", 50).run()
    first = train(tmp_path / "first", 42)
    first.run()
    before = (tmp_path / "first/recorder.bin").read_bytes()
    trainer = train(tmp_path / "second", 50)
    serializers.load(tmp_path / "first/snapshot_iter_42", trainer)
    trainer.run()
    assert (tmp_path / "second/recorder.bin").read_bytes() == (tmp_path / "whole/recorder.bin").read_bytes()
    assert (tmp_path / "first/recorder.bin").read_bytes() == before


def test_state_in_memory_has_the_rows(tmp_path):
    """As `check_extension` and a trainer in a notebook save it."""
    trainer = train(tmp_path / "a", 40)
    trainer.run()
    state = trainer.state_dict()
    other = train(tmp_path / "b", 70)
    other.load_state_dict(state)
    other.run()
    train(tmp_path / "whole", 70).run()
    assert (tmp_path / "b/recorder.bin").read_bytes() == (tmp_path / "whole/recorder.bin").read_bytes()


@pytest.mark.parametrize("name", ["log", "recorder.bin"])
def test_a_file_that_another_extension_writes_is_refused(tmp_path, name):
    """One of the two would be lost; it says which extension it is."""
    trainer = train(tmp_path, 3, extensions.LogReport(filename=name), recorder=Recorder(filename=name))
    with pytest.raises(ValueError, match=f"extension 'LogReport' writes '{name}' too; give the Recorder another filename"):
        trainer.run()


@pytest.mark.parametrize(
    "name", ["../recorder.bin", "/tmp/recorder.bin", "a/../../b.bin", "run.json", "./run.json", ".lock"]
)
def test_a_file_outside_of_the_run_or_of_the_run_itself_is_refused(name):
    """What compares runs would not find it there, or the run would lose its record or its lock."""
    with pytest.raises(ValueError, match="filename is a name in out"):
        Recorder(filename=name)


@pytest.mark.parametrize(("settings", "error"), [({"filename": ""}, TypeError), ({"parameters": (0, "epoch")}, ValueError)])
def test_wrong_settings_are_refused(settings, error):
    """With a remedy, at once."""
    with pytest.raises(error):
        extensions.Recorder(**settings)
