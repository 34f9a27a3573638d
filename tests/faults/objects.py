"""Runs in an object store: the store, a proxy before it, and what must be true of a place there."""

import json
import os
import re
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "remote"))  # where the server and the proxy are

import program
from attempts import Settings
from faulty_proxy import FaultyProxy
from injected import Plan
from object_server import environment_for, make_bucket, running_server

from chainring._places.bucket import Bucket
from chainring.serializers._store import CorruptError, open_store, parse_manifest
from tries import WrongEndError

BALLAST = 9 << 20  # bytes, more than a part of an upload
ANSWER = 1.0  # seconds for which a process of a try waits for an answer
RATE = 0.04  # of the requests that fail, where some do
QUIET = 60.0  # seconds after which nothing may be left of a killed process's requests

UPLOAD = re.compile(r"/run/[^/]+/[0-9a-f]{16}/")  # the path of a request for a file of a snapshot
ARCHIVED = re.compile(r"(?:previous|abandoned)/\d+/(?P<name>[^/]+)/manifest\.json")
DRAFT = re.compile(r"(?P<draft>(?P<name>[^/]+)/[0-9a-f]{16})/[^/]+")


class Objects:
    """A server of S3 on loopback and a proxy before it, through which all attempts go.

    Attributes:
        proxy: the proxy, see `FaultyProxy`.
    """

    def __init__(self, bench):
        self._bench, self._stack = bench, ExitStack()
        self._references, self._seconds, self._template = {}, None, None

    def __enter__(self):
        self._server = self._stack.enter_context(running_server())
        self.proxy = self._stack.enter_context(FaultyProxy(self._server))
        os.environ.update(environment_for(self._server))  # of this process, which looks at what is there
        return self

    def __exit__(self, *error):
        self._stack.close()

    def url(self, place):
        """The address of the run of a try, in an empty bucket."""
        make_bucket(self._server, place.name)
        return f"s3://{place.name}/run"

    def clear(self, url):
        """Remove what a try has left."""
        self.proxy.heal()
        bucket = Bucket(url)
        bucket.delete(entry.key for entry in bucket.list())

    def settings(self, place, url, **settings):
        """Of an attempt through the proxy, with a directory for temporary files of its own."""
        (place / "tmp").mkdir(exist_ok=True)
        environment = environment_for(self.proxy.url) | {"TMPDIR": str(place / "tmp")}
        settings.setdefault("plan", Plan()).answer = ANSWER
        return Settings(url=url, environment=environment, **settings)

    def attempt(self, place, url, **settings):
        """Starts the run at an address, of which no request was seen yet."""
        self.proxy.requests.clear()
        return self._bench.attempt(place, self.settings(place, url, **settings))

    def complete(self, place, url, ballast=0, **settings):
        """Runs to the end, and compares the outcome and what is left; returns the output."""
        with self.attempt(place, url, ballast=ballast, **settings) as attempt:
            self.compare(attempt.completed(), ballast)
            output = attempt.output
        self.settle()
        check(url)
        if left := unfinished(url):
            raise WrongEndError(f"a completed run has left {sorted(left)}")
        return output

    def compare(self, outcome, ballast=0, besides=()):
        """The run has ended as the uninterrupted one on a disk."""
        reference = self.reference(ballast)
        differing = [part for part in reference if part not in besides and outcome[part] != reference[part]]
        if differing:
            raise WrongEndError(f"these differ from the uninterrupted run on a disk: {differing}")

    def reference(self, ballast):
        """The outcome of the uninterrupted run on a disk."""
        if not ballast:
            return self._bench.reference
        if ballast not in self._references:
            with self._bench.attempt(
                self._bench.place(f"reference-ballast-{ballast}"), Settings(ballast=ballast)
            ) as attempt:
                self._references[ballast] = attempt.completed()
        return self._references[ballast]

    def seconds(self):
        """How long the run takes through the proxy, without a fault."""
        if self._seconds is None:
            place = self._bench.place("reference-remote")
            began = time.monotonic()
            self.complete(place, self.url(place))
            self._seconds = time.monotonic() - began
        return self._seconds

    def uploads(self):
        """The requests of this attempt that write files of snapshots."""
        return [each for each in list(self.proxy.requests) if each.method in ("PUT", "POST") and UPLOAD.match(each.path)]

    def is_uploading(self):
        """Whether such a request is under way."""
        return any(not each.is_over for each in self.uploads())

    def settle(self):
        """Waits until nothing is left of the requests of processes that have ended, and of their connections.

        Raises:
            WrongEndError: something is.
        """
        until = time.monotonic() + QUIET
        while under_way := [each for each in list(self.proxy.requests) if not each.is_over]:
            if time.monotonic() > until:
                raise WrongEndError(f"{QUIET:g} s after the end of the run, requests of it are still under way: {under_way}")
            time.sleep(0.002)
        while connections := self._connections():
            if time.monotonic() > until:
                raise WrongEndError(f"{QUIET:g} s after the end of the run, {connections} connections of it are open")
            time.sleep(0.002)

    def _connections(self):
        """How many there are to the proxy that both ends hold open."""
        port = int(self.proxy.url.rpartition(":")[2])
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(each[1].endswith(f":{port:04X}") and each[3] == "01" for each in lines)

    def interrupted(self, place):
        """The address of a run that was killed in a write: two snapshots, the best, a log; the same each time."""
        url = self.url(place)
        if self._template is None:
            self._template = self._killed()
        bucket = Bucket(url)
        for key, content in self._template.items():
            bucket.put(key, content)
        return url

    def _killed(self):
        for number in range(20):
            place = self._bench.place(f"remote-killed-{number}")
            url = self.url(place)
            self.proxy.fail("stall", method="PUT", key="/state.json", skip=11 + number)
            with self.attempt(place, url) as attempt:
                while not any(each.fault for each in self.uploads()):
                    attempt.wait_for("ended", 0.002)
                time.sleep(0.1)  # the training goes on beside it
                attempt.kill()
                attempt.wait_for()
            self.proxy.heal()
            self.settle()
            found = check(url)
            bucket = Bucket(url)
            if sum(name.startswith("snapshot") for name in found) == 2 and unfinished(url):
                return {entry.key: bucket.get(entry.key).content for entry in bucket.list()}
        raise WrongEndError("no run was killed in the middle of an upload in twenty tries")


def check(url):
    """Every snapshot that is there is whole, the link and the log are valid; the iterations by name."""
    store = open_store(url)
    try:
        found = {name: store.snapshot(name).verify().iteration for name in store.names()}
    except CorruptError as error:
        raise WrongEndError(f"a snapshot that is there is not whole: {error}") from error
    if (target := store.link_target("best")) is not None and target not in found:
        raise WrongEndError("the link best leads nowhere")
    if store.files.exists("log"):
        json.loads(program.content_of(url, "log"))
    return found


def unfinished(url):
    """The folders of files that belong to no snapshot.

    Of one whose manifest is damaged, or that of another, nobody knows which are its files.
    """
    store = open_store(url)
    keys = [entry.key for entry in store.files.bucket.list()]
    used, unknown = {f"{name}/{store.snapshot(name).read_manifest().folder}" for name in store.names()}, set()
    for match in filter(None, map(ARCHIVED.fullmatch, keys)):
        try:
            manifest = parse_manifest(store.files.bucket.get(match[0]).content, url)
        except CorruptError:
            unknown.add(match["name"])
        else:
            used.add(manifest.folder.removeprefix("../../"))
            unknown |= {match["name"]} - {manifest.name}
    drafts = [match for match in map(DRAFT.fullmatch, keys) if match and match["name"] not in unknown]
    return {match["draft"] for match in drafts} - used
