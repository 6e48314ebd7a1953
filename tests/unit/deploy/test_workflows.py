"""The workflows of the repository: what they run is there, with no more rights than it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAY_WRITE = {("docs", "publish"): {"pages", "id-token"}, ("release", "publish"): {"id-token", "attestations"}}


def parsed(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text("utf-8"))
    return found


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_has_the_least_rights_and_a_limit_of_time(file: Path) -> None:
    workflow = parsed(file)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        rights = job.get("permissions", {})
        assert {right for right, level in rights.items() if level == "write"} == MAY_WRITE.get((file.stem, name), set())
        assert "permissions" in job or job["timeout-minutes"] <= 60
        assert "secrets." not in str(job)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_what_a_workflow_makes_is_a_target(file: Path) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    steps = [step for job in parsed(file)["jobs"].values() for step in job["steps"]]
    made = {word for step in steps for word in re.findall(r"make (\w+)", step.get("run", ""))}
    assert made
    assert made <= targets


def test_all_versions_of_python_that_are_promised_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    promised = set(re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"])))
    tested = set(parsed(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["test"]["strategy"]["matrix"]["python"])
    assert tested == promised


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_actions_of_others_are_pinned_by_commit_with_the_version_beside_it(file: Path) -> None:
    used = re.findall(r"uses: (?!docker://)(.+)", file.read_text("utf-8"))
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_actionlint_finds_nothing() -> None:
    program = shutil.which("actionlint")
    if program is None:
        pytest.skip("actionlint is not installed; the workflow `test` runs it")
    done = subprocess.run([program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
