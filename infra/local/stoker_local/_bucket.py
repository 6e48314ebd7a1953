"""The local bucket: an in-memory S3 server with configurable delays, rates and faults."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, fields, replace
from email.utils import formatdate
from typing import Annotated, Any, Self

from stoker._base.arguments import AtLeastOne, BoundedConfig, NotNegative, NumberBound, Positive
from stoker._base.fields import read_record
from stoker._stores.options import is_loopback
from stoker_local._http1 import (
    BadRequestError,
    Body,
    ServerConnection,
    ServerRequest,
    ServerResponse,
    compose_head,
    parse_head,
)
from stoker_local._network import (
    Fault,
    FaultInjector,
    FaultKind,
    FaultPlan,
    NetworkShape,
    Pacer,
    Shaper,
    split_response,
)
from stoker_local._s3 import S3Service
from stoker_local._s3.model import BucketSpec, ObjectMap, S3Call, S3Error, StoredObject
from stoker_local._s3.operations import md5_etag
from stoker_local._s3.signature import KeyPair

_PACING_CHUNK_BYTES = 1 << 18
_ADMIN_PREFIX = "/-/"
WELL_KNOWN_KEY = KeyPair(access_key="stoker", secret_key="stoker-secret")  # noqa: S106  (not a secret)


def unique_names(kind: str, names: Iterable[str]) -> set[str]:
    """Return the names as a set; ``kind`` names their kind in the error.

    Raises:
        ValueError: a name occurs more than once.
    """
    counted = Counter(names)
    if repeated := [name for name, count in counted.items() if count > 1]:
        raise ValueError(f"a {kind} is named twice: {', '.join(repeated)}")
    return set(counted)


class JsonConfig(BoundedConfig):
    """Base of configurations that can be read from JSON."""

    __slots__ = ()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Create a configuration from a JSON object; absent names keep their defaults.

        Raises:
            ValueError: the text is not a JSON object, has an unknown name or an invalid value.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the configuration is not JSON: {error}") from error
        return read_record(cls, values, "the configuration")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig(JsonConfig):
    """Configuration of a local bucket: its address, buckets, keys, network shape and faults.

    Attributes:
        host: address to listen on. If other machines can reach it, the default key and anonymous buckets are refused.
        port: port to listen on; 0 chooses a free port.
        region: region of the endpoint and of each bucket that sets none.
        keys: key pairs that may sign requests; :meth:`LocalBucket.environment` contains the first.
        buckets: buckets that exist from the start.
        shape: delays and rates of the simulated network; default as fast as the machine.
        faults: faults to inject; default none.
        max_object_bytes: largest accepted request body, in bytes (default 1 GiB).
        max_connections: maximum number of open connections; further ones are closed.
        request_seconds: time limit for the arrival of the next request, in seconds; then the connection is closed.

    Example:
        >>> config = BucketConfig(buckets=(BucketSpec(name="data"),), shape=NetworkShape(first_byte_seconds=0.02))
        >>> BucketConfig.from_json(config.to_json()) == config
        True
    """

    host: str = "127.0.0.1"
    port: Annotated[int, NumberBound(">=", 0), NumberBound("<=", 65535)] = 0
    region: str = "us-east-1"
    keys: tuple[KeyPair, ...] = (WELL_KNOWN_KEY,)
    buckets: tuple[BucketSpec, ...] = (BucketSpec(name="stoker"),)
    shape: NetworkShape = field(default_factory=NetworkShape)
    faults: FaultPlan = field(default_factory=FaultPlan)
    max_object_bytes: NotNegative[int] = 1 << 30
    max_connections: AtLeastOne[int] = 1024
    request_seconds: Positive[float] = 300.0

    def __post_init__(self) -> None:
        BoundedConfig.__post_init__(self)
        if not is_loopback(self.host) and any(key.secret_key == WELL_KNOWN_KEY.secret_key for key in self.keys):
            raise ValueError(f"host={self.host!r} is open to other machines; set keys= to key pairs of your own")
        if not is_loopback(self.host) and any(bucket.anonymous for bucket in self.buckets):
            raise ValueError(
                f"host={self.host!r} is open to other machines, so an anonymous bucket would be public; "
                "set anonymous=False or listen on 127.0.0.1"
            )
        unique_names("access key", (key.access_key for key in self.keys))
        unique_names("bucket", (bucket.name for bucket in self.buckets))

    def to_json(self) -> str:
        """Return the configuration as one line of JSON; it contains the secret keys, so do not log it."""
        return json.dumps(asdict(self))


def client_variables(region: str, keys: Sequence[KeyPair]) -> dict[str, str]:
    """Return the environment variables that make AWS clients sign with the first key."""
    variables = {"AWS_REGION": region, "AWS_DEFAULT_REGION": region}
    for key in keys[:1]:
        variables |= {"AWS_ACCESS_KEY_ID": key.access_key, "AWS_SECRET_ACCESS_KEY": key.secret_key}
        variables |= {"AWS_SESSION_TOKEN": key.session_token} if key.session_token else {}
    return variables


def client_environment(config: BucketConfig, url: str) -> dict[str, str]:
    """Return the environment variables that point AWS clients to the bucket at ``url``, with its first key."""
    endpoint = {"AWS_ENDPOINT_URL": url, "AWS_EC2_METADATA_DISABLED": "true"}
    return endpoint | client_variables(config.region, config.keys)


class LocalBucket:
    """An S3 endpoint on this machine: an async context manager that serves from entry to exit.

    Objects are addressed by path (``/bucket/key``) and live in memory. Leaving the context closes every connection,
    frees the port and discards the objects. ``inject``, ``reshape`` and the counters may be used from any thread.

    Args:
        config: configuration; default ``BucketConfig()``.
        clock: returns the current time in POSIX seconds; default ``time.time``.

    Attributes:
        counts: counters of requests, statuses, faults, bytes and connections.
        service: buckets and keys, for tests that inspect objects or expire credentials.

    Example:
        >>> import asyncio
        >>> async def main() -> dict[str, int]:
        ...     async with LocalBucket() as bucket:
        ...         bucket.put("stoker", "key", b"data")
        ...         return {key: len(stored.data) for key, stored in bucket.objects["stoker"].items()}
        >>> asyncio.run(main())
        {'key': 4}
    """

    def __init__(self, config: BucketConfig | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self.config = config or BucketConfig()
        self.counts = BucketCounters()
        self.service = S3Service(
            region=self.config.region, keys=self.config.keys, buckets=self.config.buckets, clock=clock
        )
        self._clock = clock
        self._shaper = Shaper(self.config.shape)
        self._faults = FaultInjector(self.config.faults)
        self._connections: set[ServerConnection] = set()
        self._server: asyncio.Server | None = None
        self._url = ""

    # Control and inspection.

    @property
    def url(self) -> str:
        """URL of the endpoint, without a trailing slash."""
        if not self._url:
            raise RuntimeError("the local bucket is not running; enter it with `async with`")
        return self._url

    def environment(self) -> dict[str, str]:
        """Return the environment variables that point AWS clients to this bucket."""
        return client_environment(self.config, self.url)

    @property
    def objects(self) -> Mapping[str, ObjectMap]:
        """Bucket name → key → object; a live view."""
        return {name: bucket.objects for name, bucket in self.service.buckets.items()}

    def put(self, bucket: str, key: str, data: Body) -> StoredObject:
        """Store an object without a request.

        Args:
            bucket: name of the bucket.
            key: key of the object.
            data: content; kept by reference, not copied.
        """
        stored = StoredObject(data=memoryview(data).toreadonly(), tag=md5_etag(data), modified_at=self._clock())
        self.service.buckets[bucket].objects[key] = stored
        return stored

    def inject(self, plan: FaultPlan) -> None:
        """Replace the fault plan, from the next request on."""
        self._faults = FaultInjector(plan)

    def reshape(self, shape: NetworkShape) -> None:
        """Replace the network shape: delays from the next request on, rates for new connections."""
        self._shaper = Shaper(shape)

    # Starting and closing.

    async def __aenter__(self) -> LocalBucket:
        loop = asyncio.get_running_loop()
        config = self.config
        self._server = await loop.create_server(
            lambda: ServerConnection(self._serve), config.host, config.port, backlog=1024
        )
        host, port = self._server.sockets[0].getsockname()[:2]
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._server is None:
            return
        self._server.close()
        tasks = [wire.task for wire in self._connections]
        for wire in list(self._connections):
            wire.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server, self._url = None, ""

    # Connections.

    async def _serve(self, wire: ServerConnection) -> None:
        self._connections.add(wire)
        self.counts.record_open()
        try:
            if len(self._connections) <= self.config.max_connections:
                await self._serve_requests(wire)
        finally:
            self._connections.discard(wire)
            self.counts.record_close()

    async def _serve_requests(self, wire: ServerConnection) -> None:
        pacers = self._shaper.create_pacers(wire.socket)
        try:
            while True:
                async with asyncio.timeout(self.config.request_seconds):
                    request = parse_head(await wire.read_until(b"\r\n\r\n"))
                    body = await self._read_body(wire, request)
                admin = request.path.startswith(_ADMIN_PREFIX)
                again = await (
                    self._handle_admin(wire, request, body)
                    if admin
                    else self._handle_request(wire, request, body, pacers)
                )
                if not again or not request.keep_alive:
                    return
        except TimeoutError:
            return
        except BadRequestError as error:
            response = ServerResponse(status=error.status, body=str(error).encode())
        except S3Error as error:
            response = error.response("")
        self.counts.requests["Malformed"] += 1
        self.counts.statuses[response.status] += 1
        await wire.write(compose_head(response, keep_alive=False) + bytes(response.body))
        await wire.linger()

    async def _read_body(self, wire: ServerConnection, request: ServerRequest) -> Body:
        limit = self.config.max_object_bytes
        if request.body_bytes is not None and request.body_bytes > limit:
            raise S3Error("EntityTooLarge", f"Your proposed upload exceeds the maximum of {limit} bytes.")
        if request.headers.get("expect", "").lower() == "100-continue":
            await wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if request.body_bytes is None:
            body: Body = await wire.read_chunked(limit_bytes=limit)
        else:
            body = await wire.read_exactly(request.body_bytes)
        self.counts.bytes_in += len(body)
        return body

    async def _handle_request(
        self, wire: ServerConnection, request: ServerRequest, body: Body, pacers: tuple[Pacer, ...]
    ) -> bool:
        """Answer one request; return whether the connection can carry another."""
        call = self.service.route(request, body)
        self.counts.requests[call.operation] += 1
        fault = self._faults.draw(call.operation, call.key)
        delay = self._shaper.first_byte_delay()
        if call.operation == "GetObject":
            turn = self._shaper.rate_limit_delay(asyncio.get_running_loop().time())
            tail = self._shaper.tail_delay()
            if turn is None:
                fault = Fault(kind=FaultKind.SLOW_DOWN)
            if tail:
                self.counts.faults["tail"] += 1
            delay += (turn or 0.0) + tail
        if delay:
            await asyncio.sleep(delay)
        response = self._perform_or_fail(call, fault)
        body = b"" if request.method == "HEAD" else response.body
        if fault is not None and (fault.kind is not FaultKind.CORRUPT or body):
            self.counts.faults[fault.kind.value] += 1
        self.counts.statuses[response.status] += 1
        response = replace(response, headers={**response.headers, "Date": formatdate(self._clock(), usegmt=True)})
        head = compose_head(response, keep_alive=request.keep_alive)
        return await self._send(wire, (head, body), fault, pacers if call.operation == "GetObject" else ())

    def _perform_or_fail(self, call: S3Call, fault: Fault | None) -> ServerResponse:
        if fault is not None and fault.kind is FaultKind.SLOW_DOWN:
            wait = fault.retry_after_seconds
            headers = {} if wait is None else {"Retry-After": str(wait)}
            refusal = S3Error("SlowDown", "Please reduce your request rate.", headers=headers)
        elif fault is not None and fault.kind is FaultKind.INTERNAL_ERROR:
            refusal = S3Error("InternalError", "We encountered an internal error. Please try again.")
        else:
            return self.service.perform(call)
        return refusal.response(call.request.path)

    async def _send(
        self, wire: ServerConnection, answer: tuple[bytes, Body], fault: Fault | None, pacers: tuple[Pacer, ...]
    ) -> bool:
        """Send the head and the body of an answer; return whether the connection can carry another."""
        before, after = split_response(*answer, fault)
        head_bytes = len(answer[0])
        for piece in before:
            head_bytes = await self._write(wire, piece, pacers, head_bytes)
        if fault is not None:
            match fault.kind:
                case FaultKind.RESET:
                    wire.reset()
                    return False
                case FaultKind.TRUNCATE:
                    return False
                case FaultKind.STALL:
                    await asyncio.sleep(fault.stall_seconds)
        for piece in after:
            head_bytes = await self._write(wire, piece, pacers, head_bytes)
        return True

    async def _write(self, wire: ServerConnection, data: Body, pacers: tuple[Pacer, ...], head_bytes: int) -> int:
        """Send data that begins with ``head_bytes`` of a head, count the others; return the size of the head's rest."""
        loop, view = asyncio.get_running_loop(), memoryview(data)
        chunk_bytes = _PACING_CHUNK_BYTES if pacers else max(1, len(view))
        for start in range(0, len(view), chunk_bytes):
            part = view[start : start + chunk_bytes]
            if wait := max((pacer.reserve(len(part), loop.time()) for pacer in pacers), default=0.0):
                await asyncio.sleep(wait)
            self.counts.bytes_out += max(0, len(part) - head_bytes)
            head_bytes = max(0, head_bytes - len(part))
            await wire.write(part)
        return head_bytes

    async def _handle_admin(self, wire: ServerConnection, request: ServerRequest, body: Body) -> bool:
        """Answer ``GET /-/counts``, ``POST /-/reset`` and ``POST /-/shape``, for clients on this machine only."""
        match request.method, request.path.removeprefix(_ADMIN_PREFIX):
            case _ if not ipaddress.ip_address(wire.peer_address).is_loopback:
                response = ServerResponse(status=403)
            case "GET", "counts":
                body = json.dumps(self.counts.as_dict()).encode()
                response = ServerResponse(headers={"Content-Type": "application/json"}, body=body)
            case "POST", "reset":
                self.counts.reset()
                response = ServerResponse(status=204)
            case "POST", "shape":
                try:
                    self.reshape(NetworkShape(**json.loads(bytes(body))))
                    response = ServerResponse(status=204)
                except (TypeError, ValueError) as error:
                    response = ServerResponse(status=400, body=str(error).encode())
            case _:
                response = ServerResponse(status=404)
        await wire.write(compose_head(response, keep_alive=request.keep_alive) + bytes(response.body))
        return True


@dataclass(slots=True)
class BucketCounters:
    """Counters since the start or the last reset.

    Attributes:
        requests: requests by S3 operation (``GetObject`` …); malformed requests count as ``Malformed``.
        statuses: responses by HTTP status.
        faults: injected faults by kind; ``tail`` counts GETs delayed by the shape's tail.
        bytes_in: body bytes received.
        bytes_out: body bytes sent, including those of responses in progress.
        connections: connections open now.
        connections_opened: connections opened in total.
        peak_connections: largest number of connections open at once.
    """

    requests: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    bytes_in: int = 0
    bytes_out: int = 0
    connections: int = 0
    connections_opened: int = 0
    peak_connections: int = 0

    def record_open(self) -> None:
        """Count a new connection."""
        self.connections += 1
        self.connections_opened += 1
        self.peak_connections = max(self.peak_connections, self.connections)

    def record_close(self) -> None:
        """Count a closed connection."""
        self.connections -= 1

    def reset(self) -> None:
        """Set the counters to zero; open connections remain counted as open."""
        self.requests.clear()
        self.statuses.clear()
        self.faults.clear()
        self.bytes_in = self.bytes_out = self.connections_opened = 0
        self.peak_connections = self.connections

    def as_dict(self) -> dict[str, Any]:
        """Return the counters as JSON-ready values."""
        values = {each.name: copy(getattr(self, each.name)) for each in fields(self)}
        return values | {"statuses": {str(status): count for status, count in self.statuses.items()}}
