"""Calls of a node's function: what for, what became of them, and how soon the next one may be made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from stoker.abc import Answer
from stoker.errors import FunctionError, StokerError, ThrottledError, TransientError, WireError
from stoker_warm._life import State
from stoker_warm._settings import WarmConfig
from stoker_warm._standing import Standing
from stoker_warm._wake import Report, Task, Wake

__all__ = ["Billed", "Caller", "Invoke"]

Invoke = Callable[[str, Mapping[str, Any]], Awaitable[Answer]]
"""Calls a function by its name with an event and waits for its end; raises as :meth:`stoker.abc.Executor.call`."""

Billed = Callable[[Answer | None, Task], None]
"""Is told what a call came to, and what it was for; None where no answer came."""

_MAY_HAVE_RUN = (FunctionError, TransientError)
"""Errors of calls that may be billed: anything else was refused before a function ran."""


class Caller:
    """Calls one node. Lives on the proxy's event loop.

    Args:
        standing: with the node.
        config: the tier's settings.
        invoke: calls functions.
        proxy: makes the address, ``host:port``, and the certificate's fingerprint that nodes dial.
        billed: is told of each call.

    Attributes:
        failure: of the last call, if that failed.
        calm_seconds: until then the platform is left alone.
        may_run: an answer was lost, so the instance may run all the same; whoever has asked it clears this.
    """

    def __init__(
        self,
        standing: Standing,
        config: WarmConfig,
        invoke: Invoke,
        proxy: Callable[[], tuple[str, str]],
        billed: Billed,
    ) -> None:
        self._standing, self._config = standing, config
        self._invoke, self._proxy, self._billed = invoke, proxy, billed
        self._failed_calls = 0  # in a row
        self.failure: StokerError | None = None
        self.calm_seconds = float("-inf")
        self.may_run = False

    async def call(self, task: Task) -> bool:
        """Call the function and wait until it has returned.

        Returns:
            False if its answer tells that what the node holds is not what it is believed to.
        """
        standing, life = self._standing, self._standing.life
        standing.contact_seconds = asyncio.get_running_loop().time()
        event = self._event(task)
        life.invoked()
        is_as_expected = True
        try:
            answer = await self._invoke(standing.name, event)
        except ThrottledError as error:
            self._failed(error)
            life.throttled()
        except StokerError as error:
            self._failed(error)
            # If only the answer was lost, it runs on, and another call would start another instance beside it.
            self.may_run = isinstance(error, TransientError) and life.state is State.AWAKE
            if isinstance(error, _MAY_HAVE_RUN):
                self._billed(None, task)
            standing.gave_up(life.failed())
        except BaseException:
            life.failed()
            raise
        else:
            self.failure, self._failed_calls = None, 0
            self._billed(answer, task)
            if task is Task.WARM:
                is_as_expected = self._is_as_expected(answer)
            standing.gave_up(life.returned())
        standing.touched()
        return is_as_expected

    async def call_second(self) -> None:
        """Call the function while its instance is busy: that makes a second one."""
        with suppress(StokerError):
            answer = None
            try:
                answer = await self._invoke(self._standing.name, self._event(Task.BACKUP))
            finally:
                self._billed(answer, Task.BACKUP)

    def _event(self, task: Task) -> dict[str, Any]:
        standing, (proxy, fingerprint) = self._standing, self._proxy()
        return Wake(
            node=standing.name,
            proxy=proxy,
            fingerprint=fingerprint,
            task=task,
            linger_seconds=self._config.linger_seconds,
            dial_anew=standing.connection is None or standing.life.tries > 0 or task is Task.BACKUP,
        ).to_event()

    def _failed(self, error: StokerError) -> None:
        """A call has failed: leave the platform alone for a while, each time longer."""
        self.failure = error
        least_seconds = self._config.wake_seconds * 2.0 ** min(self._failed_calls, 3) / 8
        self._failed_calls += 1
        asked_seconds = error.retry_after_seconds if isinstance(error, TransientError) else None
        self.calm_seconds = asyncio.get_running_loop().time() + max(least_seconds, asked_seconds or 0.0)

    def _is_as_expected(self, answer: Answer) -> bool:
        try:
            return self._standing.is_as_expected(Report.parse(answer.result))
        except WireError:
            return False
