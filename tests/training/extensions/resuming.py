"""A run that is cut in two at every iteration, its second part in a fresh trainer, is the uninterrupted run."""

from chainring import serializers, training


def parts(out, make, length, k, *, way):
    """Trains ``k`` iterations, then on to ``length`` in a fresh trainer. Returns what ``make`` made, twice.

    ``make`` makes an updater and a list of extensions, new ones at each call. ``way`` says how the state goes over:
    ``"load"`` into a trainer with its extensions, before ``"extend"``, or by ``"file"``.
    """
    first, updater, own = _trainer(out / "first", make, k)
    first.run()
    if way == "file":
        serializers.save(out / "saved", first)
    state = first.state_dict()
    second, updater_2, own_2 = _trainer(out / "second", make, length, extends=way != "extend")
    if way == "file":
        serializers.load(out / "saved", second)
    else:
        second.load_state_dict(state)
    if way == "extend":
        for extension in own_2:
            second.extend(extension)
    second.run()
    return (first, updater, own), (second, updater_2, own_2)


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
