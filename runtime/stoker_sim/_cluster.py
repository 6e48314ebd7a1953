"""Models of the cache processes of a job's machines, ``cluster=``, in virtual time.

An object has its place on one machine. A rank copies an object of its own machine from memory, and reads that of
another machine over the network between machines.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker._base.arguments import AtLeastOne, BoundedConfig, Positive
from stoker._cache.eviction import CacheEntries, NoEviction
from stoker._cost.cluster import ClusterCapacity
from stoker._fetch.config import PipelineConfig
from stoker._format.manifest import Manifest
from stoker.abc import ObjectRef, Tier
from stoker_sim._bucket import SharedLink
from stoker_sim._caches import ModelledTier

NETWORK_BYTES_PER_SECOND = 900e6
"""Rate of a cache process for loaders of other machines, with TLS: `python -m benchmarks.cluster_network`."""
COPY_BYTES_PER_SECOND = 8e9
"""Rate of a copy from the memory of a process, as from a loader's cache in memory."""
START_SECONDS = 0.4
"""Time from the start of a loader until the process of its machine knows the others, measured with two machines:
`python -m benchmarks.prediction_cluster`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterModel(BoundedConfig):
    """Model of the cache processes of a job.

    Attributes:
        machines: number of machines.
        limit_bytes: limit of each machine, in bytes.
        network_bytes_per_second: rate at which the ranks of one machine read from the others.
        bytes_per_second: rate of copies on one machine.
    """

    machines: AtLeastOne[int]
    limit_bytes: AtLeastOne[int]
    network_bytes_per_second: Positive[float] = NETWORK_BYTES_PER_SECOND
    bytes_per_second: Positive[float] = COPY_BYTES_PER_SECOND

    @property
    def capacity(self) -> ClusterCapacity:
        """Memory of all machines."""
        return ClusterCapacity(machines=self.machines, limit_bytes=self.limit_bytes)

    @property
    def remote_share(self) -> float:
        """Fraction of all objects whose place is on another machine than that of their reader, 0 to 1."""
        return 1.0 - 1.0 / self.machines

    def held_share(self, manifest: Manifest) -> float:
        """Return the expected fraction of the super-samples that the machines keep, 0 to 1."""
        return self.capacity.held_share(len(manifest), manifest.size_bytes)

    def settled_tiers(
        self, ranks_per_machine: int, held_share: float
    ) -> Callable[[PipelineConfig, Manifest], Sequence[Tier]]:
        """Return a function that creates a rank's tiers when the machines have ``held_share`` of its super-samples."""
        machines = defaultdict[int, _MachineLinks](lambda: _MachineLinks(self))
        return lambda feed, _: [SettledCluster(machines[feed.rank // ranks_per_machine], held_share, self.remote_share)]

    def empty_tiers(self, manifest: Manifest, seed: str) -> Callable[[int], Tier]:
        """Return a function that creates the tier of a rank of a machine; all of them share what any of them reads."""
        rng = random.Random(seed)  # noqa: S311 - a model's
        places = _Places(self, len(manifest), rng)
        links = defaultdict[int, _MachineLinks](lambda: _MachineLinks(self))
        return lambda machine: SharedCluster(links[machine], machine, places)


class _MachineLinks:
    """The memory of a machine, and its network to the others."""

    def __init__(self, model: ClusterModel) -> None:
        memory, network = model.bytes_per_second, model.network_bytes_per_second
        self.memory = SharedLink(connection_bytes_per_second=memory, total_bytes_per_second=memory)
        self.network = SharedLink(connection_bytes_per_second=network, total_bytes_per_second=network)


class _ClusterTier(ModelledTier):
    """Base class of the tiers of a rank: like a loader's, they may take as long as the store before they are late."""

    name = "cluster"

    async def peek(self, ref: ObjectRef, into: memoryview) -> bool:
        """Read, as :meth:`read` does."""
        return await self.read(ref, into)

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Wait as long as the read takes and return True; return False at once on a miss. ``into`` is unchanged."""
        raise NotImplementedError

    def decline(self, ref: ObjectRef) -> None:
        """Do nothing: nobody waits for the object."""

    def is_responsive(self, ref: ObjectRef) -> bool:
        """Return whether the place of an object answers: always."""
        return True


class SettledCluster(_ClusterTier):
    """A rank's view of machines that have a constant fraction of what it reads.

    Args:
        links: links of its machine.
        held_share: fraction of reads that hit, 0 to 1.
        remote_share: fraction of these that hit on other machines, 0 to 1.
    """

    def __init__(self, links: _MachineLinks, held_share: float, remote_share: float) -> None:
        self._links = links
        self._is_hit, self._is_remote = _Stride(held_share), _Stride(remote_share)

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Wait as long as the read takes and return True; return False at once on a miss. ``into`` is unchanged."""
        if not self._is_hit.draw():
            return False
        await (self._links.network if self._is_remote.draw() else self._links.memory).serve(ref.size_bytes)
        return True


class _Stride:
    """Evenly spaced draws of True, with a given fraction."""

    def __init__(self, share: float) -> None:
        self._share, self._draws = share, 0

    def draw(self) -> bool:
        self._draws += 1
        return math.floor(self._draws * self._share) > math.floor((self._draws - 1) * self._share)


class SharedCluster(_ClusterTier):
    """A rank's view of machines that keep the first objects that any rank reads, each of which one rank fetches.

    Args:
        links: links of its machine.
        machine: number of its machine.
        places: places of the objects, which all ranks share.
    """

    def __init__(self, links: _MachineLinks, machine: int, places: _Places) -> None:
        self._links, self._machine, self._places = links, machine, places
        self._leases: set[int] = set()

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Wait as long as the read takes and return True; return False at once on a miss. ``into`` is unchanged."""
        places, owner = self._places, self._places.owners[ref.row]
        kept = places.kept[owner]
        if not kept.look_up(ref.row):
            if (other := places.fetching.get(ref.row)) is None:
                places.fetching[ref.row] = asyncio.Event()
                self._leases.add(ref.row)
                return False
            await other.wait()
            if not kept.look_up(ref.row):
                return False
        await (self._links.memory if owner == self._machine else self._links.network).serve(ref.size_bytes)
        return True

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Keep the object if its machine has room."""
        self._places.kept[self._places.owners[ref.row]].offer(ref.row, ref.size_bytes)
        self.decline(ref)

    def decline(self, ref: ObjectRef) -> None:
        """End the wait of others for an object that this rank was to fetch."""
        if ref.row in self._leases:
            self._leases.remove(ref.row)
            self._places.fetching.pop(ref.row).set()


class _Places:
    """Where objects are: the machine of each one, what each machine keeps, and which ones are being fetched."""

    def __init__(self, model: ClusterModel, objects: int, rng: random.Random) -> None:
        self.owners = [rng.randrange(model.machines) for _ in range(objects)]
        self.kept = [CacheEntries[int](NoEviction(), model.limit_bytes) for _ in range(model.machines)]
        self.fetching: dict[int, asyncio.Event] = {}
