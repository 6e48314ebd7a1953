"""Advice for a training: settings from closed forms, each checked in the simulator before it is suggested."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from stoker._base.sizes import MAX_BYTES, format_bytes, format_count
from stoker._cache.disk_folder import BLOCK_BYTES
from stoker._fetch.config import Continuous
from stoker._format.manifest import Manifest
from stoker.errors import ConfigError, MemoryBudgetError, StokerError
from stoker_sim._bucket import synthetic_manifest
from stoker_sim._caches import PlannedCache
from stoker_sim._cluster import ClusterModel
from stoker_sim._full import predict_full
from stoker_sim._predict import Prediction, predict, predict_later_seconds
from stoker_sim._training import PlannedTraining

_MIB = 1 << 20
_MIN_SUPER_SAMPLE_BYTES, _MAX_SUPER_SAMPLE_BYTES = _MIB, 32 * _MIB
"""Suggested size of a super-sample. Larger reads into fresh memory are three to five times slower."""
_SMALL_DATASET_MIN_BYTES = 64 << 10
"""Minimum size of a super-sample of a small data set, which has few of them at any size."""
_TRANSFER_PER_FIRST_BYTE = 8
"""Ratio of transfer time to time to the first byte at which a request is efficient."""
_RATE_RESERVE_FACTOR = 1.5
"""Reserve factor for the bytes of a request where the bucket limits the request rate."""
_TOO_SMALL_FACTOR, _TOO_LARGE_FACTOR = 2.5, 4.0
"""Factors below and above the right super-sample size from which packing again is worth it."""
_DEFAULT_WINDOW, _MIN_WINDOW = 8, 2
_MIN_WINDOWS_PER_RANK = 4
"""Minimum number of windows of a rank in an epoch; with fewer there is little to shuffle."""
_MIN_STALL = 0.01
"""Minimum stall worth a change, and minimum relative reduction of an epoch that makes a change worth it."""
_SLOTS_FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Multiples of a window's slots, tried in this order; the first that suffices is suggested."""
_FETCHES_IN_FLIGHT = 4
"""Super-samples in flight for which there should be room beside the window."""
_SIMULATED_STARTS = 6
"""Number of starts simulated for the range of the time to the first batch."""
_MEMORY_BYTES_PER_SECOND = 8e9
"""Rate of a copy out of a cache in memory."""
_LATE_FACTOR = 5.0
"""A bucket has a late tail if its slowest first byte takes more than this multiple of the median."""


_WARM_COMMAND = "Loader(tier=...) with the URL that `stoker warm proxy` prints: docs/tiers.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Memory and disk available on a node, the length of the run, and the first bytes measured.

    Attributes:
        memory_bytes: maximum memory of one rank's loader.
        disk_bytes: disk space of a node for a cache; 0 if there is no disk.
        disk_folder: folder of the cache on that disk.
        slowest_seconds: longest time to the first byte seen, in seconds.
        median_seconds: median time to the first byte, in seconds.
        epochs: number of epochs of the run.

    Raises:
        ConfigError: there is a disk, and its folder cannot be written into ``cache="disk:…"``.
    """

    memory_bytes: int
    disk_bytes: int = 0
    disk_folder: str = "/mnt/nvme/stoker"
    slowest_seconds: float = 0.0
    median_seconds: float = 0.0
    epochs: int = 10

    def __post_init__(self) -> None:
        if self.disk_bytes and (not self.disk_folder or set(self.disk_folder) & set('?"\\\0')):
            raise ConfigError(f'disk_folder {self.disk_folder!r} is empty or contains ?, " or \\: name another folder')


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The suggested value of one setting.

    Attributes:
        name: name of the setting.
        given: its value now.
        advised: the suggested value; equal to ``given`` if nothing should change.
        reason: reason for the suggested value.
        command: command or argument of ``Loader`` that changes it; empty if there is nothing to change.
    """

    name: str
    given: str
    advised: str
    reason: str
    command: str = ""

    @property
    def is_change(self) -> bool:
        """Whether the suggested value differs from the present one."""
        return self.given != self.advised


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Suggestions for a workload, with predictions before and after.

    Attributes:
        suggestions: super-sample size, window, schedule, memory, cache and warm tier, in this order.
        given: prediction for the present settings; None if a loader refuses them.
        refused: message of the error with which a loader refuses them, or ``""``.
        advised: prediction with all suggestions followed.
        workload: the workload with all suggestions followed.
    """

    suggestions: tuple[Suggestion, ...]
    given: Prediction | None
    refused: str
    advised: Prediction
    workload: PlannedTraining = field(repr=False)


def advise(given: PlannedTraining, resources: Resources) -> Advice:
    """Return suggestions for the settings of a workload.

    Args:
        given: the workload with its present settings.
        resources: memory and disk that the suggestions may use.

    Raises:
        MemoryBudgetError: the memory is too small for any order of this data set.
    """
    if given.feed.order.shuffle == "full":
        found = predict_full(given)
        suggestions = [_describe_cluster(given, given.cluster)] if given.cluster is not None else []
        return Advice(suggestions=tuple(suggestions), given=found, refused="", advised=found, workload=given)
    before, problem = _try_predict(given)
    workload, suggestions = given, list[Suggestion]()
    for step in (
        _advise_super_sample_size,
        _advise_window,
        _advise_schedule,
        _advise_memory,
        _advise_cache,
        _advise_warm_tier,
    ):
        workload, suggestion = step(workload, resources)
        suggestions.append(suggestion)
    if workload.cluster is not None:
        suggestions.append(_describe_cluster(workload, workload.cluster))
    advised = predict(workload, starts=_SIMULATED_STARTS)
    return Advice(suggestions=tuple(suggestions), given=before, refused=problem, advised=advised, workload=workload)


def _replace_settings(given: PlannedTraining, **settings: Any) -> PlannedTraining:
    """Return the workload with some settings of its loaders replaced."""
    return replace(given, feed=replace(given.feed, **settings))


def _try_predict(workload: PlannedTraining) -> tuple[Prediction | None, str]:
    try:
        return predict(workload, starts=_SIMULATED_STARTS), ""
    except StokerError as error:  # too little memory, or a link too slow for its super-samples
        return None, str(error)


def _advise_super_sample_size(given: PlannedTraining, resources: Resources) -> tuple[PlannedTraining, Suggestion]:
    """Suggest a super-sample size if the present one is far from the right one."""
    manifest = given.manifest
    average = manifest.size_bytes / len(manifest)
    good = _suitable_super_sample_bytes(given, resources)
    average_text, is_small = format_bytes(average), average < good / _TOO_SMALL_FACTOR
    if (
        not is_small
        and average <= _TOO_LARGE_FACTOR * good
        and manifest.largest_bytes <= 2 * _max_slot_bytes(resources)
    ):
        reason = "requests spend most of their time on transfer, and enough super-samples fit into the memory"
        return given, Suggestion("super-sample size", average_text, average_text, reason)
    if not is_small and manifest.samples < 2 * len(manifest):
        reason = "samples are as large as super-samples: divide them, for example volumes into crops, to shuffle better"
        return given, Suggestion("super-sample size", average_text, average_text, reason)
    if is_small:
        reason = "fewer requests, which spend most of their time on transfer, and still enough objects to shuffle"
        command = f"stoker compact URL --super-sample-bytes {good}"
    else:
        reason = "smaller ones leave memory to fetch ahead, and shuffle better"
        command = f"stoker pack SOURCE URL --super-sample-bytes {good}"
    suggestion = Suggestion("super-sample size", average_text, format_bytes(good), reason, command)
    return replace(given, manifest=_resize_super_samples(manifest, good)), suggestion


def _suitable_super_sample_bytes(given: PlannedTraining, resources: Resources) -> int:
    """Return a power of two that is large enough for the bucket, and small enough for the memory and for shuffling."""
    rate = min(given.bucket.connection_bytes_per_second, given.node_bytes_per_second)
    wanted = max(_TRANSFER_PER_FIRST_BYTE * resources.median_seconds * rate, _min_request_bytes(given))
    share = given.manifest.size_bytes / given.feed.world_size / (_DEFAULT_WINDOW * _MIN_WINDOWS_PER_RANK)
    most = min(_MAX_SUPER_SAMPLE_BYTES, _max_slot_bytes(resources), max(share, _SMALL_DATASET_MIN_BYTES))
    chosen = min(max(wanted, _MIN_SUPER_SAMPLE_BYTES), most)
    return max(1 << round(math.log2(chosen)), math.ceil(given.sample_bytes))


def _min_request_bytes(given: PlannedTraining) -> float:
    """Return the minimum bytes of a request with which the request rate does not limit the ranks."""
    needed = given.feed.world_size * given.samples_per_second * given.sample_bytes
    return _RATE_RESERVE_FACTOR * needed / given.bucket.requests_per_second


def _max_slot_bytes(resources: Resources) -> int:
    """Return the maximum size of a super-sample with which twice a window and the fetches in flight fit."""
    return max(1, resources.memory_bytes // (2 * (_DEFAULT_WINDOW + _FETCHES_IN_FLIGHT)))


def _resize_super_samples(manifest: Manifest, size_bytes: int) -> Manifest:
    """Return the manifest of a data set of about the same samples and bytes, in super-samples of another size."""
    samples = max(1, round(size_bytes * manifest.samples / manifest.size_bytes))
    count = max(1, round(manifest.samples / samples))
    samples = max(1, manifest.samples // count)
    return synthetic_manifest(
        super_samples=count, samples=samples, super_sample_bytes=max(1, manifest.size_bytes // count)
    )


def _advise_window(given: PlannedTraining, resources: Resources) -> tuple[PlannedTraining, Suggestion]:
    """Suggest at least the default window, or the largest that fits into the memory."""
    order = given.feed.order
    window = max(order.window, _DEFAULT_WINDOW)
    while window > _MIN_WINDOW and _min_memory_bytes(given, window) > resources.memory_bytes:
        window //= 2
    reason = (
        "shuffles well and costs little"
        if window >= _DEFAULT_WINDOW
        else "the largest window that fits into the memory"
    )
    command = f"Loader(window={window})" if window != order.window else ""
    suggestion = Suggestion("window", str(order.window), str(window), reason, command)
    return _replace_settings(given, order=replace(order, window=window)), suggestion


def _advise_schedule(given: PlannedTraining, resources: Resources) -> tuple[PlannedTraining, Suggestion]:
    """Suggest the continuous schedule, which is never worse than another."""
    schedule, reason = given.feed.schedule, "fetches as far ahead as the memory allows, across epochs"
    command = "" if isinstance(schedule, Continuous) else "leave out schedule="
    suggestion = Suggestion("schedule", type(schedule).__name__, "Continuous", reason, command)
    return _replace_settings(given, schedule=Continuous()), suggestion


def _min_memory_bytes(given: PlannedTraining, window: int, factor: float = 1.25) -> int:
    """Return the memory that ``factor`` times a window's slots and the fetches in flight take, in bytes."""
    feed, manifest = given.feed, given.manifest
    order = replace(feed.order, window=window)
    plan = _replace_settings(given, order=order, memory_bytes=MAX_BYTES).slots
    request_bytes = min(manifest.largest_bytes, feed.fetch.max_request_bytes)
    least = sum(math.ceil(size_bytes / plan.slot_bytes) for size_bytes in (manifest.largest_bytes, request_bytes))
    slots = math.ceil(factor * plan.window_slots) + max(math.ceil(_FETCHES_IN_FLIGHT * plan.item_slots), least)
    return manifest.file_bytes + feed.held_bytes + slots * plan.slot_bytes


def _max_memory_bytes(given: PlannedTraining) -> int:
    """Return the maximum memory a loader can use: a window, a whole epoch ahead of it, and hedges, in bytes."""
    return _replace_settings(given, memory_bytes=MAX_BYTES).slots.size_bytes


def _advise_memory(given: PlannedTraining, resources: Resources) -> tuple[PlannedTraining, Suggestion]:
    """Suggest the least memory with which an epoch takes about as long as with all available memory.

    Raises:
        MemoryBudgetError: the memory is too small even for the window.
    """
    window, memory_bytes = given.feed.order.window, given.feed.memory_bytes
    least = _min_memory_bytes(given, window, 1.0)
    most = min(resources.memory_bytes, max(least, _max_memory_bytes(given)))
    if most < least:
        raise MemoryBudgetError(
            f"no loader of this data set fits into the {format_bytes(most)} available to a rank: window {window} with "
            f"super-samples of {format_bytes(given.manifest.largest_bytes)} takes {format_bytes(least)}; plan with "
            "more memory (--memory) or with fewer ranks on a node"
        )
    best_seconds = predict_later_seconds(_replace_settings(given, memory_bytes=most))
    chosen = most
    for factor in _SLOTS_FACTORS:
        size_bytes = _round_up(_min_memory_bytes(given, window, factor), 16 * _MIB)
        if size_bytes >= most:
            break
        later_seconds = predict_later_seconds(_replace_settings(given, memory_bytes=size_bytes))
        if later_seconds <= best_seconds * (1 + _MIN_STALL / 2):
            chosen = size_bytes
            break
    fits = memory_bytes <= resources.memory_bytes
    reason = f"with {format_bytes(chosen)} training waits as little as with all available memory"
    if not fits:
        reason = f"only {format_bytes(resources.memory_bytes)} are available, and {reason}"
    advised = memory_bytes if fits and memory_bytes >= chosen else chosen
    command = "" if advised == memory_bytes else f"Loader(memory={_format_memory(chosen)})"
    suggestion = Suggestion("memory", format_bytes(memory_bytes), format_bytes(advised), reason, command)
    return _replace_settings(given, memory_bytes=advised), suggestion


def _format_memory(size_bytes: int) -> str:
    return str(size_bytes) if size_bytes % _MIB else f'"{size_bytes // _MIB}MiB"'


def _round_up(size_bytes: int, unit_bytes: int) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes


def _advise_cache(given: PlannedTraining, resources: Resources) -> tuple[PlannedTraining, Suggestion]:
    """Suggest a cache if it makes epochs noticeably shorter."""
    none = replace(given, cache=None)
    without = predict(none).later
    current_text = "none" if given.cache is None else format_bytes(given.cache.size_bytes)
    if resources.epochs < 2:
        reason = "in a single epoch nothing is read again"
    elif given.cluster is not None:
        reason = f"the cluster cache serves {given.hit_rate:.0%} of the reads of later epochs"
    elif without.stall < _MIN_STALL:
        reason = f"without a cache training waits {without.stall:.1%} of the time"
    else:
        for cache in _candidate_caches(given, resources):
            cached = replace(given, cache=cache)
            prediction = predict(cached)
            later = prediction.later
            shortens = later.seconds < (1 - _MIN_STALL) * without.seconds
            halves = later.wait_seconds < without.wait_seconds / 2
            if halves if cache.is_per_rank else shortens:
                place = "memory:" if cache.is_per_rank else f"disk:{resources.disk_folder}"
                advised = f"{place.partition(':')[0]}, {format_bytes(cache.size_bytes)}"
                reason = (
                    f"serves {prediction.hit_rate:.0%} of the reads of later epochs: stall {later.stall:.0%} instead "
                    f"of {without.stall:.0%}, epochs take {later.seconds / without.seconds:.0%} of the time"
                )
                command = f'Loader(cache="{place}?limit={_format_limit(cache.size_bytes)}")'
                return cached, Suggestion("cache", current_text, advised, reason, command)
        has_disk = resources.disk_bytes > 0
        reason = "too small to help" if has_disk else "give the size of a disk with --disk to plan a cache on it"
    return none, Suggestion("cache", current_text, "none", reason)


def _candidate_caches(given: PlannedTraining, resources: Resources) -> Iterator[PlannedCache]:
    """Yield a cache in the remaining memory and one on the disk, each if a super-sample fits into a rank's part."""
    needed_bytes = math.ceil(1.02 * given.manifest.size_bytes)
    memory_bytes = min(resources.memory_bytes - given.feed.memory_bytes, needed_bytes)
    disk_bytes = min(resources.disk_bytes, needed_bytes)
    least_bytes = _round_up(given.manifest.largest_bytes, BLOCK_BYTES)
    if memory_bytes >= least_bytes:
        yield PlannedCache(size_bytes=memory_bytes, bytes_per_second=_MEMORY_BYTES_PER_SECOND, is_per_rank=True)
    if disk_bytes // given.ranks_per_node >= least_bytes:
        yield PlannedCache(size_bytes=disk_bytes)


def _format_limit(size_bytes: int) -> str:
    """Return a cache's limit in MiB; if small, in bytes, since rounding could leave no room for a super-sample."""
    return str(size_bytes) if size_bytes < 100 * _MIB else f"{size_bytes // _MIB}MiB"


def _describe_cluster(given: PlannedTraining, cluster: ClusterModel) -> Suggestion:
    """Return which part of the data set a cluster cache holds, and the limit that holds all of it."""
    manifest = given.manifest
    limit = f"{format_bytes(cluster.limit_bytes)} a node"
    enough_bytes = cluster.capacity.sufficient_bytes(len(manifest), manifest.size_bytes)
    held = format_bytes(given.hit_rate * manifest.size_bytes)
    reason = f"{held}, {given.hit_rate:.1%} of the data set, on {format_count(cluster.machines, 'node')}"
    if cluster.limit_bytes < enough_bytes:
        reason += f"; limit={_format_limit(_round_up(enough_bytes, _MIB))} a node is enough for all of it"
    return Suggestion("cluster", limit, limit, reason)


def _advise_warm_tier(given: PlannedTraining, resources: Resources) -> tuple[PlannedTraining, Suggestion]:
    """Suggest the warm tier if late answers of the bucket are the only cause of the stall.

    The tier saves time, not money: its functions cost more than reads from a bucket of the same region.
    """
    prediction, is_worth = predict(given), False
    late = resources.slowest_seconds > _LATE_FACTOR * max(1e-9, resources.median_seconds)
    if prediction.later.stall < _MIN_STALL:
        reason = f"without it training waits {prediction.later.stall:.1%} of the time"
    elif prediction.bound.limit == "bandwidth":
        reason = "the node's network is full, and reads from functions would use the same network"
    elif prediction.bound.limit in ("requests", "request rate"):
        reason = "the number of requests is the limit; larger super-samples reduce it at no cost"
    elif given.cache is not None or given.cluster is not None:
        reason = "the cache is nearer and costs nothing"
    elif resources.epochs < 2:
        reason = "in a single epoch nothing is read again"
    elif given.manifest.size_bytes / len(given.manifest) < _MIN_SUPER_SAMPLE_BYTES:
        reason = "to cut super-samples below 1 MiB into shards costs more than it saves"
    elif late:
        is_worth = True
        reason = "the bucket answers late; functions answer repeated reads sooner, for more money"
    else:
        reason = "late answers are rare enough for hedged requests"
    advised, command = ("on", _WARM_COMMAND) if is_worth else ("off", "")
    return given, Suggestion("warm tier", "off", advised, reason, command)
