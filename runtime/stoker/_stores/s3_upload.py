"""S3's multipart uploads: parts of one new object, which a last request joins. Unfinished ones are listed and aborted.

The parts of an upload that is neither completed nor aborted, such as that of a killed process, are stored and charged,
but no listing of objects shows them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from urllib.parse import unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from stoker._base.meter import Meter, Operation
from stoker._base.upload import UnfinishedUpload
from stoker._stores.http import HttpResponse
from stoker._stores.http_objects import ObjectOperation
from stoker.abc import Buffer, ObjectInfo
from stoker.errors import StoreError, UnexpectedAnswerError

_CONCURRENCY = 4
"""Parts in flight: at 90 MB/s a connection enough for most networks, and 64 MiB of memory."""


class S3Upload:
    """A multipart upload; use :meth:`begin`.

    Args:
        key: key of the object.
        size_bytes: size of the object.
        upload_id: id of the upload.
        perform: sends a request.
        parse_error: returns the error of a response that is not an error by its status.
        meter: counts the requests.
    """

    concurrency = _CONCURRENCY

    def __init__(
        self,
        key: str,
        size_bytes: int,
        upload_id: str,
        perform: Callable[[ObjectOperation], Awaitable[HttpResponse]],
        parse_error: Callable[[HttpResponse], StoreError],
        meter: Meter,
    ) -> None:
        self._key, self._size_bytes, self._query = key, size_bytes, {"uploadId": upload_id}
        self._perform, self._parse_error, self._meter = perform, parse_error, meter
        self._tags: dict[int, str] = {}
        self._is_complete = False

    async def put_part(self, number: int, start: int, data: Buffer) -> None:
        """Send a part."""
        body = bytes(data)
        query = {"partNumber": str(number + 1), **self._query}
        with self._meter.count_request(Operation.PUT):
            reply = await self._perform(ObjectOperation("PUT", self._key, query=query, body=body))
        if "ETag" not in reply.headers:
            raise UnexpectedAnswerError(f"{self._key}: the endpoint sends no ETag for a part of an upload")
        self._tags[number] = reply.headers["ETag"]
        self._meter.add_written(len(body))

    async def complete(self) -> ObjectInfo:
        """Join the parts to a new object; S3 answers a repeated request as it did the first."""
        parts = "".join(
            f"<Part><PartNumber>{number + 1}</PartNumber><ETag>{escape(tag)}</ETag></Part>"
            for number, tag in sorted(self._tags.items())
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        with self._meter.count_request(Operation.PUT):
            reply = await self._perform(ObjectOperation("POST", self._key, is_new=True, query=self._query, body=body))
        tag = find_text(reply.body, "ETag")
        if not tag:  # the status was sent before S3 knew the outcome
            raise self._parse_error(replace(reply, status=500))
        self._is_complete = True
        return ObjectInfo(key=self._key, size_bytes=self._size_bytes, tag=tag.strip('"'))

    async def abort(self) -> None:
        """Discard the parts."""
        if not self._is_complete:
            with self._meter.count_request(Operation.DELETE):
                await self._perform(ObjectOperation("DELETE", self._key, query=self._query))


def find_text(body: bytes, name: str) -> str:
    """Return the text of an element directly below the root of an XML document; empty if there is none."""
    try:
        return ElementTree.fromstring(body).findtext(f"{{*}}{name}") or ""  # noqa: S314 - expat limits what entities expand to
    except (ElementTree.ParseError, LookupError):
        return ""


def parse_uploads(body: bytes) -> tuple[list[UnfinishedUpload], dict[str, str]]:
    """Parse a page of a listing of uploads; return it with keys of the bucket, and the query of the next page, if any.

    Raises:
        ElementTree.ParseError: the page is not XML.
        ValueError: the page is not a listing of uploads.
    """
    page = ElementTree.fromstring(body)  # noqa: S314 - expat limits what entities expand to
    if page.tag.rpartition("}")[2] != "ListMultipartUploadsResult":
        raise ValueError(page.tag)
    decode = unquote_plus if page.findtext("{*}EncodingType") == "url" else str
    uploads = [
        UnfinishedUpload(
            key=decode(entry.findtext("{*}Key") or ""),
            upload_id=entry.findtext("{*}UploadId") or "",
            begun=datetime.fromisoformat(entry.findtext("{*}Initiated") or ""),
        )
        for entry in page.iterfind("{*}Upload")
    ]
    if page.findtext("{*}IsTruncated") != "true":
        return uploads, {}
    markers = page.findtext("{*}NextKeyMarker") or "", page.findtext("{*}NextUploadIdMarker") or ""
    if not all(markers):
        raise ValueError("a truncated page without markers")
    return uploads, {"key-marker": decode(markers[0]), "upload-id-marker": markers[1]}
