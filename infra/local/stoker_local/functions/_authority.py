"""Who may call functions: signatures as Lambda verifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType

from aiohttp import web

from stoker_local._http1 import BadRequestError, Request, parse_query
from stoker_local._s3.model import S3Error
from stoker_local._s3.signature import KeyPair, read_claim, verify
from stoker_local.functions._errors import ServiceError

__all__ = ["Authority"]

_CODES = MappingProxyType(
    {
        "InvalidAccessKeyId": "UnrecognizedClientException",
        "InvalidToken": "UnrecognizedClientException",
        "SignatureDoesNotMatch": "InvalidSignatureException",
        "RequestTimeTooSkewed": "InvalidSignatureException",
        "ExpiredToken": "ExpiredTokenException",
        "AccessDenied": "AccessDeniedException",
    }
)


class Authority:
    """Lets in who signs with one of its keys, for one region's Lambda."""

    def __init__(self, keys: Iterable[KeyPair], *, region: str, clock: Callable[[], float]) -> None:
        self._keys = {key.access_key: key for key in keys}
        self._region = region
        self._clock = clock

    def admit(self, request: web.BaseRequest, body: bytes) -> KeyPair:
        """Return whose request it is.

        Raises:
            ServiceError: it is nobody's: unsigned, wrongly signed, or signed with an unknown or expired key.
        """
        try:
            head = _head_of(request)
            claim = read_claim(head, service="lambda")
            if claim is None:
                raise ServiceError("MissingAuthenticationTokenException", "Missing Authentication Token")
            digest = hashlib.sha256(body).hexdigest()
            if claim.payload_hash not in ("", digest):
                raise S3Error("SignatureDoesNotMatch", "The body is not the one that was signed.")
            if claim.region != self._region:
                raise S3Error("SignatureDoesNotMatch", f"Credential should be scoped to {self._region}.")
            claim = replace(claim, payload_hash=claim.payload_hash or digest)
            return verify(head, claim, self._keys, now=datetime.fromtimestamp(self._clock(), UTC))
        except S3Error as refusal:
            code = _CODES.get(refusal.code, "IncompleteSignatureException")
            raise ServiceError(code, refusal.message) from refusal
        except (BadRequestError, UnicodeDecodeError) as error:
            raise ServiceError("IncompleteSignatureException", "The request is not UTF-8.") from error


def _head_of(request: web.BaseRequest) -> Request:
    raw_path, _, raw_query = request.raw_path.partition("?")
    headers: dict[str, str] = {}
    for name, value in request.headers.items():
        known = headers.get(name.lower())
        headers[name.lower()] = value if known is None else f"{known},{value}"
    return Request(
        method=request.method,
        raw_path=raw_path,
        path=request.path,
        query=parse_query(raw_query),
        headers=headers,
        body_bytes=request.content_length,
        keep_alive=True,
    )
