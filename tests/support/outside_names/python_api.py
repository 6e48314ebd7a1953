"""Names that a program imports: those in ``__all__``, with parameters and members, and those in documents."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import stoker
import stoker_functions.serve
import stoker_local.functions
import stoker_sim
import stoker_torch
from stoker import abc, errors, fanout, files, images, testing, trace
from stoker._deprecation import RENAMED
from stoker_torch._options import MOVED_SETTINGS

__all__ = ["documented_imports", "imports_of", "python_api"]

_ROOT = Path(__file__).parents[3]
_MODULES = (
    *(
        stoker,
        abc,
        errors,
        fanout,
        files,
        images,
        testing,
        trace,
        stoker_torch,
        stoker_functions,
        stoker_functions.serve,
    ),
    *(stoker_local, stoker_local.functions, stoker_sim),
)
"""Modules that users import, except ``stoker_functions.aws`` and ``.gcp``, whose handlers have their own list."""
_CODE = re.compile(r"```(?:python|py)\n(.*?)```", re.DOTALL)
_DOCTEST = re.compile(r"^\s*(?:>>>|\.\.\.) ?(.*\n)", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*(?:from|import) stoker[\w.]*(?:[^\n(]*|[^\n(]*\([^)]*\))$", re.MULTILINE)
_OWNERS = {"Loader", "LoaderConfig", "StreamConfig", "StreamDataset"}
"""Classes that still accept the moved settings."""


def python_api(_: Path) -> Iterator[str]:
    """Return the public names of each package and module, with parameters, their defaults, and members."""
    for module in _MODULES:
        for name in module.__all__:
            if module is stoker and name in errors.__all__:
                yield f"stoker.{name} is stoker.errors.{name}"
            else:
                yield from _lines(f"{module.__name__}.{name}", getattr(module, name))
        for old, new in RENAMED.get(module.__name__, {}).items():
            yield f"{module.__name__}.{old} is {new}"


def documented_imports(_: Path) -> Iterator[str]:
    """Return the names that README, documents and examples import from our packages; all of them exist."""
    for file in [_ROOT / "README.md", *(_ROOT / "docs").glob("*.md"), *(_ROOT / "examples").glob("*.py")]:
        for module, name in imports_of(file):
            if not name:
                yield f"import {import_module(module).__name__}"
                continue
            value = getattr(import_module(module), name)
            yield f"from {module} import {name}"
            if module not in {each.__name__ for each in _MODULES}:
                yield from _lines(f"{module}.{name}", value)


def imports_of(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the imports from our packages in a page or a Python file: module, and name or an empty text."""
    text = file.read_text(encoding="utf-8")
    codes = [text] if file.suffix == ".py" else [*_CODE.findall(text), "".join(_DOCTEST.findall(text))]
    for statement in (each for code in codes for each in _IMPORT.findall(code)):
        (node,) = ast.parse(textwrap.dedent(statement)).body
        if isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def _lines(path: str, value: object) -> Iterator[str]:
    if not inspect.isclass(value):
        yield path
        if inspect.isfunction(value):
            yield from _parameters(path, value)
        return
    if path.rpartition(".")[2] != value.__name__:
        yield f"{path} is {value.__name__}"
        return
    ours = (each for each in value.__mro__[1:] if each not in (Exception, BaseException, object))
    bases = [each.__name__ for each in ours if issubclass(value, BaseException)]
    yield f"{path} is {' '.join(bases)}" if bases else path
    if issubclass(value, enum.Enum):
        yield from (f"{path}.{each.name} = {each.value!r}" for each in value)
        return
    if not issubclass(value, BaseException) or inspect.isfunction(value.__init__):
        yield from _parameters(path, value)
    for name in dir(value):
        owner = next(each for each in value.__mro__ if name in {*vars(each), *getattr(each, "__annotations__", ())})
        if name.startswith("_") or not owner.__module__.startswith("stoker"):
            continue
        member = inspect.getattr_static(value, _renamed(path).get(name, name))
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        yield f"{path}.{name}"
        if inspect.isfunction(function):
            yield from _parameters(f"{path}.{name}", function)


def _parameters(path: str, function: Callable[..., Any]) -> Iterator[str]:
    if path.rpartition(".")[2] in _OWNERS:
        for name, moved in MOVED_SETTINGS.items():
            default = next(each.default for each in fields(moved.options) if each.name == moved.field)
            yield f"{path}(*, {name}{_default(default)})"
            if path.endswith("Config"):
                yield f"{path}.{name}"
    parameters = dict(inspect.signature(function).parameters)
    deprecated = [parameters[new].replace(name=old) for old, new in _renamed(path).items() if new in parameters]
    for parameter in (*parameters.values(), *deprecated):
        if parameter.name in ("self", "cls"):
            continue
        stars: dict[object, str] = {
            parameter.VAR_POSITIONAL: "*",
            parameter.VAR_KEYWORD: "**",
            parameter.KEYWORD_ONLY: "*, ",
        }
        end = ", /" if parameter.kind is parameter.POSITIONAL_ONLY else ""
        yield f"{path}({stars.get(parameter.kind, '')}{parameter.name}{_default(parameter.default)}{end})"


def _renamed(path: str) -> dict[str, str]:
    """Return the present names by the deprecated ones of a class, function or method."""
    return next((names for owner, names in RENAMED.items() if path.endswith(f".{owner}")), {})


def _default(value: object) -> str:
    if value in (inspect.Parameter.empty, MISSING):
        return ""
    if is_dataclass(value) and not isinstance(value, type) and value == type(value)():
        return f"={type(value).__name__}()"
    if isinstance(value, type) or inspect.isroutine(value):
        module = value.__module__ or ""
        return "=…" if module.startswith("stoker") else f"={value.__name__}"
    text = repr(value)
    return f"={text}" if " at 0x" not in text and "<factory>" not in text else "=…"
