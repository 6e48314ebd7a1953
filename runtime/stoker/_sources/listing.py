"""Raw objects of a source: listing those that a URL names, and reading them.

A URL names all objects below a folder, one object, or the objects of a brace pattern.

In a local folder, a link that leads out of the folder is an error, unless links are followed. Links to files and
folders inside are always followed, and each folder is entered once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path

from stoker._base.retry import RetryingStore
from stoker._base.sizes import format_count
from stoker._base.task_group import run_in_order
from stoker._format.schema import Schema
from stoker._format.supersample import MAX_SAMPLE_BYTES
from stoker._sources.containers import detect_by_name, remedy_for
from stoker._stores import open_store
from stoker._stores.location import Location, parse_url
from stoker._stores.options import StoreOptions
from stoker.abc import ObjectInfo, Readable, Sample, SourceListing, Store
from stoker.errors import ConfigError, NotFoundError, PackError, TruncatedError

ARCHIVES = (".npy", ".npz", ".tar")
_BRACES_PATTERN = re.compile(r"\{([^{}]*)\}")
_RANGE_PATTERN = re.compile(r"(\d{1,18})\.\.(\d{1,18})", re.ASCII)
_MAX_NAMES = 100_000
STREAM_SPAN_BYTES = 4 << 20  # for streams that are read to the end
PEEK_SPAN_BYTES = 64 << 10  # for streams that are read at the beginning only


def check_fits(what: str, size_bytes: int, remedy: str) -> None:
    """Raise PackError if a sample is larger than any may be; its message is ``what``, the size and ``remedy``."""
    if size_bytes > MAX_SAMPLE_BYTES:
        raise PackError(f"{what} {size_bytes} bytes; a sample may have at most {MAX_SAMPLE_BYTES} (1 GiB): {remedy}")


def compute_fingerprint(kind: str, schema: Schema, objects: Iterable[ObjectInfo]) -> str:
    """Return the hash of a source, 64 hexadecimal digits; it differs if any key, size or tag differs."""
    digest = hashlib.sha256(f"{kind}\n{schema.to_json()}\n".encode())
    for item in objects:
        digest.update(json.dumps([item.key, item.size_bytes, item.tag]).encode())
    return digest.hexdigest()


class ObjectSource(ABC):
    """Base class of sources that read raw objects.

    Args:
        kind: name of the kind, as in ``stoker pack --kind``.
        schema: columns of every sample.
        listing: listing of the source; its store is closed with the source.
        objects: objects with samples, in order of the samples.

    Attributes:
        kind: name of the kind.
        schema: columns of every sample.
        objects: objects with samples, in order of the samples.
        fingerprint: hash of kind, schema, and relative key, size and tag of every object.
        size_bytes: total size of the objects.
        samples: number of samples; None if it is unknown before all are read.
    """

    samples: int | None = None

    def __init__(self, kind: str, schema: Schema, listing: SourceListing, objects: Sequence[ObjectInfo]) -> None:
        self.kind, self.schema, self.objects = kind, schema, tuple(objects)
        self.fingerprint = compute_fingerprint(kind, schema, self.objects)
        self.size_bytes = sum(item.size_bytes for item in self.objects)
        self._listing = listing

    @property
    def root(self) -> str:
        """URL of the folder that the objects' keys are relative to."""
        return self._listing.store.url

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user, such as files that were left out; reading may add more."""
        return ()

    @abstractmethod
    def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        """Yield the samples from number ``start`` on; see :meth:`stoker.abc.Source.read`."""

    async def close(self) -> None:
        """Release connections. Idempotent."""
        await self._listing.store.close()


async def list_source(
    url: str | os.PathLike[str],
    options: StoreOptions | None,
    *,
    follow_links: bool = False,
    any_suffix: bool = False,
    wrap: Callable[[Store], Store] | None = None,
) -> SourceListing:
    """List the objects that a URL names.

    A URL that ends in ``.npy``, ``.npz`` or ``.tar`` (with ``any_suffix``: in any suffix) names one object, or several
    with braces (``{000..009}``, ``{a,b}``). Any other URL, and a local folder of any name, names all objects below it,
    without hidden ones (a part of the key starts with a dot) and the empty objects that represent folders.

    Args:
        url: URL of the source.
        options: options of its store.
        follow_links: whether links that lead out of a local folder are followed.
        any_suffix: whether a URL with any suffix names an object.
        wrap: function that wraps the source's store.

    Raises:
        ConfigError: the URL is malformed, or a local folder has links that lead out of it.
        NotFoundError: a named object does not exist.
        PackError: there are no objects, or links are broken.
        StoreError: the store cannot be read.
    """
    location = parse_url(url)
    if follow_links and location.scheme != "file":
        raise ConfigError(f"--follow-links is for links in a local folder, which {location.url} is not; leave it out")
    is_folder = _is_folder(location, any_suffix=any_suffix)
    root, names = (_unescaped_url(location), []) if is_folder else _split_pattern(location)
    reader = open_store(root, options=options)
    store = RetryingStore(reader if wrap is None else wrap(reader))
    try:
        if is_folder:
            objects = await _list_folder(store, location, follow_links=follow_links)
        elif len(names) == 1:
            objects = [await store.head(names[0])]
        else:
            objects = await _list_named(store, location.url, names)
    except BaseException:
        await store.close()
        raise
    return SourceListing(location.url, store, tuple(objects), is_folder, follow_links)


async def list_between(store: RetryingStore, after: str, until: str) -> list[ObjectInfo]:
    """Return a folder's objects, without hidden ones, whose keys lie after ``after``, up to and including ``until``."""
    infos = []
    end = until.encode()
    async for item in store.list(start_after=after):
        if item.key.encode() > end:
            break
        if is_raw_object(item):
            infos.append(item)
    location = parse_url(store.url)
    if location.scheme == "file":
        return await asyncio.to_thread(_exclude_outside, Path(location.bucket), infos)
    return infos


def _is_folder(location: Location, *, any_suffix: bool) -> bool:
    """Return whether the URL names all objects below it."""
    name = location.url.lower().rpartition("/")[2]
    is_archive = "." in name.lstrip(".") if any_suffix else name.endswith(ARCHIVES)
    if location.scheme != "file":
        return not is_archive or not location.prefix
    path = Path(location.bucket)
    if path.is_file() and not is_archive:
        if container := detect_by_name(path.name):
            raise ConfigError(f"{location.url} ({container}) cannot be packed as it is; {remedy_for(container)}")
        raise ConfigError(f"{location.url} is a file of no known kind; give a folder, or one of {', '.join(ARCHIVES)}")
    return not is_archive or path.is_dir()


def _unescaped_url(location: Location) -> str:
    """Return the URL of a location, for a local one its absolute path, without URL escapes."""
    return location.bucket if location.scheme == "file" else f"{location.scheme}://{location.bucket}/{location.prefix}"


def _split_pattern(location: Location) -> tuple[str, list[str]]:
    """Return the folder of the named objects, and their keys below it."""
    address = _unescaped_url(location)
    static = address if location.scheme == "file" and Path(address).exists() else address.partition("{")[0]
    root = static.rpartition("/")[0]
    pattern = address[len(root) + 1 :]
    names = [pattern] if static == address else list(islice(_expand_braces(pattern), _MAX_NAMES + 1))
    if len(names) > _MAX_NAMES:
        raise ConfigError(f"{location.url} names more than {_MAX_NAMES} objects; use a folder instead")
    return root or "/", names


async def _list_folder(store: RetryingStore, location: Location, *, follow_links: bool) -> list[ObjectInfo]:
    if location.scheme == "file":
        await asyncio.to_thread(_check_links, Path(location.bucket), follow=follow_links)
    infos = [item async for item in store.list() if is_raw_object(item)]
    if location.scheme == "file" and not follow_links:  # a link may have been added meanwhile
        infos = await asyncio.to_thread(_exclude_outside, Path(location.bucket), infos)
    if not infos:
        if container := detect_by_name(location.prefix.rstrip("/")):
            raise PackError(
                f"there is no folder {location.url}, and a file ({container}) cannot be packed as it is; "
                f"{remedy_for(container)}"
            )
        raise PackError(f"{location.url} has no files to pack (hidden files are ignored); check the URL")
    return infos


async def _list_named(store: RetryingStore, url: str, names: list[str]) -> list[ObjectInfo]:
    wanted = set(names)
    common = os.path.commonprefix(names)  # noqa: RUF071 - a prefix of keys, which need not be a folder
    infos = {item.key: item async for item in store.list(common) if item.key in wanted}
    if missing := [name for name in names if name not in infos]:
        raise NotFoundError(
            f"{url}: {missing[0]} does not exist ({len(missing)} of {len(names)} are missing); check the range"
        )
    return [infos[name] for name in names]


def is_raw_object(item: ObjectInfo) -> bool:
    """Return whether an object can hold samples: it is neither hidden nor an empty object that represents a folder."""
    return not item.key.endswith("/") and not any(part.startswith(".") for part in item.key.split("/"))


def _expand_braces(pattern: str) -> Iterator[str]:
    """Yield the names of a brace pattern; the first braces vary slowest."""
    match = _BRACES_PATTERN.search(pattern)
    if match is None:
        yield pattern
        return
    numbers = _RANGE_PATTERN.fullmatch(match[1])
    for choice in _expand_range(numbers[1], numbers[2]) if numbers else match[1].split(","):
        yield from (pattern[: match.start()] + choice + rest for rest in _expand_braces(pattern[match.end() :]))


def _expand_range(first: str, last: str) -> Iterator[str]:
    is_padded = any(len(end) > 1 and end.startswith("0") for end in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    step = 1 if int(first) <= int(last) else -1
    return (f"{number:0{width}d}" for number in range(int(first), int(last) + step, step))


def _check_links(root: Path, *, follow: bool) -> None:
    """Check the links below ``root``, without hidden links and links in hidden folders.

    Args:
        root: the folder.
        follow: whether links out of the folder are followed; then the links in the linked folders are checked too.

    Raises:
        ConfigError: links lead out of the folder, and ``follow`` is false.
        PackError: links lead to missing or unreadable files, or one leads to a folder that contains ``root``.
    """
    real_root = root.resolve()
    outside: list[Path] = []
    broken: list[Path] = []
    for path, real in _iter_links(root, real_root, follow=follow):
        if not os.path.exists(path):  # noqa: PTH110 - Path.exists raises where it may not look
            broken.append(path)
        elif not real.is_relative_to(real_root):
            outside.append(path)
            if follow and real_root.is_relative_to(real):
                raise PackError(f"{path} is a link to {real}, which contains {root} itself; remove the link")
    if broken:
        raise PackError(
            f"{root} has {format_count(len(broken), 'link')} to files that are missing or unreadable (first: "
            f"{_describe_first_link(broken, root)}); restore the files or remove the links"
        )
    if outside and not follow:
        raise ConfigError(
            f"{root} has {format_count(len(outside), 'link')} out of it (first: "
            f"{_describe_first_link(outside, root)}), so those files "
            "would be left out; use --follow-links to pack them, or remove the links"
        )


def _iter_links(root: Path, real_root: Path, *, follow: bool) -> Iterator[tuple[Path, Path]]:
    """Yield the links below a folder and their real paths; enters linked folders that lie inside or are followed.

    Hidden entries are skipped. A linked folder is entered after its link was yielded, and once.
    """
    pending, seen = [(root, real_root)], {real_root}
    while pending:
        folder, real_folder = pending.pop()
        with suppress(OSError), os.scandir(folder) as entries:  # missing or unreadable: the listing reports it
            for entry in entries:
                is_link = entry.is_symlink()
                if entry.name.startswith(".") or not (is_link or entry.is_dir()):
                    continue
                path = folder / entry.name
                real = Path(os.path.realpath(entry)) if is_link else real_folder / entry.name
                if is_link:
                    yield path, real
                is_entered = follow or real.is_relative_to(real_root)
                if is_entered and real not in seen and os.path.isdir(path):  # noqa: PTH112 - Path.is_dir may raise
                    seen.add(real)
                    pending.append((path, real))


def _describe_first_link(paths: list[Path], root: Path) -> str:
    first = min(paths)
    name = first.relative_to(root) if first.is_relative_to(root) else first
    return f"{name} -> {os.readlink(first)}"  # noqa: PTH115 - the link's own text, as the user wrote it


def _exclude_outside(root: Path, infos: list[ObjectInfo]) -> list[ObjectInfo]:
    """Return the objects without those that links outside of ``root`` contain."""
    real_root = root.resolve()

    @cache
    def is_inside(folder: Path) -> bool:
        return folder.resolve().is_relative_to(real_root)

    def is_kept(path: Path) -> bool:
        return path.resolve().is_relative_to(real_root) if path.is_symlink() else is_inside(path.parent)

    return [item for item in infos if is_kept(root / item.key)]


async def read_object(store: Readable, item: ObjectInfo, start: int = 0, end: int | None = None) -> bytearray:
    """Return the bytes ``[start, end)`` of a listed object, by default all of them.

    Raises:
        ObjectChangedError: the object has changed since it was listed.
        StoreError: the object could not be read.
    """
    data = bytearray((item.size_bytes if end is None else end) - start)
    if data or not item.size_bytes:  # an empty object is read too, to check that it still exists and is empty
        await store.get_range(item.key, start, start + len(data), into=memoryview(data), tag=item.tag)
    return data


def split_range(start: int, end: int, span_bytes: int) -> Iterable[tuple[int, int]]:
    """Return consecutive half-open ranges of at most ``span_bytes`` each that cover ``[start, end)``."""
    return ((at, min(at + span_bytes, end)) for at in range(start, end, span_bytes))


class ByteStream:
    """Reads the bytes ``[start, end)`` of an object sequentially, fetched ahead by ranged reads of ``span_bytes``."""

    def __init__(
        self,
        store: Readable,
        item: ObjectInfo,
        start: int = 0,
        end: int | None = None,
        *,
        span_bytes: int = STREAM_SPAN_BYTES,
    ) -> None:
        self._item = item
        self._end = item.size_bytes if end is None else end
        self._spans = run_in_order(
            (last - first, lambda first=first, last=last: read_object(store, item, first, last))  # type: ignore[misc]
            for first, last in split_range(start, self._end, span_bytes)
        )
        self._span = memoryview(b"")
        self.position = start

    @property
    def remaining_bytes(self) -> int:
        """Number of bytes left."""
        return self._end - self.position

    async def read_some(self) -> memoryview:
        """Return the bytes left of the current range, or the next range; empty at the end."""
        if not self._span:
            self._span = memoryview(await anext(self._spans, b""))
        some, self._span = self._span, memoryview(b"")
        self.position += len(some)
        return some

    async def read(self, count: int) -> bytes:
        """Return the next ``count`` bytes.

        Raises:
            TruncatedError: fewer are left.
        """
        if count > self.remaining_bytes:
            raise TruncatedError(
                f"{self._item.key} ends too early: {self.remaining_bytes} bytes are left, {count} are needed"
            )
        data = bytearray()
        while len(data) < count:
            data += self._split_current(await self.read_some(), count - len(data))
        return bytes(data)

    async def skip(self, count: int) -> None:
        """Skip the next ``count`` bytes, which must exist."""
        while count:
            count -= len(self._split_current(await self.read_some(), count))

    def _split_current(self, some: memoryview, count: int) -> memoryview:
        """Return the first ``count`` of ``some``, the bytes just read, and keep the rest for the next read."""
        self._span = some[count:]
        self.position -= len(self._span)
        return some[:count]

    async def aclose(self) -> None:
        """Cancel the reads in flight."""
        await self._spans.aclose()
