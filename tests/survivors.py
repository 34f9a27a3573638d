"""Ranks of which some are lost, with a store that outlives them."""

import multiprocessing
import os
import signal

import torch
from torch.distributed import TCPStore

from chainring import report_histogram, report_image, report_text
from chainring.nn import Classifier
from chainring.parallel import create_communicator
from chainring.writers import Writer

EXAMPLES = [(torch.linspace(0, 1 + i % 3, 4), i % 3) for i in range(24)]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Killing(Writer):
    """Kills its process when a row of an iteration is written."""

    def __init__(self, at):
        self.at = at

    def write(self, record):
        if record.iteration == self.at:
            die()


class Showing(Classifier):
    """Reports an image, a text and a histogram beside its means."""

    def forward(self, x, t):
        report_image("image", torch.full((2, 2), x.mean().clamp(0, 1)))
        report_text("labels", str(t.tolist()))
        report_histogram("weights", next(self.parameters()))
        return super().forward(x, t)


def live(rank, size, where, before, function, *arguments):
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", **where}
    os.environ.update({name: str(value) for name, value in where.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    before(rank)
    function(create_communicator("cpu", survive=True), *arguments)


def end_of(size, function, *arguments, told=lambda port: {"MASTER_PORT": port}, before=int):
    """How each of some ranks ends, whose store is in this process as that of torchrun is in its agent, as they are told.

    ``before`` is called with each rank before it meets the others.
    """
    context = multiprocessing.get_context("forkserver")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = os.environ | told(store.port)  # which the server that forks them may not have
    ranks = [context.Process(target=live, args=(rank, size, where, before, function, *arguments)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(60)
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
