"""Commits that race, die and lose answers: no version is lost, none is doubled, and the pointer only moves forward."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import RetryingStore
from stoker._format import versions
from stoker._format.manifest import POINTER_KEY, Manifest, ManifestRows, PackRun
from stoker._format.supersample import SuperSampleRecord
from stoker.abc import Store
from stoker.errors import ServerError, StoreError
from stoker.testing import WatchedStore
from support.packing import NO_WAIT, SCHEMA, fresh_store


def with_run(base: Manifest | None, run: int) -> Manifest:
    """Return the successor of ``base`` with a run of one super-sample."""
    packed = SuperSampleRecord(ordinal=0, size_bytes=2000, samples=2, head_bytes=900, head_crc32c=run, crc32c=run)
    rows, pack_run = ManifestRows.of([packed]), PackRun(f"{run:016x}", 0, 1)
    if base is None:
        return Manifest(dataset="d", version=1, schema=SCHEMA, rows=rows, runs=(pack_run,))
    return base.append_runs(rows, pack_run)


_DEAD, _LOST = "the process is dead", "try again"
_ENDS = (_DEAD, _LOST)
"""How a writer may end early: it dies, or one operation is lost more often in a row than it is tried."""


class _Weather(WatchedStore):
    """Lets others run, loses requests and answers, and dies after ``lives`` operations."""

    def __init__(self, store: Store, seed: int, lives: int) -> None:
        super().__init__(store)
        self.random = random.Random(seed)
        self.lives = lives

    async def before(self, number: int, operation: str, key: str) -> None:
        for _ in range(self.random.randrange(6)):
            await asyncio.sleep(0)
        if number >= self.lives:
            raise StoreError(_DEAD)
        if self.random.random() < 0.1:
            raise ServerError(_LOST)

    after = before


class _Witness(WatchedStore):
    """Notes which versions the pointer holds, one after the other."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.pointer: list[int] = []

    async def after(self, number: int, operation: str, key: str) -> None:
        if operation == "put" and key == POINTER_KEY:
            data, _ = await self.store.get(key)
            self.pointer.append(Manifest.from_bytes(data).version)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 80)), min_size=1, max_size=5), st.integers(0, 2**32))
def test_every_commit_that_returned_is_in_the_newest_version_exactly_once(
    writers: list[tuple[int, int]], seed: int
) -> None:
    async def main() -> None:
        shared = _Witness(fresh_store())
        returned: dict[int, int] = {}  # run → the version that its commit returned

        async def write(writer: int, commits: int, lives: int) -> None:
            store = RetryingStore(_Weather(shared, seed + writer, lives), NO_WAIT)
            for commit in range(commits):
                run = 100 * writer + commit
                manifest = await versions.commit(store, lambda base, run=run: with_run(base, run))  # type: ignore[misc]
                returned[run] = manifest.version

        tasks = [write(writer, *plan) for writer, plan in enumerate(writers)]
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or str(outcome) in _ENDS
        if await versions.find_newest_manifest(shared) is None:
            assert not returned
        else:
            await check_history(shared, returned)

    asyncio.run(main())


async def check_history(store: _Witness, returned: dict[int, int]) -> None:
    before = await versions.read_manifest(store)
    newest = await versions.find_newest_manifest(store)
    assert newest is not None
    runs = [int(run.run, 16) for run in newest.runs]
    assert len(runs) == len(set(runs)) == newest.version
    assert all(runs[version - 1] == run for run, version in returned.items())
    assert before.version >= max(returned.values(), default=0), "a commit that returned was not visible to readers"
    for version in range(1, newest.version + 1):
        assert (await versions.read_manifest(store, version)).runs == newest.runs[:version]
    assert store.pointer == sorted(store.pointer)
    # The next commit, even one of nothing, moves a pointer that stayed behind.
    await versions.commit(store, lambda base: base or with_run(None, 0))
    assert (await versions.read_manifest(store)).runs == newest.runs
