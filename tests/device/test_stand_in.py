"""The stand-in for an accelerator notices what an accelerator would punish, and counts what it does."""

import multiprocessing
import signal
import subprocess
import sys

import pytest
import stand_in
import torch
from safetensors import safe_open
from stand_in import NAME, counting, native
from torch import nn

from chainring import datasets, iterators, training
from chainring.converters import concat_examples
from chainring.nn import Classifier
from chainring.training import extensions
from chainring.training.extensions.fail_on_non_number import NonNumberError

accelerator = torch.get_device_module(NAME)


def fails(program):
    """The exit status of a program, which must not be 0, and what it wrote."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout
    return done.returncode, done.stderr


def test_a_host_that_follows_a_pointer_of_the_device_is_ended():
    """By SIGSEGV, and the lines of Python are written."""
    status, said = fails(
        "import faulthandler, ctypes, torch; faulthandler.enable()\n"
        f"ctypes.string_at(torch.ones(4, device={NAME!r}).data_ptr(), 4)"
    )
    assert status == -signal.SIGSEGV
    assert 'File "<string>", line 2' in said


def test_new_memory_has_no_numbers(device):
    assert torch.empty(3, device=device).isnan().all()
    assert torch.empty(3, dtype=torch.int64, device=device).tolist() == [-1, -1, -1]


def test_memory_ends_at_a_given_byte(device):
    """The error is torch's; memory that was given back is used again before it is raised."""
    accelerator.empty_cache()
    kept = torch.empty(1024, dtype=torch.uint8, device=device)
    native.set_capacity(0, accelerator.memory_allocated() + 4096)
    del (third := [torch.empty(2048, dtype=torch.uint8, device=device)])[:]
    fits = torch.empty(4096, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(1, dtype=torch.uint8, device=device)
    del fits
    assert torch.empty(4096, dtype=torch.uint8, device=device).nbytes + kept.nbytes + len(third) == 5120


def test_what_is_alive_stays_when_the_rest_is_given_back(device):
    """Its neighbours are smaller than a page of the host."""
    tensors = [torch.ones(8, device=device) for _ in range(64)]
    kept = tensors[1::2]
    del tensors
    accelerator.empty_cache()
    assert all(tensor.tolist() == [1] * 8 for tensor in kept)


def test_bytes_that_are_alive_are_counted_and_their_most(device):
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    kept, gone = (torch.empty(512 * rows, dtype=torch.uint8, device=device) for rows in (2, 5))
    del gone
    assert accelerator.memory_allocated() - before == kept.nbytes
    assert accelerator.max_memory_allocated() - before == 7 * 512


def test_copies_and_waits_are_counted_with_their_bytes_and_lines(device):
    """Of every direction, once each."""
    pinned = torch.zeros(8).pin_memory()
    with counting() as counts:
        there = torch.zeros(8).to(device)
        there.copy_(pinned, non_blocking=True)
        there.copy_(torch.zeros(8), non_blocking=True)
        back = there.cpu()
        pinned.copy_(there, non_blocking=True)
        elsewhere = there.to(f"{NAME}:1")
        there.sum().item()
        there.nonzero()
        accelerator.synchronize()
        accelerator.current_stream().synchronize()
        event = accelerator.Event()
        event.record()
        event.synchronize()
    assert back.device.type == "cpu"
    assert elsewhere.device.index == 1
    crossed = ("to_device", "to_device_late", "to_device_unpinned", "to_host", "to_host_late", "between_devices")
    assert {kind: counts.bytes[kind] for kind in crossed} == dict.fromkeys(crossed, 32)
    each = ("number", "size", "synchronize_device", "synchronize_stream", "synchronize_event")
    assert {kind: counts[kind] for kind in (*crossed, *each)} == dict.fromkeys((*crossed, *each), 1)
    assert counts.waits == {kind: 1 for kind in stand_in.WAITS if kind in counts}
    assert {where.line.partition(":")[0] for where in counts.where} == {"test_stand_in.py"}


def test_what_waits_raises_if_it_is_asked_to(device):
    there = torch.ones(3, device=device)
    native.set_sync_mode(2)
    with pytest.raises(RuntimeError, match="synchronizing"):
        there.sum().item()
    there.mul_(2).add_(torch.ones(3).to(device, non_blocking=True))
    native.set_sync_mode(0)
    assert there.tolist() == [3, 3, 3]


def test_numbers_of_the_host_and_of_two_devices_are_not_mixed():
    for other in (torch.ones(3), torch.ones(3, device=f"{NAME}:1"), torch.tensor(1.0, device=f"{NAME}:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch.ones(3, device=f"{NAME}:0") + other
    assert (torch.ones(3, device=NAME) + torch.tensor(1.0)).device.type == NAME
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.equal(torch.tensor(1.0, device=NAME), torch.tensor(1.0))


def test_a_generator_has_a_state_and_the_cpu_keeps_its_own(device):
    """Dropout, which takes no generator, draws from it too; each device has one."""
    torch.manual_seed(3)
    host = torch.get_rng_state()
    state, elsewhere = accelerator.get_rng_state(), accelerator.get_rng_state(1)

    def draw():
        x = torch.ones(100, device=device)
        return [torch.randn(5, device=device).tolist(), nn.functional.dropout(x).tolist(), x.bernoulli(0.5).tolist()]

    first = draw()
    assert draw() != first
    accelerator.set_rng_state(state)
    assert draw() == first
    assert torch.equal(torch.get_rng_state(), host)
    assert torch.equal(accelerator.get_rng_state(1), elsewhere)
    assert first[0] != torch.randn(5).tolist()
    ours = torch.Generator(device).manual_seed(1)
    assert torch.randn(3, device=device, generator=ours).tolist() != torch.randn(3, device=device, generator=ours).tolist()


def test_a_seed_that_is_set_before_the_device_is_used_is_that_of_its_generator():
    program = f"import torch; torch.manual_seed(5); print(torch.randn(3, device={NAME!r}).tolist())"
    drawn = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    torch.manual_seed(5)
    assert drawn.strip() == str(torch.randn(3, device=NAME).tolist())


def test_a_forked_child_cannot_use_the_device(device):
    """As with CUDA, once the parent has used it."""
    torch.ones(1, device=device)

    def child(pipe):
        try:
            torch.ones(1, device=device)
        except RuntimeError as error:
            pipe.send(str(error))

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(there,))
    process.start()
    assert here.poll(30)
    assert "forked subprocess" in here.recv()
    process.join()


@pytest.mark.parametrize("side_first", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_race_is_found_in_either_order(device, side_first, ordered):
    """Of a write and a read by two streams, unless one waits for the other; it does not matter which is done first here."""
    native.set_races_raise(False)
    shared, side, main = torch.zeros(4, device=device), accelerator.Stream(), accelerator.current_stream()
    side.wait_stream(main)

    def read():
        with accelerator.stream(side):
            shared + 1

    steps = [(side, read), (main, lambda: shared.fill_(1))]
    (_, do), (second, do_next) = steps if side_first else reversed(steps)
    do()
    if ordered:
        second.wait_stream(main if second is side else side)
    do_next()
    assert bool(native.take_races()) is not ordered


def test_a_copy_to_pinned_memory_arrives_when_it_is_waited_for(device):
    pinned = torch.zeros(4, dtype=torch.uint8).pin_memory()
    pinned.copy_(torch.ones(4, dtype=torch.uint8, device=device), non_blocking=True)
    assert pinned.tolist() == [0xAB] * 4
    accelerator.synchronize()
    assert pinned.tolist() == [1] * 4


@pytest.mark.parametrize("waits", [False, True])
def test_pinned_memory_is_not_changed_while_it_is_copied(device, waits):
    native.set_races_raise(False)
    pinned = torch.zeros(4).pin_memory()
    there = pinned.to(device, non_blocking=True)
    if waits:
        accelerator.synchronize()
    pinned.fill_(1)
    assert bool(native.take_races()) is not waits
    assert there.tolist() == [0] * 4


def test_memory_that_another_stream_uses_is_allocated_again_after_record_stream_alone(device):
    """Without it, the next tensor in its place is a race."""
    native.set_races_raise(False)
    for recorded in (False, True):
        side, first = accelerator.Stream(), torch.zeros(300_000, device=device)
        side.wait_stream(accelerator.current_stream())
        with accelerator.stream(side):
            first + 1
        if recorded:
            first.record_stream(side)
        del first
        torch.zeros(300_000, device=device)
        assert bool(native.take_races()) is not recorded


def test_autocast_and_the_scaler_work(device):
    """They are torch's; losses of half precision go down."""
    model = nn.Linear(8, 1).to(device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(device)
    x, losses = torch.ones(4, 8, device=device), []
    for _ in range(5):
        with torch.autocast(device, torch.float16):
            y = model(x)
        assert y.dtype == torch.float16
        loss = (y.float() - 1).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# Mistakes that a GPU would punish, planted.

DIGITS = datasets.get_digits()[0]


class Prefetcher(iterators.SerialIterator):
    """Copies the next batch on a stream of its own, as many programs do; ``without`` is a wait that is left out."""

    def __init__(self, without=None):
        super().__init__(DIGITS, 100, seed=1)
        self.stream, self.without = accelerator.Stream(), without
        self.rows = torch.zeros(100, 64, device=NAME)

    def __next__(self):
        x, t = concat_examples(super().__next__())
        if self.without != "the copy's":
            self.stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self.stream):
            self.rows.copy_(x.pin_memory(), non_blocking=True)
            t = t.pin_memory().to(NAME, non_blocking=True)
        t.record_stream(accelerator.current_stream())
        if self.without != "the update's":
            accelerator.current_stream().wait_stream(self.stream)
        return self.rows, t


def train(out, source, converter=lambda batch, device: batch, length=12):
    """Some updates, with what copies and reads beside them; the last snapshot is at the sixth."""
    model = Classifier(nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Dropout(0.3), nn.Linear(50, 10)))
    optimizer = torch.optim.Adam(model.parameters())
    updater = training.StandardUpdater(source, optimizer, model, device=NAME, converter=converter)
    trainer = training.Trainer(updater, (length, "iteration"), out=str(out))
    trainer.extend(extensions.LogReport(trigger=(5, "iteration")))
    trainer.extend(extensions.FailOnNonNumber())
    trainer.extend(extensions.snapshot(), trigger=(6, "iteration"))
    trainer.run()


def test_training_with_copies_on_a_stream_of_their_own_has_no_race(tmp_path):
    train(tmp_path, Prefetcher())
    assert native.take_races() == []


@pytest.mark.parametrize("without", ["the copy's", "the update's"])
def test_a_wait_that_a_prefetcher_leaves_out_is_noticed(tmp_path, without):
    """For the updates that still read what is overwritten, and for the copies that are still on their way."""
    native.set_races_raise(False)
    train(tmp_path, Prefetcher(without))
    assert any("copy_" in race for race in native.take_races())


def test_a_snapshot_that_does_not_wait_for_its_copies_is_noticed(tmp_path, monkeypatch):
    """It has 0xAB in place of the parameters."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    train(tmp_path, iterators.SerialIterator(DIGITS, 100), concat_examples, length=6)
    with safe_open(next(tmp_path.glob("snapshot_iter_6/*.safetensors")), "pt") as saved:
        tensors = [saved.get_tensor(key) for key in saved.keys()]  # noqa: SIM118 - it is no dict
    assert any((tensor.reshape(-1).view(torch.uint8) == 0xAB).all() for tensor in tensors if tensor.numel() > 8)


def test_a_flag_that_is_read_before_its_event_is_noticed(tmp_path, monkeypatch):
    """`FailOnNonNumber` then reads that an update was bad."""

    class Event(torch.Event):
        def synchronize(self):
            """Leave it out."""

    monkeypatch.setattr(torch, "Event", Event)
    with pytest.raises(NonNumberError):
        train(tmp_path, iterators.SerialIterator(DIGITS, 100), concat_examples)


def test_a_pinned_batch_that_is_overwritten_too_early_is_noticed(tmp_path):
    native.set_races_raise(False)
    kept = torch.empty(100, 64).pin_memory()

    def convert(batch, device):
        x, t = concat_examples(batch)
        return kept.copy_(x).to(NAME, non_blocking=True), t.to(NAME, non_blocking=True)

    train(tmp_path, iterators.SerialIterator(DIGITS, 100), convert)
    assert any("pinned" in race for race in native.take_races())
