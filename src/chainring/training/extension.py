"""Extensions: the base class, the decorator, and the entry of one in a trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from chainring._checks import find_call_error, is_number
from chainring._hints import CALLED, EXTENSIONS
from chainring._messages import user_place
from chainring.serializers.protocol import Stateful
from chainring.training.triggers import IntervalTrigger, TriggerLike, get_trigger
from chainring.training.triggers.base import Trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

PRIORITY_WRITER = 300
"""For extensions that add to the observation, such as an Evaluator."""
PRIORITY_EDITOR = 200
"""For extensions that change what others have added."""
PRIORITY_READER = 100
"""For extensions that read the observation, such as a LogReport."""


class RollBack(RuntimeError):  # noqa: N818 - a request, and an error only where there is no snapshot
    """Raised by an extension to return the run to its newest snapshot and continue from there.

    If there is no snapshot, the run ends with this error, or with the one given as ``otherwise``.

    Example::

        if math.isnan(trainer.observation["main/loss"]):
            raise RollBack("the loss is NaN")
    """

    def __init__(self, *arguments: object, otherwise: BaseException | None = None) -> None:
        super().__init__(*arguments)
        self.otherwise = otherwise


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
        """Prepare for the loop; called once, after the state of a resumed run was restored."""

    def observe(self, trainer: Trainer) -> None:
        """Read the observation; called in every iteration, in order of priority, before the trigger is checked."""

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


_DEFAULTS = Extension()


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
        on_error: called with the trainer and the exception when the run fails; with the traceback too if it takes three
            arguments.

    Raises:
        TypeError: the trigger, the priority or a function has the wrong type; ``on_error`` has another signature.
        ValueError: the unit of the trigger is unknown, or its period is not above 0.
    """
    get_trigger(trigger)
    _check_priority(priority)
    for name, function in (("finalizer", finalizer), ("initializer", initializer), ("on_error", on_error)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} is a function, got {function!r}; write {name}=f and not {name}=f()")
    if on_error is not None:
        _check_on_error(on_error, "of make_extension")

    def decorate(function: Callable[[Trainer], Any]) -> Callable[[Trainer], Any]:
        if not callable(function):
            raise TypeError(
                f"make_extension decorates a function, got {type(function).__name__}; "
                "without settings it is written with its parentheses: @make_extension()"
            )
        settings = {
            "trigger": _first(trigger, Extension.trigger),
            "default_name": default_name if default_name is not None else getattr(function, "__name__", None),
            "priority": _first(priority, Extension.priority),
            "invoke_before_training": invoke_before_training,
            "finalize": finalizer,
            "initialize": initializer,
            "on_error": on_error,
        }
        for name, value in settings.items():
            setattr(function, name, value)
        return function

    return decorate


class Entry:
    """An extension as it is registered in one trainer: its name, its trigger and its priority there.

    Arguments that are ``None`` are looked up on the extension; see `Trainer.extend`.

    Attributes:
        name: unique in the trainer. It lives here and not on the extension, which may be registered twice.
        base_name: the name without the number that made it unique.
        fires: the call of the trigger, or ``None`` if it fires in every iteration.
        observe, observe_start, before_snapshot: methods of the extension, or ``None`` if it does not define them.
        call: calls the extension.
        place: the line of the script that has registered it, to which warnings point.
        is_due: True while the snapshots of an iteration are taken, if this is one of them and has not been called yet.
    """

    def __init__(
        self,
        extension: Callable[[Trainer], Any],
        name: str | None,
        trigger: TriggerLike,
        priority: int | None,
        invoke_before_training: bool | None,
    ) -> None:
        own_names = (getattr(extension, attribute, None) for attribute in ("default_name", "__name__"))
        self.name = self.base_name = str(_first(name, *own_names, type(extension).__name__))
        _check_extension(extension, self.name)
        _check_priority(priority)
        self.extension: Any = extension
        self.call: Callable[[Trainer], Any] = _bound(extension)
        self.trigger = get_trigger(_first(trigger, getattr(extension, "trigger", None), Extension.trigger))
        # By type: a trigger around another may pass the attributes of that one on.
        always = isinstance(self.trigger, IntervalTrigger) and self.trigger.is_every_iteration
        self.fires: Callable[[Trainer], bool] | None = None if always else _bound(self.trigger)
        self.priority: int = _first(priority, getattr(extension, "priority", None), Extension.priority)
        default = getattr(extension, "invoke_before_training", None)
        self.invoke_before_training: bool = _first(invoke_before_training, default, False)
        self.is_snapshot: bool = getattr(extension, "is_snapshot", False)
        self.place = user_place()
        self.is_due = False
        self.observe = self._defined("observe")
        self.observe_start = self._defined("observe_start")
        self.before_snapshot = self._defined("before_snapshot")

    def optional(self, name: str) -> Any:
        """Return an attribute or a method of the extension, or that of `Extension`, because a user's need not have it."""
        default = getattr(_DEFAULTS, name)
        value = getattr(self.extension, name, default)
        return value if callable(value) or not callable(default) else default

    def identify(self, trainer: Trainer) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the texts that identify the extension, the most significant first, and those that identify its trigger."""
        texts = []
        for identified, default in ((self.extension, self.optional("writes")), (self.trigger, ())):
            identity: Any = getattr(identified, "identity", None)
            if callable(identity) and not find_call_error(identity, trainer):  # else it is something else of the user's
                default = identity(trainer)
            texts.append(tuple(map(str, default)) if isinstance(default, (tuple, list)) else ())
        return texts[0], texts[1]

    def on_error(self, trainer: Trainer, exception: BaseException) -> None:
        """Call the extension's ``on_error``, if it has one, with the traceback if it demands three arguments."""
        on_error = self.optional("on_error")
        arguments = (trainer, exception, exception.__traceback__)
        on_error(*arguments[: 3 if find_call_error(on_error, trainer, exception) else 2])

    def _defined(self, name: str) -> Callable[[Trainer], Any] | None:
        """Return an optional method, unless it is the one of `Extension`, which does nothing."""
        is_inherited = getattr(type(self.extension), name, None) is getattr(Extension, name)
        return None if is_inherited else getattr(self.extension, name, None)


def _check_extension(extension: Any, name: str) -> None:
    if isinstance(extension, type):
        raise TypeError(f"an extension is an object, got the class {extension.__name__}: write {extension.__name__}(...)")
    if not callable(extension):
        hint = next((hint for method, hint in EXTENSIONS.items() if hasattr(extension, method)), None)
        hint = CALLED if extension is None else hint
        rule = f"an extension is a callable of one argument, the trainer; got {type(extension).__name__}"
        raise TypeError(rule if hint is None else f"{rule}: {hint}")
    if isinstance(extension, Trigger):
        raise TypeError(
            f"a trigger is not an extension, and {type(extension).__name__} is a trigger: give it as the stop trigger, "
            "Trainer(updater, trigger), or with an extension, extend(extension, trigger=trigger)"
        )
    if error := find_call_error(extension, None):
        raise TypeError(f"an extension is called with one argument, the trainer, and {name!r} cannot be: {error}")
    if callable(on_error := getattr(extension, "on_error", None)):
        _check_on_error(on_error, f"of extension {name!r}")


def _bound(function: Any) -> Any:
    # hot path: "an idle extension more": Python calls a bound method in half the time of an object with __call__
    return function if inspect.isroutine(function) else function.__call__


def _check_priority(priority: Any) -> None:
    if priority is not None and not is_number(priority):
        raise TypeError(f"a priority is a number, such as PRIORITY_WRITER (300); got {priority!r}")


def _check_on_error(on_error: Callable[..., None], where: str) -> None:
    if (error := find_call_error(on_error, None, None)) and find_call_error(on_error, None, None, None):
        rule = "on_error is called with the trainer and the exception, or with the traceback as a third argument"
        raise TypeError(f"{rule}, and that {where} cannot be: {error}; write on_error(trainer, exception)")


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
