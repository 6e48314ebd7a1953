"""The parts of the functions' demo that must be right for what it shows to be true."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from stoker import Operation, Prices
from stoker._base.meter import MeterReading
from stoker.errors import ConfigError
from stoker_local._demo.function_run import (
    EpochDelivery,
    FunctionDemoConfig,
    Snapshot,
    bill_table,
    bucket_reading,
    display_lines,
    function_table,
    per_sample_dollars,
    summary_line,
)
from stoker_local._demo.training import Digits, RawImages
from stoker_local.functions import FunctionEvent, FunctionStatistics

PRICES = Prices.load()
GET, PUT = 0.0004 / 1000, 0.005 / 1000


def some_digits(count: int = 4) -> Digits:
    images = np.arange(count * 64, dtype=np.uint8).reshape(count, 8, 8, 1)
    return Digits(images=images, labels=np.arange(count, dtype=np.int64))


def figures(**changes: Any) -> FunctionStatistics:
    return FunctionStatistics(**{"faults": {}, **changes})


def counts(**requests: int) -> dict[str, Any]:
    return {"requests": requests, "bytes_out": 0}


def requests(**of_each: int) -> MeterReading:
    return bucket_reading(counts(**of_each))


def a_moment(**changes: Any) -> Snapshot:
    given: dict[str, Any] = {
        "phase": "functions pack what is left",
        "seconds": 12.3,
        "images": 2500,
        "put_images": 2000,
        "waiting": 70,
        "delivered": 30,
        "dead_letters": 0,
        "functions": {"ingest": figures(instances=3, busy=2, faults={"kill": 5, "freeze": 4})},
        "super_samples": 40,
        "version": 3,
        "visible_super_samples": 30,
        "visible_samples": 1500,
        "requests": requests(GetObject=1000, PutObject=10),
        "events": [],
    }
    return Snapshot(**{**given, **changes})


def happening(what: str, **changes: Any) -> FunctionEvent:
    return FunctionEvent(
        **{"number": 0, "seconds": 1.0, "function": "ingest", "instance": "ingest/1", "kind": what, **changes}
    )


# --- the images -------------------------------------------------------------------------------------------------------


def test_images_beyond_the_digits_are_the_digits_moved_by_a_pixel() -> None:
    images = RawImages(some_digits(), 7)
    assert list(images.contents) == [f"{n % 4}/{n:05}.png" for n in range(7)]
    assert images.contents["0/00000.png"] != images.contents["0/00004.png"]


def test_more_images_than_there_are_moves_are_refused() -> None:
    assert len(RawImages(some_digits(1), 9)) == 9
    with pytest.raises(ConfigError, match="10 images are too many; the digits and their shifted copies are 9"):
        RawImages(some_digits(1), 10)


def delivered(images: RawImages, *keys: str) -> EpochDelivery:
    epoch = EpochDelivery()
    for key in keys:
        epoch.record(images, key, images.contents.get(key, b""), int(key[0]))
    return epoch


def test_an_epoch_that_has_every_image_once_has_not_failed() -> None:
    images = RawImages(some_digits(), 4)
    assert delivered(images, *reversed(images.contents)).describe_failures(images) == []


def test_missing_repeated_foreign_and_changed_samples_are_reported() -> None:
    images = RawImages(some_digits(), 4)
    keys = list(images.contents)
    assert delivered(images, *keys[1:]).describe_failures(images) == ["1 images are missing, such as 0/00000.png"]
    twice = delivered(images, *keys, keys[2]).describe_failures(images)
    assert twice == ["1 images are delivered more than once, such as 2/00002.png"]
    assert delivered(images, *keys, "3/x.png").describe_failures(images) == [
        "1 images are not what was put, such as 3/x.png"
    ]
    for content, label in ((b"another", 0), (images.contents[keys[0]], 1)):
        epoch = delivered(images, *keys[1:])
        epoch.record(images, keys[0], content, label)
        assert epoch.describe_failures(images) == ["1 images are not what was put, such as 0/00000.png"]


# --- the bill ---------------------------------------------------------------------------------------------------------


def test_the_bill_adds_functions_and_requests_and_leaves_out_those_that_brought_the_raw_images() -> None:
    used = {"a": figures(invocations=2, gb_seconds=3.0, dollars=0.5), "b": figures(invocations=1, dollars=0.25)}
    found = bucket_reading(counts(GetObject=1000, PutObject=60, ListObjectsV2=5, DeleteObject=9), raw_puts=50)
    assert found.requests[Operation.PUT] == 10
    assert PRICES.dollars(found) == pytest.approx(1000 * GET + 10 * PUT + 5 * PUT)
    everything = f"{0.75 + PRICES.dollars(found):.6f}: functions $0.750000, requests ${PRICES.dollars(found):.6f};"
    assert f"bill     ${everything}" in display_lines(a_moment(functions=used, requests=found), PRICES)
    rows = bill_table(a_moment(functions=used, requests=found), EpochDelivery(), PRICES)
    assert rows[6].split()[:5] == ["dollars", "for", "3.0", "GB-s", "$0.750000"]


def test_puts_under_way_that_the_bucket_has_not_seen_yet_are_no_negative_bill() -> None:
    assert PRICES.dollars(bucket_reading(counts(PutObject=3), raw_puts=5)) == 0


def test_one_request_of_each_kind_for_every_sample_costs_what_the_price_list_says() -> None:
    assert per_sample_dollars(1_000_000, PRICES, Operation.GET, Operation.PUT) == pytest.approx(0.4 + 5.0)


def test_the_table_of_the_bill_sets_both_ways_side_by_side() -> None:
    packed = a_moment(requests=requests(GetObject=2600, PutObject=90, ListObjectsV2=10), visible_super_samples=5)
    rows = [row.split() for row in bill_table(packed, EpochDelivery(gets=7, dollars=7 * GET), PRICES)]
    assert rows[2][-2:] == ["5", "2,500"]
    assert rows[3][-2:] == ["2,600", "2,500"]
    assert rows[4][-2:] == ["100", "2,500"]
    assert rows[5][-2:] == ["$0.001540", "$0.013500"]
    assert rows[-1][-2:] == ["$0.000003", "$0.001000"]


# --- what is seen -----------------------------------------------------------------------------------------------------


CROWDED = a_moment(
    seconds=123.4,
    put_images=2500,
    functions=dict.fromkeys(
        ("ingest", "commit", "compact"),
        figures(
            instances=3, busy=3, cold_starts=999, invocations=9999, errors=999, gb_seconds=999.0,
            faults=dict.fromkeys(("kill", "freeze", "duplicate"), 99),
        ),
    ),
    events=[happening("error", instance="compact/999", detail="Runtime.ImportModuleError")] * 9,
)  # fmt: skip


def test_nothing_is_wider_than_80_columns() -> None:
    assert max(map(len, display_lines(CROWDED, PRICES))) < 78
    assert len(summary_line(CROWDED)) < 78
    assert max(map(len, bill_table(CROWDED, EpochDelivery(), PRICES))) < 78


def test_the_block_keeps_its_height_whatever_happens() -> None:
    assert len(display_lines(CROWDED, PRICES)) == len(display_lines(a_moment(functions=CROWDED.functions), PRICES))
    assert len(display_lines(CROWDED, PRICES)) < 24


def test_the_block_tells_the_newest_of_what_happened_to_instances_and_not_every_call() -> None:
    happenings = [
        happening("kill"),
        happening("reclaim", instance=""),
        *[happening("invoke")] * 9,
        happening("error", detail="Runtime.ExitError"),
    ]
    *_, first, second = [row for row in display_lines(a_moment(events=happenings), PRICES) if row]
    assert first == "  1.0 s  ingest/1 is killed during an invocation"
    assert second == "  1.0 s  ingest/1 fails: Runtime.ExitError"


def test_the_line_and_the_table_count_what_was_done_to_the_functions() -> None:
    assert "2 of 3 busy, 5 killed, 4 frozen" in summary_line(a_moment())
    functions = {"ingest": figures(instances=3, busy=2, cold_starts=7, invocations=40, errors=6, gb_seconds=31.4,
                                   faults={"kill": 5, "duplicate": 1})}  # fmt: skip
    assert function_table(functions)[-1].split() == ["ingest", "3", "2", "7", "40", "6", "5", "0", "1", "31"]


# --- what is done -----------------------------------------------------------------------------------------------------


def test_the_faults_strike_the_same_calls_every_time_with_a_seed() -> None:
    one, other = FunctionDemoConfig(seed=1), FunctionDemoConfig(seed=2)
    assert one.faults() == FunctionDemoConfig(seed=1).faults() != other.faults()
    assert sum(Counter(one.faults().probabilities).values()) < 1
