"""The part of a data set that the cache processes of a job's machines keep."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker._base.arguments import AtLeastOne, BoundedConfig

_PLACE_BYTES = 4096
"""Unit of the memory of an object in a cache process."""
_MAX_EXACT_MEAN = 500.0
"""Mean number of objects of a machine up to which the probability of each number is computed."""
_ENOUGH_DEVIATIONS = 4.0
"""Standard deviations of a machine's number of objects above the mean, up to which its memory has room for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCapacity(BoundedConfig):
    """The memory of the cache processes of a job, ``cluster=``.

    Each object has its place on one machine, which a hash draws, and a machine keeps the first of its objects that fit.
    So the number of objects of a machine has a binomial distribution, and what one machine lacks, another one does not
    make up for.

    Attributes:
        machines: number of machines.
        limit_bytes: limit of each machine, in bytes.
    """

    machines: AtLeastOne[int]
    limit_bytes: AtLeastOne[int]

    def held_share(self, objects: int, size_bytes: int) -> float:
        """Return the expected fraction of a data set's objects that are kept, 0 to 1.

        Args:
            objects: number of objects.
            size_bytes: size of all objects, in bytes.
        """
        if not objects:
            return 0.0
        mean, deviation = self._objects_of_a_machine(objects)
        room = self.limit_bytes // _place_bytes(objects, size_bytes)
        if room >= objects:
            return 1.0
        if self.machines == 1:
            return room / objects
        if mean <= _MAX_EXACT_MEAN:
            return (room - self._mean_free(objects, room)) / mean
        distance = (room - mean) / deviation  # the distribution is close to normal
        density = math.exp(-(distance**2) / 2) / math.sqrt(2 * math.pi)
        above = density * deviation + (mean - room) * (1 + math.erf(-distance / math.sqrt(2))) / 2
        return min(1.0, max(0.0, 1 - above / mean))

    def _mean_free(self, objects: int, room: int) -> float:
        """Return the expected number of objects for which a machine has room left."""
        odds = 1 / (self.machines - 1)
        probability, free = (1 - 1 / self.machines) ** objects, 0.0
        for count in range(room):
            free += (room - count) * probability
            probability *= odds * (objects - count) / (count + 1)
        return free

    def sufficient_bytes(self, objects: int, size_bytes: int) -> int:
        """Return the limit of a machine with which nearly every draw leaves room for all objects, in bytes."""
        mean, deviation = self._objects_of_a_machine(objects)
        return math.ceil(min(objects, mean + _ENOUGH_DEVIATIONS * deviation)) * _place_bytes(objects, size_bytes)

    def _objects_of_a_machine(self, objects: int) -> tuple[float, float]:
        """Return the mean and the standard deviation of the number of objects whose place is on one machine."""
        mean = objects / self.machines
        return mean, math.sqrt(mean * (1 - 1 / self.machines))


def _place_bytes(objects: int, size_bytes: int) -> int:
    """Return the memory of an object of the mean size."""
    return max(1, math.ceil(size_bytes / max(1, objects) / _PLACE_BYTES)) * _PLACE_BYTES
