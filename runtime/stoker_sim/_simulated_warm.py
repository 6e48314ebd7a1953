"""A warm tier in virtual time: objects as shards in functions that a platform takes back, read by the first k of n.

Shards are lost when the model of a node (:mod:`stoker_sim._warm_fleet`) says so, and put back by the next
read of their object, or from the bucket when the loss is noticed. What the nodes are called for is billed as there,
as if nobody read them: what is read besides is calls of its own, and losses are noticed no sooner for it.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from stoker._base.retry import RetryingReader, RetryPolicy
from stoker._base.task_group import for_each, task_group
from stoker._cache.eviction import Lru, Residents
from stoker._cost.prices import FunctionPrices
from stoker._diagnostics.latency import Latency, LogNormal
from stoker.abc import ObjectRef, Readable
from stoker.errors import ConfigError, StoreError
from stoker_sim._bucket import SharedLink
from stoker_sim._caches import ModelledTier
from stoker_sim._warm_fleet import Bill, NodeCalls, NodeLife, Reclaim, lived, strikes
from stoker_warm._put_back import NAMES_AT_ONCE, takes_whole
from stoker_warm._settings import WarmConfig

_FIRST_HORIZON_SECONDS = 3600.0
_NOTHING = memoryview(b"")
"""Is read into: no bytes move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmModel:
    """Functions that hold super-samples for all ranks.

    Attributes:
        config: of the tier: nodes, code, how often they are called and backed up, how long they linger, and how many
            objects at a time are put back.
        memory_bytes: of a node, as configured and billed.
        limit_bytes: of these, for shards.
        bytes_per_second: of a node.
        latency: before a shard's first byte, the call that wakes its node included.
        reclaim: how the platform takes instances; None: it takes none.
    """

    config: WarmConfig = field(default_factory=WarmConfig)
    memory_bytes: int = 1536 << 20
    limit_bytes: int = 1152 << 20
    bytes_per_second: float = 75e6
    latency: Latency = field(default_factory=lambda: LogNormal(0.015, 0.1))
    reclaim: Reclaim | None = None

    def __post_init__(self) -> None:
        if not 0 < self.limit_bytes <= self.memory_bytes:
            raise ConfigError(f"limit_bytes is at most memory_bytes, {self.memory_bytes}, not {self.limit_bytes}")
        if not self.bytes_per_second > 0:
            raise ConfigError(f"bytes_per_second must be more than 0, not {self.bytes_per_second}")

    def lives(self, seconds: float, seed: str) -> list[NodeLife]:
        """Return what becomes of the nodes; a longer time begins with the same."""
        config = self.config

        def life(node: int) -> NodeLife:
            rng = random.Random(f"{seed} {node}")  # noqa: S311 - a model's
            taken = strikes(self.reclaim, seconds, rng) if self.reclaim is not None else ()
            offset = (node + 1) / config.nodes
            return lived(config.upkeep, taken, seconds, offset=offset, uses_per_second=0.0, rng=rng)

        return [life(node) for node in range(config.nodes)]


@dataclass(slots=True, kw_only=True)
class WarmTally:
    """What a warm tier did in a run.

    Attributes:
        hits: objects that were read.
        losses: objects that were here, and of which too many shards were lost.
        rebuilt: lost shards that a read has put back.
        put_back: lost shards that were put back from the bucket when their loss was noticed.
        bucket_requests: GETs for these.
        bucket_bytes: that they brought.
        evicted: objects that went for others.
        shards: that were read and written.
        shard_bytes: of all of these.
        held_bytes: of each node in the end.
        lives: of the nodes, to the end of the run.
        model: of the tier.
    """

    hits: int = 0
    losses: int = 0
    rebuilt: int = 0
    put_back: int = 0
    bucket_requests: int = 0
    bucket_bytes: int = 0
    evicted: int = 0
    shards: int = 0
    shard_bytes: int = 0
    held_bytes: float = 0.0
    lives: Sequence[NodeLife] = ()
    model: WarmModel

    def bill(self, prices: FunctionPrices, get_dollars: float) -> Bill:
        """Return what the tier costs; all shards that move do so in calls of their own, which is the most they are.

        Args:
            prices: of functions.
            get_dollars: for a GET.
        """
        model = self.model
        calls = NodeCalls(
            memory_bytes=model.memory_bytes,
            linger_seconds=model.config.linger_seconds,
            bytes_per_second=model.bytes_per_second,
        )
        shard_bytes, repaired = self.shard_bytes / max(1, self.shards), self.rebuilt + self.put_back
        return calls.bill(
            self.lives,
            self.held_bytes,
            prices,
            read=calls.moving(self.shards - repaired, shard_bytes),
            repair=calls.moving(repaired, shard_bytes),
            bucket_dollars=self.bucket_requests * get_dollars,
        )


class _Notice(NamedTuple):
    """It is noticed that a node has lost its memory."""

    seconds: float
    lost_seconds: float
    node: int


@dataclass(slots=True)
class _Object:
    """Where an object's shards are, and since when."""

    ref: ObjectRef
    nodes: list[int]
    since_seconds: list[float]


class SimulatedWarm:
    """What is in the functions, for all ranks, on one virtual-clock loop. Ranks read through a :class:`WarmView` each.

    What is offered is there at once, as in :class:`~stoker_sim._caches.SimulatedTier`; the least
    recently used objects go for it.

    Args:
        model: of the tier.
        seed: of what is drawn.
    """

    def __init__(self, model: WarmModel, seed: str) -> None:
        self._model, self._seed, self._rng = model, seed, random.Random(seed)  # noqa: S311 - a model's
        self._residents = Residents[int](Lru(), model.config.nodes * model.limit_bytes)
        self._objects = dict[int, _Object]()
        self._rows_of = [set[int]() for _ in range(model.config.nodes)]
        self._horizon_seconds = _FIRST_HORIZON_SECONDS
        self._losses = self._node_losses()
        self._counted = WarmTally(model=model)

    def shard_seconds(self, ref: ObjectRef) -> float | None:
        """Return after how many seconds enough shards of an object are there; None if it is not here.

        Shards that are lost are put back, since whoever asks has the object then.
        """
        config, now_seconds = self._model.config, asyncio.get_running_loop().time()
        held = self._objects.get(ref.row)
        if held is None:
            return None
        lost = [at for at in range(config.code.shards) if self._is_lost(held, at, now_seconds)]
        if len(lost) > config.code.parity:
            self._residents.drop(ref.row)
            self._forget(ref.row)
            self._counted.losses += 1
            return None
        self._residents.look_up(ref.row)
        self._counted.hits += 1
        self._move(ref, config.code.shards - len(lost))
        self._restore(held, lost)
        self._counted.rebuilt += len(lost)
        seconds = sorted(self._model.latency.draw(self._rng) for _ in range(config.code.shards - len(lost)))
        return seconds[config.code.data - 1] + self._transfer_seconds(ref)

    def keep(self, ref: ObjectRef) -> None:
        """Put an object away, if it is not here and fits."""
        code, now_seconds = self._model.config.code, asyncio.get_running_loop().time()
        evicted = self._residents.offer(ref.row, code.shards * code.shard_bytes(ref.size_bytes))
        if evicted is None or ref.row in self._objects:
            return
        for row in evicted:
            self._forget(row)
        self._counted.evicted += len(evicted)
        nodes = self._rng.sample(range(self._model.config.nodes), code.shards)
        self._objects[ref.row] = _Object(ref, nodes, [now_seconds] * code.shards)
        for node in nodes:
            self._rows_of[node].add(ref.row)
        self._move(ref, code.shards)

    async def keep_whole(self, store: Readable) -> None:
        """Put lost shards back from a store as soon as their loss is noticed, as the proxy does it: for ever."""
        loop, at_once = asyncio.get_running_loop(), self._model.config.put_back
        if self._model.reclaim is None or not at_once:
            return
        reader = RetryingReader(store, RetryPolicy(seed=self._rng.getrandbits(32)))
        wanted, notices = dict[int, list[int]](), self._notices()
        notice = next(notices)
        while True:
            if not wanted:
                await asyncio.sleep(max(0.0, notice.seconds - loop.time()))
            while notice.seconds <= loop.time():
                for row, position in self._lost_by(notice):
                    wanted.setdefault(row, []).append(position)
                notice = next(notices)
            batch = {row: wanted.pop(row) for row in list(islice(wanted, NAMES_AT_ONCE))}
            await for_each(batch.items(), lambda each: self._put_back(reader, *each), concurrency=at_once)

    def tally(self, seconds: float) -> WarmTally:
        """Return what was done until then."""
        held_bytes = self._residents.used / self._model.config.nodes
        return replace(self._counted, held_bytes=held_bytes, lives=self._model.lives(seconds, self._seed))

    def _transfer_seconds(self, ref: ObjectRef) -> float:
        return self._model.config.code.shard_bytes(ref.size_bytes) / self._model.bytes_per_second

    def _move(self, ref: ObjectRef, shards: int) -> None:
        self._counted.shards += shards
        self._counted.shard_bytes += shards * self._model.config.code.shard_bytes(ref.size_bytes)

    def _restore(self, held: _Object, positions: Sequence[int]) -> None:
        """Write shards again, to the nodes that lost them: those have most room."""
        for at in positions:
            held.since_seconds[at] = asyncio.get_running_loop().time()
        self._move(held.ref, len(positions))

    async def _put_back(self, reader: RetryingReader[Readable], row: int, positions: Sequence[int]) -> None:
        """Read what an object has lost, and write it; if the store fails that is left to the next read."""
        held, now_seconds, code = self._objects.get(row), asyncio.get_running_loop().time(), self._model.config.code
        lost = [at for at in positions if held is not None and self._is_lost(held, at, now_seconds)]
        if held is None or not lost:
            return  # it went, or has been read meanwhile
        ref = held.ref
        cuts = [(0, ref.size_bytes)] if takes_whole(code, lost) else [code.cuts(ref.size_bytes)[at] for at in lost]
        with suppress(StoreError):
            async with task_group() as group:
                for start, end in cuts:
                    group.create_task(reader.get_range(ref.key, start, end, into=_NOTHING))
            self._counted.bucket_requests += len(cuts)
            self._counted.bucket_bytes += sum(end - start for start, end in cuts)
            await asyncio.sleep(self._model.latency.draw(self._rng) + self._transfer_seconds(ref))
            self._restore(held, lost)
            self._counted.put_back += len(lost)

    def _lost_by(self, notice: _Notice) -> Iterator[tuple[int, int]]:
        """Yield the objects that have lost a shard so, and its position."""
        for row in sorted(self._rows_of[notice.node]):
            held = self._objects[row]
            position = held.nodes.index(notice.node)
            if held.since_seconds[position] <= notice.lost_seconds:
                yield row, position

    def _notices(self) -> Iterator[_Notice]:
        """Yield what is noticed when, for ever."""
        begin_seconds, end_seconds = 0.0, _FIRST_HORIZON_SECONDS
        while True:
            lives = self._model.lives(end_seconds, self._seed)
            every = [_Notice(late, at, node) for node, life in enumerate(lives) for at, late in life.losses]
            yield from sorted(each for each in every if begin_seconds <= each.seconds < end_seconds)
            begin_seconds, end_seconds = end_seconds, 2.0 * end_seconds

    def _forget(self, row: int) -> None:
        for node in self._objects.pop(row).nodes:
            self._rows_of[node].discard(row)

    def _is_lost(self, held: _Object, at: int, now_seconds: float) -> bool:
        while self._horizon_seconds <= now_seconds:
            self._horizon_seconds *= 2.0
            self._losses = self._node_losses()
        losses = self._losses[held.nodes[at]]
        return bisect_right(losses, held.since_seconds[at]) < bisect_right(losses, now_seconds)

    def _node_losses(self) -> list[list[float]]:
        return [[at for at, _ in life.losses] for life in self._model.lives(self._horizon_seconds, self._seed)]


class WarmView(ModelledTier):
    """The tier as one rank's fetcher sees it, through that machine's network.

    Args:
        shared: what all ranks share.
        network_bytes_per_second: of the machine.
    """

    name = "warm"

    def __init__(self, shared: SimulatedWarm, network_bytes_per_second: float) -> None:
        self._shared = shared
        self._network = SharedLink(
            connection_bytes_per_second=network_bytes_per_second, total_bytes_per_second=network_bytes_per_second
        )

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Take the time that a read would if the object is here, none if it is not; ``into`` is left as it is."""
        seconds = self._shared.shard_seconds(ref)
        if seconds is None:
            return False
        await asyncio.sleep(seconds)
        if self._network.connection_bytes_per_second < math.inf:
            await self._network.serve(ref.size_bytes)
        return True

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Put the object away."""
        self._shared.keep(ref)
