"""The proxy: puts objects as shards into nodes, and reads them from whichever nodes are first.

It runs beside the trainer. Nodes dial out to it, so it listens. A read asks for all shards of an object at once and
takes the first that restore it (A. Wang et al., "InfiniCache" (FAST 2020), section 3.2); the rest are cancelled. What
nodes have lost is written again, from the bytes that have just been read. Nothing here is ever the only copy.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from itertools import islice
from types import MappingProxyType
from typing import Any, Protocol

from stoker.errors import StokerError, StoreError, TransientError, WireError
from stoker.fanout import Answer
from stoker.task_group import task_group
from stoker.threads import in_thread
from stoker.warm.backup import back_up
from stoker.warm.bill import CostMeter
from stoker.warm.code import Code, encode, require_codec
from stoker.warm.connection import Answer as PeerAnswer
from stoker.warm.connection import Connection
from stoker.warm.directory import Directory, Held
from stoker.warm.fleet import Invoke, Node, NodeParts
from stoker.warm.handshake import ProxySide, Secret
from stoker.warm.life import Contents, State
from stoker.warm.node import LISTED_AT_ONCE
from stoker.warm.reading import ShardReader, views_of
from stoker.warm.settings import WarmConfig
from stoker.warm.shard import ShardId
from stoker.warm.sockets import Door
from stoker.warm.statistics import ProxyStatistics, ProxyTally
from stoker.warm.upkeep import Errand, Upkeep, UpkeepConfig
from stoker.warm.wake import Task
from stoker.warm.wire import Head, Kind

__all__ = ["Clients", "Proxy", "ProxyStatistics"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
"""The least time between two looks at what is due."""


class Clients(Protocol):
    """Answers those who are no nodes."""

    def room(self, size_bytes: int) -> bytearray | None:
        """Return memory for the body of a request, None for it to be thrown away."""
        ...

    async def answer(self, connection: Connection, kind: Kind, head: Head, body: bytearray) -> PeerAnswer:
        """Answer a request of a client."""
        ...


class Proxy:
    """Objects in the memory of nodes. Lives on one event loop.

    Args:
        config: the tier's settings.
        secret: of the deployment.
        invoke: calls functions by their names.
        door: where nodes, and clients, dial.
        clients: answers the requests of clients; without it they are turned away.
        rng: for choosing nodes.

    Raises:
        MissingExtraError: what the code needs is not installed.
    """

    def __init__(
        self,
        config: WarmConfig,
        secret: Secret,
        invoke: Invoke,
        door: Door,
        *,
        clients: Clients | None = None,
        rng: random.Random | None = None,
    ) -> None:
        require_codec(config.code)
        self.config = config
        self.meter = CostMeter()
        self.door = door
        self._secret, self._invoke, self._clients = secret, invoke, clients
        self._rng = rng or random.Random()  # noqa: S311 - which nodes is no secret
        self._directory = Directory(config.nodes, [config.code], limit_bytes=0, most_objects=config.most_objects)
        self._nodes: list[Node] = []
        self._tally = ProxyTally()
        self._reader = ShardReader(self._nodes, self._tally, read_seconds=config.read_seconds, lost=self._is_not_there)
        self._doomed: dict[int, set[ShardId]] = {}
        self._deleting = [asyncio.Lock() for _ in range(config.nodes)]
        self._writing: set[str] = set()
        self._writes = asyncio.Semaphore(config.writes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Listen, and call all nodes: what they hold from an earlier proxy is known once they have greeted.

        Raises:
            ConfigError: the address cannot be used.
        """
        parts = NodeParts(
            config=self.config,
            invoke=self._invoke,
            proxy=lambda: (self.door.address, self.door.fingerprint),
            spawn=self._spawn,
            billed=self._billed,
            found=self._found,
        )
        self._nodes[:] = [Node(number, parts) for number in range(self.config.nodes)]
        await self.door.open(self._accept)
        self._spawn(self._wake_unknown())
        self._spawn(self._keep_up())

    async def close(self) -> None:
        """Tell nodes to return, and end; what they hold, they hold. What waits to be written is dropped. Idempotent."""
        self._is_closed = True
        self.door.close()
        async with task_group() as group:
            for node in self._nodes:
                group.create_task(node.close())
            for connection in list(self._connections):
                group.create_task(connection.close())
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def statistics(self) -> ProxyStatistics:
        """Return a snapshot."""
        states = dict.fromkeys(State, 0)
        for node in self._nodes:
            states[node.life.state] += 1
        counted = {name: getattr(self._tally, name) for name in self._tally.__slots__}
        return ProxyStatistics(
            **counted,
            objects=len(self._directory),
            held_bytes=sum(self._directory.used_bytes(node.number) for node in self._nodes),
            limit_bytes=sum(node.limit_bytes for node in self._nodes),
            nodes=MappingProxyType({state.value: count for state, count in states.items()}),
        )

    # All nodes at once.

    async def wake(self) -> dict[str, str]:
        """Call all nodes, also those that were given up, and wait until it is known what they hold.

        Returns:
            Name → why it is not there, of those that are not.
        """
        async with task_group() as group:
            tasks = {node.name: group.create_task(self._roused(node)) for node in self._nodes}
        return {name: why for name, task in tasks.items() if (why := task.result())}

    async def stop(self) -> None:
        """Tell all nodes to return that are awake. What they hold, they hold."""
        async with task_group() as group:
            for node in self._nodes:
                group.create_task(node.stop())

    async def forget(self) -> dict[str, str]:
        """Call all nodes, and have them drop what they hold.

        Returns:
            Name → why it did not, of those that did not.
        """
        async with task_group() as group:
            tasks = {node.name: group.create_task(self._emptied(node)) for node in self._nodes}
        return {name: why for name, task in tasks.items() if (why := task.result())}

    async def _roused(self, node: Node) -> str:
        try:
            if node.life.state is State.GONE:
                await node.keep_warm()
            await node.request(Kind.PING, {}, seconds=self.config.wake_seconds)
            if not node.life.is_listed:
                await self._learn(node)
        except StokerError as error:
            return str(node.failure or error)
        return ""

    async def _emptied(self, node: Node) -> str:
        try:
            await node.forget()
        except StokerError as error:
            return str(node.failure or error)
        self._directory.lost(node.number)
        self._doomed.pop(node.number, None)
        return ""

    # Reading.

    async def read(self, name: str, into: memoryview) -> bool:
        """Fill ``into`` with an object, if it is here; verified shard by shard.

        When the call ends, however it ends, nothing writes to ``into`` any more.

        Args:
            name: of the object.
            into: memory of the object's size.

        Returns:
            Whether it was here, and so many shards of it could be had in ``read_seconds``.
        """
        found = self._directory.find(name)
        if found is None:
            self._tally.misses += 1
            return False
        lost = await self._reader.read(name, found, into)
        if lost is None:
            self._tally.losses += 1
            return False
        self.delivered(len(into))
        if lost:
            self._rebuild(name, found.code, into)
        return True

    def delivered(self, size_bytes: int) -> None:
        """Count a read of an object, be it one that another read has fetched."""
        self._tally.hits += 1
        self.meter.delivered(size_bytes)

    def lacks(self, name: str) -> bool:
        """Return whether an object is not here, which counts as a miss."""
        is_missed = self._directory.find(name) is None
        self._tally.misses += is_missed
        return is_missed

    # Writing.

    def offer(self, name: str, data: memoryview) -> None:
        """Put an object away some time, if there is room for a copy until then. Never blocks."""
        if not self._has(name) and self._has_room(len(data)):
            self._write_behind(name, self.config.code, bytes(data))

    def take(self, name: str, data: bytearray) -> bool:
        """Like :meth:`offer`, but without a copy: nobody changes ``data`` any more.

        Returns:
            Whether it is here, or will be if nothing comes between.
        """
        if self._has(name):
            return True
        if not self._has_room(len(data)):
            return False
        self._write_behind(name, self.config.code, data)
        return True

    def _has(self, name: str) -> bool:
        return self._directory.find(name) is not None or name in self._writing

    def _has_room(self, size_bytes: int) -> bool:
        has_room = not self._is_closed and self._tally.pending_bytes + size_bytes <= self.config.pending_bytes
        self._tally.declined += not has_room
        return has_room

    def _rebuild(self, name: str, code: Code, data: memoryview) -> None:
        """Put the lost shards of an object away again, of which the bytes are at hand."""
        if name in self._writing or self._is_closed:
            return
        if self._tally.pending_bytes + len(data) <= self.config.pending_bytes:
            self._write_behind(name, code, bytes(data))

    def _write_behind(self, name: str, code: Code, data: bytes | bytearray) -> None:
        self._writing.add(name)
        self._tally.pending_bytes += len(data)
        writing = self._spawn(self._write(name, code, data))
        writing.add_done_callback(lambda _: self._written(name, len(data)))

    def _written(self, name: str, size_bytes: int) -> None:
        self._writing.discard(name)
        self._tally.pending_bytes -= size_bytes

    async def _write(self, name: str, code: Code, data: bytes | bytearray) -> None:
        """Write the shards of an object that are nowhere."""
        async with self._writes:
            is_new = self._directory.find(name, is_use=False) is None
            await self._wake_unknown()
            placement = self._directory.place(name, code, self._rng)
            if placement is None:
                self._tally.declined += 1
                return
            self._tally.evicted += len({held.shard.object for held in placement.evicted})
            self._delete(placement.evicted)
            shards = await self._encoded(code, data, placement.nodes)
            async with task_group() as group:
                tasks = [
                    group.create_task(self._write_shard(node, ShardId(name, code.data, code.parity, at), shards[at]))
                    for at, node in placement.nodes.items()
                ]
            if not is_new:
                self._tally.rebuilt += sum(task.result() for task in tasks)
            elif self._directory.find(name, is_use=False) is not None:
                self._tally.stored += 1
            else:
                self._tally.declined += 1

    async def _encoded(self, code: Code, data: bytes | bytearray, wanted: Iterable[int]) -> dict[int, memoryview]:
        """Return the shards of an object, by position; parity only if it is wanted."""
        whole = memoryview(data)
        shards = dict(enumerate(views_of(code, whole)))
        if any(at >= code.data for at in wanted):
            parity = [memoryview(bytearray(code.shard_bytes(len(data)))) for _ in range(code.parity)]
            await in_thread(lambda _: encode(whole, code, parity))
            shards |= dict(enumerate(parity, code.data))
        return shards

    async def _write_shard(self, number: int, shard: ShardId, payload: memoryview) -> bool:
        node = self._nodes[number]
        try:
            await self._delete_doomed(node)
            reply = await node.request(
                Kind.SET,
                {"shard": shard.to_text(), "crc32c": shard.checksum(payload)},
                body=(payload,),
                seconds=self.config.write_seconds,
            )
            if reply.kind is Kind.STORED:
                for evicted in _evicted(reply.head):
                    self._directory.dropped(number, evicted)
                if self._directory.stored(number, shard):
                    return True
                self._doom(number, shard)
                return False
        except StoreError as error:
            _log.debug("%s does not take a shard: %s", node.name, error)
        except BaseException:
            self._directory.dropped(number, shard)
            raise
        self._directory.dropped(number, shard)
        return False

    async def _wake_unknown(self) -> None:
        """Wake nodes of which nobody knows how much they hold: none has said so yet."""
        unknown = [node for node in self._nodes if not node.limit_bytes and node.life.state is not State.GONE]
        if not unknown:
            return
        async with task_group() as group:
            for node in unknown:
                group.create_task(self._greet(node))

    async def _greet(self, node: Node) -> None:
        with suppress(TransientError):
            await node.request(Kind.PING, {}, seconds=self.config.wake_seconds)

    # Upkeep.

    async def _keep_up(self) -> None:
        """Call nodes that nobody uses, and back them up, for ever."""
        loop, config = asyncio.get_running_loop(), self.config
        every = UpkeepConfig(
            warm_seconds=config.keep_warm_seconds,
            backup_seconds=config.backup_seconds,
            peer_seconds=config.backup_seconds,  # one that is gone is missed at its next turn
        )
        upkeep = Upkeep(config.nodes, every, loop.time())
        known = [(node.life.instance, node.life.expected) for node in self._nodes]
        while True:
            due_seconds = upkeep.next_due()
            await asyncio.sleep(_LOOK_SECONDS if due_seconds is None else max(_LOOK_SECONDS, due_seconds - loop.time()))
            for node in self._nodes:
                upkeep.contacted(node.number, node.contact_seconds)
                before, known[node.number] = known[node.number], (node.life.instance, node.life.expected)
                if before[0] != node.life.instance:
                    upkeep.lost_peer(node.number)
                elif before[1] != node.life.expected:
                    upkeep.changed(node.number)
            for errand in upkeep.due(loop.time()):
                self._spawn(self._run_errand(upkeep, errand))

    async def _run_errand(self, upkeep: Upkeep, errand: Errand) -> None:
        node, is_well = self._nodes[errand.node], False
        try:
            if errand.task is Task.WARM:
                await node.keep_warm()
            else:
                copied = await back_up(node, self.config)
                self._tally.backed_up += copied  # read after the wait, during which others have counted
            is_well = True
        finally:
            upkeep.done(errand.node, asyncio.get_running_loop().time(), is_well=is_well)

    # Deleting.

    def _delete(self, held: Iterable[Held]) -> None:
        for node, shard in held:
            self._doom(node, shard)

    def _is_not_there(self, node: int, shard: ShardId) -> None:
        """A node does not have a shard, or one that is damaged, which must not be found there again."""
        if self._directory.dropped(node, shard):
            self._doom(node, shard)

    def _doom(self, node: int, shard: ShardId) -> None:
        """Delete a shard when its node is written to next: that is soon enough, and wakes nobody."""
        self._doomed.setdefault(node, set()).add(shard)

    async def _delete_doomed(self, node: Node) -> None:
        async with self._deleting[node.number]:  # lest a shard is put there again before a second order to delete it
            while doomed := self._doomed.get(node.number):
                page = list(islice(doomed, LISTED_AT_ONCE))
                head = {"shards": [shard.to_text() for shard in page]}
                await node.request(Kind.DELETE, head, seconds=self.config.write_seconds)
                doomed.difference_update(page)

    # Nodes and their connections.

    def _accept(self) -> Connection:
        connection: Connection

        def noticed(kind: Kind, head: Head) -> None:
            node = self._node_of(connection)
            if node is not None:
                self._guarded(connection, lambda: node.noticed(connection, kind, head))

        async def answer(kind: Kind, head: Head, body: bytearray) -> PeerAnswer:
            if self._clients is None or connection.peer is None or connection.peer.role != "client":
                raise WireError(f"{kind.name} is not asked of a proxy")
            return await self._clients.answer(connection, kind, head, body)

        handshake = ProxySide(self._secret, fingerprint=self.door.fingerprint)
        room = self._clients.room if self._clients is not None else _no_room
        connection = Connection(handshake, answer, notice=noticed, room=room)
        self._spawn(self._attend(connection))
        return connection

    async def _attend(self, connection: Connection) -> None:
        """Be there for a connection until it ends."""
        self._connections.add(connection)
        node: Node | None = None
        try:
            peer = await connection.ready()
            if peer.role == "node":
                node = self._node_of(connection)
                if node is None:
                    raise WireError(f"there is no node {peer.node}")
                node.greeted(connection, peer.greeting)
            await connection.closed()
        except StokerError as error:
            _log.warning("a connection of the warm tier ended: %s", error)
            connection.abort()
        finally:
            self._connections.discard(connection)
            connection.abort()
            if node is not None:
                node.lost(connection)

    def _guarded(self, connection: Connection, call: Any) -> None:
        """Close a connection on which nonsense is said."""
        try:
            call()
        except WireError as error:
            connection.abort(error)

    def _node_of(self, connection: Connection) -> Node | None:
        peer = connection.peer
        number = peer.node.removeprefix("warm-") if peer is not None else ""
        is_number = number.isascii() and number.isdigit() and len(number) <= 5
        return self._nodes[int(number)] if is_number and int(number) < len(self._nodes) else None

    def _found(self, node: Node, contents: Contents) -> None:
        """A node does not hold what it was believed to."""
        if contents is Contents.NONE:
            self._directory.lost(node.number)
            self._doomed.pop(node.number, None)
        elif contents is Contents.UNKNOWN:
            self._spawn(self._learn(node))
        self._directory.limit(node.number, node.limit_bytes)
        self._directory.avoid(node.number, is_gone=node.life.state is State.GONE)

    async def _learn(self, node: Node) -> None:
        """Ask a node for what it holds, and believe that."""
        try:
            shards = await node.listed()
        except StokerError as error:
            _log.warning("%s does not say what it holds: %s", node.name, error)
            return
        if shards is None:
            return
        doomed = self._doomed.pop(node.number, set())
        _, strange = self._directory.listed(node.number, [shard for shard in shards if shard not in doomed])
        for shard in (*doomed.intersection(shards), *strange):
            self._doom(node.number, shard)

    def _billed(self, answer: Answer | None, task: Task) -> None:
        if answer is None:
            self.meter.lost()
            return
        self.meter.called(
            task,
            billed_seconds=answer.billed_seconds,
            memory_bytes=answer.memory_bytes,
            vcpus=answer.vcpus,
            is_cold=answer.is_cold,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # if it never began
        if self._is_closed:
            task.cancel()
        return task


def _no_room(_: int) -> None:
    """Take no bodies: nodes send none unasked."""


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except StokerError as error:
        _log.warning("the warm tier goes on without: %s", error)
    except Exception:  # noqa: BLE001 - a task's boundary
        _log.exception("the warm tier goes on without")


def _evicted(head: Head) -> list[ShardId]:
    """Return what a node says has gone for a shard."""
    evicted = head.get("evicted")
    if not isinstance(evicted, list):
        raise WireError(f"a node says that {evicted!r:.40} went for a shard")
    return [ShardId.parse(each) for each in evicted]
