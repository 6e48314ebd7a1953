"""A read-only store of a data set that a function serves over HTTPS, for machines without bucket credentials.

The store holds the manifest, its versions, and their super-samples. The manifest maps a key to a path of the function
(``super-samples/{row}?version=``).

The function, or the platform in front of it, authenticates the caller by a token of ours, an AWS principal, or a Google
identity. Credentials are sent to the function only; its redirect, of which at most one is followed, gets none. A
platform's SDK is imported only if its identities are used.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from stoker._base.batch_read import BatchLimits, BatchRefusedError, ObjectRange
from stoker._base.plugins import require_extra
from stoker._base.threads import PerLoop
from stoker._format.manifest import POINTER_KEY, Manifest, version_key
from stoker._stores.access_token import parse_expiry
from stoker._stores.http import (
    Destination,
    ErrorRule,
    HttpRequest,
    HttpResponse,
    HttpTransport,
    create_error,
    parse_date,
)
from stoker._stores.http_objects import (
    CredentialsSource,
    EndpointInfo,
    HttpObjectStore,
    ObjectOperation,
    StaticCredentials,
)
from stoker._stores.http_session import Connections
from stoker._stores.location import Location, check_key, check_tag_and_range, check_text
from stoker._stores.options import Auth, HttpOptions, ServedOptions, check_endpoint, is_loopback, lambda_region
from stoker._stores.served_index import RowIndex, list_super_samples, version_of
from stoker._stores.served_values import MAX_RANGES, ValueRange, encode_ranges, parse_answer_bytes
from stoker.abc import ObjectInfo
from stoker.errors import (
    BucketNotFoundError,
    ChecksumError,
    ConfigError,
    CredentialsError,
    FormatError,
    NotFoundError,
    OutdatedFunctionWarning,
    PermissionDeniedError,
    ServerError,
    StoreError,
    UnexpectedAnswerError,
)

_BY_CODE: dict[str, ErrorRule] = {
    "failed": (StoreError, "the function failed; its log says why, so ask the person who deployed it"),
    "forbidden": (PermissionDeniedError, "the token is for other data sets; get one for this data set"),
    "no-such-dataset": (
        BucketNotFoundError,
        "the function serves no data set of that name; check the address, which ends with /v1/NAME",
    ),
    "too-large": (
        StoreError,
        "the object is too large for a function's response; deploy it with signed URLs",
    ),
    "unauthorized": (CredentialsError, "a valid token is required; set STOKER_TOKEN or ServedOptions(token=...)"),
}
_ANONYMOUS_REMEDY = "send none with ServedOptions(anonymous=True) or --anonymous"
# Remedies for users without credentials of the platform that a host belongs to.
_OTHER_REMEDIES = f", set STOKER_TOKEN if the function wants a token, or {_ANONYMOUS_REMEDY}"
_GOOGLE_DOMAINS = (".run.app", ".cloudfunctions.net")
# Auth → module that imports the platform's SDK, class of its credentials, extra.
_PLATFORMS: Mapping[Auth, tuple[str, str, str]] = {
    "aws": ("stoker._stores.aws_credentials", "AwsServedCredentials", "s3"),
    "google": ("stoker._stores.google_credentials", "GoogleServedCredentials", "gcs"),
}

_REDIRECT = 307
_EXPIRED_URL: ErrorRule = (
    ServerError,
    "the bucket refuses the URL that the function has signed, which expires soon; try again",
)
_MAX_LOCATION_CHARACTERS = 8192
# Of refusals of values after which requests for each of them may succeed, or name the object.
_BATCH_CODES = ("bad-range", "changed", "no-such-super-sample", "not-found", "too-large")
_UNKNOWN_ANSWER_BYTES = 4_500_000  # until the function tells its limit: that of Lambda
_MAX_ORIGINS = 8  # the function itself, and the hosts of the bucket in its redirects

_P = TypeVar("_P")


class ServedCredentials(CredentialsSource[_P], Protocol[_P]):
    """Credentials for a function, which may expire at any time."""

    def headers(
        self, url: str, headers: Mapping[str, str], credentials: _P, data: bytes | None = None
    ) -> Mapping[str, str]:
        """Return the headers of a GET of ``url``, or of a POST of ``data``, with the credentials added."""
        ...

    def rule(self, status: int, code: str) -> ErrorRule:
        """Return error class and remedy for a platform's status, 401 or 403, and its own code, possibly empty."""
        ...


def resolve_auth(url: str, options: ServedOptions, environment: Mapping[str, str]) -> Auth | None:
    """Return the kind of credentials for the data set at ``url``; None for none.

    The options take precedence, then a token in the environment, then the default of the host's platform.
    """
    host = urlsplit(url).hostname or ""
    if options.anonymous or options.named_auth is not None:
        return options.named_auth
    if environment.get("STOKER_TOKEN"):
        return "token"
    if lambda_region(url):
        return "aws"
    return "google" if host.endswith(_GOOGLE_DOMAINS) else None


class BearerCredentials(StaticCredentials[str | None]):
    """A fixed bearer token, or none."""

    def __init__(self, token: str | None) -> None:
        expires = None if token is None else parse_expiry(token)
        kind = "none" if token is None else "a ready token" if expires is None else "a token of stoker's"
        super().__init__(token, kind, expires)

    @classmethod
    def from_options(cls, options: ServedOptions, environment: Mapping[str, str]) -> BearerCredentials:
        """Return the token of the options, else of the environment.

        Raises:
            ConfigError: There is no token, or it has characters that HTTP does not allow.
        """
        token = options.token or environment.get("STOKER_TOKEN")
        if not token:
            raise ConfigError(
                f"a token is required, and there is none: set STOKER_TOKEN, or ServedOptions(token=...), or "
                f"{_ANONYMOUS_REMEDY}"
            )
        return cls(ServedOptions(token=token).token)  # ServedOptions checks it

    def headers(
        self, _url: str, headers: Mapping[str, str], credentials: str | None, _data: bytes | None = None
    ) -> Mapping[str, str]:
        """Return the headers with the token."""
        return headers if credentials is None else {**headers, "Authorization": f"Bearer {credentials}"}

    def rule(self, status: int, _code: str) -> ErrorRule:
        """Return the error, and the other kinds of credentials as its remedy."""
        others = "ServedOptions(auth='aws') or (auth='google'), or --auth"
        if self._credentials is None:
            return CredentialsError, f"the platform requires credentials; set STOKER_TOKEN, or use {others}"
        kind = CredentialsError if status == 401 else PermissionDeniedError
        return kind, f"the platform, not the function, refuses the token; for identities of its own, use {others}"


def credentials_factory(
    url: str, options: ServedOptions, environment: Mapping[str, str]
) -> Callable[[], ServedCredentials[Any]]:
    """Return a factory of the credentials for the data set at ``url``; the factory may raise ConfigError.

    Raises:
        MissingExtraError: The platform's SDK is not installed.
    """
    auth = resolve_auth(url, options, environment)
    if auth is None:
        return partial(BearerCredentials, None)
    if auth == "token":
        return partial(BearerCredentials.from_options, options, environment)
    module, caller, extra = _PLATFORMS[auth]
    with require_extra(f"{url} is called with an identity of {auth}'s, which", extra):
        platform = import_module(module)
    return partial(getattr(platform, caller), url, options, environment, _OTHER_REMEDIES)


class ServedStoreClient:
    """Connections to one function, and to the targets of its redirects, in one event loop.

    Args:
        url: URL of the data set, https:// or http://.
        credentials: Credentials for the function.
        http: Connection limits.
    """

    def __init__(self, url: str, credentials: ServedCredentials[Any], http: HttpOptions) -> None:
        self._url, self._http = url, http
        self._is_local = is_loopback(urlsplit(url).hostname or "")
        self._connections: dict[str, Connections] = {}
        self.credentials = credentials

    @property
    def reader(self) -> HttpTransport:
        """The object itself, which follows redirects."""
        return self

    writer = reader

    def create_request(self, operation: ObjectOperation, full_key: str, credentials: Any, address: str) -> HttpRequest:
        """Return a GET of a path below the data set's URL, or a POST.

        The condition on the tag is for the function only: the bucket's own tags may differ.
        """
        url, data = f"{self._url}/{full_key}", operation.body
        condition = {} if operation.tag is None else {"If-Match": f'"{operation.tag}"'}
        if data is None:
            headers = self.credentials.headers(url, operation.headers | condition, credentials)
            return HttpRequest(method="GET", url=url, headers=headers, address=address)
        headers = self.credentials.headers(url, {"Content-Type": "text/plain"}, credentials, data)
        length = {"Content-Length": str(len(data))}
        return HttpRequest(method="POST", url=url, headers={**headers, **length}, address=address, data=data)

    async def send(self, request: HttpRequest, destination: Destination | None = None) -> HttpResponse:
        """Send a request to the function, and follow at most one redirect of a GET, with the header ``Range`` only.

        Raises:
            StoreError: There was no response, or the redirect must not be followed.
        """
        reply = await self._send_to_origin(request, destination)
        if reply.status != _REDIRECT or request.method != "GET":
            return reply
        target = self._check_redirect(reply.headers.get("Location", ""), request.address)
        headers = {name: value for name, value in request.headers.items() if name == "Range"}
        reply = await self._send_to_origin(replace(request, url=target, headers=headers), destination)
        if 300 <= reply.status < 400:
            raise StoreError(f"{request.address}: the target of the function's redirect redirects again; not followed")
        if reply.status in (400, 401, 403):
            raise create_error(request.address, replace(reply, headers={}, body=b""), {str(reply.status): _EXPIRED_URL})
        return reply

    async def describe_endpoint(self) -> EndpointInfo:
        """Request a byte of the manifest without credentials: even an error response has the time."""
        call = HttpRequest(method="GET", url=f"{self._url}/manifest", headers={"Range": "bytes=0-0"}, address=self._url)
        reply = await self._send_to_origin(call, None)
        date = parse_date(reply.headers.get("Date"))
        return EndpointInfo(address=self._url, region=lambda_region(self._url), date=date)

    def platform_error(self, address: str, reply: HttpResponse) -> StoreError:
        """Return the error for a platform's error response; the function has not seen the request."""
        # AWS may append a colon and the URL of a definition to the type.
        code = reply.headers.get("x-amzn-ErrorType", "").partition(":")[0]
        document = reply.document
        text = str(document.get("message") or document.get("Message") or "")
        rule = self.credentials.rule(reply.status, code)
        return create_error(address, reply, {str(reply.status): rule}, code, text)

    async def close(self) -> None:
        """Close the connections; calls in progress fail."""
        for connections in self._connections.values():
            await connections.close()
        self._connections.clear()

    async def _send_to_origin(self, call: HttpRequest, destination: Destination | None) -> HttpResponse:
        parts = urlsplit(call.url)
        origin = f"{parts.scheme}://{parts.netloc}"
        if origin not in self._connections:
            if len(self._connections) >= _MAX_ORIGINS:
                raise StoreError(
                    f"{call.address}: the function redirects to more than {_MAX_ORIGINS - 1} hosts; check that it is a "
                    "stoker function"
                )
            self._connections[origin] = Connections(self._http, origin)
        return await self._connections[origin].reader.send(call, destination)

    def _check_redirect(self, location: str, address: str) -> str:
        """Check the target of a redirect, and return it: https, or loopback if the function is on loopback, too.

        A signed URL is a secret, so no message shows it.
        """
        try:
            if len(location) > _MAX_LOCATION_CHARACTERS or not location.isascii() or not location.isprintable():
                raise ValueError
            parts = urlsplit(location)
            check_endpoint(f"{parts.scheme}://{parts.netloc}", "the redirect")
            is_safe = parts.scheme == "https" or (self._is_local and is_loopback(parts.hostname or ""))
        except (ValueError, ConfigError):
            is_safe = False
        if not is_safe or set(location) & set(" \\#"):
            raise StoreError(
                f"{address}: the function redirects to an unsafe or invalid URL; only https:// is followed"
            )
        return location


def _parse_error(reply: HttpResponse) -> tuple[str, str]:
    """Return the code and the message of a function's error document; both empty for any other response."""
    document = reply.document
    return (str(document["error"]), str(document["message"])) if {"error", "message"} <= document.keys() else ("", "")


@dataclass(slots=True)
class _BatchSupport:
    """What is known of a function's answers to requests for values; views of a store share it.

    Attributes:
        answer_bytes: maximum size of an answer.
        is_missing: whether the function does not know such requests.
    """

    answer_bytes: int = _UNKNOWN_ANSWER_BYTES
    is_missing: bool = False


class ServedStore(HttpObjectStore[ServedStoreClient]):
    """A read-only store of a served data set, ``stoker+https://host/v1/name``."""

    def __init__(self, location: Location, options: ServedOptions) -> None:
        url = f"{location.scheme.removeprefix('stoker+')}://{location.bucket}/{location.prefix}"
        caller = credentials_factory(url, options, os.environ)
        super().__init__(location, lambda: ServedStoreClient(url, caller(), options.http))
        self._learning = PerLoop(asyncio.Lock)
        self._index = RowIndex()
        self._batches = _BatchSupport()
        self._requested_versions: set[int] = (
            set()
        )  # requested versions, which may have super-samples that the newest lacks

    async def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        data, info = await super()._get(key)
        if key == POINTER_KEY or version_of(key):
            with suppress(FormatError, ChecksumError):  # the caller will find out itself
                self._index.learn(Manifest.from_bytes(data))
        return data, info

    async def _get_range(
        self, key: str, start: int, end: int, into: memoryview, tag: str | None, begun: Callable[[], None] | None
    ) -> ObjectInfo:
        info = await super()._get_range(key, start, end, into, tag, begun)
        # The bucket may have responded, which does not get the condition.
        return check_tag_and_range(self._location.object_url(key), info, start, end, tag)

    @property
    def batch_limits(self) -> BatchLimits | None:
        """Limits of a request for values; None if the function does not know such requests."""
        return None if self._batches.is_missing else BatchLimits(self._batches.answer_bytes, MAX_RANGES)

    async def _get_ranges(
        self, ranges: Sequence[ObjectRange], into: memoryview, begun: Callable[[], None] | None
    ) -> None:
        found = self._index.rows_of([part.key for part in ranges])
        if found is None:
            raise BatchRefusedError(f"{self.url}: no known version of the data set has all super-samples of a batch")
        version, rows = found
        body = encode_ranges([ValueRange(row, part.start, part.end) for row, part in zip(rows, ranges, strict=True)])
        operation = ObjectOperation("POST", None, body=body, path=f"values?version={version}")
        reply = await super()._perform(operation, Destination(into, 0, into.nbytes, begun))
        if reply.is_error:
            raise UnexpectedAnswerError(f"{self.url}: status {reply.status} in place of {into.nbytes} bytes of values")
        self._batches.answer_bytes = parse_answer_bytes(reply.headers) or self._batches.answer_bytes

    def _batch_error(self, reply: HttpResponse, code: str, text: str) -> BatchRefusedError | None:
        """Return the error for a refusal of values after which the values may be read one by one; None for others."""
        answer_bytes = parse_answer_bytes(reply.headers)
        self._batches.answer_bytes = answer_bytes or self._batches.answer_bytes
        is_unknown = reply.status == 405 or code == "bad-body" or (reply.status in (404, 413) and not code)
        if is_unknown and not self._batches.is_missing:
            self._batches.is_missing = True
            warnings.warn(
                f"{self.url}: the function does not answer requests for values ({reply.status}), so each value is read "
                "by a request of its own; deploy the function of this version of stoker",
                OutdatedFunctionWarning,
                stacklevel=2,
            )
        if is_unknown or code in _BATCH_CODES:
            return BatchRefusedError(
                f"{self.url}: the function refused a batch of values ({reply.status} {code} {text})"
            )
        return None

    async def _head(self, key: str) -> ObjectInfo:
        """Return size and tag by reading a byte: function platforms report the length 0 in the response to a HEAD."""
        return self._info(key, await self._perform(ObjectOperation("GET", key, "bytes=0-0")))

    async def _list(self, prefix: str, start_after: str) -> AsyncGenerator[ObjectInfo, None]:
        """Yield the super-samples of the newest manifest, and that manifest under both its keys."""
        for text in (prefix, start_after):
            check_text("object key or prefix", text)
        manifest = await self._read_manifest(POINTER_KEY)
        for info in list_super_samples(manifest, prefix, start_after):
            yield info
        for key in (POINTER_KEY, version_key(manifest.version)):
            if key.startswith(prefix) and key > start_after:
                yield await self._head(key)

    async def _perform(self, operation: ObjectOperation, destination: Destination | None = None) -> HttpResponse:
        key = operation.key or ""
        reply = await super()._perform(replace(operation, path=await self._path(key)), destination)
        if version := version_of(key):
            self._requested_versions.add(version)
        return reply

    async def _response_error(
        self, access: ServedStoreClient, operation: ObjectOperation, _proof: Any, address: str, reply: HttpResponse
    ) -> StoreError:
        code, text = _parse_error(reply)
        if operation.method == "POST" and (refusal := self._batch_error(reply, code, text)) is not None:
            return refusal
        if not code and reply.status in (401, 403):
            return access.platform_error(address, reply)
        if code == "no-such-dataset":  # concerns the data set, whichever object was requested
            address = self.url
        return create_error(address, reply, _BY_CODE, code, text)

    async def _path(self, key: str) -> str:
        """Return the path of an object below the data set's URL.

        Raises:
            NotFoundError: No known version has the object.
        """
        check_key(key)
        if key == POINTER_KEY:
            return "manifest"
        if version := version_of(key):
            return f"manifest?version={version}"
        if not key.startswith("data/"):
            raise NotFoundError(
                f"{self._location.object_url(key)}: a served data set has super-samples and manifests only"
            )
        if path := self._index.path_of(key) or await self._search_manifests(key):
            return path
        raise NotFoundError(f"{self._location.object_url(key)}: no known version of the data set has it")

    async def _search_manifests(self, key: str) -> str | None:
        """Read the manifests that may have a super-sample, once for all concurrent requests."""
        async with self._learning.get():
            for version in sorted(self._requested_versions, reverse=True):
                if version not in self._index:
                    with suppress(NotFoundError):  # it was deleted meanwhile
                        await self._read_manifest(version_key(version))
            if (path := self._index.path_of(key)) is None:
                await self._read_manifest(POINTER_KEY)
                path = self._index.path_of(key)
            return path

    async def _read_manifest(self, key: str) -> Manifest:
        data, _ = await self._get(key)
        try:
            return Manifest.from_bytes(data)
        except (FormatError, ChecksumError) as error:
            raise UnexpectedAnswerError(
                f"{self._location.object_url(key)} is not a manifest: {error}; check that this is a stoker function"
            ) from None

    def _info(self, key: str, reply: HttpResponse) -> ObjectInfo:
        # Google's bucket sends another ETag, and the generation in a header of its own.
        tag = reply.headers.get("x-goog-generation") or reply.headers.get("ETag", "").strip('"')
        if not tag:
            raise UnexpectedAnswerError(
                f"{self._location.object_url(key)}: the response has no ETag; check that this is a stoker function"
            )
        return ObjectInfo(key=key, size_bytes=reply.size_bytes, tag=tag)

    def _unsupported_error(self, method: str, key: str) -> StoreError:
        check_key(key)
        return PermissionDeniedError(
            f"{self._location.object_url(key)}: a served data set is read-only; write to the bucket behind the function"
        )
