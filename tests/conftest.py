"""What every test has: one thread, and generators that the test before it has not touched."""

import pytest
import torch

import chainring


@pytest.fixture(autouse=True)
def _repeatable():
    torch.set_num_threads(1)
    chainring.deterministic(0)
