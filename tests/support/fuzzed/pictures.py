"""The reader of images: pixels and orientation."""

from __future__ import annotations

import io
from functools import cache

import numpy as np
from PIL import Image

from stoker import SampleContext
from stoker._image_geometry import jpeg_orientation
from stoker.errors import SampleError
from stoker.images import ImageDecoder, RandomResizedCrop
from support.fuzzed.mutations import mutated_bytes
from support.fuzzed.reader import Reader

__all__ = ["PICTURES"]

_DECODER = ImageDecoder(8, 6, random_crop=RandomResizedCrop(), flip=0.5, max_pixels=1 << 10)


def _read(data: bytes) -> str:
    assert 1 <= jpeg_orientation(memoryview(data)) <= 8
    pixels = _DECODER(data, SampleContext(seed=0, epoch=0, sample=len(data)))
    assert pixels.shape == (8, 6, 3)
    return "read"


@cache
def pictures() -> list[bytes]:
    """Return small images of several formats with an orientation: in EXIF, in XMP, and in both."""
    image = Image.fromarray(np.arange(20 * 12 * 3, dtype=np.uint8).reshape(20, 12, 3))
    exif = Image.Exif()
    exif[0x0112] = 6
    xmp = b'<rdf:Description tiff:Orientation="8"/>'
    made = []
    for kind, options in (
        ("JPEG", {"exif": exif}),
        ("JPEG", {"xmp": xmp}),
        ("JPEG", {"exif": exif, "xmp": xmp}),
        ("PNG", {"exif": exif}),
        ("WEBP", {"exif": exif, "xmp": xmp}),
    ):
        out = io.BytesIO()
        image.save(out, kind, **options)
        made.append(out.getvalue())
    return made


PICTURES = {"image": Reader(read=_read, seeds=pictures, mutate=mutated_bytes, errors=(SampleError,))}
