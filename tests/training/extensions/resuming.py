"""A run that is cut, its parts in fresh trainers, is the uninterrupted run."""

from chainring import serializers, training


def parts(out, make, length, k, *, way):
    """Trains ``k`` iterations, then on to ``length`` in a fresh trainer. Returns what ``make`` made, twice.

    ``make`` makes an updater and a list of extensions, new ones at each call. ``way`` says how the state goes over:
    ``"load"`` into a trainer with its extensions, before ``"extend"``, or by ``"file"``.
    """
    return _run_after_one_another(out, make, (k, length), way)


def chained(out, make, length, *, way):
    """Trains one iteration in each of ``length`` trainers, each of which goes on after the one before; the first none.

    So the run is cut after every iteration, and an error of one cut is there in the end. Returns what ``make`` made, and
    its trainer, for each of them.
    """
    return _run_after_one_another(out, make, range(length + 1), way)


def _run_after_one_another(out, make, lengths, way):
    made = []
    for number, length in enumerate(lengths):
        trainer, updater, own = _trainer(out / f"part-{number}", make, length, extends=way != "extend" or not made)
        if made and way == "file":
            serializers.save(out / f"saved-{number}", made[-1][0])
            serializers.load(out / f"saved-{number}", trainer)
        elif made:
            trainer.load_state_dict(made[-1][0].state_dict())
        for extension in own if way == "extend" and made else ():
            trainer.extend(extension)
        trainer.run()
        made.append((trainer, updater, own))
    return made


def whole(out, make, length):
    """The uninterrupted run: the trainer, and what ``make`` made."""
    trainer, updater, own = _trainer(out / "whole", make, length)
    trainer.run()
    return trainer, updater, own


def _trainer(out, make, length, *, extends=True):
    updater, own = make()
    trainer = training.Trainer(updater, (length, "iteration"), out=str(out))
    for extension in own if extends else ():
        trainer.extend(extension)
    return trainer, updater, own


def differences(one, other, under="extensions/"):
    """The keys under which two trainers hold another state."""
    first, second = (
        {key: str(value) for key, value in trainer.state_dict().items() if key.startswith(under)} for trainer in (one, other)
    )
    return sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
