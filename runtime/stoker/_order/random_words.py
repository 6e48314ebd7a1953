"""Reproducible randomness: random words, a computed permutation, and random numbers per sample.

All of it is identical on every machine and in every release.

**Random words** come from Philox4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11). The
generator is counter-based: the words for any (seed, purpose, epoch, index) are computed without their predecessors.
Only raw 64-bit words are used, never a library's shuffle, whose result may change between releases. Word ``4 i + j`` of
a stream is word ``j`` of the block with key ``(seed, purpose)`` and counter ``(i + 1, epoch, index, part)``, least
significant word first.

**The permutation** of ``[0, n)`` is a Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", CT-RSA 2002, sections 4 and 2): the network permutes ``[0, 4**h)``, the smallest such range that
contains ``[0, n)``; a value outside ``[0, n)`` is permuted again until it is inside, fewer than four times on average.
``left`` is the high ``h`` bits (``h`` at least 1) and ``right`` the low ones. A round maps ``(left, right)`` to
``(right, left ^ (mix(right ^ key) & (2**h - 1)))``, where ``mix`` is the finaliser of SplitMix64 (Steele, Lea, Flood,
OOPSLA 2014). There are 12 rounds, each with a 64-bit key of its own.

**A sample's numbers** depend only on (seed, epoch, sample), so random augmentation is the same for any number of
threads, worker processes and ranks, for any batch size, and after a resume.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Purpose(enum.IntEnum):
    """The purpose of a stream of words. Streams of different purposes are independent."""

    SUPER_SAMPLES = 1
    ROWS = 2
    BLOCK = 3
    FULL = 4
    SAMPLE = 5
    PACK = 6
    HOME = 7


def words(count: int, *, seed: int, purpose: Purpose, epoch: int, index: int = 0, part: int = 0) -> NDArray[np.uint64]:
    """Return ``count`` raw words, ``uint64 [count]``.

    Args:
        count: number of words.
        seed: seed of the run, 0 to 2**64 - 1.
        purpose: purpose of the stream.
        epoch: number of the epoch, from 0.
        index: number of the object of this purpose in the epoch; default 0.
        part: number of the part of that object; default 0.
    """
    return bit_generator(seed=seed, purpose=purpose, epoch=epoch, index=index, part=part).random_raw(count)


def bit_generator(*, seed: int, purpose: Purpose, epoch: int, index: int = 0, part: int = 0) -> np.random.Philox:
    """Return a generator at the first word of a stream; see :func:`words` for the arguments."""
    key = np.array([seed, purpose], np.uint64)
    counter = np.array([0, epoch, index, part], np.uint64)
    return np.random.Philox(key=key, counter=counter)


def permutation(
    count: int, *, seed: int, purpose: Purpose, epoch: int, index: int = 0, part: int = 0
) -> NDArray[np.int64]:
    """Return a uniform permutation of ``range(count)``: the stable argsort of ``count`` words (ties by index)."""
    drawn = words(count, seed=seed, purpose=purpose, epoch=epoch, index=index, part=part)
    # To sort words that end in their index is many times faster than argsort. It is the same, unless two words
    # differ in the bits of the index only.
    index_bits = np.uint64((1 << max(0, count - 1).bit_length()) - 1)
    keys = drawn & ~index_bits
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    if (keys[1:] ^ keys[:-1] <= index_bits).any():
        return np.argsort(drawn, kind="stable")
    keys &= index_bits
    return keys.view(np.int64)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a bijective hash of each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class FeistelPermutation:
    """A bijection of ``[0, count)``.

    Args:
        count: size of the range, at least 1.
        keys: round keys, ``uint64 [ROUNDS]``.
    """

    ROUNDS = 12

    def __init__(self, count: int, keys: NDArray[np.uint64]) -> None:
        self.count = count
        self._keys = keys
        self._half_bits = max(1, ((count - 1).bit_length() + 1) // 2)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the images of ``positions`` (``int64 [n]``, each in ``[0, count)``), ``int64 [n]``."""
        return self._cycle_walk(positions, self._keys)

    def inverse(self, images: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of ``images`` (``int64 [n]``, each in ``[0, count)``), ``int64 [n]``."""
        return self._cycle_walk(images, self._keys[::-1], is_inverse=True)

    def _cycle_walk(
        self, start: NDArray[np.int64], keys: NDArray[np.uint64], *, is_inverse: bool = False
    ) -> NDArray[np.int64]:
        values = self._network(start.astype(np.uint64), keys, is_inverse=is_inverse)
        outside = np.flatnonzero(values >= self.count)
        while len(outside):
            values[outside] = self._network(values[outside], keys, is_inverse=is_inverse)
            outside = outside[values[outside] >= self.count]
        return values.astype(np.int64)

    def _network(self, values: NDArray[np.uint64], keys: NDArray[np.uint64], *, is_inverse: bool) -> NDArray[np.uint64]:
        """Return the images of values. The inverse is the same network with halves swapped and keys reversed."""
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = (values & mask, values >> bits) if is_inverse else (values >> bits, values & mask)
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & mask)
        return (right << bits) | left if is_inverse else (left << bits) | right


class Stream(enum.IntEnum):
    """Independent streams of a sample's random words."""

    NUMPY = 0
    TORCH = 1
    IMAGE = 2


@dataclass(slots=True, kw_only=True)
class SampleContext:
    """Random numbers of one sample in one epoch.

    The loader passes it to ``decode`` and ``transform`` functions that have a parameter ``context``.

    Attributes:
        seed: seed of the order.
        epoch: number of the epoch, from 0.
        sample: number of the sample in packed order, from 0, equal to its ``"__id__"``.

    Example:
        A ``transform`` that flips half of the images:

        >>> def augment(sample, context):
        ...     if context.generator().random() < 0.5:
        ...         sample["image"] = sample["image"].flip(-1)
        ...     return sample
        >>> from stoker_torch import Loader
        >>> with Loader("data", batch_size=32, transform=augment) as loader:
        ...     next(iter(loader))["image"].shape
        torch.Size([32, 8, 8, 3])
    """

    seed: int
    epoch: int
    sample: int
    _generator: np.random.Generator | None = field(default=None, init=False, repr=False, compare=False)
    _torch_generator: Any = field(default=None, init=False, repr=False, compare=False)

    def generator(self) -> np.random.Generator:
        """Return the sample's numpy generator. Every call returns the same object, so draws continue a sequence."""
        if self._generator is None:
            self._generator = np.random.Generator(self._bits(Stream.NUMPY))
        return self._generator

    def torch_generator(self) -> Any:
        """Return the sample's ``torch.Generator`` for the CPU. Every call returns the same object."""
        if self._torch_generator is None:
            import torch  # optional: the rest of the runtime does not need it

            self._torch_generator = torch.Generator()
            self._torch_generator.manual_seed(int(self._bits(Stream.TORCH).random_raw()))
        return self._torch_generator

    def uniform(self, count: int, *, stream: int) -> NDArray[np.float64]:
        """Return uniform random numbers in [0, 1), ``float64 [count]``; every call returns the same numbers.

        Unlike the draws of a generator, they do not depend on the version of a library: each is the upper 53 bits of a
        Philox word.

        Args:
            count: number of random numbers.
            stream: number of the stream; different streams are independent. Callers use streams from 16 on.
        """
        return (self._bits(stream).random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _bits(self, part: int) -> np.random.Philox:
        return bit_generator(seed=self.seed, purpose=Purpose.SAMPLE, epoch=self.epoch, index=self.sample, part=part)
