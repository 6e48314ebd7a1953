"""The permissions of each deployed function on the buckets, and a store that enforces them."""

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
    """Permissions of a function; keys are patterns within the data set, with an asterisk at the end as only wildcard.

    Attributes:
        reads: patterns of the objects of the data set that it may read.
        writes: patterns of those that it may write.
        deletes: patterns of those that it may delete.
        lists: whether it may list the data set; without it, reading a missing object is forbidden, too.
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
"""Function name → its permissions, which those in the deployment files must equal."""


class GuardedStore(WatchedStore):
    """A data set, or raw objects, with the permissions of one function.

    Attributes:
        rights: permissions of the function.
        is_raw: whether these are raw objects.
    """

    def __init__(self, store: Store, rights: Rights, is_raw: bool) -> None:
        super().__init__(store)
        self.rights, self.is_raw = rights, is_raw

    async def before(self, number: int, operation: str, key: str) -> None:
        """Refuse operations that are not allowed."""
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
        """Write an object; to replace one by its ETag, S3 requires the permission to read it."""
        if if_tag is not None:
            await self.before(len(self.calls), "get", key)
        return await WatchedStore.put(self, key, data, if_absent=if_absent, if_tag=if_tag)

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Read an object; a missing one is not found with the permission to list, and forbidden without."""
        try:
            return await WatchedStore.get(self, key)
        except NotFoundError:
            if self.rights.lists:
                raise
            raise PermissionDeniedError(f"{self.url}: get {key}") from None
