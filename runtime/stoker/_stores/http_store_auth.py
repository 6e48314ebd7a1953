"""Who calls a function that serves: the bearer of a token of ours, a principal of AWS's, or one of Google's.

The function, or the platform in front of it, wants to know. A proof goes with the request to the function, and nowhere
else. An SDK is imported when its platform's identities are wanted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from stoker._stores.access_token import end_of
from stoker._stores.failures import Rule
from stoker._stores.options import Auth, ServedOptions
from stoker._stores.renewal import Renewable
from stoker._stores.standing import Identity
from stoker.errors import ConfigError, CredentialsError, MissingExtraError, PermissionDeniedError

__all__ = ["LAMBDA_URL", "OTHERWISE", "Bearer", "Caller", "auth_of", "callers_of"]

_P = TypeVar("_P")

LAMBDA_URL = re.compile(r"[a-z0-9]+\.lambda-url\.([a-z0-9-]+)\.on\.aws", re.ASCII)
"""The host of a Lambda function URL, in small letters, and its region."""

_WITHOUT = "send none with ServedOptions(anonymous=True) or --anonymous"
OTHERWISE = f", set STOKER_TOKEN if the function wants a token, or {_WITHOUT}"
"""What those can do who have no credentials of the platform that a host belongs to."""

# Auth → module, its caller, its extra.
_CALLERS: Mapping[Auth, tuple[str, str, str]] = {
    "aws": ("stoker._stores.http_store_aws", "AwsCaller", "s3"),
    "google": ("stoker._stores.http_store_google", "GoogleCaller", "gcs"),
}
_GOOGLE_DOMAINS = (".run.app", ".cloudfunctions.net")


class Caller(Renewable[_P], Protocol[_P]):
    """Who calls, by a proof that may end under way."""

    def headers(self, url: str, headers: Mapping[str, str], proof: _P) -> Mapping[str, str]:
        """Return the headers of a GET of ``url``, and among them who asks for it."""
        ...

    def rule(self, status: int, code: str) -> Rule:
        """Return what it means that the platform refuses: by its status, 401 or 403, and its own code or none."""
        ...

    async def identity(self) -> Identity:
        """Return whose credentials these are.

        Raises:
            CredentialsError: there are none.
        """
        ...


def auth_of(url: str, options: ServedOptions, environment: Mapping[str, str]) -> Auth | None:
    """Return how a reader of the data set at ``url`` says who it is; None is not at all.

    It is what the options say; else there is a token in the environment; else it is what the platform that the host
    belongs to wants by default.
    """
    host = urlsplit(url).hostname or ""
    if options.anonymous or options.named_auth is not None:
        return options.named_auth
    if environment.get("STOKER_TOKEN"):
        return "token"
    if LAMBDA_URL.fullmatch(host):
        return "aws"
    return "google" if host.endswith(_GOOGLE_DOMAINS) else None


def callers_of(url: str, options: ServedOptions, environment: Mapping[str, str]) -> Callable[[], Caller[Any]]:
    """Return what makes who reads the data set at ``url``, for one event loop, in which it raises ConfigError.

    Raises:
        MissingExtraError: the platform's SDK is not installed.
    """
    auth = auth_of(url, options, environment)
    if auth is None:
        return partial(Bearer, None)
    if auth == "token":
        return partial(Bearer.of, options, environment)
    module, caller, extra = _CALLERS[auth]
    try:
        of: Callable[..., Caller[Any]] = getattr(import_module(module), caller).of
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{url} is called with an identity of {auth}'s, which needs {error.name}; pip install 'stoker[{extra}]'"
        ) from error
    return partial(of, url, options, environment)


class Bearer:
    """Who has a ready token, or none."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    @classmethod
    def of(cls, options: ServedOptions, environment: Mapping[str, str]) -> Bearer:
        """Return who has the token of the options, else of the environment.

        Raises:
            ConfigError: there is none, or no header can carry it.
        """
        token = options.token or environment.get("STOKER_TOKEN")
        if not token:
            raise ConfigError(
                f"a token is wanted, and there is none: set STOKER_TOKEN, or ServedOptions(token=...), or {_WITHOUT}"
            )
        return cls(ServedOptions(token=token).token)  # which checks it

    async def current(self) -> str | None:
        """Return the token."""
        return self._token

    async def renew(self, used: str | None) -> str | None:
        """Return the same: there is no other."""
        return used

    def headers(self, _url: str, headers: Mapping[str, str], proof: str | None) -> Mapping[str, str]:
        """Return the headers with the token."""
        return headers if proof is None else {**headers, "Authorization": f"Bearer {proof}"}

    async def identity(self) -> Identity:
        """Return what kind of token it is, and when it ends if it is one of ours."""
        if self._token is None:
            return Identity(kind="none")
        expires = end_of(self._token)
        return Identity(kind="a ready token" if expires is None else "a token of stoker's", expires=expires)

    def rule(self, status: int, _code: str) -> Rule:
        """Say which identities there are."""
        others = "ServedOptions(auth='aws') or (auth='google'), or --auth"
        if self._token is None:
            return CredentialsError, f"the platform wants to know who calls; set STOKER_TOKEN, or use {others}"
        kind = CredentialsError if status == 401 else PermissionDeniedError
        return kind, f"the platform, not the function, refuses the token; for identities of its own, use {others}"
