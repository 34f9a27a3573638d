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

from chainring._remote.bucket import MISSING, Bucket, ChangedError, RemoteError
from chainring._remote.lease import Fence, Lease, LeaseLostError, read_fence, seal
from forked import Forked

URLS = (f"memory:///lease-{number}" for number in itertools.count())


@pytest.fixture
def world():
    return World()


@pytest.fixture
def bucket(world):
    return TimedBucket(next(URLS), world)


def take(bucket, snapshots=list):
    """A lease that nothing renews but the test."""
    return Lease(bucket, snapshots, period=None, clock=bucket.world.clock)


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
    for look in earlier.check, earlier.renew, earlier.check:
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
        Lease(bucket, list, period=None, clock=lambda: 3e7)


def test_a_renewed_lease_lasts(world, bucket):
    """Every renewal has another content, because stores take the sum of the bytes for the state of an object."""
    lease = take(bucket)
    contents = set()
    for now in range(0, 200, 20):
        world.seconds = now
        lease.renew()
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
    second.renew()
    run, token = first.stamp.split("/")
    assert (token, second.stamp) == ("1", f"{run}/2")


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
    lease.renew()
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
        lease.renew()
    world.seconds, bucket.fault = 20, None
    lease.renew()
    lease.check()
    world.seconds = 49
    with pytest.raises(BlockingIOError):
        take(bucket)


def test_a_snapshot_between_a_lost_answer_and_the_next_renewal_is_seen_by_whoever_takes_the_lease(world, bucket):
    """A taker that looked at the lease after that renewal and at the snapshots before that one comes too late."""
    lease, seen = take(bucket), []
    world.seconds, bucket.fault = 10, "silent"
    with pytest.raises(RemoteError):
        lease.renew()
    world.seconds, bucket.fault = 50, None

    def snapshots():
        looked = list(seen)
        if not seen:
            seen.append((lease.stamp, "0123456789abcdef"))  # is put now
            lease.renew()
        return looked

    with pytest.raises(BlockingIOError):
        take(bucket, snapshots)
    world.seconds = 100
    assert take(bucket, snapshots).fence.admits(*seen[0])


def test_a_condition_that_is_said_not_to_hold_is_tried_again_if_it_does(bucket):
    """S3 answers so to requests that meet, also to all of them."""
    bucket.fault = "conflict"
    lease = take(bucket)
    bucket.fault = "conflict"
    lease.renew()
    bucket.fault = "conflict"
    lease.release()
    take(bucket)


def test_a_lease_that_was_removed_or_overwritten_is_lost(bucket):
    """By whoever has cleared the place, or taken it for something else."""
    lease = take(bucket)
    bucket.delete([".lease"])
    with pytest.raises(LeaseLostError, match="was removed"):
        lease.renew()
    lease = take(bucket)
    bucket.put(".lease", b"{}")
    with pytest.raises(LeaseLostError, match="is not a lease"):
        lease.renew()


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{}", b'{"format": 1}', b"\xff", b'{"format": 1, "pid": "1"}'])
def test_an_object_that_is_not_a_lease_is_refused_with_a_remedy(bucket, content):
    """For writers and readers."""
    bucket.put(".lease", content)
    for use in take, read_fence:
        with pytest.raises(RemoteError, match=r"lease is not a lease .* remove it"):
            use(bucket)


def test_each_damaged_bit_of_a_lease_is_noticed():
    """By writers and readers: another token or folder would make snapshots invalid, which the next run removes."""
    bucket = Bucket("memory:///damaged-lease")
    Lease(bucket, lambda: [("0123456789abcdef/1", "f" * 16)]).release()
    content = bucket.get(".lease").content
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        bucket.put(".lease", bytes(damaged))
        for use in (read_fence, lambda bucket: Lease(bucket, list)):
            with pytest.raises(RemoteError, match=r"is not a lease|of a later Chainring"):
                use(bucket)


@pytest.mark.parametrize(
    ("name", "value"), [("pid", "1"), ("token", True), ("seconds", 1.5), ("folders", 3), ("folders", [1]), ("is_held", 1)]
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


@pytest.mark.parametrize("elsewhere", ["host", "machine", "namespace"])
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
            for look in lease.check, lease.renew:
                with pytest.raises(LeaseLostError, match="none that it has forked"):
                    look()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    bucket.fault = None
    lease.renew()


def test_a_thread_renews_the_lease_until_it_is_released(world, bucket):
    """Also after a time for which the store was away."""

    def wait_for_renewals():
        seen, end = {bucket.get(".lease").content}, time.monotonic() + 30
        while len(seen) < 3 and time.monotonic() < end:
            seen.add(bucket.get(".lease").content)
        assert len(seen) >= 3

    own = TimedBucket(bucket.url, world)
    lease = Lease(own, list, period=0.001, clock=world.clock)
    wait_for_renewals()
    own.fault = "away"
    count, end = len(world.requests), time.monotonic() + 30
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
    lease = Lease(bucket, list, period=0.001, clock=world.clock)
    bucket.delete([".lease"])
    end = time.monotonic() + 30
    with suppress(LeaseLostError):
        while time.monotonic() < end:
            lease.check()
    with pytest.raises(LeaseLostError, match="was removed"):
        lease.check()


def test_a_snapshot_that_its_writer_puts_after_the_lease_was_taken_is_not_valid(world, bucket):
    """For any reader and every later holder; those before are, and those without a stamp or from another run."""
    first = take(bucket)
    kept, late = (first.stamp, "a" * 16), (first.stamp, "b" * 16)
    others = [(None, "c" * 16), ("0123456789abcdef/1", "d" * 16)]
    assert read_fence(bucket).admits(*late)
    world.seconds = 31
    second = take(bucket, lambda: [kept, *others])
    own = second.stamp, "e" * 16
    second.release()
    third = take(bucket, lambda: [kept, late, *others, own])
    for fence in second.fence, third.fence, read_fence(bucket):
        assert [fence.admits(*each) for each in (kept, late, *others, own)] == [True, False, True, True, True]
    assert json.loads(bucket.get(".lease").content)["folders"] == ["a" * 16, "e" * 16]


@pytest.mark.parametrize("fault", [None, "silent"])
def test_a_removed_snapshot_is_not_valid_again_when_its_writer_puts_it_once_more(world, bucket, fault):
    """As one does that was stopped before it has received the answer, also if a renewal of the next has had none."""
    first = take(bucket)
    removed, kept = (first.stamp, "a" * 16), (first.stamp, "b" * 16)
    world.seconds = 31
    second = take(bucket, lambda: [removed, kept])
    bucket.fault = fault
    with suppress(RemoteError):
        second.renew()
    bucket.fault = None
    second.forget("a" * 16)
    for fence in second.fence, read_fence(bucket):
        assert (fence.admits(*removed), fence.admits(*kept)) == (False, True)
    second.release()
    third = take(bucket, lambda: [removed, kept])
    assert (third.fence.admits(*removed), third.fence.admits(*kept)) == (False, True)


def test_forgetting_a_snapshot_of_ones_own_makes_no_request(world, bucket):
    """Nor one that the lease does not list: nobody else puts those."""
    lease = take(bucket)
    world.requests.clear()
    lease.forget("a" * 16)
    assert world.requests == []


def test_a_lease_lists_no_more_than_the_snapshots_that_there_are():
    """However many runs there were before."""
    bucket = TimedBucket(next(URLS), World())
    sizes, there = set(), []
    for number in range(10, 40):
        lease = take(bucket, lambda: there)  # noqa: B023 - called at once
        there = [*there, (lease.stamp, f"{number:016x}")][-3:]
        lease.release()
        sizes.add(len(bucket.get(".lease").content))
    assert max(sizes) - min(sizes) < 100


def test_without_a_lease_every_snapshot_is_valid(bucket):
    """Such as those of `serializers.save`."""
    assert read_fence(bucket) == Fence()
    assert read_fence(bucket).admits("0123456789abcdef/1", "a" * 16)


class Writer:
    """A run that takes the lease, looks which snapshots are valid, and saves one.

    Attributes:
        lease: once it has it.
        saved: the folder of its snapshot, once it calls it saved.
        seen: the folders of the snapshots that were valid when it had taken the lease.
    """

    def __init__(self, name, bucket, events):
        self.name, self.bucket, self.events = name, bucket, events
        self.lease, self.saved, self.seen = None, None, None
        self.there = {}
        self.refusals = 0

    def snapshots(self):
        """Stamp and folder of each, and the state of its manifest, by key."""
        found = {}
        for entry in self.bucket.list():
            if entry.key.endswith("/manifest.json"):
                manifest = self.bucket.get(entry.key)
                found[entry.key] = (*json.loads(manifest.content), manifest.tag)
        return found

    def valid(self, fence):
        self.there = self.snapshots()
        return {folder for stamp, folder, _ in self.there.values() if fence.admits(stamp, folder)}

    def take(self):
        try:
            self.lease = take(self.bucket, lambda: [(stamp, folder) for stamp, folder, _ in self.snapshots().values()])
        except BlockingIOError:
            self.refusals += 1
        else:
            self.events.append((self.name, "taken"))
            self.seen = self.valid(self.lease.fence)

    def save(self):
        """Replaces what is not valid and in the way."""
        key, folder = "snapshot/manifest.json", f"{self.name}-folder"
        with suppress(LeaseLostError):
            while key not in self.there or not self.lease.fence.admits(*self.there[key][:2]):
                self.bucket.put(f"{folder}/weights", b"")
                self.lease.check()
                self.events.append((self.name, "looked"))
                expected = self.there[key][2] if key in self.there else MISSING
                try:
                    self.bucket.put(key, json.dumps([self.lease.stamp, folder]).encode(), expected)
                except ChangedError:
                    self.there = self.snapshots()
                    continue
                self.lease.renew()
                self.saved = folder
                return

    def run(self, saves=True):
        if self.lease is None:
            self.take()
        if self.lease is not None and saves:
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
    valid = writers[0].valid(read_fence(writers[0].bucket))
    holders = sorted((writer for writer in writers if writer.lease), key=lambda writer: writer.lease.stamp)
    tokens = [writer.lease.stamp for writer in holders]
    assert len(set(tokens)) == len(tokens)
    assert {writer.saved for writer in writers} - {None} <= valid, "what was called saved is valid"
    for earlier, later in itertools.pairwise(holders):
        assert valid & {f"{earlier.name}-folder"} <= later.seen, "what a later holder has not seen is not valid"
        taken = events.index((later.name, "taken"))
        assert (earlier.name, "looked") not in events[taken:], "who has lost the lease does not go on"


@pytest.mark.parametrize("jump", [29.5, 45])
def test_in_no_order_of_requests_is_a_snapshot_of_two_writers_in_doubt(jump):
    """One saves and another takes the lease, in every order of their requests, while time passes at any of them.

    What the first calls saved is seen by the second; what the second has not seen is never valid.
    """
    outcomes = set()

    def run(choose):
        first, second = try_order(choose, "AB", [jump], holder=0)
        outcomes.add((first.saved is not None, second.lease is not None, second.saved is not None))

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
from chainring._remote.bucket import MISSING, Bucket, ChangedError, RemoteError
from chainring._remote.lease import Lease, LeaseLostError
lease = Lease(Bucket(sys.argv[1]), list, seconds=2, period=0.1)
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

    def attempt():
        with suppress(BlockingIOError):
            return Lease(Bucket(f"{s3}/run"), list, period=None)

    with Forked(["-c", STOPPED, f"{s3}/run"]) as process:

        def ask():
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert process.stdout.readline() == "taken\n"
        began = time.monotonic()
        while time.monotonic() < began + 3.5:
            assert attempt() is None
        assert ask() == "held"
        process.send_signal(signal.SIGSTOP)
        while (lease := attempt()) is None:
            assert time.monotonic() < began + 30
        process.send_signal(signal.SIGCONT)
        assert f"process {os.getpid()} on" in ask()
    lease.renew()


@pytest.mark.parametrize("fault", ["500", "503 after", "cut", "cut after", "cut response"])
def test_a_lease_survives_requests_that_fail_and_are_tried_again(s3, proxy, fault):
    """Taken, renewed and released, whether they were carried out or not."""
    bucket = Bucket(f"{s3}/run")
    for _ in range(2):
        proxy.fail(fault, method="PUT")
        lease = Lease(bucket, list, period=None)
        proxy.fail(fault, method="PUT", times=2)
        lease.renew()
        proxy.fail(fault)
        lease.renew()
        with pytest.raises(BlockingIOError):
            Lease(bucket, list, period=None)
        proxy.fail(fault, method="PUT")
        lease.release()
