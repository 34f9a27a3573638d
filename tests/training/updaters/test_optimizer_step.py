"""The step of an optimizer: who wants to know of it is told, and where nobody does, no record of it is kept."""

import functools
import warnings

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from toys import parameters_of, updater_of

from chainring.training import UpdateCallbacks


@pytest.fixture(params=["straight", "in stages"])
def updater(request):
    """One whose optimizer has a class of its own, which a test may change."""
    updater = updater_of(callbacks=None if request.param == "straight" else UpdateCallbacks(update_on_start=lambda _: None))
    updater.get_optimizer("main").__class__ = type("OwnSGD", (torch.optim.SGD,), {})
    return updater


@pytest.fixture
def record_function(monkeypatch):
    """Names of the records that were opened."""
    opened = []

    class Recording(torch.autograd.profiler.record_function):
        def __init__(self, name, args=None):
            opened.append(name)
            super().__init__(name, args)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Recording)
    return opened


def test_without_a_profiler_no_record_is_opened(updater, record_function):
    """The record, which takes a quarter of the time of a small step, is left out; the parameters are still changed."""
    before = parameters_of(updater)
    updater.update()
    assert record_function == []
    assert not any(map(torch.equal, before, parameters_of(updater)))


def test_a_profiler_sees_the_step(updater):
    """Under torch.profiler the record has the name that PyTorch gives to it."""
    with torch.profiler.profile(acc_events=True) as profiler:  # else PyTorch 2.11 warns
        updater.update()
    assert "Optimizer.step#OwnSGD.step" in [event.name for event in profiler.events()]


def test_hooks_of_an_optimizer_are_called(updater):
    """Before and after each step, as PyTorch promises; and no more when they are removed."""
    optimizer, called = updater.get_optimizer("main"), []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: called.append("before")),
        optimizer.register_step_post_hook(lambda *_: called.append("after")),
    ]
    updater.update()
    assert called == ["before", "after"]
    for handle in handles:
        handle.remove()
    updater.update()
    assert called == ["before", "after"]


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_hooks_of_all_optimizers_are_called(updater, register):
    """Those of the whole process too."""
    called = []
    handle = register(lambda *_: called.append("hook"))
    try:
        updater.update()
    finally:
        handle.remove()
    assert called == ["hook"]


def test_a_step_that_was_replaced_is_called(updater):
    """One of the optimizer itself, as schedulers of the learning rate put in its place."""
    optimizer, called = updater.get_optimizer("main"), []
    optimizer.step = lambda: called.append("step")
    updater.update()
    assert called == ["step"]


def test_a_class_whose_step_was_wrapped_is_called_through_what_wraps_it(updater):
    """By functools.wraps, which copies PyTorch's marks."""
    kind, called = type(updater.get_optimizer("main")), []
    inner = kind.step

    @functools.wraps(inner)
    def step(self, closure=None):
        called.append("step")
        return inner(self, closure)

    kind.step = step
    updater.update()
    assert called == ["step"]


def test_a_scheduler_knows_that_its_optimizer_has_stepped(updater):
    """PyTorch warns where a scheduler steps before its optimizer, and does not here."""
    scheduler = torch.optim.lr_scheduler.ConstantLR(updater.get_optimizer("main"))
    updater.update()
    with warnings.catch_warnings(action="error"):
        scheduler.step()


def test_what_is_left_out_keeps_a_record_and_calls_hooks_and_nothing_else():
    """A PyTorch whose wrapper of steps does more is noticed here: then `step_optimizer` is to be mended."""
    wrapper = torch.optim.Optimizer.profile_hook_step(torch.optim.SGD.step).__code__
    used = {"cast", "Optimizer", "__class__", "__name__", "torch", "autograd", "profiler", "record_function", "chain"}
    used |= {"_global_optimizer_pre_hooks", "_optimizer_step_pre_hooks", "_global_optimizer_post_hooks"}
    used |= {"_optimizer_step_post_hooks", "_optimizer_step_code", "values", "isinstance", "tuple", "len", "RuntimeError"}
    assert set(wrapper.co_names) == used
