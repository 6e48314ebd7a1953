"""What docs/function-cloud.md shows works as it is shown."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker_local.functions import FunctionCloudConfig
from support.local_bucket import s3_client

PAGE = (Path(__file__).parents[2] / "docs" / "function-cloud.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[str]:
    return [command.strip() for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]


def test_the_commands_of_the_page_run_its_function_and_call_it_from_another_shell(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(blocks("python")[0])
    serve, call = blocks("sh")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    common: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PATH": path}, "text": True}
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(["/bin/sh", "-c", f"exec {serve}"], **common, **piped) as program:
        assert program.stdout is not None
        export, url = program.stdout.readline(), program.stdout.readline()
        assert re.fullmatch(r"# echo: http://127\.0\.0\.1:\d+\n", url)
        called = subprocess.run(["/bin/sh", "-c", export + call], **common, **piped, timeout=300, check=False)
        program.send_signal(signal.SIGINT)
        _, bill = program.communicate(timeout=300)
    assert (called.stdout, called.stderr) == ("b'{\"you said\": [1, 2]}'\n", "")
    assert program.returncode == 0
    assert "echo: 1 invocations, 1 cold starts, 0 errors" in bill


def test_the_program_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(blocks("python")[1])
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.stderr, ended.stdout) == ("", blocks("text")[0])


def test_the_commands_of_the_page_pack_shuffle_and_serve_in_functions(tmp_path: Path) -> None:
    serve, (_, *others) = [commands(block) for block in blocks("console")[:2]]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    common: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PATH": path}, "text": True}
    with subprocess.Popen(["/bin/sh", "-c", f"exec {serve[0]}"], **common, stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            export, *urls = [program.stdout.readline() for _ in range(5)]
            variables = dict(word.split("=", 1) for word in export.split()[1:])
            with s3_client(SimpleNamespace(url=variables["AWS_ENDPOINT_URL"])) as client:
                for number in range(3):
                    client.put_object(Bucket="raw", Key=f"photos/{number}.bin", Body=b"a photo")
            (url,) = [url.removeprefix("# stoker-serve: ") for url in urls if "stoker-serve" in url]
            script = "\n".join(["set -e", export, f"URL={url}", *others])
            ended = subprocess.run(["/bin/sh", "-c", script], **common, capture_output=True, timeout=300, check=False)
        finally:
            program.send_signal(signal.SIGINT)
    assert ended.returncode == 0, ended.stderr
    assert "s3://data/train: version 1 has 3 samples" in ended.stderr
    assert "epoch 0 is at s3://data/train/epochs/" in ended.stderr
    assert "all of them good" in ended.stderr


def test_the_configuration_of_googles_functions_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    config = FunctionCloudConfig.from_json(blocks("json")[1])
    assert {each.name: each.target for each in config.google} == {"stoker-pack": "pack", "stoker-commit": "commit"}


def test_the_configuration_of_the_page_is_valid() -> None:
    config = FunctionCloudConfig.from_json(blocks("json")[0])
    assert config.notifications[0].suffix == ".jpg"
    assert sum(config.faults.probabilities.values()) > 0
