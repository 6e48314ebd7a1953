"""The image decoder. Pillow, used directly and in full, is the oracle."""

from __future__ import annotations

import importlib
import io
import pickle
import random
import struct
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from stoker import images
from stoker.errors import ConfigError, MissingExtraError, SampleError
from stoker.images import ImageDecoder, decode_image
from support.cases import for_each

simplejpeg: Any = vars(images)["simplejpeg"]
needs_simplejpeg = pytest.mark.skipif(simplejpeg is None, reason="simplejpeg is not installed")


def picture(height: int, width: int) -> NDArray[np.uint8]:
    """Return smooth waves with some noise, different in every channel and direction."""
    y, x = np.mgrid[0:height, 0:width].astype(float)
    waves = [128 + 90 * np.sin(x / 17 + c) * np.cos(y / (11 + c)) + 20 * (x / width - y / height) for c in range(3)]
    noise = np.random.default_rng(0).normal(0, 4, (height, width, 3))
    return np.clip(np.stack(waves, -1) + noise, 0, 255).astype(np.uint8)


def encoded(pixels: Any, kind: str = "PNG", mode: str | None = None, **options: Any) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    out = io.BytesIO()
    (image.convert(mode) if mode else image).save(out, kind, **options)
    return out.getvalue()


def oriented(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def difference(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    assert one.shape == other.shape
    return float(np.abs(one.astype(int) - other.astype(int)).mean())


@pytest.fixture(params=["simplejpeg", "pillow"])
def jpeg_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pillow":
        monkeypatch.setattr(images, "simplejpeg", None)
    elif simplejpeg is None:
        pytest.skip("simplejpeg is not installed")
    return str(request.param)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000"])
def test_a_lossless_image_comes_back_exactly(kind: str) -> None:
    pixels = picture(37, 53)
    options: dict[str, Any] = {"WEBP": {"lossless": True}, "JPEG2000": {"irreversible": False}}.get(kind, {})
    decoded = decode_image(encoded(pixels, kind, **options))
    assert decoded.dtype == np.uint8
    assert decoded.flags.c_contiguous
    assert decoded.flags.writeable
    assert np.array_equal(decoded, pixels)


def test_a_jpeg_decodes_as_pillow_decodes_it(jpeg_library: str) -> None:
    data = encoded(picture(121, 83), "JPEG", quality=90)
    assert np.array_equal(decode_image(data), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_any_contiguous_bytes_will_do(wrap: Any, kind: str) -> None:
    data = encoded(picture(20, 30), kind)
    assert np.array_equal(decode_image(wrap(data)), decode_image(data))


@pytest.mark.parametrize("value", ["text", None, 3, np.arange(20, dtype=np.uint8)[::2], memoryview(b"x" * 20)[::2]])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(SampleError, match="contiguous bytes"):
        decode_image(value)


@for_each("shape", [(60, 90), (90, 60), (64, 64), (33, 200), (10, 12)])
@for_each("kind", ["JPEG", "PNG"])
def test_crop_keeps_the_middle_and_the_proportions(shape: tuple[int, int], kind: str) -> None:
    data = encoded(picture(*shape), kind)
    full = Image.open(io.BytesIO(data))
    expected = np.asarray(ImageOps.fit(full, (48, 32), Image.Resampling.BILINEAR))
    assert difference(decode_image(data, size=(32, 48)), expected) < 1.5


def test_stretch_uses_the_whole_image() -> None:
    pixels = picture(60, 90)
    expected = np.asarray(Image.fromarray(pixels).resize((30, 40), Image.Resampling.BILINEAR))
    assert np.array_equal(decode_image(encoded(pixels), size=(40, 30), resize="stretch"), expected)


@pytest.mark.parametrize("shape", [(448, 448), (900, 1200), (1793, 1800)])
def test_a_large_jpeg_is_decoded_smaller_and_hardly_differs(jpeg_library: str, shape: tuple[int, int]) -> None:
    data = encoded(picture(*shape), "JPEG", quality=95)
    expected = np.asarray(ImageOps.fit(Image.open(io.BytesIO(data)), (224, 224), Image.Resampling.BILINEAR))
    assert difference(decode_image(data, size=(224, 224)), expected) < 1


@needs_simplejpeg
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_both_jpeg_libraries_give_the_same_pixels(monkeypatch: pytest.MonkeyPatch, orientation: int, mode: Any) -> None:
    data = encoded(picture(700, 500), "JPEG", exif=oriented(orientation))
    one = decode_image(data, size=(100, 120), mode=mode)
    monkeypatch.setattr(images, "simplejpeg", None)
    assert np.abs(one.astype(int) - decode_image(data, size=(100, 120), mode=mode)).max() <= 1


@needs_simplejpeg
def test_simplejpeg_decodes_no_more_pixels_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    original = simplejpeg.decode_jpeg

    def spy(*args: Any, **options: Any) -> Any:
        shapes.append(original(*args, **options).shape[:2])
        return original(*args, **options)

    monkeypatch.setattr(simplejpeg, "decode_jpeg", spy)
    data = encoded(picture(801, 1201), "JPEG")
    for size in ((50, 50), (51, 50), (100, 150), (200, 10), (201, 10), (4000, 4000)):
        decode_image(data, size=size)
    assert shapes == [(101, 151), (201, 301), (201, 301), (401, 601), (801, 1201), (801, 1201)]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("size", [None, (20, 32)])
def test_an_image_is_turned_upright(
    jpeg_library: str, orientation: int, kind: str, size: tuple[int, int] | None
) -> None:
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(picture(40, 56), kind, exif=oriented(orientation), **options)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if size:
        upright = ImageOps.fit(upright, size[::-1], Image.Resampling.BILINEAR)
    assert difference(decode_image(data, size=size), np.asarray(upright)) < 0.5


@pytest.mark.parametrize("orientation", [0, 9, 255, 65535])
def test_an_orientation_that_does_not_exist_is_upright(jpeg_library: str, orientation: int) -> None:
    data = encoded(picture(8, 12), "JPEG", exif=oriented(orientation))
    assert decode_image(data).shape == (8, 12, 3)


def test_a_big_endian_exif_behind_another_segment_is_found(jpeg_library: str) -> None:
    tiff = b"MM\0*" + struct.pack(">I", 8) + struct.pack(">HHHIHHI", 1, 0x0112, 3, 1, 6, 0, 0)
    jpeg = encoded(picture(8, 12), "JPEG")
    comment = b"\xff\xfe\0\x06abcd"
    exif = b"\xff\xe1" + struct.pack(">H", 8 + len(tiff)) + b"Exif\0\0" + tiff
    assert decode_image(jpeg[:2] + comment + exif + jpeg[2:]).shape == (12, 8, 3)


@needs_simplejpeg
def test_damaged_exif_does_not_spoil_the_image() -> None:
    jpeg = encoded(picture(8, 12), "JPEG")
    for tiff in (b"", b"II", b"II*\0\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff", b"junk" * 9):
        exif = b"\xff\xe1" + struct.pack(">H", 8 + len(tiff)) + b"Exif\0\0" + tiff
        assert np.array_equal(decode_image(jpeg[:2] + exif + jpeg[2:]), decode_image(jpeg))


def test_grey_images_become_rgb_and_rgb_images_grey(jpeg_library: str) -> None:
    for kind in ("PNG", "JPEG"):
        grey = encoded(picture(20, 30), kind, mode="L")
        decoded = decode_image(grey)
        assert decoded.shape == (20, 30, 3)
        assert np.array_equal(decoded[..., 0], decoded[..., 2])
        assert decode_image(grey, mode="L").shape == (20, 30, 1)
        color = encoded(picture(20, 30), kind)
        expected = np.asarray(Image.open(io.BytesIO(color)).convert("L"))[..., None]
        assert difference(decode_image(color, mode="L"), expected) < 1


def test_cmyk_jpegs_become_rgb(jpeg_library: str) -> None:
    pixels = picture(20, 30)
    data = encoded(pixels, "JPEG", mode="CMYK", quality=95)
    assert np.array_equal(decode_image(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_palettes_bits_and_transparency_become_rgb() -> None:
    pixels = picture(20, 30)
    palette = Image.fromarray(pixels).quantize(16)
    expected = np.asarray(palette.convert("RGB"))
    assert np.array_equal(decode_image(encoded(palette)), expected)
    assert np.array_equal(decode_image(encoded(palette, transparency=bytes(range(16)))), expected)
    assert decode_image(encoded(Image.fromarray(pixels[..., 0] > 128))).max() == 255
    transparent = np.dstack([pixels, np.zeros((20, 30), np.uint8)])
    assert np.array_equal(decode_image(encoded(transparent)), pixels)


def test_16_bit_grey_keeps_its_high_byte() -> None:
    values = np.arange(600, dtype=np.uint16).reshape(20, 30) * 100
    assert np.array_equal(decode_image(encoded(values), mode="L")[..., 0], values >> 8)


def test_pixels_without_a_range_are_refused() -> None:
    with pytest.raises(SampleError, match="no defined range"):
        decode_image(encoded(np.ones((4, 4), np.float32), "TIFF"))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_a_truncated_image_is_an_error(jpeg_library: str, kind: str) -> None:
    data = encoded(picture(64, 64), kind)
    for end in (len(data) // 2, 20, 3, 1, 0):
        with pytest.raises(SampleError, match=f"^{end} bytes are not an intact image: ") as caught:
            decode_image(data[:end])
        assert "0x" not in str(caught.value)


def test_stray_bytes_in_a_jpeg_are_forgiven(jpeg_library: str) -> None:
    data = encoded(picture(64, 64), "JPEG")
    assert decode_image(data[:-2] + b"\0\0\0" + data[-2:]).shape == (64, 64, 3)


def png_claiming(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_a_decompression_bomb_is_refused_before_it_is_decoded(jpeg_library: str) -> None:
    with pytest.raises(SampleError, match="9000 x 8000 pixels, more than max_pixels"):
        decode_image(png_claiming(9000, 8000))
    with pytest.raises(SampleError, match=r"too large|intact"):
        decode_image(png_claiming(60000, 60000))
    for kind in ("JPEG", "PNG"):
        data = encoded(picture(20, 30), kind)
        with pytest.raises(SampleError, match="30 x 20 pixels, more than max_pixels=599; raise that"):
            decode_image(data, max_pixels=599)
        assert decode_image(data, max_pixels=600).shape == (20, 30, 3)


def test_a_format_that_starts_programs_is_not_opened() -> None:
    with pytest.raises(SampleError, match="intact image"):
        decode_image(encoded(picture(8, 8), "EPS"))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF", "JPEG2000"])
def test_random_damage_gives_an_image_or_a_typed_error(kind: str) -> None:
    rng = random.Random(7)
    options: dict[str, Any] = {"exif": oriented(6)} if kind in ("JPEG", "PNG", "TIFF") else {}
    data = encoded(picture(40, 30), kind, **options)
    outcomes = {"image": 0, "error": 0}
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(min(len(damaged), rng.choice((64, 300, 1 << 20))))] = rng.randrange(256)
        try:
            decoded = decode_image(damaged[: rng.choice((len(damaged), rng.randrange(len(damaged))))], size=(8, 8))
        except SampleError:
            outcomes["error"] += 1
        else:
            assert decoded.shape == (8, 8, 3)
            outcomes["image"] += 1
    assert outcomes["error"] > 30


def test_a_decoder_is_a_value_that_can_be_sent_to_another_process() -> None:
    decoder = ImageDecoder(24, 32, mode="L", resize="stretch")
    assert pickle.loads(pickle.dumps(decoder)) == decoder  # noqa: S301 - our own bytes
    data = encoded(picture(50, 50), "JPEG")
    assert decoder(data).shape == (24, 32, 1)
    assert np.array_equal(decoder(data), decode_image(data, size=(24, 32), mode="L", resize="stretch"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (0, 5)}, "size"),
        ({"size": (5, 2.5)}, "size"),
        ({"size": (5,)}, "size"),
        ({"size": (True, 5)}, "size"),
        ({"mode": "CMYK"}, "mode must be one of RGB, L, not 'CMYK'"),
        ({"resize": "fit"}, "resize must be one of crop, stretch, not 'fit'"),
        ({"max_pixels": 0}, "max_pixels must be at least 1, not 0"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decode_image(b"", **options)
    with pytest.raises(ConfigError):
        ImageDecoder(0, 5)


def test_without_pillow_the_import_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "stoker.images")
    with pytest.raises(MissingExtraError, match=r"pip install 'stoker\[images\]'"):
        importlib.import_module("stoker.images")


def test_without_simplejpeg_the_module_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    monkeypatch.delitem(sys.modules, "stoker.images")
    fresh = importlib.import_module("stoker.images")
    assert fresh.simplejpeg is None
    assert fresh.decode_image(encoded(picture(8, 8), "JPEG")).shape == (8, 8, 3)
