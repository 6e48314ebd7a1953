"""Base classes of the stores over HTTP: S3, Google Cloud Storage and served data sets.

Credentials are renewed before they expire, and described for diagnostics. If they expire during a request, they are
renewed and the request is sent once more. Listings are read page by page.
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
from stoker._stores.http import Destination, HttpRequest, HttpResponse, HttpTransport
from stoker._stores.location import Location, check_tag_and_range
from stoker._stores.object_store import ObjectStore
from stoker.abc import ObjectInfo
from stoker.errors import CredentialsError, StoreError, UnexpectedAnswerError

_C = TypeVar("_C")

_RENEWAL_PAUSE_SECONDS = 10.0  # pause between two attempts to renew credentials that are still valid
_EXPIRY_MARGIN_SECONDS = 10.0  # credentials are not used this close to expiry: clocks differ, and requests take time

_log = logging.getLogger("stoker.store.renewal")


class ExpiredCredentialsError(CredentialsError):
    """Credentials have expired; their source may have new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialsInfo:
    """The credentials in use, for diagnostics; holds no secrets.

    Attributes:
        kind: Source of the credentials.
        expires: Time of expiry; None if there is none, or it is unknown.
        is_renewed: Whether the credentials are renewed automatically before that.
    """

    kind: str
    expires: datetime | None = None
    is_renewed: bool = False


class CredentialsSource(Protocol[_C]):
    """A source of credentials."""

    async def current(self) -> _C:
        """Return valid credentials, renewed if they are about to expire.

        Raises:
            CredentialsError: There are no credentials, or they were refused.
            TransientError: The source failed, and there are no valid credentials.
        """
        ...

    async def renew(self, used: _C) -> _C:
        """Fetch credentials anew, unless that was done after ``used`` were; return ``used`` if there are no others."""
        ...

    async def describe(self) -> CredentialsInfo:
        """Describe the credentials; raises like :meth:`current`."""
        ...


class StaticCredentials(Generic[_C]):
    """Fixed credentials, or none."""

    def __init__(self, credentials: _C, kind: str, expires: datetime | None = None) -> None:
        self._credentials = credentials
        self._info = CredentialsInfo(kind=kind, expires=expires)

    async def current(self) -> _C:
        """Return the fixed credentials."""
        return self._credentials

    async def renew(self, used: _C) -> _C:
        """Return the same credentials: there are no others."""
        return used

    async def describe(self) -> CredentialsInfo:
        """Describe the credentials."""
        return self._info


class RenewableCredentials(ABC, Generic[_C]):
    """Credentials that are renewed before they expire; if that fails, they are used as long as they are valid.

    Used by one event loop. While one call renews them, other calls use the old ones as long as they are valid.

    Attributes:
        margin_seconds: Time before expiry at which renewal starts.
    """

    margin_seconds: ClassVar[float]

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._current: _C | None = None
        self._renew_at_seconds = self._expires_at_seconds = 0.0
        self.were_fetched = False

    @abstractmethod
    async def fetch(self) -> tuple[_C, float]:
        """Return credentials, new ones if possible, and their remaining life in seconds."""

    @abstractmethod
    async def describe(self) -> CredentialsInfo:
        """Describe the credentials."""

    @property
    def life_seconds(self) -> float:
        """Remaining time that the credentials may be used, in seconds; 0 if there are none."""
        return max(0.0, self._expires_at_seconds - asyncio.get_running_loop().time())

    async def current(self) -> _C:
        """Return valid credentials.

        Raises:
            StoreError: There are none, and fetching new ones failed.
        """
        held = self._current
        if held is not None and (self._are_fresh() or (self._lock.locked() and self.life_seconds > 0)):
            return held
        async with self._lock:
            if self._current is None or not self._are_fresh():
                self._current = await self._fetch_or_keep(self._current)
            return self._current

    async def renew(self, used: _C) -> _C:
        """Return other credentials than ``used``, fetched anew unless that has happened meanwhile."""
        self.discard(used)
        return await self.current()

    def discard(self, used: _C) -> None:
        """Discard credentials that were refused; does nothing if they were replaced meanwhile."""
        if used == self._current:
            self._current = None
            self._expires_at_seconds = 0.0

    def _are_fresh(self) -> bool:
        return asyncio.get_running_loop().time() < self._renew_at_seconds

    async def _fetch_or_keep(self, held: _C | None) -> _C:
        loop = asyncio.get_running_loop()
        try:
            credentials, life_seconds = await self.fetch()
        except StoreError as error:
            if held is None or self.life_seconds <= 0:
                raise
            _log.warning("credentials could not be renewed; the old ones last %.0f s: %s", self.life_seconds, error)
            self._renew_at_seconds = loop.time() + min(_RENEWAL_PAUSE_SECONDS, self.life_seconds)
            return held
        self.were_fetched = True
        self._expires_at_seconds = loop.time() + life_seconds - _EXPIRY_MARGIN_SECONDS
        fresh_seconds = life_seconds - self.margin_seconds
        if credentials == held:  # the source has no new ones yet
            fresh_seconds = max(fresh_seconds, min(_RENEWAL_PAUSE_SECONDS, self.life_seconds))
        self._renew_at_seconds = loop.time() + fresh_seconds
        return credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointInfo:
    """The endpoint of a bucket, for diagnostics.

    Attributes:
        address: URL, without credentials.
        signing_region: Region that requests are signed for; empty if regions do not matter.
        region: Region that the bucket reports; empty if it reports none.
        date: Time of the bucket's clock, to the second; None if it reports none.
    """

    address: str
    signing_region: str = ""
    region: str = ""
    date: datetime | None = None


class StoreClient(Protocol):
    """Connections and credentials of one store in one event loop."""

    @property
    def credentials(self) -> CredentialsSource[Any]:
        """Source of the credentials."""
        ...

    @property
    def reader(self) -> HttpTransport:
        """Transport of reads."""
        ...

    @property
    def writer(self) -> HttpTransport:
        """Transport of all other requests."""
        ...

    async def describe_endpoint(self) -> EndpointInfo:
        """Return region and clock of the bucket's endpoint, which it reports even without credentials.

        Raises:
            StoreError: The endpoint does not respond.
        """
        ...

    def create_request(self, operation: ObjectOperation, full_key: str, credentials: Any, address: str) -> HttpRequest:
        """Return a signed HTTP request.

        Args:
            operation: The operation on the object or bucket.
            full_key: Key within the bucket, empty for the bucket itself; or the path of ``operation``.
            credentials: Credentials to sign with.
            address: URL of the object or bucket, for messages.
        """
        ...

    async def close(self) -> None:
        """Close the connections; calls in progress fail."""
        ...


_A = TypeVar("_A", bound=StoreClient)


@dataclass(frozen=True, slots=True)
class ObjectOperation:
    """An operation on an object or on the bucket.

    Attributes:
        method: HTTP method.
        key: Key relative to the store's root; None for the bucket.
        range: Value of the header ``Range``; empty for the whole object.
        tag: Tag that the object must have; None for any.
        is_new: Whether the object must not exist yet.
        body: Data to write; None to write nothing.
        query: Query parameters of the URL; None for none.
        content_range: Value of the header ``Content-Range`` of a part of an upload; empty for none.
        path: Path of a served object with its parameters; empty if the key determines it.
    """

    method: str
    key: str | None
    range: str = ""
    tag: str | None = None
    is_new: bool = False
    body: bytes | None = None
    query: Mapping[str, str] | None = None
    path: str = ""
    content_range: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Header of the range, if there is one."""
        headers = {"Range": self.range, "Content-Range": self.content_range}
        return {name: value for name, value in headers.items() if value}

    @property
    def is_read(self) -> bool:
        """Whether the operation does not change the bucket."""
        return self.method in ("GET", "HEAD")


class HttpObjectStore(ObjectStore, Generic[_A]):
    """A store over HTTP; a cancelled read closes its connection.

    Each event loop has its own pool of connections, created at its first use and never shared with forked processes.

    Args:
        location: Location of the store.
        create_client: Creates the connections and credentials of the running loop.
    """

    def __init__(self, location: Location, create_client: Callable[[], _A]) -> None:
        super().__init__(location.url)
        self._location = location
        self._clients = PerLoop(create_client)

    async def describe_credentials(self) -> CredentialsInfo:
        """Describe the credentials in use, after renewing them if they are about to expire.

        Raises:
            CredentialsError: There are no credentials.
        """
        return await self._clients.get().credentials.describe()

    async def describe_endpoint(self) -> EndpointInfo:
        """Return region and clock that the bucket's endpoint reports; no object is read or written.

        Raises:
            StoreError: The endpoint does not respond.
        """
        return await self._clients.get().describe_endpoint()

    async def close(self) -> None:
        """Close the running loop's connections."""
        if (access := self._clients.pop()) is not None:
            await access.close()

    async def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        reply = await self._perform(ObjectOperation("GET", key))
        return reply.body, self._info(key, reply) or await self._head(key)

    async def _get_range(
        self, key: str, start: int, end: int, into: memoryview, tag: str | None, begun: Callable[[], None] | None
    ) -> ObjectInfo:
        if start == end:
            return check_tag_and_range(self._location.object_url(key), await self._head(key), start, end, tag)
        operation = ObjectOperation("GET", key, f"bytes={start}-{end - 1}", tag)
        reply = await self._perform(operation, Destination(into, start, end, begun))
        return self._info(key, reply) or await self._head(key)

    async def _perform(self, operation: ObjectOperation, destination: Destination | None = None) -> HttpResponse:
        """Send a request, and once more if the credentials had expired and were renewed.

        Raises:
            StoreError: The request was refused, or there was no response.
        """
        access, address, path = self._clients.get(), self.url, operation.path
        if operation.key is not None:
            address, path = self._location.object_url(operation.key), path or self._location.full_key(operation.key)
        used, is_renewed = await access.credentials.current(), False
        while True:
            carrier = access.reader if operation.is_read else access.writer
            reply = await carrier.send(access.create_request(operation, path, used, address), destination)
            is_part = bool(operation.content_range) and reply.status == 308  # of a resumable upload
            if not reply.is_error or is_part or (not operation.is_read and 200 <= reply.status < 300):
                return reply
            error = await self._response_error(access, operation, used, address, reply)
            if is_renewed or not isinstance(error, ExpiredCredentialsError):
                raise error
            renewed, is_renewed = await access.credentials.renew(used), True
            if renewed == used:
                raise error
            used = renewed

    @abstractmethod
    async def _response_error(
        self, access: _A, operation: ObjectOperation, proof: Any, address: str, reply: HttpResponse
    ) -> StoreError:
        """Return the error for an error response."""

    @abstractmethod
    def _info(self, key: str, reply: HttpResponse) -> ObjectInfo | None:
        """Return size and tag of an object from a response; None if it lacks the tag, so another request is needed.

        Raises:
            UnexpectedAnswerError: The response lacks a required header.
        """


class HttpBucketStore(HttpObjectStore[_A]):
    """A bucket, whose listings come in pages.

    Attributes:
        malformed_message: Message for a response that cannot be parsed.
    """

    malformed_message = "the response is malformed"

    async def _list(self, prefix: str, start_after: str) -> AsyncGenerator[ObjectInfo, None]:
        first = self._location.within_bucket(prefix)
        after = self._location.within_bucket(start_after) if start_after else ""
        token = ""
        while True:
            infos, following = await self._page(first, after, token)
            for info in infos:  # some buckets include the key that the listing starts after
                if info.key.encode() > start_after.encode():
                    yield info
            if not following:
                return
            if following == token:  # would repeat for ever
                raise UnexpectedAnswerError(f"{self.url}: {self.malformed_message}")
            token = following

    @abstractmethod
    async def _page(self, prefix: str, after: str, token: str) -> tuple[list[ObjectInfo], str]:
        """Return a page of a listing, and the token of the next page, empty if there is none.

        Args:
            prefix: Prefix of keys within the bucket.
            after: Key within the bucket after which the listing starts; empty for the first.
            token: Token of the page; empty for the first.
        """
