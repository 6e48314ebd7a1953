"""Common parts of the peers' programs: the command line, the source, decoding, and the measured loop.

A peer's `run.py` defines two functions, which `main` makes a program of:

- `run.py pack --workload W --source FOLDER --url s3://bucket/prefix [--limit N]` writes the data set, in the peer's own
  format, and prints the number and size of its objects.
- `run.py run --workload W --mode raw|decoded --url URL --batch B --workers N --epochs E --step-seconds S --seed K
  --cache FOLDER [--order FILE.npy] [--count-bytes]` iterates over shuffled epochs and prints the duration.

Both print one line of JSON last on standard output. The endpoint and the credentials come from the AWS_* variables.
Nothing of stoker is imported: these programs run in environments of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3  # type: ignore[import-untyped]  # it ships no types
import numpy as np
import simplejpeg
from PIL import Image

__all__ = ["Packing", "Running", "Source", "bucket_and_prefix", "decode", "main", "restore"]

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {"images": ("uint8", (32, 32, 3)), "tokens": ("uint16", (2048,))}
WORKLOADS = (*SHAPES, "jpegs")
SIDE = 224
Sample = tuple["np.ndarray | bytes", int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Settings of a pack: the first ``limit`` samples (None: all) of a workload, from a folder to a bucket."""

    workload: str
    source: Path
    url: str
    limit: int | None

    def samples(self) -> Source:
        return Source(self.workload, self.source, self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Settings of a run: batches of ``batch`` samples from ``workers`` processes; ``cache`` is a peer's disk cache."""

    workload: str
    mode: str
    url: str
    batch: int
    workers: int
    epochs: int
    step_seconds: float
    seed: int
    cache: Path
    order: Path | None
    count_bytes: bool

    @property
    def decoded(self) -> bool:
        return self.mode == "decoded"


class Source(Sequence[Sample]):
    """A generated workload: pairs of data (an array or the bytes of a JPEG) and label (the sample's number)."""

    def __init__(self, workload: str, folder: Path, limit: int | None = None) -> None:
        if workload in SHAPES:
            self._data, self._offsets = np.load(folder / f"{workload}.npy", mmap_mode="r"), None
            samples = len(self._data)
        else:
            self._data = np.memmap(folder / f"{workload}.bin", np.uint8, "r")
            self._offsets = np.load(folder / "offsets.npy")
            samples = len(self._offsets) - 1
        self._samples = samples if limit is None else min(limit, samples)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, i: int) -> Sample:  # type: ignore[override]  # no slices
        if not 0 <= i < self._samples:
            raise IndexError(i)
        if self._offsets is None:
            return np.array(self._data[i]), i
        return self._data[self._offsets[i] : self._offsets[i + 1]].tobytes(), i


@dataclass(frozen=True, slots=True)
class restore:  # noqa: N801  (used as a function, a class so that spawned workers can unpickle it)
    """A function from a sample's stored bytes to the array to train on."""

    workload: str
    decoded: bool

    def __call__(self, data: bytes) -> np.ndarray | bytes:
        if self.workload in SHAPES:
            dtype, shape = SHAPES[self.workload]
            return np.frombuffer(bytearray(data), dtype).reshape(shape)  # writable, as torch requires
        return decode(data) if self.decoded else data


def decode(jpeg: bytes) -> np.ndarray:
    """Return a JPEG as uint8 [224, 224, 3], cropped to a square.

    The steps are those of stoker's decoder, so decoding costs all loaders the same: a JPEG is decoded at a half, a
    quarter or an eighth of its sides if at least twice the size is left.
    """
    height, width, _, _ = simplejpeg.decode_jpeg_header(jpeg)
    spare = min(height, width) // (2 * SIDE)
    reduction = next(divisor for divisor in (8, 4, 2, 1) if divisor <= max(1, spare))
    pixels = simplejpeg.decode_jpeg(
        jpeg, min_height=-(-height // reduction), min_width=-(-width // reduction), min_factor=reduction
    )
    height, width = height / reduction, width / reduction
    square = min(height, width)
    left, top = (width - square) / 2, (height - square) / 2
    box = (left, top, left + square, top + square)
    return np.array(Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box))


def bucket_and_prefix(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.netloc, parts.path.strip("/")


def main(pack: Callable[[Packing], None], loader: Callable[[Running], Iterable[Any]]) -> None:
    """Run a peer's program.

    Args:
        pack: function that writes a data set.
        loader: returns an iterable over an epoch, each epoch in another order; a batch is a pair, or a mapping
            with two values, of data and labels.
    """
    options = vars(_parser().parse_args())
    if options.pop("command") == "pack":
        packing = Packing(**options)
        pack(packing)
        result = _stored(packing.url)
    else:
        result = _measured(Running(**options), loader)
    print(json.dumps(result), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    pack, run = commands.add_parser("pack"), commands.add_parser("run")
    for command in (pack, run):
        command.add_argument("--workload", choices=WORKLOADS, required=True)
        command.add_argument("--url", required=True)
    pack.add_argument("--source", type=Path, required=True)
    pack.add_argument("--limit", type=int)
    run.add_argument("--mode", choices=("raw", "decoded"), default="raw")
    run.add_argument("--batch", type=int, required=True)
    run.add_argument("--workers", type=int, required=True)
    run.add_argument("--epochs", type=int, default=1)
    run.add_argument("--step-seconds", type=float, default=0.0)
    run.add_argument("--seed", type=int, default=7)
    run.add_argument("--cache", type=Path, required=True)
    run.add_argument("--order", type=Path)
    run.add_argument("--count-bytes", action="store_true", help="that the local bucket sent by the end of each epoch")
    return parser


def _stored(url: str) -> dict[str, int]:
    """Return the number and total size of the objects under a URL."""
    bucket, prefix = bucket_and_prefix(url)
    pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    sizes = [stored["Size"] for page in pages for stored in page.get("Contents", ())]
    return {"objects": len(sizes), "bytes": sum(sizes)}


@dataclass(slots=True)
class _Epoch:
    """Printed figures of an epoch; the waits are the training loop's, for all batches, the first and the second."""

    seconds: float = 0.0
    samples: int = 0
    batches: int = 0
    wait_seconds: float = 0.0
    first_wait: float = 0.0
    second_wait: float = 0.0


@dataclass(slots=True)
class _BytesSent:
    """Bytes that the local bucket had sent by the end of each epoch.

    An answer is received at the end of the next epoch, so that no epoch waits for it.
    """

    counts: list[int] = field(default_factory=list)
    _connection: HTTPConnection | None = None

    def ask(self) -> None:
        self.receive()
        if self._connection is None:
            self._connection = HTTPConnection(urlsplit(os.environ["AWS_ENDPOINT_URL"]).netloc)
        self._connection.request("GET", "/-/counts")

    def receive(self) -> None:
        if self._connection is not None:
            self.counts.append(json.loads(self._connection.getresponse().read())["bytes_out"])


def _measured(running: Running, loader: Callable[[Running], Iterable[Any]]) -> dict[str, Any]:
    """Iterate over the epochs."""
    order: list[np.ndarray] = []
    epochs, disk_bytes, sent = [], 0, _BytesSent()
    imports_cpu_seconds = time.process_time()
    started = time.perf_counter()
    batches = loader(running)
    construction_seconds = time.perf_counter() - started
    for number in range(running.epochs):
        epochs.append(_epoch(batches, running.step_seconds, order if running.order and number == 0 else None))
        if running.count_bytes:
            sent.ask()
        disk_bytes = max(disk_bytes, _disk_bytes(running.cache))
    sent.receive()
    if running.order:
        np.save(running.order, np.concatenate(order))
    return {
        "first_batch_seconds": construction_seconds + epochs[0].first_wait,
        "first_wait": epochs[0].first_wait,
        "epochs": [asdict(epoch) for epoch in epochs],
        "bytes_sent": sent.counts,
        "disk_bytes_peak": disk_bytes,
        "imports_cpu_seconds": imports_cpu_seconds,
    }


def _epoch(batches: Iterable[Any], step_seconds: float, order: list[np.ndarray] | None) -> _Epoch:
    """Iterate over one epoch; between the batches, only read one sample and simulate the step."""
    epoch = _Epoch()
    begun = asked = time.perf_counter()
    for batch in batches:
        epoch.wait_seconds += time.perf_counter() - asked
        if epoch.batches == 0:
            epoch.first_wait = epoch.wait_seconds
        elif epoch.batches == 1:
            epoch.second_wait = epoch.wait_seconds - epoch.first_wait
        data, labels = batch.values() if isinstance(batch, Mapping) else batch
        _touch(data)
        epoch.samples += len(labels)
        epoch.batches += 1
        if order is not None:
            order.append(np.asarray(labels))
        if step_seconds:
            time.sleep(step_seconds)
        asked = time.perf_counter()
    epoch.wait_seconds += time.perf_counter() - asked
    epoch.seconds = time.perf_counter() - begun
    return epoch


def _touch(data: Any) -> None:
    """Read one sample of a batch; a training loop would read all."""
    first = data[0]
    assert first[0] == 0xFF if isinstance(first, bytes) else np.asarray(first).sum() > 0


def _disk_bytes(folder: Path) -> int:
    """Return the size of a cache on disk; the peers' caches grow while they have room, so the last size is the peak."""
    paths = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return sum(path.stat().st_blocks * 512 for path in paths)
