"""Predictions with a cluster cache: what it holds, what later epochs read of the bucket, and between machines."""

from __future__ import annotations

import asyncio
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import stoker
from stoker import OrderConfig
from stoker._fetch.config import PipelineConfig
from stoker._format.versions import publish
from stoker._order.order import Shuffle
from stoker.cli import main
from stoker.errors import ConfigError
from stoker_local import running_bucket
from stoker_sim import BucketModel
from stoker_sim._advice import Resources, advise
from stoker_sim._bucket import synthetic_manifest
from stoker_sim._cluster import ClusterModel
from stoker_sim._full import predict_full
from stoker_sim._predict import predict
from stoker_sim._scenario import Scenario, simulate
from stoker_sim._training import PlannedTraining

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
SUPER_SAMPLES = 200
MANIFEST = synthetic_manifest(super_samples=SUPER_SAMPLES, samples=100, super_sample_bytes=MIB)


def workload(
    share: float | None = 1.0,
    *,
    nodes: int = 2,
    shuffle: Shuffle = "window",
    rate: float = 1e6,
    network: float = 1e9,
    memory: int = 40 * MIB,
) -> PlannedTraining:
    """Return a training whose nodes hold this fraction of the data set each; None for no cluster cache."""
    limit_bytes = None if share is None else int(share * SUPER_SAMPLES * MIB)
    return PlannedTraining(
        manifest=MANIFEST,
        feed=PipelineConfig(
            order=OrderConfig(seed=1, shuffle=shuffle, window=4, lanes=nodes),
            batch_size=100,
            world_size=nodes,
            memory_bytes=memory,
        ),
        samples_per_second=rate,
        bucket=BucketModel(connection_bytes_per_second=20e6),
        node_bytes_per_second=50e6,
        cluster=(
            limit_bytes and ClusterModel(machines=nodes, limit_bytes=limit_bytes, network_bytes_per_second=network)
        )
        or None,
    )


def test_what_all_machines_hold_is_read_once() -> None:
    found = predict(workload())
    assert found.first.read_bytes == SUPER_SAMPLES * MIB
    assert found.later.read_bytes == found.later.requests == 0
    assert found.cluster is not None
    assert (found.cluster.held_share, found.cluster.remote_share) == (1.0, 0.5)
    assert found.cluster.later_network_bytes == pytest.approx(SUPER_SAMPLES * MIB / 2, rel=0.02)
    assert found.later.seconds < found.first.seconds / 10


def test_what_does_not_fit_is_read_in_each_epoch() -> None:
    none, half = predict(workload(None)), predict(workload(0.25))
    assert half.hit_rate == pytest.approx(0.5, abs=0.01)
    assert half.later.read_bytes == pytest.approx(none.later.read_bytes / 2, rel=0.01)
    assert half.later.seconds == pytest.approx(none.later.seconds / 2, rel=0.15)
    assert half.first.read_bytes == pytest.approx(SUPER_SAMPLES * MIB, rel=0.01)
    assert none.cluster is None


def test_one_machine_reads_nothing_from_others() -> None:
    found = predict(workload(nodes=1))
    assert found.cluster is not None
    assert found.cluster.remote_share == found.cluster.later_network_bytes == found.bound.network_seconds == 0.0


@pytest.mark.parametrize("shuffle", ["window", "full"])
def test_the_network_between_machines_is_a_limit(shuffle: Shuffle) -> None:
    slow = workload(shuffle=shuffle, network=10e6)
    found = (predict_full if shuffle == "full" else predict)(slow)
    assert found.bound.limit == "network"
    assert found.later.seconds >= (1 - 1e-9) * found.bound.seconds
    assert found.bound.seconds == pytest.approx(SUPER_SAMPLES * MIB / 2 / 2 / 10e6)


def test_full_reads_all_once_and_all_heads_before() -> None:
    found = predict_full(workload(shuffle="full"))
    assert found.first.read_bytes == SUPER_SAMPLES * (MIB + 4096)
    assert found.first.requests == SUPER_SAMPLES * 2
    assert found.later.read_bytes == 0
    assert found.first.seconds > SUPER_SAMPLES * MIB / 100e6
    assert found.cluster is not None
    assert found.cluster.first_network_bytes == 2 * found.cluster.later_network_bytes


def test_full_takes_as_long_for_a_data_set_that_is_scaled_down(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = predict_full(workload(shuffle="full", rate=3000)).first.seconds
    monkeypatch.setattr("stoker_sim._full._MAX_FETCHES", 100)
    assert predict_full(workload(shuffle="full", rate=3000)).first.seconds == pytest.approx(whole, rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share": 0.001}, r"205 KiB on each node keeps no super-sample of 1.00 MiB"),
        ({"share": 0.3, "shuffle": "full"}, r"limit= of \d+ \(.* MiB\) on each of 2 nodes does, 60.0 MiB holds 60.0%"),
        ({"share": None, "shuffle": "full"}, r"not planned without a cluster cache \(--cluster\)"),
        ({"shuffle": "full", "memory": 300 * MIB}, r"fits into a loader's memory of 314,572,800"),
    ],
)
def test_what_cannot_be_planned_names_the_figures(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predict_full(workload(**change))  # type: ignore[arg-type]


def test_columns_are_not_kept() -> None:
    with pytest.raises(ConfigError, match="plan without a cluster cache, or with all columns"):
        replace(workload(), read_shares=(0.1,))


def test_advice_tells_what_the_machines_hold_and_needs_no_other_cache() -> None:
    found = advise(workload(0.25), Resources(memory_bytes=1 << 30))
    told = {each.name: each for each in found.suggestions}
    text = told["cluster"].reason
    assert re.fullmatch(
        r"100.* MiB, 50.0% of the data set, on 2 nodes; limit=\d+MiB a node is enough for all of it", text
    )
    assert told["cache"].reason == "the cluster cache serves 50% of the reads of later epochs"
    (only,) = advise(workload(shuffle="full"), Resources(memory_bytes=1 << 30)).suggestions
    assert only.reason == "200 MiB, 100.0% of the data set, on 2 nodes"


def scenario(share: float) -> Scenario:
    found = workload(share, nodes=4)
    names = ("manifest", "feed", "bucket", "cluster", "node_bytes_per_second")
    return Scenario(epochs=3, **{name: getattr(found, name) for name in names})


@pytest.mark.parametrize(("share", "held"), [(0.5, 1.0), (0.1, 0.4)])
def test_a_simulated_cluster_holds_the_part_that_is_predicted(share: float, held: float) -> None:
    run = simulate(scenario(share))
    assert run.epochs == simulate(scenario(share)).epochs
    assert run.read_bytes / MIB == pytest.approx(SUPER_SAMPLES * (held + 3 * (1 - held)), rel=0.08)


def test_the_commands_of_the_page_print_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/planning.md").read_text("utf-8")
    shown = re.findall(r"^\$ stoker (plan .*)\n((?:[^`\n].*\n|\n)*)```", page, re.MULTILINE)
    assert len(shown) == 2
    with running_bucket() as bucket:
        for name, value in bucket.environment().items():
            monkeypatch.setenv(name, value)
        manifest = synthetic_manifest(super_samples=15_625, samples=213, super_sample_bytes=32_000_000)

        async def write() -> None:
            store = stoker.open_store("s3://stoker/images")
            await publish(store, manifest)
            await store.close()

        asyncio.run(write())
        for command, output in shown:
            assert main(shlex.split(command)) == 0
            found = capsys.readouterr().out
            assert {line for line in output.splitlines() if line not in found.splitlines()} <= {"  ..."}
