"""The meter, and the store that feeds it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable

import pytest

from stoker import Operation, Prices, open_store
from stoker._base.meter import Meter, MeterReading
from stoker._cost.prices import GB_BYTES
from stoker._stores.object_store import MeteredStore
from stoker.abc import ObjectInfo, Store
from stoker.errors import (
    ConfigError,
    ConnectionLostError,
    NotFoundError,
    ServerError,
    StoreError,
    ThrottledError,
    TruncatedError,
)

PRICES = Prices.load()


class FailingStore:
    """A store whose every request ends with ``error``, or never."""

    url = "s3://bucket"

    def __init__(self, error: StoreError | None) -> None:
        self.error = error

    async def _fail(self) -> None:
        if self.error is None:
            await asyncio.Event().wait()
            raise AssertionError
        raise self.error

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        await self._fail()
        raise AssertionError

    async def get_range(
        self,
        key: str,
        start: int,
        end: int,
        *,
        into: memoryview,
        tag: str | None = None,
        begun: Callable[[], None] | None = None,
    ) -> ObjectInfo:
        await self._fail()
        raise AssertionError

    async def head(self, key: str) -> ObjectInfo:
        await self._fail()
        raise AssertionError

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        await self._fail()
        yield ObjectInfo(key="unreachable", size_bytes=0, tag="")

    async def put(
        self, key: str, data: bytes | bytearray | memoryview, *, if_absent: bool = False, if_tag: str | None = None
    ) -> ObjectInfo:
        await self._fail()
        raise AssertionError

    async def delete(self, key: str) -> None:
        await self._fail()

    async def close(self) -> None:
        pass


async def read_after_failing(error: StoreError | None) -> MeterReading:
    """Return the reading after one ranged GET of 100 bytes that fails with ``error``, or is cancelled."""
    store = MeteredStore(FailingStore(error), Meter("s3://bucket"))
    task = asyncio.create_task(store.get_range("k", 0, 100, into=memoryview(bytearray(100))))
    await asyncio.sleep(0)
    if error is None:
        task.cancel()
    with pytest.raises(asyncio.CancelledError if error is None else type(error)):
        await task
    return store.meter.snapshot()


async def filled(name: str, count: int) -> MeteredStore:
    inner = open_store(f"memory://{name}")
    for number in range(count):
        await inner.put(f"k{number:05d}", b"x")
    return MeteredStore(inner, Meter(inner.url))


def test_every_request_is_counted_with_the_bytes_it_moved() -> None:
    async def scenario() -> None:
        inner = open_store(f"memory://{uuid.uuid4()}/train")
        store = MeteredStore(inner, Meter("s3://bucket/train"))
        assert isinstance(store, Store)
        assert store.url == inner.url
        info = await store.put("a", memoryview(bytearray(1000)).cast("I"))
        assert info.size_bytes == 1000
        data, _ = await store.get("a")
        into = bytearray(300)
        await store.get_range("a", 100, 400, into=memoryview(into), tag=info.tag)
        await store.head("a")
        assert [found.key async for found in store.list()] == ["a"]
        await store.delete("a")
        await store.close()
        reading = store.meter.snapshot()
        assert reading.requests == {"GET": 2, "HEAD": 1, "PUT": 1, "LIST": 1, "DELETE": 1}
        assert (reading.read_bytes, reading.written_bytes, reading.broken_bytes) == (len(data) + 300, 1000, 0)
        assert (reading.failed, reading.cancelled) == (0, 0)
        assert PRICES.dollars(reading) == pytest.approx((3 * 0.0004 + 2 * 0.005) / 1000)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "billed", "broken_bytes"),
    [
        (None, 1, 100),
        (TruncatedError("cut"), 1, 100),
        (ConnectionLostError("reset"), 1, 100),
        (NotFoundError("none"), 1, 0),
        (ThrottledError("slow down"), 0, 0),
        (ServerError("500"), 0, 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception | None) else "",
)
def test_an_unfinished_request_is_billed_unless_the_store_failed(
    error: StoreError | None, billed: int, broken_bytes: int
) -> None:
    reading = asyncio.run(read_after_failing(error))
    assert reading.requests[Operation.GET] == 1
    assert reading.not_billed[Operation.GET] == 1 - billed
    assert (reading.failed, reading.cancelled) == ((0, 1) if error is None else (1, 0))
    assert (reading.read_bytes, reading.broken_bytes) == (0, broken_bytes)
    assert PRICES.dollars(reading) == pytest.approx(billed * 0.0004 / 1000)


def test_every_operation_counts_its_failures() -> None:
    async def scenario() -> None:
        store = MeteredStore(FailingStore(NotFoundError("none")), Meter("s3://bucket"))
        attempts = [store.get("k"), store.head("k"), store.put("k", b"x"), store.delete("k")]
        results = await asyncio.gather(*attempts, return_exceptions=True)
        assert all(isinstance(result, NotFoundError) for result in results)
        with pytest.raises(NotFoundError):
            await anext(store.list())
        reading = store.meter.snapshot()
        assert dict(reading.requests) == dict.fromkeys(Operation, 1)
        assert reading.failed == 5
        assert reading.written_bytes == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("keys", "taken", "pages"), [(0, 0, 1), (1, 1, 1), (999, 999, 1), (2001, 2001, 3), (2001, 5, 1)]
)
def test_a_listing_costs_a_request_a_page_that_was_requested(keys: int, taken: int, pages: int) -> None:
    async def scenario() -> int:
        store = await filled(str(uuid.uuid4()), keys)
        if not keys:
            await open_store(store.url).put("elsewhere", b"")
        found = store.list("k")
        for _ in range(taken):
            await anext(found)
        if taken == keys:
            with pytest.raises(StopAsyncIteration):
                await anext(found)
        await found.aclose()  # type: ignore[attr-defined]
        return store.meter.snapshot().requests[Operation.LIST]

    assert asyncio.run(scenario()) == pages


def test_an_abandoned_listing_closes_the_one_below() -> None:
    closed = []

    class Listing(FailingStore):
        async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
            try:
                while True:
                    yield ObjectInfo(key="k", size_bytes=1, tag="")
            finally:
                closed.append(True)

    async def scenario() -> None:
        found = MeteredStore(Listing(None), Meter("s3://bucket")).list()
        await anext(found)
        await found.aclose()  # type: ignore[attr-defined]
        assert closed == [True]

    asyncio.run(scenario())


def test_egress_is_priced_by_where_the_reader_is() -> None:
    readings = []
    for egress in ("same_region", "other_region", "internet"):
        meter = Meter("s3://bucket", egress=egress)
        meter.add_read(10 * GB_BYTES)
        readings.append(PRICES.dollars(meter.snapshot()))
    assert readings == pytest.approx([0, 0.2, 0.9])
    with pytest.raises(ConfigError, match=r"egress must be one of same_region, .* not 'moon'"):
        Meter("s3://bucket", egress="moon")  # type: ignore[arg-type]


def test_a_local_store_costs_nothing() -> None:
    meter = Meter("/data/train", egress="internet")
    with meter.count_request(Operation.PUT):
        meter.add_written(1 << 40)
    assert PRICES.dollars(meter.snapshot()) == 0


def test_a_reading_does_not_change_afterwards() -> None:
    meter = Meter("s3://bucket")
    before = meter.snapshot()
    with meter.count_request(Operation.GET):
        meter.add_read(10)
    assert before.requests[Operation.GET] == before.read_bytes == 0
    assert meter.snapshot().requests[Operation.GET] == 1


def test_a_meter_shows_what_it_counted() -> None:
    meter = Meter("s3://bucket")
    assert repr(meter) == "<Meter s3://bucket unused>"
    with meter.count_request(Operation.GET):
        pass
    assert repr(MeteredStore(FailingStore(None), meter)) == "<MeteredStore <Meter s3://bucket GET=1>>"


def test_a_bug_inside_a_request_is_not_taken_for_the_stores_failure() -> None:
    meter = Meter("s3://bucket")
    with pytest.raises(ZeroDivisionError), meter.count_request(Operation.GET):
        raise ZeroDivisionError
    assert (meter.snapshot().failed, meter.snapshot().requests[Operation.GET]) == (0, 1)
