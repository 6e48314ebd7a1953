"""Eight ranks of two machines, each with a cache process: together they read the bucket once."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest

from stoker._cluster.files import runtime_folder
from stoker_local import BucketProcess
from support.cluster import node_processes, own_runtime_folder
from support.cluster_data import DATA_BYTES, SAMPLES, SUPER_SAMPLES, cluster_bucket, rank_environment
from support.cluster_ranks import Ranks, ranks_forked_with_torch
from support.ports import reserved_port

MACHINES, LOCAL_RANKS, EPOCHS = 2, 4, 3
RANKS = MACHINES * LOCAL_RANKS
TRAININGS: dict[str, dict[str, Any]] = {
    "workers": {"workers": 1, "epochs": 2},  # first: a process that has trained has threads, which a fork has not
    "window": {},
    "twins": {"twins": 4, "epochs": 1},
    "limit": {"limit": SAMPLES // 2, "epochs": 2},
    "full": {"shuffle": "full", "memory": "24MB"},
    "units": {"unit": "200KB", "window": 32, "epochs": 2},
    "resume": {"stops_after": 5, "epochs": 2},
    "kill": {"seconds": 0.02, "meets": False},
}
"""Trainings of the same processes, one after the other, each with a cache of its own."""


@pytest.fixture(scope="module")
def bucket() -> Iterator[BucketProcess]:
    with cluster_bucket() as bucket:
        yield bucket


@pytest.fixture(scope="module")
def ranks(bucket: BucketProcess) -> Iterator[Ranks]:
    port = str(reserved_port())
    with own_runtime_folder(), ranks_forked_with_torch():
        environments = [
            {**rank_environment(rank, RANKS, LOCAL_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            for rank in range(RANKS)
        ]
        ranks = Ranks(environments, meeting="env://")
        yield ranks
        ranks.kill()


def begin(ranks: Ranks, name: str) -> None:
    """Have the ranks begin a training with a cache of its own."""
    folders = [str(runtime_folder() / f"machine-{rank // LOCAL_RANKS}") for rank in range(RANKS)]
    cluster = f"memory:?limit=60MB&linger=60&name={name}"
    ranks.begin(
        **{"cluster": cluster, "patience_seconds": 20, "meets": True, "runtime_folders": folders, **TRAININGS[name]}
    )


def processes_of(name: str) -> list[psutil.Process]:
    return [each for each in node_processes() if any(f"name={name}" in part for part in each.cmdline())]


def assert_exactly_once(reports: Sequence[dict[str, Any]], epochs: int, samples: int) -> None:
    for epoch in range(epochs):
        ids = [number for report in reports for number in report["epochs"][epoch]]
        assert len(ids) == len(set(ids)) == samples


@pytest.mark.parametrize("name", [name for name in TRAININGS if name != "kill"])
def test_all_ranks_together_read_the_bucket_once(bucket: BucketProcess, ranks: Ranks, name: str) -> None:
    settings = TRAININGS[name]
    epochs, samples, twins = settings.get("epochs", EPOCHS), settings.get("limit", SAMPLES), settings.get("twins", 1)
    bucket.reset()
    begin(ranks, name)
    reports = ranks.reports()
    assert_exactly_once(reports[::twins], epochs, samples)
    for first in range(0, RANKS, twins):
        assert all(report["epochs"] == reports[first]["epochs"] for report in reports[first : first + twins])
    counts = bucket.counts()
    in_flight = RANKS / SUPER_SAMPLES if name == "resume" else 0.0  # what was being read when loaders were closed
    assert counts["bytes_out"] <= DATA_BYTES * (1.02 + in_flight)
    assert counts["bytes_out"] >= DATA_BYTES * samples / SAMPLES
    if name in ("workers", "window", "twins"):  # one request each, and some for a late manifest
        assert counts["requests"]["GetObject"] <= SUPER_SAMPLES + 3
    assert not any(report["warnings"] for report in reports)
    assert len(processes_of(name)) == MACHINES


def test_what_a_killed_process_held_is_read_again_and_a_killed_rank_stops_nobody(
    bucket: BucketProcess, ranks: Ranks
) -> None:
    bucket.reset()
    begin(ranks, "kill")
    ranks.wait_for_epoch(1, RANKS - 1)
    processes_of("kill")[0].send_signal(signal.SIGKILL)
    ranks.wait_for_epoch(2, RANKS - 1)  # after it begins, ranks do not wait for each other
    ranks.ranks[-2].kill()
    reports = ranks.reports()
    assert len(reports) == RANKS - 1
    assert all(len(set(ids)) == len(ids) for report in reports for ids in report["epochs"])
    # All, what a process held, and what was read while it was out of reach.
    assert bucket.counts()["bytes_out"] <= DATA_BYTES * 2.2


def test_no_port_and_no_process_outlives_the_job(ranks: Ranks) -> None:
    ranks.end()
    for process in node_processes():
        listening = [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        assert all(each.laddr.ip == "127.0.0.1" for each in listening)
