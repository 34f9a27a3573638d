"""precision: autocast around the forward, and a loss scaler for fp16."""

import pytest
import torch
from torch import nn

from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, UpdateCallbacks


class Linear(nn.Module):
    """Notes the format in which its product is computed; its loss grows with ``size``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(3, 1)
        self.formats = []
        self.size = 1.0

    def forward(self, x):
        y = self.layer(x)
        self.formats.append(y.dtype)
        return y.float().square().mean() * self.size


def updater_of(precision, **settings):
    model = Linear()
    data = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return StandardUpdater(SerialIterator(data, 4, shuffle=False), optimizer, model, precision=precision, **settings)


def weight_of(updater):
    return updater.get_model("main").layer.weight


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_forward_is_computed_in_the_chosen_format(precision, dtype, accumulate):
    """Parameters and gradients stay float32."""
    updater = updater_of(precision, accumulate=accumulate)
    updater.update()
    assert updater.get_model("main").formats == [dtype] * accumulate
    assert (weight_of(updater).dtype, weight_of(updater).grad.dtype) == (torch.float32, torch.float32)


def test_an_update_in_bf16_is_that_of_the_plain_autocast_loop():
    """Bit for bit."""
    updater = updater_of("bf16")
    updater.update()
    model = Linear()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(updater.get_iterator("main").dataset[:4])
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(weight_of(updater), model.layer.weight)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_update_on_start_sees_gradients_of_their_true_size(accumulate):
    """The scale of 2**16 is taken out before clipping."""
    seen = []
    callbacks = UpdateCallbacks(update_on_start=lambda context: seen.append(weight_of(context.updater).grad.clone()))
    for precision in ("fp32", "fp16"):
        updater = updater_of(precision, accumulate=accumulate, callbacks=callbacks)
        updater.get_model("main").size = 0.01
        updater.update()
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-2, atol=1e-5)


def test_a_step_whose_gradients_overflow_is_left_out_and_still_counts():
    """Parameters stay, the iteration goes up, the scale is halved."""
    updater = updater_of("fp16")
    before = weight_of(updater).detach().clone()
    updater.get_model("main").size = float("inf")
    updater.update()
    assert torch.equal(weight_of(updater), before)
    assert updater.iteration == 1
    assert updater.state_dict()["precision/scaler"]["scale"] == 2.0**15


def test_the_scale_is_saved_and_put_back():
    """A resumed run goes on with the scale that it had found."""
    updater, fresh = updater_of("fp16"), updater_of("fp16")
    updater.get_model("main").size = float("inf")
    updater.update()
    fresh.load_state_dict(updater.state_dict())
    assert fresh.state_dict()["precision/scaler"] == updater.state_dict()["precision/scaler"]
    for each in (updater, fresh):
        each.get_model("main").size = 1.0
        each.update()
    assert torch.equal(weight_of(fresh), weight_of(updater))


@pytest.mark.parametrize("saved", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("resumed", ["fp32", "bf16", "fp16"])
def test_precision_is_a_setting_that_a_resumed_run_may_change(saved, resumed):
    """Settings are never state: a scaler begins anew where there was none."""
    updater, fresh = updater_of(saved), updater_of(resumed)
    updater.update()
    fresh.load_state_dict(updater.state_dict())
    fresh.update()
    assert fresh.iteration == 2


def test_one_optimizer_may_step_twice_in_an_update_in_fp16():
    """As a critic does; the scaler alone would refuse."""

    class Twice(StandardUpdater):
        def update_core(self):
            for _ in range(2):
                with self.autocast():
                    loss = self.get_model("main")(self.next_batch())
                self.backward(loss)
                self.step()

    model = Linear()
    data = torch.randn(16, 3)
    updater = Twice(SerialIterator(data, 4), torch.optim.SGD(model.parameters(), lr=0.1), model, precision="fp16")
    updater.update()
    updater.update()
    assert updater.iteration == 2
