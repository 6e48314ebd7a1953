"""Calling a function URL as a principal of AWS's: the default of functions on Lambda (``AWS_IAM``).

AWS Lambda, developer guide: "Control access to Lambda function URLs".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stoker._stores.aws_credentials import AwsCredentials, configured_region, signed
from stoker._stores.failures import Rule
from stoker._stores.http_store_auth import LAMBDA_URL, OTHERWISE
from stoker._stores.options import ServedOptions
from stoker._stores.renewal import ExpiredCredentialsError
from stoker._stores.standing import Identity
from stoker.errors import ConfigError, PermissionDeniedError

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials

__all__ = ["AwsCaller"]

_NEEDED = "lambda:InvokeFunctionUrl and lambda:InvokeFunction on the function"


class AwsCaller:
    """Who has AWS credentials: each request is signed, for Lambda in the function's region."""

    def __init__(self, credentials: AwsCredentials, region: str) -> None:
        self._credentials, self._region = credentials, region

    @classmethod
    def of(cls, url: str, options: ServedOptions, environment: Mapping[str, str]) -> AwsCaller:
        """Return who calls the function at ``url``, whose region its host names, else the configuration.

        Raises:
            ConfigError: the region is not known.
        """
        credentials = AwsCredentials(profile=options.profile, otherwise=OTHERWISE)
        match = LAMBDA_URL.fullmatch(urlsplit(url).hostname or "")
        region = options.region or (match[1] if match else environment.get("AWS_REGION"))
        region = region or configured_region(credentials.session)
        if not region:
            raise ConfigError(
                f"{url} does not tell its AWS region; set AWS_REGION, ServedOptions(region=...) or --region"
            )
        return cls(credentials, region)

    async def current(self) -> ReadOnlyCredentials:
        """Return credentials, refreshed if they are about to expire."""
        return await self._credentials.current()

    async def renew(self, used: ReadOnlyCredentials) -> ReadOnlyCredentials:
        """Look for credentials afresh."""
        return await self._credentials.renew(used)

    def headers(self, url: str, headers: Mapping[str, str], proof: ReadOnlyCredentials) -> Mapping[str, str]:
        """Return the headers with a signature over them."""
        return signed(url, headers, proof, service="lambda", region=self._region)

    async def identity(self) -> Identity:
        """Return whose credentials sign."""
        return await self._credentials.identity()

    def rule(self, _status: int, code: str) -> Rule:
        """Say what is missing. AWS does not always tell expired credentials from others, so new ones are tried."""
        if code == "AccessDeniedException":
            return PermissionDeniedError, f"these AWS credentials may not call the function; they need {_NEEDED}"
        return ExpiredCredentialsError, (
            f"AWS refuses these credentials: they need {_NEEDED}; or they have expired, are wrong, or sign for "
            "another region (AWS_REGION, --region), or this machine's clock is off"
        )
