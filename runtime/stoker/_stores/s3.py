"""S3 and its like: signed requests, of which the reads go straight into the caller's memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from stoker._base.meter import PriceKey
from stoker._stores.credentials import ExpiredCredentialsError
from stoker._stores.http import Failure, Reply, Rule, error_of
from stoker._stores.http_objects import Asked, BucketObjects
from stoker._stores.location import Location
from stoker._stores.options import S3Options
from stoker._stores.s3_access import S3Access, endpoint_of
from stoker.abc import Buffer, ObjectInfo
from stoker.errors import (
    BucketNotFoundError,
    ConfigError,
    CredentialsError,
    DeadlineError,
    NotFoundError,
    ObjectChangedError,
    PermissionDeniedError,
    PreconditionFailedError,
    RangeBeyondEndError,
    StoreError,
    ThrottledError,
    TransientError,
    UnexpectedAnswerError,
    WrongRegionError,
)

__all__ = ["S3Store"]

_BAD_KEY: Rule = (CredentialsError, "the access key or its secret is wrong; check the credentials in use")
_DENIED: Rule = (
    PermissionDeniedError,
    (
        "these credentials may not do this (or, without s3:ListBucket, it does not exist); "
        "if the bucket asks requesters to pay, use S3Options(requester_pays=True) or --requester-pays"
    ),
)
_EXPIRED: Rule = (ExpiredCredentialsError, "the credentials have expired; log in again or renew the session token")
_PRECONDITION: Rule = (ObjectChangedError, "the object was overwritten since the manifest pinned it")
_REGION: Rule = (
    WrongRegionError,
    "the bucket lives in region {region}; set AWS_REGION, S3Options(region=...) or --region",
)
_SLOW: Rule = (ThrottledError, "S3 asks to slow down; send fewer requests at once")

_BY_CODE: dict[str, Rule] = {
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "403": _DENIED,
    "AuthorizationHeaderMalformed": _BAD_KEY,
    "ConditionalRequestConflict": _PRECONDITION,
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "IllegalLocationConstraintException": _REGION,
    "InvalidAccessKeyId": _BAD_KEY,
    "InvalidObjectState": (StoreError, "the object is archived; restore it before reading"),
    "InvalidRange": (RangeBeyondEndError, "the range begins beyond the object's end"),
    "InvalidToken": _BAD_KEY,
    "NoSuchBucket": (BucketNotFoundError, "the bucket does not exist; check its name and the endpoint"),
    "PermanentRedirect": _REGION,
    "PreconditionFailed": _PRECONDITION,
    "RequestTimeTooSkewed": (StoreError, "this machine's clock is off; set it"),
    "RequestTimeout": (DeadlineError, "S3 waited too long for the request; try again"),
    "SignatureDoesNotMatch": _BAD_KEY,
    "SlowDown": _SLOW,
    "TemporaryRedirect": _REGION,
    "Throttling": _SLOW,
    "TokenRefreshRequired": _EXPIRED,
    "WrongRegion": _REGION,
}

_NONSENSE = "the answer makes no sense; is this an S3 endpoint?"


class S3Store(BucketObjects[S3Access]):
    """``s3://bucket/prefix``."""

    nonsense = _NONSENSE

    def __init__(self, location: Location, options: S3Options) -> None:
        if location.bucket.endswith("--x-s3"):
            raise ConfigError(
                f"{location.url} is a directory bucket (S3 Express One Zone); stoker does not support its sessions and "
                "zonal endpoints, use a general-purpose bucket"
            )
        super().__init__(location, partial(S3Access, location.bucket, options))
        self._options = options

    def price_key(self) -> PriceKey:
        """Return by what its prices are found: many services speak S3 at endpoints of their own."""
        access = self._access.any()  # a session of botocore's takes milliseconds, and the loader waits for this
        endpoint_url = endpoint_of(self._at.bucket, self._options) if access is None else access.endpoint_url
        return PriceKey(self.url, endpoint_url, self._options.prices or "")

    async def presign(self, key: str, *, seconds: int, tag: str = "") -> str:
        """Return a URL that stands for a signed GET; S3 tells no versions of an object apart by their ETag."""
        access, full_key = self._access.get(), self._at.full_key(key)
        signer = await access.current()
        if signer is None:
            raise CredentialsError(f"{self.url}: an anonymous client has nothing to sign with; give credentials")
        return access.presigned(full_key, signer, seconds)

    async def _head(self, key: str) -> ObjectInfo:
        try:
            return self._info(key, await self._ask(Asked("HEAD", key)))
        except TransientError:
            raise
        except StoreError:
            # The answer to HEAD has no body to say why: ask for a byte to learn it.
            return self._info(key, await self._ask(Asked("GET", key, "bytes=0-0")))

    async def _page(self, prefix: str, after: str, token: str) -> tuple[list[ObjectInfo], str]:
        query = {"list-type": "2", "encoding-type": "url", "prefix": prefix}
        query |= {name: value for name, value in (("start-after", after), ("continuation-token", token)) if value}
        reply = await self._ask(Asked("GET", None, query=query))
        try:
            page = ElementTree.fromstring(reply.body)  # noqa: S314 - expat limits what entities expand to
            decoded = unquote_plus if page.findtext("{*}EncodingType") == "url" else str
            infos = [self._listed(entry, decoded) for entry in page.iterfind("{*}Contents")]
            is_last = page.findtext("{*}IsTruncated") != "true"
            return infos, "" if is_last else _text(page, "NextContinuationToken")
        except (ElementTree.ParseError, ValueError, LookupError):  # the latter two: it is of no encoding that there is
            raise UnexpectedAnswerError(f"{self.url}: {_NONSENSE}") from None

    def _listed(self, entry: ElementTree.Element, decoded: Callable[[str], str]) -> ObjectInfo:
        key, size, tag = decoded(_text(entry, "Key")), _text(entry, "Size"), _tag(_text(entry, "ETag"))
        return ObjectInfo(key=self._at.relative(key), size_bytes=int(size), tag=tag)

    async def _put(self, key: str, data: Buffer, *, if_absent: bool, if_tag: str | None) -> ObjectInfo:
        body = bytes(data)
        try:
            reply = await self._ask(Asked("PUT", key, tag=if_tag, is_new=if_absent, body=body))
        except BucketNotFoundError:
            raise
        except NotFoundError as error:  # If-Match finds nothing to compare with
            raise PreconditionFailedError(
                f"{self._at.object_url(key)} was deleted by somebody else; read it again and decide"
            ) from error
        return replace(self._info(key, reply), size_bytes=len(body))

    async def _delete(self, key: str) -> None:
        await self._ask(Asked("DELETE", key))

    async def _refusal(self, _access: S3Access, asked: Asked, _proof: Any, address: str, reply: Reply) -> StoreError:
        return error_of(_failure(address, reply, writing=asked.body is not None), _BY_CODE)

    def _info(self, key: str, reply: Reply) -> ObjectInfo:
        if "ETag" not in reply.headers:
            raise UnexpectedAnswerError(
                f"{self._at.object_url(key)}: the endpoint sends no ETag; stoker pins objects by it"
            )
        return ObjectInfo(key=key, size_bytes=reply.size_bytes, tag=_tag(reply.headers["ETag"]))


def _tag(etag: str) -> str:
    return etag.strip('"')


def _text(element: ElementTree.Element, name: str) -> str:
    """Return the text of a part of an answer.

    Raises:
        ValueError: there is none.
    """
    found = element.findtext(f"{{*}}{name}")
    if not found:
        raise ValueError(name)
    return found


def _failure(address: str, reply: Reply, *, writing: bool = False) -> Failure:
    """Read an error document; regular expressions, since an XML parser has more to fear from a hostile one."""
    code, text, region = (
        match[1].decode(errors="replace") if (match := re.search(pattern, reply.body)) else ""
        for pattern in (rb"<Code>([^<]+)</Code>", rb"<Message>([^<]+)</Message>", rb"<Region>([^<]+)</Region>")
    )
    region = reply.headers.get("x-amz-bucket-region", region)
    region = region if re.fullmatch(r"[a-z0-9-]{1,32}", region) else ""
    is_elsewhere = region and code in ("", "AuthorizationHeaderMalformed")
    if reply.status in (301, 307, 400) and is_elsewhere:
        code = "WrongRegion"
    return Failure(
        address=address,
        status=reply.status,
        code=code,
        text=text,
        region=region,
        headers=reply.headers,
        writing=writing,
    )
