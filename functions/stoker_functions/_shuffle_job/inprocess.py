"""Carries out tasks in this process: an executor for one machine, which needs no function to be deployed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from stoker.abc import Answer, Store
from stoker_functions._shuffle_job.task import ShuffleTask
from stoker_functions._shuffle_job.work import perform

__all__ = ["InProcess"]


class InProcess:
    """An :class:`~stoker.abc.Executor` of the one function ``shuffle``.

    Args:
        store: where the data set is; the caller closes it.
        memory_bytes: that a task may use; there is one at a time, which reads and writes much at once.
    """

    name = "this process"
    concurrency = 1
    platform: str | None = None
    sees_files = True
    heeds: frozenset[str] = frozenset()

    def __init__(self, store: Store, *, memory_bytes: int) -> None:
        self._store = store
        self._memory_bytes = memory_bytes

    async def __aenter__(self) -> InProcess:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: every call has ended when its caller has."""

    def vcpus(self, _function: str) -> float:
        """Return none: nothing is charged."""
        return 0.0

    async def call(self, function: str, event: Mapping[str, Any]) -> Answer:
        """Carry out a task.

        Raises:
            StokerError: it could not be.
        """
        started = asyncio.get_running_loop().time()
        result = await perform(self._store, ShuffleTask.from_event(event), memory_bytes=self._memory_bytes)
        seconds = asyncio.get_running_loop().time() - started
        return Answer(result=result, billed_seconds=seconds, memory_bytes=self._memory_bytes, is_cold=None)
