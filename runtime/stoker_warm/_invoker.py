"""Invocation of a node's function: the event, the bill, and how long a platform that failed is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.abc import Answer
from stoker.errors import FunctionError, StokerError, ThrottledError, TransientError
from stoker_warm._config import WarmConfig
from stoker_warm._events import Task, Wake
from stoker_warm._membership import Contents
from stoker_warm._shard import ShardMac

Invoke = Callable[[str, Mapping[str, Any]], Awaitable[Answer]]
"""Calls a function by its name with an event and waits for its end; raises as :meth:`stoker.abc.Executor.call`."""

Billed = Callable[[Answer | None, Task], None]
"""Is called with the answer of each call, None if there was none, and the task of the call."""

_MAY_HAVE_RUN = (FunctionError, TransientError)
"""Errors of calls that may be billed: anything else was refused before a function ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """What all nodes of a proxy share.

    Attributes:
        config: the tier's settings.
        mac: of shards.
        invoke: calls functions.
        proxy: makes the address, ``host:port``, and the certificate's fingerprint that nodes dial.
        spawn: runs something that ends by itself, in the proxy's task group.
        billed: is called after each call.
        found: is called with a node's number and what it holds, whenever it has greeted or was given up.
    """

    config: WarmConfig
    mac: ShardMac
    invoke: Invoke
    proxy: Callable[[], tuple[str, str]]
    spawn: Callable[[Coroutine[Any, Any, object]], object]
    billed: Billed
    found: Callable[[int, Contents], None]


class Invoker:
    """Calls one node's function. Lives on the proxy's event loop.

    Args:
        name: of the node.
        parts: what it shares with others.

    Attributes:
        failure: of the last call, if that failed.
        next_call_seconds: until which the platform is to be left alone, in the loop's time.
    """

    def __init__(self, name: str, parts: NodeParts) -> None:
        self._name, self._parts = name, parts
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
        proxy, fingerprint = self._parts.proxy()
        wake = Wake(
            node=self._name,
            proxy=proxy,
            fingerprint=fingerprint,
            task=task,
            linger_seconds=self._parts.config.linger_seconds,
            dial_anew=dial_anew,
        )
        try:
            answer = await self._parts.invoke(self._name, wake.to_event())
        except StokerError as error:
            self._failed(error)
            if isinstance(error, _MAY_HAVE_RUN) and not isinstance(error, ThrottledError):
                self._parts.billed(None, task)
            raise
        self.failure, self._failed_calls = None, 0
        self._parts.billed(answer, task)
        return answer

    def _failed(self, error: StokerError) -> None:
        """A call has failed: leave the platform alone for a while, each time longer."""
        self.failure = error
        least_seconds = self._parts.config.wake_seconds * 2.0 ** min(self._failed_calls, 3) / 8
        self._failed_calls += 1
        asked_seconds = error.retry_after_seconds if isinstance(error, TransientError) else None
        self.next_call_seconds = asyncio.get_running_loop().time() + max(least_seconds, asked_seconds or 0.0)
