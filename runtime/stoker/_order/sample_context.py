"""What a user's function may know of the sample it works on: its number, the epoch, and random numbers of its own.

The numbers depend on (seed, epoch, sample) and nothing else, so random augmentation is the same for any number of
threads, worker processes and ranks, for any batch size, and for a run that was resumed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker._order.philox import Purpose, bit_generator

__all__ = ["SampleContext", "Stream"]


class Stream(enum.IntEnum):
    """The parts of a sample's random words; those of different parts are independent."""

    NUMPY = 0
    TORCH = 1
    IMAGE = 2


@dataclass(slots=True, kw_only=True)
class SampleContext:
    """One sample in one epoch, as ``decode`` and ``transform`` functions with a parameter ``context`` get it.

    ::

        def augment(sample, context):
            if context.generator().random() < 0.5:
                sample["image"] = sample["image"].flip(-1)
            return sample

    Attributes:
        seed: of the order.
        epoch: from 0.
        sample: number in the packed order, from 0: what ``"__id__"`` gives.
    """

    seed: int
    epoch: int
    sample: int
    _generator: np.random.Generator | None = field(default=None, init=False, repr=False, compare=False)
    _torch_generator: Any = field(default=None, init=False, repr=False, compare=False)

    def generator(self) -> np.random.Generator:
        """Return the sample's numpy generator: the same object at each call, so draws follow one another."""
        if self._generator is None:
            self._generator = np.random.Generator(self._bits(Stream.NUMPY))
        return self._generator

    def torch_generator(self) -> Any:
        """Return the sample's ``torch.Generator``, of the CPU: the same object at each call."""
        if self._torch_generator is None:
            import torch  # the rest of the runtime works without

            self._torch_generator = torch.Generator()
            self._torch_generator.manual_seed(int(self._bits(Stream.TORCH).random_raw()))
        return self._torch_generator

    def uniform(self, count: int, *, stream: int) -> NDArray[np.float64]:
        """Return numbers in [0, 1), ``float64 [count]``: always the same, whatever else is drawn.

        Unlike what generators return, they do not depend on the version of a library: each is the upper 53 bits of a
        word of the order's generator.

        Args:
            count: how many.
            stream: which; numbers of different streams are independent. From 16 on they are the caller's.
        """
        return (self._bits(stream).random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _bits(self, part: int) -> np.random.Philox:
        return bit_generator(seed=self.seed, purpose=Purpose.SAMPLE, epoch=self.epoch, index=self.sample, part=part)
