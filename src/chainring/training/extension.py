"""Extensions: the base class and the decorator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from chainring.serializers.protocol import Stateful
from chainring.training._entry import Entry, check_on_error, check_priority, first_given
from chainring.training.triggers.base import TriggerLike, get_trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

PRIORITY_WRITER = 300
"""For extensions that add to the observation, such as an Evaluator."""
PRIORITY_EDITOR = 200
"""For extensions that change what others have added."""
PRIORITY_READER = 100
"""For extensions that read the observation, such as a LogReport."""


class Extension(Stateful):
    """Base class of extensions: actions that a trainer runs when their triggers fire.

    A subclass defines ``__call__``; everything else is optional. Any callable of one argument, the trainer, can be an
    extension too: this class only provides defaults, and documents the methods that a trainer looks for. A trainer calls
    them in this order, of all extensions by descending priority, and of equal ones as they were registered::

        saved state is loaded; initialize(trainer); __call__(trainer) if invoke_before_training
        while not stop_trigger(trainer):
            updater.update()
            for each extension but snapshots:
                observe(trainer); __call__(trainer) if trigger(trainer)
            for each snapshot:
                observe(trainer); it is due if trigger(trainer)
            if one is due: before_snapshot(trainer) of all others; __call__(trainer) of those that are due
        on_error(trainer, exception) if there was one; finalize()

    Example::

        class PrintLoss(Extension):
            trigger = (100, "iteration")

            def __call__(self, trainer):
                print(trainer.updater.iteration, float(trainer.observation["main/loss"]))

    Attributes:
        trigger: when it is called, unless `Trainer.extend` is given another trigger.
        priority: extensions of higher priority run first.
        invoke_before_training: True to call it also once just before the loop.
        skip_on_resume: True to skip the call before training in a resumed run.
        is_snapshot: True if it saves the state of the run. Such extensions are called last, after all triggers of the
            iteration have been checked; what follows here is asked of them alone.
        autoload: True to start a run from the newest one, and to take one when the run ends.
        has_fixed_name: True if each replaces the previous one under the same name, such as the best so far.
        target: the object that is saved instead of the trainer.
        saved_iteration: the iteration of the newest one of the trainer that this run has completely written.
    """

    trigger: TriggerLike = (1, "iteration")
    priority: int = PRIORITY_READER
    invoke_before_training: bool = False
    skip_on_resume: bool = False
    is_snapshot: bool = False
    autoload: bool = False
    has_fixed_name: bool = False
    target: Any = None
    saved_iteration: int | None = None

    @property
    def writes(self) -> Sequence[str]:
        """The names of the files that it writes into the trainer's ``out``; a new run in the same directory moves them away.

        A name may contain fields of the trainer: ``"image_{.updater.iteration}"``.
        """
        return ()

    def identity(self, trainer: Trainer) -> Sequence[str]:
        """Return texts that distinguish it from others of its class, the most significant first; by default `writes`.

        A resumed run uses them to match extensions of the same name, because the numbers added to names depend on the
        order of registration. Settings that may change between runs come last, or are left out.
        """
        return self.writes

    @property
    def watched_keys(self) -> Sequence[str]:
        """The keys of reported values that it needs; a rehearsal raises an error if one of them is not reported."""
        return ()

    @property
    def reported_keys(self) -> Sequence[str]:
        """The keys that it reports only later or only sometimes, so that a rehearsal may not see them."""
        return ()

    @property
    def ranked_key(self) -> str | None:
        """The key of a reported value, whose mean since the trigger last fired ranks what a snapshot saves."""
        return None

    @property
    def measured_phases(self) -> tuple[Mapping[str, float], int]:
        """The seconds of each phase of iterations, and their number, if it measures them, for the last line of a run."""
        return {}, 0

    @property
    def default_name(self) -> str:
        """The name under which it is registered, unless `Trainer.extend` is given one; the class name."""
        return type(self).__name__

    def __call__(self, trainer: Trainer) -> Any:
        """Run the extension; called when its trigger fires."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(trainer)")

    def newest(self, trainer: Trainer) -> tuple[int, Callable[[], None]] | None:
        """Return the iteration of the newest saved state and a function that loads it, or ``None`` if there is none.

        A run starts from it if `autoload` is true, and returns to it on a `RollBack`.
        """
        return None

    def wait(self) -> None:
        """Wait until what was taken is on the disk."""

    def before_snapshot(self, trainer: Trainer) -> None:
        """Prepare for snapshots at the end of an iteration, before the first is taken; an error prevents all of them."""

    def initialize(self, trainer: Trainer) -> None:
        """Prepare for the loop; called once, after the state of a resumed run was restored.

        Where ranks go on without one that is lost, and after a `RollBack`, it is called again, after `finalize`.
        """

    def observe(self, trainer: Trainer) -> None:
        """Read the observation; called in every iteration, in order of priority, before the trigger is checked."""

    def sets_lr(self, optimizer: Any) -> bool:
        """Return True if it sets the learning rate of this optimizer, so that nobody else does."""
        return False

    def observe_start(self, trainer: Trainer) -> None:
        """Read the values that extensions with ``invoke_before_training`` reported before training.

        Called once before the first update, in order of priority, if anything was reported; not in a resumed run. An
        extension that defines this method is not itself called before training.
        """

    def on_error(self, trainer: Trainer, exception: BaseException) -> None:
        """React to an error that ends the run; called before anything is finalized.

        Chainer's signature, ``on_error(trainer, exception, traceback)``, is supported too; `Trainer.extend` refuses any
        other.
        """

    def finalize(self) -> None:
        """Release resources; called once when a run ends, with or without an error."""


Entry.defaults = Extension()  # set from here, because the module of Entry cannot import this one: that would be a cycle


def make_extension(
    trigger: TriggerLike = None,
    default_name: str | None = None,
    priority: int | None = None,
    invoke_before_training: bool = False,
    finalizer: Callable[[], None] | None = None,
    initializer: Callable[[Trainer], None] | None = None,
    on_error: Callable[..., None] | None = None,
) -> Callable[[Callable[[Trainer], Any]], Callable[[Trainer], Any]]:
    """Set the trigger, name and priority of a function as an extension; the function itself is returned.

    Example::

        @make_extension(trigger=(1, "epoch"))
        def print_epoch(trainer):
            print(trainer.updater.epoch)

    Args:
        trigger: when it is called, by default every iteration.
        default_name: by default the name of the function.
        priority: by default `PRIORITY_READER`.
        invoke_before_training: True to call it also once just before the loop.
        finalizer: called when a run ends.
        initializer: called with the trainer before the loop.
        on_error: called with the trainer and the exception when the run fails, and with the traceback if it takes three.

    Raises:
        TypeError: the trigger, the priority or a function has the wrong type; ``on_error`` has another signature.
        ValueError: the unit of the trigger is unknown, or its period is not above 0.
    """
    get_trigger(trigger)
    check_priority(priority)
    for name, function in (("finalizer", finalizer), ("initializer", initializer), ("on_error", on_error)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} is a function, got {function!r}; write {name}=f and not {name}=f()")
    if on_error is not None:
        check_on_error(on_error, "of make_extension")

    def decorate(function: Callable[[Trainer], Any]) -> Callable[[Trainer], Any]:
        if not callable(function):
            raise TypeError(
                f"make_extension decorates a function, got {type(function).__name__}; "
                "without settings it is written with its parentheses: @make_extension()"
            )
        settings = {
            "trigger": first_given(trigger, Extension.trigger),
            "default_name": getattr(function, "__name__", None) if default_name is None else default_name,
            "priority": first_given(priority, Extension.priority),
            "invoke_before_training": invoke_before_training,
            "finalize": finalizer,
            "initialize": initializer,
            "on_error": on_error,
        }
        for name, value in settings.items():
            setattr(function, name, value)
        return function

    return decorate
