"""Random words that are the same on every machine, forever: Philox4x64-10, addressed by what they are for.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11). The generator is counter-based, so the words for
any (seed, purpose, epoch, index) are found without drawing those before them. Only raw 64-bit words are used, never a
library's shuffle, whose result may change between releases.

Word ``4 i + j`` of a stream is word ``j`` of the Philox4x64-10 block with key ``(seed, purpose)`` and counter
``(i + 1, epoch, index, part)``, least significant word first.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

__all__ = ["Purpose", "bit_generator", "permutation", "words"]


class Purpose(enum.IntEnum):
    """What a stream of words is for; streams of different purposes are independent."""

    SUPER_SAMPLES = 1
    ROWS = 2
    BLOCK = 3
    FULL = 4
    SAMPLE = 5


def words(count: int, *, seed: int, purpose: Purpose, epoch: int, index: int = 0, part: int = 0) -> NDArray[np.uint64]:
    """Return ``count`` raw words, ``uint64 [count]``.

    Args:
        count: how many.
        seed: of the run, 0 to 2**64 - 1.
        purpose: what for.
        epoch: from 0.
        index: which of the epoch's objects of this purpose.
        part: which part of that object.
    """
    return bit_generator(seed=seed, purpose=purpose, epoch=epoch, index=index, part=part).random_raw(count)


def bit_generator(*, seed: int, purpose: Purpose, epoch: int, index: int = 0, part: int = 0) -> np.random.Philox:
    """Return a generator that stands at the first word of a stream; arguments as for :func:`words`."""
    key = np.array([seed, purpose], np.uint64)
    counter = np.array([0, epoch, index, part], np.uint64)
    return np.random.Philox(key=key, counter=counter)


def permutation(
    count: int, *, seed: int, purpose: Purpose, epoch: int, index: int = 0, part: int = 0
) -> NDArray[np.int64]:
    """Return a uniform permutation of ``range(count)``: the stable argsort of that many words (ties by index)."""
    drawn = words(count, seed=seed, purpose=purpose, epoch=epoch, index=index, part=part)
    return np.argsort(drawn, kind="stable")
