"""Authentication in front of a function: the checks of Lambda's and Cloud Run's endpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import pytest
from aiohttp import web

from stoker_local import KeyPair
from stoker_local.functions import ServiceError
from stoker_local.functions._endpoints import RequestAuthenticator

__all__ = ["OPEN", "REGION", "Authenticator", "BearerAuthenticator", "IamAuthenticator", "enter"]

REGION = "eu-central-1"


def enter(monkeypatch: pytest.MonkeyPatch, key: KeyPair) -> None:
    """Set AWS credentials where the standard chain looks first."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key.secret_key)
    monkeypatch.setenv("AWS_SESSION_TOKEN", key.session_token)


class Authenticator:
    """Accepts every request."""

    def refusal(self, request: web.BaseRequest) -> web.Response | None:
        """Return the answer to a request that does not reach the function, None if it does."""
        return None


OPEN = Authenticator()


class IamAuthenticator(Authenticator):
    """A function URL of type ``AWS_IAM``.

    Args:
        keys: access keys that may call.
        tells: whether refusals contain the reason, as some of Lambda's do.
    """

    def __init__(self, *keys: KeyPair, tells: bool = False) -> None:
        self._keys = {key.access_key: key for key in keys}
        self._tells = tells
        self.refused: list[str] = []

    def expire(self, key: KeyPair) -> None:
        """Refuse a key from now on."""
        self._keys[key.access_key] = replace(key, expires_at=0.0)

    def refusal(self, request: web.BaseRequest) -> web.Response | None:
        """Verify the signature."""
        try:
            RequestAuthenticator(self._keys.values(), region=REGION, clock=time.time).authenticate(request, b"")
        except ServiceError as error:
            self.refused.append(error.code)
            headers = {"x-amzn-ErrorType": error.code} if self._tells else {}
            return web.json_response({"Message": "Forbidden"}, status=403, headers=headers)
        return None


@dataclass
class BearerAuthenticator(Authenticator):
    """A service of Cloud Run that accepts certain identity tokens.

    Attributes:
        good: tokens of callers that may call.
        known: valid tokens of callers that may not.
        seen: received tokens, in order.
    """

    good: Collection[str]
    known: Collection[str] = ()
    seen: list[str] = field(default_factory=list)

    def refusal(self, request: web.BaseRequest) -> web.Response | None:
        """Check the token."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.seen.append(token)
        if token in self.good:
            return None
        status = 403 if token in self.known or not token else 401
        text = f"<html><title>{status}</title>you said {json.dumps(token)}</html>"
        return web.Response(status=status, text=text, content_type="text/html")
