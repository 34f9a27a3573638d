"""Processes that want to write to the same place in a store at once."""

import re

from forked import Forked

PROGRAM = """
import sys
from chainring._places.bucket import Bucket
from chainring._places.index import Index
lease = None
for line in sys.stdin:
    if lease is not None:
        lease.release()
        lease = None
    if line.strip():
        try:
            lease = Index(Bucket(line.strip()))
        except BlockingIOError as error:
            print(error, flush=True)
            continue
    print("taken", flush=True)
"""


class Racer(Forked):
    """A process that takes the lease of a place when it is told to."""

    def __init__(self, environment=None):
        super().__init__(["-c", PROGRAM], env=environment)

    def tell(self, url):
        """Lets it release what it has, and take another lease if there is one to take."""
        self.stdin.write(f"{url}\n")
        self.stdin.flush()

    def answer(self):
        """``"taken"``, or with which words it was refused."""
        return self.stdout.readline().strip()

    def kill(self):
        """Ends it, and sees that it has."""
        super().kill()
        self.wait()


def race(url, racers):
    """Lets processes take a lease at once, of which one gets it and the others are told which; returns it."""
    for racer in racers:
        racer.tell("")
    for racer in racers:
        racer.answer()
    for racer in racers:
        racer.tell(url)
    answers = [racer.answer() for racer in racers]
    assert answers.count("taken") == 1, answers
    winner = racers[answers.index("taken")]
    refusal = re.compile(rf"process {winner.pid} on \S+, which has a lease for another \d+ s")
    assert all(answer == "taken" or refusal.search(answer) for answer in answers), answers
    return winner
