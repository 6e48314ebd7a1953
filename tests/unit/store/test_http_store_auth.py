"""Authentication to a served data set: choice, use and renewal of credentials, and errors."""

from __future__ import annotations

import asyncio
import itertools
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from stoker import ServedOptions, open_store
from stoker._format.manifest import POINTER_KEY
from stoker._stores import google_credentials as google_identity
from stoker._stores.served_store import credentials_factory, resolve_auth
from stoker.abc import Store
from stoker.errors import (
    ConfigError,
    CredentialsError,
    MissingExtraError,
    PermissionDeniedError,
    StokerError,
    StoreError,
)
from stoker_local import KeyPair
from support.authenticators import REGION, Authenticator, BearerAuthenticator, IamAuthenticator, enter
from support.cases import for_each
from support.datasets import pack_numbers
from support.google_metadata import machine_account
from support.serving_host import running_service
from support.stores import run_check

FIRST = KeyPair(access_key="first", secret_key="MARKER-first", session_token="MARKER-token")
SECOND = KeyPair(access_key="second", secret_key="MARKER-second", session_token="MARKER-other")
EXPIRED = KeyPair(access_key="expired", secret_key="MARKER-old", session_token="MARKER-old", expires_at=1.0)
AWS = ServedOptions(auth="aws", region=REGION)
GOOGLE = ServedOptions(auth="google")


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("STOKER_TOKEN", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "CLOUDSDK_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="module")
def dataset() -> str:
    return pack_numbers(30)


# --- how it is chosen -------------------------------------------------------------------------------------------

LAMBDA = "https://abc123.lambda-url.eu-central-1.on.aws/v1/train"
CLOUD_RUN = "https://stoker-serve-123.europe-west1.run.app/v1/train"
OWN = "https://data.example/v1/train"


@for_each(
    ("url", "options", "token", "auth"),
    [
        (LAMBDA, {}, "", "aws"),
        ("https://ABC123.Lambda-URL.eu-central-1.on.aws:8443/v1/train", {}, "", "aws"),
        (CLOUD_RUN, {}, "", "google"),
        ("https://europe-west1-mine.cloudfunctions.net/stoker-serve/v1/train", {}, "", "google"),
        (OWN, {}, "", None),
        ("http://127.0.0.1:9/v1/train", {}, "", None),
        (LAMBDA, {}, "t", "token"),
        (LAMBDA, {"token": "t"}, "", "token"),
        (LAMBDA, {"auth": "token"}, "", "token"),
        (LAMBDA, {"auth": "google"}, "t", "google"),
        (LAMBDA, {"anonymous": True}, "t", None),
        (LAMBDA, {"auth": "aws"}, "t", "aws"),
        (OWN, {"auth": "aws"}, "", "aws"),
        (OWN, {"profile": "work"}, "t", "aws"),
        (OWN, {"region": "eu-west-1"}, "t", "aws"),
        (OWN, {"service_account": "a@b"}, "t", "google"),
        (OWN, {"auth": "google", "service_account": "a@b"}, "t", "google"),
        ("https://x.lambda-url.eu-central-1.on.aws.evil.example/v1/train", {}, "", None),
        ("https://lambda-url.eu-central-1.on.aws/v1/train", {}, "", None),
        ("https://x.lambda-url.a.b.on.aws/v1/train", {}, "", None),
        ("https://evilrun.app/v1/train", {}, "", None),
        ("https://run.app.example/v1/train", {}, "", None),
        ("https://cloudfunctions.net/v1/train", {}, "", None),
    ],
)
def test_what_the_options_say_counts_then_a_token_then_the_host(
    url: str, options: dict[str, Any], token: str, auth: str | None
) -> None:
    assert resolve_auth(url, ServedOptions(**options), {"STOKER_TOKEN": token}) == auth


@for_each(
    "options",
    [
        {"auth": "aws", "token": "t"},
        {"auth": "google", "token": "t"},
        {"auth": "google", "region": "r"},
        {"auth": "token", "profile": "p"},
        {"auth": "aws", "service_account": "a@b"},
        {"token": "t", "region": "r"},
        {"profile": "p", "service_account": "a@b"},
        {"anonymous": True, "auth": "aws"},
        {"anonymous": True, "token": "t"},
        {"auth": "iam"},
        {"auth": ""},
    ],
    ids=str,
)
def test_options_of_different_kinds_exclude_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"mutually exclusive|auth must be one of"):
        ServedOptions(**options)


@pytest.mark.parametrize("token", ["", None])
def test_a_missing_token_is_reported(token: str | None) -> None:
    with pytest.raises(ConfigError, match="set STOKER_TOKEN"):
        credentials_factory(OWN, ServedOptions(auth="token", token=token), {"STOKER_TOKEN": ""})()


@pytest.mark.parametrize("auth", ["token", "aws", "google"])
def test_missing_credentials_are_reported_with_the_flag_for_anonymous_access(
    monkeypatch: pytest.MonkeyPatch, auth: Any
) -> None:
    monkeypatch.setattr(google_identity, "GCE_ENDPOINT_ID_TOKEN", "http://127.0.0.1:1/?audience={audience}")

    async def current() -> None:
        await credentials_factory(LAMBDA, ServedOptions(auth=auth), {})().current()

    with pytest.raises((ConfigError, CredentialsError), match=r"ServedOptions\(anonymous=True\) or --anonymous"):
        asyncio.run(current())


@pytest.mark.parametrize(
    ("url", "options", "environment", "region"),
    [
        (LAMBDA, {}, {"AWS_REGION": "us-west-2"}, "eu-central-1"),
        (LAMBDA, {"region": "ap-south-1"}, {}, "ap-south-1"),
        (OWN, {"auth": "aws"}, {"AWS_REGION": "us-west-2"}, "us-west-2"),
        (OWN, {"auth": "aws"}, {"AWS_DEFAULT_REGION": "us-west-1"}, "us-west-1"),
    ],
)
def test_a_request_is_signed_for_lambda_in_the_region_of_the_host_else_the_configured_one(
    monkeypatch: pytest.MonkeyPatch, url: str, options: dict[str, Any], environment: dict[str, str], region: str
) -> None:
    enter(monkeypatch, FIRST)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    async def headers() -> Any:
        caller = credentials_factory(url, ServedOptions(**options), environment)()
        return caller.headers(f"{url}/manifest?version=1", {"Range": "bytes=0-0"}, await caller.current())

    sent = asyncio.run(headers())
    assert f"/{region}/lambda/aws4_request" in sent["Authorization"]
    assert sent["Range"] == "bytes=0-0"
    assert sent["X-Amz-Security-Token"] == "MARKER-token"


def test_a_host_without_a_region_needs_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, FIRST)

    async def call() -> None:
        credentials_factory(OWN, ServedOptions(auth="aws"), {})()

    with pytest.raises(ConfigError, match="set AWS_REGION"):
        asyncio.run(call())
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(ConfigError, match="absent"):
        asyncio.run(call())


@pytest.mark.parametrize(
    ("options", "sdk", "extra"), [(AWS, "botocore.auth", "s3"), (GOOGLE, "gcloud.aio.auth", "gcs")]
)
def test_an_sdk_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, options: ServedOptions, sdk: str, extra: str
) -> None:
    for name in ("aws_credentials", "google_credentials"):
        monkeypatch.delitem(sys.modules, f"stoker._stores.{name}", raising=False)
    monkeypatch.setitem(sys.modules, sdk, None)
    with pytest.raises(MissingExtraError, match=rf"needs {sdk}; pip install 'stoker\[{extra}\]'"):
        open_store("stoker+https://data.example/v1/x", options=options)


def test_an_sdk_is_imported_for_its_own_identities_alone() -> None:
    program = """
import sys
from stoker import ServedOptions, open_store
found = lambda: sorted({"botocore", "aiobotocore", "aioboto3", "gcloud"} & set(sys.modules))
open_store("stoker+https://data.example/v1/x")
open_store("stoker+https://abc.run.app/v1/x", options=ServedOptions(token="t"))
print(found())
open_store("stoker+https://abc.lambda-url.eu-west-1.on.aws/v1/x")
print(found())
open_store("stoker+https://abc.run.app/v1/x")
print(found())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['aiobotocore', 'botocore']", "['aiobotocore', 'botocore', 'gcloud']"]


# --- behind IAM -------------------------------------------------------------------------------------------------


def outcome(url: str, options: ServedOptions | None) -> StokerError | None:
    """Read the pointer; return the error, if that is what comes of it."""
    errors: list[StokerError] = []

    async def read(store: Store) -> None:
        try:
            await store.get(POINTER_KEY)
        except StokerError as error:
            errors.append(error)

    run_check(open_store(url, options=options), read)
    return errors[0] if errors else None


def behind(authenticator: Authenticator, dataset: str, options: ServedOptions | None) -> StokerError | None:
    """Read the pointer of a data set that is served with authentication."""
    with running_service({"ds": dataset}, authenticator=authenticator) as hosted:
        error = outcome(hosted.dataset("ds"), options)
        assert bool(error) != bool(hosted.requests), "who is refused has not reached the function"
        return error


def test_signed_requests_are_accepted(monkeypatch: pytest.MonkeyPatch, dataset: str) -> None:
    enter(monkeypatch, FIRST)
    assert behind(IamAuthenticator(FIRST), dataset, AWS) is None


@pytest.mark.parametrize(
    ("key", "region", "tells", "says"),
    [
        (SECOND, REGION, False, "are wrong"),
        (KeyPair(access_key="first", secret_key="MARKER"), REGION, True, "UnrecognizedClient"),
        (EXPIRED, REGION, True, "ExpiredTokenException"),
        (EXPIRED, REGION, False, "expired"),
        (FIRST, "us-east-1", False, "another region"),
    ],
)
def test_a_refusal_by_aws_is_reported_with_possible_causes(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dataset: str,
    key: KeyPair,
    region: str,
    tells: bool,
    says: str,
) -> None:
    enter(monkeypatch, key)
    with caplog.at_level(logging.INFO):
        error = behind(IamAuthenticator(FIRST, EXPIRED, tells=tells), dataset, ServedOptions(auth="aws", region=region))
    assert isinstance(error, CredentialsError)
    assert says in str(error)
    assert "lambda:InvokeFunctionUrl" in str(error)
    assert "MARKER" not in str(error) + caplog.text


def test_credentials_that_may_not_call_the_function_are_not_looked_for_again(
    monkeypatch: pytest.MonkeyPatch, dataset: str
) -> None:
    class Denying(Authenticator):
        asked = 0

        def refusal(self, request: web.BaseRequest) -> web.Response | None:
            self.asked += 1
            told = {"x-amzn-ErrorType": "AccessDeniedException:http://internal.amazon.com/coral/"}
            return web.json_response({"Message": "User is not authorized"}, status=403, headers=told)

    enter(monkeypatch, FIRST)
    authenticator = Denying()
    error = behind(authenticator, dataset, AWS)
    assert type(error) is PermissionDeniedError
    assert "User is not authorized" in str(error)
    assert "lambda:InvokeFunction" in str(error)
    assert authenticator.asked == 1


def test_credentials_that_ended_are_looked_for_afresh_and_the_request_is_sent_again(
    monkeypatch: pytest.MonkeyPatch, dataset: str
) -> None:
    authenticator = IamAuthenticator(FIRST, SECOND, EXPIRED)

    async def check(store: Store) -> None:
        await asyncio.gather(*(store.head(POINTER_KEY) for _ in range(4)))
        authenticator.expire(FIRST)
        enter(monkeypatch, SECOND)
        await asyncio.gather(*(store.head(POINTER_KEY) for _ in range(4)))
        assert authenticator.refused == ["ExpiredTokenException"] * 4

    enter(monkeypatch, FIRST)
    with running_service({"ds": dataset}, authenticator=authenticator) as hosted:
        run_check(open_store(hosted.dataset("ds"), options=AWS), check)


def test_where_there_are_no_aws_credentials_nothing_is_sent(dataset: str) -> None:
    authenticator = IamAuthenticator(FIRST)
    error = behind(authenticator, dataset, AWS)
    assert type(error) is CredentialsError
    assert "no AWS credentials were found" in str(error)
    assert "STOKER_TOKEN" in str(error)
    assert authenticator.refused == []


# --- behind Google's identities ---------------------------------------------------------------------------------


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Run a machine whose account has tokens token-1, token-2, and so on; yields the requested audiences."""
    numbers = itertools.count(1)
    with machine_account(monkeypatch, lambda: f"token-{next(numbers)}") as asked:
        yield asked


def test_an_identity_token_is_made_out_to_the_service_and_used_while_it_is_good(
    metadata: list[str], dataset: str
) -> None:
    authenticator = BearerAuthenticator(good=["token-1"])

    async def check(store: Store) -> None:
        await asyncio.gather(*(store.head(POINTER_KEY) for _ in range(4)))

    with running_service({"ds": dataset}, authenticator=authenticator) as hosted:
        run_check(open_store(hosted.dataset("ds"), options=GOOGLE), check)
        assert metadata == [hosted.url]
    assert authenticator.seen == ["token-1"] * 4


@pytest.mark.parametrize(
    ("url", "audience"),
    [
        (CLOUD_RUN, "https://stoker-serve-123.europe-west1.run.app"),
        (
            "https://europe-west1-mine.cloudfunctions.net/stoker-serve/v1/train",
            "https://europe-west1-mine.cloudfunctions.net/stoker-serve",
        ),
    ],
)
def test_a_token_is_for_what_stands_before_the_data_set(metadata: list[str], url: str, audience: str) -> None:
    async def proof() -> Any:
        return await credentials_factory(url, ServedOptions(), {})().current()

    assert asyncio.run(proof()) == "token-1"
    assert metadata == [audience]


def test_a_token_that_is_refused_is_dropped_and_the_request_is_sent_again(metadata: list[str], dataset: str) -> None:
    authenticator = BearerAuthenticator(good=["token-2"])

    async def check(store: Store) -> None:
        await asyncio.gather(*(store.head(POINTER_KEY) for _ in range(4)))

    with running_service({"ds": dataset}, authenticator=authenticator) as hosted:
        run_check(open_store(hosted.dataset("ds"), options=GOOGLE), check)
    assert len(metadata) == 2, "of many that are refused, one asks"
    assert sorted(authenticator.seen) == ["token-1"] * 4 + ["token-2"] * 4


def test_where_there_are_no_google_credentials_nothing_is_sent(monkeypatch: pytest.MonkeyPatch, dataset: str) -> None:
    monkeypatch.setattr(google_identity, "GCE_ENDPOINT_ID_TOKEN", "http://127.0.0.1:9/{audience}")
    authenticator = BearerAuthenticator(good=[])
    error = behind(authenticator, dataset, GOOGLE)
    assert type(error) is CredentialsError
    assert "no Google credentials were found" in str(error)
    assert "STOKER_TOKEN" in str(error)
    assert authenticator.seen == []


def test_a_missing_permission_to_call_the_function_names_the_role(metadata: list[str], dataset: str) -> None:
    error = behind(BearerAuthenticator(good=[], known=["token-1"]), dataset, GOOGLE)
    assert type(error) is PermissionDeniedError
    assert "roles/run.invoker" in str(error)
    assert len(metadata) == 1


def test_tokens_that_google_does_not_take_are_an_error_after_the_second(metadata: list[str], dataset: str) -> None:
    error = behind(BearerAuthenticator(good=[]), dataset, GOOGLE)
    assert isinstance(error, CredentialsError)
    assert "log in again" in str(error)
    assert "token-" not in str(error)
    assert len(metadata) == 2


# --- tokens, and none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "kind", "says"),
    [
        ("MARKER", CredentialsError, "refuses the token"),
        ("MARKER-known", PermissionDeniedError, "refuses the token"),
        (None, CredentialsError, "requires credentials"),
    ],
)
def test_a_request_without_a_platform_identity_is_refused_with_the_remedy(
    dataset: str, token: str | None, kind: type[StoreError], says: str
) -> None:
    error = behind(BearerAuthenticator(good=[], known=["MARKER-known"]), dataset, ServedOptions(token=token))
    assert type(error) is kind
    assert says in str(error)
    assert "auth='aws'" in str(error)
    assert "MARKER" not in str(error)
