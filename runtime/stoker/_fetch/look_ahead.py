"""Limits how many items are fetched ahead of the consumer: what fills the link, and slowly more.

A ring that is filled as fast as bytes arrive writes to all of its memory once before it uses any of it again, and the
first write to a page takes up to ten times as long as a copy. So the items that are fetched, but not used yet, follow
the bandwidth-delay product of the link, with the gain of BBR (Cardwell et al., "BBR: Congestion-Based Congestion
Control", ACM Queue 2016): while requests do not slow each other down, their number doubles with every arrival; on a
full link it stays at twice the smallest number that fills it. If the consumer is slower than the link, that many items
cover twice the time of a fetch.

In addition, the limit grows with time, so that the ring becomes full, as a reserve for outages, at a rate at which new
memory takes little of the processor.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque

from stoker._fetch.concurrency import LinkUse

BDP_GAIN = 2.0
"""Items ahead as a multiple of the bandwidth-delay product in items."""
MIN_ITEMS = 4
"""Minimum limit: with fewer items, the consumer and the fetches often wait for each other."""
START_ITEMS, MAX_START_ITEMS = 3, 8
"""Items that a run fetches at once behind those of its first step: at the start, and when the start ends."""
FULL_ITEM_BYTES = 8 << 20
_MAX_SMALL_ITEMS = 16
"""The limits in items are for items of 8 MiB; for smaller ones they are up to 16 times as high, in the same bytes."""
_SMALL_START_FACTOR = 2
"""Small items wait at the start for a head, and then for their bytes: for twice the latency, twice as many."""
GROWTH_BYTES_PER_SECOND = 100e6
"""Growth of the limit: a twentieth of the rate at which memory can be touched for the first time."""
_MAX_SPLIT_ITEMS = 64
"""Number of items of a run's first epoch that may be read in parallel ranges, each of which is a request to pay."""
_SLOW_READ_SECONDS, _IDLE_LINK_FRACTION = 0.05, 0.6
"""An item arrives much sooner in parallel ranges if a whole read takes longer than this, and if most of the requests in
flight are needed to fill the link."""
_RECENT_ARRIVALS = 8


class LookAhead:
    """A limit of the items that are issued and not used yet, from the arrivals of items. Belongs to one event loop.

    Args:
        item_bytes: mean size of an item, in bytes.
        link: the link that items are read over.
        epoch_items: number of items of an epoch. Of few small items, no more are fetched at once than of large ones: a
            cache or a tier is to have an epoch's items before the next one asks for them.

    Attributes:
        link: the link that items are read over.
        start_items: number of items to fetch at once at the start of a run, behind those of its first step.
        max_start_items: number of items at once that ends the start.
        tail_items: number of items that the first step still lacks from which on others are fetched, too: they use the
            part of the link that a few small items leave idle; 0 if the items are large.
    """

    def __init__(self, item_bytes: float, link: LinkUse, epoch_items: float = math.inf) -> None:
        self._seconds_per_item = item_bytes / GROWTH_BYTES_PER_SECOND
        self._item_bytes, self._max_split_items, self.link = item_bytes, min(_MAX_SPLIT_ITEMS, epoch_items), link
        most = min(_MAX_SMALL_ITEMS, epoch_items / (4 * START_ITEMS))
        per_full_item = int(max(1, min(round(FULL_ITEM_BYTES / item_bytes), most)))
        factor = 1 if per_full_item == 1 else _SMALL_START_FACTOR * per_full_item
        self.start_items, self.max_start_items = START_ITEMS * factor, MAX_START_ITEMS * factor
        self.tail_items = START_ITEMS * (factor - 1)
        self._min_items = MIN_ITEMS * per_full_item
        self._recent: deque[float] = deque([0.0], maxlen=_RECENT_ARRIVALS)
        self._started_seconds: float | None = None

    def record_arrival(self, in_flight: int) -> None:
        """Record that one of ``in_flight`` items has arrived."""
        self._recent.append(BDP_GAIN * in_flight * self.link.useful_fraction)

    def limit(self) -> int:
        """Return the maximum number of items that are issued and not used yet."""
        return max(self._min_items, math.ceil(max(self._recent))) + int(self._growth())

    def gains_from_ranges(self, index: int) -> bool:
        """Return whether item ``index`` arrives much sooner in parallel ranges: the link is slow, and not full."""
        if index >= self._max_split_items:
            return False
        is_slow = self.link.alone_seconds(self._item_bytes) >= _SLOW_READ_SECONDS
        return is_slow and self.link.useful_fraction >= _IDLE_LINK_FRACTION

    def seconds_to_growth(self) -> float:
        """Return the time until the limit grows by an item, in seconds, if no item arrives before."""
        return (1.0 - self._growth() % 1.0) * self._seconds_per_item

    def _growth(self) -> float:
        now_seconds = asyncio.get_running_loop().time()
        if self._started_seconds is None:
            self._started_seconds = now_seconds
        return (now_seconds - self._started_seconds) / self._seconds_per_item
