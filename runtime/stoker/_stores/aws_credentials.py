"""AWS credentials from botocore's chain, renewed before expiry, and signatures of requests to Lambda functions."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeAlias

from aiobotocore.session import AioSession
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    MetadataRetrievalError,
    ProfileNotFound,
)
from botocore.exceptions import ConnectionError as BotoCoreConnectionError

from stoker._stores.http import ErrorRule, HttpResponse, create_error
from stoker._stores.http_objects import CredentialsInfo, ExpiredCredentialsError, RenewableCredentials
from stoker._stores.options import ServedOptions, lambda_region, machine_vendor
from stoker.errors import (
    ConfigError,
    ConnectionLostError,
    CredentialsError,
    PermissionDeniedError,
    ServerError,
    StoreError,
    TransientError,
)

Keys: TypeAlias = tuple[str, str, str | None]

_KINDS = {"env": "environment variables", "explicit": "given keys"}
"""Descriptions of sources whose botocore names are unclear."""
_MARGIN_SECONDS = 15 * 60  # as botocore's own refresh
_METADATA_ADDRESS, _METADATA_SECONDS = ("169.254.169.254", 80), 1.0
_NONE_FOUND = (
    "no AWS credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, "
    "run where a role is attached"
)
_NEEDED = "lambda:InvokeFunctionUrl and lambda:InvokeFunction on the function"


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsKeys:
    """Credentials, botocore's name of their source, and their expiry: None if there is none, or it is unknown."""

    keys: ReadOnlyCredentials
    method: str = field(compare=False)
    expires: datetime | None = field(compare=False)


class AwsCredentials(RenewableCredentials[AwsKeys]):
    """Credentials of the standard chain, or given keys.

    Args:
        profile: Section of the AWS configuration files; None for the default.
        keys: Access key, secret, and session token or None, which replace the chain.
        other_remedies: Other remedies of a user without credentials, appended to the error message.

    Attributes:
        session: botocore's session, replaced when credentials are discarded.
    """

    margin_seconds = _MARGIN_SECONDS

    def __init__(self, *, profile: str | None, keys: Keys | None = None, other_remedies: str) -> None:
        super().__init__()
        self._profile, self._keys, self._other_remedies = profile, keys, other_remedies
        self.session = botocore_session(profile, keys)

    async def describe(self) -> CredentialsInfo:
        """Describe the credentials; the expiry of given temporary keys is unknown."""
        credentials = await self.current()
        kind = _KINDS.get(credentials.method, credentials.method)
        kind += ", temporary" if credentials.expires is None and credentials.keys.token else ""
        return CredentialsInfo(kind=kind, expires=credentials.expires, is_renewed=credentials.expires is not None)

    def discard(self, used: AwsKeys) -> None:
        """Discard refused credentials, and search the chain anew."""
        if used == self._current:
            self.session = botocore_session(self._profile, self._keys)
        super().discard(used)

    async def fetch(self) -> tuple[AwsKeys, float]:
        """Return botocore's credentials, possibly the same as before, and their remaining life in seconds."""
        try:
            credentials = await self.session.get_credentials()
            keys = None if credentials is None else await credentials.get_frozen_credentials()
        except (BotoCoreError, ClientError) as error:
            # Not chained, here and below: botocore's errors quote untrusted responses.
            raise _translate_error(error) from None
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}" if isinstance(error, RuntimeError) else type(error).__name__
            raise ServerError(f"AWS credentials could not be fetched: the response is malformed ({reason})") from None
        if credentials is None or keys is None:
            if await _is_metadata_service_out():
                raise ConnectionLostError(
                    "AWS credentials could not be fetched: this machine's metadata service does not respond"
                )
            raise CredentialsError(f"{_NONE_FOUND}{self._other_remedies}")
        expires: datetime | None = getattr(credentials, "_expiry_time", None)  # botocore has no public name for it
        life_seconds = float("inf") if expires is None else (expires - datetime.now(UTC)).total_seconds()
        return AwsKeys(keys=keys, method=credentials.method, expires=expires), life_seconds


def _translate_error(error: BotoCoreError | ClientError) -> StoreError:
    """Translate an error of botocore's search for credentials; a TransientError if a retry may help."""
    message = f"AWS credentials could not be fetched: {error}"
    if isinstance(error, ClientError):
        code = error.response.get("Error", {}).get("Code", "")
        meta = error.response.get("ResponseMetadata", {})
        status = 429 if "Throttl" in code else meta.get("HTTPStatusCode", 0)
    elif isinstance(error, CredentialRetrievalError | MetadataRetrievalError):
        if error.kwargs.get("provider") == "custom-process":
            return CredentialsError(message)
        match = re.search(r"response ([0-9]{3}) ", str(error))  # from a container's endpoint
        status = int(match[1]) if match else 500
    else:
        status = 500 if isinstance(error, HTTPClientError | BotoCoreConnectionError) else 0
    passing = create_error(message, HttpResponse(status=status, headers={}), {}) if status else None
    return passing if isinstance(passing, TransientError) else CredentialsError(message)


async def _is_metadata_service_out() -> bool:
    """Return whether this is an EC2 machine whose metadata service is enabled and does not respond."""
    if machine_vendor() != "Amazon EC2" or os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    try:
        async with asyncio.timeout(_METADATA_SECONDS):
            _, writer = await asyncio.open_connection(*_METADATA_ADDRESS)
    except OSError:
        return True
    writer.close()
    return False


def botocore_session(profile: str | None, keys: Keys | None) -> AioSession:
    """Return a new botocore session, which has not searched for credentials yet."""
    session = AioSession(profile=profile)
    if keys is not None:
        session.set_credentials(*keys)
    return session


class AwsServedCredentials(AwsCredentials):
    """AWS credentials for a Lambda function: signs each request for the function's region.

    The default of functions on Lambda (``AWS_IAM``). AWS Lambda, developer guide: "Control access to Lambda function
    URLs".

    Args:
        url: URL of the function, whose host may name its region.
        options: Profile and region.
        environment: Environment variables of this process.
        other_remedies: Other remedies of a user without credentials.

    Raises:
        ConfigError: The region is unknown, or the profile does not exist.
    """

    def __init__(self, url: str, options: ServedOptions, environment: Mapping[str, str], other_remedies: str) -> None:
        super().__init__(profile=options.profile, other_remedies=other_remedies)
        region = options.region or lambda_region(url) or environment.get("AWS_REGION")
        try:
            region = region or self.session.get_config_variable("region")
        except ProfileNotFound as error:
            raise ConfigError(f"{error}; check AWS_PROFILE and the AWS configuration files") from error
        if not region:
            raise ConfigError(
                f"the AWS region of {url} is unknown; set AWS_REGION, ServedOptions(region=...) or --region"
            )
        self._region = region

    def headers(
        self, url: str, headers: Mapping[str, str], credentials: AwsKeys, data: bytes | None = None
    ) -> Mapping[str, str]:
        """Return the headers with a signature over them, URL and body: AWS Signature Version 4, by botocore."""
        request = AWSRequest(method="GET" if data is None else "POST", url=url, headers=dict(headers), data=data)
        SigV4Auth(credentials.keys, "lambda", self._region).add_auth(request)
        return dict(request.headers.items())

    def rule(self, _status: int, code: str) -> ErrorRule:
        """Return error class and remedy; AWS does not always distinguish expired credentials, so new ones are tried."""
        if code == "AccessDeniedException":
            return PermissionDeniedError, f"these AWS credentials may not call the function; they need {_NEEDED}"
        return ExpiredCredentialsError, (
            f"AWS refuses these credentials: they need {_NEEDED}; or they have expired, are wrong, or sign for "
            "another region (AWS_REGION, --region), or this machine's clock is off"
        )
