"""Making sure that a node is awake: what has just spoken is, what may be is pinged, and what sleeps is called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from stoker.errors import ConnectionLostError, StokerError
from stoker_warm._calling import Caller
from stoker_warm._connection import Connection
from stoker_warm._life import State
from stoker_warm._settings import WarmConfig
from stoker_warm._standing import Standing
from stoker_warm._wake import Task
from stoker_warm._wire import Kind

__all__ = ["Waking"]


class Waking:
    """Wakes one node for all who want it. Lives on the proxy's event loop.

    Args:
        standing: with the node.
        caller: of the node.
        config: the tier's settings.
        spawn: runs a call, which may last longer than anybody waits for it.
    """

    def __init__(
        self,
        standing: Standing,
        caller: Caller,
        config: WarmConfig,
        spawn: Callable[[Coroutine[Any, Any, object]], object],
    ) -> None:
        self._standing, self._caller, self._config, self._spawn = standing, caller, config, spawn
        self._waiting = 0
        self._waking: asyncio.Task[ConnectionLostError | None] | None = None

    def awake(self) -> tuple[Connection, str] | None:
        """Return the connection of a node that has just spoken, and its instance."""
        standing = self._standing
        if standing.connection is None or not standing.life.may_send(asyncio.get_running_loop().time()):
            return None
        return standing.connection, str(standing.life.instance)

    async def ready_by(self, end_seconds: float) -> tuple[Connection, str]:
        """Return the connection of a node that is awake by then, and its instance.

        Raises:
            ConnectionLostError: it is gone, or could not be woken.
        """
        try:
            async with asyncio.timeout_at(end_seconds):
                return await self.ready()
        except TimeoutError:
            raise ConnectionLostError(f"{self._standing.name} was not awake in time") from None

    async def ready(self) -> tuple[Connection, str]:
        """Return the connection of a node that is awake, and its instance.

        Raises:
            ConnectionLostError: it is gone, or could not be woken.
        """
        standing = self._standing
        is_ready = standing.life.may_send(asyncio.get_running_loop().time())
        while not is_ready or standing.connection is None:
            self._waiting += 1
            try:
                waking = self.rouse()
                # Whoever wants it waits for the same call; one that is cancelled leaves it to the others.
                await asyncio.wait([waking])
            finally:
                self._waiting -= 1
            error = ConnectionLostError(f"{standing.name} was let go") if waking.cancelled() else waking.result()
            if error is not None:
                raise ConnectionLostError(str(error))
            is_ready = standing.life.state is State.AWAKE
        return standing.connection, str(standing.life.instance)

    def rouse(self) -> asyncio.Task[ConnectionLostError | None]:
        """Begin to wake it, unless that is under way."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.ensure_future(self._wake())
        return self._waking

    async def close(self) -> None:
        """Wake it no more."""
        if self._waking is not None:
            self._waking.cancel()
            await asyncio.wait([self._waking])

    async def _wake(self) -> ConnectionLostError | None:
        """Do what it takes to hear of it, as long as somebody wants it; return the error if that fails."""
        standing, life, loop = self._standing, self._standing.life, asyncio.get_running_loop()
        begun_seconds = loop.time()
        while not (life.may_send(loop.time()) or self._is_awake_since(begun_seconds)):
            if life.state is State.GONE:
                return ConnectionLostError(f"{standing.name} was called {life.tries} times and does not come")
            if standing.is_closed or not (self._waiting or standing.asked):
                return ConnectionLostError(f"{standing.name} was let go")
            if standing.connection is not None and (self._caller.may_run or life.state is State.AWAKE):
                await self._ping(standing.connection)
                continue
            standing.changed.clear()
            pause_seconds = self._caller.calm_seconds - loop.time() if life.must_invoke else 0.0
            if pause_seconds > 0.0:
                await standing.has_changed(pause_seconds)
                continue
            if life.must_invoke:
                self._spawn(self._caller.call(Task.SERVE))
                await asyncio.sleep(0)
            if not await standing.has_changed(self._config.wake_seconds):
                standing.gave_up(life.silent())
        return None

    def _is_awake_since(self, begun_seconds: float) -> bool:
        life = self._standing.life
        return life.state is State.AWAKE and life.heard_seconds >= begun_seconds

    async def _ping(self, connection: Connection) -> None:
        self._caller.may_run = False
        sent_seconds, instance = asyncio.get_running_loop().time(), self._standing.life.instance
        try:
            await connection.request(Kind.PING, timeout=self._config.ping_seconds)
        except StokerError:
            if connection.is_open:
                self._standing.was_silent(sent_seconds)
            else:
                self._standing.lost(connection)
        else:
            self._standing.heard(str(instance))
