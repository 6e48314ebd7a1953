"""Emulated accelerators on the workloads of MLPerf Storage: `python -m benchmarks.mlperf [WORKLOAD …] [--quick]`.

Sizes of samples and batches, times of a step, and the least accelerator utilization (AU) are those of MLPerf Storage's
B200; the bucket is a local one with the network of profile `cloud`. As many accelerators run as 0.95 of the link can
supply. If the link cannot supply one, its step is as long as that takes. `stoker plan` predicts the AU beforehand.
The figures are no result of MLPerf Storage: docs/performance.md says what differs.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from statistics import NormalDist, mean
from typing import Any

import numpy as np

import stoker
from benchmarks import processor_costs
from benchmarks.accelerators import Run, run_accelerators, utilization
from benchmarks.document import table
from benchmarks.processor_costs import ProcessorCosts
from stoker._format.manifest import ManifestRows, PackRun, object_key
from stoker._format.supersample import MAX_SAMPLE_BYTES
from stoker._format.versions import commit, read_manifest
from stoker_local import PROFILES, BucketConfig, BucketSpec, bucket_process

LINK = PROFILES["cloud"]
LINK_SHARE = 0.95
"""Share of the link that the accelerators need."""
MAX_ERROR = 0.02
"""Largest difference between predicted and measured AU."""
BUCKET = "mlperf"
BUCKET_CORES = 0.2
"""Cores that the bucket uses at the link's rate."""
_NOISE_BYTES = 64 << 20

Samples = Callable[[np.random.Generator], Iterator[dict[str, Any]]]
SampleSizes = Callable[[np.random.Generator], Iterable[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload of MLPerf Storage.

    Attributes:
        title: its name there.
        batch_size: samples per batch of an accelerator.
        step_seconds: time that an accelerator computes on a batch.
        min_utilization: least AU.
        sample_bytes: mean size of what is read of a sample, in bytes.
        schema: columns of the packed samples.
        samples: generates an endless sequence of samples.
        steps: steps of an epoch, which determine the size of the data set.
        epochs: number of epochs.
        columns: names of the columns to read; None for all.
        memory: memory budget of each loader.
        window: window of the shuffle, in super-samples.
        super_sample_bytes: target size of super-samples.
        copies: how many times each super-sample is stored, if packing all samples would take too long.
    """

    title: str
    batch_size: int
    step_seconds: float
    min_utilization: float
    sample_bytes: float
    schema: Mapping[str, stoker.Column]
    samples: Samples
    steps: int
    epochs: int
    columns: Sequence[str] | None = None
    memory: str = "512MB"
    window: int = 8
    super_sample_bytes: int = 8 << 20
    copies: int = 1

    @property
    def batch_bytes(self) -> float:
        """Mean size of a batch, in bytes."""
        return self.batch_size * self.sample_bytes

    def accelerators(self, bytes_per_second: float) -> tuple[int, float]:
        """Return the number of accelerators that a link can supply, at least one, and the time of their step.

        Args:
            bytes_per_second: rate of the link that may be used.
        """
        count = int(bytes_per_second * self.step_seconds / self.batch_bytes)
        return (count, self.step_seconds) if count else (1, self.batch_bytes / bytes_per_second)


def noise(sizes: SampleSizes) -> Samples:
    """Return a generator of samples with a column ``data``, noise that repeats after 32 MiB or more."""

    def samples(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
        pool = np.frombuffer(rng.bytes(_NOISE_BYTES), np.uint8)
        for size in sizes(rng):
            start = int(rng.integers(0, len(pool) // 2))
            yield {"data": np.resize(pool[start:], size).tobytes()}

    return samples


def normal_bytes(mean: float, deviation: float, count: int) -> SampleSizes:
    """Return a sequence of sizes in bytes, of which each ``count`` are quantiles of a normal distribution, permuted.

    So their mean is that of the distribution. A sample has at least 1 MB, and at most the largest size of one.
    """
    distribution = NormalDist(mean, deviation)
    quantiles = [distribution.inv_cdf((place + 0.5) / count) for place in range(count)]
    sizes = np.clip(quantiles, 1e6, MAX_SAMPLE_BYTES).astype(np.int64)

    def draw(rng: np.random.Generator) -> Iterator[int]:
        while True:
            yield from rng.permutation(sizes).tolist()

    return draw


def arrays(sizes: Mapping[str, int]) -> Samples:
    """Return a generator of samples of ``float32`` columns with these numbers of elements."""

    def samples(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
        pool = rng.random(_NOISE_BYTES // 4, np.float32)
        while True:
            starts = {name: int(rng.integers(0, len(pool) - size)) for name, size in sizes.items()}
            yield {name: pool[starts[name] : starts[name] + size] for name, size in sizes.items()}

    return samples


FLUX = {"text": 524_328, "prompt": 409, "mean": 8_232, "variance": 8_232, "timestep": 7}
"""Column of a Flux sample → its number of ``float32`` elements."""

_READ = {"float64": 5, "float32": 27, "float16": 4, "int8": 4}
_UNREAD = {"float64": 44, "float32": 28, "float16": 49, "int8": 39}
"""Element types of the 40 columns of a DLRM sample that are read, and of the 160 others → number of columns."""


def scalars(prefix: str, counts: Mapping[str, int]) -> dict[str, stoker.Column]:
    """Return scalar columns, by name."""
    return {f"{prefix}_{dtype}_{n}": stoker.Array(dtype) for dtype, count in counts.items() for n in range(count)}


DLRM_READ, DLRM_UNREAD = scalars("read", _READ), scalars("unread", _UNREAD)


def dlrm_samples(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Yield samples with all columns of DLRM."""
    columns = stoker.Schema(DLRM_READ | DLRM_UNREAD)
    dtypes = {name: column.dtype.holder for name, column in columns.items()}
    while True:
        numbers = dict(zip(dtypes, rng.integers(0, 100, len(dtypes)).tolist(), strict=True))
        yield {name: dtype.type(numbers[name]) for name, dtype in dtypes.items()}


UNET3D_BYTES, UNET3D_DEVIATION_BYTES = 146_600_628, 68_341_808

WORKLOADS = {
    "unet3d": Workload(
        title="3D U-Net",
        batch_size=7,
        step_seconds=0.162,
        min_utilization=0.90,
        sample_bytes=UNET3D_BYTES,
        schema={"data": stoker.Bytes()},
        samples=noise(normal_bytes(UNET3D_BYTES, UNET3D_DEVIATION_BYTES, 35)),
        steps=5,
        epochs=5,
        memory="3GB",
        window=1,
    ),
    "resnet50": Workload(
        title="ResNet-50",
        batch_size=400,
        step_seconds=0.224,
        min_utilization=0.90,
        sample_bytes=114_660,
        schema={"data": stoker.Bytes()},
        samples=noise(lambda _: repeat(114_660)),
        steps=20,
        epochs=3,
    ),
    "retinanet": Workload(
        title="RetinaNet",
        batch_size=24,
        step_seconds=0.0476,
        min_utilization=0.85,
        sample_bytes=322_957,
        schema={"data": stoker.Bytes()},
        samples=noise(lambda _: repeat(322_957)),
        steps=64,
        epochs=4,
    ),
    "flux": Workload(
        title="Flux",
        batch_size=48,
        step_seconds=1.35,
        min_utilization=0.90,
        sample_bytes=4 * sum(FLUX.values()),
        schema={name: stoker.Array("float32", (size,)) for name, size in FLUX.items()},
        samples=arrays(FLUX),
        steps=8,
        epochs=5,
    ),
    "dlrm": Workload(
        title="DLRM",
        batch_size=16_384,
        step_seconds=0.000375,
        min_utilization=0.70,
        sample_bytes=sum(column.element_bytes for column in DLRM_READ.values()),
        schema=DLRM_READ | DLRM_UNREAD,
        samples=dlrm_samples,
        steps=78,
        epochs=20,
        columns=tuple(DLRM_READ),
        memory="1GB",
        super_sample_bytes=32 << 20,
        copies=64,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a workload.

    Attributes:
        workload: the workload.
        accelerators: number of accelerators.
        step_seconds: time of their step.
        samples_per_second: samples of all accelerators per second, from the start of the run.
        predicted: AU of each epoch that `stoker plan` predicts.
        measured: AU of each epoch of the run.
    """

    workload: Workload
    accelerators: int
    step_seconds: float
    samples_per_second: float
    predicted: Sequence[float]
    measured: Sequence[float]

    @property
    def row(self) -> tuple[str, ...]:
        """Row of the table."""
        workload = self.workload
        predicted, measured = mean(self.predicted), mean(self.measured)
        return (
            workload.title,
            str(self.accelerators),
            f"{1000 * self.step_seconds:,.1f}",
            f"{self.accelerators * workload.batch_bytes / self.step_seconds / 1e6:,.0f}",
            f"{self.samples_per_second:,.0f}",
            f"{self.samples_per_second * workload.sample_bytes / 1e6:,.0f}",
            f"{self.measured[0]:.1%}",
            f"{self.predicted[0]:.1%}",
            f"{measured:.1%}",
            f"{workload.min_utilization:.0%}, {_verdict(measured >= workload.min_utilization)}",
            f"{predicted:.1%}",
            f"{100 * (predicted - measured):+.1f}, {_verdict(abs(predicted - measured) <= MAX_ERROR)}",
        )


HEAD = (
    "workload",
    "accelerators",
    "step, ms",
    "needed MB/s",
    "samples/s",
    "MB/s",
    "AU, epoch 1",
    "predicted, epoch 1",
    "AU",
    "least",
    "predicted",
    "error, points",
)


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def measure(name: str, costs: ProcessorCosts, *, quick: bool) -> Figures:
    """Pack a workload into a local bucket, predict its AU, and measure it.

    Args:
        name: name of the workload.
        costs: processor time of a loader on this machine.
        quick: whether to use less data and one epoch.
    """
    workload = WORKLOADS[name]
    assert LINK.total_bytes_per_second is not None
    count, step_seconds = workload.accelerators(LINK_SHARE * LINK.total_bytes_per_second)
    epochs = 1 if quick else workload.epochs
    steps = max(3, workload.steps // 8) if quick else workload.steps
    url = f"s3://{BUCKET}/{name}"
    run = Run(
        url=url,
        accelerators=count,
        batch_size=workload.batch_size,
        step_seconds=step_seconds,
        epochs=epochs,
        columns=workload.columns,
        memory=workload.memory,
        window=workload.window,
    )
    with bucket_process(BucketConfig(buckets=(BucketSpec(name=BUCKET, anonymous=True),))) as bucket:
        os.environ.update(bucket.environment())
        pack(url, workload, steps * count * workload.batch_size)
        bucket.reshape(LINK)
        predicted = predict(run, costs)
        times = run_accelerators(run)
    seconds = max(sum(epoch.seconds for epoch in each) for each in times)
    return Figures(
        workload=workload,
        accelerators=count,
        step_seconds=step_seconds,
        samples_per_second=epochs * steps * count * workload.batch_size / seconds,
        predicted=predicted,
        measured=[utilization([[epochs[number]] for epochs in times]) for number in range(epochs)],
    )


def pack(url: str, workload: Workload, samples: int) -> None:
    """Write at least a number of samples, each super-sample as often as the workload says."""
    with stoker.Packer(url, schema=workload.schema, super_sample_bytes=workload.super_sample_bytes) as packer:
        packer.extend(islice(workload.samples(np.random.default_rng(0)), -(-samples // workload.copies)))
    if workload.copies > 1:
        asyncio.run(copy_super_samples(url, workload.copies))


async def copy_super_samples(url: str, copies: int) -> None:
    """Store the super-samples of a data set several times, and commit a version with all of them."""
    store = stoker.open_store(url)
    try:
        packed = await read_manifest(store)
        run, count = packed.runs[0].run, len(packed)
        records = [packed.rows.record(row, 0) for row in range(count)]
        for number in range(count, copies * count):
            data, _ = await store.get(packed.key(number % count))
            copy = await store.put(object_key(run, number), data)
            records.append(replace(records[number % count], tag=copy.tag))
        rows = ManifestRows.of(records)
        runs = (PackRun(run, 0, copies * count),)
        await commit(store, lambda _: replace(packed, version=packed.version + 1, rows=rows, runs=runs))
    finally:
        await store.close()


def predict(run: Run, costs: ProcessorCosts) -> list[float]:
    """Return the AU of each epoch of a run that `stoker plan` predicts."""
    arguments: dict[str, Any] = {
        "--gpu-rate": run.batch_size / run.step_seconds,
        "--ranks-per-node": run.accelerators,
        "--batch-size": run.batch_size,
        "--loader-memory": run.memory,
        "--window": run.window,
        "--cores": max(0.5, (os.cpu_count() or 1) - BUCKET_CORES),
        "--epochs": run.epochs,
    }
    if run.columns is not None:
        arguments["--columns"] = ",".join(run.columns)
    flags = [str(each) for pair in arguments.items() for each in pair]
    command = [sys.executable, "-m", "stoker.cli", "plan", run.url, *flags, *costs.flags, "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["given"]
    first, later = (float(found[epoch]["accelerator_utilization"]) for epoch in ("first", "later"))
    return [first, *[later] * (run.epochs - 1)]


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m benchmarks.mlperf", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"{', '.join(WORKLOADS)}; default all")
    parser.add_argument("--quick", action="store_true", help="less data and one epoch, to see that it runs")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.workloads if name not in WORKLOADS]:
        parser.error(f"there is no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    costs = processor_costs.measure()
    print(f"processor time of a loader: {' '.join(costs.flags)}\n")
    rows = [measure(name, costs, quick=given.quick).row for name in given.workloads or WORKLOADS]
    print(table(HEAD, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
