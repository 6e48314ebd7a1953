"""The function that serves by default, as it is deployed on Lambda: behind ``AWS_IAM``, on Lambda's own runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

import stoker
from stoker import ServedOptions, cli, open_store
from stoker.abc import Store
from stoker.errors import CredentialsError
from stoker_functions.serve import LAMBDA_ANSWER_BYTES
from stoker_local import KeyPair, running_server
from stoker_local._bucket import WELL_KNOWN_KEY
from stoker_torch import Loader
from support.authenticators import enter
from support.function_cloud import Clouds, bucket_and_cloud, function
from support.local_bucket import s3_options
from support.stores import run_check

DATASET = "s3://stoker/train"
SAMPLES = 60
LARGE = 100_000  # bytes of a sample, so that a super-sample of all of them is larger than Lambda's answers
TRAINER = KeyPair(access_key="trainer", secret_key="trainer-secret", session_token="trainer-token")
GONE = KeyPair(access_key="gone", secret_key="gone-secret", session_token="gone-token", expires_at=1.0)
WRONG = KeyPair(access_key="trainer", secret_key="MARKER", session_token="trainer-token")
AWS = ServedOptions(auth="aws", region="us-east-1")


def serving() -> AbstractAsyncContextManager[Clouds]:
    settings = {"STOKER_DATASETS": f"train={DATASET}"}
    serve = function(
        "stoker_functions.aws.serve", name="stoker-serve", concurrency=2, url_auth="AWS_IAM", environment=settings
    )
    return bucket_and_cloud(serve, keys=(WELL_KNOWN_KEY, TRAINER, GONE))


@pytest.fixture(scope="module")
def clouds() -> Iterator[Clouds]:
    with running_server(serving) as (bucket, cloud):
        schema = {"x": stoker.Array("int64"), "image": stoker.Array("uint8", (LARGE,))}
        with stoker.Packer(DATASET, schema=schema, super_sample_bytes=8 << 20, options=s3_options(bucket)) as packer:
            packer.extend({"x": number, "image": np.full(LARGE, number, "u1")} for number in range(SAMPLES))
        yield bucket, cloud


@pytest.fixture
def served(clouds: Clouds) -> str:
    """The URL of the data set."""
    return f"stoker+{clouds[1].function_urls['stoker-serve'].rstrip('/')}/v1/train"


def test_aws_credentials_suffice_to_train_from_the_function_and_its_redirects(
    clouds: Clouds, served: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter(monkeypatch, TRAINER)
    with Loader(served, batch_size=16, epochs=1, options=AWS) as loader:
        batches = list(loader)
        key = loader.manifest.key(0)

    async def check(store: Store) -> None:
        body, info = await store.get(key)
        assert len(body) == info.size_bytes > LAMBDA_ANSWER_BYTES, "more than Lambda sends: the bucket did"

    run_check(open_store(served, options=AWS), check)
    assert sorted(number for batch in batches for number in batch["x"].tolist()) == list(range(SAMPLES))
    assert all((batch["image"][:, -1] == batch["x"]).all() for batch in batches)
    assert cli.main(["verify", served, "--auth", "aws", "--region", "us-east-1"]) == 0
    assert "verified 1 super-sample" in capsys.readouterr().err


def test_full_beyond_memory_takes_one_signed_request_for_several_values(
    clouds: Clouds, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, TRAINER)
    before = clouds[1].statistics()["stoker-serve"].invocations
    with Loader(served, batch_size=2, shuffle="full", memory=5 << 20, epochs=2, options=AWS) as loader:
        batches = [batch for _ in range(2) for batch in loader]
    assert clouds[1].statistics()["stoker-serve"].invocations - before <= len(batches) * 1.02
    assert sorted(number for batch in batches for number in batch["x"].tolist()) == sorted([*range(SAMPLES)] * 2)
    assert all((batch["image"][:, 0] == batch["x"]).all() for batch in batches)


@pytest.mark.parametrize("key", [WRONG, GONE], ids=["wrong", "expired"])
def test_invalid_credentials_are_reported_and_start_no_function(
    clouds: Clouds, served: str, monkeypatch: pytest.MonkeyPatch, key: KeyPair
) -> None:
    enter(monkeypatch, key)
    before = clouds[1].statistics()["stoker-serve"].invocations
    with pytest.raises(CredentialsError, match="lambda:InvokeFunctionUrl") as caught:
        stoker.open(served, options=AWS)
    assert "MARKER" not in str(caught.value)
    assert clouds[1].statistics()["stoker-serve"].invocations == before


@pytest.mark.parametrize("options", [None, ServedOptions(token="MARKER")], ids=["nothing", "token"])
def test_a_request_without_a_platform_identity_is_reported_with_the_remedy(
    served: str, options: ServedOptions | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STOKER_TOKEN", raising=False)
    with pytest.raises(PermissionError, match=r"auth='aws'.*--auth") as caught:
        stoker.open(served, options=options)
    assert "MARKER" not in str(caught.value)
