from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stoker import ConfigError, NotFoundError, S3Options, open_store
from stoker._base.meter import PriceKey
from stoker._stores.aws_credentials import botocore_session
from stoker._stores.object_store import price_key, with_meter
from stoker._stores.s3 import S3Endpoint, _resolve_endpoint
from stoker_local import LocalBucket

ENVIRONMENT = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*ENVIRONMENT, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "config"
    config.write_text("[profile work]\nregion = ap-south-1\nendpoint_url = http://profile:9000\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


def resolve(options: S3Options, bucket: str = "bucket", **environment: str) -> S3Endpoint:
    return _resolve_endpoint(bucket, options, botocore_session(options.profile, None), environment)


def test_aws_is_addressed_by_virtual_host_in_the_region() -> None:
    assert resolve(S3Options(region="eu-west-1")) == S3Endpoint(
        endpoint_url=None, region="eu-west-1", base_url="https://bucket.s3.eu-west-1.amazonaws.com"
    )


def test_a_bucket_with_dots_is_addressed_by_path_since_no_certificate_fits() -> None:
    target = resolve(S3Options(region="eu-west-1"), "a.b")
    assert target.base_url == "https://s3.eu-west-1.amazonaws.com/a.b"


def test_china_has_its_own_domain() -> None:
    assert resolve(S3Options(region="cn-north-1")).base_url == "https://bucket.s3.cn-north-1.amazonaws.com.cn"


def test_a_custom_endpoint_is_addressed_by_path() -> None:
    target = resolve(S3Options(endpoint_url="http://host:9000/"))
    assert (target.endpoint_url, target.base_url) == ("http://host:9000", "http://host:9000/bucket")


def test_the_region_comes_from_options_then_environment_then_profile_then_default() -> None:
    work = S3Options(profile="work")
    assert resolve(S3Options(region="r-1"), AWS_REGION="r-2").region == "r-1"
    assert resolve(work, AWS_REGION="r-2").region == "r-2"
    assert resolve(work).region == "ap-south-1"
    assert resolve(S3Options()).region == "us-east-1"


def test_the_older_region_variable_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "r-3")
    assert resolve(S3Options()).region == "r-3"


def test_the_endpoint_comes_from_options_then_environment_then_profile() -> None:
    work = S3Options(profile="work")
    both = {"AWS_ENDPOINT_URL": "http://general", "AWS_ENDPOINT_URL_S3": "http://special"}
    assert resolve(S3Options(endpoint_url="http://given"), **both).endpoint_url == "http://given"
    assert resolve(work, **both).endpoint_url == "http://special"
    assert resolve(work, AWS_ENDPOINT_URL="http://general").endpoint_url == "http://general"
    assert resolve(work).endpoint_url == "http://profile:9000"


def test_prices_are_found_by_the_endpoint_wherever_it_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    def key_of(options: S3Options) -> PriceKey:
        return price_key(open_store("s3://bucket/train", options=options))

    assert key_of(S3Options()) == PriceKey("s3://bucket/train")
    assert key_of(S3Options(profile="work")) == PriceKey("s3://bucket/train", "http://profile:9000")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://0a.r2.cloudflarestorage.com")
    assert key_of(S3Options(profile="work")).endpoint == "https://0a.r2.cloudflarestorage.com"
    assert key_of(S3Options(endpoint_url="http://minio:9000")).endpoint == "http://minio:9000"
    assert key_of(S3Options(prices="r2")).name == "r2"
    with pytest.raises(ConfigError, match=r"the name of a store in the price file must be .*, not 's3://'"):
        S3Options(prices="s3://")


def test_prices_of_a_store_in_use_are_found_without_another_session_of_botocore(
    local_bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", local_bucket.url)
    options = S3Options(access_key_id="stoker", secret_access_key="stoker-secret")
    store = open_store("s3://stoker/prices", options=options)

    async def main() -> PriceKey:
        with pytest.raises(NotFoundError):
            await store.head("x")
        monkeypatch.delenv("AWS_ENDPOINT_URL")
        monkeypatch.setattr("stoker._stores.s3.botocore_session", None)
        found = price_key(with_meter(store))
        await store.close()
        return found

    assert asyncio.run(main()).endpoint == local_bucket.url


def test_configured_endpoints_can_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert resolve(S3Options(profile="work"), AWS_ENDPOINT_URL="http://general").endpoint_url is None


def test_an_unknown_profile_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="absent"):
        resolve(S3Options(profile="absent"))
