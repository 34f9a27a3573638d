"""A bucket whose store has the time that a test says, and all orders in which the requests of several can arrive."""

import contextlib
import threading
from datetime import UTC, datetime, timedelta

from chainring._places.bucket import Bucket, ChangedError, RemoteError

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class World:
    """The time, of every clock, and a store in memory that goes by it.

    Attributes:
        seconds: what all clocks say.
        requests: how many were made, by what.
    """

    def __init__(self):
        self.seconds = 0.0
        self.requests = []
        self.written = {}  # when, by state

    def clock(self):
        return self.seconds


class TimedBucket(Bucket):
    """A bucket in memory of a store that has the time of a world.

    Attributes:
        fault: ``"away"``: requests fail; ``"silent"``: they are carried out, and then fail; ``"conflict"``: the next
            condition is said not to hold, as S3 does where requests meet.
    """

    def __init__(self, url, world, before_request=lambda: None):
        super().__init__(url)
        self.world, self.fault, self._before_request = world, None, before_request

    def get(self, key):
        with self._request(f"get {key}"):
            found = super().get(key)
            return found._replace(modified=self._when(found.tag))

    def head(self, key):
        with self._request(f"head {key}"):
            entry = super().head(key)
            return entry._replace(modified=self._when(entry.tag))

    def open(self, key):
        file = super().open(key)
        self._before_request()  # that of its bytes
        return file

    def list(self, prefix="", expected=()):
        with self._request(f"list {prefix}"):
            return super().list(prefix, expected)

    def put(self, key, content, expected=None):
        with self._request(f"put {key}"):
            if expected is not None and self.fault == "conflict":
                self.fault = None
                raise ChangedError("the request met another")
            tag = super().put(key, content, expected)
            self.world.written.setdefault(tag, self.world.seconds)
            return tag

    def _when(self, tag):
        """Stores tell whole seconds."""
        return EPOCH + timedelta(seconds=int(self.world.written.get(tag, self.world.seconds)))

    @contextlib.contextmanager
    def _request(self, name):
        self._before_request()
        self.world.requests.append(name)
        if self.fault == "away":
            raise RemoteError("the store is away")
        yield
        if self.fault == "silent":
            raise RemoteError("the answer was lost")


def taken_lock():
    """A lock that one thread waits for until another releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Stepper:
    """Runs functions in threads of which one goes on at a time, from before one request to before the next."""

    def __init__(self):
        self._arrived = taken_lock()
        self._errors = []
        self._own = threading.local()
        self._threads, self._turns = [], []

    def add(self, function):
        """Starts a function, up to before its first request."""
        turn = taken_lock()

        def run():
            self._own.turn = turn
            try:
                function()
            except BaseException as error:
                self._errors.append(error)
            finally:
                self._turns[number] = None
                self._arrived.release()

        number = len(self._turns)
        self._turns.append(turn)
        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        self._arrived.acquire()

    def wait_for_turn(self):
        """What a function calls before each request; anybody else goes on at once."""
        if (turn := getattr(self._own, "turn", None)) is not None:
            self._arrived.release()
            turn.acquire()

    def waiting(self):
        """The numbers of the functions that have not ended."""
        return [number for number, turn in enumerate(self._turns) if turn is not None]

    def step(self, number):
        """Lets a function make its request and go on to the next."""
        self._turns[number].release()
        self._arrived.acquire()
        if self._errors:
            raise self._errors[0]


def orders(run):
    """Calls ``run(choose)`` for every row of answers that ``choose(number of choices)`` can give; returns how many."""
    path, count = [], 0
    while True:
        taken = 0

        def choose(choices):
            nonlocal taken
            if taken == len(path):
                path.append([0, choices])
            taken += 1
            return path[taken - 1][0]

        run(choose)
        count += 1
        del path[taken:]
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return count
        path[-1][0] += 1
