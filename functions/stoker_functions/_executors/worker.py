"""Functions in a process of this machine, as a deployed instance would run them, and the program of such a process.

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
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from stoker.abc import Answer
from stoker.errors import ConfigError
from stoker.fanout import error_of_function
from stoker_functions._deployment import Deadline, Deployment, Settings
from stoker_functions._instance import HANDLERS, handler_of

_NO_DEADLINE = Deadline(math.inf, math.inf)
_KIB = 1 if sys.platform == "darwin" else 1 << 10  # what ru_maxrss counts in
_LENGTH_BYTES = 4


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
        return json.dumps({**outcome, "seconds": seconds, "memory_bytes": used_bytes, "is_cold": is_cold})

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
    return Answer(
        result=fields["result"],
        billed_seconds=fields["seconds"],
        memory_bytes=fields["memory_bytes"],
        is_cold=fields["is_cold"],
    )


def frame(message: bytes) -> bytes:
    """Return a message as it travels."""
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


async def read_frame(stream: asyncio.StreamReader) -> bytes | None:
    """Return the next message; None if the pipe has ended, in the middle of one or before."""
    try:
        return await stream.readexactly(int.from_bytes(await stream.readexactly(_LENGTH_BYTES), "big"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


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
