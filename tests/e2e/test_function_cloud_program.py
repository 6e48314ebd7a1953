from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]  # it ships no types
import pytest

from support.function_cloud import GOOGLE_CODE, HANDLERS, is_running
from support.local_bucket import Served, s3_client

COMMAND = [sys.executable, "-m", "stoker_local", "functions"]
FUNCTIONS = ["--task-root", HANDLERS, "--function", "about=lambda_code.about"]


@contextmanager
def client_of(served: Served) -> Iterator[Any]:
    client = boto3.client(
        "lambda",
        endpoint_url=served.variables["AWS_ENDPOINT_URL_LAMBDA"],
        region_name=served.variables["AWS_REGION"],
        aws_access_key_id=served.variables["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=served.variables["AWS_SECRET_ACCESS_KEY"],
    )
    try:
        yield client
    finally:
        client.close()


def invoked(served: Served, name: str) -> Any:
    with client_of(served) as client:
        return json.loads(client.invoke(FunctionName=name)["Payload"].read())


def test_the_program_runs_functions_beside_a_bucket_and_writes_a_bill_at_its_end() -> None:
    command = [*COMMAND, *FUNCTIONS, "--environment", "MINE=a=b", "--bucket", "raw", "--url-auth", "NONE"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        served = Served(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("# about: http://127.0.0.1:")
        seen = invoked(served, "about")
        assert seen["environment"]["MINE"] == "a=b"
        assert seen["environment"]["AWS_ENDPOINT_URL"] == served.url
        with s3_client(served) as client:
            assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == ["raw"]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "START RequestId" in err
    assert "about: 1 invocations, 1 cold starts, 0 errors" in err
    assert not is_running(seen["pid"])


def test_functions_end_with_a_program_that_is_killed_and_so_does_all_that_they_have_started(tmp_path: Path) -> None:
    functions = [{"name": name, "handler": f"lambda_code.{name}", "task_root": HANDLERS} for name in ("about", "spawn")]
    google = [{"name": "mirror", "source": GOOGLE_CODE, "target": "mirror"}]
    (tmp_path / "cloud.json").write_text(json.dumps({"functions": functions, "google": google}))
    command = [*COMMAND, "--config", str(tmp_path / "cloud.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        served = Served(process)
        assert served.variables["STORAGE_EMULATOR_HOST"].startswith("http://127.0.0.1:")
        assert process.stdout is not None
        connection = HTTPConnection(process.stdout.readline().rpartition("/")[2].strip(), timeout=60)
        connection.request("GET", "/")
        worker = json.load(connection.getresponse())["pid"]
        connection.close()
        left = [worker, invoked(served, "about")["pid"], invoked(served, "spawn")]
        assert all(map(is_running, left))
        process.kill()
    deadline = time.monotonic() + 60
    while any(map(is_running, left)):
        assert time.monotonic() < deadline, f"of {left}, some are still there"
        time.sleep(0.01)


def test_a_configuration_comes_from_a_file_or_from_standard_input_whose_end_is_the_end(tmp_path: Path) -> None:
    config = {"functions": [{"name": "f", "handler": "lambda_code.about", "task_root": HANDLERS}]}
    file = tmp_path / "cloud.json"
    file.write_text(json.dumps(config))
    with subprocess.Popen(
        [*COMMAND, "--config", str(file)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert invoked(Served(process), "f")["memory"] == "128"
        process.terminate()
    assert process.returncode == 0
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*COMMAND, "--config", "-"], text=True, **streams) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(config) + "\n")
        process.stdin.flush()
        assert invoked(Served(process), "f")["memory"] == "128"
        process.stdin.close()
        assert process.wait(300) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--function", "nameless"], "not of the form NAME=VALUE"),
        (["--function", "f=m.f", "--memory-mb", "1"], "memory_mb must be at least 128"),
        (["--config", "x.json", "--function", "f=m.f"], "--function cannot be combined with --config"),
        (["--config", "x.json", "--port", "0"], "--port cannot be combined with --config"),
        ([], "give --function NAME=MODULE.HANDLER"),
        (["--config", "/does/not/exist.json"], "No such file"),
    ],
)
def test_a_mistake_is_reported_in_one_line(arguments: list[str], message: str) -> None:
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1
