"""A codemod over a whole repository: files are moved, and every text that git knows is rewritten."""

from __future__ import annotations

import ast
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tools.codemod.python import rewrite_python
from tools.codemod.table import Table
from tools.codemod.text import TextRewriter

__all__ = ["Report", "apply"]

_TEXTS = {".md", ".toml", ".yml", ".yaml", ".js", ".json", ".tf", ".cfg", ".ini", ".txt", ".sh", ".Dockerfile"}
_NAMED_TEXTS = {"Makefile", "Dockerfile", ".gitignore", ".dockerignore"}
_OWN = ("tools/codemod/", "tests/unit/tools/test_codemod.py")  # the table must keep the old names
_FROZEN = "tests/golden/"  # lists of what the outside sees: a move that changes one is to be noticed
_LEFT = {"CHANGELOG.md", "constraints.txt", "package-lock.json"}  # what was, and what others write


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a codemod did.

    Attributes:
        moved: files that were moved.
        rewritten: files whose text changed.
        doubts: file → what in it reads like a moved module and was left alone.
    """

    moved: int
    rewritten: list[str]
    doubts: dict[str, list[str]]


def apply(root: Path, table: Table) -> Report:
    """Move and rewrite everything in a git work tree.

    Args:
        root: top folder of the work tree.
        table: what goes where.
    """
    tracked = _tracked(root)
    modules = {name: file for file in tracked if (name := _module_of(file, table))}
    packages = {name for name, file in modules.items() if file.endswith("/__init__.py")}
    paths = _paths(table, packages)
    exports = _exports(root, table, modules)
    moved = _move(root, table, paths, modules)
    rewritten, doubts = [], {}
    beside = _beside(paths)
    for file in _tracked(root):
        if file.startswith(_OWN) or PurePosixPath(file).name in _LEFT or not _is_text(file):
            continue
        before = (root / file).read_text("utf-8")
        text = TextRewriter(table=table, paths=paths, exports=exports)
        if file.endswith(".py"):
            after = rewrite_python(
                before, _module_of(file, table) or "", text, beside.get(str(PurePosixPath(file).parent), {})
            )
        else:
            after = text.rewrite(before)
        if after != before:
            (root / file).write_text(after, "utf-8")
            rewritten.append(file)
        if text.doubts:
            doubts[file] = sorted(set(text.doubts))
    return Report(moved=moved, rewritten=rewritten, doubts=doubts)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)  # noqa: S603 - our own words
    return done.stdout


def _tracked(root: Path) -> list[str]:
    return [file for file in _git(root, "ls-files", "-z").split("\0") if file and (root / file).is_file()]


def _is_text(file: str) -> bool:
    path = PurePosixPath(file)
    if file.startswith(_FROZEN):
        return path.suffix == ".py"
    return path.suffix in {".py", *_TEXTS} or path.name in _NAMED_TEXTS or path.name.endswith(".dockerignore")


def _module_of(file: str, table: Table) -> str | None:
    """Return the dotted name of a module in one of the folders of source, or None."""
    for root, packages in table.roots.items():
        if file.startswith(f"{root}/") and file.endswith(".py"):
            parts = file.removeprefix(f"{root}/").removesuffix(".py").removesuffix("/__init__").split("/")
            return ".".join(parts) if parts[0] in packages else None
    return None


def _paths(table: Table, packages: set[str]) -> dict[str, str]:
    """Return old path → new path of every moved module and file."""
    paths = dict(table.files)
    for old, new in table.modules.items():
        end = "/__init__.py" if old in packages or new in packages else ".py"
        before, after = (f"{table.root_of(name)}/{name.replace('.', '/')}{end}" for name in (old, new))
        paths[before] = after
    return paths


def _exports(root: Path, table: Table, modules: dict[str, str]) -> dict[str, set[str]]:
    """Return the names that each moved package's own module binds, by the package's old name."""
    found = {}
    for old, new in table.modules.items():
        file = modules.get(old) or modules.get(new, "")
        if file.endswith("/__init__.py"):
            tree = ast.parse((root / file).read_text("utf-8"))
            found[old] = {
                *(
                    alias.asname or alias.name
                    for node in ast.walk(tree)
                    if isinstance(node, ast.ImportFrom)
                    for alias in node.names
                ),
                *(
                    node.name
                    for node in tree.body
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                ),
                *(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)),
            }
    return found


def _move(root: Path, table: Table, paths: dict[str, str], modules: dict[str, str]) -> int:
    moved = 0
    for name, docstring in table.packages.items():
        file = root / f"{table.root_of(name)}/{name.replace('.', '/')}/__init__.py"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f'"""{docstring}"""\n', "utf-8")
            _git(root, "add", str(file))
    for old, new in paths.items():
        if (root / old).exists():
            (root / new).parent.mkdir(parents=True, exist_ok=True)
            _git(root, "mv", old, new)
            moved += 1
    for name in table.drop & set(modules):
        _git(root, "rm", "--quiet", modules[name])
    for folder in sorted({(root / old).parent for old in paths}, reverse=True):
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)  # a folder left behind would still be a package
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return moved


def _beside(paths: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return, by the folder that modules go to, their base names before and after, where these differ."""
    found: dict[str, dict[str, str]] = {}
    for old, new in paths.items():
        before, after = PurePosixPath(old), PurePosixPath(new)
        if before.name != after.name and before.parent.name == after.parent.name:
            found.setdefault(str(after.parent), {})[before.name] = after.name
    return found
