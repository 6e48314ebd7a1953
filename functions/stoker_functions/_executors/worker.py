"""The local executor, which runs functions in worker processes of this machine, and the program of a worker.

``python -m stoker_functions._executors.worker`` is a worker. It reads one event at a time from standard input and
writes the answer to standard output; a message is four bytes of length, then that many bytes. When the input ends,
because the executor closed it or was killed, the worker cancels the running function and ends.
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

from stoker._base.threads import count_cores
from stoker.abc import Answer, Executor
from stoker.errors import ConfigError, ConnectionLostError, DeadlineError
from stoker.fanout import ExecutorOptions, error_of_function
from stoker_functions._deployment import Deployment, DeploymentSettings, InvocationDeadline
from stoker_functions._instance import HANDLERS, import_handler

_NO_DEADLINE = InvocationDeadline(math.inf, math.inf)
_KIB = 1 if sys.platform == "darwin" else 1 << 10  # what ru_maxrss counts in
_LENGTH_BYTES = 4
_EXIT_SECONDS = 5.0  # time for an idle worker to end by itself


class Runner:
    """Calls handlers with one deployment, which is opened at the first call.

    Args:
        environ: environment variables with the deployment's settings.
        functions: name → ``module:function`` of functions in addition to stoker's own.

    Example:
        >>> runner = Runner({"STOKER_DATASETS": "train=data"}, {})
        >>> outcome = await runner.perform("compact", {"dataset": "data"})
        >>> await runner.close()
        >>> parse_answer("compact", outcome).is_cold
        True
    """

    def __init__(self, environ: Mapping[str, str], functions: Mapping[str, str]) -> None:
        self._environ = environ
        self._functions = {**HANDLERS, **functions}
        self._deployment: Deployment | None = None

    async def perform(self, function: str, event: Mapping[str, Any]) -> str:
        """Run a function to its end, and return a JSON object for :func:`parse_answer`, also if the function fails.

        Args:
            function: name of the function.
            event: event of the function, of JSON values.
        """
        begun_seconds = asyncio.get_running_loop().time()
        is_cold = self._deployment is None
        try:
            outcome: dict[str, Any] = {"result": await self._call_handler(function, event)}
            json.dumps(outcome, allow_nan=False)
        except Exception as error:  # noqa: BLE001 - a function's boundary: its error is its answer
            outcome = {"errorType": type(error).__name__, "errorMessage": str(error)}
        seconds = asyncio.get_running_loop().time() - begun_seconds
        used_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
        return json.dumps({**outcome, "billed_seconds": seconds, "memory_bytes": used_bytes, "is_cold": is_cold})

    async def close(self) -> None:
        """Close the deployment."""
        if self._deployment is not None:
            await self._deployment.close()

    async def _call_handler(self, function: str, event: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._deployment is None:
            self._deployment = Deployment(DeploymentSettings.from_environment(self._environ))
        if function not in self._functions:
            raise ConfigError(f"there is no function {function!r}, only {', '.join(self._functions)}")
        result: object = await import_handler(self._functions[function])(event, self._deployment, _NO_DEADLINE)
        if not isinstance(result, dict):
            raise TypeError(f"the result is not a JSON object but a {type(result).__name__}")
        return result


def parse_answer(function: str, outcome: str | bytes) -> Answer:
    """Return the answer in the outcome of :meth:`Runner.perform`, or raise its error.

    Args:
        function: name of the function, for errors.
        outcome: JSON object from :meth:`Runner.perform`.

    Raises:
        FunctionError: the function failed.
        TransientError: the function failed, and may succeed if it is called again.

    Example:
        >>> outcome = '{"result": {"samples": 100}, "billed_seconds": 2.5, "memory_bytes": 0, "is_cold": true}'
        >>> parse_answer("pack", outcome).result["samples"]
        100
    """
    fields = json.loads(outcome)
    if "result" not in fields:
        raise error_of_function(function, fields["errorType"], fields["errorMessage"])
    return Answer(**fields)


def frame(message: bytes) -> bytes:
    """Return a message with its length in front."""
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


async def read_frame(stream: asyncio.StreamReader) -> bytes | None:
    """Return the next message; None if the pipe has ended, also within a message."""
    try:
        return await stream.readexactly(int.from_bytes(await stream.readexactly(_LENGTH_BYTES), "big"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class LocalExecutor(Executor):
    """Runs functions in worker processes, which have a deployment each and exchange JSON over pipes.

    A call starts a worker if none is idle, by default up to one per core. A worker whose call is cancelled is killed,
    as a cloud kills an instance; a dead worker is replaced. If this process dies, its workers end with their input.
    """

    name = "local"
    sees_files = True

    def __init__(self, options: ExecutorOptions) -> None:
        self.concurrency = options.concurrency or count_cores()
        self._timeout_seconds = options.timeout_seconds
        self._environment = {**os.environ, **options.environment}
        self._functions = json.dumps(dict(options.functions))
        self._idle: list[Process] = []
        self._workers: set[Process] = set()
        self._semaphore: asyncio.Semaphore | None = None

    def __repr__(self) -> str:
        return f"<LocalExecutor {len(self._workers)} workers, {len(self._idle)} idle>"

    async def __aenter__(self) -> LocalExecutor:
        self._semaphore = asyncio.Semaphore(self.concurrency)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._semaphore = None
        idle, self._idle = self._idle, []
        for process in self._workers - set(idle):
            _kill(process)
        await asyncio.gather(*(_wait_for_end(process) for process in self._workers))
        self._workers.clear()

    async def call(self, function: str, event: Mapping[str, Any]) -> Answer:
        """Run a function in a worker, after waiting for one that is free.

        Raises:
            ConnectionLostError: the worker died or could not be started.
            DeadlineError: the function took longer than the options allow.
            FunctionError: the function failed.
        """
        if self._semaphore is None:
            raise ConfigError("an executor is used inside its 'async with' block")
        request = frame(json.dumps({"function": function, "event": dict(event)}).encode())
        async with self._semaphore:
            process = self._idle.pop() if self._idle else await self._start_worker()
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    answer = await _exchange(process, request)
            except TimeoutError:
                _kill(process)
                raise DeadlineError(f"{function} took longer than {self._timeout_seconds} s") from None
            except BaseException:
                _kill(process)
                raise
            if answer is None:
                raise ConnectionLostError(f"the worker that ran {function} {await self._describe_exit(process)}")
            self._idle.append(process)
        return parse_answer(function, answer)

    async def _start_worker(self) -> Process:
        # In its own session, so that Ctrl-C on the terminal reaches only this process, which then ends the worker.
        # -P keeps modules of the current folder out.
        program = (sys.executable, "-P", "-m", "stoker_functions._executors.worker", self._functions)
        try:
            process = await asyncio.create_subprocess_exec(
                *program, stdin=PIPE, stdout=PIPE, env=self._environment, start_new_session=True
            )
        except OSError as error:
            raise ConnectionLostError(f"no worker could be started: {error}") from error
        self._workers.add(process)
        return process

    async def _describe_exit(self, process: Process) -> str:
        """Describe the end of a worker that has closed its pipe."""
        await _wait_for_end(process)
        self._workers.discard(process)
        code = process.returncode or 0
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


async def _exchange(process: Process, request: bytes) -> bytes | None:
    assert process.stdin is not None  # noqa: S101 - both are pipes
    assert process.stdout is not None  # noqa: S101
    with suppress(ConnectionError):  # the worker has ended, and so has the pipe of its answer
        process.stdin.write(request)
        await process.stdin.drain()
    return await read_frame(process.stdout)


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


async def _wait_for_end(process: Process) -> None:
    """Close a worker's input, at which an idle worker ends, and wait for the end; kill it after 5 s."""
    assert process.stdin is not None  # noqa: S101 - it is a pipe
    process.stdin.close()
    try:
        async with asyncio.timeout(_EXIT_SECONDS):
            await process.communicate()
    except TimeoutError:
        _kill(process)
        await process.communicate()


def main() -> None:
    """Run a worker until its input ends; output that functions print goes to standard error."""
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
            work = asyncio.create_task(_answer_call(runner, request, answers))
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


async def _answer_call(runner: Runner, request: bytes, answers: int) -> None:
    call = json.loads(request)
    answer = memoryview(frame((await runner.perform(call["function"], call["event"])).encode()))
    with suppress(BrokenPipeError):  # the executor has ended
        while answer:
            answer = answer[os.write(answers, answer) :]


if __name__ == "__main__":
    main()
