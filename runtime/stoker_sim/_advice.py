"""What to change, and what it is worth: settings from closed forms, tried in the simulator before they are advised."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from stoker._base.sizes import MOST_BYTES, format_bytes
from stoker._cache.disk_folder import BLOCK_BYTES
from stoker._fetch.config import Continuous
from stoker._format.manifest import Manifest
from stoker._memory.budget import window_slots
from stoker._memory.ring import ALIGNMENT_BYTES
from stoker.errors import BudgetError, ConfigError, StokerError
from stoker_sim._bucket import described
from stoker_sim._caches import Cache
from stoker_sim._predict import Prediction, Workload, predict

_MIB = 1 << 20
_LEAST_BYTES, _MOST_BYTES = _MIB, 32 * _MIB
"""Of a super-sample. Reading more at a time into fresh memory is three to five times slower."""
_SMALLEST_BYTES = 64 << 10
"""Of a super-sample of a data set so small that it has too few in any case."""
_TRANSFER_PER_FIRST_BYTE = 8
"""A request is well spent if its bytes take about so many times as long as waiting for the first of them."""
_SPARE_RATE = 1.5
"""Bytes of a request, for each that would be enough where a bucket limits the rate of requests."""
_TOO_SMALL, _TOO_LARGE = 2.5, 4.0
"""Super-samples that are so many times smaller or larger than they should be are worth packing again."""
_WINDOW, _LEAST_WINDOW = 8, 2
_WINDOWS_EACH = 4
"""A rank should have at least so many windows of super-samples in an epoch, or there is little to shuffle."""
_STALL = 0.01
"""A stall below this is not worth a change; nor is a change that makes an epoch shorter by a smaller part of it."""
_SLOTS_FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Of a window's slots, tried in this order: the least that is enough is advised."""
_IN_FLIGHT = 4
"""Super-samples on their way, beside a window's, for which there should be room."""
_STARTS = 6
"""Simulated for the range of a first batch."""
_MEMORY_BYTES_PER_SECOND = 8e9
"""Of a copy out of a cache in memory."""
_LATE = 5.0
"""A bucket has a tail if its slowest first byte is so many times the median."""


_WARM_COMMAND = "Loader(tier=...) with the URL that `stoker warm proxy` prints: docs/tiers.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a node and its ranks can spare, and what a late first byte is like.

    Attributes:
        memory_bytes: for a rank's loader, at most.
        disk_bytes: of a node, for a cache; 0 if there is no disk.
        disk_folder: where.
        slowest_seconds: of the first bytes seen.
        median_seconds: of them.
        epochs: that the run is to have.

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
            raise ConfigError(f'disk_folder {self.disk_folder!r} is empty, or has one of ?, ", \\ in it: name another')


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One setting.

    Attributes:
        name: of the setting.
        given: as it is.
        advised: as it should be; equal to ``given`` if it is right.
        reason: why.
        command: that changes it, or the argument of ``Loader``; empty if there is nothing to change.
    """

    name: str
    given: str
    advised: str
    reason: str
    command: str = ""

    @property
    def is_change(self) -> bool:
        """Whether something should be done."""
        return self.given != self.advised


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to change.

    Attributes:
        suggestions: super-sample size, window, schedule, memory, cache and warm tier, in this order.
        given: what is predicted as things are; None if that cannot run.
        refused: why it cannot, else ``""``.
        advised: what is predicted when all suggestions are followed.
        workload: that does.
    """

    suggestions: tuple[Suggestion, ...]
    given: Prediction | None
    refused: str
    advised: Prediction
    workload: Workload = field(repr=False)


def advise(given: Workload, resources: Resources) -> Advice:
    """Return what to change in a workload.

    Raises:
        BudgetError: the resources are too little for any order of this data set.
    """
    before, refused = _tried(given)
    workload, suggestions = given, list[Suggestion]()
    for step in (_repacked, _windowed, _continuous, _with_memory, _cached, _warm):
        workload, suggestion = step(workload, resources)
        suggestions.append(suggestion)
    advised = predict(workload, starts=_STARTS)
    return Advice(suggestions=tuple(suggestions), given=before, refused=refused, advised=advised, workload=workload)


def _with(given: Workload, **settings: Any) -> Workload:
    """Return the workload with other settings of its loaders."""
    return replace(given, feed=replace(given.feed, **settings))


def _tried(workload: Workload) -> tuple[Prediction | None, str]:
    try:
        return predict(workload, starts=_STARTS), ""
    except StokerError as error:  # too little memory, or a link on which its super-samples come too late
        return None, str(error)


def _repacked(given: Workload, resources: Resources) -> tuple[Workload, Suggestion]:
    """Return the workload with super-samples of a good size, if theirs is far from it."""
    manifest = given.manifest
    average, good = manifest.size_bytes / len(manifest), _good_bytes(given, resources)
    shown, is_small = format_bytes(average), average < good / _TOO_SMALL
    if not is_small and average <= _TOO_LARGE * good and manifest.largest_bytes <= 2 * _slot_bytes(resources):
        reason = "a request is mostly transfer, and the memory holds enough of them"
        return given, Suggestion("super-sample size", shown, shown, reason)
    if is_small:
        reason = "fewer requests, each of which is mostly transfer, and still enough of them to shuffle"
        command = f"stoker compact URL --super-sample-bytes {good}"
    else:
        reason = "smaller ones leave memory to look ahead, and more to shuffle"
        command = f"stoker pack SOURCE URL --super-sample-bytes {good}"
    suggestion = Suggestion("super-sample size", shown, format_bytes(good), reason, command)
    return replace(given, manifest=_alike(manifest, good)), suggestion


def _good_bytes(given: Workload, resources: Resources) -> int:
    """Return a power of two: large enough for the bucket, small enough for the memory and for shuffling."""
    rate = min(given.bucket.connection_bytes_per_second, given.node_bytes_per_second)
    wanted = max(_TRANSFER_PER_FIRST_BYTE * resources.median_seconds * rate, _bytes_of_a_request(given))
    share = given.manifest.size_bytes / given.feed.world_size / (_WINDOW * _WINDOWS_EACH)
    most = min(_MOST_BYTES, _slot_bytes(resources), max(share, _SMALLEST_BYTES))
    chosen = min(max(wanted, _LEAST_BYTES), most)
    return max(1 << round(math.log2(chosen)), math.ceil(given.sample_bytes))


def _bytes_of_a_request(given: Workload) -> float:
    """Return how many bytes a request has to bring for all ranks to compute without waiting for the request rate."""
    needed = given.feed.world_size * given.samples_per_second * given.sample_bytes
    return _SPARE_RATE * needed / given.bucket.requests_per_second


def _slot_bytes(resources: Resources) -> int:
    """Return how large a super-sample may be for a window and as many again in flight to fit."""
    return max(1, resources.memory_bytes // (2 * (_WINDOW + _IN_FLIGHT)))


def _alike(manifest: Manifest, size_bytes: int) -> Manifest:
    """Return a data set of about as many samples and bytes, in super-samples of another size."""
    samples = max(1, round(size_bytes * manifest.samples / manifest.size_bytes))
    count = max(1, round(manifest.samples / samples))
    samples = max(1, manifest.samples // count)
    return described(super_samples=count, samples=samples, super_sample_bytes=max(1, manifest.size_bytes // count))


def _windowed(given: Workload, resources: Resources) -> tuple[Workload, Suggestion]:
    """Return the workload with the default window, or the largest that fits."""
    order = given.feed.order
    window = max(order.window, _WINDOW)
    while window > _LEAST_WINDOW and _least_memory(given, window) > resources.memory_bytes:
        window //= 2
    reason = "mixes well and costs little" if window >= _WINDOW else "the largest for which there is memory"
    command = f"Loader(window={window})" if window != order.window else ""
    suggestion = Suggestion("window", str(order.window), str(window), reason, command)
    return _with(given, order=replace(order, window=window)), suggestion


def _continuous(given: Workload, resources: Resources) -> tuple[Workload, Suggestion]:
    """Return the workload with the schedule that is never worse than another."""
    schedule, reason = given.feed.schedule, "fetch as far ahead as the memory goes, across epochs"
    command = "" if isinstance(schedule, Continuous) else "leave schedule= out"
    suggestion = Suggestion("schedule", type(schedule).__name__, "Continuous", reason, command)
    return _with(given, schedule=Continuous()), suggestion


def _least_memory(given: Workload, window: int, factor: float = 1.25) -> int:
    """Return the memory with which ``factor`` times a window's slots, and some in flight, fit."""
    feed, manifest = given.feed, given.manifest
    order = replace(feed.order, window=window)
    slot_bytes = _rounded(manifest.largest_bytes, ALIGNMENT_BYTES)
    slots = math.ceil(factor * window_slots(len(manifest), order, feed.dealing(manifest.samples))) + _IN_FLIGHT
    return manifest.file_bytes + feed.held_bytes + slots * slot_bytes


def _most_memory(given: Workload) -> int:
    """Return the memory that a loader can fill: a window, a whole epoch ahead of it, and hedges."""
    return _with(given, memory_bytes=MOST_BYTES).slots.size_bytes


def _with_memory(given: Workload, resources: Resources) -> tuple[Workload, Suggestion]:
    """Return the workload with the least memory with which an epoch takes about as long as with all that there is.

    Raises:
        BudgetError: there is not even enough for the window.
    """
    window, memory_bytes = given.feed.order.window, given.feed.memory_bytes
    least = _least_memory(given, window, 1.0)
    most = min(resources.memory_bytes, max(least, _most_memory(given)))
    if most < least:
        raise BudgetError(
            f"no loader of this data set fits into the {format_bytes(most)} that a rank may have: window {window} with "
            f"super-samples of {format_bytes(given.manifest.largest_bytes)} takes {format_bytes(least)}; plan with "
            "more memory (--memory), or with fewer ranks on a node"
        )
    best = predict(_with(given, memory_bytes=most)).later
    chosen = most
    for factor in _SLOTS_FACTORS:
        size_bytes = _rounded(_least_memory(given, window, factor), 16 * _MIB)
        if size_bytes >= most:
            break
        if predict(_with(given, memory_bytes=size_bytes)).later.seconds <= best.seconds * (1 + _STALL / 2):
            chosen = size_bytes
            break
    fits = memory_bytes <= resources.memory_bytes
    reason = f"{format_bytes(chosen)} is the least that waits as little as all that there is"
    if not fits:
        reason = f"there are {format_bytes(resources.memory_bytes)}, and {reason}"
    advised = memory_bytes if fits and memory_bytes >= chosen else chosen
    command = "" if advised == memory_bytes else f"Loader(memory={_written(chosen)})"
    suggestion = Suggestion("memory", format_bytes(memory_bytes), format_bytes(advised), reason, command)
    return _with(given, memory_bytes=advised), suggestion


def _written(size_bytes: int) -> str:
    return str(size_bytes) if size_bytes % _MIB else f'"{size_bytes // _MIB}MiB"'


def _rounded(size_bytes: int, unit_bytes: int) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes


def _cached(given: Workload, resources: Resources) -> tuple[Workload, Suggestion]:
    """Return the workload with a cache, if one is worth having."""
    none = replace(given, cache=None)
    without = predict(none).later
    said = "none" if given.cache is None else format_bytes(given.cache.size_bytes)
    if resources.epochs < 2:
        reason = "there is one epoch: nothing comes back"
    elif without.stall < _STALL:
        reason = f"training waits {without.stall:.1%} of the time without one"
    else:
        for cache in _caches(given, resources):
            cached = replace(given, cache=cache)
            found = predict(cached)
            later = found.later
            shortens = later.seconds < (1 - _STALL) * without.seconds
            halves = later.wait_seconds < without.wait_seconds / 2
            if halves if cache.is_of_rank else shortens:
                place = "memory:" if cache.is_of_rank else f"disk:{resources.disk_folder}"
                advised = f"{place.partition(':')[0]}, {format_bytes(cache.size_bytes)}"
                reason = (
                    f"serves {found.hit_rate:.0%} of later epochs: a stall of {later.stall:.0%} instead of "
                    f"{without.stall:.0%}, in {later.seconds / without.seconds:.0%} of the time"
                )
                command = f'Loader(cache="{place}?limit={_limit(cache.size_bytes)}")'
                return cached, Suggestion("cache", said, advised, reason, command)
        has_disk = resources.disk_bytes > 0
        reason = "too small to help" if has_disk else "name a disk with --disk: a node could keep what it reads"
    return none, Suggestion("cache", said, "none", reason)


def _caches(given: Workload, resources: Resources) -> Iterator[Cache]:
    """Yield a cache in what memory is left over, and one on the disk, where a super-sample fits into a rank's part."""
    needed_bytes = math.ceil(1.02 * given.manifest.size_bytes)
    memory_bytes = min(resources.memory_bytes - given.feed.memory_bytes, needed_bytes)
    disk_bytes = min(resources.disk_bytes, needed_bytes)
    least_bytes = _rounded(given.manifest.largest_bytes, BLOCK_BYTES)
    if memory_bytes >= least_bytes:
        yield Cache(size_bytes=memory_bytes, bytes_per_second=_MEMORY_BYTES_PER_SECOND, is_of_rank=True)
    if disk_bytes // given.ranks_per_node >= least_bytes:
        yield Cache(size_bytes=disk_bytes)


def _limit(size_bytes: int) -> str:
    """Return a cache's limit as a person writes it; a small one to the byte, since it may hold one super-sample."""
    return str(size_bytes) if size_bytes < 100 * _MIB else f"{size_bytes // _MIB}MiB"


def _warm(given: Workload, resources: Resources) -> tuple[Workload, Suggestion]:
    """Say whether functions that hold the data set in memory would help: where the bucket is late, and nothing else.

    They buy time, not money: beside a bucket of the same region they cost more than reading it.
    """
    found, is_worth = predict(given), False
    late = resources.slowest_seconds > _LATE * max(1e-9, resources.median_seconds)
    if found.later.stall < _STALL:
        reason = f"training waits {found.later.stall:.1%} of the time without it"
    elif found.bound.limit == "bandwidth":
        reason = "the node's network is full, and its functions would be behind it too"
    elif found.bound.limit in ("requests", "request rate"):
        reason = "requests are too many; larger super-samples cost nothing"
    elif given.cache is not None:
        reason = "the cache is nearer, and free"
    elif resources.epochs < 2:
        reason = "there is one epoch: nothing comes back"
    elif given.manifest.size_bytes / len(given.manifest) < _LEAST_BYTES:
        reason = "cutting up super-samples below 1 MiB costs more than it saves"
    elif late:
        is_worth = True
        reason = "the bucket answers late; what was read once comes sooner from functions, for more money"
    else:
        reason = "late answers are few enough to be asked for again"
    advised, command = ("on", _WARM_COMMAND) if is_worth else ("off", "")
    return given, Suggestion("warm tier", "off", advised, reason, command)
