"""The documentation site has every public name and every page."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import griffe
import pytest

from stoker_local.functions import FunctionCloud
from stoker_torch import Preemption
from support.cases import for_each

ROOT = Path(__file__).parents[2]
SHOWN = {
    (module, name)
    for page in (ROOT / "docs" / "api").glob("*.md")
    for module, name in re.findall(r"^::: ([\w.]+)\.(\w+)$", page.read_text("utf-8"), re.MULTILINE)
}
DOCS = tuple((ROOT / "docs").rglob("*.md"))
MODULES = (
    "stoker",
    "stoker.abc",
    "stoker.errors",
    "stoker.fanout",
    "stoker.files",
    "stoker.images",
    "stoker.testing",
    "stoker.trace",
    "stoker_functions",
    "stoker_functions.serve",
    "stoker_local",
    "stoker_local.functions",
    "stoker_sim",
    "stoker_torch",
)
PAGES_OF_0_1_0 = """
allocation architecture cache costs data-loader deploy experiments fan-out format frameworks function-cloud functions
fuzzing local-bucket order performance planning plugins serve shuffle simulator trace warm-tier
"""


def public_objects(name: str) -> dict[str, Any]:
    """Return the public objects of a module by name."""
    module = importlib.import_module(name)
    return {each: getattr(module, each) for each in module.__all__ if not each.startswith("_")}


@for_each("name", MODULES)
def test_every_public_name_is_in_the_api_reference(name: str) -> None:
    shown = [getattr(importlib.import_module(module), each) for module, each in SHOWN]
    assert [each for each, found in public_objects(name).items() if not any(found is other for other in shown)] == []


def test_the_api_reference_shows_every_object_once_and_none_that_is_not_there() -> None:
    assert {module for module, _ in SHOWN} == {*MODULES, "stoker.cli"}  # of which only Command is for plug-ins
    assert [(module, each) for module, each in SHOWN if each not in public_objects(module)] == []
    classes = [
        found for module, each in SHOWN if getattr(found := public_objects(module)[each], "__name__", "") == each
    ]
    assert len(classes) == len(set(classes))


@for_each("name", MODULES)
def test_every_parameter_of_a_public_class_or_function_is_described(name: str) -> None:
    assert {
        each: missing for each, found in public_objects(name).items() if (missing := undescribed_parameters(found))
    } == {}


def undescribed_parameters(found: Any) -> set[str]:
    """Return the parameters of a class or function that no section of its docstring describes."""
    if not inspect.isroutine(found) and not inspect.isclass(found):
        return set()
    if inspect.isclass(found) and (issubclass(found, BaseException | Enum | Preemption | FunctionCloud)):
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
    links = set(re.findall(r"\]\(([\w#.-]+)\)", (ROOT / "docs" / "index.md").read_text("utf-8")))
    assert links >= {
        "install.md",
        "tables.md",
        "images.md",
        "buckets.md#minio-cloudflare-r2-and-others",
        "resume.md",
        "plugins.md#a-store",
    }


def test_a_page_has_the_title_that_the_navigation_shows() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    titles = {page: title for title, page in re.findall(r"- ([^:\n]+): (\S+\.md)$", navigation, re.MULTILINE)}
    assert titles.pop("index.md") == "Home"
    for page, title in titles.items():
        assert (ROOT / "docs" / page).read_text("utf-8").startswith(f"# {title}\n"), page


def test_blocks_in_lists_are_indented_by_four_columns() -> None:
    """Four columns belong to a list item here and on GitHub; fewer end the list on the site."""
    block = re.compile(r"^ {1,3}(?:```|\|).*", re.MULTILINE)
    assert {page.name: found for page in DOCS if (found := block.findall(page.read_text("utf-8")))} == {}


def test_the_first_page_has_the_readme_s_example() -> None:
    example = re.compile(r"```python\n.*?```", re.DOTALL)
    first, readme = (
        example.search(path.read_text("utf-8")) for path in (ROOT / "docs" / "index.md", ROOT / "README.md")
    )
    assert first is not None
    assert readme is not None
    assert first[0] == readme[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=300)
    return folder


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"""<(?:script|img|link|iframe)[^>]*\s(?:src|href)=["']?(?:https?:)?//[^>]*>|@import|url\(["']?http"""
    )
    texts = [path for path in site.rglob("*") if path.suffix in {".html", ".css", ".svg"}]
    assert len(texts) > 50
    assert [(path.name, found[0]) for path in texts for found in loads.finditer(path.read_text("utf-8"))] == []


def test_every_picture_of_the_site_has_a_text(site: Path) -> None:
    pages = {page: re.findall(r"<img[^>]*>", page.read_text("utf-8")) for page in site.rglob("*.html")}
    assert [
        (page, picture) for page, found in pages.items() for picture in found if not re.search('alt="[^"]', picture)
    ] == []


def test_no_page_shows_the_fence_of_a_block(site: Path) -> None:
    assert [page for page in site.rglob("index.html") if "```" in page.read_text("utf-8")] == []


def test_the_api_reference_has_no_markup_of_other_tools_and_no_private_path(site: Path) -> None:
    wrong = re.compile(
        r":(?:class|meth|func|data|attr|mod|exc|obj):|``|~stoker|<autoref|\bstoker\w*(?:\.\w+)*\._[a-z]\w*"
    )
    for page in (site / "api").rglob("index.html"):
        assert wrong.findall(page.read_text("utf-8")) == [], page


def test_pages_of_version_0_1_0_are_there_or_lead_to_others(site: Path) -> None:
    for name in PAGES_OF_0_1_0.split():
        page = (site / name / "index.html").read_text("utf-8")
        if moved := re.search(r'http-equiv="refresh" content="0; url=(.*?)"', page):
            assert "<article" in (site / name / moved[1] / "index.html").read_text("utf-8"), name
        else:
            assert "<article" in page, name


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
