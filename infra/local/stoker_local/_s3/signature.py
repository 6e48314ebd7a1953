"""Authentication of requests by AWS Signature Version 4, and decoding and checksums of their bodies.

Source: AWS General Reference, "Create a signed AWS API request", and the S3 API reference, "Authenticating requests".
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from io import BytesIO
from urllib.parse import quote

from stoker._base.checksum import crc32c
from stoker_local._http1 import Body, ServerRequest
from stoker_local._s3.model import S3Error

ALGORITHM = "AWS4-HMAC-SHA256"
MAX_SKEW = timedelta(minutes=15)
MAX_PRESIGNED_SECONDS = 7 * 24 * 3600

_AUTHORIZATION = re.compile(
    ALGORITHM + r"\s+Credential=(?P<credential>[^,\s]+),\s*SignedHeaders=(?P<signed_headers>[^,\s]+)"
    r",\s*Signature=(?P<signature>[0-9a-f]{64})"
)
_TIMESTAMP = re.compile(r"[0-9]{8}T[0-9]{6}Z", re.ASCII)
_UNSIGNED_PAYLOADS = ("UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER")
_MAX_CHUNK_HEAD_BYTES = 1024
_CHECKSUMS: dict[str, Callable[[Body], bytes]] = {
    "x-amz-checksum-crc32": lambda data: zlib.crc32(data).to_bytes(4, "big"),
    "x-amz-checksum-crc32c": lambda data: crc32c(data).to_bytes(4, "big"),
    "x-amz-checksum-sha1": lambda data: hashlib.sha1(data, usedforsecurity=False).digest(),
    "x-amz-checksum-sha256": lambda data: hashlib.sha256(data).digest(),
    "content-md5": lambda data: hashlib.md5(data, usedforsecurity=False).digest(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """An access key with its secret and its permissions.

    Attributes:
        access_key: access key id, without '/'.
        secret_key: secret access key.
        session_token: session token that requests must carry; empty requires none.
        expires_at: time from which the key is refused with ``ExpiredToken``, in POSIX seconds; None is never.
        buckets: names of the buckets that the key may access; None is all.
        read_only: whether the key may only read.

    Example:
        >>> KeyPair(access_key="reader", secret_key="secret", buckets=("data",), read_only=True)
        KeyPair('reader')
    """

    access_key: str
    secret_key: str
    session_token: str = ""
    expires_at: float | None = None
    buckets: tuple[str, ...] | None = None
    read_only: bool = False

    def __post_init__(self) -> None:
        if not self.access_key or not self.secret_key or "/" in self.access_key:
            raise ValueError("access_key and secret_key must not be empty, and access_key must not contain '/'")

    def __repr__(self) -> str:
        return f"KeyPair({self.access_key!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The unverified identity and signature that a request carries."""

    access_key: str
    date: str
    region: str
    service: str
    signed_headers: tuple[str, ...]
    signature: str
    timestamp: str
    payload_hash: str
    session_token: str
    expires_seconds: int | None


def parse_claim(request: ServerRequest, *, service: str = "s3") -> Claim | None:
    """Parse the signature in a request's header or query; return None if the request is unsigned.

    Services other than S3 do not require the body's hash in the request. If it is missing, ``payload_hash`` is empty,
    and the caller must fill in the computed hash.

    Raises:
        S3Error: the signature is malformed.
    """
    if "authorization" in request.headers:
        return _parse_header_claim(request, service)
    if request.query and any(name == "X-Amz-Signature" for name, _ in request.query):
        return _parse_query_claim(request, service)
    return None


def _parse_header_claim(request: ServerRequest, service: str) -> Claim:
    match = _AUTHORIZATION.fullmatch(request.headers["authorization"])
    if match is None:
        raise S3Error("AuthorizationHeaderMalformed", f"The authorization header is not {ALGORITHM}.")
    headers = request.headers
    if service == "s3" and "x-amz-content-sha256" not in headers:
        raise S3Error("InvalidRequest", "Missing required header for this request: x-amz-content-sha256")
    return Claim(
        **_parse_scope(match["credential"], service),
        signed_headers=tuple(match["signed_headers"].split(";")),
        signature=match["signature"],
        timestamp=headers.get("x-amz-date", ""),
        payload_hash=headers.get("x-amz-content-sha256", ""),
        session_token=headers.get("x-amz-security-token", ""),
        expires_seconds=None,
    )


def _parse_query_claim(request: ServerRequest, service: str) -> Claim:
    query = request.parameters
    expires = query.get("X-Amz-Expires", "")
    malformed = query.get("X-Amz-Algorithm") != ALGORITHM or not re.fullmatch(r"[0-9]{1,6}", expires, re.ASCII)
    if malformed or not 0 < int(expires) <= MAX_PRESIGNED_SECONDS:
        raise S3Error("AuthorizationHeaderMalformed", "The query does not hold a valid presigned request.")
    return Claim(
        **_parse_scope(query.get("X-Amz-Credential", ""), service),
        signed_headers=tuple(query.get("X-Amz-SignedHeaders", "").split(";")),
        signature=query["X-Amz-Signature"],
        timestamp=query.get("X-Amz-Date", ""),
        payload_hash=query.get("X-Amz-Content-Sha256", "UNSIGNED-PAYLOAD" if service == "s3" else ""),
        session_token=query.get("X-Amz-Security-Token", ""),
        expires_seconds=int(expires),
    )


def _parse_scope(credential: str, service: str) -> dict[str, str]:
    parts = credential.split("/")
    if len(parts) != 5 or parts[4] != "aws4_request" or parts[3] != service:
        raise S3Error("AuthorizationHeaderMalformed", f"The credential is not KEY/DATE/REGION/{service}/aws4_request.")
    return {"access_key": parts[0], "date": parts[1], "region": parts[2], "service": parts[3]}


def verify(request: ServerRequest, claim: Claim, keys: Mapping[str, KeyPair], *, now: datetime) -> KeyPair:
    """Return the key pair that signed the request.

    The region in the scope is not checked here: the caller compares it with the bucket's.

    Raises:
        S3Error: the key is unknown or expired, the clocks differ too much, or the signature does not match.
    """
    key = keys.get(claim.access_key)
    if key is None:
        raise S3Error("InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.")
    if not hmac.compare_digest(key.session_token.encode(), claim.session_token.encode()):
        raise S3Error("InvalidToken", "The provided token is malformed or otherwise invalid.")
    if key.expires_at is not None and now.timestamp() >= key.expires_at:
        raise S3Error("ExpiredToken", "The provided token has expired.")
    _check_time(claim, now)
    _check_signed_headers(request, claim)
    expected = _compute_signature(request, claim, key.secret_key)
    if not hmac.compare_digest(expected.encode(), claim.signature.encode()):
        raise S3Error(
            "SignatureDoesNotMatch",
            "The request signature we calculated does not match the signature you provided.",
        )
    return key


def _check_time(claim: Claim, now: datetime) -> None:
    try:
        if not _TIMESTAMP.fullmatch(claim.timestamp):
            raise ValueError(claim.timestamp)
        signed_at = datetime.fromisoformat(claim.timestamp)  # a tenth of strptime's time
    except ValueError as error:
        raise S3Error("AccessDenied", "AWS authentication requires a valid Date or x-amz-date header") from error
    if claim.timestamp[:8] != claim.date:
        raise S3Error("AuthorizationHeaderMalformed", "The credential's date is not the request's.")
    if signed_at - now > MAX_SKEW or (claim.expires_seconds is None and now - signed_at > MAX_SKEW):
        raise S3Error("RequestTimeTooSkewed", "The request time and the server's are too far apart.")
    if claim.expires_seconds is not None and now > signed_at + timedelta(seconds=claim.expires_seconds):
        raise S3Error("AccessDenied", "Request has expired")


def _check_signed_headers(request: ServerRequest, claim: Claim) -> None:
    signed = set(claim.signed_headers)
    unsigned = sorted(n for n in request.headers if (n == "host" or n.startswith("x-amz-")) and n not in signed)
    if unsigned or "host" not in signed:
        names = ", ".join(unsigned) or "host"
        raise S3Error("AccessDenied", f"There were headers present in the request which were not signed: {names}")


def _compute_signature(request: ServerRequest, claim: Claim, secret_key: str) -> str:
    headers = request.headers
    pairs = sorted((_quote(n), _quote(v)) for n, v in request.query if n != "X-Amz-Signature")
    canonical = "\n".join(
        (
            request.method,
            # All services except S3 normalize the path and percent-encode it a second time.
            quote(request.path if claim.service == "s3" else _normalize_path(request.raw_path), safe="/-_.~"),
            "&".join(f"{name}={value}" for name, value in pairs),
            *(f"{name}:{' '.join(headers.get(name, '').split())}" for name in claim.signed_headers),
            "",
            ";".join(claim.signed_headers),
            claim.payload_hash,
        )
    )
    scope = f"{claim.date}/{claim.region}/{claim.service}/aws4_request"
    digest = hashlib.sha256(canonical.encode("latin-1", "replace")).hexdigest()
    to_sign = f"{ALGORITHM}\n{claim.timestamp}\n{scope}\n{digest}"
    key = _derive_signing_key(secret_key, claim.date, claim.region, claim.service)
    return hmac.digest(key, to_sign.encode("utf-8", "replace"), "sha256").hex()


def _normalize_path(path: str) -> str:
    """Remove empty and dot segments (RFC 3986, section 5.2.4)."""
    segments: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment not in ("", "."):
            segments.append(segment)
    return "/" + "/".join(segments) + ("/" if segments and path.endswith("/") else "")


def _quote(text: str) -> str:
    return quote(text, safe="-_.~")


@lru_cache(maxsize=64)
def _derive_signing_key(secret_key: str, date: str, region: str, service: str) -> bytes:
    key = b"AWS4" + secret_key.encode()
    for part in (date, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode("utf-8", "replace"), "sha256")
    return key


def decode_payload(request: ServerRequest, body: Body) -> Body:
    """Decode an aws-chunked body and verify its checksums; other bodies are returned unchanged.

    Checksums in headers and in the trailer are verified, except CRC-64/NVME. Chunk signatures are not implemented.

    Raises:
        S3Error: the encoding is malformed, or a length or a digest does not match.
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
    elif declared not in _UNSIGNED_PAYLOADS and hashlib.sha256(body).hexdigest() != declared:
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


def _decode_chunks(body: Body) -> tuple[bytes, dict[str, str]]:
    """Decode ``size[;extension]CRLF data CRLF … 0 CRLF [name:value CRLF]… CRLF`` into data and trailer."""
    stream = BytesIO(body)
    chunks: list[bytes] = []
    while True:
        digits = _read_line(stream).partition(b";")[0]
        if not 0 < len(digits) <= 15 or digits.strip(b"0123456789abcdefABCDEF"):
            raise S3Error("InvalidRequest", "The aws-chunked body is malformed: bad chunk size.")
        size = int(digits, 16)
        if size == 0:
            break
        chunks.append(stream.read(size))
        if stream.read(2) != b"\r\n":
            raise S3Error("InvalidRequest", "The aws-chunked body is malformed: a chunk has a wrong length.")
    trailer: dict[str, str] = {}
    while stream.tell() < len(body) and (line := _read_line(stream)):
        name, _, value = line.decode("latin-1").partition(":")
        trailer[name.strip().lower()] = value.strip()
    return b"".join(chunks), trailer


def _read_line(stream: BytesIO) -> bytes:
    line = stream.readline(_MAX_CHUNK_HEAD_BYTES)
    if not line.endswith(b"\r\n"):
        raise S3Error("InvalidRequest", "The aws-chunked body is malformed: a line has no end.")
    return line[:-2]
