"""Reaching a function that serves, as the bearer of a token of ours, a principal of AWS's, or one of Google's.

The function, or the platform in front of it, wants to know who calls. A proof goes with the request to the function and
nowhere else: one redirect of its is followed without it. An SDK is imported when its platform's identities are wanted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from stoker._stores.access_token import end_of
from stoker._stores.credentials import Endpoint, ExpiredCredentialsError, Identity, Renewable, parse_date
from stoker._stores.http import Call, Destination, Failure, HttpReader, Reply, Rule, error_of
from stoker._stores.http_session import Connections
from stoker._stores.network import check_endpoint, is_this_machine
from stoker._stores.options import Auth, HttpOptions, ServedOptions
from stoker.errors import (
    ConfigError,
    CredentialsError,
    MissingExtraError,
    PermissionDeniedError,
    ServerError,
    StoreError,
)

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials

    from stoker._stores.aws_credentials import AwsCredentials
    from stoker._stores.google_credentials import IdentityTokens

__all__ = [
    "LAMBDA_URL",
    "AwsCaller",
    "Bearer",
    "Caller",
    "GoogleCaller",
    "auth_of",
    "callers_of",
    "ServedAccess",
    "said_of",
]

_P = TypeVar("_P")

LAMBDA_URL = re.compile(r"[a-z0-9]+\.lambda-url\.([a-z0-9-]+)\.on\.aws", re.ASCII)
"""The host of a Lambda function URL, in small letters, and its region."""

_WITHOUT = "send none with ServedOptions(anonymous=True) or --anonymous"
# What those can do who have no credentials of the platform that a host belongs to.
_OTHERWISE = f", set STOKER_TOKEN if the function wants a token, or {_WITHOUT}"
_NEEDED = "lambda:InvokeFunctionUrl and lambda:InvokeFunction on the function"
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


class AwsCaller:
    """Who has AWS credentials: each request is signed, for Lambda in the function's region.

    The default of functions on Lambda (``AWS_IAM``). AWS Lambda, developer guide: "Control access to Lambda function
    URLs".
    """

    def __init__(self, credentials: AwsCredentials, sign: Callable[..., Mapping[str, str]]) -> None:
        self._credentials, self._sign = credentials, sign

    @classmethod
    def of(cls, url: str, options: ServedOptions, environment: Mapping[str, str]) -> AwsCaller:
        """Return who calls the function at ``url``, whose region its host names, else the configuration.

        Raises:
            ConfigError: the region is not known.
        """
        from stoker._stores.aws_credentials import AwsCredentials, configured_region, signed

        credentials = AwsCredentials(profile=options.profile, otherwise=_OTHERWISE)
        match = LAMBDA_URL.fullmatch(urlsplit(url).hostname or "")
        region = options.region or (match[1] if match else environment.get("AWS_REGION"))
        region = region or configured_region(credentials.session)
        if not region:
            raise ConfigError(
                f"{url} does not tell its AWS region; set AWS_REGION, ServedOptions(region=...) or --region"
            )
        return cls(credentials, partial(signed, service="lambda", region=region))

    async def current(self) -> ReadOnlyCredentials:
        """Return credentials, refreshed if they are about to expire."""
        return await self._credentials.current()

    async def renew(self, used: ReadOnlyCredentials) -> ReadOnlyCredentials:
        """Look for credentials afresh."""
        return await self._credentials.renew(used)

    def headers(self, url: str, headers: Mapping[str, str], proof: ReadOnlyCredentials) -> Mapping[str, str]:
        """Return the headers with a signature over them."""
        return self._sign(url, headers, proof)

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


class GoogleCaller:
    """Who has Google credentials: each request carries an identity token for this function alone.

    The default of functions on Cloud Run. Google Cloud, Cloud Run: "Authenticating service-to-service".
    """

    def __init__(self, tokens: IdentityTokens, audience: str) -> None:
        self._tokens, self._audience = tokens, audience

    @classmethod
    def of(cls, url: str, options: ServedOptions, _environment: Mapping[str, str]) -> GoogleCaller:
        """Return who calls the function at ``url``, less ``/v1/NAME``: that is what its tokens are made out to."""
        from stoker._stores.google_credentials import IdentityTokens

        return cls(IdentityTokens(options.service_account, otherwise=_OTHERWISE), url.rsplit("/", 2)[0])

    async def current(self) -> str:
        """Return a token that has not expired."""
        return await self._tokens.get(self._audience)

    async def renew(self, used: str) -> str:
        """Return another one than was used, if it can be had."""
        self._tokens.forget(self._audience, used)
        return await self.current()

    def headers(self, _url: str, headers: Mapping[str, str], proof: str) -> Mapping[str, str]:
        """Return the headers with the token."""
        return {**headers, "Authorization": f"Bearer {proof}"}

    async def identity(self) -> Identity:
        """Get a token, to know that one can be had; others follow it."""
        await self.current()
        return Identity(kind="identity tokens of Google's", is_renewed=True)

    def rule(self, status: int, _code: str) -> Rule:
        """Say what is missing."""
        if status == 401:
            return ExpiredCredentialsError, "Google does not take the identity token; log in again"
        return PermissionDeniedError, "this Google account may not call the function; it needs roles/run.invoker on it"


# Auth → the module that loads the platform's SDK, its caller, its extra.
_PLATFORMS: Mapping[Auth, tuple[str, type[AwsCaller | GoogleCaller], str]] = {
    "aws": ("stoker._stores.aws_credentials", AwsCaller, "s3"),
    "google": ("stoker._stores.google_credentials", GoogleCaller, "gcs"),
}


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
    module, caller, extra = _PLATFORMS[auth]
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{url} is called with an identity of {auth}'s, which needs {error.name}; pip install 'stoker[{extra}]'"
        ) from error
    return partial(caller.of, url, options, environment)


_REDIRECT = 307
_STALE: Rule = (
    ServerError,
    "the bucket does not take the URL that the function has signed, which holds for a short time; ask for another",
)
_MAX_LOCATION_CHARACTERS = 8192
_MAX_ORIGINS = 8  # the function itself, and the hosts of the bucket that it redirects to


class ServedAccess:
    """Connections to one function, and to where it redirects, in one event loop.

    Args:
        url: of the data set, https:// or http://.
        caller: who calls.
        http: connections and their limits.
    """

    def __init__(self, url: str, caller: Caller[Any], http: HttpOptions) -> None:
        self._url, self._caller, self._http = url, caller, http
        self._is_local = is_this_machine(urlsplit(url).hostname or "")
        self._connections: dict[str, Connections] = {}
        self.current, self.renew, self.identity = caller.current, caller.renew, caller.identity

    @property
    def reader(self) -> HttpReader:
        """This: it follows one redirect."""
        return self

    writer = reader

    def call(self, path: str, headers: Mapping[str, str], proof: Any, address: str) -> Call:
        """Return a GET of a path below the data set's.

        A condition in ``headers`` is for the function: where the bucket answers itself, its tags may be others.
        """
        url = f"{self._url}/{path}"
        return Call(method="GET", url=url, headers=self._caller.headers(url, headers, proof), address=address)

    async def read(self, call: Call, destination: Destination | None = None) -> Reply:
        """Return the answer to a call from wherever the function sends us, which is asked for the same range only.

        Raises:
            StoreError: there was no answer, or a redirect must not be followed.
        """
        reply = await self._carried(call, destination)
        if reply.status != _REDIRECT:
            return reply
        target = self._checked(reply.headers.get("Location", ""), call.address)
        headers = {name: value for name, value in call.headers.items() if name == "Range"}
        reply = await self._carried(replace(call, url=target, headers=headers), destination)
        if 300 <= reply.status < 400:
            raise StoreError(f"{call.address}: the function redirects to what redirects again; that is not followed")
        if reply.status in (400, 401, 403):
            raise error_of(Failure(address=call.address, status=reply.status), {str(reply.status): _STALE})
        return reply

    async def endpoint(self) -> Endpoint:
        """Ask for a byte of the manifest without saying who asks: even a refusal says what time it is."""
        call = Call(method="GET", url=f"{self._url}/manifest", headers={"Range": "bytes=0-0"}, address=self._url)
        reply = await self._carried(call, None)
        match = LAMBDA_URL.fullmatch(urlsplit(self._url).hostname or "")
        region, date = match[1] if match else "", parse_date(reply.headers.get("Date"))
        return Endpoint(address=self._url, region=region, date=date)

    def shut_out(self, address: str, reply: Reply) -> StoreError:
        """Return the error for a refusal of the platform's: the function has not seen the request."""
        # AWS's type may be followed by a colon and where it is defined.
        code = reply.headers.get("x-amzn-ErrorType", "").partition(":")[0]
        said = _document(reply)
        text = str(said.get("message") or said.get("Message") or "")
        failure = Failure(address=address, status=reply.status, code=code, text=text)
        return error_of(failure, {str(reply.status): self._caller.rule(reply.status, code)})

    async def close(self) -> None:
        """Close the connections; those of calls in progress break."""
        for connections in self._connections.values():
            await connections.close()
        self._connections.clear()

    async def _carried(self, call: Call, destination: Destination | None) -> Reply:
        parts = urlsplit(call.url)
        origin = f"{parts.scheme}://{parts.netloc}"
        if origin not in self._connections:
            if len(self._connections) >= _MAX_ORIGINS:
                raise StoreError(f"{call.address}: the function redirects to ever more hosts; is it a stoker function?")
            self._connections[origin] = Connections(self._http, origin)
        return await self._connections[origin].reader.read(call, destination)

    def _checked(self, location: str, address: str) -> str:
        """Return where a redirect leads: to https, or on this machine where the function is on it, too.

        It is a secret and not repeated, whatever is wrong with it.
        """
        try:
            if len(location) > _MAX_LOCATION_CHARACTERS or not location.isascii() or not location.isprintable():
                raise ValueError
            parts = urlsplit(location)
            check_endpoint(f"{parts.scheme}://{parts.netloc}", "the redirect")
            is_safe = parts.scheme == "https" or (self._is_local and is_this_machine(parts.hostname or ""))
        except (ValueError, ConfigError):
            is_safe = False
        if not is_safe or set(location) & set(" \\#"):
            raise StoreError(f"{address}: the function redirects to where it must not; only https:// is followed")
        return location


def said_of(reply: Reply) -> tuple[str, str]:
    """Return the code and the message of an error of the function's, which is JSON; both empty of anybody else's."""
    said = _document(reply)
    return (str(said["error"]), str(said["message"])) if {"error", "message"} <= said.keys() else ("", "")


def _document(reply: Reply) -> dict[str, Any]:
    """Return the JSON object that an answer is; an empty one if it is none."""
    try:
        document = json.loads(reply.body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
