"""Nothing runs what it reads: no unpickling, no evaluation, no shell; and TLS is always verified."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cases import for_each

ROOT = Path(__file__).parents[2]
SOURCES = ("runtime", "loader", "functions", "infra/local", "infra/serverless", "infra/docker")
FILES = sorted(file for source in SOURCES for file in (ROOT / source).rglob("*.py") if "node_modules" not in file.parts)

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle", "telnetlib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "os.system",
    "os.popen",
    "torch.load",
    "torch.save",
    "tempfile.mktemp",
    "ssl._create_unverified_context",
    "yaml.load",
    "yaml.unsafe_load",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
}
NUMPY_FILES = {"load", "save", "savez"}
FORBIDDEN_KEYWORDS = {"shell": True, "verify": False, "verify_ssl": False, "ssl": False, "check_hostname": False}


def dangers(tree: ast.AST) -> Iterator[str]:
    """Yield what must not be in a module, by line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            yield from (f"{node.lineno}: import {name}" for name in named if name.partition(".")[0] in MODULES)
            if isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (f"{node.lineno}: from … import {name}" for name in whole if name in CALLS)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in CALLS:
            yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call):
            yield from _dangerous_call(node)


def _dangerous_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    given = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
    if name in BUILTINS:
        yield f"{call.lineno}: {name}(…)"
    package, _, function = name.rpartition(".")
    if package in ("np", "numpy") and function in NUMPY_FILES and given.get("allow_pickle") is not False:
        yield f"{call.lineno}: {name} without allow_pickle=False"
    yield from (f"{call.lineno}: {k}={v}" for k, v in FORBIDDEN_KEYWORDS.items() if k in given and given[k] is v)


@for_each("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_runs_nothing_that_it_reads(file: Path) -> None:
    assert list(dangers(ast.parse(file.read_text()))) == []


@for_each(
    "code",
    [
        "import pickle",
        "import pickle as innocent",
        "from marshal import loads",
        "from os import system",
        "from torch import load",
        "eval('1')",
        "exec(code)",
        "torch.load(path, weights_only=True)",
        "read = torch.load",
        "np.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "subprocess.run(line, shell=True)",
        "aiohttp.TCPConnector(ssl=False)",
        "client('s3', verify=False)",
    ],
)
def test_the_look_finds_what_it_looks_for(code: str) -> None:
    assert len(list(dangers(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code",
    ["model.eval()", "re.compile(x)", "np.load(path, allow_pickle=False)", "json.load(file)", "f(shell=False)"],
)
def test_the_look_lets_innocent_code_pass(code: str) -> None:
    assert list(dangers(ast.parse(code))) == []


def test_there_is_code_to_look_at() -> None:
    assert len(FILES) > 100
