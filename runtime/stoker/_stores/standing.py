"""What a bucket says of itself, and whom it takes us for: for those who look for what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol, runtime_checkable

__all__ = ["Endpoint", "Identity", "Introduced", "parse_date"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose credentials requests carry; nothing of it is secret.

    Attributes:
        kind: where they come from.
        expires: when they end, None if they do not or nobody knows.
        is_renewed: whether they are renewed by themselves before that.
    """

    kind: str
    expires: datetime | None = None
    is_renewed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a bucket answers.

    Attributes:
        address: its URL, without credentials.
        asked_region: that requests are signed for; empty where regions do not matter.
        region: that it says it lives in; empty if it does not say.
        date: what it takes the time to be, to the second; None if it does not say.
    """

    address: str
    asked_region: str = ""
    region: str = ""
    date: datetime | None = None


@runtime_checkable
class Introduced(Protocol):
    """A store that can tell; nothing is read or written for it."""

    async def identity(self) -> Identity:
        """Return whose credentials are used, renewed first if they are about to expire.

        Raises:
            CredentialsError: there are none.
        """
        ...

    async def endpoint(self) -> Endpoint:
        """Return what the bucket's address answers to whoever asks.

        Raises:
            StoreError: it does not answer.
        """
        ...


def parse_date(header: str | None) -> datetime | None:
    """Return the time in a ``Date`` header, None if there is none or it is not one; HTTP's dates are in UTC."""
    try:
        found = parsedate_to_datetime(header) if header else None
    except (ValueError, OverflowError):
        return None
    return found.replace(tzinfo=UTC) if found and found.tzinfo is None else found
