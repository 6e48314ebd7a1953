"""What an epoch will take, worked out before anything is fetched."""

from __future__ import annotations

from dataclasses import dataclass

from stoker._base.meter import Egress, Operation
from stoker._base.sizes import counted, format_bytes
from stoker._cost.prices import Prices
from stoker._fetch.feed import BatchSource
from stoker._stores.object_store import price_key
from stoker.errors import BudgetError

__all__ = ["LoaderPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan:
    """An epoch of one rank, as planned. Its text is one line.

    Attributes:
        samples: of the epoch, over all ranks.
        steps: batches of this rank.
        super_samples: of the data set.
        shuffle: kind of order.
        window: super-samples mixed at a time, per lane.
        lanes: into how many parts the order is cut.
        lanes_read: by this rank.
        get_requests: of this rank, hedges and retries aside.
        read_bytes: of this rank.
        dollars: what the store asks for these, from the price file.
        amplification: bytes that all ranks together read over the data set's size.
        memory_bytes: of the ring and the manifest, and where there are groups, of heads and hedge buffers.
        slots: super-samples, or groups of samples, that the ring holds.
        by_groups: whether it holds groups of samples, read by ranges.
        takers: how many share the epoch: ranks, or the workers of all ranks.
    """

    samples: int
    steps: int
    super_samples: int
    shuffle: str
    window: int
    lanes: int
    lanes_read: int
    get_requests: int
    read_bytes: int
    dollars: float
    amplification: float
    memory_bytes: int
    slots: int
    by_groups: bool
    takers: int

    @classmethod
    def of(cls, feed: BatchSource, prices: Prices, egress: Egress = "same_region") -> LoaderPlan:
        """Return the plan of a feed whose reader is at ``egress``.

        Requests and bytes are expected values.
        """
        manifest, partition, order = feed.manifest, feed.partition, feed.config.order
        expected = feed.forecast()
        store = prices.store(price_key(feed.store))
        return cls(
            samples=partition.samples,
            steps=partition.steps_from(0),
            super_samples=len(manifest),
            shuffle=order.shuffle,
            window=order.window,
            lanes=partition.lanes,
            lanes_read=partition.lanes_touched(),
            get_requests=expected.requests,
            read_bytes=expected.size_bytes,
            dollars=expected.requests * store.request_dollars(Operation.GET)
            + store.transfer_dollars(read_bytes=expected.size_bytes, written_bytes=0, egress=egress),
            amplification=expected.size_bytes * partition.takers / manifest.size_bytes,
            memory_bytes=feed.slots.size_bytes,
            slots=feed.slots.slots,
            by_groups=feed.slots.holds_groups,
            takers=partition.takers,
        )

    def check_dollars(self, most_dollars: float) -> None:
        """Refuse an epoch that would cost more, over all ranks.

        Raises:
            BudgetError: it would; names the figures.
        """
        dollars = self.dollars * self.takers
        if dollars > most_dollars:
            raise BudgetError(
                f"an epoch of shuffle {self.shuffle!r} would take {self.get_requests * self.takers:,} GETs and "
                f"{format_bytes(self.read_bytes * self.takers)} over all ranks, for ${dollars:.2f}: more than "
                f"Budget(max_dollars_per_epoch={most_dollars:g}) allows. Raise it, or use another shuffle or more "
                "memory"
            )

    def __str__(self) -> str:
        return (
            f"{counted(self.samples, 'sample')} in {counted(self.super_samples, 'super-sample')}, "
            f"{counted(self.steps, 'step')} an epoch; "
            f"shuffle {self.shuffle}, window {self.window}, lanes {self.lanes_read} of {self.lanes}; "
            f"{counted(self.get_requests, 'GET')}, {format_bytes(self.read_bytes)}, ${self.dollars:.6f} an epoch; "
            f"memory {format_bytes(self.memory_bytes)} ({self.slots} slots{' of groups' if self.by_groups else ''})"
        )
