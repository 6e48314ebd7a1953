"""The steps of ``full`` where not everything fits in memory: the rank's samples, cut into groups in their order.

A group is read as one item and needed for a while: for whole batches where it holds several, for part of one where a
batch is larger than a group. The first group is one batch, and each one after it has up to twice as many, so that the
first batch does not wait for more than itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from stoker._fetch.group_plan import MOST_SAMPLES
from stoker._order.order import Order
from stoker._order.partition import Dealing, Step
from stoker._order.steps import PlannedStep, Rows, Segment, Stretch, walk_epochs

__all__ = ["Group", "GroupSteps"]

_LOOKED_UP_SAMPLES = 8192


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Samples that are read together.

    Attributes:
        super_samples: ``int64 [samples]``, each sample's manifest row.
        rows: ``int64 [samples]``, its row in that super-sample.
    """

    super_samples: NDArray[np.int64]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    step: Step
    is_last: bool
    samples: Group
    sizes: NDArray[np.int64]


class GroupSteps:
    """The steps of one rank, one epoch after the other; items are groups. A :class:`~stoker._order.steps.StepSource`.

    Args:
        samples: ``[super-samples]``, samples of each.
        stretch: what to walk, of an order that is ``full``.
        sizes_of: returns how many bytes must be read for each sample of a group, ``int64 [samples]``.
        group_bytes: the most that one group reads, unless one sample alone is larger.
    """

    def __init__(
        self,
        samples: NDArray[np.integer],
        stretch: Stretch,
        sizes_of: Callable[[Group], NDArray[np.int64]],
        group_bytes: int,
    ) -> None:
        self._sizes_of = sizes_of
        self._group_bytes = group_bytes
        self._most_batches = 1
        self._next_item = 0
        self._steps = walk_epochs(samples, stretch, self._walk)

    def next(self) -> PlannedStep[Group] | None:
        """Return the next step, or None behind the last."""
        return next(self._steps, None)

    def _walk(self, order: Order, dealing: Dealing, position: int) -> Iterator[PlannedStep[Group]]:
        for run in self._runs(self._batches(order, dealing, position)):
            yield from self._planned(order.epoch, run)

    def _batches(self, order: Order, dealing: Dealing, position: int) -> Iterator[_Batch]:
        """Look up the samples of the steps, those of several at once: a call of numpy takes as long as 100 samples."""
        permuted = order.feistel()
        walk = dealing.walk(position)
        while steps := list(islice(walk, max(1, _LOOKED_UP_SAMPLES // dealing.batch_size))):
            positions = [part.positions(dealing.lanes) for step, _ in steps for part in step.slices]
            samples = Group(*order.locate(permuted(np.concatenate(positions))))
            sizes = self._sizes_of(samples)
            start = 0
            for step, is_last in steps:
                these = slice(start, start + step.samples)
                yield _Batch(step, is_last, Group(samples.super_samples[these], samples.rows[these]), sizes[these])
                start = these.stop

    def _runs(self, batches: Iterator[_Batch]) -> Iterator[list[_Batch]]:
        """Put batches together as long as they fit in one group; one that does not is alone."""
        run: list[_Batch] = []
        size_bytes = samples = 0
        for batch in batches:
            batch_bytes = int(batch.sizes.sum())
            fits = size_bytes + batch_bytes <= self._group_bytes and samples + len(batch.samples) <= MOST_SAMPLES
            if run and (len(run) >= self._most_batches or not fits):
                yield run
                self._most_batches *= 2
                run, size_bytes, samples = [], 0, 0
            run.append(batch)
            size_bytes += batch_bytes
            samples += len(batch.samples)
        if run:
            yield run

    def _planned(self, epoch: int, run: list[_Batch]) -> Iterator[PlannedStep[Group]]:
        """Cut a run into groups, mostly one, and plan its steps over them."""
        super_samples = np.concatenate([batch.samples.super_samples for batch in run])
        rows = np.concatenate([batch.samples.rows for batch in run])
        cuts = _cuts(np.concatenate([batch.sizes for batch in run]), self._group_bytes)
        first_item, self._next_item = self._next_item, self._next_item + len(cuts) - 1
        start = 0
        for batch in run:
            end = start + len(batch.samples)
            segments: list[Segment] = []
            first_uses: list[tuple[int, Group]] = []
            for item, (group_start, group_end) in enumerate(pairwise(cuts), first_item):
                begin, stop = max(start, group_start), min(end, group_end)
                if begin >= stop:
                    continue
                if begin == group_start:
                    group = slice(group_start, group_end)
                    first_uses.append((item, Group(super_samples[group], rows[group])))
                segments.append(
                    Segment(
                        start=begin - start,
                        end=stop - start,
                        items=(item,),
                        picks=partial(_span, begin - group_start, stop - group_start),
                        passed=(),
                        done=(item,) if stop == group_end else (),
                    )
                )
            step = batch.step
            yield PlannedStep(0, epoch, step.end, batch.is_last, tuple(segments), step.repeated, tuple(first_uses))
            start = end


def _cuts(sizes: NDArray[np.int64], most_bytes: int) -> list[int]:
    """Return where to cut so that no part has more bytes, unless it is one sample: 0, …, ``len(sizes)``."""
    ends = np.cumsum(sizes)
    cuts = [0]
    while cuts[-1] < len(sizes):
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, before + most_bytes, "right"))))
    return cuts


def _span(start: int, end: int) -> Rows:
    return np.zeros(end - start, np.int64), np.arange(start, end)
