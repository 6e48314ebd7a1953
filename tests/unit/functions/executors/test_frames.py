from __future__ import annotations

import asyncio

import pytest

from stoker_functions._executors.worker import frame, read_frame


def read(data: bytes) -> list[bytes | None]:
    async def everything() -> list[bytes | None]:
        stream = asyncio.StreamReader()
        stream.feed_data(data)
        stream.feed_eof()
        messages = [await read_frame(stream)]
        while messages[-1] is not None:
            messages.append(await read_frame(stream))
        return messages

    return asyncio.run(everything())


def test_messages_are_read_as_they_were_framed() -> None:
    messages = [b"", b"{}", b"x" * 200_000, b"\x00\n\xff"]
    assert read(b"".join(map(frame, messages))) == [*messages, None]


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 9])
def test_a_pipe_that_ends_within_a_message_has_no_message(cut: int) -> None:
    assert read(frame(b"0123456789")[:cut]) == [None]
