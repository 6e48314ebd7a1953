"""A source of raw samples as a plug-in: JSON lines, each of which ``stoker pack`` makes a sample.

A source is an object with a ``schema`` and a ``read``. An entry point names the function that opens it:

    [project.entry-points."stoker.sources"]
    json-lines = "json_lines:open_json_lines"

With that installed,

    stoker pack --kind json-lines 's3://bucket/raw/part-{000..009}.jsonl' s3://bucket/train

packs the lines of ten files, in order. A URL whose last part has a suffix is a file, any other a folder of files. If
the command is interrupted, the same command continues after the packed samples.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from stoker import Array, Text
from stoker.abc import ObjectInfo, Readable, Sample, SourceListing
from stoker.errors import PackError

CHUNK_BYTES = 8 << 20
COLUMNS = {str: Text(), int: Array("int64"), float: Array("float64"), bool: Array("bool")}


async def open_json_lines(listing: SourceListing) -> JsonLines:
    """Return the lines of the listed objects as samples; their columns are those of the first line.

    Raises:
        PackError: there is no line, or it is no JSON object, or one of its values fits no type of column.
    """
    async with aclosing(read_samples(listing, listing.objects)) as samples:
        async for where, sample in samples:
            for name, value in sample.items():
                if type(value) not in COLUMNS:
                    raise PackError(f"{where}: {name!r} is {value!r:.80}, which is no text, number or truth value")
            return JsonLines(listing, {name: COLUMNS[type(value)] for name, value in sample.items()})
    raise PackError(f"{listing.url} has no line; check the URL")


class JsonLines:
    """The lines of some objects as samples, in order."""

    def __init__(self, listing: SourceListing, schema: Mapping[str, Array | Text]) -> None:
        self.schema = schema
        self._listing = listing

    async def read(self, start: int = 0) -> AsyncGenerator[Sample, None]:
        """Yield the samples from number ``start`` on; lines have no index, so the earlier ones are read, too."""
        number = 0
        async with aclosing(read_samples(self._listing, self._listing.objects)) as samples:
            async for where, sample in samples:
                if number >= start:
                    yield where, sample
                number += 1


async def read_samples(listing: SourceListing, objects: tuple[ObjectInfo, ...]) -> AsyncGenerator[Sample, None]:
    """Yield each line's name for messages, and its values."""
    for item in objects:
        number = 0
        async with aclosing(read_lines(listing.store, item)) as lines:
            async for line in lines:
                number += 1
                where = f"{item.key}: line {number}"
                if line.strip():
                    yield where, parsed(line, where)


async def read_lines(store: Readable, item: ObjectInfo) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an object, read in parts; the tag ensures that all are of the listed object."""
    rest = b""
    for start in range(0, item.size_bytes, CHUNK_BYTES):
        chunk = bytearray(min(CHUNK_BYTES, item.size_bytes - start))
        await store.get_range(item.key, start, start + len(chunk), into=memoryview(chunk), tag=item.tag)
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
    yield rest


def parsed(line: bytes, where: str) -> dict[str, Any]:
    """Return the values of a line."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PackError(f"{where} is not JSON ({error}); correct or remove it") from None
    if not isinstance(found, dict):
        raise PackError(f"{where} is no JSON object; correct or remove it")
    return found
