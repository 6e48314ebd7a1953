"""Credentials that may end under way: renewed in time, tried once more with new ones, and described for diagnostics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Generic, Protocol, TypeVar, runtime_checkable

from stoker.errors import CredentialsError, StoreError

__all__ = [
    "ExpiredCredentialsError",
    "Credentials",
    "RenewedCredentials",
    "Endpoint",
    "Identity",
    "Introduced",
    "parse_date",
]

_C = TypeVar("_C")
_T = TypeVar("_T")

_AGAIN_SECONDS = 10.0  # between two attempts to renew credentials that last
_SLACK_SECONDS = 10.0  # credentials are not used this close to their end: clocks differ, and requests take time

_log = logging.getLogger("stoker.store.renewal")


class ExpiredCredentialsError(CredentialsError):
    """Credentials have expired; others may be had where these came from."""


class Credentials(Protocol[_C]):
    """Where credentials come from."""

    async def current(self) -> _C:
        """Return credentials, refreshed if they say themselves that they are about to expire.

        Raises:
            CredentialsError: there are none.
        """
        ...

    async def renew(self, used: _C) -> _C:
        """Look afresh, unless that was done since ``used`` were taken; return ``used`` if there are no others."""
        ...

    async def identity(self) -> Identity:
        """Return whose they are.

        Raises:
            CredentialsError: there are none.
        """
        ...


class RenewedCredentials(Generic[_T]):
    """Credentials that are renewed before their end; where that fails, they are used while they last.

    Lives in one event loop. While one call renews them, the others use those that last.

    Args:
        fetch: returns credentials, new ones if it can, and their life in seconds.
        margin_seconds: time before their end from which on they are renewed.
    """

    def __init__(self, fetch: Callable[[], Awaitable[tuple[_T, float]]], *, margin_seconds: float) -> None:
        self._fetch, self._margin_seconds = fetch, margin_seconds
        self._lock = asyncio.Lock()
        self._held: _T | None = None
        self._renew_at_seconds = self._ends_at_seconds = 0.0
        self.were_fetched = False

    @property
    def life_seconds(self) -> float:
        """How long the credentials may still be used; 0 if there are none."""
        return max(0.0, self._ends_at_seconds - asyncio.get_running_loop().time())

    async def get(self) -> _T:
        """Return credentials that have not ended.

        Raises:
            StoreError: there are none, and none can be had.
        """
        held = self._held
        if held is not None and (self._are_fresh() or (self._lock.locked() and self.life_seconds > 0)):
            return held
        async with self._lock:
            if self._held is None or not self._are_fresh():
                self._held = await self._renewed(self._held)
            return self._held

    def drop(self, used: _T) -> None:
        """Use credentials no more, since they were refused; nothing if there are others by now."""
        if used == self._held:
            self._held = None
            self._ends_at_seconds = 0.0

    def _are_fresh(self) -> bool:
        return asyncio.get_running_loop().time() < self._renew_at_seconds

    async def _renewed(self, held: _T | None) -> _T:
        loop = asyncio.get_running_loop()
        try:
            found, life_seconds = await self._fetch()
        except StoreError as error:
            if held is None or self.life_seconds <= 0:
                raise
            _log.warning("credentials could not be renewed, those in use last %.0f s: %s", self.life_seconds, error)
            self._renew_at_seconds = loop.time() + min(_AGAIN_SECONDS, self.life_seconds)
            return held
        self.were_fetched = True
        self._ends_at_seconds = loop.time() + life_seconds - _SLACK_SECONDS
        fresh_seconds = life_seconds - self._margin_seconds
        if found == held:  # there are no others yet
            fresh_seconds = max(fresh_seconds, min(_AGAIN_SECONDS, self.life_seconds))
        self._renew_at_seconds = loop.time() + fresh_seconds
        return found


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
