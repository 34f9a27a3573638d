"""What every test has: one thread, and generators that the test before it has not touched."""

import gc
import importlib
import logging
import multiprocessing
import random
import signal
import subprocess

import numpy as np
import pytest
import torch

import chainring
import forked
from older_torch import pytest_collection_modifyitems  # noqa: F401 - a hook

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup starts what it runs
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The server that forks ranks and runs imports once what they all need; it does not see the folders of the tests.
multiprocessing.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "chainring.parallel", "chainring.testing", "pytest"]
)

torch.set_num_threads(1)  # also for what is computed once for a file, before its first test


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help='on which device tests compute that ask for one (default: "cpu")')


@pytest.fixture
def device(request):
    """Where a test computes: "cpu", or "cuda" on an accelerator or on the stand-in for one (``make device``)."""
    return request.config.getoption("device")


@pytest.fixture(autouse=True)
def _repeatable():
    torch.set_num_threads(1)
    if torch.accelerator.is_available():
        chainring.deterministic(0)
    else:  # the same, but PyTorch does not note the stack of each test for an accelerator to come
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)


@pytest.fixture
def logged():
    """The messages that are logged while a test runs, as pytest's ``caplog`` has them, which takes time in every test."""
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    yield messages
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def said(capsys):
    """Returns the lines printed since it was last called, each change of a setting as ``name old -> new``.

    Those about the stop trigger are left out: tests cut runs by it.
    """

    def lines():
        rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        return [
            row for row in rows if not row.startswith(("resumed with", "setting saved", "stop trigger", "already finished"))
        ]

    return lines


@pytest.fixture(scope="module")
def forked_scripts():
    """Forks the scripts that commands start, for tests that are not about how a process starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forked.popen)
        yield


def pytest_collection_finish():
    """Leave all that was imported to the garbage that is never collected: forked workers would copy every page of it.

    With what the first optimizer imports, through which each full collection would go otherwise.
    """
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()
