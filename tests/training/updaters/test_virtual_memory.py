"""How much memory the gradients of virtual ranks take in a process."""

import os
import subprocess
import sys

import pytest

GRADIENT = 16 << 20
PROGRAM = """
import sys
from pathlib import Path
import torch
from torch import nn
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater

class Own(StandardUpdater):
    def update_core(self):
        self.backward(self.get_model("main")(self.next_batch()).square().mean())
        self.step()

def memory(kind):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[kind].split()[0])

torch.set_num_threads(1)
count, kind = int(sys.argv[1]), {"default": StandardUpdater, "own": Own}[sys.argv[2]]
net = nn.Linear(2048, 2048, bias=False)
settings = {"loss_func": lambda net, x: net(x).square().mean()} if kind is StandardUpdater else {}
iterator = SerialIterator(list(torch.ones(128, 2048)), 128)
updater = kind(iterator, torch.optim.SGD(net.parameters(), 0.1), net, virtual_ranks=count, **settings)
updater.start()
before = memory("VmRSS")
for _ in range(2):
    updater.update()
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
@pytest.mark.parametrize(("kind", "gradients"), [("default", 2), ("own", 3)])
def test_each_doubling_of_the_virtual_ranks_takes_memory_for_a_few_gradients_at_most(kind, gradients):
    """In the whole process: the C library does not keep what was freed of the gradient of each."""
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}  # its default grows with the cores

    def peak(count):
        call = [sys.executable, "-c", PROGRAM, str(count), kind]
        return int(subprocess.run(call, env=environment, check=True, capture_output=True, text=True).stdout)

    assert peak(32) - peak(4) <= 3 * gradients * GRADIENT
