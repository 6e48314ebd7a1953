"""Runs local servers: on the current event loop, in a separate thread, or in a separate process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from stoker._base.task_group import task_group
from stoker_local._bucket import BucketConfig, LocalBucket, client_environment
from stoker_local._network import NetworkShape

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web


_EXIT_SECONDS = 10.0
_SHUTDOWN_SECONDS = 0.1
_URL_PREFIX = "AWS_ENDPOINT_URL="

T = TypeVar("T")


@asynccontextmanager
async def serve_application(
    application: web.Application,
    host: str,
    port: int = 0,
    *,
    handler_cancellation: bool = False,
    max_field_size: int = 1 << 16,
) -> AsyncIterator[str]:
    """Serve an application and yield its ``host:port``; leaving the context frees the port and ends every request.

    Args:
        application: aiohttp application to serve.
        host: address to listen on.
        port: port to listen on; 0 chooses a free port.
        handler_cancellation: whether a handler is cancelled when its client disconnects.
        max_field_size: maximum length of a header, in bytes.
    """
    from aiohttp import web  # imported late: a bucket, which does not need it, starts in half the time

    runner = web.AppRunner(
        application,
        access_log=None,
        handler_cancellation=handler_cancellation,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        max_field_size=max_field_size,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        address, bound = runner.addresses[0][:2]
        yield f"[{address}]:{bound}" if ":" in address else f"{address}:{bound}"
    finally:
        await runner.cleanup()


def catch_all_application(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.Application:
    """Return an application that passes every request to one handler."""
    from aiohttp import web

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    return application


async def read_body(message: web.BaseRequest | aiohttp.ClientResponse, *, limit_bytes: int) -> bytes | None:
    """Return a body, or None if it is longer than ``limit_bytes``; reading stops at the limit."""
    if (message.content_length or 0) > limit_bytes:
        return None
    body = bytearray()
    async for piece in message.content.iter_any():
        body += piece
        if len(body) > limit_bytes:
            return None
    return bytes(body)


@contextmanager
def running_server(create: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """Run the server that ``create`` returns on an event loop in a separate thread; leaving the context ends all three.

    Args:
        create: function that returns the server, an async context manager; it is called in the thread, and an error of
            the start is raised here.

    Example:
        >>> from stoker_local import LocalBucket, running_server
        >>> with running_server(LocalBucket) as bucket:
        ...     bucket.url.startswith("http://127.0.0.1:")
        True
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
    """Run a local bucket in a separate thread, for synchronous code.

    Args:
        config: configuration of the bucket; default ``BucketConfig()``.

    Example:
        >>> with running_bucket() as bucket:
        ...     sorted(bucket.environment())[:2]
        ['AWS_ACCESS_KEY_ID', 'AWS_DEFAULT_REGION']
    """
    with running_server(lambda: LocalBucket(config)) as bucket:
        yield bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketProcess:
    """A local bucket in another process, as :func:`bucket_process` yields it.

    Example:
        >>> with bucket_process() as bucket:
        ...     bucket.url.startswith("http://127.0.0.1:")
        True

    Attributes:
        config: configuration of the bucket.
        url: URL of the endpoint, without a trailing slash.
        pid: process id.
    """

    config: BucketConfig
    url: str
    pid: int

    def environment(self) -> dict[str, str]:
        """Return the environment variables that point AWS clients to this bucket."""
        return client_environment(self.config, self.url)

    def counts(self) -> dict[str, Any]:
        """Return the bucket's counters by name: requests by operation, statuses, faults, bytes and connections."""
        counts: dict[str, Any] = json.loads(self._request("GET", "/-/counts"))
        return counts

    def reset(self) -> None:
        """Set the bucket's counters to zero."""
        self._request("POST", "/-/reset")

    def reshape(self, shape: NetworkShape) -> None:
        """Replace the network shape: delays from the next request on, rates for new connections."""
        self._request("POST", "/-/shape", json.dumps(asdict(shape)))

    def _request(self, method: str, path: str, body: str | None = None) -> bytes:
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=30.0)
        try:
            connection.request(method, path, body)
            return connection.getresponse().read()
        finally:
            connection.close()


@contextmanager
def bucket_process(config: BucketConfig | None = None) -> Iterator[BucketProcess]:
    """Run a local bucket in a separate process, so that it does not compete for this process's interpreter lock.

    The process ends when the block is left, or when this process dies in any way: it watches its standard input.

    Args:
        config: configuration of the bucket; default ``BucketConfig()``.

    Raises:
        RuntimeError: the bucket did not start; standard error contains its message.

    Example:
        >>> with bucket_process() as bucket:
        ...     bucket.counts()["requests"]
        {}
    """
    config = config or BucketConfig()
    command = [sys.executable, "-m", "stoker_local", "bucket", "--config", "-"]
    with subprocess.Popen(  # noqa: S603  (our own module)
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # a terminal's Ctrl-C must reach only this process, which ends the bucket after its last use
    ) as process:
        assert process.stdin is not None  # noqa: S101  (for the type checker)
        assert process.stdout is not None  # noqa: S101  (for the type checker)
        try:
            process.stdin.write(config.to_json() + "\n")
            process.stdin.flush()
            words = process.stdout.readline().split()
            if not words:
                raise RuntimeError(
                    f"the local bucket did not start (exit code {process.wait(_EXIT_SECONDS)}); "
                    "see its message on standard error"
                )
            url = next(word.removeprefix(_URL_PREFIX) for word in words if word.startswith(_URL_PREFIX))
            yield BucketProcess(config=config, url=url, pid=process.pid)
        finally:
            process.terminate()
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def create_stop_event(*, watch_stdin: bool) -> asyncio.Event:
    """Return an event that SIGINT, SIGTERM or, with ``watch_stdin``, the end of standard input sets."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def watch() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if watch_stdin:
        loop.add_reader(sys.stdin.fileno(), watch)
    return stop


class BackgroundTasks:
    """Starts tasks that are cancelled when the block of :func:`background_tasks` is left."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self.is_closed = False

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task.

        Raises:
            RuntimeError: the block has been left.
        """
        if self.is_closed:
            work.close()
            raise RuntimeError("the function cloud has ended; use it only within `async with function_cloud(...)`")
        return self._group.create_task(work)


class _BlockLeftError(Exception):
    """Makes a task group cancel its remaining tasks."""


@asynccontextmanager
async def background_tasks() -> AsyncIterator[BackgroundTasks]:
    """Yield a starter of tasks that are cancelled when the block is left; an error of a task ends the block."""
    with suppress(_BlockLeftError):
        async with task_group() as group:
            tasks = BackgroundTasks(group)
            try:
                yield tasks
            finally:
                tasks.is_closed = True
            raise _BlockLeftError
