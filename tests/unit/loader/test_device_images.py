"""Images that are decoded on the device; torchvision and the device are stood in for by the host."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import stoker
from stoker.errors import ConfigError, SampleError
from stoker.images import ImageDecoder, RandomResizedCrop
from stoker_torch import DeviceImageDecoder, Loader, _device_images
from support.fake_device import ImmediateDevice, use_device

COUNT = 24


def picture(number: int, width: int = 60, height: int = 40) -> Image.Image:
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([rows * 4 % 256, columns * 3 % 256, np.full_like(rows, number * 9 % 256)], axis=2)
    return Image.fromarray(pixels.astype(np.uint8))


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pack(name: str, files: list[bytes]) -> str:
    url = f"memory://device-images-{name}/ds"
    with stoker.Packer(url, schema={"image": stoker.Bytes(), "label": stoker.Array("int64")}) as packer:
        packer.extend({"image": file, "label": label} for label, file in enumerate(files))
    return url


class Torchvision:
    """``torchvision.io.decode_jpeg`` by Pillow; it fails for a batch with a file that it cannot decode."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode_jpeg(self, files: list[torch.Tensor], *, mode: str, device: torch.device) -> list[torch.Tensor]:
        images = [Image.open(io.BytesIO(file.numpy().tobytes())) for file in files]
        try:
            pixels = [np.asarray(image.convert("L" if mode == "GRAY" else "RGB")) for image in images]
        except OSError as error:
            raise RuntimeError(str(error)) from error
        self.decoded += len(files)
        return [torch.from_numpy(each.reshape(*each.shape[:2], -1).copy()).permute(2, 0, 1) for each in pixels]


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> Torchvision:
    found = Torchvision()
    monkeypatch.setattr(_device_images, "find_decode_jpeg", lambda: found.decode_jpeg)
    return found


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ImmediateDevice:
    """The device that "cuda:0" is in this test."""
    device = ImmediateDevice()
    use_device(device, monkeypatch)
    monkeypatch.setattr(_device_images.EncodedImages, "decode", decode_on_host(_device_images.EncodedImages.decode))
    return device


def decode_on_host(decode: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda images, _: decode(images, torch.device("cpu"))


def images_of(url: str, decoder: Any, **settings: Any) -> list[torch.Tensor]:
    with Loader(url, batch_size=8, decode={"image": decoder}, **{"seed": 3, **settings}) as loader:
        return [batch["image"].clone() for batch in loader]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"resize": "stretch"},
        {"mode": "L"},
        {"random_crop": RandomResizedCrop(), "flip": 0.5},
    ],
    ids=str,
)
def test_the_device_gives_the_images_of_the_host(
    device: ImmediateDevice, torchvision: Torchvision, settings: dict[str, Any]
) -> None:
    url = pack(f"same-{len(str(settings))}", [encode(picture(number)) for number in range(COUNT)])
    wanted = images_of(url, ImageDecoder(24, 24, **settings))
    found = images_of(url, DeviceImageDecoder(24, 24, **settings), device="cuda:0")
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert (one.float() - other.float()).abs().mean() < 4  # crops begin at whole pixels
    assert torchvision.decoded == COUNT


def test_orientation_other_formats_and_strange_jpegs_are_as_on_the_host(
    device: ImmediateDevice, torchvision: Torchvision
) -> None:
    files = []
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        files.append(encode(picture(orientation), exif=exif))
    files += [encode(picture(9), "PNG"), encode(picture(10).convert("CMYK"))]
    files += [encode(picture(11), "WEBP", lossless=True)]
    url = pack("kinds", files)
    wanted = torch.cat(images_of(url, ImageDecoder(20, 30), shuffle="none"))
    found = torch.cat(images_of(url, DeviceImageDecoder(20, 30), shuffle="none", device="cuda:0"))
    assert (found.float() - wanted.float()).abs().amax(dim=(1, 2, 3)).tolist() == pytest.approx([0] * 11, abs=12)
    assert torchvision.decoded == 8


def test_a_damaged_image_is_named(device: ImmediateDevice, torchvision: Torchvision) -> None:
    files = [encode(picture(number)) for number in range(8)]
    files[5] = files[5][:300]
    with pytest.raises(SampleError, match=r"sample 5 \(row 5 of memory://.*decoding on the device failed: 300 bytes"):
        images_of(pack("damaged", files), DeviceImageDecoder(20, 20), shuffle="none", device="cuda:0")


def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(
    device: ImmediateDevice, torchvision: Torchvision
) -> None:
    url = pack("large", [encode(picture(0))])
    with pytest.raises(SampleError, match="60 x 40 pixels, more than max_pixels=1000"):
        images_of(url, DeviceImageDecoder(20, 20, max_pixels=1000), device="cuda:0")
    assert torchvision.decoded == 0


def test_decoded_images_stay_on_the_device(device: ImmediateDevice, torchvision: Torchvision) -> None:
    url = pack("kept", [encode(picture(number)) for number in range(COUNT)])
    settings: dict[str, Any] = {"batch_size": 8, "decode": {"image": DeviceImageDecoder(24, 24)}, "shuffle": "none"}
    with Loader(url, device="cuda:0", gpu_cache="1MB", **settings) as loader:
        first, *_ = ([batch["image"].clone() for batch in loader] for _ in range(8))
        decoded = torchvision.decoded
        again = [batch["image"].clone() for batch in loader]
    assert torchvision.decoded == decoded
    assert all(map(torch.equal, first, again))


def test_without_torchvision_or_a_device_images_are_decoded_on_the_host(
    device: ImmediateDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = pack("host", [encode(picture(number)) for number in range(COUNT)])
    wanted = images_of(url, ImageDecoder(24, 24))
    assert all(map(torch.equal, images_of(url, DeviceImageDecoder(24, 24)), wanted))
    monkeypatch.setitem(__import__("sys").modules, "torchvision.io", None)
    _device_images.find_decode_jpeg.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = images_of(url, DeviceImageDecoder(24, 24), device="cuda:0")
    _device_images.find_decode_jpeg.cache_clear()
    assert all(map(torch.equal, found, wanted))
    assert "decodes on the host, since torchvision cannot be imported" in caplog.text


def test_a_transform_gets_images_of_the_host(
    device: ImmediateDevice, torchvision: Torchvision, caplog: pytest.LogCaptureFixture
) -> None:
    url = pack("transform", [encode(picture(number)) for number in range(8)])
    images = images_of(url, DeviceImageDecoder(24, 24), device="cuda:0", transform=lambda sample: sample)
    assert images[0].shape == (8, 24, 24, 3)
    assert "decodes on the host: transform= or collate= needs them there" in caplog.text


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError):
        DeviceImageDecoder(0, 10)
