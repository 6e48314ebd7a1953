"""What a cluster cache holds, and the reads that it saves."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

import stoker
from stoker import Operation
from stoker._cost.cluster import ClusterCapacity
from stoker._cost.usage import training_traffic
from stoker._format.versions import publish
from stoker.cli import main
from stoker.errors import ConfigError
from stoker_sim._bucket import synthetic_manifest
from support.cases import for_each

MIB = 1 << 20


def share(machines: int, limit_bytes: int, objects: int = 39, size_bytes: int = 39 * 2 * MIB) -> float:
    return ClusterCapacity(machines=machines, limit_bytes=limit_bytes).held_share(objects, size_bytes)


def test_one_machine_holds_whole_objects_up_to_its_limit() -> None:
    assert share(1, 19 * MIB) == 9 / 39
    assert share(1, 39 * 2 * MIB) == share(1, 1 << 50) == 1.0
    assert share(1, 2 * MIB - 1) == 0.0


def test_an_object_takes_whole_pages() -> None:
    assert share(1, 8192, objects=2, size_bytes=2 * 4097) == 0.5


def test_no_objects_are_not_held() -> None:
    assert share(3, 1, objects=0, size_bytes=0) == 0.0


@for_each("machines", [2, 8])
@for_each("part", [0.3, 0.8, 1.0, 1.1, 1.5])
def test_machines_hold_what_random_places_leave_room_for(machines: int, part: float) -> None:
    objects = 200
    limit_bytes = int(part * objects / machines * MIB)
    rng = np.random.default_rng(0)
    places = rng.multinomial(objects, [1 / machines] * machines, 2000)
    drawn = np.minimum(places, limit_bytes // MIB).sum(axis=1).mean() / objects
    assert share(machines, limit_bytes, objects, objects * MIB) == pytest.approx(drawn, abs=0.01)


@pytest.mark.parametrize("machines", [1, 2, 8, 64])
def test_a_sufficient_limit_holds_all(machines: int) -> None:
    for objects in (1, 39, 1000, 62_500):
        enough = ClusterCapacity(machines=machines, limit_bytes=1).sufficient_bytes(objects, objects * MIB)
        assert share(machines, enough, objects, objects * MIB) > 0.998
        assert enough <= objects * MIB


def test_a_limit_of_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="limit_bytes must be at least 1, not 0"):
        ClusterCapacity(machines=2, limit_bytes=0)


def test_what_is_held_is_read_once_in_all_epochs() -> None:
    options = {"epochs": 90, "ranks": 8}
    all_held, none_held, half = (
        training_traffic(1000, 1000 * MIB, **options, held_share=held)  # type: ignore[arg-type]
        for held in (1.0, 0.0, 0.5)
    )
    assert all_held.requests[Operation.GET] == 8 + 1000
    assert all_held.read_bytes == 1000 * MIB
    assert none_held.requests[Operation.GET] == 8 + 90 * 1007
    assert half.read_bytes == (all_held.read_bytes + none_held.read_bytes) / 2
    with pytest.raises(ConfigError, match=r"held_share \(1.5\)"):
        training_traffic(1000, 1000 * MIB, epochs=1, ranks=1, held_share=1.5)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return publish_manifest(str(tmp_path_factory.mktemp("data")))


def publish_manifest(url: str) -> str:
    """Write the manifest of a data set of 8 GB."""

    async def write() -> None:
        store = stoker.open_store(url)
        await publish(store, synthetic_manifest(super_samples=1000, samples=100, super_sample_bytes=8 * MIB))
        await store.close()

    asyncio.run(write())
    return url


def test_the_command_compares_the_cost_with_and_without_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["cost", url, "--store", "s3", "--egress", "internet", "--nodes", "4", "--epochs", "10", "--json"]
    assert main(run) == 0
    without = json.loads(capsys.readouterr().out)
    assert main([*run, "--cluster", "memory:?limit=1000MiB"]) == 0
    found = json.loads(capsys.readouterr().out)
    compared = found["cluster"]
    assert compared["held_share"] == 0.5
    saved = compared["without"]["dollars"] - compared["with_cluster"]["dollars"]
    assert without["dollars"] - found["dollars"] == pytest.approx(saved)
    read_bytes = 1000 * 8 * MIB * (0.5 + 0.5 * 10 * 1.003)
    assert compared["with_cluster"]["read_bytes"] == pytest.approx(read_bytes)
    assert compared["without"]["read_bytes"] == pytest.approx(1000 * 8 * MIB * 10 * 1.003)
    assert main([*run[:-1], "--cluster", "memory:?limit=1000MiB"]) == 0
    text = capsys.readouterr().out
    assert " a node: 50.0% of the data set on 4 nodes; " in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cluster", "memory:?limit=1MB"], "977 KiB on each node keeps no super-sample of 8.00 MiB"),
        (["--cluster", "64GB"], "write for example memory:?limit=64GB"),
        (["--cluster", "memory:?limit=-1"], "write for example memory:?limit=64GB"),
    ],
)
def test_a_cluster_cache_that_makes_no_sense_is_an_error(
    url: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["cost", url, "--store", "s3", *flags])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code
    assert message in capsys.readouterr().err
