"""What else happens besides updating: the base class of extensions, and the trainer's entry of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from chainring.serializers.base import Stateful
from chainring.training.triggers import IntervalTrigger, get_trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

PRIORITY_WRITER = 300
"""For extensions that add to the observation, such as an Evaluator."""
PRIORITY_EDITOR = 200
"""For extensions that change what others have added."""
PRIORITY_READER = 100
"""For extensions that read the observation, such as a LogReport."""


class RollBack(RuntimeError):  # noqa: N818 - it asks for something, and is an error only where that cannot be had
    """Raised by an extension, it puts the run back to its newest snapshot, from which it goes on.

    Without a snapshot it ends the run, as any error does.
    """


class Extension(Stateful):
    """Something that a trainer does when a trigger fires. Write ``__call__``; everything else is optional.

    Any callable of one argument, the trainer, can be an extension: this class gives defaults and names the methods that
    a trainer looks for.

    Attributes:
        trigger: when it is called, unless `Trainer.extend` says otherwise.
        priority: extensions of higher priority run first.
        invoke_before_training: whether it is also called once just before the loop.
        skip_on_resume: whether the call before training is left out in a run that continues an earlier one.
        is_snapshot: whether it takes down the state of the run. Such extensions are called last, after every trigger of
            the iteration has been asked.
        has_fixed_name: of a snapshot, whether every one has the same name, as the best has.
        autoload: of a snapshot, whether a run continues from the newest one, and is taken down when it ends.
    """

    trigger: Any = (1, "iteration")
    priority: int = PRIORITY_READER
    invoke_before_training: bool = False
    skip_on_resume: bool = False
    is_snapshot: bool = False
    autoload: bool = False
    has_fixed_name: bool = False

    @property
    def writes(self) -> Sequence[str]:
        """The names of the files that it writes into the trainer's ``out``; they are moved away when another run starts.

        A name may have fields of the trainer: ``"image_{.updater.iteration}"``.
        """
        return ()

    @property
    def default_name(self) -> str:
        """Its name, unless `Trainer.extend` says otherwise; the class name."""
        return type(self).__name__

    def __call__(self, trainer: Trainer) -> Any:
        """What happens when the trigger fires."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(trainer)")

    def newest(self, trainer: Trainer) -> tuple[int, Callable[[], None]] | None:
        """Return the newest state that it has saved: its iteration, and a function that loads it; ``None`` without one.

        A run begins from it where `autoload` is true, and goes back to it on a `RollBack`.
        """
        return None

    def before_snapshot(self, trainer: Trainer) -> None:
        """Called at the end of an iteration in which snapshots are taken, before the first; an error leaves them untaken."""

    def initialize(self, trainer: Trainer) -> None:
        """Called once before the loop, when the state of a resumed run is back."""

    def observe(self, trainer: Trainer) -> None:
        """Called every iteration, at its place in the order, before its trigger is asked."""

    def on_error(self, trainer: Trainer, exception: BaseException) -> None:
        """Called when the run fails, before anything is finalized."""

    def finalize(self) -> None:
        """Called once when a run ends, however it ends."""


def make_extension(
    trigger: Any = None,
    default_name: str | None = None,
    priority: int | None = None,
    invoke_before_training: bool = False,
    finalizer: Callable[[], None] | None = None,
    initializer: Callable[[Trainer], None] | None = None,
    on_error: Callable[..., None] | None = None,
) -> Callable[[Callable[[Trainer], Any]], Callable[[Trainer], Any]]:
    """Makes a function an extension with defaults of its own; the function itself is returned.

    Args:
        trigger: when it is called, by default every iteration.
        default_name: by default the name of the function.
        priority: by default `PRIORITY_READER`.
        invoke_before_training: whether it is also called once just before the loop.
        finalizer: called when a run ends.
        initializer: called with the trainer before the loop.
        on_error: called with the trainer and the exception when the run fails.

    Raises:
        TypeError, ValueError: the trigger is none, see `get_trigger`; the priority is no number; or a function cannot be
            called.
    """
    get_trigger(trigger)
    _check_priority(priority)
    for name, call in (("finalizer", finalizer), ("initializer", initializer), ("on_error", on_error)):
        if call is not None and not callable(call):
            raise TypeError(f"{name} is a function, got {call!r}; write {name}=f and not {name}=f()")

    def decorate(function: Callable[[Trainer], Any]) -> Callable[[Trainer], Any]:
        if not callable(function):
            raise TypeError(
                f"make_extension decorates a function, got {type(function).__name__}; "
                "without settings it is written with its parentheses: @make_extension()"
            )
        settings = {
            "trigger": Extension.trigger if trigger is None else trigger,
            "default_name": default_name if default_name is not None else getattr(function, "__name__", None),
            "priority": Extension.priority if priority is None else priority,
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
    """An extension as it is registered in one trainer: under what name, when, and in which place.

    Attributes:
        extension: the callable.
        name: unique in the trainer. It lives here and not on the extension, which may be registered twice.
        trigger: asked once an iteration.
        asks: the call of the trigger, or ``None`` if it fires in every iteration.
        observe: the extension's `observe`, or ``None`` if it has none of its own.
        call: calls the extension. A profiler puts a call that it times in its place.
    """

    __slots__ = (
        *("name", "extension", "call", "observe", "trigger", "asks"),
        *("priority", "invoke_before_training", "is_snapshot"),
    )

    def __init__(
        self, extension: Any, name: str, trigger: Any, priority: int | None, invoke_before_training: bool | None
    ) -> None:
        _check_priority(priority)
        self.extension = extension
        self.call: Callable[[Trainer], Any] = _bound(extension)
        self.name = name
        self.trigger = get_trigger(_first(trigger, getattr(extension, "trigger", None), Extension.trigger))
        # By type: a trigger around another may pass the attributes of that one on.
        every = isinstance(self.trigger, IntervalTrigger) and self.trigger.is_every_iteration
        self.asks: Callable[[Trainer], bool] | None = None if every else _bound(self.trigger)
        self.priority: int = _first(priority, getattr(extension, "priority", None), Extension.priority)
        before = getattr(extension, "invoke_before_training", None)
        self.invoke_before_training: bool = _first(invoke_before_training, before, False)
        self.is_snapshot: bool = getattr(extension, "is_snapshot", False)
        has_own = getattr(type(extension), "observe", None) is not Extension.observe
        self.observe: Callable[[Trainer], None] | None = getattr(extension, "observe", None) if has_own else None

    @property
    def kinds(self) -> list[str]:
        """The class names of the extension and of its trigger: saved state is for the same ones only."""
        return [type(self.extension).__name__, type(self.trigger).__name__]

    def method(self, name: str) -> Callable[..., Any]:
        """An optional method of the extension; where there is none, one that does nothing."""
        found = getattr(self.extension, name, None)
        return found if callable(found) else _nothing


def _bound(part: Any) -> Any:
    """What is called in every iteration: a method costs half of an object that is called, of which Python looks it up."""
    return part if inspect.isroutine(part) else part.__call__


def name_of(extension: Any, name: str | None) -> str:
    """What an extension is called: the given name, its ``default_name``, its ``__name__``, or that of its class."""
    own = (getattr(extension, "default_name", None), getattr(extension, "__name__", None))
    return str(_first(name, *own, type(extension).__name__))


def _check_priority(priority: Any) -> None:
    """Refuses now what could not be ordered when the run starts."""
    if priority is not None and (isinstance(priority, bool) or not isinstance(priority, (int, float))):
        raise TypeError(f"a priority is a number, such as PRIORITY_WRITER (300); got {priority!r}")


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _nothing(*_: Any) -> None:
    return None
