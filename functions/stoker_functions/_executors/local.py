"""Functions in worker processes of this machine, one at a time in each."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from stoker.abc import Answer, Executor
from stoker.errors import ConfigError, ConnectionLostError, DeadlineError
from stoker.fanout import ExecutorOptions
from stoker_functions._executors.worker import answer_of, frame, read_frame

_LEAVE_SECONDS = 5.0  # that an idle worker has to end by itself


class LocalExecutor(Executor):
    """Worker processes with a deployment of their own each; they speak JSON over pipes.

    A worker is started when a call finds none idle, up to one per core. One that dies, or whose call is cancelled, is
    replaced: it is killed as a cloud would kill an instance. If this process dies, its workers see the end of their
    input and go, too.
    """

    name = "local"
    sees_files = True

    def __init__(self, options: ExecutorOptions) -> None:
        self.concurrency = options.concurrency or _cores()
        self._timeout_seconds = options.timeout_seconds
        self._environment = {**os.environ, **options.environment}
        self._functions = json.dumps(dict(options.functions))
        self._idle: list[Process] = []
        self._workers: set[Process] = set()
        self._turns: asyncio.Semaphore | None = None

    def __repr__(self) -> str:
        return f"<LocalExecutor {len(self._workers)} workers, {len(self._idle)} idle>"

    async def __aenter__(self) -> LocalExecutor:
        self._turns = asyncio.Semaphore(self.concurrency)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._turns = None
        idle, self._idle = self._idle, []
        for process in self._workers - set(idle):
            _kill(process)
        await asyncio.gather(*(_ended(process) for process in self._workers))
        self._workers.clear()

    async def call(self, function: str, event: Mapping[str, Any]) -> Answer:
        """Run a function in a worker; waits while all are busy.

        Raises:
            ConnectionLostError: the worker died, or none could be started.
            DeadlineError: the function took longer than the options allow.
            FunctionError: the function failed.
        """
        if self._turns is None:
            raise ConfigError("an executor is used inside its 'async with' block")
        request = frame(json.dumps({"function": function, "event": dict(event)}).encode())
        async with self._turns:
            process = self._idle.pop() if self._idle else await self._started()
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    answer = await _exchanged(process, request)
            except TimeoutError:
                _kill(process)
                raise DeadlineError(f"{function} took longer than {self._timeout_seconds} s") from None
            except BaseException:
                _kill(process)
                raise
            if answer is None:
                raise ConnectionLostError(f"the worker that ran {function} {await self._fate(process)}")
            self._idle.append(process)
        return answer_of(function, answer)

    async def _started(self) -> Process:
        # In a session of its own, so that Ctrl-C on the terminal reaches only this process, which then ends it.
        # And -P: what lies in the current folder is no module.
        program = (sys.executable, "-P", "-m", "stoker_functions._executors.worker", self._functions)
        try:
            process = await asyncio.create_subprocess_exec(
                *program, stdin=PIPE, stdout=PIPE, env=self._environment, start_new_session=True
            )
        except OSError as error:
            raise ConnectionLostError(f"no worker could be started: {error}") from error
        self._workers.add(process)
        return process

    async def _fate(self, process: Process) -> str:
        """Return what became of a worker that has closed its pipe."""
        await _ended(process)
        self._workers.discard(process)
        code = process.returncode or 0
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def _exchanged(process: Process, request: bytes) -> bytes | None:
    assert process.stdin is not None  # noqa: S101 - both are pipes
    assert process.stdout is not None  # noqa: S101
    with suppress(ConnectionError):  # the worker is gone: then the answer's pipe has ended, too
        process.stdin.write(request)
        await process.stdin.drain()
    return await read_frame(process.stdout)


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


async def _ended(process: Process) -> None:
    """Close a worker's input and wait for its end, which an idle one finds by itself."""
    assert process.stdin is not None  # noqa: S101 - it is a pipe
    process.stdin.close()
    try:
        async with asyncio.timeout(_LEAVE_SECONDS):
            await process.communicate()
    except TimeoutError:
        _kill(process)
        await process.communicate()
