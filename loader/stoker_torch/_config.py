"""What a loader can be told: every setting, its default and its check in one place."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import TIMEOUT_MAX
from typing import Any, Literal, TypedDict, get_args

import numpy as np

from stoker._base.arguments import explain_arguments
from stoker._base.operations import Egress
from stoker._base.sizes import parse_bytes
from stoker._cache.tiers import CacheSpec, Sharers, open_tier
from stoker._cost.spending import parse_dollars
from stoker._fetch.config import FetchConfig, check_fetch
from stoker._fetch.feed import FeedConfig
from stoker._fetch.schedule import Continuous, Schedule
from stoker._order.order import OrderConfig, Shuffle
from stoker._stores.location import is_url_like
from stoker._stores.options import StoreOptions
from stoker.abc import Readable, Tier, TraceSink
from stoker.errors import ConfigError
from stoker_torch._context import asks_for_context

__all__ = ["DATA_LOADER_HINTS", "LoaderConfig", "LoaderShuffle", "Settings", "SharedSettings"]

LoaderShuffle = Shuffle | Literal["materialized"]

_INTEGERS = {
    "batch_size": 1,
    "seed": 0,
    "window": 1,
    "lanes": 1,
    "rank": 0,
    "world_size": 1,
    "limit": 1,
    "version": 1,
    "epochs": 1,
    "workers": 1,
    "max_bad_samples": 0,
}
"""The integer settings, and the least that each may be."""

_FLAGS = ("drop_last", "evaluation", "with_ids", "pin_memory", "reuse_buffers")

_FETCHING = "fetching ahead needs no setting: it goes as far as memory= allows"
DATA_LOADER_HINTS = {
    "collate_fn": "use collate=, a function of the list of a batch's samples",
    "generator": "use seed=, an integer that fixes the order of every epoch",
    "prefetch_factor": _FETCHING,
    "in_order": "batches always come in order",
    "dataset": "the first argument is the URL of a packed data set",
    "sampler": "the order is chosen by shuffle= and seed=; for a sampler, use stoker.open(url) in a DataLoader",
    "batch_sampler": "the order is chosen by shuffle= and seed=; for a sampler, use stoker.open(url) in a DataLoader",
    "random_seed": "use seed=",
    "cache_dir": "use cache='disk:/folder?limit=20GB'",
}
"""Arguments of other loaders → what to use instead, here and in :class:`~stoker_torch.StreamDataset`."""
_LOADER_HINTS = DATA_LOADER_HINTS | {
    "num_workers": "use workers=, threads that run decode= and transform=; fetching needs none",
    "persistent_workers": "workers= are threads, which last as long as the Loader",
    "multiprocessing_context": "workers= are threads, not processes",
    "worker_init_fn": "workers= are threads, not processes",
    "pin_memory_device": "use pin_memory=True",
}


@explain_arguments("Loader", _LOADER_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """The settings of a :class:`~stoker_torch.Loader`.

    Attributes:
        batch_size: samples a batch and rank.
        shuffle: ``"window"``, ``"block"``, ``"full"``, ``"none"``, or ``"materialized"``: the sequence of ``"full"``,
            read from objects that ``stoker shuffle`` made of the epoch, and as ``"full"`` where there are none. As a
            DataLoader's, True is the default and False is ``"none"``.
        seed: with the manifest's version and the epoch it fixes the order, on every machine.
        window: super-samples that are mixed at a time, per lane.
        lanes: into how many parts the order is cut; default the world size. A multiple of every world size that the run
            may have keeps each rank to super-samples of its own.
        memory: of this rank, for the manifest and the ring: bytes, ``"512MB"``, or ``"node:4GB"``, which is divided by
            ``LOCAL_WORLD_SIZE``. Batches that were handed out are the caller's and not counted.
        cache: where to keep super-samples that are needed again, over epochs and, on a disk, runs:
            ``"disk:/mnt/nvme/stoker?limit=20GB"``, ``"memory:?limit=2GB"``, or a sequence of such, the nearest first;
            with ``&policy=`` ``next-use`` (default), ``uniform``, ``lru`` or ``fifo``. A disk's limit is the machine's,
            one in memory the rank's, or the machine's as ``limit=node:8GB``, beside ``memory``.
        warm: a tier of super-samples in the memory of warm functions, between this machine and the bucket:
            ``"warm://10.0.0.5:7411"``, a proxy that trainers share, or one in this process:
            ``"warm+lambda://stoker?listen=10.0.0.9:7411"``. The secret is in ``STOKER_WARM_SECRET``. Default none.
        rank: and ``world_size``: default torch.distributed's, else ``RANK`` and ``WORLD_SIZE``, else 0 of 1.
        drop_last: leave out the last global batch of an epoch if it is not full; else it is divided evenly.
        evaluation: every sample exactly once, with no repeats and no drops; ranks may differ by one batch, so do not
            use it with collective operations in the loop.
        columns: which to deliver; default all.
        limit: only the first so many samples of every epoch's order.
        version: of the manifest; default the newest when the loader is made.
        epochs: how many the run has: nothing is fetched beyond, and a loop behind the last one is empty.
        decode: column → function of one value (``bytes``, ``str`` or a tensor), run in the pool. Results that are
            numbers, or tensors or arrays of one shape, make a tensor as torch's ``default_collate`` makes it (of
            Python's floats ``float64``); others make a list.
        transform: function of one sample, a dictionary of values after ``decode``, run in the pool. It, and a function
            of ``decode``, is also given a :class:`~stoker.SampleContext` (the epoch, the sample's number, and random
            generators of its own) if it has a parameter ``context``.
        collate: function of the list of a batch's samples; default torch's ``default_collate``.
        batch_transform: function of a whole batch, run in the pool; the last thing done to it.
        workers: threads of the pool that runs those four; default the number of cores.
        timeout: seconds to wait for a batch from those four; then ``SampleTimeoutError`` names the sample and the
            function that has not returned. Default 0: without a limit, as torch's ``DataLoader`` has it. What the
            bucket may take is ``fetch``'s.
        max_bad_samples: how many samples in the run may fail in ``decode`` or ``transform``; each is replaced by
            another of its batch and counted. Default none. What fails on a whole batch is always an error.
        with_ids: add ``"__id__"``, ``int64 [samples]``: each sample's number in the packed order.
        pin_memory: put batches, as they are yielded, into page-locked memory; of no effect without a CUDA device.
        reuse_buffers: gather into buffers of earlier batches that nobody holds any more. Copies to a GPU must be
            started on the stream that is current where the loop asks for batches.
        schedule: how far ahead to fetch; default as far as the memory goes.
        fetch: deadlines, retries, hedges and concurrency.
        options: how to reach the bucket (``S3Options``, ``GcsOptions``).
        max_dollars_per_epoch: refuse an order whose requests and bytes would cost more, over all ranks.
        egress: where the bucket is for this machine, as dollars depend on it: ``"same_region"``, ``"other_region"`` or
            ``"internet"``.
        budget: of the whole job, for what the store asks: ``"5 USD"`` or a number; default no limit. Each rank has an
            equal part. It warns at 80% of it and raises ``BudgetExceededError`` at 100%, between two batches. Counts
            begin when the loader is made.
        trace: a file into which a timeline of waits, fetches and requests is written (with several ranks,
            ``trace.json`` becomes ``trace.rank3.json``); or a sink, or several, of :mod:`stoker.trace`, which whoever
            made them closes.

    Raises:
        ConfigError: a value is out of range, or two of them do not go together.
    """

    batch_size: int
    shuffle: LoaderShuffle = "window"
    seed: int = 0
    window: int = 8
    lanes: int | None = None
    memory: int | str = "512MB"
    cache: str | Sequence[str] | None = None
    warm: str | None = None
    rank: int | None = None
    world_size: int | None = None
    drop_last: bool = False
    evaluation: bool = False
    columns: Sequence[str] | None = None
    limit: int | None = None
    version: int | None = None
    epochs: int | None = None
    decode: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    transform: Callable[..., Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    batch_transform: Callable[[Any], Any] | None = None
    workers: int | None = None
    timeout: float = 0
    max_bad_samples: int = 0
    with_ids: bool = False
    pin_memory: bool = False
    reuse_buffers: bool = False
    schedule: Schedule = field(default_factory=Continuous)
    fetch: FetchConfig = field(default_factory=FetchConfig)
    options: StoreOptions | None = None
    max_dollars_per_epoch: float = 1.0
    egress: Egress = "same_region"
    budget: float | str | None = None
    trace: str | os.PathLike[str] | TraceSink | Sequence[TraceSink] | None = None

    def __post_init__(self) -> None:
        shuffle: object = self.shuffle
        if isinstance(shuffle, bool | np.bool_):
            object.__setattr__(self, "shuffle", "window" if shuffle else "none")
        for name, least in _INTEGERS.items():
            value = getattr(self, name)
            if value is None and self.__dataclass_fields__[name].default is None:
                continue
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} {value!r} is not an integer of at least {least}")
            object.__setattr__(self, name, int(value))  # numpy's would not go into a state as JSON
        self._check_flags_and_functions()
        is_number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if not is_number or not 0 <= self.timeout <= TIMEOUT_MAX:
            raise ConfigError(f"timeout {self.timeout!r} is not a number of seconds from 0, which is without a limit")
        if isinstance(self.columns, str):
            raise ConfigError(f"columns is a sequence of names: write columns=[{self.columns!r}]")
        if self.columns is not None and not self.columns:
            raise ConfigError("columns is empty; name at least one, or leave it out for all")
        unknown = [name for name in self.decode if self.columns is not None and name not in self.columns]
        if unknown:
            raise ConfigError(f"decode names {', '.join(unknown)}, which columns= leaves out")
        self.memory_bytes()
        self.caches()
        if self.egress not in get_args(Egress):
            raise ConfigError(f"egress {self.egress!r} is not one of {', '.join(get_args(Egress))}")
        if self.budget is not None:
            parse_dollars(self.budget)
        self._check_dollars_per_epoch()
        self.sinks()

    def _check_flags_and_functions(self) -> None:
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise ConfigError(f"{name} is True or False, not {getattr(self, name)!r}")
        if not isinstance(self.decode, Mapping):
            raise ConfigError(f"decode is a dictionary of column and function, not {self.decode!r}")
        functions: dict[str, Any] = {f"decode[{name!r}]": function for name, function in self.decode.items()}
        for name in ("transform", "collate", "batch_transform"):
            if getattr(self, name) is not None:
                functions[name] = getattr(self, name)
        for name, function in functions.items():
            if not callable(function):
                raise ConfigError(f"{name} is a function, not {function!r}")
            asks_for_context(function, name, is_of_batch=name in ("collate", "batch_transform"))
        if not callable(getattr(self.schedule, "admit", None)):
            raise ConfigError(f"schedule is a stoker.Schedule, such as stoker.Continuous(), not {self.schedule!r}")
        check_fetch(self.fetch)

    def _check_dollars_per_epoch(self) -> None:
        dollars: object = self.max_dollars_per_epoch
        is_number = isinstance(dollars, int | float | np.integer | np.floating) and not isinstance(dollars, bool)
        if not is_number or math.isnan(self.max_dollars_per_epoch):
            raise ConfigError(
                f"max_dollars_per_epoch {dollars!r:.80} is not a number of dollars; for no limit write float('inf')"
            )

    def feed_config(self, *, rank: int, world_size: int, lanes: int) -> FeedConfig:
        """Return what a rank's feed is to deliver and how."""
        shuffle: Shuffle = "full" if self.shuffle == "materialized" else self.shuffle
        return FeedConfig(
            order=OrderConfig(seed=self.seed, shuffle=shuffle, window=self.window, lanes=lanes),
            by_lanes=self.shuffle == "materialized",
            local_ranks=_local_ranks(rank, world_size) if self.cache else (),
            batch_size=self.batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=self.drop_last,
            evaluation=self.evaluation,
            limit=self.limit,
            columns=None if self.columns is None else tuple(self.columns),
            memory_bytes=self.memory_bytes(),
            end_epoch=self.epochs,
            schedule=self.schedule,
            fetch=self.fetch,
        )

    def sinks(self) -> tuple[TraceSink, ...]:
        """Return what ``trace`` names besides a file.

        Raises:
            ConfigError: it is neither a file nor a sink.
        """
        if self.trace is None:
            return ()
        if isinstance(self.trace, str | os.PathLike):
            if is_url_like(os.fspath(self.trace)):
                raise ConfigError(
                    f"trace {os.fspath(self.trace)!r:.200} is a URL; name a file of this machine, such as "
                    "'trace.json', and copy it when the loader is closed"
                )
            return ()
        sinks: tuple[Any, ...] = tuple(self.trace) if isinstance(self.trace, Sequence) else (self.trace,)
        for sink in sinks:
            if not callable(getattr(sink, "waited", None)):
                raise ConfigError(f"trace is the name of a file, or a sink such as ChromeTrace, not {sink!r}")
        return sinks

    def memory_bytes(self) -> int:
        """Return the budget of one rank in bytes.

        Raises:
            ConfigError: it is not a size.
        """
        if not isinstance(self.memory, str) or not self.memory.startswith("node:"):
            return parse_bytes(self.memory, "memory")
        return parse_bytes(self.memory.removeprefix("node:"), "memory") // _ranks_here()

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return what ``cache`` says, the nearest first.

        Raises:
            ConfigError: it is not right.
        """
        return CacheSpec.parse_all(self.cache)

    def warm_tier(self, store: Readable, processes: int) -> Tier | None:
        """Return the tier that ``warm`` names, for one of so many processes; nothing is connected to before a read.

        Args:
            store: of the data set, from which what nodes lose is put back if ``warm`` says so.
            processes: that read, in the whole job.

        Raises:
            ConfigError: it is not right, there is no secret, or several processes would each have a proxy.
        """
        if self.warm is None:
            return None
        return open_tier(self.warm, store=store, processes=processes)

    def sharers(self, feed: FeedConfig) -> Sharers:
        """Return who shares the caches of the machine with the process that has a feed."""
        workers = feed.workers or 1
        ranks = _ranks_here()
        return Sharers(ranks=ranks, workers=workers, number=_local_rank(feed.rank, ranks) * workers + feed.worker)


def _ranks_here() -> int:
    """Return how many ranks this machine has."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not ranks.isdecimal() or not int(ranks):
        raise ConfigError(f"what is of a node is divided by LOCAL_WORLD_SIZE, which is {ranks!r}")
    return int(ranks)


def _local_rank(rank: int, ranks: int) -> int:
    local = os.environ.get("LOCAL_RANK", "")
    return int(local) if local.isdecimal() and int(local) < ranks else rank % ranks


def _local_ranks(rank: int, world_size: int) -> range:
    """Return the ranks of this machine: launchers number them one after the other."""
    ranks = _ranks_here()
    first = rank - _local_rank(rank, ranks)
    return range(max(0, first), min(world_size, first + ranks))


class SharedSettings(TypedDict, total=False):
    """Fields of :class:`LoaderConfig`, for type checkers: what loaders and stream datasets take alike."""

    shuffle: LoaderShuffle
    seed: int
    window: int
    lanes: int | None
    memory: int | str
    cache: str | Sequence[str] | None
    warm: str | None
    rank: int | None
    world_size: int | None
    drop_last: bool
    evaluation: bool
    columns: Sequence[str] | None
    limit: int | None
    version: int | None
    epochs: int | None
    decode: Mapping[str, Callable[..., Any]]
    transform: Callable[..., Any] | None
    collate: Callable[[list[Any]], Any] | None
    batch_transform: Callable[[Any], Any] | None
    workers: int | None
    timeout: float
    max_bad_samples: int
    with_ids: bool
    schedule: Schedule
    fetch: FetchConfig
    options: StoreOptions | None
    max_dollars_per_epoch: float
    egress: Egress


class Settings(SharedSettings, total=False):
    """The fields of :class:`LoaderConfig`: what ``Loader(url, **settings)`` takes."""

    batch_size: int
    pin_memory: bool
    reuse_buffers: bool
    budget: float | str | None
    trace: str | os.PathLike[str] | TraceSink | Sequence[TraceSink] | None
