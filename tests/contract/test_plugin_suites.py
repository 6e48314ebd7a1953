"""The suites that are shipped for plug-ins pass for what stoker has itself, and fail for what is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from stoker._cache.disk_tier import DiskTier
from stoker._cache.eviction import POLICIES
from stoker.abc import Answer, EvictionPolicy, Executor, NextUseOracle, ObjectRef, Tier
from stoker.errors import ConfigError, FunctionError, StokerError, TransientError
from stoker.fanout import error_of_function
from stoker.testing import CONTRACT_FUNCTIONS, EvictionPolicyTests, ExecutorTests, TierTests, run_virtual
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode
from stoker_warm._proxy import Proxy
from stoker_warm._tier import WarmTier
from support.tiers import MANIFEST, disk_tier, future, memory_tier
from support.warm_platform import TIER_SECRET
from support.warm_platform import Tier as WarmPlatformTier


@pytest.mark.parametrize("policy", POLICIES)
class TestPolicies(EvictionPolicyTests):
    @pytest.fixture(autouse=True)
    def _chosen(self, policy: str) -> None:
        self.policy = policy

    def create_policy(self, oracle: NextUseOracle[str]) -> EvictionPolicy[str]:
        return POLICIES[self.policy](oracle)


class Forgetful:
    """A policy that forgets removed keys, and names all others twice."""

    def __init__(self, oracle: NextUseOracle[str]) -> None:
        self._keys: list[str] = []

    def used(self, key: str) -> None: ...

    def added(self, key: str) -> None:
        self._keys += [key, key]

    def removed(self, key: str) -> None: ...

    def victims(self, newcomer: str) -> Iterator[str]:
        yield from self._keys


class _OfForgetful(EvictionPolicyTests):
    def create_policy(self, oracle: NextUseOracle[str]) -> EvictionPolicy[str]:
        return Forgetful(oracle)


def failures(suite: Any) -> set[str]:
    """Return the tests of a suite that fail."""
    failed = set()
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except Exception:  # noqa: BLE001 - whatever it is, the suite has found it
                failed.add(name)
    return failed


def test_the_suite_of_policies_finds_one_that_forgets() -> None:
    assert failures(_OfForgetful()) == {
        "test_a_cache_is_never_fuller_than_its_limit_and_takes_in_what_fits",
        "test_a_key_that_was_removed_is_no_victim_and_may_come_back",
        "test_victims_are_in_the_cache_and_each_is_named_once",
    }


class TestMemoryTier(TierTests):
    async def create_tier(self) -> Tier:
        tier = memory_tier(64)
        await tier.follow(MANIFEST, future())
        return tier


class TestDiskTier(TierTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "cache"

    async def create_tier(self) -> Tier:
        tier = disk_tier(self.path, 64)
        await tier.follow(MANIFEST, future())
        return tier

    async def settle(self, tier: Tier) -> None:
        assert isinstance(tier, DiskTier)
        await tier.flush()


class _ProxyAndNodes(WarmTier):
    """The warm tier, with its proxy and its nodes in this process."""

    def __init__(self, made: WarmPlatformTier) -> None:
        super().__init__(self._started, TIER_SECRET)
        self._proxy, self.made = made.proxy, made

    async def _started(self) -> Proxy:
        return self.made.proxy

    async def close(self) -> None:
        await self.made.__aexit__()


class TestWarmTier(TierTests):
    async def create_tier(self) -> Tier:
        made = WarmPlatformTier(WarmConfig(nodes=3, code=ErasureCode(2, 1)))
        await made.__aenter__()
        return _ProxyAndNodes(made)

    async def settle(self, tier: Tier) -> None:
        assert isinstance(tier, _ProxyAndNodes)
        await tier.made.put()

    def _run_loop(self, main: Coroutine[Any, Any, None]) -> None:
        run_virtual(main)


class Wrong:
    """A tier that keeps references, ignores identities, and writes when it likes."""

    name = ""

    def __init__(self) -> None:
        self._held: dict[str, memoryview] = {}

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        data = self._held.get(ref.key)
        if data is None:
            return False
        asyncio.get_running_loop().call_later(0.01, self._write, data, into)
        into[:] = data[: len(into)]
        await asyncio.sleep(0)
        return True

    def _write(self, data: memoryview, into: memoryview) -> None:
        into[:] = data[: len(into)]

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        self._held[ref.key] = data

    async def close(self) -> None: ...


class NoTier(Wrong):
    """A tier that has nothing."""

    name = "none"

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        return False


class _OfWrong(TierTests):
    async def create_tier(self) -> Tier:
        return Wrong()


def test_the_suite_of_tiers_finds_what_is_wrong() -> None:
    assert failures(_OfWrong()) == {
        "test_it_has_a_name",
        "test_it_copies_what_it_is_offered",
        "test_an_object_of_another_checksum_or_key_is_another_object",
        "test_a_read_that_is_cancelled_ends_soon_and_writes_nothing_afterwards",
    }


class _OfNothing(TierTests):
    keeps = False

    async def create_tier(self) -> Tier:
        return NoTier()


def test_a_tier_that_stores_nothing_passes_if_it_declares_that() -> None:
    assert failures(_OfNothing()) == set()


class InlineExecutor(Executor):
    """An executor that runs functions in this process, one call after the other."""

    name, concurrency, sees_files = "inline", 1, True

    async def __aenter__(self) -> Executor:
        return self

    async def __aexit__(self, *exception: object) -> None: ...

    async def call(self, function: str, event: Mapping[str, Any]) -> Answer:
        if function not in CONTRACT_FUNCTIONS:
            raise ConfigError(f"there is no function {function}")
        module, _, name = CONTRACT_FUNCTIONS[function].partition(":")
        try:
            result = await getattr(import_module(module), name)(json.loads(json.dumps(event)), None, None)
        except Exception as error:
            raise error_of_function(function, type(error).__name__, str(error)) from error
        if not isinstance(result, dict):
            raise FunctionError(function, "TypeError", "the result is no object")
        return Answer(result=result, billed_seconds=0.0, memory_bytes=0, is_cold=None)


class TestInlineExecutor(ExecutorTests):
    def create_executor(self) -> Executor:
        return InlineExecutor()


class Careless(InlineExecutor):
    """An executor that keeps to itself what went wrong."""

    async def call(self, function: str, event: Mapping[str, Any]) -> Answer:
        try:
            return await super().call(function, {**event, "more": 1})
        except (StokerError, asyncio.CancelledError):
            raise TransientError("lost") from None


class _OfCareless(ExecutorTests):
    def create_executor(self) -> Executor:
        return Careless()


def test_the_suite_of_executors_finds_what_is_wrong() -> None:
    assert failures(_OfCareless()) == {
        "test_a_call_can_be_cancelled_and_the_next_one_works",
        "test_a_function_that_is_not_there_is_a_final_error",
        "test_a_megabyte_goes_both_ways",
        "test_a_result_that_is_no_object_is_the_functions_error",
        "test_an_error_of_a_function_has_its_type_and_message",
        "test_an_error_that_may_pass_is_transient",
        "test_an_event_arrives_and_a_result_comes_back_as_they_are",
    }


@pytest.mark.parametrize("suite", [EvictionPolicyTests, TierTests, ExecutorTests])
def test_a_suite_says_what_to_override(suite: Any) -> None:
    assert len(failures(suite())) >= 5
