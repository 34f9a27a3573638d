"""A link in a store names what the run that goes on has made it name, however late an earlier writer is."""

import itertools
from contextlib import suppress

import pytest
from stepped import Stepper, TimedBucket, World

from chainring._places.index import Index, LeaseLostError
from chainring._places.remote import RemotePlace

URLS = (f"memory:///links-{number}" for number in itertools.count())


def take(bucket):
    """The place of a run that takes the index."""
    place = RemotePlace(bucket)
    place.index = Index(bucket, period=None, clock=bucket.world.clock)
    return place


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
        except LeaseLostError as error:
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
    return seen, refused, RemotePlace(first).link_target("best")


def test_however_late_a_link_is_put_it_is_refused_or_seen_by_whoever_has_taken_the_index():
    """The earlier writer is stopped before any of its requests, and goes on between any two of the other."""
    outcomes = set()
    for before, meanwhile in itertools.product(range(5), range(10)):
        seen, refused, target = put_late(before, meanwhile)
        assert seen in ([], [target])
        assert target == ("a" if refused else "b")
        outcomes.add((len(seen), target, *refused))
    assert outcomes == {(0, "b"), (1, "b"), (1, "a", LeaseLostError)}


@pytest.mark.parametrize("content", [b"notes", b'{"chainring": "link"}'])
def test_other_small_objects_stay_as_they_are(content):
    """What is no link is in the way of one."""
    bucket = TimedBucket(next(URLS), World())
    bucket.put("notes", content)
    place = take(bucket)
    place.link("best", "a")
    with pytest.raises(FileExistsError, match="in the way of a link"):
        place.link("notes", "a")
    assert bucket.get("notes").content == content
    assert place.links() == RemotePlace(bucket).links() == {"best": "a"}


def test_the_object_of_a_link_counts_where_another_run_or_a_person_has_put_it():
    """One that this run has put and the index does not list came late, or was left by a run that was killed."""
    bucket = TimedBucket(next(URLS), World())
    place = take(bucket)
    place.link("best", "a")
    late = bucket.get("best").content
    place.link("best", None)
    bucket.put("best", late)
    bucket.put("copied", b'{"chainring": "link", "target": "b", "run": "0123456789abcdef"}')
    bucket.put("by_hand", b'{"chainring": "link", "target": "c"}')
    for reader in place, RemotePlace(bucket):
        assert reader.links() == {"copied": "b", "by_hand": "c"}
        assert (reader.link_target("best"), reader.link_target("by_hand")) == (None, "c")
