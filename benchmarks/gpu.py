"""Batches in the memory of a GPU: `python -m benchmarks.gpu [--quick] [--ranks 4]`, on any machine with a CUDA device.

`--host`, on any machine: the time that the host takes for a batch of a complete `gpu_cache=`, with its own memory, and
the processor time of the thread that receives.

It starts its own buckets, one for each rank, and packs its own data: images of uint8[224, 224, 3] (150 KB) and of
uint8[32, 32, 3] (3 KB), with labels. Everything is verified by checksums, but for the last two rows of a table.

- **rate**: samples of steady epochs, in device memory, until the device has used them; processor time of all threads.
- **overlap**: part of the time of the copies in which a kernel of the training step runs, as torch's profiler sees it.
- **stall**: how much longer a loop takes whose steps compute for 5, 20 and 50 ms on the device, than the same loop on
  one batch that lies there.
- **busy**: rate while another process computes on the device, with and without ``device=``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.data import DataLoader

import stoker
from benchmarks.document import table
from stoker._fetch import range_reader
from stoker_local import BucketConfig, BucketSpec, bucket_process
from stoker_torch import Loader, StreamDataset, _loader
from stoker_torch._devices import BlockingDevice

BUCKET = "gpu"
STEPS_MS = (5, 20, 50)
MEMORY = "2GB"
"""Memory of a rank, enough for the windows of all workers."""
WORKERS = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """Images of one size.

    Attributes:
        side: height and width of an image, in pixels.
        samples: number of images.
        batch_size: images per batch.
    """

    side: int
    samples: int
    batch_size: int

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/images-{self.side}"

    @property
    def sample_bytes(self) -> int:
        return self.side * self.side * 3 + 8

    def pack(self) -> None:
        """Pack the images into the bucket of the environment."""
        images = np.random.default_rng(self.side).integers(0, 256, (64, self.side, self.side, 3), np.uint8)
        schema = {"image": stoker.Array("uint8", images.shape[1:]), "label": stoker.Array("int64")}
        with stoker.Packer(self.url, schema=schema) as packer:
            packer.extend({"image": images[label % len(images)], "label": label} for label in range(self.samples))


WORKLOADS = {"150 KB": Workload(224, 4_000, 64), "3 KB": Workload(32, 100_000, 256)}
Batches = Callable[[], Iterable[Any]]


# Ways to get batches to the device; each is a context of a function that returns the batches of an epoch.


@contextmanager
def staged(work: Workload, **settings: Any) -> Iterator[Batches]:
    settings |= {"batch_size": work.batch_size, "drop_last": True, "memory": MEMORY}
    with Loader(work.url, device="cuda", **settings) as loader:
        yield lambda: loader


@contextmanager
def host(work: Workload) -> Iterator[Batches]:
    """Batches that stay in host memory, for comparison."""
    with Loader(work.url, batch_size=work.batch_size, drop_last=True, memory=MEMORY) as loader:
        yield lambda: loader


@contextmanager
def copied_by_the_loop(work: Workload) -> Iterator[Batches]:
    settings: dict[str, Any] = {"batch_size": work.batch_size, "drop_last": True, "memory": MEMORY}
    with Loader(work.url, pin_memory=True, **settings) as loader:
        yield lambda: map(to_device, loader)


@contextmanager
def data_loader(work: Workload) -> Iterator[Batches]:
    settings: dict[str, Any] = {"batch_size": work.batch_size, "drop_last": True, "memory": MEMORY}
    dataset = StreamDataset(work.url, rank=0, world_size=1, **settings)
    batches = DataLoader(
        dataset, batch_size=None, num_workers=WORKERS, pin_memory=True, persistent_workers=True, prefetch_factor=4
    )
    yield lambda: map(to_device, batches)


@contextmanager
def on_device(work: Workload) -> Iterator[Batches]:
    """Shuffled batches of tensors that lie on the device: what no loader surpasses."""
    shape = (work.samples, work.side, work.side, 3)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    labels = torch.arange(work.samples, device="cuda")

    def batches() -> Iterator[Any]:
        order = torch.randperm(work.samples, device="cuda")
        for indices in order.split(work.batch_size)[: work.samples // work.batch_size]:
            yield {"image": images[indices], "label": labels[indices]}

    yield batches


def to_device(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to("cuda", non_blocking=True) for name, value in batch.items()}


WAYS: dict[str, Callable[[Workload], Any]] = {
    '`Loader(device="cuda")`': staged,
    "`Loader`, batches in host memory": host,
    "`Loader(pin_memory=True)`, `.to(non_blocking=True)`": copied_by_the_loop,
    f"`DataLoader` of `StreamDataset`, {WORKERS} workers, `pin_memory`, `.to(non_blocking=True)`": data_loader,
    '`Loader(device="cuda", gpu_cache=…)`, from the third epoch on': partial(staged, gpu_cache="8GB"),
    "tensors on the device, indexed": on_device,
}


@dataclass(frozen=True, slots=True)
class Rate:
    """A measured rate.

    Attributes:
        samples_per_second: samples in device memory.
        cpu_seconds_per_gb: processor time of all threads and worker processes of it.
        device_bytes: most memory of the device in use.
    """

    samples_per_second: float
    cpu_seconds_per_gb: float
    device_bytes: int


def _cpu_seconds() -> float:
    return sum(os.times()[:4]) + _children_seconds()


def _children_seconds() -> float:
    """Return the processor time of running child processes, such as the workers of a DataLoader."""
    tasks = Path("/proc/self/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return sum(_stat_seconds(Path("/proc", child, "stat")) for child in children)


def _stat_seconds(file: Path) -> float:
    """Return the processor time of a process or thread."""
    fields = file.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_rate(work: Workload, batches: Batches, epochs: int) -> Rate:
    """Read epochs, the first two of them not measured."""
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    samples, started, cpu = 0, 0.0, 0.0
    for epoch in range(epochs + 2):
        if epoch == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            started, cpu = time.perf_counter(), _cpu_seconds()
        for batch in batches():
            if batch["label"].is_cuda:
                total += batch["label"][0]
            samples += len(batch["label"]) * (epoch >= 2)
    torch.cuda.synchronize()
    seconds, cpu = time.perf_counter() - started, _cpu_seconds() - cpu
    gigabytes = samples * work.sample_bytes / 1e9
    return Rate(samples / seconds, cpu / gigabytes, torch.cuda.max_memory_allocated())


def rates(work: Workload, rounds: int, epochs: int) -> str:
    found: dict[str, list[Rate]] = {title: [] for title in WAYS}
    for _ in range(rounds):
        for title, way in WAYS.items():
            with way(work) as batches:
                found[title].append(measure_rate(work, batches, epochs))
            torch.cuda.empty_cache()
    rows = []
    for title, each in found.items():
        rate = median(one.samples_per_second for one in each)
        cpu = median(one.cpu_seconds_per_gb for one in each)
        memory = median(one.device_bytes for one in each)
        rows.append(
            [title, f"{rate:,.0f}", f"{rate * work.sample_bytes / 1e9:.2f}", f"{cpu:.2f}", f"{memory / 1e6:,.0f}"]
        )
    return table(["what", "samples/s", "GB/s", "CPU s/GB", "device MB"], rows)


# Steps on the device.


class Step:
    """A training step that computes for about a time on the device, and reads its batch.

    Args:
        milliseconds: duration.
    """

    def __init__(self, milliseconds: float) -> None:
        self._weights = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
        self._count = 1
        self._multiply(20)
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._multiply(50)
        end.record()
        end.synchronize()
        self._count = max(1, round(milliseconds / (begin.elapsed_time(end) / 50)))

    def _multiply(self, count: int) -> torch.Tensor:
        result = self._weights
        for _ in range(count):
            result = self._weights @ result
        return result

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Queue the step; return its result, on the device."""
        mean = batch["image"].float().mean()
        return self._multiply(self._count)[0, 0] + mean


def run_steps(step: Step, batches: Iterable[Any], steps: int) -> float:
    """Return the seconds of a number of steps behind the first batch, with the loop at most two steps ahead."""
    iterator = iter(batches)
    step(next(iterator))
    torch.cuda.synchronize()
    started = time.perf_counter()
    earlier: list[torch.cuda.Event] = []
    for batch in islice(iterator, steps):
        step(batch)
        event = torch.cuda.Event()
        event.record()
        earlier.append(event)
        if len(earlier) > 2:
            earlier.pop(0).synchronize()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def endless(batches: Batches) -> Iterator[Any]:
    while True:
        yield from batches()


def stalls(work: Workload, rounds: int, seconds: float) -> str:
    ways = {title: way for title, way in WAYS.items() if way not in (host, on_device)}
    rows = {title: [title] for title in ways}
    for milliseconds in STEPS_MS:
        step = Step(milliseconds)
        steps = max(40, round(seconds / milliseconds * 1e3))
        batch = {"image": torch.zeros(work.batch_size, work.side, work.side, 3, dtype=torch.uint8, device="cuda")}
        found: dict[str, list[float]] = {title: [] for title in ways}
        for _ in range(rounds):
            for title, way in ways.items():
                with way(work) as batches:
                    taken = run_steps(step, endless(batches), steps)
                alone = run_steps(step, (batch for _ in range(steps + 1)), steps)
                found[title].append(taken / alone - 1)
        for title, each in found.items():
            rows[title].append(f"{median(each):.2%}")
    return table(["stall", *(f"{each} ms" for each in STEPS_MS)], list(rows.values()))


def overlap(work: Workload) -> str:
    """Return the part of the copies' time in which kernels of the step run."""
    step, (copies, kernels) = Step(5), (list[tuple[int, int]](), list[tuple[int, int]]())
    with staged(work) as batches:
        run_steps(step, endless(batches), 20)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run_steps(step, endless(batches), 60)
    for event in profile.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        span = event.time_range.start, event.time_range.end
        (copies if "HtoD" in event.name else kernels).append(span)
    copied = sum(end - begin for begin, end in copies)
    hidden = sum(_covered(span, kernels) for span in copies)
    return f"{len(copies)} copies of {copied / 1e3:.1f} ms in all; {hidden / copied:.1%} while a kernel runs"


def _covered(span: tuple[int, int], others: list[tuple[int, int]]) -> float:
    begin, end = span
    covered, cursor = 0.0, begin
    for other_begin, other_end in sorted(others):
        low, high = max(other_begin, cursor), min(other_end, end)
        if low < high:
            covered, cursor = covered + high - low, high
    return covered


# Several processes.


def child(side: int, mode: str, epochs: int) -> None:
    """Measure one rank of several, or one way beside a busy device, and print samples per second."""
    work = next(work for work in WORKLOADS.values() if work.side == side)
    with (host if mode == "host" else staged)(work) as batches:
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(measure_rate(work, batches, epochs).samples_per_second), flush=True)


def pack() -> None:
    """Pack all workloads into the bucket of the environment."""
    print("ready", flush=True)
    for work in WORKLOADS.values():
        work.pack()


def compute() -> None:
    """Keep the device busy."""
    step = Step(5)
    batch = {"image": torch.zeros(8, device="cuda")}
    print("ready", flush=True)
    while True:
        step(batch)
        torch.cuda.synchronize()


@contextmanager
def program(environment: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    with subprocess.Popen(
        command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{' '.join(arguments)} did not start")
            yield process
        finally:
            process.kill()


def run_together(work: Workload, environments: list[dict[str, str]], mode: str, epochs: int) -> float:
    """Return the samples per second of all ranks, which begin together."""
    arguments = "--child", str(work.side), mode, str(epochs)
    with ExitStack() as stack:
        processes = [stack.enter_context(program(each, *arguments)) for each in environments]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return sum(json.loads(process.stdout.readline()) for process in processes if process.stdout is not None)


# Without a device.


def host_part(samples: int = 65_536, batch_size: int = 64, rounds: int = 9) -> str:
    """Return the microseconds of a batch of two columns, from a complete cache and from indexed tensors."""
    torch.set_num_threads(1)
    values = {"image": np.zeros(48, np.uint8), "label": 0}
    device = BlockingDevice(torch.device("cpu"))
    ways: dict[str, Batches] = {}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        schema = {"image": stoker.Array("uint8", (48,)), "label": stoker.Array("int64")}
        with stoker.Packer(folder, schema=schema, super_sample_bytes=100_000) as packer:
            packer.extend(values for _ in range(samples))
        stack.enter_context(patch.multiple(_loader, check_available=lambda _: None, open_device=lambda _: device))
        for shuffle in ("window", "full"):
            for title, settings in {"": {}, ", `batch_transform=`": {"batch_transform": lambda batch: batch}}.items():
                loader = Loader(
                    folder, batch_size=batch_size, shuffle=shuffle, device="cuda:0", gpu_cache="1GB", **settings
                )
                stack.enter_context(loader)
                ways[f'`gpu_cache=`, `shuffle="{shuffle}"`{title}'] = partial(iter, loader)
        images, labels = torch.zeros(samples, 48, dtype=torch.uint8), torch.zeros(samples, dtype=torch.int64)
        ways["tensors in host memory, indexed"] = lambda: (
            (images[indices], labels[indices]) for indices in torch.randperm(samples).split(batch_size)
        )
        found: dict[str, list[float]] = {title: [] for title in ways}
        for round_ in range(rounds + 3):
            for title, batches in ways.items():
                started = time.perf_counter()
                count = sum(1 for _ in batches())
                if round_ >= 3:  # the cache is complete
                    found[title].append((time.perf_counter() - started) / count * 1e6)
    rows = [[title, f"{median(each):.0f}"] for title, each in found.items()]
    return table([f"batches of {batch_size}", "host µs/batch"], rows)


def receiving(work: Workload, rounds: int = 5) -> str:
    """Return the processor time of the thread that receives, without and with another one that verifies."""
    ways = {"it verifies, too": 2, "another thread verifies": 4}
    found: dict[str, list[float]] = {title: [] for title in ways}
    with bucket_process(BucketConfig(buckets=(BucketSpec(name=BUCKET, anonymous=True),))) as bucket:
        os.environ.update(bucket.environment())
        work.pack()
        for _ in range(rounds):
            for title, cores in ways.items():
                with (
                    patch.object(range_reader, "count_cores", lambda cores=cores: cores),
                    Loader(work.url, batch_size=work.batch_size, memory=MEMORY) as loader,
                ):
                    for _ in loader:  # the first touch of the memory
                        pass
                    (thread,) = (each for each in threading.enumerate() if each.name == "stoker-loader")
                    file = Path(f"/proc/self/task/{thread.native_id}/stat")
                    read, seconds = loader.stats().read_bytes, _stat_seconds(file)
                    for _ in range(3):
                        for _ in loader:
                            pass
                    seconds = _stat_seconds(file) - seconds
                    found[title].append(seconds / (loader.stats().read_bytes - read) * 1e9)
    rows = [[title, f"{median(each):.2f}"] for title, each in found.items()]
    return table(["the receiving thread", "CPU s/GB"], rows)


def main(*, is_quick: bool, ranks: int) -> None:
    rounds, epochs, seconds = (1, 2, 1.0) if is_quick else (3, 3, 3.0)
    config = BucketConfig(buckets=(BucketSpec(name=BUCKET, anonymous=True),))
    with ExitStack() as stack:
        buckets = [stack.enter_context(bucket_process(config)) for _ in range(ranks)]
        environments = [dict(bucket.environment()) for bucket in buckets]
        for packing in [stack.enter_context(program(each, "--pack")) for each in environments]:
            packing.wait()
        os.environ.update(environments[0])
        print(f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, torch {torch.__version__}", flush=True)
        for name, work in WORKLOADS.items():
            print(f"\n### {name}\n\n{rates(work, rounds, epochs)}", flush=True)
        work = WORKLOADS["150 KB"]
        print(f"\n### Stall\n\n{stalls(work, rounds, seconds)}\n\n### Overlap\n\n{overlap(work)}", flush=True)
        together = run_together(work, environments, "device", epochs) * work.sample_bytes / 1e9
        print(f"\n### {ranks} ranks on one device\n\n{together:.2f} GB/s", flush=True)
        with program({}, "--compute"):
            busy = [
                run_together(work, environments[:1], "device", epochs)
                / run_together(work, environments[:1], "host", epochs)
                for _ in range(rounds)
            ]
        print(f"\n### A busy device\n\n{median(busy):.2f} of the rate without `device=`", flush=True)


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--ranks", type=int, default=4, help="processes that read together; default 4")
    parser.add_argument("--host", action="store_true", help="the host's part alone, without a device")
    parser.add_argument("--child", nargs=3, help="for the program itself")
    parser.add_argument("--pack", action="store_true", help="for the program itself")
    parser.add_argument("--compute", action="store_true", help="for the program itself")
    options = parser.parse_args()
    if options.host:
        print(host_part(), receiving(WORKLOADS["150 KB"]), sep="\n\n")
        parser.exit()
    if not torch.cuda.is_available():
        parser.exit(1, "benchmarks.gpu needs a CUDA device, and this machine has none\n")
    if options.compute:
        compute()
    elif options.pack:
        pack()
    elif options.child:
        child(int(options.child[0]), options.child[1], int(options.child[2]))
    else:
        main(is_quick=options.quick, ranks=options.ranks)
