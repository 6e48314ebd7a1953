"""Stores on S3 and compatible services: signed requests, and reads into the caller's memory."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import quote, unquote_plus, urlencode, urlsplit
from xml.etree import ElementTree
from zlib import crc32

from aiobotocore.session import AioSession
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import ProfileNotFound
from botocore.utils import check_dns_name

from stoker._base.meter import Operation, PriceKey
from stoker._base.upload import UnfinishedUpload
from stoker._stores.aws_credentials import AwsCredentials, AwsKeys, Keys, botocore_session
from stoker._stores.aws_signature import ReadSigner
from stoker._stores.http import ErrorRule, HttpRequest, HttpResponse, create_error, host_of, parse_date
from stoker._stores.http_objects import (
    EndpointInfo,
    ExpiredCredentialsError,
    HttpBucketStore,
    ObjectOperation,
    StaticCredentials,
)
from stoker._stores.http_session import Connections
from stoker._stores.location import Location
from stoker._stores.options import S3Options, check_endpoint
from stoker._stores.s3_upload import S3Upload, find_text, parse_uploads
from stoker.abc import Buffer, ObjectInfo
from stoker.errors import (
    BucketNotFoundError,
    ConfigError,
    CredentialsError,
    DeadlineError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StoreError,
    ThrottledError,
    TransientError,
    UnexpectedAnswerError,
    WrongRegionError,
)

_ANONYMOUS_REMEDY = ", or send none with S3Options(anonymous=True) or --anonymous"
_CHECKSUM = "x-amz-checksum-crc32"

_BAD_KEY: ErrorRule = (CredentialsError, "the access key or its secret is wrong; check the credentials in use")
_DENIED: ErrorRule = (
    PermissionDeniedError,
    (
        "these credentials may not do this (or, without s3:ListBucket, it does not exist); "
        "if the bucket asks requesters to pay, use S3Options(requester_pays=True) or --requester-pays"
    ),
)
_EXPIRED: ErrorRule = (ExpiredCredentialsError, "the credentials have expired; log in again or renew the session token")
_REGION: ErrorRule = (
    WrongRegionError,
    "the bucket is in region {region}; set AWS_REGION, S3Options(region=...) or --region",
)

# For other codes, the status says enough.
_BY_CODE: dict[str, ErrorRule] = {
    "403": _DENIED,
    "AuthorizationHeaderMalformed": _BAD_KEY,
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "IllegalLocationConstraintException": _REGION,
    "InvalidAccessKeyId": _BAD_KEY,
    "InvalidObjectState": (StoreError, "the object is archived; restore it before reading"),
    "InvalidToken": _BAD_KEY,
    "NoSuchUpload": (NotFoundError, "the upload was aborted, for example by a lifecycle rule; pack again to resume"),
    "NoSuchBucket": (BucketNotFoundError, "the bucket does not exist; check its name and the endpoint"),
    "PermanentRedirect": _REGION,
    "RequestTimeTooSkewed": (StoreError, "this machine's clock is off; set it"),
    "RequestTimeout": (DeadlineError, "S3 waited too long for the request; try again"),
    "SignatureDoesNotMatch": _BAD_KEY,
    "TemporaryRedirect": _REGION,
    "Throttling": (ThrottledError, "S3 asks to slow down; send fewer requests at once"),
    "TokenRefreshRequired": _EXPIRED,
    "WrongRegion": _REGION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Endpoint:
    """The resolved endpoint of a bucket.

    Attributes:
        endpoint_url: URL of an S3-compatible service; None for AWS.
        region: Region that requests are signed for.
        base_url: URL of the bucket, without a trailing slash.
    """

    endpoint_url: str | None
    region: str
    base_url: str


class S3StoreClient(Connections):
    """Connections and credentials of one store in one event loop.

    Attributes:
        endpoint_url: URL of an S3-compatible service; empty for AWS.
    """

    def __init__(self, bucket: str, options: S3Options) -> None:
        self._options = options
        chain = AwsCredentials(profile=options.profile, keys=_keys(options), other_remedies=_ANONYMOUS_REMEDY)
        self.credentials = StaticCredentials(None, "none") if options.anonymous else chain
        self._target = _resolve_endpoint(bucket, options, chain.session, os.environ)
        self.endpoint_url = self._target.endpoint_url or ""
        parts = urlsplit(self._target.base_url)
        self._base_path, self._host = parts.path, host_of(f"{parts.scheme}://{parts.netloc}")
        self._signer = ReadSigner(self._target.region)
        bundle: str | None = chain.session.get_config_variable("ca_bundle")
        super().__init__(options.http, self._target.base_url, ca_bundle=bundle)

    async def describe_endpoint(self) -> EndpointInfo:
        """Send an unsigned HEAD of the bucket: even an error response has its region and time."""
        target = self._target
        reply = await self.reader.send(
            HttpRequest(method="HEAD", url=target.base_url, headers={}, address=target.base_url)
        )
        return EndpointInfo(
            address=target.base_url,
            signing_region=target.region,
            region=reply.headers.get("x-amz-bucket-region", ""),
            date=parse_date(reply.headers.get("Date")),
        )

    def create_request(
        self, operation: ObjectOperation, full_key: str, credentials: AwsKeys | None, address: str
    ) -> HttpRequest:
        """Return a request, signed by ``credentials`` unless that is None; ``full_key`` is a key, empty for the bucket.

        On AWS, writes carry a checksum, which many S3-compatible services do not support. Parts of uploads do not:
        their signature has a hash of the body.
        """
        headers = operation.headers
        if operation.tag is not None:
            headers["If-Match"] = f'"{operation.tag}"'
        if operation.is_new:
            headers["If-None-Match"] = "*"
        if self._options.requester_pays:
            headers["x-amz-request-payer"] = "requester"
        method, url = operation.method, self._url(full_key, operation.query)
        if operation.is_read and not operation.query and full_key:
            if credentials is not None:
                path = url[len(self._target.base_url) - len(self._base_path) :]
                headers = self._signer.sign(credentials.keys, method, self._host, path, headers)
            return HttpRequest(method=method, url=url, headers=headers, address=address)
        request = AWSRequest(method=method, url=url, headers=headers, data=operation.body)
        if operation.body is not None and not operation.query and not self.endpoint_url:
            request.headers[_CHECKSUM] = b64encode(crc32(operation.body).to_bytes(4, "big")).decode()
            # Saves hashing the body once more for the signature.
            request.context["checksum"] = {"request_algorithm": {"in": "header", "name": _CHECKSUM}}
            request.context["has_streaming_input"] = True
        if credentials is not None:
            S3SigV4Auth(credentials.keys, "s3", self._target.region).add_auth(request)
        headers = dict(request.headers.items())
        return HttpRequest(method=method, url=url, headers=headers, address=address, data=operation.body)

    def presign(self, key: str, signer: AwsKeys, seconds: int) -> str:
        """Return a signed URL of an object, readable without credentials for some seconds."""
        payer = {"x-amz-request-payer": "requester"} if self._options.requester_pays else {}
        request = AWSRequest(method="GET", url=self._url(key), params=payer)
        S3SigV4QueryAuth(signer.keys, "s3", self._target.region, expires=seconds).add_auth(request)
        return str(request.url)

    def _url(self, key: str, query: Mapping[str, str] | None = None) -> str:
        base_url = self._target.base_url
        url = f"{base_url}/{quote(key, safe='-_.~/')}" if key or not urlsplit(base_url).path else base_url
        return f"{url}?{urlencode(query, quote_via=quote, safe='')}" if query else url


def _keys(options: S3Options) -> Keys | None:
    if options.access_key_id is None or options.secret_access_key is None:
        return None
    return options.access_key_id, options.secret_access_key, options.session_token


def find_endpoint_url(bucket: str, options: S3Options) -> str:
    """Return the URL of the S3-compatible service of a bucket; empty for AWS.

    Raises:
        ConfigError: The configured endpoint is not a URL, or the profile does not exist.
    """
    if options.endpoint_url is not None:
        return options.endpoint_url
    return (
        _resolve_endpoint(bucket, options, botocore_session(options.profile, _keys(options)), os.environ).endpoint_url
        or ""
    )


def _resolve_endpoint(
    bucket: str, options: S3Options, session: AioSession, environment: Mapping[str, str]
) -> S3Endpoint:
    """Resolve endpoint and region from the options, else the environment, else the profile."""
    try:
        profile = session.get_scoped_config()
        region = options.region or environment.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
        ignore_configured = session.get_config_variable("ignore_configured_endpoint_urls")
    except ProfileNotFound as error:
        raise ConfigError(f"{error}; check AWS_PROFILE and the AWS configuration files") from error
    endpoint = options.endpoint_url
    if endpoint is None and not ignore_configured:
        configured = (environment.get("AWS_ENDPOINT_URL_S3"), environment.get("AWS_ENDPOINT_URL"))
        endpoint = next(filter(None, (*configured, profile.get("endpoint_url"))), None)
    if endpoint is not None:
        check_endpoint(endpoint, "AWS_ENDPOINT_URL (or the profile's endpoint_url)")
        endpoint = endpoint.rstrip("/")
        return S3Endpoint(endpoint_url=endpoint, region=region, base_url=f"{endpoint}/{quote(bucket, safe='')}")
    host = f"s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
    # A bucket name with a dot does not match the wildcard certificate, and old names need not be valid host names.
    base_url = f"https://{bucket}.{host}" if check_dns_name(bucket) else f"https://{host}/{bucket}"
    return S3Endpoint(endpoint_url=None, region=region, base_url=base_url)


class S3Store(HttpBucketStore[S3StoreClient]):
    """A store in an S3 bucket, ``s3://bucket/prefix``."""

    malformed_message = "the response is malformed; check that the endpoint speaks S3"

    def __init__(self, location: Location, options: S3Options) -> None:
        if location.bucket.endswith("--x-s3"):
            raise ConfigError(
                f"{location.url} is a directory bucket (S3 Express One Zone), whose sessions and zonal endpoints "
                "stoker does not support; use a general-purpose bucket"
            )
        super().__init__(location, partial(S3StoreClient, location.bucket, options))
        self._options = options

    def price_key(self) -> PriceKey:
        """Return the key of the store's prices; it has the endpoint, since many services speak S3."""
        access = self._clients.any()  # creating a botocore session takes milliseconds, and the loader waits for this
        endpoint_url = (
            find_endpoint_url(self._location.bucket, self._options) if access is None else access.endpoint_url
        )
        return PriceKey(self.url, endpoint_url, self._options.prices or "")

    async def presign(self, key: str, *, seconds: int, tag: str = "") -> str:
        """Return the URL of a signed GET of an object; ``tag`` is ignored, since S3 cannot select a version by ETag."""
        access, full_key = self._clients.get(), self._location.full_key(key)
        signer = await access.credentials.current()
        if signer is None:
            raise CredentialsError(f"{self.url}: an anonymous client cannot sign URLs; give credentials")
        return access.presign(full_key, signer, seconds)

    async def _head(self, key: str) -> ObjectInfo:
        try:
            return self._info(key, await self._perform(ObjectOperation("HEAD", key)))
        except TransientError:
            raise
        except StoreError:
            # The response to HEAD has no body with the error: read a byte to get it.
            return self._info(key, await self._perform(ObjectOperation("GET", key, "bytes=0-0")))

    async def _page(self, prefix: str, after: str, token: str) -> tuple[list[ObjectInfo], str]:
        query = {"list-type": "2", "encoding-type": "url", "prefix": prefix}
        query |= {name: value for name, value in (("start-after", after), ("continuation-token", token)) if value}
        reply = await self._perform(ObjectOperation("GET", None, query=query))
        try:
            page = ElementTree.fromstring(reply.body)  # noqa: S314 - expat limits what entities expand to
            if page.tag.rpartition("}")[2] != "ListBucketResult":  # an error document or a proxy's page
                raise ValueError(page.tag)
            decoded = unquote_plus if page.findtext("{*}EncodingType") == "url" else str
            infos = [self._parse_entry(entry, decoded) for entry in page.iterfind("{*}Contents")]
            is_last = page.findtext("{*}IsTruncated") != "true"
            return infos, "" if is_last else _text(page, "NextContinuationToken")
        except (ElementTree.ParseError, ValueError, LookupError):  # LookupError: unknown encoding
            raise UnexpectedAnswerError(f"{self.url}: {self.malformed_message}") from None

    def _parse_entry(self, entry: ElementTree.Element, decoded: Callable[[str], str]) -> ObjectInfo:
        key = decoded(_text(entry, "Key"))
        size = _text(entry, "Size")
        tag = _text(entry, "ETag").strip('"')
        return ObjectInfo(key=self._location.relative(key), size_bytes=int(size), tag=tag)

    async def _put(self, key: str, data: Buffer, *, if_absent: bool, if_tag: str | None) -> ObjectInfo:
        body = bytes(data)
        try:
            reply = await self._perform(ObjectOperation("PUT", key, tag=if_tag, is_new=if_absent, body=body))
        except BucketNotFoundError:
            raise
        except NotFoundError as error:  # If-Match without an object
            raise PreconditionFailedError(
                f"{self._location.object_url(key)} was deleted by another writer; read it again and decide"
            ) from error
        return replace(self._info(key, reply), size_bytes=len(body))

    async def begin_upload(self, key: str, size_bytes: int) -> S3Upload:
        """Begin a multipart upload."""
        with self.meter.count_request(Operation.PUT):
            reply = await self._perform(ObjectOperation("POST", key, query={"uploads": ""}))
        address = self._location.object_url(key)
        if not (upload_id := find_text(reply.body, "UploadId")):
            raise UnexpectedAnswerError(f"{address}: the endpoint began no multipart upload; {self.malformed_message}")
        parse_error = partial(_parse_error, address, is_write=True)
        return S3Upload(key, size_bytes, upload_id, self._perform, parse_error, self.meter)

    async def list_uploads(self, prefix: str) -> list[UnfinishedUpload]:
        """Return the uploads of objects under ``prefix`` that were neither completed nor aborted."""
        found: list[UnfinishedUpload] = []
        query = {"uploads": "", "encoding-type": "url", "prefix": self._location.within_bucket(prefix)}
        while True:
            with self.meter.count_request(Operation.LIST):
                reply = await self._perform(ObjectOperation("GET", None, query=query))
            try:
                page, following = parse_uploads(reply.body)
            except (ElementTree.ParseError, ValueError, LookupError):
                raise UnexpectedAnswerError(f"{self.url}: {self.malformed_message}") from None
            found += [replace(each, key=self._location.relative(each.key)) for each in page]
            if not following:
                return found
            query |= following

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Discard the parts of an upload; does nothing if it has ended meanwhile."""
        with self.meter.count_request(Operation.DELETE), suppress(NotFoundError):
            await self._perform(ObjectOperation("DELETE", upload.key, query={"uploadId": upload.upload_id}))

    async def _delete(self, key: str) -> None:
        await self._perform(ObjectOperation("DELETE", key))

    async def _response_error(
        self, _access: S3StoreClient, operation: ObjectOperation, _proof: Any, address: str, reply: HttpResponse
    ) -> StoreError:
        return _parse_error(address, reply, is_write=operation.body is not None)

    def _info(self, key: str, reply: HttpResponse) -> ObjectInfo:
        if "ETag" not in reply.headers:
            raise UnexpectedAnswerError(
                f"{self._location.object_url(key)}: the endpoint sends no ETag, which stoker needs to detect "
                "changed objects"
            )
        return ObjectInfo(key=key, size_bytes=reply.size_bytes, tag=reply.headers["ETag"].strip('"'))


def _text(element: ElementTree.Element, name: str) -> str:
    """Return the text of a child element.

    Raises:
        ValueError: The element is missing or empty.
    """
    text = element.findtext(f"{{*}}{name}")
    if not text:
        raise ValueError(name)
    return text


def _parse_error(address: str, reply: HttpResponse, *, is_write: bool = False) -> StoreError:
    """Parse an error document; by regular expressions, which are safer than an XML parser for untrusted input."""
    code, text, region = (
        match[1].decode(errors="replace") if (match := re.search(pattern, reply.body)) else ""
        for pattern in (rb"<Code>([^<]+)</Code>", rb"<Message>([^<]+)</Message>", rb"<Region>([^<]+)</Region>")
    )
    region = reply.headers.get("x-amz-bucket-region", region)
    region = region if re.fullmatch(r"[a-z0-9-]{1,32}", region) else ""
    if reply.status in (301, 307, 400) and region and code in ("", "AuthorizationHeaderMalformed"):
        code = "WrongRegion"
    return create_error(address, reply, _BY_CODE, code, text, region=region, is_write=is_write)
