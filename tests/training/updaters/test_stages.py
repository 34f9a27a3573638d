"""The stages of an update and the callbacks around them."""

from functools import partial

import pytest
import torch
from toys import Regression, observed_update, parameters_of, regression_data, same_regression, updater_of

from chainring.iterators import SerialIterator
from chainring.parallel import Communicator
from chainring.training import ParallelUpdater, StandardUpdater, UpdateCallbacks

STAGES = [
    "batch_on_finish",
    *(f"{stage}_on_{when}" for stage in ("forward", "backward", "comm", "update") for when in ("start", "finish")),
]
BATCH = ("batch_on_finish", 0)


def recording(events, *names):
    """Callbacks that write down the name of their stage and the index of the micro-batch."""
    return UpdateCallbacks(
        **{name: lambda context, name=name: events.append((name, context.micro_step)) for name in names or STAGES}
    )


def stages(*names, micro_step=0):
    return [(f"{name}_on_{when}", micro_step) for name in names for when in ("start", "finish")]


def test_each_callback_runs_once_a_stage_in_the_order_of_the_stages():
    """forward_on_start comes before the forward, and forward_on_finish once after it."""
    events = []

    class Noting(Regression):
        def forward(self, x, t):
            events.append("forward")
            return super().forward(x, t)

    updater_of(model=Noting(), callbacks=recording(events)).update()
    forward = stages("forward")
    assert events == [BATCH, forward[0], "forward", forward[1], *stages("backward", "update")]


def test_forward_and_backward_callbacks_run_for_every_micro_batch_and_update_once():
    """With accumulate=2 the update stage comes after both micro-batches, whose index the context has."""
    events = []
    updater_of(callbacks=recording(events), accumulate=2).update()
    assert events == [
        BATCH,
        *stages("forward", "backward", micro_step=0),
        ("batch_on_finish", 1),
        *stages("forward", "backward", micro_step=1),
        *stages("update", micro_step=1),
    ]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_comm_callbacks_run_once_an_update_and_only_with_a_communicator(accumulate):
    """A communicator, also of one, brings the comm stage between the last backward and the update."""
    events = []
    updater_of(callbacks=recording(events), accumulate=accumulate, comm=Communicator()).update()
    last = accumulate - 1
    assert events[-5:] == [("backward_on_finish", last), *stages("comm", "update", micro_step=last)]
    assert len([event for event in events if event[0].startswith("comm")]) == 2


def test_the_context_has_updater_iteration_micro_step_batch_and_loss():
    """A callback needs no closure over the loop; the loss is there from the end of the forward on."""
    seen = []

    def note(context):
        seen.append((context.updater, context.iteration, context.micro_step, context.batch[0].shape, context.loss))

    updater = updater_of(4, callbacks=UpdateCallbacks(forward_on_start=note, forward_on_finish=note, update_on_finish=note))
    updater.update()
    updater.update()
    assert [entry[:4] for entry in seen] == [(updater, i, 0, (4, 3)) for i in (0, 0, 0, 1, 1, 1)]
    assert [entry[4] is None for entry in seen] == [True, False, False] * 2
    x, t = regression_data().tensors
    assert seen[1][4].item() == same_regression()(x[:4], t[:4]).item()


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_any_iterable_of_callbacks_will_do_and_keeps_its_order(kind):
    """A tuple is not taken for one callback that cannot be called."""
    events = []
    callbacks = kind([lambda context: events.append("a"), lambda context: events.append("b")])
    updater = updater_of(callbacks=UpdateCallbacks(update_on_start=callbacks))
    updater.update()
    updater.update()
    assert events == ["a", "b"] * 2


def test_callbacks_do_not_leak_from_one_object_into_another():
    """Default arguments are not shared lists."""
    assert UpdateCallbacks(update_on_start=print).update_on_start == (print,)
    assert not UpdateCallbacks()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("given", "shown"), [(3, "3"), ([print, "print"], "'print'")])
def test_callbacks_of_a_wrong_kind_are_refused_by_name(stage, given, shown):
    """The error says which argument, what is wrong in it, and what it should be."""
    with pytest.raises(TypeError, match=f"{stage}.*{shown}|{shown}.*{stage}") as caught:
        UpdateCallbacks(**{stage: given})
    assert "callable of one context" in str(caught.value)


@pytest.mark.parametrize("stage", [name for name in STAGES if not name.startswith("comm")])
def test_an_error_in_a_callback_ends_the_update(stage):
    """It is raised as it is; the iteration is not counted and the batch is returned again."""
    updater = updater_of(callbacks=UpdateCallbacks(**{stage: lambda context: 1 / 0}))
    with pytest.raises(ZeroDivisionError):
        updater.update()
    assert (updater.iteration, updater.get_iterator("main").epoch_detail) == (0, 0.0)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_update_on_start_sees_the_final_gradient(accumulate):
    """Clipping there acts on the mean over all micro-batches, which is what the optimizer then uses."""
    seen = []

    def clip(context):
        parameters = list(context.updater.get_model("main").parameters())
        seen.append([parameter.grad.clone() for parameter in parameters])
        torch.nn.utils.clip_grad_norm_(parameters, 0.01)

    updater = updater_of(12 // accumulate, accumulate=accumulate, callbacks=UpdateCallbacks(update_on_start=clip))
    before = parameters_of(updater)
    updater.update()

    model = same_regression()
    model(*regression_data().tensors).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    torch.testing.assert_close(seen[0], gradients)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    expected = [value - 0.1 * parameter.grad for value, parameter in zip(before, model.parameters(), strict=True)]
    torch.testing.assert_close(parameters_of(updater), expected)


def test_update_on_finish_sees_the_stepped_parameters_and_still_the_gradient():
    """What was applied can be looked at."""
    seen = []

    def note(context):
        weight = context.updater.get_model("main").predictor.weight
        seen.append((weight.detach().clone(), weight.grad is not None))

    updater = updater_of(callbacks=UpdateCallbacks(update_on_finish=note))
    updater.update()
    assert torch.equal(seen[0][0], updater.get_model("main").predictor.weight)
    assert seen[0][1]


def test_what_a_callback_reports_is_in_the_observation():
    """A gradient norm, say: callbacks run inside the reporter's scope."""
    from chainring import report

    def note(context):
        report({"grad_norm": 2.5})

    for accumulate in (1, 2):
        callbacks = UpdateCallbacks(update_on_start=note, backward_on_finish=lambda context: report({"seen": 1}))
        observation = observed_update(updater_of(callbacks=callbacks, accumulate=accumulate))
        assert (observation["grad_norm"], observation["seen"]) == (2.5, 1)


def test_callbacks_run_in_the_order_of_an_update_core_of_ones_own():
    """autocast, backward and step bring their callbacks along."""
    events = []

    class Own(StandardUpdater):
        def update_core(self):
            x, t = self.next_batch()
            with self.autocast():
                loss = self.get_model("main")(x, t)
            self.backward(loss)
            self.step()

    updater_of(kind=Own, callbacks=recording(events)).update()
    assert events == [BATCH, *stages("forward", "backward", "update")]


SETTINGS = [
    {},
    {"accumulate": 2},
    {"callbacks": UpdateCallbacks(update_on_start=lambda context: None)},
    {"kind": ParallelUpdater, "devices": {"main": "cpu", "second": "cpu"}},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_callback_of_a_batch_gets_the_converted_batch(settings):
    """In a fast path and in stages, and divided over replicas: tensors, and how many examples they are."""
    seen = []
    updater = updater_of(**settings)
    updater.callbacks.add("batch_on_finish", seen.append)
    updater.update()
    updater.update()
    steps = [(i, k) for i in range(2) for k in range(settings.get("accumulate", 1))]
    assert [(context.iteration, context.micro_step) for context in seen] == steps
    assert all(context.updater is updater and context.examples == 4 for context in seen)
    batches = seen[0].batch if "devices" in settings else [seen[0].batch]
    x, t = regression_data().tensors
    for n, (inputs, targets) in enumerate(batches):
        assert torch.equal(inputs, x[:4][n :: len(batches)])
        assert torch.equal(targets, t[:4][n :: len(batches)])
    updater.callbacks.remove("batch_on_finish", seen.append)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_callback_may_replace_the_batch(settings):
    """The forward is computed from what it leaves in the context."""
    updater = updater_of(**settings)

    def zeros(value):
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(map(zeros, value))

    def zero(context):
        context.batch = zeros(context.batch)

    updater.callbacks.add("batch_on_finish", zero)
    assert observed_update(updater)["main/loss"].item() == pytest.approx(same_regression().predictor.bias.item() ** 2)
    updater.callbacks.remove("batch_on_finish", zero)
    assert observed_update(updater)["main/loss"].item() != pytest.approx(same_regression().predictor.bias.item() ** 2)


def test_a_callback_can_be_added_and_removed_between_updates():
    """Of any stage, also where the updater was made without callbacks; the first or the last of its stage."""
    events = []

    def note(context):
        events.append(context.iteration)

    updater = updater_of()
    callbacks = updater.callbacks
    updater.update()
    callbacks.add("update_on_start", note)
    callbacks.add("update_on_start", lambda context: events.append("last"))
    callbacks.add("update_on_start", lambda context: events.append("first"), first=True)
    updater.update()
    callbacks.remove("update_on_start", note)
    callbacks.remove("update_on_start", note)  # once more is once too many, and does no harm
    updater.update()
    assert events == ["first", 1, "last", "first", "last"]


def test_a_callback_that_is_assigned_to_a_stage_is_called():
    """``callbacks.update_on_start += (f,)`` is `add`; what cannot be called is refused there."""
    updater, events = updater_of(), []
    updater.update()
    updater.callbacks.update_on_start += (lambda context: events.append(context.iteration),)
    updater.update()
    updater.callbacks.update_on_start = ()
    updater.update()
    assert events == [1]
    with pytest.raises(TypeError, match="update_on_start is a callable"):
        updater.callbacks.update_on_start = 3


def test_updates_are_the_same_with_callbacks_and_without():
    """An updater that goes through stages for a while computes the same bits."""
    plain, heard, events = updater_of(), updater_of(), []
    for listens in (False, True, False):
        if listens:
            heard.callbacks.add("update_on_finish", events.append)
        else:
            heard.callbacks.remove("update_on_finish", events.append)
        plain.update()
        heard.update()
    assert len(events) == 1
    assert all(map(torch.equal, parameters_of(plain), parameters_of(heard)))


class InStages(StandardUpdater):
    """Runs stage by stage, since it has a stage of its own."""

    def update_core(self):
        super().update_core()


def _weighted(model, x=None, t=None):
    loss = model.predictor.weight.square().mean() if x is None else (model.predictor(x) - t).square().mean()
    return {"loss": loss, "weight": 3 if x is None else len(x) - 1}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("has_data", "loss_func"), [(True, None), (True, _weighted), (False, _weighted)], ids=["plain", "weighted", "no data"]
)
def test_callbacks_see_the_same_in_the_straight_update_and_stage_by_stage(has_data, loss_func, precision):
    """The batch, the loss, the number of examples, the weight of the update, and the gradients as far as they are."""

    def seen_by(kind):
        events, model = [], same_regression()

        def note(stage, context):
            gradients = [None if parameter.grad is None else parameter.grad.tolist() for parameter in model.parameters()]
            loss = None if context.loss is None else context.loss.item()
            events.append((stage, context.iteration, str(context.batch), loss, context.examples, gradients))

        callbacks = UpdateCallbacks(**{name: partial(note, name) for name in STAGES})
        data = SerialIterator(regression_data(), 4, shuffle=False) if has_data else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        updater = kind(data, optimizer, model, loss_func=loss_func, precision=precision, callbacks=callbacks)
        for _ in range(3):
            updater.update()
            events.append((updater.weight, [parameter.tolist() for parameter in parameters_of(updater)]))
        return events

    straight = seen_by(StandardUpdater)
    assert straight == seen_by(InStages)
    assert len(straight) == 3 * (7 + has_data)


def test_a_callback_may_compute_more_gradients_by_the_updater():
    """What it adds before the step counts, in the straight update as stage by stage."""

    def trained(kind):
        def add(context):
            context.updater.backward(context.updater.get_model("main").predictor.weight.square().mean())

        updater = updater_of(kind=kind, callbacks=UpdateCallbacks(update_on_start=add))
        for _ in range(3):
            updater.update()
        return parameters_of(updater)

    assert all(map(torch.equal, trained(StandardUpdater), trained(InStages)))


def test_a_callback_for_an_unknown_stage_is_refused():
    """With the stages that there are."""
    with pytest.raises(ValueError, match=r"batch_on_finish.*update_on_finish; got 'batch_on_start'"):
        UpdateCallbacks().add("batch_on_start", print)
    with pytest.raises(ValueError, match="got 'batch'"):
        UpdateCallbacks().remove("batch", print)


def test_callbacks_are_given_by_name_only():
    """A position says nothing about a stage: upstream's own example put a callback into another stage's place."""
    with pytest.raises(TypeError):
        UpdateCallbacks(lambda context: None)


class TwoBatches(StandardUpdater):
    """Takes two batches in an update."""

    def update_core(self):
        losses = [self.get_model("main")(*self.next_batch()) for _ in range(2)]
        self.backward(sum(losses))
        self.step()


EPOCHS = {  # of batches of 4 of 12 examples, of 5 of 12, and so on
    "a batch": ({}, 4, [0, 0, 0, 1, 1, 1]),
    "micro-batches": ({"accumulate": 2}, 4, [0, 0, 0, 1, 1, 1]),
    "across epochs": ({"accumulate": 2}, 5, [0, 0, 0, 1, 1, 2]),
    "an end of their own": ({"accumulate": 2, "accumulate_across_epochs": False}, 4, [0, 0, 0, 1, 1, 1]),
    "several batches": ({"kind": TwoBatches}, 4, [0, 0, 0, 1, 1, 1]),
    "virtual ranks": ({"virtual_ranks": 2}, 4, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]),
    "virtual micro-batches": ({"virtual_ranks": 1, "accumulate": 2}, 4, [0, 0, 0, 1, 1, 1]),
    "virtual ranks of one's own": ({"virtual_ranks": 1, "kind": TwoBatches}, 4, [0, 0, 0, 1, 1, 1]),
    "replicas": ({"kind": ParallelUpdater, "devices": {"main": "cpu", "second": "cpu"}}, 4, [0, 0, 0, 1, 1, 1]),
    "one batch an epoch": ({}, 12, [0, 1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("name", EPOCHS)
def test_a_context_has_the_epoch_of_its_batch(name):
    """Also in the last batch of an epoch, with which the updater counts the epoch as over, before the update ends."""
    settings, batch_size, expected = EPOCHS[name]
    seen = []
    updater = updater_of(batch_size, **settings)
    stages = ("batch_on_finish",) if "kind" in settings else ("batch_on_finish", "forward_on_start", "backward_on_finish")
    for stage in stages:
        updater.callbacks.add(stage, lambda context, stage=stage: seen.append((stage, context.epoch)))
    updater.start()
    while len(seen) < len(expected) * len(stages):
        updater.update()
    for stage in stages:
        assert [epoch for at, epoch in seen if at == stage][: len(expected)] == expected, stage


@pytest.mark.parametrize("source", ["without data", "a loader"])
def test_the_epoch_of_a_context_is_0_without_data_and_counted_for_loaders(source):
    """An update without data belongs to epoch 0."""
    seen, model = [], same_regression()
    loader = None if source == "without data" else torch.utils.data.DataLoader(regression_data(), 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    updater = StandardUpdater(loader, optimizer, model, loss_func=lambda model, *_: model.predictor.weight.sum())
    updater.callbacks.add("forward_on_start", lambda context: seen.append((context.epoch, context.updater.epoch)))
    for _ in range(4):
        updater.update()
    assert seen == ([(0, 0)] * 4 if loader is None else [(0, 0), (0, 1), (1, 1), (1, 2)])
