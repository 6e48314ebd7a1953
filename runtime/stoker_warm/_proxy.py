"""The proxy: puts objects as shards into nodes, and reads them from whichever nodes are first.

It runs beside the trainer, or for several trainers. Nodes dial out to it, so it listens, calls them when they are
needed and to keep them warm, learns what they hold, and has the bill. Nothing here is ever the only copy.
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
"""Calls a function by its name with an event and waits for its end; raises as :meth:`stoker.abc.Executor.call`."""

_BILLABLE_ERRORS = (FunctionError, TransientError)
"""Errors of calls that may be billed: anything else was refused before a function ran."""
MAX_HEARTBEATS = 16
"""Calls to keep nodes warm that are under way at a time."""
_MAX_SHOWN_PROBLEMS = 5
_MAX_PROBLEM_CHARACTERS = 300


class Proxy:
    """Objects in the memory of nodes. Lives on one event loop.

    Args:
        config: the tier's settings.
        secret: of the deployment.
        invoke: calls functions by their names.
        listener: where nodes dial.
        mac: of shards.
        prices: for its bill; without one, functions cost nothing.
        rng: for choosing nodes.

    Attributes:
        config: the tier's settings.
        listener: where nodes dial.
        bill: what it has cost so far.
        objects: reads, keeps and writes them.

    Raises:
        MissingExtraError: what the code needs is not installed.
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
        """Listen, and call all nodes: what they hold from an earlier proxy is known once they have greeted.

        Raises:
            ConfigError: the address cannot be used.
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
        """Tell nodes to return, and end; what they hold, they hold. What waits to be written is dropped. Idempotent."""
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
        """Return figures of the tier as JSON values.

        Args:
            wake_nodes: whether to call all nodes before, also those that were given up, and to wait until it is known
                what they hold. Those that do not come are ``problems``, of which the first few are told.
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
        """Call all nodes, and have them drop what they hold; return what went wrong."""
        return _format_problems(await for_each_node(self._nodes, NodeClient.delete_all))

    async def _wake_node(self, node: NodeClient) -> None:
        if node.state_machine.state is NodeState.GONE:
            await node.keep_warm()
        await node.ping()
        if not node.state_machine.has_shard_list:
            await self._reconcile(node)

    # What nodes need.

    async def _invoke_node(self, name: str, task: NodeTask, dial_anew: bool) -> Answer:
        """Call a node's function, and put it on the bill."""
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
        """A node has said what it holds, or is given up."""
        self._directory.set_limit(node.number, node.limit_bytes, is_gone=node.state_machine.state is NodeState.GONE)
        if contents is NodeContents.NONE:
            self._directory.clear_node(node.number)
        elif contents is NodeContents.UNKNOWN:
            self._spawn(self._reconcile(node))

    async def _reconcile(self, node: NodeClient) -> None:
        """Ask a node for what it holds, and believe that."""
        try:
            shards = await node.list_shards()
        except StokerError as error:
            _log.warning("%s does not say what it holds: %s", node.name, error)
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
    """Call each node whenever it had no contact for an interval, until the proxy ends.

    A platform takes back an instance that is not called for some time (A. Wang et al., "InfiniCache" (FAST 2020),
    section 4.2).
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
        _log.warning("the warm tier goes on without: %s", error)
    except Exception:  # noqa: BLE001 - a task's boundary
        _log.exception("the warm tier goes on without")


def _format_problems(problems: Mapping[str, str]) -> list[str]:
    """Return the first few problems of nodes, in few words."""
    return [f"{name}: {why}"[:_MAX_PROBLEM_CHARACTERS] for name, why in list(problems.items())[:_MAX_SHOWN_PROBLEMS]]
