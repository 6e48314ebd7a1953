"""Memory growth of a long training: `python -m benchmarks.flat_memory`.

36,000 batches, half an hour of steps of 50 ms, are read from a local bucket without pauses, with all that a training
does with a loader: fixed and ragged columns, decoding in a pool, saved states, epochs left early, loaders closed and
reused, and others created from a state and dropped. Sampled while all loaders are closed: private memory, Python
objects, open files, threads. Growth is the median slope between any two samples (Theil and Sen), so that a jump of the
allocator does not count and a leak does; the first quarter is warm-up. Exits with 1 if anything grows: memory by half a
batch per epoch, objects by one in two epochs, or, with few epochs, by more than samples differ without a leak. `--leak`
keeps a batch per epoch, to test the detection.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import psutil
import torch

import stoker
from stoker_local import BucketConfig, BucketSpec, bucket_process
from stoker_torch import Loader

BATCHES = 36_000
SAMPLES = 512
BATCH = 64
BATCHES_AN_EPOCH = SAMPLES // BATCH
BATCH_BYTES = BATCH * 32 * 32 * 3
TIMES = 16  # that it is sampled
LIMITS = {"memory_bytes": BATCH_BYTES // 2, "objects": 0.5}
"""Maximum growth per epoch."""
OBJECTS_APART = 160
"""Maximum difference in objects between two samples without a leak; 160 on a busy machine, 45 on a quiet one."""
URL = "s3://stoker/train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resource usage of the process while its loaders are closed.

    Attributes:
        epochs: number of epochs begun so far.
        memory_bytes: private memory.
        objects: objects that the garbage collector tracks; each sample adds one.
        files: number of file descriptors.
        threads: number of threads.
    """

    epochs: int
    memory_bytes: int
    objects: int
    files: int
    threads: int

    @classmethod
    def sample(cls, epochs: int) -> Usage:
        gc.collect()
        process = psutil.Process()
        return cls(
            epochs=epochs,
            memory_bytes=process.memory_full_info().uss,
            objects=len(gc.get_objects()),
            files=process.num_fds(),
            threads=process.num_threads(),
        )


def pack() -> None:
    rng = np.random.default_rng(0)
    schema = {
        "image": stoker.Array("uint8", (32, 32, 3)),
        "label": stoker.Array("int64"),
        "caption": stoker.Text(),
        "tokens": stoker.Ragged("uint16"),
    }
    with stoker.Packer(URL, schema=schema, super_sample_bytes=128 << 10) as packer:
        for label, image in enumerate(rng.integers(0, 256, (SAMPLES, 32, 32, 3), dtype=np.uint8)):
            tokens = np.arange(label % 50, dtype=np.uint16)
            packer.write({"image": image, "label": label, "caption": "a truck " * (label % 9), "tokens": tokens})


def create_loader() -> Loader:
    return Loader(URL, batch_size=BATCH, memory="4MB", decode={"caption": lambda text: len(text)}, workers=2)


def train_repeatedly(times: int, epochs_each: int, kept: list[object] | None) -> Iterator[Usage]:
    """Train the given number of epochs repeatedly, and yield the memory in use after each time."""
    with create_loader() as loader:
        for epoch in range(times * epochs_each):
            for number, batch in enumerate(loader):
                if kept is not None and number == 0:
                    kept.append(batch)
                state = json.dumps(loader.state_dict())
                if epoch % 5 == 4 and number == BATCHES_AN_EPOCH // 2:
                    break
            if epoch % epochs_each == epochs_each - 1:
                drop_another(state)
                loader.close()
                yield Usage.sample(epoch + 1)


def drop_another(state: str) -> None:
    """Create another loader that resumes from a state, and leave it in the middle of an epoch."""
    with create_loader() as other:
        other.load_state_dict(json.loads(state))
        next(iter(other))


def growth(usages: list[Usage], name: str) -> float:
    """Return the growth of a figure per epoch: the median slope between any two samples."""
    epochs = np.array([usage.epochs for usage in usages], np.float64)
    figures = np.array([getattr(usage, name) for usage in usages], np.float64)
    earlier, later = np.triu_indices(len(usages), 1)
    return float(np.median((figures[later] - figures[earlier]) / (epochs[later] - epochs[earlier])))


def table(usages: list[Usage]) -> str:
    lines = ["| epochs | memory MB | objects | files | threads |", "| ---: | ---: | ---: | ---: | ---: |"]
    lines += [
        f"| {usage.epochs:,} | {usage.memory_bytes / 1e6:.1f} | {usage.objects:,} | {usage.files} | {usage.threads} |"
        for usage in usages
    ]
    return "\n".join(lines)


def find_growth(usages: list[Usage]) -> list[str]:
    """Return a description of what grows."""
    epochs = usages[-1].epochs - usages[0].epochs
    limits = {**LIMITS, "objects": max(LIMITS["objects"], OBJECTS_APART / epochs)}
    found = [
        f"{name} grows by {slope:,.1f} an epoch, more than {limit:,.1f}"
        for name, limit in limits.items()
        if (slope := growth(usages, name)) > limit
    ]
    for name in ("files", "threads"):
        seen = {getattr(usage, name) for usage in usages}
        found += [f"{name} vary: {sorted(seen)}"] if len(seen) > 1 else []
    return found


def main() -> int:
    parser = ArgumentParser()
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--leak", action="store_true", help="keep a batch an epoch, to see that this is found")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    epochs_each = max(1, arguments.batches // BATCHES_AN_EPOCH // TIMES)
    with bucket_process(BucketConfig(buckets=(BucketSpec(name="stoker", anonymous=True),))) as bucket:
        os.environ.update(bucket.environment())
        pack()
        usages = list(train_repeatedly(TIMES, epochs_each, [] if arguments.leak else None))
    steady = usages[TIMES // 4 :]
    print(table(steady))
    found = find_growth(steady)
    print("\ngrowth an epoch: " + ", ".join(f"{growth(steady, name):,.2f} {name}" for name in LIMITS))
    print("\n".join(found) or "flat")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
