"""Removing a data set: every object that stoker made for it, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from stoker._base.retry import RetryingReader, RetryingStore
from stoker._base.task_group import for_each
from stoker._format import versions
from stoker._format.manifest import POINTER_KEY, Manifest, object_key
from stoker._maintenance.inspection import list_super_samples, open_super_sample
from stoker._order.materialized_layout import EPOCHS_FOLDER
from stoker._pack.catalog import DIGEST_KEY
from stoker._pack.record import is_record_key, list_records
from stoker.abc import ObjectInfo, Store
from stoker.errors import ChecksumError, FormatError, NotFoundError

__all__ = ["Removal", "plan_removal", "remove"]

_DELETES_AT_ONCE = 16
_EPOCH_KEY = re.compile(rf"{EPOCHS_FOLDER}[0-9a-f]{{16}}/[0-9]{{8}}/.+", re.ASCII)
_VERSION_KEY = re.compile(r"manifests/[0-9]{8,9}\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What removing a data set deletes.

    Attributes:
        manifest: the newest version, None if none can be read.
        objects: to be deleted, in this order: manifests first, so that nothing that is left names what is gone, and
            pack records last, so that a removal that was cut off is still one of a data set when it is run again.
        others: objects in the data set's folders that are not its own; they stay.
    """

    manifest: Manifest | None
    objects: tuple[ObjectInfo, ...]
    others: tuple[ObjectInfo, ...]

    @property
    def size_bytes(self) -> int:
        """How many bytes the objects have."""
        return sum(info.size_bytes for info in self.objects)


async def plan_removal(store: Store) -> Removal:
    """Return what there is of a data set; nothing is deleted.

    Raises:
        NotFoundError: there is no data set, nor anything that a pack of one left.
        BucketNotFoundError: the bucket, or folder, does not exist.
    """
    reader = RetryingReader(store)
    listed = {
        folder: [info async for info in reader.list(folder)] for folder in ("manifests/", EPOCHS_FOLDER, "packs/")
    }
    data = [info async for info in reader.list("data/")]
    super_samples = await list_super_samples(reader)
    own = {info.key for info in super_samples.values()}
    manifest = None
    with suppress(FormatError, ChecksumError, NotFoundError):
        manifest = await versions.newest_manifest(reader)
    pointer = []
    with suppress(NotFoundError):
        pointer = [await reader.head(POINTER_KEY)]
    is_own: list[tuple[list[ObjectInfo], Callable[[str], object]]] = [
        (pointer, lambda _: True),
        (listed["manifests/"], _VERSION_KEY.fullmatch),
        (listed[EPOCHS_FOLDER], _EPOCH_KEY.fullmatch),
        (data, own.__contains__),
        (listed["packs/"], lambda key: is_record_key(key) or key == DIGEST_KEY),
    ]
    if manifest is None and not await _has_pack(reader, [object_key(*place) for place in sorted(super_samples)[:1]]):
        raise NotFoundError(f"there is no data set at {store.url}; nothing was deleted")
    return Removal(
        manifest=manifest,
        objects=tuple(info for infos, test in is_own for info in infos if test(info.key)),
        others=tuple(info for infos, test in is_own for info in infos if not test(info.key)),
    )


async def _has_pack(reader: RetryingReader[Store], keys: list[str]) -> bool:
    """Return whether a pack left a record that can be read, or one of its super-samples."""
    if any(logged.record is not None for logged in await list_records(reader)):
        return True
    for key in keys:
        with suppress(NotFoundError, FormatError, ChecksumError):
            await open_super_sample(reader, key)
            return True
    return False


async def remove(store: Store, removal: Removal, on_deleted: Callable[[ObjectInfo], object] | None = None) -> None:
    """Delete the objects, those of one kind side by side and one kind after the other.

    Training that reads the data set fails with its next request; a pack that runs fails with its next record.

    Args:
        store: where the data set is.
        removal: what to delete.
        on_deleted: called with each object when it is gone.
    """
    retrying = RetryingStore(store)

    async def delete(info: ObjectInfo) -> None:
        await retrying.delete(info.key)
        if on_deleted is not None:
            on_deleted(info)

    kinds: dict[str, list[ObjectInfo]] = {}
    for info in removal.objects:
        kinds.setdefault(info.key.partition("/")[0], []).append(info)
    for infos in kinds.values():
        await for_each(infos, delete, concurrency=_DELETES_AT_ONCE)
