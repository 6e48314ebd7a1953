"""From a refusal to a typed error: the wait that a store asks for."""

from __future__ import annotations

import pytest

from stoker.store.failures import retry_after_seconds


@pytest.mark.parametrize(("value", "seconds"), [("7", 7.0), (" 7\t", 7.0), ("0", 0.0), ("999999999", 999_999_999.0)])
def test_a_number_of_seconds_is_taken(value: str, seconds: float) -> None:
    assert retry_after_seconds({"ReTry-AFTER": value}) == seconds


@pytest.mark.parametrize(
    "value", ["", "-1", "1e9", "nan", "٣", "9" * 400, "\x1c5", "5\x1f", "\u20075", "Fri, 01 Jan 2027 00:00:00 GMT"]
)
def test_anything_else_is_no_wait(value: str) -> None:
    assert retry_after_seconds({"Retry-After": value}) is None
    assert retry_after_seconds({"Retry": "5"}) is None
