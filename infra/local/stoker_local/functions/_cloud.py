"""The local function cloud: function instances, the endpoints that invoke them, and their triggers."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import aiohttp
from aiohttp import web

from stoker.errors import MissingExtraError
from stoker_local._bucket import LocalBucket, client_variables
from stoker_local._gcs import LocalGcs
from stoker_local._host import BackgroundTasks, background_tasks, catch_all_application, serve_application
from stoker_local._s3.model import ObjectCreated
from stoker_local.functions._config import FunctionCloudConfig, FunctionFaultInjector, FunctionFaultPlan
from stoker_local.functions._endpoints import RequestAuthenticator, function_url, invoke_api
from stoker_local.functions._google import GoogleService, finalized_message, gateway, push_events
from stoker_local.functions._instance_pool import InstancePool, LambdaService
from stoker_local.functions._processes import AnySpec, InstanceConfig, ProcessSupervisor, process_supervisor
from stoker_local.functions._statistics import CloudRecorder, FunctionEvent, FunctionStatistics, Invocation, Outcome
from stoker_local.functions._triggers import (
    LocalQueue,
    create_queues,
    created_message,
    matches,
    poll_queue,
    run_schedule,
    scheduled_event,
    setup_message,
    watch_objects,
)

_MAX_HEADER_BYTES = 1 << 16


class FunctionCloud:
    """A running function cloud, as :func:`function_cloud` yields it; use it on the same event loop.

    Attributes:
        config: configuration of the cloud.
        url: URL of the Lambda endpoint.
        queues: queues by name.
        function_urls: function name → function URL, for Lambda functions with ``url_auth``.
        google_urls: function name → URL, for Google functions.
        google_url: URL under which every Google function is available at ``/NAME``; empty if there are none.
        tmp: ``tmpfs`` if each instance has its own limited ``/tmp``, ``folder`` if it uses a folder in ``TMPDIR``.

    Example:
        >>> from pathlib import Path
        >>> size = Path("my_module.py").write_text("def echo(event, context): return event")
        >>> config = FunctionCloudConfig(functions=(FunctionSpec(name="echo", handler="my_module.echo"),))
        >>> async with function_cloud(config) as cloud:
        ...     first = await cloud.invoke("echo", {"n": 1})
        ...     cloud.inject(FunctionFaultPlan(script=(FunctionFault(kind=FunctionFaultKind.RECLAIM),)))
        ...     second = await cloud.invoke("echo", {"n": 2})  # its instance was reclaimed
        ...     cloud.statistics()["echo"].cold_starts
        2
    """

    def __init__(
        self,
        config: FunctionCloudConfig,
        *,
        tasks: BackgroundTasks,
        supervisor: ProcessSupervisor,
        session: aiohttp.ClientSession,
        clock: Callable[[], float],
        echo: Callable[[str], object],
    ) -> None:
        self.config = config
        self.url = ""
        self.queues: Mapping[str, LocalQueue] = create_queues(config.queues, seed=config.seed, clock=clock)
        self.function_urls: dict[str, str] = {}
        self.google_urls: dict[str, str] = {}
        self.google_url = ""
        self.tmp = supervisor.tmp
        self._lambda_services: dict[str, LambdaService] = {}
        self._google_services: dict[str, GoogleService] = {}
        self._faults = FunctionFaultInjector(config.faults)
        self._recorder = CloudRecorder(clock=asyncio.get_running_loop().time, echo=echo)
        self._ids = random.Random(config.seed)  # noqa: S311  (reproducible ids, not secrets)
        self._notification_count = 0
        self._tasks = tasks
        self._supervisor = supervisor
        self._session = session
        self._clock = clock

    # Control and inspection.

    def environment(self) -> dict[str, str]:
        """Return the environment variables that point AWS clients' Lambda calls to this cloud, with the first key."""
        return {"AWS_ENDPOINT_URL_LAMBDA": self.url, **client_variables(self.config.region, self.config.keys)}

    async def invoke(self, function: str, event: Any, *, waits: bool = False) -> Outcome:
        """Run a Lambda function directly, without an HTTP request.

        Args:
            function: name of the function.
            event: JSON-serialisable event.
            waits: wait for the function's concurrency instead of being throttled.

        Raises:
            KeyError: the function does not exist.
            ServiceError: the invocation was throttled.
        """
        return await self._lambda_services[function].invoke(self._invocation(event), waits=waits)

    def fire(self, schedule: str) -> asyncio.Task[None]:
        """Fire a schedule now; the returned task ends when its event has been handled or all retries have failed.

        Raises:
            KeyError: the schedule does not exist.
        """
        schedule_spec = next((each for each in self.config.schedules if each.name == schedule), None)
        if schedule_spec is None:
            raise KeyError(schedule)
        config, now = self.config, self._clock()
        event = scheduled_event(
            schedule_spec, region=config.region, account=config.account, event_id=self._new_id(), now=now
        )
        return self._lambda_services[schedule_spec.function].deliver_event(self._invocation(event))

    def inject(self, plan: FunctionFaultPlan) -> None:
        """Replace the fault plan, from the next invocation on."""
        self._faults.replace(plan)

    def reclaim(self) -> None:
        """End all idle instances at once."""
        pools: list[InstancePool[Any]] = [*self._lambda_services.values(), *self._google_services.values()]
        for pool in pools:
            pool.reclaim()

    def statistics(self) -> dict[str, FunctionStatistics]:
        """Return the statistics of every function; :func:`~stoker_local.functions.total` sums them."""
        return self._recorder.statistics()

    def events(self, since: int = 0) -> list[FunctionEvent]:
        """Return the events from number ``since`` on, oldest first; only the newest 10,000 are kept."""
        return self._recorder.events(since)

    def log(self, function: str) -> str:
        """Return the output of the function's newest 200 invocations."""
        return "".join(self._recorder.recorders[function].logs)

    # Starting and closing.

    async def _start(self, stack: AsyncExitStack, *, bucket: LocalBucket | None, gcs: LocalGcs | None) -> None:
        """Start all servers and triggers, which ``stack`` ends; only :func:`function_cloud` calls this."""
        config = self.config
        authority = RequestAuthenticator(config.keys, region=config.region, clock=self._clock)
        api = invoke_api(self._lambda_services, authority, new_id=self._new_id)
        self.url = await self._serve(stack, api, config.port)
        role = {"AWS_ENDPOINT_URL_LAMBDA": self.url, **(bucket.environment() if bucket else {})}
        for spec in config.functions:
            fleet = LambdaService(self._instance_config(spec, role, "lambda"), self.queues)
            self._lambda_services[spec.name] = fleet
            if spec.url_auth:
                front = function_url(fleet, authority, new_id=self._new_id)
                self.function_urls[spec.name] = await self._serve(stack, front)
        platform = gcs.environment() if gcs else {}
        for google in config.google:
            service = GoogleService(
                self._instance_config(google, platform, "cloud-run", vcpus=google.cpus), self._session
            )
            self._google_services[google.name] = service
            self.google_urls[google.name] = await self._serve(stack, catch_all_application(service.handle_request))
        if self._google_services:
            self.google_url = await self._serve(stack, gateway(self._google_services))
        self._start_triggers()
        if bucket is not None:
            stack.enter_context(watch_objects(bucket.service.watchers, self._on_created))
        if gcs is not None:
            stack.enter_context(watch_objects(gcs.watchers, self._on_finalized))
        for queue in self.queues.values():
            stack.callback(queue.close)

    def _invocation(self, event: Any) -> Invocation:
        """Return the delivery of an event under a new request id."""
        return Invocation(request_id=self._new_id(), payload=json.dumps(event).encode())

    async def _serve(self, stack: AsyncExitStack, application: web.Application, port: int = 0) -> str:
        return f"http://{await stack.enter_async_context(serve_application(application, self.config.host, port))}"

    def _instance_config(
        self, spec: AnySpec, environment: Mapping[str, str], platform: str, *, vcpus: float = 0.0
    ) -> InstanceConfig[AnySpec]:
        """Return the configuration that all instances of a function share, after adding its statistics."""
        return InstanceConfig(
            spec=spec,
            cloud=self.config,
            environment={**environment, **self.config.environment},
            supervisor=self._supervisor,
            recorder=self._recorder.add_function(spec.name, platform, memory_bytes=spec.memory_bytes, vcpus=vcpus),
            faults=self._faults,
            tasks=self._tasks,
        )

    def _start_triggers(self) -> None:
        config = self.config
        for source in config.sources:
            arn = f"arn:aws:sqs:{config.region}:{config.account}:{source.queue}"
            invoke = partial(self.invoke, source.function, waits=True)
            for _ in range(source.concurrency):
                self._tasks.start(poll_queue(source, self.queues[source.queue], invoke, queue_arn=arn))
        for schedule in config.schedules:
            if schedule.enabled:
                self._tasks.start(run_schedule(schedule, partial(self.fire, schedule.name)))
        for finalized in config.finalized:
            for _ in range(finalized.concurrency):
                self._tasks.start(push_events(self.queues[finalized.queue], self._google_services[finalized.function]))
        for notification in config.notifications:
            self.queues[notification.queue].send(setup_message(notification.bucket, self._clock()))

    def _on_created(self, created: ObjectCreated) -> None:
        for notification in self.config.notifications:
            if matches(notification, created):
                self._notification_count += 1
                message = created_message(created, region=self.config.region, sequence=self._notification_count)
                self.queues[notification.queue].send(message)

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
    """Run a function cloud; however the block is left, its processes are ended and its ports freed.

    Functions get the environment variables of ``bucket`` (Lambda) or ``gcs`` (Google) and ``config.environment``, but
    none of this process's own.

    Args:
        config: configuration of the cloud.
        bucket: running local S3 whose objects trigger notifications; None if there is none.
        gcs: running local GCS whose objects trigger Google functions; None if there is none.
        clock: returns the current time in POSIX seconds; default ``time.time``.
        echo: is called with the output of every invocation; by default, output is only kept for ``log``.

    Raises:
        ValueError: a notification names a bucket that does not exist.
        MissingExtraError: a runtime that the functions need is not installed.
        OSError: a port is in use, or ``tmp="tmpfs"`` is not possible on this system.

    Example:
        >>> from stoker_local import LocalBucket
        >>> ingest = FunctionSpec(name="ingest", handler="stoker_functions.aws.ingest")
        >>> config = FunctionCloudConfig(functions=(ingest,))
        >>> async with LocalBucket() as bucket, function_cloud(config, bucket=bucket) as cloud:
        ...     cloud.environment()["AWS_ENDPOINT_URL_LAMBDA"] == cloud.url
        True
    """
    _check_buckets(config, bucket, gcs)
    _check_runtimes(config)
    async with (
        _session() as session,
        process_supervisor(config.tmp) as supervisor,
        background_tasks() as tasks,
        AsyncExitStack() as stack,
    ):
        cloud = FunctionCloud(config, tasks=tasks, supervisor=supervisor, session=session, clock=clock, echo=echo)
        await cloud._start(stack, bucket=bucket, gcs=gcs)  # noqa: SLF001  (its only way to start)
        yield cloud


def _session() -> aiohttp.ClientSession:
    """Return a session that forwards requests unchanged, each on a new connection: instances may end at any time."""
    return aiohttp.ClientSession(
        auto_decompress=False,
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        max_field_size=_MAX_HEADER_BYTES,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


def _check_buckets(config: FunctionCloudConfig, bucket: LocalBucket | None, gcs: LocalGcs | None) -> None:
    for kind, names, existing in (
        ("S3", {each.bucket for each in config.notifications}, bucket.objects if bucket else {}),
        ("GCS", {each.bucket for each in config.finalized}, gcs.buckets if gcs else {}),
    ):
        if missing := sorted(names - set(existing)):
            raise ValueError(f"a notification names a bucket that the local {kind} does not have: {', '.join(missing)}")


def _check_runtimes(config: FunctionCloudConfig) -> None:
    """Check that the runtimes are installed, without which every instance would fail to start."""
    for kind, functions, module in (
        ("Lambda", config.functions, "awslambdaric"),
        ("Google", config.google, "functions_framework"),
    ):
        if functions and find_spec(module) is None:
            raise MissingExtraError(f"{kind} functions need {module}; pip install 'stoker[local]'")
