"""Objects and sources by URL, in any store."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from stoker import open_store
from stoker._sources import ObjectSource, open_source
from stoker.abc import Store

T = TypeVar("T")


def put_all(url: str, objects: Mapping[str, bytes]) -> None:
    """Write objects below a URL."""

    async def write(store: Store) -> None:
        for key, data in objects.items():
            await store.put(key, data)

    with_store(url, write)


def with_store(url: str, work: Callable[[Store], Any]) -> Any:
    """Return the result of ``work`` with the store at a URL."""

    async def run() -> Any:
        store = open_store(url)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def with_source(url: str, work: Callable[[ObjectSource], Any], kind: str | None = None, **options: Any) -> Any:
    """Return the result of ``work`` with the source at a URL."""

    async def run() -> Any:
        source = await open_source(url, kind, **options)
        try:
            return await work(source)
        finally:
            await source.close()

    return asyncio.run(run())


def read_all(url: str, kind: str | None = None, start: int = 0, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the samples of a source, each checked against its schema."""

    async def read(source: ObjectSource) -> list[tuple[str, dict[str, Any]]]:
        async with aclosing(source.read(start)) as samples:
            found = [item async for item in samples]
        for where, sample in found:
            source.schema.encode(sample, where)
        return found

    samples: list[tuple[str, dict[str, Any]]] = with_source(url, read, kind, **options)
    return samples


def look(url: str, kind: str | None = None, **options: Any) -> ObjectSource:
    """Return a closed source, whose attributes can be read."""

    async def same(source: ObjectSource) -> ObjectSource:
        return source

    source: ObjectSource = with_source(url, same, kind, **options)
    return source


def tar_of(members: Iterable[tuple[str, bytes]], *, tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar with the given files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tar_format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()
