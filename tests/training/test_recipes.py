"""The recipes of docs/recipes.md do what the page says: precision, clipping, a GAN, the best snapshots, averages, rates."""

import ast
import inspect
import itertools
import os

import numpy as np
import psutil
import pytest
import torch
from recipes import assert_resumes_everywhere, blocks, definitions, rows_of, run_page, run_section
from torch import nn

from chainring import datasets, iterators, serializers, training
from chainring.training import UpdateCallbacks, clip_grad_norm, extensions, triggers

DIGITS = datasets.get_digits(withlabel=False)[0][:40]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def gan(size, **settings):
    """The page's updater over 40 digits in order, from the same start each time."""
    page = definitions("A GAN")
    torch.manual_seed(1)
    updater = page["gan"](**settings)
    models, optimizers = updater.get_all_models(), updater.get_all_optimizers()
    return page["GAN"](iterators.SerialIterator(DIGITS, size, shuffle=False), optimizers, models, **settings)


def parameters(updater):
    return [p.detach().clone() for model in updater.get_all_models().values() for p in model.parameters()]


def test_the_updater_of_the_gan_is_at_most_25_lines():
    """The page shows that little is needed."""
    (source,) = (block for block in blocks("A GAN") if "class GAN" in block)
    (kind,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    assert kind.end_lineno - kind.lineno + 1 <= 25


@pytest.mark.parametrize("parts", [2, 4])
def test_a_gan_in_parts_is_one_batch_as_large(parts):
    """For both models; the noise of the parts is the noise of the whole."""
    whole, accumulated = gan(20), gan(20 // parts, accumulate=parts)
    for updater in (whole, accumulated):
        torch.manual_seed(5)
        for _ in range(4):
            updater.update()
    torch.testing.assert_close(parameters(accumulated), parameters(whole), rtol=1e-4, atol=1e-6)


def test_a_gan_is_the_loop_by_hand():
    """Each model steps on the gradient of its own loss, both computed before either steps."""
    updater, other = gan(20), gan(20)
    generator, critic = other.get_model("generator"), other.get_model("critic")
    optimizers = other.get_all_optimizers()
    for number in range(3):
        torch.manual_seed(number)
        updater.update()
        torch.manual_seed(number)
        real, noise = torch.as_tensor(DIGITS[20 * number % 40 :][:20]), torch.randn(20, 16)
        fake = generator(noise)
        losses = {
            "generator": -nn.functional.logsigmoid(critic(fake)).mean(),
            "critic": -nn.functional.logsigmoid(critic(real)).mean()
            - nn.functional.logsigmoid(-critic(fake.detach())).mean(),
        }
        grads = {n: torch.autograd.grad(losses[n], list(other.get_model(n).parameters()), retain_graph=True) for n in losses}
        for name, optimizer in optimizers.items():
            for parameter, grad in zip(other.get_model(name).parameters(), grads[name], strict=True):
                parameter.grad = grad
            optimizer.step()
    torch.testing.assert_close(parameters(updater), parameters(other), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_both_models_of_a_gan_run_in_the_chosen_format(precision, dtype):
    """Which an update_core keeps by self.autocast()."""
    updater, formats = gan(20, precision=precision), set()
    for model in updater.get_all_models().values():
        model[0].register_forward_hook(lambda module, inputs, output: formats.add(output.dtype))
    updater.update()
    assert formats == {dtype}


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2, "precision": "bf16"}, {"precision": "fp16"}])
def test_a_gan_resumes_at_every_iteration(tmp_path, settings):
    """Bit for bit, with the noise that it draws."""

    def make(out, length):
        return training.Trainer(gan(20 // settings.get("accumulate", 1), **settings), length, out)

    assert_resumes_everywhere(make, tmp_path, 6)


def test_the_norm_of_a_skipped_step_is_not_finite():
    """By which the page tells to see an overflow: parameters stay, and grad_norm is infinite or NaN."""
    model = nn.Linear(2, 1)
    callbacks = UpdateCallbacks(update_on_start=clip_grad_norm(1.0))
    updater = training.StandardUpdater(
        [torch.full((1, 2), 1e4)] * 4,
        torch.optim.SGD(model.parameters(), 0.1),
        model,
        loss_func=lambda model, x: model(x).float().square().mean(),
        precision="fp16",
        callbacks=callbacks,
    )
    before = parameters(updater)
    trainer = training.Trainer(updater, (1, "iteration"), "skipped")
    trainer.run()
    assert not np.isfinite(float(trainer.observation["grad_norm"]))
    assert all(map(torch.equal, parameters(updater), before))
    assert updater.iteration == 1


def test_the_link_of_the_best_snapshots_leads_to_one_of_the_three_that_are_kept():
    """Of the run of the page, and the model is loaded from there."""
    page = run_section("The best snapshots")
    kept = {name for name in os.listdir("best") if name.startswith("best_iter_")}
    assert len(kept) in (3, 4)  # the newest too, where it is not among the best
    assert os.readlink("best/best") in kept
    model = page["Classifier"](page["mlp"]())
    serializers.load("best/best", model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), page["model"].parameters(), strict=True))


def test_of_values_that_fall_and_rise_the_records_are_kept():
    """Of 3, 1, 4, 2, 0.5, 0.7 the records are 3, 1 and 0.5, and two stay; 0.7 is better than 1, and no record."""
    values = iter([3.0, 1.0, 4.0, 2.0, 0.5, 0.7])
    model = nn.Linear(2, 1)
    updater = training.StandardUpdater(
        [torch.ones(1, 2)] * 6, torch.optim.SGD(model.parameters(), 0.1), model, loss_func=lambda model, x: model(x).sum()
    )
    trainer = training.Trainer(updater, (6, "iteration"), "kept")
    better = triggers.MinValueTrigger("value", trigger=(1, "iteration"))
    trainer.extend(extensions.observe_value("value", lambda _: next(values)), trigger=(1, "iteration"))
    trainer.extend(extensions.snapshot("best_{.updater.iteration}", n_retains=2), trigger=better)
    trainer.extend(extensions.snapshot("best"), trigger=better)
    trainer.run()
    assert sorted(os.listdir("kept")) == [".lock", "best", "best_2", "best_5", "best_iter_5", "run.json"]


def test_the_averaged_model_is_evaluated_beside_the_model():
    """Under its own name, and its loss is that of the average by the formula."""
    page = run_section("Exponential moving average")
    (*_, row) = rows_of(page["trainer"])
    model = page["Classifier"](page["mlp"]())
    serializers.load("averaged/average.model", model)
    x, t = (torch.as_tensor(np.stack(part)) for part in zip(*page["test"], strict=True))
    with torch.no_grad():
        assert row["average/main/loss"] == pytest.approx(float(nn.functional.cross_entropy(model.predictor(x), t)), rel=1e-5)
    assert row["average/main/loss"] != row["validation/main/loss"]


def test_the_warm_up_is_the_schedule_of_the_page():
    """From a tenth to the whole in ten iterations, then half a cosine over the rest of the 43."""
    rates = warm_rates()
    rises = [0.1 * (0.1 + 0.9 * step / 10) for step in range(10)]
    falls = [0.05 * (1 + np.cos(np.pi * step / 33)) for step in range(len(rates) - 10)]
    np.testing.assert_allclose(rates, rises + falls, rtol=1e-6, atol=1e-9)


def warm_rates():
    namespace = {}
    for block in [*blocks(), blocks("Learning rate schedules")[0]]:
        exec(block, namespace)
    return [row["lr"] for row in rows_of(namespace["trainer"])]


def test_throughput_and_the_profile_have_the_names_of_the_page(monkeypatch):
    """So that who reads the page finds them."""
    real, looks = psutil.cpu_times(), itertools.count()  # of which a run as short as this may see no tick
    monkeypatch.setattr(psutil, "cpu_times", lambda: real._replace(user=real.user + next(looks)))
    page = run_page("profiling.md")
    (*_, row) = rows_of(page["trainer"])
    names = {"iterations_per_second", "examples_per_second", "peak_memory_mib"}
    assert {f"throughput/{name}" for name in names} <= row.keys()
    names = {"cpu_percent", "process_cpu_percent", "memory_percent", "process_memory_mib"}
    for row in rows_of(page["watched"]):
        assert {f"system/{name}" for name in names} <= row.keys()
    with open("profiled/profile.txt") as table:
        phases = [line.partition("  ")[0] for line in table.read().splitlines()[2:]]
    assert phases[:6] == ["first batch", "data", "forward", "backward", "step", "update"]
    assert "extension:LogReport" in phases


def test_the_shift_of_the_page_takes_the_arguments_it_is_shown_with():
    """From 0.01 to 0.1 in ten iterations."""
    shift = extensions.WarmupShift("lr", 0.01, 10, 0.1)
    assert list(inspect.signature(extensions.WarmupShift).parameters)[:4] == ["attr", "warmup_start", "warmup_iter", "init"]
    assert shift.value(0, 0.1) == pytest.approx(0.01)
    assert shift.value(10, 0.1) == pytest.approx(0.1)


def test_the_function_without_data_is_minimised():
    """The page's Rosenbrock valley: its minimum is at (1, 1)."""
    page = run_section("Updates without data")
    log = page["trainer"].get_extension("LogReport").log
    assert log[-1]["main/loss"] < log[0]["main/loss"] / 20
    assert (len(log), page["trainer"].updater.epoch) == (10, 0)


def test_an_environment_resumes_at_every_step_of_an_episode(tmp_path):
    """That of gymnasium's cart and pole, which has no state to save: its actions are taken again."""
    page = run_section("Reinforcement learning")
    log = page["trainer"].get_extension("LogReport").log
    assert log[-1]["main/steps"] > log[0]["main/steps"]

    def make(out, length):
        torch.manual_seed(3)
        return training.Trainer(page["reinforce"](), length, out)

    assert_resumes_everywhere(make, tmp_path, 6)


def test_the_recipe_of_a_closure_trains_and_its_loss_falls():
    """Six steps of LBFGS, and a step of the optimizer that looks nearby."""
    page = run_section("Optimizers that need a closure")
    log = page["trainer"].get_extension("LogReport").log
    assert log[-1]["main/loss"] < log[0]["main/loss"] / 2
    model = page["Classifier"](page["mlp"]())
    optimizer = page["Nearby"](model.parameters(), lr=0.1)
    updater = page["SharpnessAware"](page["batches"](), optimizer, model, accumulate=2)
    trainer = training.Trainer(updater, (2, "epoch"))
    trainer.extend(extensions.LogReport())
    trainer.run()
    first, last = trainer.get_extension("LogReport").log
    assert last["main/loss"] < first["main/loss"]


def test_a_batch_that_grows_is_the_same_where_it_is_cut(tmp_path, capsys):
    """The number of batches of each update, the rows of the log and the parameters; the log has it as the page says."""

    def make(out, stop):
        page = definitions("A batch that grows")
        torch.manual_seed(1)
        model = page["Classifier"](page["mlp"]())
        batches = iterators.SerialIterator(datasets.get_digits()[0][:200], 10)
        updater = training.StandardUpdater(batches, torch.optim.Adam(model.parameters()), model)
        trainer = training.Trainer(updater, stop, out=out)
        choose = page["choose"]
        trainer.extend(training.make_extension(priority=training.PRIORITY_READER, initializer=choose)(choose))
        report_it = extensions.observe_value("accumulate", lambda trainer: trainer.updater.accumulate)
        trainer.extend(report_it, trigger=(1, "iteration"))
        return trainer

    assert_resumes_everywhere(make, tmp_path, 13)
    page = run_section("A batch that grows")
    assert [row["accumulate"] for row in rows_of(page["trainer"])][:3] == [1, 1, 4]


def test_one_batch_is_learnt_by_heart(tmp_path):
    """As the page asserts."""
    assert run_section("Overfit one batch")["trainer"].updater.iteration == 60
