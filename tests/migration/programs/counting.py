"""What iterators and updaters count."""

from either import BEFORE_TRAINING, iterators, make_trainer, points, training

FIELDS = ("epoch", "is_new_epoch", "epoch_detail", "previous_epoch_detail")


def _steps(iterator, count):
    steps = []
    for _ in range(count):
        size = len(next(iterator))
        steps.append([size, *(getattr(iterator, name) for name in FIELDS)])
    return steps


def iterator():
    """`SerialIterator`: batches cross the end of an epoch, and what it counts after each."""
    return [_steps(iterators.SerialIterator(points(10), size, shuffle=False), 12) for size in (1, 3, 4, 5, 10)]


def one_pass():
    """`repeat=False`: the last batch is short, and `reset` begins again."""
    iterator = iterators.SerialIterator(points(10), 4, repeat=False, shuffle=False)
    first = [[x.tolist() for x, _ in batch] for batch in iterator]
    iterator.reset()
    return [first, [[x.tolist() for x, _ in batch] for batch in iterator]]


def multiprocess_order():
    """`MultiprocessIterator(shuffle=False)`: the same examples in the same order."""
    iterator = iterators.MultiprocessIterator(list(range(10)), 4, shuffle=False, n_processes=2)
    try:
        return [[int(i) for i in next(iterator)] for _ in range(6)]
    finally:
        iterator.finalize()


def shuffled():
    """Shuffled, each epoch has every example once, and not in the order of the one before."""
    iterator = iterators.SerialIterator(list(range(50)), 25)
    first, second = ([i for _ in range(2) for i in next(iterator)] for _ in range(2))
    return [sorted(first), sorted(second), first == second]


def shuffle_none():
    """`shuffle=None` shuffles."""
    iterator = iterators.SerialIterator(list(range(50)), 50, shuffle=None)
    order = [int(i) for i in next(iterator)]
    return [sorted(order), order == sorted(order)]


def updater():
    """`StandardUpdater`: iteration, epoch and their details after each update."""
    trainer, _ = make_trainer((3, "epoch"))
    seen = []

    @training.make_extension(trigger=(1, "iteration"))
    def look(trainer):
        updater = trainer.updater
        seen.append([updater.iteration, *(getattr(updater, name) for name in FIELDS)])

    trainer.extend(look)
    trainer.run()
    return seen


def stop_trigger():
    """The iteration at which a run of so many epochs or iterations ends."""
    stops = [(7, "iteration"), (1, "epoch"), (2, "epoch"), (5, "epoch")]
    ends = []
    for stop in stops:
        trainer, _ = make_trainer(stop)
        trainer.run()
        ends.append([trainer.updater.iteration, trainer.updater.epoch])
    return ends


def before_training():
    """`call_before_training=True`, here `invoke_before_training=True`: once at iteration 0, then by the trigger."""
    trainer, _ = make_trainer((1, "epoch"))
    called = []
    settings = {BEFORE_TRAINING: True}
    trainer.extend(
        lambda trainer: called.append(trainer.updater.iteration), name="call", trigger=(2, "iteration"), **settings
    )
    trainer.run()
    return called
