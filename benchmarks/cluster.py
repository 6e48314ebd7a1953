"""The cache process of a machine, ``cluster=``: `python -m benchmarks.cluster [--rounds 5]`.

One loader of 150 KB samples (``uint8[224, 224, 3]``) from a bucket on loopback: epochs from the process's memory, from
the loader's own memory (``cache="memory:"``), and from the bucket; then the same with a ``full`` order, which does not
fit in the loader's memory, and is read by ranges.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser
from statistics import median
from typing import Any

import numpy as np
import psutil

import stoker
from benchmarks.document import table
from stoker_local import BucketConfig, BucketSpec, bucket_process
from stoker_torch import Loader

URL, SAMPLES, SHAPE = "s3://cluster/images", 4_000, (224, 224, 3)
LIMIT = "1GB"
CLUSTER = {"cluster": f"memory:?limit={LIMIT}&name=benchmark&linger=5"}
WAYS: dict[str, dict[str, Any]] = {
    'the process, `cluster="memory:"`': CLUSTER,
    'the loader, `cache="memory:"`': {"cache": f"memory:?limit={LIMIT}"},
    "a bucket on loopback": {},
    "the process, `full`": {"shuffle": "full", **CLUSTER},
    "a bucket on loopback, `full`": {"shuffle": "full"},
}


def cpu_seconds(pids: list[int]) -> float:
    """Return the processor time of this process and of others."""
    others = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(os.times()[:2]) + sum(each.user + each.system for each in others)


def node_pids() -> list[int]:
    processes = psutil.process_iter(["cmdline"])
    return [each.pid for each in processes if "stoker._cluster.node" in (each.info["cmdline"] or [])]


def measure(settings: dict[str, Any]) -> tuple[float, float]:
    """Return GB/s and processor seconds a GB of the third epoch and the next two."""
    with Loader(URL, batch_size=64, memory="256MB", **settings) as loader:
        for _ in range(2):
            for _ in loader:
                pass
        pids = node_pids() if "cluster" in settings else []
        begun, cpu, samples = time.perf_counter(), cpu_seconds(pids), 0
        for _ in range(3):
            for batch in loader:
                samples += len(batch["image"])
        seconds, cpu = time.perf_counter() - begun, cpu_seconds(pids) - cpu
    gigabytes = samples * np.prod(SHAPE) / 1e9
    return gigabytes / seconds, cpu / gigabytes


def main(rounds: int) -> None:
    with bucket_process(BucketConfig(buckets=(BucketSpec(name="cluster", anonymous=True),))) as bucket:
        os.environ.update(bucket.environment())
        images = np.random.default_rng(0).integers(0, 256, (64, *SHAPE), np.uint8)
        with stoker.Packer(URL, schema={"image": stoker.Array("uint8", SHAPE)}) as packer:
            packer.extend({"image": images[number % len(images)]} for number in range(SAMPLES))
        found: dict[str, list[tuple[float, float]]] = {title: [] for title in WAYS}
        for _ in range(rounds):
            for title, settings in WAYS.items():
                found[title].append(measure(settings))
    rows = []
    for title, each in found.items():
        rate, cpu = (median(values) for values in zip(*each, strict=True))
        rows.append([title, f"{rate:.2f}", f"{cpu:.2f}"])
    print(table(["epochs from", "GB/s", "CPU s/GB"], rows))


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all ways; default 5")
    main(parser.parse_args().rounds)
