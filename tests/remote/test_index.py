"""One run at a time writes to a place in a store, and what an earlier writer puts too late is known."""

import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress

import pytest
from races import Racer, race
from stepped import Stepper, TimedBucket, World, orders

from chainring._places.base import STAMP, digest_of
from chainring._places.bucket import Bucket, RemoteError
from chainring._places.index import Index, LeaseLostError, read_record, seal
from chainring._places.remote import RemotePlace
from chainring.serializers._store import Manifest, format_manifest
from forked import Forked

URLS = (f"memory:///lease-{number}" for number in itertools.count())


@pytest.fixture
def world():
    return World()


@pytest.fixture
def bucket(world):
    return TimedBucket(next(URLS), world)


def take(bucket):
    """An index that nothing replaces but the test."""
    return Index(bucket, period=None, clock=bucket.world.clock)


def rewrite(bucket, **values):
    """Writes the lease as another process would have."""
    document = json.loads(bucket.get(".lease").content) | values
    del document["crc"]
    bucket.put(".lease", seal(document))


def ended_process():
    """A process that has ended, which its parent has not seen yet."""
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process


def test_a_second_run_is_refused_with_the_process_the_host_and_the_seconds_left(world, bucket):
    """As long as it may have been renewed within its seconds by the clock of the store, which tells whole ones."""
    take(bucket)
    rewrite(bucket, pid=4711, host="elsewhere")
    for now, left in (0, 31), (7.9, 24), (30.9, 1):
        world.seconds = now
        with pytest.raises(BlockingIOError, match=rf"process 4711 on elsewhere, .* another {left} s .* choose another out"):
            take(bucket)


def test_a_lease_that_was_not_renewed_is_taken(world, bucket):
    """The earlier holder sees that at its next look, is told by whom, and never gets the lease back."""
    earlier = take(bucket)
    world.seconds = 31
    later = take(bucket)
    later.check()
    for look in earlier.check, earlier.change, earlier.check:
        with pytest.raises(LeaseLostError, match=f"process {os.getpid()} on .* has taken its lease"):
            look()
    later.release()
    with pytest.raises(LeaseLostError):
        earlier.check()
    with warnings.catch_warnings(action="error"):
        earlier.release()  # it was told
    assert not json.loads(bucket.get(".lease").content)["is_held"]


def test_only_the_clock_of_the_store_says_when_a_lease_has_expired(world, bucket):
    """A taker whose own clock is a year ahead is refused."""
    take(bucket)
    with pytest.raises(BlockingIOError):
        Index(bucket, period=None, clock=lambda: 3e7)


def test_a_renewed_lease_lasts(world, bucket):
    """Every renewal has another content, because stores take the sum of the bytes for the state of an object."""
    lease = take(bucket)
    contents = set()
    for now in range(0, 200, 20):
        world.seconds = now
        lease.change()
        contents.add(bucket.get(".lease").content)
        with pytest.raises(BlockingIOError):
            take(bucket)
    assert len(contents) == 10


def test_a_released_lease_is_taken_at_once(bucket):
    """With the next token; releasing again does nothing to the next holder."""
    first = take(bucket)
    first.release()
    second = take(bucket)
    first.release()
    second.change()
    assert (first.record.token, second.record.token) == (1, 2)
    assert first.record.run == second.record.run


def test_a_look_makes_no_request_while_the_lease_is_fresh(world, bucket):
    """Nor while a thread has renewed it; later it renews it."""
    lease = take(bucket)
    world.requests.clear()
    world.seconds = 27
    lease.check()
    assert world.requests == []
    world.seconds = 29
    lease.check()
    assert world.requests == ["put .lease"]


def test_a_renewal_counts_from_its_beginning(world, bucket):
    """The store may have carried it out then, however late its answer comes."""

    def pass_seconds():
        world.seconds += 15

    slow = TimedBucket(bucket.url, world, pass_seconds)
    lease = take(slow)
    world.seconds = 100
    lease.change()
    world.seconds = 129
    world.requests.clear()
    lease.check()
    assert world.requests == ["put .lease"]


def test_a_run_that_was_stopped_goes_on_if_nobody_has_taken_its_lease(world, bucket):
    """However long it was stopped: that its renewal succeeds says that the lease has always been its own."""
    lease = take(bucket)
    world.seconds = 1e6
    lease.check()
    with pytest.raises(BlockingIOError):
        take(bucket)


def test_while_the_store_is_away_a_look_passes_as_long_as_nobody_can_have_the_lease(world, bucket):
    """Then it raises what the store does; and it passes again when the store is back and the lease was not taken."""
    lease = take(bucket)
    bucket.fault = "away"
    world.seconds = 27
    lease.check()
    world.seconds = 29
    with pytest.raises(RemoteError, match="away") as raised:
        lease.check()
    assert not isinstance(raised.value, LeaseLostError)
    bucket.fault = None
    world.seconds = 90
    lease.check()


@pytest.mark.parametrize("fault", ["away", "silent"])
def test_a_renewal_that_failed_is_no_loss(world, bucket, fault):
    """Also if it was carried out and only its answer was lost."""
    lease = take(bucket)
    world.seconds, bucket.fault = 10, fault
    with pytest.raises(RemoteError):
        lease.change()
    world.seconds, bucket.fault = 20, None
    lease.change()
    lease.check()
    world.seconds = 49
    with pytest.raises(BlockingIOError):
        take(bucket)


def test_a_condition_that_is_said_not_to_hold_is_tried_again_if_it_does(bucket):
    """S3 answers so to requests that meet, also to all of them."""
    bucket.fault = "conflict"
    lease = take(bucket)
    bucket.fault = "conflict"
    lease.change()
    bucket.fault = "conflict"
    lease.release()
    take(bucket)


def test_a_lease_that_was_removed_or_overwritten_is_lost(bucket):
    """By whoever has cleared the place, or taken it for something else."""
    lease = take(bucket)
    bucket.delete([".lease"])
    with pytest.raises(LeaseLostError, match="was removed"):
        lease.change()
    lease = take(bucket)
    bucket.put(".lease", b"{}")
    with pytest.raises(LeaseLostError, match="is not a lease"):
        lease.change()


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{}", b'{"format": 1}', b"\xff", b'{"format": 1, "pid": "1"}'])
def test_an_object_that_is_not_a_lease_is_refused_with_a_remedy(bucket, content):
    """For writers and readers."""
    bucket.put(".lease", content)
    for use in take, read_record:
        with pytest.raises(RemoteError, match=r"lease is not a lease .* remove it"):
            use(bucket)


def test_damage_of_an_index_is_noticed():
    """By writers and readers: another digest would make a snapshot invalid, which the next run removes."""
    bucket = Bucket("memory:///damaged-index")
    index = Index(bucket)
    index.change(snapshots={"snapshot_iter_1": "f" * 16}, links={"best": "snapshot_iter_1"})
    index.release()
    content = bucket.get(".lease").content
    for bit in range(0, 8 * len(content), 41):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        bucket.put(".lease", bytes(damaged))
        for use in (read_record, Index):
            with pytest.raises(RemoteError, match=r"is not a lease|of a later Chainring"):
                use(bucket)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pid", "1"),
        ("token", True),
        ("seconds", 1.5),
        ("snapshots", 3),
        ("snapshots", {"a": 1}),
        ("links", {"a": None}),
        ("is_held", 1),
    ],
)
def test_a_lease_with_a_value_of_another_type_is_refused(bucket, name, value):
    """It may be a stranger's."""
    take(bucket)
    rewrite(bucket, **{name: value})
    with pytest.raises(RemoteError, match="is not a lease"):
        take(bucket)


def test_a_lease_of_a_later_version_is_refused(bucket):
    """Its holder may promise something else."""
    take(bucket).release()
    rewrite(bucket, format=2)
    with pytest.raises(RemoteError, match="format 2 of a later Chainring; upgrade"):
        take(bucket)


def test_the_lease_of_a_process_of_this_host_that_has_ended_is_taken_at_once(bucket):
    """Before its parent sees that and after; if another has its number; and if this process has replaced its program."""
    process = ended_process()
    take(bucket)
    rewrite(bucket, pid=process.pid, started=0)
    take(bucket)
    process.wait()
    rewrite(bucket, pid=process.pid)
    take(bucket)
    rewrite(bucket, pid=os.getppid(), started=1)
    take(bucket)
    rewrite(bucket, holder="0" * 16)
    take(bucket).check()


@pytest.mark.parametrize("elsewhere", ["host", "machine"])
def test_the_lease_of_a_process_elsewhere_is_not_taken_because_its_number_is_free_here(bucket, elsewhere):
    """Such as in another container, or on a machine of the same name."""
    process = ended_process()
    process.wait()
    take(bucket)
    rewrite(bucket, pid=process.pid, **{elsewhere: "elsewhere"})
    with pytest.raises(BlockingIOError):
        take(bucket)


@pytest.mark.parametrize("pid", [0, -1, 1])
def test_the_lease_of_a_process_that_may_live_is_not_taken(bucket, pid):
    """Number 1 always does, and others are no processes."""
    take(bucket)
    rewrite(bucket, pid=pid, started=0)
    with pytest.raises(BlockingIOError):
        take(bucket)


def test_losing_the_lease_does_not_fail_the_end_of_a_run(world, bucket):
    """It is a warning, if nothing has told before; so is a store that is away."""
    lease = take(bucket)
    bucket.delete([".lease"])
    with pytest.warns(UserWarning, match="was removed"):
        lease.release()
    lease = take(bucket)
    bucket.fault = "away"
    with pytest.warns(UserWarning, match="may have to wait 30 s"):
        lease.release()
    bucket.fault = None
    lease = take(bucket)
    bucket.fault, world.seconds = "away", 31
    lease.release()  # anybody can take it as it is


def test_a_forked_process_neither_renews_nor_releases(world, bucket):
    """It is told so where it asks."""
    lease = take(bucket)
    bucket.fault = "away"
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        pid = os.fork()  # the threads are those of obstore, which the child does not use
    if pid == 0:
        try:
            lease.release()
            for look in lease.check, lease.change:
                with pytest.raises(LeaseLostError, match="none that it has forked"):
                    look()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    bucket.fault = None
    lease.change()


def test_a_thread_renews_the_lease_until_it_is_released(world, bucket):
    """Also after a time for which the store was away."""

    def wait_for_renewals():
        seen, end = {bucket.get(".lease").content}, time.monotonic() + 120
        while len(seen) < 3 and time.monotonic() < end:
            seen.add(bucket.get(".lease").content)
        assert len(seen) >= 3

    own = TimedBucket(bucket.url, world)
    lease = Index(own, period=0.001, clock=world.clock)
    wait_for_renewals()
    own.fault = "away"
    count, end = len(world.requests), time.monotonic() + 120
    while len(world.requests) < count + 3 and time.monotonic() < end:
        pass
    own.fault = None
    wait_for_renewals()
    lease.release()
    released = bucket.get(".lease").content
    take(bucket)
    assert not json.loads(released)["is_held"]


def test_a_thread_notices_that_the_lease_is_lost(world, bucket):
    """Without a look being due."""
    lease = Index(bucket, period=0.001, clock=world.clock)
    bucket.delete([".lease"])
    end = time.monotonic() + 120
    with suppress(LeaseLostError):
        while time.monotonic() < end:
            lease.check()
    with pytest.raises(LeaseLostError, match="was removed"):
        lease.check()


def put_manifest(place, name="snapshot"):
    """Publishes a snapshot without files; returns its digest."""
    manifest = format_manifest(Manifest("snapshot", 1, {}, {STAMP: place.stamp(name), "by": place.index.record.holder}))
    place.publish(f"{name}/{'0' * 16}", name, manifest)
    return digest_of(manifest)


def place_of(bucket):
    """The place of a run that takes the index."""
    place = RemotePlace(bucket)
    place.index = take(bucket)
    return place


def is_valid(place, manifest, name="snapshot"):
    return place.admits(name, json.loads(manifest[:-9])["about"].get(STAMP), digest_of(manifest))


def test_a_manifest_that_its_writer_puts_after_the_index_was_taken_is_not_valid(world, bucket):
    """For any reader and every later holder; it fails there. Those before are, also under the next holders."""
    first = place_of(bucket)
    put_manifest(first, "kept")
    world.seconds = 31
    second = place_of(bucket)
    late = format_manifest(Manifest("snapshot", 1, {}, {STAMP: first.stamp("snapshot")}))
    bucket.put("snapshot/manifest.json", late)
    with pytest.raises(LeaseLostError):
        first.index.change(snapshots={"snapshot": digest_of(late)})
    second.index.release()
    for place in second, place_of(bucket), RemotePlace(bucket):
        assert not is_valid(place, late)
        assert is_valid(place, bucket.get("kept/manifest.json").content, "kept")
    assert list(read_record(bucket).snapshots) == ["kept"]


def test_a_manifest_that_was_copied_there_is_valid_by_itself(bucket):
    """Of another run, of another name, and one that was written without an index."""
    place = place_of(bucket)
    for stamp in None, "0123456789abcdef/snapshot", place.stamp("other"):
        manifest = format_manifest(Manifest("snapshot", 1, {}, {} if stamp is None else {STAMP: stamp}))
        assert is_valid(place, manifest)
        assert is_valid(RemotePlace(bucket), manifest)
    assert is_valid(
        RemotePlace("memory:///nowhere"), format_manifest(Manifest("snapshot", 1, {}, {STAMP: "0123456789abcdef/snapshot"}))
    )


@pytest.mark.parametrize("fault", ["away", "silent"])
def test_a_removed_snapshot_is_not_valid_again_when_its_writer_puts_it_once_more(world, bucket, fault):
    """As one does that was stopped before it has received the answer, also if a change of the next has had none."""
    removed = put_manifest(first := place_of(bucket))
    kept = put_manifest(first, "kept")
    manifest = bucket.get("snapshot/manifest.json").content
    world.seconds = 31
    second = place_of(bucket)
    bucket.fault = fault
    with pytest.raises(RemoteError):
        second.index.change(links={"best": "kept"})
    bucket.fault = None
    second.remove("snapshot", [])
    bucket.put("snapshot/manifest.json", manifest)
    for place in second, RemotePlace(bucket):
        assert not is_valid(place, manifest)
    assert digest_of(manifest) == removed
    assert (read_record(bucket).snapshots, read_record(bucket).links) == ({"kept": kept}, {})


class Writer:
    """A run that takes the index, and saves a snapshot.

    Attributes:
        place: once it has it.
        saved: the digest of its snapshot, once it calls it saved.
        seen: the digests of the snapshots that there were when it had taken the index.
    """

    def __init__(self, name, bucket, events):
        self.name, self.bucket, self.events = name, bucket, events
        self.place, self.saved, self.seen = None, None, set()
        self.refusals = 0

    def take(self):
        try:
            self.place = place_of(self.bucket)
        except BlockingIOError:
            self.refusals += 1
        else:
            self.events.append((self.name, "taken"))
            self.seen = set(self.place.index.record.snapshots.values())

    def save(self):
        with suppress(LeaseLostError, FileExistsError):
            self.place.index.check()
            self.events.append((self.name, "looked"))
            self.saved = put_manifest(self.place)

    def run(self, saves=True):
        if self.place is None:
            self.take()
        if self.place is not None and saves and not self.seen:
            self.save()


def try_order(choose, names, jumps, holder=None, saves=True):
    """Lets writers go on in an order, while all clocks jump; returns the writers."""
    world, stepper, url, events = World(), Stepper(), next(URLS), []
    writers = [Writer(name, TimedBucket(url, world, stepper.wait_for_turn), events) for name in names]
    if holder is not None:
        writers[holder].take()
    for writer in writers:
        stepper.add(functools.partial(writer.run, saves))
    jumps = list(jumps)
    while waiting := stepper.waiting():
        choice = choose(len(waiting) + bool(jumps))
        if choice == len(waiting):
            world.seconds += jumps.pop(0)
        else:
            stepper.step(waiting[choice])
    check_end(writers, events)
    return writers


def check_end(writers, events):
    """What must be true in the end, in whatever order the requests came."""
    valid = set(read_record(writers[0].bucket).snapshots.values())
    holders = sorted((writer for writer in writers if writer.place), key=lambda writer: writer.place.index.record.token)
    tokens = [writer.place.index.record.token for writer in holders]
    assert len(set(tokens)) == len(tokens)
    saved = {writer.saved for writer in writers} - {None}
    assert saved <= valid, "what was called saved is valid"
    assert not saved or {digest_of(writers[0].bucket.get("snapshot/manifest.json").content)} == valid
    for earlier, later in itertools.pairwise(holders):
        assert earlier.saved is None or earlier.saved in later.seen, "what a later holder has not seen was not saved"
        taken = events.index((later.name, "taken"))
        assert (earlier.name, "looked") not in events[taken:], "who has lost the index does not go on"


@pytest.mark.parametrize("jump", [29.5, 45])
def test_in_no_order_of_requests_is_a_snapshot_of_two_writers_in_doubt(jump):
    """One saves and another takes the lease, in every order of their requests, while time passes at any of them.

    What the first calls saved is seen by the second; what the second has not seen is never valid.
    """
    outcomes = set()

    def run(choose):
        first, second = try_order(choose, "AB", [jump], holder=0)
        outcomes.add((first.saved is not None, second.place is not None, second.saved is not None))

    orders(run)
    assert (True, False, False) in outcomes
    assert ((False, True, True) in outcomes) == (jump > 31)


def test_of_two_that_take_a_lease_at_once_one_has_it():
    """In every order of their requests; the other is refused with its name."""

    def run(choose):
        writers = try_order(choose, "AB", [], saves=False)
        assert sorted(writer.refusals for writer in writers) == [0, 1]

    orders(run)


def test_of_three_writers_no_snapshot_is_in_doubt():
    """In some hundred orders of their requests, while time passes twice."""
    for seed in range(400):
        draw = random.Random(seed)
        try_order(draw.randrange, "ABC", [35, 40], holder=0)


def test_of_processes_that_start_at_once_one_goes_on(s3):
    """The others are refused with its name. When it is killed its lease is free at once."""
    with Racer() as first, Racer() as second, Racer() as third:
        for number in range(10):
            race(f"{s3}/{number}", [first, second, third])
        racers = [first, second, third]
        while len(racers) > 1:
            winner = race(f"{s3}/again", racers)
            winner.kill()
            racers.remove(winner)


STOPPED = """
import sys
from chainring._places.bucket import MISSING, Bucket, ChangedError, RemoteError
from chainring._places.index import Index, LeaseLostError
lease = Index(Bucket(sys.argv[1]), seconds=int(sys.argv[2]), period=0.1)
print("taken", flush=True)
for line in sys.stdin:
    try:
        lease.check()
        print("held", flush=True)
    except LeaseLostError as error:
        print(error, flush=True)
"""


def test_a_process_that_was_stopped_sees_that_its_lease_was_taken_before_it_does_anything_else(s3):
    """While it goes on it keeps the lease. By the clock of a server; here with a lease of two seconds."""
    assert take_from_one_that_is_stopped(f"{s3}/run", 2) or take_from_one_that_is_stopped(f"{s3}/again", 20)


def take_from_one_that_is_stopped(url, seconds):
    """False if its lease was lost before that, as where a machine is so busy that the process stands still by itself."""

    def attempt():
        time.sleep(0.05)
        with suppress(BlockingIOError):
            return Index(Bucket(url), period=None)

    with Forked(["-c", STOPPED, url, str(seconds)]) as process:

        def ask():
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert process.stdout.readline() == "taken\n"
        began = time.monotonic()
        while time.monotonic() < began + seconds + 1.5:
            if attempt() is not None:
                return False
        assert ask() == "held"
        process.send_signal(signal.SIGSTOP)
        while (lease := attempt()) is None:
            assert time.monotonic() < began + 240
        process.send_signal(signal.SIGCONT)
        assert f"process {os.getpid()} on" in ask()
    lease.change()
    return True


@pytest.mark.parametrize("fault", ["500", "503 after", "cut", "cut after", "cut response"])
def test_a_lease_survives_requests_that_fail_and_are_tried_again(s3, proxy, fault):
    """Taken, renewed and released, whether they were carried out or not."""
    bucket = Bucket(f"{s3}/run")
    for _ in range(2):
        proxy.fail(fault, method="PUT")
        lease = Index(bucket, period=None)
        proxy.fail(fault, method="PUT", times=2)
        lease.change()
        proxy.fail(fault)
        lease.change()
        with pytest.raises(BlockingIOError):
            Index(bucket, period=None)
        proxy.fail(fault, method="PUT")
        lease.release()
