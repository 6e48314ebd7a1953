"""Conversion of an HTTP error to a typed error: the delay that a store requests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from stoker._stores.http import HttpResponse, create_error, retry_after_seconds
from stoker.errors import ServerError, StoreError
from support.cases import for_each


@pytest.mark.parametrize(("value", "seconds"), [("7", 7.0), (" 7\t", 7.0), ("0", 0.0), ("999999999", 999_999_999.0)])
def test_a_number_of_seconds_is_taken(value: str, seconds: float) -> None:
    assert retry_after_seconds({"ReTry-AFTER": value}) == seconds


@for_each(
    "value",
    ["", "-1", "1e9", "nan", "٣", "9" * 400, "\x1c5", "5\x1f", "\u20075", "Fri, 99 Jan 2027 00:00:00 GMT", "tomorrow"],
)
def test_anything_else_is_no_wait(value: str) -> None:
    assert retry_after_seconds({"Retry-After": value}) is None
    assert retry_after_seconds({"Retry": "5"}) is None


@pytest.mark.parametrize(
    ("until", "seconds"),
    [
        ("Fri, 01 Jan 2027 00:00:30 GMT", 30.0),
        ("Friday, 01-Jan-27 00:02:00 GMT", 120.0),
        ("Fri Jan  1 00:00:10 2027", 10.0),
        ("Thu, 31 Dec 2026 23:59:00 GMT", 0.0),
        ("Fri, 01 Jan 9999 00:00:00 GMT", 7972 * 365.2425 * 86400),
    ],
)
def test_a_date_counts_from_the_answers_own(until: str, seconds: float) -> None:
    found = retry_after_seconds({"Retry-After": until, "date": "Fri, 01 Jan 2027 00:00:00 GMT"})
    assert found == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize("date", [None, "yesterday"])
def test_a_date_counts_from_now_where_the_answer_has_none(date: str | None) -> None:
    until = format_datetime(datetime.now(UTC) + timedelta(seconds=600), usegmt=True)
    found = retry_after_seconds({"Retry-After": until} | ({"Date": date} if date else {}))
    assert found == pytest.approx(600.0, abs=5.0)


@for_each("status", [500, 502, 504, 506, 507, 508, 511, 520, 521, 522, 523, 524, 529, 530, 598, 599])
def test_every_failure_inside_the_store_may_pass(status: int) -> None:
    assert type(create_error("s3://b/x", HttpResponse(status=status, headers={}), {})) is ServerError


@pytest.mark.parametrize("status", [501, 505, 400, 405, 411])
def test_what_the_store_cannot_do_does_not_pass(status: int) -> None:
    assert type(create_error("s3://b/x", HttpResponse(status=status, headers={}), {})) is StoreError
