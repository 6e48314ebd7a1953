"""Decodes the JPEGs of a batch on the device, and resizes them there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stoker._order.random_words import SampleContext
from stoker.errors import SampleError
from stoker_torch._tensors import RaggedColumn
from stoker_torch._user_functions import ContextOf

if TYPE_CHECKING:
    from stoker.images import ImageDecoder, JpegCrop, Mode, RandomResizedCrop, Resize

_log = logging.getLogger("stoker")

DecodeJpegs = Callable[..., list[torch.Tensor]]
"""``torchvision.io.decode_jpeg``."""


@dataclass(frozen=True, slots=True)
class DeviceImageDecoder:
    """Decodes the images of a column on the loader's device; a value of ``Loader(decode=..., device="cuda")``.

    The result is ``uint8 [samples, height, width, channels]`` on the device, with the crops and flips of an
    :class:`~stoker.images.ImageDecoder` of the same settings, to within a pixel; pixels differ by the rounding of the
    decoders and filters. Scale and normalise in ``batch_transform``, which runs on the device, too.

    JPEGs are decoded by torchvision on CUDA. Images of other formats, and JPEGs that only Pillow decodes, are decoded
    by an ``ImageDecoder`` on the host and copied. So are all images if there is no torchvision, or no CUDA device, with
    a warning; the batches and their order stay the same.

    Attributes:
        height: height of the result, in pixels.
        width: width of the result, in pixels.
        mode: ``RGB`` for 3 channels (default) or ``L`` (grey) for 1.
        resize: ``crop`` (default) or ``stretch``; ignored with ``random_crop``.
        random_crop: random crop to apply before resizing; default None, the whole image.
        flip: probability of mirroring the result left to right, from 0 (default) to 1.
        max_pixels: maximum pixels of an image; a larger one is rejected before decoding. Default 2^26.

    Raises:
        ConfigError: a value is out of range.

    Example:
        >>> import torch
        >>> device = "cuda" if torch.cuda.is_available() else "cpu"
        >>> with stoker.Packer("gray", schema={"image": stoker.Bytes()}) as packer:
        ...     packer.extend({"image": b"P5 2 2 255 abcd"} for _ in range(8))
        >>> decode = {"image": DeviceImageDecoder(224, 224)}
        >>> with Loader("gray", batch_size=8, decode=decode, device=device) as loader:
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
    max_pixels: int = 1 << 26

    def __post_init__(self) -> None:
        self.on_host()

    def on_host(self) -> ImageDecoder:
        """Return the decoder of the host with the same settings."""
        from stoker.images import ImageDecoder

        options = {name: getattr(self, name) for name in ("mode", "resize", "random_crop", "flip", "max_pixels")}
        return ImageDecoder(self.height, self.width, **options)

    def __call__(self, data: Any, context: SampleContext | None = None) -> Any:
        """Return one image, decoded on the host; see :meth:`stoker.images.ImageDecoder.__call__`."""
        return self.on_host()(data, context)

    @property
    def is_random(self) -> bool:
        """Whether the result depends on the sample's context."""
        return self.random_crop is not None or self.flip > 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one result."""
        return self.height, self.width, 1 if self.mode == "L" else 3


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImages:
    """The images of a column in a batch, in host memory, to be decoded on the device.

    Attributes:
        decoder: settings.
        column: encoded images.
        name_of: function from a sample's place in the batch to its name in error messages.
        context_of: function from a sample's place in the batch to its context.
    """

    decoder: DeviceImageDecoder
    column: RaggedColumn
    name_of: Callable[[int], str]
    context_of: ContextOf | None

    def like(self) -> torch.Tensor:
        """Return a tensor without memory that has the shape and dtype of the result."""
        return torch.empty((len(self.column), *self.decoder.shape), dtype=torch.uint8, device="meta")

    def decode(self, device: torch.device) -> torch.Tensor:
        """Return the decoded images, ``uint8 [samples, height, width, channels]``; waits for the device.

        Raises:
            SampleError: an image is damaged, is none, or is too large; names the sample.
        """
        host = self.decoder.on_host()
        crops: dict[int, JpegCrop] = {}
        result = torch.empty(self.like().shape, dtype=torch.uint8, device=device)
        files = [self.column.values[start:end] for start, end in pairwise(self.column.offsets.tolist())]
        for place, file in enumerate(files):
            try:
                crop = host.jpeg_crop(file.numpy(), self._context(place))
            except SampleError as error:
                raise self._failure(place, error) from error
            if crop is not None:
                crops[place] = crop
        decoded = self._decode_jpegs([files[place] for place in crops], device)
        for (place, crop), image in zip(crops.items(), decoded, strict=True):
            if image is not None:
                result[place] = _resize(image, crop)
        undecoded = {place for place, image in zip(crops, decoded, strict=True) if image is None}
        for place in sorted(undecoded | (set(range(len(files))) - set(crops))):
            try:
                pixels = host(files[place].numpy(), self._context(place))
            except SampleError as error:
                raise self._failure(place, error) from error
            result[place].copy_(torch.from_numpy(np.ascontiguousarray(pixels)))
        return result

    def _context(self, place: int) -> SampleContext | None:
        return self.context_of(place) if self.context_of is not None and self.decoder.is_random else None

    def _failure(self, place: int, error: SampleError) -> SampleError:
        return SampleError(f"{self.name_of(place)}: decoding on the device failed: {error}")

    def _decode_jpegs(self, files: list[torch.Tensor], device: torch.device) -> Sequence[torch.Tensor | None]:
        """Return decoded JPEGs, ``uint8 [channels, height, width]``; None for what the device cannot decode."""
        decode = find_decode_jpeg()
        if not files or decode is None:
            return [None] * len(files)
        mode = "GRAY" if self.decoder.mode == "L" else "RGB"
        try:
            return decode(files, mode=mode, device=device)
        except RuntimeError:  # one of them is damaged or of a kind that the device does not know: find out which
            return [self._decode_one(file, mode, device) for file in files]

    @staticmethod
    def _decode_one(file: torch.Tensor, mode: str, device: torch.device) -> torch.Tensor | None:
        decode = find_decode_jpeg()
        try:
            return None if decode is None else decode([file], mode=mode, device=device)[0]
        except RuntimeError:
            return None


def like_decoded(value: Any) -> Any:
    """Return what decoding makes of a value of a batch, without memory; other values as they are."""
    return value.like() if isinstance(value, EncodedImages) else value


def _resize(image: torch.Tensor, crop: JpegCrop) -> torch.Tensor:
    """Return the crop of an image, resized, in its orientation, ``uint8 [height, width, channels]``."""
    part = image[None, :, crop.top : crop.bottom, crop.left : crop.right]
    if part.shape[2:] != (crop.height, crop.width):
        size = crop.height, crop.width
        scaled = torch.nn.functional.interpolate(part.float(), size=size, mode="bilinear", antialias=True)
        part = scaled.round_().clamp_(0, 255).to(torch.uint8)
    pixels = part[0].permute(2, 1, 0) if crop.transpose else part[0].permute(1, 2, 0)
    flips = [axis for axis, is_flipped in enumerate((crop.up_down, crop.left_right)) if is_flipped]
    return pixels.flip(flips) if flips else pixels


@cache
def find_decode_jpeg() -> DecodeJpegs | None:
    """Return torchvision's decoder of JPEGs, or None with a warning."""
    try:
        decode: DecodeJpegs = import_module("torchvision.io").decode_jpeg  # optional, and slow to import
    except (ImportError, RuntimeError) as error:  # an installation for another torch raises the latter
        _log.warning(
            "DeviceImageDecoder decodes on the host, since torchvision cannot be imported: %s. Install the torchvision "
            "of this torch to decode on the device",
            error,
        )
        return None
    return decode


def device_decoders(
    decode: Mapping[str, Callable[..., Any]] | None, device: torch.device | None, *, has_transform: bool
) -> dict[str, DeviceImageDecoder]:
    """Return column → decoder, of the decoders that work on a device; the others decode in the worker threads.

    Args:
        decode: functions of columns.
        device: accelerator; None without.
        has_transform: whether functions of single samples on the host need the decoded images.
    """
    found = {name: each for name, each in (decode or {}).items() if isinstance(each, DeviceImageDecoder)}
    if not found or device is None:
        return {}
    if device.type != "cuda" or has_transform:
        reason = "transform= or collate= needs them there" if has_transform else f"{device} decodes no JPEGs"
        _log.warning("DeviceImageDecoder decodes on the host: %s", reason)
        return {}
    return {} if find_decode_jpeg() is None else found
