"""What a client sends as an object's bytes: aws-chunked coding undone, digests verified."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Callable, Mapping

from stoker._base.checksum import crc32c
from stoker_local._http1 import Body, Request
from stoker_local._s3.errors import S3Error

__all__ = ["decode_payload"]

_UNSIGNED = ("UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER")
_MAX_CHUNK_HEAD_BYTES = 1024

_CHECKSUMS: dict[str, Callable[[Body], bytes]] = {
    "x-amz-checksum-crc32": lambda data: zlib.crc32(data).to_bytes(4, "big"),
    "x-amz-checksum-crc32c": lambda data: crc32c(data).to_bytes(4, "big"),
    "x-amz-checksum-sha1": lambda data: hashlib.sha1(data, usedforsecurity=False).digest(),
    "x-amz-checksum-sha256": lambda data: hashlib.sha256(data).digest(),
    "content-md5": lambda data: hashlib.md5(data, usedforsecurity=False).digest(),
}


def decode_payload(request: Request, body: Body) -> Body:
    """Return the object's bytes that ``body`` carries; not aws-chunked, it is returned as it is.

    The checksums that the client announced are verified, in headers or in the trailer (CRC-64/NVME excepted, which
    is taken on trust). Chunk signatures are not implemented.

    Raises:
        S3Error: the coding is malformed, or a length or a digest does not match.
    """
    declared = request.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
    digests: Mapping[str, str] = request.headers
    if declared.startswith("STREAMING-AWS4"):
        raise S3Error("NotImplemented", "Signed chunks are not implemented; send an unsigned trailer instead.")
    if declared.startswith("STREAMING-") or "aws-chunked" in request.headers.get("content-encoding", ""):
        body, trailer = _decode_chunks(body)
        digests = {**request.headers, **trailer}
        if request.headers.get("x-amz-decoded-content-length", str(len(body))) != str(len(body)):
            raise S3Error("InvalidRequest", "The body is not as long as x-amz-decoded-content-length says.")
    elif declared not in _UNSIGNED and hashlib.sha256(body).hexdigest() != declared:
        raise S3Error("XAmzContentSHA256Mismatch", "The provided x-amz-content-sha256 is not the body's.")
    _verify_digests(digests, body)
    return body


def _verify_digests(digests: Mapping[str, str], body: Body) -> None:
    for name, digest in _CHECKSUMS.items():
        if name not in digests:
            continue
        try:
            sent = base64.b64decode(digests[name], validate=True)
        except (binascii.Error, ValueError):
            sent = b""
        expected = digest(body)
        if len(sent) != len(expected):
            raise S3Error("InvalidDigest", f"The {name} you specified is not valid.")
        if sent != expected:
            raise S3Error("BadDigest", f"The {name} you specified did not match what we received.")


def _decode_chunks(body: Body) -> tuple[Body, dict[str, str]]:
    """Undo ``size[;extension]CRLF data CRLF … 0 CRLF [name:value CRLF]… CRLF``; one chunk is decoded without a copy."""
    view = memoryview(body)
    chunks: list[memoryview] = []
    position = 0
    while True:
        line, position = _line(body, position)
        digits = line.partition(b";")[0]
        if not 0 < len(digits) <= 15 or digits.strip(b"0123456789abcdefABCDEF"):
            raise S3Error("InvalidRequest", "The aws-chunked body is malformed: bad chunk size.")
        size = int(digits, 16)
        if size == 0:
            break
        chunks.append(view[position : position + size])
        position += size
        if bytes(view[position : position + 2]) != b"\r\n":
            raise S3Error("InvalidRequest", "The aws-chunked body is malformed: a chunk has a wrong length.")
        position += 2
    return (chunks[0] if len(chunks) == 1 else b"".join(chunks)), _trailer(body, position)


def _trailer(body: Body, position: int) -> dict[str, str]:
    trailer: dict[str, str] = {}
    while position < len(body):
        line, position = _line(body, position)
        if not line:
            break
        name, _, value = line.decode("latin-1").partition(":")
        trailer[name.strip().lower()] = value.strip()
    return trailer


def _line(body: Body, position: int) -> tuple[bytes, int]:
    head = bytes(memoryview(body)[position : position + _MAX_CHUNK_HEAD_BYTES])
    end = head.find(b"\r\n")
    if end < 0:
        raise S3Error("InvalidRequest", "The aws-chunked body is malformed: a line has no end.")
    return head[:end], position + end + 2
