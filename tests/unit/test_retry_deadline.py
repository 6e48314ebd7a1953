"""How long an operation is tried again: through an outage, not for ever, and not in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from stoker import RetryingStore, RetryPolicy
from stoker._base.retry import PACK_RETRY_POLICY
from stoker._pack.plan import PackConfig
from stoker.abc import Store
from stoker.errors import (
    ConfigError,
    ConnectionLostError,
    RangeBeyondEndError,
    ServerError,
    StoreError,
    ThrottledError,
    TransientError,
    UnexpectedAnswerError,
)
from stoker.testing import WatchedStore, run_virtual
from support.packing import SCHEMA, fresh_store

Operation = Callable[[RetryingStore], Awaitable[object]]


async def _listed(store: RetryingStore) -> list[str]:
    return [info.key async for info in store.list()]


OPERATIONS: dict[str, Operation] = {
    "get": lambda store: store.get("x"),
    "head": lambda store: store.head("x"),
    "range": lambda store: store.get_range("x", 0, 1, into=memoryview(bytearray(1))),
    "list": _listed,
    "put": lambda store: store.put("y", b"1"),
    "delete": lambda store: store.delete("y"),
}
every_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


class Out(WatchedStore):
    """Fails until ``out_seconds``, or as often as there are ``errors``; a failure takes a while."""

    def __init__(self, store: Store, *errors: TransientError, out_seconds: float = 0.0, slow_seconds: float = 0.01):
        super().__init__(store)
        self.errors = list(errors)
        self.out_seconds, self.slow_seconds = out_seconds, slow_seconds
        self.asked_seconds: list[float] = []

    async def before(self, number: int, operation: str, key: str) -> None:
        now = asyncio.get_running_loop().time()
        self.asked_seconds.append(now)
        if now < self.out_seconds:
            await asyncio.sleep(self.slow_seconds)
            raise ConnectionLostError("s3://bucket/x: the connection broke")
        if self.errors:
            raise self.errors.pop(0)


def run(store: Out, operation: Operation, policy: RetryPolicy | None = None) -> float:
    """Perform an operation; return how long it took."""

    async def main() -> float:
        await store.store.put("x", b"0123456789")
        begun = asyncio.get_running_loop().time()
        await operation(RetryingStore(store, policy))
        return asyncio.get_running_loop().time() - begun

    return run_virtual(main())


def fails(store: Out, operation: Operation, kind: type[StoreError], policy: RetryPolicy | None = None) -> float:
    async def failing(retrying: RetryingStore) -> None:
        with pytest.raises(kind):
            await operation(retrying)

    return run(store, failing, policy)


@every_operation
@pytest.mark.parametrize("out_seconds", [20.0, 50.0])
def test_an_outage_shorter_than_the_deadline_fails_nothing(operation: Operation, out_seconds: float) -> None:
    assert out_seconds <= run(Out(fresh_store(), out_seconds=out_seconds), operation) <= out_seconds + 5.0


@every_operation
@pytest.mark.parametrize("slow_seconds", [0.01, 20.0])
def test_a_longer_one_ends_it_at_the_deadline(operation: Operation, slow_seconds: float) -> None:
    took = fails(Out(fresh_store(), out_seconds=1e9, slow_seconds=slow_seconds), operation, ConnectionLostError)
    assert 50.0 <= took <= 60.0 + 2 * slow_seconds + 0.1


def test_packing_has_more_patience(caplog: pytest.LogCaptureFixture) -> None:
    assert PackConfig(schema=SCHEMA).retry is PACK_RETRY_POLICY
    store = Out(fresh_store(), out_seconds=240.0)
    with caplog.at_level(logging.WARNING, logger="stoker"):
        assert run(store, OPERATIONS["put"], PACK_RETRY_POLICY) >= 240.0
    assert 10 <= len(caplog.messages) <= 30  # not silent, and not one for each attempt
    assert "s3://bucket/x: the connection broke" in caplog.text


def test_concurrent_operations_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def together(store: RetryingStore) -> None:
        await asyncio.gather(*(store.get("x") for _ in range(20)))

    with caplog.at_level(logging.WARNING, logger="stoker"):
        run(Out(fresh_store(), out_seconds=50.0), together)
    assert 3 <= len(caplog.messages) <= 5


def test_a_short_failure_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="stoker"):
        run(Out(fresh_store(), out_seconds=5.0), OPERATIONS["get"])
    assert caplog.messages == []


@pytest.mark.parametrize("asked_seconds", [120.0, 7200.0])
def test_a_wait_beyond_the_deadline_is_cut_and_logged(asked_seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    asks = ThrottledError("slow down", retry_after_seconds=asked_seconds)
    store = Out(fresh_store(), asks)
    with caplog.at_level(logging.WARNING, logger="stoker"):
        assert run(store, OPERATIONS["get"]) == pytest.approx(30.0)
    assert caplog.messages == [f"retrying in 30.0 s, for at most 60 s more: {store.url}/x: slow down"]
    assert fails(Out(fresh_store(), *[asks] * 300), OPERATIONS["get"], ThrottledError) <= 60.0


def test_a_wait_that_fits_is_waited_out() -> None:
    asks = ThrottledError("slow down", retry_after_seconds=40.0)
    assert 40.0 <= run(Out(fresh_store(), asks), OPERATIONS["get"]) <= 40.1


@pytest.mark.parametrize(("kind", "answers"), [(RangeBeyondEndError, 2), (UnexpectedAnswerError, 8)])
def test_what_a_store_says_again_it_means(kind: type[TransientError], answers: int) -> None:
    store = Out(fresh_store(), *[kind("so it is")] * 100)
    assert fails(store, OPERATIONS["range"], kind) < 20.0
    assert len(store.asked_seconds) == answers
    mixed = Out(fresh_store(), *[kind("no"), *[ServerError("down")] * 2] * (answers - 1))
    run(mixed, OPERATIONS["range"])


def test_a_write_of_minutes_is_tried_three_times_at_least() -> None:
    store = Out(fresh_store(), out_seconds=1500.0, slow_seconds=1000.0)
    assert run(store, OPERATIONS["put"]) >= 2000.0


def test_a_process_that_was_stopped_has_its_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, waits = asyncio.sleep, 0

    async def stopped(seconds: float) -> None:
        nonlocal waits
        waits += 1
        await sleep(seconds + (3600.0 if waits == 3 else 0.0))

    monkeypatch.setattr("stoker._base.retry.asyncio.sleep", stopped)
    store = Out(fresh_store(), *[ServerError("down")] * 10)
    assert 3600.0 <= run(store, OPERATIONS["get"]) <= 3660.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_deadline_is_positive(seconds: float) -> None:
    with pytest.raises(ConfigError, match="deadline_seconds"):
        RetryPolicy(deadline_seconds=seconds)
