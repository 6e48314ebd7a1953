from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.bench import BUCKET, Bench, Program
from benchmarks.cells import Cell
from benchmarks.workloads import WORKLOADS

from stoker_local import BucketConfig, BucketSpec, bucket_process

SAMPLES = 600


def program(module: str) -> Program:
    return Program(command=(sys.executable, "-m", f"benchmarks.{module}"), torch_bytes=0)


def cell(loader: str, kind: str) -> Cell:
    return Cell(workload="images", mode="raw", profile="none", loader=loader, kind=kind, samples=SAMPLES, round=0)


def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bench.RESULTS", tmp_path)
    monkeypatch.setattr("benchmarks.bench._LOGS", tmp_path / "logs")
    monkeypatch.setattr("benchmarks.bench.STARTS", 2)
    monkeypatch.setattr("benchmarks.workloads.DATA", tmp_path)
    WORKLOADS["images"].generate(SAMPLES)


def test_a_loader_that_hangs_is_given_up_after_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path, monkeypatch)
    hung = Program(command=(sys.executable, "-c", "import time; time.sleep(600)"), torch_bytes=0)
    with bucket_process(BucketConfig(buckets=(BucketSpec(name=BUCKET),))) as bucket:
        bench = Bench(
            workload="images", samples=SAMPLES, bucket=bucket, programs={"litdata": hung}, timeout_seconds=0.5
        )
        errors = [bench.measure(replace(cell("litdata", "cold"), round=number)).error for number in range(3)]
    once = "no result within 0.5 s"
    assert errors == [once, once, f"{once}, 2 times; not tried again"]


def test_cells_are_measured_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path, monkeypatch)
    with bucket_process(BucketConfig(buckets=(BucketSpec(name=BUCKET, anonymous=True),))) as bucket:
        bench = Bench(
            workload="images",
            samples=SAMPLES,
            bucket=bucket,
            programs={"ours": program("ours"), "sockets": program("limits"), "broken": program("missing")},
            timeout_seconds=60.0,
        )
        bench.pack("ours", SAMPLES)
        bench.pack("broken", SAMPLES)
        ours, limit, broken = (
            bench.measure(cell(*each)) for each in (("ours", "cold"), ("sockets", "limit"), ("broken", "cold"))
        )
        steady, starts = (bench.measure(cell("ours", kind)) for kind in ("steady", "starts"))
    assert ours.error is None
    assert ours.delivered == SAMPLES
    assert ours.mixing is not None
    assert (ours.mixing.missing, ours.mixing.duplicated) == (0, 0)
    assert 1.0 <= ours.amplification < 1.05
    # A hedge that was not needed may be broken off before the bucket has seen it.
    assert ours.result["get_requests"] - ours.result["hedges"] <= ours.gets <= ours.result["get_requests"]
    assert ours.disk_bytes == 0
    assert ours.cpu_seconds > 0
    assert ours.extra_bytes > 50 << 20  # torch was imported
    assert steady.result["bytes_sent"] == sorted(steady.result["bytes_sent"])
    assert len(steady.result["bytes_sent"]) == len(steady.result["epochs"]) == steady.cell.epochs
    assert steady.result["bytes_sent"][-1] <= steady.read_bytes
    assert steady.second_epoch_rate > 0
    assert starts.error is None
    assert len(starts.start_seconds) == 2
    assert limit.error is None
    assert limit.result["connections"] == ours.counts["peak_connections"]
    assert limit.read_bytes > limit.cell.epochs * limit.payload_bytes
    assert (broken.error or "").startswith("packing failed: exit code 1: ")
    assert not list(tmp_path.glob("cell-*"))
