"""Prediction of a ``full`` order beyond the memory of loaders, with a cluster cache that holds the whole data set.

Its epochs are not simulated, since every step needs samples of all super-samples, but computed: in the first one,
loaders fetch each super-sample once, in the order in which steps need them; in later ones they copy ranges of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from stoker._fetch.mapped_objects import STAGED_OBJECTS
from stoker._memory.ring import ALIGNMENT_BYTES
from stoker.errors import ConfigError
from stoker_sim._predict import (
    START_SPREAD,
    ClusterForecast,
    EpochForecast,
    Prediction,
    epoch_bound,
    median_first_byte,
)
from stoker_sim._training import PlannedTraining

_MAX_FETCHES = 200_000
"""Maximum number of super-samples of all ranks of which the fetches are computed; else one stands for several."""
_MAX_DRAWS = 8
"""Draws for each super-sample after which hardly one is missing."""


def predict_full(workload: PlannedTraining) -> Prediction:
    """Compute a workload of shuffle ``full``.

    Raises:
        ConfigError: the data set fits into the memory of a loader, which then reads super-samples whole.
    """
    manifest, feed, cluster = workload.manifest, workload.feed, workload.cluster
    assert cluster is not None  # noqa: S101 - else the workload is refused
    if manifest.size_bytes <= feed.memory_bytes:
        raise ConfigError(
            f"with shuffle 'full', a data set of {manifest.size_bytes:,} bytes fits into a loader's memory of "
            f"{feed.memory_bytes:,}, and later epochs read nothing: plan a larger data set, or less loader memory"
        )
    step_seconds = max(workload.step_seconds, _copy_seconds(workload))
    head_bytes, head_seconds = _read_heads(workload)
    batch_seconds, seconds = _fetch_epoch(workload, step_seconds)
    begun = workload.start_seconds + head_seconds
    first = EpochForecast(
        seconds=begun + seconds,
        wait_seconds=begun + seconds - workload.steps * workload.step_seconds,
        requests=len(manifest) * (workload.mean_requests + 1),
        read_bytes=manifest.size_bytes + head_bytes,
        counted_seconds=seconds - batch_seconds - step_seconds,
        counted_compute_seconds=(workload.steps - 1) * workload.step_seconds,
    )
    later = EpochForecast(
        seconds=workload.steps * step_seconds,
        wait_seconds=workload.steps * (step_seconds - workload.step_seconds),
        requests=0.0,
        read_bytes=0.0,
        counted_seconds=(workload.steps - 1) * step_seconds,
        counted_compute_seconds=(workload.steps - 1) * workload.step_seconds,
    )
    network_bytes = cluster.remote_share * manifest.size_bytes
    low, high = workload.start_range_seconds or (workload.start_seconds, workload.start_seconds)
    return Prediction(
        first_batch_seconds=begun + batch_seconds,
        first_batch_range_seconds=(
            (low + head_seconds + batch_seconds) / START_SPREAD,
            (high + head_seconds + batch_seconds) * START_SPREAD,
        ),
        first=first,
        later=later,
        bound=epoch_bound(workload, STAGED_OBJECTS, 1.0),
        hit_rate=1.0,
        simulated=0.0,
        slots=0,
        cluster=ClusterForecast(
            held_share=1.0,
            remote_share=cluster.remote_share,
            first_network_bytes=2 * network_bytes,  # given whole, then read by ranges
            later_network_bytes=network_bytes,
        ),
    )


def _copy_seconds(workload: PlannedTraining) -> float:
    """Return the time in which the ranks of a node copy a batch each: over the network, and by their processors."""
    cluster, model = workload.cluster, workload.processor
    assert cluster is not None  # noqa: S101 - as above
    batch_size, ranks = workload.feed.batch_size, workload.ranks_per_node
    batch_bytes = batch_size * workload.sample_bytes
    network_seconds = ranks * batch_bytes * cluster.remote_share / cluster.network_bytes_per_second
    processor_seconds = batch_bytes * model.fetched_byte_seconds + batch_size * model.sample_seconds
    return max(network_seconds, processor_seconds * max(1.0, ranks / model.cores))


def _read_heads(workload: PlannedTraining) -> tuple[float, float]:
    """Return the bytes of all heads, of which each rank reads a part from the bucket for all, and the time of that."""
    rows, concurrency = workload.manifest.rows, workload.feed.fetch.max_concurrency
    aligned = -(-rows.head_bytes.astype(np.int64) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    head_bytes = float(np.minimum(rows.size_bytes, aligned).sum())
    ranks = workload.feed.world_size
    rounds = -(-len(workload.manifest) // (concurrency * ranks))
    rate = ranks * workload.node_bytes_per_second / workload.ranks_per_node
    limit_seconds = len(workload.manifest) / workload.bucket.requests_per_second
    return head_bytes, max(rounds * median_first_byte(workload) + head_bytes / rate, limit_seconds)


def _fetch_epoch(workload: PlannedTraining, step_seconds: float) -> tuple[float, float]:
    """Return the time until all super-samples of the first step are there, and until the end of the last step.

    A loader reads groups of one batch, then two, four and so on, and fetches a few super-samples of them at a time, in
    ascending order. Ranks that lack the same one at the same time wait for each other.
    """
    count, ranks, steps = len(workload.manifest), workload.feed.world_size, workload.steps
    scale = max(1.0, count * ranks / _MAX_FETCHES)
    objects, batch_size = math.ceil(count / scale), max(1, round(workload.feed.batch_size / scale))
    groups = [2**number for number in range(steps.bit_length())]
    fetches = _Fetches(workload, scale)
    rng = np.random.default_rng(0)
    ready_seconds = first_seconds = ends_seconds = 0.0
    first = 1
    for batches in groups:
        samples = min(batches * batch_size, _MAX_DRAWS * objects)
        wanted = [np.unique(rng.integers(0, objects, samples)).tolist() for _ in range(ranks)]
        ready_seconds = max(ready_seconds, fetches.fetch(wanted))
        first_seconds = first_seconds or ready_seconds
        ends_seconds = max(ends_seconds, ready_seconds + (steps - first + 1) * step_seconds)
        first += batches
    return first_seconds, ends_seconds


class _Fetches:
    """Fetches of super-samples by all ranks, each of which has a few at a time.

    Args:
        workload: the training.
        scale: number of super-samples that one stands for.
    """

    def __init__(self, workload: PlannedTraining, scale: float) -> None:
        manifest, bucket, cluster = workload.manifest, workload.bucket, workload.cluster
        assert cluster is not None  # noqa: S101 - else the workload is refused
        object_bytes = manifest.size_bytes / len(manifest)
        requests, ranks = workload.mean_requests, workload.ranks_per_node
        transfer_seconds = object_bytes / requests / bucket.connection_bytes_per_second
        self._seconds = scale * (median_first_byte(workload) + transfer_seconds)
        self._copy_seconds = scale * cluster.remote_share * object_bytes * ranks / cluster.network_bytes_per_second
        node_rate = min(workload.node_bytes_per_second, bucket.total_bytes_per_second / workload.nodes)
        self._link_seconds = scale * object_bytes / node_rate
        self._queue_seconds = scale * requests * workload.nodes / bucket.requests_per_second
        self._ranks_per_node = ranks
        self._nodes_free = [0.0] * workload.nodes
        self._ranks_free = [[0.0] * STAGED_OBJECTS for _ in range(workload.feed.world_size)]
        self._arrivals: dict[int, float] = {}

    def fetch(self, wanted: Sequence[Sequence[int]]) -> float:
        """Return the time at which each rank has had the super-samples that it wants, in their order."""
        waiting = [(free, rank) for rank, slots in enumerate(self._ranks_free) for free in slots]
        heapq.heapify(waiting)
        lists, ended = [iter(each) for each in wanted], [list[float]() for _ in wanted]
        while waiting:
            now, rank = heapq.heappop(waiting)
            number = next(lists[rank], None)
            if number is None:
                ended[rank].append(now)
            else:
                heapq.heappush(waiting, (self._fetch(number, now, rank), rank))
        self._ranks_free = ended
        return max(map(max, ended))

    def _fetch(self, number: int, now: float, rank: int) -> float:
        """Return the time at which a rank has a super-sample that it asks for."""
        if (arrival := self._arrivals.get(number)) is not None:
            return now if arrival <= now else arrival + self._copy_seconds
        node = rank // self._ranks_per_node
        each_seconds = max(self._link_seconds, self._queue_seconds)
        self._nodes_free[node] = max(now, self._nodes_free[node]) + each_seconds
        arrival = self._arrivals[number] = max(now + self._seconds, self._nodes_free[node])
        return arrival
