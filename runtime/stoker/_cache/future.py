"""When a rank needs each super-sample next: what an order that is fixed by a seed tells before anything is read."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stoker._order.order import Order
from stoker._order.sharding import Dealing
from stoker._order.steps import OrderSource, Stretch

__all__ = ["NEVER", "Future"]

NEVER = sys.maxsize
"""The time of what is not needed again, as far as one looks ahead."""
_NOT_HERE = -1
"""In an epoch's plan: this rank does not need it, or had it before the run went on from the middle of the epoch."""


class Future:
    """Tells, of each super-sample, when the rank needs it next. Times are positions of the run, epoch after epoch.

    What was dealt to this rank in one epoch may fall to another one in the next, so epochs are looked through until one
    needs it. Of a super-sample that is cut at the border of two lanes, an epoch's first use is told. An epoch's plan is
    made when it is first looked into, and costs 8 bytes a super-sample of the data set.

    Where the rank, or all that share a cache with it, read everything in each epoch, uses are told as the end of their
    epoch. A cache has as many hits then whatever of the next epoch it keeps; but by their very times it would keep the
    first ones, and an epoch would begin with nothing but hits and end with nothing but misses, faster than any network.

    Args:
        samples: ``[super-samples]``, samples of each.
        stretch: what the rank walks.
        order: gives the order of an epoch; who plans for many ranks has each made once.
        horizon_epochs: how many epochs to look into beyond the present one.
        others: how whole epochs are dealt to others whose needs count as the rank's own: those that share a cache with
            it. They are believed to be where it is.
    """

    def __init__(
        self,
        samples: NDArray[np.integer],
        stretch: Stretch,
        order: OrderSource = Order,
        *,
        horizon_epochs: int = 8,
        others: Sequence[Dealing] = (),
    ) -> None:
        self._samples, self._stretch, self._order = samples, stretch, order
        self._horizon_epochs = horizon_epochs
        self._others = tuple(others)
        self._reads_all = len(self._others) + 1 >= stretch.partition.takers
        self._taken: set[int] = set()
        self._epoch_length = int(np.sum(samples, dtype=np.int64)) + 1
        self._plans: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
        self.present = stretch.epoch * self._epoch_length + stretch.position
        """The time that has passed: all that is needed up to it was asked for."""
        self._taking = self.present

    def reach(self, epoch: int, position: int) -> None:
        """Everything before a position of an epoch was asked for. Never goes back."""
        self.present = max(self.present, epoch * self._epoch_length + position)
        for passed in [each for each in self._plans if each < self.present // self._epoch_length]:
            del self._plans[passed]

    def take(self, super_sample: int, epoch: int, position: int) -> None:
        """A super-sample was asked for, for its uses before a position of an epoch: the end of a step.

        Steps are taken from in their order. What a step needs besides, and has not taken yet, is still needed.
        """
        taking = epoch * self._epoch_length + position
        if taking > self._taking:
            self.reach(*divmod(self._taking, self._epoch_length))
            self._taking = taking
            self._taken.clear()
        self._taken.add(super_sample)

    def next_use(self, super_sample: int) -> int:
        """Return the time, behind the present, at which a super-sample is needed next; :data:`NEVER` if it is not."""
        passed = self._taking if super_sample in self._taken else self.present
        first = passed // self._epoch_length
        for epoch in range(first, first + self._horizon_epochs + 1):
            if self._stretch.end_epoch is not None and epoch >= self._stretch.end_epoch:
                break
            position = int(self._plan(epoch)[super_sample])
            time = epoch * self._epoch_length + position + 1
            if position >= 0 and time > passed:
                return (epoch + 1) * self._epoch_length if self._reads_all else time
        return NEVER

    def _plan(self, epoch: int) -> NDArray[np.int64]:
        """Return from which position of an epoch the rank needs each super-sample, negative where it does not."""
        if epoch not in self._plans:
            self._plans[epoch] = self._planned(epoch)
        return self._plans[epoch]

    def _planned(self, epoch: int) -> NDArray[np.int64]:
        stretch = self._stretch
        if stretch.order.shuffle == "full":  # all over the epoch
            return np.zeros(len(self._samples), np.int64)
        order = self._order(self._samples, stretch.order, epoch)
        own = stretch.partition if epoch == stretch.epoch else stretch.partition.from_start()
        plan = np.full(len(self._samples), NEVER, np.int64)
        for dealing in (own, *self._others):
            for number in dealing.lanes_taken().tolist():
                lane = order.lane(number)
                np.minimum.at(plan, lane.super_samples, dealing.positions_of(number, lane.first_places()))
        plan[plan == NEVER] = _NOT_HERE
        return plan
