"""A store that speaks S3, a bucket of one's own in it, and a proxy before it."""

import uuid

import pytest
from faulty_proxy import FaultyProxy
from object_server import environment_for, make_bucket, running_server


@pytest.fixture(scope="session")
def object_server():
    """The address of a server of S3 on loopback."""
    with running_server() as address:
        yield address


@pytest.fixture
def s3(object_server, monkeypatch, tmp_path):
    """The address of an empty bucket, such as ``s3://...``, in a store that the environment names."""
    for name, value in environment_for(object_server).items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))  # what the developer has
    name = f"test-{uuid.uuid4().hex}"
    make_bucket(object_server, name)
    return f"s3://{name}"


@pytest.fixture
def proxy(object_server, s3, monkeypatch):
    """A proxy that breaks what it is told to break; buckets opened from now on go through it."""
    with FaultyProxy(object_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy
