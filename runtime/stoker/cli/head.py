"""``stoker head``: the first samples of a data set, as they were packed."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from stoker.catalog import read_manifest
from stoker.checksum import crc32c
from stoker.cli.command import Command
from stoker.cli.flags import add_dataset, opened, positive
from stoker.cli.output import preview, table
from stoker.errors import ChecksumError, FormatError
from stoker.manifest import Manifest
from stoker.retry import RetryingReader
from stoker.store import Store
from stoker.supersample import SuperSample

__all__ = ["command"]


def _configure(parser: ArgumentParser) -> None:
    add_dataset(parser)
    parser.add_argument("-n", type=positive, default=5, metavar="N", help="how many samples (default: 5)")


def _run(args: Namespace) -> int:
    asyncio.run(_print(args))
    return 0


async def _print(args: Namespace) -> None:
    async with opened(args) as store:
        manifest = await read_manifest(store, args.at)
        async with aclosing(_samples(store, manifest)) as samples:
            number = 0
            async for sample in samples:
                rows = [(name, preview(manifest.schema[name], value)) for name, value in sample.items()]
                print(f"sample {number}\n{table(rows)}")
                number += 1
                if number == args.n:
                    return


async def _samples(store: Store, manifest: Manifest) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the samples in the order in which they were packed, each super-sample verified."""
    reader = RetryingReader(store)
    for row in range(len(manifest)):
        ref = manifest.ref(row)
        data = bytearray(ref.size_bytes)
        await reader.get_range(ref.key, 0, len(data), into=memoryview(data))
        if crc32c(data) != ref.crc32c:
            raise ChecksumError(f"{store.url}/{ref.key} is damaged: run stoker verify {store.url}")
        opened = SuperSample(data)
        if opened.head.schema != manifest.schema:
            raise FormatError(f"{store.url}/{ref.key} has other columns than its manifest; run stoker verify")
        for index in range(len(opened)):
            yield opened[index]


command = Command(name="head", help="show the first samples of a data set", configure=_configure, run=_run)
