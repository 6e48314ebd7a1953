"""What keeping the record of waits costs, and writing a trace: `python -m benchmarks.trace_overhead`.

One loader reads 50,000 samples of `uint8[32, 32, 3]` and an `int64` label from memory, as fast as it can, in batches
of 256, through a store that answers at once: so there is nothing to hide the costs behind. Three ways, in turn: no
record at all, the record that every loader keeps (`stats()`), and a trace file. A round gives the ratio of each to no
record, of samples a second and of samples a second of processor time; the ratios' medians are told. On a machine that
does other things, too, the second is the one to look at.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import stoker
from stoker.feed import BatchSource
from stoker.manifest import Manifest
from stoker.trace.recorder import Recorder
from stoker_torch import Loader

SAMPLES, BATCH, EPOCHS, ROUNDS = 50_000, 256, 4, 15
SCHEMA = {"image": stoker.Array("uint8", (32, 32, 3)), "label": stoker.Array("int64")}
SIZES = (8 << 20, 1 << 20, 128 << 10)


class Deaf(Recorder):
    """A recorder that keeps nothing."""

    def begun(self, asked_seconds: float, now_seconds: float) -> None:
        pass

    def yielded(self, epoch: int, asked_seconds: float, now_seconds: float) -> None:
        pass


class Unrecorded(Loader):
    """A loader without a record."""

    def _made_feed(self, manifest: Manifest, lanes: int) -> BatchSource:
        self._recorder = Deaf()
        config = self.config.feed_config(rank=self.rank, world_size=self.world_size, lanes=lanes)
        return self._supply.made_feed(manifest, self.config, config)


def pack(size_bytes: int) -> str:
    url = f"memory://overhead-{size_bytes}/ds"
    images = np.random.default_rng(0).integers(0, 256, (SAMPLES, 32, 32, 3), np.uint8)
    with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=size_bytes) as packer:
        packer.extend({"image": image, "label": number} for number, image in enumerate(images))
    return url


def samples_per_second(kind: type[Loader], url: str, settings: Mapping[str, Any]) -> tuple[float, float]:
    """Return samples per second of the clock and per second of all processors."""
    with kind(url, batch_size=BATCH, memory="512MB", **settings) as loader:
        for _ in loader:  # the first epoch takes the ring's pages
            pass
        begun, begun_cpu = time.perf_counter(), time.process_time()
        for _ in range(EPOCHS):
            for _ in loader:
                pass
        samples = SAMPLES * EPOCHS
        return samples / (time.perf_counter() - begun), samples / (time.process_time() - begun_cpu)


def main() -> None:
    print(f"median ratio of {ROUNDS} rounds of {EPOCHS} epochs, in turn; samples a second are the medians, too")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        ways: dict[str, tuple[type[Loader], dict[str, Any]]] = {
            "no record": (Unrecorded, {}),
            "record": (Loader, {}),
            "trace": (Loader, {"trace": trace}),
        }
        for size_bytes in SIZES:
            url = pack(size_bytes)
            speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for number in range(ROUNDS):
                for name in sorted(ways, reverse=bool(number % 2)):
                    speeds[name].append(samples_per_second(ways[name][0], url, ways[name][1]))
            written = trace.stat().st_size / 1e6
            print(f"super-samples of {size_bytes >> 10:5} KiB; the trace of {EPOCHS + 1} epochs has {written:.2f} MB")
            for name, figures in speeds.items():
                pairs = list(zip(figures, speeds["no record"], strict=True))
                clock, processor = (median(figure[way] / base[way] for figure, base in pairs) for way in (0, 1))
                speed = median(figure[0] for figure in figures)
                print(f"  {name:10} {speed:10,.0f} samples/s; ratio {clock:.3f}, of processor time {processor:.3f}")


if __name__ == "__main__":
    main()
