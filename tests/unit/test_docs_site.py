"""The documentation site has every public name and every page."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_in_the_api_reference(name: str) -> None:
    module = importlib.import_module(name)
    public = {each for each in getattr(module, "__all__", dir(module)) if not each.startswith("_")}
    if name == "stoker.errors":
        public = {each for each in public if getattr(getattr(module, each), "__module__", "") == name}
    errors = {each for module, each in SHOWN if module == "stoker.errors"} if name == "stoker" else set()
    assert public - {each for module, each in SHOWN if module == name} - errors == set()


def test_the_api_reference_has_no_name_that_is_not_there() -> None:
    assert {module for module, _ in SHOWN} == set(MODULES)
    assert [(module, each) for module, each in SHOWN if not hasattr(importlib.import_module(module), each)] == []


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
