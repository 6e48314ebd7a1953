"""Random fault schedules of the cache processes of several machines, in virtual time.

Ranks of all machines read epochs through real tiers, connections and processes, over links in memory. Meanwhile
processes are killed and frozen, machines are cut off, join late and lie, ranks crash, and all ranks start again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from itertools import count

from stoker import FetchConfig
from stoker._base.batch_read import ObjectPart, RangePart
from stoker._cluster.client import ClusterTier
from stoker._cluster.connection import Connection
from stoker._cluster.frames import Frame, Kind
from stoker._cluster.members import Member
from stoker._cluster.peers import SETTLE_SECONDS
from stoker._cluster.secret import ClusterSecret
from stoker._cluster.serving import Listener, Node, NodeConnection
from stoker._cluster.spec import ClusterSpec
from stoker._fetch.fetcher import Fetcher
from stoker._fetch.mapped_objects import SLOW_SECONDS, MappedObjects
from stoker._memory.ring import Ring
from stoker._shared.address import Address
from stoker.abc import ObjectRef
from stoker.errors import ChecksumError, ConnectionLostError
from stoker.testing import run_virtual
from support.faulty_store import FaultyStore, StoreProfile, pin
from support.warm_wires import Link, LinkConfig

__all__ = ["FAULTS", "RANGES", "ClusterRun", "play"]

FAULTS = ("kill", "freeze", "split", "lie", "crash", "late", "restart", "registry")
MACHINES, LOCAL_RANKS, EPOCHS, OBJECTS = 4, 8, 5, 64
STALL_SECONDS = 1.0
"""Time that a fetch may take longer than the bucket does."""
_SLACK_SECONDS = 0.1
_SLOT_BYTES = 4096
_SILENT_SECONDS = 20.0
_OWN_SECONDS = 0.03
"""Time that the bucket takes."""
RANGES = 4
"""Ranges that a rank reads at a time, and ranks that need ranges of an object."""


class PlainArena:
    """Memory of a process, of which all pages are there."""

    readable = None

    def __init__(self, size_bytes: int) -> None:
        self.memory = memoryview(bytearray(size_bytes))

    def reserve(self, offset: int, size_bytes: int) -> bool:
        return True


class _Port:
    """A listener of a process."""

    def __init__(self, machine: Machine, node: Node, address: Address) -> None:
        self.machine, self.node, self.address = machine, node, address
        machine.run.ports[str(address)] = self

    def accept(self) -> NodeConnection:
        return NodeConnection(self.node, self)

    def discard(self, connection: NodeConnection) -> None:
        pass

    def close(self) -> None:
        self.machine.run.ports.pop(str(self.address), None)


class Machine:
    """A machine: its process, and the ends of links there."""

    def __init__(self, run: ClusterRun, number: int) -> None:
        self.run, self.number, self.label = run, number, f"{number + 1:016x}"
        self.node: Node | None = None
        self.links: list[Link] = []  # whose second end is the process's
        self.is_frozen = False

    async def listen(self, node: Node, address: Address, *, tls: bool) -> Listener:
        await asyncio.sleep(0.001)
        port = address.port or next(self.run.port_numbers)
        return _Port(self, node, Address(address.host, port))

    async def open_node(self, spec: ClusterSpec, text: str) -> Connection:
        """Connect a client of this machine; start the process if there is none."""
        await asyncio.sleep(0.001)
        if self.is_frozen:  # accepted by the system, and never greeted
            await asyncio.sleep(15.0)
            raise ConnectionLostError("the process does not answer")
        if self.node is None:
            arena = PlainArena(spec.limit_bytes)
            self.node = Node(arena, spec.limit_bytes, label=self.label, listen=self.listen)  # type: ignore[arg-type]
        node = self.node
        is_mapped = self.run.is_mapped
        connection = Connection(node.arena.memory if is_mapped else None)
        self.join(Link(LinkConfig(latency_seconds=0.00005)), connection, NodeConnection(node))
        connection.send(Frame(Kind.OPEN, number=int(is_mapped)))
        return connection

    async def open_peer(self, address: Address, secret: ClusterSecret) -> Connection:
        """Connect a client of this machine to another machine's process."""
        latency_seconds = self.run.latency_seconds
        await asyncio.sleep(2 * latency_seconds)
        port = self.run.ports.get(str(address))
        other = int(address.host.rsplit(".", 1)[1])
        if frozenset((self.number, other)) in self.run.split:
            await asyncio.sleep(5.0)
            raise ConnectionLostError(f"{address} does not answer")
        if port is None:
            raise ConnectionLostError(f"nobody listens at {address}")
        connection = Connection(secret=secret)
        link = Link(LinkConfig(latency_seconds=latency_seconds, segment_bytes=1400, window_bytes=8192))
        self.run.between.append((frozenset((self.number, other)), link))
        port.machine.join(link, connection, port.accept())
        await connection.prove(10.0)
        return connection

    def join(self, link: Link, client: Connection, server: NodeConnection) -> None:
        self.links.append(link)
        link.join(client, server)
        if self.is_frozen:
            link.ends[1].freeze()
        if self.run.liar is self and isinstance(server._listener, _Port):
            link.ends[1].tamper = self.run.lie

    def kill(self) -> None:
        """End the process; its memory is lost."""
        node, self.node = self.node, None
        if node is not None:
            node.close_ports()
        for link in self.links:
            link.cut()
        self.links.clear()

    async def freeze(self, seconds: float) -> None:
        """Stop the process for a time."""
        self.is_frozen = True
        stopped = list(self.links)
        for link in stopped:
            link.ends[1].freeze()
        await asyncio.sleep(seconds)
        self.is_frozen = False
        for link in self.links:
            link.ends[1].thaw()


class _Registry:
    """Where machines find each other; a list, which is out of reach at times."""

    job = "virtual"

    def __init__(self, run: ClusterRun, machine: int) -> None:
        self.run, self.number, self.machines = run, machine, len(run.machines) if run.knows_machines else 0

    async def secret(self) -> ClusterSecret:
        await self._ask()
        return self.run.secret

    def addresses(self) -> list[Address]:
        return [Address(f"10.0.0.{self.number}", 0)]

    async def join(self, member: Member) -> list[Member]:
        await self._ask()
        if {each.label: each for each in self.run.joined}.get(member.label) != member:
            self.run.joined.append(member)
        return list(self.run.joined)

    async def _ask(self) -> None:
        await asyncio.sleep(0.002)
        if self.run.is_registry_lost:
            await asyncio.sleep(5.0)
            raise ConnectionLostError("the store cannot be reached")


class Rank:
    """One rank, which reads its part of each epoch: objects, a few of them ahead, or ranges of many at a time.

    Args:
        run: the run.
        number: number of the rank.
        group: number of its share of an epoch, which its twins have, too.
    """

    def __init__(self, run: ClusterRun, number: int, group: int) -> None:
        self.run, self.number, self.group = run, number, group
        self.machine = run.machines[number // LOCAL_RANKS]
        self.delivered: Counter[tuple[int, int]] = Counter()
        self.position = (0, 0)

    async def train(self, epochs: range) -> None:
        """Read epochs from where it was, and end with no connection left."""
        run, self.has_settled = self.run, False
        tier = ClusterTier(
            run.setting,
            is_shared=run.twins > 1,
            registry=_Registry(run, self.machine.number),
            open_node=self.machine.open_node,
            open_peer=self.machine.open_peer,
        )
        ring = Ring(4, _SLOT_BYTES)
        fetcher = Fetcher(
            run.store,
            ring=ring,
            rng=random.Random(self.number),
            config=FetchConfig(hedge=run.hedges, hedge_first_seconds=0.2),
            tiers=[tier],
            log=logging.getLogger("stoker.virtual"),
        )
        mapped = MappedObjects(tier, run.largest_bytes, fetcher, fetcher._counters)
        try:
            for epoch in epochs:
                if self.position[0] <= epoch and run.reads_ranges:
                    await self._read_ranges_of_epoch(mapped, epoch)
                elif self.position[0] <= epoch:
                    await self._read_epoch(fetcher, ring, epoch)
        finally:
            await tier.close()

    def _places(self, epoch: int) -> range:
        """Return the places of its share of an epoch that it has not had yet."""
        first = self.position[1] if self.position[0] == epoch else 0
        return range(first, len(self.run.share(epoch, self.group)))

    def _deliver(self, epoch: int, place: int) -> None:
        self.delivered[epoch, place] += 1
        self.position = (epoch, place + 1) if place + 1 < self._places(epoch).stop else (epoch + 1, 0)

    async def _read_ranges_of_epoch(self, mapped: MappedObjects, epoch: int) -> None:
        """Read some ranges of many objects at each step, and from the bucket what is nowhere else."""
        loop, own = asyncio.get_running_loop(), self.run.share(epoch, self.group)
        for first in self._places(epoch)[::RANGES]:
            places = range(first, min(first + RANGES, len(own)))
            parts, into = _parts_of([own[place] for place in places], epoch)

            def verify(number: int, parts: list[ObjectPart] = parts, into: memoryview = into) -> None:
                ref, part = parts[number]
                found = into[part.offset : part.offset + part.size_bytes]
                if found != self.run.objects[ref.key][part.start : part.end]:
                    raise ChecksumError(f"wrong bytes of {ref.key}")

            begun = loop.time()
            for number in await mapped.copy(parts, into, verify):
                ref, part = parts[number]
                left = into[part.offset : part.offset + part.size_bytes]
                await self.run.store.get_range(ref.key, part.start, part.end, into=left)
            self.run.check_time(loop.time() - begun, len(parts), settles=not self.has_settled)
            self.has_settled = True
            for number in range(len(parts)):
                verify(number)
            await asyncio.sleep(self.run.step_seconds)
            for place in places:
                self._deliver(epoch, place)

    async def _read_epoch(self, fetcher: Fetcher, ring: Ring, epoch: int) -> None:
        own = self.run.share(epoch, self.group)
        ahead: dict[int, asyncio.Task[int]] = {}
        try:
            for place in self._places(epoch):
                for near in range(place, min(place + 3, len(own))):
                    if near not in ahead:
                        ahead[near] = asyncio.create_task(self._fetch(fetcher, own[near]))
                slot = await ahead[place]
                ref = own[place]
                assert ring.view(slot, ref.size_bytes) == self.run.objects[ref.key], "wrong bytes were delivered"
                await asyncio.sleep(self.run.step_seconds)
                assert ring.view(slot, ref.size_bytes) == self.run.objects[ref.key], "a slot in use was written to"
                ring.release(slot)
                del ahead[place]
                self._deliver(epoch, place)
        finally:
            for task in ahead.values():
                task.cancel()
            await asyncio.gather(*ahead.values(), return_exceptions=True)

    async def _fetch(self, fetcher: Fetcher, ref: ObjectRef) -> int:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        slot = await fetcher.fetch(ref)
        self.run.check_time(loop.time() - begun)
        return slot


def _parts_of(refs: list[ObjectRef], epoch: int) -> tuple[list[ObjectPart], memoryview]:
    """Return a part of each object, another one in each epoch, and memory for all of them."""
    parts: list[ObjectPart] = []
    size_bytes = 0
    for ref in refs:
        start = random.Random(f"{ref.key} {epoch}").randrange(ref.size_bytes)
        end = min(ref.size_bytes, start + 100)
        parts.append(ObjectPart(ref, RangePart(start, end, size_bytes)))
        size_bytes += end - start
    return parts, memoryview(bytearray(size_bytes))


class ClusterRun:
    """A training of machines with 8 ranks each, over 5 epochs, and three more after the last fault.

    Args:
        seed: seed of the faults, and of everything else.
        faults: number of faults; default drawn, 0 for none.
        machines: number of machines.
        objects: number of objects.

    Attributes:
        counts: fault → how often it happened, and what was read from the bucket.
    """

    def __init__(
        self, seed: int, faults: int | None = None, *, machines: int = MACHINES, objects: int = OBJECTS
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.faults = rng.randrange(1, 9) if faults is None else faults
        sizes = [rng.randrange(1, 3000) for _ in range(objects)]
        self.objects = {f"data/{number}": rng.randbytes(size) for number, size in enumerate(sizes)}
        self.refs = pin(self.objects)
        self.store = FaultyStore(self.objects, profile=StoreProfile(tail_sigma=0.0), seed=seed)
        self.twins = rng.choice([1, 1, 1, 2, 8])
        places = rng.choice([objects, objects, objects // machines // 2])
        self.holds_all = places == objects
        self.setting = f"disk:/nowhere?limit={places * 4096}B"  # not opened; of memory, each loader asks the system
        self.is_mapped, self.hedges = rng.random() < 0.8, rng.random() < 0.8
        self.knows_machines = rng.random() < 0.7
        self.reads_ranges = seed % 3 == 2
        self.largest_bytes = max(sizes)
        self.latency_seconds = rng.choice([0.0002, 0.002, 0.02])
        self.step_seconds = rng.choice([0.01, 0.1, 1.0])
        self.secret = ClusterSecret(bytes(32))
        self.port_numbers = count(7000)
        self.ports: dict[str, _Port] = {}
        self.joined: list[Member] = []
        self.split: set[frozenset[int]] = set()
        self.between: list[tuple[frozenset[int], Link]] = []
        self.is_registry_lost = False
        self.liar: Machine | None = None
        self.machines = [Machine(self, number) for number in range(machines)]
        self.ranks = [Rank(self, number, number // self.twins) for number in range(machines * LOCAL_RANKS)]
        self.late_seconds = [0.0] * machines
        self.training: list[asyncio.Task[None]] = []
        self.longest_seconds = 0.0
        self.counts: Counter[str] = Counter()
        self.shares: dict[tuple[int, int], list[ObjectRef]] = {}

    def share(self, epoch: int, group: int) -> list[ObjectRef]:
        """Return what a group of ranks reads in an epoch, in its order."""
        if (epoch, group) in self.shares:
            return self.shares[epoch, group]
        refs = self.refs * (RANGES if self.reads_ranges else 1)  # ranks need parts of the same objects
        order = random.Random(epoch).sample(refs, len(refs))
        self.shares[epoch, group] = order[group :: len(self.ranks) // self.twins]
        return self.shares[epoch, group]

    def check_time(self, seconds: float, parts: int = 0, *, settles: bool = False) -> None:
        """Check that a read took no longer than the bucket does, and a second; one more while machines meet."""
        self.longest_seconds = max(self.longest_seconds, seconds)
        limit_seconds = STALL_SECONDS + _OWN_SECONDS + _SLACK_SECONDS
        if parts:
            limit_seconds += SLOW_SECONDS + SETTLE_SECONDS * settles + _OWN_SECONDS * parts
        assert seconds <= limit_seconds, f"a read took {seconds:.2f} s"

    def lie(self, data: bytes) -> bytes:
        """Change a byte of some of what a process sends."""
        if not data or self.rng.random() < 0.8:
            return data
        place = self.rng.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << self.rng.randrange(8)]) + data[place + 1 :]

    async def play(self) -> None:
        """Train, with faults; then train three epochs without, the last one with other loaders."""
        rng = self.rng
        causes = [rng.choice(FAULTS) for _ in range(self.faults)]
        self.counts["late"] = int("late" in causes)
        self.late_seconds = [rng.choice([0.0, 0.3, 5.0]) if "late" in causes else 0.0 for _ in self.machines]
        duration_seconds = EPOCHS * len(self.refs) * self.twins / len(self.ranks) * (self.step_seconds + 0.05)
        self._start(range(EPOCHS))
        events = [
            asyncio.create_task(self._cause(fault, rng.random() * duration_seconds))
            for fault in causes
            if fault != "late"
        ]
        while any(not rank.done() for rank in self.training):
            await asyncio.wait(self.training)
        for rank in self.training:
            rank.result()
        await asyncio.gather(*events)
        self.check_delivered(EPOCHS)
        self.counts["requests"] = len(self.store.sent_seconds)
        self.step_seconds = 5.0
        for epochs in (range(EPOCHS, EPOCHS + 2), range(EPOCHS + 2, EPOCHS + 3)):
            before = len(self.store.sent_seconds)
            self._start(epochs, at_once=True)
            await asyncio.gather(*self.training)
            self.counts[f"requests of epoch {epochs[-1]}"] = len(self.store.sent_seconds) - before
        self.check_delivered(EPOCHS + 3)
        for machine in self.machines:
            machine.kill()

    def check_delivered(self, epochs: int) -> None:
        for rank in self.ranks:
            places = {(epoch, place) for epoch in range(epochs) for place in range(len(self.share(epoch, rank.group)))}
            assert set(rank.delivered) == places, f"rank {rank.number} lacks samples"
            assert set(rank.delivered.values()) == {1}, f"rank {rank.number} had samples twice"

    def _start(self, epochs: range, *, at_once: bool = False) -> None:
        async def train(rank: Rank) -> None:
            await asyncio.sleep(0.0 if at_once else self.late_seconds[rank.machine.number])
            await rank.train(epochs)

        self.training = [asyncio.create_task(train(rank)) for rank in self.ranks]
        self.epochs = epochs

    async def _cause(self, fault: str, seconds: float) -> None:
        rng = self.rng
        await asyncio.sleep(seconds)
        self.counts[fault] += 1
        machine, lasting_seconds = rng.choice(self.machines), rng.choice([0.1, 3.0, 40.0])
        match fault:
            case "kill":
                machine.kill()
            case "freeze":
                if not machine.is_frozen:
                    await machine.freeze(lasting_seconds)
            case "split":
                await self._split(frozenset(rng.sample(range(len(self.machines)), 2)), lasting_seconds)
            case "lie":
                await self._lie(machine, lasting_seconds)
            case "crash":
                await self._restart([rng.randrange(len(self.ranks))], rng.choice([0.0, 2.0]))
            case "restart":
                await self._restart(range(len(self.ranks)), rng.choice([0.0, 2.0, 70.0]))
            case "registry":
                self.is_registry_lost = True
                await asyncio.sleep(lasting_seconds)
                self.is_registry_lost = False

    async def _split(self, pair: frozenset[int], seconds: float) -> None:
        self.split.add(pair)
        for ends, link in self.between:
            if ends == pair:
                link.split()
                asyncio.get_running_loop().call_later(_SILENT_SECONDS, link.cut)  # as the system does
        await asyncio.sleep(seconds)
        self.split.discard(pair)

    async def _lie(self, machine: Machine, seconds: float) -> None:
        self.liar = machine
        between = [link for _, link in self.between if link in machine.links]  # not what its own loaders get
        for link in between:
            link.ends[1].tamper = self.lie
        await asyncio.sleep(seconds)
        self.liar = None
        for link in machine.links:
            link.ends[1].tamper = bytes

    async def _restart(self, numbers: range | list[int], pause_seconds: float) -> None:
        """Cancel ranks, which lose their connections, and start them again where they were."""
        ended = [self.training[number] for number in numbers if not self.training[number].done()]
        again = [number for number in numbers if not self.training[number].done()]
        for task in ended:
            task.cancel()

        async def train(rank: Rank, before: asyncio.Task[None]) -> None:
            await asyncio.wait([before])
            await asyncio.sleep(pause_seconds)
            await rank.train(self.epochs)

        for number in again:
            self.training[number] = asyncio.create_task(train(self.ranks[number], self.training[number]))


def play(seed: int, faults: int | None = None) -> ClusterRun:
    """Play a schedule, check it, and return it."""
    run = ClusterRun(seed, faults)
    run_virtual(run.play())
    if run.holds_all and run.twins == 1:  # twins may have got an object at their machine that its owner lacked
        assert not run.counts[f"requests of epoch {EPOCHS + 2}"], "the bucket was read after everything was held"
    return run
