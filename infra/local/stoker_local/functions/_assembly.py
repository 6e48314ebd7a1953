"""Puts a function cloud together as its configuration says."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import aiohttp

from stoker_local._bucket import LocalBucket
from stoker_local._gcs import LocalGcs
from stoker_local._objects import ObjectCreated
from stoker_local.functions._authority import Authority
from stoker_local.functions._config import FunctionCloudConfig
from stoker_local.functions._event_invoke import EventInvoker
from stoker_local.functions._faults import FunctionFaultInjector
from stoker_local.functions._fleet import Fleet
from stoker_local.functions._function_url import FunctionUrl
from stoker_local.functions._google.finalized import finalized_message, push
from stoker_local.functions._google.gateway import Gateway
from stoker_local.functions._google.instance import InstanceConfig
from stoker_local.functions._google.service import Service
from stoker_local.functions._google.spec import GoogleSpec
from stoker_local.functions._invoke_api import InvokeApi
from stoker_local.functions._ledger import Account, Ledger
from stoker_local.functions._outcome import Invocation, Outcome
from stoker_local.functions._pool import PoolConfig
from stoker_local.functions._sandbox import SandboxConfig
from stoker_local.functions._serving import serving
from stoker_local.functions._spec import FunctionSpec
from stoker_local.functions._tasks import Tasks
from stoker_local.functions._triggers.assembly import Notifier, make_queues, start_source, watching
from stoker_local.functions._triggers.notification import opening_message
from stoker_local.functions._triggers.schedule import Timetable
from stoker_local.functions._warden import Warden

__all__ = ["Assembly"]


class Assembly:
    """The parts of a function cloud; :meth:`start` starts them.

    Attributes:
        url: of the Lambda endpoint, once started.
        function_urls: by function, once started, as are ``google_urls``.
        google_url: below which all Google functions are by their names, once started; empty without any.
    """

    def __init__(
        self,
        config: FunctionCloudConfig,
        *,
        tasks: Tasks,
        warden: Warden,
        session: aiohttp.ClientSession,
        clock: Callable[[], float],
        echo: Callable[[str], object],
    ) -> None:
        self.config = config
        self.url = ""
        self.warden = warden
        self.function_urls: dict[str, str] = {}
        self.google_urls: dict[str, str] = {}
        self.google_url = ""
        self.fleets: dict[str, Fleet] = {}
        self.services: dict[str, Service] = {}
        self.queues = make_queues(config.queues, seed=config.seed, clock=clock)
        self.faults = FunctionFaultInjector(config.faults)
        self.ledger = Ledger(clock=asyncio.get_running_loop().time, echo=echo)
        self.events = EventInvoker(self.queues, retry_seconds=config.event_retry_seconds, tasks=tasks)
        self.timetable = Timetable(
            schedules={schedule.name: schedule for schedule in config.schedules},
            send=self._send,
            region=config.region,
            account=config.account,
            new_id=self._new_id,
            clock=clock,
        )
        self._ids = random.Random(config.seed)  # noqa: S311  (reproducible ids, not secrets)
        self._tasks = tasks
        self._session = session
        self._clock = clock

    async def start(self, stack: AsyncExitStack, *, bucket: LocalBucket | None, gcs: LocalGcs | None) -> None:
        """Start everything; the stack ends it."""
        config = self.config
        authority = Authority(config.keys, region=config.region, clock=self._clock)
        api = InvokeApi(self.fleets, self.events, authority, new_id=self._new_id)
        self.url = await self._serve(stack, api, config.port)
        role = {"AWS_ENDPOINT_URL_LAMBDA": self.url, **(bucket.environment() if bucket else {})}
        for spec in config.functions:
            fleet = self.fleets[spec.name] = self._fleet(spec, {**role, **config.environment})
            if spec.url_auth:
                front = FunctionUrl(fleet, authority, new_id=self._new_id)
                self.function_urls[spec.name] = await self._serve(stack, front)
        platform = {**(gcs.environment() if gcs else {}), **config.environment}
        for google in config.google:
            service = self.services[google.name] = self._service(google, platform)
            self.google_urls[google.name] = await self._serve(stack, service)
        if self.services:
            self.google_url = await self._serve(stack, Gateway(self.services))
        self._start_triggers()
        if bucket is not None:
            notifier = Notifier(config.notifications, self.queues, region=config.region)
            stack.enter_context(watching(bucket.service.watchers, notifier.notify))
        if gcs is not None:
            stack.enter_context(watching(gcs.watchers, self._on_finalized))
        for queue in self.queues.values():
            stack.callback(queue.close)

    def invocation(self, event: Any) -> Invocation:
        """Return an event's delivery, with an id of its own."""
        return Invocation(request_id=self._new_id(), payload=json.dumps(event).encode())

    async def _serve(
        self, stack: AsyncExitStack, front: InvokeApi | FunctionUrl | Service | Gateway, port: int = 0
    ) -> str:
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
            warden=self.warden,
            init_seconds=config.init_seconds,
        )
        account = self.ledger.open(spec.name, "lambda", memory_bytes=spec.memory_bytes)
        return Fleet(sandbox, self._pool(spec.name, spec.concurrency, account))

    def _service(self, spec: GoogleSpec, environment: Mapping[str, str]) -> Service:
        instance = InstanceConfig(spec=spec, host=self.config.host, environment=environment, warden=self.warden)
        account = self.ledger.open(spec.name, "cloud-run", memory_bytes=spec.memory_bytes, vcpus=spec.cpus)
        return Service(instance, self._pool(spec.name, spec.instances * spec.concurrency, account), self._session)

    def _pool(self, function: str, slots: int, account: Account) -> PoolConfig:
        return PoolConfig(
            function=function,
            slots=slots,
            idle_seconds=self.config.idle_seconds,
            faults=self.faults,
            account=account,
            tasks=self._tasks,
        )

    def _start_triggers(self) -> None:
        config = self.config
        for source in config.sources:
            arn = f"arn:aws:sqs:{config.region}:{config.account}:{source.queue}"
            invoke = partial(self._invoke_waiting, self.fleets[source.function])
            start_source(self._tasks, source, self.queues[source.queue], invoke, queue_arn=arn)
        self.timetable.start(self._tasks)
        for finalized in config.finalized:
            for _ in range(finalized.concurrency):
                self._tasks.start(push(self.queues[finalized.queue], self.services[finalized.function]))
        for notification in config.notifications:
            self.queues[notification.queue].send(opening_message(notification.bucket, self._clock()))

    async def _invoke_waiting(self, fleet: Fleet, event: dict[str, Any]) -> Outcome:
        return await fleet.invoke(self.invocation(event), waits=True)

    def _send(self, function: str, event: dict[str, Any]) -> asyncio.Task[None]:
        return self.events.accept(self.fleets[function], self.invocation(event))

    def _on_finalized(self, created: ObjectCreated) -> None:
        for finalized in self.config.finalized:
            if finalized.bucket == created.bucket:
                self.queues[finalized.queue].send(finalized_message(created))

    def _new_id(self) -> str:
        return str(uuid.UUID(int=self._ids.getrandbits(128), version=4))
