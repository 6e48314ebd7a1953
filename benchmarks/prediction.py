"""Predictions and real runs: `python -m benchmarks.prediction [--repeats N]` prints the table of docs/planning.md.

For each configuration, a local bucket is shaped and probed, and a loader's run is predicted; then the loader runs, with
a training step that sleeps. Nothing is fitted: a prediction uses the manifest, a few reads, and the settings. The table
shows the ratio of measured to predicted, the median of the repeats.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import stoker
from stoker import Continuous, NextBatch, OrderConfig, Schedule
from stoker._diagnostics.probe import Probe, ProbeLimits, probe
from stoker._fetch.config import PipelineConfig
from stoker._format.manifest import Manifest
from stoker._format.versions import read_manifest
from stoker_local import BucketConfig, BucketProcess, NetworkShape, bucket_process
from stoker_sim._predict import Prediction, predict
from stoker_sim._training import PlannedTraining
from stoker_torch import Loader

EPOCHS = 3
REST_SECONDS = 2.0
"""Pause before each prediction, after which a bucket with a request limit allows its full burst again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Settings of a run.

    Attributes:
        name: name in the table.
        shape: shape of the bucket.
        super_sample_bytes: size of the data set's super-samples.
        samples: number of samples, of 3 KiB each.
        samples_per_second: speed of the training.
        batch_size: batch size of the loader.
        window: window of the loader.
        memory_bytes: memory budget of the loader.
        schedule: schedule of the loader.
    """

    name: str
    shape: NetworkShape
    super_sample_bytes: int = 1 << 20
    samples: int = 30_000
    samples_per_second: float = 10_000.0
    batch_size: int = 256
    window: int = 8
    memory_bytes: int = 64_000_000
    schedule: Schedule = Continuous()  # noqa: RUF009 - frozen


def shape(first_byte_seconds: float, connection: float, total: float, sigma: float = 0.1) -> NetworkShape:
    """Return a bucket's shape; rates are in MB per second."""
    return NetworkShape(
        first_byte_seconds=first_byte_seconds,
        first_byte_sigma=sigma,
        connection_bytes_per_second=connection * 1e6,
        total_bytes_per_second=total * 1e6,
    )


CONFIGURATIONS = (
    Configuration(name="training is the limit", shape=shape(0.04, 60, 200), samples_per_second=8_000),
    Configuration(name="the link is the limit", shape=shape(0.03, 25, 35), samples_per_second=30_000),
    Configuration(name="near both limits", shape=shape(0.05, 20, 45), samples_per_second=13_000),
    Configuration(name="distant bucket", shape=shape(0.15, 40, 70), samples_per_second=9_000),
    Configuration(name="small super-samples", shape=shape(0.08, 40, 90), super_sample_bytes=1 << 17),
    Configuration(name="large super-samples", shape=shape(0.05, 30, 60), super_sample_bytes=4 << 20, window=4),
    Configuration(name="small memory", shape=shape(0.2, 25, 80), memory_bytes=14_000_000, samples_per_second=10_000),
    Configuration(
        name="20 requests a second, more wait",
        shape=replace(shape(0.02, 90, 600), gets_per_second=20, gets_burst=20, gets_wait=True),
    ),
    Configuration(
        name="20 requests a second, then 503", shape=replace(shape(0.02, 90, 600), gets_per_second=20, gets_burst=20)
    ),
    Configuration(name="next batch only", shape=shape(0.08, 30, 70), schedule=NextBatch(), samples_per_second=7_000),
)
"""Chosen after the predictor was finished; its development used configurations with other shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Figures of a real run: its first batch, its first epoch, the later ones, their stall, and its requests."""

    first_batch_seconds: float
    first_seconds: float
    later_seconds: float
    later_stall: float
    requests: float


def pack(url: str, configuration: Configuration) -> None:
    """Write a data set of noise."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (configuration.samples, 32, 32, 3), dtype=np.uint8)
    schema = {"image": stoker.Array("uint8", (32, 32, 3)), "label": stoker.Array("int64")}
    with stoker.Packer(url, schema=schema, super_sample_bytes=configuration.super_sample_bytes) as packer:
        packer.extend({"image": image, "label": number} for number, image in enumerate(images))


def probe_data(url: str) -> tuple[Manifest, float, Probe]:
    """Return a data set's manifest, the time until a loader may fetch, and a probe, as `stoker plan` takes them."""

    async def look() -> tuple[Manifest, float, Probe]:
        begun = time.perf_counter()
        store = stoker.open_store(url)
        try:
            manifest = await read_manifest(store)
            seconds = time.perf_counter() - begun
            found = await probe(store, [manifest.ref(row) for row in range(len(manifest))], ProbeLimits())
        finally:
            await store.close()
        return manifest, seconds + found.connect_seconds, found

    return asyncio.run(look())


def predict_run(url: str, configuration: Configuration) -> Prediction:
    """Probe the bucket, and predict."""
    manifest, start_seconds, found = probe_data(url)
    return predict(
        PlannedTraining(
            manifest=manifest,
            feed=PipelineConfig(
                order=OrderConfig(seed=3, window=configuration.window),
                batch_size=configuration.batch_size,
                memory_bytes=configuration.memory_bytes,
                schedule=configuration.schedule,
            ),
            samples_per_second=configuration.samples_per_second,
            bucket=found.bucket(),
            node_bytes_per_second=found.total_bytes_per_second,
            start_seconds=start_seconds,
        )
    )


def measure_run(url: str, configuration: Configuration) -> Observed:
    """Run a loader for three epochs; the second represents the later ones, as in a prediction."""
    step_seconds = configuration.batch_size / configuration.samples_per_second
    seconds, waits, started = [], [], time.perf_counter()
    with Loader(
        url,
        batch_size=configuration.batch_size,
        window=configuration.window,
        seed=3,
        memory=configuration.memory_bytes,
        schedule=configuration.schedule,
        epochs=EPOCHS,
    ) as loader:
        for epoch in range(EPOCHS):
            begun = time.perf_counter() if epoch else started
            waited = loader.stats().wait_seconds
            for batch in loader:
                time.sleep(step_seconds * len(batch["label"]) / configuration.batch_size)
            seconds.append(time.perf_counter() - begun)
            waits.append(loader.stats().wait_seconds - waited)
        stats = loader.stats()
    assert stats.first_batch_seconds is not None
    return Observed(
        first_batch_seconds=stats.construction_seconds + stats.first_batch_seconds,
        first_seconds=seconds[0],
        later_seconds=seconds[1],
        later_stall=waits[1] / seconds[1],
        requests=stats.get_requests / EPOCHS,
    )


@contextmanager
def environment(bucket: BucketProcess) -> Iterator[None]:
    """Set the environment variables of this process for the bucket."""
    before = dict(os.environ)
    os.environ.update(bucket.environment())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def compare_runs(configuration: Configuration, repeats: int) -> dict[str, object]:
    """Return the predicted and measured figures, and their ratios."""
    url = "s3://stoker/data"
    pairs: list[tuple[Prediction, Observed]] = []
    with bucket_process(BucketConfig()) as bucket, environment(bucket):
        pack(url, configuration)
        bucket.reshape(configuration.shape)
        for _ in range(repeats):
            time.sleep(REST_SECONDS)
            pairs.append((predict_run(url, configuration), measure_run(url, configuration)))

    def ratio(name: str) -> float:
        expected: Callable[[Prediction], float] = {
            "first_batch_seconds": lambda found: found.first_batch_seconds,
            "first_seconds": lambda found: found.first.seconds,
            "later_seconds": lambda found: found.later.seconds,
            "requests": lambda found: (found.first.requests + (EPOCHS - 1) * found.later.requests) / EPOCHS,
        }[name]
        return float(statistics.median(getattr(real, name) / expected(found) for found, real in pairs))

    return {
        "name": configuration.name,
        "first_batch": ratio("first_batch_seconds"),
        "first_epoch": ratio("first_seconds"),
        "later_epochs": ratio("later_seconds"),
        "requests": ratio("requests"),
        "stall_predicted": statistics.median(found.later.stall for found, _ in pairs),
        "stall_measured": statistics.median(real.later_stall for _, real in pairs),
        "runs": [{"predicted": asdict(found), "measured": asdict(real)} for found, real in pairs],
    }


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="names of configurations")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    rows = []
    print("| configuration | first batch | first epoch | later epochs | requests | stall, predicted | measured |")
    print("|---|---|---|---|---|---|---|")
    for each in CONFIGURATIONS:
        if options.only and each.name not in options.only:
            continue
        row = compare_runs(each, options.repeats)
        rows.append(row)
        ratios = " | ".join(f"{row[name]:.2f}" for name in ("first_batch", "first_epoch", "later_epochs", "requests"))
        print(f"| {each.name} | {ratios} | {row['stall_predicted']:.1%} | {row['stall_measured']:.1%} |")
        sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2), "utf-8")


if __name__ == "__main__":
    main()
