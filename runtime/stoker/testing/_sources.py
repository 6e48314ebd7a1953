"""The contract of sources, as tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from secrets import token_hex
from typing import Any

from stoker._base.retry import RetryingStore
from stoker._format.schema import Schema
from stoker._stores import open_store
from stoker.abc import Sample, Source, SourceListing, Store
from stoker.errors import PackError, StoreError


async def _read_encoded(source: Source, start: int = 0) -> list[tuple[str, list[bytes]]]:
    """Return the samples from number ``start`` on: the name and the encoded values of each."""
    schema = Schema(source.schema)
    async with aclosing(source.read(start)) as samples:
        return [_encode_sample(schema, sample) async for sample in samples]


def _encode_sample(schema: Schema, sample: Sample) -> tuple[str, list[bytes]]:
    where, values = sample
    assert isinstance(where, str), f"the name of a sample is {where!r}"
    assert where, "a sample has an empty name"
    return where, [bytes(value) for value in schema.encode(values, where)]


class SourceTests:
    r"""The tests of a :class:`~stoker.abc.Source`.

    Override :meth:`objects` and :meth:`open_source`. Each test has its own event loop and keeps the objects in a
    memory store.

    Example:
        >>> from stoker.testing import SourceTests
        >>> class TestJsonLines(SourceTests):
        ...     def objects(self):
        ...         return {"a.jsonl": b'{"label": 1}\n{"label": 2}\n'}
        ...
        ...     async def open_source(self, listing):
        ...         return JsonLines(listing)
    """

    def objects(self) -> Mapping[str, bytes]:
        """Return raw objects, key → content, that have at least two samples; every object must be needed."""
        raise NotImplementedError("override objects in your test class")

    async def open_source(self, listing: SourceListing) -> Source:
        """Return the source of the listed objects, as the entry point's function does.

        Args:
            listing: store, URL and objects to read.
        """
        raise NotImplementedError("override open_source in your test class")

    def _run(self, check: Callable[[Source, Store], Awaitable[Any]]) -> Any:
        async def checked() -> Any:
            store = RetryingStore(open_store(f"memory://{token_hex(16)}"))  # of this test alone
            for key, data in self.objects().items():
                await store.put(key, data)
            listed = tuple([item async for item in store.list()])
            return await check(await self.open_source(SourceListing(store.url, store, listed, is_folder=True)), store)

        return asyncio.run(checked())

    def test_it_is_a_source_with_columns(self) -> None:
        async def check(source: Source, store: Store) -> None:
            assert isinstance(source, Source)
            assert Schema(source.schema)

        self._run(check)

    def test_every_sample_has_the_columns_of_the_schema(self) -> None:
        async def check(source: Source, store: Store) -> None:
            assert len(await _read_encoded(source)) > 1, "give objects with at least two samples"

        self._run(check)

    def test_samples_and_their_order_are_the_same_every_time(self) -> None:
        async def check(source: Source, store: Store) -> Any:
            samples = await _read_encoded(source)
            assert await _read_encoded(source) == samples
            return [values for _, values in samples]  # names may contain the URL of the store, which differs

        assert self._run(check) == self._run(check), "a second source of the same objects has other samples"

    def test_reading_begins_at_any_sample(self) -> None:
        async def check(source: Source, store: Store) -> None:
            samples = await _read_encoded(source)
            for start in {0, 1, len(samples) // 2, len(samples) - 1, len(samples)}:
                assert await _read_encoded(source, start) == samples[start:], f"reading from sample {start} on"

        self._run(check)

    def test_reading_may_end_early_and_leaves_nothing_behind(self) -> None:
        async def check(source: Source, store: Store) -> None:
            before = asyncio.all_tasks()
            for count in range(3):
                async with aclosing(source.read()) as samples:
                    for _ in range(count):
                        await anext(samples)
            assert asyncio.all_tasks() == before, "reads are still under way"

        self._run(check)

    def test_several_readings_do_not_disturb_each_other(self) -> None:
        async def check(source: Source, store: Store) -> None:
            samples = await _read_encoded(source)
            both = await asyncio.gather(_read_encoded(source), _read_encoded(source, 1))
            assert list(both) == [samples, samples[1:]]

        self._run(check)

    def test_an_object_that_was_replaced_or_deleted_is_an_error(self) -> None:
        async def replace(store: Store, key: str) -> None:
            await store.put(key, self.objects()[key] + b" ")

        async def delete(store: Store, key: str) -> None:
            await store.delete(key)

        for change in (replace, delete):
            for key in self.objects():

                async def check(
                    source: Source, store: Store, key: str = key, change: Callable[..., Awaitable[None]] = change
                ) -> None:
                    await change(store, key)
                    try:
                        await _read_encoded(source)
                    except (PackError, StoreError):
                        return
                    raise AssertionError(f"the source did not notice that {key} changed; read it with its listed tag")

                self._run(check)
