"""The data of all measurements of loaders: `python -m benchmarks.workloads [--scale 0.1]` writes it.

Everything is generated from a seed and stored under ``benchmarks/results/data``, in files that numpy alone can read.
Sample i has the label i, which shows the order of delivery.
"""

from __future__ import annotations

import io
import shutil
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

RESULTS = Path(__file__).parent / "results"
DATA = RESULTS / "data"
IMAGE_SHAPE = (32, 32, 3)
TOKENS = 2048
LABEL_BYTES = 8
JPEG_SIZE = (500, 375)
JPEG_QUALITY = 93
_TEXTURES = 24
_GRAIN = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A kind of training data.

    Attributes:
        name: name of the workload, and of its folder.
        title: description of a sample.
        samples: number of samples at scale 1.
        batch: samples per batch.
        modes: forms of delivered samples: ``raw``, as they are stored, and ``decoded``.
        write: function that writes a number of samples into a folder.
    """

    name: str
    title: str
    samples: int
    batch: int
    modes: tuple[str, ...]
    write: Callable[[Path, int], None]

    def folder(self, samples: int) -> Path:
        """Return the folder of a number of samples, which may not exist yet."""
        return DATA / f"{self.name}-{samples}"

    def scaled(self, scale: float) -> int:
        """Return the number of samples at a scale, at least two batches."""
        return max(2 * self.batch, round(self.samples * scale))

    def generate(self, samples: int) -> Path:
        """Write the data if it does not exist, and return its folder. Interrupted writes are repeated."""
        folder = self.folder(samples)
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            self.write(unfinished, samples)
            unfinished.rename(folder)
        return folder

    def payload_bytes(self, samples: int, taken: int | None = None) -> int:
        """Return the size of the generated samples and their labels, the minimum that any loader must read.

        Args:
            samples: number of generated samples.
            taken: number of first samples to count; default all.
        """
        taken = samples if taken is None else taken
        folder = self.folder(samples)
        if self.name == "jpegs":
            data = int(np.load(folder / "offsets.npy", mmap_mode="r")[taken])
        else:
            data = np.load(folder / f"{self.name}.npy", mmap_mode="r")[:taken].nbytes
        return data + taken * LABEL_BYTES


class Jpegs:
    """The generated JPEGs, in memory, as a sequence of ``bytes``.

    Args:
        folder: folder with ``jpegs.bin`` and ``offsets.npy``.
    """

    def __init__(self, folder: Path) -> None:
        self._offsets = np.load(folder / "offsets.npy")
        self._data = np.fromfile(folder / "jpegs.bin", np.uint8)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.view(index).tobytes()

    def view(self, index: int) -> NDArray[np.uint8]:
        """Return a JPEG's bytes without a copy."""
        return self._data[self._offsets[index] : self._offsets[index + 1]]


def _write_images(folder: Path, samples: int) -> None:
    images = np.random.default_rng(1).integers(0, 256, (samples, *IMAGE_SHAPE), dtype=np.uint8)
    np.save(folder / "images.npy", images)


def _write_tokens(folder: Path, samples: int) -> None:
    tokens = np.random.default_rng(2).integers(0, 50_000, (samples, TOKENS), dtype=np.uint16)
    np.save(folder / "tokens.npy", tokens)


def _texture(rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return an image of smooth blotches with fine grain, which compresses about as well as a photograph."""
    width, height = JPEG_SIZE
    blotches = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((width, height), 3)
    grain = rng.normal(0.0, _GRAIN, (height, width, 1))
    return np.clip(np.asarray(blotches, np.float64) + grain, 0, 255).astype(np.uint8)


def _jpeg(textures: list[NDArray[np.uint8]], index: int) -> bytes:
    """Return a JPEG that shows its number, on a shifted texture."""
    shifted = np.roll(textures[index % len(textures)], (7 * index, 13 * index), axis=(0, 1))
    image = Image.fromarray(shifted)
    ImageDraw.Draw(image).text((20, 20), str(index), fill="white")
    file = io.BytesIO()
    image.save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


def _write_jpegs(folder: Path, samples: int) -> None:
    rng = np.random.default_rng(3)
    textures = [_texture(rng) for _ in range(_TEXTURES)]
    ends = [0]
    with (folder / "jpegs.bin").open("wb") as file:
        for index in range(samples):
            ends.append(ends[-1] + file.write(_jpeg(textures, index)))
    np.save(folder / "offsets.npy", np.array(ends, np.int64))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="images",
            title="uint8[32,32,3] + label",
            samples=50_000,
            batch=256,
            modes=("raw",),
            write=_write_images,
        ),
        Workload(
            name="jpegs",
            title="JPEG of about 110 KB + label",
            samples=6_000,
            batch=64,
            modes=("raw", "decoded"),
            write=_write_jpegs,
        ),
        Workload(
            name="tokens", title="uint16[2048] + label", samples=60_000, batch=64, modes=("raw",), write=_write_tokens
        ),
    )
}


def generate(names: Iterable[str], scale: float) -> None:
    """Write the named workloads at a scale, and print their sizes."""
    for name in names:
        workload = WORKLOADS[name]
        samples = workload.scaled(scale)
        workload.generate(samples)
        megabytes = workload.payload_bytes(samples) / 1e6
        print(f"{name}: {samples:,} x {workload.title}, {megabytes:,.1f} MB, {megabytes / samples * 1e3:.1f} KB each")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="1 is the full size")
    generate(WORKLOADS, parser.parse_args().scale)
