"""Connection options of stores, one class per adapter, and the proxy and certificates that the environment names.

Proxy and certificates are resolved once for all connections of a store, so reads and writes cannot disagree. This
module imports no cloud SDK.
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

from stoker._base.arguments import BoundedConfig, Positive, explain_arguments
from stoker._base.meter import check_store_name
from stoker.errors import ConfigError

Auth: TypeAlias = Literal["aws", "google", "token"]
_AUTH_BY_OPTION: Mapping[str, Auth] = {"profile": "aws", "region": "aws", "service_account": "google", "token": "token"}

_LAMBDA_HOST = re.compile(r"[a-z0-9]+\.lambda-url\.([a-z0-9-]+)\.on\.aws", re.ASCII)
_BUNDLES = ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")


@explain_arguments("HttpOptions")
@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions(BoundedConfig):
    """HTTP connection limits of one store in one event loop.

    Attributes:
        max_connections: Maximum number of open connections; a further request waits for a free one.
        connect_timeout_seconds: Time limit of one TCP and TLS handshake.
        read_timeout_seconds: Time limit between two received bytes. The deadline of a whole attempt is the caller's.
        transport: Transport of reads. ``"direct"`` receives straight into the caller's memory; ``"aiohttp"`` copies
            once more, and is always used if the environment names a proxy for the endpoint.
        receive_buffer_bytes: Size of aiohttp's receive buffer per connection, in bytes.

    Example:
        >>> from stoker import HttpOptions, S3Options
        >>> options = S3Options(region="eu-west-1", http=HttpOptions(max_connections=128))
    """

    max_connections: Positive[int] = 64
    connect_timeout_seconds: Positive[float] = 10.0
    read_timeout_seconds: Positive[float] = 20.0
    transport: Literal["direct", "aiohttp"] = "direct"
    receive_buffer_bytes: Positive[int] = 256 << 10


@explain_arguments("S3Options")
@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """Options of an S3 bucket; omitted ones come from the standard AWS environment and configuration files.

    Attributes:
        endpoint_url: URL of an S3-compatible service, addressed path-style. Default: ``AWS_ENDPOINT_URL_S3``, then
            ``AWS_ENDPOINT_URL``, else AWS itself.
        region: Region of the bucket. Default: ``AWS_REGION``, then ``AWS_DEFAULT_REGION``, then the region of the
            profile, else ``us-east-1``.
        anonymous: Whether to send unsigned requests.
        requester_pays: Whether to agree to pay for requests to a requester-pays bucket.
        access_key_id: Access key of static credentials, given together with ``secret_access_key``. Default: the
            standard credential chain, refreshed as needed.
        secret_access_key: Secret key of static credentials.
        session_token: Session token of temporary static credentials.
        profile: Section of the AWS configuration files to use.
        prices: Name of the store in the price file to bill by, such as ``"r2"`` or ``"minio"``. Default: the store that
            lists the endpoint, else AWS.
        http: Connection limits.

    Example:
        >>> from stoker import S3Options
        >>> minio = S3Options(endpoint_url="http://127.0.0.1:9000", access_key_id="key", secret_access_key="secret")
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
            raise ConfigError("access_key_id and secret_access_key must be given together")
        if self.session_token is not None and self.access_key_id is None:
            raise ConfigError("session_token needs access_key_id and secret_access_key")
        if (self.access_key_id is not None) + (self.profile is not None) + self.anonymous > 1:
            raise ConfigError("access keys, profile and anonymous are mutually exclusive; give at most one of them")


@explain_arguments("GcsOptions")
@dataclass(frozen=True, slots=True, kw_only=True)
class GcsOptions:
    """Options of a Google Cloud Storage bucket; omitted ones come from the standard Google environment.

    Attributes:
        endpoint_url: URL of an emulator, which receives no token other than ``token``. Default:
            ``STORAGE_EMULATOR_HOST``, else Google.
        anonymous: Whether to send requests without a token.
        token: OAuth 2 access token; it is not refreshed.
        credentials_file: Service account or authorised user file. Default: ``GOOGLE_APPLICATION_CREDENTIALS``, then the
            credentials of the gcloud CLI, else the service account of the machine.
        user_project: Project to bill for requests to a requester-pays bucket.
        prices: Name of the store in the price file to bill by, such as ``"gsrapid"``. Default: ``"gs"``.
        http: Connection limits.

    Example:
        >>> from stoker import GcsOptions
        >>> options = GcsOptions(credentials_file="reader.json", user_project="my-project")
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
            raise ConfigError("token, credentials_file and anonymous are mutually exclusive; give at most one of them")


@explain_arguments("ServedOptions")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServedOptions(BoundedConfig):
    """Options of a data set that a function serves. Credentials are sent to the function only.

    Attributes:
        auth: Kind of credentials: ``"token"`` sends a bearer token, ``"aws"`` signs requests for ``AWS_IAM``,
            ``"google"`` sends identity tokens for Cloud Run. Default: the kind that the options below belong to; else
            ``"token"`` if ``STOKER_TOKEN`` is set; else ``"aws"`` for a host ``*.lambda-url.REGION.on.aws`` and
            ``"google"`` for a host in ``run.app`` or ``cloudfunctions.net``; else none.
        anonymous: Whether to send no credentials.
        token: Bearer token; it is not refreshed. Default: ``STOKER_TOKEN``.
        profile: Section of the AWS configuration files to use. Default: the standard chain, refreshed as needed.
        region: AWS region of the function. Default: the region in the host's name, then ``AWS_REGION``, then
            ``AWS_DEFAULT_REGION``, then the region of the profile.
        service_account: E-mail address of the Google service account to impersonate; user accounts have no identity
            tokens of their own.
        http: Connection limits.

    Example:
        >>> from stoker import ServedOptions
        >>> options = ServedOptions(auth="aws", region="eu-west-1")
    """

    auth: Auth | None = None
    anonymous: bool = False
    token: str | None = field(default=None, repr=False)
    profile: str | None = None
    region: str | None = None
    service_account: str | None = None
    http: HttpOptions = field(default_factory=HttpOptions)

    def __post_init__(self) -> None:
        BoundedConfig.__post_init__(self)  # super() does not know a class with slots
        _check_credentials(self, "token")
        if len(self._auths_of_options) + self.anonymous > 1:
            raise ConfigError(
                "token, profile and region (AWS), service_account (Google) and anonymous are mutually exclusive, and "
                "must match auth; give the options of one kind"
            )

    @property
    def named_auth(self) -> Auth | None:
        """The kind of credentials that ``auth`` names, or else the options that only one kind has; None without any."""
        return next(iter(self._auths_of_options), None)

    @property
    def _auths_of_options(self) -> set[Auth]:
        implied = {auth for name, auth in _AUTH_BY_OPTION.items() if getattr(self, name) is not None}
        return implied if self.auth is None else implied | {self.auth}


StoreOptions = S3Options | GcsOptions | ServedOptions


def _check_bucket(endpoint_url: str | None, prices: str | None) -> None:
    if endpoint_url is not None:
        check_endpoint(endpoint_url, "endpoint_url")
    if prices is not None:
        check_store_name(prices)


def _check_credentials(options: StoreOptions, *names: str) -> None:
    """Raise ConfigError if a value cannot be a credential; the usual cause is a line end copied from a file."""
    for name in names:
        value: str | None = getattr(options, name)
        if value is not None and not (value.isascii() and value.isprintable() and value == value.strip()):
            raise ConfigError(
                f"{name} has surrounding blanks, a line end or characters that no HTTP header can hold; remove them"
            )


def check_endpoint(url: str, name: str) -> None:
    """Raise ConfigError unless ``url`` is the URL of an endpoint, without credentials.

    Credentials in a URL would be sent to any server at that address, and printed with every error. The message shows
    the argument's ``name`` and not the URL, which may hold a secret.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")  # refuses labels that are empty or too long
    except ValueError:
        fits = False
    if not fits or not url.isascii() or not url.isprintable() or set(url) & set(" \\"):
        raise ConfigError(f"{name} must be an http:// or https:// URL with a host, such as https://host:9000")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"{name} holds a user, password, query or fragment; give credentials as options")


def find_proxy(url: str) -> str | None:
    """Return the proxy that ``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY`` and ``NO_PROXY`` name for ``url``, if any.

    Loopback addresses never use a proxy, which would connect to its own machine instead.

    Raises:
        ConfigError: The proxy is not an HTTP proxy. The message does not show it, since it may hold a password.
    """
    parts = urlsplit(url)
    if is_loopback(parts.hostname or "") or proxy_bypass(parts.netloc):
        return None
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy:
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        raise ConfigError(f"the proxy for {parts.hostname} is not an HTTP proxy; set HTTPS_PROXY=http://host:port")
    return proxy


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or ``localhost``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def lambda_region(url: str) -> str:
    """Return the AWS region in the URL of a Lambda function; empty for any other URL."""
    match = _LAMBDA_HOST.fullmatch(urlsplit(url).hostname or "")
    return match[1] if match else ""


def machine_vendor(root: Path = Path("/")) -> str:
    """Return the machine's vendor, such as ``Amazon EC2``, from ``sys`` below ``root``; empty if it is not there."""
    try:
        return (root / "sys/class/dmi/id/sys_vendor").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def create_tls_context(bundle: str | None = None) -> ssl.SSLContext:
    """Return a TLS context that trusts ``bundle``, else ``REQUESTS_CA_BUNDLE``, ``SSL_CERT_FILE`` or the system's CAs.

    Verification cannot be turned off, except in favour of a certificate's fingerprint:
    :func:`create_fingerprint_context`.

    Raises:
        ConfigError: The file or folder holds no certificates.
    """
    path = bundle or next(filter(None, map(os.environ.get, _BUNDLES)), None)
    if path is None:
        return _system_tls_context()
    try:
        if Path(path).is_dir():
            return ssl.create_default_context(capath=path)
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"cannot read certificates from {path!r} ({error}); check AWS_CA_BUNDLE, {', '.join(_BUNDLES)}"
        ) from error


@cache
def _system_tls_context() -> ssl.SSLContext:
    """Return a TLS context with the system's certificates; cached, since reading them takes 10 to 30 ms."""
    return ssl.create_default_context()


def create_fingerprint_context() -> ssl.SSLContext:
    """Return a TLS context that accepts any certificate, for callers that compare fingerprints before they send."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
