"""Calling a function as a principal of Google's: the default of functions on Cloud Run.

Google Cloud, Cloud Run: "Authenticating service-to-service".
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker._stores.failures import Rule
from stoker._stores.google_identity import IdentityTokens
from stoker._stores.http_store_auth import OTHERWISE
from stoker._stores.options import ServedOptions
from stoker._stores.renewal import ExpiredCredentialsError
from stoker._stores.standing import Identity
from stoker.errors import PermissionDeniedError

__all__ = ["GoogleCaller"]


class GoogleCaller:
    """Who has Google credentials: each request carries an identity token for this function alone."""

    def __init__(self, tokens: IdentityTokens, audience: str) -> None:
        self._tokens, self._audience = tokens, audience

    @classmethod
    def of(cls, url: str, options: ServedOptions, _environment: Mapping[str, str]) -> GoogleCaller:
        """Return who calls the function at ``url``, less ``/v1/NAME``: that is what its tokens are made out to."""
        return cls(IdentityTokens(options.service_account, otherwise=OTHERWISE), url.rsplit("/", 2)[0])

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
