"""The part of a workload that is simulated for the whole: enough to tell, and little enough to take a second."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from stoker._format.manifest import Manifest, PackRun
from stoker_sim._planning.workload import Workload

__all__ = ["beginning", "excerpt"]

_MOST_FETCHES = 400
_MOST_STEPS = 3_000
"""Simulated in an epoch, on all ranks together. The rest is extrapolated."""
_LEAST_WINDOWS = 4
"""Simulated on each rank, however many steps that is."""
_MOST_TINY_STEPS, _TINY_STEPS_EACH = 4 * _MOST_STEPS, 32
"""Where there are more steps than the first, some are simulated as one, but each super-sample lasts for the second."""
_START_STEPS = 2
"""Of all ranks, that are simulated of a start."""
_MOST_RANKS = 8
"""Simulated, or one node's; where there are more, each has as much to do as before, in a data set as much smaller."""


def excerpt(workload: Workload) -> Workload:
    """Return as much of a workload as is simulated: fewer nodes, and fewer super-samples for each of their ranks.

    A short last step, for which some super-samples are read again, comes once in a whole epoch, and is left out of a
    part that stands for more.
    """
    feed, manifest = workload.feed, workload.manifest
    ranks = workload.ranks_per_node * min(workload.nodes, max(1, _MOST_RANKS // workload.ranks_per_node))
    share = len(manifest) * ranks / feed.world_size
    step_fetches = feed.batch_size * len(manifest) / manifest.samples
    least = _LEAST_WINDOWS * feed.order.window * feed.order.lanes * ranks // feed.world_size
    kept = max(min(_MOST_FETCHES, int(_MOST_STEPS * step_fetches)), least)
    if kept >= share and ranks == feed.world_size:
        return replace(workload, feed=replace(feed, batch_size=_coarse_batch(feed.batch_size, manifest)))
    small = _thinned(manifest, max(1, min(kept, round(share))), manifest.samples * ranks / feed.world_size)
    lanes = max(1, feed.order.lanes * ranks // feed.world_size)
    held_bytes = feed.held_bytes + manifest.file_bytes - small.file_bytes
    batch_size = _coarse_batch(feed.batch_size, small)
    cut = replace(
        feed,
        batch_size=batch_size,
        world_size=ranks,
        held_bytes=held_bytes,
        order=replace(feed.order, lanes=lanes),
        drop_last=feed.drop_last or small.samples >= 2 * batch_size * ranks,
    )
    rate = workload.bucket.requests_per_second * ranks / feed.world_size
    bucket = replace(workload.bucket, requests_per_second=rate)
    return replace(workload, manifest=small, feed=cut, bucket=bucket)


def beginning(small: Workload, super_samples: int) -> Workload:
    """Return as much of an excerpt as its start reads: so many super-samples or a few steps, if it has more."""
    manifest, feed = small.manifest, small.feed
    step_fetches = feed.world_size * feed.batch_size * len(manifest) / manifest.samples
    kept = max(super_samples, math.ceil(_START_STEPS * step_fetches))
    if len(manifest) <= kept:
        return small
    thinned = _thinned(manifest, kept, float(manifest.samples))
    return replace(small, manifest=thinned, feed=replace(feed, drop_last=False))


def _coarse_batch(batch_size: int, manifest: Manifest) -> int:
    """Return the size of batches to simulate: several at once where they are many, and tiny beside super-samples."""
    several = manifest.samples // (batch_size * _MOST_TINY_STEPS)
    each = manifest.samples // (batch_size * len(manifest) * _TINY_STEPS_EACH)
    return batch_size * max(1, min(several, each))


def _thinned(manifest: Manifest, kept: int, most_samples: float) -> Manifest:
    """Return a manifest of so many super-samples evenly taken from another, the largest one always among them.

    Where more ranks share a super-sample than are simulated, each has fewer samples, ``most_samples`` in all.
    """
    rows = manifest.rows
    keep = np.zeros(len(manifest), np.bool_)
    keep[np.linspace(0, len(manifest) - 1, kept).astype(np.int64)] = True
    largest = int(rows.size_bytes.argmax())
    if not keep[largest]:
        keep[int(np.flatnonzero(keep)[0])], keep[largest] = False, True
    run = PackRun(manifest.runs[0].run, 0, int(keep.sum()))
    rows = rows.kept(keep)
    too_many = float(rows.samples.sum()) / most_samples
    if too_many > 1.0:
        rows = replace(rows, samples=np.maximum(1, rows.samples / too_many).astype(rows.samples.dtype))
    return replace(manifest, rows=rows, runs=(run,))
