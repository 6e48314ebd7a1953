"""Peers that speak out of turn, nonsense, or without the secret."""

from __future__ import annotations

import asyncio

import pytest

from stoker.errors import ConnectionLostError, CredentialsError, DeadlineError, WireError
from stoker_warm._auth import WarmSecret
from stoker_warm._frames import Kind, encode_frame
from support.cases import for_each
from support.warm_connections import SHARD, Server, joined, memory, node_side, proxy_side, run
from support.warm_wires import Link, LinkConfig


@for_each(
    "data",
    [
        encode_frame(Kind.PONG),
        encode_frame(Kind.STORED),
        encode_frame(Kind.PING),
        encode_frame(Kind.SET),
        encode_frame(Kind.CHALLENGE, {"nonce": "00" * 32}),
        encode_frame(Kind.PROOF),
        encode_frame(Kind.WELCOME, {"mac": "00" * 32}),
        encode_frame(Kind.FOUND, {}, 1001) + bytes(1001),
        encode_frame(Kind.MISSING) * 2,
        encode_frame(Kind.FAILED) * 2,
        b"SW\x03" + bytes(9),
    ],
    ids=lambda data: data[:12].hex(),
)
def test_an_unrequested_message_closes_the_connection(data: bytes) -> None:
    async def test() -> None:
        async with joined(Server(), link=LinkConfig(latency_seconds=1.5)) as (proxy, node, wire):
            asking = asyncio.create_task(proxy.request(Kind.GET, into=memory(1000)))
            await asyncio.sleep(1)
            wire.ends[1].write(data)
            await proxy.wait_closed()
            await asyncio.gather(asking, return_exceptions=True)  # one of these is an answer, and then one too many
            assert isinstance(proxy.failure, WireError)
            await node.wait_closed()

    run(test)


def test_an_answer_while_nothing_is_asked_closes_the_connection() -> None:
    async def test() -> None:
        async with joined(Server()) as (proxy, _, wire):
            await proxy.request(Kind.PING)
            wire.ends[1].write(encode_frame(Kind.PONG))
            await proxy.wait_closed()
            assert isinstance(proxy.failure, WireError)
            assert "answers no open request" in str(proxy.failure)

    run(test)


def test_answers_out_of_order_close_the_connection_and_write_to_no_memory() -> None:
    async def test() -> None:
        async with joined(link=LinkConfig(latency_seconds=1.5)) as (proxy, _, wire):
            into = memory(10)
            getting = asyncio.create_task(proxy.request(Kind.SET, {"shard": "a"}))
            asking = asyncio.create_task(proxy.request(Kind.GET, into=into))
            await asyncio.sleep(1)
            wire.ends[1].write(encode_frame(Kind.FOUND, {}, 10) + b"x" * 10 + encode_frame(Kind.STORED))
            for each in (getting, asking):
                with pytest.raises(ConnectionLostError, match="FOUND frame arrived that answers no open request"):
                    await each
            assert not any(into)

    run(test)


@pytest.mark.parametrize("kind", [Kind.PONG, Kind.FOUND, Kind.HERE, Kind.LEAVING, Kind.FAILED, Kind.CHALLENGE])
def test_nodes_accept_no_other_messages(kind: Kind) -> None:
    async def test() -> None:
        async with joined(Server()) as (_, node, wire):
            wire.ends[0].write(encode_frame(kind))
            await node.wait_closed()
            assert isinstance(node.failure, WireError)

    run(test)


def test_a_request_cannot_be_answered_before_it_was_sent() -> None:
    async def test() -> None:
        limits = {"MAX_WRITE_BYTES": 10_000}
        async with joined(link=LinkConfig(window_bytes=10_000), limits=limits) as (proxy, _, wire):
            wire.ends[1].pause_reading()
            asking = asyncio.create_task(proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD]))
            await asyncio.sleep(1)
            wire.ends[1].write(encode_frame(Kind.STORED))
            with pytest.raises(ConnectionLostError):
                await asking
            assert isinstance(proxy.failure, WireError)

    run(test)


# The handshake.


def test_a_wrong_secret_ends_both_sides_with_what_to_check() -> None:
    async def test() -> None:
        proxy, node = proxy_side(), node_side(secret=WarmSecret(b"x" * 32))
        Link().join(proxy, node)
        for side in (proxy, node):
            with pytest.raises(CredentialsError, match="check that STOKER_WARM_SECRET is the same"):
                await side.wait_authenticated()
            await side.wait_closed()
        with pytest.raises(CredentialsError):
            await proxy.request(Kind.PING)

    run(test)


@pytest.mark.parametrize("first", [encode_frame(Kind.PING), encode_frame(Kind.SET, {}, 100), b"x" * 16])
def test_nothing_is_taken_before_the_handshake(first: bytes) -> None:
    async def test() -> None:
        server = Server()
        for side in (proxy_side(), node_side(server)):
            wire = Link()
            wire.join(side, asyncio.Protocol())
            wire.ends[1].write(first)
            with pytest.raises(WireError):
                await side.wait_authenticated()
            await side.wait_closed()
        assert server.asked == []

    run(test)


@pytest.mark.parametrize("seconds_between_bytes", [0.1, 1.0, 1000.0])
def test_slow_authentication_is_ended_in_time(seconds_between_bytes: float) -> None:
    async def test() -> None:
        proxy, other = proxy_side(), asyncio.Protocol()
        wire = Link()
        wire.join(proxy, other)

        async def trickle() -> None:
            for byte in encode_frame(Kind.PROOF, {"node": "x" * 3000}):
                await asyncio.sleep(seconds_between_bytes)
                wire.ends[1].write(bytes([byte]))

        trickling = asyncio.create_task(trickle())
        with pytest.raises(DeadlineError, match="did not complete the handshake in 5 s"):
            await proxy.wait_authenticated()
        assert asyncio.get_running_loop().time() == pytest.approx(5)
        await proxy.wait_closed()
        trickling.cancel()
        await asyncio.wait([trickling])

    run(test)


def test_requests_may_follow_right_behind_the_welcome() -> None:
    async def test() -> None:
        proxy, node = proxy_side(), node_side(Server())
        Link().join(proxy, node)
        await proxy.wait_authenticated()
        assert (await proxy.request(Kind.PING)).kind is Kind.PONG
        await proxy.close()
        await node.wait_closed()

    run(test)
