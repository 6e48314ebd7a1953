"""The connections of a cache process, from loaders of its machine and, if they ask for it, from those of other ones."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from stoker._cache.index import is_name, size_of
from stoker._cluster.arena import Arena
from stoker._cluster.catalog import Catalog, Decision, Reply
from stoker._cluster.frames import (
    MAX_PARTS_BYTES,
    NONCE_BYTES,
    PART,
    PROOF_BYTES,
    PROTOCOL,
    Frame,
    FrameProtocol,
    Kind,
    Need,
)
from stoker._cluster.members import Member
from stoker._cluster.secret import ClusterSecret
from stoker._shared.address import Address
from stoker.errors import StokerError

LEASE_SECONDS = 30.0
"""Time limit of a lease: the client is stuck then, and another one that waits fetches the object."""
_PASSING_BYTES = 256 << 20
"""Maximum memory, beside the limit and not above it, of objects that ranks with the same batches need at a time."""
_MAX_JOBS, _MAX_MEMBERS = 16, 4096
_LOOK_SECONDS = 5.0
"""Time for a client to find out the secret and the address of a job; another one is asked then."""
_log = logging.getLogger("stoker.cluster.node")


class Listener(Protocol):
    """Accepts connections from other machines.

    Attributes:
        address: where it does.
    """

    address: Address

    def discard(self, connection: NodeConnection) -> None:
        """Count a connection as unauthenticated no longer: it has proved that it has a secret, or has ended."""
        ...

    def close(self) -> None:
        """Accept no more connections."""
        ...


class Listen(Protocol):
    """Begins to accept connections for a process."""

    async def __call__(self, node: Node, address: Address, *, tls: bool) -> Listener:
        """Accept connections at an address, over TLS unless it is one of loopback.

        Raises:
            StokerError: the address cannot be used.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A job whose machines share their caches.

    Attributes:
        secret: its secret.
        own: this process.
        members: label → member, of all that are known here.
    """

    secret: ClusterSecret
    own: Member
    members: dict[str, Member]

    def join(self, members: Iterable[Any]) -> None:
        """Record members.

        Raises:
            ValueError: a description makes no sense.
        """
        for each in map(Member.decode, members):
            if each.label != self.own.label and (each.label in self.members or len(self.members) < _MAX_MEMBERS):
                self.members[each.label] = each

    def encode(self) -> dict[str, object]:
        """Return what other loaders of this machine need to know of the job, for JSON."""
        members = [each.encode() for each in self.members.values()]
        return {"secret": self.secret.reveal(), "own": self.own.encode(), "members": members}


class Node:
    """What a cache process has, and who uses it. Belongs to one event loop.

    Args:
        arena: memory of the objects.
        limit_bytes: its size.
        label: name of the machine among those of a job.
        listen: begins to accept connections from other machines.

    Attributes:
        clients: present connections.
        had_clients: whether there was one.
        idle_since: event loop's time at which the last client left; None while there is one.
        jobs: jobs whose machines share their caches, by the text that identifies them.
    """

    def __init__(self, arena: Arena, limit_bytes: int, *, label: str, listen: Listen) -> None:
        self.arena, self.catalog = arena, Catalog(limit_bytes, min(limit_bytes, _PASSING_BYTES))
        self.clients: set[NodeConnection] = set()
        self.had_clients = False
        self.idle_since: float | None = asyncio.get_running_loop().time()
        self.jobs: dict[str, Job] = {}
        self._limit_bytes, self._label, self._listen = limit_bytes, label, listen
        self._listening: dict[str, asyncio.Task[Listener]] = {}
        self._ports: dict[str, int] = {}
        self._asked: dict[str, tuple[float, NodeConnection]] = {}  # job → when which client was to look for members

    def add_client(self, client: NodeConnection) -> None:
        """Add a client."""
        self.clients.add(client)
        self.had_clients, self.idle_since = True, None

    def remove_client(self, client: NodeConnection) -> None:
        """Remove a client, and give its leases to others."""
        if client not in self.clients:
            return
        self.clients.discard(client)
        self.answer(self.catalog.forget(client))
        self._asked = {job: asked for job, asked in self._asked.items() if asked[1] is not client}
        if not self.clients:
            self.idle_since = asyncio.get_running_loop().time()

    def close_ports(self) -> None:
        """Accept no client of another machine any more, and forget all jobs."""
        listening, self._listening = self._listening, {}
        for task in listening.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()
            else:
                task.cancel()
        self.jobs.clear()
        self._asked.clear()

    async def listen(self, name: str, addresses: Iterable[Address], secret: ClusterSecret, *, tls: bool) -> Job:
        """Accept clients of a job's other machines, at the first of the addresses that this machine has.

        Raises:
            StokerError: none of them can be used.
        """
        problem = StokerError("no address to listen on was given")
        for address in addresses:
            try:
                listener = await self._listener(address, tls=tls)
            except StokerError as error:
                problem = error
                continue
            own = Member(label=self._label, address=listener.address, limit_bytes=self._limit_bytes)
            self.jobs.pop(name, None)
            self.jobs[name] = Job(secret, own, {own.label: own})
            while len(self.jobs) > _MAX_JOBS:
                del self.jobs[next(iter(self.jobs))]
            return self.jobs[name]
        raise problem

    async def _listener(self, address: Address, *, tls: bool) -> Listener:
        """Return the listener at an address, at the same port as before if it had been closed."""
        key = f"{address} {tls}"
        if key not in self._listening:
            again = Address(address.host, self._ports.get(key, address.port))
            self._listening[key] = asyncio.ensure_future(self._listen(self, again, tls=tls))
        try:
            listener = await asyncio.shield(self._listening[key])
        except StokerError:
            self._listening.pop(key, None)
            if self._ports.pop(key, address.port) == address.port:
                raise
            return await self._listener(address, tls=tls)  # another process has the port now
        self._ports[key] = listener.address.port
        return listener

    def is_outdated(self, name: str, max_seconds: float, client: NodeConnection) -> bool:
        """Return whether no present client was asked to look for a job's members for a time; then this one is asked."""
        now = asyncio.get_running_loop().time()
        asked_seconds, _ = self._asked.get(name, (-math.inf, client))
        if now - asked_seconds < (max_seconds if name in self.jobs else _LOOK_SECONDS):
            return False
        self._asked[name] = now, client
        return True

    def answer(self, replies: Iterable[Reply | None]) -> None:
        """Send replies."""
        for reply in replies:
            if reply is not None:
                assert isinstance(reply.client, NodeConnection)  # noqa: S101 - only these ask
                reply.client.reply(reply)

    def watch_lease(self, client: NodeConnection, name: str) -> None:
        """End a client's lease at its time limit."""
        lease = self.catalog.lease_of(client, name)
        asyncio.get_running_loop().call_later(LEASE_SECONDS, self._expire, client, name, lease)

    def _expire(self, client: NodeConnection, name: str, lease: int | None) -> None:
        if lease is None or self.catalog.lease_of(client, name) != lease:
            return
        if self.catalog.is_arriving(name):
            client.abort()  # stuck in the middle: it must not write any more
        else:
            self.answer(self.catalog.release(client, name))


class NodeConnection(FrameProtocol):
    """The connection of a client.

    Args:
        node: the process.
        listener: where a client of another machine has connected, which has to prove that it has a secret first; None
            on this machine.
    """

    def __init__(self, node: Node, listener: Listener | None = None, fingerprint: str = "") -> None:
        super().__init__()
        self._node, self._listener, self._fingerprint = node, listener, fingerprint
        self._nonce = b"" if listener is None else secrets.token_bytes(NONCE_BYTES)
        self._is_proven = listener is None
        self._has_mapped, self._job = False, ""  # the job that a client of another machine has the secret of
        self._asked: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._is_proven:
            self._node.add_client(self)
        else:
            self.send(Frame(Kind.CHALLENGE, number=PROTOCOL), self._nonce)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for task in self._tasks:
            task.cancel()
        if self._listener is not None:
            self._listener.discard(self)
        self._node.remove_client(self)

    def reply(self, reply: Reply) -> None:
        """Send the answer to a request."""
        name = self._asked.pop(reply.request, "")
        place, body = reply.place, memoryview(b"")
        if isinstance(place, bytearray):
            self.send(Frame(Kind.PASS, reply.request, name), memoryview(place))
            return
        if reply.decision is Decision.LEASE:
            self._node.watch_lease(self, name)
        elif reply.decision is Decision.HIT and not self._has_mapped:
            body = self._node.arena.memory[place : place + size_of(name)]
        self.send(Frame(Kind[reply.decision.name], reply.request, name, place), body)

    def frame_received(self, frame: Frame) -> tuple[int, memoryview | None]:
        if not self._is_proven:
            if frame.kind is not Kind.PROVE:
                raise ValueError(f"{frame.kind.name} from a client that has not proved anything")
            return self.text_memory(frame._replace(number=PROOF_BYTES))
        is_local = self._listener is None
        if frame.kind in (Kind.JOIN, Kind.PARTS) or (frame.kind is Kind.LISTEN and is_local):
            return self.text_memory(frame)
        catalog, name = self._node.catalog, frame.name
        match frame.kind:
            case Kind.OPEN:
                self._has_mapped = bool(frame.number) and is_local
            case Kind.ASK:
                self._ask(frame)
            case Kind.PEEK:
                self._asked[frame.request] = name
                self._node.answer([catalog.peek(self, frame.request, name)])
            case Kind.GIVE:
                return size_of(name), self._place(name)
            case Kind.RELEASE:
                self._node.answer(catalog.release(self, name))
            case Kind.CANCEL:
                if self._asked.pop(frame.request, None) is not None:
                    catalog.cancel(self, frame.request, name)
            case Kind.REJECT:
                catalog.reject(name)
            case _:
                raise ValueError(f"a client sent {frame.kind.name}")
        return 0, None

    def _ask(self, frame: Frame) -> None:
        self._asked[frame.request] = frame.name
        shared, passes = bool(frame.number & Need.SHARED), bool(frame.number & Need.PASSING)
        reply = self._node.catalog.ask(self, frame.request, frame.name, is_shared=shared, passes=passes)
        if reply is None:
            self.send(Frame(Kind.WAIT, frame.request, frame.name))
        else:
            self._node.answer([reply])

    def _place(self, name: str) -> memoryview | None:
        node, size_bytes = self._node, size_of(name)
        place = node.catalog.begin(self, name)
        if place is None:
            return None
        if isinstance(place, bytearray):
            return memoryview(place)
        if not node.arena.reserve(place, size_bytes):
            _log.warning("the system has no room for more than %d bytes: no object is added", node.catalog.used_bytes)
            node.answer(node.catalog.stop_adding(name))
            return None
        return node.arena.memory[place : place + size_bytes]

    def body_received(self, frame: Frame, body: memoryview) -> None:
        node = self._node
        match frame.kind:
            case Kind.PROVE:
                self._check_proof(bytes(body))
            case Kind.GIVE:
                node.answer(node.catalog.complete(self, frame.name))
            case Kind.JOIN:
                fields = _fields(body)
                members: object = []
                if self._listener is not None and fields["job"] != self._job:
                    raise ValueError("a client joins another job than that whose secret it has")
                if (job := node.jobs.get(fields["job"])) is not None:
                    job.join(fields["members"])
                    members = job.encode()["members"]
                self.send_text(Kind.MEMBERS, frame.request, json.dumps(members).encode())
            case Kind.LISTEN:
                task = asyncio.get_running_loop().create_task(self._listen(frame.request, _fields(body)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Kind.PARTS:
                self._send_parts(frame.request, body)

    def _check_proof(self, proof: bytes) -> None:
        nonces, mac = self._nonce + proof[:NONCE_BYTES], proof[NONCE_BYTES:]
        known = {name: job.secret for name, job in self._node.jobs.items()}
        proven = [name for name, each in known.items() if each.is_proof(mac, "client", nonces, self._fingerprint)]
        if not proven:
            raise ValueError("the client has no secret of a job here")
        self._job, self._is_proven = proven[0], True
        own_proof = known[self._job].proof("process", nonces, self._fingerprint)
        self.send(Frame(Kind.WELCOME, number=PROTOCOL), own_proof)
        assert self._listener is not None  # noqa: S101 - else nothing has to be proved
        self._listener.discard(self)
        self._node.add_client(self)

    async def _listen(self, request: int, asked: dict[str, Any]) -> None:
        """Answer with what is known of a job, and whether the client is to look for its members where they meet.

        First listen for the job if the client says where, and with which secret.
        """
        name, answer = asked["job"], dict[str, object]()
        job = self._node.jobs.get(name)
        try:
            if asked["secret"] and (job is None or job.secret.reveal() != asked["secret"]):
                addresses = [Address.parse(each) for each in asked["addresses"]]
                secret = ClusterSecret.parse(asked["secret"])
                job = await self._node.listen(name, addresses, secret, tls=asked["tls"])
            elif self._node.is_outdated(name, asked["max_seconds"], self):
                answer["look"] = True
        except StokerError as error:
            answer["problem"] = str(error)
        if job is not None:
            answer |= job.encode()
        self.send_text(Kind.LISTENS, request, json.dumps(answer).encode())

    def _send_parts(self, request: int, listed: memoryview) -> None:
        """Send the parts of a list that are here, and for each one whether it is."""
        if len(listed) % PART.size:
            raise ValueError("an incomplete list of parts")
        catalog, memory = self._node.catalog, self._node.arena.memory
        kinds, ranges = bytearray(), [memoryview(b"")]
        decided: dict[str, Reply] = {}
        size_bytes = 0
        for raw, start, end in PART.iter_unpack(listed):
            name = raw.decode("ascii")
            if not is_name(name) or not start <= end <= size_of(name):
                raise ValueError(f"{name!r:.40} has no part from {start} to {end}")
            if name not in decided:
                decided[name] = catalog.peek(self, request, name)
            reply = decided[name]
            kind = Kind[reply.decision.name]
            if kind is Kind.HIT and size_bytes + end - start > MAX_PARTS_BYTES:
                kind = Kind.FULL  # the client reads it from the store
            if kind is Kind.HIT:
                assert isinstance(reply.place, int)  # noqa: S101 - peek() finds no others
                ranges.append(memory[reply.place + start : reply.place + end])
                size_bytes += end - start
            kinds.append(kind)
        self.send(Frame(Kind.RANGES, request, "", len(kinds) + size_bytes), b"".join([kinds, *ranges]))


def _fields(body: memoryview) -> dict[str, Any]:
    """Return the fields of a text.

    Raises:
        ValueError: it is not a JSON object about a job.
    """
    try:
        fields = json.loads(bytes(body))
    except RecursionError:
        raise ValueError("a text with deep nesting") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("job"), str):
        raise ValueError("a text that is about no job")
    if not isinstance(fields.setdefault("members", []), list):
        raise ValueError("members that are no list")
    return {"addresses": [], "secret": "", "max_seconds": 0.0, "tls": True} | fields
