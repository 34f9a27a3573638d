"""The batches of an iterator with an order sampler, and a check that it resumes after every batch."""

from chainring.iterators import SerialIterator


def batches(sampler, size, batch_size, number, seed=3):
    """The indices of an iterator's first batches."""
    return taken(SerialIterator(list(range(size)), batch_size, order_sampler=sampler, seed=seed), number)


def taken(iterator, number):
    return [list(next(iterator)) for _ in range(number)]


def assert_resumes_after_every_batch(make, size, batch_size, number):
    """A sampler made anew continues, without state of its own, wherever the run was saved."""

    def iterator():
        return SerialIterator(list(range(size)), batch_size, order_sampler=make(), seed=3)

    whole = taken(iterator(), number)
    for place in range(number):
        before = iterator()
        taken(before, place)
        after = iterator()
        after.load_state_dict(before.state_dict())
        assert taken(after, number - place) == whole[place:]
