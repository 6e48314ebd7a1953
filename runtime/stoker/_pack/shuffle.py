"""``pack --shuffle``: packs samples in the order of one uniform permutation, out of core.

The samples are first packed in the source's order into the pack's **work folder**, ``packs/<pack>/``, because their
number, on which the permutation depends, is known only at the end of the source. They are then read in the order of the
permutation (:mod:`stoker._pack.scatter`) and packed again, as any pack run. Neither the number of parts nor the memory
changes the result. The work folder has no manifest, so nobody can open it as a data set. It is deleted after the
commit; if the pack is given up, garbage collection deletes it.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from stoker._base.meter import FolderStore
from stoker._base.retry import RetryingReader, RetryingStore
from stoker._base.task_group import for_each
from stoker._fetch.materialized_pipeline import load_manifest
from stoker._format.manifest import Manifest
from stoker._format.supersample import Head
from stoker._order.epoch_layout import MAX_SLICES, EpochLayout
from stoker._order.random_words import Purpose
from stoker._pack.plan import PackConfig, plan_pack
from stoker._pack.record import list_records
from stoker._pack.run import FinishedSuperSample, PackProgress, RunWriter, SuperSampleWriter
from stoker._pack.scatter import Scatter
from stoker._pack.stored_samples import StoredSamples, sample_bytes
from stoker.abc import Store
from stoker.errors import ChecksumError, MemoryBudgetError, PackError, StoreError

_log = logging.getLogger("stoker.pack.shuffle")
WORK_KEY_PATTERN = re.compile(r"packs/([0-9a-f]{16})/.+", re.ASCII)
"""Keys in the work folder of a pack, whose id is the first group."""
_WORK_URL_PATTERN = re.compile(r".+/packs/[0-9a-f]{16}/?", re.ASCII)
_STAGED_KEY = "staged.safetensors"  # not where a data set has its manifest
_CELLS_FOLDER = "cells/"
_HEADROOM = 1.2
"""Memory of a part divided by the memory of an average part, since parts differ in size."""
_MAX_CONCURRENT_DELETES = 16


def work_folder(store: Store, pack: str) -> FolderStore:
    """Return the work folder of a pack, without retries.

    Args:
        store: store of the data set.
        pack: id of the pack: of its run, or of its job.
    """
    return FolderStore(store.wrapped if isinstance(store, RetryingReader) else store, f"packs/{pack}/")


def work_url(url: str, pack: str) -> str:
    """Return the URL of the work folder of a pack to the data set at ``url``."""
    return f"{url.rstrip('/')}/packs/{pack}"


def is_work_url(url: str) -> bool:
    """Return whether a URL is that of a pack's work folder, whose records need no catalog."""
    return _WORK_URL_PATTERN.fullmatch(url) is not None


async def publish_staged(store: Store, pack: str, runs: Sequence[str]) -> Manifest:
    """Store and return the manifest of the samples that functions have packed into a pack's work folder.

    Args:
        store: store of the data set.
        pack: id of the pack.
        runs: runs in the work folder, in order of the samples.

    Raises:
        PackError: a run is not complete.
    """
    folder = RetryingStore(work_folder(store, pack))
    records = {item.record.run: item.record for item in await list_records(folder) if item.record is not None}
    prefixes = [records[run].prefix for run in runs if run in records and records[run].state == "complete"]
    manifests = [prefix for prefix in prefixes if prefix is not None]
    if len(manifests) < len(runs):
        raise PackError(
            f"{len(runs) - len(manifests)} of {len(runs)} parts of job {pack} are incomplete; run the same command "
            "again"
        )
    staged = replace(
        manifests[0],
        rows=manifests[0].rows.concatenate(*(each.rows for each in manifests[1:])),
        runs=tuple(run for each in manifests for run in each.runs),
    )
    await folder.put(_STAGED_KEY, staged.to_bytes())
    return staged


async def read_staged(store: Store, pack: str) -> Manifest:
    """Return the manifest that :func:`publish_staged` stored.

    Raises:
        NotFoundError: there is none, because the pack was committed or given up.
    """
    staged, _ = await load_manifest(work_folder(store, pack), _STAGED_KEY)
    return staged


async def delete_work_folder(store: RetryingStore, pack: str) -> None:
    """Delete the objects in the work folder of a pack that was committed or has no samples; log it if that fails."""
    try:
        async with aclosing(store.list(f"packs/{pack}/")) as infos:
            keys = [info.key async for info in infos]
        await for_each(keys, store.delete, concurrency=_MAX_CONCURRENT_DELETES)
    except StoreError as error:
        _log.warning(
            "cannot delete the temporary objects of the permutation (%s); delete them with: stoker gc --delete %s",
            error,
            store.url,
        )


async def open_staging(
    store: Store, pack: str, config: PackConfig, on_progress: Callable[[PackProgress], object] | None = None
) -> RunWriter:
    """Return the run that packs the samples in the source's order into the work folder; it is resumed if it exists.

    Args:
        store: store of the data set.
        pack: id of the pack.
        config: configuration of the pack.
        on_progress: called with the durable progress each time it grows.
    """
    folder = RetryingStore(work_folder(store, pack), config.retry)
    plan = await plan_pack(folder, replace(config, mode="create", source="staged samples", shuffle=None))
    samples = SuperSampleWriter(config.schema, config.super_sample_bytes, dataset=plan.dataset, run=plan.record.run)
    writer = RunWriter(folder, samples, plan.record, plan.journal, on_progress, concurrency=config.concurrency)
    await writer.begin()
    return writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """The permutation of the samples of one pack, and the parts in which it is written.

    Attributes:
        pack: id of the pack: of its run, or of its job.
        seed: seed of the permutation.
        parts: number of slices.
        object_bytes: limit of a super-sample's data.
    """

    pack: str
    seed: int
    parts: int
    object_bytes: int

    def count_scatters(self, staged: Manifest) -> int:
        """Return the number of parts that the super-samples are cut into: none if one slice has all samples."""
        return 0 if self.parts == 1 else min(self.parts, len(staged))

    def scatter(
        self, store: Store, staged: Manifest, *, memory_bytes: int, stop_at_seconds: float = math.inf
    ) -> Scatter:
        """Return the permuted order of staged samples, and the way to read them in it.

        Args:
            store: store of the data set.
            staged: manifest of the samples in the work folder, in the source's order.
            memory_bytes: memory that permuting may use.
            stop_at_seconds: time on the clock of the event loop after which no more work is begun.
        """
        folder = work_folder(store, self.pack)
        layout = EpochLayout(staged, seed=self.seed, lanes=1, epoch=0, purpose=Purpose.PACK)
        return Scatter(
            store=folder,
            folder=FolderStore(folder, _CELLS_FOLDER),
            layout=layout,
            slice_starts=layout.slice_starts(self.parts),
            scatters=self.count_scatters(staged),
            object_bytes=self.object_bytes,
            memory_bytes=memory_bytes,
            stop_at_seconds=stop_at_seconds,
        )


class PermutedWriter:
    """Packs stored samples into a run, and checks that each value still has the checksum of its first packing.

    Args:
        run: run that gets the samples.
    """

    def __init__(self, run: RunWriter) -> None:
        self._run = run
        self._checksums: list[bytes] = []

    async def write(self, samples: StoredSamples) -> None:
        """Pack samples, and release each.

        Raises:
            ChecksumError: a value changed in memory; it was not written.
            StoreError: an upload failed.
        """
        writer = self._run.sample_writer
        for values, checksums in samples.rows():
            if cut := writer.add_encoded(values, f"sample {writer.samples}"):
                await self._submit(cut)
            self._checksums.append(checksums)

    async def complete(self) -> None:
        """Upload the last super-sample, wait for all uploads, and record that the run is complete."""
        if cut := self._run.sample_writer.finish():
            await self._submit(cut)
        await self._run.complete()

    async def _submit(self, cut: FinishedSuperSample) -> None:
        head = Head.parse(cut.data[: cut.packed.head_bytes], len(cut.data))
        if head.checksums.tobytes() != b"".join(self._checksums):
            raise ChecksumError(
                f"super-sample {cut.packed.ordinal}: a value changed in memory after it was read; pack again"
            )
        self._checksums.clear()
        await self._run.submit(cut)


async def pack_permuted(store: Store, run: RunWriter, staged: Manifest, config: PackConfig) -> None:
    """Pack all staged samples into a run, in the order of the permutation, after those that are durable.

    Raises:
        MemoryBudgetError: the memory is too small.
        ChecksumError: a staged object is damaged.
        StoreError: the store failed.
    """
    run.skip_durable()
    writer = PermutedWriter(run)
    parts, max_parts = _count_parts(staged, config), min(staged.samples, MAX_SLICES)
    while run.sample_writer.samples < staged.samples:
        try:
            await _write_rest(store, run, writer, staged, config, parts)
        except MemoryBudgetError:  # parts of very uneven sizes
            if parts == max_parts:
                raise
            parts = min(2 * parts, max_parts)
    await writer.complete()


def _count_parts(staged: Manifest, config: PackConfig) -> int:
    """Return the number of parts of which each fits in memory."""
    memory = config.plan_memory(staged.largest_bytes)
    held_bytes = sample_bytes(len(staged.schema), staged.samples, staged.size_bytes) * _HEADROOM
    return min(math.ceil(held_bytes / memory.values_bytes), staged.samples, MAX_SLICES)


async def _write_rest(
    store: Store, run: RunWriter, writer: PermutedWriter, staged: Manifest, config: PackConfig, parts: int
) -> None:
    """Pack the samples that the run lacks, with a number of parts."""
    assert config.shuffle is not None  # noqa: S101 - of a pack that permutes
    permutation = Permutation(
        pack=run.record.run, seed=config.shuffle, parts=parts, object_bytes=config.super_sample_bytes
    )
    scatter = permutation.scatter(store, staged, memory_bytes=config.memory_bytes)
    for part in range(scatter.scatters):
        await scatter.write(part)
    for part, end in enumerate(scatter.slice_starts[1:].tolist()):
        start = int(scatter.slice_starts[part])
        if (done := run.sample_writer.samples) < end:
            await writer.write(await scatter.read(part, done - start))
