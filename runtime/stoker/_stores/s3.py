"""S3 and its like: objects are read by signed GETs into the caller's memory, all else goes through aioboto3."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
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

from stoker._base.operations import PriceKey
from stoker._stores.credentials import Endpoint, ExpiredCredentialsError, Identity, with_renewal
from stoker._stores.failures import Failure, Rule, error_of
from stoker._stores.http import Destination, Reply
from stoker._stores.http_session import translated
from stoker._stores.location import Location, check_conditions, check_empty_range, check_range
from stoker._stores.network import PerLoop
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


class S3Store:
    """``s3://bucket/prefix``. Connections are made on first use, one pool per event loop, none shared across a fork."""

    def __init__(self, location: Location, options: S3Options) -> None:
        if location.bucket.endswith("--x-s3"):
            raise ConfigError(
                f"{location.url} is a directory bucket (S3 Express One Zone); stoker does not support its sessions and "
                "zonal endpoints, use a general-purpose bucket"
            )
        self._at = location
        self._payer: dict[str, Any] = {"RequestPayer": "requester"} if options.requester_pays else {}
        self._options = options
        self._access = PerLoop(self._opened)
        self._endpoint: str | None = None

    @property
    def url(self) -> str:
        """The root as the user wrote it."""
        return self._at.url

    def price_key(self) -> PriceKey:
        """Return by what its prices are found: many services speak S3 at endpoints of their own."""
        if self._endpoint is None:  # nothing was read yet
            self._endpoint = endpoint_of(self._at.bucket, self._options)
        return PriceKey(self.url, self._endpoint, self._options.prices or "")

    def _opened(self) -> S3Access:
        access = S3Access(self._at.bucket, self._options)
        self._endpoint = access.endpoint_url
        return access

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return a whole object."""
        reply = await self._read("GET", key, {})
        return reply.body, self._info(key, reply)

    async def get_range(
        self,
        key: str,
        start: int,
        end: int,
        *,
        into: memoryview,
        tag: str | None = None,
        begun: Callable[[], None] | None = None,
    ) -> ObjectInfo:
        """Read bytes ``[start, end)`` into ``into``; cancellation closes the connection."""
        check_range(start, end, into)
        if start == end:
            return check_empty_range(self._at, await self.head(key), start, tag)
        headers = {"Range": f"bytes={start}-{end - 1}"} | ({"If-Match": f'"{tag}"'} if tag is not None else {})
        return self._info(key, await self._read("GET", key, headers, Destination(into, start, end, begun)))

    async def head(self, key: str) -> ObjectInfo:
        """Return size and tag."""
        try:
            return self._info(key, await self._read("HEAD", key, {}))
        except TransientError:
            raise
        except StoreError:
            # The answer to HEAD has no body to say why: ask for a byte to learn it.
            return self._info(key, await self._read("GET", key, {"Range": "bytes=0-0"}))

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield objects, a request per thousand."""
        arguments: dict[str, Any] = {"Bucket": self._at.bucket, "Prefix": self._at.within_bucket(prefix)}
        if start_after:
            arguments["StartAfter"] = self._at.within_bucket(start_after)
        while True:
            page = await self._control(self.url, lambda client: client.list_objects_v2(**arguments, **self._payer))
            for entry in page.get("Contents", []):
                if key := self._at.relative(_said(entry, "Key", self.url)):
                    tag = _tag(_said(entry, "ETag", self.url))
                    yield ObjectInfo(key=key, size_bytes=_said(entry, "Size", self.url), tag=tag)
            if not page.get("IsTruncated"):
                return
            following = _said(page, "NextContinuationToken", self.url)
            if following == arguments.get("ContinuationToken"):  # this would go on for ever
                raise UnexpectedAnswerError(f"{self.url}: {_NONSENSE}")
            arguments["ContinuationToken"] = following

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        """Write an object in one request."""
        check_conditions(if_absent=if_absent, if_tag=if_tag)
        body = bytes(data)
        arguments: dict[str, Any] = {"Bucket": self._at.bucket, "Key": self._at.full_key(key), "Body": body}
        if if_absent:
            arguments["IfNoneMatch"] = "*"
        if if_tag is not None:
            arguments["IfMatch"] = f'"{if_tag}"'
        address = self._at.object_url(key)
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
        return ObjectInfo(key=key, size_bytes=len(body), tag=_tag(_said(answer, "ETag", address)))

    async def delete(self, key: str) -> None:
        """Delete an object."""
        arguments: dict[str, Any] = {"Bucket": self._at.bucket, "Key": self._at.full_key(key), **self._payer}
        await self._control(self._at.object_url(key), lambda client: client.delete_object(**arguments))

    async def presign(self, key: str, *, seconds: int, tag: str = "") -> str:
        """Return a URL that stands for a signed GET; S3 tells no versions of an object apart by their ETag."""
        access, full_key = self._access.get(), self._at.full_key(key)
        signer = await access.current()
        if signer is None:
            raise CredentialsError(f"{self.url}: an anonymous client has nothing to sign with; give credentials")
        return access.presigned(full_key, signer, seconds)

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

    async def _read(
        self, method: str, key: str, headers: dict[str, str], destination: Destination | None = None
    ) -> Reply:
        """Send a signed request, once more if the credentials had to be renewed."""
        access, full_key, address = self._access.get(), self._at.full_key(key), self._at.object_url(key)

        async def once(signer: ReadOnlyCredentials | None) -> Reply:
            call = access.call(method, full_key, headers, signer, address)
            if destination is None:
                reply = await access.reader.ask(call)
            else:
                reply = await access.reader.read_into(call, destination)
            if reply.refused:
                raise error_of(_failure(address, reply), _BY_CODE)
            return reply

        return await with_renewal(access, once)

    async def _control(self, address: str, work: Callable[[S3Client], Awaitable[_T]], *, writing: bool = False) -> _T:
        """Perform a call of the control plane, once more if the credentials had to be renewed."""
        access = self._access.get()

        async def once(_: ReadOnlyCredentials | None) -> _T:
            with _control_errors(address, writing=writing):
                return await work(await access.client())

        return await with_renewal(access, once)

    def _info(self, key: str, reply: Reply) -> ObjectInfo:
        if "ETag" not in reply.headers:
            raise UnexpectedAnswerError(
                f"{self._at.object_url(key)}: the endpoint sends no ETag; stoker pins objects by it"
            )
        return ObjectInfo(key=key, size_bytes=reply.size_bytes, tag=_tag(reply.headers["ETag"]))


def _said(answer: Mapping[str, Any], name: str, address: str) -> Any:
    if name not in answer:
        raise UnexpectedAnswerError(f"{address}: {_NONSENSE}")
    return answer[name]


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
