from __future__ import annotations

import base64

import pytest

from stoker_functions._executors.lambda_ import Bill, bill_of
from support.function_endpoints import REPORT

JSON_REPORT = (
    '{"time":"2026-11-21T10:00:00.000Z","type":"platform.report","record":{"requestId":"1","metrics":{"durationMs":12.5,'
    '"billedDurationMs":640,"memorySizeMB":512,"maxMemoryUsedMB":90,"initDurationMs":120.5},"status":"success"}}\n'
)


def encoded(log: str) -> str:
    return base64.b64encode(log.encode()).decode()


def test_the_report_line_tells_time_with_initialisation_memory_and_a_cold_start() -> None:
    assert bill_of(encoded(REPORT)) == Bill(seconds=1.353, memory_bytes=2 << 30, is_cold=True)


def test_a_warm_invocation_has_no_initialisation() -> None:
    log = REPORT.replace("\tInit Duration: 1250.31 ms", "")
    assert bill_of(encoded(log)) == Bill(seconds=1.353, memory_bytes=2 << 30, is_cold=False)


def test_a_snapshot_that_was_restored_is_a_cold_start() -> None:
    log = REPORT.replace("Init Duration: 1250.31 ms", "Restore Duration: 400.00 ms\tBilled Restore Duration: 12 ms")
    bill = bill_of(encoded(log))
    assert bill == Bill(seconds=1.353, memory_bytes=2 << 30, is_cold=True)


def test_a_report_in_json_is_read_too() -> None:
    bill = bill_of(encoded('{"message":"hello"}\n' + JSON_REPORT))
    assert bill == Bill(seconds=0.64, memory_bytes=512 << 20, is_cold=True)


def test_what_the_function_itself_printed_before_is_not_believed() -> None:
    fake = "REPORT RequestId: 0\tBilled Duration: 1 ms\tMemory Size: 128 MB\n"
    bill = bill_of(encoded(fake + REPORT))
    assert bill is not None
    assert bill.seconds == 1.353


@pytest.mark.parametrize(
    "log",
    ["", "END RequestId: 1\n", "REPORT RequestId: 1\tDuration: 1 ms\n", "a REPORT RequestId: 1 Billed Duration: 1 ms"],
)
def test_a_log_without_a_whole_report_tells_nothing(log: str) -> None:
    assert bill_of(encoded(log)) is None


@pytest.mark.parametrize("text", ["no base64!", "é", "QQ"])
def test_what_is_no_base64_tells_nothing(text: str) -> None:
    assert bill_of(text) is None


def test_a_log_that_was_cut_in_the_middle_of_a_character_is_read() -> None:
    whole = ("é" * 10 + "\n" + REPORT).encode()[1:]
    assert bill_of(base64.b64encode(whole).decode()) == Bill(seconds=1.353, memory_bytes=2 << 30, is_cold=True)
