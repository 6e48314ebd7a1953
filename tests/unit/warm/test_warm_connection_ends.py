"""How connections end: who hears of it, and what is left."""

from __future__ import annotations

import asyncio

import pytest

from stoker.errors import ConnectionLostError, WireError
from stoker.testing import run_virtual
from stoker_warm._frames import Head, Kind
from support.warm_connections import SHARD, Server, joined, memory, node_side, proxy_side, run
from support.warm_wires import Link, LinkConfig


@pytest.mark.parametrize("whose", ["ours", "theirs", "the network's"])
def test_a_connection_that_ends_ends_every_request(whose: str) -> None:
    async def test() -> None:
        async with joined(Server(), limits={"MAX_OPEN_REQUESTS": 3}) as (proxy, node, wire):
            wire.ends[1].freeze()
            asking = [asyncio.create_task(proxy.request(Kind.PING)) for _ in range(10)]  # seven wait for their turn
            await asyncio.sleep(1)
            {"ours": proxy.abort, "theirs": node.abort, "the network's": wire.cut}[whose]()
            wire.ends[1].thaw()
            await asyncio.wait(asking)
            assert {type(each.exception()) for each in asking} == {ConnectionLostError}
            await proxy.wait_closed()
            await node.wait_closed()
            with pytest.raises(ConnectionLostError):
                await proxy.request(Kind.PING)
            with pytest.raises(ConnectionLostError):
                await node.flush()

    run(test)


def test_a_connection_may_break_at_any_byte_of_either_side() -> None:
    async def test(cut: int, side: int) -> bool:
        """Return whether the cut came before the end."""
        link = Link(LinkConfig(segment_bytes=700))
        proxy, node = proxy_side(), node_side(Server())
        link.ends[side].cut_after(cut)
        link.join(proxy, node)
        into = memory(2000)
        try:
            await proxy.wait_authenticated()
            await node.wait_authenticated()
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
            await early.wait_authenticated()
        other = node_side()
        Link().join(early, other)
        with pytest.raises(ConnectionLostError):
            await other.wait_authenticated()
        await early.wait_closed()

    run(test)


def test_a_close_waits_for_an_idle_peer_at_most_for_its_timeout() -> None:
    async def test() -> None:
        limits = {"CLOSE_TIMEOUT_SECONDS": 3.0}
        async with joined(link=LinkConfig(window_bytes=1000), limits=limits) as (proxy, node, wire):
            wire.ends[1].freeze()
            asking = asyncio.create_task(proxy.request(Kind.SET, {"shard": "a"}, body=[SHARD]))
            await asyncio.sleep(1)
            await proxy.close()
            assert asyncio.get_running_loop().time() == pytest.approx(4, abs=0.1)
            with pytest.raises(ConnectionLostError):
                await asking
            wire.ends[1].thaw()
            await node.wait_closed()

    run(test)


def test_the_last_message_arrives_before_the_close() -> None:
    async def test() -> None:
        heard: list[Head] = []
        proxy = proxy_side(lambda _, kind, head: heard.append(head))
        node = node_side()
        Link(LinkConfig(bytes_per_second=1000.0)).join(proxy, node)
        await node.wait_authenticated()
        node.notify(Kind.LEAVING, {"long": "x" * 500})
        await node.close()
        await proxy.wait_closed()
        assert len(heard) == 1

    run(test)


def test_all_waiters_get_the_reason_of_the_loss_and_it_is_kept() -> None:
    async def test() -> None:
        async with joined(Server(), link=LinkConfig(latency_seconds=1.5)) as (proxy, _, wire):
            asking = asyncio.create_task(proxy.request(Kind.PING))
            await asyncio.sleep(1)
            wire.ends[1].write(b"no frame at all, and long enough")
            with pytest.raises(ConnectionLostError, match="uses another protocol") as lost:
                await asking
            assert isinstance(lost.value.__cause__, WireError)
            assert isinstance(proxy.failure, WireError)

    run(test)
