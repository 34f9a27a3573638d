"""What the tests of contracts share: runs in memory, where those of other tests are."""

import os
import tempfile

import pytest


@pytest.fixture(autouse=True)
def _in_memory(monkeypatch):
    """The checks make directories of their own, hundreds of times; `make test` says where memory has room for them."""
    monkeypatch.setattr(tempfile, "tempdir", os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir())
