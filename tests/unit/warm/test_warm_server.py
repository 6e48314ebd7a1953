from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from stoker._cache.keeper import name_of
from stoker.abc import ObjectRef
from stoker.errors import ConfigError, ConnectionLostError, ServerError
from stoker_warm._auth import PeerSide, Secret
from stoker_warm._client import ClientConfig
from stoker_warm._config import WarmConfig
from stoker_warm._connection import Connection
from stoker_warm._erasure import Code
from stoker_warm._frames import MAX_BODY_BYTES, Head, Kind
from stoker_warm._requests import Answer, Reply
from stoker_warm._server import MemoryAccount, MemoryPool, ServerConfig
from support.warm_clients import SharedTier, loaded, objects, until_stored
from support.warm_connections import run
from support.warm_platform import SECRET
from support.warm_wires import LinkConfig

CONFIG = WarmConfig(nodes=4, code=Code(2, 1))
OBJECTS = objects(6)
NAMES = list(OBJECTS)
LARGE = objects(3, 3_000_000, seed=1)
"""Too large for a connection to take each at once."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """What comes back only when circles are looked for comes back too late."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def filled(tier: SharedTier, contents: Mapping[str, bytes] = OBJECTS) -> None:
    for name, data in contents.items():
        tier.proxy.offer(name, memoryview(data))
    await until_stored(tier.proxy)
    assert tier.proxy.statistics().stored == len(contents)


def counting_reads(tier: SharedTier) -> list[str]:
    """Return a list to which each object is added that is read from the nodes."""
    found, read = list[str](), tier.proxy.read

    async def counted(name: str, into: memoryview) -> bool:
        found.append(name)
        return await read(name, into)

    tier.proxy.read = counted  # type: ignore[method-assign]  # to look inside
    return found


async def lent_bytes(tier: SharedTier) -> int:
    """Return what is lent for reads, after what is free has come back."""
    await asyncio.sleep(0.01)
    return tier.server._memory.lent_bytes


async def raw(tier: SharedTier, role: Any = "client") -> Connection:
    """Return a connection on which anything can be asked."""

    async def refuse(kind: Kind, head: Head, body: bytearray) -> Answer:
        raise AssertionError(kind)

    connection = await tier.dial(lambda: Connection(PeerSide(SECRET, role, "warm-0", "0" * 16), refuse))
    await connection.ready()
    return connection


# Reading.


def test_what_one_client_offers_another_reads() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            first, second = tier.client(), tier.client()
            assert await loaded(first, NAMES) == dict.fromkeys(NAMES)
            for name, data in OBJECTS.items():
                first.offer(name, memoryview(data))
            await asyncio.sleep(1.0)
            assert first.statistics().stored == len(OBJECTS)
            assert await loaded(second, NAMES) == OBJECTS
            assert (second.statistics().hits, first.statistics().misses) == (len(OBJECTS), len(OBJECTS))

    run(test)


def test_clients_that_read_the_same_object_at_once_share_one_read_of_the_nodes() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await filled(tier)
            reads, clients = counting_reads(tier), [tier.client() for _ in range(5)]
            for found in await asyncio.gather(*(loaded(client, NAMES[:2]) for client in clients)):
                assert found == {name: OBJECTS[name] for name in NAMES[:2]}
            assert sorted(reads) == sorted(NAMES[:2])
            # Each is a GET that the bucket was spared.
            assert tier.proxy.statistics().hits == 10
            assert (await clients[0].status())["bill"]["reads"] == 10

    run(test)


def test_an_object_on_its_way_to_one_client_is_not_read_again_for_another() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG, link=LinkConfig(window_bytes=10_000)) as tier:
            await filled(tier, LARGE)
            slow, other = tier.client(), tier.client()
            await loaded(slow, ["0" * 32])
            reads = counting_reads(tier)
            tier.ends[0].pause_reading()
            (name, data), *_ = LARGE.items()
            waiting = asyncio.create_task(loaded(slow, [name]))
            await asyncio.sleep(1.0)
            assert await loaded(other, [name]) == {name: data}
            tier.ends[0].resume_reading()
            assert await waiting == {name: data}
            assert reads == [name]

    run(test)


def test_a_reader_that_leaves_does_not_take_the_object_from_the_others() -> None:
    async def test() -> None:
        link = LinkConfig(bytes_per_second=1e6)
        async with SharedTier(CONFIG, link=link) as tier:
            await filled(tier)
            first, second = tier.client(), tier.client()
            await loaded(first, ["0" * 32])
            await loaded(second, ["0" * 32])
            reads = counting_reads(tier)
            leaving = asyncio.create_task(loaded(first, NAMES[:1]))
            await asyncio.sleep(0.005)
            staying = asyncio.create_task(loaded(second, NAMES[:1]))
            await asyncio.sleep(0.005)
            leaving.cancel()
            assert await staying == {NAMES[0]: OBJECTS[NAMES[0]]}
            assert len(reads) == 1

    run(test)


def test_when_all_readers_have_left_the_nodes_are_not_read_any_more_and_the_next_reader_begins_anew() -> None:
    async def test() -> None:
        link = LinkConfig(bytes_per_second=1e6)
        async with SharedTier(CONFIG, link=link) as tier:
            await filled(tier)
            client = tier.client()
            await loaded(client, ["0" * 32])
            with no_garbage_collection():
                leaving = asyncio.create_task(loaded(client, NAMES[:1]))
                await asyncio.sleep(0.01)
                assert await lent_bytes(tier) >= len(OBJECTS[NAMES[0]])
                await client.close()
                leaving.cancel()
                await asyncio.sleep(0.01)
                assert not tier.server._flights
                assert await lent_bytes(tier) == 0
            assert await loaded(tier.client(), NAMES[:1]) == {NAMES[0]: OBJECTS[NAMES[0]]}

    run(test)


def test_an_empty_object_is_kept_and_read() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            client, name = tier.client(), name_of(ObjectRef(key="nothing", size_bytes=0, crc32c=0))
            assert await loaded(client, [name]) == {name: None}
            client.offer(name, memoryview(b""))
            await asyncio.sleep(1.0)
            assert client.statistics().stored == 1
            assert await loaded(client, [name]) == {name: b""}

    run(test)


def test_a_hundred_clients_read_at_once_in_little_memory() -> None:
    async def test() -> None:
        limit = 4 * 131072
        async with SharedTier(CONFIG, server=ServerConfig(read_bytes=limit)) as tier:
            await filled(tier)
            most, clients = 0, [tier.client() for _ in range(100)]

            async def watch() -> None:
                nonlocal most
                while True:
                    pool = tier.server._memory
                    most = max(most, pool.lent_bytes + pool._spare_bytes)
                    await asyncio.sleep(0.0001)

            watching = asyncio.create_task(watch())
            for found in await asyncio.gather(*(loaded(client, NAMES) for client in clients)):
                assert found == OBJECTS
            watching.cancel()
            assert 131072 <= most <= limit

    run(test)


def test_clients_that_do_not_take_their_answers_hold_up_the_others_for_a_while_only() -> None:
    async def test() -> None:
        config, link = ServerConfig(read_bytes=4_000_000), LinkConfig(window_bytes=10_000)
        async with SharedTier(CONFIG, server=config, link=link) as tier:
            await filled(tier, LARGE)
            lazy, other, (*names, last) = await raw(tier), tier.client(), LARGE
            tier.ends[0].pause_reading()
            intos = [memoryview(bytearray(3_000_000)) for _ in names]
            stuck = [
                asyncio.create_task(lazy.request(Kind.READ, {"object": name}, into=into))
                for name, into in zip(names, intos, strict=True)
            ]
            await asyncio.sleep(1.0)
            begun = asyncio.get_running_loop().time()
            assert await loaded(other, [last]) == {last: None}, "there is no memory for it within its deadline"
            while (await loaded(other, [last]))[last] is None:  # noqa: ASYNC110 - as a trainer asks that has a bucket
                await asyncio.sleep(1.0)
            assert asyncio.get_running_loop().time() - begun < 200.0
            await asyncio.wait(stuck)
            assert all(isinstance(each.exception(), ConnectionLostError) for each in stuck)

    run(test)


@pytest.mark.parametrize("sent_bytes", [1000, 50_000, 99_000])
def test_a_client_that_dies_in_the_middle_of_an_answer_leaves_nothing_behind(sent_bytes: int) -> None:
    async def test() -> None:
        link = LinkConfig(window_bytes=10_000)
        async with SharedTier(CONFIG, link=link) as tier:
            await filled(tier)
            dying, other = tier.client(), tier.client()
            await loaded(dying, ["0" * 32])
            with no_garbage_collection():
                end = tier.network.links[-1].ends[1]
                end.cut_after(end.sent_bytes + sent_bytes)
                assert await loaded(dying, NAMES[:1]) == {NAMES[0]: None}
                await asyncio.sleep(1.0)
                assert await lent_bytes(tier) == 0
            assert await loaded(other, NAMES) == OBJECTS

    run(test)


def test_an_object_of_which_a_shard_was_late_leaves_no_memory_behind() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await filled(tier)
            client = tier.client()
            for link in tier.network.links[:1]:
                link.config = LinkConfig(bytes_per_second=2e5)
            with no_garbage_collection():
                assert await loaded(client, NAMES) == OBJECTS
                assert tier.proxy.statistics().late
                assert await lent_bytes(tier) == 0

    run(test)


def test_an_object_that_is_lost_is_missing_and_its_memory_comes_back() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await filled(tier)
            client = tier.client()
            for number in range(CONFIG.nodes):
                tier.platform.reclaim(f"warm-{number}")
            assert await loaded(client, NAMES) == dict.fromkeys(NAMES)
            assert await lent_bytes(tier) == 0

    run(test)


# Writing.


async def offered(connection: Connection, name: str, body: bytes) -> Reply:
    return await connection.request(Kind.OFFER, {"object": name}, body=(body,))


def test_what_is_not_what_its_name_says_is_refused_and_never_read() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            connection, (name, data) = await raw(tier), next(iter(OBJECTS.items()))
            for body in (data[:-1], data + b"x", b"", b"x" + data[1:]):
                assert (await offered(connection, name, body)).kind is Kind.REFUSED
            await asyncio.sleep(1.0)
            assert await loaded(tier.client(), [name]) == {name: None}
            assert tier.server._offers.held_bytes == 0
            await connection.close()

    run(test)


def test_offers_beyond_the_limit_are_thrown_away_as_they_arrive() -> None:
    async def test() -> None:
        server = ServerConfig(offer_bytes=250_000)
        async with SharedTier(CONFIG, server=server, link=LinkConfig(bytes_per_second=1e6)) as tier:
            connections = [await raw(tier) for _ in range(6)]
            with no_garbage_collection():
                waiting = [
                    asyncio.create_task(offered(connection, name, data))
                    for connection, (name, data) in zip(connections, OBJECTS.items(), strict=True)
                ]
                await asyncio.sleep(0.05)
                assert tier.server._offers.held_bytes == 200_000
                kinds = [(await each).kind for each in waiting]
                assert (kinds.count(Kind.STORED), kinds.count(Kind.REFUSED)) == (2, 4)
                await until_stored(tier.proxy)
                await asyncio.sleep(0.01)
                assert tier.server._offers.held_bytes == 0
            for connection in connections:
                await connection.close()

    run(test)


def test_an_offer_that_breaks_off_is_not_counted_any_more() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG, link=LinkConfig(bytes_per_second=1e6)) as tier:
            connection, (name, data) = await raw(tier), next(iter(OBJECTS.items()))
            with no_garbage_collection():
                waiting = asyncio.create_task(offered(connection, name, data))
                await asyncio.sleep(0.05)
                assert tier.server._offers.held_bytes == len(data)
                connection.abort()
                await asyncio.wait([waiting])
                assert isinstance(waiting.exception(), OSError)
                await asyncio.sleep(1.0)
                assert tier.server._offers.held_bytes == 0

    run(test)


# Nonsense and enemies.


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        (Kind.READ, {}),
        (Kind.READ, {"object": "../../etc/passwd"}),
        (Kind.READ, {"object": "A" * 32}),
        (Kind.READ, {"object": 3}),
        (Kind.READ, {"object": ["0" * 32]}),
        (Kind.OFFER, {"object": "0" * 31}),
        (Kind.GET, {"shard": "x"}),
        (Kind.INDEX, {}),
        (Kind.PING, {}),
        (Kind.STOP, {}),
    ],
)
def test_what_makes_no_sense_is_refused_and_the_next_request_answered(kind: Kind, head: Head) -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            connection = await raw(tier)
            with pytest.raises(ServerError, match="WireError"):
                await connection.request(kind, head)
            assert (await connection.request(Kind.READ, {"object": "0" * 32})).kind is Kind.MISSING
            await connection.close()

    run(test)


@pytest.mark.parametrize("size_bytes", [MAX_BODY_BYTES + 1, (1 << 32) - 1])
def test_an_object_larger_than_a_body_may_be_is_missing_and_takes_no_memory(size_bytes: int) -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            connection = await raw(tier)
            name = name_of(ObjectRef(key="large", size_bytes=size_bytes, crc32c=1))
            assert (await connection.request(Kind.READ, {"object": name})).kind is Kind.MISSING
            assert (await offered(connection, name, b"x")).kind is Kind.REFUSED
            assert await lent_bytes(tier) == 0
            await connection.close()

    run(test)


@pytest.mark.parametrize("kind", [Kind.READ, Kind.OFFER, Kind.STATUS, Kind.DOWN])
def test_a_node_is_no_client(kind: Kind) -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await filled(tier)
            greeting: dict[str, str | int] = {"instance": "0" * 16, "term": 0, "hash": "0" * 16}
            greeting |= {"held_bytes": 0, "limit_bytes": 1}

            async def refuse(kind: Kind, head: Head, body: bytearray) -> Answer:
                raise ServerError("not now")

            side = PeerSide(SECRET, "node", "warm-3", "0" * 16, greeting={**greeting, "task": "serve"})
            connection = await tier.dial(lambda: Connection(side, refuse))
            await connection.ready()
            with pytest.raises(OSError, match=r"WireError|connection"):
                await connection.request(kind, {"object": NAMES[0]})
            await connection.close()
            assert not tier.server.is_down.is_set()

    run(test)


def test_who_does_not_know_the_secret_gets_nothing_and_reads_misses(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await filled(tier)
            stranger, other = Secret.generate(), tier.client()
            client = tier.client(secret=stranger)
            assert await loaded(client, NAMES) == dict.fromkeys(NAMES)
            client.offer(NAMES[0], memoryview(OBJECTS[NAMES[0]]))
            assert await loaded(other, NAMES) == OBJECTS
            assert client.statistics().unreachable == len(NAMES)
            told = [record.getMessage() for record in caplog.records if record.name == "stoker.warm.client"]
            assert len(told) == 1
            assert "STOKER_WARM_SECRET" in told[0]
            for secret in (stranger, SECRET):
                assert secret.reveal() not in caplog.text

    with caplog.at_level(logging.DEBUG):
        run(test)


# What people ask.


def test_the_status_says_what_is_there_and_what_it_costs() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await filled(tier)
            client = tier.client(ClientConfig(pending_bytes=1 << 20))
            await loaded(client, [*NAMES, "0" * 32])
            await asyncio.sleep(2.0)
            told = await client.status()
            assert (told["hits"], told["misses"], told["stored"], told["objects"]) == (6, 1, 6, 6)
            assert told["nodes"] == {"sleeping": 4, "awake": 0, "maybe": 0, "gone": 0}
            assert 600_000 * 1.5 <= told["held_bytes"] <= told["limit_bytes"]
            bill = told["bill"]
            assert bill["requests"] >= 4
            assert bill["gb_seconds"] > 0
            assert bill["dollars"] == pytest.approx(bill["serve_dollars"])
            # A GET of S3 is cheaper than a read from functions.
            assert bill["break_even_reads_per_hour"] is None
            assert 0 < bill["bucket_dollars"] < bill["dollars"]

    run(test)


def test_all_nodes_can_be_called_and_those_that_do_not_come_are_named() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            tier.broken.add("warm-2")
            told = await tier.client().status(wakes=True)
            assert told["absent"] == 1
            assert told["problems"] == ["warm-2: warm-2 is not deployed"]
            assert told["limit_bytes"] == 3 * tier.platform.shelf_bytes

    run(test)


@pytest.mark.parametrize("forgets", [False, True])
def test_nodes_are_told_to_return_and_to_forget(forgets: bool) -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await filled(tier)
            assert await tier.client().down(forgets=forgets) == []
            assert not tier.server.is_down.is_set(), "the answer goes out first"
            await asyncio.wait_for(tier.server.is_down.wait(), 1.0)
            held = [instance.store.held_bytes for each in tier.platform.instances.values() for instance in each]
            assert [bool(each) for each in held] == [not forgets] * 4
            assert tier.proxy.statistics().objects == (0 if forgets else len(OBJECTS))

    run(test)


def test_a_proxy_that_has_only_begun_has_nodes_forget_what_an_earlier_one_gave_them() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await filled(tier)
            await tier.replace_proxy()
            assert await tier.proxy.forget() == {}
            for instances in tier.platform.instances.values():
                assert [instance.store.held_bytes for instance in instances] == [0]
            assert tier.proxy.statistics().objects == 0

    run(test)


@pytest.mark.parametrize("name", ["read_bytes", "offer_bytes"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**{name: 0})


# Memory.


def test_lent_memory_comes_back_with_its_last_view_and_is_used_again() -> None:
    async def test() -> None:
        pool = MemoryPool(1 << 20)
        with no_garbage_collection():
            first, _ = await pool.take(100_000)
            part, first[:3] = first[1:], b"abc"
            del first, _
            await asyncio.sleep(0)
            assert pool.lent_bytes >= 100_000
            del part
            await asyncio.sleep(0.001)
            assert pool.lent_bytes == 0
            again, give_back = await pool.take(100_001)
            assert bytes(again[:3]) == b"abc", "it is the same memory"
            give_back()
            give_back()
            await asyncio.sleep(0.001)
            assert pool.lent_bytes == 0
            del again, give_back
            await asyncio.sleep(0.001)
            assert pool.lent_bytes == 0, "it does not come back twice"

    run(test)


def test_who_asks_for_more_memory_than_is_left_waits_in_order_of_arrival() -> None:
    async def test() -> None:
        pool, turns = MemoryPool(300_000), list[int]()
        held = [(await pool.take(100_000)).memory]

        async def take(number: int, size_bytes: int) -> memoryview:
            memory, _ = await pool.take(size_bytes)
            turns.append(number)
            return memory

        waiting = [asyncio.create_task(take(number, size)) for number, size in enumerate((250_000, 50_000))]
        await asyncio.sleep(1.0)
        assert not turns
        held.clear()
        await asyncio.sleep(0.001)
        assert turns == [0]
        await waiting[0]
        del waiting[0]
        await asyncio.sleep(0.001)
        assert turns == [0, 1]
        await waiting[0]

    run(test)


def test_sizes_that_differ_never_keep_more_memory_than_the_limit() -> None:
    async def test() -> None:
        pool = MemoryPool(1 << 20)
        for size in itertools.chain(range(1, 1 << 20, 54_321), [1 << 20]):
            memory, _ = await pool.take(size)
            assert len(memory) == size
            assert pool.lent_bytes + pool._spare_bytes <= 1 << 20
            del memory
            await asyncio.sleep(0.001)

    run(test)


def test_memory_is_counted_for_as_long_as_it_exists() -> None:
    async def test() -> None:
        account = MemoryAccount(1000)
        with no_garbage_collection():
            first = account.room(600)
            assert first is not None
            assert account.room(401) is None
            second = account.room(400)
            view = memoryview(first)
            del first, second
            await asyncio.sleep(0.001)
            assert account.held_bytes == 600
            view.release()
            del view
            await asyncio.sleep(0.001)
            assert account.held_bytes == 0

    run(test)
