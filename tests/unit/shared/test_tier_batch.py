"""Batch reads of a shared tier: parts of many objects in one stream, and what a hostile server or client sends."""

from __future__ import annotations

import asyncio
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import stoker
from stoker._format.versions import read_manifest
from stoker._shared import protocol
from stoker._shared.folder_storage import FolderStorage
from stoker._shared.protocol import (
    LENGTH,
    MISSING_LENGTH,
    BatchResponse,
    ObjectRange,
    RangeInto,
    encode_request,
    parse_request,
)
from stoker._shared.read_through import ReadThrough
from stoker.abc import ObjectRef
from stoker.errors import CredentialsError, StoreError, TruncatedError, UnexpectedAnswerError
from support.cases import for_each
from support.shared_tier import IS_SOUND, OTHER_SECRET, SECRET, client_of, object_of, offered, running, server_of
from support.waiting import until

TOKEN = {"Authorization": f"Bearer {SECRET.token}"}
NAME = SECRET.object_name(object_of(1)[0])


def parts_of(*asked: tuple[int, int, int]) -> tuple[list[tuple[ObjectRef, int, memoryview]], list[bytes]]:
    """Return requested ranges (object, start and end), and the right bytes of each."""
    parts, right = [], []
    for number, start, end in asked:
        ref, data = object_of(number)
        parts.append((ref, start, memoryview(bytearray(end - start))))
        right.append(data[start:end])
    return parts, right


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_parts_are_filled_in_any_order_and_missing_ones_are_reported(tmp_path: Path, is_on_disk: bool) -> None:
    async def main() -> None:
        folders = [FolderStorage(tmp_path / each, 1 << 20, IS_SOUND) if is_on_disk else None for each in "ab"]
        servers = [server_of(100 if is_on_disk else 1 << 20, folder=folder) for folder in folders]
        async with running(servers[0]) as one, running(servers[1]) as two, client_of(one, two) as tier:
            for number in range(8):
                await offered(tier, *object_of(number))
            asked = [(3, 0, 10_000), (99, 5, 9), (0, 17, 18), (7, 9_999, 10_000), (0, 17, 4000), (98, 0, 10_000)]
            parts, right = parts_of(*asked, *((number, number, 5000) for number in range(8)))
            found = await tier.read_ranges(parts)
            assert found == [number < 50 for number, *_ in asked] + [True] * 8
            for (_, _, into), is_found, expected in zip(parts, found, right, strict=True):
                assert bytes(into) == (expected if is_found else bytes(len(into)))
            assert await tier.read_ranges([]) == []
            assert sum(server.stats.misses for server in servers) >= 2

    asyncio.run(main())


def test_a_large_batch_is_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_RANGES", 4)
    monkeypatch.setattr(protocol, "MAX_BATCH_BYTES", 15_000)

    async def main() -> None:
        server = server_of()
        async with running(server) as url, client_of(url) as tier:
            for number in range(3):
                await offered(tier, *object_of(number))
            parts, right = parts_of(*((number % 3, number, 10_000) for number in range(3)), *[(0, 0, 1)] * 9)
            before = server.stats.requests
            assert await tier.read_ranges(parts) == [True] * 12
            assert [bytes(into) for *_, into in parts] == right
            assert server.stats.requests - before == 5

    asyncio.run(main())


def test_a_missing_part_is_read_through_for_later_requests(tmp_path: Path) -> None:
    from support.waiting import until
    from unit.shared.test_shared_tier import pack

    pack(tmp_path / "data", 10)

    async def main() -> None:
        store = stoker.open_store(tmp_path / "data")
        source = ReadThrough(store, [SECRET])
        await source.refresh()
        ref = (await read_manifest(store)).ref(0)
        server = server_of(sources=[source])
        async with running(server) as url, client_of(url) as tier:
            assert await tier.read_ranges([(ref, 0, memoryview(bytearray(9)))] * 2) == [False, False]
            await until(lambda: server.stats.fetched)
            assert await tier.read_ranges([(ref, 0, memoryview(bytearray(9)))]) == [True]

    asyncio.run(main())


@for_each(
    "body",
    [
        b"",
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        f"{NAME} 0 1".encode(),
        f"{NAME} 0 10001\n".encode(),
        f"{NAME} 5 5\n".encode(),
        f"{NAME} 6 5\n".encode(),
        f"{NAME} -1 5\n".encode(),
        f"{NAME} 0 99999999999\n".encode(),
        f"{NAME.upper()} 0 1\n".encode(),
        f"{NAME} 0 1\n\n".encode(),
        f"{NAME} 0 1\n".encode() * 1025,
        f"{'0' * 8}ffffffff{'0' * 16} 0 4294967295\n".encode() * 2,
        bytes(2 << 20),
    ],
)
def test_what_is_no_batch_is_refused(body: bytes) -> None:
    async def main() -> None:
        server = server_of()
        async with running(server) as url, aiohttp.ClientSession() as session:
            async with session.post(f"{url}/objects", data=BytesIO(body), headers=TOKEN) as response:
                assert response.status in (400, 413)
            async with session.post(f"{url}/objects", data=f"{NAME} 0 1\n".encode(), headers=TOKEN) as response:
                assert (response.status, await response.read()) == (200, LENGTH.pack(MISSING_LENGTH))

    asyncio.run(main())


def test_a_batch_needs_a_token_and_finds_only_the_tenant_s_objects() -> None:
    async def main() -> None:
        parts, _ = parts_of((1, 0, 10))
        async with running(server_of()) as url, client_of(url, secret=OTHER_SECRET) as stranger:
            with pytest.raises(CredentialsError):
                await stranger.read_ranges(parts)
        both = server_of(secrets=(SECRET, OTHER_SECRET))
        async with running(both) as url, client_of(url) as tier, aiohttp.ClientSession() as session:
            await offered(tier, *object_of(1))
            other = {"Authorization": f"Bearer {OTHER_SECRET.token}"}
            async with session.post(f"{url}/objects", data=f"{NAME} 0 10\n".encode(), headers=other) as response:
                assert await response.read() == LENGTH.pack(MISSING_LENGTH)

    asyncio.run(main())


RIGHT = LENGTH.pack(4) + b"abcd" + LENGTH.pack(MISSING_LENGTH) + LENGTH.pack(2) + b"xy"


@pytest.mark.parametrize("step", [1, 3, 7, 100])
def test_a_stream_is_taken_in_any_pieces(step: int) -> None:
    memories = [memoryview(bytearray(size)) for size in (4, 3, 2)]
    answer = BatchResponse("a", [RangeInto(NAME, 0, into) for into in memories])
    for start in range(0, len(RIGHT), step):
        answer.receive(RIGHT[start : start + step])
    assert answer.finish() == [True, False, True]
    assert [bytes(each) for each in memories] == [b"abcd", bytes(3), b"xy"]


HOSTILE = {
    "too long a part": (LENGTH.pack(5) + b"abcde", UnexpectedAnswerError),
    "too short a part": (LENGTH.pack(3) + b"abc" + RIGHT[12:], UnexpectedAnswerError),
    "negative": (LENGTH.pack(-2), UnexpectedAnswerError),
    "huge": (LENGTH.pack((1 << 63) - 1), UnexpectedAnswerError),
    "unasked": (RIGHT + LENGTH.pack(MISSING_LENGTH), UnexpectedAnswerError),
    "part of a head behind": (RIGHT + b"\0", TruncatedError),
    "nothing": (b"", TruncatedError),
    "ends in a part": (RIGHT[:-1], TruncatedError),
    "ends in a head": (RIGHT[:-5], TruncatedError),
    "ends between parts": (RIGHT[:12], TruncatedError),
}


@for_each("case", HOSTILE)
@for_each("framing", ["length", "chunked", "close"])
def test_a_stream_that_was_not_requested_is_an_error_and_writes_nowhere_else(case: str, framing: str) -> None:
    stream, kind = HOSTILE[case]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
            begin = b"HTTP/1.1 200 OK\r\n"
            if framing == "length":
                writer.write(begin + f"Content-Length: {len(stream)}\r\n\r\n".encode() + stream)
            elif framing == "close":
                writer.write(begin + b"Connection: close\r\n\r\n" + stream)
            else:
                chunk = f"{len(stream):x}\r\n".encode() + stream + b"\r\n" if stream else b""
                writer.write(begin + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n")
            await writer.drain()

    async def main() -> None:
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with listener, client_of(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}") as tier:
            whole = bytearray(b"." * 20)
            memories = [memoryview(whole)[start:end] for start, end in ((2, 6), (8, 11), (13, 15))]
            ref, _ = object_of(1)
            with pytest.raises(kind):
                async with asyncio.timeout(10):
                    await tier.read_ranges([(ref, 0, into) for into in memories])
            kept = [whole[:2], whole[6:8], whole[11:13], whole[15:]]
            assert kept == [b"..", b"..", b"..", b"....."]

    asyncio.run(main())


def test_a_range_beyond_the_object_s_end_is_an_error() -> None:
    async def main() -> None:
        async with running(server_of()) as url, client_of(url) as tier:
            ref, _ = object_of(1)
            with pytest.raises(StoreError, match="within the object"):
                await tier.read_ranges([(ref, 9_999, memoryview(bytearray(2)))])

    asyncio.run(main())


def test_a_request_is_read_as_it_was_written() -> None:
    asked = [RangeInto(NAME, start, memoryview(bytes(size))) for start, size in ((0, 1), (17, 9_000), (9_999, 1))]
    parsed = parse_request(encode_request(asked))
    assert parsed == [ObjectRange(name, start, start + len(into)) for name, start, into in asked]


def test_a_reader_of_a_batch_that_leaves_holds_nothing() -> None:
    async def main() -> None:
        server: Any = server_of(1 << 26)
        ref, data = object_of(2, 30_000_000)
        async with running(server) as url, client_of(url) as tier:
            await offered(tier, ref, data)
            into = memoryview(bytearray(len(data)))
            reading = asyncio.create_task(tier.read_ranges([(ref, 0, into)] * 4))
            await asyncio.sleep(0.01)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            tier.reject(ref)
            await until(lambda: not server.statistics()["memory"].used_bytes)

    asyncio.run(main())


def test_a_file_that_is_damaged_within_a_batch_breaks_the_stream_off(tmp_path: Path) -> None:
    async def main() -> None:
        folder = FolderStorage(tmp_path, 1 << 20, IS_SOUND)
        async with running(server_of(100, folder=folder)) as url, client_of(url) as tier:
            ref, data = object_of(1)
            await offered(tier, ref, data)
            (tmp_path / SECRET.tenant / "objects" / NAME).write_bytes(data[:10])
            with pytest.raises(StoreError):
                await tier.read_ranges([(ref, 0, memoryview(bytearray(len(data))))])

    asyncio.run(main())


def test_a_request_that_is_too_long_is_refused_before_it_comes() -> None:
    async def main() -> None:
        async with running(server_of()) as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            with closing(writer):
                head = f"POST /objects HTTP/1.1\r\nHost: a\r\nAuthorization: {TOKEN['Authorization']}\r\n"
                writer.write(f"{head}Content-Length: 99999999999\r\n\r\n".encode())
                async with asyncio.timeout(10):
                    assert b" 413 " in await reader.readline()

    asyncio.run(main())
