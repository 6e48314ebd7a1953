"""Google Cloud Storage's resumable uploads: one object in parts, in order. Sessions expire by themselves, at no charge.

The last part creates the object. Bytes that the store has already are ignored, so a part may be sent again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs, urlsplit

from stoker._base.meter import Meter, Operation
from stoker._stores.http import HttpResponse
from stoker._stores.http_objects import ObjectOperation
from stoker.abc import Buffer, ObjectInfo
from stoker.errors import ServerError, UnexpectedAnswerError

_MAX_SESSION_CHARACTERS = 2048


class GcsUpload:
    """A resumable upload.

    Args:
        key: key of the object.
        size_bytes: size of the object.
        session: id of the session.
        perform: sends a request.
        parse_info: returns size and generation from the response that creates the object.
        meter: counts the requests.
    """

    concurrency = 1

    def __init__(
        self,
        key: str,
        size_bytes: int,
        session: str,
        perform: Callable[[ObjectOperation], Awaitable[HttpResponse]],
        parse_info: Callable[[HttpResponse], ObjectInfo],
        meter: Meter,
    ) -> None:
        self._key, self._size_bytes, self._query = key, size_bytes, {"upload_id": session}
        self._perform, self._parse_info, self._meter = perform, parse_info, meter
        self._last: tuple[int, Buffer] | None = None
        self._info: ObjectInfo | None = None

    async def put_part(self, number: int, start: int, data: Buffer) -> None:
        """Send a part; the last one, which creates the object, is sent by :meth:`complete`."""
        if start + memoryview(data).nbytes == self._size_bytes:
            self._last = start, data
            return
        reply = await self._send(start, data)
        if reply.status != 308 or reply.headers.get("Range") != f"bytes=0-{start + memoryview(data).nbytes - 1}":
            raise ServerError(f"{self._key}: the store did not accept the part at {start} of a resumable upload")

    async def complete(self) -> ObjectInfo:
        """Send the last part."""
        if self._last is None:
            raise UnexpectedAnswerError(f"{self._key}: an upload without its last part cannot be completed")
        reply = await self._send(*self._last)
        if reply.status == 308:
            raise ServerError(f"{self._key}: the store did not accept the last part of a resumable upload")
        self._info = self._parse_info(reply)
        return self._info

    async def abort(self) -> None:
        """Discard the session."""
        if self._info is None:
            await self._perform(ObjectOperation("DELETE", self._key, query=self._query))

    async def _send(self, start: int, data: Buffer) -> HttpResponse:
        body = bytes(data)
        place = f"bytes {start}-{start + len(body) - 1}/{self._size_bytes}"
        with self._meter.count_request(Operation.PUT):
            reply = await self._perform(
                ObjectOperation("PUT", self._key, query=self._query, body=body, content_range=place)
            )
        self._meter.add_written(len(body))
        return reply


def session_of(reply: HttpResponse, address: str) -> str:
    """Return the id of the session that a response begins.

    Raises:
        UnexpectedAnswerError: the response has no session.
    """
    location = urlsplit(reply.headers.get("Location", ""))
    session = parse_qs(location.query).get("upload_id", [""])[0]
    if not 0 < len(session) <= _MAX_SESSION_CHARACTERS:
        raise UnexpectedAnswerError(f"{address}: the endpoint began no resumable upload")
    return session
