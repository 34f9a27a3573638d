"""What the tests of services share: one database, and a wandb that keeps to itself."""

import pytest


@pytest.fixture(scope="session")
def database(tmp_path_factory):
    """To make MLflow's tables takes seconds, so the tests share one database and have experiments of their own."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'runs.db'}"


@pytest.fixture
def offline(tmp_path_factory, monkeypatch):
    """W&B uses no network, says nothing, and leaves no files outside the test's directories."""
    import wandb

    own = tmp_path_factory.mktemp("own")
    for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(own))
    yield
    wandb.teardown()
