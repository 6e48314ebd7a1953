"""One instance of a function: a real runtime client in a process of its own, frozen whenever it has nothing to do."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stoker_local.functions._faults import FunctionFault, FunctionFaultKind
from stoker_local.functions._isolation import ProcessLimits, peak_memory_bytes, signal_group
from stoker_local.functions._outcome import Answer, Invocation, failure
from stoker_local.functions._output import Output
from stoker_local.functions._runtime_api import InstanceState, RuntimeApi
from stoker_local.functions._spec import FunctionSpec
from stoker_local.functions._strike import Target, striking
from stoker_local.functions._warden import ProcessPlan, Warden

__all__ = ["Sandbox", "SandboxConfig"]

_SETTLE_SECONDS = 10.0
_OPEN_FILES = 1024
_MEMORY_ERRORS = ("MemoryError", "_ArrayMemoryError")  # Python's and numpy's


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig:
    """What all instances of a function have in common.

    Attributes:
        arn: the function's Amazon resource name.
        environment: what the platform gives it; the function's own variables come on top.
        init_seconds: limit of a cold start.
    """

    spec: FunctionSpec
    host: str
    region: str
    arn: str
    environment: Mapping[str, str] = field(repr=False)
    warden: Warden
    init_seconds: float


class Sandbox:
    """One instance. :meth:`live` is its life; the rest may be used while that runs.

    Attributes:
        name: of the instance, for logs and statistics.
        init_seconds: how long it took to start, once it has.
        peak_bytes: most resident memory so far, 0 where the system does not tell.
    """

    def __init__(self, name: str, config: SandboxConfig, *, on_fault: Callable[[FunctionFaultKind], None]) -> None:
        self.name = name
        self.init_seconds = 0.0
        self.peak_bytes = 0
        self._config = config
        self._target = Target(kill=self.kill, freeze=self._freeze, thaw=self._resume, note=on_fault)
        self._pid = 0
        self._api = RuntimeApi(arn=config.arn, on_poll=self._freeze)
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._output = Output()

    def __repr__(self) -> str:
        return f"<Sandbox {self.name} {self._api.state}>"

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended."""
        return self._api.state is not InstanceState.DEAD

    # --- its process --------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Run the process until it ends, and clear up after it; cancelled, kill it first."""
        code = -signal.SIGKILL
        try:
            async with (
                self._api.serving(self._config.host) as address,
                self._config.warden.running(self._plan(address), self._output) as process,
            ):
                self._pid = process.pid
                code = await process.wait()
        finally:
            self._api.step("end")
            self._ended.set_result(code)
            self._output.close()

    def _plan(self, address: str) -> ProcessPlan:
        spec = self._config.spec
        return ProcessPlan(
            command=(sys.executable, "-m", "awslambdaric", spec.handler),
            environment=self._environment(address),
            folder=spec.task_root,
            limits=ProcessLimits(memory_bytes=spec.memory_bytes, tmp_bytes=spec.tmp_mb << 20, open_files=_OPEN_FILES),
        )

    def _environment(self, address: str) -> dict[str, str]:
        config, spec = self._config, self._config.spec
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "TZ": ":UTC",
            "AWS_REGION": config.region,
            "AWS_DEFAULT_REGION": config.region,
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

    def kill(self) -> None:
        """End the process and all that it has started, at once, frozen or not."""
        self._signal(signal.SIGKILL)

    def _freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def _thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _resume(self) -> None:
        """Thaw it, unless it stands still because it waits for work."""
        if self._api.state is not InstanceState.FROZEN:
            self._thaw()

    def _signal(self, number: signal.Signals) -> None:
        if self._pid and self.is_alive:
            signal_group(self._pid, number)

    def take_log(self) -> bytes:
        """Return what it has written since the last call."""
        return self._output.take()

    # --- its work -----------------------------------------------------------------------------------------------

    async def start(self) -> Answer | None:
        """Wait until it asks for work; return an error if it ends, fails or takes too long instead."""
        loop = asyncio.get_running_loop()
        started_at, limit = loop.time(), self._config.init_seconds
        await self._wait_for(self._api.polled, self._api.answer, seconds=limit)
        self.init_seconds = loop.time() - started_at
        if self._api.polled.done():
            return None
        if self._api.answer.done():
            answer = self._api.answer.result()
        elif self._ended.done():
            answer = _exit_of(self._ended.result(), "")
        else:
            answer = failure("Sandbox.Timedout", f"Init timed out after {limit:.2f} seconds", "")
        await self._end()
        return answer

    async def run(self, invocation: Invocation, fault: FunctionFault | None) -> tuple[Answer, float]:
        """Let it do one invocation; return the answer and its seconds, once it is frozen again or has ended."""
        if self._ended.done():
            return _exit_of(self._ended.result(), invocation.request_id), 0.0
        loop, limit = asyncio.get_running_loop(), self._config.spec.timeout_seconds
        started_at = loop.time()
        self._thaw()
        self._api.begin(invocation, timeout_seconds=limit)
        with striking(fault, self._target):
            await self._wait_for(self._api.answer, seconds=limit)
        seconds = loop.time() - started_at
        self.peak_bytes = max(self.peak_bytes, peak_memory_bytes(self._pid))
        answer = self._judged(invocation.request_id)
        survives = self._api.answer.done() and answer is self._api.answer.result()
        if survives:
            await self._wait_for(self._api.polled, seconds=_SETTLE_SECONDS)
        if not (survives and self._api.polled.done()):
            await self._end()
        return answer, seconds

    def _judged(self, request_id: str) -> Answer:
        """Return how the invocation has ended, in Lambda's words."""
        if self._api.answer.done():
            answer = self._api.answer.result()
            if answer.error_type not in _MEMORY_ERRORS and self.peak_bytes <= self._config.spec.memory_bytes:
                return answer
            # Lambda would have killed it before it could answer.
            return failure("Runtime.OutOfMemory", "Runtime exited with error: signal: killed", request_id)
        if self._ended.done():
            return _exit_of(self._ended.result(), request_id)
        limit = self._config.spec.timeout_seconds
        return failure("Sandbox.Timedout", f"Task timed out after {limit:.2f} seconds", request_id)

    async def _wait_for(self, *events: asyncio.Future[None] | asyncio.Future[Answer], seconds: float) -> None:
        """Wait for the first of these, for its end, or for so long."""
        await asyncio.wait({*events, self._ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    async def _end(self) -> None:
        self.kill()
        await asyncio.wait({self._ended})


def _exit_of(code: int, request_id: str) -> Answer:
    how = f"signal: {signal.strsignal(-code)}".lower() if code < 0 else f"exit status {code}"
    message = f"Runtime exited with error: {how}" if code else "Runtime exited without providing a reason"
    return failure("Runtime.ExitError", message, request_id)
