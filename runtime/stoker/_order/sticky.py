"""Sticky lanes: most super-samples stay in their lane of the epoch before, so that their reader has them already.

With ``sticky``, every super-sample has a **home** lane in each epoch, and the sequence of the epoch is its usual one
(see :mod:`stoker._order.order`) sorted by home lane; super-samples of a lane keep their usual order.

Home lanes follow from **slots**, in which super-samples stay for several epochs. Let ``n`` be the number of
super-samples, ``q = round(1,000,000 (1 - sticky))``, and ``G = ⌈1,000,000 / q⌉`` the number of groups. The permutation
``(HOME, 0, 0)`` of epoch 0 assigns a slot to each super-sample at first; slots ``j, j + G, j + 2 G, …`` are group
``j``. The super-samples of a group are permuted among its slots by the permutation ``(HOME, j + 1, 0)`` of epoch
``d = ⌊(e q G + 1,000,000 j) / (1,000,000 G)⌋``, where ``e`` is the epoch. So ``d`` rises in one of ``1 / (1 - sticky)``
epochs, at another time for each group, and any epoch is computed without the ones before.

The samples in the order of slots are cut into lanes of equal length, ± 1; the home of a super-sample is the lane of its
first sample. Each lane has its share of each group, so a group that is permuted moves nothing else but what the
different sizes of super-samples shift. A super-sample stays with probability ``sticky + (1 - sticky) / lanes``, but for
those shifts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker._format.manifest import sample_starts
from stoker._order.random_words import Purpose, permutation

MAX_STICKY = 0.99
_WHOLE = 1_000_000


def _slots(count: int, sticky: float, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the super-sample in each slot, ``int64 [count]``."""
    moved = round(_WHOLE * (1.0 - sticky))
    groups = -(-_WHOLE // moved)
    slots = permutation(count, seed=seed, purpose=Purpose.HOME, epoch=0)
    for group in range(min(groups, count)):
        members = slots[group::groups]
        draw = (epoch * moved * groups + group * _WHOLE) // (_WHOLE * groups)
        drawn = permutation(len(members), seed=seed, purpose=Purpose.HOME, epoch=draw, index=group + 1)
        slots[group::groups] = members[drawn]
    return slots


def sort_by_home(
    sequence: NDArray[np.uint32], counts: NDArray[np.integer], *, sticky: float, lanes: int, seed: int, epoch: int
) -> NDArray[np.uint32]:
    """Return the sequence of an epoch sorted by home lane, ``uint32 [super-samples]``.

    Args:
        sequence: usual sequence of the epoch, ``uint32 [super-samples]``.
        counts: number of samples of each super-sample, integer ``[super-samples]``.
        sticky: probability to stay in a lane, above 0.
        lanes: number of lanes.
        seed: seed of the order.
        epoch: number of the epoch, from 0.
    """
    slots = _slots(len(counts), sticky, seed, epoch)
    starts = sample_starts(counts[slots])
    base, extra = divmod(int(starts[-1]), lanes)
    numbers = np.arange(lanes)
    first_slots = np.searchsorted(starts[:-1], numbers * base + np.minimum(numbers, extra), "left")
    homes = np.empty(len(slots), np.int64)
    homes[slots] = np.searchsorted(first_slots, np.arange(len(slots)), "right")
    return sequence[np.argsort(homes[sequence], kind="stable")]
