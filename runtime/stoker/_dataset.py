"""Random access to the samples of a data set in a bucket, by sample number."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker._base.arguments import check_picklable, explain_arguments
from stoker._base.closeable import Closeable
from stoker._base.meter import Operation
from stoker._base.sizes import format_bytes, parse_bytes
from stoker._base.threads import LoopThread, PerLoop
from stoker._cost.prices import Prices
from stoker._fetch.config import FetchConfig, FetchCounters, check_fetch
from stoker._fetch.samples import SampleReader
from stoker._format.display import describe_manifest, describe_type, html_table
from stoker._format.manifest import Manifest
from stoker._format.schema import Schema
from stoker._format.versions import read_manifest
from stoker._memory.budget import SampleMemory
from stoker._stores import StoreOptions, open_reader, url_of
from stoker._stores.object_store import ObjectStore, with_meter
from stoker.abc import RangeReadable
from stoker.errors import ArgumentError, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStatistics:
    """Counts since the data set was opened. A forked process continues the counts of its parent.

    Attributes:
        samples: samples returned.
        get_requests: GET requests sent, including hedges, retries and the manifest's.
        read_bytes: bytes received.
        retries: requests sent again after a failure.
        hedges: duplicate requests sent because the first was late.
        hedge_wins: hedges that finished before the first request.
        dollars: price of the requests and bytes, according to the price file.
    """

    samples: int
    get_requests: int
    read_bytes: int
    retries: int
    hedges: int
    hedge_wins: int
    dollars: float


_LOADER = "use stoker_torch.Loader for shuffled batches, or pass this data set to a torch DataLoader"
_HINTS = {
    "batch_size": _LOADER,
    "shuffle": _LOADER,
    "num_workers": _LOADER,
    "mode": "a data set is opened for reading; to write one, use stoker.Packer",
    "schema": "the data set has a schema already; to select columns, use columns=",
}


@explain_arguments("stoker.open", _HINTS)
class Dataset(Closeable):
    """A map-style data set: random access to the samples of one version, by number in packed order.

    ``dataset[i]`` returns sample ``i`` as a dictionary from column name to the packed value, which owns its memory: an
    array, ``bytes`` or ``str``. :meth:`samples` reads many samples concurrently; PyTorch's ``DataLoader`` uses it for
    each batch. Every value is verified by its checksum.

    The first sample of a super-sample takes two GETs, one for the head and one for the values; further ones take one
    GET while the head is cached, or none if all their columns are small. Adjacent values of a super-sample are read
    in one range, and a super-sample that is needed almost entirely is read whole, in one GET.

    The constructor reads only the manifest. A data set may be used from several threads. A forked process opens its
    own connections. A pickle holds the URL, the settings and the version, and reopens the data set when loaded. To
    read all samples once, in any order, a ``Loader`` needs far fewer requests.

    Args:
        url: location of the data set: a path, ``file://``, ``s3://``, ``gs://`` or ``memory://`` URL; or a
            :class:`stoker.abc.Store`, which runs on the data set's own thread and event loop.
        version: version of the manifest, from 1; default the newest.
        columns: names of the columns to read, in this order; default all.
        memory: memory per process for the manifest, heads and values in flight, in bytes or as ``"256MB"``. Returned
            samples belong to the caller and are not counted.
        options: connection settings of the bucket (``S3Options``, ``GcsOptions``).
        fetch: deadlines, retries, hedges and concurrency.

    Raises:
        ConfigError: a setting is invalid, or a column does not exist.
        NotFoundError: the URL has no data set, or the data set has no such version.
        MemoryBudgetError: the memory is too small; the message names the smallest size that works.

    Example:
        >>> with stoker.open("s3://bucket/train", columns=["image", "label"]) as photos:
        ...     first = photos[0]
        ...     batch = photos.samples([5, 3, -1])
        ...     len(photos), [sample["label"].item() for sample in batch]
        (128, [5, 3, 7])
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | RangeReadable,
        *,
        version: int | None = None,
        columns: Sequence[str] | None = None,
        memory: int | str = "256MB",
        options: StoreOptions | None = None,
        fetch: FetchConfig | None = None,
    ) -> None:
        if version is not None and (type(version) is not int or version < 1):
            raise ConfigError(f"version must be a positive integer, not {version!r}")
        self._place, self.url = url, url_of(url)
        self._settings: dict[str, Any] = {"memory": memory, "options": options, "fetch": fetch}
        memory_bytes = parse_bytes(memory, "memory")
        check_fetch(FetchConfig() if fetch is None else fetch)
        inner = open_reader(url, options=options)
        self._source = _DatasetReader(with_meter(inner))
        self._thread = LoopThread("stoker-dataset", on_close=self._source.close)
        try:
            self._manifest = self._thread.run(read_manifest(self._source.store, version))
            self._schema = Schema(self._manifest.schema.select(columns))
            self._samples = self._manifest.samples
            self._source.plan(self._manifest, self._schema, memory_bytes, fetch or FetchConfig())
        except BaseException:
            self._thread.close()
            raise

    @property
    def manifest(self) -> Manifest:
        """The manifest of the version that is read."""
        return self._manifest

    @property
    def schema(self) -> Schema:
        """The columns that are read, in the order of each sample's dictionary."""
        return self._schema

    def __repr__(self) -> str:
        size = describe_manifest(self._manifest, self._schema)
        return f"<Dataset {self._source.store.url} version {self._manifest.version}: {size}>"

    def _repr_html_(self) -> str:
        manifest = self._manifest
        rows = [
            ("version", str(manifest.version)),
            ("samples", f"{len(self):,}"),
            ("super-samples", f"{len(manifest):,}, {format_bytes(manifest.size_bytes)}"),
            *((f"column {name}", describe_type(column)) for name, column in self._schema.items()),
        ]
        return html_table(f"Dataset {self._source.store.url}", rows)

    def __reduce__(self) -> tuple[Any, ...]:
        settings = {**self._settings, "columns": tuple(self._schema), "version": self._manifest.version}
        check_picklable(self._place, "a store")
        return partial(Dataset, **settings), (self._place,)

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield all samples in packed order, reading one super-sample at a time."""
        for start, end in pairwise(accumulate(map(int, self._manifest.rows.samples), initial=0)):
            yield from self.samples(range(start, end))

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """Return one sample; a negative index counts from the end.

        Raises:
            IndexError: the index is out of range.
            StoreError: the sample could not be read; the message names the object.
        """
        try:
            number = operator.index(index)
        except TypeError:
            raise TypeError(f"index {index!r} is not an integer; for several samples use .samples(range(…))") from None
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} is out of range: the data set has {len(self)} samples")
        return self.samples([number])[0]

    def samples(self, indices: ArrayLike) -> list[dict[str, Any]]:
        """Return samples by number, in the order of ``indices``, which may repeat.

        Besides the result, at most ``memory`` is used, for any number of indices. A KeyboardInterrupt cancels the call.

        Args:
            indices: sequence of integers, or integer array ``[samples]``; negative indices count from the end.

        Raises:
            IndexError: an index is out of range; nothing was read.
            ArgumentError: the indices are not integers.
            StoreError: all retries failed; the message names the object and, for a wrong checksum of a value, row
                and column.
            FormatError: an object does not match the manifest.
        """
        return self._thread.run(self._source.read(_sample_numbers(indices, len(self))))

    __getitems__ = samples  # PyTorch's DataLoader calls this for a batch

    def value_sizes(self, column: str, indices: ArrayLike) -> NDArray[np.int64]:
        """Return the sizes of packed values in bytes, ``int64 [samples]``, without reading the values.

        The sizes of a ragged column (``Bytes``, ``Text``, ``Ragged``) are in the heads of super-samples, which are
        read, and cached within ``memory``; all values of an ``Array`` column have one size.

        Example:
            >>> with stoker.open("s3://bucket/train") as photos:
            ...     photos.value_sizes("label", [0, 1]).tolist()
            [8, 8]

        Args:
            column: name of a column that is read.
            indices: samples by number, as for :meth:`samples`.

        Raises:
            ConfigError: the column is not read.
            IndexError: an index is out of range.
            ArgumentError: the indices are not integers.
            StoreError: a head could not be read; the message names the object.
        """
        self._schema.select([column])
        return self._thread.run(self._source.value_sizes(column, _sample_numbers(indices, len(self))))

    def read_object(self, row: int, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes of an object of the data set: a super-sample, as it is in the bucket.

        A whole object is verified by its checksum. A part has none; the bucket is asked for it under the condition
        that the object is the packed one, unless the bucket was copied.

        Example:
            >>> with stoker.open("s3://bucket/train") as photos:
            ...     whole = photos.read_object(0)
            ...     photos.read_object(0, 8, 12) == whole[8:12]
            True

        Args:
            row: row of the manifest, from 0; ``manifest.key(row)`` is the object's key.
            start: first byte.
            end: byte behind the last; default the size of the object.

        Raises:
            IndexError: the manifest has no such row, or the object no such range.
            StoreError: all retries failed; the message names the object.
        """
        key, size_bytes = self._manifest.key(row), int(self._manifest.rows.size_bytes[row])
        end = size_bytes if end is None else end
        if not 0 <= start <= end <= size_bytes:
            raise IndexError(f"range [{start}, {end}) is not within {key}, which has {size_bytes} bytes")
        return self._thread.run(self._source.read_object(row, start, end))

    def stats(self) -> DatasetStatistics:
        """Return the counts so far: samples, requests, bytes, retries, hedges and dollars."""
        return self._source.statistics()

    def close(self) -> None:
        """Close connections, end the thread and free the memory. Idempotent; a later read reopens the data set.

        A concurrent call in another thread raises StokerError.
        """
        self._thread.close()


class _DatasetReader:
    """The readers of a data set, which do not refer to it: the thread must not keep it from garbage collection."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._readers = PerLoop(self._create_reader)
        self._samples = 0
        self._fetched = FetchCounters()

    def plan(self, manifest: Manifest, columns: Schema, memory_bytes: int, fetch: FetchConfig) -> None:
        """Plan the memory; connections and buffers follow with the first read.

        Raises:
            MemoryBudgetError: the memory is too small; the message names the smallest size that works.
        """
        hedges, request_bytes = fetch.hedge_burst if fetch.hedge else 0, fetch.max_request_bytes
        memory = SampleMemory.plan(manifest, hedges, memory_bytes, max_request_bytes=request_bytes)
        self._make = partial(SampleReader, self.store, manifest, columns, memory, fetch, self._fetched)

    def _create_reader(self) -> SampleReader:
        return self._make()

    async def read(self, numbers: NDArray[np.int64]) -> list[dict[str, Any]]:
        """Return samples by number, with the reader of the running event loop and process."""
        samples = await self._readers.get().read(numbers)
        self._samples += len(samples)
        return samples

    async def value_sizes(self, column: str, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of a column's values, with the reader of the running event loop and process."""
        return await self._readers.get().value_sizes(column, numbers)

    async def read_object(self, row: int, start: int, end: int) -> bytes:
        """Return bytes of an object, with the reader of the running event loop and process."""
        return await self._readers.get().read_object(row, start, end)

    async def close(self) -> None:
        """Close the running loop's reader and connections."""
        self._readers.pop()
        await self.store.close()

    def statistics(self) -> DatasetStatistics:
        """Return a snapshot of the counts."""
        reading, fetched = self.store.meter.snapshot(), self._fetched
        return DatasetStatistics(
            samples=self._samples,
            get_requests=reading.requests[Operation.GET],
            read_bytes=reading.read_bytes,
            retries=sum(fetched.retries.copy().values()),
            hedges=fetched.hedges,
            hedge_wins=fetched.hedge_wins,
            dollars=Prices.load().dollars(reading),
        )


def _sample_numbers(indices: ArrayLike, samples: int) -> NDArray[np.int64]:
    """Return indices as sample numbers from 0, ``int64 [samples]``."""
    try:
        array = np.asarray(indices)
    except ValueError:  # sequences of different lengths
        raise ArgumentError(f"indices must be a sequence or array [samples] of integers, not {indices!r:.80}") from None
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise ArgumentError(
            f"indices must be a sequence or array [samples] of integers, not {array.dtype} {array.shape}"
        )
    outside = array[(array < -samples) | (array >= samples)]
    if len(outside):
        raise IndexError(f"sample {outside[0]} is out of range: the data set has {samples} samples")
    numbers = array.astype(np.int64)
    return np.where(numbers < 0, numbers + samples, numbers)
