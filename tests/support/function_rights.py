"""What each deployed function may do to the buckets, and a store that lets it do no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.abc import Buffer, ObjectInfo, Store
from stoker.errors import NotFoundError, PermissionDeniedError
from stoker.testing import WatchedStore

__all__ = ["RIGHTS", "GuardedStore", "Rights"]

MANIFESTS = frozenset({"manifest.safetensors", "manifests/*"})
PACKED = frozenset({"data/*", "packs/*"})
EPOCHS = frozenset({"epochs/*"})
NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What a function may do; keys are patterns within the data set, whose only wildcard is an asterisk at the end.

    Attributes:
        reads: objects of the data set.
        writes: the same.
        deletes: the same.
        lists: whether it may list the data set; who may not is told of what is not there that it is forbidden.
        reads_raw: whether it may read and list raw objects.
    """

    reads: frozenset[str]
    writes: frozenset[str] = NOTHING
    deletes: frozenset[str] = NOTHING
    lists: bool = True
    reads_raw: bool = False


RIGHTS: Mapping[str, Rights] = {
    "pack": Rights(reads=PACKED, writes=PACKED, reads_raw=True),
    "ingest": Rights(reads=MANIFESTS | PACKED, writes=PACKED, deletes=frozenset({"packs/*"}), reads_raw=True),
    "commit": Rights(reads=MANIFESTS | PACKED, writes=MANIFESTS | PACKED, deletes=frozenset({"packs/*"})),
    "compact": Rights(reads=MANIFESTS | PACKED, writes=MANIFESTS | PACKED, deletes=frozenset({"packs/*"})),
    "shuffle": Rights(reads=MANIFESTS | EPOCHS | {"data/*"}, writes=EPOCHS, deletes=EPOCHS),
    "serve": Rights(reads=MANIFESTS | {"data/*"}, lists=False),
}
"""By the functions' names: a right more or less in a deployment file is a change to be made here, too."""


class GuardedStore(WatchedStore):
    """A data set, or raw objects, as one function sees them.

    Attributes:
        rights: of the function.
        is_raw: whether these are raw objects.
    """

    def __init__(self, store: Store, rights: Rights, is_raw: bool) -> None:
        super().__init__(store)
        self.rights, self.is_raw = rights, is_raw

    async def before(self, number: int, operation: str, key: str) -> None:
        """Refuse what is not allowed."""
        if self.is_raw:
            allowed = self.rights.reads_raw and operation in ("get", "head", "list")
        elif operation == "list":
            allowed = self.rights.lists
        else:
            patterns = {"put": self.rights.writes, "delete": self.rights.deletes}.get(operation, self.rights.reads)
            allowed = any(key.startswith(at[:-1]) if at.endswith("*") else key == at for at in patterns)
        if not allowed:
            raise PermissionDeniedError(f"{self.url}: {operation} {key} is not among the rights of this function")

    async def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_tag: str | None = None) -> ObjectInfo:
        """Write an object; S3 asks who replaces one by its ETag for the right to read it."""
        if if_tag is not None:
            await self.before(len(self.calls), "get", key)
        return await WatchedStore.put(self, key, data, if_absent=if_absent, if_tag=if_tag)

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Read an object, of which only those who may list are told that it is not there."""
        try:
            return await WatchedStore.get(self, key)
        except NotFoundError:
            if self.rights.lists:
                raise
            raise PermissionDeniedError(f"{self.url}: get {key}") from None
