"""The proxy's client of one node: calls a sleeping node, sends requests to an awake one, and abandons a faulty one."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from stoker.abc import Answer
from stoker.errors import (
    ConnectionLostError,
    DeadlineError,
    ServerError,
    StokerError,
    ThrottledError,
    TransientError,
    WireError,
)
from stoker_warm._config import WarmConfig
from stoker_warm._events import NodeReport, NodeTask
from stoker_warm._frames import Buffer, Frame, Head, Kind
from stoker_warm._node_state import NodeContents, NodeState, NodeStateMachine
from stoker_warm._peer_connections import ProxyConnection
from stoker_warm._shard import MAX_SHARDS_PER_FRAME, ShardId, ShardMac, parse_page

_log = logging.getLogger("stoker.warm.nodes")


class GetOutcome(enum.Enum):
    """Outcome of requesting a shard from a node."""

    VALID = "the shard arrived with a valid MAC"
    MISSING = "the node does not have the shard"
    CORRUPT = "the shard arrived with wrong bytes or an invalid MAC"
    UNAVAILABLE = "no answer arrived in time"


class NodeClient:
    """Client of one node, a function that holds shards. Used by the proxy's event loop only.

    Requests except ``get`` raise a TransientError if the node could not be woken, was late, or failed.

    Args:
        number: Number of the node in the directory.
        config: Settings of the proxy.
        mac: Key for the MACs of shards.
        call: Function that calls the node's function, with its name, the task, and whether to open a new connection;
            returns and raises as :meth:`stoker.abc.Executor.call`.
        on_contents: Callback with the node's contents, whenever the node has greeted or becomes GONE.
        spawn: Function that runs a coroutine in the proxy's task group.
    """

    def __init__(
        self,
        number: int,
        config: WarmConfig,
        mac: ShardMac,
        call: Callable[[str, NodeTask, bool], Awaitable[Answer]],
        *,
        on_contents: Callable[[NodeClient, NodeContents], None],
        spawn: Callable[[Coroutine[Any, Any, object]], object],
    ) -> None:
        self.number, self.name = number, config.node_name(number)
        self.limit_bytes = 0
        self._now = asyncio.get_running_loop().time
        self.state_machine = NodeStateMachine(fresh_seconds=config.fresh_seconds)
        """State machine of the node."""
        self.last_contact_seconds = self._now()
        """Loop time of the last call or message."""
        self.call_error: StokerError | None = None
        """Error of the last call, if it failed."""
        self._config, self._mac, self._spawn = config, mac, spawn
        self._invoke, self._on_contents = partial(call, self.name), partial(on_contents, self)
        self._connection: ProxyConnection | None = None  # to the known instance
        self._changed = asyncio.Event()  # set when the state may have changed
        # Unanswered requests, and requests that wait until the node is awake
        self._open_requests = self._waiting_requests = 0
        self._change_count = 0  # number of changes of its contents
        self._failed_call_count = 0  # consecutive
        self._next_call_seconds = float("-inf")  # no call before this time
        self._is_closed = False  # no more calls
        # Last timeout; last shard, or timeout of one
        self._last_timeout_seconds = self._last_delivery_seconds = float("-inf")
        self._was_called_back = False
        self._may_run = False  # a call's answer was lost, so the instance may still run; cleared by a ping
        self._wake_up_task: asyncio.Task[str] | None = None

    # Requests of the proxy.

    async def get(self, shard: ShardId, into: memoryview) -> GetOutcome:
        """Read a shard into ``into``, within ``read_seconds``. A wrong shard is counted against the node.

        Once this returns or raises, even if cancelled, nothing writes to ``into`` any more.
        """
        head, seconds = {"shard": shard.to_text()}, self._config.read_seconds
        try:
            reply, instance = await self._request(Kind.GET, head, into=into, timeout_seconds=seconds)
        except ServerError:
            return GetOutcome.MISSING  # the node has answered, with an error
        except StokerError:
            return GetOutcome.UNAVAILABLE
        if reply.kind is Kind.MISSING:
            return GetOutcome.MISSING
        if reply.body_bytes == len(into) and self._mac.verify(shard, into, reply.head.get("mac")):
            return GetOutcome.VALID
        self._on_wrong_data(instance)
        return GetOutcome.CORRUPT

    async def set(self, shard: ShardId, payload: memoryview) -> list[ShardId] | None:
        """Write a shard to the node; return the shards that it evicted for it, or None if it refuses the shard.

        Once this returns or raises, even if cancelled, nothing reads ``payload`` any more.
        """
        head = {"shard": shard.to_text(), "mac": self._mac.sign(shard, payload)}
        seconds = self._config.write_seconds
        reply, _ = await self._request(Kind.SET, head, body=(payload,), timeout_seconds=seconds)
        return ShardId.parse_all(reply.head.get("evicted")) if reply.kind is Kind.STORED else None

    async def delete(self, shards: Sequence[ShardId]) -> None:
        """Delete shards on the node."""
        for start in range(0, len(shards), MAX_SHARDS_PER_FRAME):
            head = {"shards": [shard.to_text() for shard in shards[start : start + MAX_SHARDS_PER_FRAME]]}
            await self._request(Kind.DELETE, head, timeout_seconds=self._config.write_seconds)

    async def ping(self, timeout_seconds: float | None = None) -> None:
        """Wake the node if necessary, and wait for its answer, by default for ``wake_seconds``."""
        await self._request(
            Kind.PING, {}, timeout_seconds=self._config.wake_seconds if timeout_seconds is None else timeout_seconds
        )

    async def _request(
        self,
        kind: Kind,
        head: Head,
        *,
        body: Sequence[Buffer] = (),
        into: memoryview | None = None,
        timeout_seconds: float,
    ) -> tuple[Frame, str]:
        """Wake the node if necessary, send a request, and return the answer and the instance that sent it."""
        end_seconds = self._now() + timeout_seconds
        try:
            return await self._request_once(kind, head, body, into, end_seconds)
        except ConnectionLostError:
            if self._now() >= end_seconds:
                raise
            # Its instance was stopped, or the connection broke. All requests are idempotent.
            return await self._request_once(kind, head, body, into, end_seconds)

    async def _request_once(
        self, kind: Kind, head: Head, body: Sequence[Buffer], into: memoryview | None, end_seconds: float
    ) -> tuple[Frame, str]:
        connection, instance = self._awake_connection() or await self._wait_awake(end_seconds)
        sent_seconds, is_change = self._now(), kind in (Kind.SET, Kind.DELETE)
        left_seconds = max(0.0, end_seconds - sent_seconds)
        self._open_requests += 1
        try:
            reply = await connection.request(kind, head, body=body, into=into, timeout_seconds=left_seconds)
        except BaseException as error:
            self._handle_failure(kind, connection, sent_seconds, is_late=isinstance(error, DeadlineError))
            raise
        finally:
            self._open_requests -= 1
        is_current = connection is self._connection
        if is_change and not is_current:
            raise ConnectionLostError(f"{self.name} has another connection than the one that answered")
        self._on_answer(instance)
        self._was_called_back = False
        if is_current and kind is Kind.GET:
            self._last_delivery_seconds = self._now()
            self.state_machine.on_shard_answer()
        if is_change and reply.kind is Kind.STORED:
            self._update_version(
                NodeReport.parse({key: value for key, value in reply.head.items() if key != "evicted"})
            )
        return reply, instance

    def _handle_failure(self, kind: Kind, connection: ProxyConnection, sent_seconds: float, *, is_late: bool) -> None:
        """Update the state after a request without an answer."""
        is_current = connection is self._connection
        if is_late:
            self._on_timeout(sent_seconds)
            if kind is Kind.GET and is_current:
                self._on_shard_timeout(sent_seconds)
        if not connection.is_open:
            self.on_disconnected(connection)
        elif kind in (Kind.SET, Kind.DELETE) and connection is self._connection:
            # The outcome of the change is unknown, so the node must list its shards.
            self._change_count += 1
            self.state_machine.has_shard_list = False
            self._on_contents(NodeContents.UNKNOWN)

    async def keep_warm(self) -> None:
        """Call the node, so that the platform keeps its instance, and detect whether it has lost its contents."""
        if self.state_machine.state is NodeState.GONE:  # it must greet to return
            self._changed.clear()
            self._spawn(self._call(NodeTask.SERVE))
            await self._wait_for_change(self._config.wake_seconds)
        elif not await self._call(NodeTask.WARM):
            with suppress(StokerError):
                await self._wait_awake()  # so that it greets, and reports its contents
        elif not self.state_machine.has_shard_list:
            self._on_contents(NodeContents.UNKNOWN)  # an earlier attempt to list its shards has failed

    async def close(self) -> None:
        """Send STOP, and close the connection; the node keeps its shards. Idempotent."""
        self._is_closed = True
        connection = self._connection
        # A sleeping node would receive the STOP only in its next invocation.
        if connection is not None and connection.is_open and self.state_machine.state is not NodeState.SLEEPING:
            with suppress(StokerError):
                await connection.request(Kind.STOP, timeout_seconds=self._config.ping_seconds)
        if self._wake_up_task is not None:
            self._wake_up_task.cancel()
            await asyncio.wait([self._wake_up_task])
        if self._connection is not None:
            await self._connection.close()

    async def list_shards(self) -> list[ShardId] | None:
        """List all shards of the node, in pages; None if another instance became the node meanwhile."""
        instance, changes = self.state_machine.instance, -1
        while self._change_count != changes:  # otherwise a change may be missing from the earlier pages
            changes, shards, has_more = self._change_count, list[ShardId](), True
            while has_more:
                after = {"after": shards[-1].to_text()} if shards else {}
                reply, _ = await self._request(Kind.INDEX, after, timeout_seconds=self._config.write_seconds)
                if instance is None or self.state_machine.instance != instance:
                    return None
                shards += parse_page(self.name, reply.head, shards, self._config.max_objects)
                has_more = bool(reply.head.get("more"))
        self.state_machine.has_shard_list = True
        return shards

    async def delete_all(self) -> None:
        """Delete all shards on the node."""
        await self.ping()  # until its instance is known
        await self.ping()
        while (held := await self.list_shards()) != []:
            if held is None:
                raise ConnectionLostError(f"another instance of {self.name} has connected, which may hold shards, too")
            await self.delete(held)
        self._on_contents(NodeContents.NONE)

    # Waking the node.

    async def _call(self, task: NodeTask) -> bool:
        """Call the function, and wait until it has returned.

        Returns:
            False if the result of a heartbeat call shows that the node's contents differ from the expected version.
        """
        membership, is_as_expected = self.state_machine, True
        self.last_contact_seconds = self._now()
        dial_anew = self._connection is None or membership.failed_attempts > 0
        membership.on_call_started()
        try:
            answer = await self._invoke(task, dial_anew)
        except StokerError as error:
            self._back_off(error)
            if isinstance(error, ThrottledError):
                membership.on_call_throttled()
            else:
                # If only the answer was lost, the instance still runs, and another call would start a second one.
                self._may_run = isinstance(error, TransientError) and membership.state is NodeState.AWAKE
                self._disconnect_if_gone(membership.on_call_failed())
        except BaseException:
            membership.on_call_failed()
            raise
        else:
            self.call_error, self._failed_call_count = None, 0
            is_as_expected = task is not NodeTask.WARM or self._has_expected_version(answer)
            self._disconnect_if_gone(membership.on_call_returned())
        self._record_contact()
        return is_as_expected

    def _back_off(self, error: StokerError) -> None:
        """Delay the next call after a failed one, with exponential back-off."""
        self.call_error = error
        least_seconds = self._config.wake_seconds * 2.0 ** min(self._failed_call_count, 3) / 8
        self._failed_call_count += 1
        asked_seconds = error.retry_after_seconds if isinstance(error, TransientError) else None
        self._next_call_seconds = self._now() + max(least_seconds, asked_seconds or 0.0)

    def _has_expected_version(self, answer: Answer) -> bool:
        try:
            report = NodeReport.parse(answer.result)
        except WireError:
            return False
        return (
            self.state_machine.on_message(report.instance, self._now())
            and report.version == self.state_machine.expected_version
        )

    def _awake_connection(self) -> tuple[ProxyConnection, str] | None:
        """Return the connection and instance of a node that is awake; None if it must be pinged or called first."""
        self._record_received()
        if self._connection is None or not self.state_machine.can_send(self._now()):
            return None
        return self._connection, str(self.state_machine.instance)

    async def _wait_awake(self, end_seconds: float | None = None) -> tuple[ProxyConnection, str]:
        """Wake the node if necessary, and return its connection and instance; raise ConnectionLostError on failure."""
        is_ready = self.state_machine.can_send(self._now())
        while not is_ready or self._connection is None:
            self._waiting_requests += 1
            try:
                waking = self._start_wake_up()
                async with asyncio.timeout_at(end_seconds):
                    # All requests wait for the same task, which continues if one of them is cancelled.
                    await asyncio.wait([waking])
            except TimeoutError:
                raise ConnectionLostError(f"{self.name} was not awake in time") from None
            finally:
                self._waiting_requests -= 1
            if reason := "is not needed any more" if waking.cancelled() else waking.result():
                raise ConnectionLostError(f"{self.name} {reason}")
            is_ready = self.state_machine.state is NodeState.AWAKE
        return self._connection, str(self.state_machine.instance)

    def _start_wake_up(self) -> asyncio.Task[str]:
        """Return the task that wakes the node; start it if it does not run."""
        if self._wake_up_task is None or self._wake_up_task.done():
            self._wake_up_task = asyncio.ensure_future(self._wake_up())
        return self._wake_up_task

    async def _wake_up(self) -> str:
        """Ping or call the node until it answers, as long as a request waits; return the reason of a failure, or ""."""
        membership, begun_seconds = self.state_machine, self._now()
        while not membership.can_send(self._now()):
            if membership.state is NodeState.AWAKE and membership.last_message_seconds >= begun_seconds:
                break
            if membership.state is NodeState.GONE:
                return f"was called {membership.failed_attempts} times and does not connect"
            if self._is_closed or not (self._waiting_requests or self._open_requests):
                return "is not needed any more"
            if self._connection is not None and (self._may_run or membership.state is NodeState.AWAKE):
                await self._ping(self._connection)
                continue
            self._changed.clear()
            pause_seconds = self._next_call_seconds - self._now() if membership.must_invoke else 0.0
            if pause_seconds > 0.0:
                await self._wait_for_change(pause_seconds)
                continue
            if membership.must_invoke:
                self._spawn(self._call(NodeTask.SERVE))
                await asyncio.sleep(0)
            if not await self._wait_for_change(self._config.wake_seconds):
                self._disconnect_if_gone(membership.on_timeout())
        return ""

    async def _ping(self, connection: ProxyConnection) -> None:
        self._may_run = False
        sent_seconds, instance = self._now(), self.state_machine.instance
        try:
            await connection.request(Kind.PING, timeout_seconds=self._config.ping_seconds)
        except StokerError:
            if connection.is_open:
                self._on_timeout(sent_seconds)
            else:
                self.on_disconnected(connection)
        else:
            self._on_answer(str(instance))

    # Messages of the node.

    def on_greeting(self, connection: ProxyConnection, greeting: Head) -> None:
        """Handle the greeting of an authenticated instance."""
        report = NodeReport.parse(greeting)
        contents = self.state_machine.on_greeting(report.instance, report.version, self._now())
        if contents is None:
            self._spawn(_stop_instance(connection, self._config.ping_seconds))
            return
        if self._connection is not None:
            self._connection.abort()
        if contents is NodeContents.DOUBTFUL:  # while this instance runs, the platform chooses the known one for a call
            self._connection = None
            self._spawn(self._call(NodeTask.SERVE))
        else:
            self._connection, self.limit_bytes = connection, report.limit_bytes
            self._on_contents(contents)
        self._record_contact()  # after the call has started, since waiters check the state then

    def on_notice(self, connection: ProxyConnection, kind: Kind, head: Head) -> None:
        """Handle a notice: an instance was invoked again, or is about to return."""
        if connection is self._connection:
            report = NodeReport.parse(head)
            (self.state_machine.on_leaving if kind is Kind.LEAVING else self.state_machine.on_message)(
                report.instance, self._now()
            )
            self._update_version(report)
            self._record_contact()
        elif kind is Kind.LEAVING:  # of another instance, which must greet again if it is invoked again
            connection.abort()

    def _on_answer(self, instance: str) -> None:
        """Record an answer of an instance."""
        if self.state_machine.on_message(instance, self._now()):
            self.last_contact_seconds = self._now()

    def _record_received(self) -> None:
        """Count received bytes as a message while the node is awake: discarded late shards show that it runs, too."""
        received_seconds = self._connection.received_seconds if self._connection is not None else float("-inf")
        if self.state_machine.state is NodeState.AWAKE and received_seconds > self.state_machine.last_message_seconds:
            self.state_machine.on_message(str(self.state_machine.instance), received_seconds)

    def _update_version(self, report: NodeReport) -> None:
        """Record the reported version, unless it is older: reports of concurrent requests arrive in any order."""
        if report.version.change_count >= self.state_machine.expected_version.change_count:
            self._change_count += report.version != self.state_machine.expected_version
            self.state_machine.on_change(report.instance, report.version)

    def _record_contact(self) -> None:
        """Record a contact with the node, and wake the tasks that wait for a change."""
        self.last_contact_seconds = self._now()
        self._changed.set()
        # Requests sent while the node was leaving are in its socket, and answered if it is called again. If it leaves
        # again without any answer, it is not called back a second time.
        is_cut_short = (
            self._open_requests and self._connection is not None and self.state_machine.state is NodeState.SLEEPING
        )
        if is_cut_short and not (self._was_called_back or self._is_closed):
            self._was_called_back = True
            self._start_wake_up()

    async def _wait_for_change(self, seconds: float) -> bool:
        """Wait for a change of the state; return whether it came within ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._changed.wait()
        return False

    # Failures of the node.

    def on_disconnected(self, connection: ProxyConnection) -> None:
        """Handle the end of a connection."""
        if connection is self._connection and self.state_machine.instance is not None:
            instance, self._connection = self.state_machine.instance, None
            self.state_machine.on_disconnected(instance)
            self._changed.set()  # not a contact: the next call shows whether the instance still exists
            if isinstance(connection.failure, WireError):  # it sent invalid data, for example a shard that is too long
                self._on_wrong_data(instance)

    def _on_timeout(self, sent_seconds: float) -> None:
        """Handle a request's timeout, unless anything was received since. Those of concurrent requests count once."""
        self._record_received()
        if max(self.state_machine.last_message_seconds, self._last_timeout_seconds) < sent_seconds:
            self._last_timeout_seconds = self._now()
            self._disconnect_if_gone(self.state_machine.on_timeout())
            self._record_contact()

    def _on_shard_timeout(self, sent_seconds: float) -> None:
        """Handle the timeout of a request for a shard. Timeouts of concurrent requests count as one."""
        had_time = self._now() - sent_seconds >= self._config.read_seconds / 2  # otherwise waking it took the time
        if had_time and self._last_delivery_seconds <= sent_seconds:
            self._last_delivery_seconds = self._now()
            self._disconnect_if_gone(self.state_machine.on_shard_timeout())

    def _on_wrong_data(self, instance: str) -> None:
        """Count wrong or invalid data of an instance."""
        if is_given_up := self.state_machine.on_wrong_shard(instance):
            _log.warning(
                "%s answers with wrong shards, and nothing is read from its instance %s any more; its memory or its "
                "network is faulty, or the shards are forged: check who may change the function, and deploy it again",
                self.name,
                instance,
            )
        self._disconnect_if_gone(is_given_up)

    def _disconnect_if_gone(self, is_gone: bool) -> None:
        """If the node has become GONE, close its connection and report its contents as lost."""
        if is_gone:
            if self._connection is not None:
                self._connection.abort()
                self._connection = None
            self._changed.set()
            self._on_contents(NodeContents.NONE)


async def _stop_instance(connection: ProxyConnection, timeout_seconds: float) -> None:
    """Send STOP to an instance that is not the node, and close its connection."""
    with suppress(StokerError):
        await connection.request(Kind.STOP, timeout_seconds=timeout_seconds)
    await connection.close()
