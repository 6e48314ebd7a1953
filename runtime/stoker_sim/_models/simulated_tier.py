"""A cache in virtual time: a real policy and a real account of bytes, on a device that moves none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from stoker._cache.eviction import Residents
from stoker._diagnostics.latency import Constant, Latency
from stoker.abc import ObjectRef
from stoker_sim._models.link import SharedLink

__all__ = ["SimulatedTier"]

Key = TypeVar("Key", bound=Hashable)
_NVME = Constant(0.0001)


class SimulatedTier(Generic[Key]):
    """A :class:`~stoker.abc.Tier` on one virtual-clock loop. Nodes that are given the same one share it.

    What is offered is resident at once and costs the device nothing: a tier writes behind its readers' backs.

    Args:
        residents: what is here, in bytes, by the policy under test.
        key_of: what the residents call an object: its row for policies that know the order, else its key.
        bytes_per_second: of the device; all who read share it.
        latency: before a read's first byte.
        rng: for what is drawn.
        name: in the statistics.
    """

    def __init__(
        self,
        residents: Residents[Key],
        key_of: Callable[[ObjectRef], Key],
        *,
        bytes_per_second: float = 2e9,
        latency: Latency = _NVME,
        rng: random.Random | None = None,
        name: str = "cache",
    ) -> None:
        self.residents, self.name = residents, name
        self._key_of = key_of
        self._latency, self._rng = latency, rng or random.Random(0)  # noqa: S311 - a model's
        self._device = SharedLink(connection_bytes_per_second=bytes_per_second, total_bytes_per_second=bytes_per_second)

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        """Take the time that a read would if the object is here, none if it is not; ``into`` is left as it is."""
        if not self.residents.look_up(self._key_of(ref)):
            return False
        await asyncio.sleep(self._latency.draw(self._rng))
        await self._device.serve(ref.size_bytes)
        return True

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        """Keep the object if the policy wants it."""
        self.residents.offer(self._key_of(ref), ref.size_bytes)

    async def close(self) -> None:
        """Nothing to release."""
