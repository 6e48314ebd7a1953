"""One file, one sample: folders of files, and folders of images with a sub-folder for each class."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from stoker.errors import PackError
from stoker.schema import Array, Bytes, Schema, Text
from stoker.sources.listing import Listing, fingerprint_of
from stoker.sources.protocol import Sample
from stoker.sources.reading import in_order, read
from stoker.store.protocol import ObjectInfo
from stoker.supersample import MAX_SUPER_SAMPLE_BYTES

__all__ = ["IMAGE_SUFFIXES", "FolderSource", "is_image", "open_files", "open_image_folder"]

IMAGE_SUFFIXES = (
    ".avif", ".bmp", ".gif", ".heic", ".jp2", ".jpeg", ".jpg", ".jxl", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip


def is_image(key: str) -> bool:
    """Return whether the key ends like that of an image."""
    return key.lower().endswith(IMAGE_SUFFIXES)


class FolderSource:
    """Files as samples, in ascending UTF-8 order of their path below the folder.

    Attributes:
        kind: ``files`` or ``image-folder``.
        schema: the columns of every sample.
        fingerprint: of kind, schema and files.
        samples: how many files there are.
        size_bytes: of all files.
        notes: which files were left out.
    """

    def __init__(
        self, kind: str, schema: Schema, listing: Listing, kept: Sequence[ObjectInfo], to_sample: _ToSample
    ) -> None:
        for item in kept:
            if item.size_bytes > MAX_SUPER_SAMPLE_BYTES:
                raise PackError(
                    f"{listing.url}/{item.key} has {item.size_bytes} bytes; a sample has to fit a super-sample of at "
                    f"most {MAX_SUPER_SAMPLE_BYTES}: split the file or move it away"
                )
        self.kind, self.schema, self.samples = kind, schema, len(kept)
        self.fingerprint = fingerprint_of(kind, schema, kept)
        self.size_bytes = sum(item.size_bytes for item in kept)
        self.notes = _left_out(listing, kept)
        self._listing, self._kept, self._to_sample = listing, kept, to_sample

    async def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        """Yield the files from number ``start`` on."""
        store, rest = self._listing.store, self._kept[start:]
        contents = in_order((item.size_bytes, lambda item=item: read(store, item)) for item in rest)  # type: ignore[misc]
        try:
            for item in rest:
                yield item.key, self._to_sample(item.key, await anext(contents))
        finally:
            await contents.aclose()

    async def close(self) -> None:
        """Close the store."""
        await self._listing.store.close()


_ToSample = Callable[[str, bytearray], dict[str, Any]]


def open_files(listing: Listing) -> FolderSource:
    """Return every file as a sample with ``data`` and ``path``."""

    def to_sample(key: str, data: bytearray) -> dict[str, Any]:
        return {"data": data, "path": key}

    return FolderSource("files", Schema({"data": Bytes(), "path": Text()}), listing, listing.objects, to_sample)


def open_image_folder(listing: Listing) -> FolderSource:
    """Return every image below a sub-folder as a sample with ``image`` (its bytes), ``label`` and ``path``.

    The label is the number of the top sub-folder among their sorted names, which stand in the schema.

    Raises:
        PackError: there is no image in a sub-folder.
    """
    kept = [item for item in listing.objects if "/" in item.key and is_image(item.key)]
    if not kept:
        raise PackError(
            f"{listing.url} has no image in a sub-folder; put the images of each class into a folder of its own, "
            "or pack them as they are with --kind files"
        )
    classes = sorted({_class_of(item.key) for item in kept})
    labels = {name: number for number, name in enumerate(classes)}
    schema = Schema({"image": Bytes(), "label": Array("int64", classes=tuple(classes)), "path": Text()})

    def to_sample(key: str, data: bytearray) -> dict[str, Any]:
        return {"image": data, "label": labels[_class_of(key)], "path": key}

    return FolderSource("image-folder", schema, listing, kept, to_sample)


def _class_of(key: str) -> str:
    return key.partition("/")[0]


def _left_out(listing: Listing, kept: Sequence[ObjectInfo]) -> tuple[str, ...]:
    count = len(listing.objects) - len(kept)
    if not count:
        return ()
    keys = {item.key for item in kept}
    first = next(item.key for item in listing.objects if item.key not in keys)
    return (f"{count} of {len(listing.objects)} files were left out: no image in a sub-folder (first: {first})",)
