"""Reaching S3: where a bucket answers, with whose credentials, and how a request is signed.

Only what needs it pays for botocore's client: a reader signs its GETs with botocore's signer (45 µs each) and never
builds one (0.1 s).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import aioboto3
from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSPreparedRequest, AWSRequest
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import ProfileNotFound
from botocore.utils import check_dns_name

from stoker._stores.aws_credentials import AwsCredentials, Keys, botocore_session
from stoker._stores.credentials import Endpoint, Identity, parse_date
from stoker._stores.http import Call, HttpReader, without_secrets
from stoker._stores.http_session import exchange, open_reader, open_session, translated
from stoker._stores.network import check_endpoint
from stoker._stores.options import S3Options
from stoker.errors import ConfigError

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client

__all__ = ["S3Access", "endpoint_of"]

_OTHERWISE = ", or send none with S3Options(anonymous=True) or --anonymous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a bucket answers.

    Attributes:
        endpoint_url: of an S3-compatible service; None is AWS.
        region: that requests are signed for.
        base_url: what comes before an object's key.
    """

    endpoint_url: str | None
    region: str
    base_url: str


class S3Access:
    """Connections, credentials and the control-plane client of one store in one event loop.

    Attributes:
        endpoint_url: of an S3-compatible service; empty for AWS.
        reader: performs reads.
    """

    def __init__(self, bucket: str, options: S3Options) -> None:
        self._options = options
        self._credentials = AwsCredentials(profile=options.profile, keys=_keys(options), otherwise=_OTHERWISE)
        botocore = self._credentials.session
        self._target = _target(bucket, options, botocore, os.environ)
        self._client_lock = asyncio.Lock()
        self._client: S3Client | None = None
        self._clients = AsyncExitStack()
        bundle: str | None = botocore.get_config_variable("ca_bundle")
        self.endpoint_url = self._target.endpoint_url or ""
        self._session = open_session(options.http, self._target.base_url, ca_bundle=bundle)
        self.reader: HttpReader = open_reader(options.http, self._target.base_url, self._session, ca_bundle=bundle)

    async def current(self) -> ReadOnlyCredentials | None:
        """Return credentials, refreshed if they are about to expire; None for anonymous requests.

        Raises:
            CredentialsError: there are none.
        """
        return None if self._options.anonymous else await self._credentials.current()

    async def renew(self, used: ReadOnlyCredentials | None) -> ReadOnlyCredentials | None:
        """Look for credentials afresh, unless another call has done so since ``used`` were taken."""
        return None if used is None else await self._credentials.renew(used)

    async def identity(self) -> Identity:
        """Return whose credentials are used."""
        return Identity(kind="none") if self._options.anonymous else await self._credentials.identity()

    async def endpoint(self) -> Endpoint:
        """Ask for the bucket without a signature: even its refusal says where it lives and what time it is."""
        target = self._target
        call = Call(method="HEAD", url=target.base_url, headers={}, address=target.base_url)
        with translated(target.base_url):
            reply = await exchange(self._session, call)
        return Endpoint(
            address=target.base_url,
            asked_region=target.region,
            region=reply.headers.get("x-amz-bucket-region", ""),
            date=parse_date(reply.headers.get("Date")),
        )

    async def client(self) -> S3Client:
        """Return the control-plane client, made on first use."""
        async with self._client_lock:
            if self._client is None:
                session = aioboto3.Session(botocore_session=self._credentials.client_session())
                context = session.client(
                    "s3",
                    region_name=self._target.region,
                    endpoint_url=self._target.endpoint_url,
                    config=_client_config(self._options, self._target),
                )
                client: S3Client = await self._clients.enter_async_context(context)
                client.meta.events.register_last("before-parameter-build.s3", _refuse_redirects)
                client.meta.events.register("before-send.s3", self._send)  # type: ignore[arg-type]  # returns what is sent
                self._client = client
            return self._client

    def call(
        self, method: str, key: str, headers: dict[str, str], signer: ReadOnlyCredentials | None, address: str
    ) -> Call:
        """Return a request for an object, signed by ``signer`` unless that is None."""
        if self._options.requester_pays:
            headers = {**headers, "x-amz-request-payer": "requester"}
        url = self._url(key)
        request = AWSRequest(method=method, url=url, headers=headers)
        if signer is not None:
            S3SigV4Auth(signer, "s3", self._target.region).add_auth(request)
        return Call(method=method, url=url, headers=dict(request.headers.items()), address=address)

    def presigned(self, key: str, signer: ReadOnlyCredentials, seconds: int) -> str:
        """Return the URL of an object, signed so that it can be read without credentials."""
        payer = {"x-amz-request-payer": "requester"} if self._options.requester_pays else {}
        request = AWSRequest(method="GET", url=self._url(key), params=payer)
        S3SigV4QueryAuth(signer, "s3", self._target.region, expires=seconds).add_auth(request)
        return str(request.url)

    def _url(self, key: str) -> str:
        return f"{self._target.base_url}/{quote(key, safe='-_.~/')}"

    async def _send(self, request: AWSPreparedRequest, **_: object) -> AioAWSResponse:
        """Send a request of the control plane over our own session.

        So the proxy and the certificates are those of the bulk reads; and no redirect is followed, while aiobotocore's
        own way follows them, to a machine's metadata service if it is told to.
        """
        headers = {name: value if isinstance(value, str) else value.decode() for name, value in request.headers.items()}
        chunked = headers.pop("Transfer-Encoding", "") == "chunked"
        call = Call(
            method=request.method,
            url=request.url,
            headers=headers,
            address=self._target.base_url,
            data=request.body,
            chunked=chunked,
        )
        reply = await exchange(self._session, call)
        body = without_secrets(reply.body, headers)  # S3 reports some errors with status 200
        answered = {name.lower(): value for name, value in reply.headers.items()}
        return AioAWSResponse(request.url, reply.status, answered, _Body(body))  # type: ignore[arg-type]  # as aiobotocore's own

    async def close(self) -> None:
        """Close the connections; those of calls in progress break."""
        await self.reader.close()
        await self._clients.aclose()
        await self._session.close()


@dataclass(frozen=True, slots=True)
class _Body:
    """A body that has arrived, as aiobotocore reads one."""

    data: bytes

    async def read(self) -> bytes:
        return self.data


def _keys(options: S3Options) -> Keys | None:
    if options.access_key_id is None or options.secret_access_key is None:
        return None
    return options.access_key_id, options.secret_access_key, options.session_token


def endpoint_of(bucket: str, options: S3Options) -> str:
    """Return the URL of the S3-compatible service that a bucket is in; empty for AWS.

    Raises:
        ConfigError: the configured endpoint is no URL, or the profile does not exist.
    """
    if options.endpoint_url is not None:
        return options.endpoint_url
    return _target(bucket, options, botocore_session(options.profile, _keys(options)), os.environ).endpoint_url or ""


def _target(bucket: str, options: S3Options, session: AioSession, environment: Mapping[str, str]) -> Target:
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
        return Target(endpoint_url=endpoint, region=region, base_url=f"{endpoint}/{quote(bucket, safe='')}")
    host = f"s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
    # A dot in the bucket's name would not match the certificate's wildcard, and old names need not be host names.
    base_url = f"https://{bucket}.{host}" if check_dns_name(bucket) else f"https://{host}/{bucket}"
    return Target(endpoint_url=None, region=region, base_url=base_url)


def _refuse_redirects(context: dict[str, Any], **_: object) -> None:
    """Tell botocore that it has followed a redirect: bulk reads follow none, so neither does the rest."""
    context.setdefault("s3_redirect", {})["redirected"] = True


def _client_config(options: S3Options, target: Target) -> AioConfig:
    return AioConfig(
        signature_version=UNSIGNED if options.anonymous else "s3v4",
        s3={
            "addressing_style": "path" if target.endpoint_url else "auto",
            "us_east_1_regional_endpoint": "regional",  # the host that bulk reads go to
        },
        ignore_configured_endpoint_urls=True,  # resolved above, for both planes alike
        retries={"total_max_attempts": 1, "mode": "standard"},
        # Timeouts and the number of connections are those of our session, which does the sending.
        # Many S3-compatible services know no checksum trailers.
        request_checksum_calculation="when_required" if target.endpoint_url else "when_supported",
        response_checksum_validation="when_required",
    )
