"""Predictions and real runs with ``cluster=``: `python -m benchmarks.prediction_cluster [--repeats N]`.

For each configuration, a local bucket is shaped and probed, and the training of several machines is predicted; then its
ranks run, each in a process of its own, with a training step that sleeps. A machine is a folder for the socket of its
cache process: those of different machines reach each other over TCP. Bytes are the bucket's own count. The table shows
the ratio of measured to predicted, the median of the repeats.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import stoker
from benchmarks.prediction import environment, probe_data, shape
from stoker import FetchConfig, OrderConfig
from stoker._cluster.spec import ClusterSpec
from stoker._fetch import tier_chain
from stoker._fetch.config import PipelineConfig
from stoker._order.order import Shuffle
from stoker_local import BucketConfig, BucketProcess, bucket_process
from stoker_sim._cluster import START_SECONDS, ClusterModel
from stoker_sim._full import predict_full
from stoker_sim._predict import Prediction, predict
from stoker_sim._training import PlannedTraining

URL, EPOCHS = "s3://stoker/data", 3
SHAPE = shape(0.08, 15, 150)
LINGER_SECONDS = 5
"""Time that a cache process stays after a run, which is longer than ranks take to start."""
PATIENCE_SECONDS = 20.0
"""Time for which a rank waits for the cache before it reads the bucket: all processes start on the same cores here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A training of several machines.

    Attributes:
        name: name in the table.
        limit_share: limit of each machine, as a fraction of the data set.
        shuffle: shuffle of the loaders.
        memory: memory budget of each loader.
        machines: number of machines.
        ranks_per_machine: number of ranks of each machine.
        samples_per_second: speed of the training of each rank.
        batch_size: batch size of each rank.
        samples: number of samples.
        sample_bytes: size of each sample.
        super_sample_bytes: size of the super-samples.
    """

    name: str
    limit_share: float
    shuffle: Shuffle = "window"
    memory: int = 64_000_000
    machines: int = 2
    ranks_per_machine: int = 2
    samples_per_second: float = 2_000.0
    batch_size: int = 100
    samples: int = 15_000
    sample_bytes: int = 20_000
    super_sample_bytes: int = 2_000_000

    @property
    def ranks(self) -> int:
        """Number of ranks of all machines."""
        return self.machines * self.ranks_per_machine

    @property
    def cluster(self) -> str:
        """Setting of the loaders."""
        limit_bytes = int(self.limit_share * self.samples * self.sample_bytes)
        return f"memory:?limit={limit_bytes}&linger={LINGER_SECONDS}"


CONFIGURATIONS = (
    Configuration(name="all fits", limit_share=1.2),
    Configuration(name="all fits, fast training", limit_share=1.2, samples_per_second=8_000),
    Configuration(name="half fits", limit_share=0.25),
    Configuration(name="half fits, fast training", limit_share=0.25, samples_per_second=8_000),
    Configuration(name="`full`, all fits", limit_share=1.2, shuffle="full"),
    Configuration(name="`full`, all fits, fast training", limit_share=1.2, shuffle="full", samples_per_second=8_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Figures of a real run: what the bucket sent; on the slowest rank, the first batch and the epochs' durations."""

    read_bytes: int
    requests: int
    first_batch_seconds: float
    seconds: list[float]


def pack(configuration: Configuration) -> None:
    """Write a data set of noise."""
    rng = np.random.default_rng(0)
    size_bytes = configuration.sample_bytes
    schema = {"x": stoker.Array("uint8", (size_bytes,)), "id": stoker.Array("int64")}
    noise = rng.integers(0, 256, (64, size_bytes), dtype=np.uint8)
    with stoker.Packer(URL, schema=schema, super_sample_bytes=configuration.super_sample_bytes) as packer:
        packer.extend({"x": noise[number % 64], "id": number} for number in range(configuration.samples))


def predict_run(configuration: Configuration) -> Prediction:
    """Probe the bucket, and predict."""
    manifest, start_seconds, found = probe_data(URL)
    limit_bytes = ClusterSpec.parse(configuration.cluster).limit_bytes
    predict_order = predict_full if configuration.shuffle == "full" else predict
    return predict_order(
        PlannedTraining(
            manifest=manifest,
            feed=PipelineConfig(
                order=OrderConfig(seed=3, shuffle=configuration.shuffle, lanes=configuration.ranks),
                batch_size=configuration.batch_size,
                memory_bytes=configuration.memory,
                world_size=configuration.ranks,
                fetch=FetchConfig(hedge=False),
            ),
            ranks_per_node=configuration.ranks_per_machine,
            samples_per_second=configuration.samples_per_second,
            bucket=found.bucket(),
            node_bytes_per_second=found.total_bytes_per_second / configuration.machines,  # one bucket's for all
            start_seconds=start_seconds + START_SECONDS,
            cluster=ClusterModel(machines=configuration.machines, limit_bytes=limit_bytes),
        )
    )


def measure_run(configuration: Configuration, bucket: BucketProcess, epochs: int = EPOCHS) -> Observed:
    """Run the ranks of a training, and return what they took of the bucket."""
    bucket.reset()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        places = []
        for machine in range(configuration.machines):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="run", ignore_cleanup_errors=True))
            for number in range(configuration.ranks_per_machine):
                place = {
                    "RANK": machine * configuration.ranks_per_machine + number,
                    "WORLD_SIZE": configuration.ranks,
                    "LOCAL_RANK": number,
                    "LOCAL_WORLD_SIZE": configuration.ranks_per_machine,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "XDG_RUNTIME_DIR": folder,
                }
                places.append({name: str(value) for name, value in place.items()})
        ranks = stack.enter_context(_start_ranks(configuration, epochs, places))
        text, _ = ranks.communicate(timeout=300)
        if ranks.returncode:
            raise SystemExit(f"the ranks ended with {ranks.returncode}")
    first, *seconds = (max(each) for each in zip(*map(json.loads, text.splitlines()[-len(places) :]), strict=True))
    counts = bucket.counts()
    return Observed(
        read_bytes=counts["bytes_out"],
        requests=counts["requests"]["GetObject"],
        first_batch_seconds=first,
        seconds=seconds,
    )


def _start_ranks(
    configuration: Configuration, epochs: int, places: Sequence[Mapping[str, str]]
) -> subprocess.Popen[str]:
    settings = {
        "cluster": configuration.cluster,
        "shuffle": configuration.shuffle,
        "memory": configuration.memory,
        "batch_size": configuration.batch_size,
        "epochs": epochs,
    }
    arguments = json.dumps([places, settings, configuration.batch_size / configuration.samples_per_second])
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.prediction_cluster", "--ranks", arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )


def run_ranks(places: Sequence[Mapping[str, str]], settings: dict[str, Any], step_seconds: float) -> None:
    """Train in a process for each place, all of which share what takes long to import; print what each has measured.

    Args:
        places: environment variables of each rank.
        settings: settings of the loaders.
        step_seconds: duration of a training step.
    """
    import stoker_torch  # noqa: F401 - for the ranks

    gc.freeze()
    children = []
    for place in places:
        if not (child := os.fork()):
            os.environ.update(place)
            line = json.dumps(train(settings, step_seconds)) + "\n"
            os.write(sys.stdout.fileno(), line.encode())  # at once, since ranks write to the same pipe
            return
        children.append(child)
    if any(codes := [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]):
        raise SystemExit(f"ranks ended with {codes}")


def train(settings: dict[str, Any], step_seconds: float) -> list[float]:
    """Train as one rank, whose steps wait for all ranks; return the time of the first batch, and that of each epoch."""
    from torch import distributed

    from stoker_torch import Loader

    tier_chain.SINGLE_FLIGHT_SECONDS = PATIENCE_SECONDS
    distributed.init_process_group("gloo")
    distributed.barrier()
    seconds, begun = [], time.perf_counter()
    with Loader(URL, seed=3, fetch=FetchConfig(hedge=False), **settings) as loader:
        for _ in range(settings["epochs"]):
            for batch in loader:
                end = time.perf_counter() + step_seconds * len(batch["id"]) / settings["batch_size"]
                distributed.barrier()
                time.sleep(max(0.0, end - time.perf_counter()))
            distributed.barrier()
            seconds.append(time.perf_counter() - begun)
            begun += seconds[-1]
        stats = loader.stats()
    return [stats.construction_seconds + (stats.first_batch_seconds or 0.0), *seconds]


def compare_bytes(configuration: Configuration) -> tuple[float, float]:
    """Return the measured bytes of the first and of a later epoch, each as a multiple of the predicted ones.

    If next to nothing is predicted, it is 1 plus what was read beyond that, as a fraction of the data set.
    """
    with bucket_process(BucketConfig()) as bucket, environment(bucket):
        pack(configuration)
        predicted = predict_run(configuration)
        first = measure_run(configuration, bucket, 1).read_bytes
        later = (measure_run(configuration, bucket, EPOCHS).read_bytes - first) / (EPOCHS - 1)
    expected, data_bytes = predicted.later.read_bytes, configuration.samples * configuration.sample_bytes
    beyond = (later - expected) / (expected if expected > 0.01 * data_bytes else data_bytes)
    return first / predicted.first.read_bytes, 1.0 + beyond


def compare_runs(configuration: Configuration, repeats: int) -> list[str]:
    """Return the cells of a row of the table."""
    pairs: list[tuple[Prediction, Observed]] = []
    with bucket_process(BucketConfig()) as bucket, environment(bucket):
        pack(configuration)
        bucket.reshape(SHAPE)
        for _ in range(repeats):
            pairs.append((predict_run(configuration), measure_run(configuration, bucket)))
            print(json.dumps(_figures(*pairs[-1])), file=sys.stderr)
    figures = [_figures(*pair) for pair in pairs]
    return [f"{statistics.median(each[name][1] / each[name][0] for each in figures):.2f}" for name in figures[0]]


def _figures(predicted: Prediction, real: Observed) -> dict[str, tuple[float, float]]:
    """Return each figure of the table, predicted and measured."""
    first, later = predicted.first, predicted.later
    return {
        "first batch": (predicted.first_batch_seconds, real.first_batch_seconds),
        "first epoch": (first.seconds, real.seconds[0]),
        "later epochs": (later.seconds, real.seconds[1]),
        "bytes": (first.read_bytes + (EPOCHS - 1) * later.read_bytes, real.read_bytes),
        "requests": (first.requests + (EPOCHS - 1) * later.requests, real.requests),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m benchmarks.prediction_cluster", description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of configurations")
    parser.add_argument("--ranks", help="places and settings of the ranks, as JSON, for the processes of a run")
    options = parser.parse_args(arguments)
    if options.ranks:
        run_ranks(*json.loads(options.ranks))
        return
    print("| configuration | first batch | first epoch | later epochs | bytes | requests |")
    print("|---|---|---|---|---|---|")
    for each in CONFIGURATIONS:
        if not options.only or each.name in options.only:
            print(f"| {each.name} | {' | '.join(compare_runs(each, options.repeats))} |", flush=True)


if __name__ == "__main__":
    main()
