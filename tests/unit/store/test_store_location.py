from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker import GcsOptions, HttpOptions, S3Options, StoreOptions, open_store
from stoker._stores.location import parse_url
from stoker.abc import Store
from stoker.errors import ConfigError, MissingExtraError, StoreError
from support.cases import for_each
from support.stores import run_check


@pytest.mark.parametrize(
    ("url", "scheme", "bucket", "prefix"),
    [
        ("s3://bucket", "s3", "bucket", ""),
        ("s3://bucket/", "s3", "bucket", ""),
        ("s3://bucket/a/b c%20/", "s3", "bucket", "a/b c%20"),
        ("gs://bucket.with.dots/a?b#c", "gs", "bucket.with.dots", "a?b#c"),
        ("memory://name/x", "memory", "name", "x"),
        ("/data/train/", "file", "/data/train", ""),
        ("/", "file", "/", ""),
        ("file:///data/a%20b", "file", "/data/a b", ""),
        ("file://localhost/data", "file", "/data", ""),
    ],
)
def test_a_url_is_taken_apart(url: str, scheme: str, bucket: str, prefix: str) -> None:
    location = parse_url(url)
    assert (location.scheme, location.bucket, location.prefix) == (scheme, bucket, prefix)


def test_a_relative_path_keeps_its_place_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    location = parse_url(Path("sub") / "folder")
    os.chdir("/")
    assert location.bucket == str(tmp_path / "sub" / "folder")
    assert location.url == "sub/folder"


@for_each(
    "url",
    [
        "",
        "s3://",
        "s3:///key",
        "s3://a b/key",
        "s3://bücket",
        "http://host/x",
        "S3://bucket",
        "file://host/x",
        "file://",
        "file:///a?b",
        "nul\0",
        "s3://..",
        "s3://./x",
    ],
)
def test_what_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_url(url)


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s3:/bucket/x", "s3://bucket/prefix"),
        ("gs:/bucket/x", "gs://bucket/prefix"),
        ("S3:/bucket", "S3://bucket/prefix"),
        ("memory:/x", "memory://bucket/prefix"),
        ("stoker+https:/host/v1/x", "stoker+https://bucket/prefix"),
        ("anything-1.0:/x", "anything-1.0://bucket/prefix"),
        ("s3:bucket/x", "s3://bucket/prefix"),
        ("file:/folder", "file:///folder"),
        (Path("s3://bucket/x"), "s3://bucket/prefix"),
    ],
)
def test_a_url_that_lacks_a_slash_is_no_folder(url: str | Path, meant: str) -> None:
    with pytest.raises(ConfigError, match="lacks a slash") as caught:
        open_store(url)
    assert meant in str(caught.value)


@pytest.mark.parametrize("path", ["./s3:/bucket", "runs/12:/x", "/data/s3:/x", "a:b/c", "12:30"])
def test_a_folder_may_have_a_colon_in_its_name(path: str) -> None:
    assert parse_url(path).scheme == "file"


@pytest.mark.parametrize(
    "url",
    [
        "s3:/key:secret-part@bucket/x",
        "s3://key:secret-part@bucket/x",
        "gs://secret-part:9000/x",
        "memory://secret-part@x",
        "file://user:secret-part@host/x",
        "https://bucket.s3.amazonaws.com/k?X-Amz-Signature=secret-part",
    ],
)
def test_a_url_with_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert "secret-part" not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint",
    [
        "https://user:secret-part@host",
        "https://host/?token=secret-part",
        "https://host/#secret-part",
        "secret-part:4443",
        "https://",
        "https://host:secret-part",
        "https://host/\r\nsecret-part",
    ],
)
def test_an_endpoint_with_a_secret_is_refused_without_repeating_it(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def used(store: Store) -> None:
        await store.head("k")

    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{endpoint}" if "://" not in endpoint else endpoint)
    tries: list[Callable[[], object]] = [
        lambda: S3Options(endpoint_url=endpoint),
        lambda: GcsOptions(endpoint_url=endpoint),
        lambda: run_check(open_store("s3://bucket", options=S3Options(anonymous=True)), used),
    ]
    if "://" in endpoint:  # an emulator's scheme may be left out
        tries.append(lambda: run_check(open_store("gs://bucket"), used))
    for attempt in tries:
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert "secret-part" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name", "access point"),
        ("s3://train--usw2-az1--x-s3/prefix", "directory bucket"),
    ],
)
def test_what_s3_calls_a_bucket_and_stoker_cannot_read_is_named(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_store(url)


def test_half_a_surrogate_pair_in_a_prefix_is_refused() -> None:
    with pytest.raises(ConfigError, match="Unicode"):
        parse_url("s3://bucket/\ud800")


def test_an_address_for_messages_writes_nothing_to_the_terminal() -> None:
    assert parse_url("s3://b").object_url("a\r\n\x1b[2Jü\u202e") == "s3://b/a\\r\\n\\x1b[2Jü\\u202e"


def test_a_bucket_that_lists_what_is_elsewhere_is_found_out() -> None:
    location = parse_url("s3://b/ours")
    assert location.relative("ours/k") == "k"
    for listed in ("theirs/k", "ours", "oursk", "ours/\udfff"):
        with pytest.raises(StoreError, match="is not below"):
            location.relative(listed)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("/folder", S3Options()),
        ("memory://x", GcsOptions()),
        ("s3://bucket", GcsOptions()),
        ("gs://bucket", S3Options()),
    ],
)
def test_options_of_another_store_are_refused(url: str, options: StoreOptions) -> None:
    with pytest.raises(ConfigError, match=type(options).__name__):
        open_store(url, options=options)


def test_contradicting_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="together"):
        S3Options(access_key_id="a")
    with pytest.raises(ConfigError, match="session_token"):
        S3Options(session_token="t")
    with pytest.raises(ConfigError, match="mutually exclusive"):
        S3Options(profile="p", anonymous=True)
    with pytest.raises(ConfigError, match="mutually exclusive"):
        GcsOptions(token="t", anonymous=True)
    with pytest.raises(ConfigError, match="endpoint_url"):
        GcsOptions(endpoint_url="localhost:4443")
    with pytest.raises(ConfigError, match="max_connections"):
        HttpOptions(max_connections=0)


def test_options_do_not_show_their_secrets() -> None:
    shown = repr(S3Options(access_key_id="AK", secret_access_key="hush", session_token="quiet"))
    shown += repr(GcsOptions(token="silent"))
    assert not any(secret in shown for secret in ("AK", "hush", "quiet", "silent"))


@pytest.mark.parametrize(
    ("url", "module", "extra"), [("s3://b", "botocore.auth", "s3"), ("gs://b", "gcloud.aio.auth", "gcs")]
)
def test_a_missing_sdk_names_the_extra_to_install(
    url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("stoker._stores.s3", "stoker._stores.gcs"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'stoker\[{extra}\]'"):
        open_store(url)


def test_opening_a_store_imports_no_other_stores_sdk_and_starts_nothing() -> None:
    program = """
import socket, sys, threading
def refuse(*_): raise AssertionError("a socket")
socket.socket.connect = refuse
from stoker import open_store
open_store("/nowhere"), open_store("memory://x")
assert not {"botocore", "gcloud", "aiohttp"} & set(sys.modules), "an SDK"
open_store("s3://bucket")
assert "gcloud" not in sys.modules
open_store("gs://bucket")
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
