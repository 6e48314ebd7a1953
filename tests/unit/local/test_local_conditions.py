from __future__ import annotations

from http import HTTPStatus

import pytest

from stoker_local._s3.model import S3Error, StoredObject
from stoker_local._s3.multipart import parse_copy_source
from stoker_local._s3.operations import COPY_SOURCE_IF, evaluate_read_conditions

MODIFIED_AT = 784_111_777.9  # Sun, 06 Nov 1994 08:49:37.9 GMT
STORED = StoredObject(data=b"", tag='"tag"', modified_at=MODIFIED_AT)


@pytest.mark.parametrize(
    "date", ["Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"]
)
def test_a_time_is_read_in_each_form_of_http_and_compared_in_whole_seconds(date: str) -> None:
    assert evaluate_read_conditions({"if-modified-since": date}, STORED) is HTTPStatus.NOT_MODIFIED
    assert evaluate_read_conditions({"if-unmodified-since": date}, STORED) is HTTPStatus.OK
    assert evaluate_read_conditions({"if-modified-since": date.replace("37", "36")}, STORED) is HTTPStatus.OK
    assert (
        evaluate_read_conditions({"if-unmodified-since": date.replace("37", "36")}, STORED)
        is HTTPStatus.PRECONDITION_FAILED
    )


@pytest.mark.parametrize("date", ["", "0", "Sun, 06 Nov 999999 08:49:37 GMT", "\xff"])
def test_what_is_no_date_is_no_condition(date: str) -> None:
    assert evaluate_read_conditions({"if-modified-since": date, "if-unmodified-since": date}, STORED) is HTTPStatus.OK


def test_conditions_on_a_copys_source_are_apart_from_those_on_its_destination() -> None:
    headers = {"if-match": '"other"', f"{COPY_SOURCE_IF}none-match": "tag"}
    assert evaluate_read_conditions(headers, STORED) is HTTPStatus.PRECONDITION_FAILED
    assert evaluate_read_conditions(headers, STORED, prefix=COPY_SOURCE_IF) is HTTPStatus.NOT_MODIFIED


@pytest.mark.parametrize(
    ("header", "source"),
    [
        ("bucket/key", ("bucket", "key")),
        ("/bucket/a/b", ("bucket", "a/b")),
        ("bucket/%C3%BC%20%2525?versionId=null", ("bucket", "ü %25")),
        ("bucket%2Fkey", ("bucket", "key")),
        ("bucket/%3FversionId=1", ("bucket", "?versionId=1")),
    ],
)
def test_a_copy_source_is_read(header: str, source: tuple[str, str]) -> None:
    assert parse_copy_source(header) == source


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("", "InvalidArgument"),
        ("bucket", "InvalidArgument"),
        ("bucket/", "InvalidArgument"),
        ("//key", "InvalidArgument"),
        ("bucket/%ff", "InvalidArgument"),
        ("bucket/key?versionId=1", "NoSuchVersion"),
    ],
)
def test_a_malformed_copy_source_is_refused(header: str, code: str) -> None:
    with pytest.raises(S3Error) as caught:
        parse_copy_source(header)
    assert caught.value.code == code
