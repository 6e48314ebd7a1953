from __future__ import annotations

import math
from typing import Any

import pytest

from stoker import Prices
from stoker._base.meter import Egress
from stoker._cost.prices import GB_BYTES, FunctionPrices, StorePrices
from stoker.abc import Answer
from stoker.errors import ConfigError
from stoker_warm._billing import WarmBill, WarmPrices
from stoker_warm._events import NodeTask

MEMORY = 1536 << 20
MIB = 1 << 20
PRICES = Prices.load()
LAMBDA = PRICES.function("lambda")
S3 = PRICES.store("s3")
TARIFF = WarmPrices(functions=LAMBDA, store=S3)
ROUND = FunctionPrices(
    name="round", region="", source="", dollars_per_request=1.0, dollars_per_gb_second=10.0, dollars_per_vcpu_second=0.5
)


HOUR = 3600.0


def call(bill: WarmBill, purpose: NodeTask, seconds: float = 1.0, **figures: Any) -> None:
    figures = {"memory_bytes": GB_BYTES, "is_cold": False, "billed_seconds": seconds} | figures
    bill.count_call(purpose, Answer(result={}, **figures))


def an_hour(
    reads: int, *, served_gb_seconds: float, store: StorePrices = S3, egress: Egress = "same_region"
) -> WarmBill:
    """Return the bill of 12 functions that are kept warm each minute, and of reads of 8 MiB."""
    bill = WarmBill(prices=WarmPrices(functions=LAMBDA, store=store, egress=egress))
    for _ in range(12 * 60):
        call(bill, NodeTask.WARM, 0.002, memory_bytes=MEMORY)
    for _ in range(reads):
        call(bill, NodeTask.SERVE, served_gb_seconds)
        bill.count_read(8 * MIB)
    return bill


def test_a_tier_that_did_nothing_costs_nothing() -> None:
    bill = WarmBill(prices=TARIFF)
    assert (bill.dollars(), bill.bucket_dollars, bill.break_even_reads_per_hour(0.0)) == (0.0, 0.0, None)
    assert bill.to_json(0.0)["dollars_per_hour"] is None


def test_calls_are_billed_by_what_they_were_for() -> None:
    bill = WarmBill(prices=WarmPrices(functions=ROUND, store=S3))
    call(bill, NodeTask.SERVE, 2.0, is_cold=True)
    call(bill, NodeTask.WARM, 0.5, memory_bytes=2 * GB_BYTES)
    call(bill, NodeTask.WARM, 0.5, is_cold=None)
    call(bill, NodeTask.WARM, 3.0, vcpus=2.0)
    assert bill.dollars(NodeTask.SERVE) == 1.0 + 20.0
    assert bill.dollars(NodeTask.WARM) == 3.0 + 45.0 + 3.0
    assert bill.dollars() == 72.0
    assert bill.to_json(7200.0)["dollars_per_hour"] == 51.0 / 2
    assert [bill.usage[purpose].calls for purpose in NodeTask] == [1, 3]
    assert [bill.usage[purpose].cold_starts for purpose in NodeTask] == [1, 0]
    assert bill.usage[NodeTask.WARM].billed_seconds == 4.0
    assert bill.usage[NodeTask.WARM].gb_seconds == 4.5
    assert bill.usage[NodeTask.WARM].vcpu_seconds == 6.0


def test_what_was_used_for_each_task_adds_up_to_the_bill() -> None:
    bill = an_hour(10, served_gb_seconds=0.2)
    dollars = {task: used.cost_dollars(LAMBDA) for task, used in bill.usage.items()}
    assert dollars == {task: bill.dollars(task) for task in NodeTask}
    assert 0 < sum(dollars.values()) == bill.dollars()
    told = bill.to_json(HOUR)
    assert (told["serve_dollars"], told["warm_dollars"]) == (dollars[NodeTask.SERVE], dollars[NodeTask.WARM])
    assert told["dollars"] == bill.dollars()


def test_functions_without_prices_cost_nothing() -> None:
    bill = WarmBill(prices=WarmPrices())
    call(bill, NodeTask.SERVE)
    assert (bill.dollars(), bill.usage[NodeTask.SERVE].calls) == (0.0, 1)


def test_a_report_of_a_bill_does_not_change_with_it() -> None:
    bill = WarmBill(prices=TARIFF)
    before = bill.to_json(1.0)
    call(bill, NodeTask.SERVE)
    assert before["requests"] == 0


def test_the_same_reads_from_the_bucket_are_one_get_each_and_bytes_where_they_cost() -> None:
    assert an_hour(1000, served_gb_seconds=0.1).bucket_dollars == pytest.approx(0.0004)
    elsewhere = an_hour(1000, served_gb_seconds=0.1, egress="other_region")
    assert elsewhere.bucket_dollars == pytest.approx(0.0004 + 1000 * 8 / 1024 * 0.02)


def test_beside_a_bucket_of_the_same_region_the_tier_never_pays_however_much_is_read() -> None:
    """8 MiB at 75 MB/s from functions of 1.5 GB: 0.17 GB-s, at the packaged prices, against one GET."""
    for reads in (1, 100, 10_000):
        bill = an_hour(reads, served_gb_seconds=8 * MIB / 75e6 * 1.5)
        assert bill.break_even_reads_per_hour(HOUR) is None
        assert bill.dollars() > bill.bucket_dollars


def test_where_bytes_cost_it_pays_from_some_rate_on() -> None:
    figures: dict[str, Any] = {"served_gb_seconds": 8 * MIB / 75e6 * 1.5, "egress": "other_region"}
    reads = an_hour(10, **figures).break_even_reads_per_hour(HOUR)
    assert reads is not None
    assert 1 < reads < 10_000
    below, above = an_hour(math.floor(reads), **figures), an_hour(math.ceil(reads), **figures)
    assert below.dollars() >= below.bucket_dollars
    assert above.dollars() <= above.bucket_dollars


def test_an_unread_tier_reports_no_rate() -> None:
    assert an_hour(0, served_gb_seconds=0.0, egress="internet").break_even_reads_per_hour(HOUR) is None


def test_calls_without_an_answer_are_counted() -> None:
    bill = WarmBill(prices=TARIFF)
    bill.count_call(NodeTask.SERVE, None)
    assert (bill.dollars(), bill.to_json(1.0)["unanswered"]) == (0.0, 1)


@pytest.mark.parametrize("name", ["billed_seconds", "memory_bytes", "vcpus"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_figures_that_make_no_sense_are_refused(name: str, value: float) -> None:
    bill = WarmBill(prices=TARIFF)
    with pytest.raises(ConfigError, match=name):
        call(bill, NodeTask.SERVE, **{name: value})
    assert bill.usage[NodeTask.SERVE].calls == 0


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_bill_is_of_a_stretch_of_time(seconds: float) -> None:
    with pytest.raises(ConfigError, match="duration"):
        WarmBill(prices=TARIFF).to_json(seconds)
