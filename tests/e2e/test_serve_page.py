"""The page about serving: its commands and examples work as printed, its table of errors is complete."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import aiohttp
import pytest
from safetensors.numpy import load_file

import stoker
from stoker._format.manifest import Manifest
from stoker._stores.options import Auth
from stoker_functions.serve import TokenKeys
from stoker_functions.serve._messages import AsgiApp
from stoker_local import LocalBucket
from support.datasets import SCHEMA, pack_numbers, sample_of
from support.local_bucket import s3_options
from support.serving_host import hosting, running_service

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serve.md").read_text("utf-8")
SHELL = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(*command: str, folder: Path, **variables: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **variables}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_commands_of_the_page_work_with_what_is_served_and_with_redirects(
    tmp_path: Path, local_bucket: LocalBucket
) -> None:
    making, reading, *_ = SHELL
    keys, token = run(
        "bash", "-ec", f'{making}\necho "$STOKER_TOKEN_KEYS"; echo "$STOKER_TOKEN"', folder=tmp_path
    ).split()
    options = s3_options(local_bucket)
    url = "s3://stoker/serve-page"
    with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=20_000, options=options) as packer:
        packer.extend(map(sample_of, range(400)))
    with running_service(
        {"train": url}, options, answer_bytes=9000, token_keys=TokenKeys.parse(keys), with_token=True
    ) as hosted:
        run("bash", "-ec", reading, folder=tmp_path, STOKER_URL=hosted.url, STOKER_TOKEN=token)
        assert hosted.statuses == [200, 307, 206, 200, 200]
    first = (tmp_path / "first.safetensors").read_bytes()
    values = (tmp_path / "values.bin").read_bytes()
    assert (len(values), values[:512]) == (1536, first[1024:1536])
    assert (tmp_path / "stoker.curl").stat().st_mode & 0o077 == 0
    assert (tmp_path / "head.bin").read_bytes() == (tmp_path / "first.safetensors").read_bytes()[:1024]
    assert load_file(tmp_path / "batch.safetensors")["x"].shape == (32,)
    assert "'image': (32, 4, 3)" in run(sys.executable, "-c", PYTHON[0], folder=tmp_path)


def test_the_application_of_the_page_serves() -> None:
    async def status(app: AsgiApp) -> int:
        async with (
            hosting(app) as url,
            aiohttp.ClientSession() as session,
            session.get(f"{url}/v1/train/manifest") as response,
        ):
            return response.status

    names: dict[str, Any] = {}
    exec(PYTHON[-1].replace("/data/train", pack_numbers(10)), names)  # noqa: S102 - our own page
    assert asyncio.run(status(names["app"])) == 200


def test_the_application_of_the_page_starts_as_the_page_says_and_tells_curl_why_it_refuses(tmp_path: Path) -> None:
    with stoker.Packer(tmp_path / "train", schema=SCHEMA) as packer:
        packer.extend(map(sample_of, range(10)))
    (tmp_path / "my_module.py").write_text(PYTHON[-1].replace("/data/train", str(tmp_path / "train")))
    start, read = SHELL[-2:]
    program, *arguments = start.replace("--port 8000", "--port 0").split()
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = next(found[0] for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            read = read.replace("curl", "curl --silent").replace("http://127.0.0.1:8000", url)
            run("bash", "-ec", read, folder=tmp_path)
            assert Manifest.from_bytes((tmp_path / "manifest.safetensors").read_bytes()).samples == 10
            wrong = subprocess.run(["bash", "-c", read.replace("/train/", "/tain/")], cwd=tmp_path, check=False)
            assert wrong.returncode == 22
            assert json.loads((tmp_path / "manifest.safetensors").read_text())["error"] == "no-such-dataset"
        finally:
            server.terminate()
            server.communicate()


def test_the_table_of_errors_has_every_code_and_no_other() -> None:
    source = "".join(file.read_text() for file in (ROOT / "functions/stoker_functions/serve").glob("*.py"))
    raised = set(re.findall(r'HttpError\(\s*(\d{3}),\s*"([a-z-]+)"', source))
    rows = re.findall(r"^\| ([0-9, ]+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    assert {code for _, code in raised} == {code for _, codes in rows for code in re.findall(r"`([a-z-]+)`", codes)}
    assert {status for status, _ in raised} == {status for statuses, _ in rows for status in statuses.split(", ")}


def test_the_table_of_identities_has_every_kind_and_no_other() -> None:
    assert sorted(re.findall(r'^\| `"(\w+)"` \|', PAGE, re.MULTILINE)) == sorted(get_args(Auth))


@pytest.mark.parametrize("link", re.findall(r"\]\(([a-z.-]+\.md)\)", PAGE))
def test_a_page_that_this_one_links_to_is_there(link: str) -> None:
    assert (ROOT / "docs" / link).exists()
