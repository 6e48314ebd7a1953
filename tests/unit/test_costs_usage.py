"""The lines of a bill: each kind of use by itself."""

from __future__ import annotations

from typing import Any

import pytest

import stoker
from stoker import Operation, Prices
from stoker._cost.prices import GB_BYTES
from stoker._cost.usage import (
    BillLine,
    FunctionUsage,
    MachineUsage,
    StorageUsage,
    Traffic,
    WarmTierUsage,
    packing_traffic,
    total_dollars,
    training_traffic,
)
from stoker._stores.object_store import MemoryStore
from stoker.abc import Buffer, ObjectInfo
from stoker.errors import ConfigError
from stoker_torch import Loader
from support.datasets import pack_numbers

PRICES = Prices.load()
S3, EXPRESS, LAMBDA = PRICES.store("s3"), PRICES.store("s3express"), PRICES.function("lambda")


def lines(parts: list[BillLine]) -> dict[str, tuple[float, float]]:
    """Return quantity and dollars of each line by its name."""
    assert len({part.name for part in parts}) == len(parts)
    return {part.name: (part.quantity, part.dollars) for part in parts}


def near(quantity: float, dollars: float) -> Any:
    return pytest.approx((quantity, dollars))


@pytest.mark.parametrize(("quantity", "dollars"), [(float("inf"), 1.0), (1.0, float("nan"))])
def test_a_line_beyond_counting_is_refused(quantity: float, dollars: float) -> None:
    with pytest.raises(ConfigError, match=r"disks: .* are not finite"):
        BillLine("disks", quantity, "GB", dollars)


def test_data_at_rest_costs_its_gb_months() -> None:
    assert lines(StorageUsage(size_bytes=10 * GB_BYTES, months=3).bill_lines(S3)) == {
        "data at rest": near(30, 30 * 0.023)
    }


def test_each_operation_is_a_line_and_bytes_are_where_they_are_not_free() -> None:
    used = Traffic(
        requests={Operation.GET: 1000, Operation.PUT: 10}, read_bytes=4 * GB_BYTES, written_bytes=2 * GB_BYTES
    )
    assert lines(used.bill_lines(S3)) == {"GET requests": near(1000, 0.0004), "PUT requests": near(10, 0.00005)}
    assert lines(used.bill_lines(EXPRESS)) == {
        "GET requests": near(1000, 0.00003),
        "PUT requests": near(10, 0.0000113),
        "retrieval": near(4, 4 * 0.0006),
        "upload": near(2, 2 * 0.0032),
    }


def test_a_reader_in_another_region_pays_for_the_way() -> None:
    used = Traffic(read_bytes=5 * GB_BYTES, egress="other_region")
    assert lines(used.bill_lines(S3)) == {"egress, other region": near(5, 0.1)}


def test_traffic_adds_up_if_the_reader_is_the_same() -> None:
    one = Traffic(requests={Operation.GET: 1}, read_bytes=2)
    other = Traffic(requests={Operation.PUT: 3, Operation.GET: 4}, written_bytes=5)
    assert one + other == Traffic(requests={Operation.GET: 5, Operation.PUT: 3}, read_bytes=2, written_bytes=5)
    with pytest.raises(ConfigError, match="cannot add traffic with egress same_region and internet"):
        one + Traffic(egress="internet")


def test_a_machine_that_waits_costs_as_much_as_one_that_computes() -> None:
    used = MachineUsage(nodes=4, compute_hours=10, wait_hours=0.5, disk_bytes=100 * GB_BYTES, disk_months=2)
    g6 = PRICES.machine("g6.xlarge")
    assert lines(used.time_lines(g6)) == {
        "computing": near(40, 40 * 0.8048),
        "waiting for data": near(2, 2 * 0.8048),
    }
    assert lines(used.disk_lines(PRICES.disk("gp3"))) == {"disks": near(800, 64.0)}


def test_a_job_may_have_some_of_a_machines_accelerators() -> None:
    p5 = PRICES.machine("p5.48xlarge")
    two = MachineUsage(nodes=1, accelerators=2, compute_hours=1)
    assert lines(two.time_lines(p5))["computing"] == near(1, 2 * 6.88)
    for accelerators in (0, 9):
        with pytest.raises(ConfigError, match="has 8 accelerators"):
            MachineUsage(nodes=1, accelerators=accelerators, compute_hours=1).time_lines(p5)


def test_functions_pay_for_requests_memory_processors_and_init() -> None:
    used = FunctionUsage(calls=1e6, seconds=2, memory_bytes=2 * GB_BYTES, cold_starts=1000, init_seconds=0.5)
    assert lines(used.bill_lines(LAMBDA)) == {
        "functions: requests": near(1e6, 0.2),
        "functions: running": near(4e6, 4e6 * 0.0000166667),
        "functions: INIT": near(1000, 1000 * 0.0000166667),
    }
    on_cloud_run = FunctionUsage(calls=10, seconds=1, memory_bytes=GB_BYTES, vcpus=2).bill_lines(
        PRICES.function("cloud-run")
    )
    assert lines(on_cloud_run)["functions: running"] == near(10, 10 * 0.0000025)
    assert lines(on_cloud_run)["functions: processors"] == near(20, 20 * 0.000024)


def test_each_call_is_rounded_up_with_its_init() -> None:
    used = FunctionUsage(calls=1000, seconds=0.12, memory_bytes=GB_BYTES, vcpus=1, cold_starts=10, init_seconds=0.1)
    found = lines(used.bill_lines(PRICES.function("cloud-run")))
    assert found["functions: running"] == near(200, 200 * 0.0000025)
    assert found["functions: INIT"] == near(1, 0.0000025)  # 0.22 s are billed as 0.3
    assert found["functions: processors"] == near(201, 201 * 0.000024)
    assert lines(used.bill_lines(LAMBDA))["functions: running"] == near(120, 120 * 0.0000166667)


def test_what_a_month_uses_beyond_a_tier_is_cheaper() -> None:
    used = FunctionUsage(calls=7e9, seconds=1, memory_bytes=GB_BYTES, cold_starts=1e9, init_seconds=1)
    found = lines(used.bill_lines(LAMBDA))
    assert found["functions: running"] == near(7e9, 6e9 * 0.0000166667 + 1e9 * 0.000015)
    assert found["functions: INIT"] == near(1e9, 1e9 * 0.000015)
    in_two_months = FunctionUsage(calls=7e9, seconds=1, memory_bytes=GB_BYTES, months=2)
    assert lines(in_two_months.bill_lines(LAMBDA))["functions: running"] == near(7e9, 7e9 * 0.0000166667)


def test_tmp_is_paid_beyond_what_is_free_and_is_refused_where_there_is_none() -> None:
    used = FunctionUsage(
        calls=1000, seconds=2, memory_bytes=GB_BYTES, tmp_bytes=2.5 * GB_BYTES, cold_starts=10, init_seconds=1
    )
    assert lines(used.bill_lines(LAMBDA))["functions: /tmp"] == near(4020, 4020 * 0.0000000309)
    with pytest.raises(ConfigError, match=r"Google Cloud Run, .*: there is no price of /tmp, files are in memory"):
        used.bill_lines(PRICES.function("cloud-run"))


def test_a_call_costs_what_the_price_file_says_of_an_invocation() -> None:
    parts = FunctionUsage(calls=1, seconds=3, memory_bytes=GB_BYTES, vcpus=1).bill_lines(LAMBDA)
    assert total_dollars(parts) == pytest.approx(LAMBDA.invocation_dollars(seconds=3, memory_bytes=GB_BYTES, vcpus=1))


def test_a_warm_tier_pays_for_keeping_warm_and_serving() -> None:
    used = WarmTierUsage(
        functions=400,
        memory_bytes=1.5 * GB_BYTES,
        hours=50,
        warm_seconds=0.1,
        served_bytes=75e9,
        serve_calls=1000,
    )
    found = lines(used.bill_lines(LAMBDA))
    assert found["warm tier, keeping warm: requests"] == near(1.2e6, 0.24)
    assert found["warm tier, keeping warm: running"] == near(180_000, 3.000006)  # as section 5 has of InfiniCache
    assert found["warm tier, serving: requests"] == near(1000, 0.0002)
    assert found["warm tier, serving: running"] == near(1500, 1500 * 0.0000166667)


def test_a_warm_tier_buys_latency_not_money() -> None:
    served = WarmTierUsage(
        functions=1, memory_bytes=1.5 * GB_BYTES, hours=1, served_bytes=1e12, serve_calls=1e12 / (8 << 20)
    )
    gets = Traffic(requests={Operation.GET: 1e12 / (8 << 20)}, read_bytes=1e12)
    assert total_dollars(served.bill_lines(LAMBDA)) > 5 * total_dollars(gets.bill_lines(S3))


def test_a_warm_tier_that_does_nothing_else_is_only_kept_warm() -> None:
    names = [part.name for part in WarmTierUsage(functions=1, memory_bytes=1, hours=1).bill_lines(LAMBDA)]
    assert names == ["warm tier, keeping warm: requests", "warm tier, keeping warm: running"]


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_what_cannot_be_used_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="size_bytes must be a finite number of at least 0"):
        StorageUsage(size_bytes=wrong)
    with pytest.raises(ConfigError, match="requests must be a finite number of at least 0"):
        Traffic(requests={Operation.GET: wrong})
    with pytest.raises(ConfigError, match="wait_hours must be a finite number of at least 0"):
        MachineUsage(nodes=1, wait_hours=wrong)
    with pytest.raises(ConfigError, match="seconds must be a finite number of at least 0"):
        FunctionUsage(calls=1, seconds=wrong, memory_bytes=1)
    with pytest.raises(ConfigError, match="hours must be a finite number of at least 0"):
        WarmTierUsage(functions=1, memory_bytes=1, hours=wrong)


def test_a_reader_is_somewhere_and_periods_are_not_nothing() -> None:
    with pytest.raises(ConfigError, match=r"egress must be one of same_region, .* not 'moon'"):
        Traffic(egress="moon")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="more than 0"):
        WarmTierUsage(functions=1, memory_bytes=1, hours=1, warm_every_seconds=0)


def test_an_epoch_reads_each_super_sample_once_and_those_that_are_cut_twice() -> None:
    once = training_traffic(100, 10_000, epochs=1, ranks=1)
    assert (once.requests[Operation.GET], once.read_bytes) == (101, 10_000)
    more = training_traffic(100, 10_000, epochs=3, ranks=4)
    assert more.requests[Operation.GET] == 4 + 3 * 103
    assert more.read_bytes == pytest.approx(3 * 10_300)
    cached = training_traffic(100, 10_000, epochs=3, ranks=4, hit_rate=0.5)
    assert cached.requests[Operation.GET] == 4 + 2 * 103
    assert training_traffic(0, 0, epochs=1, ranks=2).requests[Operation.GET] == 2
    for wrong in ({"epochs": 0, "ranks": 1}, {"epochs": 1, "ranks": 0}, {"epochs": 1, "ranks": 1, "hit_rate": 1.1}):
        with pytest.raises(ConfigError, match="at least 1"):
            training_traffic(1, 1, **wrong)


def test_that_is_what_loaders_plan() -> None:
    url = pack_numbers(500)
    planned = []
    for rank in range(3):
        with Loader(url, batch_size=20, rank=rank, world_size=3) as loader:
            planned.append((loader.plan.get_requests, loader.plan.read_bytes))
            super_samples, size_bytes = len(loader.manifest), loader.manifest.size_bytes
    reckoned = training_traffic(super_samples, size_bytes, epochs=1, ranks=3)
    requests, read_bytes = (sum(each) for each in zip(*planned, strict=True))
    assert requests == pytest.approx(reckoned.requests[Operation.GET] - 3, abs=3)
    assert read_bytes == pytest.approx(reckoned.read_bytes, rel=0.05)


def test_packing_writes_each_super_sample_and_little_more() -> None:
    assert packing_traffic(100, 10_000) == Traffic(requests={Operation.PUT: 118}, written_bytes=10_000)


@pytest.mark.parametrize("super_samples", [1, 7, 8, 100, 400])
def test_packing_writes_what_is_reckoned(super_samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []
    put = MemoryStore.put

    async def counted_put(self: MemoryStore, key: str, data: Buffer, **conditions: Any) -> ObjectInfo:
        writes.append(key)
        return await put(self, key, data, **conditions)

    monkeypatch.setattr(MemoryStore, "put", counted_put)
    url = f"memory://writes-{super_samples}"
    with stoker.Packer(url, schema={"x": stoker.Array("int64")}, super_sample_bytes=12) as packer:
        packer.extend({"x": number} for number in range(super_samples))
    assert sum(key.startswith("data/") for key in writes) == super_samples
    reckoned = packing_traffic(super_samples, 0).requests[Operation.PUT]
    assert 0 <= reckoned - len(writes) <= reckoned // 50, "uploads that end at the same time share a record"
