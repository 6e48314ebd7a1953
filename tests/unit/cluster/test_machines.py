"""Cache processes of two machines in one event loop: each object has one owner, and clients need the secret."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from stoker._base.batch_read import ObjectPart, RangePart
from stoker._cache.index import Presence, name_of
from stoker._cluster import client as client_module
from stoker._cluster import peers as peers_module
from stoker._cluster import serving
from stoker._cluster.client import ClusterTier, open_local
from stoker._cluster.connection import Connection
from stoker._cluster.frames import PROTOCOL, Frame, Kind
from stoker._cluster.members import Member
from stoker._cluster.secret import ClusterSecret
from stoker._cluster.serving import Node, NodeConnection
from stoker._cluster.spec import ClusterSpec
from stoker._cluster.tcp import open_tcp
from stoker._shared.address import Address
from stoker.errors import ConnectionLostError
from support.cluster import object_of, read_object, running_node

MIB = 1 << 20
TEXT = "memory:?limit=32MB&linger=60"


class Meeting:
    """A registry for tests."""

    job, machines = "test", 2

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.environment = asyncio.Lock()
        self.host, self.members = host, list[Member]()
        self._secret = ClusterSecret.generate()

    async def secret(self) -> ClusterSecret:
        return self._secret

    def addresses(self) -> list[Address]:
        return [Address(self.host, 0)]

    async def join(self, member: Member) -> list[Member]:
        if member not in self.members:
            self.members.append(member)
        return list(self.members)


@dataclass
class Machine:
    """A machine of a job: its process, and how loaders there find it."""

    node: Node
    folder: str
    meeting: Meeting

    async def open_node(self, spec: ClusterSpec, text: str) -> Connection:
        async with self.meeting.environment:
            os.environ["XDG_RUNTIME_DIR"] = self.folder
            return await open_local(spec, text)

    def tier(self, *, is_shared: bool = False) -> ClusterTier:
        return ClusterTier(TEXT, is_shared=is_shared, registry=self.meeting, open_node=self.open_node)


@asynccontextmanager
async def two_machines(host: str = "127.0.0.1") -> AsyncIterator[list[Machine]]:
    meeting, machines = Meeting(host), list[Machine]()
    async with AsyncExitStack() as stack:
        for _ in range(2):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="run"))
            os.environ["XDG_RUNTIME_DIR"] = folder
            machines.append(Machine(await stack.enter_async_context(running_node(TEXT)), folder, meeting))
        yield machines


def check(work: Callable[[list[Machine]], Awaitable[None]], host: str = "127.0.0.1") -> None:
    async def main() -> None:
        async with two_machines(host) as machines, asyncio.timeout(60):
            await work(machines)

    before = os.environ.get("XDG_RUNTIME_DIR")
    try:
        asyncio.run(main())
    finally:
        os.environ.pop("XDG_RUNTIME_DIR", None)
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before


async def arrived(machines: list[Machine], count: int) -> None:
    """Wait until the processes have objects, together."""
    while sum(each.is_here for machine in machines for each in machine.node.catalog._objects.values()) < count:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.001)


async def meet(*tiers: ClusterTier) -> None:
    """Wait until loaders know of each other's machines."""
    await asyncio.gather(*(tier.find(object_of(0, 1)[0]) for tier in tiers))


async def share_objects(machines: list[Machine], *, objects: int = 30, size_bytes: int = 300_000) -> None:
    first, second = (machine.tier() for machine in machines)
    await meet(first, second)
    for number in range(objects):
        ref, body = object_of(number, size_bytes)
        assert await read_object(first, ref) is None
        waiting = asyncio.create_task(read_object(second, ref))
        await asyncio.sleep(0.005)
        assert not waiting.done()  # the other one fetches it
        first.offer(ref, memoryview(body))
        assert await waiting == body
        assert await read_object(first, ref) == body
    held = [set(machine.node.catalog._objects) for machine in machines]
    assert not held[0] & held[1]
    assert all(held)
    await first.close()
    await second.close()


def test_each_object_has_a_place_in_one_process_and_both_machines_get_it() -> None:
    check(share_objects)


def own_address() -> str | None:
    """Return an address of this machine that is no loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


@pytest.mark.skipif(own_address() is None, reason="this machine has no address but that of loopback")
def test_between_machines_objects_travel_over_tls() -> None:
    async def work(machines: list[Machine]) -> None:
        await share_objects(machines, objects=16, size_bytes=MIB)
        port = next(iter(machines[0].node._ports.values()))
        with socket.create_connection((machines[0].meeting.host, port), 5) as plain:
            plain.settimeout(0.3)
            with pytest.raises(TimeoutError):
                plain.recv(100)  # nothing is sent before TLS

    check(work, own_address() or "")


def test_parts_of_another_machine_s_objects_come_by_one_request_a_machine() -> None:
    async def work(machines: list[Machine]) -> None:
        tier, other = (machine.tier() for machine in machines)
        await meet(tier, other)
        objects = [object_of(number, 10_000) for number in range(60)]  # some of each machine, whatever their labels are
        for ref, body in objects[:48]:
            assert await read_object(tier, ref) is None
            tier.offer(ref, memoryview(body))
        await arrived(machines, 48)
        found = [await tier.find(ref) for ref, _ in objects]
        remote = [pair for pair, place in zip(objects, found, strict=True) if place.is_remote]
        local = [pair for pair, place in zip(objects, found, strict=True) if not place.is_remote]
        assert len(remote) > 1
        assert len(local) > 1
        ranges = [
            ObjectPart(ref, RangePart(10 * place, 10 * place + 7, 7 * place)) for place, (ref, _) in enumerate(remote)
        ]
        into = memoryview(bytearray(7 * len(remote)))
        presences = await tier.read_parts(ranges, into)
        for (ref, body), (_, part), presence in zip(remote, ranges, presences, strict=True):
            is_here = any(name_of(ref) in machine.node.catalog._objects for machine in machines)
            assert presence is (Presence.COPIED if is_here else Presence.LACKING)
            assert bytes(into[part.offset : part.offset + 7]) == (body[part.start : part.end] if is_here else bytes(7))
        await tier.close()
        await other.close()

    check(work)


def test_ranks_with_the_same_batches_get_another_machine_s_object_once() -> None:
    async def work(machines: list[Machine]) -> None:
        first, twin, far = machines[0].tier(is_shared=True), machines[0].tier(is_shared=True), machines[1].tier()
        await meet(first, twin, far)
        for number in range(8):
            ref, body = object_of(number)
            assert await read_object(first, ref) is None
            waiting = asyncio.create_task(read_object(twin, ref))
            await asyncio.sleep(0.005)
            first.offer(ref, memoryview(body))
            assert await waiting == body
        await arrived(machines, 8)
        sent = sum(connection.catalog.hits for connection in [machines[1].node])
        assert sent == 0  # the twin got all from its own machine
        for tier in (first, twin, far):
            await tier.close()

    check(work)


def test_an_owner_that_joined_later_gets_what_others_have_held_so_far() -> None:
    async def work(machines: list[Machine]) -> None:
        machines[0].meeting.machines = 1
        early = machines[0].tier()
        objects = [object_of(number, 1000) for number in range(40)]
        for ref, body in objects:
            assert await read_object(early, ref) is None
            early.offer(ref, memoryview(body))
        await arrived(machines, 40)
        await early.close()
        machines[0].meeting.machines = 2
        late = machines[1].tier()
        again = machines[0].tier()
        await meet(late, again)
        for ref, body in objects:
            assert await read_object(late, ref) == body  # none has to be fetched
        assert len(machines[1].node.catalog._objects) > 2
        await late.close()
        await again.close()

    check(work)


def test_the_port_is_closed_with_the_last_client_and_opened_at_the_same_place_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(machines: list[Machine]) -> None:
        node, ports = machines[0].node, list[int]()
        for _ in range(2):
            tier = machines[0].tier()
            await tier.find(object_of(0)[0])
            while not node._listening:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            ports += node._ports.values()
            await tier.close()
            node.close_ports()
            await asyncio.sleep(0.05)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", ports[-1])
        assert ports[0] == ports[1]

    monkeypatch.setattr(peers_module, "SETTLE_SECONDS", 0.05)
    check(work)


async def listening_at(machine: Machine) -> Address:
    """Have a process listen; return where."""
    tier = machine.tier()
    connection = await machine.open_node(ClusterSpec.parse(TEXT), TEXT)
    secret = (await machine.meeting.secret()).reveal()
    asked = {"job": "test", "addresses": ["127.0.0.1:0"], "secret": secret}
    answer = json.loads(await connection.send_and_receive(Kind.LISTEN, json.dumps(asked).encode()))
    await connection.close()
    await tier.close()
    return Member.decode(answer["own"]).address


def test_another_loader_looks_for_the_others_once_that_which_was_to_look_has_left() -> None:
    async def work(machines: list[Machine]) -> None:
        spec, text = ClusterSpec.parse(TEXT), json.dumps({"job": "test"}).encode()
        first, second = [await machines[0].open_node(spec, TEXT) for _ in range(2)]
        assert json.loads(await first.send_and_receive(Kind.LISTEN, text)) == {"look": True}
        assert json.loads(await second.send_and_receive(Kind.LISTEN, text)) == {}
        await first.close()
        while len(machines[0].node.clients) > 1:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
        assert json.loads(await second.send_and_receive(Kind.LISTEN, text)) == {"look": True}
        await second.close()

    check(work)


def test_who_does_not_have_the_secret_gets_nothing() -> None:
    async def work(machines: list[Machine]) -> None:
        address = await listening_at(machines[0])
        with pytest.raises(ConnectionLostError, match="another secret, or another release"):
            await open_tcp(address, ClusterSecret.generate())
        connection = await open_tcp(address, await machines[0].meeting.secret())
        (own,) = json.loads(await connection.send_and_receive(Kind.JOIN, b'{"job": "test"}'))
        assert Member.decode(own).address == address
        with pytest.raises(ConnectionLostError):  # whose secret it may not have
            await connection.send_and_receive(Kind.JOIN, b'{"job": "other"}')

    check(work)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(100),
        Frame(Kind.ASK, 1, "0" * 32).encode(),
        Frame(Kind.OPEN, number=1).encode(),
        Frame(Kind.LISTEN, 1, "", 10).encode() + bytes(10),
        Frame(Kind.JOIN, 1, "", 10).encode() + bytes(10),
        Frame(Kind.PROVE).encode() + bytes(64),
    ],
)
def test_a_stranger_s_bytes_end_its_connection(data: bytes) -> None:
    async def work(machines: list[Machine]) -> None:
        address = await listening_at(machines[0])
        reader, writer = await asyncio.open_connection(address.host, address.port)
        challenge = await reader.readexactly(45 + 32)
        assert Frame.decode(challenge[:45])._replace(name="") == Frame(Kind.CHALLENGE, number=PROTOCOL)
        writer.write(data)
        with suppress(ConnectionResetError):
            assert await reader.read(100) == b""
        assert not machines[0].node.catalog._objects
        writer.close()

    check(work)


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"{}",
        b'{"job": 5}',
        b'{"job": "test", "members": 5}',
        b"\xff\xfe",
        b"[" * 2000,
        b'{"job": "test", "members": [{}]}',
        b'{"job": "test"',
    ],
)
def test_texts_that_make_no_sense_end_their_connection(text: bytes) -> None:
    async def work(machines: list[Machine]) -> None:
        address = await listening_at(machines[0])
        connection = await open_tcp(address, await machines[0].meeting.secret())
        with pytest.raises(ConnectionLostError):
            await connection.send_and_receive(Kind.JOIN, text)

    check(work)


@pytest.mark.parametrize("listed", [b"x", bytes(48), b"\xff" * 48, b"0" * 32 + (5).to_bytes(8, "little") + bytes(8)])
def test_lists_of_parts_that_make_no_sense_end_their_connection(listed: bytes) -> None:
    async def work(machines: list[Machine]) -> None:
        address = await listening_at(machines[0])
        connection = await open_tcp(address, await machines[0].meeting.secret())
        with pytest.raises(ConnectionLostError):
            await connection.send_and_receive(Kind.PARTS, listed)

    check(work)


def test_a_proof_is_good_for_one_certificate_and_one_side() -> None:
    secret, nonces = ClusterSecret.generate(), bytes(range(64))
    proof = secret.proof("client", nonces, "ab" * 32)
    assert secret.is_proof(proof, "client", nonces, "ab" * 32)
    assert not secret.is_proof(proof, "process", nonces, "ab" * 32)
    assert not secret.is_proof(proof, "client", nonces, "cd" * 32)
    assert not secret.is_proof(proof, "client", nonces[::-1], "ab" * 32)
    assert not ClusterSecret.generate().is_proof(proof, "client", nonces, "ab" * 32)
    assert "…" in repr(secret)


def test_a_machine_that_was_lost_is_found_again_without_a_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "LOST_SECONDS", 0.2)
    monkeypatch.setattr(peers_module, "_RETRY_SECONDS", 0.1)
    monkeypatch.setattr(peers_module, "_MAX_RETRY_SECONDS", 0.1)

    async def work(machines: list[Machine]) -> None:
        is_cut = True

        async def open_peer(address: Address, secret: ClusterSecret) -> Connection:
            if is_cut:
                raise ConnectionLostError("the network is cut")
            return await open_tcp(address, secret)

        meeting = machines[0].meeting
        tier = ClusterTier(TEXT, registry=meeting, open_node=machines[0].open_node, open_peer=open_peer)
        other = machines[1].tier()
        await meet(tier, other)
        objects = [object_of(number, 1000)[0] for number in range(40)]

        async def remote() -> int:
            return sum([(await tier.find(ref)).is_remote for ref in objects])

        assert await remote() > 2
        loop = asyncio.get_running_loop()
        until = loop.time() + 10
        while await remote():  # until the others take over
            for ref in objects:
                await tier.peek(ref, memoryview(bytearray(ref.size_bytes)))
            await asyncio.sleep(0.05)
            assert loop.time() < until
        is_cut = False
        while not await remote():
            await asyncio.sleep(0.05)
            assert loop.time() < until
        await tier.close()
        await other.close()

    check(work)


def test_a_machine_that_does_not_answer_delays_ranges_for_a_short_time() -> None:
    async def work(machines: list[Machine]) -> None:
        async def open_peer(address: Address, secret: ClusterSecret) -> Connection:
            await asyncio.sleep(30)
            raise ConnectionLostError("no answer")

        meeting = machines[0].meeting
        tier = ClusterTier(TEXT, registry=meeting, open_node=machines[0].open_node, open_peer=open_peer)
        other = machines[1].tier()
        await meet(tier, other)
        refs = [object_of(number, 100)[0] for number in range(40)]
        parts = [ObjectPart(ref, RangePart(0, 10, 0)) for ref in refs if (await tier.find(ref)).is_remote]
        begun = asyncio.get_running_loop().time()
        for _ in range(3):
            found = await tier.read_parts(parts, memoryview(bytearray(10)))
            assert set(found) == {Presence.UNAVAILABLE}
        assert asyncio.get_running_loop().time() - begun < 5
        await tier.close()
        await other.close()

    check(work)


@pytest.mark.parametrize(
    "answer",
    [
        (Kind.RANGES, 3, bytes([Kind.HIT]) * 3),
        (Kind.RANGES, 100, bytes(100)),
        (Kind.FULL, 0, b""),
        (Kind.LEASE, 0, b""),
    ],
)
def test_wrong_answers_to_a_list_of_parts_are_no_errors_of_the_training(
    answer: tuple[Kind, int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, number, body = answer

    def lie(connection: NodeConnection, request: int, _: memoryview) -> None:
        name = "" if kind is Kind.RANGES else "0" * 32
        connection.send(Frame(kind, request, name, number), body)

    monkeypatch.setattr(NodeConnection, "_send_parts", lie)

    async def work(machines: list[Machine]) -> None:
        tier, other = (machine.tier() for machine in machines)
        await meet(tier, other)
        ranges = [ObjectPart(object_of(number, 100)[0], RangePart(0, 10, 10 * number)) for number in range(40)]
        found = await tier.read_parts(ranges, memoryview(bytearray(400)))
        assert set(found) == {Presence.UNAVAILABLE}
        await tier.close()
        await other.close()

    check(work)


def test_a_range_that_is_too_large_for_a_message_is_left_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_PARTS_BYTES", 50_000)
    monkeypatch.setattr(serving, "MAX_PARTS_BYTES", 50_000)

    async def work(machines: list[Machine]) -> None:
        tier, other = (machine.tier() for machine in machines)
        await meet(tier, other)
        refs = []
        for number in range(20):
            ref, body = object_of(number, 60_000)
            assert await read_object(tier, ref) is None
            tier.offer(ref, memoryview(body))
            refs.append(ref)
        await arrived(machines, 20)
        remote = [ref for ref in refs if (await tier.find(ref)).is_remote][:3]
        sizes = [60_000, 40_000, 40_000]
        wanted = enumerate(zip(remote, sizes, strict=True))
        ranges = [ObjectPart(ref, RangePart(0, size, 60_000 * place)) for place, (ref, size) in wanted]
        found = await tier.read_parts(ranges, memoryview(bytearray(180_000)))
        assert list(found) == [Presence.UNAVAILABLE, Presence.COPIED, Presence.UNAVAILABLE]
        await tier.close()
        await other.close()

    check(work)


def test_a_job_that_is_started_again_with_another_secret_replaces_the_one_before() -> None:
    async def work(machines: list[Machine]) -> None:
        first = [machine.tier() for machine in machines]
        await meet(*first)
        machines[0].meeting._secret = ClusterSecret.generate()
        machines[0].meeting.members.clear()
        again = [machine.tier() for machine in machines]
        await meet(*again)
        objects = [object_of(number) for number in range(40)]
        remote = [pair for pair in objects if (await again[0].find(pair[0])).is_remote]
        ref, body = remote[0]
        until = asyncio.get_running_loop().time() + 10
        while await read_object(again[0], ref) != body:
            again[0].offer(ref, memoryview(body))
            await asyncio.sleep(0.05)
            assert asyncio.get_running_loop().time() < until
        for tier in (*first, *again):
            await tier.close()

    check(work)
