"""What S3 refuses, from the local bucket: which verifies signatures, regions and expiry as S3 does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from stoker import Bytes, HttpOptions, Packer, RetryingStore, S3Options, open_store
from stoker.abc import ObjectInfo, Store
from stoker.errors import (
    BucketNotFoundError,
    ConfigError,
    ConnectionLostError,
    CredentialsError,
    DeadlineError,
    PermissionDeniedError,
    ServerError,
    StoreError,
    ThrottledError,
    TruncatedError,
    WrongRegionError,
)
from stoker_local import BucketConfig, BucketSpec, Fault, FaultKind, FaultPlan, KeyPair, LocalBucket, running_bucket
from support.stores import list_keys, read_range, run_check
from support.uses import USES, Use, error_of, every_use
from support.waiting import until

FIRST = KeyPair(access_key="first", secret_key="first-secret", session_token="first-token")
SECOND = KeyPair(access_key="second", secret_key="second-secret", session_token="second-token")
EXPIRED = KeyPair(access_key="expired", secret_key="s", session_token="t", expires_at=1.0)
CONFIG = BucketConfig(
    keys=(FIRST, SECOND, EXPIRED),
    buckets=(
        BucketSpec(name="ours"),
        BucketSpec(name="abroad", region="eu-west-1"),
        BucketSpec(name="public", anonymous=True),
        BucketSpec(name="costly", requester_pays=True),
    ),
)


@pytest.fixture(scope="module")
def served() -> Iterator[LocalBucket]:
    with running_bucket(CONFIG) as bucket:
        for name in ("ours", "public", "costly"):
            bucket.put(name, "x", b"0123456789")
        yield bucket


@pytest.fixture
def bucket(served: LocalBucket) -> Iterator[LocalBucket]:
    yield served
    served.inject(FaultPlan())


def options(bucket: LocalBucket, key: KeyPair = FIRST, region: str = "us-east-1") -> S3Options:
    return S3Options(
        endpoint_url=bucket.url,
        region=region,
        access_key_id=key.access_key,
        secret_access_key=key.secret_key,
        session_token=key.session_token,
    )


@every_use
def test_a_bucket_elsewhere_is_a_wrong_region_that_is_named(bucket: LocalBucket, use: Use) -> None:
    error = error_of("s3://abroad", options(bucket), use)
    assert isinstance(error, WrongRegionError)
    assert "eu-west-1" in str(error)
    assert "AWS_REGION" in str(error)


@every_use
def test_a_signature_for_another_region_is_a_wrong_region_that_is_named(bucket: LocalBucket, use: Use) -> None:
    error = error_of("s3://ours", options(bucket, region="eu-north-1"), use)
    assert isinstance(error, WrongRegionError)
    assert "us-east-1" in str(error)


@every_use
@pytest.mark.parametrize(
    "key",
    [
        KeyPair(access_key="nobody", secret_key="private-part"),
        KeyPair(access_key="first", secret_key="private-part"),
    ],
    ids=["unknown-key", "wrong-secret"],
)
def test_wrong_keys_are_a_credentials_error_that_does_not_repeat_them(
    bucket: LocalBucket, use: Use, key: KeyPair
) -> None:
    error = error_of("s3://ours", options(bucket, key), use)
    assert isinstance(error, CredentialsError)
    assert "private-part" not in str(error)


@every_use
def test_static_credentials_that_expired_are_a_credentials_error(bucket: LocalBucket, use: Use) -> None:
    error = error_of("s3://ours", options(bucket, EXPIRED), use)
    assert isinstance(error, CredentialsError)
    assert "expired" in str(error)


@every_use
def test_expired_credentials_are_looked_up_once_more(
    bucket: LocalBucket, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = S3Options(endpoint_url=bucket.url, region="us-east-1")
    _enter(monkeypatch, EXPIRED)

    async def check(store: Store) -> None:
        with pytest.raises(CredentialsError):
            await use(store)
        _enter(monkeypatch, SECOND)
        await asyncio.gather(*(use(store) for _ in range(4)))

    run_check(open_store("s3://ours", options=settings), check)


def _enter(monkeypatch: pytest.MonkeyPatch, key: KeyPair) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key.secret_key)
    monkeypatch.setenv("AWS_SESSION_TOKEN", key.session_token)


@every_use
def test_a_missing_bucket_is_named(bucket: LocalBucket, use: Use) -> None:
    error = error_of("s3://nowhere", options(bucket), use)
    assert isinstance(error, BucketNotFoundError)
    assert "s3://nowhere" in str(error)


@every_use
def test_anonymous_requests_are_denied_where_the_bucket_is_not_public(bucket: LocalBucket, use: Use) -> None:
    settings = S3Options(endpoint_url=bucket.url, region="us-east-1", anonymous=True)
    assert isinstance(error_of("s3://ours", settings, use), PermissionDeniedError)


def test_anonymous_requests_read_a_public_bucket(bucket: LocalBucket) -> None:
    async def check(store: Store) -> None:
        assert (await store.get("x"))[0] == b"0123456789"
        assert (await store.head("x")).size_bytes == 10
        assert await read_range(store, "x", 2, 4) == b"23"
        assert await list_keys(store) == ["x"]

    settings = S3Options(endpoint_url=bucket.url, region="us-east-1", anonymous=True)
    run_check(open_store("s3://public", options=settings), check)


@every_use
def test_a_requester_pays_bucket_says_which_option_it_needs(bucket: LocalBucket, use: Use) -> None:
    error = error_of("s3://costly", options(bucket), use)
    assert isinstance(error, PermissionDeniedError)
    assert "requester_pays=True" in str(error)


def test_requester_pays_opens_every_use_of_such_a_bucket(bucket: LocalBucket) -> None:
    async def check(store: Store) -> None:
        for use in USES.values():
            await use(store)

    settings = replace(options(bucket), requester_pays=True)
    run_check(open_store("s3://costly", options=settings), check)


FAULTS: dict[FaultKind, type[StoreError]] = {
    FaultKind.SLOW_DOWN: ThrottledError,
    FaultKind.INTERNAL_ERROR: ServerError,
    FaultKind.RESET: TruncatedError,
    FaultKind.TRUNCATE: TruncatedError,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_read_is_a_transient_error_and_the_next_read_succeeds(
    bucket: LocalBucket, fault: FaultKind
) -> None:
    async def check(store: Store) -> None:
        for use in (USES["get"], USES["range"]):
            bucket.inject(FaultPlan(script=(Fault(kind=fault, retry_after_seconds=7),)))
            with pytest.raises(FAULTS[fault]) as caught:
                await use(store)
            asked = 7.0 if fault is FaultKind.SLOW_DOWN else None
            assert getattr(caught.value, "retry_after_seconds", None) == asked
            await use(store)

    run_check(open_store("s3://ours", options=options(bucket)), check)


@pytest.mark.parametrize("fault", [FaultKind.SLOW_DOWN, FaultKind.INTERNAL_ERROR])
def test_a_fault_in_the_control_plane_is_transient_and_not_retried_here(bucket: LocalBucket, fault: FaultKind) -> None:
    async def check(store: Store) -> None:
        for name, operation in (("put", "PutObject"), ("list", "ListObjectsV2"), ("delete", "DeleteObject")):
            one = Fault(kind=fault, retry_after_seconds=7)
            bucket.inject(FaultPlan(script=(one,), operations=(operation,)))
            with pytest.raises(FAULTS[fault]):
                await USES[name](store)
            await USES[name](store)

    run_check(open_store("s3://ours", options=options(bucket)), check)


def test_a_stalled_read_is_a_deadline_error(bucket: LocalBucket) -> None:
    stall = Fault(kind=FaultKind.STALL, stall_seconds=30)
    bucket.inject(FaultPlan(script=(stall,)))
    settings = replace(options(bucket), http=HttpOptions(read_timeout_seconds=0.1))
    assert isinstance(error_of("s3://ours", settings, USES["range"]), DeadlineError)


@every_use
def test_an_unserved_endpoint_is_a_lost_connection(bucket: LocalBucket, use: Use) -> None:
    settings = S3Options(
        endpoint_url="http://127.0.0.1:1", region="us-east-1", access_key_id="a", secret_access_key="b"
    )
    assert isinstance(error_of("s3://ours", settings, use), ConnectionLostError)


@every_use
def test_without_any_credentials_the_error_says_how_to_give_some(
    bucket: LocalBucket, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    settings = S3Options(endpoint_url=bucket.url, region="us-east-1")
    error = error_of("s3://ours", settings, use)
    assert isinstance(error, CredentialsError)
    assert "AWS_ACCESS_KEY_ID" in str(error)
    assert "anonymous=True" in str(error)


def test_an_unknown_profile_is_a_configuration_error(bucket: LocalBucket) -> None:
    async def check(store: Store) -> None:
        with pytest.raises(ConfigError, match="nobody's-profile"):
            await store.get("x")

    run_check(open_store("s3://ours", options=S3Options(profile="nobody's-profile")), check)


def test_the_standard_environment_is_enough(bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)

    async def check(store: Store) -> None:
        written = await store.put("environment", b"1")
        assert await store.get("environment") == (b"1", written)

    run_check(open_store("s3://ours/sub"), check)


def test_a_cancelled_read_closes_its_connection_and_no_other(bucket: LocalBucket) -> None:
    bucket.put("ours", "large", b"\x01" * (1 << 20))

    async def check(store: Store) -> None:
        await asyncio.gather(*(read_range(store, "x", 0, 4) for _ in range(2)))
        kept = bucket.counts.connections
        assert kept == 2
        bucket.inject(FaultPlan(script=(Fault(kind=FaultKind.STALL),)))
        into = bytearray(1 << 20)
        read = asyncio.ensure_future(store.get_range("large", 0, 1 << 20, into=memoryview(into)))
        await until(lambda: into[0] == 1)
        read.cancel()
        await asyncio.wait([read])
        assert read.cancelled()
        await until(lambda: bucket.counts.connections == kept - 1)

    run_check(open_store("s3://ours", options=options(bucket)), check)


def test_one_connection_serves_many_reads(bucket: LocalBucket) -> None:
    async def check(store: Store) -> None:
        before = bucket.counts.connections_opened
        for _ in range(10):
            info = await store.get_range("x", 0, 4, into=memoryview(bytearray(4)))
            assert isinstance(info, ObjectInfo)
        assert bucket.counts.connections_opened == before + 1

    run_check(open_store("s3://ours", options=options(bucket)), check)


@pytest.mark.parametrize("kind", [FaultKind.RESET, FaultKind.TRUNCATE])
def test_a_conditional_write_whose_answer_is_lost_is_known_as_ones_own(bucket: LocalBucket, kind: FaultKind) -> None:
    key, lost = f"lost-{kind.value}", FaultPlan(script=(Fault(kind=kind, position=0.0),), operations=("PutObject",))

    async def check(store: Store) -> None:
        bucket.inject(lost)
        bucket.counts.reset()
        with pytest.raises(ConnectionLostError):
            await store.put(key, b"1", if_absent=True)
        assert bucket.counts.requests["PutObject"] == 1
        assert bucket.objects["ours"][key].data == b"1"
        bucket.inject(lost)
        written = await RetryingStore(store).put(key, b"2", if_tag=(await store.head(key)).tag)
        assert await store.get(key) == (b"2", written)

    run_check(open_store("s3://ours", options=options(bucket)), check)


def test_a_pack_survives_the_loss_of_the_answers_to_its_commit(bucket: LocalBucket) -> None:
    lost = Fault(kind=FaultKind.RESET, position=0.0)
    bucket.inject(FaultPlan(script=(lost, None, lost), operations=("PutObject",), key_prefix="set/manifest"))
    with Packer("s3://ours/set", schema={"a": Bytes()}, options=options(bucket)) as packer:
        packer.write({"a": b"1"})
    assert sorted(key for key in bucket.objects["ours"] if key.startswith("set/manifest")) == [
        "set/manifest.safetensors",
        "set/manifests/00000001.safetensors",
    ]
