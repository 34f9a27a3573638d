"""What goes wrong with a store, said in a line with a remedy, and without what a request carried.

obstore's messages repeat the address of a request, which may be signed, and the store's answer, which may have credentials
in it. Of them only the status, the store's code for it and the kind of a broken connection are taken.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import NamedTuple


class RemoteError(OSError):
    """The store does not answer, or refuses."""


class ChangedError(RemoteError):
    """An object is not in the state in which it was expected: somebody else has written it.

    Attributes:
        is_certain: False if an earlier try of the same request may have written it, of which no answer came.
    """

    is_certain = True


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
