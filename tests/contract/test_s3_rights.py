"""Every operation of the local bucket on a key or a bucket verifies the caller and its permissions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from botocore import UNSIGNED
from botocore.config import Config

from stoker_local import BucketConfig, BucketSpec, KeyPair, LocalBucket, running_bucket
from support.local_bucket import exchange, s3_client
from support.s3_servers import refusal

OWNER = KeyPair(access_key="owner", secret_key="s")
READER = KeyPair(access_key="reader", secret_key="s", read_only=True)
GUEST = KeyPair(access_key="guest", secret_key="s", buckets=("theirs",))
CONFIG = BucketConfig(
    keys=(OWNER, READER, GUEST),
    buckets=(
        BucketSpec(name="ours"),
        BucketSpec(name="theirs"),
        BucketSpec(name="public", anonymous=True),
        BucketSpec(name="costly", requester_pays=True),
    ),
)
SOURCE = {"Bucket": "ours", "Key": "k"}
READS: dict[str, dict[str, Any]] = {
    "get_object": SOURCE,
    "get_object_tagging": SOURCE,
    "get_bucket_versioning": {"Bucket": "ours"},
    "list_objects": {"Bucket": "ours"},
    "list_object_versions": {"Bucket": "ours"},
    "list_multipart_uploads": {"Bucket": "ours"},
    "list_parts": {**SOURCE, "UploadId": "upload-00000001"},
}
WRITES: dict[str, dict[str, Any]] = {
    "copy_object": {"Bucket": "ours", "Key": "copy", "CopySource": SOURCE},
    "upload_part_copy": {**SOURCE, "UploadId": "upload-00000001", "PartNumber": 1, "CopySource": SOURCE},
    "put_object_tagging": {**SOURCE, "Tagging": {"TagSet": []}},
    "delete_object_tagging": SOURCE,
    "delete_object": SOURCE,
}
OPERATIONS = {**READS, **WRITES}


@pytest.fixture(scope="module")
def served() -> Iterator[LocalBucket]:
    with running_bucket(CONFIG) as bucket:
        for name in ("ours", "theirs", "public", "costly"):
            bucket.put(name, "k", b"abc")
        with client_of(bucket, OWNER) as owner:
            owner.create_multipart_upload(**SOURCE)
        yield bucket


@contextmanager
def client_of(bucket: LocalBucket, key: KeyPair) -> Iterator[Any]:
    with s3_client(bucket, aws_access_key_id=key.access_key, aws_secret_access_key=key.secret_key) as client:
        yield client


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_wrong_signature_is_refused(served: LocalBucket, operation: str) -> None:
    with client_of(served, replace(OWNER, secret_key="wrong")) as client:
        assert refusal(getattr(client, operation), **OPERATIONS[operation]) == (403, "SignatureDoesNotMatch")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_unsigned_operations_are_refused(served: LocalBucket, operation: str) -> None:
    with s3_client(served, config=Config(signature_version=UNSIGNED)) as client:
        assert refusal(getattr(client, operation), **OPERATIONS[operation]) == (403, "AccessDenied")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_key_of_another_bucket_is_refused(served: LocalBucket, operation: str) -> None:
    with client_of(served, GUEST) as client:
        assert refusal(getattr(client, operation), **OPERATIONS[operation]) == (403, "AccessDenied")


def test_a_key_that_may_only_read_writes_nothing(served: LocalBucket) -> None:
    with client_of(served, READER) as client:
        assert {refusal(getattr(client, name), **READS[name])[0] for name in READS} == {200}
        assert {refusal(getattr(client, name), **WRITES[name])[0] for name in WRITES} == {403}


def test_a_copy_reads_only_what_its_key_may_read(served: LocalBucket) -> None:
    copy = {"Bucket": "theirs", "Key": "copy"}
    with client_of(served, GUEST) as client:
        assert refusal(client.copy_object, **copy, CopySource=SOURCE) == (403, "AccessDenied")
        assert refusal(client.copy_object, **copy, CopySource={"Bucket": "absent", "Key": "k"}) == (403, "AccessDenied")
        assert refusal(client.copy_object, **copy, CopySource={"Bucket": "theirs", "Key": "k"}) == (200, "")


def test_a_copy_from_a_requester_pays_bucket_is_reported(served: LocalBucket) -> None:
    copy = {"Bucket": "ours", "Key": "copy", "CopySource": {"Bucket": "costly", "Key": "k"}}
    with client_of(served, OWNER) as client:
        assert refusal(client.copy_object, **copy) == (403, "AccessDenied")
        assert refusal(client.copy_object, **copy, RequestPayer="requester") == (200, "")


def test_a_copy_source_that_is_not_signed_is_refused(served: LocalBucket) -> None:
    with client_of(served, OWNER) as client:
        url = client.generate_presigned_url("put_object", Params={"Bucket": "ours", "Key": "new"})
    target = url.removeprefix(served.url)
    request = f"PUT {target} HTTP/1.1\r\nHost: {served.url.removeprefix('http://')}\r\nConnection: close\r\n"
    answer = exchange(served, f"{request}x-amz-copy-source: ours/k\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 403")
    assert "new" not in served.objects["ours"]


@pytest.mark.parametrize("value", ["a%0d%0aSet-Cookie:b", "%C3%BC", "a%00"])
def test_a_header_that_a_read_requests_cannot_end_the_head(served: LocalBucket, value: str) -> None:
    answer = exchange(
        served, f"GET /public/k?response-content-type={value} HTTP/1.1\r\nConnection: close\r\n\r\n".encode()
    )
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"Set-Cookie" not in answer


def test_only_a_signed_read_may_override_response_headers(served: LocalBucket) -> None:
    answer = exchange(served, b"GET /public/k?response-content-type=x HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert b"<Code>InvalidRequest</Code>" in answer


def test_what_is_not_a_number_or_an_encoding_is_an_invalid_argument(served: LocalBucket) -> None:
    for query in ("max-keys=x", "max-keys=-1", "encoding-type=gzip", "versions&max-keys=1e3", "uploads&max-uploads=x"):
        answer = exchange(served, f"GET /public?{query} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
        assert b"<Code>InvalidArgument</Code>" in answer, query
