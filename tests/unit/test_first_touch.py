"""Pages are taken before they are written to, whatever stands in them stays, and nothing waits for it at the end."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import sys
import threading

import pytest

from stoker._memory import ring as first_touch
from stoker._memory.ring import PagePrefaulter, anonymous_memory, prefault

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes pages on request")


def resident_pages(memory: memoryview) -> int:
    """Return how many pages of a mapping are in memory, without touching any."""
    states = (ctypes.c_ubyte * -(-memory.nbytes // mmap.PAGESIZE))()
    address = ctypes.c_void_p(first_touch.address_of(memory))
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(memory.nbytes), states) == 0
    return sum(state & 1 for state in states)


@linux
def test_a_forked_child_sees_zeros_and_shares_nothing() -> None:
    memory = anonymous_memory(4 * mmap.PAGESIZE)
    memory[:3] = b"abc"
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, memory[:3])
        memory[:3] = b"xyz"
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 3) == b"\0\0\0"
    assert bytes(memory[:3]) == b"abc"
    os.close(read)
    os.close(write)


@linux
def test_all_pages_are_taken_and_keep_what_stands_in_them() -> None:
    memory = anonymous_memory(9 * MIB + 5 * mmap.PAGESIZE)
    memory[5 * MIB : 5 * MIB + 3] = b"abc"
    assert resident_pages(memory) == 1
    asyncio.run(PagePrefaulter(memory).run())
    assert resident_pages(memory) == memory.nbytes // mmap.PAGESIZE
    assert memory[5 * MIB - 1 : 5 * MIB + 4].tobytes() == b"\0abc\0"


@linux
def test_what_is_written_meanwhile_is_not_lost() -> None:
    memory = anonymous_memory(32 * MIB)

    async def main() -> None:
        touching = asyncio.create_task(PagePrefaulter(memory).run())
        for begin in range(0, memory.nbytes, MIB):
            memory[begin : begin + MIB] = bytes([1 + begin // MIB]) * MIB
            await asyncio.sleep(0)
        await touching

    asyncio.run(main())
    assert all(memory[begin : begin + MIB] == bytes([1 + begin // MIB]) * MIB for begin in range(0, 32 * MIB, MIB))


def test_one_that_was_interrupted_continues_behind_the_pieces_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()
    sizes: list[int] = []

    def slow(piece: memoryview) -> bool:
        sizes.append(piece.nbytes)
        begun.release()
        return may_end.wait(30) or True

    monkeypatch.setattr(first_touch, "prefault", slow)
    touch = PagePrefaulter(memoryview(bytearray(9 * MIB)))

    async def interrupted() -> None:
        task = asyncio.create_task(touch.run())
        await asyncio.to_thread(begun.acquire)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        may_end.set()

    asyncio.run(interrupted())
    assert sizes == [4 * MIB]
    asyncio.run(touch.run())
    assert sizes == [4 * MIB, 4 * MIB, 4 * MIB, MIB]
    asyncio.run(touch.run())
    assert len(sizes) == 4, "all is there"


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_elsewhere_nothing_is_asked_of_the_system(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    memory = memoryview(bytearray(9 * MIB))
    assert not prefault(memory)
    asyncio.run(PagePrefaulter(memory).run())


@linux
def test_a_system_that_refuses_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuses(piece: memoryview) -> bool:
        asked.append(piece.nbytes)
        return False

    monkeypatch.setattr(first_touch, "_MADV_POPULATE_WRITE", 12345)
    assert not prefault(anonymous_memory(MIB))
    monkeypatch.setattr(first_touch, "prefault", refuses)
    touch = PagePrefaulter(memoryview(bytearray(9 * MIB)))
    asyncio.run(touch.run())
    asyncio.run(touch.run())
    assert asked == [4 * MIB]
