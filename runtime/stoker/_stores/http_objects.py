"""Objects over HTTP: what S3, Google Cloud Storage and served data sets share.

Credentials are renewed before their end, and described for diagnostics; where they expired under way, they are renewed
and the request is sent once more. Every request takes the same way, and a listing goes on from page to page.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from stoker._base.threads import PerLoop
from stoker._stores.http import Call, Destination, HttpReader, Reply
from stoker._stores.location import Location, check_found
from stoker._stores.object_store import ObjectStore
from stoker.abc import ObjectInfo
from stoker.errors import CredentialsError, StoreError, UnexpectedAnswerError

_C = TypeVar("_C")

_AGAIN_SECONDS = 10.0  # between two attempts to renew credentials that last
_SLACK_SECONDS = 10.0  # credentials are not used this close to their end: clocks differ, and requests take time

_log = logging.getLogger("stoker.store.renewal")


class ExpiredCredentialsError(CredentialsError):
    """Credentials have expired; others may be had where these came from."""


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


class Credentials(Protocol[_C]):
    """Where credentials come from."""

    async def current(self) -> _C:
        """Return credentials, refreshed if they say themselves that they are about to expire.

        Raises:
            CredentialsError: there are none, or they were refused.
            TransientError: where they come from failed, and there are none that last.
        """
        ...

    async def renew(self, used: _C) -> _C:
        """Look afresh, unless that was done since ``used`` were taken; return ``used`` if there are no others."""
        ...

    async def identity(self) -> Identity:
        """Return whose they are; raises as :meth:`current` does."""
        ...


class ReadyCredentials(Generic[_C]):
    """Credentials that are given and stay, or none."""

    def __init__(self, given: _C, kind: str, expires: datetime | None = None) -> None:
        self._given = given
        self._identity = Identity(kind=kind, expires=expires)

    async def current(self) -> _C:
        """Return what was given."""
        return self._given

    async def renew(self, used: _C) -> _C:
        """Return the same: there are no others."""
        return used

    async def identity(self) -> Identity:
        """Return whose they are."""
        return self._identity


class RenewedCredentials(ABC, Generic[_C]):
    """Credentials that are renewed before their end; where that fails, they are used while they last.

    Lives in one event loop. While one call renews them, the others use those that last.

    Attributes:
        margin_seconds: time before their end from which on they are renewed.
    """

    margin_seconds: ClassVar[float]

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._held: _C | None = None
        self._renew_at_seconds = self._ends_at_seconds = 0.0
        self.were_fetched = False

    @abstractmethod
    async def fetch(self) -> tuple[_C, float]:
        """Return credentials, new ones if they can be had, and their life in seconds."""

    @abstractmethod
    async def identity(self) -> Identity:
        """Return whose they are."""

    @property
    def life_seconds(self) -> float:
        """How long the credentials may still be used; 0 if there are none."""
        return max(0.0, self._ends_at_seconds - asyncio.get_running_loop().time())

    async def current(self) -> _C:
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

    async def renew(self, used: _C) -> _C:
        """Return others than were used, unless there are others by now."""
        self.drop(used)
        return await self.current()

    def drop(self, used: _C) -> None:
        """Use credentials no more, since they were refused; nothing if there are others by now."""
        if used == self._held:
            self._held = None
            self._ends_at_seconds = 0.0

    def _are_fresh(self) -> bool:
        return asyncio.get_running_loop().time() < self._renew_at_seconds

    async def _renewed(self, held: _C | None) -> _C:
        loop = asyncio.get_running_loop()
        try:
            found, life_seconds = await self.fetch()
        except StoreError as error:
            if held is None or self.life_seconds <= 0:
                raise
            _log.warning("credentials could not be renewed, those in use last %.0f s: %s", self.life_seconds, error)
            self._renew_at_seconds = loop.time() + min(_AGAIN_SECONDS, self.life_seconds)
            return held
        self.were_fetched = True
        self._ends_at_seconds = loop.time() + life_seconds - _SLACK_SECONDS
        fresh_seconds = life_seconds - self.margin_seconds
        if found == held:  # there are no others yet
            fresh_seconds = max(fresh_seconds, min(_AGAIN_SECONDS, self.life_seconds))
        self._renew_at_seconds = loop.time() + fresh_seconds
        return found


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


class Access(Protocol):
    """Connections and credentials of one store in one event loop."""

    @property
    def credentials(self) -> Credentials[Any]:
        """Whose requests these are."""
        ...

    @property
    def reader(self) -> HttpReader:
        """What performs reads."""
        ...

    @property
    def writer(self) -> HttpReader:
        """What performs all else."""
        ...

    async def endpoint(self) -> Endpoint:
        """Return what the bucket's address answers to whoever asks.

        Raises:
            StoreError: it does not answer.
        """
        ...

    def call(self, asked: Asked, place: str, proof: Any, address: str) -> Call:
        """Return a request with the proof of who asks.

        Args:
            asked: what for.
            place: the key within the bucket, empty for the bucket; or the path that ``asked`` has.
            proof: the credentials in use.
            address: of what is asked for, for messages.
        """
        ...

    async def close(self) -> None:
        """Close the connections; those of calls in progress break."""
        ...


_A = TypeVar("_A", bound=Access)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of an object, or of the bucket.

    Attributes:
        method: of HTTP.
        key: relative to the store's root; None for the bucket.
        range: as the header has it; empty for the whole object.
        tag: that the object must have; None for any.
        is_new: whether there must be no such object.
        body: to write; None to write nothing.
        query: parameters of the URL, if it has any.
        path: where it is served, with its parameters, if the key does not tell.
    """

    method: str
    key: str | None
    range: str = ""
    tag: str | None = None
    is_new: bool = False
    body: bytes | None = None
    query: Mapping[str, str] | None = None
    path: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The header of the range."""
        return {"Range": self.range} if self.range else {}

    @property
    def only_reads(self) -> bool:
        """Whether it leaves the bucket as it is."""
        return self.method in ("GET", "HEAD")


class HttpObjects(ObjectStore, Generic[_A]):
    """A store whose objects are read over HTTP; a cancelled read closes its connection.

    Connections are made on first use, one pool per event loop; no fork shares them.

    Args:
        location: of the store.
        access: makes connections and credentials for the running loop.
    """

    def __init__(self, location: Location, access: Callable[[], _A]) -> None:
        super().__init__(location.url)
        self._at = location
        self._access = PerLoop(access)

    async def identity(self) -> Identity:
        """Return whose credentials are used, renewed first if they are about to expire.

        Raises:
            CredentialsError: there are none.
        """
        return await self._access.get().credentials.identity()

    async def endpoint(self) -> Endpoint:
        """Return what the bucket's address answers to whoever asks; nothing is read or written for it.

        Raises:
            StoreError: it does not answer.
        """
        return await self._access.get().endpoint()

    async def close(self) -> None:
        """Close the running loop's connections."""
        if (access := self._access.take()) is not None:
            await access.close()

    async def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        reply = await self._ask(Asked("GET", key))
        return reply.body, self._info(key, reply) or await self._head(key)

    async def _get_range(
        self, key: str, start: int, end: int, into: memoryview, tag: str | None, begun: Callable[[], None] | None
    ) -> ObjectInfo:
        if start == end:
            return check_found(self._at.object_url(key), await self._head(key), start, end, tag)
        asked = Asked("GET", key, f"bytes={start}-{end - 1}", tag)
        reply = await self._ask(asked, Destination(into, start, end, begun))
        return self._info(key, reply) or await self._head(key)

    async def _ask(self, asked: Asked, destination: Destination | None = None) -> Reply:
        """Send a request, once more if the credentials had to be renewed.

        Raises:
            StoreError: it was refused, or there was no answer.
        """
        access, address, place = self._access.get(), self.url, asked.path
        if asked.key is not None:
            address, place = self._at.object_url(asked.key), place or self._at.full_key(asked.key)
        used, is_renewed = await access.credentials.current(), False
        while True:
            carrier = access.reader if asked.only_reads else access.writer
            reply = await carrier.read(access.call(asked, place, used, address), destination)
            if not reply.refused or (not asked.only_reads and 200 <= reply.status < 300):
                return reply
            error = await self._refusal(access, asked, used, address, reply)
            if is_renewed or not isinstance(error, ExpiredCredentialsError):
                raise error
            renewed, is_renewed = await access.credentials.renew(used), True
            if renewed == used:
                raise error
            used = renewed

    @abstractmethod
    async def _refusal(self, access: _A, asked: Asked, proof: Any, address: str, reply: Reply) -> StoreError:
        """Return the error for a refusal."""

    @abstractmethod
    def _info(self, key: str, reply: Reply) -> ObjectInfo | None:
        """Return what an answer says of an object; None if it leaves out the tag, so that it must be asked for.

        Raises:
            UnexpectedAnswerError: it leaves out what it must say.
        """


class BucketObjects(HttpObjects[_A]):
    """A bucket, whose listings come in pages.

    Attributes:
        nonsense: what to say of an answer that cannot be understood.
    """

    nonsense = "the answer makes no sense"

    async def _list(self, prefix: str, start_after: str) -> AsyncGenerator[ObjectInfo, None]:
        first, after = self._at.within_bucket(prefix), self._at.within_bucket(start_after) if start_after else ""
        token = ""
        while True:
            infos, following = await self._page(first, after, token)
            for info in infos:  # a bucket may list the key itself after which it is to list
                if info.key.encode() > start_after.encode():
                    yield info
            if not following:
                return
            if following == token:  # this would go on for ever
                raise UnexpectedAnswerError(f"{self.url}: {self.nonsense}")
            token = following

    @abstractmethod
    async def _page(self, prefix: str, after: str, token: str) -> tuple[list[ObjectInfo], str]:
        """Return a page of a listing and the token of the next one, empty if there is none.

        Args:
            prefix: that keys in the bucket begin with.
            after: key in the bucket after which the listing begins; empty for the first.
            token: of the page; empty for the first.
        """
