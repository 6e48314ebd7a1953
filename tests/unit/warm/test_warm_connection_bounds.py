"""What a peer can make a connection keep in memory, whatever it does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from stoker.errors import ConfigError, ConnectionLostError, DeadlineError
from stoker_warm._auth import PeerSide
from stoker_warm._connection import ConnectionConfig
from stoker_warm._frames import Kind, encode_frame
from support.warm_connections import INSTANCE, SECRET, SHARD, Server, joined, memory, proxy_side, run
from support.warm_wires import End, Link, LinkConfig


def test_a_peer_that_asks_faster_than_it_is_served_is_not_read() -> None:
    async def test() -> None:
        server, config = Server(seconds=1.0), ConnectionConfig(open_requests=500, serving_requests=8)
        async with joined(server, config=config, link=LinkConfig(window_bytes=4096)) as (proxy, node, wire):
            head = {"long": "x" * 2000}  # so that few of them come in one receive
            waiting = asyncio.gather(*(proxy.request(Kind.PING, head) for _ in range(100)))
            await asyncio.sleep(0.5)
            assert 8 <= node.statistics().serving_requests <= 8 + 8
            assert wire.ends[0].get_write_buffer_size() <= config.piece_bytes
            await waiting
            assert len(server.asked) == 100
            assert server.most_serving <= 16

    run(test)


def test_the_bodies_of_what_is_served_are_bounded_too() -> None:
    async def test() -> None:
        server, config = Server(seconds=1.0), ConnectionConfig(serving_bytes=3 * len(SHARD))
        async with joined(server, config=config) as (proxy, node, _):
            waiting = asyncio.gather(*(proxy.request(Kind.SET, {"shard": str(n)}, body=[SHARD]) for n in range(12)))
            await asyncio.sleep(0.5)
            assert node.statistics().serving_bytes == 3 * len(SHARD)
            await waiting
            assert list(server.stored.values()) == [SHARD] * 12

    run(test)


def test_a_peer_that_does_not_read_its_answers_is_served_no_more() -> None:
    async def test() -> None:
        server, config = Server(), ConnectionConfig(open_requests=1000, serving_requests=5)
        async with joined(server, config=config) as (proxy, node, wire):
            first, second = wire.ends
            first.pause_reading()
            intos = [memory(len(SHARD)) for _ in range(30)]
            waiting = asyncio.gather(*(proxy.request(Kind.GET, {"shard": len(SHARD)}, into=each) for each in intos))
            await asyncio.sleep(30)
            assert second.get_write_buffer_size() <= config.piece_bytes
            # What fits one receive is taken together.
            assert node.statistics().serving_requests <= 30
            first.resume_reading()
            await waiting
            assert all(into == SHARD for into in intos)

    run(test)


def test_a_peer_that_takes_nothing_for_too_long_is_given_up() -> None:
    async def test() -> None:
        config = ConnectionConfig(stall_seconds=20.0)
        slow = LinkConfig(bytes_per_second=10_000, window_bytes=100_000)
        async with joined(Server(), config=config, link=slow) as (proxy, _, wire):
            await proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD])  # slow is not stalled
            wire.ends[1].freeze()
            with pytest.raises(ConnectionLostError, match="took nothing for 20 s"):
                await proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD])
            assert isinstance(proxy.failure, DeadlineError)

    run(test)


def test_who_serves_says_where_bodies_go_or_that_they_do_not() -> None:
    async def test() -> None:
        asked, made = [], bytearray(1000)

        def room(body_bytes: int) -> bytearray | None:
            asked.append(body_bytes)
            return made if body_bytes == len(made) else None

        server = Server()
        async with joined(server, room=room) as (proxy, _, _):
            for size in (0, 1000, 2_000_000):
                await proxy.request(Kind.SET, {"shard": str(size)}, body=[(SHARD * 2)[:size]])
            assert asked == [1000, 2_000_000]
            assert server.stored["1000"] is made
            assert made == SHARD[:1000]
            assert server.stored["0"] == server.stored["2000000"] == b""

    run(test)


def test_a_large_body_waits_in_its_own_memory_for_a_slow_peer() -> None:
    async def test() -> None:
        config = ConnectionConfig(piece_bytes=100_000)
        slow = LinkConfig(bytes_per_second=1e6, window_bytes=10_000)
        async with joined(Server(), config=config, link=slow) as (proxy, _, wire):
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
        """Shakes hands through a connection that it then speaks past."""

        answered_bytes = 0

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, End)
            self.transport, self.side = transport, PeerSide(SECRET, "node", "warm-7", INSTANCE)

        def data_received(self, data: bytes) -> None:
            if self.side.peer is not None:
                self.answered_bytes += len(data)
            elif (message := self.side.received(*hear(data))) is not None:
                self.transport.write(encode_frame(message[0], 0, message[1]))
            else:  # this was the welcome
                self.transport.write(b"".join(encode_frame(Kind.PING, n) for n in range(1, 20_001)))

    async def test() -> None:
        server, flood = Server(), Flood()
        proxy = proxy_side(server)
        Link().join(proxy, flood)
        await proxy.ready()
        most = 0
        while len(server.asked) < 20_000:
            await asyncio.sleep(0.001)
            most = max(most, proxy.statistics().serving_requests)
        await proxy.flush()
        await asyncio.sleep(1)
        assert flood.answered_bytes == 20_000 * len(encode_frame(Kind.PONG, 1))
        assert 0 < most <= 64 + (16 << 10) // 16
        await proxy.close()

    run(test)


def hear(data: bytes) -> tuple[Kind, dict[str, Any]]:
    return Kind(data[3]), json.loads(data[16:])


@pytest.mark.parametrize("name", ["open_requests", "serving_bytes", "handshake_seconds", "piece_bytes"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ConnectionConfig(**{name: 0})
