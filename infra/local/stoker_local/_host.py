"""Where a local server runs for callers that have no event loop: on its own thread, or in its own process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

from stoker_local._bucket import LocalBucket, environment_of
from stoker_local._config import BucketConfig
from stoker_local._network import Shape

__all__ = ["BucketProcess", "bucket_process", "running_bucket", "running_server", "stopping"]

_EXIT_SECONDS = 10.0
_URL = "AWS_ENDPOINT_URL="

T = TypeVar("T")


@contextmanager
def running_server(create: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """Run the server that ``create`` returns on an event loop of its own, on a thread of its own.

    An error of its start is raised here; leaving ends the server, its loop and its thread.
    """
    ready: Future[tuple[T, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        async with create() as server:
            ready.set_result((server, asyncio.get_running_loop(), stop))
            await stop.wait()

    def report(ended: Future[None]) -> None:
        error = ended.exception()
        if error is not None and not ready.done():
            ready.set_exception(error)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="stoker-local") as thread:
        ended = thread.submit(lambda: asyncio.run(serve()))
        ended.add_done_callback(report)
        server, loop, stop = ready.result()
        try:
            yield server
        finally:
            loop.call_soon_threadsafe(stop.set)
            ended.result()


@contextmanager
def running_bucket(config: BucketConfig | None = None) -> Iterator[LocalBucket]:
    """Run a local bucket on a thread of its own, for synchronous tests."""
    with running_server(lambda: LocalBucket(config)) as bucket:
        yield bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketProcess:
    """A local bucket in another process."""

    config: BucketConfig
    url: str
    pid: int

    def environment(self) -> dict[str, str]:
        """Return the environment variables that lead any AWS client here."""
        return environment_of(self.config, self.url)

    def counts(self) -> dict[str, Any]:
        """Return its counters by name: requests of each kind, and bytes."""
        counts: dict[str, Any] = json.loads(self._ask("GET", "/-/counts"))
        return counts

    def reset(self) -> None:
        """Set its counters to zero."""
        self._ask("POST", "/-/reset")

    def reshape(self, shape: Shape) -> None:
        """Replace the shape: its delays from the next request on, its rates for new connections."""
        self._ask("POST", "/-/shape", json.dumps(asdict(shape)))

    def _ask(self, method: str, path: str, body: str | None = None) -> bytes:
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=30.0)
        try:
            connection.request(method, path, body)
            return connection.getresponse().read()
        finally:
            connection.close()


@contextmanager
def bucket_process(config: BucketConfig | None = None) -> Iterator[BucketProcess]:
    """Run a local bucket in a process of its own, so that it does not share this one's interpreter lock.

    It ends when the block is left, and also when this process dies, however it dies: it watches its standard input.

    Raises:
        RuntimeError: it did not start; its own message stands on standard error.
    """
    config = config or BucketConfig()
    command = [sys.executable, "-m", "stoker_local", "bucket", "--config", "-"]
    with subprocess.Popen(  # noqa: S603  (our own module)
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # a terminal's Ctrl-C is for this process, which ends the bucket when it no longer needs it
    ) as process:
        assert process.stdin is not None  # noqa: S101  (for the type checker)
        assert process.stdout is not None  # noqa: S101  (for the type checker)
        try:
            process.stdin.write(config.to_json() + "\n")
            process.stdin.flush()
            words = process.stdout.readline().split()
            if not words:
                raise RuntimeError(f"the local bucket did not start (exit code {process.wait(_EXIT_SECONDS)})")
            url = next(word.removeprefix(_URL) for word in words if word.startswith(_URL))
            yield BucketProcess(config=config, url=url, pid=process.pid)
        finally:
            process.terminate()
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def stopping(*, watch_stdin: bool) -> asyncio.Event:
    """Return what is set by SIGINT, SIGTERM or, if it is watched, the end of standard input."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def watch() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if watch_stdin:
        loop.add_reader(sys.stdin.fileno(), watch)
    return stop
