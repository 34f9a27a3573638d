"""Requests to a store through obstore: tried again while that may help, with credentials from where each store has them.

What goes wrong is said in a line with a remedy, without what a request carried: obstore's messages repeat the address of a
request, which may be signed, and the store's answer, which may have credentials in it. Only the status is taken, the store's
code for it and the kind of a broken connection.
"""

from __future__ import annotations

import functools
import os
import random
import re
import time
from collections.abc import Callable
from datetime import timedelta
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from chainring._places.base import RemoteError

Result = TypeVar("Result")

_FIRST_PAUSE = 1 / 600  # of `Patience.retry`, before the second try; each is twice the one before
_LONGEST_PAUSE = 1 / 8
_PART_TRIES = 24  # of a part after the first, so that their pauses are `Patience.retry` together
_HANDLED_BY_OBSTORE = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
             "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE")  # fmt: skip
_PROFILES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_KEYS_LAST = timedelta(minutes=5)  # after which credentials are asked for again

_random_pauses = random.Random()  # not the global generator, whose state belongs to the run
_process_with_threads: int | None = None  # the process in which obstore's threads run


class ChangedError(RemoteError):
    """An object is not in the state in which it was expected: somebody else has written it.

    ``is_certain`` is False if an earlier try of the same request may have written it, of which no answer came.
    """

    is_certain = True


class Patience(NamedTuple):
    """How many seconds a store is waited for."""

    retry: float = 60.0  # for so long a request that fails is tried again
    start: float = 5.0  # the same, while nothing has answered at all since the bucket was opened
    answer: float = 15.0  # a request has failed when nothing has come for so long
    part: float = 180.0  # a part of an upload has failed when it has taken so long


PATIENCE = Patience()


class Connection:
    """A way to the bucket of a name, by ``s3``, ``gs``, ``az`` or ``memory``."""

    def __init__(self, scheme: str, name: str, patience: Patience) -> None:
        self._scheme, self._name, self._patience = scheme, name, patience
        self._answer, self._part = timedelta(seconds=patience.answer), timedelta(seconds=patience.part)
        self._has_answered = scheme == "memory"

    @functools.cached_property
    def asking(self) -> Any:
        """The obstore store for what is small: a try ends when nothing comes for a while, and `call` makes the next."""
        return self._open({"read_timeout": self._answer, "timeout": timedelta(days=1)}, {"max_retries": 0})

    @functools.cached_property
    def putting(self) -> Any:
        """The one for what takes a while to send, during which nothing comes back."""
        return self._open({"timeout": self._part}, {"max_retries": 0})

    @functools.cached_property
    def sending(self) -> Any:
        """The one for the parts of uploads, which obstore sends, and tries again."""
        retry = timedelta(seconds=self._patience.retry)
        pauses = {"init_backoff": retry / 60, "max_backoff": retry / 15}
        retries = {"max_retries": _PART_TRIES, "retry_timeout": self._part + retry, "backoff": pauses}
        return self._open({"timeout": self._part}, retries)

    def _open(self, limits: dict[str, Any], retries: dict[str, Any]) -> Any:
        if self._scheme == "memory":
            return _memory(self._name)
        options = limits | {"connect_timeout": self._answer / 3, "allow_http": True}  # if the address of the store says so
        config, provider = _credentials() if self._scheme == "s3" else ({}, None)
        url = f"{self._scheme}://{self._name}"
        try:
            return obstore().store.from_url(
                url, config=config, client_options=options, retry_config=retries, credential_provider=provider
            )
        except (obstore().exceptions.BaseError, ValueError, OSError):
            pass  # it may repeat a setting
        raise RemoteError(f"the settings for {url} cannot be used: check the variables AWS_..., GOOGLE_... or AZURE_...")

    def call(self, action: str, place: str, request: Callable[[], Result], *, tries_again: bool = True) -> Result:
        """Return what a request to obstore returns; it is tried again while that may help, if it ``tries_again``.

        There is a `FileNotFoundError` where there is no such object, a `ChangedError` where a condition does not hold, and
        a `RemoteError` for anything else. The ``action``, such as "read", and the place, an address, are for messages.
        """
        global _process_with_threads
        if _process_with_threads not in (None, os.getpid()):  # obstore would wait for ever for its threads
            raise RemoteError(
                f"process {os.getpid()} was forked from one that has used an object store, and has not the threads which "
                'that takes; start processes by "spawn" or "forkserver"'
            )
        _process_with_threads = os.getpid()
        exceptions = obstore().exceptions
        begun, pause, was_sent = time.monotonic(), _FIRST_PAUSE * self._patience.retry, False
        while True:
            try:
                result = request()
            except RemoteError:  # of settings that cannot be used
                raise
            except (exceptions.BaseError, OSError) as error:  # which goes no further, as it has all of a request
                trouble = trouble_of(error)
                is_missing = isinstance(error, FileNotFoundError) and _status_of(error)[1] not in _BUCKET_CODES
                is_condition = isinstance(error, (exceptions.AlreadyExistsError, exceptions.PreconditionError))
            else:
                self._has_answered = True
                return result
            self._has_answered = self._has_answered or not trouble.is_silent
            if is_missing:
                raise FileNotFoundError(f"there is no {place}")
            if is_condition and not trouble.heals and not trouble.remedy:  # obstore takes more for a condition
                changed = ChangedError(f"{place} was written by somebody else")
                changed.is_certain = not was_sent
                raise changed
            was_sent = was_sent or not trouble.is_silent
            seconds = time.monotonic() - begun
            retry, start, *_ = self._patience
            left = (retry if self._has_answered else min(start, retry)) - seconds
            if not (tries_again and trouble.heals) or left <= 0:
                after = f" after {seconds:.0f} s" if seconds >= 1 else ""
                raise RemoteError(f"{place} cannot be {action}{after}: {trouble}")
            time.sleep(min(pause * _random_pauses.uniform(0.5, 1), left))
            pause = min(2 * pause, _LONGEST_PAUSE * retry)


def obstore() -> Any:
    """Return the package, which is only imported when a store is used."""
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ImportError("object stores need obstore: pip install 'chainring[remote]'") from error
    return obstore


@functools.cache
def _memory(name: str) -> Any:
    """Return the store of a name, which exists in the memory of this process alone."""
    return obstore().store.MemoryStore()


def _credentials() -> tuple[dict[str, Any], Any]:
    """Return settings, and what asks for the keys of a profile: obstore finds all others itself."""
    if any(os.environ.get(name) for name in _HANDLED_BY_OBSTORE):
        return {}, None
    try:
        import botocore.exceptions
        import botocore.session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        profile = next(filter(os.environ.get, _PROFILES), None)
        if profile:
            raise ImportError(f"{profile} is set, and profiles need boto3: pip install 'chainring[remote]'") from None
        return {}, None
    try:
        session = botocore.session.Session()
        settings = {
            "region": session.get_config_variable("region"),
            "endpoint": session.get_scoped_config().get("endpoint_url"),
        }
        given = {"region": _REGIONS, "endpoint": _ENDPOINTS}
        config = {key: value for key, value in settings.items() if value and not any(map(os.environ.get, given[key]))}
        if session.get_credentials() is None:
            return config, None
        provider = Boto3CredentialProvider(session, ttl=_KEYS_LAST)
        provider()  # asks whoever gives them for the first time
        return config, provider
    except (botocore.exceptions.BotoCoreError, OSError) as error:
        failure = type(error).__name__  # which alone is told
    raise RemoteError(f"credentials cannot be had from the profiles of AWS ({failure}); check AWS_PROFILE and ~/.aws")


class Trouble(NamedTuple):
    """What a failed request came to."""

    said: str
    remedy: str = ""
    heals: bool = False  # another try may succeed
    is_silent: bool = False  # the request has not reached the store

    def __str__(self) -> str:
        return f"{self.said}; {self.remedy}" if self.remedy else self.said


_ACCOUNT = "check the credentials: the variables AWS_..., GOOGLE_... or AZURE_..., a profile, or the machine's role"
_PERMISSION = (
    "the credentials need permission to read, write, list and delete objects there, and to abort uploads; "
    "a store also answers so for an object that is not there if they may not list"
)
_MISSING_BUCKET = "there is no bucket of that name: create it, or correct the address"
_REGION = "the bucket is in another region: set AWS_REGION to that"
_ENDPOINT = "check the network and, for your own store, the address in AWS_ENDPOINT_URL"
_CODES = {  # of the store, in the body of its answer
    "NoSuchBucket": _MISSING_BUCKET,
    "ContainerNotFound": _MISSING_BUCKET,
    "InvalidBucketName": "correct the address",
    "AccessDenied": _PERMISSION,
    "AuthorizationFailure": _PERMISSION,
    "AuthorizationPermissionMismatch": _PERMISSION,
    "InvalidAccessKeyId": _ACCOUNT,
    "SignatureDoesNotMatch": _ACCOUNT,
    "AuthenticationFailed": _ACCOUNT,
    "InvalidToken": _ACCOUNT,
    "ExpiredToken": "the credentials have expired: renew them",
    "RequestTimeTooSkewed": "set this machine's clock",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
}
_BUCKET_CODES = ("NoSuchBucket", "ContainerNotFound")
_HEALING = (408, 429, 500, 502, 503, 504)
_HEALING_CODES = ("RequestTimeout", "ConditionalRequestConflict", "OperationAborted", "SlowDown", "InternalError")
NOT_OF_A_STORE = "the answer is not that of a store"
_SILENCE = [  # by what stands in an error that has no answer of the store
    (NOT_OF_A_STORE, Trouble(NOT_OF_A_STORE, f"something on the way to it has answered: {_ENDPOINT}", heals=True)),
    ("dns error", Trouble("the name of the store is not known", _ENDPOINT, heals=True, is_silent=True)),
    ("ConnectionRefused", Trouble("nothing answers at the address of the store", _ENDPOINT, heals=True, is_silent=True)),
    ("BadScheme|InvalidContentType|ertificate", Trouble("the store does not speak TLS as it must", _ENDPOINT)),
    ("NotSupported|not supported|NotImplemented", Trouble("the store is set not to do this", "unset AWS_CONDITIONAL_PUT")),
    ("[Tt]imed ?[Oo]ut|Timeout", Trouble("the store has not answered in time", _ENDPOINT, heals=True)),
    ("Http|reqwest|HTTP", Trouble("the connection to the store broke or stood still", _ENDPOINT, heals=True)),
]


def _status_of(error: BaseException) -> tuple[int | None, str]:
    """Return the status and the code with which a store has refused, as far as it has."""
    text = str(error).partition("\nDebug source")[0]
    status = re.search(r"status code: (\d{3})\b", text)
    code = re.search(r"<Code>([A-Za-z]{1,60})</Code>", text)
    return int(status[1]) if status else None, code[1] if code else ""


def trouble_of(error: BaseException) -> Trouble:
    """Return what an error of obstore's comes to."""
    text = str(error)
    status, code = _status_of(error)
    if re.search(
        r"169\.254\.|/latest/(api|meta-data)|/computeMetadata/|token request|[Cc]redential provider|TokenRequest", text
    ):
        return Trouble("no credentials were found", _ACCOUNT, heals=True, is_silent=True)
    if "incorrectly configured region" in text or status in (301, 307, 308):
        return Trouble("the store says that the bucket is elsewhere", _REGION)
    if status:
        name = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
        said = f"the store answers {status} {name}".rstrip() + (f" ({code})" if code and code not in name else "")
        remedy = _CODES.get(code) or {401: _ACCOUNT, 403: _PERMISSION}.get(status, "")
        return Trouble(said, remedy, heals=status in _HEALING or code in _HEALING_CODES)
    if "<Code>" in text or "Server returned error response" in text:  # in an answer with status 200
        return Trouble(f"the store says {code or 'that it failed'}", _CODES.get(code, ""), heals=True)
    trouble = next((trouble for pattern, trouble in _SILENCE if re.search(pattern, text)), Trouble("obstore failed"))
    was_never_sent = trouble.heals and "kind: Connect," in text
    return Trouble(trouble.said, trouble.remedy, trouble.heals, is_silent=trouble.is_silent or was_never_sent)
