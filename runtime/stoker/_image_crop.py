"""Which part of an image is taken: the middle, or a random one for training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.errors import ConfigError

__all__ = ["RandomResizedCrop"]

_ATTEMPTS = 10
_NUMBERS = 4
"""Random numbers that an attempt takes."""


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A random part of an image, chosen as torchvision's ``RandomResizedCrop`` chooses it.

    Attributes:
        scale: least and most of the image's area that the part has, in (0, 1].
        ratio: least and most of its width divided by its height, before it is resized.

    Raises:
        ConfigError: a value is out of range.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for name, most in (("scale", 1.0), ("ratio", math.inf)):
            values = getattr(self, name)
            try:
                low, high = map(float, values)
            except (TypeError, ValueError):
                low = high = math.nan
            if not (0 < low <= high <= most and math.isfinite(high)):
                raise ConfigError(f"{name} {values!r} is not (least, most) with 0 < least <= most <= {most:g}")
            object.__setattr__(self, name, (low, high))

    @property
    def numbers(self) -> int:
        """How many random numbers :meth:`choose` takes."""
        return _ATTEMPTS * _NUMBERS

    def choose(self, height: int, width: int, uniform: Sequence[float]) -> tuple[int, int, int, int]:
        """Return a part of an image as ``(top, left, height, width)`` in pixels.

        The area and the logarithm of the ratio are uniform; what does not fit into the image is drawn again, ten times
        at most, and then the middle is taken, with the ratio as near to the image's as is allowed.

        Args:
            height: of the image.
            width: of the image.
            uniform: ``numbers`` random numbers in [0, 1).
        """
        shortest, longest = (math.log(ratio) for ratio in self.ratio)
        for attempt in range(_ATTEMPTS):
            area, ratio, down, right = uniform[_NUMBERS * attempt : _NUMBERS * (attempt + 1)]
            wanted = height * width * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
            proportion = math.exp(shortest + ratio * (longest - shortest))
            part_width, part_height = round(math.sqrt(wanted * proportion)), round(math.sqrt(wanted / proportion))
            if 0 < part_width <= width and 0 < part_height <= height:
                top, left = int(down * (height - part_height + 1)), int(right * (width - part_width + 1))
                return top, left, part_height, part_width
        return self._middle(height, width)

    def _middle(self, height: int, width: int) -> tuple[int, int, int, int]:
        part_height, part_width = height, width
        if width / height < self.ratio[0]:
            part_height = round(width / self.ratio[0])
        elif width / height > self.ratio[1]:
            part_width = round(height * self.ratio[1])
        part_height, part_width = max(1, part_height), max(1, part_width)
        return (height - part_height) // 2, (width - part_width) // 2, part_height, part_width
