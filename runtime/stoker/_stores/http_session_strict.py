"""aiohttp's connections, which are not used again once bytes came behind an answer.

aiohttp keeps such bytes, and takes them for the beginning of the next answer over the connection.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler

__all__ = ["StrictConnector"]

_HEAD_END, _LAST_CHUNK = b"\r\n\r\n", b"0\r\n\r\n"


class StrictConnector(aiohttp.TCPConnector):
    """Makes connections that carry one answer for each request, and nothing else."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._factory = cast("partial[ResponseHandler]", partial(_OneAnswer, loop=self._loop))


class _OneAnswer(ResponseHandler):
    """Closes its connection if anything comes that was not asked for, with an answer or after it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._is_asked = False
        self._heads: list[Any] = []  # interim ones, the answer's, and what must not be there
        self._ahead = b""  # what came until the head was whole

    def set_response_params(self, **parameters: Any) -> None:
        """Expect an answer."""
        self._is_asked, self._payload, self._ahead = True, None, b""
        self._heads.clear()
        super().set_response_params(**parameters)

    def feed_data(self, data: Any, *size: Any) -> None:
        """Take note of a head; interim ones come before the answer's."""
        self._heads.append(data[0])
        super().feed_data(data, *size)

    def data_received(self, data: bytes) -> None:
        """Pass on what belongs to the answer that is awaited."""
        if not self._is_asked:
            if data:
                self._hang_up()
            return
        payload = self._payload
        before_bytes = None if not self._has_head or payload is None else payload.total_bytes
        if before_bytes is None:
            self._ahead += data
        super().data_received(data)
        if not self._has_head or self._payload is None:
            return
        if self._payload.is_eof():
            self._is_asked = False
            if self._has_more(data, before_bytes, self._payload.total_bytes):
                self._hang_up()
        self._ahead = b""

    def _hang_up(self) -> None:
        """Close the connection, which may have been given back already; the answer is there."""
        self.force_close()
        self.abort()

    @property
    def _has_head(self) -> bool:
        return any(head.code >= 200 for head in self._heads)

    def _has_more(self, data: bytes, before_bytes: int | None, body_bytes: int) -> bool:
        """Return whether the segment in which the answer ended has bytes behind it.

        Args:
            data: the segment.
            before_bytes: of the body that came before it; None if the head came with it.
            body_bytes: of the whole body.
        """
        if any(head.code >= 200 for head in self._heads[:-1]):
            return True
        if self._heads[-1].chunked:
            return not data.endswith(_LAST_CHUNK[-len(data) :])
        if before_bytes is not None:
            return len(data) > body_bytes - before_bytes
        end = 0
        for _ in self._heads:
            end = self._ahead.find(_HEAD_END, end) + len(_HEAD_END)
        return len(self._ahead) > end + body_bytes
