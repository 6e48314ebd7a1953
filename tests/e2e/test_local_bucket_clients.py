from __future__ import annotations

import asyncio
import hashlib
import io
import os
import time
from collections.abc import Iterator
from typing import Any

import aioboto3
import aiohttp
import pytest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from yarl import URL

from stoker_local import BucketConfig, BucketSpec, KeyPair, LocalBucket, running_bucket
from support.local_bucket import s3_client, signed_headers


@pytest.fixture(scope="module")
def bucket() -> Iterator[LocalBucket]:
    with running_bucket() as running:
        yield running


@pytest.fixture
def client(bucket: LocalBucket) -> Iterator[Any]:
    bucket.objects["stoker"].clear()
    with s3_client(bucket) as made:
        yield made


def _code(caught: pytest.ExceptionInfo[ClientError]) -> tuple[str, int]:
    response = caught.value.response
    return response["Error"]["Code"], response["ResponseMetadata"]["HTTPStatusCode"]


@pytest.mark.parametrize("key", ["plain", "a b/ü+%25&?#.bin", "slash//slash", "☃/" + "x" * 900, "%2F"])
def test_an_object_comes_back_as_it_was_put(client: Any, key: str) -> None:
    data = os.urandom(100_001)
    tag = client.put_object(Bucket="stoker", Key=key, Body=data, ContentType="x/y", Metadata={"note": "n"})["ETag"]
    got = client.get_object(Bucket="stoker", Key=key)
    assert got["Body"].read() == data
    assert got["ETag"] == tag == f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
    assert (got["ContentType"], got["Metadata"]) == ("x/y", {"note": "n"})
    assert client.head_object(Bucket="stoker", Key=key)["ContentLength"] == len(data)
    assert [o["Key"] for o in client.list_objects_v2(Bucket="stoker")["Contents"]] == [key]
    client.delete_object(Bucket="stoker", Key=key)
    client.delete_object(Bucket="stoker", Key=key)
    with pytest.raises(ClientError) as caught:
        client.get_object(Bucket="stoker", Key=key)
    assert _code(caught) == ("NoSuchKey", 404)


def test_ranges_are_inclusive_open_or_suffixes(client: Any) -> None:
    data = bytes(range(256)) * 4096
    client.put_object(Bucket="stoker", Key="k", Body=data)
    for header, part in {"bytes=5-9": data[5:10], "bytes=1000000-": data[1_000_000:], "bytes=-7": data[-7:]}.items():
        got = client.get_object(Bucket="stoker", Key="k", Range=header)
        assert (got["Body"].read(), got["ContentLength"]) == (part, len(part))
    assert got["ContentRange"] == f"bytes {len(data) - 7}-{len(data) - 1}/{len(data)}"
    with pytest.raises(ClientError) as caught:
        client.get_object(Bucket="stoker", Key="k", Range=f"bytes={len(data)}-")
    assert _code(caught) == ("InvalidRange", 416)


def test_reads_are_conditional_on_the_tag(client: Any) -> None:
    tag = client.put_object(Bucket="stoker", Key="k", Body=b"1")["ETag"]
    assert client.get_object(Bucket="stoker", Key="k", IfMatch=tag)["Body"].read() == b"1"
    with pytest.raises(ClientError) as caught:
        client.get_object(Bucket="stoker", Key="k", IfMatch='"other"')
    assert _code(caught) == ("PreconditionFailed", 412)
    with pytest.raises(ClientError) as caught:
        client.get_object(Bucket="stoker", Key="k", IfNoneMatch=tag)
    assert _code(caught) == ("304", 304)


def test_writes_are_conditional_on_absence_or_the_tag(client: Any) -> None:
    tag = client.put_object(Bucket="stoker", Key="k", Body=b"1", IfNoneMatch="*")["ETag"]
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket="stoker", Key="k", Body=b"2", IfNoneMatch="*")
    assert _code(caught) == ("PreconditionFailed", 412)
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket="stoker", Key="k", Body=b"2", IfMatch='"other"')
    assert _code(caught) == ("PreconditionFailed", 412)
    client.put_object(Bucket="stoker", Key="k", Body=b"3", IfMatch=tag)
    assert client.get_object(Bucket="stoker", Key="k")["Body"].read() == b"3"
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket="stoker", Key="absent", Body=b"3", IfMatch=tag)
    assert _code(caught) == ("NoSuchKey", 404)


def test_a_listing_is_paged_in_order_and_folds_prefixes(client: Any) -> None:
    keys = sorted(f"{folder}/{name}" for folder in ("a", "b+b", "ü") for name in range(7))
    for key in keys:
        client.put_object(Bucket="stoker", Key=key, Body=b"x")
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="stoker", PaginationConfig={"PageSize": 4})
    assert [o["Key"] for page in pages for o in page["Contents"]] == keys
    folded = client.list_objects_v2(Bucket="stoker", Delimiter="/")
    assert [p["Prefix"] for p in folded["CommonPrefixes"]] == ["a/", "b+b/", "ü/"]
    after = client.list_objects_v2(Bucket="stoker", Prefix="b+b/", StartAfter="b+b/4")
    assert [o["Key"] for o in after["Contents"]] == ["b+b/5", "b+b/6"]


def test_many_objects_are_deleted_at_once(client: Any) -> None:
    for key in ("a", "b", "<c&>"):
        client.put_object(Bucket="stoker", Key=key, Body=b"x")
    gone = client.delete_objects(Bucket="stoker", Delete={"Objects": [{"Key": k} for k in ("a", "<c&>", "never")]})
    assert [d["Key"] for d in gone["Deleted"]] == ["a", "<c&>", "never"]
    assert [o["Key"] for o in client.list_objects_v2(Bucket="stoker")["Contents"]] == ["b"]


def test_a_large_upload_goes_in_parts(client: Any, bucket: LocalBucket) -> None:
    data = os.urandom(17 << 20)
    client.upload_fileobj(io.BytesIO(data), "stoker", "large")
    got = client.get_object(Bucket="stoker", Key="large")
    assert got["Body"].read() == data
    assert got["ETag"].endswith('-3"')
    assert not bucket.service.buckets["stoker"].uploads


def test_an_upload_in_parts_refuses_what_s3_refuses(client: Any, bucket: LocalBucket) -> None:
    target = {"Bucket": "stoker", "Key": "k"}
    upload = {**target, "UploadId": client.create_multipart_upload(**target)["UploadId"]}
    tags = [client.upload_part(**upload, PartNumber=n, Body=b"small")["ETag"] for n in (1, 2)]

    def complete(*parts: tuple[int, str]) -> str:
        named = [{"PartNumber": number, "ETag": tag} for number, tag in parts]
        with pytest.raises(ClientError) as caught:
            client.complete_multipart_upload(**upload, MultipartUpload={"Parts": named})
        return _code(caught)[0]

    assert complete((1, tags[0]), (2, tags[1])) == "EntityTooSmall"
    assert complete((2, tags[1]), (1, tags[0])) == "InvalidPartOrder"
    assert complete((3, tags[0])) == "InvalidPart"
    assert complete((1, '"other"')) == "InvalidPart"
    client.abort_multipart_upload(**upload)
    assert complete((1, tags[0])) == "NoSuchUpload"
    assert not bucket.objects["stoker"]


def test_buckets_are_made_found_and_removed(client: Any) -> None:
    client.create_bucket(Bucket="new-one")
    assert "new-one" in [b["Name"] for b in client.list_buckets()["Buckets"]]
    assert client.head_bucket(Bucket="new-one")["BucketRegion"] == "us-east-1"
    assert client.get_bucket_location(Bucket="new-one")["LocationConstraint"] is None
    client.put_object(Bucket="new-one", Key="k", Body=b"")
    with pytest.raises(ClientError) as caught:
        client.delete_bucket(Bucket="new-one")
    assert _code(caught) == ("BucketNotEmpty", 409)
    client.delete_object(Bucket="new-one", Key="k")
    client.delete_bucket(Bucket="new-one")
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket="new-one", Key="k", Body=b"")
    assert _code(caught) == ("NoSuchBucket", 404)
    with pytest.raises(ClientError) as caught:
        client.head_bucket(Bucket="new-one")
    assert _code(caught) == ("404", 404)


def test_boto3_sees_expired_credentials(bucket: LocalBucket) -> None:
    guest = KeyPair(access_key="guest", secret_key="s", session_token="t", expires_at=time.time() - 1)
    bucket.service.keys["guest"] = guest
    secrets = {"aws_access_key_id": "guest", "aws_secret_access_key": "s", "aws_session_token": "t"}
    with s3_client(bucket, **secrets) as client, pytest.raises(ClientError) as caught:
        client.get_object(Bucket="stoker", Key="k")
    assert _code(caught) == ("ExpiredToken", 400)


def test_boto3s_presigned_url_needs_no_key(bucket: LocalBucket, client: Any) -> None:
    client.put_object(Bucket="stoker", Key="a b", Body=b"presigned")
    with s3_client(bucket, config=Config(signature_version="s3v4")) as signer:
        url = signer.generate_presigned_url("get_object", Params={"Bucket": "stoker", "Key": "a b"})

    async def read() -> bytes:
        async with aiohttp.ClientSession() as session, session.get(URL(url, encoded=True)) as response:
            assert response.status == 200
            return await response.read()

    assert asyncio.run(read()) == b"presigned"


def test_aioboto3_and_aiohttp_read_on_the_loop_that_serves() -> None:
    data = os.urandom(3 << 20)

    async def exercise() -> None:
        config = BucketConfig(buckets=(BucketSpec(name="paid", requester_pays=True),))
        async with LocalBucket(config) as bucket, aiohttp.ClientSession(auto_decompress=False) as session:
            keys = {"aws_access_key_id": "stoker", "aws_secret_access_key": "stoker-secret"}
            aws = aioboto3.Session(**keys, region_name="us-east-1")
            async with aws.client("s3", endpoint_url=bucket.url) as client:
                await client.put_object(Bucket="paid", Key="ü/k", Body=data, RequestPayer="requester")
            url = f"{bucket.url}/paid/%C3%BC/k"
            wanted = {"Range": "bytes=1000-2000999", "x-amz-request-payer": "requester"}
            headers = signed_headers(url, headers=wanted, credentials=Credentials("stoker", "stoker-secret"))
            async with session.get(URL(url, encoded=True), headers=headers) as response:
                assert response.status == 206
                assert await response.read() == data[1000:2_001_000]
            assert bucket.counts.requests == {"PutObject": 1, "GetObject": 1}
            assert (bucket.counts.bytes_in, bucket.counts.bytes_out) == (len(data), 2_000_000)

    asyncio.run(exercise())
