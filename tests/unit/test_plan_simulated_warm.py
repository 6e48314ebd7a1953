"""A warm tier in scenarios: what it keeps, how long reads take, what it loses, and what it costs."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from stoker import Prices
from stoker._diagnostics.latency import Constant, LateTail
from stoker.abc import ObjectRef
from stoker.errors import ConfigError
from stoker.testing import run_virtual
from stoker_sim._commands.simulate import scenario_outcome
from stoker_sim._scenario import Scenario, SimulationResult, simulate
from stoker_sim._scenario_file import read_scenario
from stoker_sim._simulated_warm import SimulatedWarmTier, WarmTierModel, WarmTierView
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode

HOUR = 3600.0
SMALL = """
nodes = 2
epochs = 3
[dataset]
super_samples = 40
samples = 10
super_sample_bytes = "8MiB"
[node]
batch_size = 10
compute = { seconds = 1.0 }
fetch = { hedge = false }
[order]
shuffle = "block"
"""
SIZE_BYTES = 8 << 20
NOTHING = memoryview(b"")


def ref(row: int, size_bytes: int = 4_000_000) -> ObjectRef:
    return ObjectRef(key=str(row), size_bytes=size_bytes, crc32c=0, row=row)


def model(code: str = "4+2", nodes: int = 12, **settings: object) -> WarmTierModel:
    given = {"bytes_per_second": 1e6, "latency": Constant(0.5), **settings}
    config = {key: given.pop(key) for key in ("keep_warm_seconds",) if key in given}
    return WarmTierModel(config=WarmConfig(nodes=nodes, code=ErasureCode.parse(code), **config), **given)  # type: ignore[arg-type]


def scenario_of(folder: Path, warm: str) -> Scenario:
    path = folder / "scenario.toml"
    path.write_text(SMALL + warm)
    return read_scenario(path).scenario


def run_of(folder: Path, warm: str) -> SimulationResult:
    return simulate(scenario_of(folder, warm))


def test_a_read_takes_a_shards_latency_and_transfer_and_the_rest_through_the_machines_network() -> None:
    async def main() -> list[float]:
        shared, loop, seconds = SimulatedWarmTier(model(), "1"), asyncio.get_running_loop(), []
        for view in (WarmTierView(shared, float("inf")), WarmTierView(shared, 2e6)):
            assert await view.read(ref(2), NOTHING) is False
            view.offer(ref(1), NOTHING)
            begun_seconds = loop.time()
            assert await view.read(ref(1), NOTHING)
            seconds.append(loop.time() - begun_seconds)
        return seconds

    assert run_virtual(main()) == pytest.approx([1.5, 3.5])


def test_the_first_shards_are_enough_so_late_ones_are_not_waited_for() -> None:
    def slowest(code: str) -> float:
        async def main() -> float:
            shared = SimulatedWarmTier(
                model(code, latency=LateTail(usual=Constant(0.1), fraction=0.02, seconds=5.0)), "1"
            )
            shared.put(ref(1))
            return sorted(shared.read_seconds(ref(1)) or 0.0 for _ in range(500))[-10]

        return run_virtual(main())

    assert slowest("4+0") > 5.0
    assert slowest("4+2") == pytest.approx(1.1)


def test_lost_shards_are_written_again_by_a_read_and_too_many_lose_the_object() -> None:
    life_seconds = HOUR

    async def main() -> tuple[int, int, float]:
        shared = SimulatedWarmTier(model(nodes=50, mean_life_seconds=life_seconds), "2")
        for row in range(300):
            shared.put(ref(row))
        await asyncio.sleep(HOUR / 4)
        found = sum(shared.read_seconds(ref(row)) is not None for row in range(300))
        tally = shared.counters(HOUR / 4)
        assert tally.hits == found
        assert tally.losses == 300 - found
        again = sum(shared.read_seconds(ref(row)) is not None for row in range(300))
        assert again == found, "what was lost is not here any more, what was read is whole"
        return found, tally.rebuilt, sum(bool(life.losses) for life in tally.lives) / 50

    found, rebuilt, gone = run_virtual(main())
    # Of 6 shards as many are lost as of all nodes.
    chances = [gone**lost * (1 - gone) ** (6 - lost) * ways for lost, ways in ((0, 1), (1, 6), (2, 15))]
    assert 0.1 < gone < 0.35
    assert found / 300 == pytest.approx(sum(chances), abs=0.06)
    assert rebuilt / 300 == pytest.approx(chances[1] + 2 * chances[2], rel=0.15)


def test_a_full_tier_lets_the_least_recently_used_go() -> None:
    async def main() -> tuple[set[int], int]:
        shared = SimulatedWarmTier(model(nodes=6, limit_bytes=3_000_000), "1")  # of three objects
        for row in (0, 1, 2):
            shared.put(ref(row))
        shared.read_seconds(ref(0))
        shared.put(ref(3))
        shared.put(ref(3))
        shared.put(ref(4, 100_000_000))
        return {row for row in range(5) if shared.read_seconds(ref(row)) is not None}, shared.counters(1.0).evicted

    assert run_virtual(main()) == ({0, 2, 3}, 1)


def test_a_longer_look_at_the_nodes_begins_as_a_shorter_one() -> None:
    asked = model(mean_life_seconds=600.0)
    short, long = (asked.simulate_lives(hours * HOUR, "1") for hours in (1, 4))
    for one, other in zip(short, long, strict=True):
        assert [at for at, _ in other.losses if at < HOUR] == [at for at, _ in one.losses]


def test_later_epochs_come_from_a_tier_that_loses_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, "[warm]\nnodes = 12\n")
    assert run.warm is not None
    assert (run.warm.losses, run.warm.rebuilt) == (0, 0)
    assert run.read_bytes == (3 * 40 - run.warm.hits) * SIZE_BYTES
    assert run.warm.hits == sum(each.tier_hits["warm"] for each in run.epochs) > 60
    assert sum(each.read_bytes for each in run.of_epoch(2)) == 0
    assert run.warm.shards == (run.warm.hits + 40) * 12
    assert run.warm.held_bytes == pytest.approx(40 * SIZE_BYTES / 10, rel=1e-5)


def test_reads_that_find_too_little_go_to_the_bucket(tmp_path: Path) -> None:
    run, usual = (run_of(tmp_path, f"[warm]\n{life}\n") for life in ("mean_life_seconds = 60", ""))
    assert run.warm is not None
    assert usual.warm is not None
    assert run.warm.losses > 0
    delivered = sum(each.tier_hits["warm"] for each in run.epochs)
    assert run.warm.hits - 2 <= delivered <= run.warm.hits < usual.warm.hits, "but for those that were late"
    assert run.read_bytes == (3 * 40 - delivered) * SIZE_BYTES > usual.read_bytes


def test_the_outcome_says_what_the_tier_did_and_cost(tmp_path: Path) -> None:
    scenario = scenario_of(tmp_path, "[warm]\nmean_life_seconds = 60\n")
    run, prices = simulate(scenario), Prices.load()
    assert run.warm is not None
    said = " ".join(scenario_outcome("x", scenario, run, prices=prices, url="s3").remarks)
    assert f"Of {run.warm.hits + run.warm.losses} reads of objects it held, {run.warm.losses} found" in said
    assert f"{run.warm.rebuilt} shards rewritten" in said
    assert f"costs ${run.warm.cost(prices.function('lambda')).dollars:.3g}" in said


def test_missing_figures_are_those_of_a_proxy_and_given_ones_are_used(tmp_path: Path) -> None:
    assert scenario_of(tmp_path, "").warm is None
    assert scenario_of(tmp_path, "[warm]\n").warm == WarmTierModel()
    warm = scenario_of(
        tmp_path,
        """
        [warm]
        nodes = 30
        code = "4+2"
        keep_warm_seconds = 120
        linger_seconds = 0.05
        mean_life_seconds = 1800
        memory_bytes = "512MiB"
        bytes_per_second = 50e6
        latency = { seconds = 0.02 }
        """,
    ).warm
    assert warm == WarmTierModel(
        config=WarmConfig(
            nodes=30,
            code=ErasureCode(4, 2),
            keep_warm_seconds=120.0,
            linger_seconds=0.05,
        ),
        memory_bytes=512 << 20,
        limit_bytes=384 << 20,
        bytes_per_second=50e6,
        latency=Constant(0.02),
        mean_life_seconds=1800.0,
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('code = "10"', "warm.code is '10', not a code"),
        ("nodes = 5", "warm: nodes must be from 12, the number of shards of code 10\\+2"),
        ("mean_life_seconds = 1", "warm.mean_life_seconds is 1, not a number"),
        ('limit_bytes = "2GiB"', "warm: limit_bytes is at most memory_bytes"),
        ("bytes_per_second = 0", "warm.bytes_per_second is 0"),
        ("keep_warm_seconds = inf", "keep_warm_seconds must be more than 0 and less than inf"),
        ("lifes = 1", "warm.lifes has no effect here"),
    ],
)
def test_a_field_that_is_wrong_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scenario_of(tmp_path, f"[warm]\n{line}\n")


@pytest.mark.parametrize("line", ["backup_seconds = 60", "put_back = 4", "together = 0.5"])
def test_a_removed_field_is_accepted_with_a_warning_that_names_it(tmp_path: Path, line: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"^warm.{line.partition(' ')[0]} has no effect, .*; leave it out"):
        assert scenario_of(tmp_path, f"[warm]\n{line}\n").warm == WarmTierModel()


def test_nodes_that_never_live_are_refused() -> None:
    with pytest.raises(ConfigError, match="mean_life_seconds"):
        WarmTierModel(mean_life_seconds=0.0)


def test_the_same_seed_draws_the_same() -> None:
    def drawn(seed: str) -> list[float | None]:
        async def main() -> list[float | None]:
            shared = SimulatedWarmTier(WarmTierModel(mean_life_seconds=2 * HOUR), seed)
            rows = list(range(20))
            random.Random(1).shuffle(rows)
            for row in rows:
                shared.put(ref(row))
            await asyncio.sleep(HOUR / 2)
            return [shared.read_seconds(ref(row)) for row in rows]

        return run_virtual(main())

    assert drawn("1") == drawn("1") != drawn("2")
