"""Google functions: one address per function, and instances behind it that each run the real Functions Framework.

Events of the local GCS are sent as CloudEvents until they are acknowledged.
Source: CloudEvents HTTP protocol binding, binary mode; Google's ``google.cloud.storage.object.v1.finalized``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from stoker_local._gcs import object_resource
from stoker_local._host import catch_all_application, read_body
from stoker_local._s3.model import ObjectCreated
from stoker_local.functions._config import FunctionFault, GoogleSpec
from stoker_local.functions._instance_pool import InstancePool
from stoker_local.functions._processes import FunctionProcess, InstanceConfig, ProcessPlan
from stoker_local.functions._statistics import ServiceError
from stoker_local.functions._triggers import LocalQueue

_MAX_BODY_BYTES = 32 << 20
_BILLED_STEPS_PER_SECOND = 10
_HOP_BY_HOP = frozenset(
    {"connection", "content-length", "date", "keep-alive", "server", "te", "trailer", "transfer-encoding", "upgrade"}
)
_TARGET = re.compile(r"/(?P<name>[a-z0-9-]+)(?P<rest>(?:[/?].*)?)", re.ASCII | re.DOTALL)
_HEADER_CHARACTERS = "".join(chr(code) for code in range(ord("!"), ord("~") + 1) if chr(code) not in '%"')
_EVENT_TYPE = "google.cloud.storage.object.v1.finalized"
_TERMINATION_SECONDS = 10.0
_START_SECONDS = 60.0
_CONNECT_INTERVAL_SECONDS = 0.02


class GoogleInstance(FunctionProcess[GoogleSpec]):
    """One instance of a Google function; its other methods may be used while :meth:`live` runs.

    Attributes:
        url: URL at which it listens.
        active: number of requests in progress.
        start_seconds: time from the start until it listened, in seconds; 0 before that.
    """

    def __init__(self, name: str, config: InstanceConfig[GoogleSpec]) -> None:
        super().__init__(name, config)
        self.active = 0
        self.start_seconds = 0.0
        self._port = reserve_port(config.cloud.host)
        self.url = f"http://{_url_host(config.cloud.host)}:{self._port}"

    @asynccontextmanager
    async def _plan_process(self) -> AsyncIterator[ProcessPlan]:
        spec = self._config.spec
        yield ProcessPlan(
            command=self._command(),
            environment=self._environment(),
            folder=spec.folder,
            memory_bytes=spec.memory_bytes,
            tmp_bytes=spec.memory_bytes,  # on Cloud Run, files count as memory
        )

    async def _terminate(self, process: asyncio.subprocess.Process) -> None:
        """Send SIGTERM and wait at most ten seconds, as Cloud Run does."""
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)  # a stopped process would not handle the signal
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TERMINATION_SECONDS):
                await process.wait()

    def _command(self) -> tuple[str, ...]:
        spec, host = self._config.spec, _url_host(self._config.cloud.host)
        program = Path(sys.executable).with_name("functions-framework")
        return (
            *(str(program), "--target", spec.target, "--source", str(Path(spec.source).absolute())),
            *("--signature-type", spec.signature, "--host", host, "--port", str(self._port), "--asgi"),
        )

    def _environment(self) -> dict[str, str]:
        config, spec = self._config, self._config.spec
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            **config.environment,
            **spec.environment,
            "FUNCTION_TARGET": spec.target,
            "FUNCTION_SIGNATURE_TYPE": spec.signature,
            "K_SERVICE": spec.name,
            "K_REVISION": f"{spec.name}-00001",
            "K_CONFIGURATION": spec.name,
            "PORT": str(self._port),
            "CLOUD_RUN_TIMEOUT_SECONDS": str(int(spec.timeout_seconds) or 1),
        }

    async def wait_until_listening(self) -> bool:
        """Wait until the instance accepts connections; return False if it ends or takes too long instead."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        while self.is_alive and loop.time() < started_at + _START_SECONDS:
            try:
                _, writer = await asyncio.open_connection(self._config.cloud.host, self._port)
            except OSError:
                await asyncio.wait({self.exit_future}, timeout=_CONNECT_INTERVAL_SECONDS)
                continue
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            self.start_seconds = loop.time() - started_at
            return True
        self.kill()
        return False


def reserve_port(host: str) -> int:
    """Return a free port that the system assigns to no other socket for a minute, unless one binds it by number.

    The Functions Framework takes a port, but no open socket. After a connection that this side has closed first, the
    system does not assign the port by itself (TIME_WAIT; Stevens, "TCP/IP Illustrated", section 13.5).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        address = server.getsockname()
        with socket.create_connection(address[:2]):
            server.accept()[0].close()
    port: int = address[1]
    return port


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class GoogleService(InstancePool[GoogleInstance]):
    """A Google function; each request goes to the first instance with free capacity, otherwise to a new instance."""

    def __init__(self, config: InstanceConfig[GoogleSpec], session: aiohttp.ClientSession) -> None:
        self.spec, cloud = config.spec, config.cloud
        slots = self.spec.instances * self.spec.concurrency
        super().__init__(config.recorder, config.faults, config.tasks, slots=slots, idle_seconds=cloud.idle_seconds)
        self._config = config
        self._session = session
        self._active_since: dict[GoogleInstance, float] = {}

    async def handle_request(self, request: web.Request, target: str = "") -> web.Response:
        """Answer an HTTP request; ``target`` replaces its path and query unless it is empty."""
        target = target or request.raw_path
        sent = request.headers.get("Authorization", "")
        expected = f"Bearer {self.spec.token}"
        if self.spec.token and not hmac.compare_digest(sent.encode("utf-8", "replace"), expected.encode()):
            return web.Response(status=401, text="Unauthorized", headers={"WWW-Authenticate": "Bearer"})
        if not target.startswith("/"):  # a request to a proxy
            return web.Response(status=400, text="Bad Request")
        body = await read_body(request, limit_bytes=_MAX_BODY_BYTES)
        if body is None:
            return web.Response(status=413, text="Request Entity Too Large")
        return await self.dispatch(request.method, target, request.headers, body)

    async def dispatch(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> web.Response:
        """Forward a request to an instance; ``target`` is the path and query, still percent-encoded."""
        forward = partial(self._forward, method, target, headers, body)
        try:
            fault = await self.acquire_slot()
        except ServiceError:
            return web.Response(status=429, text="Rate exceeded.")
        self.deliver_duplicate(fault, partial(self._run_in_slot, forward, None))
        return await self._run_in_slot(forward, fault)

    async def _run_in_slot(
        self, forward: Callable[[GoogleInstance], Awaitable[web.Response]], fault: FunctionFault | None
    ) -> web.Response:
        """Answer a request within an acquired slot."""
        instance = self._acquire_instance()
        try:
            if instance.start_seconds or await instance.wait_until_listening():
                with instance.inject_fault(fault):
                    response = await forward(instance)
            else:
                response = web.Response(status=503, text="The service has failed to start.")
        finally:
            self._release_instance(instance)
            self.slots.release()
        self.recorder.figures.errors += response.status >= 500
        event = "error" if response.status >= 500 else "answer"
        self.recorder.record_event(event, instance=instance.name, detail=str(response.status))
        return response

    async def _forward(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes, instance: GoogleInstance
    ) -> web.Response:
        """Forward a request to an instance and return the instance's response."""
        try:
            async with self._session.request(
                method,
                URL(instance.url + target, encoded=True),
                headers=_end_to_end_headers(headers),
                data=BytesIO(body) if body else None,
                timeout=aiohttp.ClientTimeout(total=self.spec.timeout_seconds),
                allow_redirects=False,
            ) as answer:
                content = await read_body(answer, limit_bytes=_MAX_BODY_BYTES)
        except TimeoutError:
            return web.Response(status=504, text="upstream request timeout")
        except (aiohttp.ClientError, OSError):
            instance.kill()
            return web.Response(status=503, text="The instance ended before it answered.")
        if instance.exceeds_memory(self.spec.memory_bytes):
            # Cloud Run would have killed it before it could answer.
            instance.kill()
            text = f"Memory limit of {self.spec.memory_mb} MiB exceeded with {instance.peak_bytes >> 20} MiB used."
            return web.Response(status=503, text=text)
        if content is None:
            return web.Response(status=500, text="The response is larger than 32 MiB.")
        return web.Response(status=answer.status, body=content, headers=_end_to_end_headers(answer.headers))

    # Instances.

    def _acquire_instance(self) -> GoogleInstance:
        """Return an instance with capacity for one more request, and count the request; start one if there is none."""
        usable = (i for i in self.instances if i.is_alive and i.active < self.spec.concurrency)
        instance = next(usable, None)
        if instance is None:
            instance = GoogleInstance(self.next_name(), self._config)
            self.recorder.record_event("cold-start", instance=instance.name)
            self.start(instance)
        self.mark_busy(instance)
        instance.active += 1
        if instance.active == 1:
            self.recorder.figures.busy += 1
            self._active_since[instance] = asyncio.get_running_loop().time()
        return instance

    def _release_instance(self, instance: GoogleInstance) -> None:
        instance.active -= 1
        self.recorder.figures.invocations += 1
        self.recorder.record_log(instance.output.take())
        if instance.active:
            return
        self.recorder.figures.busy -= 1
        seconds = asyncio.get_running_loop().time() - self._active_since.pop(instance)
        self.recorder.figures.billed_seconds += math.ceil(seconds * _BILLED_STEPS_PER_SECOND) / _BILLED_STEPS_PER_SECOND
        if instance.is_alive:
            self.mark_idle(instance)


def _end_to_end_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers that a proxy forwards, including repeated ones."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP)


def gateway(services: Mapping[str, GoogleService]) -> web.Application:
    """Return an application that forwards ``/NAME/path?query`` to the service NAME as ``/path?query``."""

    async def answer(request: web.Request) -> web.Response:
        target = _TARGET.fullmatch(request.raw_path)
        service = services.get(target["name"]) if target else None
        if target is None or service is None:
            return web.Response(status=404, text="There is no such function.")
        rest = target["rest"]
        return await service.handle_request(request, rest if rest.startswith("/") else f"/{rest}")

    return catch_all_application(answer)


def finalized_message(created: ObjectCreated) -> str:
    """Return the queue message of an object's event: its headers and body, as JSON."""
    resource = object_resource(created.bucket, created.key, created.stored)
    headers = {
        "ce-specversion": "1.0",
        "ce-id": f"{created.bucket}/{created.stored.tag}",
        "ce-type": _EVENT_TYPE,
        "ce-source": f"//storage.googleapis.com/projects/_/buckets/{created.bucket}",
        # Characters that a header cannot contain are percent-encoded, as the binding requires.
        "ce-subject": quote(f"objects/{created.key}", safe=_HEADER_CHARACTERS, errors="surrogatepass"),
        "ce-time": datetime.fromtimestamp(created.stored.modified_at, UTC).isoformat(),
        "content-type": "application/json",
    }
    return json.dumps({"headers": headers, "body": resource})


async def push_events(queue: LocalQueue, service: GoogleService) -> None:
    """Post events to a function until cancelled, one at a time; unacknowledged events become visible again."""
    while True:
        (delivery,) = await queue.receive(1)
        message: dict[str, Any] = json.loads(delivery.body)
        headers = dict(message["headers"])
        if service.spec.token:
            headers["Authorization"] = f"Bearer {service.spec.token}"
        body = json.dumps(message["body"]).encode()
        response = await service.dispatch("POST", "/", headers, body)
        if 200 <= response.status < 300:
            queue.delete(delivery.receipt)
