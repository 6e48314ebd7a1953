"""What an instance of a node answers, keeps and says of itself, and when it dials anew; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stoker.errors import ConnectionLostError, CredentialsError, ServerError
from stoker.testing import run_virtual
from stoker_warm._auth import WarmSecret
from stoker_warm._events import NodeReport, NodeTask, WakeEvent
from stoker_warm._frames import Frame, Kind
from stoker_warm._node import NodeServer
from stoker_warm._peer_connections import ProxyConnection
from stoker_warm._shard import MAX_SHARDS_PER_FRAME, SHARD_OVERHEAD_BYTES, ShardId, ShardStore
from support.cases import for_each
from support.warm_listener import Listener
from support.warm_platform import ADDRESS, SECRET

LINGER_SECONDS = 10.0
SIZE_BYTES = 100
MAC_TEXT = "0123456789abcdef" * 3 + "01234567"


def shard(number: int, size_bytes: int = SIZE_BYTES) -> ShardId:
    """Return the id of the only shard of an object of a size."""
    return ShardId(f"{0:08x}{size_bytes:08x}{number:016x}", 1, 0, 0)


async def put(proxy: ProxyConnection, each: ShardId, payload: bytes = b"", **changes: Any) -> Frame:
    payload = payload or bytes(each.size_bytes)
    head = {"shard": each.to_text(), "mac": MAC_TEXT, **changes}
    return await proxy.request(Kind.SET, head, body=(payload,))


async def held(proxy: ProxyConnection) -> NodeReport:
    """Return what the node says of itself."""
    return NodeReport.parse((await proxy.request(Kind.PING)).head)


def serve(test: Callable[[ProxyConnection], Awaitable[None]], **options: Any) -> None:
    """Run a test, which is the proxy, during one invocation."""

    async def main() -> None:
        listener = Listener(**options)
        await listener.run(test, linger_seconds=LINGER_SECONDS)
        await listener.close()

    run_virtual(main())


def wake(**changes: Any) -> WakeEvent:
    return WakeEvent(**{"node": "warm-0", "proxy": ADDRESS, "linger_seconds": LINGER_SECONDS, **changes})


# What it answers.


def test_a_shard_that_was_put_is_found_with_its_mac_and_another_is_missing() -> None:
    async def test(proxy: ProxyConnection) -> None:
        payload = bytes(range(SIZE_BYTES))
        assert (await put(proxy, shard(1), payload)).kind is Kind.STORED
        into = memoryview(bytearray(SIZE_BYTES))
        found = await proxy.request(Kind.GET, {"shard": shard(1).to_text()}, into=into)
        assert (found.kind, found.head, bytes(into)) == (Kind.FOUND, {"mac": MAC_TEXT}, payload)
        missing = await proxy.request(Kind.GET, {"shard": shard(2).to_text()}, into=into)
        assert (missing.kind, missing.body_bytes) == (Kind.MISSING, 0)

    serve(test)


def test_every_answer_to_a_change_says_what_is_held_and_what_went_for_it() -> None:
    async def test(proxy: ProxyConnection) -> None:
        before = await held(proxy)
        assert (before.version.change_count, before.held_bytes, before.limit_bytes) == (
            0,
            0,
            2 * (SIZE_BYTES + SHARD_OVERHEAD_BYTES),
        )
        for number in (1, 2):
            assert (await put(proxy, shard(number))).head["evicted"] == []
        third = dict((await put(proxy, shard(3))).head)
        assert third.pop("evicted") == [shard(1).to_text()]
        report = NodeReport.parse(third)
        assert (report.held_bytes, report.version.change_count) == (before.limit_bytes, 4)
        assert report == await held(proxy)
        deleted = await proxy.request(Kind.DELETE, {"shards": [shard(2).to_text(), shard(9).to_text()]})
        assert NodeReport.parse(deleted.head).held_bytes == before.limit_bytes / 2
        assert NodeReport.parse(deleted.head) == await held(proxy)

    serve(test, shelf_bytes=2 * (SIZE_BYTES + SHARD_OVERHEAD_BYTES))


@pytest.mark.parametrize("payload", [bytes(SIZE_BYTES - 1), bytes(SIZE_BYTES + 1)], ids=["shorter", "longer"])
def test_what_is_not_as_long_as_its_name_says_is_not_kept(payload: bytes) -> None:
    async def test(proxy: ProxyConnection) -> None:
        refused = await put(proxy, shard(1), payload)
        assert (refused.kind, refused.head) == (Kind.REFUSED, {"reason": "wrong length"})
        assert (await held(proxy)).version.change_count == 0

    serve(test)


def test_a_shard_that_is_larger_than_the_shelf_is_refused_and_nothing_goes_for_it() -> None:
    async def test(proxy: ProxyConnection) -> None:
        await put(proxy, shard(1))
        refused = await put(proxy, shard(2, 500))
        assert (refused.kind, refused.head) == (Kind.REFUSED, {"reason": "too large"})
        assert (await proxy.request(Kind.GET, {"shard": shard(1).to_text()})).kind is Kind.FOUND

    serve(test, shelf_bytes=400 + SHARD_OVERHEAD_BYTES)


def test_what_is_held_is_listed_page_by_page_in_the_order_of_ids() -> None:
    async def test(proxy: ProxyConnection) -> None:
        shards = [shard(number, 1) for number in range(MAX_SHARDS_PER_FRAME + 2)]
        for each in reversed(shards):
            await put(proxy, each)
        first = (await proxy.request(Kind.INDEX, {})).head
        assert (first["shards"], first["more"]) == ([each.to_text() for each in shards[:MAX_SHARDS_PER_FRAME]], 1)
        second = (await proxy.request(Kind.INDEX, {"after": first["shards"][-1]})).head
        assert (second["shards"], second["more"]) == ([each.to_text() for each in shards[MAX_SHARDS_PER_FRAME:]], 0)
        assert (await proxy.request(Kind.INDEX, {"after": shards[-1].to_text()})).head == {"shards": [], "more": 0}

    serve(test)


@for_each(
    ("kind", "head", "says"),
    [
        (Kind.GET, {}, "WireError"),
        (Kind.GET, {"shard": 7}, "WireError"),
        (Kind.SET, {"shard": "x", "mac": MAC_TEXT}, "WireError"),
        (Kind.SET, {"shard": shard(1).to_text()}, "has a malformed MAC: None"),
        (Kind.SET, {"shard": shard(1).to_text(), "mac": 7}, "has a malformed MAC: 7"),
        (Kind.SET, {"shard": shard(1).to_text(), "mac": MAC_TEXT + "0"}, "has a malformed MAC"),
        (Kind.SET, {"shard": shard(1).to_text(), "mac": MAC_TEXT.upper()}, "has a malformed MAC"),
        (Kind.DELETE, {}, "None is not a list of the names of shards"),
        (
            Kind.DELETE,
            {"shards": [shard(1).to_text()] * (MAX_SHARDS_PER_FRAME + 1)},
            "a list of shards must have at most 1000",
        ),
        (Kind.DELETE, {"shards": ["x"]}, "WireError"),
        (Kind.INDEX, {"after": "x"}, "WireError"),
    ],
)
def test_what_makes_no_sense_fails_and_changes_nothing(kind: Kind, head: dict[str, Any], says: str) -> None:
    async def test(proxy: ProxyConnection) -> None:
        before = await held(proxy)
        with pytest.raises(ServerError, match=says):
            await proxy.request(kind, head)
        assert await held(proxy) == before

    serve(test)


# Invocations.


def test_a_keep_warm_call_opens_no_connection_and_reports_the_content() -> None:
    async def main() -> None:
        listener = Listener()
        told = await listener.node.run(wake(task=NodeTask.WARM), 900.0)
        assert NodeReport.parse(told) == listener.node.report
        assert listener.connections == []

    run_virtual(main())


def test_an_instance_is_known_by_sixteen_digits_that_no_other_has() -> None:
    instances = {NodeServer(ShardStore(1), SECRET).report.instance for _ in range(100)}
    assert len(instances) == 100
    assert {len(each) for each in instances} == {16}


def test_a_greeting_says_what_the_call_was_for_and_what_is_held() -> None:
    async def main() -> None:
        listener = Listener()
        listener.node._store.set(shard(1), MAC_TEXT, bytes(SIZE_BYTES))

        async def check(proxy: ProxyConnection) -> None:
            peer = await proxy.wait_authenticated()
            greeting = dict(peer)
            assert greeting.pop("node") == "warm-0"
            assert NodeReport.parse(greeting) == listener.node.report
            assert greeting["term"] == 1

        await listener.run(check, linger_seconds=0.1)
        await listener.close()

    run_virtual(main())


def test_the_shelf_and_the_connection_stay_from_one_invocation_to_the_next() -> None:
    async def main() -> None:
        listener = Listener()
        await listener.run(lambda proxy: put(proxy, shard(1)), linger_seconds=0.1)
        told = await listener.node.run(wake(linger_seconds=0.1), 900.0)
        await asyncio.sleep(1.0)
        assert len(listener.connections) == 1
        assert listener.notices == [Kind.LEAVING, Kind.HERE, Kind.LEAVING], "it says that it is here again"
        assert NodeReport.parse(told).held_bytes == SIZE_BYTES + SHARD_OVERHEAD_BYTES
        await listener.close()

    run_virtual(main())


async def nothing(_: ProxyConnection) -> None:
    """Ask for nothing."""


@pytest.mark.parametrize("why", ["told to", "elsewhere", "another certificate", "broken"])
def test_a_node_dials_anew_where_the_connection_from_before_is_useless(why: str) -> None:
    async def main() -> None:
        listener = Listener()
        await listener.run(nothing, linger_seconds=0.1)
        changes: dict[str, Any] = {"linger_seconds": 0.1, "must_reconnect": why == "told to"}
        if why == "elsewhere":
            listener.network.listen("other:7411", listener._accept)
            changes["proxy"] = "other:7411"
        if why == "broken":
            listener.connections[0].abort()
            await asyncio.sleep(1.0)
        if why == "another certificate":
            changes["fingerprint"] = "ab" * 32  # which this proxy does not show
            with pytest.raises(CredentialsError):
                await listener.node.run(wake(**changes), 900.0)
        else:
            await listener.node.run(wake(**changes), 900.0)
            await asyncio.sleep(1.0)
            assert listener.notices == [Kind.LEAVING, Kind.LEAVING], "it greets instead"
        assert len(listener.connections) == 2
        assert not listener.connections[0].is_open
        await listener.close()

    run_virtual(main())


def test_a_stop_of_one_invocation_does_not_stop_the_next() -> None:
    async def main() -> None:
        listener, loop = Listener(), asyncio.get_running_loop()
        await listener.run(lambda proxy: proxy.request(Kind.STOP), linger_seconds=LINGER_SECONDS)
        begun_seconds = loop.time()
        await listener.node.run(wake(), 900.0)
        assert loop.time() - begun_seconds >= LINGER_SECONDS
        await listener.close()

    run_virtual(main())


def test_an_order_to_stop_that_came_while_the_node_slept_does_not_stop_it_when_it_is_called() -> None:
    async def main() -> None:
        listener, loop = Listener(), asyncio.get_running_loop()
        await listener.run(nothing, linger_seconds=0.1)
        (end, _) = listener.network.links[0].ends
        end.freeze()
        stopping = asyncio.ensure_future(listener.connections[0].request(Kind.STOP))
        await asyncio.sleep(1.0)
        end.thaw()
        begun_seconds = loop.time()
        await listener.node.run(wake(), 900.0)
        assert loop.time() - begun_seconds >= LINGER_SECONDS
        assert (await stopping).kind is Kind.BYE
        await listener.close()

    run_virtual(main())


def test_a_proxy_that_cannot_be_reached_or_has_another_secret_fails_one_invocation_only() -> None:
    async def main() -> None:
        listener = Listener()
        with pytest.raises(ConnectionLostError):
            await listener.node.run(wake(proxy="nobody:7411"), 900.0)
        told = await listener.node.run(wake(linger_seconds=0.1), 900.0)
        assert told["instance"] == listener.node.report.instance
        await listener.close()
        stranger = Listener(secret=WarmSecret(b"x" * 32))
        for _ in range(2):
            with pytest.raises(CredentialsError, match="STOKER_WARM_SECRET"):
                await stranger.node.run(wake(), 900.0)
        assert [connection.is_open for connection in stranger.connections] == [False, False]
        await stranger.close()

    run_virtual(main())


def test_a_node_that_is_closed_has_no_connection_and_keeps_its_shelf() -> None:
    async def main() -> None:
        listener = Listener()
        await listener.run(lambda proxy: put(proxy, shard(1)), linger_seconds=0.1)
        await listener.node.close()
        await listener.node.close()
        await asyncio.sleep(1.0)
        assert not listener.connections[0].is_open
        assert listener.node.report.version.change_count == 1
        await listener.node.run(wake(linger_seconds=0.1), 900.0)
        assert len(listener.connections) == 2
        await listener.close()

    run_virtual(main())
