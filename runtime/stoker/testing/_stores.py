"""The contract of stores, as tests."""

from __future__ import annotations

import asyncio
import os
import warnings

import pytest

from stoker._base.task_group import end_tasks
from stoker._format.manifest import POINTER_KEY
from stoker.abc import ObjectInfo, Store
from stoker.errors import (
    BucketNotFoundError,
    ConfigError,
    NotFoundError,
    ObjectChangedError,
    PreconditionFailedError,
    TruncatedError,
)
from stoker.testing._store_places import Deviation, StoreLocation, list_keys, read_range

_CONTENT = bytes(range(256)) * 4096  # 1 MiB
_ODD_KEYS = (
    "a b",
    "a+b",
    "a%20b",
    "a%2Fb",
    "a=b&c=d",
    "q?x#y",
    "tilde~star*quote'(paren)!",
    "ünïcode/日本語",
    "emoji-🔥",
    "dots.../..x",
    'back\\slash"quote',
    "colon:semi;comma,at@dollar$",
)


class StoreTests:
    """The tests of a :class:`~stoker.abc.Store`; a subclass says in the fixture ``place`` where the store is.

    Example:
        >>> import pytest
        >>> from stoker.testing import StoreLocation, StoreTests
        >>> class TestMyStore(StoreTests):
        ...     @pytest.fixture
        ...     def place(self, tmp_path):
        ...         return StoreLocation(url=f"mine://{tmp_path}/bucket", missing_url=f"mine://{tmp_path}/missing")
    """

    @pytest.fixture
    def conditional(self, place: StoreLocation) -> StoreLocation:
        """The place, if its store performs conditional writes."""
        if Deviation.IGNORES_PRECONDITIONS in place.deviations:
            pytest.skip(f"{place.name} ignores preconditions")
        return place

    # reading

    def test_get_returns_what_put_was_given_and_the_tag_that_it_returned(self, place: StoreLocation) -> None:
        async def check(store: Store) -> None:
            written = await store.put("a/b", _CONTENT)
            assert written == ObjectInfo(key="a/b", size_bytes=len(_CONTENT), tag=written.tag)
            assert written.tag
            assert await store.get("a/b") == (_CONTENT, written)

        place.run(check)

    def test_head_and_list_agree_with_put(self, place: StoreLocation) -> None:
        async def check(store: Store) -> None:
            written = await store.put("a/b", b"12345")
            assert await store.head("a/b") == written
            assert [info async for info in store.list()] == [written]

        place.run(check)

    def test_an_empty_object_can_be_written_and_read_in_every_way(self, place: StoreLocation) -> None:
        if Deviation.REFUSES_EMPTY_OBJECTS in place.deviations:
            pytest.skip(f"{place.name} drops the connection of an empty upload")

        async def check(store: Store) -> None:
            written = await store.put("empty", b"")
            assert await store.get("empty") == (b"", written)
            assert await store.head("empty") == written
            assert await read_range(store, "empty", 0, 0, written.tag) == b""

        place.run(check)

    @pytest.mark.parametrize(
        ("start", "end"),
        [
            (0, 1),
            (0, len(_CONTENT)),
            (5, 5),
            (len(_CONTENT) - 1, len(_CONTENT)),
            (1000, 70_000),
            (len(_CONTENT), len(_CONTENT)),
        ],
    )
    def test_get_range_fills_exactly_the_memory_it_was_given(self, place: StoreLocation, start: int, end: int) -> None:
        async def check(store: Store) -> None:
            written = await store.put("x", _CONTENT)
            surrounded = bytearray(b"\xee" * (end - start + 16))
            into = memoryview(surrounded)[8 : 8 + end - start]
            assert await store.get_range("x", start, end, into=into, tag=written.tag) == written
            assert surrounded == b"\xee" * 8 + _CONTENT[start:end] + b"\xee" * 8

        place.run(check)

    def test_the_beginning_of_an_answer_is_told_once_at_most_and_never_that_of_a_refusal(
        self, place: StoreLocation
    ) -> None:
        async def check(store: Store) -> None:
            await store.put("x", _CONTENT)
            calls: list[str] = []
            into = memoryview(bytearray(len(_CONTENT)))
            await store.get_range("x", 0, len(_CONTENT), into=into, begun=lambda: calls.append("begun"))
            assert calls in ([], ["begun"])
            calls.clear()
            with pytest.raises(NotFoundError):
                await store.get_range("y", 0, 1, into=into[:1], begun=lambda: calls.append("begun"))
            assert calls == []

        place.run(check)

    @pytest.mark.parametrize(("start", "end"), [(0, 11), (9, 11), (10, 11), (10_000, 10_001), (11, 11)])
    def test_a_range_beyond_the_end_is_truncated(self, place: StoreLocation, start: int, end: int) -> None:
        async def check(store: Store) -> None:
            await store.put("x", b"0123456789")
            with pytest.raises(TruncatedError, match="x"):
                await read_range(store, "x", start, end)

        place.run(check)

    def test_a_read_pinned_to_a_tag_refuses_what_was_written_since(self, conditional: StoreLocation) -> None:
        async def check(store: Store) -> None:
            old = await store.put("x", b"old")
            new = await store.put("x", b"new")
            assert old.tag != new.tag
            for end in (3, 0):
                with pytest.raises(ObjectChangedError, match="x"):
                    await read_range(store, "x", 0, end, old.tag)
            with pytest.raises(ObjectChangedError):
                await read_range(store, "x", 0, 3, "another-store's-tag")
            assert await read_range(store, "x", 0, 3, new.tag) == b"new"

        conditional.run(check)

    def test_half_a_surrogate_pair_is_refused_in_keys_and_prefixes(self, place: StoreLocation) -> None:
        async def check(store: Store) -> None:
            await store.put("x", b"1")
            for call in (store.get("\ud800"), store.put("\udfff", b""), list_keys(store, "a\ud800")):
                with pytest.raises(ConfigError, match="Unicode"):
                    await call
            with pytest.raises(ConfigError, match="Unicode"):
                await list_keys(store, start_after="\ud800")

        place.run(check)

    def test_a_missing_object_is_not_found_and_its_bucket_is(self, place: StoreLocation) -> None:
        async def check(store: Store) -> None:
            await store.put("there", b"1")
            for read in (store.get("missing"), store.head("missing"), read_range(store, "missing", 0, 1)):
                with pytest.raises(NotFoundError, match="missing") as caught:
                    await read
                assert not isinstance(caught.value, BucketNotFoundError)

        place.run(check)

    def test_a_missing_bucket_is_told_from_a_missing_object(self, place: StoreLocation) -> None:
        if not place.missing_url:
            pytest.skip(f"{place.name} has no buckets that do not exist")
        keys = [POINTER_KEY] if Deviation.LEAVES_404_UNEXPLAINED in place.deviations else [POINTER_KEY, "x"]

        async def check(store: Store) -> None:
            for key in keys:
                for read in (store.get(key), store.head(key), read_range(store, key, 0, 1), list_keys(store)):
                    with pytest.raises(BucketNotFoundError):
                        await read

        place.run_without_bucket(check)

    def test_many_reads_at_once_do_not_mix_their_bytes(self, place: StoreLocation) -> None:
        async def check(store: Store) -> None:
            await store.put("x", _CONTENT)
            count = 5 if Deviation.SLOW in place.deviations else 40
            ranges = [(start, start + 4097) for start in range(0, count * 1000, 1000)]
            parts = await asyncio.gather(*(read_range(store, "x", *each) for each in ranges))
            assert parts == [_CONTENT[start:end] for start, end in ranges]

        place.run(check)

    # listing

    def test_list_yields_keys_in_utf8_order_below_a_prefix_and_after_a_key(self, place: StoreLocation) -> None:
        keys = ["A", "a-", "a.txt", "a/0", "a/b/c", "a/b0", "a0", "b", "ü", "\uffee", "\U0001f525"]

        async def check(store: Store) -> None:
            for key in reversed(keys):
                await store.put(key, b"x")
            assert await list_keys(store) == keys
            assert await list_keys(store, "a/") == ["a/0", "a/b/c", "a/b0"]
            assert await list_keys(store, "a/b") == ["a/b/c", "a/b0"]
            assert await list_keys(store, "nothing") == []
            for key in ("A", "a/b", "a/b/c", "a/zzz", "b", "\U0001f525"):
                assert await list_keys(store, start_after=key) == [k for k in keys if k.encode() > key.encode()]
            assert await list_keys(store, "a/", start_after="a/0") == ["a/b/c", "a/b0"]

        place.run(check)

    def test_list_goes_on_beyond_one_page(self, place: StoreLocation) -> None:
        if Deviation.SLOW in place.deviations:
            pytest.skip(f"{place.name} takes seconds to store 2,005 objects")
        keys = [f"{number:05}" for number in range(2005)]

        async def put_some(store: Store, some: list[str]) -> None:
            for key in some:
                await store.put(key, b"x")

        async def check(store: Store) -> None:
            await asyncio.gather(*(put_some(store, keys[lane::8]) for lane in range(8)))
            assert await list_keys(store) == keys
            assert await list_keys(store, start_after=keys[999]) == keys[1000:]

        place.run(check)

    def test_a_store_sees_nothing_outside_its_prefix(self, place: StoreLocation) -> None:
        async def check(store: Store) -> None:
            await store.put("x", b"1")
            await store.put("y/x", b"2")
            inner = place.open(f"{place.url}/y")
            try:
                assert await list_keys(inner) == ["x"]
                assert (await inner.get("x"))[0] == b"2"
            finally:
                await inner.close()

        place.run(check)

    def test_odd_keys_are_written_listed_read_and_deleted(self, place: StoreLocation) -> None:
        async def check(store: Store) -> None:
            cuts = Deviation.CUTS_KEYS_AT_SEMICOLONS in place.deviations
            keys = sorted((key for key in _ODD_KEYS if not (cuts and ";" in key)), key=str.encode)
            written = {key: await store.put(key, key.encode()) for key in keys}
            assert [info async for info in store.list()] == list(written.values())
            for key, info in written.items():
                assert await store.get(key) == (key.encode(), info)
                assert await read_range(store, key, 1, 3, info.tag) == key.encode()[1:3]
                assert await store.head(key) == info
                await store.delete(key)
            assert await list_keys(store) == []

        place.run(check)

    # writing

    def test_put_replaces_and_changes_the_tag(self, place: StoreLocation) -> None:
        async def check(store: Store) -> None:
            first, second = await store.put("x", b"one"), await store.put("x", b"two!")
            assert first.tag != second.tag
            assert await store.get("x") == (b"two!", second)

        place.run(check)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_put_takes_any_buffer_and_keeps_none_of_it(self, place: StoreLocation, kind: type) -> None:
        async def check(store: Store) -> None:
            source = bytearray(b"0123456789")
            await store.put("x", kind(source))
            source[:] = b"overwritten"[:10]
            assert (await store.get("x"))[0] == b"0123456789"

        place.run(check)

    def test_put_if_absent_writes_once(self, conditional: StoreLocation) -> None:
        async def check(store: Store) -> None:
            first = await store.put("x", b"first", if_absent=True)
            with pytest.raises(PreconditionFailedError, match="x"):
                await store.put("x", b"second", if_absent=True)
            assert await store.get("x") == (b"first", first)

        conditional.run(check)

    def test_put_if_tag_replaces_only_what_was_read(self, conditional: StoreLocation) -> None:
        async def check(store: Store) -> None:
            first = await store.put("x", b"first")
            second = await store.put("x", b"second", if_tag=first.tag)
            for stale in (first.tag, "never-a-tag"):
                with pytest.raises(PreconditionFailedError, match="x"):
                    await store.put("x", b"third", if_tag=stale)
            with pytest.raises(PreconditionFailedError, match="missing"):
                await store.put("missing", b"third", if_tag=first.tag)
            assert await store.get("x") == (b"second", second)
            assert await list_keys(store) == ["x"]

        conditional.run(check)

    @pytest.mark.parametrize("absent", [True, False])
    def test_of_many_conditional_writers_exactly_one_wins(self, conditional: StoreLocation, absent: bool) -> None:
        async def check(store: Store) -> None:
            tag = None if absent else (await store.put("x", b"start")).tag
            bodies = [b"writer %d" % number for number in range(8)]
            outcomes = await asyncio.gather(
                *(store.put("x", body, if_absent=absent, if_tag=tag) for body in bodies), return_exceptions=True
            )
            won = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, ObjectInfo)]
            lost = [outcome for outcome in outcomes if isinstance(outcome, PreconditionFailedError)]
            assert len(won) == 1
            assert len(lost) == 7
            assert await store.get("x") == (bodies[won[0]], outcomes[won[0]])

        if Deviation.WRITES_WITHOUT_LOCK in conditional.deviations:
            pytest.skip(f"{conditional.name} checks and writes without a lock")
        conditional.run(check)

    def test_delete_deletes_and_forgives_what_is_not_there(self, place: StoreLocation) -> None:
        async def check(store: Store) -> None:
            await store.put("x", b"1")
            await store.put("y", b"1")
            await store.delete("x")
            await store.delete("x")
            await store.delete("never/there")
            with pytest.raises(NotFoundError):
                await store.get("x")
            assert await list_keys(store) == ["y"]

        place.run(check)

    # arguments

    @pytest.mark.parametrize("key", ["", "/absolute", "nul\0", "lone-\ud800", "k" * 1025])
    def test_a_key_that_no_bucket_can_hold_is_refused(self, place: StoreLocation, key: str) -> None:
        async def check(store: Store) -> None:
            for call in (store.get(key), store.head(key), store.put(key, b""), store.delete(key)):
                with pytest.raises(ConfigError):
                    await call

        place.run(check)

    @pytest.mark.parametrize(("start", "end", "room"), [(-1, 1, 2), (2, 1, 0), (0, 4, 3), (0, 4, 5)])
    def test_a_range_that_does_not_fit_its_memory_is_refused(
        self, place: StoreLocation, start: int, end: int, room: int
    ) -> None:
        async def check(store: Store) -> None:
            with pytest.raises(ConfigError):
                await store.get_range("x", start, end, into=memoryview(bytearray(room)))
            with pytest.raises(ConfigError):
                await store.get_range("x", 0, 4, into=memoryview(b"read"))

        place.run(check)

    def test_contradicting_conditions_are_refused(self, place: StoreLocation) -> None:
        async def check(store: Store) -> None:
            with pytest.raises(ConfigError):
                await store.put("x", b"", if_absent=True, if_tag="1")

        place.run(check)

    # life

    def test_a_cancelled_read_writes_nothing_more_and_harms_no_later_one(self, place: StoreLocation) -> None:
        body = os.urandom(1 << 20) * 8

        async def check(store: Store) -> None:
            await store.put("x", body)
            for patience in (0, 1, 5, 25):
                into = bytearray(len(body))
                read = asyncio.ensure_future(store.get_range("x", 0, len(body), into=memoryview(into)))
                for _ in range(patience):
                    await asyncio.sleep(0)
                await end_tasks([read])
                seen = bytes(into)
                await asyncio.sleep(0.02)
                assert into == seen
                assert await read_range(store, "x", 0, len(body)) == body

        place.run(check)

    def test_a_cancelled_write_is_whole_or_absent(self, place: StoreLocation) -> None:
        old, new = b"o" * (1 << 20), b"n" * (1 << 20)

        async def check(store: Store) -> None:
            await store.put("x", old)
            for patience in (0, 1, 5, 25):
                write = asyncio.ensure_future(store.put("x", new))
                for _ in range(patience):
                    await asyncio.sleep(0)
                await end_tasks([write])
                assert (await store.get("x"))[0] in (old, new)
            assert await list_keys(store) == ["x"]

        place.run(check)

    def test_a_closed_store_can_be_used_again_and_closed_again(self, place: StoreLocation) -> None:
        async def check(store: Store) -> None:
            await store.close()
            written = await store.put("x", b"1")
            await store.close()
            await store.close()
            assert await store.get("x") == (b"1", written)

        place.run(check)

    def test_a_store_serves_one_event_loop_after_another(self, place: StoreLocation) -> None:
        store = place.open()

        async def first() -> ObjectInfo:
            info = await store.put("x", b"1")
            await store.close()
            return info

        async def second() -> tuple[bytes, ObjectInfo]:
            result = await store.get("x")
            await store.close()
            return result

        written = asyncio.run(first())
        assert asyncio.run(second()) == (b"1", written)

    def test_a_forked_child_reads_and_leaves_its_parents_connections_alone(self, place: StoreLocation) -> None:
        store = place.open()

        async def read() -> bytes:
            return await read_range(store, "x", 0, 4)

        with asyncio.Runner() as runner:
            runner.run(store.put("x", b"0123"))
            assert runner.run(read()) == b"0123"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # the servers under test run in our threads
                child = os.fork()
            if child == 0:
                status = 1
                try:
                    status = int(asyncio.run(read()) != b"0123")
                finally:
                    os._exit(status)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            assert runner.run(asyncio.wait_for(read(), 60)) == b"0123"
            runner.run(store.close())
