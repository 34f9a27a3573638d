"""What the first computation of a process with several threads comes to."""

import os
import subprocess
import sys

PROGRAM = """
import os, sys, torch, zlib
import chainring
torch.set_num_threads(2)
numbers = torch.rand(3200, generator=torch.Generator().manual_seed(0)) ** 4 * 1e-4
digests = set()
for _ in range(800):
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        torch.ones(100, 64) @ torch.ones(64, 50)  # starts the threads
        os.write(writes, b"%d" % zlib.crc32(numbers.sqrt().numpy()))
        os._exit(0)
    os.close(writes)
    digests.add(os.read(reads, 20))
    os.close(reads)
    os.waitpid(child, 0)
print(len(digests))
"""


def test_the_first_square_roots_of_a_process_are_those_of_every_other():
    """Where torch has MKL, a process in some hundreds had other last bits: an optimizer's first step shows them."""
    program = PROGRAM
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "active"}  # both threads begin at once
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=600)
    assert done.stdout.strip() == "1", done.stderr
