"""Extensions: names, order, and what else is called."""

import os

from either import extensions, make_trainer, training


def order():
    """By priority, the largest first; equal ones in the order in which they were added."""
    trainer, _ = make_trainer((2, "iteration"))
    called = []
    for name, priority in (
        ("a", None),
        ("b", training.PRIORITY_WRITER),
        ("c", training.PRIORITY_EDITOR),
        ("d", None),
        ("e", 5),
    ):
        trainer.extend(lambda _, name=name: called.append(name), name=name, priority=priority)
    trainer.run()
    return called


def decorated():
    """`make_extension`: trigger, priority, initializer and finalizer; the name is the function's."""
    trainer, _ = make_trainer((4, "iteration"))
    called = []
    ends = {"initializer": lambda trainer: called.append("first"), "finalizer": lambda: called.append("last")}

    @training.make_extension(trigger=(2, "iteration"), priority=250, **ends)
    def look(trainer):
        called.append(trainer.updater.iteration)

    trainer.extend(look)
    trainer.extend(lambda trainer: called.append("then"), name="then", trigger=(2, "iteration"))
    trainer.run()
    return [called, trainer.get_extension("look") is look]


def own_class():
    """An `Extension` of one's own: its trigger and priority, `initialize`, `finalize`, and what `extend` says goes first."""

    class Mine(training.Extension):
        trigger = (2, "iteration")
        priority = 150

        def __init__(self):
            self.called = []

        def initialize(self, trainer):
            self.called.append("initialize")

        def __call__(self, trainer):
            self.called.append(trainer.updater.iteration)

        def finalize(self):
            self.called.append("finalize")

    trainer, _ = make_trainer((6, "iteration"))
    mine, other = Mine(), Mine()
    trainer.extend(mine)
    trainer.extend(other, trigger=(3, "iteration"))
    trainer.run()
    names = [trainer.get_extension(name) is extension for name, extension in (("Mine", mine), ("Mine_1", other))]
    return [mine.called, other.called, names]


def failing():
    """A failing run calls `on_error(trainer, exception, traceback)`, then `finalize`, and raises the error."""
    called = []

    class Watch(training.Extension):
        def __call__(self, trainer):
            if trainer.updater.iteration == 3:
                raise ValueError("third")

        def on_error(self, trainer, exception, traceback):
            called.append(["on_error", str(exception), traceback is not None])

        def finalize(self):
            called.append(["finalize"])

    trainer, _ = make_trainer((5, "iteration"))
    trainer.extend(Watch())
    try:
        trainer.run()
    except ValueError as error:
        called.append(str(error))
    return called


def missing():
    """`get_extension` of an unknown name raises a ValueError or a KeyError."""
    trainer, _ = make_trainer((1, "iteration"))
    trainer.extend(extensions.LogReport())
    try:
        trainer.get_extension("nobody")
    except (ValueError, KeyError) as error:
        return "nobody" in str(error)


def files_of_extensions():
    """`PlotReport` with a name of its own, and `dump_graph`: the files in `out`."""
    trainer, _ = make_trainer((2, "epoch"))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PlotReport(["main/loss"], filename="loss.png"))
    trainer.extend(extensions.dump_graph("main/loss"))
    trainer.run()
    return sorted(name for name in os.listdir(trainer.out) if name in ("log", "loss.png", "cg.dot"))
