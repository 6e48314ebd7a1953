"""All instances of one function: who gets which, when one is started, and when it is taken back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from stoker_local.functions.errors import ServiceError
from stoker_local.functions.faults import FunctionFault, FunctionFaultInjector, FunctionFaultKind
from stoker_local.functions.ledger import Account
from stoker_local.functions.outcome import Answer, Invocation, Outcome, billed_milliseconds, report
from stoker_local.functions.output import tail
from stoker_local.functions.sandbox import Sandbox, SandboxConfig
from stoker_local.functions.spec import FunctionSpec
from stoker_local.functions.tasks import Tasks

__all__ = ["Fleet", "FleetConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """What a fleet is made of.

    Attributes:
        sandbox: what its instances have in common.
        idle_seconds: an instance without work for so long is taken back.
    """

    sandbox: SandboxConfig
    idle_seconds: float
    faults: FunctionFaultInjector
    account: Account
    tasks: Tasks


class Fleet:
    """The instances of one function; their work is done in the tasks that it is given.

    The instance that worked last works next, so that the others can be taken back.
    """

    def __init__(self, config: FleetConfig) -> None:
        self.spec: FunctionSpec = config.sandbox.spec
        self._config = config
        self.account, self._meter = config.account, config.account.meter
        self._slots = asyncio.Semaphore(self.spec.concurrency)
        self._idle: dict[Sandbox, asyncio.TimerHandle] = {}  # the one that worked last is last
        self._living: set[Sandbox] = set()  # but for those that are about to die
        self._started = 0

    @property
    def arn(self) -> str:
        """The function's Amazon resource name."""
        return self._config.sandbox.arn

    async def invoke(self, invocation: Invocation, *, waits: bool = False) -> Outcome:
        """Run the function once; an instance is started if none is idle.

        Cancelling the caller does not stop the function, as with the real one.

        Args:
            invocation: what to run.
            waits: wait for the function's concurrency rather than be throttled.

        Raises:
            ServiceError: throttled.
        """
        fault = self._config.faults.draw(self.spec.name)
        kind = fault and fault.kind
        if fault is not None and kind not in (FunctionFaultKind.KILL, FunctionFaultKind.FREEZE):
            self.account.struck(fault.kind)
        if kind is FunctionFaultKind.THROTTLE or (self._slots.locked() and not waits):
            self.account.throttled()
            raise ServiceError(
                "TooManyRequestsException",
                "Rate Exceeded.",
                reason="ReservedFunctionConcurrentInvocationLimitExceeded",
            )
        if kind is FunctionFaultKind.RECLAIM:
            self.reclaim()
        await self._slots.acquire()
        task = self._config.tasks.start(self._run(invocation, fault))
        if kind is FunctionFaultKind.DUPLICATE:
            self._config.tasks.start(self._run_again(invocation))
        return await asyncio.shield(task)

    def reclaim(self) -> None:
        """Take all idle instances back at once."""
        for sandbox in list(self._idle):
            self._take_back(sandbox)

    # --- invocations --------------------------------------------------------------------------------------------

    async def _run_again(self, invocation: Invocation) -> None:
        """Deliver the same event again: beside the first delivery if concurrency allows, else after it."""
        await self._slots.acquire()
        await self._run(invocation, None)

    async def _run(self, invocation: Invocation, fault: FunctionFault | None) -> Outcome:
        """Run the invocation in the slot that was acquired for it."""
        self._meter.busy += 1
        try:
            sandbox, is_cold = self._lease()
            error = await self._start(sandbox) if is_cold else None
            if error is None:
                self.account.note("invoke", instance=sandbox.name)
                answer, seconds = await sandbox.run(invocation, fault)
            else:
                answer, seconds = error, 0.0
            self._release(sandbox)
            init_seconds = sandbox.init_seconds if is_cold else None
            return self._outcome(
                sandbox,
                Outcome(
                    request_id=invocation.request_id,
                    payload=answer.payload,
                    error_type=answer.error_type,
                    seconds=seconds,
                    init_seconds=init_seconds,
                    billed_milliseconds=billed_milliseconds(seconds, init_seconds),
                    memory_bytes=sandbox.peak_bytes,
                    log=sandbox.take_log(),
                ),
            )
        finally:
            self._meter.busy -= 1
            self._slots.release()

    def _lease(self) -> tuple[Sandbox, bool]:
        """Return an idle instance, or a new one and True."""
        if self._idle:
            sandbox, timer = self._idle.popitem()
            timer.cancel()
            return sandbox, False
        self._started += 1
        return Sandbox(f"{self.spec.name}/{self._started}", self._config.sandbox, on_fault=self.account.struck), True

    async def _start(self, sandbox: Sandbox) -> Answer | None:
        self._living.add(sandbox)
        self.account.started(instances=len(self._living))
        self._config.tasks.start(self._live(sandbox))
        error = await sandbox.start()
        what = "cold-start" if error is None else "start-failed"
        self.account.note(what, instance=sandbox.name, detail=error.error_type if error else "")
        return error

    async def _live(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.live()
        finally:
            if timer := self._idle.pop(sandbox, None):
                timer.cancel()
            self._forget(sandbox)

    def _outcome(self, sandbox: Sandbox, outcome: Outcome) -> Outcome:
        """Count an invocation that has ended, and return it with the end of its whole log."""
        log = b"START RequestId: %b Version: $LATEST\n" % outcome.request_id.encode()
        log += outcome.log + report(self.spec, outcome)
        self.account.wrote(log)
        self._meter.invocations += 1
        self._meter.errors += bool(outcome.error_type)
        self._meter.billed_seconds += outcome.billed_milliseconds / 1000
        what = "error" if outcome.error_type else "answer"
        self.account.note(what, instance=sandbox.name, detail=outcome.error_type)
        return replace(outcome, log=tail(log))

    def _release(self, sandbox: Sandbox) -> None:
        if sandbox.is_alive:
            loop = asyncio.get_running_loop()
            self._idle[sandbox] = loop.call_later(self._config.idle_seconds, self._take_back, sandbox)

    def _take_back(self, sandbox: Sandbox) -> None:
        self._idle.pop(sandbox).cancel()
        self.account.reclaimed(sandbox.name)
        self._forget(sandbox)
        sandbox.kill()

    def _forget(self, sandbox: Sandbox) -> None:
        self._living.discard(sandbox)
        self._meter.instances = len(self._living)
