"""How to reach a bucket: options, one record per adapter; and the proxy and certificates of this machine's environment.

Proxy and certificates are settled once for every connection of a store, so that reads and writes cannot disagree. No
cloud SDK is imported here.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from stoker._base.arguments import Bounded, Positive, explain_arguments
from stoker._base.meter import check_store_name
from stoker.errors import ConfigError

Auth: TypeAlias = Literal["aws", "google", "token"]
_AUTH_OF: Mapping[str, Auth] = {"profile": "aws", "region": "aws", "service_account": "google", "token": "token"}

_LAMBDA_HOST = re.compile(r"[a-z0-9]+\.lambda-url\.([a-z0-9-]+)\.on\.aws", re.ASCII)
_BUNDLES = ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")


@explain_arguments("HttpOptions")
@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions(Bounded):
    """Connections of one store in one event loop.

    Attributes:
        max_connections: open connections at once; a request beyond them waits for one.
        connect_timeout_seconds: for one TCP and TLS handshake.
        read_timeout_seconds: without a single byte arriving; a whole attempt's deadline is its caller's.
        transport: of reads. ``"direct"`` receives straight into the caller's memory; ``"aiohttp"`` copies, and carries
            reads in any case where the environment names a proxy for the endpoint.
        receive_buffer_bytes: what may arrive ahead of the copy into the caller's memory, per connection of aiohttp.
    """

    max_connections: Positive[int] = 64
    connect_timeout_seconds: Positive[float] = 10.0
    read_timeout_seconds: Positive[float] = 20.0
    transport: Literal["direct", "aiohttp"] = "direct"
    receive_buffer_bytes: Positive[int] = 256 << 10


@explain_arguments("S3Options")
@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """How to reach an S3 bucket; what is left out comes from the standard AWS environment and configuration files.

    Attributes:
        endpoint_url: of an S3-compatible service, addressed path-style; default ``AWS_ENDPOINT_URL_S3``,
            ``AWS_ENDPOINT_URL``, else AWS itself.
        region: default ``AWS_REGION``, ``AWS_DEFAULT_REGION``, the profile's, else ``us-east-1``.
        anonymous: send unsigned requests.
        requester_pays: agree to pay for requests to a bucket of that kind.
        access_key_id: with ``secret_access_key``, static credentials; else the standard chain, refreshed as needed.
        session_token: of temporary static credentials.
        profile: a section of the AWS configuration files.
        prices: name of the store in the price file whose prices hold, such as ``"r2"`` or ``"minio"``; default the one
            that lists the endpoint, else AWS's.
        http: connections and their limits.
    """

    endpoint_url: str | None = None
    region: str | None = None
    anonymous: bool = False
    requester_pays: bool = False
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    profile: str | None = None
    prices: str | None = None
    http: HttpOptions = field(default_factory=HttpOptions)

    def __post_init__(self) -> None:
        _check_bucket(self.endpoint_url, self.prices)
        _check_credentials(self, "access_key_id", "secret_access_key", "session_token")
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ConfigError("access_key_id and secret_access_key go together; give both or neither")
        if self.session_token is not None and self.access_key_id is None:
            raise ConfigError("session_token needs access_key_id and secret_access_key")
        if (self.access_key_id is not None) + (self.profile is not None) + self.anonymous > 1:
            raise ConfigError("access keys, profile and anonymous exclude each other; give one of them")


@explain_arguments("GcsOptions")
@dataclass(frozen=True, slots=True, kw_only=True)
class GcsOptions:
    """How to reach a Google Cloud Storage bucket; what is left out comes from the standard Google environment.

    Attributes:
        endpoint_url: of an emulator, which gets no token but ``token``; default ``STORAGE_EMULATOR_HOST``, else Google.
        anonymous: send requests without a token.
        token: a ready OAuth 2 access token; it is not refreshed.
        credentials_file: a service account or authorised user file; default ``GOOGLE_APPLICATION_CREDENTIALS``, the
            gcloud CLI's, else the machine's own account.
        user_project: the project to bill for requests to a requester-pays bucket.
        prices: name of the store in the price file whose prices hold, such as ``"gsrapid"``; default ``"gs"``.
        http: connections and their limits.
    """

    endpoint_url: str | None = None
    anonymous: bool = False
    token: str | None = field(default=None, repr=False)
    credentials_file: str | Path | None = None
    user_project: str | None = None
    prices: str | None = None
    http: HttpOptions = field(default_factory=HttpOptions)

    def __post_init__(self) -> None:
        _check_bucket(self.endpoint_url, self.prices)
        _check_credentials(self, "token")
        if (self.token is not None) + (self.credentials_file is not None) + self.anonymous > 1:
            raise ConfigError("token, credentials_file and anonymous exclude each other; give one of them")


@explain_arguments("ServedOptions")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServedOptions(Bounded):
    """How to reach a data set that a function serves, and as whom. Proofs of that go to the function alone.

    Attributes:
        auth: ``"token"``, one of our own or another bearer token that is ready; ``"aws"``, requests signed as
            ``AWS_IAM`` wants; ``"google"``, identity tokens as Cloud Run wants them. Left out, it is what the options
            below are for; else ``"token"`` if there is ``STOKER_TOKEN``; else ``"aws"`` for a host
            ``*.lambda-url.REGION.on.aws`` and ``"google"`` for one in ``run.app`` or ``cloudfunctions.net``; else none.
        anonymous: send no credentials.
        token: default ``STOKER_TOKEN``; it is not refreshed.
        profile: a section of the AWS configuration files; else the standard chain, refreshed as needed.
        region: of the function on AWS; default the host's, ``AWS_REGION``, ``AWS_DEFAULT_REGION``, the profile's.
        service_account: the e-mail address of the Google account to act for; people have no identity tokens of their
            own.
        http: connections and their limits.
    """

    auth: Auth | None = None
    anonymous: bool = False
    token: str | None = field(default=None, repr=False)
    profile: str | None = None
    region: str | None = None
    service_account: str | None = None
    http: HttpOptions = field(default_factory=HttpOptions)

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)  # super() does not know a class with slots
        _check_credentials(self, "token")
        if len(self._said) + self.anonymous > 1:
            raise ConfigError(
                "token, profile or region (of AWS), service_account (of Google) and anonymous exclude each other, and "
                "go with their own auth; give what is of one kind"
            )

    @property
    def named_auth(self) -> Auth | None:
        """What ``auth`` says, or else is said by giving what only one kind has."""
        return next(iter(self._said), None)

    @property
    def _said(self) -> set[Auth]:
        said = {auth for name, auth in _AUTH_OF.items() if getattr(self, name) is not None}
        return said if self.auth is None else said | {self.auth}


StoreOptions = S3Options | GcsOptions | ServedOptions


def _check_bucket(endpoint_url: str | None, prices: str | None) -> None:
    if endpoint_url is not None:
        check_endpoint(endpoint_url, "endpoint_url")
    if prices is not None:
        check_store_name(prices)


def _check_credentials(options: StoreOptions, *names: str) -> None:
    """Raise ConfigError if one has what no credential has: most come with the line end of the file they stood in."""
    for name in names:
        value: str | None = getattr(options, name)
        if value is not None and not (value.isascii() and value.isprintable() and value == value.strip()):
            raise ConfigError(f"{name} has blanks or a line end around it, or characters that no request can carry")


def check_endpoint(url: str, name: str) -> None:
    """Raise ConfigError unless ``url`` is an endpoint; it may hold a secret and is not repeated, but for its ``name``.

    Credentials in it would be sent to whoever answers, and printed with every error.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")  # refuses labels that are empty or too long
    except ValueError:
        fits = False
    if not fits or not url.isascii() or not url.isprintable() or set(url) & set(" \\"):
        raise ConfigError(f"{name} must be http:// or https:// and a host, as in https://host:9000")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"{name} holds a user, password, query or fragment; give credentials as options")


def proxy_of(url: str) -> str | None:
    """Return the proxy that ``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY`` and ``NO_PROXY`` name for ``url``.

    This machine itself is never reached through one, whatever they say: it would be the proxy's own machine.

    Raises:
        ConfigError: it is not an HTTP proxy; it may hold a password and is not repeated.
    """
    parts = urlsplit(url)
    if is_this_machine(parts.hostname or "") or proxy_bypass(parts.netloc):
        return None
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy:
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        raise ConfigError(f"the proxy for {parts.hostname} is not an HTTP proxy; set HTTPS_PROXY=http://host:port")
    return proxy


def is_this_machine(host: str) -> bool:
    """Return whether a host is an address of this machine's loopback, or its name."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def lambda_region(url: str) -> str:
    """Return the region of a Lambda function from its URL; empty if it is not one's."""
    match = _LAMBDA_HOST.fullmatch(urlsplit(url).hostname or "")
    return match[1] if match else ""


def machine_vendor(root: Path = Path("/")) -> str:
    """Return who made this machine, as ``sys`` below ``root`` says, such as ``Amazon EC2``; empty if it does not."""
    try:
        return (root / "sys/class/dmi/id/sys_vendor").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def trusted(bundle: str | None = None) -> ssl.SSLContext:
    """Return what verifies certificates: ``bundle``, else ``REQUESTS_CA_BUNDLE``, ``SSL_CERT_FILE``, else the system's.

    There is no way to leave verification out, but by a certificate's fingerprint: :func:`without_authorities`.

    Raises:
        ConfigError: there are no certificates in the file or folder that is named.
    """
    path = bundle or next(filter(None, map(os.environ.get, _BUNDLES)), None)
    if path is None:
        return _system_trust()
    try:
        if Path(path).is_dir():
            return ssl.create_default_context(capath=path)
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"no certificates can be read from {path!r} ({error}); check AWS_CA_BUNDLE, {', '.join(_BUNDLES)}"
        ) from error


@cache
def _system_trust() -> ssl.SSLContext:
    """Return the system's certificates, which take 10 to 30 ms to read."""
    return ssl.create_default_context()


def without_authorities() -> ssl.SSLContext:
    """Return what takes any certificate: for those who compare its fingerprint before they send anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
