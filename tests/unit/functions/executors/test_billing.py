from __future__ import annotations

import base64

import pytest

from stoker.abc import Answer
from stoker_functions._executors.lambda_ import add_bill
from support.function_endpoints import REPORT

JSON_REPORT = (
    '{"time":"2026-11-21T10:00:00.000Z","type":"platform.report","record":{"requestId":"1","metrics":{"durationMs":12.5,'
    '"billedDurationMs":640,"memorySizeMB":512,"maxMemoryUsedMB":90,"initDurationMs":120.5},"status":"success"}}\n'
)


UNKNOWN = Answer(result={}, billed_seconds=7.0, memory_bytes=0, is_cold=None)


def bill_of(log_result: str) -> Answer:
    return add_bill(UNKNOWN, log_result)


def answer_with(seconds: float, memory_bytes: int, *, is_cold: bool) -> Answer:
    return Answer(result={}, billed_seconds=seconds, memory_bytes=memory_bytes, is_cold=is_cold)


def encoded(log: str) -> str:
    return base64.b64encode(log.encode()).decode()


def test_the_report_line_tells_time_with_initialisation_memory_and_a_cold_start() -> None:
    assert bill_of(encoded(REPORT)) == answer_with(1.353, 2 << 30, is_cold=True)


def test_a_warm_invocation_has_no_initialisation() -> None:
    log = REPORT.replace("\tInit Duration: 1250.31 ms", "")
    assert bill_of(encoded(log)) == answer_with(1.353, 2 << 30, is_cold=False)


def test_a_snapshot_that_was_restored_is_a_cold_start() -> None:
    log = REPORT.replace("Init Duration: 1250.31 ms", "Restore Duration: 400.00 ms\tBilled Restore Duration: 12 ms")
    bill = bill_of(encoded(log))
    assert bill == answer_with(1.353, 2 << 30, is_cold=True)


def test_a_report_in_json_is_read_too() -> None:
    bill = bill_of(encoded('{"message":"hello"}\n' + JSON_REPORT))
    assert bill == answer_with(0.64, 512 << 20, is_cold=True)


def test_what_the_function_itself_printed_before_is_not_believed() -> None:
    fake = "REPORT RequestId: 0\tBilled Duration: 1 ms\tMemory Size: 128 MB\n"
    bill = bill_of(encoded(fake + REPORT))
    assert bill.billed_seconds == 1.353


@pytest.mark.parametrize(
    "log",
    ["", "END RequestId: 1\n", "REPORT RequestId: 1\tDuration: 1 ms\n", "a REPORT RequestId: 1 Billed Duration: 1 ms"],
)
def test_a_log_without_a_whole_report_tells_nothing(log: str) -> None:
    assert bill_of(encoded(log)) == UNKNOWN


@pytest.mark.parametrize("text", ["no base64!", "é", "QQ"])
def test_what_is_no_base64_tells_nothing(text: str) -> None:
    assert bill_of(text) == UNKNOWN


def test_a_log_that_was_cut_in_the_middle_of_a_character_is_read() -> None:
    whole = ("é" * 10 + "\n" + REPORT).encode()[1:]
    assert bill_of(base64.b64encode(whole).decode()) == answer_with(1.353, 2 << 30, is_cold=True)
