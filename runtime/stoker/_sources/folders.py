"""Folders as sources: each file is a sample; image folders have a sub-folder for each class."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from stoker._base.sizes import format_count
from stoker._base.task_group import run_in_order
from stoker._format.schema import Array, Bytes, Schema, Text
from stoker._sources.listing import ObjectSource, check_fits, read_object
from stoker.abc import ObjectInfo, Sample, SourceListing
from stoker.errors import ConfigError, PackError

IMAGE_SUFFIXES = (
    ".avif", ".bmp", ".gif", ".heic", ".jp2", ".jpeg", ".jpg", ".jxl", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip


_SPLIT_NAMES = frozenset(
    ["dev", "eval", "holdout", "test", "testing", "train", "training", "trainval", "val", "valid", "validation"]
)
_MAX_SHOWN_FOLDERS = 5


def is_image(key: str) -> bool:
    """Return whether the key has the suffix of an image."""
    return key.lower().endswith(IMAGE_SUFFIXES)


def is_sample_file(kind: str, key: str) -> bool:
    """Return whether a file is a sample of a folder of this kind (``files`` or ``image-folder``)."""
    return kind == "files" or ("/" in key and is_image(key))


class FolderSource(ObjectSource):
    """Files as samples, in ascending UTF-8 order of their path below the folder.

    Args:
        kind: ``files``, whose samples have ``data`` and ``path``, or ``image-folder``, whose samples have ``image``
            (the file's bytes), ``label`` (the index of the top sub-folder among the schema's classes) and ``path``.
        schema: columns of every sample.
        listing: listing of the folder.
        objects: files that are samples.

    Attributes:
        follows_links: whether links out of a local folder are followed.
    """

    def __init__(self, kind: str, schema: Schema, listing: SourceListing, objects: Sequence[ObjectInfo]) -> None:
        for item in objects:
            check_fits(f"{listing.url}/{item.key} has", item.size_bytes, "split the file or move it away")
        super().__init__(kind, schema, listing, objects)
        self.samples = len(objects)
        self.follows_links = listing.follows_links
        column = schema.get("label")
        classes = column.classes if isinstance(column, Array) and column.classes else ()
        self._labels = {name: number for number, name in enumerate(classes)}

    @property
    def notes(self) -> tuple[str, ...]:
        """Note about the files that were left out."""
        count = len(self._listing.objects) - len(self.objects)
        if not count:
            return ()
        keys = {item.key for item in self.objects}
        first = next(item.key for item in self._listing.objects if item.key not in keys)
        total = len(self._listing.objects)
        return (f"{count} of {total} files were left out: no image in a sub-folder (first: {first})",)

    async def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        """Yield the files from number ``start`` on."""
        store, rest = self._listing.store, self.objects[start:]
        contents = run_in_order((item.size_bytes, lambda item=item: read_object(store, item)) for item in rest)  # type: ignore[misc]
        try:
            for item in rest:
                yield item.key, self._sample(item.key, await anext(contents))
        finally:
            await contents.aclose()

    def _sample(self, key: str, data: bytearray) -> dict[str, Any]:
        if self.kind == "files":
            return {"data": data, "path": key}
        name = _class_of(key)
        if name not in self._labels:
            raise PackError(
                f"{self._listing.url}/{key} is of class {name!r}, which is not among the data set's "
                f"{format_count(len(self._labels), 'class', 'classes')}; pack a data set with all classes, or "
                f"move it away"
            )
        return {"image": data, "label": self._labels[name], "path": key}


def open_files(listing: SourceListing) -> FolderSource:
    """Return a source whose samples are the files of a folder, with ``data`` and ``path``."""
    return FolderSource("files", files_schema(), listing, listing.objects)


def files_schema() -> Schema:
    """Return the columns of the kind ``files``."""
    return Schema({"data": Bytes(), "path": Text()})


def images_schema(classes: Iterable[str]) -> Schema:
    """Return the columns of the kind ``image-folder`` with these class names."""
    return Schema({"image": Bytes(), "label": Array("int64", classes=tuple(classes)), "path": Text()})


def open_image_folder(listing: SourceListing, *, is_explicit: bool = False) -> FolderSource:
    """Return a source whose samples are the images in sub-folders, with ``image`` (bytes), ``label`` and ``path``.

    The label is the index of the top sub-folder among their sorted names, which the schema lists as classes.

    Args:
        listing: listing of the folder.
        is_explicit: whether the user named the kind; otherwise it was detected from the file names.

    Raises:
        PackError: there is no image in a sub-folder.
        ConfigError: the class folders seem to lie below other folders, such as ``train`` and ``val``.
    """
    images = [item for item in listing.objects if is_sample_file("image-folder", item.key)]
    if not images:
        raise PackError(
            f"{listing.url} has no image in a sub-folder; put the images of each class into a folder of its own, "
            "or pack them as they are with --kind files"
        )
    _check_classes_on_top(listing, [item.key for item in images], is_explicit=is_explicit)
    return FolderSource(
        "image-folder", images_schema(sorted({_class_of(item.key) for item in images})), listing, images
    )


def _check_classes_on_top(listing: SourceListing, keys: Sequence[str], *, is_explicit: bool) -> None:
    """Raise ConfigError if top sub-folders are splits above class folders, or if none contains an image directly."""
    tops = {_class_of(key) for key in keys}
    direct = {_class_of(key) for key in keys if key.count("/") == 1}
    splits = {top: key for key in keys if (top := _class_of(key)).lower() in _SPLIT_NAMES and top not in direct}
    if len(splits) < len(tops) if is_explicit else direct and not splits:
        return
    above = splits or {key.rsplit("/", 2)[0]: key for key in keys}  # folders of folders with images
    wrong = sorted(above)
    examples = ", ".join(f"{listing.url.rstrip('/')}/{folder}" for folder in wrong[:_MAX_SHOWN_FOLDERS])
    more = f" and {len(wrong) - _MAX_SHOWN_FOLDERS:,} more" if len(wrong) > _MAX_SHOWN_FOLDERS else ""
    other = (
        "" if len(splits) == len(tops) else f", or use --kind image-folder if {min(tops - splits.keys())} is a class"
    )
    raise ConfigError(
        f"{listing.url}: its classes seem to be sub-folders of its sub-folders ({above[wrong[0]]}), so labels would be "
        f"wrong; pack {examples}{more} one by one, each as a data set of its own{other}"
    )


def _class_of(key: str) -> str:
    return key.partition("/")[0]
