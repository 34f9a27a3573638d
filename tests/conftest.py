"""What every test has: one thread, and generators that the test before it has not touched."""

import signal

import pytest
import torch

import chainring

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _repeatable():
    torch.set_num_threads(1)
    chainring.deterministic(0)
