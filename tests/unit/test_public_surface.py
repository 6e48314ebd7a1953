"""What users import: lazily loaded, all of it listed, and nothing else on any page or in any example."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import stoker
import stoker.testing
import stoker_functions
import stoker_sim
from stoker import errors
from support.cases import for_each
from support.outside_names.python_api import imports_of
from support.public_names import PUBLIC, ROOT

LAZY = (stoker, stoker.testing, stoker_functions, stoker_sim)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOR_USERS = [page for page in PAGES if page.name not in ("architecture.md", "fuzzing.md")]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PRIVATE_IMPORT = re.compile(r"^[ \t\"']*from (stoker\w*(?:\.\w+)*\._[\w.]+) import (\([^)]*\)|.*)$", re.MULTILINE)
PRIVATE = re.compile(r"\bstoker(?:_[a-z]+)?(?:\.\w+)*\._[a-z]\w*")


def typed_names(module: ModuleType) -> dict[str, str]:
    """Return what type checkers see a package import lazily, name → module."""
    tree = ast.parse(inspect.getsource(module))
    (block,) = (each for each in tree.body if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING")
    found = [each for each in block.body if isinstance(each, ast.ImportFrom)]
    return {alias.name: str(each.module) for each in found for alias in each.names}


@pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)
def test_the_names_that_are_loaded_lazily_are_those_that_type_checkers_see_and_that_are_listed(
    package: ModuleType,
) -> None:
    lazy = {name: module for module, names in package._NAMES_OF.items() for name in names.split()}
    assert typed_names(package) == lazy
    eager = {"open", "__version__", *errors.__all__} if package is stoker else set()
    assert sorted(package.__all__) == sorted({*lazy, *eager})
    assert set(package.__all__) <= set(dir(package))


@for_each("name", PUBLIC)
def test_a_public_module_lists_its_names_and_has_each(name: str) -> None:
    module = import_module(name)
    names = list(module.__all__)
    assert len(set(names)) == len(names)
    assert not [each for each in names if getattr(module, each, None) is None]


def test_a_name_that_stoker_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'stoker' has no attribute 'Lodaer'"):
        _ = stoker.Lodaer  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Lodaer' from 'stoker'"):
        from stoker import Lodaer  # type: ignore[attr-defined]  # noqa: F401
    assert not hasattr(stoker, "__wrapped__")


def test_importing_stoker_loads_errors_alone_and_each_name_what_it_needs() -> None:
    program = (
        "import sys, stoker\n"
        "loaded = [name for name in sys.modules if name.startswith('stoker')]\n"
        "print(*sorted(loaded), *sorted({'aiohttp', 'asyncio', 'numpy', 'typing'} & set(sys.modules)))\n"
        "from stoker import *\n"
        "print(open.__name__, S3Options().http.max_connections, stoker.open is Dataset)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded, names = done.stdout.splitlines()
    assert loaded.split() == [
        *("stoker", "stoker._base", "stoker._base.plugins", "stoker._deprecation", "stoker._version", "stoker.errors"),
        "typing",
    ]
    assert names == "Dataset 64 True"


@for_each("file", [*PAGES, *EXAMPLES], ids=lambda file: file.name)
def test_pages_and_examples_import_public_names_only(file: Path) -> None:
    for module, name in imports_of(file):
        assert module in PUBLIC, f"{file.name} imports the private module {module}"
        named = f"{module}.{name}"
        assert not name or name in import_module(module).__all__ or named in PUBLIC, f"{file.name} imports {named}"


@for_each("page", FOR_USERS, ids=lambda page: page.name)
def test_pages_for_users_name_nothing_private(page: Path) -> None:
    assert PRIVATE.findall(page.read_text("utf-8")) == []


def test_tests_import_what_is_public_from_where_it_is_public() -> None:
    public = {
        (value.__module__, each): name
        for name in PUBLIC
        for each in import_module(name).__all__
        if inspect.isclass(value := getattr(import_module(name), each)) or inspect.isfunction(value)
    }
    found = {}
    for file in (file for folder in ("tests", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")):
        if "golden" in file.parts:
            continue
        for module, names in PRIVATE_IMPORT.findall(file.read_text("utf-8")):
            for each in re.findall(r"\w+(?: as \w+)?", names):
                if place := public.get((module, each.partition(" ")[0])):
                    found[f"{file.relative_to(ROOT)}: {module}.{each}"] = f"from {place} import {each}"
    assert found == {}


def described(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield what a public thing and its public members say of themselves, with the name of each."""
    yield name, str(inspect.getdoc(value)) if inspect.isclass(value) or inspect.isroutine(value) else ""
    for base in value.__mro__ if inspect.isclass(value) and not issubclass(value, BaseException) else ():
        for member, found in vars(base).items() if base.__module__.startswith("stoker") else ():
            function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            if inspect.isfunction(function) and not member.startswith("_"):
                yield f"{name}.{member}", str(function.__doc__)


@for_each("name", PUBLIC)
def test_docstrings_of_public_names_do_not_refer_to_private_modules(name: str) -> None:
    module = import_module(name)
    found = [(name, str(module.__doc__))]
    for each in module.__all__:
        found += described(f"{name}.{each}", getattr(module, each))
    assert {where: PRIVATE.findall(text) for where, text in found if PRIVATE.search(text)} == {}
