"""The images: linted, pinned, small, without privileges and without tools."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.installed_wheels import closure, size_bytes

ROOT = Path(__file__).parents[3]
DOCKERFILES = sorted((ROOT / "infra" / "docker").glob("*.Dockerfile"))
FUNCTIONS = ROOT / "infra" / "docker" / "functions.Dockerfile"
LIMIT_BYTES = 250_000_000


@dataclass(slots=True)
class Stage:
    """A stage of a build: what it stands on and its instructions."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)


def stages(dockerfile: Path) -> dict[str, Stage]:
    """Return the stages of a Dockerfile, in order."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    stage = Stage("", "")
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = found.setdefault(name, Stage(name, base))
        else:
            stage.instructions.append((instruction, rest.strip()))
    return found


def line_of(dockerfile: Path, name: str) -> list[Stage]:
    """Return a stage and those that it stands on, itself first."""
    every = stages(dockerfile)
    found = [every[name]]
    while found[-1].base in every:
        found.append(every[found[-1].base])
    return found


def final(dockerfile: Path) -> list[str]:
    """Return the stages that images are made of: no other stands on them or copies from them."""
    every = stages(dockerfile)
    used = {stage.base for stage in every.values()}
    copied = (rest for stage in every.values() for name, rest in stage.instructions if name == "COPY")
    used |= {match[1] for rest in copied if (match := re.match(r"--from=(\S+)", rest))}
    return [name for name in every if name not in used]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.stem)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    program = Path(sys.executable).parent / "hadolint"
    run = subprocess.run([str(program), str(dockerfile)], capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")


def test_there_are_an_image_for_each_platform_one_of_a_tier_server_and_one_to_train() -> None:
    found = {name for dockerfile in DOCKERFILES for name in final(dockerfile)}
    assert found == {"lambda", "cloud-run", "tier", "trainer"}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.stem)
def test_every_base_is_pinned_by_digest(dockerfile: Path) -> None:
    every = stages(dockerfile)
    foreign = [stage.base for stage in every.values() if stage.base not in every]
    assert foreign
    assert all(re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", base) for base in foreign)


@pytest.mark.parametrize(
    ("dockerfile", "name"), [(file, name) for file in DOCKERFILES for name in final(file)], ids=str
)
def test_an_image_runs_as_nobody_and_has_no_build_tools(dockerfile: Path, name: str) -> None:
    line = line_of(dockerfile, name)
    users = [rest for stage in line for instruction, rest in reversed(stage.instructions) if instruction == "USER"]
    assert users[0].split(":")[0].isdecimal()
    assert int(users[0].split(":")[0]) > 0
    commands = " ".join(rest for stage in line for instruction, rest in stage.instructions if instruction == "RUN")
    assert not re.search(r"pip install|python3-pip|gcc|g\+\+|build-essential|cmake|git\b|curl", commands)
    copied = [rest for stage in line for instruction, rest in stage.instructions if instruction in ("COPY", "ADD")]
    assert any(rest.startswith("--from=build") for rest in copied)
    assert all(rest.startswith(("--from=build", "examples/")) for rest in copied)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.stem)
def test_what_is_copied_into_a_build_is_there_and_sent_to_the_builder(dockerfile: Path) -> None:
    sent = set((dockerfile.parent / f"{dockerfile.name}.dockerignore").read_text().splitlines())
    for stage in stages(dockerfile).values():
        for instruction, rest in stage.instructions:
            if instruction == "COPY" and not rest.startswith("--from"):
                for source in shlex.split(rest)[:-1]:
                    assert (ROOT / source).exists()
                    assert f"!{source}" in sent
    assert "*" in sent


def test_the_build_has_all_that_the_project_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    copied = {rest.split()[0] for instruction, rest in stages(FUNCTIONS)["build"].instructions if instruction == "COPY"}
    assert all(any(Path(package).is_relative_to(source) for source in copied) for package in packages)


def requirements(stage: str) -> list[str]:
    """Return the arguments of pip install in a stage, with our own package by its name."""
    (run,) = (rest for instruction, rest in stages(FUNCTIONS)[stage].instructions if instruction == "RUN")
    words = shlex.split(run)
    asked = words[words.index("constraints.txt") + 1 :]
    assert asked[0].startswith(".[")
    return [asked[0].replace(".", "stoker", 1), *asked[1:]]


@pytest.mark.parametrize("stage", ["build-lambda", "build-cloud-run"])
def test_the_wheels_of_the_functions_are_small_and_have_no_torch(stage: str) -> None:
    found = closure(requirements(stage))
    assert {"numpy", "aiohttp", "redis"} < set(found)
    assert not {"torch", "scikit-learn", "ray", "pytest"} & set(found)
    size = size_bytes(found.values())
    print(f"{stage}: {size / 1e6:.0f} MB of {len(found)} wheels")
    assert 20_000_000 < size < LIMIT_BYTES


def test_the_image_of_a_tier_server_makes_certificates_and_runs_the_server() -> None:
    found = closure(requirements("build-tier"))
    assert {"cryptography", "aiohttp"} <= set(found)
    assert not {"torch", "redis", "pytest"} & set(found)
    assert size_bytes(found.values()) < LIMIT_BYTES
    entry = [rest for instruction, rest in stages(FUNCTIONS)["tier"].instructions if instruction == "ENTRYPOINT"]
    assert entry == ['["stoker", "tier", "serve"]']


def test_the_image_for_google_finds_the_module_with_its_functions() -> None:
    (variables,) = (rest for name, rest in stages(FUNCTIONS)["cloud-run"].instructions if name == "ENV")
    source = dict(word.split("=", 1) for word in shlex.split(variables))["FUNCTION_SOURCE"]
    version = re.search(r"python:(\d+\.\d+)", stages(FUNCTIONS)["python"].base)
    assert version is not None
    assert source == f"/opt/stoker/lib/python{version[1]}/site-packages/stoker_functions/gcp.py"
