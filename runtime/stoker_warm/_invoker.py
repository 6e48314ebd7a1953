"""Invocation of a node's function: the event, the bill, and how long a platform that failed is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from stoker.abc import Answer
from stoker.errors import FunctionError, StokerError, ThrottledError, TransientError
from stoker_warm._billing import CostMeter
from stoker_warm._config import WarmConfig
from stoker_warm._events import Task, Wake

Invoke = Callable[[str, Mapping[str, Any]], Awaitable[Answer]]
"""Calls a function by its name with an event and waits for its end; raises as :meth:`stoker.abc.Executor.call`."""

_MAY_HAVE_RUN = (FunctionError, TransientError)
"""Errors of calls that may be billed: anything else was refused before a function ran."""


class Invoker:
    """Calls one node's function. Lives on the proxy's event loop.

    Args:
        name: of the node.
        config: the tier's settings.
        invoke: calls functions.
        proxy: returns the address, ``host:port``, and the certificate's fingerprint that the node dials.
        meter: counts calls.

    Attributes:
        failure: of the last call, if that failed.
        next_call_seconds: until which the platform is to be left alone, in the loop's time.
    """

    def __init__(
        self, name: str, config: WarmConfig, invoke: Invoke, proxy: Callable[[], tuple[str, str]], meter: CostMeter
    ) -> None:
        self._name, self._config, self._invoke, self._proxy, self._meter = name, config, invoke, proxy, meter
        self.failure: StokerError | None = None
        self.next_call_seconds = float("-inf")
        self._failed_calls = 0  # in a row

    async def call(self, task: Task, *, dial_anew: bool) -> Answer:
        """Call the function, wait until it has returned, and return its answer.

        Args:
            task: what for.
            dial_anew: whether the node is to give up a connection from before.

        Raises:
            ThrottledError: the platform runs too many, and did not carry it out.
            StokerError: it failed, or its answer was lost.
        """
        proxy, fingerprint = self._proxy()
        wake = Wake(
            node=self._name,
            proxy=proxy,
            fingerprint=fingerprint,
            task=task,
            linger_seconds=self._config.linger_seconds,
            dial_anew=dial_anew,
        )
        try:
            answer = await self._invoke(self._name, wake.to_event())
        except StokerError as error:
            self._failed(error)
            if isinstance(error, _MAY_HAVE_RUN) and not isinstance(error, ThrottledError):
                self._meter.called(task, None)
            raise
        self.failure, self._failed_calls = None, 0
        self._meter.called(task, answer)
        return answer

    def _failed(self, error: StokerError) -> None:
        """A call has failed: leave the platform alone for a while, each time longer."""
        self.failure = error
        least_seconds = self._config.wake_seconds * 2.0 ** min(self._failed_calls, 3) / 8
        self._failed_calls += 1
        asked_seconds = error.retry_after_seconds if isinstance(error, TransientError) else None
        self.next_call_seconds = asyncio.get_running_loop().time() + max(least_seconds, asked_seconds or 0.0)
