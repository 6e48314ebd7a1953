"""Both planes of a store reach an endpoint in the same way: with these certificates, through this proxy."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stoker import GcsOptions, S3Options, open_store
from stoker._stores.options import find_proxy
from stoker.abc import Store
from stoker.errors import ConfigError, ConnectionLostError, StoreError
from support.stores import list_keys, read_range
from support.tls import Authority, Origin, connect_proxy, https_origin, make_authority

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
BUNDLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
KEYS = {"region": "us-east-1", "access_key_id": "a", "secret_access_key": "s"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    hosts = ("*.s3.us-east-1.amazonaws.com", "s3.us-east-1.amazonaws.com", "storage.googleapis.com")
    return make_authority(tmp_path_factory.mktemp("tls"), *hosts)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*PROXIES, *map(str.lower, PROXIES), *BUNDLES, "AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


async def using(url: str, options: S3Options | GcsOptions, check: Callable[[Store], Awaitable[object]]) -> None:
    store = open_store(url, options=options)
    try:
        await check(store)
    finally:
        await store.close()


def with_origin(authority: Authority, check: Callable[[Origin], Awaitable[object]]) -> Origin:
    async def main() -> Origin:
        async with https_origin(authority.server) as origin:
            await check(origin)
            return origin

    return asyncio.run(main())


async def read_and_list(store: Store) -> None:
    assert await read_range(store, "k", 2, 5) == b"234"
    assert await list_keys(store) == []


async def is_refused(store: Store) -> None:
    for use in (read_range(store, "k", 0, 1), list_keys(store)):
        with pytest.raises(StoreError, match="certificate is not trusted") as caught:
            await use
        assert not isinstance(caught.value, ConnectionLostError)


@pytest.mark.parametrize("variable", BUNDLES)
def test_both_planes_of_s3_trust_the_certificates_that_are_named(
    authority: Authority, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(authority.bundle))

    async def check(origin: Origin) -> None:
        options = S3Options(endpoint_url=f"https://127.0.0.1:{origin.port}", **KEYS)  # type: ignore[arg-type]
        await using("s3://bucket", options, read_and_list)

    with_origin(authority, check)


def test_a_profile_names_certificates_too(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(f"[profile work]\nca_bundle = {authority.bundle}\n")
    (tmp_path / "keys").write_text("[work]\naws_access_key_id = a\naws_secret_access_key = s\n")

    async def check(origin: Origin) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
            endpoint = f"https://127.0.0.1:{origin.port}"
            await using("s3://bucket", S3Options(endpoint_url=endpoint, profile="work"), read_and_list)

    with_origin(authority, check)


@pytest.mark.parametrize("url", ["s3://bucket", "gs://bucket"])
def test_an_untrusted_certificate_is_refused_without_a_retry(authority: Authority, url: str) -> None:
    async def check(origin: Origin) -> None:
        endpoint = f"https://127.0.0.1:{origin.port}"
        options = S3Options(endpoint_url=endpoint, **KEYS) if url[0] == "s" else GcsOptions(endpoint_url=endpoint)  # type: ignore[arg-type]
        await using(url, options, is_refused)

    assert with_origin(authority, check).requests == []


def test_a_certificate_for_another_host_is_refused(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.bundle))

    async def check(origin: Origin) -> None:
        options = S3Options(endpoint_url=f"https://localhost:{origin.port}", **KEYS)  # type: ignore[arg-type]
        await using("s3://bucket", options, is_refused)

    assert with_origin(authority, check).requests == []


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_certificates_that_cannot_be_read_are_a_configuration_error(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "bundle.pem").write_text(content)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "bundle.pem"))

    async def check(store: Store) -> None:
        with pytest.raises(ConfigError, match=r"bundle\.pem.*AWS_CA_BUNDLE"):
            await store.head("k")

    asyncio.run(using("s3://bucket", S3Options(anonymous=True), check))


def test_a_forked_child_leaves_its_parents_connection_over_tls_alone(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))

    async def reads_here_and_in_a_child(store: Store) -> None:
        assert await read_range(store, "k", 2, 5) == b"234"
        if (child := os.fork()) == 0:
            status = 1
            try:
                status = int(asyncio.run(read_range(store, "k", 3, 5)) != b"34")
            finally:
                os._exit(status)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert await read_range(store, "k", 2, 5) == b"234"

    async def check(origin: Origin) -> None:
        options = S3Options(endpoint_url=f"https://127.0.0.1:{origin.port}", **KEYS)  # type: ignore[arg-type]
        await using("s3://bucket", options, reads_here_and_in_a_child)

    origin = with_origin(authority, check)
    assert len(origin.requests) == 3
    assert len(origin.names) == 2  # a handshake of each process


def test_aws_is_reached_through_the_proxy_under_its_own_names(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))

    async def check(origin: Origin) -> None:
        async with connect_proxy(origin.port, password="pw") as proxy:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url)
            await using("s3://bucket", S3Options(**KEYS), read_and_list)  # type: ignore[arg-type]
            await using("s3://buc.ket", S3Options(**KEYS), read_and_list)  # type: ignore[arg-type]
            assert set(proxy.tunnels) == {"bucket.s3.us-east-1.amazonaws.com:443", "s3.us-east-1.amazonaws.com:443"}

    origin = with_origin(authority, check)
    virtual, by_path = "bucket.s3.us-east-1.amazonaws.com", "s3.us-east-1.amazonaws.com"
    assert origin.names == [virtual, by_path]
    paths = [path for _, path in origin.requests]
    assert paths == [f"{virtual}/k", f"{virtual}/", f"{by_path}/buc.ket/k", f"{by_path}/buc.ket"]


def test_a_write_to_aws_carries_its_checksum(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))

    async def check(origin: Origin) -> None:
        async with connect_proxy(origin.port, password="pw") as proxy:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url)
            await using("s3://bucket", S3Options(**KEYS), lambda store: store.put("k", b"hello"))  # type: ignore[arg-type]

    origin = with_origin(authority, check)
    assert origin.headers[0]["x-amz-checksum-crc32"] == "NhCmhg=="
    assert "x-amz-checksum-crc32" in origin.headers[0]["authorization"], "the signature is over it, too"
    assert origin.headers[0]["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert origin.bodies == [b"hello"]


def test_google_is_reached_through_the_proxy(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.bundle))

    async def check(origin: Origin) -> None:
        async with connect_proxy(origin.port, password="pw") as proxy:
            monkeypatch.setenv("HTTPS_PROXY", proxy.url)

            async def read(store: Store) -> None:
                with pytest.raises(StoreError):  # S3 answers there, which sends no generation
                    await read_range(store, "k", 2, 5)
                with pytest.raises(StoreError, match="check that the endpoint speaks the GCS"):
                    await list_keys(store)

            await using("gs://bucket", GcsOptions(token="t"), read)
            assert set(proxy.tunnels) == {"storage.googleapis.com:443"}

    origin = with_origin(authority, check)
    assert origin.headers[0]["authorization"] == "Bearer t"


def test_this_machine_is_never_reached_through_a_proxy(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")

    async def check(origin: Origin) -> None:
        options = S3Options(endpoint_url=f"https://127.0.0.1:{origin.port}", **KEYS)  # type: ignore[arg-type]
        await using("s3://bucket", options, read_and_list)

    with_origin(authority, check)


@pytest.mark.parametrize(
    "password",
    ["wrong-secret", pytest.param("", id="unreachable")],
)
def test_a_proxy_that_refuses_or_is_not_there_is_a_lost_connection_without_its_password(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    async def check(origin: Origin) -> None:
        async with connect_proxy(origin.port, password="pw") as proxy:
            refusing = proxy.url.replace("user:pw@", f"user:{password}@")
            monkeypatch.setenv("HTTPS_PROXY", refusing if password else "http://user:wrong-secret@127.0.0.1:1")

            async def fails(store: Store) -> None:
                for use in (read_range(store, "k", 0, 1), list_keys(store)):
                    with pytest.raises(StoreError, match="s3://bucket") as caught:
                        await use
                    assert "wrong-secret" not in f"{caught.value!r}{caught.value}{caught.value.__cause__!r}"
                    assert isinstance(caught.value, ConnectionLostError)

            await using("s3://bucket", S3Options(**KEYS), fails)  # type: ignore[arg-type]

    with_origin(authority, check)


def test_the_proxy_is_the_one_that_the_environment_names_for_the_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_proxy("https://host") is None
    monkeypatch.setenv("ALL_PROXY", "any:1")
    monkeypatch.setenv("HTTPS_PROXY", "tls:2")
    monkeypatch.setenv("NO_PROXY", "near,.far.example")
    assert find_proxy("http://host") == "http://any:1"
    assert find_proxy("https://host:9000") == "http://tls:2"
    assert find_proxy("https://near:9000") is None
    assert find_proxy("https://x.far.example") is None
    assert {find_proxy(f"http://{host}:9000") for host in ("127.0.0.1", "[::1]", "localhost")} == {None}
    monkeypatch.setenv("HTTPS_PROXY", "socks5://user:secret-part@host")
    with pytest.raises(ConfigError) as caught:
        find_proxy("https://host")
    assert "secret-part" not in str(caught.value)


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "b\u00fccket.example", "a b", "a\\b", ""])
def test_an_endpoint_whose_host_is_no_name_is_a_configuration_error(host: str) -> None:
    with pytest.raises(ConfigError, match="endpoint_url must be"):
        S3Options(endpoint_url=f"http://{host}:9000")


@pytest.mark.parametrize("value", ["secret\n", " secret", "s\u00e9cret"])
def test_credentials_that_no_request_can_carry_are_a_configuration_error_that_does_not_tell_them(value: str) -> None:
    keys = {"access_key_id": "a", "secret_access_key": "s"}
    for make in (
        lambda: GcsOptions(token=value),
        lambda: S3Options(**{**keys, "access_key_id": value}),  # type: ignore[arg-type]
        lambda: S3Options(**{**keys, "secret_access_key": value}),  # type: ignore[arg-type]
        lambda: S3Options(**{**keys, "session_token": value}),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match="line end") as caught:
            make()
        assert "cret" not in str(caught.value).replace("secret_access_key", "")
