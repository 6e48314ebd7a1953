"""Raw objects: which ones a source's URL stands for, and reading them.

A URL stands for everything below a folder, one object, or those of a brace pattern.

In a local folder, a link that leads out of it is an error, unless it is to be followed. Links to files and folders
inside are followed like everything else, and no folder is entered again below itself.
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
from stoker._base.sizes import counted
from stoker._base.task_group import in_order
from stoker._format.schema import Schema
from stoker._format.supersample import MAX_SUPER_SAMPLE_BYTES
from stoker._sources.containers import named_like, remedy_for
from stoker._stores import open_store
from stoker._stores.location import Location, parse_url
from stoker._stores.options import StoreOptions
from stoker.abc import ObjectInfo, Readable, Sample, SourceListing, Store
from stoker.errors import ConfigError, NotFoundError, PackError, TruncatedError

ARCHIVES = (".npy", ".npz", ".tar")
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(\d{1,18})\.\.(\d{1,18})", re.ASCII)
_MAX_NAMES = 100_000
STREAM_SPAN_BYTES = 4 << 20  # of a stream that is read to its end
PEEK_SPAN_BYTES = 64 << 10  # of one of which only the beginning is wanted


def check_fits(what: str, size_bytes: int, remedy: str) -> None:
    """Raise PackError if a sample is larger than a super-sample; ``what`` names it and ends before the number."""
    if size_bytes > MAX_SUPER_SAMPLE_BYTES:
        raise PackError(
            f"{what} {size_bytes} bytes; a sample has to fit a super-sample of at most {MAX_SUPER_SAMPLE_BYTES}: "
            f"{remedy}"
        )


def fingerprint_of(kind: str, schema: Schema, objects: Iterable[ObjectInfo]) -> str:
    """Return the hash of a source: 64 hexadecimal digits, others if any object changed."""
    digest = hashlib.sha256(f"{kind}\n{schema.to_json()}\n".encode())
    for item in objects:
        digest.update(json.dumps([item.key, item.size_bytes, item.tag]).encode())
    return digest.hexdigest()


class ObjectSource(ABC):
    """A source that raw objects are: what the kinds have in common.

    Args:
        kind: as ``stoker pack --kind`` names it.
        schema: the columns of every sample.
        listing: where the objects are; closed with the source.
        objects: those that samples are in, in order of the samples.

    Attributes:
        kind: as given.
        schema: as given.
        objects: as given.
        fingerprint: hash of kind, schema, and relative key, size and tag of every object.
        size_bytes: of all objects.
        samples: how many samples there are, None if only reading them tells.
    """

    samples: int | None = None

    def __init__(self, kind: str, schema: Schema, listing: SourceListing, objects: Sequence[ObjectInfo]) -> None:
        self.kind, self.schema, self.objects = kind, schema, tuple(objects)
        self.fingerprint = fingerprint_of(kind, schema, self.objects)
        self.size_bytes = sum(item.size_bytes for item in self.objects)
        self._listing = listing

    @property
    def root(self) -> str:
        """URL of the folder that the objects' keys are relative to."""
        return self._listing.store.url

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the source, such as files that were left out; more once it was read."""
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
    """List what a URL stands for.

    A URL that ends in ``.npy``, ``.npz`` or ``.tar``, or in any suffix for sources that take others, is one object, or
    several with braces (``{000..009}``, ``{a,b}``); any other, and a local folder of any name, stands for all below it.
    Hidden objects (a part of the key
    starts with a dot) and the empty objects that stand for folders are left out.

    Args:
        url: of the source.
        options: of its store.
        follow_links: take in what links in a local folder lead to outside of it.
        any_suffix: whether an object of any suffix may be one.
        wrap: returns the store to read through, given the source's own.

    Raises:
        ConfigError: the URL is malformed; or a local folder has links to what is not below it.
        NotFoundError: an object that it names does not exist.
        PackError: there is nothing; or links lead to nothing.
        StoreError: the store cannot be read.
    """
    location = parse_url(url)
    if follow_links and location.scheme != "file":
        raise ConfigError(f"--follow-links is for links in a local folder, which {location.url} is not; leave it out")
    is_folder = _is_folder(location, any_suffix=any_suffix)
    root, names = (_address(location), []) if is_folder else _root_and_names(location)
    opened = open_store(root, options=options)
    store = RetryingStore(opened if wrap is None else wrap(opened))
    try:
        if is_folder:
            objects = await _below(store, location, follow_links=follow_links)
        elif len(names) == 1:
            objects = [await store.head(names[0])]
        else:
            objects = await _named(store, location.url, names)
    except BaseException:
        await store.close()
        raise
    return SourceListing(location.url, store, tuple(objects), is_folder, follow_links)


async def listed_between(store: RetryingStore, after: str, until: str) -> list[ObjectInfo]:
    """Return the objects of a folder whose keys lie behind ``after``, up to ``until``; hidden ones left out."""
    found = []
    end = until.encode()
    async for item in store.list(start_after=after):
        if item.key.encode() > end:
            break
        if is_wanted(item):
            found.append(item)
    location = parse_url(store.url)
    if location.scheme == "file":
        return await asyncio.to_thread(_without_links_out, Path(location.bucket), found)
    return found


def _is_folder(location: Location, *, any_suffix: bool) -> bool:
    """Return whether the URL stands for all that is below it."""
    name = location.url.lower().rpartition("/")[2]
    is_archive = "." in name.lstrip(".") if any_suffix else name.endswith(ARCHIVES)
    if location.scheme != "file":
        return not is_archive or not location.prefix
    path = Path(location.bucket)
    if path.is_file() and not is_archive:
        if container := named_like(path.name):
            raise ConfigError(f"{location.url} ({container}) cannot be packed as it is; {remedy_for(container)}")
        raise ConfigError(f"{location.url} is a file of no known kind; give a folder, or one of {', '.join(ARCHIVES)}")
    return not is_archive or path.is_dir()


def _address(location: Location) -> str:
    """Return the URL, for a local one the absolute path, in the form whose parts are names of objects."""
    return location.bucket if location.scheme == "file" else f"{location.scheme}://{location.bucket}/{location.prefix}"


def _root_and_names(location: Location) -> tuple[str, list[str]]:
    """Return the folder that the named objects are in, and their keys below it."""
    address = _address(location)
    static = address if location.scheme == "file" and Path(address).exists() else address.partition("{")[0]
    root = static.rpartition("/")[0]
    pattern = address[len(root) + 1 :]
    names = [pattern] if static == address else list(islice(_expanded(pattern), _MAX_NAMES + 1))
    if len(names) > _MAX_NAMES:
        raise ConfigError(f"{location.url} stands for more than {_MAX_NAMES} objects; use a folder instead")
    return root or "/", names


async def _below(store: RetryingStore, location: Location, *, follow_links: bool) -> list[ObjectInfo]:
    if location.scheme == "file":
        await asyncio.to_thread(_check_links, Path(location.bucket), follow=follow_links)
    found = [item async for item in store.list() if is_wanted(item)]
    if location.scheme == "file" and not follow_links:  # a link may have come since
        found = await asyncio.to_thread(_without_links_out, Path(location.bucket), found)
    if not found:
        if container := named_like(location.prefix.rstrip("/")):
            raise PackError(
                f"there is no folder {location.url}, and a file ({container}) cannot be packed as it is; "
                f"{remedy_for(container)}"
            )
        raise PackError(f"{location.url} holds no files to pack (hidden ones do not count); check the URL")
    return found


async def _named(store: RetryingStore, url: str, names: list[str]) -> list[ObjectInfo]:
    wanted = set(names)
    common = os.path.commonprefix(names)  # noqa: RUF071 - a beginning of keys, be it no folder
    found = {item.key: item async for item in store.list(common) if item.key in wanted}
    if missing := [name for name in names if name not in found]:
        raise NotFoundError(
            f"{url}: {missing[0]} does not exist ({len(missing)} of {len(names)} are missing); check the range"
        )
    return [found[name] for name in names]


def is_wanted(item: ObjectInfo) -> bool:
    """Return whether an object is raw material: neither hidden nor an empty one that stands for a folder."""
    return not item.key.endswith("/") and not any(part.startswith(".") for part in item.key.split("/"))


def _expanded(pattern: str) -> Iterator[str]:
    """Yield the names of a brace pattern, the first braces varying slowest."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    numbers = _NUMBERS.fullmatch(match[1])
    for choice in _numbers(numbers[1], numbers[2]) if numbers else match[1].split(","):
        yield from (pattern[: match.start()] + choice + rest for rest in _expanded(pattern[match.end() :]))


def _numbers(first: str, last: str) -> Iterator[str]:
    is_padded = any(len(end) > 1 and end.startswith("0") for end in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    step = 1 if int(first) <= int(last) else -1
    return (f"{number:0{width}d}" for number in range(int(first), int(last) + step, step))


def _check_links(root: Path, *, follow: bool) -> None:
    """Raise for links below ``root`` that would be left out of a pack, or take in what contains the folder itself.

    Hidden links and what lies in hidden folders do not matter.

    Args:
        root: the folder.
        follow: whether links out of the folder are to be followed; then those in the folders that they lead to count.

    Raises:
        ConfigError: links lead out of the folder, and ``follow`` is false.
        PackError: links lead to nothing that can be read; or one leads to a folder that contains ``root``.
    """
    real_root = root.resolve()
    outside: list[Path] = []
    broken: list[Path] = []
    for path, real in _links(root, real_root, follow=follow):
        if not os.path.exists(path):  # noqa: PTH110 - Path.exists raises where it may not look
            broken.append(path)
        elif not real.is_relative_to(real_root):
            outside.append(path)
            if follow and real_root.is_relative_to(real):
                raise PackError(f"{path} is a link to {real}, which contains {root} itself; remove the link")
    if broken:
        raise PackError(
            f"{root} has {counted(len(broken), 'link')} to what does not exist or cannot be read (first: "
            f"{_shown(broken, root)}); restore the files or remove the links"
        )
    if outside and not follow:
        raise ConfigError(
            f"{root} has {counted(len(outside), 'link')} out of it (first: {_shown(outside, root)}), so those files "
            "would be left out; say --follow-links to pack what they lead to, or remove them"
        )


def _links(root: Path, real_root: Path, *, follow: bool) -> Iterator[tuple[Path, Path]]:
    """Yield the links below a folder, and below what they lead to if that is inside or followed; and their real paths.

    Hidden ones are passed over. A folder is entered behind the yield of the link to it, and once.
    """
    pending, seen = [(root, real_root)], {real_root}
    while pending:
        folder, real_folder = pending.pop()
        with suppress(OSError), os.scandir(folder) as entries:  # gone, or not to be read, which the listing tells
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


def _shown(paths: list[Path], root: Path) -> str:
    first = min(paths)
    name = first.relative_to(root) if first.is_relative_to(root) else first
    return f"{name} -> {os.readlink(first)}"  # noqa: PTH115 - the link's own text, as the user wrote it


def _without_links_out(root: Path, found: list[ObjectInfo]) -> list[ObjectInfo]:
    """Leave out what links lead to outside of ``root``."""
    real_root = root.resolve()

    @cache
    def is_inside(folder: Path) -> bool:
        return folder.resolve().is_relative_to(real_root)

    def is_kept(path: Path) -> bool:
        return path.resolve().is_relative_to(real_root) if path.is_symlink() else is_inside(path.parent)

    return [item for item in found if is_kept(root / item.key)]


async def read(store: Readable, item: ObjectInfo, start: int = 0, end: int | None = None) -> bytearray:
    """Return bytes ``[start, end)`` of an object that was listed before, by default all of them.

    Raises:
        ObjectChangedError: the object is not the one that was listed.
        StoreError: it could not be read.
    """
    data = bytearray((item.size_bytes if end is None else end) - start)
    if data or not item.size_bytes:  # of an empty object, too, it is asked whether it is still there and empty
        await store.get_range(item.key, start, start + len(data), into=memoryview(data), tag=item.tag)
    return data


def spans(start: int, end: int, span_bytes: int) -> Iterable[tuple[int, int]]:
    """Return the half-open ranges of at most ``span_bytes`` that ``[start, end)`` consists of."""
    return ((at, min(at + span_bytes, end)) for at in range(start, end, span_bytes))


class ByteStream:
    """Bytes ``[start, end)`` of an object one after the other, fetched ahead by ranged reads of ``span_bytes``."""

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
        self._spans = in_order(
            (last - first, lambda first=first, last=last: read(store, item, first, last))  # type: ignore[misc]
            for first, last in spans(start, self._end, span_bytes)
        )
        self._span = memoryview(b"")
        self.position = start

    @property
    def remaining(self) -> int:
        """How many bytes are left."""
        return self._end - self.position

    async def read_some(self) -> memoryview:
        """Return the next bytes, as many as there are at hand; nothing at the end."""
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
        if count > self.remaining:
            raise TruncatedError(f"{self._item.key} has {self.remaining} bytes left of {count}")
        data = bytearray()
        while len(data) < count:
            data += self._take(await self.read_some(), count - len(data))
        return bytes(data)

    async def skip(self, count: int) -> None:
        """Pass over the next ``count`` bytes, which must be there."""
        while count:
            count -= len(self._take(await self.read_some(), count))

    def _take(self, some: memoryview, count: int) -> memoryview:
        """Return the first ``count`` of some bytes just read; the rest goes back."""
        self._span = some[count:]
        self.position -= len(self._span)
        return some[:count]

    async def aclose(self) -> None:
        """Cancel the reads in flight."""
        await self._spans.aclose()
