"""S3 and its like: objects are read by signed GETs into the caller's memory, all else goes through aioboto3."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
)
from botocore.parsers import ResponseParserError

from stoker._base.meter import PriceKey
from stoker._stores.credentials import ExpiredCredentialsError, with_renewal
from stoker._stores.http import Call, Failure, Reply, Rule, error_of
from stoker._stores.http_objects import Asked, BucketObjects, said_in
from stoker._stores.http_session import translated
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
    StokerError,
    StoreError,
    ThrottledError,
    TransientError,
    UnexpectedAnswerError,
    WrongRegionError,
)

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client

__all__ = ["S3Store"]

_T = TypeVar("_T")

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

# botocore's own errors, where no answer came; the first row that matches counts.
_BY_TYPE: tuple[tuple[type[Exception] | tuple[type[Exception], ...], type[StokerError], str], ...] = (
    (NoCredentialsError, CredentialsError, "no AWS credentials were found"),
    (ParamValidationError, ConfigError, "the bucket or key is not one that S3 can have"),
    (BotoCoreError, StoreError, "the request could not be made"),
)


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
        self._payer: dict[str, Any] = {"RequestPayer": "requester"} if options.requester_pays else {}

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
        arguments: dict[str, Any] = {"Bucket": self._at.bucket, "Prefix": prefix, **self._payer}
        arguments |= {name: value for name, value in (("StartAfter", after), ("ContinuationToken", token)) if value}
        page = await self._control(self.url, lambda client: client.list_objects_v2(**arguments))
        complaint = f"{self.url}: {_NONSENSE}"
        infos = [
            ObjectInfo(
                key=self._at.relative(said_in(entry, "Key", str, complaint)),
                size_bytes=said_in(entry, "Size", int, complaint),
                tag=_tag(said_in(entry, "ETag", str, complaint)),
            )
            for entry in page.get("Contents", [])
        ]
        return infos, said_in(page, "NextContinuationToken", str, complaint) if page.get("IsTruncated") else ""

    async def _put(self, key: str, data: Buffer, *, if_absent: bool, if_tag: str | None) -> ObjectInfo:
        body, address = bytes(data), self._at.object_url(key)
        arguments: dict[str, Any] = {"Bucket": self._at.bucket, "Key": self._at.full_key(key), "Body": body}
        if if_absent:
            arguments["IfNoneMatch"] = "*"
        if if_tag is not None:
            arguments["IfMatch"] = f'"{if_tag}"'
        try:
            answer = await self._control(
                address, lambda client: client.put_object(**arguments, **self._payer), writing=True
            )
        except BucketNotFoundError:
            raise
        except NotFoundError as error:  # If-Match finds nothing to compare with
            raise PreconditionFailedError(
                f"{address} was deleted by somebody else; read it again and decide"
            ) from error
        return ObjectInfo(
            key=key, size_bytes=len(body), tag=_tag(said_in(answer, "ETag", str, f"{address}: {_NONSENSE}"))
        )

    async def _delete(self, key: str) -> None:
        arguments: dict[str, Any] = {"Bucket": self._at.bucket, "Key": self._at.full_key(key), **self._payer}
        await self._control(self._at.object_url(key), lambda client: client.delete_object(**arguments))

    def _call(self, access: S3Access, asked: Asked, proof: ReadOnlyCredentials | None, address: str) -> Call:
        condition = {} if asked.tag is None else {"If-Match": f'"{asked.tag}"'}
        return access.call(asked.method, self._at.full_key(asked.key), asked.headers | condition, proof, address)

    async def _refusal(self, _access: S3Access, _asked: Asked, _proof: Any, address: str, reply: Reply) -> StoreError:
        return error_of(_failure(address, reply), _BY_CODE)

    def _info(self, key: str, reply: Reply) -> ObjectInfo:
        if "ETag" not in reply.headers:
            raise UnexpectedAnswerError(
                f"{self._at.object_url(key)}: the endpoint sends no ETag; stoker pins objects by it"
            )
        return ObjectInfo(key=key, size_bytes=reply.size_bytes, tag=_tag(reply.headers["ETag"]))

    async def _control(self, address: str, work: Callable[[S3Client], Awaitable[_T]], *, writing: bool = False) -> _T:
        """Perform a call of the control plane, once more if the credentials had to be renewed."""
        access = self._access.get()

        async def once(_: ReadOnlyCredentials | None) -> _T:
            with _control_errors(address, writing=writing):
                return await work(await access.client())

        return await with_renewal(access, once)


def _tag(etag: str) -> str:
    return etag.strip('"')


def _failure(address: str, reply: Reply) -> Failure:
    """Read an error document; regular expressions, since an XML parser has more to fear from a hostile one."""
    code, text, region = (
        match[1].decode(errors="replace") if (match := re.search(pattern, reply.body)) else ""
        for pattern in (rb"<Code>([^<]+)</Code>", rb"<Message>([^<]+)</Message>", rb"<Region>([^<]+)</Region>")
    )
    return _failure_of(address, reply.status, code, text, reply.headers, region=region)


def _failure_of(
    address: str, status: int, code: str, text: str, headers: Mapping[str, str], *, region: str, writing: bool = False
) -> Failure:
    region = headers.get("x-amz-bucket-region", region)
    region = region if re.fullmatch(r"[a-z0-9-]{1,32}", region) else ""
    if status in (301, 307, 400) and region and code in ("", "301", "307", "400", "AuthorizationHeaderMalformed"):
        code = "WrongRegion"
    return Failure(
        address=address, status=status, code=code, text=text, region=region, headers=headers, writing=writing
    )


@contextmanager
def _control_errors(address: str, *, writing: bool) -> Iterator[None]:
    with translated(address):
        try:
            yield
        except ClientError as error:
            details, meta = error.response.get("Error", {}), error.response["ResponseMetadata"]
            raise error_of(
                _failure_of(
                    address,
                    meta["HTTPStatusCode"],
                    details.get("Code", ""),
                    details.get("Message", ""),
                    meta["HTTPHeaders"],
                    region=str(details.get("Region", "")),
                    writing=writing,
                ),
                _BY_CODE,
            ) from None
        except BotoCoreError as error:
            kind, what = next((kind, what) for types, kind, what in _BY_TYPE if isinstance(error, types))
            raise kind(f"{address}: {what} ({error})") from error
        except (StokerError, aiohttp.ClientError, OSError):
            raise
        except (ResponseParserError, ValueError, LookupError, TypeError, AttributeError):
            # From a library that trusts its endpoint; what it says quotes the answer, which may quote our token.
            raise UnexpectedAnswerError(f"{address}: {_NONSENSE}") from None
