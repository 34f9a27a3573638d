"""The lifecycle of a run: initialize, on_error and finalize, with and without failures."""

import pytest
from counting import CountingUpdater, a_trainer

from chainring import get_current_reporter, training


class Witness(training.Extension):
    """Writes down what happens to it; raises where it is told to."""

    def __init__(self, events, name, raises=None):
        self.events, self.name, self.raises = events, name, raises or {}

    def _happens(self, what):
        self.events.append(f"{what} {self.name}")
        if what in self.raises:
            raise self.raises[what]

    def initialize(self, trainer):
        self._happens("initialize")

    def __call__(self, trainer):
        self._happens("call")

    def on_error(self, trainer, exception):
        self._happens("on_error")

    def finalize(self):
        self._happens("finalize")


class Failing(CountingUpdater):
    """An updater whose third update fails, and that says when it is finalized."""

    def __init__(self, events, error=None, on_finalize=None):
        super().__init__()
        self.events, self.error, self.on_finalize = events, error, on_finalize

    def update_core(self):
        if self.error is not None and self.iteration == 2:
            raise self.error

    def finalize(self):
        super().finalize()
        self.events.append("finalize updater")
        if self.on_finalize is not None:
            raise self.on_finalize


def witnessed(out, error=None, a=None, b=None, on_finalize=None, stop=(3, "iteration")):
    """A trainer with the witnesses "a" and "b", and the list of what happens, calls of extensions left out."""
    events = []
    trainer = a_trainer(out, Failing(events, error, on_finalize), stop)
    trainer.extend(Witness(events, "b", b), "b", priority=1)
    trainer.extend(Witness(events, "a", a), "a", priority=2)
    return trainer, events


STARTED = ["initialize a", "initialize b"]
TOLD = ["on_error a", "on_error b"]
ENDED = ["finalize a", "finalize b", "finalize updater"]
kinds = pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])


def raised_by(trainer):
    """What a run raises."""
    try:
        trainer.run()
    except BaseException as error:
        return error
    pytest.fail("the run raised nothing")


def around(events):
    """What happens around the loop."""
    return [event for event in events if not event.startswith("call")]


def test_a_run_initializes_all_and_finalizes_all_and_the_updater(tmp_path):
    """In the order of priority, the updater last, each once."""
    trainer, events = witnessed(tmp_path)
    trainer.run()
    assert around(events) == STARTED + ENDED


@kinds
@pytest.mark.parametrize("where", ["update", "call", "stop"])
def test_an_error_in_the_loop_tells_all_and_finalizes_all(tmp_path, kind, where):
    """The update's, an extension's and the stop trigger's alike, interrupts included; that very error is raised."""
    error = kind("first")

    def stop(trainer):
        if trainer.updater.iteration == 2:
            raise error
        return False

    settings = {"update": {"error": error}, "call": {"a": {"call": error}}, "stop": {"stop": stop}}
    trainer, events = witnessed(tmp_path, **settings[where])
    assert (raised_by(trainer), around(events)) == (error, STARTED + TOLD + ENDED)


@kinds
def test_an_error_of_initialize_tells_those_that_have_started_and_finalizes_all(tmp_path, kind):
    """Upstream finalizes nothing then, and worker processes stay."""
    error = kind("first")
    trainer, events = witnessed(tmp_path, b={"initialize": error})
    assert (raised_by(trainer), events) == (error, [*STARTED, "on_error a", *ENDED])


@kinds
def test_an_error_of_a_call_before_training_tells_all_and_finalizes_all(tmp_path, kind):
    """Such a call is inside the run as any other."""
    error = kind("first")
    trainer, events = witnessed(tmp_path)
    trainer.extend(Witness(events, "c", {"call": error}), "c", priority=0, invoke_before_training=True)
    raised, expected = (
        raised_by(trainer),
        [*STARTED, "initialize c", "call c", *TOLD, "on_error c", *ENDED[:2], "finalize c"],
    )
    assert (raised, events) == (error, [*expected, ENDED[2]])


@kinds
@pytest.mark.parametrize("later", [RuntimeError, KeyboardInterrupt])
def test_an_error_of_on_error_hides_nothing_and_stops_nothing(tmp_path, kind, later):
    """The first error is raised with the later one as a note; every other handler and finalizer runs."""
    trainer, events = witnessed(tmp_path, kind("first"), a={"on_error": later("second")})
    raised = raised_by(trainer)
    assert (type(raised), str(raised), around(events)) == (kind, "first", STARTED + TOLD + ENDED)
    assert f"afterwards on_error of 'a' raised {later.__name__}: second" in raised.__notes__


def test_an_error_of_finalize_does_not_keep_the_others_from_it(tmp_path):
    """After a good run it is raised itself; the other extensions and the updater are finalized all the same."""
    error = RuntimeError("late")
    trainer, events = witnessed(tmp_path, a={"finalize": error})
    assert (raised_by(trainer), around(events)) == (error, STARTED + ENDED)
    assert "raised in finalize of 'a'" in error.__notes__


def test_errors_of_finalize_are_notes_of_the_first_error(tmp_path):
    """The first is raised, whatever comes later, and the notes name each place in order."""
    late = {"finalize": RuntimeError("second")}
    trainer, events = witnessed(tmp_path, ValueError("first"), late, {"finalize": OSError("third")}, KeyError("fourth"))
    raised = raised_by(trainer)
    assert (str(raised), around(events)) == ("first", STARTED + TOLD + ENDED)
    assert raised.__notes__[1:] == [
        "afterwards finalize of 'a' raised RuntimeError: second",
        "afterwards finalize of 'b' raised OSError: third",
        "afterwards finalize of the updater raised KeyError: 'fourth'",
    ]


def test_an_on_error_that_raises_the_same_error_adds_no_note(tmp_path):
    """A handler that only raises what it was given says nothing new."""
    error = ValueError("first")
    trainer, _ = witnessed(tmp_path, error, a={"on_error": error})
    assert raised_by(trainer).__notes__ == ["raised after iteration 2"]


def test_the_error_says_in_which_iteration_it_was_raised(tmp_path):
    """An update that fails after two completed ones is the third iteration's."""
    trainer, _ = witnessed(tmp_path, ValueError("first"))
    assert raised_by(trainer).__notes__ == ["raised after iteration 2"]


def test_the_error_of_an_extension_says_whose_it_is(tmp_path):
    """By the name that it has in the trainer, and in which iteration."""
    trainer, _ = witnessed(tmp_path, a={"call": ValueError("first")})
    assert raised_by(trainer).__notes__ == ["raised in extension 'a' after iteration 1"]


def test_the_error_is_logged_before_anything_is_finalized(tmp_path, logged):
    """A finalizer may take long or hang, so the message comes first."""
    trainer, _ = witnessed(tmp_path, ValueError("first"))
    seen = []
    trainer.extend(training.make_extension(finalizer=lambda: seen.extend(logged))(lambda trainer: None))
    raised_by(trainer)
    assert seen == ["training stops after iteration 2: ValueError: first"]


@pytest.mark.parametrize("error", [None, ValueError("first")], ids=["after success", "after failure"])
def test_a_trainer_runs_once(tmp_path, error):
    """A second run raises and touches nothing, also after a failed one, where upstream goes on with what is closed."""
    trainer, events = witnessed(tmp_path, error)
    try:
        trainer.run()
    except ValueError:
        events.append("failed")
    before = list(events)
    with pytest.raises(RuntimeError, match="can run only once; make a new one, and load a snapshot or state_dict"):
        trainer.run()
    assert events == before


def test_state_is_not_loaded_into_a_trainer_that_has_run(tmp_path):
    """It would never be used; the error says to make a new trainer."""
    trainer, _ = witnessed(tmp_path)
    trainer.run()
    with pytest.raises(RuntimeError, match="which has started; make a new trainer"):
        trainer.load_state_dict(trainer.state_dict())


def test_a_failed_run_leaves_no_reporter_and_no_name_behind(tmp_path):
    """Afterwards reports go nowhere again, and no extension counts as running."""
    trainer, _ = witnessed(tmp_path, a={"call": ValueError("first")})
    raised_by(trainer)
    with pytest.raises(RuntimeError, match="no reporter is current"):
        get_current_reporter()
    assert trainer.extension_name is None


def test_an_out_that_goes_bad_before_the_run_finalizes_all(tmp_path):
    """A file that has taken the directory's place is an error of the run that names out."""
    trainer, events = witnessed(tmp_path / "out")
    (tmp_path / "out").touch()
    assert "out must be a writable directory" in str(raised_by(trainer))
    assert events == ENDED


def test_an_error_in_a_trigger_is_not_blamed_on_the_extension_before(tmp_path):
    """Which extension failed is said only while one is called."""
    trainer = a_trainer(tmp_path, stop=(1, "iteration"))

    def boom(_):
        raise ValueError("first")

    trainer.extend(lambda _: None, name="before")
    trainer.extend(lambda _: None, name="after", trigger=boom)
    with pytest.raises(ValueError, match="first") as caught:
        trainer.run()
    assert caught.value.__notes__ == ["raised after iteration 1"]


def test_an_extension_registered_while_the_run_goes_on_is_refused(tmp_path):
    """It would not be called, so it is no silent loss."""
    trainer = a_trainer(tmp_path, stop=(1, "iteration"))
    trainer.extend(lambda t: t.extend(lambda _: None))
    with pytest.raises(RuntimeError, match="before run"):
        trainer.run()


def test_on_error_runs_with_two_arguments_and_with_the_traceback_as_chainers(tmp_path):
    """A method of either signature, a function of either given to make_extension, and one with another default."""
    trainer, events = witnessed(tmp_path, error := ValueError("broken"))

    class Chainers:
        def __call__(self, trainer):
            pass

        def on_error(self, trainer, exception, traceback):
            events.append(("chainer", exception, traceback is exception.__traceback__ and traceback is not None))

    def with_option(trainer, exception, verbose=False):
        events.append(("option", exception, verbose))

    def with_traceback(trainer, exc, tb):
        events.append(("function", exc, tb is exc.__traceback__))

    trainer.extend(Chainers(), priority=0)
    trainer.extend(training.make_extension(on_error=with_option)(lambda trainer: None), "option", priority=0)
    trainer.extend(training.make_extension(on_error=with_traceback)(lambda trainer: None), "function", priority=0)
    assert raised_by(trainer) == error
    events = [event for event in events if "call" not in event and event not in (*STARTED, *ENDED)]
    assert events == [*TOLD, ("chainer", error, True), ("option", error, False), ("function", error, True)]
    assert not any("on_error" in note for note in error.__notes__)


def test_an_on_error_of_another_signature_is_refused_at_extend(tmp_path):
    """Otherwise it would never run, and be noticed hours later, when something else fails."""

    class Witnessed(training.Extension):
        def on_error(self, exception):
            raise AssertionError

    trainer, _ = witnessed(tmp_path)
    with pytest.raises(TypeError, match=r"the trainer and the exception.*'Witnessed' cannot be: too many.*write on_error\("):
        trainer.extend(Witnessed())
    with pytest.raises(TypeError, match="and that of make_extension cannot be: missing a required"):
        training.make_extension(on_error=lambda trainer, exception, traceback, more: None)
