"""Emulated accelerators: their utilization, how many a link supplies, and a run of each kind of data."""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from dataclasses import asdict, replace
from itertools import islice, repeat
from pathlib import Path

import numpy as np
import pytest
from benchmarks import mlperf
from benchmarks.accelerators import EpochTimes, Run, run_accelerators, utilization
from benchmarks.mlperf import (
    DLRM_READ,
    DLRM_UNREAD,
    FLUX,
    LINK,
    LINK_SHARE,
    UNET3D_BYTES,
    UNET3D_DEVIATION_BYTES,
    WORKLOADS,
    Figures,
    noise,
    normal_bytes,
)
from benchmarks.processor_costs import ProcessorCosts

import stoker
from stoker._format.supersample import MAX_SAMPLE_BYTES
from stoker_local import running_bucket
from stoker_sim._commands import plan
from stoker_torch import Loader

assert LINK.total_bytes_per_second is not None
USABLE = LINK_SHARE * LINK.total_bytes_per_second


def times(*waits: float, compute: float = 1.0) -> EpochTimes:
    """Return the times of an epoch of steps with these waits, and a second behind each for the other accelerators."""
    return EpochTimes(
        seconds=sum(waits) + len(waits) * (compute + 1.0),
        step_seconds=[wait + compute for wait in waits],
        compute_seconds=[compute] * len(waits),
    )


def test_the_first_step_of_an_epoch_does_not_count() -> None:
    assert times(99.0, 0.0, 2.0).accelerator_utilization == pytest.approx(2.0 / (2.0 + 2.0 + 3.0))


def test_the_utilization_of_a_run_is_the_mean_of_its_epochs_and_accelerators() -> None:
    run = [[times(0.0, 0.0), times(0.0, 2.0)], [times(0.0, 1.0), times(0.0, 1.0)]]
    assert utilization(run) == pytest.approx((1 / 3 + 1 / 5 + 1 / 4 + 1 / 4) / 4)


@pytest.mark.parametrize(("name", "count"), [("resnet50", 2), ("retinanet", 3), ("flux", 7)])
def test_as_many_accelerators_run_as_the_link_supplies(name: str, count: int) -> None:
    workload = WORKLOADS[name]
    assert workload.accelerators(USABLE) == (count, workload.step_seconds)
    assert (count + 1) * workload.batch_bytes / workload.step_seconds > USABLE


@pytest.mark.parametrize("name", ["unet3d", "dlrm"])
def test_a_step_is_longer_if_the_link_cannot_supply_one_accelerator(name: str) -> None:
    workload = WORKLOADS[name]
    count, step_seconds = workload.accelerators(USABLE)
    assert count == 1
    assert step_seconds > workload.step_seconds
    assert workload.batch_bytes / step_seconds == pytest.approx(USABLE)


def test_super_samples_are_stored_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = replace(
        WORKLOADS["flux"], schema={"data": stoker.Bytes()}, samples=noise(lambda _: repeat(1000)), copies=3
    )
    with running_bucket() as bucket:
        for name, value in bucket.environment().items():
            monkeypatch.setenv(name, value)
        mlperf.pack("s3://stoker/data", replace(workload, super_sample_bytes=4096), 20)
        with Loader("s3://stoker/data", batch_size=7, epochs=1) as loader:
            values = [bytes(value) for batch in loader for value in batch["data"]]
    assert len(values) == 21
    assert sorted(Counter(values).values()) == [3] * 7


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "unet3d"])
def test_samples_have_the_size_of_the_workload(name: str) -> None:
    workload = WORKLOADS[name]
    schema = stoker.Schema(workload.schema)
    wanted = [name in (workload.columns or schema) for name in schema]
    samples = islice(workload.samples(np.random.default_rng(0)), 4)
    for values in map(schema.encode, samples):
        sizes = [len(value) for value, is_wanted in zip(values, wanted, strict=True) if is_wanted]
        assert sum(sizes) == workload.sample_bytes


def test_sizes_of_samples_are_normally_distributed_and_within_the_limits_of_a_sample() -> None:
    sizes = list(islice(normal_bytes(UNET3D_BYTES, UNET3D_DEVIATION_BYTES, 1000)(np.random.default_rng(0)), 2000))
    assert sorted(sizes[:1000]) == sorted(sizes[1000:])
    assert sizes[:1000] != sizes[1000:]
    assert 1 <= min(sizes) < max(sizes) <= MAX_SAMPLE_BYTES
    assert np.mean(sizes) == pytest.approx(UNET3D_BYTES, rel=0.01)
    assert np.std(sizes) == pytest.approx(UNET3D_DEVIATION_BYTES, rel=0.02)
    assert np.quantile(sizes, 0.75) == pytest.approx(UNET3D_BYTES + 0.6745 * UNET3D_DEVIATION_BYTES, rel=0.01)


def test_the_data_set_of_large_samples_has_the_mean_size_of_the_workload() -> None:
    workload = WORKLOADS["unet3d"]
    sizes = normal_bytes(UNET3D_BYTES, UNET3D_DEVIATION_BYTES, workload.steps * workload.batch_size)
    drawn = list(islice(sizes(np.random.default_rng(0)), workload.steps * workload.batch_size))
    assert np.mean(drawn) == pytest.approx(workload.sample_bytes, rel=0.005)


def test_the_parameters_are_those_of_the_published_configurations() -> None:
    assert {
        name: (each.batch_size, each.step_seconds, each.min_utilization, each.sample_bytes)
        for name, each in WORKLOADS.items()
    } == {
        "unet3d": (7, 0.162, 0.90, 146_600_628),
        "resnet50": (400, 0.224, 0.90, 114_660),
        "retinanet": (24, 0.0476, 0.85, 322_957),
        "flux": (48, 1.35, 0.90, 2_164_832),
        "dlrm": (16_384, 0.000375, 0.70, 160),
    }
    assert len(FLUX) == 5
    dlrm = DLRM_READ | DLRM_UNREAD
    assert (len(DLRM_READ), len(dlrm), sum(each.element_bytes for each in dlrm.values())) == (40, 200, 761)


@pytest.mark.parametrize(
    ("measured", "predicted", "verdicts"),
    [
        (0.9, 0.919, ("90%, met", "+1.9, met")),
        (0.89, 0.95, ("90%, **missed**", "+6.0, **missed**")),
    ],
)
def test_a_row_tells_whether_the_least_utilization_is_held_and_predicted(
    measured: float, predicted: float, verdicts: tuple[str, str]
) -> None:
    figures = Figures(
        workload=WORKLOADS["flux"],
        accelerators=7,
        step_seconds=1.35,
        samples_per_second=200.0,
        predicted=[predicted - 0.01, predicted + 0.01],
        measured=[measured - 0.1, measured + 0.1],
    )
    row = dict(zip(mlperf.HEAD, figures.row, strict=True))
    assert (row["least"], row["error, points"]) == verdicts


def test_two_accelerators_share_an_epoch_and_wait_for_each_other(tmp_path: Path) -> None:
    url = str(tmp_path / "data")
    with stoker.Packer(url, schema={"data": stoker.Array("uint8", (8,))}) as packer:
        packer.extend({"data": np.full(8, number, np.uint8)} for number in range(24))
    run = Run(
        url=url, accelerators=2, batch_size=4, step_seconds=0.001, epochs=2, columns=None, memory="64MB", window=8
    )
    found = run_accelerators(run)
    assert [[len(epoch.step_seconds) for epoch in each] for each in found] == [[3, 3], [3, 3]]
    assert all(0 < epoch.accelerator_utilization <= 1 for each in found for epoch in each)


def test_an_accelerator_that_fails_ends_the_others(tmp_path: Path) -> None:
    run = Run(
        url=str(tmp_path / "none"),
        accelerators=2,
        batch_size=4,
        step_seconds=0.001,
        epochs=1,
        columns=None,
        memory="64MB",
        window=8,
    )
    with pytest.raises(stoker.errors.StokerError, match="none"):
        run_accelerators(run)


def test_measured_processor_times_are_given_to_plan_by_its_flags() -> None:
    costs = ProcessorCosts(
        cpu_per_request=1, cpu_per_gb=2, cpu_per_batch=3, cpu_per_value=4, cpu_per_gathered_gb=5, cpu_per_new_gb=6
    )
    parser = ArgumentParser()
    plan.configure(parser)
    found = vars(parser.parse_args(["url", "--gpu-rate", "1", *costs.flags]))
    assert {name: found[name] for name in asdict(costs)} == asdict(costs)
    assert [name for name in found if name.startswith("cpu_per_")] == list(asdict(costs))
