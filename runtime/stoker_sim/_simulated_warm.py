"""A warm tier in virtual time: objects as erasure-coded shards in functions, read by the first k of n shards.

Shards are lost when the model of a node (:mod:`stoker_sim._warm_fleet`) loses its memory, and rewritten by the next
read of their object. Keep-warm calls are billed as in that model, as if there were no reads: reads are billed as extra
calls, and do not make the proxy notice losses sooner.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stoker._base.arguments import BoundedConfig, Positive
from stoker._cache.eviction import CacheEntries, Lru
from stoker._cost.prices import FunctionPrices
from stoker._diagnostics.latency import Latency, LogNormal
from stoker.abc import ObjectRef
from stoker.errors import ConfigError
from stoker_sim._bucket import SharedLink
from stoker_sim._caches import ModelledTier
from stoker_sim._warm_fleet import FleetCost, NodeCalls, NodeLife, draw_reclaims, simulate_life
from stoker_warm._config import WarmConfig

_FIRST_HORIZON_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmTierModel(BoundedConfig):
    """Model of a warm tier, whose functions hold super-samples for all ranks.

    Attributes:
        config: settings of the tier: number of nodes, erasure code, call interval and linger time.
        memory_bytes: configured and billed memory of a node, in bytes.
        limit_bytes: part of that memory for shards, in bytes.
        bytes_per_second: rate at which a node sends or receives.
        latency: distribution of the time to a shard's first byte, including the call that wakes its node.
        mean_life_seconds: mean life of an instance before the platform reclaims it, in seconds; None for unlimited.
    """

    config: WarmConfig = field(default_factory=WarmConfig)
    memory_bytes: int = 1536 << 20
    limit_bytes: Positive[int] = 1152 << 20
    bytes_per_second: Positive[float] = 75e6
    latency: Latency = field(default_factory=lambda: LogNormal(0.015, 0.1))
    mean_life_seconds: Positive[float] | None = None

    def __post_init__(self) -> None:
        BoundedConfig.__post_init__(self)
        if self.limit_bytes > self.memory_bytes:
            raise ConfigError(f"limit_bytes is at most memory_bytes ({self.memory_bytes}), not {self.limit_bytes}")

    def simulate_lives(self, seconds: float, seed: str) -> list[NodeLife]:
        """Return the simulated lives of the nodes.

        Args:
            seconds: duration of the simulation, in seconds; a longer one begins with the same events.
            seed: seed of the reclaims.
        """
        config = self.config

        def life(node: int) -> NodeLife:
            rng = random.Random(f"{seed} {node}")  # noqa: S311 - a model's
            mean_seconds, offset = self.mean_life_seconds, (node + 1) / config.nodes
            reclaims = draw_reclaims(mean_seconds, seconds, rng) if mean_seconds is not None else ()
            return simulate_life(
                config.keep_warm_seconds, reclaims, seconds, offset=offset, uses_per_second=0.0, rng=rng
            )

        return [life(node) for node in range(config.nodes)]


@dataclass(slots=True, kw_only=True)
class WarmCounters:
    """Counters of a warm tier in one run.

    Attributes:
        hits: number of reads served by the tier.
        losses: number of reads of objects that had lost too many shards.
        rebuilt: number of lost shards rewritten by reads.
        evicted: number of objects evicted.
        shards: number of shards read and written.
        shard_bytes: total size of these shards, in bytes.
        held_bytes: mean bytes held by a node at the end of the run.
        lives: lives of the nodes up to the end of the run.
        model: model of the tier.
    """

    hits: int = 0
    losses: int = 0
    rebuilt: int = 0
    evicted: int = 0
    shards: int = 0
    shard_bytes: int = 0
    held_bytes: float = 0.0
    lives: Sequence[NodeLife] = ()
    model: WarmTierModel

    def cost(self, prices: FunctionPrices) -> FleetCost:
        """Return the cost of the tier, an upper bound: each shard is counted as moved in a call of its own."""
        model = self.model
        calls = NodeCalls(
            memory_bytes=model.memory_bytes,
            linger_seconds=model.config.linger_seconds,
            bytes_per_second=model.bytes_per_second,
        )
        shard_bytes = self.shard_bytes / max(1, self.shards)
        return calls.cost(
            self.lives,
            prices,
            read=calls.shard_calls(self.shards - self.rebuilt, shard_bytes),
            rebuild=calls.shard_calls(self.rebuilt, shard_bytes),
        )


@dataclass(slots=True)
class _StoredObject:
    """Nodes of an object's shards, and the times at which the shards were written."""

    ref: ObjectRef
    nodes: list[int]
    since_seconds: list[float]


class SimulatedWarmTier:
    """The state of a simulated warm tier, which all ranks share; each reads through its own :class:`WarmTierView`.

    Offered objects are stored at once, as in :class:`~stoker_sim._caches.SimulatedCache`; the least recently used
    objects are evicted for them.

    Args:
        model: model of the tier.
        seed: seed of latencies, placement and reclaims.
    """

    def __init__(self, model: WarmTierModel, seed: str) -> None:
        self._model, self._seed, self._rng = model, seed, random.Random(seed)  # noqa: S311 - a model's
        self._entries = CacheEntries[int](Lru(), model.config.nodes * model.limit_bytes)
        self._objects = dict[int, _StoredObject]()
        self._horizon_seconds = _FIRST_HORIZON_SECONDS
        self._losses = self._node_losses()
        self._counters = WarmCounters(model=model)

    def read_seconds(self, ref: ObjectRef) -> float | None:
        """Return the time until enough shards of an object have arrived, in seconds; None if it is not stored.

        The read rewrites lost shards, since the reader has the whole object afterwards.
        """
        config, now_seconds = self._model.config, asyncio.get_running_loop().time()
        held = self._objects.get(ref.row)
        if held is None:
            return None
        lost = [at for at in range(config.code.shards) if self._is_lost(held, at, now_seconds)]
        if len(lost) > config.code.parity:
            self._entries.remove(ref.row)
            del self._objects[ref.row]
            self._counters.losses += 1
            return None
        self._entries.look_up(ref.row)
        self._counters.hits += 1
        self._count_shards(ref, config.code.shards - len(lost))
        self._rewrite_shards(held, lost)
        self._counters.rebuilt += len(lost)
        seconds = sorted(self._model.latency.draw(self._rng) for _ in range(config.code.shards - len(lost)))
        return seconds[config.code.data - 1] + self._transfer_seconds(ref)

    def put(self, ref: ObjectRef) -> None:
        """Store an object if it is not stored yet and fits."""
        code, now_seconds = self._model.config.code, asyncio.get_running_loop().time()
        evicted = self._entries.offer(ref.row, code.shards * code.shard_bytes(ref.size_bytes))
        if evicted is None or ref.row in self._objects:
            return
        for row in evicted:
            del self._objects[row]
        self._counters.evicted += len(evicted)
        nodes = self._rng.sample(range(self._model.config.nodes), code.shards)
        self._objects[ref.row] = _StoredObject(ref, nodes, [now_seconds] * code.shards)
        self._count_shards(ref, code.shards)

    def counters(self, seconds: float) -> WarmCounters:
        """Return the counters of a run that took this many seconds."""
        held_bytes = self._entries.used / self._model.config.nodes
        return replace(self._counters, held_bytes=held_bytes, lives=self._model.simulate_lives(seconds, self._seed))

    def _transfer_seconds(self, ref: ObjectRef) -> float:
        return self._model.config.code.shard_bytes(ref.size_bytes) / self._model.bytes_per_second

    def _count_shards(self, ref: ObjectRef, shards: int) -> None:
        self._counters.shards += shards
        self._counters.shard_bytes += shards * self._model.config.code.shard_bytes(ref.size_bytes)

    def _rewrite_shards(self, held: _StoredObject, positions: Sequence[int]) -> None:
        """Rewrite lost shards to the nodes that lost them, which have the most room."""
        for at in positions:
            held.since_seconds[at] = asyncio.get_running_loop().time()
        self._count_shards(held.ref, len(positions))

    def _is_lost(self, held: _StoredObject, at: int, now_seconds: float) -> bool:
        while self._horizon_seconds <= now_seconds:
            self._horizon_seconds *= 2.0
            self._losses = self._node_losses()
        losses = self._losses[held.nodes[at]]
        return bisect_right(losses, held.since_seconds[at]) < bisect_right(losses, now_seconds)

    def _node_losses(self) -> list[list[float]]:
        return [[at for at, _ in life.losses] for life in self._model.simulate_lives(self._horizon_seconds, self._seed)]


class WarmTierView(ModelledTier):
    """A simulated warm tier as one rank reads it, through its machine's network.

    Args:
        shared: state of the tier, shared by all ranks.
        network_bytes_per_second: bandwidth of the machine.
    """

    name = "warm"

    def __init__(self, shared: SimulatedWarmTier, network_bytes_per_second: float) -> None:
        self._shared = shared
        self._network = SharedLink(
            connection_bytes_per_second=network_bytes_per_second, total_bytes_per_second=network_bytes_per_second
        )

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Wait as long as the read takes; return False at once if it is not stored. ``into`` is left unchanged."""
        seconds = self._shared.read_seconds(ref)
        if seconds is None:
            return False
        await asyncio.sleep(seconds)
        if self._network.connection_bytes_per_second < math.inf:
            await self._network.serve(ref.size_bytes)
        return True

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Store the object."""
        self._shared.put(ref)
