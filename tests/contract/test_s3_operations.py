"""S3's copies, uploads in parts, listings and tags by its API reference, on the local bucket and on moto."""

from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime
from itertools import count
from typing import Any

import pytest
from botocore.config import Config

from stoker_local import Fault, FaultKind, FaultPlan, LocalBucket
from support.local_bucket import s3_client
from support.s3_servers import on_both, on_each, refusal, unlike_moto

PART_BYTES = 5 << 20
_NUMBERS = count()


@pytest.fixture
def bucket(client: Any) -> str:
    """A bucket of the test's own."""
    name = f"operations-{next(_NUMBERS)}"
    client.create_bucket(Bucket=name)
    return name


def _upload(client: Any, bucket: str, key: str, *parts: bytes) -> dict[str, Any]:
    """Upload parts, and return what completes them."""
    upload = {"Bucket": bucket, "Key": key}
    upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]
    tags = [client.upload_part(**upload, PartNumber=n, Body=part)["ETag"] for n, part in enumerate(parts, 1)]
    return {**upload, "MultipartUpload": {"Parts": [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(tags, 1)]}}


def _read(client: Any, bucket: str, key: str) -> bytes:
    data: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    return data


# --- copies -----------------------------------------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("key", ["plain", "a b/ü+%25&#.bin", "what?versionId", " ", "//"])
def test_a_copy_has_the_bytes_the_metadata_and_the_tags_of_its_source(client: Any, bucket: str, key: str) -> None:
    source = {"Bucket": bucket, "Key": key}
    tag = client.put_object(
        **source, Body=b"abc", ContentType="x/y", CacheControl="no-store", Metadata={"a": "1"}, Tagging="t=1"
    )["ETag"]
    copied = client.copy_object(Bucket=bucket, Key="copy", CopySource=source)["CopyObjectResult"]
    got = client.get_object(Bucket=bucket, Key="copy")
    assert (got["Body"].read(), got["ETag"], copied["ETag"]) == (b"abc", tag, tag)
    assert (got["ContentType"], got["CacheControl"], got["Metadata"]) == ("x/y", "no-store", {"a": "1"})
    assert client.get_object_tagging(Bucket=bucket, Key="copy")["TagSet"] == [{"Key": "t", "Value": "1"}]
    assert abs((copied["LastModified"] - datetime.now(UTC)).total_seconds()) < 600


@on_both
def test_a_copy_with_the_replace_directive_gets_new_metadata_and_tags(client: Any, bucket: str) -> None:
    source = {"Bucket": bucket, "Key": "k"}
    client.put_object(**source, Body=b"abc", ContentType="x/y", Metadata={"a": "1"}, Tagging="t=1")
    new = {"ContentType": "y/z", "Metadata": {"b": "2"}, "Tagging": "u=2"}
    client.copy_object(
        Bucket=bucket, Key="ignored", CopySource=source, **{k: v for k, v in new.items() if k != "Tagging"}
    )
    assert client.head_object(Bucket=bucket, Key="ignored")["Metadata"] == {"a": "1"}
    client.copy_object(**source, CopySource=source, **new, MetadataDirective="REPLACE", TaggingDirective="REPLACE")
    got = client.get_object(**source)
    assert (got["Body"].read(), got["ContentType"], got["Metadata"]) == (b"abc", "y/z", {"b": "2"})
    assert client.get_object_tagging(**source)["TagSet"] == [{"Key": "u", "Value": "2"}]


@on_both
def test_a_copy_is_refused_as_s3_refuses_it(client: Any, bucket: str) -> None:
    source = {"Bucket": bucket, "Key": "k"}
    client.put_object(**source, Body=b"abc")
    assert refusal(client.copy_object, **source, CopySource=source) == (400, "InvalidRequest")
    assert refusal(client.copy_object, **source, CopySource={**source, "Key": "absent"}) == (404, "NoSuchKey")
    assert refusal(client.copy_object, **source, CopySource={**source, "Bucket": "absent"}) == (404, "NoSuchBucket")


@unlike_moto("takes an unknown directive, and answers 500 to a source without a key")
def test_a_malformed_copy_is_an_invalid_argument(client: Any, bucket: str) -> None:
    source, invalid = {"Bucket": bucket, "Key": "k"}, (400, "InvalidArgument")
    client.put_object(**source, Body=b"abc")
    assert refusal(client.copy_object, Bucket=bucket, Key="c", CopySource=source, MetadataDirective="MOVE") == invalid
    assert refusal(client.copy_object, Bucket=bucket, Key="c", CopySource=source, TaggingDirective="MOVE") == invalid
    assert refusal(client.copy_object, Bucket=bucket, Key="c", CopySource=bucket) == invalid


@on_both
def test_a_copy_of_an_object_uploaded_in_parts_is_one_object(client: Any, bucket: str) -> None:
    data = os.urandom(PART_BYTES + 3)
    client.complete_multipart_upload(**_upload(client, bucket, "k", data[:PART_BYTES], data[PART_BYTES:]))
    source = {"Bucket": bucket, "Key": "k"}
    tag = client.copy_object(Bucket=bucket, Key="copy", CopySource=source)["CopyObjectResult"]["ETag"]
    assert tag == f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
    assert _read(client, bucket, "copy") == data


@on_both
def test_a_part_is_copied_whole_or_by_a_range(client: Any, bucket: str) -> None:
    data, source = os.urandom(PART_BYTES + 7), {"Bucket": bucket, "Key": "k"}
    client.put_object(**source, Body=data)
    upload = {"Bucket": bucket, "Key": "joined"}
    upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]
    whole = client.upload_part_copy(**upload, PartNumber=1, CopySource=source)["CopyPartResult"]
    some = client.upload_part_copy(**upload, PartNumber=2, CopySource=source, CopySourceRange="bytes=3-9")
    tags = [whole["ETag"], some["CopyPartResult"]["ETag"]]
    assert tags[1] == f'"{hashlib.md5(data[3:10], usedforsecurity=False).hexdigest()}"'
    parts = [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(tags, 1)]
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    assert _read(client, bucket, "joined") == data + data[3:10]


@unlike_moto("answers 500, or takes them")
@pytest.mark.parametrize(
    "asked", ["bytes=0-7", "bytes=7-9", "bytes=3-1", "bytes=2-", "bytes=-2", "0-2", "bytes=0-1,3-4"]
)
def test_a_range_to_copy_is_never_cut(client: Any, bucket: str, asked: str) -> None:
    source = {"Bucket": bucket, "Key": "k"}
    client.put_object(**source, Body=b"1234567")
    upload = {"Bucket": bucket, "Key": "joined"}
    upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]
    part = {**upload, "PartNumber": 1, "CopySource": source, "CopySourceRange": asked}
    assert refusal(client.upload_part_copy, **part) == (400, "InvalidArgument")


# --- uploads in parts -------------------------------------------------------------------------------------------


@on_both
def test_a_completion_that_is_sent_again_succeeds_again(client: Any, bucket: str) -> None:
    completion = _upload(client, bucket, "k", b"abc")
    first = client.complete_multipart_upload(**completion, IfNoneMatch="*")
    again = client.complete_multipart_upload(**completion, IfNoneMatch="*")
    assert (again["ETag"], again["Key"], again["Bucket"]) == (first["ETag"], "k", bucket)
    assert _read(client, bucket, "k") == b"abc"


@unlike_moto("completes from what is there")
def test_a_completion_that_is_sent_again_undoes_nothing(client: Any, bucket: str) -> None:
    completion = _upload(client, bucket, "k", b"abc")
    tag = client.complete_multipart_upload(**completion)["ETag"]
    client.put_object(Bucket=bucket, Key="k", Body=b"later")
    assert client.complete_multipart_upload(**completion)["ETag"] == tag
    assert _read(client, bucket, "k") == b"later"


@unlike_moto("answers 500 to ListParts of an upload that is not there")
def test_an_upload_that_was_aborted_or_never_was_cannot_be_completed(client: Any, bucket: str) -> None:
    completion = _upload(client, bucket, "k", b"abc")
    upload = {name: completion[name] for name in ("Bucket", "Key", "UploadId")}
    client.abort_multipart_upload(**upload)
    assert refusal(client.complete_multipart_upload, **completion) == (404, "NoSuchUpload")
    assert refusal(client.upload_part, **upload, PartNumber=1, Body=b"x") == (404, "NoSuchUpload")
    assert refusal(client.list_parts, **upload) == (404, "NoSuchUpload")


@unlike_moto("answers the other parts of a completed upload with success")
def test_only_the_same_completion_succeeds_again(client: Any, bucket: str) -> None:
    completion = _upload(client, bucket, "k", bytes(PART_BYTES), b"abc")
    client.complete_multipart_upload(**completion)
    fewer = {**completion, "MultipartUpload": {"Parts": completion["MultipartUpload"]["Parts"][:1]}}
    assert refusal(client.complete_multipart_upload, **fewer) == (404, "NoSuchUpload")
    assert refusal(client.complete_multipart_upload, **{**completion, "Key": "l"}) == (404, "NoSuchUpload")


def test_a_client_whose_answer_was_lost_completes_and_makes_one_object(local_bucket: LocalBucket) -> None:
    made: list[str] = []
    retrying = Config(retries={"total_max_attempts": 3, "mode": "standard"})
    with s3_client(local_bucket, config=retrying) as client:
        completion = _upload(client, "stoker", "lost", b"abc")
        lost = Fault(kind=FaultKind.RESET, position=0.0)
        local_bucket.inject(FaultPlan(script=(lost,), operations=("CompleteMultipartUpload",)))
        local_bucket.service.watchers.append(lambda created: made.append(created.event))
        try:
            client.complete_multipart_upload(**completion, IfNoneMatch="*")
        finally:
            local_bucket.service.watchers.clear()
            local_bucket.inject(FaultPlan())
        assert _read(client, "stoker", "lost") == b"abc"
        client.delete_object(Bucket="stoker", Key="lost")
    assert made == ["ObjectCreated:CompleteMultipartUpload"]


@on_both
def test_uploads_and_their_parts_are_listed(client: Any, bucket: str) -> None:
    for key in ("a", "b", "b"):
        completion = _upload(client, bucket, key, b"abc", b"defg")
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, PaginationConfig={"PageSize": 2})
    uploads = [upload for page in pages for upload in page["Uploads"]]
    assert [upload["Key"] for upload in uploads] == ["a", "b", "b"]
    assert completion["UploadId"] in [upload["UploadId"] for upload in uploads[1:]]
    upload = {name: completion[name] for name in ("Bucket", "Key", "UploadId")}
    pages = client.get_paginator("list_parts").paginate(**upload, PaginationConfig={"PageSize": 1})
    assert [(part["PartNumber"], part["Size"]) for page in pages for part in page["Parts"]] == [(1, 3), (2, 4)]


@unlike_moto("does not tell the number of parts")
def test_a_part_is_read_by_its_number(client: Any, bucket: str) -> None:
    client.complete_multipart_upload(**_upload(client, bucket, "k", bytes(PART_BYTES), b"abc"))
    got = client.get_object(Bucket=bucket, Key="k", PartNumber=2)
    assert (got["Body"].read(), got["PartsCount"], got["ContentLength"]) == (b"abc", 2, 3)
    assert got["ContentRange"] == f"bytes {PART_BYTES}-{PART_BYTES + 2}/{PART_BYTES + 3}"
    assert client.head_object(Bucket=bucket, Key="k", PartNumber=1)["ContentLength"] == PART_BYTES
    assert refusal(client.get_object, Bucket=bucket, Key="k", PartNumber=3)[0] == 416


# --- listings ---------------------------------------------------------------------------------------------------


def _fill(client: Any, bucket: str, *keys: str) -> None:
    for key in keys:
        client.put_object(Bucket=bucket, Key=key, Body=b"x")


@unlike_moto("does not repeat the marker")
def test_a_listing_of_version_1_continues_after_the_last_key(client: Any, bucket: str) -> None:
    _fill(client, bucket, "a", "b+ ü", "c", "d")
    first = client.list_objects(Bucket=bucket, MaxKeys=2)
    assert [entry["Key"] for entry in first["Contents"]] == ["a", "b+ ü"]
    assert (first["IsTruncated"], first["Marker"], "NextMarker" in first) == (True, "", False)
    assert first["Contents"][0]["Owner"]["ID"]
    second = client.list_objects(Bucket=bucket, MaxKeys=2, Marker="b+ ü")
    assert [entry["Key"] for entry in second["Contents"]] == ["c", "d"]
    assert (second["IsTruncated"], second["Marker"]) == (False, "b+ ü")
    after_none = client.list_objects(Bucket=bucket, Marker="bb")  # a marker need not exist
    assert [entry["Key"] for entry in after_none["Contents"]] == ["c", "d"]


@unlike_moto("lists keys before common prefixes, and a common prefix again after it")
def test_a_listing_of_version_1_folds_and_continues_at_its_next_marker(client: Any, bucket: str) -> None:
    _fill(client, bucket, "a/1", "a/2", "b", "c/1", "c/2/3", "d")
    found: list[str] = []
    listing = client.list_objects(Bucket=bucket, Delimiter="/", MaxKeys=1)
    while True:
        found += [entry["Key"] for entry in listing.get("Contents", [])]
        found += [entry["Prefix"] for entry in listing.get("CommonPrefixes", [])]
        if not listing["IsTruncated"]:
            break
        listing = client.list_objects(Bucket=bucket, Delimiter="/", MaxKeys=1, Marker=listing["NextMarker"])
    assert found == ["a/", "b", "c/", "d"]
    within = client.list_objects(Bucket=bucket, Delimiter="/", Prefix="c/")
    assert [entry["Key"] for entry in within["Contents"]] == ["c/1"]
    assert [entry["Prefix"] for entry in within["CommonPrefixes"]] == ["c/2/"]


@on_both
def test_every_object_of_an_unversioned_bucket_has_the_version_null(client: Any, bucket: str) -> None:
    _fill(client, bucket, "a", "b/1", "b/2", "c")
    assert "Status" not in client.get_bucket_versioning(Bucket=bucket)
    pages = client.get_paginator("list_object_versions").paginate(Bucket=bucket, PaginationConfig={"PageSize": 2})
    versions = [version for page in pages for version in page["Versions"]]
    assert [version["Key"] for version in versions] == ["a", "b/1", "b/2", "c"]
    assert {(version["VersionId"], version["IsLatest"], version["Size"]) for version in versions} == {("null", True, 1)}
    folded = client.list_object_versions(Bucket=bucket, Delimiter="/")
    assert [version["Key"] for version in folded["Versions"]] == ["a", "c"]
    assert [entry["Prefix"] for entry in folded["CommonPrefixes"]] == ["b/"]
    assert client.get_object(Bucket=bucket, Key="a", VersionId="null")["Body"].read() == b"x"


@on_both
def test_a_bucket_is_emptied_through_the_listing_of_its_versions(client: Any, bucket: str) -> None:
    _fill(client, bucket, "a", "b", "c")
    versions = client.list_object_versions(Bucket=bucket)["Versions"]
    gone = [{"Key": version["Key"], "VersionId": version["VersionId"]} for version in versions]
    assert "Errors" not in client.delete_objects(Bucket=bucket, Delete={"Objects": gone})
    client.delete_bucket(Bucket=bucket)


@unlike_moto("answers 400")
def test_another_version_than_null_is_none(client: Any, bucket: str) -> None:
    _fill(client, bucket, "a")
    assert refusal(client.get_object, Bucket=bucket, Key="a", VersionId="v1") == (404, "NoSuchVersion")
    gone = client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "a", "VersionId": "v1"}]})
    assert [error["Code"] for error in gone["Errors"]] == ["NoSuchVersion"]
    marked = {"Bucket": bucket, "VersionIdMarker": "null"}
    assert refusal(client.list_object_versions, **marked) == (400, "InvalidArgument")


# --- tags and headers -------------------------------------------------------------------------------------------


@on_both
def test_tags_are_put_read_and_deleted_beside_the_object(client: Any, bucket: str) -> None:
    target = {"Bucket": bucket, "Key": "k"}
    tag = client.put_object(**target, Body=b"abc", Tagging="a%20b=1&c=")["ETag"]
    expected = [{"Key": "a b", "Value": "1"}, {"Key": "c", "Value": ""}]
    assert client.get_object_tagging(**target)["TagSet"] == expected
    client.put_object_tagging(**target, Tagging={"TagSet": [{"Key": "d", "Value": "2"}]})
    assert client.get_object_tagging(**target)["TagSet"] == [{"Key": "d", "Value": "2"}]
    assert client.get_object(**target)["TagCount"] == 1
    assert client.head_object(**target)["ETag"] == tag
    client.delete_object_tagging(**target)
    assert client.get_object_tagging(**target)["TagSet"] == []


REFUSED_TAGS = {
    "repeated": [("k", "1"), ("k", "2")],
    "eleven": [(str(number), "") for number in range(11)],
    "long name": [("k" * 129, "")],
    "long value": [("k", "v" * 257)],
}


@pytest.mark.parametrize(("server", "case", "tags"), on_each(REFUSED_TAGS, moto={"repeated": "takes the last one"}))
def test_tags_that_s3_does_not_take_are_refused(
    client: Any, bucket: str, case: str, tags: list[tuple[str, str]]
) -> None:
    _fill(client, bucket, "k")
    listed = {"TagSet": [{"Key": name, "Value": value} for name, value in tags]}
    assert refusal(client.put_object_tagging, Bucket=bucket, Key="k", Tagging=listed)[0] == 400
    assert client.get_object_tagging(Bucket=bucket, Key="k")["TagSet"] == []


@on_both
def test_a_signed_read_may_override_response_headers(client: Any, bucket: str) -> None:
    _fill(client, bucket, "k")
    asked = {"ResponseContentType": "x/y", "ResponseContentDisposition": 'attachment; filename="a"'}
    got = client.get_object(Bucket=bucket, Key="k", **asked)
    assert (got["ContentType"], got["ContentDisposition"]) == ("x/y", 'attachment; filename="a"')
    assert client.head_object(Bucket=bucket, Key="k")["ContentType"] == "binary/octet-stream"
