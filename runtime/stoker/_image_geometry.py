"""Random crops of an image, and the orientation in its metadata.

The orientation is in EXIF, in PNG's "Raw profile type exif", or else in XMP. Pillow defines the result. This module
reads the usual EXIF of a JPEG itself, since Pillow takes 100 microseconds, a tenth of the time to decode a small JPEG;
it leaves all other cases to Pillow.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker._deprecation import alias_attributes
from stoker.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image


_MAX_ATTEMPTS = 10
_NUMBERS_PER_ATTEMPT = 4
"""Random numbers per attempt."""


@alias_attributes("RandomResizedCrop", {"numbers": "random_numbers"})
@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A random crop, with the distribution of torchvision's ``RandomResizedCrop``.

    Attributes:
        scale: minimum and maximum area of the crop, as fractions of the image's area, in (0, 1].
        ratio: minimum and maximum aspect ratio of the crop (width / height), before it is resized.

    Raises:
        ConfigError: a value is out of range.

    Example:
        >>> RandomResizedCrop(scale=(1.0, 1.0), ratio=(1.0, 1.0)).choose(4, 4, [0.5] * 40)
        (0, 0, 4, 4)
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
                raise ConfigError(f"{name} must be (low, high) with 0 < low <= high <= {most:g}, not {values!r}")
            object.__setattr__(self, name, (low, high))

    @property
    def random_numbers(self) -> int:
        """Number of random numbers that :meth:`choose` needs."""
        return _MAX_ATTEMPTS * _NUMBERS_PER_ATTEMPT

    def choose(self, height: int, width: int, uniform: Sequence[float]) -> tuple[int, int, int, int]:
        """Return a crop as ``(top, left, height, width)``, in pixels.

        The area and the logarithm of the ratio are uniform. A crop that does not fit into the image is drawn again, in
        at most ten attempts; then the crop is the largest at the centre, with the allowed ratio nearest to the image's.

        Args:
            height: height of the image, in pixels.
            width: width of the image, in pixels.
            uniform: ``random_numbers`` numbers in [0, 1).
        """
        shortest, longest = (math.log(ratio) for ratio in self.ratio)
        for attempt in range(_MAX_ATTEMPTS):
            area, ratio, down, right = uniform[_NUMBERS_PER_ATTEMPT * attempt : _NUMBERS_PER_ATTEMPT * (attempt + 1)]
            area_pixels = height * width * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
            proportion = math.exp(shortest + ratio * (longest - shortest))
            part_width = round(math.sqrt(area_pixels * proportion))
            part_height = round(math.sqrt(area_pixels / proportion))
            if 0 < part_width <= width and 0 < part_height <= height:
                top = int(down * (height - part_height + 1))
                left = int(right * (width - part_width + 1))
                return top, left, part_height, part_width
        return self._central_crop(height, width)

    def _central_crop(self, height: int, width: int) -> tuple[int, int, int, int]:
        part_height, part_width = height, width
        if width / height < self.ratio[0]:
            part_height = round(width / self.ratio[0])
        elif width / height > self.ratio[1]:
            part_width = round(height * self.ratio[1])
        part_height, part_width = max(1, part_height), max(1, part_width)
        return (height - part_height) // 2, (width - part_width) // 2, part_height, part_width


UPRIGHT = 1
_TAG = 0x0112
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_FILL = re.compile(rb"\xff+")
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(="|>)([0-9])')
_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_SHORT, _LONG = 3, 4
_START_OF_SCAN = 0xDA
_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD9)}
_ABSENT = -1
_MAX_SEGMENTS = 4096
"""Maximum JPEG segments to parse: 256 MB of metadata if they are full."""
# Exceptions that Pillow raises for damaged metadata; the type depends on the position of the damage.
_DAMAGE = (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error, Warning)


def orientation_of(image: Image.Image) -> int:
    """Return an image's orientation according to Pillow, 1 to 8; upright (1) if its metadata is damaged."""
    try:
        value = image.getexif().get(_TAG, UPRIGHT)
    except _DAMAGE:
        return UPRIGHT
    return next((each for each in range(1, 9) if each == value), UPRIGHT)  # a fraction may equal an integer


def jpeg_orientation(data: memoryview) -> int:
    """Return the orientation of a JPEG, 1 to 8, from the segments before its pixels."""
    exif, xmp = _read_metadata(data)
    orientation = _parse_exif_orientation(exif)
    if orientation is None:
        return _orientation_by_pillow({"exif": exif, "xmp": xmp})
    if orientation == _ABSENT:
        in_xmp = _XMP_ORIENTATION.search(xmp)
        orientation = UPRIGHT if in_xmp is None else int(in_xmp[2])
    return orientation if 1 <= orientation <= 8 else UPRIGHT


def _orientation_by_pillow(info: Mapping[str, bytes]) -> int:
    from PIL import Image  # callers require Pillow

    image = Image.Image()
    image.info = {name: value for name, value in info.items() if value}
    return orientation_of(image)


def _read_metadata(data: memoryview) -> tuple[bytes, bytes]:
    """Return the EXIF blocks of a JPEG, joined as in Pillow, and its last XMP block."""
    blocks: list[bytes] = []
    xmp = b""
    start = 2
    for _ in range(_MAX_SEGMENTS):
        fill = _FILL.match(data, start)
        if fill is None or fill.end() + 3 > len(data):
            break
        marker, start = data[fill.end()], fill.end() + 1
        if marker == _START_OF_SCAN:
            break
        if marker in _WITHOUT_LENGTH:
            continue
        end = start + int.from_bytes(data[start : start + 2], "big")
        if marker == 0xE1:
            body = bytes(data[start + 2 : end])
            if body.startswith(_EXIF):
                blocks.append(body[len(_EXIF) if blocks else 0 :])
            elif body.startswith(_XMP):
                xmp = body[len(_XMP) :]
        start = max(end, start + 2)
    return b"".join(blocks), xmp


def _parse_exif_orientation(exif: bytes) -> int | None:
    """Return the orientation in an EXIF block, ``_ABSENT`` if it has none, or None if the block is unusual."""
    tiff = exif.removeprefix(_EXIF)
    if not tiff:
        return _ABSENT
    order = _ORDERS.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return None
    (start,) = struct.unpack_from(f"{order}I", tiff, 4)
    if start + 2 > len(tiff):
        return None
    (entries,) = struct.unpack_from(f"{order}H", tiff, start)
    if start + 2 + 12 * entries > len(tiff):
        return None
    places = [
        offset
        for offset in range(start + 2, start + 2 + 12 * entries, 12)
        if struct.unpack_from(f"{order}H", tiff, offset)[0] == _TAG
    ]
    if not places:
        return _ABSENT
    kind, count = struct.unpack_from(f"{order}HI", tiff, places[0] + 2)
    if len(places) > 1 or count != 1 or kind not in (_SHORT, _LONG):
        return None
    value: Any = struct.unpack_from(f"{order}{'H' if kind == _SHORT else 'I'}", tiff, places[0] + 8)[0]
    return int(value)
