"""Random access: a data set in a bucket as a sequence of samples, read by number."""

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
from stoker._base.closing import Closing
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
from stoker._stores.object_store import ObjectStore, metered
from stoker.abc import RangeReadable
from stoker.errors import ArgumentError, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStatistics:
    """Counts since the data set was opened, in this process and, of a forked one, in its parent before.

    Attributes:
        samples: returned.
        get_requests: sent, hedges, retries and the manifest's included.
        read_bytes: that arrived.
        retries: requests that were tried again.
        hedges: requests that were sent a second time because they were late.
        hedge_wins: of these, those that were faster.
        dollars: what the store asks for the requests and bytes, from the price file.
    """

    samples: int
    get_requests: int
    read_bytes: int
    retries: int
    hedges: int
    hedge_wins: int
    dollars: float


_LOADER = "use stoker_torch.Loader, which makes batches in a shuffled order, or this data set in a DataLoader"
_HINTS = {
    "batch_size": _LOADER,
    "shuffle": _LOADER,
    "num_workers": _LOADER,
    "mode": "a data set is opened to read; to write, use stoker.Packer",
    "schema": "it is in the data set; columns= chooses among its columns",
}


@explain_arguments("stoker.open", _HINTS)
class Dataset(Closing):
    """The samples of one version of a data set, by their number in the packed order: a map-style data set.

    ``dataset[i]`` is sample ``i``, a dictionary of column and value as they were packed: an array, ``bytes`` or
    ``str``, each with memory of its own. :meth:`samples` reads many at once, which is what a ``DataLoader`` of PyTorch
    does for each batch. Every value is verified by its checksum.

    A sample takes two GETs when it is the first of its super-sample, for the head and for the values, and then one,
    as long as the head is kept; none where all its columns are small. Values of the same super-sample that lie near
    each other are read as one, and a super-sample of which nearly everything is asked for is read whole, in one GET.

    Construction reads the manifest, and nothing else. May be used from several threads; a forked process connects
    anew, and a pickle is the URL, the settings and the version, opened again where it is loaded. To read everything
    once, in whatever order, a ``Loader`` takes far fewer requests.

    Args:
        url: place of the data set: a path, ``file://``, ``s3://``, ``gs://`` or ``memory://``; or a
            :class:`stoker.abc.Store`, which is used on the data set's own thread and event loop.
        version: of the manifest; default the newest.
        columns: which to read, in this order; default all.
        memory: of each process, for the manifest, heads, and values on their way: bytes or ``"256MB"``. Samples that
            were returned are the caller's and not counted.
        options: how to reach the bucket (``S3Options``, ``GcsOptions``).
        fetch: deadlines, retries, hedges and concurrency.

    Raises:
        ConfigError: a setting is wrong, or there is no such column.
        NotFoundError: there is no data set at the URL, or it has no such version.
        BudgetError: the memory is too small; names the figure that fits.
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
            raise ConfigError(f"version {version!r} is not an integer from 1")
        self._place, self.url = url, url_of(url)
        self._settings: dict[str, Any] = {"memory": memory, "options": options, "fetch": fetch}
        memory_bytes = parse_bytes(memory, "memory")
        check_fetch(FetchConfig() if fetch is None else fetch)
        inner = open_reader(url, options=options)
        self._source = _Source(metered(inner))
        self._thread = LoopThread("stoker-dataset", last=self._source.close)
        try:
            self._manifest = self._thread.run(read_manifest(self._source.store, version))
            self._schema = Schema(self._manifest.schema.chosen(columns))
            self._samples = self._manifest.samples
            self._source.begin(self._manifest, self._schema, memory_bytes, fetch or FetchConfig())
        except BaseException:
            self._thread.close()
            raise

    @property
    def manifest(self) -> Manifest:
        """The pinned version of the data set's index."""
        return self._manifest

    @property
    def schema(self) -> Schema:
        """The columns that are read, in the order in which samples have them."""
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
        """Yield all samples in the packed order; those of a super-sample are read at a time."""
        for start, end in pairwise(accumulate(map(int, self._manifest.rows.samples), initial=0)):
            yield from self.samples(range(start, end))

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """Return one sample; a negative index counts from the end.

        Raises:
            IndexError: there is no such sample.
            StoreError: it could not be had; names the object.
        """
        try:
            number = operator.index(index)
        except TypeError:
            raise TypeError(f"index {index!r} is not an integer; for several samples use .samples(range(…))") from None
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of a data set with {len(self)}")
        return self.samples([number])[0]

    def samples(self, indices: ArrayLike) -> list[dict[str, Any]]:
        """Return samples by number, in the order asked for, any of them more than once.

        Args:
            indices: a sequence of integers, or an integer array ``[samples]``; negative ones count from the end.

        However many are asked for, no more than ``memory`` is held beside the result. An interrupt ends the reading.

        Raises:
            IndexError: there is no such sample; nothing was read.
            ArgumentError: these are no integers.
            StoreError: bytes could not be had after all retries; names object, and row and column if a value is not
                what was packed.
            FormatError: an object is not what the manifest says.
        """
        return self._thread.run(self._source.read(_numbers(indices, len(self))))

    __getitems__ = samples  # PyTorch's DataLoader asks for a batch by this name

    def stats(self) -> DatasetStatistics:
        """Return what was done so far: samples, requests, bytes, retries, hedges, dollars."""
        return self._source.statistics()

    def close(self) -> None:
        """Close connections, end the thread and free the memory. Idempotent; reading again starts anew.

        A call under way in another thread raises StokerError.
        """
        self._thread.close()


class _Source:
    """What samples are read from. Apart from the data set, so that the thread can close it when that is garbage."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._readers = PerLoop(self._made)
        self._samples = 0
        self._fetched = FetchCounters()

    def begin(self, manifest: Manifest, columns: Schema, memory_bytes: int, fetch: FetchConfig) -> None:
        """Prepare to read; nothing is connected or allocated yet.

        Raises:
            BudgetError: the memory is too small; names the figure that fits.
        """
        memory = SampleMemory.plan(manifest, fetch.hedge_burst if fetch.hedge else 0, memory_bytes)
        self._make = partial(SampleReader, self.store, manifest, columns, memory, fetch, self._fetched)

    def _made(self) -> SampleReader:
        return self._make()

    async def read(self, numbers: NDArray[np.int64]) -> list[dict[str, Any]]:
        """Return samples; on whatever loop and in whatever process, with a reader that belongs there."""
        found = await self._readers.get().read(numbers)
        self._samples += len(found)
        return found

    async def close(self) -> None:
        """Let go of the running loop's reader and connections."""
        self._readers.take()
        await self.store.close()

    def statistics(self) -> DatasetStatistics:
        """Return a snapshot."""
        reading, fetched = self.store.meter.reading(), self._fetched
        return DatasetStatistics(
            samples=self._samples,
            get_requests=reading.requests[Operation.GET],
            read_bytes=reading.read_bytes,
            retries=sum(fetched.retries.copy().values()),
            hedges=fetched.hedges,
            hedge_wins=fetched.hedge_wins,
            dollars=Prices.load().dollars(reading),
        )


def _numbers(indices: ArrayLike, samples: int) -> NDArray[np.int64]:
    """Return indices as numbers from 0."""
    try:
        found = np.asarray(indices)
    except ValueError:  # sequences of different lengths
        raise ArgumentError(f"indices are integers in a sequence or an array [samples], not {indices!r:.80}") from None
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise ArgumentError(
            f"indices are integers in a sequence or an array [samples], not {found.dtype} {found.shape}"
        )
    outside = found[(found < -samples) | (found >= samples)]
    if len(outside):
        raise IndexError(f"sample {outside[0]} of a data set with {samples}")
    numbers = found.astype(np.int64)
    return np.where(numbers < 0, numbers + samples, numbers)
