"""A Lambda function as its callers see it: invocations, each in an instance that is started if none is idle."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from stoker_local.functions._faults import FunctionFault, FunctionFaultKind
from stoker_local.functions._outcome import Answer, Invocation, Outcome, billed_milliseconds, report
from stoker_local.functions._output import tail
from stoker_local.functions._pool import Pool, PoolConfig
from stoker_local.functions._sandbox import Sandbox, SandboxConfig
from stoker_local.functions._spec import FunctionSpec

__all__ = ["Fleet"]


class Fleet:
    """The instances of one function; their work is done in the tasks that it is given.

    The instance that worked last works next, so that the others can be taken back.
    """

    def __init__(self, sandbox: SandboxConfig, config: PoolConfig) -> None:
        self.spec: FunctionSpec = sandbox.spec
        self.account, self._meter = config.account, config.account.meter
        self.pool: Pool[Sandbox] = Pool(config)
        self._sandbox = sandbox
        self._tasks = config.tasks
        self._started = 0

    @property
    def arn(self) -> str:
        """The function's Amazon resource name."""
        return self._sandbox.arn

    async def invoke(self, invocation: Invocation, *, waits: bool = False) -> Outcome:
        """Run the function once; an instance is started if none is idle.

        Cancelling the caller does not stop the function, as with the real one.

        Args:
            invocation: what to run.
            waits: wait for the function's concurrency rather than be throttled.

        Raises:
            ServiceError: throttled.
        """
        fault = await self.pool.admit(waits=waits)
        task = self._tasks.start(self._run(invocation, fault))
        if fault is not None and fault.kind is FunctionFaultKind.DUPLICATE:
            self._tasks.start(self._run_again(invocation))
        return await asyncio.shield(task)

    async def _run_again(self, invocation: Invocation) -> None:
        """Deliver the same event again: beside the first delivery if concurrency allows, else after it."""
        await self.pool.slots.acquire()
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
            if sandbox.is_alive:
                self.pool.rest(sandbox)
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
            self.pool.slots.release()

    def _lease(self) -> tuple[Sandbox, bool]:
        """Return an idle instance, or a new one and True."""
        if sandbox := next(reversed(self.pool.idle), None):
            self.pool.wake(sandbox)
            return sandbox, False
        self._started += 1
        return Sandbox(f"{self.spec.name}/{self._started}", self._sandbox, on_fault=self.account.struck), True

    async def _start(self, sandbox: Sandbox) -> Answer | None:
        self.pool.start(sandbox)
        error = await sandbox.start()
        what = "cold-start" if error is None else "start-failed"
        self.account.note(what, instance=sandbox.name, detail=error.error_type if error else "")
        return error

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
