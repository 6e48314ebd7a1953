"""A worker process of the local executor: ``python -m stoker_functions._executors.worker``, a pipe at either end.

One event at a time arrives on standard input and is answered on standard output. When the input ends, be it because
the executor closed it or because its process was killed, what runs is cancelled and the worker ends too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress

from stoker_functions._executors.frames import frame, read_frame
from stoker_functions._executors.runner import Runner

__all__ = ["main"]


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
