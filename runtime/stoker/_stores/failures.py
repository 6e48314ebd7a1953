"""From a refusal over HTTP to a typed error that names the object, what happened and the remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeAlias

from stoker._base.fields import printable
from stoker._stores.credentials import parse_date
from stoker.errors import (
    CredentialsError,
    DeadlineError,
    NotFoundError,
    ObjectChangedError,
    PermissionDeniedError,
    PreconditionFailedError,
    RangeBeyondEndError,
    ServerError,
    StoreError,
    ThrottledError,
    TransientError,
)

__all__ = ["Failure", "Rule", "error_of", "retry_after_seconds"]

Rule: TypeAlias = tuple[type[StoreError], str]

_CHANGED: Rule = (ObjectChangedError, "the object was overwritten since the manifest pinned it")
_LOST: Rule = (PreconditionFailedError, "it was written by somebody else; read it again and decide")
_UNSUPPORTED: Rule = (StoreError, "the store cannot do this")
_SERVER: Rule = (ServerError, "the store failed inside; try again")
_THROTTLED: Rule = (ThrottledError, "the store asks to slow down; send fewer requests at once")

_BY_STATUS: dict[int, Rule] = {
    401: (CredentialsError, "the credentials are missing or not valid"),
    403: (PermissionDeniedError, "these credentials may not do this; ask the bucket's owner for permission"),
    404: (NotFoundError, "it does not exist"),
    408: (DeadlineError, "the store waited too long for the request; try again"),
    409: _LOST,
    412: _CHANGED,
    416: (RangeBeyondEndError, "the range begins beyond the object's end"),
    429: _THROTTLED,
    501: _UNSUPPORTED,
    503: _THROTTLED,
    505: _UNSUPPORTED,
}
"""Every other status from 500 on counts as 500: Cloudflare, and so R2, has 520 to 530, others 507 and 529."""
_UNKNOWN: Rule = (StoreError, "the store refused")
_MAX_TEXT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A refusal, as the store worded it.

    Attributes:
        address: of the object or bucket, for the message.
        status: of HTTP.
        code: the store's name for what happened, or empty.
        text: the store's explanation, or empty.
        region: where the store says that the bucket is, or empty.
        headers: of the answer; names in any case.
        writing: a precondition that failed is then a lost race, not a changed object.
    """

    address: str
    status: int
    code: str = ""
    text: str = ""
    region: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    writing: bool = False


def error_of(failure: Failure, by_code: Mapping[str, Rule]) -> StoreError:
    """Return the error for a failure: by the store's own code or status where ``by_code`` has it, else by status."""
    known = by_code.get(failure.code) or by_code.get(str(failure.status))
    kind, remedy = known or _BY_STATUS.get(failure.status, _SERVER if failure.status >= 500 else _UNKNOWN)
    if failure.writing and kind is ObjectChangedError:
        kind, remedy = _LOST
    code, text, region = (printable(said[:_MAX_TEXT]) for said in (failure.code, failure.text, failure.region))
    said = ": ".join(filter(None, (f"{failure.status} {code}".strip(), text)))
    message = f"{failure.address}: {remedy.format(region=region or '(not told)')} ({said})"
    if issubclass(kind, TransientError):
        return kind(message, retry_after_seconds=retry_after_seconds(failure.headers))
    return kind(message)


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Return how long a ``Retry-After`` header asks to wait, in seconds; None if there is none or it says nothing.

    A date counts from the answer's own ``Date``, so that this machine's clock does not matter.
    """
    said = {name.lower(): value for name, value in headers.items()}
    wanted = said.get("retry-after")
    if wanted is None:
        return None
    if re.fullmatch(r"[ \t]*[0-9]{1,9}[ \t]*", wanted):
        return float(wanted)
    until, now = parse_date(wanted), parse_date(said.get("date"))
    if until is None:
        return None
    return max(0.0, (until - (now or datetime.now(UTC))).total_seconds())
