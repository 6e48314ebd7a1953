"""How to reach a bucket: one options record per adapter, free of any cloud SDK."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from stoker._base.arguments import explain_arguments
from stoker._base.meter import check_store_name
from stoker._stores.network import check_endpoint
from stoker.errors import ConfigError

__all__ = ["Auth", "GcsOptions", "HttpOptions", "S3Options", "ServedOptions", "StoreOptions"]

Auth: TypeAlias = Literal["aws", "google", "token"]
_AUTH_OF: Mapping[str, Auth] = {"profile": "aws", "region": "aws", "service_account": "google", "token": "token"}


@explain_arguments("HttpOptions")
@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Connections of one store in one event loop.

    Attributes:
        max_connections: open connections at once; a request beyond them waits for one.
        connect_timeout_seconds: for one TCP and TLS handshake.
        read_timeout_seconds: without a single byte arriving; a whole attempt's deadline is its caller's.
        transport: of reads. ``"direct"`` receives straight into the caller's memory; ``"aiohttp"`` copies, and carries
            reads in any case where the environment names a proxy for the endpoint.
        receive_buffer_bytes: what may arrive ahead of the copy into the caller's memory, per connection of aiohttp.
    """

    max_connections: int = 64
    connect_timeout_seconds: float = 10.0
    read_timeout_seconds: float = 20.0
    transport: Literal["direct", "aiohttp"] = "direct"
    receive_buffer_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        if self.transport not in ("direct", "aiohttp"):
            raise ConfigError(f"transport is 'direct' or 'aiohttp', not {self.transport!r}")
        for name in ("max_connections", "connect_timeout_seconds", "read_timeout_seconds", "receive_buffer_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be greater than zero, not {getattr(self, name)!r}")


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
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url, "endpoint_url")
        if self.prices is not None:
            check_store_name(self.prices)
        _check_credentials(
            access_key_id=self.access_key_id,
            secret_access_key=self.secret_access_key,
            session_token=self.session_token,
        )
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
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url, "endpoint_url")
        if self.prices is not None:
            check_store_name(self.prices)
        _check_credentials(token=self.token)
        if (self.token is not None) + (self.credentials_file is not None) + self.anonymous > 1:
            raise ConfigError("token, credentials_file and anonymous exclude each other; give one of them")


@explain_arguments("ServedOptions")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServedOptions:
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
        _check_credentials(token=self.token)
        if self.auth not in (None, *get_args(Auth)):
            raise ConfigError(f"auth is 'aws', 'google' or 'token', not {self.auth!r}")
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


def _check_credentials(**credentials: str | None) -> None:
    """Raise ConfigError if one has what no credential has: most come with the line end of the file they stood in."""
    for name, value in credentials.items():
        if value is not None and not (value.isascii() and value.isprintable() and value == value.strip()):
            raise ConfigError(f"{name} has blanks or a line end around it, or characters that no request can carry")
