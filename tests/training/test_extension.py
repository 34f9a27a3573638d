"""Objects that may be extensions, their names, and their default settings."""

import functools

import pytest
from counting import CountingUpdater, Fires, a_trainer

from chainring import training
from chainring.training import PRIORITY_EDITOR, PRIORITY_READER, PRIORITY_WRITER, extensions


def a_function(trainer):
    """An extension."""


class Named(training.Extension):
    """An extension with everything but its class's defaults."""

    trigger = (2, "iteration")
    priority = PRIORITY_WRITER
    default_name = "mine"

    def __init__(self):
        self.fires = Fires()

    def __call__(self, trainer):
        self.fires(trainer)


class Holder:
    """Has a method to be used as an extension."""

    def method(self, trainer):
        pass


def names(trainer):
    """The names of a trainer's extensions, in the order in which they would run."""
    return [line.split()[0] for line in trainer.explain(1).splitlines()[2:]]


@pytest.mark.parametrize(
    ("extension", "name"),
    [
        (a_function, "a_function"),
        (lambda trainer: None, "<lambda>"),
        (lambda *everything: None, "<lambda>"),
        (Fires(), "Fires"),
        (Named(), "mine"),
        (Holder().method, "method"),
        (functools.partial(a_function), "partial"),
        ([].append, "append"),
        (training.make_extension()(lambda trainer: None), "<lambda>"),
    ],
)
def test_any_callable_of_one_argument_is_an_extension_with_a_name(tmp_path, extension, name):
    """Objects, functions, bound methods, partials and callables of C run; upstream refuses methods and partials."""
    trainer = a_trainer(tmp_path, stop=(3, "iteration"))
    trainer.extend(extension)
    trainer.run()
    assert (names(trainer), trainer.get_extension(name)) == ([name], extension)


@pytest.mark.parametrize("wrap", [lambda fires: fires, lambda fires: fires.__call__, functools.partial])
def test_an_object_a_method_and_a_partial_are_called(tmp_path, wrap):
    """Without settings, in every iteration."""
    trainer, fires = a_trainer(tmp_path, stop=(3, "iteration")), Fires()
    trainer.extend(wrap(fires))
    trainer.run()
    assert fires.iterations == [1, 2, 3]


def test_the_name_is_the_given_one_else_the_default_else_the_functions_else_the_class(tmp_path):
    """Each falls back on the next."""
    trainer, function = a_trainer(tmp_path), training.make_extension(default_name="default")(lambda trainer: None)
    for extension, name in [(function, "given"), (function, None), (a_function, None), (Fires(), None)]:
        trainer.extend(extension, name)
    assert names(trainer) == ["given", "default", "a_function", "Fires"]


def test_the_second_of_a_name_gets_a_number(tmp_path):
    """The second becomes name_1, the third name_2, and a number that is taken is passed over."""
    trainer = a_trainer(tmp_path)
    for name in (None, None, "Fires_2", None):
        trainer.extend(Fires(), name)
    assert names(trainer) == ["Fires", "Fires_1", "Fires_2", "Fires_3"]


def test_three_log_reports_have_names_of_their_own(tmp_path):
    """LogReport, LogReport_1, LogReport_2."""
    trainer = a_trainer(tmp_path)
    for _ in range(3):
        trainer.extend(extensions.LogReport(filename=None))
    assert names(trainer) == ["LogReport", "LogReport_1", "LogReport_2"]


def test_one_object_registered_twice_has_two_names(tmp_path):
    """Names live in the trainer's entries and not on the object, so each call sees its own."""
    trainer, seen = a_trainer(tmp_path, stop=(1, "iteration")), []

    class Same:
        def initialize(self, trainer):
            seen.append(("initialize", trainer.extension_name))

        def __call__(self, trainer):
            seen.append(("call", trainer.extension_name))

    same = Same()
    trainer.extend(same, "x")
    trainer.extend(same, "y")
    trainer.run()
    assert seen == [("initialize", "x"), ("initialize", "y"), ("call", "x"), ("call", "y")]
    assert vars(same) == {}


def test_outside_of_extensions_no_extension_has_the_name(tmp_path):
    """`extension_name` is None in the update and after the run."""
    seen = []

    class Looking(CountingUpdater):
        def update_core(self):
            seen.append(trainer.extension_name)

    trainer = a_trainer(tmp_path, Looking(), (3, "iteration"))
    trainer.extend(a_function)
    trainer.run()
    assert [*seen, trainer.extension_name] == [None] * 4


@pytest.mark.parametrize("arguments", [{"name": "training"}, {}])
def test_the_name_training_is_refused(tmp_path, arguments):
    """Given or the extension's own, with the remedy."""

    def training(trainer):
        pass

    with pytest.raises(ValueError, match=r'"training" is reserved.*give name= to extend'):
        a_trainer(tmp_path).extend(training, **arguments)


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    """A misspelt `get_extension` shows what there is."""
    trainer = a_trainer(tmp_path)
    trainer.extend(a_function)
    trainer.extend(Named())
    expected = r"no extension 'a_funktion': did you mean 'a_function'\? registered: \['a_function', 'mine'\]"
    with pytest.raises(KeyError, match=expected):
        trainer.get_extension("a_funktion")


class Subclassed(Named):
    """Is found as its base is."""

    default_name = "subclassed"


def test_an_extension_is_found_by_its_class(tmp_path):
    """Whatever its name there; a class called like a function too."""
    trainer = a_trainer(tmp_path)
    mine, log, snapshot = Named(), extensions.LogReport(), extensions.snapshot()
    trainer.extend(mine, name="other")
    trainer.extend(log)
    trainer.extend(snapshot)
    assert trainer.get_extension(Named) is mine
    assert trainer.get_extension(extensions.LogReport) is log
    assert trainer.get_extension(extensions.snapshot) is snapshot


def test_an_extension_is_found_by_the_class_that_it_derives_from(tmp_path):
    """Unless there is one of that class itself, which then is meant."""
    trainer = a_trainer(tmp_path)
    derived, exact = Subclassed(), Named()
    trainer.extend(derived)
    assert trainer.get_extension(Named) is derived
    trainer.extend(exact)
    assert trainer.get_extension(Named) is exact
    assert trainer.get_extension(Subclassed) is derived


def test_a_class_without_an_extension_lists_those_that_are_registered(tmp_path):
    """With their classes, as names may be others."""
    trainer = a_trainer(tmp_path)
    with pytest.raises(KeyError, match="no extension of class LogReport; registered: none"):
        trainer.get_extension(extensions.LogReport)
    trainer.extend(a_function)
    trainer.extend(Named(), name="other")
    expected = r"no extension of class LogReport; registered: a_function \(function\), other \(Named\)"
    with pytest.raises(KeyError, match=expected):
        trainer.get_extension(extensions.LogReport)


def test_a_class_of_several_extensions_is_refused_with_their_names(tmp_path):
    """None of them is taken silently; one object under two names is no choice."""
    trainer = a_trainer(tmp_path)
    first = Named()
    trainer.extend(first)
    trainer.extend(first, name="again")
    assert trainer.get_extension(Named) is first
    trainer.extend(Named())
    rule = r"the only extension of that class, and there are 3: mine, again, mine_1; give the name of one of them"
    with pytest.raises(ValueError, match=rule):
        trainer.get_extension(Named)


@pytest.mark.parametrize("wanted", [3, None, extensions.observe_lr, Named()])
def test_an_extension_is_not_found_by_anything_else(tmp_path, wanted):
    """Such as the function that made it."""
    trainer = a_trainer(tmp_path)
    trainer.extend(Named())
    with pytest.raises(TypeError, match="an extension is known by its name or its class, such as LogReport; got"):
        trainer.get_extension(wanted)


def test_an_extension_brings_its_trigger_and_priority(tmp_path):
    """Arguments that extend is not given come from the extension."""
    trainer, mine, order = a_trainer(tmp_path, stop=(4, "iteration")), Named(), []
    trainer.extend(a_function)
    trainer.extend(mine)
    order = names(trainer)
    trainer.run()
    assert (mine.fires.iterations, order) == ([2, 4], ["mine", "a_function"])


def test_extend_overrides_what_an_extension_brings(tmp_path):
    """A trigger and a priority given to extend win, a priority of 0 too."""
    trainer, mine = a_trainer(tmp_path, stop=(4, "iteration")), Named()
    trainer.extend(a_function, priority=1)
    trainer.extend(mine, trigger=(3, "iteration"), priority=0)
    trainer.run()
    assert (mine.fires.iterations, names(trainer)) == ([3], ["a_function", "mine"])


def test_an_extension_without_settings_runs_every_iteration_as_a_reader(tmp_path):
    """Every iteration, priority 100, between a little more and a little less."""
    trainer, fires = a_trainer(tmp_path, stop=(3, "iteration")), Fires()
    trainer.extend(a_function, "less", priority=99)
    trainer.extend(fires)
    trainer.extend(a_function, "more", priority=101)
    trainer.run()
    assert (names(trainer), fires.iterations) == (["more", "Fires", "less"], [1, 2, 3])


def test_extensions_may_be_given_to_the_trainer(tmp_path):
    """`Trainer(extensions=[...])` is extend for each."""
    trainer = training.Trainer(CountingUpdater(), None, str(tmp_path), [a_function, Named(), Fires()])
    assert names(trainer) == ["mine", "a_function", "Fires"]


def test_the_base_class_has_the_documented_defaults():
    """Every iteration, reader, not before training, named by its class; the priorities are 300, 200 and 100."""
    plain = training.Extension()
    defaults = (plain.trigger, plain.priority, plain.invoke_before_training, plain.default_name)
    assert defaults == ((1, "iteration"), 100, False, "Extension")
    assert (PRIORITY_WRITER, PRIORITY_EDITOR, PRIORITY_READER) == (300, 200, 100)


def test_an_extension_that_does_nothing_says_what_to_define(tmp_path):
    """Calling the base class names the method and the subclass."""

    class Empty(training.Extension):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty must define __call__\(trainer\)"):
        Empty()(a_trainer(tmp_path))


def test_make_extension_gives_the_function_back_with_its_settings(tmp_path):
    """The function itself, called when its trigger fires, at its place, under its name."""
    fires = Fires()

    def function(trainer):
        fires(trainer)

    made = training.make_extension((2, "iteration"), "made", 250)(function)
    trainer = a_trainer(tmp_path, stop=(4, "iteration"))
    trainer.extend(a_function)
    trainer.extend(made)
    trainer.run()
    assert (made is function, names(trainer), fires.iterations) == (True, ["made", "a_function"], [2, 4])


def test_make_extension_without_settings_has_those_of_an_extension():
    """Every iteration, reader, the function's name; optional methods are None."""
    made = training.make_extension()(lambda trainer: None)
    assert (made.trigger, made.priority, made.default_name) == ((1, "iteration"), 100, "<lambda>")
    assert (made.invoke_before_training, made.initialize, made.finalize, made.on_error) == (False, None, None, None)


def test_make_extension_attaches_what_happens_around_a_run(tmp_path):
    """The initializer before, the finalizer after, on_error when the run fails."""
    seen = []

    @training.make_extension(
        initializer=lambda trainer: seen.append("initialize"),
        finalizer=lambda: seen.append("finalize"),
        on_error=lambda trainer, error: seen.append(repr(error)),
    )
    def fail(trainer):
        raise ValueError("x")

    trainer = a_trainer(tmp_path)
    trainer.extend(fail)
    with pytest.raises(ValueError, match="x"):
        trainer.run()
    assert seen == ["initialize", "ValueError('x')", "finalize"]


def test_make_extension_refuses_an_unknown_setting():
    """A misspelt keyword is an error."""
    with pytest.raises(TypeError, match="priorty"):
        training.make_extension(priorty=1)


def test_make_extension_refuses_a_bad_trigger_when_it_is_written():
    """Not only when the function is registered."""
    with pytest.raises(ValueError, match="got 'epochs'"):
        training.make_extension(trigger=(1, "epochs"))


def test_make_extension_without_parentheses_says_so(tmp_path):
    """`@make_extension` on its own takes the function for a trigger; the first call tells what to write."""

    @training.make_extension
    def function(trainer):
        pass

    with pytest.raises(TypeError, match=r"@make_extension\(\)"):
        function(a_trainer(tmp_path))


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        (Named, r"got the class Named: write Named\(\.\.\.\)"),
        (lambda trainer, epoch: None, "called with one argument, the trainer, and '<lambda>' cannot be.*'epoch'"),
        (lambda: None, "called with one argument, the trainer, and '<lambda>' cannot be"),
        (5, "a callable of one argument, the trainer; got int"),
        (None, "a callable of one argument, the trainer; got NoneType"),
        ("LogReport", "a callable of one argument, the trainer; got str"),
    ],
)
def test_what_cannot_be_called_with_a_trainer_is_refused(tmp_path, extension, message):
    """When it is registered, not hours later; the error says what an extension is and what this is."""
    with pytest.raises(TypeError, match=message):
        a_trainer(tmp_path).extend(extension)


@pytest.mark.parametrize(("trigger", "error"), [((1, "epochs"), ValueError), (5, TypeError), ((0, "epoch"), ValueError)])
def test_a_bad_trigger_is_refused_and_leaves_nothing_registered(tmp_path, trigger, error):
    """After the error the trainer is as before."""
    trainer = a_trainer(tmp_path)
    with pytest.raises(error, match=r"trigger|period"):
        trainer.extend(a_function, trigger=trigger)
    assert names(trainer) == []
