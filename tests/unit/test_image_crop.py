"""Crops for training: torchvision's geometry, Pillow's pixels, and the sample's own random numbers."""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from stoker import SampleContext, images
from stoker.errors import ConfigError
from stoker.images import ImageDecoder, RandomResizedCrop
from support.cases import for_each

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
simplejpeg: Any = vars(images)["simplejpeg"]


@pytest.fixture(params=["simplejpeg", "pillow"])
def jpeg_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pillow":
        monkeypatch.setattr(images, "simplejpeg", None)
    elif simplejpeg is None:
        pytest.skip("simplejpeg is not installed")


def context(sample: int, epoch: int = 0) -> SampleContext:
    return SampleContext(seed=5, epoch=epoch, sample=sample)


def picture(height: int, width: int) -> NDArray[np.uint8]:
    """Return waves that are different at every position and channel."""
    y, x = np.mgrid[0:height, 0:width].astype(float)
    waves = [128 + 90 * np.sin(x / 17 + c) * np.cos(y / (11 + c)) + 20 * (x / width - y / height) for c in range(3)]
    pixels: NDArray[np.uint8] = np.clip(np.stack(waves, -1), 0, 255).astype(np.uint8)
    return pixels


def encoded(pixels: NDArray[np.uint8], kind: str, orientation: int = 1, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, exif=exif, **options)
    return out.getvalue()


def torchvisions(
    height: int, width: int, crop: RandomResizedCrop, uniform: list[float]
) -> tuple[int, int, int, int] | None:
    """Return what torchvision's get_params makes of the same random numbers; None where it takes the middle."""
    for attempt in range(10):
        area, aspect, down, right = uniform[4 * attempt : 4 * attempt + 4]
        target_area = height * width * (crop.scale[0] + area * (crop.scale[1] - crop.scale[0]))
        low, high = np.log(crop.ratio)
        aspect_ratio = math.exp(low + aspect * (high - low))
        w = round(math.sqrt(target_area * aspect_ratio))
        h = round(math.sqrt(target_area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            return math.floor(down * (height - h + 1)), math.floor(right * (width - w + 1)), h, w
    return None


def expected(data: bytes, decoder: ImageDecoder, sample: int) -> NDArray[np.uint8]:
    """Return what Pillow alone makes of an image, decoded whole."""
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    flip, *uniform = context(sample).uniform(41, stream=2).tolist()
    if decoder.random_crop is not None:
        top, left, height, width = decoder.random_crop.choose(upright.height, upright.width, uniform)
        part = upright.crop((left, top, left + width, top + height))
        upright = part.resize((decoder.width, decoder.height), Image.Resampling.BILINEAR)
    else:
        upright = ImageOps.fit(upright, (decoder.width, decoder.height), Image.Resampling.BILINEAR)
    pixels: NDArray[np.uint8] = np.asarray(ImageOps.mirror(upright) if flip < decoder.flip else upright)
    return pixels


@pytest.mark.parametrize("crop", [RandomResizedCrop(), RandomResizedCrop((0.5, 0.9), (0.2, 0.4))])
@pytest.mark.parametrize("shape", [(375, 500), (500, 375), (7, 300), (1, 1)])
def test_a_random_crop_is_chosen_as_torchvision_chooses_it(crop: RandomResizedCrop, shape: tuple[int, int]) -> None:
    for sample in range(200):
        uniform = context(sample).uniform(40, stream=2).tolist()
        top, left, height, width = box = crop.choose(*shape, uniform)
        theirs = torchvisions(*shape, crop, uniform)
        assert theirs in (box, None)
        assert 0 <= top <= top + height <= shape[0]
        assert 0 <= left <= left + width <= shape[1]
        if theirs is None:
            assert (top, left) == ((shape[0] - height) // 2, (shape[1] - width) // 2)


def test_areas_and_ratios_are_spread_as_asked() -> None:
    boxes = [
        RandomResizedCrop().choose(1000, 1000, context(sample).uniform(40, stream=2).tolist()) for sample in range(2000)
    ]
    areas = np.array([height * width / 1e6 for _, _, height, width in boxes])
    ratios = np.array([math.log(width / height) for _, _, height, width in boxes])
    places = np.array([top / max(1, 1000 - height) for top, _, height, _ in boxes])
    assert areas.min() < 0.09
    assert 0.46 < areas.mean() < 0.5  # 0.54, had all that is drawn a place in the image
    assert abs(ratios.mean()) < 0.02
    assert ratios.max() < math.log(4 / 3) + 0.01
    assert 0.47 < places.mean() < 0.53


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_crop_is_that_of_the_upright_image(jpeg_library: None, orientation: int, kind: str) -> None:
    data = encoded(picture(50, 74), kind, orientation, **({"lossless": True} if kind == "WEBP" else {}))
    decoder = ImageDecoder(40, 32, random_crop=RandomResizedCrop((0.2, 0.9)), flip=0.5)
    for sample in range(5):
        found = decoder(data, context(sample))
        most = 0 if orientation < 5 and kind != "JPEG" else 1  # Pillow rounds between columns and rows
        assert np.abs(found.astype(int) - expected(data, decoder, sample)).max() <= most


def test_a_large_jpeg_is_decoded_as_small_as_its_crop_allows(
    jpeg_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[float] = []
    original = Image.Image.resize

    def spy(image: Image.Image, *args: Any, box: Any = None, **options: Any) -> Image.Image:
        if box is not None:
            decoded.append(box[2] - box[0])
        return original(image, *args, box=box, **options)  # type: ignore[misc]  # none of the others is it

    monkeypatch.setattr(Image.Image, "resize", spy)
    data = encoded(picture(900, 1200), "JPEG", 6, quality=95)
    decoder = ImageDecoder(56, 56, random_crop=RandomResizedCrop((0.02, 1.0)))
    reductions = set()
    for sample in range(16):
        found = decoder(data, context(sample))
        boxed = decoder.random_crop
        assert boxed is not None
        _, _, height, width = boxed.choose(1200, 900, context(sample).uniform(41, stream=2).tolist()[1:])
        reduction = round(height / decoded[-1])
        assert min(height, width) / reduction >= 112 or reduction == 1
        reductions.add(reduction)
        assert np.abs(found.astype(int) - expected(data, decoder, sample)).mean() < 2
    assert reductions == {1, 2, 4}


def test_a_flip_alone_mirrors_every_other_image() -> None:
    data = encoded(picture(20, 30), "PNG")
    decoder = ImageDecoder(20, 30, flip=0.5)
    upright = decoder(data, context(0)) if context(0).uniform(1, stream=2)[0] >= 0.5 else decoder(data, context(1))
    mirrored = [bool((decoder(data, context(sample)) != picture(20, 30)).any()) for sample in range(200)]
    assert 70 < sum(mirrored) < 130
    assert upright.flags.c_contiguous
    assert np.array_equal(ImageDecoder(20, 30, flip=1)(data, context(0)), picture(20, 30)[:, ::-1])


def test_choices_depend_on_the_epoch_and_the_sample_and_not_on_what_else_is_drawn() -> None:
    data = encoded(picture(50, 74), "PNG")
    decoder = ImageDecoder(16, 16, random_crop=RandomResizedCrop(), flip=0.5)
    other = context(3)
    other.generator().random(7)
    assert np.array_equal(decoder(data, context(3)), decoder(data, other))
    assert not np.array_equal(decoder(data, context(3)), decoder(data, context(4)))
    assert not np.array_equal(decoder(data, context(3)), decoder(data, context(3, epoch=1)))


@pytest.mark.parametrize(("mode", "mean", "std"), [("RGB", MEAN, STD), ("L", [0.5], np.array([0.25]))])
def test_normalised_pixels_are_those_of_totensor_and_normalize(mode: Any, mean: Any, std: Any) -> None:
    data = encoded(np.arange(256 * 3, dtype=np.uint8).reshape(16, 16, 3), "PNG")
    plain = ImageDecoder(16, 16, mode=mode)
    found = ImageDecoder(16, 16, mode=mode, mean=mean, std=std)(data)
    tensor = torch.from_numpy(plain(data)).permute(2, 0, 1).to(torch.float32).div(255)
    shaped = [torch.tensor(list(values), dtype=torch.float32)[:, None, None] for values in (mean, std)]
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    assert np.array_equal(found, tensor.sub(shaped[0]).div(shaped[1]).numpy())


def test_a_decoder_that_chooses_is_a_value_and_needs_a_context() -> None:
    decoder = ImageDecoder(8, 8, random_crop=RandomResizedCrop(scale=(0.5, 1)), mean=list(MEAN), std=list(STD))
    assert pickle.loads(pickle.dumps(decoder)) == decoder  # noqa: S301 - our own bytes
    assert hash(decoder)
    for chooses in (decoder, ImageDecoder(8, 8, flip=0.1)):
        with pytest.raises(ConfigError, match=r"decoder\(data, SampleContext"):
            chooses(encoded(picture(8, 8), "PNG"))


@for_each(
    ("make", "message"),
    [
        (lambda: RandomResizedCrop(scale=(0, 1)), r"scale must be .*, not \(0, 1\)"),
        (lambda: RandomResizedCrop(scale=(0.5, 1.1)), "high <= 1"),
        (lambda: RandomResizedCrop(scale=(0.5, 0.4)), "scale"),
        (lambda: RandomResizedCrop(ratio=(1, math.inf)), "ratio"),
        (lambda: RandomResizedCrop(ratio=(1, 2, 3)), "ratio"),  # type: ignore[arg-type]  # on purpose
        (
            lambda: ImageDecoder(8, 8, random_crop=True),  # type: ignore[arg-type]  # on purpose
            r"random_crop must be a RandomResizedCrop, such as RandomResizedCrop\(\), not True",
        ),
        (lambda: ImageDecoder(8, 8, flip=1.5), "flip must be a probability from 0 to 1, not 1.5"),
        (lambda: ImageDecoder(8, 8, flip=math.nan), "flip"),
        (lambda: ImageDecoder(8, 8, flip="half"), "flip must be a probability from 0 to 1, not 'half'"),  # type: ignore[arg-type]  # on purpose
        (lambda: ImageDecoder(8, 8, mean=0.5, std=0.5), "mean must be .*, not 0.5"),  # type: ignore[arg-type]  # on purpose
        (lambda: RandomResizedCrop(scale=0.5), "scale must be .*, not 0.5"),  # type: ignore[arg-type]  # on purpose
        (lambda: ImageDecoder(8, 8, mean=MEAN), "must be given together"),
        (lambda: ImageDecoder(8, 8, mean=MEAN, std=(1, 0, 1)), "std .* above 0 for each channel"),
        (lambda: ImageDecoder(8, 8, mode="L", mean=MEAN, std=STD), "mean .* each channel of L"),
    ],
)
def test_wrong_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
