"""The distribution: the wheel has every package and imports; the pins for development cover all requirements."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from support.cases import for_each

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [ROOT / folder for folder in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?", re.ASCII)


def requirements(*, of_users: bool = False) -> Iterator[Requirement]:
    """Yield all that pyproject.toml asks for but the project itself; of users only, what its extras bring."""
    project = PROJECT["project"]
    asked = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    if not of_users:
        asked += PROJECT["build-system"]["requires"]
        asked += (each for group in PROJECT["dependency-groups"].values() for each in group)
    yield from (requirement for requirement in map(Requirement, asked) if requirement.name != project["name"])


def imported(node: ast.AST, *, types_too: bool) -> Iterator[str]:
    """Yield the top-level modules that a program imports, wherever in it."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
        yield from (name.partition(".")[0] for name in names)
    for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for child in [] if for_types and not types_too else ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from imported(child, types_too=types_too)


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which a freshly built wheel was unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def run(wheel: Path, program: str) -> str:
    """Return what a program prints that finds our packages only in the wheel."""
    whole = f"import sys; sys.path.insert(0, {str(wheel)!r})\n{program}"
    done = subprocess.run([sys.executable, "-I", "-c", whole], cwd=wheel, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def test_the_wheel_has_every_listed_package_and_nothing_else(wheel: Path) -> None:
    found = {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"}
    assert found == {package.name for package in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_in_the_wheel_has_all_its_files_and_its_types_marker(wheel: Path, package: Path) -> None:
    wanted = {file.relative_to(package) for kind in ("*.py", "*.toml") for file in package.rglob(kind)}
    shipped = wheel / package.name
    assert wanted | {Path("py.typed")} <= {file.relative_to(shipped) for file in shipped.rglob("*")}


def test_every_module_of_the_wheel_imports_from_the_wheel(wheel: Path) -> None:
    files = [file.relative_to(wheel).with_suffix("") for file in wheel.rglob("*.py") if file.name != "__main__.py"]
    names = sorted({".".join(file.parts).removesuffix(".__init__") for file in files})
    imported = run(wheel, f"import importlib\nfor name in {names!r}: print(importlib.import_module(name).__file__)")
    assert len(names) > len(PACKAGES)
    assert all(Path(file).is_relative_to(wheel) for file in imported.splitlines())
    assert len(imported.splitlines()) == len(names)


def test_every_entry_point_resolves_to_the_type_of_its_group(wheel: Path) -> None:
    program = """
    from importlib.metadata import PathDistribution
    from pathlib import Path
    (info,) = Path(sys.path[0]).glob("*.dist-info")
    for point in PathDistribution(info).entry_points:
        found = point.load()
        print(point.name, "callable" if callable(found) else type(found).__name__)
    """.replace("\n    ", "\n")
    groups = PROJECT["project"]["entry-points"]
    wanted = [
        *(f"{name} Command" for name in groups["stoker.commands"]),
        *(
            f"{name} callable"
            for name in (*groups["stoker.executors"], *groups["stoker.tiers"], *groups["fsspec.specs"])
        ),
        *(f"{name} callable" for name in PROJECT["project"]["scripts"]),
    ]
    assert sorted(run(wheel, program).splitlines()) == sorted(wanted)


def test_the_version_of_the_wheel_is_that_of_the_package(wheel: Path) -> None:
    version = run(wheel, "import stoker; print(stoker.__version__)").strip()
    assert [info.name for info in wheel.glob("*.dist-info")] == [f"stoker-{version}.dist-info"]


@for_each("requirement", list(requirements()), ids=str)
def test_a_requirement_has_a_lower_bound_and_a_pin_that_satisfies_it(requirement: Requirement) -> None:
    assert any(bound.operator in (">=", "==", "~=") for bound in requirement.specifier)
    assert pins()[canonicalize_name(requirement.name)] in requirement.specifier


PEERS, RESULTS = ROOT / "benchmarks" / "peers", ROOT / "benchmarks" / "results"
"""Programs that run in environments of their own, and these environments."""


@pytest.mark.parametrize(
    ("folders", "of_users"),
    [(PACKAGES, True), ([*PACKAGES, *(ROOT / name for name in ("tests", "tools", "benchmarks", "examples"))], False)],
    ids=["users", "developers"],
)
def test_every_imported_package_is_a_requirement(folders: list[Path], of_users: bool) -> None:
    ours = (
        {package.name for package in PACKAGES}
        | {"benchmarks", "tools"}
        | {path.name for path in (ROOT / "tests").iterdir()}
    )
    ours |= {path.stem for path in (ROOT / "examples").glob("*.py")}
    files = [file for folder in folders for file in folder.rglob("*.py") if not file.is_relative_to(PEERS)]
    files = [file for file in files if not file.is_relative_to(RESULTS)]
    modules = {name for file in files for name in imported(ast.parse(file.read_text()), types_too=not of_users)}
    asked = {canonicalize_name(requirement.name) for requirement in requirements(of_users=of_users)}
    brought_by = packages_distributions()
    foreign = sorted(modules - sys.stdlib_module_names - ours)
    assert len(foreign) > 10
    assert [name for name in foreign if asked.isdisjoint(map(canonicalize_name, brought_by.get(name, ())))] == []


def test_constraints_are_plain_pins_with_no_local_version_path_or_repetition() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    assert len(pins()) == len(lines)
    assert "stoker" not in pins()


def test_the_extra_all_includes_every_other_extra() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.extras == set(extras) - {"all"}
