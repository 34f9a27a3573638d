"""Uploads to S3 that nobody has finished: obstore cannot list them, boto3 can."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from chainring._places.errors import RemoteError

_TRIES = 8  # of a request, with pauses between them


def abort_unfinished(bucket: str, prefix: str, older: timedelta, place: str) -> list[str]:
    """Abort the uploads below a prefix that were begun so long ago; return the keys of their objects.

    Raises:
        RemoteError: the store does not answer, or does not allow it.
    """
    try:
        import boto3
        import botocore.exceptions
    except ImportError:
        return []
    drawn = random.getstate()  # of the run: botocore draws from the same generator how long it waits
    try:
        client = _client(boto3)
        aborted = []
        for upload, now in _uploads(client, bucket, prefix):
            if now - upload["Initiated"] >= older:
                client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                aborted.append(upload["Key"])
        return aborted
    except botocore.exceptions.ClientError as error:
        said = f"the store answers {error.response.get('Error', {}).get('Code', 'that it failed')}"
    except (botocore.exceptions.BotoCoreError, OSError, ValueError) as error:
        said = type(error).__name__
    finally:
        random.setstate(drawn)
    raise RemoteError(f"{place} cannot be aborted: {said}; the credentials need permission to list and to abort uploads")


def _uploads(client: Any, bucket: str, prefix: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the uploads that are under way, and what time it is in the store."""
    for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
        now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
        for upload in page.get("Uploads", []):
            yield upload, now


def _client(boto3: Any) -> Any:
    """Return a client with the settings that obstore takes and boto3 does not."""
    from botocore import UNSIGNED
    from botocore.config import Config

    is_public = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
    settings = {"signature_version": UNSIGNED} if is_public else {}
    return boto3.client(
        "s3",
        region_name=os.environ.get("AWS_REGION"),
        endpoint_url=os.environ.get("AWS_ENDPOINT"),
        config=Config(retries={"total_max_attempts": _TRIES, "mode": "standard"}, **settings),
    )
