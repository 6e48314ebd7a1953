"""A store as a plug-in: objects in an SQLite database, such as ``sqlite:///data/set.db`` or a folder of it.

A package that has this module declares the URL scheme in its pyproject.toml, and ``stoker pack`` can write there::

    [project.entry-points."stoker.stores"]
    sqlite = "sqlite_store:SqliteStore"
"""

import sqlite3
import uuid
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

from stoker.abc import Buffer, ObjectInfo
from stoker.errors import NotFoundError, ObjectChangedError, PreconditionFailedError, RangeBeyondEndError, StoreError


class SqliteStore:
    """Objects are rows, and every write draws a new tag. The event loop waits while SQLite works."""

    def __init__(self, url: str) -> None:
        self.url, self.prices = url, "file"  # prices: files of this machine cost nothing
        path, _, folder = url.removeprefix("sqlite://").partition(".db")
        self._path, self._folder = f"{path}.db", f"{folder}/"
        self._run("create table if not exists objects (key text primary key, data blob, tag text)")

    def _run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            with closing(sqlite3.connect(self._path, timeout=60)) as database, database:  # commits at its end
                return database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"{self.url}: {error}; check the path and the disk") from error

    async def head(self, key: str) -> ObjectInfo:
        for size_bytes, tag in self._run("select length(data), tag from objects where key = ?", self._folder + key):
            return ObjectInfo(key=key, size_bytes=size_bytes, tag=tag)
        raise NotFoundError(f"{self.url}/{key} does not exist")

    async def get_range(
        self, key: str, start: int, end: int, *, into: memoryview, tag: str | None = None, **_: object
    ) -> ObjectInfo:
        info = await self.head(key)
        if end > info.size_bytes:
            raise RangeBeyondEndError(f"{self.url}/{key} has {info.size_bytes} bytes, fewer than {end}")
        statement = "select substr(data, ?, ?) from objects where key = ? and tag = ?"
        rows = self._run(statement, start + 1, end - start, self._folder + key, tag or info.tag)
        if not rows:
            raise ObjectChangedError(f"{self.url}/{key} no longer has the tag {tag or info.tag}")
        into[:] = rows[0][0] or b""
        return info

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        for full_key, size_bytes, tag in self._run("select key, length(data), tag from objects order by key"):
            key = full_key.removeprefix(self._folder)
            if full_key.startswith(self._folder + prefix) and key.encode() > start_after.encode():
                yield ObjectInfo(key=key, size_bytes=size_bytes, tag=tag)

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        info = ObjectInfo(key=key, size_bytes=memoryview(data).nbytes, tag=uuid.uuid4().hex)
        row = bytes(data), info.tag, self._folder + key
        if if_tag is not None:
            rows = self._run("update objects set data = ?, tag = ? where key = ? and tag = ? returning 1", *row, if_tag)
        elif if_absent:
            rows = self._run("insert or ignore into objects (data, tag, key) values (?, ?, ?) returning 1", *row)
        else:
            rows = self._run("replace into objects (data, tag, key) values (?, ?, ?) returning 1", *row)
        if not rows:
            raise PreconditionFailedError(f"{self.url}/{key} was written by another process")
        return info

    async def delete(self, key: str) -> None:
        self._run("delete from objects where key = ?", self._folder + key)
