"""What the same reads cost from each place that may hold the data, by examples computed by hand."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker import Prices, cli
from stoker._cost import workload
from stoker._cost.prices import GB_BYTES, CachePrices
from stoker._cost.tiers import TierComparison, TierCost
from stoker._cost.workload import ReadWorkload, WarmFunctions
from stoker.errors import ConfigError
from stoker_functions import _warm_node
from stoker_warm import _shard
from stoker_warm._config import WarmConfig
from stoker_warm._erasure import ErasureCode

PRICES = Prices.load()
LAMBDA, S3 = PRICES.function("lambda"), PRICES.store("s3")
PAGE = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text("utf-8")
WORK = ReadWorkload(size_bytes=10 * GB_BYTES, reads=12_800, hours=73, object_bytes=8 << 20)
"""1,280 objects of 8 MiB, each read ten times, in a tenth of a month."""


def costs(work: ReadWorkload = WORK, **settings: Any) -> dict[str, TierCost]:
    """Return what each place costs, by its name."""
    settings = {"prices": PRICES, "store": S3, "functions": LAMBDA, **settings}
    return {each.place: each for each in TierComparison(work=work, **settings).costs()}


def dollars(place: str, work: ReadWorkload = WORK, **settings: Any) -> float:
    found = costs(work, **settings)[place].dollars
    assert found is not None
    return found


def lines(cost: TierCost) -> dict[str, float]:
    """Return the dollars of each line by its name, without those of nothing."""
    assert cost.parts is not None
    return {part.name: part.dollars for part in cost.parts if part.quantity}


FILL = 1280 * 0.4e-6
"""A GET of each object."""


def test_the_bucket_costs_a_get_for_each_read() -> None:
    bucket = costs()["bucket"]
    assert lines(bucket) == {"GET requests": pytest.approx(12_800 * 0.4e-6)}
    assert bucket.dollars_per_read == pytest.approx(0.4e-6)
    assert bucket.of == "Amazon S3 Standard"


def test_the_way_out_of_the_buckets_region_is_paid_for_each_read_of_the_bucket_and_once_for_nearer_places() -> None:
    away = replace(WORK, egress="other_region")
    assert dollars("bucket", away) == pytest.approx(12_800 * 0.4e-6 + 100 * 0.02)
    for place in costs().keys() - {"bucket"}:
        assert dollars(place, away) - dollars(place) == pytest.approx(10 * 0.02), place


def test_a_bucket_of_one_zone_is_written_once_and_charges_for_bytes_and_time() -> None:
    assert lines(costs()["bucket in one zone"]) == {
        "filling: GET requests": pytest.approx(FILL),
        "PUT requests": pytest.approx(1280 * 1.13e-6),
        "upload": pytest.approx(10 * 0.0032),
        "data at rest": pytest.approx(10 * 0.11 * 0.1),
        "GET requests": pytest.approx(12_800 * 0.03e-6),
        "retrieval": pytest.approx(100 * 0.0006),
    }


def test_a_bucket_of_one_zone_is_not_compared_with_itself() -> None:
    assert "bucket in one zone" not in costs(store=PRICES.store("s3express"))


def test_each_trainer_fills_a_disk_and_memory_of_its_own() -> None:
    assert dollars("disk of each trainer") == pytest.approx(FILL + 10 * 0.08 * 0.1)
    assert dollars("memory of each trainer") == pytest.approx(FILL)
    four = replace(WORK, trainers=4)
    assert dollars("disk of each trainer", four) == pytest.approx(4 * (FILL + 10 * 0.08 * 0.1))
    assert dollars("memory of each trainer", four) == pytest.approx(4 * FILL)
    assert dollars("stoker tier serve", four) == dollars("stoker tier serve")


def test_a_trainer_keeps_no_more_than_it_reads() -> None:
    few = replace(WORK, trainers=20)  # 640 objects each, half of them
    assert dollars("memory of each trainer", few) == pytest.approx(20 * 640 * 0.4e-6)
    assert dollars("disk of each trainer", few) == pytest.approx(20 * (640 * 0.4e-6 + 5 * 0.08 * 0.1))


def test_the_disk_and_the_trainer_s_memory_are_shown_if_known() -> None:
    found = costs(disk=PRICES.disk("pd-standard"), trainer=PRICES.machine("g6.xlarge"))
    assert dollars("disk of each trainer", disk=PRICES.disk("pd-standard")) == pytest.approx(FILL + 10 * 0.04 * 0.1)
    assert found["disk of each trainer"].limit == "the disk's rate; each trainer fills its own"
    assert costs()["disk of each trainer"].limit == "125 MB/s a disk; each trainer fills its own"
    assert found["memory of each trainer"].limit == "10 GiB of free memory on each trainer, which has 16 GiB"


@pytest.mark.parametrize(
    ("gigabytes", "count", "machine", "dollars_per_hour"),
    [
        (10, 1, "AWS r7g.large", 0.1071),
        (14.4, 1, "AWS r7g.large", 0.1071),  # nine tenths of 16
        (15, 1, "AWS r7g.xlarge", 0.2142),  # as much as two of the smaller ones, and one machine
        (40, 3, "AWS r7g.large", 0.3213),
    ],
)
def test_servers_are_the_cheapest_machines_whose_memory_holds_everything(
    gigabytes: float, count: int, machine: str, dollars_per_hour: float
) -> None:
    work = replace(WORK, size_bytes=gigabytes * GB_BYTES)
    found = costs(work)["stoker tier serve"]
    assert (found.count, found.of) == (count, machine)
    assert found.dollars == pytest.approx(work.objects * 0.4e-6 + 73 * dollars_per_hour)


def test_a_managed_cache_is_the_cheapest_that_holds_everything() -> None:
    found = costs(replace(WORK, size_bytes=19 * GB_BYTES))["managed Valkey or Redis"]
    assert (found.count, found.of) == (1, "Amazon ElastiCache for Valkey, cache.r7g.xlarge")
    assert found.dollars == pytest.approx(2432 * 0.4e-6 + 73 * 0.3496)
    small = replace(WORK, size_bytes=0.5 * GB_BYTES, reads=64)  # each object once, 0.5 GB moved
    found = costs(small)["managed Valkey or Redis"]
    assert found.of == "Amazon ElastiCache Serverless for Valkey"
    assert found.dollars == pytest.approx(64 * 0.4e-6 + 0.5 * 73 * 0.084 + 0.5 * 0.00241)


def test_nodes_of_a_cache_are_as_many_as_hold_everything() -> None:
    cache = CachePrices(name="c", region="r", source="s", dollars_per_node_hour=1.0, node_gb=4)
    assert [cache.nodes(size * GB_BYTES) for size in (1, 4, 4.1, 9)] == [1, 1, 2, 3]
    assert replace(cache, node_gb=0.0).nodes(9 * GB_BYTES) == 0


def test_what_the_price_file_lacks_in_a_region_has_no_price() -> None:
    found = costs(functions=replace(LAMBDA, region="eu-north-1"))
    unpriced = {place for place, cost in found.items() if cost.dollars is None}
    assert unpriced == {
        "bucket in one zone",
        "disk of each trainer",
        "stoker tier serve",
        "managed Valkey or Redis",
    }
    assert all(found[place].limit == "the price file has no price for eu-north-1" for place in unpriced)
    assert all(found[place].dollars_per_read is None for place in unpriced)


def warm_use(work: ReadWorkload, warm: WarmFunctions) -> dict[str, tuple[float, float]]:
    """Return quantity and dollars of each line of warm functions, by its name."""
    return {
        part.name.removeprefix("warm tier, "): (part.quantity, part.dollars) for part in warm.bill_lines(work, LAMBDA)
    }


def test_reads_that_are_far_apart_each_wake_all_their_nodes_for_the_linger() -> None:
    work, warm = replace(WORK, reads=100, hours=1000), WarmFunctions()
    found = warm_use(work, warm)
    stay_seconds = 0.25 + 0.025 + (8 << 20) / 10 / 75e6
    calls, _ = found["serving: requests"]
    assert calls == pytest.approx(1200, rel=1e-3)
    seconds = math.ceil(stay_seconds * 1000) / 1000
    assert found["serving: running"][0] == pytest.approx(calls * seconds * 1.5, rel=1e-3)
    assert sum(dollars for name, (_, dollars) in found.items() if name.startswith("serving")) / 100 == pytest.approx(
        12 * (0.2e-6 + seconds * 1.5 * 0.0000166667), rel=1e-3
    )


def test_nodes_that_are_not_asked_are_called_once_a_minute() -> None:
    found = warm_use(replace(WORK, reads=1, hours=1000), WarmFunctions())
    assert found["keeping warm: requests"][0] == pytest.approx(12 * 1000 * 60, rel=1e-3)
    assert found["keeping warm: running"][0] == pytest.approx(12 * 1000 * 60 * 0.002 * 1.5, rel=1e-3)


def test_nodes_that_are_always_asked_never_sleep() -> None:
    found = warm_use(replace(WORK, reads=36_000_000, hours=1), WarmFunctions())
    assert found["serving: running"][0] == pytest.approx(12 * 3600 * 1.5)
    assert found["serving: requests"][0] == pytest.approx(12 * 3600 / 900)
    assert found["keeping warm: requests"][0] == 0


def test_nodes_are_as_many_as_hold_the_shards_and_at_least_one_a_shard() -> None:
    warm = WarmFunctions()
    assert warm.nodes(WORK) == 12  # 10 GiB and parity have room in 9.2
    shards = 12 * 12_800 * ((8 << 20) / 10 + 768)
    assert warm.nodes(replace(WORK, size_bytes=100 * GB_BYTES)) == math.ceil(shards / ((1536 - 192) << 20)) == 92
    with pytest.raises(ConfigError, match="has no room for shards; give it at least 256MiB"):
        WarmFunctions(memory_bytes=float(128 << 20)).nodes(WORK)


def test_functions_whose_processors_are_billed_apart_have_them_in_the_bill() -> None:
    run = PRICES.function("cloud-run")
    names = {part.name for part in WarmFunctions(vcpus=1.0).bill_lines(WORK, run)}
    assert "warm tier, serving: processors" in names
    assert not any("processors" in part.name for part in WarmFunctions(vcpus=1.0).bill_lines(WORK, LAMBDA))


def test_what_is_assumed_of_warm_functions_is_what_they_do() -> None:
    config, assumed = WarmConfig(), WarmFunctions()
    assert workload.NODE_RESERVED_BYTES == _warm_node.RESERVED_BYTES
    assert workload.SHARD_OVERHEAD_BYTES == _shard.SHARD_OVERHEAD_BYTES
    assert (assumed.linger_seconds, assumed.keep_warm_seconds) == (config.linger_seconds, config.keep_warm_seconds)
    assert str(ErasureCode(assumed.data_shards, assumed.parity_shards)) == str(config.code)


@pytest.mark.parametrize(
    "wrong", [{"size_bytes": 0}, {"reads": 0}, {"hours": -1}, {"trainers": 0}, {"reads": math.inf}]
)
def test_a_workload_of_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ReadWorkload(**{"size_bytes": 1.0, "reads": 1.0, "hours": 1.0, **wrong})  # type: ignore[arg-type]


OF_THE_PAGE = ReadWorkload(size_bytes=33e9, reads=197_500, hours=50)


def test_33_gb_that_are_read_197500_times_in_50_hours() -> None:
    found = costs(OF_THE_PAGE)
    assert {place: round(cost.dollars or 0.0, 2) for place, cost in found.items()} == {
        "bucket": 0.08,
        "bucket in one zone": 1.27,
        "disk of each trainer": 0.17,
        "memory of each trainer": 0.0,
        "stoker tier serve": 16.07,
        "managed Valkey or Redis": 34.92,
        "warm functions": 16.37,
    }


def test_the_page_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STOKER_PRICES", raising=False)
    found = re.search(r"^\$ stoker (cost --compare-tiers.*)\n((?:.+\n)*?)```", PAGE, re.MULTILINE)
    assert found
    assert cli.main(shlex.split(found[1])) == 0
    assert capsys.readouterr().out == found[2]


def test_the_figures_in_the_pages_text_are_the_commands() -> None:
    away, text = replace(OF_THE_PAGE, egress="other_region"), PAGE.replace("\n  ", " ")
    for said, place in (
        ("cost ${} from the bucket", "bucket"),
        ("${} from `stoker tier serve`", "stoker tier serve"),
        ("${} from warm functions", "warm functions"),
        ("Memory (${})", "memory of each trainer"),
        ("disks (${})", "disk of each trainer"),
        ("a bucket of one zone (${})", "bucket in one zone"),
    ):
        assert said.format(f"{dollars(place, away):.2f}") in text
    short = dollars("warm functions", OF_THE_PAGE, warm=WarmFunctions(linger_seconds=0.05))
    assert f"`--linger 0.05` brings these reads to ${short:.2f}" in text
    reads = dollars("stoker tier serve", OF_THE_PAGE) / 0.4e-6
    assert f"from {reads / 1e6:.0f} million reads in 50 hours on" in text
    awake = WarmFunctions().nodes(OF_THE_PAGE) * 1.5 * 3600 * LAMBDA.dollars_per_gb_second
    assert f"sleep cost ${awake:.2f} an hour, all {WarmFunctions().nodes(OF_THE_PAGE)} of them" in text
    per_read = costs(OF_THE_PAGE)["warm functions"].dollars_per_read
    assert per_read is not None
    assert f"${per_read:.5f}, as much as {per_read / 0.4e-6:.0g} GETs".replace("2e+02", "200") in text
