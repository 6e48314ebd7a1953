from __future__ import annotations

import pytest

from stoker import Prices
from stoker._cost.prices import GB_BYTES
from stoker._fanout.report import FanoutCounters
from stoker.abc import Answer

LAMBDA = Prices.load().functions["lambda"]
CLOUD_RUN = Prices.load().functions["cloud-run"]


def test_dollars_are_those_of_the_price_list_for_each_call() -> None:
    tally = FanoutCounters(LAMBDA)
    for seconds, gib in ((10.0, 1), (2.0, 4)):
        tally.count_answer(Answer(result={}, billed_seconds=seconds, memory_bytes=gib * GB_BYTES, is_cold=True))
    report = tally.report([], 0, 12.0)
    assert report.dollars == pytest.approx(2 * 0.0000002 + 18 * 0.0000166667)
    assert (report.billed_seconds, report.gb_seconds, report.cold_starts) == (12.0, 18.0, 2)


def test_processors_that_are_charged_for_apart_are_in_the_dollars() -> None:
    tally = FanoutCounters(CLOUD_RUN)
    tally.count_answer(Answer(result={}, billed_seconds=10.0, memory_bytes=GB_BYTES, is_cold=None, vcpus=2.0))
    dollars = 0.0000004 + 10 * 0.0000025 + 20 * 0.000024
    assert tally.report([], 0, 1.0).dollars == pytest.approx(dollars)


def test_the_cost_of_failed_calls_is_estimated_from_their_duration() -> None:
    tally = FanoutCounters(LAMBDA)
    tally.count_answer(Answer(result={}, billed_seconds=1.0, memory_bytes=2 * GB_BYTES, is_cold=False))
    tally.count_failure(10.0)
    tally.count_failure(20.0)
    report = tally.report([], 0, 1.0)
    assert report.dollars == pytest.approx(3 * 0.0000002 + 62 * 0.0000166667)
    assert (report.wasted_calls, report.gb_seconds) == (2, 2.0)


def test_where_nothing_is_charged_there_are_no_dollars() -> None:
    report = FanoutCounters(None).report([{}], 0, 1.0)
    assert report.dollars is None
    assert "$" not in " ".join(report.lines())


def test_what_results_with_objects_count_is_added_up_and_nothing_else() -> None:
    results: list[dict[str, object]] = [
        {"samples": 10, "objects": 2, "size_bytes": 100},
        {"samples": 5, "objects": 1, "size_bytes": 50},
        {"samples": "many", "objects": True},
        {"samples": 1000, "version": 3},
    ]
    report = FanoutCounters(None).report(results, 0, 1.0)
    assert (report.tasks, report.samples, report.objects, report.size_bytes) == (4, 15, 3, 150)


def test_the_lines_tell_what_happened_and_leave_out_what_did_not() -> None:
    tally = FanoutCounters(LAMBDA)
    tally.counts |= {"calls": 5, "throttled": 2}
    tally.count_answer(Answer(result={}, billed_seconds=3.0, memory_bytes=GB_BYTES, is_cold=True))
    lines = tally.report([{"samples": 1200, "objects": 2, "size_bytes": 1 << 20}], 0, 9.0).lines()
    assert lines == (
        "1 task in 5 calls, in 9.0 s (throttled 2, cold starts 1)",
        "1,200 samples in 2 super-samples, 1.00 MiB",
        "3.0 s of functions, 3.00 GB-s, $0.000050 for functions",
    )


def test_requests_that_functions_tell_of_are_counted_and_priced_by_their_store() -> None:
    prices = Prices.load()
    tally = FanoutCounters(LAMBDA, prices)
    requests = {"s3://bucket/train": {"GET": 1000, "PUT": 100}, "/a/folder": {"GET": 7}}
    tally.count_answer(Answer(result={"requests": requests}, billed_seconds=1.0, memory_bytes=GB_BYTES, is_cold=False))
    tally.count_answer(
        Answer(result={"requests": {"s3://b": {"GET": 1}}}, billed_seconds=1.0, memory_bytes=1, is_cold=False)
    )
    report = tally.report([], 0, 1.0)
    assert report.requests == 1108
    assert report.request_dollars == pytest.approx(1001 * 0.0000004 + 100 * 0.000005)
    assert report.lines()[-1] == "1,108 requests to stores, $0.000900"


@pytest.mark.parametrize(
    "nonsense", [None, 3, [1], {"s3://b": 3}, {"s3://b": {"GET": "x", "EAT": 3, "PUT": -1}}, {3: 4}]
)
def test_an_account_of_requests_that_is_none_adds_nothing(nonsense: object) -> None:
    tally = FanoutCounters(LAMBDA, Prices.load())
    answer = Answer(result={"requests": nonsense}, billed_seconds=1.0, memory_bytes=GB_BYTES, is_cold=False)
    tally.count_answer(answer)
    assert tally.report([], 0, 1.0).requests == 0


def test_large_bills_are_shown_in_cents() -> None:
    tally = FanoutCounters(LAMBDA)
    tally.count_answer(Answer(result={}, billed_seconds=1e8, memory_bytes=GB_BYTES, is_cold=False))
    assert "$1,666.67 for functions" in tally.report([], 0, 1.0).lines()[-1]
