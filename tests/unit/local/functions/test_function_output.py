from __future__ import annotations

import asyncio
import os

import pytest

from stoker_local.functions._processes import OutputPipe, tail


def test_what_was_written_is_taken_once_and_still_after_the_end() -> None:
    async def scenario() -> None:
        output = OutputPipe()
        os.write(output.writer, b"one ")
        assert output.take() == b"one "
        os.write(output.writer, b"two")
        output.close_writer()
        output.close()
        assert (output.take(), output.take()) == (b"two", b"")

    asyncio.run(scenario())


def test_of_much_that_is_written_the_end_is_kept() -> None:
    async def scenario() -> None:
        output = OutputPipe()
        for number in range(100):
            os.write(output.writer, b"%04d" % number * 1024)
            await asyncio.sleep(0)
        taken = output.take()
        assert taken.endswith(b"0099" * 1024)
        assert len(taken) <= 1 << 16
        assert tail(taken) == taken[-4096:]
        output.close()

    asyncio.run(scenario())


def test_reading_the_output_ends_although_a_process_writes_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        output = OutputPipe()
        with monkeypatch.context() as patched:
            patched.setattr(os, "read", lambda descriptor, size: b"x" * size)
            assert set(output.take()) == {ord("x")}
        output.close()

    asyncio.run(scenario())
