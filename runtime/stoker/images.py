"""Image decoding to a fixed size, so that images stack into a batch, with random crops and flips for training.

simplejpeg (libjpeg-turbo) decodes JPEG if it is installed; Pillow decodes the other formats, and any JPEG that
simplejpeg rejects (CMYK, stray bytes). Both release the GIL, so a thread pool decodes in parallel, and both give the
same pixels up to rounding. If the crop of a JPEG is much larger than the result, the image is decoded at 1/2, 1/4 or
1/8 of its sides. The reduced crop is at least twice as high and wide as the result, enough for the resizing filter.

The same bytes always give the same pixels, with the same versions of both libraries.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from stoker._image_geometry import UPRIGHT, RandomResizedCrop, jpeg_orientation, orientation_of
from stoker._order.random_words import SampleContext, Stream
from stoker.errors import ConfigError, MissingExtraError, SampleError

try:
    from PIL import Image
except ImportError as error:
    raise MissingExtraError("decoding images needs Pillow; pip install 'stoker[images]'") from error
try:
    import simplejpeg
except ImportError:
    simplejpeg = None

__all__ = ["MAX_PIXELS", "ImageDecoder", "JpegCrop", "RandomResizedCrop", "decode_image"]

MAX_PIXELS = 1 << 26
Data = bytes | bytearray | memoryview | NDArray[np.uint8]
Mode = Literal["RGB", "L"]
Resize = Literal["crop", "stretch"]
_Choose = Callable[[int, int], tuple[int, int, int, int]]

# Formats whose decoders are part of Pillow itself; some of the others start programs (EPS starts Ghostscript).
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF", "JPEG2000", "AVIF")
# EXIF orientation → (transpose, flip up-down, flip left-right), in the order of application.
_ORIENTATIONS = {
    UPRIGHT: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}
# Exceptions that Pillow raises for damaged files; the type depends on the format and the position of the damage.
_DAMAGE = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, ArithmeticError, RuntimeError, Warning)


class JpegCrop(NamedTuple):
    """The crop of a JPEG, and its orientation. Steps after decoding: cut, resize, transpose, flip.

    Example:
        >>> import io
        >>> from PIL import Image
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (40, 20)).save(file, "JPEG")
        >>> crop = ImageDecoder(10, 10).jpeg_crop(file.getvalue())
        >>> crop.left, crop.top, crop.right, crop.bottom
        (10, 0, 30, 20)

    Attributes:
        left: first column of the crop in the file's image, in pixels.
        top: first row of the crop.
        right: column behind the crop.
        bottom: row behind the crop.
        height: height of the resized crop, in the orientation of the file.
        width: width of the resized crop.
        transpose: whether to exchange rows and columns.
        up_down: whether to reverse the rows, after ``transpose``.
        left_right: whether to reverse the columns, after ``transpose``.
    """

    left: int
    top: int
    right: int
    bottom: int
    height: int
    width: int
    transpose: bool
    up_down: bool
    left_right: bool


@dataclass(frozen=True, slots=True)
class ImageDecoder:
    """Decodes an encoded image to ``uint8 [height, width, channels]``; a callable for ``Loader(decode=...)``.

    With ``mean`` and ``std`` the result is ``float32 [channels, height, width]``.

    Random crops and flips depend only on the sample's :class:`~stoker.SampleContext`, which the loader passes: they are
    the same for any number of threads, workers and ranks, and after a resume. All decoders of a sample draw the same
    random numbers, so two columns with images of equal size are cropped and mirrored alike.

    Attributes:
        height: height of the result, in pixels.
        width: width of the result, in pixels.
        mode: ``RGB`` for 3 channels (default) or ``L`` (grey) for 1.
        resize: ``crop`` (default) or ``stretch``, as in :func:`decode_image`; ignored with ``random_crop``.
        random_crop: random crop to apply before resizing; default None, the whole image.
        flip: probability of mirroring the result left to right, from 0 (default) to 1.
        mean: value to subtract from each channel, which is scaled to [0, 1] first; default None: no normalisation.
        std: divisor of each channel, after the subtraction; given together with ``mean``.
        max_pixels: maximum pixels of an image, as in :func:`decode_image`; default 2^26.

    Raises:
        ConfigError: a value is out of range.

    Example:
        >>> from stoker_torch import Loader
        >>> schema = {"image": stoker.Bytes(), "label": stoker.Array("int64")}
        >>> with stoker.Packer("gray", schema=schema) as packer:
        ...     packer.extend({"image": b"P5 2 2 255 abcd", "label": label} for label in range(8))
        >>> train = ImageDecoder(224, 224, random_crop=RandomResizedCrop(), flip=0.5)
        >>> with Loader("gray", batch_size=8, decode={"image": train}) as loader:
        ...     next(iter(loader))["image"].shape
        torch.Size([8, 224, 224, 3])
    """

    height: int
    width: int
    _: KW_ONLY
    mode: Mode = "RGB"
    resize: Resize = "crop"
    random_crop: RandomResizedCrop | None = None
    flip: float = 0.0
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        _check_options((self.height, self.width), self.mode, self.resize, self.max_pixels)
        if self.random_crop is not None and not isinstance(self.random_crop, RandomResizedCrop):
            raise ConfigError(
                f"random_crop must be a RandomResizedCrop, such as RandomResizedCrop(), not {self.random_crop!r}"
            )
        if not isinstance(self.flip, int | float) or not 0 <= self.flip <= 1:
            raise ConfigError(f"flip must be a probability from 0 to 1, not {self.flip!r}")
        if (self.mean is None) != (self.std is None):
            raise ConfigError("mean and std must be given together")
        for name in ("mean", "std"):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, _validate_channels(name, values, self.mode))

    def __call__(self, data: Data, context: SampleContext | None = None) -> NDArray[Any]:
        """Return the decoded image, in memory of its own.

        Args:
            data: content of the image file.
            context: context of the sample; required with ``random_crop`` or ``flip``.

        Raises:
            ConfigError: the context is missing.
            SampleError: ``data`` is not an image, is damaged, or has more than ``max_pixels`` pixels.
        """
        pixels = _decode(data, self._options(context))
        return pixels if self.mean is None or self.std is None else _normalise(pixels, self.mean, self.std)

    @property
    def is_random(self) -> bool:
        """Whether the result depends on the sample's context."""
        return self.random_crop is not None or self.flip > 0

    def jpeg_crop(self, data: Data, context: SampleContext | None = None) -> JpegCrop | None:
        """Return what another decoder of JPEG must do for the same result, without decoding.

        Args:
            data: content of the image file.
            context: context of the sample; required with ``random_crop`` or ``flip``.

        Returns:
            The crop; None if the data is no JPEG, or one that only Pillow decodes, such as one of CMYK.

        Raises:
            ConfigError: the context is missing.
            SampleError: the image has more than ``max_pixels`` pixels.
        """
        return _jpeg_crop(memoryview(data).cast("B"), self._options(context))  # type: ignore[arg-type]  # as _decode

    def _options(self, context: SampleContext | None) -> _DecodeOptions:
        crop, is_mirrored = None, False
        if self.is_random:
            if context is None:
                raise ConfigError(
                    "random_crop and flip need the sample's context: call decoder(data, SampleContext(…))"
                )
            count = 1 + (0 if self.random_crop is None else self.random_crop.random_numbers)
            first, *rest = context.uniform(count, stream=Stream.IMAGE).tolist()
            is_mirrored = first < self.flip
            crop = None if self.random_crop is None else partial(self.random_crop.choose, uniform=rest)
        return _DecodeOptions(
            size=(self.height, self.width),
            mode=self.mode,
            resize=self.resize,
            max_pixels=self.max_pixels,
            crop=crop,
            is_mirrored=is_mirrored,
        )


def decode_image(
    data: Data,
    *,
    size: tuple[int, int] | None = None,
    mode: Mode = "RGB",
    resize: Resize = "crop",
    max_pixels: int = MAX_PIXELS,
) -> NDArray[np.uint8]:
    """Decode a JPEG, PNG, WebP, GIF (its first frame), BMP, PPM, TIFF, JPEG 2000 or AVIF image.

    The image is rotated according to its EXIF orientation. CMYK, palette, grey and 16-bit grey images are converted
    to ``mode``; transparency is dropped, not blended.

    Args:
        data: content of the image file.
        size: ``(height, width)`` of the result, in pixels; default the image's own.
        mode: ``RGB`` for 3 channels (default) or ``L`` (grey) for 1.
        resize: ``crop`` (default) keeps the aspect ratio and cuts the longer dimension equally on both sides;
            ``stretch`` changes the aspect ratio. Both use an antialiased bilinear filter.
        max_pixels: maximum pixels of an image; a larger one is rejected before decoding. Default 2^26.

    Returns:
        ``uint8 [height, width, channels]``, writable, C-contiguous.

    Raises:
        ConfigError: an option is out of range.
        SampleError: ``data`` is not an image, is damaged, or has too many pixels.

    Example:
        >>> decode_image(b"P5 1 2 255 ab", size=(2, 2)).shape
        (2, 2, 3)
    """
    _check_options(size, mode, resize, max_pixels)
    return _decode(data, _DecodeOptions(size=size, mode=mode, resize=resize, max_pixels=max_pixels))


def _check_options(size: tuple[int, int] | None, mode: str, resize: str, max_pixels: int) -> None:
    if size is not None and not (len(size) == 2 and all(type(side) is int and side > 0 for side in size)):
        raise ConfigError(f"size must be (height, width) in pixels, not {size!r}")
    if mode not in get_args(Mode):
        raise ConfigError(f"mode must be one of {', '.join(get_args(Mode))}, not {mode!r}")
    if resize not in get_args(Resize):
        raise ConfigError(f"resize must be one of {', '.join(get_args(Resize))}, not {resize!r}")
    if max_pixels < 1:
        raise ConfigError(f"max_pixels must be at least 1, not {max_pixels!r}")


def _validate_channels(name: str, values: Sequence[float], mode: Mode) -> tuple[float, ...]:
    try:
        channels = tuple(map(float, values))
    except (TypeError, ValueError):
        channels = ()
    least = 0 if name == "std" else -math.inf
    if len(channels) != (1 if mode == "L" else 3) or not all(least < value < math.inf for value in channels):
        raise ConfigError(
            f"{name} must be a number{' above 0' * (name == 'std')} for each channel of {mode}, not {values!r}"
        )
    return channels


class _Box(NamedTuple):
    """A rectangle in an image, in pixels; fractional if the image was decoded at reduced size."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def shape(self) -> tuple[float, float]:
        return self.bottom - self.top, self.right - self.left

    def scale_down(self, reduction: int) -> _Box:
        return _Box(*(side / reduction for side in self))


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeOptions:
    """Options of one decoding.

    Attributes:
        size: ``(height, width)`` of the result; None for the image's own.
        mode: mode of the result.
        resize: way to change the aspect ratio, if the crop is not random.
        max_pixels: maximum pixels of the image.
        crop: function from height and width of the upright image to a crop; None for the whole image.
        is_mirrored: whether the upright result is mirrored left to right.
    """

    size: tuple[int, int] | None
    mode: Mode
    resize: Resize
    max_pixels: int
    crop: _Choose | None = None
    is_mirrored: bool = False

    def stored_size(self, orientation: int) -> tuple[int, int] | None:
        """Return the size of the result in the orientation of the file."""
        return self.size if self.size is None or not _ORIENTATIONS[orientation][0] else self.size[::-1]

    def box(self, height: float, width: float, orientation: int) -> _Box:
        """Return the crop of an image, in the orientation of the file."""
        if self.crop is not None:
            return self._random_box(self.crop, int(height), int(width), orientation)
        size = self.stored_size(orientation)
        cut_x = cut_y = 0.0
        if size is not None and self.resize == "crop":
            scale = min(width / size[1], height / size[0])
            cut_x = max(0.0, (width - size[1] * scale) / 2)  # rounding may go below 0
            cut_y = max(0.0, (height - size[0] * scale) / 2)
        return _Box(cut_x, cut_y, width - cut_x, height - cut_y)

    @staticmethod
    def _random_box(choose: _Choose, height: int, width: int, orientation: int) -> _Box:
        transpose, up_down, left_right = _ORIENTATIONS[orientation]
        if transpose:
            height, width = width, height
        top, left, part_height, part_width = choose(height, width)
        if up_down:
            top = height - top - part_height
        if left_right:
            left = width - left - part_width
        if transpose:
            return _Box(top, left, top + part_height, left + part_width)
        return _Box(left, top, left + part_width, top + part_height)

    def reduction(self, height: int, width: int, orientation: int) -> int:
        """Return 1, 2, 4 or 8: the largest divisor of a JPEG's sides that leaves its crop twice the result's sides."""
        size = self.stored_size(orientation)
        if size is None:
            return 1
        shape = (height, width) if self.crop is None else self.box(height, width, orientation).shape
        spare = min(have // (2 * side) for side, have in zip(size, shape, strict=True))
        return next(divisor for divisor in (8, 4, 2, 1) if divisor <= max(1, spare))


@dataclass(frozen=True, slots=True)
class _DecodedImage:
    """A decoded image, before it is resized and rotated.

    Attributes:
        image: decoded pixels; fewer than the file's if it was decoded at reduced size.
        box: crop, in pixels of ``image``. It may end up to 1 before the image does, whose last row and column may
            be partly padding.
        orientation: EXIF orientation, 1 to 8.
    """

    image: Image.Image
    box: _Box
    orientation: int


def _decode(data: Data, request: _DecodeOptions) -> NDArray[np.uint8]:
    try:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # numpy arrays are buffers
    except TypeError:
        raise SampleError(f"an image must be the contiguous bytes of a file, not {type(data).__name__}") from None
    try:
        decoded = _decode_with_simplejpeg(view, request) or _decode_with_pillow(view, request)
    except Image.DecompressionBombError as error:
        raise SampleError(f"the image is too large: {error}") from None
    except _DAMAGE as error:
        reason = str(error).partition(" <_io")[0] or type(error).__name__
        raise SampleError(f"{len(view)} bytes are not an intact image: {reason}") from error
    size = request.stored_size(decoded.orientation)
    image = decoded.image if size is None else _resize(decoded, size)
    transpose, up_down, left_right = _ORIENTATIONS[decoded.orientation]
    pixels = np.asarray(image).reshape(image.height, image.width, -1)
    if transpose:
        pixels = pixels.swapaxes(0, 1)
    return np.array(pixels[:: -1 if up_down else 1, :: -1 if left_right != request.is_mirrored else 1], order="C")


def _read_jpeg_header(data: memoryview, request: _DecodeOptions) -> tuple[int, int, int] | None:
    """Return height, width and orientation of a JPEG; None if simplejpeg does not support the file."""
    if simplejpeg is None or bytes(data[:3]) != b"\xff\xd8\xff":
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        _check_pixels(width, height, request.max_pixels)
        return (height, width, jpeg_orientation(data)) if space in ("YCbCr", "RGB", "Gray") else None
    except ValueError:  # Pillow decides whether such a file is damaged, and says how.
        return None


def _decode_with_simplejpeg(data: memoryview, request: _DecodeOptions) -> _DecodedImage | None:
    """Decode a JPEG with simplejpeg; return None if it does not support the file."""
    header = _read_jpeg_header(data, request)
    if header is None:
        return None
    height, width, orientation = header
    try:
        reduction = request.reduction(height, width, orientation)
        pixels = simplejpeg.decode_jpeg(
            data,
            colorspace="GRAY" if request.mode == "L" else "RGB",
            min_height=-(-height // reduction),
            min_width=-(-width // reduction),
            min_factor=reduction,
        )
    except ValueError:  # Pillow decides whether such a file is damaged, and says how.
        return None
    box = request.box(height, width, orientation).scale_down(reduction)
    if request.crop is not None:  # so that Pillow copies only the crop, and its filter reads nothing beyond it
        (left, top, right, bottom), box = _align_to_pixels(box)
        pixels = pixels[top:bottom, left:right]
    return _DecodedImage(Image.fromarray(pixels[:, :, 0] if request.mode == "L" else pixels), box, orientation)


def _jpeg_crop(data: memoryview, request: _DecodeOptions) -> JpegCrop | None:
    header = _read_jpeg_header(data, request)
    if header is None:
        return None
    height, width, orientation = header
    box, size = request.box(height, width, orientation), request.stored_size(orientation)
    assert size is not None  # noqa: S101 - an ImageDecoder has one
    transpose, up_down, left_right = _ORIENTATIONS[orientation]
    left, top = min(round(box.left), width - 1), min(round(box.top), height - 1)
    right, bottom = max(left + 1, round(box.right)), max(top + 1, round(box.bottom))
    return JpegCrop(left, top, right, bottom, *size, transpose, up_down, left_right != request.is_mirrored)


def _decode_with_pillow(data: memoryview, request: _DecodeOptions) -> _DecodedImage:
    """Decode an image of any format with Pillow."""
    with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
        width, height = image.size
        _check_pixels(width, height, request.max_pixels)
        reduction = 1
        if image.format == "JPEG":
            reduction = request.reduction(height, width, orientation_of(image))
            image.draft(None, (width // reduction, height // reduction))
        image.load()
        if reduction == 1:
            width, height = image.size  # Pillow rotates a TIFF itself
        orientation = orientation_of(image)  # some formats store it after the pixels
        box = request.box(height, width, orientation).scale_down(reduction)
        if request.crop is None:
            return _DecodedImage(_convert_mode(image, request.mode), box, orientation)
        part, box = _align_to_pixels(box)
        return _DecodedImage(_convert_mode(image.crop(part), request.mode), box, orientation)


def _align_to_pixels(box: _Box) -> tuple[tuple[int, int, int, int], _Box]:
    """Return the smallest rectangle of whole pixels around a crop, and the crop relative to it."""
    left, top = int(box.left), int(box.top)
    part = (left, top, math.ceil(box.right), math.ceil(box.bottom))
    return part, _Box(box.left - left, box.top - top, box.right - left, box.bottom - top)


def _convert_mode(image: Image.Image, mode: Mode) -> Image.Image:
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


def _resize(image: _DecodedImage, size: tuple[int, int]) -> Image.Image:
    height, width = size
    if image.box == _Box(0, 0, width, height):
        return image.image
    return image.image.resize((width, height), Image.Resampling.BILINEAR, box=image.box)


def _normalise(pixels: NDArray[np.uint8], mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """Return the result of torchvision's ``ToTensor`` and ``Normalize`` for pixels, bit for bit."""
    height, width, channels = pixels.shape
    values = np.arange(256, dtype=np.float32) / np.float32(255)
    result = np.empty((channels, height, width), np.float32)
    for channel in range(channels):
        table = (values - np.float32(mean[channel])) / np.float32(std[channel])
        np.take(table, pixels[:, :, channel], out=result[channel], mode="clip")  # no index is out of range
    return result
