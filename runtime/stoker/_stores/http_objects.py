"""Objects over HTTP: what S3, Google Cloud Storage and served data sets share.

Ranges and tags become headers, credentials that expired under way are renewed and the request sent once more, a refusal
becomes a typed error, and a listing goes on from page to page.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from stoker._stores.credentials import Endpoint, ExpiredCredentialsError, Identity, Renewable
from stoker._stores.http import Call, Destination, HttpReader, Reply
from stoker._stores.location import Location, check_empty_range
from stoker._stores.network import PerLoop
from stoker._stores.object_store import ObjectStore
from stoker.abc import ObjectInfo
from stoker.errors import StoreError, UnexpectedAnswerError

__all__ = ["Asked", "BucketObjects", "HttpObjects", "said_in"]

_T = TypeVar("_T")


class Access(Protocol):
    """Connections and credentials of one store in one event loop."""

    async def identity(self) -> Identity:
        """Return whose credentials are used.

        Raises:
            CredentialsError: there are none.
        """
        ...

    async def endpoint(self) -> Endpoint:
        """Return what the address answers to whoever asks.

        Raises:
            StoreError: it does not answer.
        """
        ...

    async def close(self) -> None:
        """Close the connections; those of calls in progress break."""
        ...


class BucketAccess(Access, Renewable[Any], Protocol):
    """Connections to a bucket, whose requests are signed here."""

    @property
    def reader(self) -> HttpReader:
        """What performs reads."""
        ...


_A = TypeVar("_A", bound=Access)
_B = TypeVar("_B", bound=BucketAccess)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of an object.

    Attributes:
        method: of HTTP.
        key: relative to the store's root.
        range: as the header has it; empty for the whole object.
        tag: that the object must have; None for any.
    """

    method: str
    key: str
    range: str = ""
    tag: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The header of the range."""
        return {"Range": self.range} if self.range else {}


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
        """Return whose credentials are used."""
        return await self._access.get().identity()

    async def endpoint(self) -> Endpoint:
        """Return what the bucket's address answers to whoever asks."""
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
            return check_empty_range(self._at, await self._head(key), start, tag)
        asked = Asked("GET", key, f"bytes={start}-{end - 1}", tag)
        reply = await self._ask(asked, Destination(into, start, end, begun))
        return self._info(key, reply) or await self._head(key)

    @abstractmethod
    async def _ask(self, asked: Asked, destination: Destination | None = None) -> Reply:
        """Send a request for an object.

        Raises:
            StoreError: it was refused, or there was no answer.
        """

    @abstractmethod
    def _info(self, key: str, reply: Reply) -> ObjectInfo | None:
        """Return what an answer says of an object; None if it leaves out the tag, so that it must be asked for.

        Raises:
            UnexpectedAnswerError: it leaves out what it must say.
        """


class BucketObjects(HttpObjects[_B]):
    """A bucket: requests are signed, and listings come in pages.

    Attributes:
        nonsense: what to say of an answer that cannot be understood.
    """

    nonsense = "the answer makes no sense"

    async def _ask(self, asked: Asked, destination: Destination | None = None) -> Reply:
        """Send a request, once more if the credentials had to be renewed."""
        access, address = self._access.get(), self._at.object_url(asked.key)
        used, is_renewed = await access.current(), False
        while True:
            reply = await access.reader.read(self._call(access, asked, used, address), destination)
            if not reply.refused:
                return reply
            error = await self._refusal(access, asked, used, address, reply)
            if is_renewed or not isinstance(error, ExpiredCredentialsError):
                raise error
            renewed, is_renewed = await access.renew(used), True
            if renewed == used:
                raise error
            used = renewed

    async def _list(self, prefix: str, start_after: str) -> AsyncIterator[ObjectInfo]:
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
    def _call(self, access: _B, asked: Asked, proof: Any, address: str) -> Call:
        """Return the request, signed."""

    @abstractmethod
    async def _refusal(self, access: _B, asked: Asked, proof: Any, address: str, reply: Reply) -> StoreError:
        """Return the error for a refusal."""

    @abstractmethod
    async def _page(self, prefix: str, after: str, token: str) -> tuple[list[ObjectInfo], str]:
        """Return a page of a listing and the token of the next one, empty if there is none.

        Args:
            prefix: that keys in the bucket begin with.
            after: key in the bucket after which the listing begins; empty for the first.
            token: of the page; empty for the first.
        """


def said_in(document: object, name: str, kind: type[_T], complaint: str, default: _T | None = None) -> _T:
    """Return a field of an answer.

    Args:
        document: the answer, or a part of it.
        name: of the field.
        kind: that the value must be of.
        complaint: text of the error.
        default: for a field that is not there; None if it must be.

    Raises:
        UnexpectedAnswerError: it is not there, or not of its kind.
    """
    value = document.get(name, default) if isinstance(document, Mapping) else None
    if not isinstance(value, kind):
        raise UnexpectedAnswerError(complaint)
    return value
