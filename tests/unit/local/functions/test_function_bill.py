from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from stoker import Prices
from stoker_local.functions import FunctionSpec, Outcome, sum_statistics
from stoker_local.functions._statistics import (
    CloudRecorder,
    FunctionRecorder,
    billed_milliseconds,
    failure_result,
    report_lines,
)

GIB = 1 << 30


def ledger(clock: Callable[[], float] = time.monotonic) -> CloudRecorder:
    return CloudRecorder(clock=clock, echo=lambda text: None)


def account(platform: str, **size: Any) -> FunctionRecorder:
    return ledger().add_function("f", platform, **size)


@pytest.mark.parametrize(
    ("seconds", "init_seconds", "billed"),
    [(0.0, None, 0), (0.001, None, 1), (0.0010001, None, 2), (0.0004, 0.0004, 1), (1.5, 0.25, 1750)],
)
def test_a_begun_millisecond_is_billed_whole_and_cold_starts_are_billed_too(
    seconds: float, init_seconds: float | None, billed: int
) -> None:
    assert billed_milliseconds(seconds, init_seconds) == billed


def outcome(**changes: Any) -> Outcome:
    settings: dict[str, Any] = {
        "request_id": "id",
        "payload": b"null",
        "error_type": "",
        "seconds": 0.0123,
        "init_seconds": None,
        "billed_milliseconds": 13,
        "memory_bytes": 30 << 20,
        "log": b"",
    }
    return Outcome(**{**settings, **changes})


def test_a_report_is_written_as_lambda_writes_it() -> None:
    spec = FunctionSpec(name="f", handler="m.f", memory_mb=128)
    assert report_lines(spec, outcome()) == (
        b"END RequestId: id\n"
        b"REPORT RequestId: id\tDuration: 12.30 ms\tBilled Duration: 13 ms\tMemory Size: 128 MB"
        b"\tMax Memory Used: 30 MB\n"
    )
    assert b"\tInit Duration: 250.00 ms\n" in report_lines(spec, outcome(init_seconds=0.25))
    assert report_lines(spec, outcome(error_type="Sandbox.Timedout")).endswith(
        b"\tStatus: timeout\tError Type: Sandbox.Timedout\n"
    )
    assert b"Error Type" not in report_lines(spec, outcome(error_type="ValueError"))


def test_an_error_of_the_platform_names_the_request() -> None:
    answer = failure_result("Runtime.ExitError", "Runtime exited with error: exit status 1", "id")
    assert answer.error_type == "Runtime.ExitError"
    assert b'"RequestId: id Error: Runtime exited with error: exit status 1"' in answer.payload


def test_the_bill_is_gigabyte_seconds_and_requests_at_list_prices() -> None:
    prices = Prices.load().functions["lambda"]
    meter = account("lambda", memory_bytes=GIB // 2)
    meter.figures.invocations, meter.figures.billed_seconds = 10, 8.0
    read = meter.statistics()
    assert read.gb_seconds == pytest.approx(4.0)
    assert read.dollars == pytest.approx(10 * prices.dollars_per_request + 4.0 * prices.dollars_per_gb_second)


def test_processors_are_billed_where_they_are_billed_apart() -> None:
    prices = Prices.load().functions["cloud-run"]
    meter = account("cloud-run", memory_bytes=GIB, vcpus=2.0)
    meter.figures.billed_seconds = 3.0
    rate = prices.dollars_per_gb_second + 2 * prices.dollars_per_vcpu_second
    assert meter.statistics().dollars == pytest.approx(3.0 * rate)


def test_figures_of_functions_add_up() -> None:
    one, two = account("lambda", memory_bytes=GIB), account("lambda", memory_bytes=2 * GIB)
    one.record_start(instances=1)
    one.figures.invocations, one.figures.billed_seconds = 1, 1.0
    two.figures.invocations, two.figures.billed_seconds = 2, 1.0
    one.figures.faults["kill"] += 1
    two.figures.faults["kill"] += 2
    summed = sum_statistics({"one": one.statistics(), "two": two.statistics()})
    assert (summed.invocations, summed.cold_starts, summed.instances) == (3, 1, 1)
    assert summed.gb_seconds == pytest.approx(3.0)
    assert summed.faults == {"kill": 3}
    assert sum_statistics({}).dollars == 0


def test_happenings_are_numbered_and_read_from_where_one_stopped() -> None:
    now = [5.0]
    journal = ledger(lambda: now[0])
    journal.record_event("f", "cold-start", instance="f/1")
    now[0] = 7.5
    journal.record_event("f", "error", instance="f/1", detail="ValueError")
    assert [(h.number, h.seconds, h.kind) for h in journal.events(0)] == [(0, 0.0, "cold-start"), (1, 2.5, "error")]
    assert [h.detail for h in journal.events(1)] == ["ValueError"]
    assert journal.events(2) == []


def test_of_many_happenings_the_newest_are_kept() -> None:
    journal = ledger(lambda: 0.0)
    for _ in range(10_001):
        journal.record_event("f", "answer")
    assert (journal.events(0)[0].number, len(journal.events(0))) == (1, 10_000)
