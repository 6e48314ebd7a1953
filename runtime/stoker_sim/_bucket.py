"""Simulated buckets: timing without bytes, synthetic data sets, and shared network links.

A model can also be estimated from a real bucket: from durations in a file, or from a trace.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker._base.arguments import rename_arguments
from stoker._diagnostics.latency import BucketModel, RecordedLatency
from stoker._format.manifest import Manifest, ManifestRows, PackRun
from stoker._format.schema import Bytes, Schema
from stoker._trace.recording import TracedResponse, TraceEvent, read_values
from stoker.abc import ObjectInfo
from stoker.errors import ConfigError, NotFoundError, ServerError, ThrottledError

_RUN_ID = "0" * 16


def synthetic_manifest(
    *, super_samples: int, samples: int, super_sample_bytes: int, head_bytes: int = 4096
) -> Manifest:
    """Return the manifest of a synthetic data set whose super-samples are all alike.

    Args:
        super_samples: number of super-samples.
        samples: number of samples in each super-sample.
        super_sample_bytes: size of each super-sample, in bytes.
        head_bytes: size of each head, in bytes; cut to the size of the super-sample.

    Raises:
        ConfigError: a number is not positive, or does not fit into the format's 32 bits.
    """
    given = {"super_samples": super_samples, "samples": samples, "super_sample_bytes": super_sample_bytes}
    for name, number in given.items():
        if not 0 < number < 1 << 32:
            raise ConfigError(f"{name} must be in [1, 2**32), not {number}")
    full = np.ones(super_samples, "<u4")
    rows = ManifestRows(
        size_bytes=full * np.uint32(super_sample_bytes),
        samples=full * np.uint32(samples),
        head_bytes=full * np.uint32(min(head_bytes, super_sample_bytes)),
        head_crc32c=full * np.uint32(0),
        crc32c=full * np.uint32(0),
        tags=np.zeros((super_samples, 16), np.uint8),
    )
    schema = Schema({"data": Bytes()})
    return Manifest(dataset=_RUN_ID, version=1, schema=schema, rows=rows, runs=(PackRun(_RUN_ID, 0, super_samples),))


def without_checksums(manifest: Manifest) -> Manifest:
    """Return a copy of the manifest with all checksums 0, which is the checksum of objects without bytes."""
    rows = replace(manifest.rows, crc32c=np.zeros_like(manifest.rows.crc32c))
    return replace(manifest, rows=rows)


def create_size_lookup(manifest: Manifest) -> Callable[[str], int]:
    """Return a function from an object's key to its size in bytes, which raises KeyError for unknown keys."""
    if len(manifest.runs) > 1:
        return {manifest.key(row): int(manifest.rows.size_bytes[row]) for row in range(len(manifest))}.__getitem__
    # Keys end in the row number, so a dictionary of a million keys is not needed.
    first, prefix = manifest.runs[0].first_number, manifest.key(0).rpartition("/")[0]
    sizes = manifest.rows.size_bytes

    def of_one_run(key: str) -> int:
        folder, _, number = key.rpartition("/")
        if folder != prefix or not number.isdecimal() or not 0 <= int(number) - first < len(sizes):
            raise KeyError(key)
        return int(sizes[int(number) - first])

    return of_one_run


_ScheduledEnd = tuple[float, int, asyncio.Future[None]]
"""The common progress at which a request ends, a unique number, and the future that its caller awaits."""


class ProcessorSharing:
    """Processor sharing: all active requests are served at the same rate, which depends on their number.

    So a single number, the work done for each request so far, describes the progress of all. A request ends when that
    number has grown by the request's work (A. Demers, S. Keshav, S. Shenker, "Analysis and Simulation of a Fair
    Queueing Algorithm", SIGCOMM 1989, section 2). A request costs O(log n).

    Args:
        rate_of: function from the number of active requests to the rate of each, in units of work a second.
    """

    def __init__(self, rate_of: Callable[[int], float]) -> None:
        self._rate_of = rate_of
        self._work_done = 0.0
        self._advanced_seconds = 0.0
        self._active = 0
        self._numbers = count()
        self._ends: list[_ScheduledEnd] = []
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled: tuple[_ScheduledEnd, float] | None = None
        """The request for whose end the timer is set, and the rate assumed."""

    @property
    def next_end_seconds(self) -> float:
        """Loop time of the next end of a request if none begins or is cancelled before; infinity if none is active."""
        return math.inf if self._timer is None else self._timer.when()

    async def serve(self, work: float) -> None:
        """Return when this amount of work has been done; if cancelled, the rate is shared among the other requests."""
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._ends, (self._work_done + work, next(self._numbers), turn))
        self._active += 1
        self._schedule_next_end(loop)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():  # otherwise the request ended just before the cancellation
                self._advance(loop.time())
                self._active -= 1
                self._schedule_next_end(loop)
            raise

    def set_rate(self, rate: Callable[[int], float]) -> None:
        """Change the rate from now on; work that has been done stays done."""
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        self._rate_of = rate
        self._schedule_next_end(loop)

    def _current_rate(self) -> float:
        return self._rate_of(max(1, self._active))

    def _advance(self, now_seconds: float) -> None:
        self._work_done += (now_seconds - self._advanced_seconds) * self._current_rate()
        self._advanced_seconds = now_seconds

    def _schedule_next_end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the timer to the next end of a request that was not cancelled."""
        while self._ends and self._ends[0][2].done():
            heapq.heappop(self._ends)
        timed = (self._ends[0], self._current_rate()) if self._ends else None
        if timed == self._scheduled:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._scheduled, self._timer = timed, None
        if timed is not None:
            (end, _, _), rate = timed
            self._timer = loop.call_later(max(0.0, end - self._work_done) / rate, self._end_due)

    def _end_due(self) -> None:
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        self._work_done = max(self._work_done, self._ends[0][0])  # rounding may have left it slightly below
        self._scheduled = self._timer = None
        while self._ends and self._ends[0][0] <= self._work_done:
            turn = heapq.heappop(self._ends)[2]
            if not turn.done():
                turn.set_result(None)
                self._active -= 1
        self._schedule_next_end(loop)


class SharedLink(ProcessorSharing):
    """A network link: every transfer gets ``min(connection, total / transfers)`` bytes a second.

    Args:
        connection_bytes_per_second: maximum rate of one transfer.
        total_bytes_per_second: maximum rate of all transfers together.
    """

    def __init__(self, *, connection_bytes_per_second: float, total_bytes_per_second: float = math.inf) -> None:
        super().__init__(self._transfer_rate)
        self.connection_bytes_per_second = connection_bytes_per_second
        self.total_bytes_per_second = total_bytes_per_second

    def _transfer_rate(self, transfers: int) -> float:
        return min(self.connection_bytes_per_second, self.total_bytes_per_second / transfers)


class SimulatedBucket:
    """The state of a bucket that all nodes share: its bandwidth and its request rate.

    Args:
        model: latency, bandwidth, request rate and errors of the bucket.
        size_of: function from a key to the size of its object in bytes; raises KeyError if there is none.
        objects: content of all objects by key; None for objects without bytes.
    """

    def __init__(
        self, model: BucketModel, size_of: Callable[[str], int], objects: Mapping[str, bytes] | None = None
    ) -> None:
        self.model, self.size_of, self.objects = model, size_of, objects
        self.link = SharedLink(
            connection_bytes_per_second=model.connection_bytes_per_second,
            total_bytes_per_second=model.total_bytes_per_second,
        )
        self._next_free_seconds = 0.0

    def enter_queue(self) -> float:
        """Enter a request into the queue and return its waiting time in seconds.

        Raises:
            ThrottledError: the request would wait longer than the model's ``max_queue_seconds``.
        """
        now_seconds = asyncio.get_running_loop().time()
        each_seconds = 1.0 / self.model.requests_per_second
        wait_seconds = max(0.0, self._next_free_seconds - now_seconds - (self.model.burst - 1) * each_seconds)
        if wait_seconds > self.model.max_queue_seconds:
            raise ThrottledError("simulated://bucket answers with 503: too many requests")
        self._next_free_seconds = max(now_seconds, self._next_free_seconds) + each_seconds
        return wait_seconds


class ModelledReader:
    """A :class:`~stoker.abc.Readable` on a virtual clock, whose reads take time and usually move no bytes.

    Args:
        url: URL of the store in error messages.
        size_of: function from a key to the size of its object in bytes; raises KeyError if there is none.
        objects: content of all objects by key; None for objects without bytes.
    """

    def __init__(self, url: str, size_of: Callable[[str], int], objects: Mapping[str, bytes] | None = None) -> None:
        self.url, self._size_of, self._objects = url, size_of, objects

    async def get_range(
        self,
        key: str,
        start: int,
        end: int,
        *,
        into: memoryview,
        tag: str | None = None,
        begun: Callable[[], None] | None = None,
    ) -> ObjectInfo:
        """Wait as long as the read takes; ``into`` is left unchanged if the objects have no bytes."""
        info = await self.head(key)
        if begun is not None:
            begun()
        await self._transfer(key, end - start)
        if self._objects is not None:
            into[:] = self._objects[key][start:end]
        return info

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return the object's content, zeros if the objects have no bytes."""
        data = bytearray(self._object_info(key).size_bytes)
        info = await self.get_range(key, 0, len(data), into=memoryview(data))
        return bytes(data), info

    async def head(self, key: str) -> ObjectInfo:
        """Return an object's size at once: a reader that has the manifest knows it without a request.

        Raises:
            NotFoundError: there is no such object.
        """
        return self._object_info(key)

    async def _transfer(self, key: str, size_bytes: int) -> None:
        """Wait as long as the bytes take after the first one."""
        raise NotImplementedError

    def _object_info(self, key: str) -> ObjectInfo:
        try:
            return ObjectInfo(key=key, size_bytes=self._size_of(key), tag="")
        except KeyError:
            raise NotFoundError(f"{self.url}/{key} does not exist") from None


class BucketView(ModelledReader):
    """A bucket as one machine reads it: transfers share the machine's network and the bucket's bandwidth.

    Args:
        bucket: the bucket's state, shared with other machines.
        rng: generator of latencies and errors.
        bytes_per_second: bandwidth of the machine's network; a transfer takes as long as on the slower of both links.
        seed: seed of draws that depend only on the key and on the number of its earlier requests, so that two runs
            with different settings get the same late answers. None draws from ``rng`` in the order of requests.
    """

    def __init__(
        self,
        bucket: SimulatedBucket,
        rng: random.Random,
        *,
        bytes_per_second: float = math.inf,
        seed: str | None = None,
    ) -> None:
        super().__init__("simulated://bucket", bucket.size_of, bucket.objects)
        self._bucket, self._rng, self._seed = bucket, rng, seed
        self._request_counts = Counter[str]()
        self._rate = rate = bucket.model.connection_bytes_per_second
        own = SharedLink(connection_bytes_per_second=rate, total_bytes_per_second=bytes_per_second)
        self._links = [link for link in (own, bucket.link) if link.total_bytes_per_second < math.inf]

    async def head(self, key: str) -> ObjectInfo:
        """Wait for the first byte, and in the queue if requests are too many.

        Raises:
            NotFoundError: there is no such object.
            ThrottledError: the queue is too long.
            ServerError: a random error, with the model's probability.
        """
        model, rng = self._bucket.model, self._create_rng(key)
        first_byte_seconds = model.first_byte.draw(rng)
        try:
            line_seconds = self._bucket.enter_queue() if model.requests_per_second < math.inf else 0.0
        except ThrottledError:
            await asyncio.sleep(first_byte_seconds)
            raise
        await asyncio.sleep(line_seconds + first_byte_seconds)
        if model.error_fraction and rng.random() < model.error_fraction:
            raise ServerError(f"{self.url}/{key}: 500, a random error of the bucket model (error_fraction)")
        return self._object_info(key)

    async def _transfer(self, key: str, size_bytes: int) -> None:
        match self._links:
            case []:
                await asyncio.sleep(size_bytes / self._rate)
            case [link]:
                await link.serve(size_bytes)
            case links:
                await asyncio.gather(*(link.serve(size_bytes) for link in links))

    def _create_rng(self, key: str) -> random.Random:
        if self._seed is None:
            return self._rng
        self._request_counts[key] += 1
        return random.Random(f"{self._seed} {key} {self._request_counts[key]}")  # noqa: S311 - a model's


_MICROSECONDS = 1e-6


def read_durations(path: Path, event: str = "first_byte") -> RecordedLatency:
    """Return the durations in a file: a list of seconds, or the durations of a trace's events of one name.

    Args:
        path: a Chrome trace (``{"traceEvents": [...]}`` or its list), a JSON list of seconds, or a text file with a
            number of seconds on each line. A truncated file is read up to its end. All numbers are held in memory.
        event: name of the events, if the file is a trace.

    Raises:
        ConfigError: the file cannot be read, or has no such durations.
    """
    problem = f"{path} has neither a list of seconds nor a trace with events {event!r}"
    try:
        seconds = tuple(array("d", _parse_durations(path, event)))
    except (AttributeError, OverflowError, TypeError) as error:
        raise ConfigError(f"{problem}: {error}") from None
    try:
        return RecordedLatency(seconds)
    except ConfigError as error:
        raise ConfigError(f"{problem}: {error}") from None


def _parse_durations(path: Path, event: str) -> Iterator[float]:
    kinds: set[bool] = set()
    for value in read_values(path):
        is_number = isinstance(value, int | float)
        kinds.add(is_number)
        if len(kinds) > 1:
            raise TypeError("it has both numbers and events")
        if is_number:
            yield value
        elif value.get("name") == event and "dur" in value:
            yield value["dur"] * _MICROSECONDS


_CONNECTION_QUANTILE, _TOTAL_QUANTILE = 0.9, 0.95


@rename_arguments("recorded_latency", {"told": "events"})
def recorded_latency(events: Iterable[TraceEvent]) -> RecordedLatency:
    """Return the distribution of the times to the first byte of a trace's requests.

    A request that was overtaken by its hedge counts with the time until it was cancelled, although it would have taken
    longer. So in a run with hedges the latest first bytes are underestimated.

    Args:
        events: records of the trace, as :func:`~stoker.trace.read_trace` yields them.

    Raises:
        ConfigError: the trace has no request with a first byte, or cannot be read.

    Example:
        >>> from pathlib import Path
        >>> from stoker.trace import ChromeTrace, read_trace
        >>> from stoker_torch import Loader
        >>> with ChromeTrace("trace.json") as trace, Loader("s3://bucket/train", batch_size=32, trace=trace) as loader:
        ...     batches = len(list(loader))
        >>> latency = recorded_latency(read_trace(Path("trace.json")))
        >>> median_seconds = sorted(latency.seconds)[len(latency.seconds) // 2]
    """
    return _first_byte_latency(_answer_rows(events))


@rename_arguments("recorded_bucket", {"told": "events"})
def recorded_bucket(events: Iterable[TraceEvent]) -> BucketModel:
    """Return a model of the bucket of a trace: first bytes, the rate of a connection and of all together.

    The rate of a connection is the 90th percentile over transfers, since the fastest ones shared the link with the
    fewest others. The rate of all connections is the 95th percentile over time of their sum; if the run never filled
    its link, the real limit is higher. About 40 bytes a request are held in memory.

    Args:
        events: records of the trace, as :func:`~stoker.trace.read_trace` yields them.

    Raises:
        ConfigError: the trace has no transfers, or cannot be read.

    Example:
        >>> from pathlib import Path
        >>> from stoker.trace import ChromeTrace, read_trace
        >>> from stoker_torch import Loader
        >>> with ChromeTrace("trace.json") as trace, Loader("s3://bucket/train", batch_size=32, trace=trace) as loader:
        ...     batches = len(list(loader))
        >>> recorded_bucket(read_trace(Path("trace.json"))).total_bytes_per_second > 0
        True
    """
    answers = _answer_rows(events)
    whole = answers[answers["is_whole"] & (answers["transfer_seconds"] > 0)]
    if not len(whole):
        raise ConfigError("the trace has no complete transfer that took time: record a longer run to learn the rate")
    return BucketModel(
        first_byte=_first_byte_latency(answers),
        connection_bytes_per_second=float(np.quantile(_transfer_rates(whole), _CONNECTION_QUANTILE)),
        total_bytes_per_second=_total_rate_quantile(whole),
    )


def _answer_rows(events: Iterable[TraceEvent]) -> NDArray[np.void]:
    """Return the trace's answers as a structured array with the fields of ``Answer``."""
    fields = [*zip(TracedResponse._fields, ("f8", "f8", "f8", "i8", "?", "?"), strict=True)]
    return np.fromiter((each.event for each in events if isinstance(each.event, TracedResponse)), fields)


def _first_byte_latency(answers: NDArray[np.void]) -> RecordedLatency:
    if not answers["is_begun"].any():
        raise ConfigError("the trace has no first bytes: it is empty, or its store does not report first bytes")
    return RecordedLatency(tuple(answers["first_byte_seconds"].tolist()))


def _transfer_rates(answers: NDArray[np.void]) -> NDArray[np.float64]:
    rates: NDArray[np.float64] = answers["size_bytes"] / answers["transfer_seconds"]
    return rates


def _total_rate_quantile(answers: NDArray[np.void]) -> float:
    """Return a quantile over time of the sum of all transfers' rates, in bytes a second; each rate is a mean."""
    begins = answers["sent_seconds"] + answers["first_byte_seconds"]
    ends, rates = begins + answers["transfer_seconds"], _transfer_rates(answers)
    moments = np.concatenate([begins, ends])
    order = np.argsort(moments, kind="stable")
    together = np.cumsum(np.concatenate([rates, -rates])[order])[:-1]
    lasted = np.diff(moments[order])
    busy = (lasted > 0) & (together > rates.min() / 2)  # a sum that should be 0 may differ from it by rounding
    by_rate = np.argsort(together[busy], kind="stable")
    share = np.cumsum(lasted[busy][by_rate]) / math.fsum(lasted[busy])
    return float(together[busy][by_rate][int(np.searchsorted(share, _TOTAL_QUANTILE))])
