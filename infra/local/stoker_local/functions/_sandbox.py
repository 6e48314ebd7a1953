"""One instance of a Lambda function: the real runtime client in a separate process, which is frozen while it is idle.

Every instance has its own Runtime API endpoint, so that no event is given to the pending poll of a dead instance.
Source of the contract: AWS Lambda Developer Guide, "Using the Lambda runtime API for custom runtimes".
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum

from aiohttp import web

from stoker_local._host import read_body, serve_application
from stoker_local.functions._config import FunctionFault, FunctionSpec
from stoker_local.functions._processes import FunctionProcess, InstanceConfig, ProcessPlan
from stoker_local.functions._statistics import MAX_RESULT_BYTES, HandlerResult, Invocation, failure_result

_SETTLE_SECONDS = 10.0
_OPEN_FILES = 1024
_MEMORY_ERRORS = ("MemoryError", "_ArrayMemoryError")  # Python's and numpy's
_MAX_ERROR_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 21  # the runtime client sends an error's complete stack trace in one header
_API_PREFIX = "/2018-06-01/runtime"
_ERROR_TYPE = re.compile(r"[\w.:$-]{1,255}")


class Sandbox(FunctionProcess[FunctionSpec]):
    """One instance of a Lambda function; its other methods may be used while :meth:`live` runs.

    Attributes:
        init_seconds: duration of the start, in seconds; 0 before its end.
    """

    def __init__(self, name: str, config: InstanceConfig[FunctionSpec], arn: str) -> None:
        super().__init__(name, config)
        self.init_seconds = 0.0
        self._api = RuntimeApi(arn=arn, on_poll=self.freeze)

    def __repr__(self) -> str:
        return f"<Sandbox {self.name} {self._api.state}>"

    # The process.

    @asynccontextmanager
    async def _plan_process(self) -> AsyncIterator[ProcessPlan]:
        spec = self._config.spec
        try:
            async with self._api.serve(self._config.cloud.host) as address:
                yield ProcessPlan(
                    command=(sys.executable, "-m", "awslambdaric", spec.handler),
                    environment=self._environment(address),
                    folder=spec.task_root,
                    memory_bytes=spec.memory_bytes,
                    tmp_bytes=spec.tmp_mb << 20,
                    open_files=_OPEN_FILES,
                )
        finally:
            self._api.step("end")

    def _environment(self, address: str) -> dict[str, str]:
        config, spec = self._config, self._config.spec
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "TZ": ":UTC",
            "AWS_REGION": config.cloud.region,
            "AWS_DEFAULT_REGION": config.cloud.region,
            **config.environment,
            **spec.environment,
            "_HANDLER": spec.handler,
            "AWS_EXECUTION_ENV": f"AWS_Lambda_python{sys.version_info.major}.{sys.version_info.minor}",
            "AWS_LAMBDA_FUNCTION_NAME": spec.name,
            "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(spec.memory_mb),
            "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand",
            "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{spec.name}",
            "AWS_LAMBDA_LOG_STREAM_NAME": self.name,
            "AWS_LAMBDA_RUNTIME_API": address,
            "LAMBDA_TASK_ROOT": os.path.abspath(spec.task_root),  # noqa: PTH100  (a symbolic link stays one)
            "LAMBDA_RUNTIME_DIR": "/var/runtime",
        }

    def thaw(self) -> None:
        """Continue the process group, unless it is frozen because it waits for work."""
        if self._api.state is not InstanceState.FROZEN:
            super().thaw()

    # Invocations.

    async def start(self) -> HandlerResult | None:
        """Wait until the instance polls for work; return an error if it ends, fails or takes too long instead."""
        loop = asyncio.get_running_loop()
        started_at, limit = loop.time(), self._config.cloud.init_seconds
        await self._wait_for(self._api.poll_future, self._api.result_future, seconds=limit)
        self.init_seconds = loop.time() - started_at
        if self._api.poll_future.done():
            return None
        answer = self._final_result("", f"Init timed out after {limit:.2f} seconds")
        await self._kill_and_wait()
        return answer

    async def run(self, invocation: Invocation, fault: FunctionFault | None) -> tuple[HandlerResult, float]:
        """Run one invocation; return its result and duration in seconds, once the instance is frozen or has ended."""
        if self.exit_future.done():
            return _exit_result(self.exit_future.result(), invocation.request_id), 0.0
        loop, limit = asyncio.get_running_loop(), self._config.spec.timeout_seconds
        started_at = loop.time()
        super().thaw()
        self._api.begin(invocation, timeout_seconds=limit)
        with self.inject_fault(fault):
            await self._wait_for(self._api.result_future, seconds=limit)
        seconds = loop.time() - started_at
        exceeds = self.exceeds_memory(self._config.spec.memory_bytes)
        answer = self._final_result(invocation.request_id, f"Task timed out after {limit:.2f} seconds")
        survives = self._api.result_future.done()
        if survives and (exceeds or answer.error_type in _MEMORY_ERRORS):
            # Lambda would have killed it before it could answer.
            message = "Runtime exited with error: signal: killed"
            answer = failure_result("Runtime.OutOfMemory", message, invocation.request_id)
            survives = False
        if survives:
            await self._wait_for(self._api.poll_future, seconds=_SETTLE_SECONDS)
        if not (survives and self._api.poll_future.done()):
            await self._kill_and_wait()
        return answer, seconds

    def _final_result(self, request_id: str, late: str) -> HandlerResult:
        """Return the result of the start or invocation, in Lambda's terms; ``late`` is the message of a timeout."""
        if self._api.result_future.done():
            return self._api.result_future.result()
        if self.exit_future.done():
            return _exit_result(self.exit_future.result(), request_id)
        return failure_result("Sandbox.Timedout", late, request_id)

    async def _wait_for(self, *events: asyncio.Future[None] | asyncio.Future[HandlerResult], seconds: float) -> None:
        """Wait for one of the events or the end of the process, at most ``seconds``."""
        await asyncio.wait({*events, self.exit_future}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    async def _kill_and_wait(self) -> None:
        self.kill()
        await asyncio.wait({self.exit_future})


def _exit_result(code: int, request_id: str) -> HandlerResult:
    reason = f"signal: {signal.strsignal(-code)}".lower() if code < 0 else f"exit status {code}"
    message = f"Runtime exited with error: {reason}" if code else "Runtime exited without providing a reason"
    return failure_result("Runtime.ExitError", message, request_id)


class InstanceState(StrEnum):
    """States of an instance."""

    STARTING = "starting"
    FROZEN = "frozen"
    BUSY = "busy"
    ANSWERED = "answered"  # has answered, but not yet polled for the next event
    DEAD = "dead"


_TRANSITIONS: Mapping[tuple[InstanceState, str], InstanceState] = {
    (InstanceState.STARTING, "poll"): InstanceState.FROZEN,
    (InstanceState.STARTING, "fail"): InstanceState.ANSWERED,
    (InstanceState.FROZEN, "invoke"): InstanceState.BUSY,
    (InstanceState.BUSY, "answer"): InstanceState.ANSWERED,
    (InstanceState.ANSWERED, "poll"): InstanceState.FROZEN,
    **{(state, "end"): InstanceState.DEAD for state in InstanceState},
}


class RuntimeApi:
    """The Runtime API endpoint of one instance.

    Attributes:
        state: state of the instance.
        result_future: future of the result of the start or current invocation; a start has a result only if it fails.
        poll_future: future that is done while the instance waits for work.
    """

    def __init__(self, *, arn: str, on_poll: Callable[[], None]) -> None:
        self.state = InstanceState.STARTING
        self._arn = arn
        self._on_poll = on_poll
        self._loop = asyncio.get_running_loop()
        self._work: asyncio.Queue[tuple[Invocation, int]] = asyncio.Queue()
        self._request_id = ""
        self.result_future: asyncio.Future[HandlerResult] = self._loop.create_future()
        self.poll_future: asyncio.Future[None] = self._loop.create_future()

    def begin(self, invocation: Invocation, *, timeout_seconds: float) -> None:
        """Give an invocation to the instance; from now on, :attr:`result_future` is the future of its result."""
        self.step("invoke")
        self.result_future, self.poll_future = self._loop.create_future(), self._loop.create_future()
        self._request_id = invocation.request_id
        deadline_milliseconds = int((time.time() + timeout_seconds) * 1000)
        self._work.put_nowait((invocation, deadline_milliseconds))

    def step(self, event: str) -> None:
        """Change the state according to an event.

        Raises:
            HTTPForbidden: the event is not allowed in the current state.
        """
        if (self.state, event) not in _TRANSITIONS:
            error = {"errorType": "InvalidStateTransition", "errorMessage": f"{event} while {self.state}"}
            raise web.HTTPForbidden(text=json.dumps(error), content_type="application/json")
        self.state = _TRANSITIONS[self.state, event]

    def serve(self, host: str) -> AbstractAsyncContextManager[str]:
        """Serve on a free port; the context yields the address for the runtime client."""
        app = web.Application()
        app.router.add_get(f"{_API_PREFIX}/invocation/next", self._next)
        app.router.add_post(f"{_API_PREFIX}/invocation/{{id}}/response", self._respond)
        app.router.add_post(f"{_API_PREFIX}/invocation/{{id}}/error", self._fail)
        app.router.add_post(f"{_API_PREFIX}/init/error", self._fail)
        # A pending poll must end when its process dies.
        return serve_application(app, host, handler_cancellation=True, max_field_size=_MAX_HEADER_BYTES)

    async def _next(self, request: web.Request) -> web.Response:
        self.step("poll")
        if not self.poll_future.done():
            self.poll_future.set_result(None)
        self._on_poll()
        invocation, deadline_milliseconds = await self._work.get()
        headers = {
            "Lambda-Runtime-Aws-Request-Id": invocation.request_id,
            "Lambda-Runtime-Deadline-Ms": str(deadline_milliseconds),
            "Lambda-Runtime-Invoked-Function-Arn": self._arn,
        }
        if invocation.client_context:
            headers["Lambda-Runtime-Client-Context"] = invocation.client_context
        return web.Response(body=invocation.payload, headers=headers, content_type="application/json")

    async def _respond(self, request: web.Request) -> web.Response:
        body = await read_body(request, limit_bytes=MAX_RESULT_BYTES)
        if body is not None:
            return self._finish(request, HandlerResult(payload=body), status=202)
        message = f"Response payload size exceeded maximum allowed payload size ({MAX_RESULT_BYTES} bytes)."
        error = {"errorType": "Function.ResponseSizeTooLarge", "errorMessage": message}
        answer = HandlerResult(payload=json.dumps(error).encode(), error_type="Function.ResponseSizeTooLarge")
        return self._finish(request, answer, status=413)

    async def _fail(self, request: web.Request) -> web.Response:
        return self._finish(request, await _read_error(request), status=202)

    def _finish(self, request: web.Request, answer: HandlerResult, *, status: int) -> web.Response:
        is_start = "id" not in request.match_info
        if not is_start and request.match_info["id"] != self._request_id:
            return web.json_response({"errorType": "InvalidRequestID"}, status=400)
        self.step("fail" if is_start else "answer")
        self.result_future.set_result(answer)
        return web.json_response({"status": "OK"}, status=status)


async def _read_error(request: web.Request) -> HandlerResult:
    """Parse a reported error; a body without a valid error type becomes the message of an ``Unhandled`` error."""
    body = await read_body(request, limit_bytes=_MAX_ERROR_BYTES) or b""
    try:
        error_type = json.loads(body)["errorType"]
    except (ValueError, TypeError, KeyError, RecursionError):
        error_type = None
    if isinstance(error_type, str) and _ERROR_TYPE.fullmatch(error_type):
        return HandlerResult(payload=body, error_type=error_type)
    error = {"errorType": "Unhandled", "errorMessage": body.decode("utf-8", "replace")}
    return HandlerResult(payload=json.dumps(error).encode(), error_type="Unhandled")
