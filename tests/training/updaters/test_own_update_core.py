"""A GAN-like update_core of two models and two optimizers, against the same thing by hand."""

import pytest
import torch
from torch import nn
from toys import assert_close, parameters_of

from chainring import report
from chainring.iterators import SerialIterator
from chainring.parallel import Communicator
from chainring.training import StandardUpdater, Trainer, UpdateCallbacks, extensions


def networks():
    torch.manual_seed(7)
    generator = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return generator, critic


def real_and_noise(size=24):
    draw = torch.Generator().manual_seed(2)
    return [torch.randn(size, n, generator=draw, dtype=torch.float64) for n in (3, 2)]


def critic_loss(generator, critic, real, noise):
    return nn.functional.softplus(-critic(real)).mean() + nn.functional.softplus(critic(generator(noise).detach())).mean()


def generator_loss(generator, critic, noise):
    return nn.functional.softplus(-critic(generator(noise))).mean()


class GAN(StandardUpdater):
    """The critic learns, then the generator, whose loss also reaches the critic's parameters."""

    def update_core(self):
        generator, critic = self.get_model("generator"), self.get_model("critic")
        real, noise = self.next_batch(), self.next_batch("noise")
        with self.autocast():
            loss = critic_loss(generator, critic, real, noise)
        self.backward(loss)
        self.step("critic")
        with self.autocast():
            loss = generator_loss(generator, critic, noise)
        self.backward(loss)
        self.step("generator")


def gan(batch_size=4, kind=GAN, repeat=True, **settings):
    generator, critic = networks()
    real, noise = real_and_noise()
    return kind(
        {name: SerialIterator(data, batch_size, repeat, shuffle=False) for name, data in (("main", real), ("noise", noise))},
        {"generator": torch.optim.Adam(generator.parameters()), "critic": torch.optim.Adam(critic.parameters())},
        {"generator": generator, "critic": critic},
        **settings,
    )


def by_hand(batch_size, accumulate, updates):
    """Each optimizer steps on the mean over the parts; a critic that steps in the last part is what the generator sees."""
    generator, critic = networks()
    optimizers = [torch.optim.Adam(each.parameters()) for each in (generator, critic)]
    real, noise = (part.split(batch_size) for part in real_and_noise())
    for number in range(updates):
        held = [0.0] * sum(1 for _ in critic.parameters()), [0.0] * sum(1 for _ in generator.parameters())
        for part in range(accumulate):
            at = (number * accumulate + part) % len(real)
            losses = (
                lambda at=at: critic_loss(generator, critic, real[at], noise[at]),
                lambda at=at: generator_loss(generator, critic, noise[at]),
            )
            for which, model in enumerate((critic, generator)):
                gradients = torch.autograd.grad(losses[which](), list(model.parameters()))
                held[which][:] = [old + new / accumulate for old, new in zip(held[which], gradients, strict=True)]
                if part == accumulate - 1:
                    for parameter, gradient in zip(model.parameters(), held[which], strict=True):
                        parameter.grad = gradient
                    optimizers[1 - which].step()
    return [list(generator.parameters()), list(critic.parameters())]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("comm", [None, Communicator()])
def test_a_gan_trains_as_the_loop_by_hand(accumulate, comm):
    """The generator's loss leaves nothing in the critic's gradient, in whichever part of the update it was computed."""
    updater = gan(4, accumulate=accumulate, comm=comm)
    for _ in range(4):
        updater.update()
    ours = [parameters_of(updater, name) for name in ("generator", "critic")]
    assert_close(ours, [[parameter.detach() for parameter in model] for model in by_hand(4, accumulate, 4)])


def test_a_gan_whose_data_end_inside_an_accumulation_steps_on_what_there_is():
    """24 rows in parts of 16: the second part has 8, and the third never comes."""
    cut = gan(16, accumulate=3, repeat=False)
    cut.update()
    real, noise = real_and_noise()
    generator, critic = networks()
    critic_loss(generator, critic, real, noise).backward()
    optimizer = torch.optim.Adam(critic.parameters())
    optimizer.step()
    assert_close(parameters_of(cut, "critic"), [parameter.detach() for parameter in critic.parameters()])


class TwoSteps(GAN):
    """The critic steps twice for each step of the generator."""

    def update_core(self):
        generator, critic = self.get_model("generator"), self.get_model("critic")
        for _ in range(2):
            real, noise = self.next_batch(), self.next_batch("noise")
            self.backward(critic_loss(generator, critic, real, noise))
            self.step("critic")
        self.backward(generator_loss(generator, critic, noise))
        self.step("generator")


def test_each_of_several_steps_of_one_optimizer_uses_its_own_gradient_in_full():
    """With a communicator, which makes weights matter, the second step of an update is no smaller than the first."""
    plain, weighed = gan(kind=TwoSteps), gan(kind=TwoSteps, comm=Communicator())
    for _ in range(3):
        plain.update()
        weighed.update()
    for name in ("generator", "critic"):
        assert_close(parameters_of(weighed, name), parameters_of(plain, name))


def test_an_iterator_of_ones_own_name_goes_back_too_when_an_update_fails():
    """All iterators agree with iteration."""

    class Failing(GAN):
        def update_core(self):
            self.next_batch()
            self.next_batch("noise")
            raise ArithmeticError

    updater = gan(kind=Failing)
    with pytest.raises(ArithmeticError):
        updater.update()
    assert [iterator.epoch_detail for iterator in updater.get_all_iterators().values()] == [0.0, 0.0]


def test_models_of_other_names_need_an_update_core_of_ones_own():
    """The default update says which name it works with, and the remedy."""
    with pytest.raises(ValueError, match=r"works with the model \"main\".*\['critic', 'generator'\].*write update_core"):
        gan(kind=StandardUpdater)


def test_clipping_before_a_step_sees_the_gradients_of_that_optimizer_alone():
    """Those of the critic, which the generator's loss has reached, are nobody's yet when the generator steps."""
    seen = []

    def look(context):
        models = context.updater.get_all_models()
        seen.append({name: any(p.grad is not None for p in models[name].parameters()) for name in sorted(models)})

    gan(callbacks=UpdateCallbacks(update_on_start=look)).update()
    assert seen == [{"critic": True, "generator": False}, {"critic": False, "generator": True}]


class Critic(StandardUpdater):
    """Takes two batches in an update, and reports of each."""

    weight_of = staticmethod(lambda x: None)
    calls_backward = True

    def update_core(self):
        for key in ("first", "second"):
            x = self.next_batch()
            loss = self.get_model("main")(torch.ones(1)).sum() * x.mean()
            if self.calls_backward:
                self.backward(loss, self.weight_of(x))
                self.step()
            report({key: x.mean(), "last": x.mean(), "name": key})


class Tokens(Critic):
    weight_of = staticmethod(lambda x: 10 * len(x))


class TokensOnTheDevice(Critic):
    weight_of = staticmethod(lambda x: torch.tensor(10 * len(x)))


class Silent(Critic):
    calls_backward = False


SIZES = (7, 1, 2, 5)
CRITICS = {
    "by rows": (Critic, {}),
    "by tokens": (Tokens, {}),
    "by tokens on the device": (TokensOnTheDevice, {}),
    "without a backward": (Silent, {}),
    "accumulated": (Critic, {"accumulate": 2}),
    "accumulated, by tokens": (TokensOnTheDevice, {"accumulate": 2}),
    "virtual ranks": (Critic, {"virtual_ranks": 2}),
    "virtual ranks, accumulated": (Critic, {"virtual_ranks": 2, "accumulate": 2}),
    "virtual ranks, by tokens": (Tokens, {"virtual_ranks": 3}),
}


@pytest.mark.parametrize(("kind", "settings"), CRITICS.values(), ids=CRITICS)
def test_a_value_is_weighed_by_the_batch_that_it_was_reported_of(kind, settings, tmp_path):
    """In an update of several batches of other sizes; the observation has the values as they were reported."""
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randn(size, 1, generator=draw) for size in SIZES]
    model = nn.Linear(1, 1)
    updater = kind(batches, torch.optim.SGD(model.parameters(), lr=0.0), model, **settings)
    count = 2 // settings.get("accumulate", 1)
    trainer = Trainer(updater, (count, "iteration"), out=str(tmp_path))
    trainer.extend(extensions.LogReport(trigger=(count, "iteration")))
    trainer.run()
    (row,) = trainer.get_extension("LogReport").log
    assert row["first"] == pytest.approx(torch.cat(batches[0::2]).mean().item(), rel=1e-5)
    assert row["second"] == row["last"] == pytest.approx(torch.cat(batches[1::2]).mean().item(), rel=1e-5)
    assert not any(isinstance(value, tuple) for value in trainer.observation.values())
