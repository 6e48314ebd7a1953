"""How the proxy stands with a node: its life, its connection, and what to make of its words and of its silence.

What is heard here changes the state at once and waits for nothing. Whoever waits for a node to be awake looks again
whenever ``changed`` is set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stoker_warm._connection import Connection
from stoker_warm._life import Contents, Life, State
from stoker_warm._settings import WarmConfig
from stoker_warm._wake import Report

__all__ = ["Standing"]


class Standing:
    """One node's state, on the proxy's event loop.

    Args:
        name: of the node.
        config: the tier's settings.
        found: is told what the node holds, each time that this is news.
        call_back: is called when the node sleeps and requests lie on its socket.

    Attributes:
        life: of the node.
        connection: to the known instance.
        contact_seconds: when it was called or spoke last.
        changed: is set when something has happened to it.
        asked: requests without an answer.
        changes: of what it holds.
        is_closed: it is let go: nobody calls it any more.
    """

    def __init__(
        self, name: str, config: WarmConfig, *, found: Callable[[Contents], None], call_back: Callable[[], object]
    ) -> None:
        self.name = name
        self.life = Life(fresh_seconds=config.fresh_seconds)
        self.connection: Connection | None = None
        self.contact_seconds = self._now()
        self.changed = asyncio.Event()
        self.asked = self.changes = 0
        self.is_closed = False
        self._read_seconds = config.read_seconds
        self._found, self._call_back = found, call_back
        self._silent_seconds = float("-inf")
        self._delivery_seconds = float("-inf")  # when it last delivered, or was found not to
        self._is_called_back = False

    # What is heard.

    def greeted(self, connection: Connection, report: Report) -> Contents | None:
        """An instance has connected; return what to think of it, as :meth:`Life.greeted` does."""
        contents = self.life.greeted(report.instance, report.digest, self._now())
        if contents is not None:
            if self.connection is not None:
                self.connection.abort()
            self.connection = None if contents is Contents.DOUBTFUL else connection
        return contents

    def heard(self, instance: str) -> None:
        """An instance has answered."""
        if self.life.heard(instance, self._now()):
            self.contact_seconds = self._now()

    def answered(self, instance: str, *, is_shard: bool) -> None:
        """The instance at the end of the connection has answered a request."""
        self.heard(instance)
        self._is_called_back = False
        if is_shard:
            self._delivery_seconds = self._now()
            self.life.delivered()

    def noticed(self, report: Report, *, is_bye: bool) -> None:
        """The instance at the end of the connection says that it is here again, or that it goes."""
        (self.life.said_bye if is_bye else self.life.heard)(report.instance, self._now())
        self.noted(report)
        self.touched()

    def is_as_expected(self, report: Report) -> bool:
        """Return whether a call was answered by the known instance, with what it is believed to hold."""
        return self.life.heard(report.instance, self._now()) and report.digest == self.life.expected

    def noted(self, report: Report) -> None:
        """Take note of a digest; answers to what was asked at the same time come in any order."""
        if report.digest.term >= self.life.expected.term:
            self.changes += report.digest != self.life.expected
            self.life.changed(report.instance, report.digest)

    def doubt(self) -> None:
        """It may hold what nobody knows of, or not hold what it is believed to: have it say what it holds."""
        self.changes += 1
        self.life.doubted(str(self.life.instance))
        self._found(Contents.UNKNOWN)

    # What is not heard.

    def lost(self, connection: Connection) -> None:
        """A connection has ended."""
        if connection is self.connection and self.life.instance is not None:
            self.life.lost(self.life.instance)
            self.connection = None
            self.changed.set()  # which is no contact: whether the instance is there, the next call tells

    def was_silent(self, sent_seconds: float) -> None:
        """It has not answered what was sent then. Many requests that wait at once are one silence."""
        if max(self.life.heard_seconds, self._silent_seconds) < sent_seconds:
            self._silent_seconds = self._now()
            self.gave_up(self.life.silent())
            self.touched()

    def did_not_deliver(self, sent_seconds: float) -> None:
        """It has not delivered the shard that it was asked for then. Many that it is asked for at once are one."""
        had_time = self._now() - sent_seconds >= self._read_seconds / 2  # to wake it took the rest
        if had_time and self._delivery_seconds <= sent_seconds:
            self._delivery_seconds = self._now()
            self.gave_up(self.life.undelivered())

    def gave_up(self, is_given_up: bool) -> None:
        """Close the connection of a node if it is given up: what it held is lost."""
        if is_given_up:
            if self.connection is not None:
                self.connection.abort()
                self.connection = None
            self.changed.set()
            self._found(Contents.NONE)

    def touched(self) -> None:
        """Something has happened to it, or was done to it."""
        self.contact_seconds = self._now()
        self.changed.set()
        # What was asked while it said that it goes lies on its socket: it is answered when it is called again. One that
        # goes again before it has answered anything is left alone.
        is_cut_short = self.asked and self.connection is not None and self.life.state is State.SLEEPING
        if is_cut_short and not (self._is_called_back or self.is_closed):
            self._is_called_back = True
            self._call_back()

    async def has_changed(self, seconds: float) -> bool:
        """Wait until something happens to it; return whether that was in time."""
        try:
            async with asyncio.timeout(seconds):
                await self.changed.wait()
        except TimeoutError:
            return False
        return True

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
