"""What every store does, run against every store."""

from __future__ import annotations

from stoker.abc import Store
from stoker.testing import StoreLocation, StoreTests


class TestStores(StoreTests):
    """The suite that plug-ins run, over the places of the fixture ``place``."""


def test_a_bucket_tells_that_an_answer_has_begun_and_what_is_near_does_not(place: StoreLocation) -> None:
    async def check(store: Store) -> None:
        await store.put("x", b"0123")
        told: list[str] = []
        await store.get_range("x", 0, 4, into=memoryview(bytearray(4)), begun=lambda: told.append("begun"))
        assert told == ([] if store.url.startswith(("memory:", "file:", "/")) else ["begun"])

    place.run(check)
