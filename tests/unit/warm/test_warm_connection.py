from __future__ import annotations

import asyncio
import gc
import json
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from stoker.clock import run_virtual
from stoker.errors import (
    ConfigError,
    ConnectionLostError,
    CredentialsError,
    DeadlineError,
    NotFoundError,
    ServerError,
    WireError,
)
from stoker.warm.connection import Answer, Connection, ConnectionConfig, Serve
from stoker.warm.handshake import PeerSide, ProxySide, Secret
from stoker.warm.outbox import Buffer
from stoker.warm.wire import Head, Kind, encode_frame
from support.tls import make_authority
from support.warm_wires import End, Link, LinkConfig

SECRET = Secret(bytes(32))
INSTANCE = "0" * 16
SHARD = bytes(range(256)) * 4000  # 1 MB


async def refuse(kind: Kind, head: Head, body: bytearray) -> Answer:
    raise NotFoundError("nothing is here")


@dataclass
class Server:
    """Serves as a node does, and remembers what it was asked."""

    seconds: float = 0.0
    stored: dict[str, bytearray] = field(default_factory=dict)
    asked: list[tuple[Kind, Head]] = field(default_factory=list)
    cancelled: int = 0
    serving: int = 0
    most_serving: int = 0

    async def __call__(self, kind: Kind, head: Head, body: bytearray) -> Answer:
        self.asked.append((kind, head))
        self.serving += 1
        self.most_serving = max(self.most_serving, self.serving)
        try:
            if self.seconds or "seconds" in head:
                await asyncio.sleep(head.get("seconds", self.seconds))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.serving -= 1
        if kind is Kind.GET and "shard" in head:
            return Kind.FOUND, {"crc32c": 7}, (SHARD[: head["shard"]],)
        if kind is Kind.GET:
            return Kind.MISSING, {}, ()
        if kind is Kind.SET:
            self.stored[head["shard"]] = body
            return Kind.STORED, {"bytes": len(body)}, ()
        return Kind.PONG, {}, ()


def proxy_side(serve: Serve = refuse, secret: Secret = SECRET, *, fingerprint: str = "", **options: Any) -> Connection:
    return Connection(ProxySide(secret, fingerprint=fingerprint), serve, **options)


def node_side(serve: Serve = refuse, secret: Secret = SECRET, *, fingerprint: str = "", **options: Any) -> Connection:
    side = PeerSide(secret, "node", "warm-7", INSTANCE, greeting={"term": 3}, fingerprint=fingerprint)
    return Connection(side, serve, **options)


@asynccontextmanager
async def joined(
    serve: Serve = refuse, *, link: LinkConfig | None = None, ask: Serve = refuse, **options: Any
) -> AsyncIterator[tuple[Connection, Connection, Link]]:
    """Yield the proxy's side, the node's, which serves, and the link; afterwards nothing may be left of them."""
    proxy, node, wire = proxy_side(ask, **options), node_side(serve, **options), Link(link)
    wire.join(proxy, node)
    await proxy.ready()
    await node.ready()
    try:
        yield proxy, node, wire
    finally:
        for end in wire.ends:
            end.thaw()
        await proxy.close()
        await node.close()
        for side in (proxy, node):
            assert not side.is_open
            statistics = side.statistics()
            assert (statistics.open_requests, statistics.serving_requests, statistics.serving_bytes) == (0, 0, 0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test in virtual time; neither tasks nor complaints of the loop may be left."""
    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await test()

    run_virtual(main())
    gc.collect(1)  # what tasks and futures that nobody asked have to say
    assert complaints == []


def memory(size_bytes: int) -> memoryview:
    return memoryview(bytearray(size_bytes))


# Asking and answering.


def test_a_request_is_answered_with_a_body_straight_into_its_memory() -> None:
    async def test() -> None:
        async with joined(Server()) as (proxy, _, _):
            into = memory(len(SHARD) + 10)
            reply = await proxy.request(Kind.GET, {"shard": len(SHARD)}, into=into)
            assert (reply.kind, reply.head, reply.body_bytes) == (Kind.FOUND, {"crc32c": 7}, len(SHARD))
            assert into == SHARD + bytes(10)

    run(test)


def test_a_body_goes_from_where_its_parts_are_and_belongs_to_who_serves_it() -> None:
    async def test() -> None:
        server = Server()
        async with joined(server) as (proxy, _, _):
            parts: list[Buffer] = [SHARD, bytearray(b"more"), memoryview(SHARD)[:5], b""]
            reply = await proxy.request(Kind.SET, {"shard": "a"}, body=parts)
            assert reply.head == {"bytes": len(SHARD) + 9}
            assert server.stored["a"] == SHARD + b"more" + SHARD[:5]
            server.stored["a"].extend(b"no view of it is left")

    run(test)


def test_both_sides_ask_at_once_and_number_their_requests_for_themselves() -> None:
    async def test() -> None:
        async with joined(Server(), ask=Server()) as (proxy, node, _):
            sizes = [0, 1, 100, 20_000, 300_000]
            intos = [memory(size) for size in sizes * 2]
            sides = [proxy] * len(sizes) + [node] * len(sizes)
            wanted = [
                side.request(Kind.GET, {"shard": len(into)}, into=into) for side, into in zip(sides, intos, strict=True)
            ]
            replies = await asyncio.gather(*wanted)
            assert [reply.body_bytes for reply in replies] == sizes * 2
            assert all(into == SHARD[: len(into)] for into in intos)

    run(test)


def test_answers_come_in_any_order() -> None:
    async def test() -> None:
        order: list[int] = []

        async def ask(proxy: Connection, seconds: int) -> None:
            await proxy.request(Kind.PING, {"seconds": seconds})
            order.append(seconds)

        async with joined(Server()) as (proxy, _, _):
            await asyncio.gather(*(ask(proxy, seconds) for seconds in (3, 1, 2)))
        assert order == [1, 2, 3]

    run(test)


def test_an_answer_without_a_taker_of_its_body_says_how_long_it_was() -> None:
    async def test() -> None:
        async with joined(Server()) as (proxy, _, _):
            assert (await proxy.request(Kind.GET, {"shard": 1000})).body_bytes == 1000
            assert (await proxy.request(Kind.GET)).kind is Kind.MISSING

    run(test)


def test_an_error_of_the_handler_is_told_and_the_connection_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(kind: Kind, head: Head, body: bytearray) -> Answer:
        if kind is Kind.PING:
            raise RuntimeError("a secret detail")
        if kind is Kind.INDEX:
            raise NotFoundError("\x1b[2J\n" + "x" * 5000)
        if kind is Kind.GET:
            return Kind.STORED, {}, ()
        if kind is Kind.DELETE:
            return Kind.STORED, {"not": object()}, ()
        raise NotFoundError("no such shard")

    async def test() -> None:
        async with joined(broken) as (proxy, _, _):
            for kind, says in (
                (Kind.SET, "failed at SET: NotFoundError: no such shard"),
                (Kind.PING, "failed at PING: RuntimeError$"),
                (Kind.GET, "STORED is no answer to GET"),
                (Kind.DELETE, "cannot be sent as JSON"),
                (Kind.INDEX, r"NotFoundError: \?\[2J\?x{100,500}$"),
            ):
                with pytest.raises(ServerError, match=says):
                    await proxy.request(kind)
            assert proxy.is_open

    with caplog.at_level(logging.ERROR):
        run(test)
    assert [record.getMessage() for record in caplog.records] == ["a PING request of a peer failed"]


def test_what_cannot_be_sent_is_refused_and_the_connection_goes_on() -> None:
    async def test() -> None:
        async with joined(Server()) as (proxy, _, _):
            with pytest.raises(WireError, match="PONG is no request"):
                await proxy.request(Kind.PONG)
            with pytest.raises(WireError, match="at most 16777216"):
                await proxy.request(Kind.SET, {}, body=[SHARD] * 20)
            assert proxy.statistics().open_requests == 0
            assert (await proxy.request(Kind.PING)).kind is Kind.PONG

    run(test)


def test_notices_arrive_in_order_and_before_what_is_sent_later() -> None:
    async def test() -> None:
        heard: list[tuple[Kind, Head]] = []
        proxy = proxy_side(notice=lambda kind, head: heard.append((kind, head)))
        node = node_side()
        Link().join(proxy, node)
        with pytest.raises(ConnectionLostError, match="not ready"):
            node.notify(Kind.PONG)
        await node.ready()
        node.notify(Kind.PONG, {"awake": True})
        node.notify(Kind.BYE, {"term": 3})
        await node.flush()
        await node.close()
        await proxy.closed()
        assert heard == [(Kind.PONG, {"awake": True}), (Kind.BYE, {"term": 3})]

    run(test)


def test_more_requests_than_may_be_open_wait_for_their_turn() -> None:
    async def test() -> None:
        server, config = Server(seconds=1.0), ConnectionConfig(open_requests=3)
        async with joined(server, config=config) as (proxy, _, _):
            waiting = asyncio.gather(*(proxy.request(Kind.PING) for _ in range(10)))
            await asyncio.sleep(0.5)
            assert proxy.statistics().open_requests == 3
            await waiting
            assert server.most_serving == 3
            assert asyncio.get_running_loop().time() == pytest.approx(4, abs=0.1)

    run(test)


# Bounded memory.


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


def test_a_hundred_thousand_pings_at_once_are_answered_within_bounds() -> None:
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
                self.transport.write(b"".join(encode_frame(Kind.PING, n) for n in range(1, 100_001)))

    async def test() -> None:
        server, flood = Server(), Flood()
        proxy = proxy_side(server)
        Link().join(proxy, flood)
        await proxy.ready()
        most = 0
        while len(server.asked) < 100_000:
            await asyncio.sleep(0.001)
            most = max(most, proxy.statistics().serving_requests)
        await proxy.flush()
        await asyncio.sleep(1)
        assert flood.answered_bytes == 100_000 * len(encode_frame(Kind.PONG, 1))
        assert 0 < most <= 64 + (16 << 10) // 16
        await proxy.close()

    run(test)


def hear(data: bytes) -> tuple[Kind, dict[str, Any]]:
    return Kind(data[3]), json.loads(data[16:])


# Giving up.


def test_after_a_cancellation_nothing_writes_to_the_memory_and_the_connection_goes_on() -> None:
    async def test() -> None:
        slow = LinkConfig(bytes_per_second=1e6)
        async with joined(Server(), link=slow) as (proxy, _, _):
            into = memory(len(SHARD))
            asking = asyncio.create_task(proxy.request(Kind.GET, {"shard": len(SHARD)}, into=into))
            await asyncio.sleep(0.3)
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()
            done = bytes(into).rstrip(b"\0")
            assert 0 < len(done) < len(SHARD)
            assert proxy.statistics().open_requests == 1  # the peer has not answered yet
            into[:] = b"\xa5" * len(SHARD)
            assert (await proxy.request(Kind.PING)).kind is Kind.PONG
            assert into == b"\xa5" * len(SHARD)
            assert proxy.statistics().open_requests == 0

    run(test)


def test_a_cancelled_request_that_was_not_sent_is_never_heard_of() -> None:
    async def test() -> None:
        server = Server()
        async with joined(server, link=LinkConfig(bytes_per_second=1e6, window_bytes=1000)) as (proxy, _, _):
            large = asyncio.create_task(proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD]))
            await asyncio.sleep(0.1)
            behind = asyncio.create_task(proxy.request(Kind.PING))
            await asyncio.sleep(0.1)
            behind.cancel()
            await asyncio.wait([behind])
            assert proxy.statistics().open_requests == 1
            await large
            assert [kind for kind, _ in server.asked] == [Kind.SET]

    run(test)


def test_a_body_that_is_under_way_is_sent_to_its_end_from_a_copy_when_its_request_is_cancelled() -> None:
    async def test() -> None:
        server, body = Server(), bytearray(SHARD)
        config = ConnectionConfig(piece_bytes=10_000)
        slow = LinkConfig(bytes_per_second=1e6, window_bytes=10_000)
        async with joined(server, link=slow, config=config) as (proxy, _, _):
            asking = asyncio.create_task(proxy.request(Kind.SET, {"shard": "a"}, body=[body]))
            await asyncio.sleep(0.3)
            asking.cancel()
            await asyncio.wait([asking])
            body[:] = bytes(len(body))
            assert (await proxy.request(Kind.PING)).kind is Kind.PONG
            assert server.stored["a"] == SHARD

    run(test)


def test_the_peer_stops_serving_what_was_cancelled() -> None:
    async def test() -> None:
        server = Server(seconds=10.0)
        async with joined(server) as (proxy, node, _):
            asking = asyncio.create_task(proxy.request(Kind.PING))
            await asyncio.sleep(1)
            asking.cancel()
            await asyncio.sleep(1)
            assert server.cancelled == 1
            assert proxy.statistics().open_requests == node.statistics().serving_requests == 0

    run(test)


def test_an_answer_that_waits_to_be_sent_shrinks_when_its_request_is_cancelled() -> None:
    async def test() -> None:
        slow = LinkConfig(bytes_per_second=1e6, window_bytes=10_000)
        async with joined(Server(), link=slow, config=ConnectionConfig(piece_bytes=10_000)) as (proxy, _, _):
            intos = [memory(len(SHARD)) for _ in range(5)]
            asking = [asyncio.create_task(proxy.request(Kind.GET, {"shard": len(SHARD)}, into=into)) for into in intos]
            await asyncio.sleep(0.3)
            for each in asking[1:]:
                each.cancel()
            await asyncio.wait(asking)
            assert intos[0] == SHARD
            assert not any(any(into) for into in intos[1:])
            await proxy.request(Kind.PING)
            assert proxy.statistics().received_bytes < 1.5 * len(SHARD)

    run(test)


def test_an_answer_that_crosses_the_cancellation_is_taken_for_nothing_else() -> None:
    async def test() -> None:
        server = Server()
        async with joined(server, link=LinkConfig(latency_seconds=1.0)) as (proxy, _, _):
            asking = asyncio.create_task(proxy.request(Kind.PING))
            await asyncio.sleep(1.5)
            asking.cancel()
            await asyncio.sleep(0.1)
            assert (await proxy.request(Kind.PING)).kind is Kind.PONG
            assert server.cancelled == 0

    run(test)


def test_a_request_that_has_a_deadline_ends_then_wherever_it_is() -> None:
    async def test() -> None:
        async with joined(Server(seconds=100.0), config=ConnectionConfig(open_requests=1)) as (proxy, _, _):
            for _ in range(2):  # the second waits for its turn
                started = asyncio.get_running_loop().time()
                with pytest.raises(DeadlineError, match="did not answer PING within 2 s"):
                    await asyncio.gather(*(proxy.request(Kind.PING, timeout=2) for _ in range(3)))
                assert asyncio.get_running_loop().time() - started == pytest.approx(2)
            assert proxy.is_open

    run(test)


def test_requests_to_a_frozen_peer_neither_pile_up_nor_break_the_connection() -> None:
    async def test() -> None:
        server = Server()
        async with joined(server, config=ConnectionConfig(open_requests=4)) as (proxy, _, wire):
            wire.ends[1].freeze()
            for _ in range(50):
                with pytest.raises(DeadlineError):
                    await proxy.request(Kind.GET, {"shard": 1000}, timeout=1)
            assert proxy.statistics().open_requests == 4
            sent_bytes = proxy.statistics().sent_bytes
            wire.ends[1].thaw()
            assert (await proxy.request(Kind.PING)).kind is Kind.PONG
            assert len(server.asked) <= 5
            assert proxy.statistics().sent_bytes < sent_bytes + 1000

    run(test)


# The end.


@pytest.mark.parametrize("whose", ["ours", "theirs", "the network's"])
def test_a_connection_that_ends_ends_every_request(whose: str) -> None:
    async def test() -> None:
        server = Server(seconds=100.0)
        async with joined(server, config=ConnectionConfig(open_requests=3)) as (proxy, node, wire):
            asking = [asyncio.create_task(proxy.request(Kind.PING)) for _ in range(10)]  # seven wait for their turn
            await asyncio.sleep(1)
            {"ours": proxy.abort, "theirs": node.abort, "the network's": wire.cut}[whose]()
            await asyncio.wait(asking)
            assert {type(each.exception()) for each in asking} == {ConnectionLostError}
            await proxy.closed()
            await node.closed()
            assert server.cancelled == 3
            with pytest.raises(ConnectionLostError):
                await proxy.request(Kind.PING)
            with pytest.raises(ConnectionLostError):
                await proxy.flush()

    run(test)


def test_a_connection_may_break_at_any_byte_of_either_side() -> None:
    async def test(cut: int, side: int) -> bool:
        """Return whether the cut came before the end."""
        link = Link(LinkConfig(segment_bytes=700))
        proxy, node = proxy_side(Server()), node_side(Server())
        link.ends[side].cut_after(cut)
        link.join(proxy, node)
        into = memory(2000)
        try:
            await proxy.ready()
            await node.ready()
            await proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD[:1500]])
            await proxy.request(Kind.GET, {"shard": 2000}, into=into)
            assert into == SHARD[:2000]
            was_cut = False
        except ConnectionLostError:
            was_cut = True
        await proxy.close()
        await node.close()
        return was_cut

    for side, step in ((0, 1), (1, 3)):
        cut = 0
        while True:
            cut += step
            is_over: list[bool] = []

            async def main(cut: int = cut, side: int = side, is_over: list[bool] = is_over) -> None:
                is_over.append(not await test(cut, side))

            run_virtual(main())
            if is_over[0]:
                break
        assert cut > 1500


def test_closing_twice_or_before_there_was_a_connection_is_no_error() -> None:
    async def test() -> None:
        async with joined() as (proxy, node, _):
            await asyncio.gather(proxy.close(), proxy.close(), node.close())
            await proxy.close()
        early = proxy_side()
        await early.close()
        with pytest.raises(ConnectionLostError):
            await early.ready()
        other = node_side()
        Link().join(early, other)
        with pytest.raises(ConnectionLostError):
            await other.ready()
        await early.closed()

    run(test)


def test_a_close_waits_for_a_peer_that_does_not_read_no_longer_than_it_is_told() -> None:
    async def test() -> None:
        config = ConnectionConfig(close_seconds=3.0)
        async with joined(link=LinkConfig(window_bytes=1000), config=config) as (proxy, node, wire):
            wire.ends[1].freeze()
            asking = asyncio.create_task(proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD]))
            await asyncio.sleep(1)
            await proxy.close()
            assert asyncio.get_running_loop().time() == pytest.approx(4, abs=0.1)
            with pytest.raises(ConnectionLostError):
                await asking
            wire.ends[1].thaw()
            await node.closed()

    run(test)


def test_what_was_said_last_arrives_before_the_close() -> None:
    async def test() -> None:
        heard: list[Head] = []
        proxy = proxy_side(notice=lambda _, head: heard.append(head))
        node = node_side()
        Link(LinkConfig(bytes_per_second=1000.0)).join(proxy, node)
        await node.ready()
        node.notify(Kind.BYE, {"long": "x" * 500})
        await node.close()
        await proxy.closed()
        assert len(heard) == 1

    run(test)


def test_the_reason_of_the_loss_is_told_to_all_and_kept() -> None:
    async def test() -> None:
        async with joined(Server(seconds=9)) as (proxy, _, wire):
            asking = asyncio.create_task(proxy.request(Kind.PING))
            await asyncio.sleep(1)
            wire.ends[1].write(b"no frame at all, and long enough")
            with pytest.raises(ConnectionLostError, match="speaks another protocol") as lost:
                await asking
            assert isinstance(lost.value.__cause__, WireError)
            assert isinstance(proxy.failure, WireError)

    run(test)


# Hostile peers.


@pytest.mark.parametrize(
    "data",
    [
        encode_frame(Kind.PONG, 5),
        encode_frame(Kind.FOUND, 5, {}, 10) + bytes(10),
        encode_frame(Kind.FAILED, 5),
        encode_frame(Kind.FAILED, 0),
        encode_frame(Kind.FOUND, 0),
        encode_frame(Kind.PING, 0),
        encode_frame(Kind.SET, 7, {}, 0) * 2,
        encode_frame(Kind.CHALLENGE, 0, {"nonce": "00" * 32}),
        encode_frame(Kind.PROOF, 0),
        encode_frame(Kind.WELCOME, 0, {"mac": "00" * 32}),
        encode_frame(Kind.STORED, 1),
        encode_frame(Kind.FOUND, 1, {}, 1001) + bytes(1001),
        encode_frame(Kind.MISSING, 1) * 2,
        b"SW\x02" + bytes(13),
    ],
    ids=lambda data: data[:16].hex(),
)
def test_what_was_not_asked_for_closes_the_connection(data: bytes) -> None:
    async def test() -> None:
        async with joined(Server(seconds=9)) as (proxy, node, wire):
            asking = asyncio.create_task(proxy.request(Kind.GET, into=memory(1000)))
            await asyncio.sleep(1)
            wire.ends[1].write(data)
            await proxy.closed()
            await asyncio.gather(asking, return_exceptions=True)  # one of these is an answer, and then one too many
            assert isinstance(proxy.failure, WireError)
            await node.closed()

    run(test)


def test_a_request_cannot_be_answered_before_it_was_sent() -> None:
    async def test() -> None:
        config = ConnectionConfig(piece_bytes=10_000)
        async with joined(link=LinkConfig(window_bytes=10_000), config=config) as (proxy, _, wire):
            wire.ends[1].pause_reading()
            asking = asyncio.create_task(proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD]))
            await asyncio.sleep(1)
            wire.ends[1].write(encode_frame(Kind.STORED, 1))
            with pytest.raises(ConnectionLostError):
                await asking
            assert isinstance(proxy.failure, WireError)

    run(test)


def test_cancelling_what_was_never_asked_is_no_error() -> None:
    async def test() -> None:
        async with joined(Server()) as (proxy, _, wire):
            wire.ends[0].write(encode_frame(Kind.CANCEL, 99))
            assert (await proxy.request(Kind.PING)).kind is Kind.PONG

    run(test)


# The handshake.


def test_a_wrong_secret_ends_both_sides_with_what_to_check() -> None:
    async def test() -> None:
        proxy, node = proxy_side(), node_side(secret=Secret(b"x" * 32))
        Link().join(proxy, node)
        for side in (proxy, node):
            with pytest.raises(CredentialsError, match="check that STOKER_WARM_SECRET is the same"):
                await side.ready()
            with pytest.raises(CredentialsError):
                await side.request(Kind.PING)
            await side.closed()

    run(test)


@pytest.mark.parametrize("first", [encode_frame(Kind.PING, 1), encode_frame(Kind.SET, 1, {}, 100), b"x" * 16])
def test_nothing_is_served_before_the_handshake(first: bytes) -> None:
    async def test() -> None:
        server = Server()
        proxy, other = proxy_side(server), asyncio.Protocol()
        wire = Link()
        wire.join(proxy, other)
        wire.ends[1].write(first)
        with pytest.raises(WireError):
            await proxy.ready()
        await proxy.closed()
        assert server.asked == []

    run(test)


@pytest.mark.parametrize("seconds_between_bytes", [0.1, 1.0, 1000.0])
def test_who_is_slow_to_prove_himself_is_sent_away_in_time(seconds_between_bytes: float) -> None:
    async def test() -> None:
        proxy, other = proxy_side(), asyncio.Protocol()
        wire = Link()
        wire.join(proxy, other)

        async def trickle() -> None:
            for byte in encode_frame(Kind.PROOF, 0, {"node": "x" * 3000}):
                await asyncio.sleep(seconds_between_bytes)
                wire.ends[1].write(bytes([byte]))

        trickling = asyncio.create_task(trickle())
        with pytest.raises(DeadlineError, match="did not end the handshake in 5 s"):
            await proxy.ready()
        assert asyncio.get_running_loop().time() == pytest.approx(5)
        await proxy.closed()
        trickling.cancel()
        await asyncio.wait([trickling])

    run(test)


def test_requests_may_follow_right_behind_the_welcome() -> None:
    async def test() -> None:
        proxy, node = proxy_side(), node_side(Server())
        Link().join(proxy, node)
        await proxy.ready()
        assert (await proxy.request(Kind.PING)).kind is Kind.PONG
        await proxy.close()
        await node.closed()

    run(test)


@pytest.mark.parametrize("name", ["open_requests", "serving_bytes", "handshake_seconds", "piece_bytes"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ConnectionConfig(**{name: 0})


# Real sockets.


@dataclass
class Pair:
    """Both sides of a connection over loopback."""

    proxy: Connection
    node: Connection
    server: Server


@asynccontextmanager
async def over_loopback(
    server: ssl.SSLContext | None = None, client: ssl.SSLContext | None = None, fingerprint: str = ""
) -> AsyncIterator[Pair]:
    loop, serve = asyncio.get_running_loop(), Server()
    proxy = proxy_side(fingerprint=fingerprint)
    listening = await loop.create_server(lambda: proxy, "127.0.0.1", 0, ssl=server)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        _, node = await loop.create_connection(
            lambda: node_side(serve, fingerprint=fingerprint), "127.0.0.1", port, ssl=client
        )
        try:
            await node.ready()
            await proxy.ready()
            yield Pair(proxy, node, serve)
        finally:
            await node.close()
            await proxy.close()


async def exchange_over(pair: Pair) -> None:
    """Read and write over a connection, and give up some of it."""
    intos = [memory(len(SHARD)) for _ in range(20)]
    asking = [asyncio.create_task(pair.proxy.request(Kind.GET, {"shard": len(SHARD)}, into=each)) for each in intos]
    await asyncio.sleep(0)
    for each in asking[10:]:
        each.cancel()
    await asyncio.wait(asking)
    assert all(into == SHARD for into in intos[:10])
    reply = await pair.proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD] * 8, timeout=60)
    assert reply.head == {"bytes": 8 * len(SHARD)}


def test_it_works_over_a_socket() -> None:
    async def test() -> None:
        async with over_loopback() as pair:
            await exchange_over(pair)

    asyncio.run(test())


def test_it_works_over_tls_and_the_certificate_is_part_of_the_handshake(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    client = ssl.create_default_context(cafile=str(authority.bundle))
    text = (tmp_path / "server.pem").read_text()
    certificate = ssl.PEM_cert_to_DER_cert(text[: text.index("-----END") + len("-----END CERTIFICATE-----\n")])

    async def test(fingerprint: str) -> None:
        async with over_loopback(authority.server, client, fingerprint) as pair:
            await exchange_over(pair)

    asyncio.run(test(sha256(certificate).hexdigest()))
    with pytest.raises(CredentialsError, match="fingerprint"):
        asyncio.run(test("ab" * 32))


def test_what_a_socket_has_not_taken_of_a_cancelled_body_is_sent_as_it_was() -> None:
    async def test() -> None:
        async with over_loopback() as pair:
            assert pair.node._transport is not None
            pair.node._transport.pause_reading()
            body = bytearray(SHARD * 12)
            asking = asyncio.create_task(pair.proxy.request(Kind.SET, {"shard": "a"}, body=[body]))
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.wait([asking])
            body[:] = bytes(len(body))
            pair.node._transport.resume_reading()
            await pair.proxy.request(Kind.PING)
            assert pair.server.stored["a"] == SHARD * 12

    asyncio.run(test())
