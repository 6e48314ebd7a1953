"""Batches of samples that the consumer has itself: only their places in the order are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from stoker._fetch.batch_stream import Batch, StoredDataset
from stoker._order.order import Order
from stoker._order.sharding import LaneSlice, RankStep
from stoker._order.steps import PositionRange

_STEPS_AT_ONCE = 64
"""Steps whose samples are computed together: a batch is then a few slices of arrays."""


class ResidentStream:
    """Delivers the batches of a range of the order without columns; reads nothing, and needs no thread.

    Args:
        dataset: data set of the samples; its super-samples are the units of the order.
        positions: range of the rank's order.
    """

    is_closed = False

    def __init__(self, dataset: StoredDataset, positions: PositionRange) -> None:
        self._dataset, self._positions = dataset, positions
        self._batches = self._iter_epochs()

    def start(self) -> None:
        """Do nothing: nothing is fetched."""

    def next(self, dataset: StoredDataset) -> Batch | None:
        """Return the samples of the next step, or None at the end of the run."""
        return next(self._batches, None)

    def is_ready(self) -> bool:
        """Return that :meth:`next` does not wait."""
        return True

    def close(self) -> None:
        """Do nothing: nothing is fetched."""

    def _iter_epochs(self) -> Iterator[Batch]:
        counts = self._dataset.manifest.rows.samples
        for epoch, sharding, position in self._positions.epochs():
            order = Order(counts, self._positions.order, epoch)
            steps = sharding.steps(position)
            while some := list(islice(steps, _STEPS_AT_ONCE)):
                yield from self._batches_of(order, some)

    def _batches_of(self, order: Order, steps: Sequence[tuple[RankStep, bool]]) -> Iterator[Batch]:
        super_samples, rows = order.locate(_samples_of(order, [part for step, _ in steps for part in step.slices]))
        ends = np.cumsum([step.samples for step, _ in steps]).tolist()
        resident = np.ones(len(rows), np.bool_)
        for (step, is_last), (start, end) in zip(steps, pairwise([0, *ends]), strict=True):
            yield Batch(
                columns={},
                epoch=order.epoch,
                end=step.end,
                is_last=is_last,
                super_samples=super_samples[start:end],
                rows=rows[start:end],
                repeated=step.repeated,
                dataset=self._dataset,
                resident=resident[start:end],
            )


def _samples_of(order: Order, slices: Sequence[LaneSlice]) -> NDArray[np.int64]:
    """Return the samples of slices, one after the other, as numbers in packed order, ``int64``."""
    if order.config.shuffle == "full":
        return order.feistel()(np.concatenate([part.positions(order.lanes) for part in slices]))
    merged: list[LaneSlice] = []
    for part in slices:
        if merged and (merged[-1].lane, merged[-1].end) == (part.lane, part.start):
            merged[-1] = LaneSlice(part.lane, merged[-1].start, part.end)
        else:
            merged.append(part)
    return np.concatenate([order.lane(part.lane).sample_ids(part.start, part.end - part.start) for part in merged])
