"""Imports point down: between the packages, between the folders of the runtime, and never in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from support.cases import for_each

ROOT = Path(__file__).parents[2]
SOURCES = {
    "stoker": "runtime",
    "stoker_warm": "runtime",
    "stoker_sim": "runtime",
    "stoker_torch": "loader",
    "stoker_functions": "functions",
    "stoker_local": "infra/local",
}
MAY_IMPORT = {
    "stoker": set(),
    "stoker_warm": {"stoker"},
    "stoker_sim": {"stoker", "stoker_warm"},
    "stoker_torch": {"stoker"},
    "stoker_functions": {"stoker", "stoker_warm"},
    "stoker_local": {"stoker", "stoker_torch", "stoker_functions"},
}
HEAVY = ("torch", "boto3", "botocore", "aioboto3", "aiobotocore", "gcloud", "PIL", "simplejpeg", "sklearn", "moto")
# Those whose business is one of them; the rest of the runtime imports these only where they are used.
_OF_S3 = ("aws_credentials", "s3")
_OF_GCS = ("gcs", "google_credentials")
ADAPTERS = {"stoker.images", *(f"stoker._stores.{name}" for name in (*_OF_S3, *_OF_GCS))}

LAYERS = """
    abc errors _deprecation _version
    _base
    _format
    _order
    _memory
    _stores
    _cache
    _shared _cluster
    _fetch
    _pack
    _sources
    _maintenance
    _cost
    _trace
    _diagnostics
    _fanout
    _dataset _image_geometry fanout images testing trace
    _files
    files
    cli
""".strip().splitlines()
"""The folders and modules of the runtime, lowest first; a module imports from its own line and those above it here."""
LAYER_OF = {part: layer for layer, parts in enumerate(LAYERS) for part in parts.split()}

PUBLIC = {
    "stoker": ("abc", "errors", "fanout", "files", "images", "testing", "trace"),
    "stoker_functions": ("aws", "gcp", "serve"),
    "stoker_local": ("functions",),
    "stoker_sim": (),
    "stoker_torch": (),
    "stoker_warm": (),
}
"""Packages, and which modules of theirs users may import. All others have an underscore, but for the command line."""

CONTRACTS = "stoker.abc"
"""The lowest module; the types of what plug-ins are given lie above it, so it names them for type checkers only."""

PURE = ("_order", "_cost", "_trace")
"""Folders of decisions and data, where nothing awaits."""


def modules(package: str) -> dict[str, Path]:
    """Return every module of a package, dotted name → file."""
    source = ROOT / SOURCES[package]
    named = {}
    for file in (source / package).rglob("*.py"):
        parts = file.relative_to(source).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


EVERY_MODULE = {name: file for package in SOURCES for name, file in modules(package).items()}


@cache
def parsed(name: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(EVERY_MODULE[name].read_text(encoding="utf-8"))


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below one, but for what only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from at_run_time(node)


def imported(name: str) -> Iterator[str]:
    """Yield the modules of ours that a module imports, wherever in it; of the contracts, those at run time."""
    tree = parsed(name)
    for node in at_run_time(tree) if name == CONTRACTS else ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [each if each in EVERY_MODULE else str(node.module) for each in below]
        else:
            continue
        yield from (each for each in found if each.partition(".")[0] in SOURCES)


def upward(name: str) -> Iterator[tuple[str, str]]:
    """Yield the imports of a module that point to a package or a layer above its own."""
    package, _, rest = name.partition(".")
    for other in imported(name):
        their_package, _, their_rest = other.partition(".")
        if their_package != package:
            if their_package not in MAY_IMPORT[package]:
                yield name, other
        elif package == "stoker" and rest:
            assert their_rest, f"{name} imports the package itself, which is the roof"
            if LAYER_OF[their_rest.partition(".")[0]] > LAYER_OF[rest.partition(".")[0]]:
                yield name, other


@for_each("name", sorted(EVERY_MODULE))
def test_a_module_imports_only_packages_and_layers_below_it(name: str) -> None:
    assert not list(upward(name))


def test_every_folder_of_the_runtime_is_in_a_layer() -> None:
    assert {name.split(".")[1] for name in modules("stoker") if "." in name} == set(LAYER_OF)


def test_what_users_may_import_has_no_underscore_and_all_else_has_one() -> None:
    without = {name for name in EVERY_MODULE if not any(part.startswith("_") for part in name.split("."))}
    assert {name for name in without if not f"{name}.".startswith("stoker.cli.")} == {
        ".".join(parts)
        for package, names in PUBLIC.items()
        for parts in ((package,), *((package, name) for name in names))
    }


@for_each("name", sorted(EVERY_MODULE))
def test_a_file_has_at_most_500_lines(name: str) -> None:
    assert len(EVERY_MODULE[name].read_text(encoding="utf-8").splitlines()) <= 500


def test_no_imports_go_round_in_a_circle() -> None:
    graph = {name: {other for other in imported(name) if other != name} for name in EVERY_MODULE}
    assert len(list(TopologicalSorter(graph).static_order())) == len(EVERY_MODULE)


@for_each("name", sorted(name for name in modules("stoker") if f"{name}.".split(".")[1] in PURE))
def test_a_pure_module_waits_for_nothing(name: str) -> None:
    assert not [node for node in ast.walk(parsed(name)) if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith)]


@for_each("name", sorted(set(EVERY_MODULE) - {"stoker._base.task_group"}))
def test_no_module_makes_a_task_group_that_hides_the_type_of_its_failure(name: str) -> None:
    calls = (node for node in ast.walk(parsed(name)) if isinstance(node, ast.Call))
    plain = [call.lineno for call in calls if ast.unparse(call.func).rpartition(".")[2] == "TaskGroup"]
    assert not plain, f"{name}: use stoker._base.task_group; asyncio's own raises an ExceptionGroup"


def test_importing_the_runtime_loads_no_torch_no_cloud_sdk_and_no_image_codec() -> None:
    program = (
        f"import importlib, sys\nfor name in {sorted(set(modules('stoker')) - ADAPTERS)!r}:\n"
        "    if not name.endswith('__main__'): importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    path = ":".join(str(ROOT / source) for source in SOURCES.values())
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_no_folder_of_the_project_is_a_link_or_has_one() -> None:
    folders = (
        *{source.split("/")[0] for source in SOURCES.values()},
        "benchmarks",
        "docs",
        "examples",
        "tests",
        "tools",
    )
    paths = [path for folder in folders for path in (ROOT / folder, *(ROOT / folder).iterdir())]
    assert [path for path in paths if path.is_symlink()] == []
