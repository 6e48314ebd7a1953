"""Reaching a function that serves: who calls is for it alone, and one redirect of its is followed without that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from stoker._stores.credentials import Endpoint, Identity, parse_date, with_renewal
from stoker._stores.failures import Failure, Rule, error_of
from stoker._stores.http import Call, Destination, HttpReader, Reply
from stoker._stores.http_session import open_reader, open_session
from stoker._stores.http_store_auth import LAMBDA_URL, Caller
from stoker._stores.network import check_endpoint, is_this_machine
from stoker._stores.options import HttpOptions
from stoker.errors import ConfigError, ServerError, StoreError

__all__ = ["ServedAccess", "said_of"]

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
        self._carriers: dict[str, tuple[HttpReader, aiohttp.ClientSession]] = {}

    async def read(
        self, path: str, headers: Mapping[str, str], address: str, destination: Destination | None = None
    ) -> Reply:
        """Return the answer to a GET of a path below the data set's, from wherever the function sends us.

        A condition in ``headers`` is for the function: where the bucket answers itself, its tags may be others.

        Raises:
            StoreError: there was no answer, the platform does not let us in, or a redirect must not be followed.
        """
        url = f"{self._url}/{path}"

        async def once(proof: Any) -> Reply:
            shown = self._caller.headers(url, headers, proof)
            reply = await self._carried(Call(method="GET", url=url, headers=shown, address=address), destination)
            if reply.status in (401, 403) and not said_of(reply)[0]:
                raise self._shut_out(address, reply)
            return reply

        reply = await with_renewal(self._caller, once)
        if reply.status != _REDIRECT:
            return reply
        plain = {name: value for name, value in headers.items() if name != "If-Match"}
        target = self._checked(reply.headers.get("Location", ""), address)
        reply = await self._carried(Call(method="GET", url=target, headers=plain, address=address), destination)
        if 300 <= reply.status < 400:
            raise StoreError(f"{address}: the function redirects to what redirects again; that is not followed")
        if reply.status in (400, 401, 403):
            raise error_of(Failure(address=address, status=reply.status), {str(reply.status): _STALE})
        return reply

    async def identity(self) -> Identity:
        """Return who calls."""
        return await self._caller.identity()

    async def endpoint(self) -> Endpoint:
        """Ask for a byte of the manifest without saying who asks: even a refusal says what time it is."""
        call = Call(method="GET", url=f"{self._url}/manifest", headers={"Range": "bytes=0-0"}, address=self._url)
        reply = await self._carried(call, None)
        match = LAMBDA_URL.fullmatch(urlsplit(self._url).hostname or "")
        region, date = match[1] if match else "", parse_date(reply.headers.get("Date"))
        return Endpoint(address=self._url, region=region, date=date)

    def _shut_out(self, address: str, reply: Reply) -> StoreError:
        """Return the error for a refusal of the platform's: the function has not seen the request."""
        # AWS's type may be followed by a colon and where it is defined.
        code = reply.headers.get("x-amzn-ErrorType", "").partition(":")[0]
        said = _document(reply)
        text = str(said.get("message") or said.get("Message") or "")
        failure = Failure(address=address, status=reply.status, code=code, text=text)
        return error_of(failure, {str(reply.status): self._caller.rule(reply.status, code)})

    async def close(self) -> None:
        """Close the connections; those of calls in progress break."""
        for reader, session in self._carriers.values():
            await reader.close()
            await session.close()
        self._carriers.clear()

    async def _carried(self, call: Call, destination: Destination | None) -> Reply:
        parts = urlsplit(call.url)
        origin = f"{parts.scheme}://{parts.netloc}"
        if origin not in self._carriers:
            if len(self._carriers) >= _MAX_ORIGINS:
                raise StoreError(f"{call.address}: the function redirects to ever more hosts; is it a stoker function?")
            session = open_session(self._http, origin)
            self._carriers[origin] = open_reader(self._http, origin, session), session
        reader, _ = self._carriers[origin]
        return await reader.read(call, destination)

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
