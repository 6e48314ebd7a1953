"""Decodes images, resized to one size so that they stack into a batch.

JPEG goes through simplejpeg (libjpeg-turbo) where it is installed, everything else, and any JPEG that simplejpeg
declines (CMYK, stray bytes), through Pillow. Both release the interpreter lock while they work, so a pool of threads
decodes in parallel, and both give the same pixels up to rounding. A JPEG much larger than asked is decoded at 1/2, 1/4
or 1/8 of its sides, but at least twice those asked, which leaves the resizing filter enough to work on.

The same bytes give the same pixels every time with the same versions of both libraries.
"""

from __future__ import annotations

import io
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, MissingExtraError, SampleError

try:
    from PIL import Image
except ImportError as error:
    raise MissingExtraError("decoding images needs Pillow; pip install 'stoker[images]'") from error
try:
    import simplejpeg
except ImportError:
    simplejpeg = None

__all__ = ["MAX_PIXELS", "ImageDecoder", "decode_image"]

MAX_PIXELS = 1 << 26
Data = bytes | bytearray | memoryview | NDArray[np.uint8]
Mode = Literal["RGB", "L"]
Resize = Literal["crop", "stretch"]

# Formats whose decoders are part of Pillow itself; some of the others start programs (EPS starts Ghostscript).
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF", "JPEG2000", "AVIF")
_EXIF_PREFIX = b"Exif\0\0"
# EXIF orientation → (transpose, flip up-down, flip left-right), applied in this order.
_TURNS = {
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}
_UPRIGHT = (False, False, False)
# What Pillow raises on damaged files; which of them depends on the format and on where the damage is.
_DAMAGE = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, ArithmeticError, RuntimeError, Warning)


@dataclass(frozen=True, slots=True)
class ImageDecoder:
    """A function from an encoded image to ``uint8 [height, width, channels]``, e.g. ``decode={"image": ...}``.

    Attributes:
        height: of the result, in pixels.
        width: of the result, in pixels.
        mode: ``RGB`` for 3 channels or ``L`` (grey) for 1.
        resize: see :func:`decode_image`.
        max_pixels: see :func:`decode_image`.

    Raises:
        ConfigError: a value is out of range.
    """

    height: int
    width: int
    _: KW_ONLY
    mode: Mode = "RGB"
    resize: Resize = "crop"
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        _check((self.height, self.width), self.mode, self.resize, self.max_pixels)

    def __call__(self, data: Data) -> NDArray[np.uint8]:
        """Return the decoded image; it owns its memory.

        Raises:
            SampleError: ``data`` is not an image, is damaged, or is larger than ``max_pixels``.
        """
        return _decoded(data, (self.height, self.width), self.mode, self.resize, self.max_pixels)


def decode_image(
    data: Data,
    *,
    size: tuple[int, int] | None = None,
    mode: Mode = "RGB",
    resize: Resize = "crop",
    max_pixels: int = MAX_PIXELS,
) -> NDArray[np.uint8]:
    """Decode a JPEG, PNG, WebP, GIF (its first frame), BMP, PPM, TIFF, JPEG 2000 or AVIF image.

    The image is turned upright as its EXIF orientation says. CMYK, palette, grey and 16-bit grey images are converted
    to ``mode``; transparency is dropped, not blended.

    Args:
        data: the whole file.
        size: ``(height, width)`` of the result; default the image's own.
        mode: ``RGB`` for 3 channels or ``L`` (grey) for 1.
        resize: ``crop`` keeps the proportions and cuts what is too long equally from both sides; ``stretch`` does not.
            Both use an antialiased bilinear filter.
        max_pixels: refuse, before decoding, an image with more than these.

    Returns:
        ``uint8 [height, width, channels]``, writable, C-contiguous.

    Raises:
        ConfigError: an option is out of range.
        SampleError: ``data`` is not an image, is damaged, or is too large.
    """
    _check(size, mode, resize, max_pixels)
    return _decoded(data, size, mode, resize, max_pixels)


def _check(size: tuple[int, int] | None, mode: str, resize: str, max_pixels: int) -> None:
    if size is not None and not (len(size) == 2 and all(type(side) is int and side > 0 for side in size)):
        raise ConfigError(f"size {size!r} is not (height, width) in pixels")
    if mode not in get_args(Mode):
        raise ConfigError(f"mode {mode!r} is not one of {', '.join(get_args(Mode))}")
    if resize not in get_args(Resize):
        raise ConfigError(f"resize {resize!r} is not one of {', '.join(get_args(Resize))}")
    if max_pixels < 1:
        raise ConfigError(f"max_pixels {max_pixels!r} is not at least 1")


def _decoded(data: Data, size: tuple[int, int] | None, mode: Mode, resize: Resize, limit: int) -> NDArray[np.uint8]:
    try:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # numpy arrays are buffers
    except TypeError:
        raise SampleError(f"an image must be the contiguous bytes of a file, not {type(data).__name__}") from None
    try:
        found = _fast_jpeg(view, size, mode, limit) or _opened(view, size, mode, limit)
    except Image.DecompressionBombError as error:
        raise SampleError(f"the image is too large: {error}") from None
    except _DAMAGE as error:
        reason = str(error).partition(" <_io")[0] or type(error).__name__
        raise SampleError(f"{len(view)} bytes are not an intact image: {reason}") from error
    transpose, up_down, left_right = _TURNS.get(found.orientation, _UPRIGHT)
    image = found.image
    if size is not None:
        image = _resized(found, size[::-1] if transpose else size, resize)
    pixels = np.asarray(image).reshape(image.height, image.width, -1)
    if transpose:
        pixels = pixels.swapaxes(0, 1)
    return np.array(pixels[:: -1 if up_down else 1, :: -1 if left_right else 1], order="C")


@dataclass(frozen=True, slots=True)
class _Found:
    """A decoded image, before it is resized and turned.

    Attributes:
        image: its pixels, perhaps fewer than the file has.
        height: of the picture in these pixels; up to 1 less than the image's, whose last row may be partly padding.
        width: likewise.
        orientation: EXIF's.
    """

    image: Image.Image
    height: float
    width: float
    orientation: int


def _fast_jpeg(data: memoryview, size: tuple[int, int] | None, mode: Mode, limit: int) -> _Found | None:
    """Return a JPEG that simplejpeg takes, otherwise None."""
    if simplejpeg is None or bytes(data[:3]) != b"\xff\xd8\xff":
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        _check_pixels(width, height, limit)
        if space not in ("YCbCr", "RGB", "Gray"):
            return None
        orientation = _orientation(_jpeg_exif(data))
        reduction = _reduction((height, width), size, orientation)
        pixels = simplejpeg.decode_jpeg(
            data,
            colorspace="GRAY" if mode == "L" else "RGB",
            min_height=-(-height // reduction),
            min_width=-(-width // reduction),
            min_factor=reduction,
        )
    except ValueError:  # Pillow decides whether such a file is damaged, and says how.
        return None
    image = Image.fromarray(pixels[:, :, 0] if mode == "L" else pixels)
    return _Found(image, height / reduction, width / reduction, orientation)


def _jpeg_exif(data: memoryview) -> bytes:
    """Return the EXIF block of a JPEG, empty if there is none, from the segments before its pixels."""
    start = 2
    while start + 4 <= len(data) and data[start] == 0xFF and data[start + 1] != 0xDA:
        end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        if data[start + 1] == 0xE1 and bytes(data[start + 4 : start + 10]) == _EXIF_PREFIX:
            return bytes(data[start + 4 : end])
        start = end
    return b""


def _orientation(exif: bytes) -> int:
    """Return the orientation in an EXIF block; 1, upright, if there is none or the block is damaged."""
    tiff = exif.removeprefix(_EXIF_PREFIX)
    order: Literal["little", "big"] = "little" if tiff[:2] == b"II" else "big"

    def number(start: int, size_bytes: int) -> int:
        return int.from_bytes(tiff[start : start + size_bytes], order)  # 0 behind the end

    first = number(4, 4) + 2
    for entry in range(first, min(first + 12 * number(first - 2, 2), len(tiff)), 12):
        if number(entry, 2) == 0x0112:
            return number(entry + 8, 2)
    return 1


def _reduction(shape: tuple[int, int], size: tuple[int, int] | None, orientation: int) -> int:
    """Return 1, 2, 4 or 8: by how much a JPEG's sides can be divided and still be twice as long as asked."""
    if size is None:
        return 1
    wanted = size[::-1] if _TURNS.get(orientation, _UPRIGHT)[0] else size
    spare = min(have // (2 * side) for side, have in zip(wanted, shape, strict=True))
    return next(divisor for divisor in (8, 4, 2, 1) if divisor <= max(1, spare))


def _opened(data: memoryview, size: tuple[int, int] | None, mode: Mode, limit: int) -> _Found:
    """Return any image that Pillow takes."""
    with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
        width, height = image.size
        _check_pixels(width, height, limit)
        reduction = 1
        if image.format == "JPEG":
            reduction = _reduction((height, width), size, _orientation(image.info.get("exif", b"")))
            image.draft(None, (width // reduction, height // reduction))
        image.load()
        if reduction == 1:
            width, height = image.size  # Pillow has turned a TIFF
        orientation = _orientation(image.info.get("exif", b""))
        return _Found(_converted(image, mode), height / reduction, width / reduction, orientation)


def _converted(image: Image.Image, mode: Mode) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} (32 bits) have no defined range")
    elif image.mode in ("P", "PA"):
        image = image.convert("RGBA")
    return image.convert(mode)


def _check_pixels(width: int, height: int, limit: int) -> None:
    if width * height > limit:
        raise SampleError(
            f"the image has {width} x {height} pixels, more than max_pixels={limit}; raise that if it is genuine"
        )


def _resized(found: _Found, size: tuple[int, int], resize: Resize) -> Image.Image:
    height, width = size
    cut_x = cut_y = 0.0
    if resize == "crop":
        scale = min(found.width / width, found.height / height)
        cut_x = max(0.0, (found.width - width * scale) / 2)  # rounding may go below 0
        cut_y = max(0.0, (found.height - height * scale) / 2)
    box = (cut_x, cut_y, found.width - cut_x, found.height - cut_y)
    if (found.width, found.height) == (float(width), float(height)):
        return found.image
    return found.image.resize((width, height), Image.Resampling.BILINEAR, box=box)
