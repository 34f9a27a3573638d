"""Directories and addresses copied to each other by boto3, as ``aws s3 sync`` does it."""

import functools
import os
from pathlib import Path
from urllib.parse import urlsplit

import boto3


def client():
    """A client of the store that the environment names."""
    return client_of(os.environ["AWS_ENDPOINT_URL"])


@functools.cache
def client_of(address):
    """A client of the store at an address, which takes long to make."""
    return boto3.client("s3", endpoint_url=address)


def parts(url):
    """The bucket and the key of an address."""
    split = urlsplit(url)
    return split.netloc, split.path.strip("/")


def keys(url):
    """The keys below an address, without it, in their order."""
    bucket, prefix = parts(url)
    pages = client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/" if prefix else "")
    return [item["Key"].removeprefix(f"{prefix}/") for page in pages for item in page.get("Contents", ())]


def read(url):
    """The content of an object."""
    bucket, key = parts(url)
    return client().get_object(Bucket=bucket, Key=key)["Body"].read()


def write(url, content):
    """Puts an object where one may be."""
    bucket, key = parts(url)
    client().put_object(Bucket=bucket, Key=key, Body=content)


def remove(url):
    """Removes an object."""
    bucket, key = parts(url)
    client().delete_object(Bucket=bucket, Key=key)


def sync_up(folder, url):
    """Copies all files of a directory, those behind links too."""
    for root, _, files in os.walk(folder, followlinks=True):
        for file in (Path(root, name) for name in files):
            write(f"{url}/{file.relative_to(folder)}", file.read_bytes())


def sync_down(url, folder):
    """Copies all objects below an address into a directory, which it returns."""
    for key in keys(url):
        path = Path(folder, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read(f"{url}/{key}"))
    return Path(folder)
