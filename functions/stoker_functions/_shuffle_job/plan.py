"""The cost of each way to make an epoch, and the choice of one, as pure functions.

For ``N`` samples in ``M`` super-samples of ``D`` bytes, ``S`` slices, ``T`` scatters, and ``O`` super-samples written:

- ``streamed``: every slice reads every super-sample that has one of its samples, nearly always all of them, and keeps
  its own: about ``S · M`` GETs and ``S · D`` bytes; ``O`` PUTs.
- ``ranged``: every slice reads the heads of all super-samples, and then its samples, a range or more each: about
  ``S · M + N`` GETs for every large column, ``D`` bytes and the heads ``S`` times; ``O`` PUTs.
- ``scattered``: ``T`` scatters read ``M / T`` super-samples each and write their samples again, a **cell** for each
  slice; a slice reads its ``T`` cells. With ``C`` the super-samples in the ``T · S`` cells, at least one each:
  ``M + C + S · T`` GETs and ``2 D`` bytes read; ``C + O`` PUTs and ``2 D`` bytes written.

Records and manifests add a few requests per task. ``streamed`` and ``scattered`` hold all samples of a slice or scatter
in memory before they write, which sets the minimum number of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from stoker._base.meter import Operation
from stoker._cost.prices import FunctionPrices, StorePrices
from stoker._fetch.range_plan import ReadLimits, forecast_groups
from stoker._format.manifest import Manifest
from stoker._format.supersample import MAX_TARGET_BYTES
from stoker._order.epoch_layout import MAX_SLICES, even_slice_count
from stoker._order.order import MAX_LANES
from stoker._order.sharding import RankSharding
from stoker._pack.part_writer import RECORD_EVERY_OBJECTS
from stoker._pack.stored_samples import HEADER_BYTES, TaskMemory, sample_bytes
from stoker.errors import ConfigError, MemoryBudgetError
from stoker_functions._shuffle_job.work import ShuffleTask, Way

_HEADROOM = 1.2
"""Memory divided by the memory of an average part, at least: parts differ in size."""
_BYTES_PER_SECOND, _REQUESTS_PER_SECOND = 75e6, 500.0
"""Throughput and request rate of one task, to and from the store."""
_TIME_SHARE = 0.6
"""Fraction of a task's time limit that a plan may use; the rest is for times when the store is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Requirements and prices of a plan.

    Attributes:
        lanes: number of parts that the order of the epoch is cut into.
        store: prices of the bucket.
        slices: minimum number of slices; default 1.
        memory_bytes: memory that a task may use.
        task_seconds: time limit of a task; default no limit.
        concurrency: number of concurrent tasks; default 1.
        prices: prices of the function that executes a task; default None, no charge.
        configured_bytes: memory of the function that is billed.
        vcpus: processors of the function that are billed.

    Raises:
        ConfigError: the number of lanes or slices is out of range.
    """

    lanes: int
    store: StorePrices
    slices: int = 1
    memory_bytes: int
    task_seconds: float = math.inf
    concurrency: int = 1
    prices: FunctionPrices | None = None
    configured_bytes: int = 0
    vcpus: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.lanes <= MAX_LANES:
            raise ConfigError(f"lanes must be in [1, {MAX_LANES}], not {self.lanes}")
        if not 1 <= self.slices <= self.max_slices:
            raise ConfigError(f"slices must be in [1, {self.max_slices}] for {self.lanes} lanes, not {self.slices}")

    @property
    def max_slices(self) -> int:
        """Maximum number of slices, which all have equal parts of a lane."""
        return MAX_SLICES // self.lanes * self.lanes

    def task_dollars(self, seconds: float) -> float:
        """Return the price of a task that takes ``seconds``."""
        if self.prices is None:
            return 0.0
        return self.prices.invocation_dollars(seconds=seconds, memory_bytes=self.configured_bytes, vcpus=self.vcpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """One way to make an epoch, and its cost; requests and bytes are expected values.

    Attributes:
        way: how slices read, as in :class:`ShuffleTask`.
        slices: number of parts that the epoch is cut into for writing.
        scatters: number of parts that the super-samples are cut into for scattering.
        object_bytes: limit of a written super-sample's data.
        get_requests: GET requests of all tasks.
        put_requests: PUT requests of all tasks.
        read_bytes: bytes read by all tasks.
        written_bytes: bytes written by all tasks.
        store_dollars: price of requests and bytes.
        function_dollars: price of the functions.
        task_seconds: time of the longest task.
        seconds: time of the whole plan.
        problem: reason why the plan does not work; empty if it works.
    """

    way: Way
    slices: int
    scatters: int
    object_bytes: int
    get_requests: int
    put_requests: int
    read_bytes: int
    written_bytes: int
    store_dollars: float
    function_dollars: float
    task_seconds: float
    seconds: float
    problem: str = ""

    @property
    def dollars(self) -> float:
        """Price of the epoch, without storage."""
        return self.store_dollars + self.function_dollars

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key of plans that work: price, then time."""
        return round(self.dollars, 9), self.seconds

    def phases(self, **epoch: Any) -> list[list[ShuffleTask]]:
        """Return the tasks in lists, each of which must be complete before the next one begins.

        Args:
            **epoch: ``dataset``, ``version``, ``seed``, ``epoch``, ``lanes`` and ``keep`` of the tasks.
        """
        first = ShuffleTask(
            way=self.way,
            slices=self.slices,
            scatters=self.scatters,
            object_bytes=self.object_bytes,
            step="commit",
            part=0,
            **epoch,
        )
        scatters = [replace(first, step="scatter", part=part) for part in range(self.scatters)]
        slices = [replace(first, step="slice", part=part) for part in range(self.slices)]
        return [phase for phase in (scatters, slices, [first]) if phase]


def plan_ways(manifest: Manifest, config: PlanConfig) -> tuple[EpochPlan, ...]:
    """Return the plan of each way, with as many parts as memory and time require.

    Raises:
        MemoryBudgetError: the memory is too small for any way.
    """
    planner = _Planner(manifest, config)
    return tuple(planner.plan(way) for way in get_args(Way))


def choose_plan(plans: Sequence[EpochPlan]) -> EpochPlan:
    """Return the cheapest plan that works; among equal prices, the fastest.

    Raises:
        MemoryBudgetError: no plan works; the message has the reasons.
    """
    working = [plan for plan in plans if not plan.problem]
    if not working:
        raise MemoryBudgetError(
            "the epoch cannot be made with this memory and time: " + "; ".join(f"{p.way}: {p.problem}" for p in plans)
        )
    return min(working, key=lambda plan: plan.rank)


@dataclass(frozen=True, slots=True)
class _TaskKind:
    """Tasks of one kind: their number, and the requests and bytes of each."""

    count: int
    get_requests: float
    put_requests: float
    read_bytes: float
    written_bytes: float

    @property
    def seconds(self) -> float:
        """Estimated time of one task."""
        requests = self.get_requests + self.put_requests
        moved_bytes = self.read_bytes + self.written_bytes
        return requests / _REQUESTS_PER_SECOND + moved_bytes / _BYTES_PER_SECOND


_TOTALS = ("get_requests", "put_requests", "read_bytes", "written_bytes")
"""Attributes of tasks that a plan adds up."""


class _Planner:
    def __init__(self, manifest: Manifest, config: PlanConfig) -> None:
        self._manifest, self._config = manifest, config
        self._size_bytes, largest_bytes = manifest.size_bytes, manifest.largest_bytes
        # With its header, an object is no larger than those of the data set, so a loader needs no more memory.
        self._object_bytes = min(MAX_TARGET_BYTES, max(largest_bytes - HEADER_BYTES, largest_bytes // 2))
        self._memory = TaskMemory.plan(
            config.memory_bytes, largest_bytes=largest_bytes, object_bytes=self._object_bytes
        )
        held_bytes = sample_bytes(len(manifest.schema), manifest.samples, self._size_bytes) * _HEADROOM
        self._min_parts = math.ceil(held_bytes / self._memory.values_bytes)

    def plan(self, way: Way) -> EpochPlan:
        config = self._config
        min_slices = config.slices if way == "ranged" else max(config.slices, self._min_parts)
        slices = even_slice_count(min(min_slices, config.max_slices), config.lanes)
        while True:
            plan = self._plan_with_slices(way, slices)
            more = even_slice_count(2 * slices, config.lanes)
            if not plan.problem or more > min(config.max_slices, self._manifest.samples):
                return plan
            slices = more

    def _plan_with_slices(self, way: Way, slices: int) -> EpochPlan:
        most_seconds = self._config.task_seconds
        scatters = min(max(slices, self._min_parts), len(self._manifest)) if way == "scattered" else 0
        problem = ""
        try:
            kinds = [*self._task_kinds(way, slices, scatters), _TaskKind(1, slices + 4, 2, 0, 0)]
        except MemoryBudgetError as error:
            problem, kinds = str(error), [_TaskKind(1, 0, 0, 0, 0)]
        slowest_seconds = max(kind.seconds for kind in kinds)
        if not problem and slowest_seconds > _TIME_SHARE * most_seconds:
            problem = f"a task would take about {slowest_seconds:,.0f} s of its limit of {most_seconds:,.0f} s"
        if not problem and way != "ranged" and slices < self._min_parts:
            problem = f"the samples do not fit in memory in {slices} slices, which is the maximum"
        if not problem and way == "scattered" and scatters < self._min_parts:
            problem = f"the samples do not fit in memory in {scatters} scatters, one per super-sample"
        return self._sum_plan(way, (slices, scatters), kinds, problem)

    def _task_kinds(self, way: Way, slices: int, scatters: int) -> list[_TaskKind]:
        """Return the tasks that read and write samples."""
        size_bytes = self._size_bytes
        objects = self._count_objects(max(slices, self._config.lanes)) / slices
        written_bytes = size_bytes / slices
        if way == "ranged":
            requests, read_bytes = self._forecast_ranges(slices)
            return [self._task_kind(slices, requests, objects, read_bytes, written_bytes)]
        if way == "streamed":
            super_samples = len(self._manifest)
            share = 1.0 - (1.0 - 1.0 / slices) ** (self._manifest.samples / super_samples)
            return [self._task_kind(slices, share * super_samples, objects, share * size_bytes, written_bytes)]
        cells = self._count_objects(scatters * slices)
        moved_bytes = size_bytes / scatters
        return [
            self._task_kind(scatters, 1 + len(self._manifest) / scatters, cells / scatters, moved_bytes, moved_bytes),
            self._task_kind(slices, scatters + cells / slices, objects, written_bytes, written_bytes),
        ]

    def _count_objects(self, parts: int) -> int:
        """Return the number of super-samples written by ``parts`` parts, which share none."""
        return parts * math.ceil(self._size_bytes / parts / self._object_bytes) if parts else 0

    def _task_kind(self, count: int, gets: float, puts: float, read_bytes: float, written_bytes: float) -> _TaskKind:
        """Return tasks with their requests, including those for the manifest and the records."""
        return _TaskKind(count, gets + 2, puts + 1 + puts // RECORD_EVERY_OBJECTS, read_bytes, written_bytes)

    def _forecast_ranges(self, slices: int) -> tuple[float, float]:
        """Return the GET requests and bytes of one slice that is read by ranges."""
        manifest = self._manifest
        limits = ReadLimits(slot_bytes=self._memory.group_bytes(manifest), range_bytes=manifest.largest_bytes)
        sharding = RankSharding(samples=manifest.samples, batch_size=1, world_size=slices)
        forecast = forecast_groups(manifest, manifest.schema, limits, sharding)
        return forecast.requests, forecast.size_bytes

    def _sum_plan(self, way: Way, parts: tuple[int, int], kinds: Sequence[_TaskKind], problem: str) -> EpochPlan:
        config, store = self._config, self._config.store
        total = {name: math.ceil(sum(kind.count * getattr(kind, name) for kind in kinds)) for name in _TOTALS}
        gets, puts, read_bytes, written_bytes = total.values()
        requests = gets * store.request_dollars(Operation.GET) + puts * store.request_dollars(Operation.PUT)
        transfer_dollars = store.transfer_dollars(
            read_bytes=read_bytes, written_bytes=written_bytes, egress="same_region"
        )
        return EpochPlan(
            way=way,
            slices=parts[0],
            scatters=parts[1],
            object_bytes=self._object_bytes,
            **total,
            store_dollars=requests + transfer_dollars,
            function_dollars=sum(kind.count * config.task_dollars(kind.seconds) for kind in kinds),
            task_seconds=max(kind.seconds for kind in kinds),
            seconds=sum(math.ceil(kind.count / config.concurrency) * kind.seconds for kind in kinds),
            problem=problem,
        )
