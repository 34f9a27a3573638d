"""A link in a store names what the run that goes on has made it name, however late an earlier writer is."""

import itertools
from contextlib import suppress

import pytest
import torch
from stepped import Stepper, TimedBucket, World

from chainring import iterators, training
from chainring._remote.bucket import Bucket, ChangedError
from chainring._remote.lease import Lease, LeaseLostError
from chainring.serializers._object_store import ObjectStore
from chainring.training import extensions

URLS = (f"memory:///links-{number}" for number in itertools.count())


def take(bucket):
    """The store of a run that takes the lease and puts the links anew."""
    store = ObjectStore(bucket)
    store.lease = Lease(bucket, list, period=None, clock=bucket.world.clock)
    store.renew_links()
    return store


def put_late(before, meanwhile):
    """Stops a writer before one of the requests of a link, while another takes its lease by so many.

    Returns what the other saw, how the first was refused, and what is linked in the end.
    """
    world, stepper, url = World(), Stepper(), next(URLS)
    first, second = (TimedBucket(url, world, stepper.wait_for_turn) for _ in range(2))
    earlier, seen, refused = take(first), [], []
    earlier.link("best", "a")

    def link():
        try:
            earlier.link("best", "b")
        except (LeaseLostError, ChangedError) as error:
            refused.append(type(error))

    def take_over():
        with suppress(BlockingIOError):  # by a writer that has gone on, and renewed its lease
            seen.append(take(second).link_target("best"))

    def go_on(number, requests=100):
        while requests > 0 and number in stepper.waiting():
            stepper.step(number)
            requests -= 1

    stepper.add(link)
    go_on(0, before)
    world.seconds = 45
    stepper.add(take_over)
    go_on(1, meanwhile)
    go_on(0)
    go_on(1)
    return seen, refused, ObjectStore(first).link_target("best")


def test_however_late_a_link_is_put_it_is_refused_or_seen_by_whoever_has_taken_the_lease_and_renewed_the_links():
    """The earlier writer is stopped before any of its requests, and goes on between any two of the other."""
    outcomes = set()
    for before, meanwhile in itertools.product(range(5), range(25)):
        seen, refused, found = put_late(before, meanwhile)
        assert seen in ([], [found])
        assert found == ("a" if refused else "b")
        outcomes.add((len(seen), found, *refused))
    assert outcomes == {(0, "b"), (1, "b"), (1, "a", LeaseLostError)}


@pytest.mark.parametrize("content", [b"notes", b'{"chainring": "link"}'])
def test_other_small_objects_stay_as_they_are(content):
    """What is no link is not touched when the links are renewed."""
    bucket = TimedBucket(next(URLS), World())
    bucket.put("notes", content)
    store = take(bucket)
    store.link("best", "a")
    store.renew_links()
    assert bucket.get("notes").content == content
    assert store.links() == {"best": "a"}


def start(url, end):
    """Run up to an iteration, with a snapshot of each under one name."""
    loader = iterators.SerialIterator([torch.ones(1)] * 4, 2, seed=1)
    model = torch.nn.Linear(1, 1)
    updater = training.StandardUpdater(
        loader, torch.optim.SGD(model.parameters(), 0.1), model, loss_func=lambda model, x: model(x).sum()
    )
    trainer = training.Trainer(updater, (end, "iteration"), out=url)
    trainer.extend(extensions.snapshot("newest", autoload=True), trigger=(1, "iteration"))
    trainer.run()


def test_a_run_that_has_loaded_its_snapshot_puts_the_links_anew_and_one_that_is_refused_does_not():
    """What the process before puts late is refused then, also where the link that it saw is the right one."""
    url = next(URLS)
    start(url, 2)
    bucket = Bucket(url)
    first = bucket.head("newest").tag
    start(url, 2)
    second = bucket.head("newest").tag
    assert second != first
    assert ObjectStore(bucket).links() == {"newest": "newest_iter_2"}
    for entry in bucket.list("newest_iter"):
        bucket.put(entry.key, b"{")
    with pytest.warns(UserWarning, match="is skipped"), pytest.raises(ValueError, match="snapshot"):
        start(url, 4)
    assert bucket.head("newest").tag == second
