"""The adapters to Lambda and to Google's functions: thin, quick to import, and true to what handlers raise."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stoker_functions
import stoker_functions.aws as aws
from stoker.errors import ConfigError, EventError
from stoker_functions._instance import HANDLERS, LAMBDA_HANDLERS, SERVING_HANDLERS
from support.cases import for_each
from support.deployments import Place

FOLDER = Path(stoker_functions.__file__).parent
HEAVY = ("torch", "stoker_torch", "stoker_local", "PIL", "simplejpeg", "moto", "sklearn", "redis", "ray")
CLOUDS = {
    "aws": ("boto3", "botocore", "aioboto3", "aiobotocore"),
    "gcp": ("gcloud", "google.auth", "google.cloud.storage"),
}


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_an_adapter_has_at_most_forty_lines(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 40


def modules_of(adapter: str, function: str) -> set[str]:
    """Return what a process has imported that has loaded a function and nothing else."""
    program = f"""
import json, sys
import stoker_functions.{adapter}
assert callable(getattr(stoker_functions.{adapter}, {function!r}))
print(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300)
    return set(json.loads(done.stdout))


CASES = [("aws", name) for name in LAMBDA_HANDLERS] + [
    ("gcp", name) for name in [*HANDLERS, "ingest", *SERVING_HANDLERS]
]


@pytest.mark.parametrize("adapter", ["aws", "gcp"])
def test_loading_a_function_imports_neither_torch_nor_an_sdk_nor_what_other_functions_need(adapter: str) -> None:
    found = modules_of(adapter, "commit")
    unwanted = (*HEAVY, *CLOUDS["aws"], *CLOUDS["gcp"])
    assert [module for module in found if is_of(module, unwanted)] == []
    assert "stoker_functions._commit" in found
    assert "stoker_functions.serve._service" not in found


def is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize(("adapter", "scheme"), [("aws", "s3"), ("gcp", "gs")])
def test_opening_a_bucket_imports_the_sdk_of_its_cloud_and_not_the_other(adapter: str, scheme: str) -> None:
    program = f"""
import asyncio, json, os, sys
import stoker_functions.{adapter}
from stoker_functions._deployment import Deployment
from stoker_functions._deployment import DeploymentSettings

async def main():
    store = Deployment(DeploymentSettings(datasets={{"d": "{scheme}://bucket"}})).dataset_store("{scheme}://bucket")
    try:
        await store.wrapped.get("x")
    except Exception as error:
        print(type(error).__name__, error, file=sys.stderr)
    await store.close()

asyncio.run(main())
print(json.dumps(sorted(sys.modules)))
"""
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/nonexistent",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "STORAGE_EMULATOR_HOST": "http://127.0.0.1:1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300, env=environ
    )
    found = set(json.loads(done.stdout))
    other = CLOUDS["gcp" if adapter == "aws" else "aws"]
    own = CLOUDS[adapter]
    assert [module for module in found if is_of(module, (*other, *HEAVY))] == []
    assert [module for module in found if is_of(module, own)] != []


class Context:
    def get_remaining_time_in_millis(self) -> int:
        return 30_000


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A deployment that the environment of this process describes."""
    made = Place()
    monkeypatch.setenv("STOKER_DATASETS", f"train={made.dataset}")
    monkeypatch.setenv("STOKER_SOURCES", made.raw)
    monkeypatch.delenv("STOKER_INGEST", raising=False)
    monkeypatch.setenv("AWS_LAMBDA_FUNCTION_MEMORY_SIZE", "512")
    aws._instance.cache_clear()
    yield made
    deployment, runner = aws._instance()
    runner.run(deployment.close())
    runner.close()
    aws._instance.cache_clear()


def invoke(name: str, event: object) -> Any:
    return getattr(aws, name)(event, Context())


def test_what_a_handler_raises_reaches_lambda_under_its_own_name(place: Place) -> None:
    with pytest.raises(EventError, match="pack event"):
        invoke("pack", {})
    with pytest.raises(EventError, match="commit event"):
        invoke("commit", [])
    with pytest.raises(ConfigError, match="STOKER_INGEST"):
        invoke("ingest", {"Records": []})


def test_an_instance_keeps_its_loop_and_connections_from_one_invocation_to_the_next(place: Place) -> None:
    results = [invoke("commit", {"dataset": place.dataset}) for _ in range(3)]
    assert [result["version"] for result in results] == [0, 0, 0]
    assert len(aws._instance()[0]._stores) == 1


def test_a_wrong_setting_is_reported_at_every_invocation(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_TIMEOUT_SECONDS", "soon")
    for _ in range(2):
        with pytest.raises(ConfigError, match="STOKER_TIMEOUT_SECONDS"):
            invoke("commit", {"dataset": place.dataset})
    monkeypatch.delenv("STOKER_TIMEOUT_SECONDS")


@for_each(("adapter", "name"), CASES)
def test_every_function_is_there_under_its_name(adapter: str, name: str) -> None:
    assert callable(getattr(__import__(f"stoker_functions.{adapter}", fromlist=["x"]), name))


@pytest.mark.parametrize("adapter", ["aws", "gcp"])
def test_what_is_no_function_is_no_attribute(adapter: str) -> None:
    module = __import__(f"stoker_functions.{adapter}", fromlist=["x"])
    for name in ("nothing", "__wrapped__", "os"):
        with pytest.raises(AttributeError):
            getattr(module, name)
