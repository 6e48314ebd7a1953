"""docs/deploy.md: its costs are those of the price file, its files are there, its commands name what is deployed."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker import Prices
from stoker._cost.prices import GB_BYTES
from stoker_functions._deployment import DeploymentSettings
from stoker_functions._warm_node import shard_limit_bytes
from stoker_warm._config import WarmConfig, WarmDeployment
from stoker_warm._connection import HANDSHAKE_TIMEOUT_SECONDS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "deploy.md").read_text("utf-8")


def test_the_costs_are_those_of_the_price_file_and_its_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_PRICES", raising=False)
    ((code, shown),) = re.findall(r"```python\n(.*?)```\n\s*```text\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "deploy.md", "exec"), names)  # noqa: S102 - our own page
    assert printed.getvalue() == shown
    assert f"List prices of {Prices.load().date}" in PAGE


def test_how_fast_a_function_packs_is_what_was_measured() -> None:
    (measured,) = re.findall(r"^measured = \{(.*)\}", PAGE, re.MULTILINE)
    functions = (ROOT / "docs" / "functions.md").read_text("utf-8")
    for sample_bytes, samples_a_second in re.findall(r"([0-9_]+): (\d+)", measured):
        (row,) = re.findall(rf"^\| {int(sample_bytes) // 1000} KB, `pack` \| ([0-9,]+) \|", functions, re.MULTILINE)
        # Measured again, it is a little else; the dollars of this page do not change for that.
        assert int(samples_a_second) == pytest.approx(int(row.replace(",", "")), rel=0.3)


def test_every_output_that_a_command_uses_is_there() -> None:
    stack = "".join((ROOT / "infra" / "serverless" / name).read_text() for name in ("storage.yml", "callers.yml"))
    outputs = {name for each in stack.split("Outputs:\n")[1:] for name in re.findall(r"^  (\w+):$", each, re.MULTILINE)}
    warm = (ROOT / "infra" / "serverless" / "warm.js").read_text()
    outputs |= set(re.findall(r"(\w+): \{ Value:", warm.partition("Outputs: {")[2]))
    used = set(re.findall(r"\$\(output (\w+)\)", PAGE))
    assert {"Alarms", "FanOutPolicy", "IngestDeadLetters", "TrainerRole", "WarmPolicies"} <= used <= outputs
    terraform = (ROOT / "infra" / "terraform" / "outputs.tf").read_text()
    names = re.findall(r"terraform output -raw (\w+)", PAGE)
    assert len(names) > 3
    assert all(f'output "{name}" {{' in terraform for name in names)


def test_every_file_that_the_page_links_to_is_there() -> None:
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", PAGE)} - {""}
    assert not [link for link in links if not link.startswith("http") and not (ROOT / "docs" / link).exists()]


def test_files_and_parameters_in_commands_are_there() -> None:
    commands = "\n".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL))
    files = {
        name.removeprefix("../")
        for name in re.findall(r"[\w./-]*docker/\w+\.Dockerfile|infra/serverless/\w+\.py", commands)
    }
    assert files
    assert all((ROOT / file).exists() or (ROOT / "infra" / file).exists() for file in files)
    osls = (ROOT / "serverless.yml").read_text() + "".join(
        file.read_text() for file in (ROOT / "infra" / "serverless").glob("*.yml")
    )
    generator = (ROOT / "infra" / "serverless" / "warm.js").read_text()
    for name in re.findall(r"--param '?(\w+)=", PAGE):
        assert f"${{param:{name}}}" in osls + generator or f'"{name}"' in generator
    terraform = (ROOT / "infra" / "terraform" / "variables.tf").read_text()
    for name in re.findall(r"-var '?(\w+)=|TF_VAR_(\w+)=", commands):
        assert f'variable "{"".join(name)}"' in terraform


def test_commands_of_stoker_and_options_of_the_training_job_are_there() -> None:
    joined = PAGE.replace("\\\n", " ")
    lines = re.findall(r"^ *\$ (?:stoker|.*\$\(stoker) (\w+) (.*)$", joined, re.MULTILINE)
    assert {name for name, _ in lines} == {"pack", "shuffle", "token", "warm"}
    for name, rest in lines:
        command = [name, *re.findall(r"^\w+", rest)] if name == "warm" else [name]
        shown = subprocess.run(
            [sys.executable, "-m", "stoker.cli", *command, "--help"], capture_output=True, text=True, check=True
        ).stdout
        own = re.sub(r"\$\([^)]*\)", "", rest).partition(" | ")[0]
        assert all(option in shown for option in re.findall(r"--[a-z-]+", own))
    job = (ROOT / "examples" / "train_job.py").read_text()
    terraform = (ROOT / "infra" / "terraform" / "trainer.tf").read_text()
    options = re.findall(r'"(--[a-z-]+)=', PAGE + terraform)
    assert {"--data", "--checkpoint", "--classes"} <= set(options)
    assert all(f'"{option}"' in job for option in options)


def test_urls_of_warm_tiers_are_understood_and_listen_where_nodes_may_reach_them() -> None:
    stands_for = {"$(hostname -i)": "10.0.0.5", "$(terraform output -raw function_url)": "https://{function}-1.run.app"}
    urls = re.findall(r'"(warm\+?\w*://[^"…]+)"', PAGE)
    assert len(urls) > 3
    ports = set()
    for url in urls:
        for each, value in stands_for.items():
            url = url.replace(each, value)
        ports.add(WarmDeployment.parse(url).listen.port)
    (port,) = ports
    assert re.search(rf"^    warmPort: {port}$", (ROOT / "serverless.yml").read_text(), re.MULTILINE)


def test_what_the_page_says_of_nodes_is_so() -> None:
    words, config = " ".join(PAGE.split()), WarmConfig()
    osls = (ROOT / "serverless.yml").read_text()
    (megabytes,) = re.findall(r"warmMemory: (\d+)", osls)
    shard_gib = shard_limit_bytes(DeploymentSettings(memory_bytes=int(megabytes) << 20)) / GB_BYTES
    assert f"of {int(megabytes):,} MB" in words
    assert f"{shard_gib:.1f} GiB of shards a node" in words
    assert f"`{config.code}` leaves {config.code.data / config.code.shards:.0%}" in words
    assert "Twelve nodes" in words
    assert config.nodes == 12
    assert HANDSHAKE_TIMEOUT_SECONDS == 5
    assert "does not prove within five seconds" in words


def test_reserved_concurrency_adds_up_to_what_the_page_says() -> None:
    functions = (ROOT / "infra" / "serverless" / "functions.yml").read_text()
    total = sum(map(int, re.findall(r"reservedConcurrency: (\d+)", functions)))
    assert f"adds up to {total} of the 1,000" in " ".join(PAGE.split())
