"""The local function cloud: real runtimes, an endpoint to invoke them, and what triggers them, on this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from typing import Any

import aiohttp

from stoker.errors import MissingExtraError
from stoker_local._bucket import LocalBucket
from stoker_local._gcs import LocalGcs
from stoker_local.functions._assembly import Assembly
from stoker_local.functions._config import FunctionCloudConfig
from stoker_local.functions._faults import FunctionFaultPlan
from stoker_local.functions._outcome import Outcome
from stoker_local.functions._statistics import FunctionStatistics, Happening
from stoker_local.functions._tasks import background
from stoker_local.functions._triggers.queue import LocalQueue
from stoker_local.functions._warden import warden

__all__ = ["FunctionCloud", "function_cloud"]

_MAX_HEADER_BYTES = 1 << 16


class FunctionCloud:
    """A running function cloud, as :func:`function_cloud` yields it; for use on that event loop.

    Attributes:
        config: what runs.
        url: of the Lambda endpoint.
        queues: by name.
        function_urls: of the functions that have one, by function.
        google_urls: of the Google functions, by function.
        google_url: below which all Google functions are by their names, as those of a project; empty without any.
        tmp: ``tmpfs`` if instances have a limited ``/tmp`` of their own, ``folder`` if it is a folder in ``TMPDIR``.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self.config = assembly.config
        self.url = assembly.url
        self.queues: Mapping[str, LocalQueue] = assembly.queues
        self.function_urls: Mapping[str, str] = assembly.function_urls
        self.google_urls: Mapping[str, str] = assembly.google_urls
        self.google_url = assembly.google_url
        self.tmp = assembly.warden.tmp

    def environment(self) -> dict[str, str]:
        """Return the environment variables that lead any AWS client's Lambda calls here, with the first key."""
        key = self.config.keys[0]
        variables = {
            "AWS_ENDPOINT_URL_LAMBDA": self.url,
            "AWS_REGION": self.config.region,
            "AWS_DEFAULT_REGION": self.config.region,
            "AWS_ACCESS_KEY_ID": key.access_key,
            "AWS_SECRET_ACCESS_KEY": key.secret_key,
        }
        return variables | ({"AWS_SESSION_TOKEN": key.session_token} if key.session_token else {})

    async def invoke(self, function: str, event: Any, *, waits: bool = False) -> Outcome:
        """Run a Lambda function without a request; ``waits`` rather than be throttled.

        Raises:
            KeyError: there is no such function.
            ServiceError: throttled.
        """
        return await self._assembly.fleets[function].invoke(self._assembly.invocation(event), waits=waits)

    def fire(self, schedule: str) -> asyncio.Task[None]:
        """Fire a schedule ahead of its time; the task ends when its event has been handled or given up.

        Raises:
            KeyError: there is no such schedule.
        """
        return self._assembly.timetable.fire(schedule)

    def inject(self, plan: FunctionFaultPlan) -> None:
        """Replace the faults, from the next invocation on."""
        self._assembly.faults.replace(plan)

    def reclaim(self) -> None:
        """Take all idle instances back at once."""
        for fleet in self._assembly.fleets.values():
            fleet.pool.reclaim()
        for service in self._assembly.services.values():
            service.pool.reclaim()

    def statistics(self) -> dict[str, FunctionStatistics]:
        """Return the figures of every function; :func:`~stoker_local.functions._statistics.total` adds them up."""
        return self._assembly.ledger.statistics()

    def events(self, since: int = 0) -> list[Happening]:
        """Return what has happened from number ``since`` on, oldest first."""
        return self._assembly.ledger.events(since)

    def log(self, function: str) -> str:
        """Return what the newest 200 invocations of a function wrote."""
        return "".join(self._assembly.ledger.accounts[function].logs)


@asynccontextmanager
async def function_cloud(
    config: FunctionCloudConfig,
    *,
    bucket: LocalBucket | None = None,
    gcs: LocalGcs | None = None,
    clock: Callable[[], float] = time.time,
    echo: Callable[[str], object] = lambda text: None,
) -> AsyncIterator[FunctionCloud]:
    """Run a function cloud; however the block is left, its processes have ended and its ports are free.

    Functions get the environment of ``bucket`` (Lambda) or ``gcs`` (Google), which are running local clouds, and
    ``config.environment``; nothing of this process's own environment.

    Args:
        config: what runs.
        bucket: the local S3 that notifies, running.
        gcs: the local GCS that notifies, running.
        clock: POSIX seconds.
        echo: is given what every invocation writes.

    Raises:
        ValueError: a notification names a bucket that is not there.
        MissingExtraError: what functions run in is not installed.
        OSError: a port is taken, or the private ``/tmp`` that is wanted cannot be had.
    """
    _check_buckets(config, bucket, gcs)
    _check_runtimes(config)
    async with (
        _session() as session,
        warden(config.tmp) as keeper,
        background() as tasks,
        AsyncExitStack() as stack,
    ):
        assembly = Assembly(config, tasks=tasks, warden=keeper, session=session, clock=clock, echo=echo)
        await assembly.start(stack, bucket=bucket, gcs=gcs)
        yield FunctionCloud(assembly)


def _session() -> aiohttp.ClientSession:
    """Return what passes requests on as they are, each on a connection of its own: instances may go at any time."""
    return aiohttp.ClientSession(
        auto_decompress=False,
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        max_field_size=_MAX_HEADER_BYTES,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


def _check_buckets(config: FunctionCloudConfig, bucket: LocalBucket | None, gcs: LocalGcs | None) -> None:
    for kind, names, there in (
        ("S3", {each.bucket for each in config.notifications}, bucket.objects if bucket else {}),
        ("GCS", {each.bucket for each in config.finalized}, gcs.buckets if gcs else {}),
    ):
        if missing := sorted(names - set(there)):
            raise ValueError(f"there is no bucket {', '.join(missing)} in the local {kind} to be told of")


def _check_runtimes(config: FunctionCloudConfig) -> None:
    """Raise here what each instance would die of."""
    for kind, functions, module in (
        ("Lambda", config.functions, "awslambdaric"),
        ("Google", config.google, "functions_framework"),
    ):
        if functions and find_spec(module) is None:
            raise MissingExtraError(f"{kind} functions run in {module}; pip install 'stoker[local]'")
