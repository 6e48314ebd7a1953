"""The proxy: writes objects as shards to nodes, and reads them from the nodes that answer first.

It runs in the trainer's process, or as a server for several trainers. It listens for the nodes' connections, calls
nodes to use them and to keep them warm, learns their contents, and keeps the bill. No object is only on nodes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

from stoker._base.task_group import task_group
from stoker.abc import Answer
from stoker.errors import FunctionError, StokerError, ThrottledError, TransientError
from stoker_warm._auth import WarmSecret
from stoker_warm._billing import ProxyStatistics, WarmBill, WarmPrices
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import require_codec
from stoker_warm._events import NodeTask, WakeEvent
from stoker_warm._listener import MAX_UNAUTHENTICATED, Listener, PeerServer
from stoker_warm._node_client import NodeClient
from stoker_warm._node_state import NodeContents, NodeState
from stoker_warm._objects import ShardedObjects, for_each_node
from stoker_warm._shard import ShardMac

_log = logging.getLogger("stoker.warm.proxy")

Invoke = Callable[[str, Mapping[str, Any]], Awaitable[Answer]]
"""Calls a function, by name, with an event, and waits for its result; raises as :meth:`stoker.abc.Executor.call`."""

_BILLABLE_ERRORS = (FunctionError, TransientError)
"""Errors of calls that may be billed; with any other error, the function did not run."""
MAX_HEARTBEATS = 16
"""Maximum number of concurrent heartbeat calls, which keep nodes warm."""
_MAX_SHOWN_PROBLEMS = 5
_MAX_PROBLEM_CHARACTERS = 300


class Proxy:
    """Proxy of a warm tier, which stores objects in the memory of nodes. Used by one event loop.

    Args:
        config: Settings of the proxy.
        secret: Secret of the deployment.
        invoke: Function that calls functions by their names.
        listener: Listener for the nodes' connections.
        mac: Key for the MACs of shards.
        prices: Prices for the bill; None counts the functions as free.
        rng: Random generator for choosing nodes.

    Attributes:
        config: Settings of the proxy.
        listener: Listener for the nodes' connections.
        bill: Cost of the tier so far.
        objects: Objects on the nodes.

    Raises:
        MissingExtraError: A package that the erasure code needs is not installed.
    """

    def __init__(
        self,
        config: WarmConfig,
        secret: WarmSecret,
        invoke: Invoke,
        listener: Listener,
        *,
        mac: ShardMac,
        prices: WarmPrices | None = None,
        rng: random.Random | None = None,
    ) -> None:
        require_codec(config.code)
        self.config = config
        self.bill = WarmBill(prices=prices or WarmPrices())
        self.listener = listener
        self._mac, self._invoke = mac, invoke
        self._nodes: list[NodeClient] = []
        rng = rng or random.Random()  # noqa: S311 - which nodes is no secret
        self.objects = ShardedObjects(config, self._nodes, self.bill, rng, self._spawn)
        self._directory = self.objects.directory
        self._start_seconds = 0.0
        self._peer_server = PeerServer(secret, listener, self._nodes, self._spawn)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> Self:
        """Listen, and call all nodes; contents from an earlier proxy become known when the nodes greet.

        Raises:
            ConfigError: The address cannot be used.
        """
        self._start_seconds = asyncio.get_running_loop().time()
        self._nodes[:] = [
            NodeClient(
                number, self.config, self._mac, call=self._invoke_node, on_contents=self._on_contents, spawn=self._spawn
            )
            for number in range(self.config.nodes)
        ]
        await self.listener.open(
            self._peer_server.create_connection, max_unauthenticated=MAX_UNAUTHENTICATED + self.config.nodes
        )
        self._spawn(self.objects.learn_limits())
        start_heartbeats(self._nodes, self.config.keep_warm_seconds, self._spawn)
        return self

    async def close(self) -> None:
        """Send STOP to the nodes, which keep their shards, and discard queued writes. Idempotent."""
        self._is_closed = True
        self.objects.close()
        self.listener.close()
        async with task_group() as group:
            for node in self._nodes:
                group.create_task(node.close())
            group.create_task(self._peer_server.close())
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def statistics(self) -> ProxyStatistics:
        """Return a snapshot."""
        states = Counter(node.state_machine.state for node in self._nodes)
        return ProxyStatistics(
            **asdict(self.objects.counters),
            objects=len(self._directory),
            held_bytes=sum(self._directory.used_bytes(node.number) for node in self._nodes),
            limit_bytes=sum(node.limit_bytes for node in self._nodes),
            nodes={state.value: states[state] for state in NodeState},
        )

    async def status(self, *, wake_nodes: bool = False) -> dict[str, Any]:
        """Return the status of the tier as JSON values.

        Args:
            wake_nodes: Whether to wake all nodes first, including gone ones, and wait until their contents are known.
                ``problems`` has messages for the first few nodes that fail, ``absent`` their number.
        """
        problems = await for_each_node(self._nodes, self._wake_node) if wake_nodes else {}
        return {
            "code": str(self.config.code),
            **asdict(self.statistics()),
            "problems": _format_problems(problems),
            "absent": len(problems),
            "bill": self.bill.to_json(asyncio.get_running_loop().time() - self._start_seconds),
        }

    async def delete_all(self) -> list[str]:
        """Call all nodes, and delete their shards; return messages for the first few nodes that fail."""
        return _format_problems(await for_each_node(self._nodes, NodeClient.delete_all))

    async def _wake_node(self, node: NodeClient) -> None:
        if node.state_machine.state is NodeState.GONE:
            await node.keep_warm()
        await node.ping()
        if not node.state_machine.has_shard_list:
            await self._reconcile(node)

    # Callbacks of nodes.

    async def _invoke_node(self, name: str, task: NodeTask, dial_anew: bool) -> Answer:
        """Call a node's function, and add the call to the bill."""
        wake = WakeEvent(
            node=name,
            proxy=self.listener.address,
            fingerprint=self.listener.fingerprint,
            task=task,
            linger_seconds=self.config.linger_seconds,
            must_reconnect=dial_anew,
        )
        try:
            answer = await self._invoke(name, wake.to_event())
        except StokerError as error:
            if isinstance(error, _BILLABLE_ERRORS) and not isinstance(error, ThrottledError):
                self.bill.count_call(task, None)
            raise
        self.bill.count_call(task, answer)
        return answer

    def _on_contents(self, node: NodeClient, contents: NodeContents) -> None:
        """Handle the contents of a node that has greeted or become GONE."""
        self._directory.set_limit(node.number, node.limit_bytes, is_gone=node.state_machine.state is NodeState.GONE)
        if contents is NodeContents.NONE:
            self._directory.clear_node(node.number)
        elif contents is NodeContents.UNKNOWN:
            self._spawn(self._reconcile(node))

    async def _reconcile(self, node: NodeClient) -> None:
        """List a node's shards, and update the directory."""
        try:
            shards = await node.list_shards()
        except StokerError as error:
            _log.warning("the shards of %s cannot be listed: %s", node.name, error)
            return
        if shards is not None:
            self._directory.reconcile(node.number, shards, is_trusted=not node.state_machine.is_distrusted)

    def _spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(_run_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # if it never began
        if self._is_closed:
            task.cancel()
        return task


def start_heartbeats(
    nodes: Sequence[NodeClient],
    interval_seconds: float,
    spawn: Callable[[Coroutine[Any, Any, object]], asyncio.Task[None]],
) -> None:
    """Call each node whenever there was no contact for an interval, until the proxy closes.

    A platform stops an instance that is not called for long (A. Wang et al., "InfiniCache" (FAST 2020), section 4.2).
    """
    calls, loop = asyncio.Semaphore(MAX_HEARTBEATS), asyncio.get_running_loop()

    async def keep_warm(node: NodeClient) -> None:
        while True:
            await asyncio.sleep(max(0.0, node.last_contact_seconds + interval_seconds - loop.time()))
            async with calls:
                if node.last_contact_seconds + interval_seconds <= loop.time():
                    await asyncio.wait([spawn(node.keep_warm())])

    for node in nodes:
        spawn(keep_warm(node))


async def _run_logged(work: Coroutine[Any, Any, object]) -> None:
    try:
        await work
    except StokerError as error:
        _log.warning("a background task of the warm tier failed, and the tier continues without it: %s", error)
    except Exception:  # noqa: BLE001 - a task boundary
        _log.exception("a background task of the warm tier failed, and the tier continues without it")


def _format_problems(problems: Mapping[str, str]) -> list[str]:
    """Format the first few problems of nodes, each shortened."""
    return [
        f"{name}: {reason}"[:_MAX_PROBLEM_CHARACTERS] for name, reason in list(problems.items())[:_MAX_SHOWN_PROBLEMS]
    ]
