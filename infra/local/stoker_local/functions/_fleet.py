"""The instances of a function, and a Lambda function as its callers see it, invoked at once or by an event.

Source: AWS Lambda Developer Guide, "How Lambda handles errors and retries with asynchronous invocation" and "Capturing
records of Lambda asynchronous invocations".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Generic, Protocol, TypeVar

from stoker_local._serving import Tasks
from stoker_local.functions._config import FunctionSpec
from stoker_local.functions._faults import FunctionFault, FunctionFaultInjector, FunctionFaultKind
from stoker_local.functions._processes import tail
from stoker_local.functions._sandbox import Sandbox, SandboxConfig
from stoker_local.functions._statistics import (
    Account,
    Answer,
    Invocation,
    Outcome,
    ServiceError,
    billed_milliseconds,
    report,
)
from stoker_local.functions._triggers import LocalQueue

__all__ = ["EventInvoker", "Fleet", "Pool"]

_STRIKE_LATER = (FunctionFaultKind.KILL, FunctionFaultKind.FREEZE)


class Instance(Protocol):
    """What a pool knows of an instance."""

    name: str

    async def live(self) -> None:
        """Run until it ends; cancelled, end it."""


T = TypeVar("T", bound=Instance)


class Pool(Generic[T]):
    """The instances of a function.

    Attributes:
        account: counts what happens.
        tasks: in which instances live.
        slots: one is acquired for every invocation, by :meth:`admit` or by whom it delivers again.
        living: but for those that are about to end.
        idle: of these, the one that worked last is last.
    """

    def __init__(
        self, account: Account, faults: FunctionFaultInjector, tasks: Tasks, *, slots: int, idle_seconds: float
    ) -> None:
        self.account = account
        self.tasks = tasks
        self.slots = asyncio.Semaphore(slots)
        self.living: dict[T, asyncio.Task[None]] = {}
        self.idle: dict[T, asyncio.TimerHandle] = {}
        self._faults = faults
        self._idle_seconds = idle_seconds

    async def admit(self, *, waits: bool = False) -> FunctionFault | None:
        """Acquire a slot for an invocation; return the fault that is to strike it.

        Args:
            waits: wait for a slot rather than be throttled.

        Raises:
            ServiceError: throttled.
        """
        fault = self._faults.draw(self.account.function)
        kind = fault and fault.kind
        if fault is not None and kind not in _STRIKE_LATER:
            self.account.struck(fault.kind)
        if kind is FunctionFaultKind.THROTTLE or (self.slots.locked() and not waits):
            self.account.throttled()
            reason = "ReservedFunctionConcurrentInvocationLimitExceeded"
            raise ServiceError("TooManyRequestsException", "Rate Exceeded.", reason=reason)
        if kind is FunctionFaultKind.RECLAIM:
            self.reclaim()
        await self.slots.acquire()
        return fault

    def start(self, instance: T) -> None:
        """Let a new instance live."""
        self.living[instance] = self.tasks.start(self._live(instance))
        self.account.started(instances=len(self.living))

    def wake(self, instance: T) -> None:
        """Note that an instance has work."""
        if timer := self.idle.pop(instance, None):
            timer.cancel()

    def rest(self, instance: T) -> None:
        """Note that an instance has no more work; it is taken back if none comes."""
        loop = asyncio.get_running_loop()
        self.idle[instance] = loop.call_later(self._idle_seconds, self._take_back, instance)

    def reclaim(self) -> None:
        """Take all idle instances back at once."""
        for instance in list(self.idle):
            self._take_back(instance)

    def _take_back(self, instance: T) -> None:
        self.account.reclaimed(instance.name)
        self.living[instance].cancel()
        self._forget(instance)

    async def _live(self, instance: T) -> None:
        try:
            await instance.live()
        finally:
            self._forget(instance)

    def _forget(self, instance: T) -> None:
        self.wake(instance)
        self.living.pop(instance, None)
        self.account.figures.instances = len(self.living)


class Fleet:
    """The instances of one function; their work is done in the tasks that it is given.

    The instance that worked last works next, so that the others can be taken back.
    """

    def __init__(self, sandbox: SandboxConfig, pool: Pool[Sandbox]) -> None:
        self.spec: FunctionSpec = sandbox.spec
        self.account = pool.account
        self.pool = pool
        self._sandbox = sandbox
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
        task = self.pool.tasks.start(self._run(invocation, fault))
        if fault is not None and fault.kind is FunctionFaultKind.DUPLICATE:
            self.pool.tasks.start(self._run_again(invocation))
        return await asyncio.shield(task)

    async def _run_again(self, invocation: Invocation) -> None:
        """Deliver the same event again: beside the first delivery if concurrency allows, else after it."""
        await self.pool.slots.acquire()
        await self._run(invocation, None)

    async def _run(self, invocation: Invocation, fault: FunctionFault | None) -> Outcome:
        """Run the invocation in the slot that was acquired for it."""
        self.account.figures.busy += 1
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
            self.account.figures.busy -= 1
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
        self.account.figures.invocations += 1
        self.account.figures.errors += bool(outcome.error_type)
        self.account.figures.billed_seconds += outcome.billed_milliseconds / 1000
        what = "error" if outcome.error_type else "answer"
        self.account.note(what, instance=sandbox.name, detail=outcome.error_type)
        return replace(outcome, log=tail(log))


class EventInvoker:
    """Lambda's queue of events, before the functions."""

    def __init__(
        self,
        queues: Mapping[str, LocalQueue],
        *,
        retry_seconds: tuple[float, float],
        tasks: Tasks,
    ) -> None:
        self._queues = queues
        self._retry_seconds = retry_seconds
        self._tasks = tasks

    def accept(self, fleet: Fleet, invocation: Invocation) -> asyncio.Task[None]:
        """Take an event over; the task ends when it has been handled or given up."""
        return self._tasks.start(self._deliver(fleet, invocation))

    async def _deliver(self, fleet: Fleet, invocation: Invocation) -> None:
        for attempt in range(1 + fleet.spec.retries):
            if attempt:
                fleet.account.note("retry", detail=str(attempt))
                await asyncio.sleep(self._retry_seconds[attempt - 1])
            outcome = await self._attempt(fleet, invocation)
            if not outcome.error_type:
                return
        fleet.account.note("dropped", detail=outcome.error_type)
        if fleet.spec.on_failure:
            self._hand_over(fleet, invocation, outcome)

    def _hand_over(self, fleet: Fleet, invocation: Invocation, outcome: Outcome) -> None:
        """Give what has failed to the queue of failures, unless it is more than a message can be."""
        try:
            record = json.dumps(_record(fleet.arn, invocation, outcome, attempts=1 + fleet.spec.retries))
            self._queues[fleet.spec.on_failure].send(record)
        except (ValueError, RecursionError):
            fleet.account.note("undelivered", detail=fleet.spec.on_failure)

    async def _attempt(self, fleet: Fleet, invocation: Invocation) -> Outcome:
        """Wait for the function's concurrency; being throttled all the same is no failed attempt."""
        while True:
            try:
                return await fleet.invoke(invocation, waits=True)
            except ServiceError:
                await asyncio.sleep(self._retry_seconds[0])


def _record(arn: str, invocation: Invocation, outcome: Outcome, *, attempts: int) -> dict[str, Any]:
    return {
        "version": "1.0",
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "requestContext": {
            "requestId": invocation.request_id,
            "functionArn": f"{arn}:$LATEST",
            "condition": "RetriesExhausted",
            "approximateInvokeCount": attempts,
        },
        "requestPayload": json.loads(invocation.payload),
        "responseContext": {"statusCode": 200, "executedVersion": "$LATEST", "functionError": "Unhandled"},
        "responsePayload": json.loads(outcome.payload),
    }
