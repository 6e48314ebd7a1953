"""What a peer can make a connection keep in memory, whatever it does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from stoker.errors import ConnectionLostError, DeadlineError
from stoker_warm._auth import ProxyHandshake
from stoker_warm._frames import HEADER_BYTES, Kind, encode_frame
from support.warm_connections import SECRET, SHARD, Server, joined, memory, node_side, run
from support.warm_wires import End, Link, LinkConfig


def test_a_peer_that_does_not_read_its_answers_is_served_no_more() -> None:
    async def test() -> None:
        server, limits = Server(), {"MAX_OPEN_REQUESTS": 1000}
        async with joined(server, limits=limits) as (proxy, node, wire):
            first, second = wire.ends
            first.pause_reading()
            intos = [memory(len(SHARD)) for _ in range(30)]
            waiting = asyncio.gather(*(proxy.request(Kind.GET, {"shard": len(SHARD)}, into=each) for each in intos))
            await asyncio.sleep(30)
            assert second.get_write_buffer_size() <= 1 << 20
            # What fits one receive is taken together.
            assert len(server.asked) <= 30
            assert node.is_sending
            more = asyncio.gather(*(proxy.request(Kind.PING, {"long": "x" * 20_000}) for _ in range(20)))
            await asyncio.sleep(30)
            assert len(server.asked) <= 30, "it reads no further while answers wait"
            first.resume_reading()
            await waiting
            assert all(into == SHARD for into in intos)
            assert {reply.kind for reply in await more} == {Kind.PONG}

    run(test)


def test_a_peer_that_takes_nothing_for_too_long_is_given_up() -> None:
    async def test() -> None:
        limits = {"STALL_TIMEOUT_SECONDS": 20.0}
        slow = LinkConfig(bytes_per_second=10_000, window_bytes=100_000)
        async with joined(Server(), limits=limits, link=slow) as (proxy, _, wire):
            await proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD])  # slow is not stalled
            wire.ends[1].freeze()
            with pytest.raises(ConnectionLostError, match="received no data for 20 s"):
                await proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD])
            assert isinstance(proxy.failure, DeadlineError)

    run(test)


def test_a_large_body_waits_in_its_own_memory_for_a_slow_peer() -> None:
    async def test() -> None:
        limits = {"MAX_WRITE_BYTES": 100_000}
        slow = LinkConfig(bytes_per_second=1e6, window_bytes=10_000)
        async with joined(Server(), limits=limits, link=slow) as (proxy, _, wire):
            waiting = asyncio.create_task(proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD] * 5))
            most = 0
            while not waiting.done():
                await asyncio.sleep(0.01)
                most = max(most, wire.ends[0].get_write_buffer_size())
            assert 0 < most <= 100_000
            assert (await waiting).head == {"bytes": 5 * len(SHARD)}

    run(test)


def test_many_thousand_pings_at_once_are_answered_within_bounds() -> None:
    class Flood(asyncio.Protocol):
        """Is a proxy that asks without end, and reads nothing meanwhile."""

        answered_bytes = 0

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, End)
            self.transport, self.side = transport, ProxyHandshake(SECRET)
            message = self.side.begin()
            assert message is not None
            transport.write(encode_frame(*message))

        def data_received(self, data: bytes) -> None:
            if self.side.peer is not None:
                self.answered_bytes += len(data)
            elif (message := self.side.receive(*hear(data))) is not None:
                self.transport.write(encode_frame(*message) + encode_frame(Kind.PING) * 20_000)
                self.transport.pause_reading()

    async def test() -> None:
        server, flood = Server(), Flood()
        node, wire = node_side(server), Link(LinkConfig(window_bytes=1000))
        wire.join(flood, node)
        await node.wait_authenticated()
        await asyncio.sleep(10)
        assert 0 < len(node._outbox) <= (16 << 10) // HEADER_BYTES
        assert len(server.asked) < 3000
        flood.transport.resume_reading()
        while len(server.asked) < 20_000:  # noqa: ASYNC110 - a list has no event
            await asyncio.sleep(0.001)
        await node.flush()
        await asyncio.sleep(1)
        assert flood.answered_bytes == 20_000 * len(encode_frame(Kind.PONG))
        await node.close()

    run(test)


def hear(data: bytes) -> tuple[Kind, dict[str, Any]]:
    return Kind(data[3]), json.loads(data[HEADER_BYTES:])
