"""Requests of the proxy and answers of a node."""

from __future__ import annotations

import asyncio
import logging

import pytest

from stoker.errors import ConnectionLostError, NotFoundError, ServerError, WireError
from stoker_warm._frames import Buffer, Head, Kind
from stoker_warm._peer_connections import ProxyConnection, ReplyParts
from support.warm_connections import SHARD, Server, joined, memory, node_side, proxy_side, run
from support.warm_wires import Link, LinkConfig


def test_a_request_is_answered_with_a_body_straight_into_its_memory() -> None:
    async def test() -> None:
        async with joined(Server()) as (proxy, _, _):
            into = memory(len(SHARD) + 10)
            reply = await proxy.request(Kind.GET, {"shard": len(SHARD)}, into=into)
            assert (reply.kind, reply.head, reply.body_bytes) == (Kind.FOUND, {"mac": "7"}, len(SHARD))
            assert into == SHARD + bytes(10)

    run(test)


def test_a_body_is_sent_from_its_parts_which_belong_to_the_server() -> None:
    async def test() -> None:
        server = Server()
        async with joined(server) as (proxy, _, _):
            parts: list[Buffer] = [SHARD, bytearray(b"more"), memoryview(SHARD)[:5], b""]
            reply = await proxy.request(Kind.SET, {"shard": "a"}, body=parts)
            assert reply.head == {"bytes": len(SHARD) + 9}
            assert server.stored["a"] == SHARD + b"more" + SHARD[:5]
            server.stored["a"].extend(b"no view of it is left")

    run(test)


def test_many_requests_at_once_are_answered_in_their_order_each_in_its_own_memory() -> None:
    async def test() -> None:
        order: list[int] = []

        async def ask(proxy: ProxyConnection, number: int, into: memoryview) -> None:
            reply = await proxy.request(Kind.GET, {"shard": len(into)}, into=into)
            assert reply.body_bytes == len(into)
            order.append(number)

        async with joined(Server()) as (proxy, _, _):
            intos = [memory(size) for size in [300_000, 0, 20_000, 1, 100] * 2]
            await asyncio.gather(*(ask(proxy, number, into) for number, into in enumerate(intos)))
            assert all(into == SHARD[: len(into)] for into in intos)
            assert order == list(range(10))

    run(test)


def test_an_answer_without_a_taker_of_its_body_says_how_long_it_was() -> None:
    async def test() -> None:
        async with joined(Server()) as (proxy, _, _):
            assert (await proxy.request(Kind.GET, {"shard": 1000})).body_bytes == 1000
            assert (await proxy.request(Kind.GET)).kind is Kind.MISSING

    run(test)


def test_an_error_of_the_handler_is_reported_and_the_connection_continues(caplog: pytest.LogCaptureFixture) -> None:
    def broken(kind: Kind, head: Head, body: bytearray) -> ReplyParts:
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
                (Kind.GET, "STORED is not an answer to GET"),
                (Kind.DELETE, "not a string, an integer or a list of strings"),
                (Kind.INDEX, r"NotFoundError: \?\[2J\?x{100,500}$"),
            ):
                with pytest.raises(ServerError, match=says):
                    await proxy.request(kind)
            assert proxy.is_open

    with caplog.at_level(logging.ERROR):
        run(test)
    assert [record.getMessage() for record in caplog.records] == ["a PING request of the proxy failed"]


def test_what_cannot_be_sent_is_refused_and_the_connection_continues() -> None:
    async def test() -> None:
        async with joined(Server()) as (proxy, _, _):
            with pytest.raises(WireError, match="PONG is not a request"):
                await proxy.request(Kind.PONG)
            with pytest.raises(WireError, match="at most 16777216"):
                await proxy.request(Kind.SET, {}, body=[SHARD] * 20)
            assert not proxy._requests
            assert (await proxy.request(Kind.PING)).kind is Kind.PONG

    run(test)


def test_notices_arrive_in_order_and_before_what_is_sent_later() -> None:
    async def test() -> None:
        heard: list[tuple[Kind, Head]] = []
        proxy = proxy_side(lambda _, kind, head: heard.append((kind, head)))
        node = node_side()
        Link().join(proxy, node)
        with pytest.raises(ConnectionLostError, match="not ready"):
            node.notify(Kind.HERE, {})
        await node.wait_authenticated()
        node.notify(Kind.HERE, {"awake": 1})
        node.notify(Kind.LEAVING, {"term": 3})
        await node.flush()
        await node.close()
        await proxy.wait_closed()
        assert heard == [(Kind.HERE, {"awake": 1}), (Kind.LEAVING, {"term": 3})]

    run(test)


def test_a_notice_between_two_answers_changes_nothing_about_their_order() -> None:
    async def test() -> None:
        heard: list[Kind] = []
        proxy, wire = proxy_side(lambda _, kind, head: heard.append(kind)), Link()

        def serve(kind: Kind, head: Head, body: bytearray) -> ReplyParts:
            node.notify(Kind.HERE, {})
            return Kind.FOUND, {"number": head["number"]}, (SHARD[:20_000],)

        node = node_side(serve)
        wire.join(proxy, node)
        await proxy.wait_authenticated()
        replies = await asyncio.gather(*(proxy.request(Kind.GET, {"number": number}) for number in range(5)))
        assert [reply.head["number"] for reply in replies] == list(range(5))
        assert heard == [Kind.HERE] * 5
        await node.close()
        await proxy.wait_closed()

    run(test)


def test_more_requests_than_may_be_open_wait_for_their_turn() -> None:
    async def test() -> None:
        limits, link = {"MAX_OPEN_REQUESTS": 3}, LinkConfig(latency_seconds=0.5)
        async with joined(Server(), limits=limits, link=link) as (proxy, _, _):
            begun_seconds = asyncio.get_running_loop().time()
            waiting = asyncio.gather(*(proxy.request(Kind.PING) for _ in range(10)))
            await asyncio.sleep(0.25)
            assert len(proxy._requests) == 3
            await waiting
            assert asyncio.get_running_loop().time() - begun_seconds == pytest.approx(4, abs=0.1)

    run(test)
