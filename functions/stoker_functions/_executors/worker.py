"""Functions in worker processes of this machine, one at a time in each, and the program of such a process.

``python -m stoker_functions._executors.worker`` is a worker of the local executor, with a pipe at either end: messages
are four bytes of length, then that many bytes. One event at a time arrives on standard input and is answered on
standard output. When the input ends, be it because the executor closed it or because its process was killed, what runs
is cancelled and the worker ends too.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from stoker.abc import Answer, Executor
from stoker.errors import ConfigError, ConnectionLostError, DeadlineError
from stoker.fanout import ExecutorOptions, error_of_function
from stoker_functions._deployment import Deadline, Deployment, Settings
from stoker_functions._instance import HANDLERS, handler_of

_NO_DEADLINE = Deadline(math.inf, math.inf)
_KIB = 1 if sys.platform == "darwin" else 1 << 10  # what ru_maxrss counts in
_LENGTH_BYTES = 4
_LEAVE_SECONDS = 5.0  # that an idle worker has to end by itself


class Runner:
    """Calls handlers with one deployment, which is made at the first call.

    Args:
        environ: where the deployment's settings are read.
        functions: name → ``module:function``, beside stoker's own.
    """

    def __init__(self, environ: Mapping[str, str], functions: Mapping[str, str]) -> None:
        self._environ = environ
        self._functions = {**HANDLERS, **functions}
        self._deployment: Deployment | None = None

    async def perform(self, function: str, event: Mapping[str, Any]) -> str:
        """Run a function to its end; return a JSON object for :func:`answer_of`, also if it fails."""
        begun_seconds = asyncio.get_running_loop().time()
        is_cold = self._deployment is None
        try:
            outcome: dict[str, Any] = {"result": await self._result(function, event)}
            json.dumps(outcome, allow_nan=False)
        except Exception as error:  # noqa: BLE001 - a function's boundary: whatever it raises is its answer
            outcome = {"errorType": type(error).__name__, "errorMessage": str(error)}
        seconds = asyncio.get_running_loop().time() - begun_seconds
        used_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
        return json.dumps({**outcome, "billed_seconds": seconds, "memory_bytes": used_bytes, "is_cold": is_cold})

    async def close(self) -> None:
        """Release what the deployment holds."""
        if self._deployment is not None:
            await self._deployment.close()

    async def _result(self, function: str, event: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._deployment is None:
            self._deployment = Deployment(Settings.from_environment(self._environ))
        if function not in self._functions:
            raise ConfigError(f"there is no function {function!r}, only {', '.join(self._functions)}")
        result: object = await handler_of(self._functions[function])(event, self._deployment, _NO_DEADLINE)
        if not isinstance(result, dict):
            raise TypeError(f"the result is no JSON object but a {type(result).__name__}")
        return result


def answer_of(function: str, outcome: str | bytes) -> Answer:
    """Return the answer that :meth:`Runner.perform` wrote down, or raise the error.

    Raises:
        FunctionError: the function failed.
        TransientError: it failed in a way that may pass.
    """
    fields = json.loads(outcome)
    if "result" not in fields:
        raise error_of_function(function, fields["errorType"], fields["errorMessage"])
    return Answer(**fields)


def frame(message: bytes) -> bytes:
    """Return a message as it travels."""
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


async def read_frame(stream: asyncio.StreamReader) -> bytes | None:
    """Return the next message; None if the pipe has ended, in the middle of one or before."""
    try:
        return await stream.readexactly(int.from_bytes(await stream.readexactly(_LENGTH_BYTES), "big"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


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


def main() -> None:
    """Serve until the input ends. Anything that a function prints goes to standard error instead."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with os.fdopen(answers, "wb", buffering=0) as pipe:
        asyncio.run(_serve(pipe.fileno()))


async def _serve(answers: int) -> None:
    requests = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    runner = Runner(os.environ, json.loads(sys.argv[1]))
    try:
        request = await read_frame(requests)
        while request is not None:
            work = asyncio.create_task(_answered(runner, request, answers))
            following = asyncio.create_task(read_frame(requests))
            await asyncio.wait((work, following), return_when=asyncio.FIRST_COMPLETED)
            if following.done() and following.result() is None:
                work.cancel()
            await asyncio.wait((work,))
            request = await following
            if not work.cancelled():
                work.result()
    finally:
        await runner.close()


async def _answered(runner: Runner, request: bytes, answers: int) -> None:
    call = json.loads(request)
    answer = memoryview(frame((await runner.perform(call["function"], call["event"])).encode()))
    with suppress(BrokenPipeError):  # nobody waits for it any more
        while answer:
            answer = answer[os.write(answers, answer) :]


if __name__ == "__main__":
    main()
