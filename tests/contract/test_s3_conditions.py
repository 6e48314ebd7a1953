"""S3's preconditions as its API reference states them, on the local bucket and on moto."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import pytest

from support.s3_servers import on_both, on_each, refusal, unlike_moto

SECOND = timedelta(seconds=1)
OTHER = '"00000000000000000000000000000000"'
_NUMBERS = count()


@pytest.fixture
def target(client: Any) -> dict[str, str]:
    """An object of three bytes in a bucket of its own."""
    name = f"conditions-{next(_NUMBERS)}"
    client.create_bucket(Bucket=name)
    client.put_object(Bucket=name, Key="k", Body=b"abc")
    return {"Bucket": name, "Key": "k"}


def _conditions(client: Any, target: dict[str, str], names: str, prefix: str = "") -> dict[str, Any]:
    """Arguments by their names: with the object's own ETag or another, its own time (``@``) or that a second before."""
    head = client.head_object(**target)
    values = {"": head["ETag"], "other": OTHER, "@": head["LastModified"], "before": head["LastModified"] - SECOND}
    return {prefix + name: values[kind] for name, _, kind in (part.partition(":") for part in names.split())}


READS = {
    "IfMatch": 200,
    "IfMatch:other": 412,
    "IfNoneMatch": 304,
    "IfNoneMatch:other": 200,
    "IfModifiedSince:before": 200,
    "IfModifiedSince:@": 304,
    "IfUnmodifiedSince:@": 200,
    "IfUnmodifiedSince:before": 412,
    # The two combinations that the reference of GetObject and HeadObject spells out:
    "IfMatch IfUnmodifiedSince:before": 200,
    "IfNoneMatch IfModifiedSince:before": 304,
    # The others follow from RFC 7232, section 6, to which it refers:
    "IfMatch:other IfUnmodifiedSince:@": 412,
    "IfMatch:other IfNoneMatch": 412,
    "IfMatch IfNoneMatch:other": 200,
    "IfUnmodifiedSince:@ IfModifiedSince:@": 304,
    "IfUnmodifiedSince:before IfModifiedSince:@": 412,
}


@pytest.mark.parametrize("operation", ["get_object", "head_object"])
@pytest.mark.parametrize(
    ("server", "names", "status"),
    on_each(READS, moto={"IfMatch IfUnmodifiedSince:before": "lets neither condition make the other void"}),
)
def test_a_read_is_conditional(client: Any, target: dict[str, str], operation: str, names: str, status: int) -> None:
    conditions = _conditions(client, target, names)
    assert refusal(getattr(client, operation), **target, **conditions)[0] == status


@pytest.mark.parametrize(
    ("server", "names", "status"),
    on_each(READS, moto=dict.fromkeys([names for names in READS if READS[names] != 200], "ignores them")),
)
def test_a_copy_is_conditional_on_its_source(client: Any, target: dict[str, str], names: str, status: int) -> None:
    conditions = _conditions(client, target, names, prefix="CopySource")
    copy = {"Bucket": target["Bucket"], "Key": "copy", "CopySource": target, **conditions}
    expected = (200, "") if status == 200 else (412, "PreconditionFailed")  # a copy has no 304
    assert refusal(client.copy_object, **copy) == expected
    upload = client.create_multipart_upload(Bucket=target["Bucket"], Key="part")["UploadId"]
    part = {**copy, "Key": "part", "UploadId": upload, "PartNumber": 1}
    assert refusal(client.upload_part_copy, **part) == expected


def _put(client: Any, target: dict[str, str], **conditions: str) -> tuple[int, str]:
    return refusal(client.put_object, **target, Body=b"xyz", **conditions)


def _copy(client: Any, target: dict[str, str], **conditions: str) -> tuple[int, str]:
    source = {"Bucket": target["Bucket"], "Key": "source"}
    client.put_object(**source, Body=b"xyz")
    return refusal(client.copy_object, **target, CopySource=source, **conditions)


def _complete(client: Any, target: dict[str, str], **conditions: str) -> tuple[int, str]:
    upload = {**target, "UploadId": client.create_multipart_upload(**target)["UploadId"]}
    parts = [{"PartNumber": 1, "ETag": client.upload_part(**upload, PartNumber=1, Body=b"xyz")["ETag"]}]
    return refusal(client.complete_multipart_upload, **upload, MultipartUpload={"Parts": parts}, **conditions)


Write = Callable[..., tuple[int, str]]
WRITES: dict[str, Write] = {"put": _put, "copy": _copy, "complete": _complete}
COPIES = {"copy": "ignores conditions on the destination of a copy"}


@pytest.mark.parametrize(("server", "how", "write"), on_each(WRITES, moto=COPIES))
def test_a_write_is_conditional_on_absence(client: Any, target: dict[str, str], how: str, write: Write) -> None:
    assert write(client, target, IfNoneMatch="*") == (412, "PreconditionFailed")
    assert client.get_object(**target)["Body"].read() == b"abc"
    assert write(client, {**target, "Key": "new"}, IfNoneMatch="*") == (200, "")


@pytest.mark.parametrize(
    ("server", "how", "write"),
    on_each(WRITES, moto={**COPIES, "complete": "ignores If-Match of a completion"}),
)
def test_a_write_is_conditional_on_the_etag(client: Any, target: dict[str, str], how: str, write: Write) -> None:
    tag = client.head_object(**target)["ETag"]
    assert write(client, target, IfMatch=OTHER) == (412, "PreconditionFailed")
    assert client.get_object(**target)["Body"].read() == b"abc"
    assert write(client, target, IfMatch=tag) == (200, "")
    assert client.get_object(**target)["Body"].read() == b"xyz"
    assert write(client, {**target, "Key": "absent"}, IfMatch=tag) == (404, "NoSuchKey")


@pytest.mark.parametrize(
    ("server", "how", "write"),
    on_each(WRITES, moto=dict.fromkeys(WRITES, "takes any ETag")),
)
def test_no_write_takes_an_etag_to_be_absent(client: Any, target: dict[str, str], how: str, write: Write) -> None:
    """The reference: "Expects the '*' (asterisk) character"; S3 answers 501 to an ETag, and to both conditions."""
    tag = client.head_object(**target)["ETag"]
    assert write(client, target, IfNoneMatch=OTHER) == (501, "NotImplemented")
    assert write(client, target, IfNoneMatch="*", IfMatch=tag) == (501, "NotImplemented")
    assert client.get_object(**target)["Body"].read() == b"abc"


@on_both
def test_a_delete_is_conditional_on_the_etag(client: Any, target: dict[str, str]) -> None:
    tag = client.head_object(**target)["ETag"]
    assert refusal(client.delete_object, **target, IfMatch=OTHER) == (412, "PreconditionFailed")
    assert refusal(client.delete_object, **target, IfMatch=tag) == (204, "")
    assert refusal(client.delete_object, **target, IfMatch="*") == (404, "NoSuchKey")
    assert refusal(client.delete_object, **target) == (204, "")


@unlike_moto("ignores the ETags of a DeleteObjects")
def test_each_of_many_deletes_has_its_own_condition(client: Any, target: dict[str, str]) -> None:
    bucket, tag = target["Bucket"], client.head_object(**target)["ETag"]
    client.put_object(Bucket=bucket, Key="l", Body=b"def")
    wanted = [{"Key": "k", "ETag": tag}, {"Key": "l", "ETag": tag}, {"Key": "m", "VersionId": "null"}]
    answer = client.delete_objects(Bucket=bucket, Delete={"Objects": wanted})
    assert [deleted["Key"] for deleted in answer["Deleted"]] == ["k", "m"]
    assert [(error["Key"], error["Code"]) for error in answer["Errors"]] == [("l", "PreconditionFailed")]
    assert [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket)["Contents"]] == ["l"]


@unlike_moto("answers 500")
@pytest.mark.parametrize("date", ["yesterday", "Tue, 31 Feb 2026 00:00:00 GMT"])
def test_a_time_that_is_none_is_ignored(client: Any, target: dict[str, str], date: str) -> None:
    def send(request: Any, **_: Any) -> None:
        request.headers["If-Modified-Since"] = request.headers["If-Unmodified-Since"] = date

    client.meta.events.register("before-sign.s3.GetObject", send)
    assert client.get_object(**target)["Body"].read() == b"abc"
