"""The documentation site has every public name and every page."""

from __future__ import annotations

import importlib
import inspect
import re
from enum import Enum
from pathlib import Path
from typing import Any

import griffe
import pytest

from stoker_torch import Preemption

ROOT = Path(__file__).parents[2]
SHOWN = {
    (module, name)
    for page in (ROOT / "docs" / "api").glob("*.md")
    for module, name in re.findall(r"^::: ([\w.]+)\.(\w+)$", page.read_text("utf-8"), re.MULTILINE)
}
MODULES = (
    "stoker",
    "stoker.abc",
    "stoker.errors",
    "stoker.fanout",
    "stoker.images",
    "stoker.testing",
    "stoker.trace",
    "stoker_functions",
    "stoker_local",
    "stoker_sim",
    "stoker_torch",
)


def public_objects(name: str) -> dict[str, Any]:
    """Return the public objects of a module by name; of ``stoker.errors``, without ``__all__``, its own classes."""
    module = importlib.import_module(name)
    if name == "stoker.errors":
        return {each: found for each, found in vars(module).items() if getattr(found, "__module__", "") == name}
    return {each: getattr(module, each) for each in module.__all__ if not each.startswith("_")}


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_in_the_api_reference(name: str) -> None:
    shown = [getattr(importlib.import_module(module), each) for module, each in SHOWN]
    assert [each for each, found in public_objects(name).items() if not any(found is other for other in shown)] == []


def test_the_api_reference_shows_every_object_once_and_none_that_is_not_there() -> None:
    assert {module for module, _ in SHOWN} == set(MODULES)
    assert [(module, each) for module, each in SHOWN if each not in public_objects(module)] == []
    classes = [
        found for module, each in SHOWN if getattr(found := public_objects(module)[each], "__name__", "") == each
    ]
    assert len(classes) == len(set(classes))


@pytest.mark.parametrize("name", MODULES)
def test_every_parameter_of_a_public_class_or_function_is_described(name: str) -> None:
    assert {
        each: missing for each, found in public_objects(name).items() if (missing := undescribed_parameters(found))
    } == {}


def undescribed_parameters(found: Any) -> set[str]:
    """Return the parameters of a class or function that no section of its docstring describes."""
    if not inspect.isroutine(found) and not inspect.isclass(found):
        return set()
    if inspect.isclass(found) and (issubclass(found, BaseException | Enum | Preemption)):
        return set()  # nobody else constructs them
    kinds = found.__mro__ if inspect.isclass(found) else ()
    texts = [inspect.getdoc(each) or "" for each in (found, *kinds, *(vars(kind).get("__init__") for kind in kinds))]
    described = {
        each.name
        for text in texts
        for section in griffe.parse_google(griffe.Docstring(text), warnings=False)
        if section.kind in (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes)
        for each in section.value
    }
    parameters = inspect.signature(found).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {each.name for each in parameters if each.kind not in variable and each.name[0] != "_"} - described


def test_the_first_page_leads_to_a_newcomer_s_five_questions() -> None:
    links = set(re.findall(r"\]\(([\w-]+)\.md\)", (ROOT / "docs" / "index.md").read_text("utf-8")))
    # Install; pack a table and images; read from MinIO; resume on fewer GPUs; add a store.
    assert {"install", "tables", "images", "buckets", "resume", "plugins"} <= links


def test_every_decision_is_in_the_table_and_names_modules_and_tests_that_exist() -> None:
    folder = ROOT / "docs" / "adr"
    pages = sorted(page for page in folder.glob("*.md") if page.name != "index.md")
    assert re.findall(r"^\| \[\d{4}\]\(([\w.-]+)\)", (folder / "index.md").read_text("utf-8"), re.MULTILINE) == [
        page.name for page in pages
    ]
    roots = (ROOT, ROOT / "runtime", ROOT / "loader", ROOT / "functions", ROOT / "infra" / "local")
    for page in pages:
        text = page.read_text("utf-8")
        assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == ["Context", "Decision", "Alternatives", "Consequences"]
        paths = re.findall(r"`((?:tests|infra|stoker\w*)(?:/[\w.-]+)*)`", text)
        assert any(path.startswith("tests/") for path in paths), page.name
        assert [path for path in paths if not any((root / path).exists() for root in roots)] == [], page.name
