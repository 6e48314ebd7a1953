"""Objects over HTTP: what S3, Google Cloud Storage and served data sets share.

Ranges and tags become headers, credentials that expired under way are renewed and the request sent once more, a refusal
becomes a typed error, and a listing goes on from page to page.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from stoker._base.threads import PerLoop
from stoker._stores.credentials import Credentials, Endpoint, ExpiredCredentialsError, Identity, Introduced
from stoker._stores.http import Call, Destination, HttpReader, Reply
from stoker._stores.location import Location, check_found
from stoker._stores.object_store import ObjectStore
from stoker.abc import ObjectInfo
from stoker.errors import StoreError, UnexpectedAnswerError

__all__ = ["Asked", "BucketObjects", "HttpObjects", "said_in"]

_T = TypeVar("_T")


class Access(Credentials[Any], Introduced, Protocol):
    """Connections and credentials of one store in one event loop."""

    @property
    def reader(self) -> HttpReader:
        """What performs reads."""
        ...

    @property
    def writer(self) -> HttpReader:
        """What performs all else."""
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
        used, is_renewed = await access.current(), False
        while True:
            carrier = access.reader if asked.only_reads else access.writer
            reply = await carrier.read(access.call(asked, place, used, address), destination)
            if not reply.refused or (not asked.only_reads and 200 <= reply.status < 300):
                return reply
            error = await self._refusal(access, asked, used, address, reply)
            if is_renewed or not isinstance(error, ExpiredCredentialsError):
                raise error
            renewed, is_renewed = await access.renew(used), True
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
