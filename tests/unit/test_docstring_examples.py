"""The examples of docstrings run and print what they show; every public class and function has one."""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import stoker
from stoker_local import BucketConfig, BucketSpec, running_bucket
from support.cases import for_each
from support.public_names import PUBLIC, ROOT

READER = {
    "images": torch.utils.data.TensorDataset(torch.zeros(128, 3, 8, 8), torch.arange(128)),
    "train_step": lambda images, labels: None,
}
"""What readers have already: a map-style data set, and a step of their training."""
PACKAGES = ("runtime", "loader", "functions", "infra/local")
SCHEMA = {
    "image": stoker.Array("uint8", (8, 8, 3)),
    "label": stoker.Array("int64"),
}
HANDLERS = ("stoker_functions.aws", "stoker_functions.gcp")
"""Modules of handlers, which a platform calls: the pages of the functions show their deployment."""
IN_GUIDE = (
    *("BufferedSink", "CopySink", "CorrectedTier", "Deletable", "EvictionPolicy", "Executor", "FetchSink", "Listable"),
    *("NextUseOracle", "PlacedTier", "Presigner", "RangeReadable", "Readable", "ReleaseSink", "Source"),
    *("SourceListing", "Store", "Tier", "TraceSink", "Writable"),
)
"""Protocols of plug-ins, and what they are called with: the guide on plug-ins implements them, at greater length."""
LITERAL = re.compile(r"(?<=::\n\n) +\S.*(?:\n(?: .*)?)*|(?<=```python\n)(?:.*\n)*?(?= *```)", re.MULTILINE)
"""Literal blocks of docstrings, and fenced ones of Python."""


class Docstring(NamedTuple):
    """A docstring with the module and the name that it describes, and its first line there."""

    module: str
    name: str
    text: str
    line: int


def docstrings_of(body: list[ast.stmt], module: str, name: str = "") -> Iterator[Docstring]:
    """Yield the docstrings of modules, classes, functions and attributes in a part of a module."""
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from docstrings_of(node.body, module, f"{name}.{node.name}".lstrip("."))
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield Docstring(module, name, inspect.cleandoc(text), node.lineno)


def docstrings_with(text: str) -> Iterator[Docstring]:
    """Yield the docstrings of all packages that contain a text."""
    for folder in (ROOT / package for package in PACKAGES):
        for file in sorted(folder.rglob("*.py")):
            source = file.read_text("utf-8")
            if text in source:
                module = ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
                found = docstrings_of(ast.parse(source).body, module)
                yield from (docstring for docstring in found if text in docstring.text)


EXAMPLES = list(docstrings_with(">>> "))


@cache
def public_modules() -> dict[tuple[str, str], str]:
    """Return the module and name of every definition that is public → the public module to import it from."""
    found: dict[tuple[str, str], str] = {}
    for public in PUBLIC:
        module = import_module(public)
        for name in module.__all__:
            value = getattr(module, name)
            found.setdefault((getattr(value, "__module__", public), getattr(value, "__name__", name)), public)
    return found


def names_for(docstring: Docstring) -> dict[str, Any]:
    """Return the names that an example may use: what its public module exports, or all of a private module."""
    name = docstring.name.partition(".")[0]
    public = public_modules().get((docstring.module, name), docstring.module)
    module = import_module(public)
    if public not in PUBLIC:
        return dict(vars(module))
    return {"stoker": stoker, **READER, **{name: getattr(module, name) for name in module.__all__}}


def run_examples(docstring: Docstring, names: dict[str, Any]) -> str:
    """Run the examples of a docstring, with ``await`` as in ``python -m asyncio``; return the report of failures."""
    test = doctest.DocTestParser().get_doctest(
        docstring.text, names, docstring.name, docstring.module, docstring.line - 1
    )
    report: list[str] = []
    with asyncio.Runner() as loop:

        def run_code(source: str) -> None:
            loop.run(eval(compile_line(source), test.globs))  # noqa: S307 - our own docstrings

        test.globs["run_code"] = run_code
        for each in test.examples:
            assert doctest.SKIP not in each.options, f"{each.source} is not run"
            if compile_line(each.source).co_flags & inspect.CO_COROUTINE:
                each.source = f"run_code({each.source!r})\n"
        doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    return "".join(report)


def compile_line(source: str) -> Any:
    return compile(source, "<example>", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def sample_of(number: int) -> dict[str, Any]:
    image = np.full((8, 8, 3), number, np.uint8)
    return {"image": image, "label": number % 10}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A packed data set with images and labels, in a folder and at ``s3://bucket/train``."""
    folder = tmp_path_factory.mktemp("packed") / "data"
    with (
        running_bucket(BucketConfig(buckets=(BucketSpec(name="bucket"),))) as bucket,
        pytest.MonkeyPatch.context() as patch,
    ):
        for variable, value in bucket.environment().items():
            patch.setenv(variable, value)
        for url in (folder, "s3://bucket/train"):
            with stoker.Packer(url, schema=SCHEMA, super_sample_bytes=4096) as packer:
                packer.extend(map(sample_of, range(128)))
        yield folder


@pytest.mark.parametrize("docstring", EXAMPLES, ids=lambda each: f"{each.module}.{each.name}")
def test_the_examples_of_a_docstring_print_what_it_shows(
    docstring: Docstring, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").symlink_to(dataset)
    if report := run_examples(docstring, names_for(docstring)):
        pytest.fail(report, pytrace=False)


def test_code_in_docstrings_is_written_as_examples() -> None:
    """A literal block without prompts would not run; formulas and output, which are no Python, may stand in one."""
    blocks = [(each.module, each.name, block) for each in docstrings_with("") for block in LITERAL.findall(each.text)]
    assert [block for block in blocks if is_python(block[2])] == []


def is_python(text: str) -> bool:
    try:
        return bool(ast.parse(inspect.cleandoc(text)).body)
    except SyntaxError:
        return False


@for_each("name", [name for name in PUBLIC if name not in HANDLERS])
def test_public_classes_and_functions_have_an_example(name: str) -> None:
    module = import_module(name)
    named = [each for each in module.__all__ if each not in IN_GUIDE]
    assert [each for each in named if needs_example(getattr(module, each))] == []


def needs_example(value: object) -> bool:
    """Return whether a public value is a class or function without an example, and not one of the plain exceptions."""
    if not (inspect.isclass(value) or inspect.isfunction(value)) or ">>> " in (value.__doc__ or ""):
        return False
    return not issubclass(value, BaseException) if inspect.isclass(value) and "__init__" not in vars(value) else True


def test_what_has_no_example_is_implemented_in_the_guide_on_plug_ins() -> None:
    guide = (ROOT / "docs" / "plugins.md").read_text("utf-8")
    assert [name for name in IN_GUIDE if not re.search(rf"\b{name}\b", guide)] == []
