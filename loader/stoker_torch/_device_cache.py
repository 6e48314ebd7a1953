"""Samples that stay on a device: a fixed part of the super-samples, from which batches are gathered there.

GeePS keeps on the device what saves most copying per byte (H. Cui et al., EuroSys 2016, section 3.3). Every sample of a
data set is used once an epoch, so any part of it saves the same, if it stays: what is replaced before it is used again
saves nothing. The part is chosen by a hash of the super-samples' numbers, and is the same in all epochs and runs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker._base.sizes import format_bytes
from stoker._fetch.batch_stream import Batch
from stoker._format.manifest import Manifest
from stoker._order.random_words import mix
from stoker.errors import ConfigError
from stoker_torch._tensors import RaggedColumn, map_tensors

_log = logging.getLogger("stoker")

_NOT_CHOSEN = -1
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class CachePlan:
    """How a batch is completed from the cache, and what of it is kept.

    Attributes:
        samples: number of samples of the batch.
        counts: number of indices of each kind: rows of new samples in the batch as it was read, their places in the
            cache, places in the batch of the samples that were read and of those that are resident (none if all are),
            and the places of the latter in the cache.
        new: ``int64``, super-samples of the samples to keep.
        slots: ``int64``, their places in the cache.
    """

    samples: int
    counts: tuple[int, int, int, int, int]
    new: NDArray[np.int64]
    slots: NDArray[np.int64]


class DeviceCache:
    """Keeps the values of samples in memory of a device, as they are in batches before ``batch_transform``.

    Used by one thread at a time, on one stream, except the attributes and :meth:`has`.

    Args:
        manifest: index of the data set.
        limit_bytes: size of the cache.

    Attributes:
        storage: values of the samples on the device: a tensor ``[places, *shape]`` for each one of a batch.
        is_empty: whether it has no samples.
        is_complete: whether it has all samples of the data set.
    """

    def __init__(self, manifest: Manifest, limit_bytes: int) -> None:
        self.manifest, self._limit_bytes = manifest, limit_bytes
        self.clear()

    def clear(self) -> None:
        """Forget all samples, and release the memory on the device."""
        manifest = self.manifest
        self._samples = manifest.rows.samples.astype(np.int64)
        self._missing = self._samples.copy()  # of each super-sample
        self._bases = np.full(len(self._samples), _NOT_CHOSEN, np.int64)
        self._is_kept = np.zeros(0, np.bool_)  # by place
        self._layout: Any = None
        self.storage: list[torch.Tensor] = []
        self.is_empty, self.is_complete = True, False

    # Called by any thread.

    def has(self, super_sample: int) -> bool:
        """Return whether it has all samples of a super-sample."""
        return bool(self._missing[super_sample] == 0 and self._bases[super_sample] != _NOT_CHOSEN)

    @property
    def size_bytes(self) -> int:
        """Memory that it takes on the device, in bytes."""
        return sum(each.nbytes for each in self.storage)

    def places(self, batch: Batch) -> NDArray[np.int64]:
        """Return the places of a batch's samples in the cache, ``int64 [samples]``; arbitrary ones for others."""
        places: NDArray[np.int64] = self._bases[batch.super_samples] + batch.rows
        return places

    # Called by the thread that stages.

    def plan(self, batch: Batch, values: Any) -> tuple[CachePlan, torch.Tensor]:
        """Return the plan of a batch, and the indices that :meth:`complete` needs on the device, ``int64``.

        Args:
            batch: batch as it was read.
            values: its values that are not resident, in host memory, as they will be staged.

        Raises:
            ConfigError: the values are not tensors with a row for each sample.
        """
        places = self.places(batch)
        if batch.resident is not None and batch.resident.all():  # the batch consists of the places, in order
            return CachePlan(len(batch), (0, 0, 0, 0, len(batch)), _NONE, _NONE), torch.from_numpy(places)
        read = np.ones(len(batch), np.bool_) if batch.resident is None else ~batch.resident
        if self._layout is None:
            self._choose(values, int(read.sum()))
            places = self.places(batch)
        new = self._new_samples(batch, read, places)
        rows_of_new = (np.cumsum(read) - 1)[new]
        read_places, resident_places = np.flatnonzero(read), np.flatnonzero(~read)
        parts = rows_of_new, places[new], read_places, resident_places, places[resident_places]
        counts = tuple(map(len, parts))
        plan = CachePlan(len(batch), counts, batch.super_samples[new], places[new])  # type: ignore[arg-type]
        return plan, torch.from_numpy(np.concatenate(parts))

    def _new_samples(self, batch: Batch, read: NDArray[np.bool_], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples of a batch that were read, and are to be kept and are not yet."""
        is_new = read & (self._bases[batch.super_samples] != _NOT_CHOSEN)
        is_new[is_new] = ~self._is_kept[places[is_new]]
        _, first = np.unique(places[is_new], return_index=True)  # a sample may be repeated
        return np.flatnonzero(is_new)[first]

    def complete(self, plan: CachePlan, indices: torch.Tensor, values: Any) -> Any:
        """Keep the new samples of a batch on the device, and return the batch with its resident samples."""
        new_rows, new_slots, read, resident, slots = indices.split(list(plan.counts))
        staged = _leaves(values) if plan.counts[2] else []
        if not self.storage:
            shape = len(self._is_kept)
            self.storage = [leaf.new_empty((shape, *leaf.shape[1:])) for leaf in staged]
        if plan.counts[0]:
            for kept, leaf in zip(self.storage, staged, strict=True):
                kept.index_copy_(0, new_slots, leaf.index_select(0, new_rows))
            self._confirm(plan)
        if not plan.counts[4]:
            return values
        if not plan.counts[2]:
            return self.select(slots)
        found = [leaf.new_empty((plan.samples, *leaf.shape[1:])) for leaf in staged]
        for target, leaf, kept in zip(found, staged, self.storage, strict=True):
            target.index_copy_(0, read, leaf)
            target.index_copy_(0, resident, kept.index_select(0, slots))
        return self._as_batch(found)

    def select(self, places: torch.Tensor) -> Any:
        """Return the batch of samples that are all in the cache, given by their places, ``int64`` on the device."""
        return self._as_batch([kept.index_select(0, places) for kept in self.storage])

    def _as_batch(self, leaves: list[torch.Tensor]) -> Any:
        following = iter(leaves)
        return map_tensors(lambda _: next(following), self._layout)

    def _confirm(self, plan: CachePlan) -> None:
        """Count samples as kept, now that the copy is queued."""
        self._is_kept[plan.slots] = True
        np.subtract.at(self._missing, plan.new, 1)
        self.is_empty, self.is_complete = False, not self._missing.any()

    def _choose(self, values: Any, samples: int) -> None:
        """Choose the super-samples to keep, now that the size of a sample is known."""
        leaves = _leaves(values)
        for leaf in leaves:
            if leaf.ndim == 0 or len(leaf) != samples:
                raise ConfigError(
                    f"gpu_cache keeps tensors with a row for each of the {samples} samples of a batch, not one with "
                    f"the shape {tuple(leaf.shape)}"
                )
        if not leaves:
            raise ConfigError("gpu_cache keeps tensors, and the batches have none")
        row_bytes = sum(leaf.nbytes // samples for leaf in leaves)
        room = self._limit_bytes // max(1, row_bytes)
        order = np.argsort(mix(np.arange(len(self._samples), dtype=np.uint64)), kind="stable")
        ends = np.cumsum(self._samples[order])
        chosen = order[ends <= room]
        if not len(chosen):
            raise ConfigError(
                f"gpu_cache={format_bytes(self._limit_bytes)} does not hold the {self._samples[order[0]]} samples of "
                f"one super-sample, of {format_bytes(row_bytes)} each on the device"
            )
        self._bases[chosen] = ends[: len(chosen)] - self._samples[chosen]
        self._is_kept = np.zeros(int(ends[len(chosen) - 1]), np.bool_)
        self._layout = map_tensors(lambda _: torch.empty(0, device="meta"), values)
        _log.info(
            "gpu_cache: %d of %d super-samples stay on the device, %s",
            len(chosen),
            len(self._samples),
            format_bytes(len(self._is_kept) * row_bytes),
        )


def _leaves(values: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch, in a fixed order.

    Raises:
        ConfigError: it has ragged columns, or values that are no tensors.
    """
    found: list[torch.Tensor] = []

    def refuse(value: object) -> object:
        raise ConfigError(f"gpu_cache keeps tensors, and the batches have a {type(value).__name__}: {value!r:.80}")

    def add(value: torch.Tensor | RaggedColumn) -> torch.Tensor | RaggedColumn:
        if isinstance(value, RaggedColumn):
            raise ConfigError(
                "gpu_cache keeps values of one shape, and a ragged column has none: decode it, pad it in transform=, "
                "or leave it out with columns="
            )
        found.append(value)
        return value

    map_tensors(add, values, refuse)
    return found
