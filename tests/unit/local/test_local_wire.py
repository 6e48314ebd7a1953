from __future__ import annotations

import asyncio
import socket

import pytest

from stoker_local._http1 import ServerConnection


def test_nothing_is_written_to_a_connection_that_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    is_over = asyncio.Event()

    async def serve(wire: ServerConnection) -> None:
        theirs.close()  # and the event loop has had no time to notice
        try:
            await wire.write(bytes(16 << 20))
        finally:
            is_over.set()

    async def main() -> None:
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: ServerConnection(serve), sock=ours)
        await is_over.wait()
        transport.close()

    asyncio.run(main())
    assert caplog.messages == []
