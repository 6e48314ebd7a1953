"""The instances of a function, and Lambda functions with synchronous and asynchronous invocation.

Source: AWS Lambda Developer Guide, "How Lambda handles errors and retries with asynchronous invocation" and "Capturing
records of Lambda asynchronous invocations".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from stoker_local._host import BackgroundTasks
from stoker_local.functions._config import FunctionFault, FunctionFaultInjector, FunctionFaultKind, FunctionSpec
from stoker_local.functions._processes import InstanceConfig, tail
from stoker_local.functions._sandbox import Sandbox
from stoker_local.functions._statistics import (
    FunctionRecorder,
    HandlerResult,
    Invocation,
    Outcome,
    ServiceError,
    billed_milliseconds,
    report_lines,
)
from stoker_local.functions._triggers import LocalQueue

_DELAYED_FAULTS = (FunctionFaultKind.KILL, FunctionFaultKind.FREEZE)


class PooledInstance(Protocol):
    """The interface of instances in a pool."""

    name: str

    async def run_process(self) -> None:
        """Run the instance until it ends; end it if cancelled."""


T = TypeVar("T", bound=PooledInstance)


class InstancePool(Generic[T]):
    """The instances of a function.

    Attributes:
        recorder: statistics and events of the function.
        slots: semaphore for the concurrency limit; :meth:`acquire_slot` or :meth:`deliver_duplicate` acquires one slot
            per invocation.
        instances: instance → task, without instances that are about to end.
        idle: idle instance → timer that reclaims it; the most recently used instance is last.
    """

    def __init__(
        self,
        recorder: FunctionRecorder,
        faults: FunctionFaultInjector,
        tasks: BackgroundTasks,
        *,
        slots: int,
        idle_seconds: float,
    ) -> None:
        self.recorder = recorder
        self.tasks = tasks
        self.slots = asyncio.Semaphore(slots)
        self.instances: dict[T, asyncio.Task[None]] = {}
        self.idle: dict[T, asyncio.TimerHandle] = {}
        self._faults = faults
        self._idle_seconds = idle_seconds
        self._name_count = 0

    async def acquire_slot(self, *, waits: bool = False) -> FunctionFault | None:
        """Acquire a slot for an invocation; return the fault to inject into it, or None.

        Args:
            waits: wait for a slot instead of being throttled.

        Raises:
            ServiceError: the invocation was throttled.
        """
        fault = self._faults.draw(self.recorder.function)
        kind = fault and fault.kind
        if fault is not None and kind not in _DELAYED_FAULTS:
            self.recorder.record_fault(fault.kind)
        if kind is FunctionFaultKind.THROTTLE or (self.slots.locked() and not waits):
            self.recorder.figures.throttles += 1
            self.recorder.record_event("throttle")
            reason = "ReservedFunctionConcurrentInvocationLimitExceeded"
            raise ServiceError("TooManyRequestsException", "Rate Exceeded.", reason=reason)
        if kind is FunctionFaultKind.RECLAIM:
            self.reclaim()
        await self.slots.acquire()
        return fault

    def deliver_duplicate(self, fault: FunctionFault | None, deliver: Callable[[], Awaitable[object]]) -> None:
        """Deliver a duplicate if ``fault`` is one: concurrently if a slot is free, otherwise when one becomes free."""

        async def deliver_again() -> None:
            await self.slots.acquire()
            await deliver()

        if fault is not None and fault.kind is FunctionFaultKind.DUPLICATE:
            self.tasks.start(deliver_again())

    def start(self, instance: T) -> None:
        """Run a new instance."""
        self.instances[instance] = self.tasks.start(self._run_instance(instance))
        self.recorder.record_start(instances=len(self.instances))

    def next_name(self) -> str:
        """Return the name of a new instance."""
        self._name_count += 1
        return f"{self.recorder.function}/{self._name_count}"

    def mark_busy(self, instance: T) -> None:
        """Mark an instance as busy: cancel its timer."""
        if timer := self.idle.pop(instance, None):
            timer.cancel()

    def mark_idle(self, instance: T) -> None:
        """Mark an instance as idle; it is reclaimed after ``idle_seconds`` without work."""
        loop = asyncio.get_running_loop()
        self.idle[instance] = loop.call_later(self._idle_seconds, self._reclaim_instance, instance)

    def reclaim(self) -> None:
        """End all idle instances at once."""
        for instance in list(self.idle):
            self._reclaim_instance(instance)

    def _reclaim_instance(self, instance: T) -> None:
        self.recorder.figures.reclaimed += 1
        self.recorder.record_event("reclaim", instance=instance.name)
        self.instances[instance].cancel()
        self._remove(instance)

    async def _run_instance(self, instance: T) -> None:
        try:
            await instance.run_process()
        finally:
            self._remove(instance)

    def _remove(self, instance: T) -> None:
        self.mark_busy(instance)
        self.instances.pop(instance, None)
        self.recorder.figures.instances = len(self.instances)


class LambdaService(InstancePool[Sandbox]):
    """A Lambda function; each invocation runs in its own task.

    The most recently used instance is used next, so that the others can be reclaimed.

    Attributes:
        arn: Amazon resource name of the function.
    """

    def __init__(self, config: InstanceConfig[FunctionSpec], queues: Mapping[str, LocalQueue]) -> None:
        self.spec, cloud = config.spec, config.cloud
        super().__init__(
            config.recorder, config.faults, config.tasks, slots=self.spec.concurrency, idle_seconds=cloud.idle_seconds
        )
        self.arn = f"arn:aws:lambda:{cloud.region}:{cloud.account}:function:{self.spec.name}"
        self._config = config
        self._queues = queues

    async def invoke(self, invocation: Invocation, *, waits: bool = False) -> Outcome:
        """Run the function once; start an instance if none is idle.

        As in Lambda, cancelling the caller does not stop the function.

        Args:
            invocation: event to deliver.
            waits: wait for the function's concurrency instead of being throttled.

        Raises:
            ServiceError: the invocation was throttled.
        """
        fault = await self.acquire_slot(waits=waits)
        task = self.tasks.start(self._run(invocation, fault))
        self.deliver_duplicate(fault, partial(self._run, invocation, None))
        return await asyncio.shield(task)

    async def _run(self, invocation: Invocation, fault: FunctionFault | None) -> Outcome:
        """Run the invocation in the slot that was acquired for it."""
        self.recorder.figures.busy += 1
        try:
            sandbox, error, init_seconds = await self._acquire_sandbox()
            if error is None:
                self.recorder.record_event("invoke", instance=sandbox.name)
                answer, seconds = await sandbox.run(invocation, fault)
            else:
                answer, seconds = error, 0.0
            if sandbox.is_alive:
                self.mark_idle(sandbox)
            else:
                self._remove(sandbox)  # its process may take a while to end; the next instance must not wait for it
            return self._record_outcome(
                sandbox,
                Outcome(
                    request_id=invocation.request_id,
                    payload=answer.payload,
                    error_type=answer.error_type,
                    seconds=seconds,
                    init_seconds=init_seconds,
                    billed_milliseconds=billed_milliseconds(seconds, init_seconds),
                    memory_bytes=sandbox.peak_bytes,
                    log=sandbox.output.take(),
                ),
            )
        finally:
            self.recorder.figures.busy -= 1
            self.slots.release()

    async def _acquire_sandbox(self) -> tuple[Sandbox, HandlerResult | None, float | None]:
        """Return an idle instance, or a new one with the error and the duration of its start, in seconds."""
        if sandbox := next(reversed(self.idle), None):
            self.mark_busy(sandbox)
            return sandbox, None, None
        sandbox = Sandbox(self.next_name(), self._config, self.arn)
        self.start(sandbox)
        error = await sandbox.start()
        event = "cold-start" if error is None else "start-failed"
        self.recorder.record_event(event, instance=sandbox.name, detail=error.error_type if error else "")
        return sandbox, error, sandbox.init_seconds

    def _record_outcome(self, sandbox: Sandbox, outcome: Outcome) -> Outcome:
        """Record an invocation that has ended; return its outcome with the last 4 KiB of the complete log."""
        log = b"START RequestId: %b Version: $LATEST\n" % outcome.request_id.encode()
        log += outcome.log + report_lines(self.spec, outcome)
        self.recorder.record_log(log)
        self.recorder.figures.invocations += 1
        self.recorder.figures.errors += bool(outcome.error_type)
        self.recorder.figures.billed_seconds += outcome.billed_milliseconds / 1000
        event = "error" if outcome.error_type else "answer"
        self.recorder.record_event(event, instance=sandbox.name, detail=outcome.error_type)
        return replace(outcome, log=tail(log))

    # Events.

    def deliver_event(self, invocation: Invocation) -> asyncio.Task[None]:
        """Invoke the function asynchronously; the task ends when the event has been handled or all retries failed."""
        return self.tasks.start(self._deliver_with_retries(invocation))

    async def _deliver_with_retries(self, invocation: Invocation) -> None:
        for attempt in range(1 + self.spec.retries):
            if attempt:
                self.recorder.record_event("retry", detail=str(attempt))
                await asyncio.sleep(self._config.cloud.event_retry_seconds[attempt - 1])
            outcome = await self._invoke_unthrottled(invocation)
            if not outcome.error_type:
                return
        self.recorder.record_event("dropped", detail=outcome.error_type)
        if self.spec.on_failure:
            self._send_to_failure_queue(invocation, outcome)

    def _send_to_failure_queue(self, invocation: Invocation, outcome: Outcome) -> None:
        """Send a failed event to the failure queue, unless it is too large for a message."""
        try:
            record = json.dumps(_failure_record(self.arn, invocation, outcome, attempts=1 + self.spec.retries))
            self._queues[self.spec.on_failure].send(record)
        except (ValueError, RecursionError):
            self.recorder.record_event("undelivered", detail=self.spec.on_failure)

    async def _invoke_unthrottled(self, invocation: Invocation) -> Outcome:
        """Invoke the function when it has a free slot; an injected throttle is retried and is not a failed attempt."""
        while True:
            try:
                return await self.invoke(invocation, waits=True)
            except ServiceError:
                await asyncio.sleep(self._config.cloud.event_retry_seconds[0])


def _failure_record(arn: str, invocation: Invocation, outcome: Outcome, *, attempts: int) -> dict[str, Any]:
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
