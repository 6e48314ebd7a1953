from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from stoker.errors import ConfigError, ConnectionLostError, CredentialsError, StokerError
from stoker_warm._auth import ProxySide, Secret
from stoker_warm._client import ClientConfig
from stoker_warm._config import WarmConfig
from stoker_warm._connection import Connection
from stoker_warm._erasure import Code
from stoker_warm._frames import MAX_BODY_BYTES, Head, Kind
from stoker_warm._requests import Answer
from support.warm_clients import SharedTier, loaded, objects, until_stored
from support.warm_connections import run
from support.warm_platform import ADDRESS, SECRET
from support.warm_wires import LinkConfig

CONFIG = WarmConfig(nodes=4, code=Code(2, 1))
OBJECTS = objects(6)
NAMES = list(OBJECTS)
NOBODY = "0" * 32


async def filled(tier: SharedTier) -> None:
    for name, data in OBJECTS.items():
        tier.proxy.offer(name, memoryview(data))
    await until_stored(tier.proxy)


async def dead(tier: SharedTier) -> None:
    """Take the proxy away."""
    await tier.proxy.close()


def dials(tier: SharedTier) -> list[float]:
    """Return a list to which the time of each attempt to connect is added."""
    found, dial = list[float](), tier.network.dial

    async def noted(address: str, *arguments: Any, name: str = "") -> Any:
        if name == "client":
            found.append(asyncio.get_running_loop().time())
        return await dial(address, *arguments, name=name)

    tier.network.dial = noted  # type: ignore[method-assign, assignment]  # to look inside
    return found


class Impostor:
    """A proxy that answers as it is told."""

    def __init__(self, tier: SharedTier, answer: Callable[[Kind, Head], Answer | Exception]) -> None:
        self.asked: list[Kind] = []
        self.connections: list[Connection] = []
        self._answer = answer
        tier.network.listen(ADDRESS, self._accept)

    def _accept(self) -> Connection:
        async def serve(kind: Kind, head: Head, body: bytearray) -> Answer:
            self.asked.append(kind)
            answer = self._answer(kind, head)
            if isinstance(answer, Exception):
                raise answer
            return answer

        self.connections.append(Connection(ProxySide(SECRET), serve))
        return self.connections[-1]

    async def close(self) -> None:
        for connection in self.connections:
            await connection.close()


# Connecting.


def test_what_was_dropped_is_not_asked_for_again() -> None:
    async def main() -> None:
        async with SharedTier(CONFIG) as tier:
            await dead(tier)
            impostor = Impostor(tier, lambda kind, head: (Kind.FOUND, {}, (b"x",)))
            client, name = tier.client(), "0" * 8 + "00000001" + "0" * 16
            assert await client.read(name, memoryview(bytearray(1)))
            client.drop(name)
            assert not await client.read(name, memoryview(bytearray(1)))
            assert (impostor.asked, client.statistics().misses) == ([Kind.READ], 1)
            await impostor.close()

    run(main)


def test_nothing_is_connected_before_the_first_read_and_many_readers_share_one_connection() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await filled(tier)
            times, client = dials(tier), tier.client()
            client.offer(NAMES[0], memoryview(OBJECTS[NAMES[0]]))
            await asyncio.sleep(1.0)
            assert not times
            assert await loaded(client, NAMES) == OBJECTS
            assert len(times) == 1
            assert client.statistics().connects == 1

    run(test)


def test_without_a_proxy_every_read_is_a_miss_and_it_is_looked_for_ever_more_seldom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await dead(tier)
            times, client = dials(tier), tier.client()
            for _ in range(3000):
                assert await loaded(client, NAMES[:1]) == {NAMES[0]: None}
                await asyncio.sleep(0.1)
            pauses = [later - earlier for earlier, later in pairwise(times)]
            assert 8 <= len(times) <= 25
            assert all(0.25 <= pause <= 30.2 for pause in pauses)
            assert max(pauses[-3:]) > 10 * pauses[0]
            assert client.statistics().unreachable == 3000

    with caplog.at_level(logging.WARNING):
        run(test)
    assert [record.name for record in caplog.records].count("stoker.warm.client") == 1


def test_a_proxy_that_was_restarted_is_found_again() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await filled(tier)
            client = tier.client()
            for _ in range(3):
                assert await loaded(client, NAMES) == OBJECTS
                await tier.replace_proxy()
                assert await loaded(client, NAMES) == dict.fromkeys(NAMES), "it connects anew meanwhile"
                await asyncio.sleep(5.0)
            assert client.statistics().connects == 4

    run(test)


def test_a_proxy_that_hangs_holds_up_one_read_for_its_deadline_and_the_others_not_at_all() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await filled(tier)
            client = tier.client()
            await loaded(client, [NOBODY])
            tier.network.links[-1].split()
            tier.network.stop(ADDRESS)
            tier.network.listen(ADDRESS, _silent)
            loop = asyncio.get_running_loop()
            begun = loop.time()
            assert await loaded(client, NAMES) == dict.fromkeys(NAMES)
            assert loop.time() - begun == pytest.approx(15.0, abs=0.1)
            for _ in range(100):
                begun = loop.time()
                assert await loaded(client, NAMES) == dict.fromkeys(NAMES)
                assert loop.time() == begun
                await asyncio.sleep(1.0)

    run(test)


def _silent() -> asyncio.Protocol:
    return asyncio.Protocol()


def test_a_proxy_that_hangs_up_at_once_is_not_dialled_at_every_read() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await dead(tier)

            class Rude(asyncio.Protocol):
                def connection_made(self, transport: asyncio.BaseTransport) -> None:
                    transport.close()

            tier.network.listen(ADDRESS, Rude)
            times, client = dials(tier), tier.client()
            for _ in range(1000):
                await loaded(client, NAMES[:1])
                await asyncio.sleep(0.01)
            assert 2 <= len(times) <= 10

    run(test)


def test_a_proxy_that_is_there_and_hangs_up_on_every_request_is_not_dialled_at_every_read() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await dead(tier)

            def hang_up(kind: Kind, head: Head) -> Answer | Exception:
                impostor.connections[-1].abort()
                return StokerError("gone")

            impostor = Impostor(tier, hang_up)
            times, client = dials(tier), tier.client()
            for _ in range(1000):
                assert await loaded(client, NAMES[:1]) == {NAMES[0]: None}
                await asyncio.sleep(0.01)
            assert 2 <= len(times) <= 10
            await impostor.close()

    run(test)


@pytest.mark.parametrize("ask", ["status", "down"])
def test_people_are_told_why_the_proxy_cannot_be_asked(ask: str) -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            stranger = tier.client(secret=Secret.generate())
            with pytest.raises(CredentialsError, match="STOKER_WARM_SECRET"):
                await getattr(stranger, ask)()
            await dead(tier)
            client = tier.client()
            for _ in range(2):
                with pytest.raises(ConnectionLostError, match="nobody listens"):
                    await getattr(client, ask)()

    run(test)


# Reading.


@pytest.mark.parametrize("body", [b"", OBJECTS[NAMES[0]][:-1], OBJECTS[NAMES[0]] + b"x"])
def test_what_is_not_the_size_of_the_object_is_a_miss(body: bytes) -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await dead(tier)
            impostor = Impostor(tier, lambda kind, head: (Kind.FOUND, {}, (body,)))
            client = tier.client()
            assert await loaded(client, NAMES[:1]) == {NAMES[0]: None}
            assert client.statistics().failures == 1
            await impostor.close()

    run(test)


def test_a_failure_of_the_proxy_is_a_miss_and_the_connection_stays() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await dead(tier)
            impostor = Impostor(tier, lambda kind, head: ConfigError("it is misconfigured"))
            client = tier.client()
            for _ in range(3):
                assert await loaded(client, NAMES[:1]) == {NAMES[0]: None}
            assert (client.statistics().failures, client.statistics().connects) == (3, 1)
            await impostor.close()

    run(test)


@pytest.mark.parametrize("seconds", [0.0, 0.0005, 0.02, 0.05, 0.07])
def test_nothing_writes_to_memory_after_a_cancelled_read(seconds: float) -> None:
    async def test() -> None:
        async with SharedTier(CONFIG, link=LinkConfig(bytes_per_second=2e6)) as tier:
            await filled(tier)
            client = tier.client()
            await loaded(client, [NOBODY])
            into = bytearray(100_000)
            reading = asyncio.create_task(client.read(NAMES[0], memoryview(into)))
            await asyncio.sleep(seconds)
            reading.cancel()
            await asyncio.wait([reading])
            assert reading.cancelled()
            into[:] = bytes(100_000)
            await asyncio.sleep(1.0)
            assert into == bytes(100_000)
            assert await loaded(client, NAMES) == OBJECTS

    run(test)


def test_a_reader_that_gives_up_while_it_connects_leaves_the_connection_to_others() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            await filled(tier)
            client = tier.client()
            leaving = asyncio.create_task(loaded(client, NAMES[:1]))
            staying = asyncio.create_task(loaded(client, NAMES))
            await asyncio.sleep(0.001)
            leaving.cancel()
            assert await staying == OBJECTS
            assert client.statistics().connects == 1

    run(test)


# Writing.


def test_what_is_offered_is_copied_and_counted_until_the_proxy_has_it() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG, link=LinkConfig(bytes_per_second=1e6)) as tier:
            client = tier.client(ClientConfig(pending_bytes=250_000))
            await loaded(client, [NOBODY])
            for name, data in OBJECTS.items():
                memory = bytearray(data)
                for _ in range(2):
                    client.offer(name, memoryview(memory))
                memory[:] = bytes(len(memory))
            assert client.statistics().pending_bytes == 200_000
            assert client.statistics().declined == 8
            await asyncio.sleep(5.0)
            assert client.statistics().pending_bytes == 0
            assert client.statistics().stored == 2
            assert await loaded(client, NAMES) == {
                **dict.fromkeys(NAMES),
                **{name: OBJECTS[name] for name in NAMES[:2]},
            }

    run(test)


def test_a_read_does_not_wait_behind_what_is_written() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG, link=LinkConfig(bytes_per_second=1e6)) as tier:
            client = tier.client()
            await loaded(client, [NOBODY])
            ((name, data),) = objects(1, 5_000_000, seed=2).items()
            client.offer(name, memoryview(data))
            await asyncio.sleep(0.5)
            begun = asyncio.get_running_loop().time()
            await loaded(client, [NOBODY])
            assert asyncio.get_running_loop().time() - begun < 0.1
            assert client.statistics().pending_bytes == len(data)

    run(test)


def test_without_a_proxy_nothing_is_copied() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            client = tier.client()
            await loaded(client, [NOBODY])
            await dead(tier)
            await asyncio.sleep(0.1)
            client.offer(NAMES[0], memoryview(OBJECTS[NAMES[0]]))
            assert client.statistics().pending_bytes == 0
            assert client.statistics().declined == 1

    run(test)


def test_what_no_frame_can_carry_is_not_offered() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            client = tier.client(ClientConfig(pending_bytes=1 << 30))
            await loaded(client, [NOBODY])
            client.offer(NAMES[0], memoryview(bytearray(MAX_BODY_BYTES + 1)))
            assert client.statistics().pending_bytes == 0

    run(test)


# Ending.


def test_a_closed_client_misses_keeps_nothing_and_can_be_closed_again() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG, link=LinkConfig(bytes_per_second=1e6)) as tier:
            client = tier.client()
            await loaded(client, [NOBODY])
            for name, data in OBJECTS.items():
                client.offer(name, memoryview(data))
            reading = asyncio.create_task(loaded(client, NAMES))
            await asyncio.sleep(0.01)
            for _ in range(2):
                await client.close()
            assert await reading == dict.fromkeys(NAMES)
            client.offer(NAMES[0], memoryview(OBJECTS[NAMES[0]]))
            assert await loaded(client, NAMES) == dict.fromkeys(NAMES)
            assert client.statistics().pending_bytes == 0

    run(test)


def test_a_client_that_is_closed_while_it_connects_leaves_nothing_behind() -> None:
    async def test() -> None:
        async with SharedTier(CONFIG) as tier:
            client = tier.client()
            reading = asyncio.create_task(loaded(client, NAMES))
            await asyncio.sleep(0.0015)
            await client.close()
            assert await reading == dict.fromkeys(NAMES)

    run(test)


@pytest.mark.parametrize("name", ClientConfig.__slots__)
def test_a_setting_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ClientConfig(**{name: 0})
