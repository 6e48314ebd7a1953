from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest

from stoker.testing import run_virtual
from stoker_local._host import background_tasks
from stoker_local.functions import FunctionFault, FunctionFaultKind, FunctionFaultPlan, ServiceError
from stoker_local.functions._config import FunctionFaultInjector
from stoker_local.functions._instance_pool import InstancePool
from stoker_local.functions._statistics import CloudRecorder


class Idler:
    """An instance that runs until it is ended, which takes a second."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ends = asyncio.Event()

    async def run_process(self) -> None:
        try:
            await self.ends.wait()
        finally:
            await asyncio.sleep(1.0)


@asynccontextmanager
async def pool_of(
    *names: str, script: tuple[FunctionFault | None, ...] = ()
) -> AsyncIterator[tuple[InstancePool[Idler], CloudRecorder]]:
    """A pool with two slots and these instances, all idle for ten seconds at most."""
    ledger = CloudRecorder(clock=asyncio.get_running_loop().time, echo=lambda text: None)
    async with background_tasks() as tasks:
        account = ledger.add_function("f", "lambda", memory_bytes=1 << 30)
        faults = FunctionFaultInjector(FunctionFaultPlan(script=script))
        pool: InstancePool[Idler] = InstancePool(account, faults, tasks, slots=2, idle_seconds=10.0)
        for name in names:
            instance = Idler(name)
            pool.start(instance)
            await asyncio.sleep(0)
            pool.mark_idle(instance)
        yield pool, ledger


def names(instances: Iterable[Idler]) -> list[str]:
    return [instance.name for instance in instances]


def test_an_instance_is_reclaimed_after_its_idle_time() -> None:
    async def scenario() -> None:
        async with pool_of("a", "b") as (pool, ledger):
            a, b = pool.idle
            await asyncio.sleep(6.0)
            pool.mark_busy(a)
            await asyncio.sleep(3.0)
            pool.mark_idle(a)
            assert names(pool.idle) == ["b", "a"]  # the one that worked last is last
            await asyncio.sleep(2.0)
            assert (names(pool.idle), names(pool.instances)) == (["a"], ["a"])
            assert ledger.statistics()["f"].reclaimed == 1
            pool.mark_busy(a)
            await asyncio.sleep(60.0)
            assert names(pool.instances) == ["a"]
            assert not b.ends.is_set()  # it was cancelled

    run_virtual(scenario())


def test_an_instance_that_ends_by_itself_is_neither_idle_nor_living_nor_taken_back() -> None:
    async def scenario() -> None:
        async with pool_of("a", "b") as (pool, ledger):
            next(iter(pool.idle)).ends.set()
            await asyncio.sleep(2.0)
            assert (names(pool.idle), names(pool.instances)) == (["b"], ["b"])
            figures = ledger.statistics()["f"]
            assert (figures.instances, figures.cold_starts, figures.reclaimed) == (1, 2, 0)

    run_virtual(scenario())


def test_reclaiming_ends_what_is_idle_and_nothing_else() -> None:
    async def scenario() -> None:
        async with pool_of("a", "b") as (pool, ledger):
            pool.mark_busy(next(iter(pool.idle)))
            pool.reclaim()
            assert (names(pool.idle), names(pool.instances)) == ([], ["a"])
            assert [each.instance for each in ledger.events(0)] == ["b"]

    run_virtual(scenario())


def test_one_more_than_there_are_slots_is_throttled_unless_it_waits() -> None:
    async def scenario() -> None:
        async with pool_of() as (pool, ledger):
            for _ in range(2):
                assert await pool.acquire_slot() is None
            with pytest.raises(ServiceError, match="Rate Exceeded"):
                await pool.acquire_slot()
            waiting = asyncio.create_task(pool.acquire_slot(waits=True))
            await asyncio.sleep(5.0)
            assert not waiting.done()
            pool.slots.release()
            assert await waiting is None
            assert ledger.statistics()["f"].throttles == 1

    run_virtual(scenario())


def test_faults_that_strike_before_an_invocation_are_counted_and_the_others_handed_on() -> None:
    throttle, reclaim, kill = (FunctionFault(kind=FunctionFaultKind(kind)) for kind in ("throttle", "reclaim", "kill"))

    async def scenario() -> None:
        async with pool_of("a", script=(throttle, reclaim, kill)) as (pool, ledger):
            with pytest.raises(ServiceError):
                await pool.acquire_slot()
            assert names(pool.idle) == ["a"]
            assert await pool.acquire_slot() is reclaim
            assert names(pool.idle) == []
            assert await pool.acquire_slot() is kill
            assert ledger.statistics()["f"].faults == {"throttle": 1, "reclaim": 1}

    run_virtual(scenario())
