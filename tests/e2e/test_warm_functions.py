"""The warm tier on Lambda's real runtime: nodes that are frozen between invocations, killed, and called twice."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from stoker._shared.certificate import read_fingerprint
from stoker_functions._warm_node import RESERVED_BYTES
from stoker_warm._auth import WarmSecret
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from stoker_warm._events import NodeReport, NodeTask, WakeEvent
from support.tls import make_authority
from support.waiting import until
from support.warm_cloud import PREFIX, SECRET, objects, warm_cloud

CONFIG = WarmConfig(nodes=3, code=ErasureCode(2, 1), linger_seconds=0.1)
OBJECTS = objects(6)
ALL = range(CONFIG.nodes)


def test_objects_are_kept_while_their_nodes_stand_still_and_are_read_when_they_are_called_again() -> None:
    async def check() -> None:
        async with warm_cloud(CONFIG) as warm:
            await warm.put(OBJECTS)
            for _ in range(2):
                await warm.asleep()
                assert await warm.read_all(OBJECTS) == OBJECTS
            figures = warm.cloud.statistics().values()
            assert [each.cold_starts for each in figures] == [1] * CONFIG.nodes, "each node is one instance"
            assert sum(each.invocations for each in figures) >= 2 * CONFIG.nodes
            assert warm.proxy.statistics().hits == 2 * len(OBJECTS)

    asyncio.run(check())


def test_as_many_nodes_as_there_is_parity_may_die_at_a_time_and_no_read_fails() -> None:
    async def check() -> None:
        async with warm_cloud(CONFIG) as warm:
            await warm.put(OBJECTS)
            for victim in (0, 2):
                await warm.asleep()
                await warm.kill([victim])
                assert await warm.read_all(OBJECTS) == OBJECTS
                # Once the proxy knows the loss, a read repairs it, so that the next node may die.
                await warm.asleep()
                assert await warm.read_all(OBJECTS) == OBJECTS
                await until(lambda: not warm.proxy.statistics().pending_bytes)
            found = warm.proxy.statistics()
            assert (found.losses, found.misses) == (0, 0)
            assert found.rebuilt >= len(OBJECTS)

    asyncio.run(check())


def test_when_one_more_dies_each_object_is_lost_once_and_can_be_put_away_again() -> None:
    async def check() -> None:
        async with warm_cloud(CONFIG) as warm:
            await warm.put(OBJECTS)
            await warm.asleep()
            await warm.kill([0, 1])
            for _ in range(2):
                assert await warm.read_all(OBJECTS) == dict.fromkeys(OBJECTS)
            found = warm.proxy.statistics()
            assert found.losses + found.misses == 2 * len(OBJECTS)
            assert found.losses <= len(OBJECTS)
            await warm.put(OBJECTS)
            assert await warm.read_all(OBJECTS) == OBJECTS

    asyncio.run(check())


def test_a_proxy_that_has_restarted_learns_what_nodes_hold() -> None:
    async def check() -> None:
        async with warm_cloud(CONFIG) as warm:
            await warm.put(OBJECTS)
            held_bytes = warm.proxy.statistics().held_bytes
            await warm.restart()
            await until(lambda: warm.proxy.statistics().held_bytes == held_bytes)
            assert await warm.read_all(OBJECTS) == OBJECTS
            assert [each.cold_starts for each in warm.cloud.statistics().values()] == [1] * CONFIG.nodes

    asyncio.run(check())


def test_nodes_with_another_secret_than_the_proxy_hold_nothing_and_no_log_has_a_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = WarmSecret.generate()

    async def check() -> None:
        async with warm_cloud(CONFIG, secret=other) as warm:
            name, data = next(iter(OBJECTS.items()))
            warm.proxy.objects.offer(name, memoryview(data))
            await until(lambda: all(figures.errors for figures in warm.cloud.statistics().values()))
            assert await warm.read(name) is None
            found = warm.proxy.statistics()
            assert (found.stored, found.held_bytes, found.nodes["awake"]) == (0, 0, 0)
            written = "".join(warm.cloud.log(f"{PREFIX}-warm-{number}") for number in ALL) + caplog.text
            assert "STOKER_WARM_SECRET" in written
            assert SECRET.reveal() not in written
            assert other.reveal() not in written

    asyncio.run(check())


def test_over_tls_nodes_accept_only_the_configured_certificate(tmp_path: Path) -> None:
    certificates = []
    for name in ("own", "other"):
        folder = tmp_path / name
        folder.mkdir()
        make_authority(folder)
        certificates.append((folder / "server.pem", folder / "server.pem"))

    async def check() -> None:
        async with warm_cloud(CONFIG, certificate=certificates[0]) as warm:
            await warm.put(OBJECTS)
            await warm.asleep()
            assert await warm.read_all(OBJECTS) == OBJECTS
            await warm.asleep()
            told = WakeEvent(
                node="warm-0", proxy=warm.proxy.listener.address, fingerprint=read_fingerprint(certificates[1][0])
            )
            outcome = await warm.cloud.invoke(f"{PREFIX}-warm-0", told.to_event())
            assert outcome.error_type == "CredentialsError"
            assert "certificate" in json.loads(outcome.payload)["errorMessage"]
            assert await warm.read_all(OBJECTS) == OBJECTS

    asyncio.run(check())


def test_a_node_that_is_called_while_it_serves_is_a_second_instance_which_takes_nothing_from_the_first() -> None:
    async def check() -> None:
        async with warm_cloud(dataclasses.replace(CONFIG, linger_seconds=1.0)) as warm:
            await warm.put(OBJECTS)
            wake = WakeEvent(node="warm-0", proxy=warm.proxy.listener.address, linger_seconds=0.1)
            outcome = await warm.cloud.invoke(f"{PREFIX}-warm-0", wake.to_event())
            assert not outcome.error_type
            assert outcome.is_cold
            assert await warm.read_all(OBJECTS) == OBJECTS
            found = warm.proxy.statistics()
            assert (found.losses, found.misses, found.rebuilt) == (0, 0, 0)

    asyncio.run(check())


def test_a_node_returns_before_its_time_limit_and_is_called_again() -> None:
    async def check() -> None:
        config = dataclasses.replace(CONFIG, linger_seconds=60.0)
        async with warm_cloud(config, timeout_seconds=3.0) as warm:
            await warm.put(OBJECTS)
            await warm.asleep()
            assert await warm.read_all(OBJECTS) == OBJECTS
            await warm.asleep()
            for figures in warm.cloud.statistics().values():
                assert (figures.errors, figures.cold_starts) == (0, 1)
                assert figures.invocations == 2

    asyncio.run(check())


def test_what_a_node_holds_and_what_is_on_its_way_fit_into_the_memory_of_its_function() -> None:
    memory_bytes, object_bytes = 256 << 20, 8 << 20
    objects_held = (memory_bytes - RESERVED_BYTES) // object_bytes - 1  # a little more than its bytes is counted

    async def check() -> None:
        config = dataclasses.replace(CONFIG, nodes=1, code=ErasureCode(1, 0))
        async with warm_cloud(config, memory_mb=memory_bytes >> 20) as warm:
            for round_ in range(3):
                await warm.put(objects(objects_held, object_bytes, seed=round_))
            assert warm.proxy.statistics().evicted > objects_held
            await warm.asleep()
            wake = WakeEvent(node="warm-0", proxy=warm.proxy.listener.address, task=NodeTask.WARM)
            outcome = await warm.cloud.invoke(f"{PREFIX}-warm-0", wake.to_event())
            report = NodeReport.parse(json.loads(outcome.payload))
            assert report.limit_bytes == memory_bytes - RESERVED_BYTES
            assert report.limit_bytes - object_bytes < report.held_bytes <= report.limit_bytes
            assert report.limit_bytes < outcome.memory_bytes < memory_bytes
            assert not warm.cloud.statistics()[f"{PREFIX}-warm-0"].errors  # it would have been killed

    asyncio.run(check())
