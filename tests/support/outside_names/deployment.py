"""Entry points, handlers that deploy files name, environment variables, and loggers."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from stoker_functions import aws, gcp
from stoker_functions._instance import GOOGLE_HANDLERS, LAMBDA_HANDLERS, SERVING_HANDLERS

__all__ = ["entry_points", "environment", "handlers", "loggers", "read_variables"]

_ROOT = Path(__file__).parents[3]
_VARIABLE = re.compile(r"STOKER_[A-Z_]+")
_HANDLER = re.compile(r"\bstoker_functions(?:\.\w+)+")
_LOGGER = re.compile(r"\bgetLogger\((.*?)\)")
_GOOGLE_TARGET = re.compile(r"FUNCTION_TARGET *= .*")
_GOOGLE_SOURCE = re.compile(r"FUNCTION_SOURCE=\S*/site-packages/(\S+)\.py")


def entry_points(_: Path) -> Iterator[str]:
    """Return the entry points of the distribution, each of which loads."""
    project = _project()["project"]
    groups = {"console script": project["scripts"], **project["entry-points"]}
    for group, points in groups.items():
        for name, value in points.items():
            EntryPoint(name, value, group).load()
            yield f"{group} {name}"


def handlers(_: Path) -> Iterator[str]:
    """Return the handlers of each platform and those that deploy files name, each of which can be called."""
    for module, names in ((aws, LAMBDA_HANDLERS), (gcp, {*GOOGLE_HANDLERS, *SERVING_HANDLERS})):
        for name in names:
            yield _callable(f"{module.__name__}.{name}")
    for file in _deploy_files():
        text, tool = file.read_text(encoding="utf-8"), _tool(file)
        for line in _lines_without_comments(file, text):
            for path in _HANDLER.findall(line):
                yield f"{tool}: {_callable(path.removesuffix('.py'))}"
            for target in _GOOGLE_TARGET.findall(line):
                for name in re.findall(r'\? "(\w+)"|= "(\w+)"', target):
                    yield f"{tool}: {_callable(f'{gcp.__name__}.{name[0] or name[1]}')}"
            for source in _GOOGLE_SOURCE.findall(line):
                yield f"{tool}: {import_module(source.replace('/', '.')).__name__} as FUNCTION_SOURCE"


def environment(_: Path) -> Iterator[str]:
    """Return our environment variables: those that programs name, and those that deploy files set."""
    for name in read_variables():
        yield f"{name} of programs"
    for file in _deploy_files():
        for name in _VARIABLE.findall(file.read_text(encoding="utf-8")):
            yield f"{name} set by {_tool(file)}"


def read_variables() -> set[str]:
    """Return the variables that are a whole string in a program, as in ``environ.get``, and not a part of a message."""
    found: set[str] = set()
    for text in _programs():
        if "STOKER_" in text:
            strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            found |= {each for each in strings if isinstance(each, str) and _VARIABLE.fullmatch(each)}
    return found


def loggers(_: Path) -> Iterator[str]:
    """Return the names of our loggers, which users set levels by, so they do not follow the names of files."""
    for text in _programs():
        for argument in _LOGGER.findall(text):
            yield str(ast.literal_eval(argument))


def _programs() -> Iterator[str]:
    """Yield the text of every shipped module."""
    for package in _project()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        for file in (_ROOT / package).rglob("*.py"):
            yield file.read_text(encoding="utf-8")


def _project() -> dict[str, Any]:
    return tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _callable(path: str) -> str:
    module, _, name = path.rpartition(".")
    if not callable(getattr(import_module(module), name)):
        raise TypeError(f"{path}, which a deploy file names, cannot be called")
    return path


def _deploy_files() -> list[Path]:
    folders = [_ROOT / "infra" / name for name in ("serverless", "terraform", "docker")]
    kinds = {".yml", ".js", ".tf", ".Dockerfile"}
    return [_ROOT / "serverless.yml", *(file for each in folders for file in each.iterdir() if file.suffix in kinds)]


def _tool(file: Path) -> str:
    return "serverless" if file.parent == _ROOT else file.parent.name


def _lines_without_comments(file: Path, text: str) -> Iterator[str]:
    mark = "//" if file.suffix == ".js" else "#"
    for line in text.splitlines():
        if not line.lstrip().startswith((mark, "description")):
            yield line
