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
from stoker_warm._auth import Secret
from stoker_warm._billing import Bill, ProxyStatistics, Tariff
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import require_codec
from stoker_warm._events import Task, Wake
from stoker_warm._listener import MAX_UNAUTHENTICATED, Listener, PeerServer
from stoker_warm._membership import Contents, State
from stoker_warm._node_connection import Node
from stoker_warm._objects import ShardedObjects, at_nodes
from stoker_warm._shard import ShardMac

_log = logging.getLogger("stoker.warm.proxy")

Invoke = Callable[[str, Mapping[str, Any]], Awaitable[Answer]]
"""Calls a function by its name with an event and waits for its end; raises as :meth:`stoker.abc.Executor.call`."""

_MAY_HAVE_RUN = (FunctionError, TransientError)
"""Errors of calls that may be billed: anything else was refused before a function ran."""
MAX_HEARTBEATS = 16
"""Calls to keep nodes warm that are under way at a time."""
_SHOWN_PROBLEMS = 5
_SHOWN_CHARACTERS = 300


class Proxy:
    """Objects in the memory of nodes. Lives on one event loop.

    Args:
        config: the tier's settings.
        secret: of the deployment.
        invoke: calls functions by their names.
        listener: where nodes dial.
        mac: of shards.
        tariff: for its bill; without one, functions cost nothing.
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
        secret: Secret,
        invoke: Invoke,
        listener: Listener,
        *,
        mac: ShardMac,
        tariff: Tariff | None = None,
        rng: random.Random | None = None,
    ) -> None:
        require_codec(config.code)
        self.config = config
        self.bill = Bill(tariff=tariff or Tariff())
        self.listener = listener
        self._mac, self._invoke = mac, invoke
        self._nodes: list[Node] = []
        rng = rng or random.Random()  # noqa: S311 - which nodes is no secret
        self.objects = ShardedObjects(config, self._nodes, self.bill, rng, self._spawn)
        self._directory = self.objects.directory
        self._begun_seconds = 0.0
        self._peers = PeerServer(secret, listener, self._nodes, self._spawn)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> Self:
        """Listen, and call all nodes: what they hold from an earlier proxy is known once they have greeted.

        Raises:
            ConfigError: the address cannot be used.
        """
        self._begun_seconds = asyncio.get_running_loop().time()
        self._nodes[:] = [
            Node(number, self.config, self._mac, call=self._call, found=self._found, spawn=self._spawn)
            for number in range(self.config.nodes)
        ]
        await self.listener.open(self._peers.accept, max_unauthenticated=MAX_UNAUTHENTICATED + self.config.nodes)
        self._spawn(self.objects.meet_nodes())
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
            group.create_task(self._peers.close())
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def statistics(self) -> ProxyStatistics:
        """Return a snapshot."""
        states = Counter(node.membership.state for node in self._nodes)
        return ProxyStatistics(
            **asdict(self.objects.tally),
            objects=len(self._directory),
            held_bytes=sum(self._directory.used_bytes(node.number) for node in self._nodes),
            limit_bytes=sum(node.limit_bytes for node in self._nodes),
            nodes={state.value: states[state] for state in State},
        )

    async def status(self, *, wakes: bool = False) -> dict[str, Any]:
        """Return figures of the tier as JSON values.

        Args:
            wakes: whether to call all nodes before, also those that were given up, and to wait until it is known what
                they hold. Those that do not come are ``problems``, of which the first few are told.
        """
        problems = await at_nodes(self._nodes, self._wake) if wakes else {}
        return {
            "code": str(self.config.code),
            **asdict(self.statistics()),
            "problems": _described(problems),
            "absent": len(problems),
            "bill": self.bill.to_json(asyncio.get_running_loop().time() - self._begun_seconds),
        }

    async def forget(self) -> list[str]:
        """Call all nodes, and have them drop what they hold; return what went wrong."""
        return _described(await at_nodes(self._nodes, Node.forget))

    async def _wake(self, node: Node) -> None:
        if node.membership.state is State.GONE:
            await node.keep_warm()
        await node.ping()
        if not node.membership.is_listed:
            await self._learn(node)

    # What nodes need.

    async def _call(self, name: str, task: Task, dial_anew: bool) -> Answer:
        """Call a node's function, and put it on the bill."""
        wake = Wake(
            node=name,
            proxy=self.listener.address,
            fingerprint=self.listener.fingerprint,
            task=task,
            linger_seconds=self.config.linger_seconds,
            dial_anew=dial_anew,
        )
        try:
            answer = await self._invoke(name, wake.to_event())
        except StokerError as error:
            if isinstance(error, _MAY_HAVE_RUN) and not isinstance(error, ThrottledError):
                self.bill.called(task, None)
            raise
        self.bill.called(task, answer)
        return answer

    def _found(self, node: Node, contents: Contents) -> None:
        """A node has said what it holds, or is given up."""
        self._directory.limit(node.number, node.limit_bytes, is_gone=node.membership.state is State.GONE)
        if contents is Contents.NONE:
            self._directory.lost(node.number)
        elif contents is Contents.UNKNOWN:
            self._spawn(self._learn(node))

    async def _learn(self, node: Node) -> None:
        """Ask a node for what it holds, and believe that."""
        try:
            shards = await node.listed()
        except StokerError as error:
            _log.warning("%s does not say what it holds: %s", node.name, error)
            return
        if shards is not None:
            self._directory.listed(node.number, shards, is_trusted=not node.membership.is_distrusted)

    def _spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # if it never began
        if self._is_closed:
            task.cancel()
        return task


def start_heartbeats(
    nodes: Sequence[Node],
    interval_seconds: float,
    spawn: Callable[[Coroutine[Any, Any, object]], asyncio.Task[None]],
) -> None:
    """Call each node whenever it had no contact for an interval, until the proxy ends.

    A platform takes back an instance that is not called for some time (A. Wang et al., "InfiniCache" (FAST 2020),
    section 4.2).
    """
    calls, loop = asyncio.Semaphore(MAX_HEARTBEATS), asyncio.get_running_loop()

    async def keep_warm(node: Node) -> None:
        while True:
            await asyncio.sleep(max(0.0, node.contact_seconds + interval_seconds - loop.time()))
            async with calls:
                if node.contact_seconds + interval_seconds <= loop.time():
                    await asyncio.wait([spawn(node.keep_warm())])

    for node in nodes:
        spawn(keep_warm(node))


async def _logged(work: Coroutine[Any, Any, object]) -> None:
    try:
        await work
    except StokerError as error:
        _log.warning("the warm tier goes on without: %s", error)
    except Exception:  # noqa: BLE001 - a task's boundary
        _log.exception("the warm tier goes on without")


def _described(problems: Mapping[str, str]) -> list[str]:
    """Return the first few problems of nodes, in few words."""
    return [f"{name}: {why}"[:_SHOWN_CHARACTERS] for name, why in list(problems.items())[:_SHOWN_PROBLEMS]]
