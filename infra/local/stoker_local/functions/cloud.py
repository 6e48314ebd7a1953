"""The local function cloud: real runtimes, an endpoint to invoke them, and what triggers them, on this machine."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import aiohttp

from stoker.prices import Prices
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
from stoker_local.functions.isolation import choose_tmp
from stoker_local.functions.outcome import Invocation, Outcome
from stoker_local.functions.sandbox import SandboxConfig
from stoker_local.functions.serving import serving
from stoker_local.functions.spec import FunctionSpec
from stoker_local.functions.statistics import FunctionStatistics, Happening, Journal, Meter
from stoker_local.functions.tasks import Tasks, background
from stoker_local.functions.triggers.event_source import poll
from stoker_local.functions.triggers.notification import created_message, matches, test_message
from stoker_local.functions.triggers.queue import LocalQueue
from stoker_local.functions.triggers.schedule import keep_firing, scheduled_event
from stoker_local.gcs import LocalGcs
from stoker_local.objects import ObjectCreated

__all__ = ["FunctionCloud", "function_cloud"]

_KEPT_LOGS = 1000


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
        session: aiohttp.ClientSession,
        *,
        clock: Callable[[], float],
        echo: Callable[[str], object],
    ) -> None:
        self.config = config
        self.url = ""
        self.tmp = choose_tmp(config.tmp)
        self.queues: dict[str, LocalQueue] = {}
        self.function_urls: dict[str, str] = {}
        self.google_urls: dict[str, str] = {}
        self._tasks = tasks
        self._session = session
        self._clock = clock
        self._echo = echo
        self._ids = random.Random(config.seed)  # noqa: S311  (reproducible ids, not secrets)
        self._faults = FunctionFaultInjector(config.faults)
        self._journal = Journal(asyncio.get_running_loop().time)
        self._prices = Prices.load().functions
        self._meters: dict[str, Meter] = {}
        self._logs: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_KEPT_LOGS))
        self._fleets: dict[str, Fleet] = {}
        self._services: dict[str, Service] = {}
        self._sequence = 0
        self._events = EventInvoker(
            self.queues, retry_seconds=config.event_retry_seconds, tasks=tasks, journal=self._journal
        )

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
        return {name: meter.read() for name, meter in self._meters.items()}

    def events(self, since: int = 0) -> list[Happening]:
        """Return what has happened from number ``since`` on, oldest first."""
        return self._journal.since(since)

    def log(self, function: str) -> str:
        """Return what the newest 1,000 invocations of a function wrote."""
        return "".join(self._logs[function])

    # --- making it ----------------------------------------------------------------------------------------------

    async def start(self, stack: AsyncExitStack, *, bucket: LocalBucket | None, gcs: LocalGcs | None) -> None:
        """Start everything; the stack ends it."""
        self._make_queues(stack)
        authority = Authority(self.config.keys, region=self.config.region, clock=self._clock)
        api = InvokeApi(self._fleets, self._events, authority, new_id=self._new_id)
        self.url = await self._serve(stack, api, self.config.port)
        role = {"AWS_ENDPOINT_URL_LAMBDA": self.url, **(bucket.environment() if bucket else {})}
        for spec in self.config.functions:
            self._fleets[spec.name] = Fleet(self._fleet_config(spec, role))
            if spec.url_auth:
                front = FunctionUrl(self._fleets[spec.name], authority, new_id=self._new_id)
                self.function_urls[spec.name] = await self._serve(stack, front)
        await self._start_google(stack, gcs.environment() if gcs else {})
        self._start_triggers()
        if bucket is not None:
            self._watch(stack, bucket.service.watchers, self._on_s3)
        if gcs is not None:
            self._watch(stack, gcs.watchers, self._on_gcs)

    async def _serve(self, stack: AsyncExitStack, front: InvokeApi | FunctionUrl | Service, port: int = 0) -> str:
        address = await stack.enter_async_context(serving(front.application(), self.config.host, port))
        return f"http://{address}"

    def _make_queues(self, stack: AsyncExitStack) -> None:
        """Make the queues, each after the one that takes its dead letters."""
        waiting = {spec.name: spec for spec in self.config.queues}
        while waiting:
            spec = next(spec for spec in waiting.values() if spec.dead_letters not in waiting)
            del waiting[spec.name]
            chance = random.Random(f"{self.config.seed}/{spec.name}")  # noqa: S311  (reproducible duplicates)
            queue = LocalQueue(spec, chance=chance, dead_letters=self.queues.get(spec.dead_letters), clock=self._clock)
            stack.callback(queue.close)
            self.queues[spec.name] = queue

    def _fleet_config(self, spec: FunctionSpec, role: Mapping[str, str]) -> FleetConfig:
        config = self.config
        meter = self._meters[spec.name] = Meter(self._prices["lambda"], memory_bytes=spec.memory_bytes)
        sandbox = SandboxConfig(
            spec=spec,
            host=config.host,
            region=config.region,
            arn=f"arn:aws:lambda:{config.region}:{config.account}:function:{spec.name}",
            environment={**role, **config.environment},
            tmp=self.tmp,
            init_seconds=config.init_seconds,
        )
        return FleetConfig(
            sandbox=sandbox,
            idle_seconds=config.idle_seconds,
            faults=self._faults,
            meter=meter,
            journal=self._journal,
            tasks=self._tasks,
            on_log=self._on_log,
        )

    async def _start_google(self, stack: AsyncExitStack, environment: Mapping[str, str]) -> None:
        for spec in self.config.google:
            self._services[spec.name] = Service(self._service_config(spec, environment), self._session)
            self.google_urls[spec.name] = await self._serve(stack, self._services[spec.name])

    def _service_config(self, spec: GoogleSpec, environment: Mapping[str, str]) -> ServiceConfig:
        meter = Meter(self._prices["cloud-run"], memory_bytes=spec.memory_bytes, vcpus=spec.cpus)
        self._meters[spec.name] = meter
        instance = InstanceConfig(
            spec=spec,
            host=self.config.host,
            environment={**environment, **self.config.environment},
            tmp=self.tmp,
        )
        return ServiceConfig(
            instance=instance,
            idle_seconds=self.config.idle_seconds,
            faults=self._faults,
            meter=meter,
            journal=self._journal,
            tasks=self._tasks,
            on_log=self._on_log,
        )

    def _start_triggers(self) -> None:
        region, account = self.config.region, self.config.account
        for source in self.config.sources:
            fleet = self._fleets[source.function]
            arn = f"arn:aws:sqs:{region}:{account}:{source.queue}"
            for _ in range(source.concurrency):
                self._tasks.start(poll(source, self.queues[source.queue], self._invoker(fleet), queue_arn=arn))
        for schedule in self.config.schedules:
            if schedule.enabled:
                self._tasks.start(keep_firing(schedule, partial(self.fire, schedule.name)))
        for finalized in self.config.finalized:
            for _ in range(finalized.concurrency):
                self._tasks.start(push(self.queues[finalized.queue], self._services[finalized.function]))
        for notification in self.config.notifications:
            self.queues[notification.queue].send(test_message(notification.bucket, self._clock()))

    def _invoker(self, fleet: Fleet) -> Callable[[bytes], Any]:
        def invoke(payload: bytes) -> Any:
            return fleet.invoke(Invocation(request_id=self._new_id(), payload=payload), waits=True)

        return invoke

    # --- what comes in ------------------------------------------------------------------------------------------

    def _watch(
        self,
        stack: AsyncExitStack,
        watchers: list[Callable[[ObjectCreated], None]],
        react: Callable[[ObjectCreated], None],
    ) -> None:
        """React to objects that are created, on this event loop, whatever thread the bucket runs on."""
        loop = asyncio.get_running_loop()

        def on_created(created: ObjectCreated) -> None:
            loop.call_soon_threadsafe(react, created)

        watchers.append(on_created)
        stack.callback(watchers.remove, on_created)

    def _on_s3(self, created: ObjectCreated) -> None:
        for notification in self.config.notifications:
            if matches(notification, created):
                self._sequence += 1
                message = created_message(created, region=self.config.region, sequence=self._sequence)
                self.queues[notification.queue].send(message)

    def _on_gcs(self, created: ObjectCreated) -> None:
        for finalized in self.config.finalized:
            if finalized.bucket == created.bucket:
                self.queues[finalized.queue].send(finalized_message(created))

    def _on_log(self, instance: str, log: bytes) -> None:
        if log:
            text = log.decode("utf-8", "replace")
            self._logs[instance.rpartition("/")[0]].append(text)
            self._echo(text)

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
    async with _session() as session, background() as tasks, AsyncExitStack() as stack:
        cloud = FunctionCloud(config, tasks, session, clock=clock, echo=echo)
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
