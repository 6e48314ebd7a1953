"""Settings of loaders: the name, type, default, description and check of each one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from stoker._base.arguments import explain_arguments
from stoker._base.sizes import parse_bytes
from stoker._cache.tiers import CacheSharing, CacheSpec, open_tier
from stoker._cluster.client import ClusterTier
from stoker._cluster.spec import ClusterSpec
from stoker._fetch.config import Continuous, FetchConfig, PipelineConfig, Schedule, check_fetch
from stoker._order.order import OrderConfig, Shuffle
from stoker._stores.location import is_url_like
from stoker._stores.options import StoreOptions
from stoker.abc import RangeReadable, Readable, Tier, TraceSink
from stoker.errors import ConfigError
from stoker_torch._devices import parse_device
from stoker_torch._options import MOVED_SETTINGS, Budget, WorkerOptions, validate_integer
from stoker_torch._ranks import local_rank, local_ranks, local_world_size
from stoker_torch._registry import find_registry
from stoker_torch._user_functions import takes_context

LoaderShuffle = Literal[Shuffle, "materialized"]

_MINIMA = {"batch_size": 1, "seed": 0, "window": 1, "lanes": 1, "rank": 0, "world_size": 1, "limit": 1, "version": 1}
_MINIMA |= {"epochs": 1}
"""The integer settings → the minimum of each."""
_BY_UNIT: Any = None
"""Default of a window that depends on the unit."""
_AHEAD = 2
_FLAGS = ("drop_last", "evaluation", "with_ids", "pin_memory", "reuse_buffers", "static")

_HINTS = {
    "collate_fn": "use collate=, a function of the list of a batch's samples",
    "generator": "use seed=, an integer that fixes the order of every epoch",
    "prefetch_factor": "the loader fetches ahead as far as memory= allows",
    "in_order": "batches always come in order",
    "dataset": "the first argument is the URL of a packed data set",
    "sampler": "the order is chosen by shuffle= and seed=; for a sampler, use stoker.open(url) in a DataLoader",
    "batch_sampler": "the order is chosen by shuffle= and seed=; for a sampler, use stoker.open(url) in a DataLoader",
    "random_seed": "use seed=",
    "cache_dir": "use cache='disk:/folder?limit=20GB'",
}
"""Arguments of other loaders → what to use instead."""
_LOADER_HINTS = _HINTS | {
    "num_workers": "use workers=, threads that run decode= and transform=; fetching needs none",
    "persistent_workers": "workers= are threads, which last as long as the Loader",
    "multiprocessing_context": "workers= are threads, not processes",
    "worker_init_fn": "workers= are threads, not processes",
    "pin_memory_device": "use device=",
}
_FOR_DATA_LOADER = "give it to the DataLoader"
_IN_WORKERS = "it cannot be used in worker processes; give DataLoader pin_memory=True"
_STREAM_HINTS = _HINTS | {
    "num_workers": f"{_FOR_DATA_LOADER}; workers= are threads of each of its processes",
    "persistent_workers": _FOR_DATA_LOADER,
    "prefetch_factor": _FOR_DATA_LOADER,
    "multiprocessing_context": _FOR_DATA_LOADER,
    "worker_init_fn": _FOR_DATA_LOADER,
    "pin_memory_device": _FOR_DATA_LOADER,
    "pin_memory": _IN_WORKERS,
    "reuse_buffers": _IN_WORKERS,
    "trace": "trace is for a Loader: worker processes do not know what the training loop waits for; trace a Loader "
    "with the same settings to see what the bucket does",
}


@explain_arguments("StreamDataset", _STREAM_HINTS, MOVED_SETTINGS)
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """The settings that a :class:`~stoker_torch.StreamDataset` and a :class:`~stoker_torch.Loader` have in common.

    Attributes:
        batch_size: samples per batch and rank. Default for a ``StreamDataset``: None, which yields single samples.
        shuffle: ``"window"``, ``"block"``, ``"full"``, ``"none"``, or ``"materialized"``: the sequence of ``"full"``,
            read from objects that ``stoker shuffle`` wrote for the epoch; without such objects, it reads as ``"full"``
            does. As in a DataLoader, True is the default and False is ``"none"``.
        seed: number that fixes the order on every machine, together with the manifest's version and the epoch.
        window: number of super-samples, or with ``unit`` of units, that are mixed at a time, per lane; default 8
            super-samples or 256 units.
        unit: size of a unit, such as ``"1MiB"``, for shuffle ``"window"`` only: an epoch permutes units, which are runs
            of rows of super-samples with about this size, and reads each by ranges. A window then mixes many more
            super-samples in the same memory, for more and smaller requests. Cannot be combined with ``cache`` and
            ``tier``, which keep whole super-samples. Default None: whole super-samples.
        lanes: number of parts that the order is cut into; default the world size, for a ``StreamDataset`` the number
            of workers of all ranks. If it is a multiple of every world size that the run may have, no super-sample is
            read by two ranks.
        sticky: probability that a super-sample stays in its lane of the epoch before, so that a rank or node that kept
            what it read has it, 0 (default) to 0.99; for shuffle ``"window"`` and ``"block"``. Lanes must be as many
            in each run, and a multiple of the world size. See the page on the order for what it costs in mixing.
        memory: memory budget of this rank, for the manifest and the ring: bytes, ``"512MB"``, or ``"node:4GB"``, which
            is divided by ``LOCAL_WORLD_SIZE``. Batches that were yielded belong to the caller and are not counted.
        cache: caches on this machine, which keep super-samples for later epochs and, on a disk, later runs:
            ``"disk:/mnt/nvme/stoker?limit=20GB"``, ``"memory:?limit=2GB"``, or a sequence of these, nearest first;
            ``&policy=`` is ``next-use`` (default), ``no-evict``, ``lru`` or ``fifo``. The limit of a disk is for the
            machine, that of memory for the rank (``limit=node:8GB``: for the machine) and not part of ``memory``.
        cluster: cache of super-samples that all loaders of this machine share, in a process of its own:
            ``"memory:?limit=64GB"`` or ``"disk:/mnt/nvme?limit=1TB"``. Each super-sample is fetched once for all of
            them. The first loader starts the process; it ends a minute after the last one (``&linger=SECONDS``).
            ``&name=`` keeps jobs apart that have the same limit. Default none.
        tier: shared tier between the machines and the bucket, which is read before the bucket:
            ``"https://10.0.0.9:7412?fingerprint=…"``, as ``stoker tier serve`` prints it, or a sequence of such URLs
            (secret in ``STOKER_TIER_SECRET``); ``"warm://10.0.0.5:7411"``, a proxy of warm functions that several
            trainers share, or ``"warm+lambda://stoker?listen=10.0.0.9:7411"``, a proxy in this process (secret in
            ``STOKER_WARM_SECRET``); the URL of a plug-in; or a :class:`stoker.abc.Tier`, which is used on the
            loader's own thread and event loop, and which the caller closes after the loader. Default none.
        warm: another name of ``tier``.
        rank: number of this rank, given with ``world_size``; default torch.distributed's, else ``RANK``, else 0.
        world_size: number of ranks; default torch.distributed's, else ``WORLD_SIZE``, else 1.
        mesh: dimension of data parallelism of a device mesh, such as ``device_mesh["dp"]``, in place of ``rank`` and
            ``world_size``: the ranks that differ only in other dimensions get the same batches.
        drop_last: whether to leave out the last global batch of an epoch if it is not full. Default False: the ranks
            share its samples evenly.
        evaluation: whether to deliver every sample exactly once, without repeats and drops; the ranks may then differ
            by one batch, so do not use it with collective operations in the loop.
        columns: names of the columns to deliver; default all.
        limit: number of samples to deliver per epoch, the first ones of its order; default all.
        version: version of the manifest; default the newest one at construction.
        epochs: number of epochs of the run; nothing is fetched beyond them. Default unknown.
        decode: column → function of one value (``bytes``, ``str`` or a tensor), run in the worker threads. If the
            results are numbers, or tensors or arrays of one shape, they become a tensor as in torch's
            ``default_collate`` (Python floats become ``float64``), else a list.
        transform: function of one sample, a dictionary of values after ``decode``, run in the worker threads. It, like
            a function of ``decode``, also gets a :class:`~stoker.SampleContext` (the epoch, the sample's number, and
            random generators for this sample) if it has a parameter ``context``.
        collate: function of the list of a batch's samples; default torch's ``default_collate``.
        batch_transform: function of a whole batch, run last, in the worker threads.
        workers: number of worker threads that run these four functions, or a :class:`WorkerOptions` that adds a time
            limit and the number of samples that may fail; default the number of cores, and 1 in a worker process.
        with_ids: whether to add ``"__id__"``, ``int64 [samples]``: each sample's number in the packed order.
        schedule: how far ahead to fetch; default as far as the memory allows.
        fetch: deadlines, retries, hedges and concurrency of fetches.
        options: how to reach the bucket (``S3Options``, ``GcsOptions``).
        budget: dollars that the whole job may spend (``"5 USD"`` or a number, for a ``Loader`` only), or a
            :class:`Budget`, which adds the limit of an epoch's plan and the location of the bucket; default no limit
            for the run, and 1 dollar for an epoch's plan.

    Raises:
        ConfigError: a value is out of range, or two settings contradict each other.

    Example:
        >>> config = StreamDataset("data", shuffle="block", memory="1GB", columns=["image", "label"]).config
    """

    batch_size: int | None = None
    shuffle: LoaderShuffle = "window"
    seed: int = 0
    window: int = _BY_UNIT
    unit: int | str | None = None
    sticky: float = 0.0
    lanes: int | None = None
    memory: int | str = "512MB"
    cache: str | Sequence[str] | None = None
    cluster: str | None = None
    tier: str | Sequence[str] | Tier | None = None
    warm: str | Tier | None = None
    rank: int | None = None
    world_size: int | None = None
    mesh: DeviceMesh | None = None
    drop_last: bool = False
    evaluation: bool = False
    columns: Sequence[str] | None = None
    limit: int | None = None
    version: int | None = None
    epochs: int | None = None
    decode: Mapping[str, Callable[..., Any]] | None = None
    transform: Callable[..., Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    batch_transform: Callable[[Any], Any] | None = None
    workers: int | WorkerOptions | None = None
    with_ids: bool = False
    schedule: Schedule = Continuous()  # noqa: RUF009 - frozen, and so shown in the signature
    fetch: FetchConfig = FetchConfig()  # noqa: RUF009 - as above
    options: StoreOptions | None = None
    budget: float | str | Budget | None = None

    def __post_init__(self) -> None:
        shuffle: object = self.shuffle
        if isinstance(shuffle, bool | np.bool_):
            object.__setattr__(self, "shuffle", "window" if shuffle else "none")
        optional = {each.name for each in fields(self) if each.default is None}
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if value is not None or name not in optional:
                object.__setattr__(self, name, validate_integer(name, value, minimum))
        order = self.order(lanes=1)
        object.__setattr__(self, "window", order.window)
        object.__setattr__(self, "sticky", order.sticky)
        for name in _FLAGS:
            flag = getattr(self, name, False)
            if not isinstance(flag, bool | np.bool_):
                raise ConfigError(f"{name} must be True or False, not {flag!r}")
        self._check_functions()
        self._check_columns()
        self.memory_bytes()
        self.caches()
        self.cluster_tier()
        self._check_tier()
        WorkerOptions.of(self.workers)
        Budget.of(self.budget)
        if isinstance(self.schedule, type) or not callable(getattr(self.schedule, "admit", None)):
            raise ConfigError(f"schedule must be a stoker.Schedule, such as stoker.Continuous(), not {self.schedule!r}")
        check_fetch(self.fetch)

    def _check_functions(self) -> None:
        if self.decode is not None and not isinstance(self.decode, Mapping):
            raise ConfigError(f"decode must be a dictionary from column to function, not {self.decode!r}")
        for name, function in self._functions("transform", "collate", "batch_transform").items():
            if not callable(function):
                raise ConfigError(f"{name} must be a function, not {function!r}")
            takes_context(function, name, is_of_batch=name in ("collate", "batch_transform"))

    def _functions(self, *settings: str) -> dict[str, Callable[..., Any]]:
        """Return the name of each function of ``decode``, and of each of the settings that is given → the function."""
        functions = {f"decode[{name!r}]": function for name, function in (self.decode or {}).items()}
        return functions | {name: getattr(self, name) for name in settings if getattr(self, name) is not None}

    def _check_tier(self) -> None:
        if self.tier is not None and self.warm is not None:
            raise ConfigError("tier= and warm= name the same setting; give only tier=")
        tier = self.warm if self.tier is None else self.tier
        if isinstance(tier, type):
            raise ConfigError(f"tier must be an instance of {tier.__name__}, not the class itself")
        if isinstance(tier, list | tuple) and (not tier or not all(isinstance(url, str) for url in tier)):
            raise ConfigError(f"tier must be a URL or a sequence of server URLs, not {tier!r:.80}")
        missing = [name for name in ("name", "read", "offer", "close") if not hasattr(tier, name)]
        if tier is not None and not isinstance(tier, str | list | tuple) and missing:
            raise ConfigError(
                f"tier {tier!r:.80} is neither a URL, such as 'warm://10.0.0.5:7411', nor a stoker.abc.Tier: it lacks "
                f"{', '.join(missing)}"
            )

    def _check_columns(self) -> None:
        if isinstance(self.columns, str):
            raise ConfigError(f"columns must be a sequence of names; write columns=[{self.columns!r}]")
        if self.columns is None:
            return
        if not self.columns:
            raise ConfigError("columns is empty; name at least one column, or leave it out to read all")
        if unknown := [name for name in self.decode or () if name not in self.columns]:
            raise ConfigError(f"decode has the columns {', '.join(unknown)}, which columns= leaves out")

    if not TYPE_CHECKING:  # else a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            if name not in MOVED_SETTINGS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            moved = MOVED_SETTINGS[name]
            warnings.warn(f".{name} is deprecated: read .{moved.setting}", DeprecationWarning, stacklevel=2)
            return getattr(moved.options.of(getattr(self, moved.setting)), moved.field)

    def order(self, lanes: int) -> OrderConfig:
        """Return the settings of the order, cut into a number of lanes.

        Raises:
            ConfigError: a setting is out of range, or ``unit`` does not go with another one.
        """
        shuffle: Shuffle = "full" if self.shuffle == "materialized" else self.shuffle
        unit_bytes = None if self.unit is None else parse_bytes(self.unit, "unit")
        if self.unit is not None and (self.cache or self.tier or self.warm):
            raise ConfigError(f"unit={self.unit!r} reads parts of super-samples; cache= and tier= keep whole ones")
        return OrderConfig(
            seed=self.seed,
            shuffle=shuffle,
            window=self.window,
            lanes=lanes,
            unit_bytes=unit_bytes,
            sticky=self.sticky,
        )

    def feed_config(self, *, rank: int, world_size: int, lanes: int) -> PipelineConfig:
        """Return the settings of a rank's batch pipeline."""
        return PipelineConfig(
            order=self.order(lanes),
            by_lanes=self.shuffle == "materialized",
            local_ranks=local_ranks(rank, world_size) if self.cache else (),
            batch_size=self.batch_size or 1,
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

    def memory_bytes(self) -> int:
        """Return the memory budget of one rank, in bytes.

        Raises:
            ConfigError: it is not a size.
        """
        if not isinstance(self.memory, str) or not self.memory.startswith("node:"):
            return parse_bytes(self.memory, "memory")
        return parse_bytes(self.memory.removeprefix("node:"), "memory") // local_world_size()

    def caches(self) -> tuple[CacheSpec, ...]:
        """Return the caches that ``cache`` names, nearest first.

        Raises:
            ConfigError: ``cache`` is not valid.
        """
        return CacheSpec.parse_all(self.cache)

    def cluster_tier(self, *, is_shared: bool = False) -> ClusterTier | None:
        """Return the cache of this machine's loaders, and of those of the job's other machines, without a connection.

        Args:
            is_shared: whether other ranks get the same batches.

        Raises:
            ConfigError: ``cluster`` is not valid.
        """
        if self.cluster is None:
            return None
        registry = find_registry(ClusterSpec.parse(self.cluster))
        return ClusterTier(self.cluster, is_shared=is_shared, registry=registry)

    def shared_tier(self, store: Readable, processes: int) -> Tier | None:
        """Return the tier that ``tier`` names or is, without a connection yet.

        Args:
            store: store of the data set, from which some tiers read the objects that they lack.
            processes: number of processes of the job that read.

        Raises:
            ConfigError: ``tier`` is not valid, there is no secret, or several processes would each start a proxy.
        """
        tier = self.warm if self.tier is None else self.tier
        if isinstance(tier, list | tuple):
            tier = ",".join(tier)
        return open_tier(tier, store=store, processes=processes) if isinstance(tier, str) else cast("Tier | None", tier)

    warm_tier = shared_tier  # deprecated alias

    def sharers(self, feed: PipelineConfig) -> CacheSharing:
        """Return the processes that share the caches of this machine with the process of a batch pipeline."""
        workers = feed.workers or 1
        ranks = local_world_size()
        return CacheSharing(
            ranks=ranks, workers=workers, process_index=local_rank(feed.rank, ranks) * workers + feed.worker
        )


@explain_arguments("Loader", _LOADER_HINTS, MOVED_SETTINGS)
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig(StreamConfig):
    """The settings of a :class:`~stoker_torch.Loader`: those of a :class:`StreamConfig` and a few more.

    Attributes:
        pin_memory: whether to yield batches in page-locked memory; no effect without a CUDA device.
        reuse_buffers: whether to gather into the buffers of earlier batches that are no longer referenced. Copies to a
            GPU must then be started on the stream that is current when the loop asks for batches.
        device: accelerator to yield batches on, such as ``"cuda:0"``: they are copied ahead of the loop, through
            page-locked memory and on a stream of their own; the loop's current stream waits for a batch, the loop does
            not. ``batch_transform`` then runs on the device, too, on that stream. ``"cuda"`` is the current device at
            the first iteration. Default, and ``"cpu"``: batches in host memory.
        ahead: number of batches on the device ahead of the loop.
        gpu_cache: size of the part of the data set that stays on ``device``, such as ``"4GB"``: whole super-samples,
            the same in every epoch, as they are after ``decode`` and ``transform``, which must then not be random.
            From the second epoch on, their samples are neither read nor copied. All columns need a fixed shape.
            Default none.
        static: whether to yield all batches in the tensors of the first one, which a CUDA graph reads again; needs
            ``drop_last``. No effect without an accelerator in ``device``.
        trace: file to write a timeline of waits, fetches and requests to (with several ranks, ``trace.json`` becomes
            ``trace.rank3.json``); or one or several sinks of :mod:`stoker.trace`, which the caller closes.

    Raises:
        ConfigError: a value is out of range, or two settings contradict each other.

    Example:
        >>> config = LoaderConfig(batch_size=64, shuffle="window", epochs=90)
    """

    batch_size: int
    pin_memory: bool = False
    reuse_buffers: bool = False
    device: str | int | torch.device | None = None
    ahead: int = _AHEAD
    gpu_cache: int | str | None = None
    static: bool = False
    trace: str | os.PathLike[str] | TraceSink | Sequence[TraceSink] | None = None

    def __post_init__(self) -> None:
        StreamConfig.__post_init__(self)  # super() does not know a class with slots
        self.sinks()
        self._check_device()

    def accelerator(self) -> torch.device | None:
        """Return the device that batches are copied to; None for batches in host memory.

        Raises:
            ConfigError: ``device`` is not a device.
        """
        device = None if self.device is None else parse_device(self.device)
        return None if device is None or device.type == "cpu" else device

    def _check_device(self) -> None:
        object.__setattr__(self, "ahead", validate_integer("ahead", self.ahead, 1))
        if self.static and not self.drop_last:
            raise ConfigError("static=True yields every batch in the same tensors: give drop_last=True, too")
        if self.device is None and (self.static or self.ahead != _AHEAD):
            raise ConfigError("ahead= and static= are for batches on an accelerator: give device=, such as 'cuda:0'")
        self._check_gpu_cache()
        if self.accelerator() is not None and (self.pin_memory or self.reuse_buffers):
            raise ConfigError(
                f"device={str(self.device)!r} copies batches through page-locked memory that it uses again: leave out "
                "pin_memory= and reuse_buffers="
            )

    def _check_gpu_cache(self) -> None:
        if self.gpu_cache is None:
            return
        parse_bytes(self.gpu_cache, "gpu_cache")
        if self.device is None:
            raise ConfigError("gpu_cache= is memory of an accelerator: give device=, such as 'cuda:0'")
        if self.unit is not None or self.shuffle == "materialized":
            setting = f"unit={self.unit!r}" if self.unit is not None else "shuffle='materialized'"
            raise ConfigError(f"gpu_cache= keeps whole super-samples of the data set, and {setting} reads others")
        if self.collate is not None or WorkerOptions.of(self.workers).max_bad_samples:
            raise ConfigError(
                "gpu_cache= keeps single samples: use batch_transform= in place of collate=, which makes batches, and "
                "leave out max_bad_samples=, which replaces samples"
            )
        for name, function in self._functions("transform").items():
            if takes_context(function, name) and getattr(function, "is_random", True):
                raise ConfigError(
                    f"{name} has a parameter context, so its results differ between epochs, and gpu_cache= would keep "
                    "those of the first: move what is random to batch_transform="
                )

    def sinks(self) -> tuple[TraceSink, ...]:
        """Return the sinks in ``trace``; none if it is a file.

        Raises:
            ConfigError: ``trace`` is neither a file nor a sink.
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
            if isinstance(sink, type) or not callable(getattr(sink, "waited", None)):
                raise ConfigError(f"trace is the name of a file, or a sink such as ChromeTrace(path), not {sink!r}")
        return sinks


@explain_arguments("StreamDataset", _STREAM_HINTS, MOVED_SETTINGS)
@dataclass(frozen=True, slots=True)
class StreamArguments(StreamConfig):
    """The arguments of a :class:`~stoker_torch.StreamDataset`: a URL and the settings.

    Attributes:
        url: location of the data set: a path, ``file://``, ``s3://`` or ``gs://``; ``memory://`` exists in one process
            and those forked from it. Or a :class:`stoker.abc.Store`, which is pickled for spawned worker processes.
    """

    url: str | os.PathLike[str] | RangeReadable = field(kw_only=False)


@explain_arguments("Loader", _LOADER_HINTS, MOVED_SETTINGS)
@dataclass(frozen=True, slots=True)
class LoaderArguments(LoaderConfig):
    """The arguments of a :class:`~stoker_torch.Loader`: a URL and the settings.

    Attributes:
        url: location of the data set: a path, ``file://``, ``s3://``, ``gs://`` or ``memory://``. Or a
            :class:`stoker.abc.Store`, which is used on the loader's own thread and event loop.
    """

    url: str | os.PathLike[str] | RangeReadable = field(kw_only=False)
