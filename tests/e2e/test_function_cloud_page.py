"""What docs/function-cloud.md shows works as it is shown."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from stoker_local.functions import FunctionCloudConfig

PAGE = (Path(__file__).parents[2] / "docs" / "function-cloud.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


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
        called = subprocess.run(["/bin/sh", "-c", export + call], **common, **piped, timeout=60, check=False)
        program.send_signal(signal.SIGINT)
        _, bill = program.communicate(timeout=60)
    assert (called.stdout, called.stderr) == ("b'{\"you said\": [1, 2]}'\n", "")
    assert program.returncode == 0
    assert "echo: 1 invocations, 1 cold starts, 0 errors" in bill


def test_the_program_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(blocks("python")[1])
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stderr, ended.stdout) == ("", blocks("text")[0])


def test_the_configuration_of_the_page_is_valid() -> None:
    (document,) = blocks("json")
    config = FunctionCloudConfig.from_json(document)
    assert config.notifications[0].suffix == ".jpg"
    assert sum(config.faults.probabilities.values()) > 0
