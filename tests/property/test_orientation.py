"""Images are turned upright as Pillow turns them, wherever and however their orientation is written."""

from __future__ import annotations

import io
import random
import struct
import time
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageOps

from stoker import images
from stoker._image_geometry import jpeg_orientation
from stoker.errors import SampleError
from stoker.images import decode_image
from support.memory import memory_of

PIXELS = np.arange(8 * 24 * 3, dtype=np.uint8).reshape(8, 24, 3) // 2
ATTRIBUTE = '<x:xmpmeta><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>'
ELEMENT = "<x:xmpmeta><tiff:Orientation>{}</tiff:Orientation></x:xmpmeta>"


def saved(kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(PIXELS).save(out, kind, **options)
    return out.getvalue()


JPEG, PNG = saved("JPEG"), saved("PNG")


def tiff(order: str, kind: int, values: list[int], *, tag: int = 0x0112, copies: int = 1, head: bytes = b"") -> bytes:
    """Return an EXIF block, without its prefix, with a tag of a type."""
    size = {1: "B", 3: "H", 4: "I", 8: "h", 9: "i", 13: "I", 16: "Q", 2: "B", 5: "I"}[kind]
    body = struct.pack(f"{order}{len(values)}{size}", *values)
    place = 8 + 2 + 12 * (copies + 1) + 4
    inline = body.ljust(4, b"\0") if len(body) <= 4 else struct.pack(f"{order}I", place)
    count = len(values) // 2 if kind == 5 else len(values)
    entry = struct.pack(f"{order}HHI", tag, kind, count) + inline
    maker = struct.pack(f"{order}HHI", 0x0100, 4, 1) + struct.pack(f"{order}I", 24)
    head = head or {"<": b"II*\0", ">": b"MM\0*"}[order]
    start = struct.pack(f"{order}IH", 8, copies + 1)
    return head + start + maker + entry * copies + bytes(4) + body


def segment(marker: int, body: bytes, fill: int = 0) -> bytes:
    return b"\xff" * fill + struct.pack(">BBH", 0xFF, marker, 2 + len(body)) + body


def with_segments(*segments: bytes) -> bytes:
    return JPEG[:2] + b"".join(segments) + JPEG[2:]


def exif(block: bytes, fill: int = 0) -> bytes:
    return segment(0xE1, b"Exif\0\0" + block, fill)


def xmp(text: str, fill: int = 0) -> bytes:
    return segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + text.encode(), fill)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def with_chunk(kind: bytes, body: bytes, *, is_last: bool = False) -> bytes:
    place = len(PNG) - 12 if is_last else 33
    return PNG[:place] + chunk(kind, body) + PNG[place:]


def raw_profile(block: bytes) -> bytes:
    return f"\nexif\n{len(block) + 6:8}\n{(b'Exif' + bytes(2) + block).hex()}\n".encode()


def short(order: str, value: int) -> bytes:
    return tiff(order, 3, [value])


FORMS: dict[str, Callable[[int], bytes]] = {
    "little endian": lambda o: with_segments(exif(short("<", o))),
    "big endian": lambda o: with_segments(exif(short(">", o))),
    "little-endian long": lambda o: with_segments(exif(tiff("<", 4, [o]))),
    "big-endian long": lambda o: with_segments(exif(tiff(">", 4, [o]))),
    "signed": lambda o: with_segments(exif(tiff(">", 9, [o]))),
    "a byte": lambda o: with_segments(exif(tiff("<", 1, [o]))),
    "text": lambda o: with_segments(exif(tiff("<", 2, [48 + o, 0]))),
    "a fraction": lambda o: with_segments(exif(tiff(">", 5, [2 * o, 2]))),
    "several values": lambda o: with_segments(exif(tiff(">", 3, [o, 1, 1]))),
    "several entries": lambda o: with_segments(exif(tiff("<", 3, [o], copies=2))),
    "fill bytes": lambda o: with_segments(exif(short("<", o), fill=5)),
    "fill bytes behind another segment": lambda o: with_segments(segment(0xFE, b"text"), exif(short(">", o), fill=1)),
    "a restart marker before": lambda o: with_segments(b"\xff\xd0", exif(short("<", o))),
    "a second prefix": lambda o: with_segments(exif(b"Exif\0\0" + short("<", o))),
    "in two segments": lambda o: with_segments(exif(short("<", o)[:20]), exif(short("<", o)[20:])),
    "XMP attribute": lambda o: with_segments(xmp(ATTRIBUTE.format(o))),
    "XMP element, fill bytes": lambda o: with_segments(xmp(ELEMENT.format(o), fill=3)),
    "XMP twice": lambda o: with_segments(xmp(ELEMENT.format(3)), xmp(ATTRIBUTE.format(o))),
    "EXIF before XMP": lambda o: with_segments(xmp(ELEMENT.format(3)), exif(short("<", o))),
    "EXIF without, XMP": lambda o: with_segments(exif(tiff(">", 3, [7], tag=0x0106)), xmp(ATTRIBUTE.format(o))),
    "empty EXIF, XMP": lambda o: with_segments(exif(b""), xmp(ATTRIBUTE.format(o))),
    "PNG": lambda o: with_chunk(b"eXIf", short(">", o)),
    "PNG, behind the pixels": lambda o: with_chunk(b"eXIf", tiff(">", 4, [o]), is_last=True),
    "PNG raw profile": lambda o: with_chunk(b"tEXt", b"Raw profile type exif\0" + raw_profile(short("<", o))),
    "PNG packed raw profile": lambda o: with_chunk(
        b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw_profile(short(">", o)))
    ),
    "PNG raw profile behind the pixels": lambda o: with_chunk(
        b"tEXt", b"Raw profile type exif\0" + raw_profile(tiff(">", 4, [o])), is_last=True
    ),
    "PNG XMP": lambda o: with_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + ATTRIBUTE.format(o).encode()),
    "WebP": lambda o: saved("WEBP", lossless=True, exif=short(">", o)),
    "WebP XMP": lambda o: saved("WEBP", lossless=True, xmp=ATTRIBUTE.format(o).encode()),
    "TIFF": lambda o: saved("TIFF", tiffinfo={0x0112: o}),
}


@pytest.mark.filterwarnings("ignore:Metadata Warning, tag 274 had too many entries")
@pytest.mark.parametrize("library", ["simplejpeg", "pillow"])
@pytest.mark.parametrize("form", FORMS)
def test_an_orientation_is_found_wherever_pillow_finds_it(
    form: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "pillow":
        monkeypatch.setattr(images, "simplejpeg", None)
    shapes = set()
    for orientation in range(1, 10):
        data = FORMS[form](orientation)
        upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        decoded = decode_image(data)
        shapes.add(decoded.shape)
        assert decoded.shape == upright.shape, orientation
        assert np.abs(decoded.astype(int) - upright).max() <= 1, orientation
    assert len(shapes) == (1 if form in ("a byte", "text") else 2)  # which Pillow does not take for an orientation


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_damaged_orientation_is_what_pillow_takes_it_for_and_spoils_no_image() -> None:
    rng = random.Random(3)
    turned = 0
    for number in range(1500):
        form = rng.choice([form for form in FORMS if FORMS[form](1)[:2] == JPEG[:2]])
        data = bytearray(FORMS[form](rng.randrange(2, 9)))
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(2, max(3, len(data) - len(JPEG) + 2))] = rng.choice((0, 1, 6, 0xFF, rng.randrange(256)))
        try:
            decoded = decode_image(data)
        except SampleError:
            continue
        try:
            upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        except (OSError, SyntaxError, ValueError, TypeError, struct.error):
            assert sorted(decoded.shape) == sorted(PIXELS.shape)
            continue
        assert decoded.shape == upright.shape, (number, form)
        turned += decoded.shape != PIXELS.shape
    assert turned > 100


@pytest.mark.parametrize(
    "hostile",
    [
        b"\xff" * (1 << 20),
        segment(0xE1, b"Exif\0\0") * (1 << 17),
        b"\xff\xe1\0\2" * (1 << 20),
        b"\xff\xe1\0\0" * (1 << 20),
        xmp("tiff:Orientation=" * 3000) * 20,
        exif(b"II*\0\x08\0\0\0\xff\xff" + b"\x12\x01\x03\0\xff\xff\xff\xff\0\0\0\0" * 5000),
        exif(b"MM\0*" + b"\xff" * 60),
        exif(tiff("<", 3, [6] * 9000)),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_hostile_metadata_is_read_in_bounded_time_and_memory(hostile: bytes) -> None:
    data = with_segments(hostile)
    started = time.process_time()
    max_bytes = 8 * len(data) + (1 << 20)
    assert memory_of(lambda: jpeg_orientation(memoryview(data)), enough_bytes=max_bytes).peak_bytes <= max_bytes
    assert 1 <= jpeg_orientation(memoryview(data)) <= 8
    assert time.process_time() - started < 5
