"""The client of a shared tier: reads and offers objects over HTTP/1.1 that servers hold in memory.

``https://10.0.0.9:7412?fingerprint=…`` is the URL of a server. Several, separated by commas, divide the objects by
rendezvous hashing (D. Thaler, C. Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions
on Networking 6, 1998): adding or removing a server moves only that server's share. Bytes are received straight into the
caller's memory. Servers see names that are computed with the secret, never keys.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import parse_qsl, urlsplit

from stoker._base.task_group import end_tasks, task_group
from stoker._base.threads import PerLoop
from stoker._shared.protocol import (
    BATCH_PATH,
    GROUP_HEADER,
    METRIC_PREFIX,
    METRICS_PATH,
    OBJECTS_PATH,
    BatchResponse,
    RangeInto,
    encode_request,
    split_requests,
)
from stoker._shared.secret import SECRET_VARIABLE, TierSecret
from stoker._stores.http import Destination, ErrorRule, HttpRequest, HttpResponse, create_error
from stoker._stores.http_session import Connections
from stoker._stores.options import HttpOptions, is_loopback
from stoker.abc import ObjectRef, Readable
from stoker.errors import (
    ConfigError,
    CredentialsError,
    ServerError,
    StokerError,
    StoreError,
    ThrottledError,
    UnexpectedAnswerError,
)

_HTTP = HttpOptions(max_connections=32, connect_timeout_seconds=3.0, read_timeout_seconds=15.0)
_PENDING_BYTES = 64 << 20
"""Memory for copies of objects that wait to be offered, beside the loader's budget; further objects are not offered."""
_PIECE_BYTES = 256 << 10
_OFFERS = 4
_OFFER_SECONDS = 60.0
_PAUSE_SECONDS = 5.0
"""Pause between an offer that a server did not accept and the next one."""
_DONE = (200, 201, 204)
_NO_ROOM = 507
_FINGERPRINT = re.compile(r"[0-9a-f]{64}", re.ASCII)
_EXAMPLE = "write for example https://10.0.0.9:7412?fingerprint=…, as `stoker tier serve` prints it"
_REFUSED: ErrorRule = (
    StoreError,
    "the tier server, or a proxy before it, refuses the request; check the URL and the proxy",
)
_FAILED: ErrorRule = (ServerError, "the tier server, or a proxy before it, failed; see its log")
_BUSY: ErrorRule = (ThrottledError, "the tier server, or a proxy before it, is overloaded")
_RULES: dict[str, ErrorRule] = {
    **{str(status): _REFUSED for status in range(300, 500)},
    **{str(status): _FAILED for status in range(500, 600)},
    "429": _BUSY,
    "503": _BUSY,
    "401": (
        CredentialsError,
        f"the tier server does not know this tenant; set {SECRET_VARIABLE} to the server's secret",
    ),
}

_log = logging.getLogger("stoker.tier.client")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of one tier server.

    Attributes:
        origin: Scheme, host and port.
        fingerprint: SHA-256 of the server's certificate, 64 hexadecimal digits; empty if an authority has signed it, or
            without TLS.

    Example:
        >>> ServerAddress.parse("http://127.0.0.1:7412").origin
        'http://127.0.0.1:7412'
    """

    origin: str
    fingerprint: str = ""

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """Parse the URL of a server.

        Raises:
            ConfigError: The URL is malformed, or its traffic would cross a network without TLS.
        """
        try:
            parts = urlsplit(url)
            settings = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
            port = parts.port
        except ValueError:
            raise ConfigError(f"this is not the URL of a tier server; {_EXAMPLE}") from None
        if parts.username is not None or parts.password is not None:
            raise ConfigError(f"the URL of a tier holds a user or password; the secret belongs in {SECRET_VARIABLE}")
        origin = f"{parts.scheme}://{parts.netloc}"
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.path not in ("", "/"):
            raise ConfigError(f"{origin} with the path {parts.path!r:.80} is not a tier server's URL; {_EXAMPLE}")
        if settings.keys() - {"fingerprint"} or parts.fragment:
            raise ConfigError(
                f"{origin}: the URL of a tier server takes only the setting fingerprint=, not {', '.join(settings)}"
            )
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise ConfigError(f"{origin}: unencrypted traffic could be read and changed on the network; use https://")
        return cls(origin, _parse_fingerprint(settings, origin))


def _parse_fingerprint(settings: Mapping[str, str], origin: str) -> str:
    """Return the fingerprint in the settings of a URL, empty if there is none.

    Raises:
        ConfigError: The fingerprint is malformed, or the URL is not https.
    """
    fingerprint = settings.get("fingerprint", "")
    if fingerprint and (origin.startswith("http://") or not _FINGERPRINT.fullmatch(fingerprint)):
        raise ConfigError(
            f"{origin}: fingerprint= must be the SHA-256 of an https:// server's certificate, 64 hexadecimal digits"
        )
    return fingerprint


class SharedTier:
    """A :class:`~stoker.abc.Tier` on servers that several machines share. It connects at the first read.

    Args:
        servers: Addresses of the servers, at least one.
        secret: The tenant's secret.
    """

    name = "shared"

    def __init__(self, servers: Sequence[ServerAddress], secret: TierSecret) -> None:
        self._servers, self._secret = tuple(servers), secret
        self._clients = PerLoop(lambda: _LoopClient(self._servers, secret))

    def place(self, ref: ObjectRef) -> str:
        """Return the origin of the server that is responsible for an object; empty if there is only one server."""
        return self._server(self._name(ref)).origin if len(self._servers) > 1 else ""

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Read an object into ``into``; return False if its server does not have it.

        Raises:
            StoreError: The server cannot be reached, or sent an invalid response.
        """
        name = self._name(ref)
        return await self._clients.get().read(self._server(name), name, into)

    async def read_ranges(self, parts: Sequence[tuple[ObjectRef, int, memoryview]]) -> list[bool]:
        """Read ranges of objects, by one request per server for up to 1,024 ranges or 256 MiB.

        The bytes are not verified, since checksums are of whole objects. When the call has ended, even by an error or
        cancellation, nothing writes to the memory any more.

        Args:
            parts: For each range: the object, the offset of the range in bytes, and memory of the range's size, at
                least one byte.

        Returns:
            For each range, in the order of ``parts``, whether its server has the object; the memory of other ranges is
            unchanged.

        Raises:
            StoreError: A server cannot be reached, or sent an invalid response; ranges on other servers may be filled.
        """
        asked: dict[ServerAddress, list[int]] = {}
        wanted = [RangeInto(self._name(ref), start, into) for ref, start, into in parts]
        for number, part in enumerate(wanted):
            asked.setdefault(self._server(part.name), []).append(number)
        side, results = self._clients.get(), [False] * len(wanted)

        async def read_server(server: ServerAddress, numbers: list[int]) -> None:
            for number, is_found in zip(
                numbers, await side.read_ranges(server, [wanted[each] for each in numbers]), strict=True
            ):
                results[number] = is_found

        async with task_group() as group:
            for server, numbers in asked.items():
                group.create_task(read_server(server, numbers))
        return results

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Offer an object to its server, if the server can verify it (by SHA-256) and there is memory for a copy."""
        if ref.sha256_128 is not None:
            name = self._name(ref)
            self._clients.get().offer(self._server(name), name, self._secret.group_id(ref.dataset), data)

    def reject(self, ref: ObjectRef) -> None:
        """Have the server delete an object whose bytes were wrong."""
        name = self._name(ref)
        self._clients.get().reject(self._server(name), name)

    async def flush(self) -> int:
        """Wait until no offer of the running loop is pending; return how many offers servers have accepted in all."""
        return await self._clients.get().flush()

    async def close(self) -> None:
        """Close the running loop's connections; pending offers are dropped. Idempotent."""
        if (side := self._clients.pop()) is not None:
            await side.close()

    def _name(self, ref: ObjectRef) -> str:
        return self._secret.object_name(ref)

    def _server(self, name: str) -> ServerAddress:
        if len(self._servers) == 1:
            return self._servers[0]
        return max(
            self._servers, key=lambda server: blake2b(f"{server.origin} {name}".encode(), digest_size=8).digest()
        )


class _LoopClient:
    """Connections and pending offers of one event loop."""

    def __init__(self, servers: Sequence[ServerAddress], secret: TierSecret) -> None:
        self._headers = {"Authorization": f"Bearer {secret.token}"}
        self._connections = {
            server: Connections(_HTTP, server.origin, fingerprint=server.fingerprint) for server in servers
        }
        self._offers: dict[str, asyncio.Task[None]] = {}
        self._rejections: dict[str, asyncio.Task[bool]] = {}
        self._offer_limits = {server: asyncio.Semaphore(_OFFERS) for server in servers}
        self._offers_from_seconds: dict[ServerAddress, float] = {}
        self._servers_with_warning: set[ServerAddress] = set()
        self._copies = _BufferPool(_PENDING_BYTES)
        self._accepted_offers = 0

    async def read(self, server: ServerAddress, name: str, into: memoryview) -> bool:
        call = self._create_request("GET", server, name)
        reply = await self._connections[server].reader.send(call, Destination(into, 0, len(into)))
        if reply.status == 404:
            return False
        if reply.is_error:
            raise _response_error(call, reply)
        return True

    async def read_ranges(self, server: ServerAddress, parts: Sequence[RangeInto]) -> list[bool]:
        is_found: list[bool] = []
        url = server.origin + BATCH_PATH
        for each in split_requests(parts):
            body = encode_request(each)
            headers = {**self._headers, "Content-Length": str(len(body))}
            answer = BatchResponse(url, each)
            call = HttpRequest(method="POST", url=url, headers=headers, address=url, data=body, on_body=answer.receive)
            reply = await self._connections[server].reader.send(call)
            if reply.is_error:
                raise _response_error(call, reply)
            is_found += answer.finish()
        return is_found

    def offer(self, server: ServerAddress, name: str, group: str, data: memoryview) -> None:
        loop = asyncio.get_running_loop()
        is_put_off = loop.time() < self._offers_from_seconds.get(server, 0.0)
        if is_put_off or name in self._offers or (buffer := self._copies.acquire(len(data))) is None:
            return
        copy = memoryview(buffer)[: len(data)]
        copy[:] = data
        task = loop.create_task(self._send_offer(server, name, group, copy))
        self._offers[name] = task
        task.add_done_callback(lambda _: self._finish_offer(name, buffer))

    def reject(self, server: ServerAddress, name: str) -> None:
        if name not in self._rejections:
            task = asyncio.get_running_loop().create_task(
                self._send(server, self._create_request("DELETE", server, name))
            )
            self._rejections[name] = task
            task.add_done_callback(lambda _: self._rejections.pop(name))

    async def flush(self) -> int:
        while self._offers:
            await asyncio.wait(list(self._offers.values()))
        return self._accepted_offers

    async def close(self) -> None:
        await end_tasks([*self._offers.values(), *self._rejections.values()])
        for connections in self._connections.values():
            await connections.close()

    def _create_request(
        self,
        method: str,
        server: ServerAddress,
        name: str,
        data: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> HttpRequest:
        url = f"{server.origin}{OBJECTS_PATH}{name}"
        return HttpRequest(method=method, url=url, headers={**self._headers, **(headers or {})}, address=url, data=data)

    async def _send_offer(self, server: ServerAddress, name: str, group: str, data: memoryview) -> None:
        headers = {GROUP_HEADER: group, "Expect": "100-continue", "Content-Length": str(len(data))}
        call = self._create_request("PUT", server, name, _pieces(data), headers)
        async with self._offer_limits[server]:
            if asyncio.get_running_loop().time() >= self._offers_from_seconds.get(server, 0.0):
                is_accepted = await self._send(server, call)
                self._accepted_offers += is_accepted

    async def _send(self, server: ServerAddress, call: HttpRequest) -> bool:
        """Send a request in the background; a failure pauses offers to the server and is logged."""
        try:
            async with asyncio.timeout(_OFFER_SECONDS):
                reply = await self._connections[server].writer.send(call)
        except (StokerError, TimeoutError) as error:
            self._pause_offers(server, str(error) or "it did not answer in time")
            return False
        if reply.status in _DONE:
            self._servers_with_warning.discard(server)
        elif reply.status == _NO_ROOM:
            self._offers_from_seconds[server] = asyncio.get_running_loop().time() + _PAUSE_SECONDS
        else:
            self._pause_offers(server, str(_response_error(call, reply)))
        return reply.status in _DONE

    def _pause_offers(self, server: ServerAddress, reason: str) -> None:
        """Pause offers to a server, since each offer costs a copy; log the reason of the first pause."""
        self._offers_from_seconds[server] = asyncio.get_running_loop().time() + _PAUSE_SECONDS
        if server not in self._servers_with_warning:
            self._servers_with_warning.add(server)
            _log.warning(
                "a tier server accepts no objects, and is offered at most one every %g s: %s", _PAUSE_SECONDS, reason
            )

    def _finish_offer(self, name: str, buffer: bytearray) -> None:
        del self._offers[name]
        self._copies.release(buffer)


class _BufferPool:
    """A pool of buffers for copies: allocating fresh pages costs several times as much as the copy.

    Args:
        limit_bytes: Maximum size of all buffers together, including unused ones, in bytes.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._spare: list[bytearray] = []

    def acquire(self, size_bytes: int) -> bytearray | None:
        """Return a buffer of at least this size and at most twice it; None if that would exceed the limit."""
        for number, buffer in enumerate(self._spare):
            if size_bytes <= len(buffer) <= 2 * size_bytes:
                return self._spare.pop(number)
        while self._spare and self._held_bytes + size_bytes > self._limit_bytes:
            self._held_bytes -= len(self._spare.pop())
        if self._held_bytes + size_bytes > self._limit_bytes:
            return None
        self._held_bytes += size_bytes
        return bytearray(size_bytes)

    def release(self, buffer: bytearray) -> None:
        """Return a buffer to the pool."""
        self._spare.append(buffer)


async def read_metrics(server: ServerAddress, secret: TierSecret) -> dict[str, float]:
    """Return the metrics of a server by name, without the prefix ``stoker_tier_``.

    Raises:
        StoreError: The server cannot be reached, or sent an invalid response.
    """
    text = (await get_with_metrics_token(server, secret, METRICS_PATH)).decode("utf-8", "replace")
    lines = (line.rpartition(" ") for line in text.splitlines() if line[:1] != "#")
    try:
        return {name.removeprefix(METRIC_PREFIX): float(value) for name, _, value in lines}
    except ValueError:
        raise UnexpectedAnswerError(
            f"{server.origin}: the response does not hold the metrics of a tier server; check the URL"
        ) from None


async def get_with_metrics_token(server: ServerAddress, secret: TierSecret, path: str) -> bytes:
    """Return the body of a server's response to a GET with the metrics token.

    Raises:
        StoreError: The server cannot be reached, or sent an invalid response.
    """
    url = f"{server.origin}{path}"
    headers = {"Authorization": f"Bearer {secret.metrics_token}"}
    call = HttpRequest(method="GET", url=url, headers=headers, address=url)
    connections = Connections(_HTTP, server.origin, fingerprint=server.fingerprint)
    try:
        reply = await connections.reader.send(call)
    finally:
        await connections.close()
    if reply.is_error:
        raise _response_error(call, reply)
    return bytes(reply.body)


async def _pieces(data: memoryview) -> AsyncIterator[memoryview]:
    """Yield the data in pieces to send."""
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]


def _response_error(call: HttpRequest, reply: HttpResponse) -> StoreError:
    return create_error(call.address, reply, _RULES, text=reply.body.decode("utf-8", "replace").strip())


def open_shared_tier(url: str, *, store: Readable, processes: int = 1) -> SharedTier:
    """Return the tier of one or several servers, with the secret in ``STOKER_TIER_SECRET``.

    Args:
        url: URLs of the servers, separated by commas.
        store: Not used: the loader, or a server that reads through, reads missing objects.
        processes: Not used: any number of processes may share a tier.

    Raises:
        ConfigError: A URL is malformed, or there is no secret.
    """
    servers = [ServerAddress.parse(each.strip()) for each in url.split(",")]
    if len({server.origin for server in servers}) < len(servers):
        raise ConfigError("the same tier server is given twice; give each once")
    return SharedTier(servers, TierSecret.parse(os.environ.get(SECRET_VARIABLE, "")))
