"""The network of the other tests: were it wrong, they would show nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stoker.testing import run_virtual
from support.warm_wires import End, Link, LinkConfig, Network


class Taker(asyncio.BufferedProtocol):
    """Takes what comes, a thousand bytes at a time, and notes when."""

    def __init__(self) -> None:
        self.buffer = bytearray(1000)
        self.data = b""
        self.seconds: list[float] = []
        self.told: list[str] = []
        self.error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, End)
        self.end = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.buffer[:nbytes]
        self.seconds.append(asyncio.get_running_loop().time())

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.told.append("lost")
        self.error = exc


def run(config: LinkConfig, test: Callable[[Link, Taker, Taker], Awaitable[None]]) -> None:
    async def main() -> None:
        link, first, second = Link(config), Taker(), Taker()
        link.join(first, second)
        await test(link, first, second)

    run_virtual(main())


def test_bytes_come_in_order_late_by_the_latency_and_no_faster_than_the_bandwidth() -> None:
    async def test(link: Link, first: Taker, second: Taker) -> None:
        first.end.write(b"a" * 2000)
        first.end.write(b"b" * 1000)
        second.end.write(b"c")
        await asyncio.sleep(60)
        assert second.data == b"a" * 2000 + b"b" * 1000
        assert first.data == b"c"
        assert first.seconds == pytest.approx([0.501])
        assert second.seconds == pytest.approx([1.5, 2.5, 3.5])

    run(LinkConfig(latency_seconds=0.5, bytes_per_second=1000, segment_bytes=1000), test)


def test_bytes_beyond_the_window_wait_at_the_paused_sender() -> None:
    async def test(link: Link, first: Taker, second: Taker) -> None:
        first.end.set_write_buffer_limits(high=0)
        second.end.pause_reading()
        first.end.write(b"x" * 10_000)
        await asyncio.sleep(60)
        assert (first.end.get_write_buffer_size(), second.data, first.told) == (6000, b"", ["pause"])
        second.end.resume_reading()
        await asyncio.sleep(60)
        assert (first.end.get_write_buffer_size(), len(second.data)) == (0, 10_000)
        assert first.told == ["pause", "resume"]

    run(LinkConfig(window_bytes=4000), test)


@pytest.mark.parametrize("cut", [0, 1, 999, 1000, 1001, 4999])
def test_a_link_is_cut_after_the_exact_number_of_bytes(cut: int) -> None:
    async def test(link: Link, first: Taker, second: Taker) -> None:
        first.end.cut_after(cut)
        first.end.write(bytes(5000))
        await asyncio.sleep(60)
        assert len(second.data) == cut
        assert isinstance(first.error, ConnectionResetError)
        assert isinstance(second.error, ConnectionResetError)
        assert (first.told[-1], second.told) == ("lost", ["lost"])

    run(LinkConfig(), test)


def test_a_frozen_end_neither_reads_nor_sends_until_it_is_thawed() -> None:
    async def test(link: Link, first: Taker, second: Taker) -> None:
        second.end.freeze()
        first.end.write(b"to the frozen")
        second.end.write(b"from the frozen")
        await asyncio.sleep(60)
        assert (first.data, second.data) == (b"", b"")
        second.end.thaw()
        await asyncio.sleep(60)
        assert (first.data, second.data) == (b"from the frozen", b"to the frozen")

    run(LinkConfig(), test)


def test_a_frozen_end_learns_of_the_cut_when_it_is_thawed() -> None:
    async def test(link: Link, first: Taker, second: Taker) -> None:
        second.end.freeze()
        link.cut()
        await asyncio.sleep(60)
        assert (first.told, second.told) == (["lost"], [])
        second.end.thaw()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert second.told == ["lost"]

    run(LinkConfig(), test)


def test_a_split_link_loses_all_bytes_silently() -> None:
    async def test(link: Link, first: Taker, second: Taker) -> None:
        first.end.write(b"under way")
        link.split()
        second.end.abort()
        await asyncio.sleep(60)
        assert (first.told, second.told, second.data) == ([], ["lost"], b"")

    run(LinkConfig(), test)


@pytest.mark.parametrize("closes", [True, False])
def test_a_close_sends_what_waits_and_an_abort_only_what_has_left(closes: bool) -> None:
    async def test(link: Link, first: Taker, second: Taker) -> None:
        first.end.write(bytes(9000))
        (first.end.close if closes else first.end.abort)()
        await asyncio.sleep(60)
        assert (len(second.data), second.error is None) == ((9000, True) if closes else (4000, False))
        assert first.told[-1] == second.told[-1] == "lost"

    run(LinkConfig(window_bytes=4000), test)


def test_a_network_answers_by_address() -> None:
    async def main() -> None:
        network, answered = Network(LinkConfig(latency_seconds=1.0)), Taker()
        network.listen("10.0.0.5:7411", lambda: answered)
        end, mine = await network.dial("10.0.0.5:7411", Taker, name="warm-7")
        assert asyncio.get_running_loop().time() == 2
        assert mine.end is end
        assert end.get_extra_info("peername")[0] == "10.0.0.5:7411"
        assert answered.end.get_extra_info("peername")[0] == "warm-7"
        network.stop("10.0.0.5:7411")
        with pytest.raises(ConnectionRefusedError):
            await network.dial("10.0.0.5:7411", Taker)
        assert len(network.links) == 1

    run_virtual(main())
