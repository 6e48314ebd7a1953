"""``python -m tools.prose``: report phrases and names that ``tools/prose.toml`` lists, with what to write instead."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCES = ("runtime", "loader", "functions", "infra/local", "benchmarks", "examples", "tests", "tools")
PAGES = ("README.md", "CONTRIBUTING.md", "docs", "examples/README.md", "benchmarks/peers/README.md")
LEFT_OUT = ("benchmarks/results", "tests/unit/tools/test_prose.py")
"""Installed packages of others, and a test that quotes the phrases."""
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_TEXT_TOKENS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the strings and comments of a module with their first lines; comments on lines in a row are one."""
    comment, begin, end = "", 0, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.start[0] == end + 1:
            comment, end = f"{comment} {token.string.strip('# ')}", token.start[0]
        elif token.type == tokenize.COMMENT:
            yield begin, comment
            comment, begin, end = token.string.strip("# "), token.start[0], token.start[0]
        elif token.type in _TEXT_TOKENS:
            yield token.start[0], token.string
    yield begin, comment


def names_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the functions and methods of a module with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name


def problems_of(file: Path, table: dict[str, Any]) -> Iterator[str]:
    """Yield the lines to report of a module or a page."""
    source = file.read_text("utf-8")
    is_module = file.suffix == ".py"
    texts = texts_of(source) if is_module else enumerate(_FENCE.sub("", source).split("\n\n"), 1)
    place = "" if is_module else "paragraph "
    for line, text in texts:
        flat = " ".join(text.split())
        for phrase, instead in table["phrases"].items():
            for found in re.finditer(phrase, flat, re.IGNORECASE):
                yield f"{file.relative_to(ROOT)}:{place}{line}: {found[0]!r}: write {instead}"
    for line, name in names_of(source) if is_module else ():
        if re.match(table["names"]["participles"], name) and name not in table["names"]["keep"]:
            yield f"{file.relative_to(ROOT)}:{line}: {name!r} is a participle: name what the function does or returns"


def main() -> int:
    """Print what is found; return the exit code."""
    table = tomllib.loads(Path(__file__).with_name("prose.toml").read_text("utf-8"))
    left_out = [ROOT / path for path in LEFT_OUT]
    files = [file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py"))]
    files = [file for file in files if not any(file.is_relative_to(path) for path in left_out)]
    for page in PAGES:
        path = ROOT / page
        files += sorted(path.rglob("*.md")) if path.is_dir() else [path] if path.exists() else []
    if not files:
        print("there is no module and no page to look at", file=sys.stderr)
        return 2
    found = [problem for file in files for problem in problems_of(file, table)]
    print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
