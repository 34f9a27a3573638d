"""These tests need Chromium. They are collected by a command of their own only: `python -m pytest tests/browser`."""

import shutil
from pathlib import Path

import pytest

from report_runs import trained

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_ignore_collect(collection_path, config):
    """Leaves them out of a run that does not ask for this directory."""
    asked = (Path(argument.partition("::")[0]).resolve() for argument in config.args)
    here = Path(__file__).parent
    return None if any(path == here or here in path.parents for path in asked) else True


@pytest.fixture(scope="session")
def chromium():
    """The browser, without a window."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.fail("the page of a run is tested in Chromium, and there is none on PATH: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def result(tmp_path_factory):
    """The directory of a run that was trained and resumed."""
    return trained(tmp_path_factory.mktemp("out") / "result")
