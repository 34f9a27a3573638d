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
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from chainring._places.base import RemoteError

Result = TypeVar("Result")

_FIRST_PAUSE = 1 / 600  # of `Patience.retry`, before the second try; each is twice the one before
_LONGEST_PAUSE = 1 / 8
_PART_TRIES = 24  # of a part after the first, so that their pauses are `Patience.retry` together
_OWN_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
             "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE")  # fmt: skip
_PROFILES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_KEYS_LAST = timedelta(minutes=5)  # after which credentials are asked for again

_chance = random.Random()  # not the program's, whose state is that of its run
_user: int | None = None  # the process in which obstore's threads run


class ChangedError(RemoteError):
    """An object is not in the state in which it was expected: somebody else has written it.

    Attributes:
        is_certain: False if an earlier try of the same request may have written it, of which no answer came.
    """

    is_certain = True


class Patience(NamedTuple):
    """How many seconds a store is waited for."""

    retry: float = 60.0
    """A request that fails is tried again for so long."""
    start: float = 5.0
    """The same, while nothing has answered at all since the bucket was opened."""
    answer: float = 15.0
    """A request has failed when nothing has come for so long."""
    part: float = 180.0
    """A part of an upload has failed when it has taken so long."""


PATIENCE = Patience()


class Connection:
    """A way to one bucket.

    Args:
        scheme: ``s3``, ``gs``, ``az`` or ``memory``.
        name: the name of the bucket.
        patience: how long it waits.
    """

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
        try:
            return obstore().store.from_url(
                f"{self._scheme}://{self._name}",
                config=config,
                client_options=options,
                retry_config=retries,
                credential_provider=provider,
            )
        except (obstore().exceptions.BaseError, ValueError, OSError):
            pass  # it may repeat a setting
        settings = "the variables AWS_..., GOOGLE_... or AZURE_..."
        raise RemoteError(f"the settings for {self._scheme}://{self._name} cannot be used: check {settings}")

    def call(self, deed: str, place: str, request: Callable[[], Result], *, tries_again: bool = True) -> Result:
        """Return what a request returns; it is tried again while that may help.

        Args:
            deed: what is done to the place, such as "read", for messages.
            place: the address.
            request: calls obstore, and nothing else.
            tries_again: False if the request tries again itself, or cannot be repeated.

        Raises:
            FileNotFoundError: there is no such object.
            ChangedError: a condition does not hold.
            RemoteError: anything else.
        """
        _refuse_fork()
        begun, pause, was_sent = time.monotonic(), _FIRST_PAUSE * self._patience.retry, False
        while True:
            result, failure = self._attempt(place, request)
            if failure is None:
                return result  # type: ignore[return-value]
            if not isinstance(failure, Trouble):
                if isinstance(failure, ChangedError):
                    failure.is_certain = not was_sent
                raise failure
            was_sent = was_sent or not failure.is_silent
            waits = self._has_answered or not failure.is_silent
            seconds = time.monotonic() - begun
            left = (self._patience.retry if waits else min(self._patience.start, self._patience.retry)) - seconds
            if not (tries_again and failure.heals) or left <= 0:
                after = f" after {seconds:.0f} s" if seconds >= 1 else ""
                raise RemoteError(f"{place} cannot be {deed}{after}: {failure}")
            time.sleep(min(pause * _chance.uniform(0.5, 1), left))
            pause = min(2 * pause, _LONGEST_PAUSE * self._patience.retry)

    def _attempt(self, place: str, request: Callable[[], Result]) -> tuple[Result | None, Trouble | OSError | None]:
        """Return what a request returns, or what it came to: errors of obstore go no further, as they have all of it."""
        exceptions = obstore().exceptions
        try:
            result = request()
        except RemoteError:  # of settings that cannot be used
            raise
        except (exceptions.BaseError, OSError) as error:
            trouble = trouble_of(error)
            self._has_answered = self._has_answered or not trouble.is_silent
            if is_missing(error):
                return None, FileNotFoundError(f"there is no {place}")
            is_condition = isinstance(error, (exceptions.AlreadyExistsError, exceptions.PreconditionError))
            if is_condition and not trouble.heals and not trouble.remedy:  # obstore takes more for a condition
                return None, ChangedError(f"{place} was written by somebody else")
            return None, trouble
        self._has_answered = True
        return result, None


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
    """Return the one of a name in this process, which exists nowhere else."""
    return obstore().store.MemoryStore()


def _refuse_fork() -> None:
    """Raise in a process that was forked from one that has used a store: obstore would wait for ever for its threads."""
    global _user
    if _user not in (None, os.getpid()):
        raise RemoteError(
            f"process {os.getpid()} was forked from one that has used an object store, and has not the threads which that "
            'takes; start processes by "spawn" or "forkserver"'
        )
    _user = os.getpid()


def _credentials() -> tuple[dict[str, Any], Callable[[], dict[str, Any]] | None]:
    """Return settings, and what asks for the keys of a profile: obstore finds all others itself."""
    if any(os.environ.get(name) for name in _OWN_KEYS):
        return {}, None
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError:
        profile = next(filter(os.environ.get, _PROFILES), None)
        if profile:
            raise ImportError(f"{profile} is set, and profiles need boto3: pip install 'chainring[remote]'") from None
        return {}, None
    failure = ""
    try:
        session = botocore.session.Session()
        settings = {
            "region": session.get_config_variable("region"),
            "endpoint": session.get_scoped_config().get("endpoint_url"),
        }
        given = {"region": _REGIONS, "endpoint": _ENDPOINTS}
        config = {key: value for key, value in settings.items() if value and not any(map(os.environ.get, given[key]))}
        keys = session.get_credentials()
        if keys is None:
            return config, None
        _frozen(keys)  # asks whoever gives them for the first time
        return config, functools.partial(_frozen, keys)
    except (botocore.exceptions.BotoCoreError, OSError) as error:
        failure = type(error).__name__
    raise RemoteError(f"credentials cannot be had from the profiles of AWS ({failure}); check AWS_PROFILE and ~/.aws")


def _frozen(keys: Any) -> dict[str, Any]:
    """Return keys as obstore takes them; it asks again when they may have expired."""
    found = keys.get_frozen_credentials()
    return {
        "access_key_id": found.access_key,
        "secret_access_key": found.secret_key,
        "token": found.token,
        "expires_at": datetime.now(UTC) + _KEYS_LAST,
    }


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


def status_of(error: BaseException) -> tuple[int | None, str]:
    """Return the status and the code with which a store has refused, as far as it has."""
    text = str(error).partition("\nDebug source")[0]
    status = re.search(r"status code: (\d{3})\b", text)
    code = re.search(r"<Code>([A-Za-z]{1,60})</Code>", text)
    return int(status[1]) if status else None, code[1] if code else ""


def is_missing(error: BaseException) -> bool:
    """Return whether an object is not there, in a bucket that may be there."""
    return isinstance(error, FileNotFoundError) and status_of(error)[1] not in _BUCKET_CODES


def trouble_of(error: BaseException) -> Trouble:
    """Return what an error of obstore's comes to."""
    text = str(error)
    status, code = status_of(error)
    if re.search(
        r"169\.254\.|/latest/(api|meta-data)|/computeMetadata/|token request|[Cc]redential provider|TokenRequest", text
    ):
        return Trouble("no credentials were found", _ACCOUNT, heals=True, is_silent=True)
    if "incorrectly configured region" in text or status in (301, 307, 308):
        return Trouble("the store says that the bucket is elsewhere", _REGION)
    if status:
        return _refusal(status, code)
    if "<Code>" in text or "Server returned error response" in text:  # in an answer with status 200
        return Trouble(f"the store says {code or 'that it failed'}", _CODES.get(code, ""), heals=True)
    return _silence(text)


def _refusal(status: int, code: str) -> Trouble:
    name = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
    said = f"the store answers {status} {name}".rstrip() + (f" ({code})" if code and code not in name else "")
    remedy = _CODES.get(code) or {401: _ACCOUNT, 403: _PERMISSION}.get(status, "")
    return Trouble(said, remedy, heals=status in _HEALING or code in _HEALING_CODES)


def _silence(text: str) -> Trouble:
    never_sent = "kind: Connect," in text
    if "dns error" in text:
        return Trouble("the name of the store is not known", _ENDPOINT, heals=True, is_silent=True)
    if "ConnectionRefused" in text:
        return Trouble("nothing answers at the address of the store", _ENDPOINT, heals=True, is_silent=True)
    if "BadScheme" in text or "InvalidContentType" in text or "ertificate" in text:
        return Trouble("the store does not speak TLS as it must", _ENDPOINT)
    if "NotSupported" in text or "not supported" in text or "NotImplemented" in text:
        return Trouble("the store is set not to do this", "unset AWS_CONDITIONAL_PUT")
    if re.search(r"[Tt]imed ?[Oo]ut|Timeout", text):
        return Trouble("the store has not answered in time", _ENDPOINT, heals=True, is_silent=never_sent)
    if "Http" in text or "reqwest" in text or "HTTP" in text:
        return Trouble("the connection to the store broke or stood still", _ENDPOINT, heals=True, is_silent=never_sent)
    return Trouble("obstore failed")
