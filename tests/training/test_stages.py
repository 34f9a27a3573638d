"""The stages of an update and the callbacks around them."""

import pytest
import torch
from toys import Regression, observed_update, parameters_of, regression_data, same_regression, updater_of

from chainring.parallel import Communicator
from chainring.training import StandardUpdater, UpdateCallbacks

STAGES = [f"{stage}_on_{when}" for stage in ("forward", "backward", "comm", "update") for when in ("start", "finish")]


def recording(events, *names):
    """Callbacks that write down the name of their stage and the part that is under way."""
    return UpdateCallbacks(
        **{name: lambda context, name=name: events.append((name, context.micro_step)) for name in names or STAGES}
    )


def parts(*names, part=0):
    return [(f"{name}_on_{when}", part) for name in names for when in ("start", "finish")]


def test_each_callback_runs_once_a_stage_in_the_order_of_the_stages():
    """forward_on_start comes before the forward, and forward_on_finish once after it."""
    events = []

    class Noting(Regression):
        def forward(self, x, t):
            events.append("forward")
            return super().forward(x, t)

    updater_of(model=Noting(), callbacks=recording(events)).update()
    forward = parts("forward")
    assert events == [forward[0], "forward", forward[1], *parts("backward", "update")]


def test_forward_and_backward_callbacks_run_for_every_part_and_update_once():
    """With accumulate=2 the update stage comes after both parts, and the context says which part it is."""
    events = []
    updater_of(callbacks=recording(events), accumulate=2).update()
    assert events == [
        *parts("forward", "backward", part=0),
        *parts("forward", "backward", part=1),
        *parts("update", part=1),
    ]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_comm_callbacks_run_once_an_update_and_only_with_a_communicator(accumulate):
    """A communicator, also of one, brings the comm stage between the last backward and the update."""
    events = []
    updater_of(callbacks=recording(events), accumulate=accumulate, comm=Communicator()).update()
    last = accumulate - 1
    assert events[-5:] == [("backward_on_finish", last), *parts("comm", "update", part=last)]
    assert len([event for event in events if event[0].startswith("comm")]) == 2


def test_the_context_tells_updater_iteration_part_batch_and_loss():
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
    """Clipping there acts on the mean over all parts, which is what the optimizer then uses."""
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
    assert events == parts("forward", "backward", "update")


def test_callbacks_are_given_by_name_only():
    """A position says nothing about a stage: upstream's own example put a callback into another stage's place."""
    with pytest.raises(TypeError):
        UpdateCallbacks(lambda context: None)
