"""One use of each operation of a store, for properties that all operations share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from stoker import StoreOptions, open_store
from stoker.abc import Store
from stoker.errors import StoreError
from support.stores import list_keys, read_range, run_check

__all__ = ["USES", "Use", "error_of", "every_use"]

Use = Callable[[Store], Awaitable[object]]
USES: dict[str, Use] = {
    "get": lambda store: store.get("x"),
    "range": lambda store: read_range(store, "x", 0, 4),
    "head": lambda store: store.head("x"),
    "list": list_keys,
    "put": lambda store: store.put("x", b"0123456789"),
    "delete": lambda store: store.delete("y"),
}
every_use = pytest.mark.parametrize("use", USES.values(), ids=USES.keys())


def error_of(url: str, options: StoreOptions, use: Use) -> StoreError:
    """Return the error of ``use``; it must fail."""
    caught: list[StoreError] = []

    async def check(store: Store) -> None:
        with pytest.raises(StoreError) as info:
            await use(store)
        caught.append(info.value)

    run_check(open_store(url, options=options), check)
    return caught[0]
