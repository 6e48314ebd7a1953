"""One budget in bytes: how it becomes ring slots, and the least that a configuration can work with.

The budget of a rank covers the manifest and the ring; the ring's slots hold the window, what is in flight and a reserve
for hedges. Window, lanes and order never bend to the budget: only the look-ahead derives from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.errors import BudgetError
from stoker.manifest import Manifest
from stoker.order import OrderConfig
from stoker.partition import Partition
from stoker.ring import ALIGNMENT_BYTES
from stoker.sizes import format_bytes

__all__ = ["SlotPlan", "plan_slots", "window_slots"]

_HEDGE_SHARE = 16
"""One slot in so many is kept for hedges, at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """How a memory budget is spent.

    Attributes:
        slots: of the ring, in all.
        slot_bytes: of one, the size of the largest super-sample.
        window_slots: that the order needs at a time.
        hedge_slots: kept for hedged requests.
        manifest_bytes: of the manifest in memory.
    """

    slots: int
    slot_bytes: int
    window_slots: int
    hedge_slots: int
    manifest_bytes: int

    @property
    def size_bytes(self) -> int:
        """What all of it takes."""
        return self.slots * self.slot_bytes + self.manifest_bytes


def window_slots(super_samples: int, order: OrderConfig, partition: Partition) -> int:
    """Return how many super-samples a rank must hold at a time for this order.

    A lane holds its window, ``block`` twice that so that the next group arrives while one is delivered, ``none`` one;
    ``full`` holds everything.
    """
    if order.shuffle == "full":
        return super_samples
    lane = {"none": 1, "window": order.window, "block": 2 * order.window}[order.shuffle]
    return partition.lanes_touched() * min(lane, super_samples)


def plan_slots(
    manifest: Manifest, manifest_bytes: int, order: OrderConfig, partition: Partition, memory_bytes: int
) -> SlotPlan:
    """Return how ``memory_bytes`` are spent.

    No more slots are taken than one epoch of this rank can fill besides its window: looking farther ahead than that
    would fetch epochs that may never be asked for.

    Raises:
        BudgetError: the budget is too small; names the figure that fits.
    """
    slot_bytes = -(-manifest.largest_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    needed = window_slots(len(manifest), order, partition)
    minimum = needed + 2  # one in flight, one for its hedge
    slots = (memory_bytes - manifest_bytes) // slot_bytes
    if slots < minimum:
        figure = minimum * slot_bytes + manifest_bytes
        raise BudgetError(
            f"memory {format_bytes(memory_bytes)} is too small: shuffle {order.shuffle!r} holds {needed} super-samples "
            f"at a time, and 2 more are in flight, of up to {format_bytes(slot_bytes)} each, beside a manifest of "
            f"{format_bytes(manifest_bytes)}; give memory={figure} ({format_bytes(figure)}) or a smaller window"
        )
    epoch_items = -(-len(manifest) // partition.world_size) + partition.lanes_touched()
    hedge_slots = max(1, min(slots, needed + epoch_items) // _HEDGE_SHARE)
    return SlotPlan(
        slots=min(slots, needed + epoch_items + hedge_slots),
        slot_bytes=slot_bytes,
        window_slots=needed,
        hedge_slots=hedge_slots,
        manifest_bytes=manifest_bytes,
    )
