"""The local function cloud: real runtimes, an endpoint to invoke them, and what triggers them, on this machine."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import aiohttp

from stoker_local.bucket import LocalBucket
from stoker_local.functions.authority import Authority
from stoker_local.functions.config import FunctionCloudConfig
from stoker_local.functions.event_invoke import EventInvoker
from stoker_local.functions.faults import FunctionFaultInjector, FunctionFaultPlan
from stoker_local.functions.fleet import Fleet, FleetConfig
from stoker_local.functions.function_url import FunctionUrl
from stoker_local.functions.google.finalized import finalized_message, push
from stoker_local.functions.google.instance import InstanceConfig
from stoker_local.functions.google.service import Service, ServiceConfig
from stoker_local.functions.google.spec import GoogleSpec
from stoker_local.functions.invoke_api import InvokeApi
from stoker_local.functions.ledger import Ledger
from stoker_local.functions.outcome import Invocation, Outcome
from stoker_local.functions.sandbox import SandboxConfig
from stoker_local.functions.serving import serving
from stoker_local.functions.spec import FunctionSpec
from stoker_local.functions.statistics import FunctionStatistics, Happening
from stoker_local.functions.tasks import Tasks, background
from stoker_local.functions.triggers.assembly import Notifier, make_queues, start_source, watching
from stoker_local.functions.triggers.notification import opening_message
from stoker_local.functions.triggers.schedule import keep_firing, scheduled_event
from stoker_local.functions.warden import Warden, warden
from stoker_local.gcs import LocalGcs
from stoker_local.objects import ObjectCreated

__all__ = ["FunctionCloud", "function_cloud"]


class FunctionCloud:
    """A running function cloud, as :func:`function_cloud` yields it; for use on that event loop.

    Attributes:
        url: of the Lambda endpoint.
        queues: by name.
        function_urls: of the functions that have one, by function.
        google_urls: of the Google functions, by function.
        tmp: ``tmpfs`` if instances have a limited ``/tmp`` of their own, ``folder`` if it is a folder in ``TMPDIR``.
    """

    def __init__(
        self,
        config: FunctionCloudConfig,
        tasks: Tasks,
        warden: Warden,
        session: aiohttp.ClientSession,
        *,
        clock: Callable[[], float],
        echo: Callable[[str], object],
    ) -> None:
        self.config = config
        self.url = ""
        self.tmp = warden.tmp
        self.queues = make_queues(config.queues, seed=config.seed, clock=clock)
        self.function_urls: dict[str, str] = {}
        self.google_urls: dict[str, str] = {}
        self._tasks = tasks
        self._warden = warden
        self._session = session
        self._clock = clock
        self._ids = random.Random(config.seed)  # noqa: S311  (reproducible ids, not secrets)
        self._faults = FunctionFaultInjector(config.faults)
        self._ledger = Ledger(clock=asyncio.get_running_loop().time, echo=echo)
        self._fleets: dict[str, Fleet] = {}
        self._services: dict[str, Service] = {}
        self._events = EventInvoker(self.queues, retry_seconds=config.event_retry_seconds, tasks=tasks)

    # --- use ----------------------------------------------------------------------------------------------------

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
        invocation = Invocation(request_id=self._new_id(), payload=json.dumps(event).encode())
        return await self._fleets[function].invoke(invocation, waits=waits)

    def fire(self, schedule: str) -> asyncio.Task[None]:
        """Fire a schedule ahead of its time; the task ends when its event has been handled or given up.

        Raises:
            KeyError: there is no such schedule.
        """
        fired = {each.name: each for each in self.config.schedules}[schedule]
        event = scheduled_event(
            fired,
            region=self.config.region,
            account=self.config.account,
            event_id=self._new_id(),
            now=self._clock(),
        )
        invocation = Invocation(request_id=self._new_id(), payload=json.dumps(event).encode())
        return self._events.accept(self._fleets[fired.function], invocation)

    def inject(self, plan: FunctionFaultPlan) -> None:
        """Replace the faults, from the next invocation on."""
        self._faults.replace(plan)

    def reclaim(self) -> None:
        """Take all idle instances back at once."""
        for fleet in self._fleets.values():
            fleet.reclaim()
        for service in self._services.values():
            service.reclaim()

    def statistics(self) -> dict[str, FunctionStatistics]:
        """Return the figures of every function; :func:`~stoker_local.functions.statistics.total` adds them up."""
        return self._ledger.statistics()

    def events(self, since: int = 0) -> list[Happening]:
        """Return what has happened from number ``since`` on, oldest first."""
        return self._ledger.events(since)

    def log(self, function: str) -> str:
        """Return what the newest 1,000 invocations of a function wrote."""
        return "".join(self._ledger.accounts[function].logs)

    # --- making it ----------------------------------------------------------------------------------------------

    async def start(self, stack: AsyncExitStack, *, bucket: LocalBucket | None, gcs: LocalGcs | None) -> None:
        """Start everything; the stack ends it."""
        authority = Authority(self.config.keys, region=self.config.region, clock=self._clock)
        api = InvokeApi(self._fleets, self._events, authority, new_id=self._new_id)
        self.url = await self._serve(stack, api, self.config.port)
        role = {"AWS_ENDPOINT_URL_LAMBDA": self.url, **(bucket.environment() if bucket else {})}
        for spec in self.config.functions:
            fleet = self._fleets[spec.name] = self._fleet(spec, {**role, **self.config.environment})
            if spec.url_auth:
                self.function_urls[spec.name] = await self._serve(
                    stack, FunctionUrl(fleet, authority, new_id=self._new_id)
                )
        platform = {**(gcs.environment() if gcs else {}), **self.config.environment}
        for google in self.config.google:
            service = self._services[google.name] = self._service(google, platform)
            self.google_urls[google.name] = await self._serve(stack, service)
        self._start_triggers()
        if bucket is not None:
            notifier = Notifier(self.config.notifications, self.queues, region=self.config.region)
            stack.enter_context(watching(bucket.service.watchers, notifier.notify))
        if gcs is not None:
            stack.enter_context(watching(gcs.watchers, self._on_finalized))
        for queue in self.queues.values():
            stack.callback(queue.close)

    async def _serve(self, stack: AsyncExitStack, front: InvokeApi | FunctionUrl | Service, port: int = 0) -> str:
        address = await stack.enter_async_context(serving(front.application(), self.config.host, port))
        return f"http://{address}"

    def _fleet(self, spec: FunctionSpec, environment: Mapping[str, str]) -> Fleet:
        config = self.config
        sandbox = SandboxConfig(
            spec=spec,
            host=config.host,
            region=config.region,
            arn=f"arn:aws:lambda:{config.region}:{config.account}:function:{spec.name}",
            environment=environment,
            warden=self._warden,
            init_seconds=config.init_seconds,
        )
        return Fleet(
            FleetConfig(
                sandbox=sandbox,
                idle_seconds=config.idle_seconds,
                faults=self._faults,
                account=self._ledger.open(spec.name, "lambda", memory_bytes=spec.memory_bytes),
                tasks=self._tasks,
            )
        )

    def _service(self, spec: GoogleSpec, environment: Mapping[str, str]) -> Service:
        config = ServiceConfig(
            instance=InstanceConfig(spec=spec, host=self.config.host, environment=environment, warden=self._warden),
            idle_seconds=self.config.idle_seconds,
            faults=self._faults,
            account=self._ledger.open(spec.name, "cloud-run", memory_bytes=spec.memory_bytes, vcpus=spec.cpus),
            tasks=self._tasks,
        )
        return Service(config, self._session)

    def _start_triggers(self) -> None:
        config = self.config
        for source in config.sources:
            arn = f"arn:aws:sqs:{config.region}:{config.account}:{source.queue}"
            invoke = partial(self._invoke_waiting, self._fleets[source.function])
            start_source(self._tasks, source, self.queues[source.queue], invoke, queue_arn=arn)
        for schedule in config.schedules:
            if schedule.enabled:
                self._tasks.start(keep_firing(schedule, partial(self.fire, schedule.name)))
        for finalized in config.finalized:
            for _ in range(finalized.concurrency):
                self._tasks.start(push(self.queues[finalized.queue], self._services[finalized.function]))
        for notification in config.notifications:
            self.queues[notification.queue].send(opening_message(notification.bucket, self._clock()))

    async def _invoke_waiting(self, fleet: Fleet, payload: bytes) -> Outcome:
        return await fleet.invoke(Invocation(request_id=self._new_id(), payload=payload), waits=True)

    def _on_finalized(self, created: ObjectCreated) -> None:
        for finalized in self.config.finalized:
            if finalized.bucket == created.bucket:
                self.queues[finalized.queue].send(finalized_message(created))

    def _new_id(self) -> str:
        return str(uuid.UUID(int=self._ids.getrandbits(128), version=4))


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
        OSError: a port is taken, or the private ``/tmp`` that is wanted cannot be had.
    """
    _check_buckets(config, bucket, gcs)
    async with (
        _session() as session,
        warden(config.tmp) as keeper,
        background() as tasks,
        AsyncExitStack() as stack,
    ):
        cloud = FunctionCloud(config, tasks, keeper, session, clock=clock, echo=echo)
        await cloud.start(stack, bucket=bucket, gcs=gcs)
        yield cloud


def _session() -> aiohttp.ClientSession:
    """Return what passes requests on as they are, each on a connection of its own: instances may go at any time."""
    return aiohttp.ClientSession(
        auto_decompress=False,
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


def _check_buckets(config: FunctionCloudConfig, bucket: LocalBucket | None, gcs: LocalGcs | None) -> None:
    for kind, names, there in (
        ("S3", {each.bucket for each in config.notifications}, bucket.objects if bucket else {}),
        ("GCS", {each.bucket for each in config.finalized}, gcs.buckets if gcs else {}),
    ):
        if missing := sorted(names - set(there)):
            raise ValueError(f"there is no bucket {', '.join(missing)} in the local {kind} to be told of")
