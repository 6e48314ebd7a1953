"""Loaders of one machine with a cache process: every sample once an epoch, each super-sample from the bucket once."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stoker_local import BucketProcess
from stoker_torch import Loader
from support.cluster import node_processes, own_runtime_folder, wait_until_gone
from support.cluster_data import DATA_BYTES, SAMPLES, cluster_bucket, rank_environment
from support.cluster_rank import URL
from support.cluster_ranks import Ranks, ranks_forked_with_torch

RANKS, EPOCHS = 3, 3
CLUSTER = "memory:?limit=200MB&linger=60"
"""Setting whose process outlives the time between the starts of ranks; a test's end kills it."""
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def packed() -> Iterator[BucketProcess]:
    with cluster_bucket() as bucket:
        yield bucket


@pytest.fixture
def bucket(packed: BucketProcess) -> BucketProcess:
    packed.reset()
    return packed


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with own_runtime_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def ranks_for(packed: BucketProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, int], Ranks]]:
    """Return ranks for the next training: those of the last one, if they are ready for another."""
    all_ranks: dict[tuple[int, int], Ranks] = {}

    def find(count: int, twins: int) -> Ranks:
        found = all_ranks.get((count, twins))
        if found is None or not found.are_ready:
            if found is not None:
                found.kill()
            meeting = f"file://{tmp_path_factory.mktemp('meeting')}/meeting" if twins else ""
            environments = [rank_environment(rank, count, count) for rank in range(count)]
            found = all_ranks[count, twins] = Ranks(environments, meeting)
        return found

    with ranks_forked_with_torch():
        yield find
        for ranks in all_ranks.values():
            ranks.kill()


Train = Callable[..., Ranks]


@pytest.fixture
def train(ranks_for: Callable[[int, int], Ranks]) -> Iterator[Train]:
    """Start a training; one that has not ended is killed at the end."""
    begun: list[Ranks] = []

    def start(cluster: str, *, ranks: int = RANKS, twins: int = 0, **settings: Any) -> Ranks:
        training = ranks_for(ranks, twins)
        training.begin(cluster=cluster, twins=twins, **settings)
        begun.append(training)
        return training

    yield start
    for training in begun:
        if training.is_training:
            training.kill()


def assert_exactly_once(reports: Sequence[dict[str, Any]]) -> None:
    for epoch in range(EPOCHS):
        ids = [number for report in reports for number in report["epochs"][epoch]]
        assert sorted(ids) == list(range(SAMPLES))


def share_read(bucket: BucketProcess) -> float:
    """Return the bytes that the bucket has sent, as a multiple of the data set's."""
    return float(bucket.counts()["bytes_out"] / DATA_BYTES)


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 2},  # first: a process that has trained has threads, of which a worker that is forked has none
        {},
        {"shuffle": "full", "memory": "24MB"},  # does not fit: read in groups of samples
    ],
    ids=str,
)
def test_ranks_read_the_bucket_once(bucket: BucketProcess, train: Train, settings: dict[str, Any]) -> None:
    training = train(CLUSTER, patience_seconds=20, **settings)
    reports = training.reports()
    assert_exactly_once(reports)
    assert 1.0 <= share_read(bucket) <= 1.05
    assert all(report["states"] == {"cluster": "closed"} for report in reports if report["states"])


def test_worker_processes_of_one_data_parallel_index_get_the_same_batches_by_one_fetch(
    bucket: BucketProcess, train: Train
) -> None:
    training = train(CLUSTER, ranks=4, twins=2, meets=True, patience_seconds=20, workers=1, epochs=2)
    first, first_twin, second, second_twin = (report["epochs"] for report in training.reports())
    assert (first, second) == (first_twin, second_twin)
    for one, other in zip(first, second, strict=True):
        assert sorted(one + other) == list(range(SAMPLES))
    assert 1.0 <= share_read(bucket) <= 1.05


def test_ranks_of_one_data_parallel_index_read_once_what_their_machine_cannot_hold(
    bucket: BucketProcess, train: Train
) -> None:
    training = train("memory:?limit=20MB&linger=60", ranks=4, twins=2, meets=True, patience_seconds=20, epochs=2)
    first, first_twin, second, second_twin = (report["epochs"] for report in training.reports())
    assert (first, second) == (first_twin, second_twin)
    for one, other in zip(first, second, strict=True):
        assert sorted(one + other) == list(range(SAMPLES))
    assert 1.2 <= share_read(bucket) <= 1.9  # less what it holds; each for itself, they would read three times as much


def test_a_second_training_finds_what_the_first_one_has_read(bucket: BucketProcess, train: Train) -> None:
    train(CLUSTER, patience_seconds=20).reports()
    (process,) = node_processes()
    bucket.reset()
    reports = train(CLUSTER, seed=5).reports()
    assert [each.pid for each in node_processes()] == [process.pid]
    assert_exactly_once(reports)
    assert share_read(bucket) <= 0.01


def test_a_killed_rank_costs_what_it_was_reading(bucket: BucketProcess, train: Train) -> None:
    training = train(CLUSTER, patience_seconds=20, seconds=0.01)
    training.wait_for_epoch(1, 2)
    training.ranks[2].kill()
    reports = training.reports()
    assert len(reports) == RANKS - 1
    assert share_read(bucket) <= 1.25  # what it held, and what it had not given yet


def test_a_killed_process_is_replaced_and_every_sample_comes_once(bucket: BucketProcess, train: Train) -> None:
    training = train(CLUSTER, patience_seconds=20, seconds=0.02)
    training.wait_for_epoch(1, 0)
    (process,) = node_processes()
    process.send_signal(signal.SIGKILL)
    reports = training.reports()
    assert_exactly_once(reports)
    assert share_read(bucket) <= 2.2


def test_a_frozen_process_delays_no_rank_for_long(train: Train) -> None:
    training = train("memory:?limit=200MB&linger=1", seconds=0.01)
    training.wait_for_epoch(1, 0)
    (process,) = node_processes()
    process.send_signal(signal.SIGSTOP)
    try:
        reports = training.reports()
    finally:
        process.send_signal(signal.SIGCONT)
    assert_exactly_once(reports)
    assert max(report["longest_wait"] for report in reports) <= 1.0 + 5.0  # for a busy machine; a read may take 10 s
    assert wait_until_gone(10)


def test_many_that_start_at_once_start_one_process() -> None:
    command = [sys.executable, "-m", "support.cluster_rank", "memory:?limit=10MB&linger=30"]
    processes = [
        subprocess.Popen(command, env=rank_environment(0, 1, 1), stdout=subprocess.PIPE, text=True) for _ in range(8)
    ]
    owners = set()
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        owners |= set(output.split())
    assert len(owners) == len(node_processes()) == 1


def test_a_process_that_cannot_start_is_a_warning_and_the_bucket_is_read(
    bucket: BucketProcess, train: Train, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    training = train(f"disk:{file}?limit=1GB", epochs=1, patience_seconds=60)  # a start may take some seconds
    reports = training.reports()
    assert all("File exists" in report["warnings"] or "Not a directory" in report["warnings"] for report in reports)
    assert share_read(bucket) >= 1.0


def test_the_process_ends_when_it_is_asked_to(folder: Path) -> None:
    command = [sys.executable, "-m", "support.cluster_rank", "memory:?limit=10MB&linger=60"]
    subprocess.run(command, env=rank_environment(0, 1, 1), check=True, stdout=subprocess.DEVNULL)
    (process,) = node_processes()
    process.terminate()
    assert wait_until_gone(10)
    assert not list(folder.glob("*.sock"))


def test_the_page_s_example_runs() -> None:
    page = (TESTS.parent / "docs" / "cluster.md").read_text("utf-8")
    block = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0]  # the other one needs ranks
    code = block.replace("s3://bucket/train", URL).replace("64GB", "1GB&linger=1").replace("range(90)", "range(2)")
    code = code.replace('"image"', '"x"').replace('"label"', '"id"')
    seen: list[int] = []
    exec(code, {"Loader": Loader, "train_step": lambda _, ids: seen.extend(ids.tolist())})  # noqa: S102 - the page's block
    assert sorted(seen) == sorted(2 * [*range(SAMPLES)])
    assert wait_until_gone(10)
