"""What an epoch will take, worked out before anything is fetched."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.feed import Feed
from stoker.prices import Operation, Prices
from stoker.sizes import format_bytes

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
        memory_bytes: of the ring and the manifest.
        slots: super-samples that the ring holds.
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

    @classmethod
    def of(cls, feed: Feed, prices: Prices) -> LoaderPlan:
        """Return the plan of a feed; requests and bytes assume super-samples of the mean size."""
        manifest, partition, order = feed.manifest, feed.partition, feed.config.order
        touched = partition.lanes_touched()
        share = touched / partition.lanes * partition.samples / max(1, manifest.samples)
        cuts = touched if partition.lanes > 1 else 0
        get_requests = min(len(manifest), round(len(manifest) * share) + cuts)
        read_bytes = round(manifest.size_bytes / len(manifest) * get_requests)
        store = prices.store(feed.store.url)
        return cls(
            samples=partition.samples,
            steps=partition.steps_from(0),
            super_samples=len(manifest),
            shuffle=order.shuffle,
            window=order.window,
            lanes=partition.lanes,
            lanes_read=touched,
            get_requests=get_requests,
            read_bytes=read_bytes,
            dollars=get_requests * store.request_dollars(Operation.GET)
            + store.transfer_dollars(read_bytes=read_bytes, written_bytes=0, egress="same_region"),
            amplification=get_requests * partition.world_size / len(manifest),
            memory_bytes=feed.slots.size_bytes,
            slots=feed.slots.slots,
        )

    def __str__(self) -> str:
        return (
            f"{self.samples:,} samples in {self.super_samples:,} super-samples, {self.steps:,} steps an epoch; "
            f"shuffle {self.shuffle}, window {self.window}, lanes {self.lanes_read} of {self.lanes}; "
            f"{self.get_requests:,} GETs, {format_bytes(self.read_bytes)}, ${self.dollars:.6f} an epoch; "
            f"memory {format_bytes(self.memory_bytes)} ({self.slots} slots)"
        )
