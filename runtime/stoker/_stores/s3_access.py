"""Reaching S3: where a bucket answers, with whose credentials, and how a request is signed, by botocore (45 µs)."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode, urlsplit
from zlib import crc32

from aiobotocore.session import AioSession
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import ProfileNotFound
from botocore.utils import check_dns_name

from stoker._stores.aws_credentials import AwsCredentials, Keys, botocore_session
from stoker._stores.credentials import Endpoint, Identity, parse_date
from stoker._stores.http import Call
from stoker._stores.http_objects import Asked
from stoker._stores.http_session import Connections
from stoker._stores.network import check_endpoint
from stoker._stores.options import S3Options
from stoker.errors import ConfigError

__all__ = ["S3Access", "endpoint_of"]

_OTHERWISE = ", or send none with S3Options(anonymous=True) or --anonymous"
_CHECKSUM = "x-amz-checksum-crc32"


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


class S3Access(Connections):
    """Connections and credentials of one store in one event loop.

    Attributes:
        endpoint_url: of an S3-compatible service; empty for AWS.
    """

    def __init__(self, bucket: str, options: S3Options) -> None:
        self._options = options
        self._credentials = AwsCredentials(profile=options.profile, keys=_keys(options), otherwise=_OTHERWISE)
        botocore = self._credentials.session
        self._target = _target(bucket, options, botocore, os.environ)
        self.endpoint_url = self._target.endpoint_url or ""
        bundle: str | None = botocore.get_config_variable("ca_bundle")
        super().__init__(options.http, self._target.base_url, ca_bundle=bundle)

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
        reply = await self.reader.read(Call(method="HEAD", url=target.base_url, headers={}, address=target.base_url))
        return Endpoint(
            address=target.base_url,
            asked_region=target.region,
            region=reply.headers.get("x-amz-bucket-region", ""),
            date=parse_date(reply.headers.get("Date")),
        )

    def call(self, asked: Asked, place: str, proof: ReadOnlyCredentials | None, address: str) -> Call:
        """Return a request, signed by ``proof`` unless that is None; ``place`` is a key, empty for the bucket.

        On AWS, what is written carries its checksum. Many S3-compatible services know none.
        """
        headers = asked.headers
        if asked.tag is not None:
            headers["If-Match"] = f'"{asked.tag}"'
        if asked.is_new:
            headers["If-None-Match"] = "*"
        if self._options.requester_pays:
            headers["x-amz-request-payer"] = "requester"
        method, url = asked.method, self._url(place, asked.query)
        request = AWSRequest(method=method, url=url, headers=headers, data=asked.body)
        if asked.body is not None and not self.endpoint_url:
            request.headers[_CHECKSUM] = b64encode(crc32(asked.body).to_bytes(4, "big")).decode()
            # So the body need not be hashed for the signature, too.
            request.context["checksum"] = {"request_algorithm": {"in": "header", "name": _CHECKSUM}}
            request.context["has_streaming_input"] = True
        if proof is not None:
            S3SigV4Auth(proof, "s3", self._target.region).add_auth(request)
        headers = dict(request.headers.items())
        return Call(method=method, url=url, headers=headers, address=address, data=asked.body)

    def presigned(self, key: str, signer: ReadOnlyCredentials, seconds: int) -> str:
        """Return the URL of an object, signed so that it can be read without credentials."""
        payer = {"x-amz-request-payer": "requester"} if self._options.requester_pays else {}
        request = AWSRequest(method="GET", url=self._url(key), params=payer)
        S3SigV4QueryAuth(signer, "s3", self._target.region, expires=seconds).add_auth(request)
        return str(request.url)

    def _url(self, key: str, query: Mapping[str, str] | None = None) -> str:
        base_url = self._target.base_url
        url = f"{base_url}/{quote(key, safe='-_.~/')}" if key or not urlsplit(base_url).path else base_url
        return f"{url}?{urlencode(query, quote_via=quote, safe='')}" if query else url


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
