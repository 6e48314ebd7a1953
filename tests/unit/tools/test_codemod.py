from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from tools.codemod.python import rewrite_python
from tools.codemod.repository import apply
from tools.codemod.table import Table
from tools.codemod.text import TextRewriter

ROOT = Path(__file__).parents[3]
TABLE = Table(
    roots={"runtime": ["stoker", "stoker_sim"]},
    modules={
        "stoker.clock": "stoker._base.clock",
        "stoker.fetch": "stoker._fetch",
        "stoker.fetch.gate": "stoker._fetch.limiter",
        "stoker.plan.link": "stoker_sim.link",
    },
    names={"stoker._fetch.limiter.Gate": "Limiter"},
    packages={"stoker._base": "What everything stands on."},
    files={"runtime/stoker/plan/published": "runtime/stoker_sim/published"},
    keep=frozenset({"stoker.fetch"}),
)
PATHS = {
    "runtime/stoker/clock.py": "runtime/stoker/_base/clock.py",
    "runtime/stoker/fetch/gate.py": "runtime/stoker/_fetch/limiter.py",
    "runtime/stoker/plan/published": "runtime/stoker_sim/published",
}


def rewriter() -> TextRewriter:
    return TextRewriter(table=TABLE, paths=PATHS, exports={"stoker.fetch": {"Fetched"}})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import stoker.clock\nstoker.clock.now()\n", "import stoker._base.clock\nstoker._base.clock.now()\n"),
        ("import stoker.clock as c\nc.now()\n", "import stoker._base.clock as c\nc.now()\n"),
        ("from stoker.clock import now as n  # why\n", "from stoker._base.clock import now as n  # why\n"),
        ("from stoker.fetch import gate\ngate.x\n", "from stoker._fetch import limiter as gate\ngate.x\n"),
        (
            "from stoker import clock, open\n",
            "from stoker._base import clock\nfrom stoker import open\n",
        ),
        (
            "if TYPE_CHECKING:\n    from stoker.plan.link import Link\n",
            "if TYPE_CHECKING:\n    from stoker_sim.link import Link\n",
        ),
        (
            "import stoker.fetch.gate\nx(stoker.fetch.gate.Gate.y, self.stoker.clock)\n",
            "import stoker._fetch.limiter\nx(stoker._fetch.limiter.Limiter.y, self.stoker.clock)\n",
        ),
        (
            "from stoker.fetch.gate import Gate\ndef f(g: Gate) -> Gate: return Gate(g.Gate)\n",
            "from stoker._fetch.limiter import Limiter\ndef f(g: Limiter) -> Limiter: return Limiter(g.Gate)\n",
        ),
        ("patch('stoker.fetch.gate.Gate.y', 1)\n", "patch('stoker._fetch.limiter.Limiter.y', 1)\n"),
        ("f'{a} stoker.clock:now'  # stoker.clock\n", "f'{a} stoker._base.clock:now'  # stoker._base.clock\n"),
        ("span('stoker.fetch', 'stoker.fetch.duration')\n", "span('stoker.fetch', 'stoker.fetch.duration')\n"),
        ("logging.getLogger('stoker.clock')\n", "logging.getLogger('stoker.clock')\n"),
        ("place('gate.py')\n", "place('limiter.py')\n"),
    ],
)
def test_a_module_follows_what_has_moved(before: str, after: str) -> None:
    beside = {"gate.py": "limiter.py"}
    assert rewrite_python(before, "stoker.user", rewriter(), beside) == after
    assert rewrite_python(after, "stoker.user", rewriter(), beside) == after


def test_a_name_changes_where_it_is_defined() -> None:
    before = '__all__ = ["Gate"]\nclass Gate:\n    Gate = 1\ndef f(x: Gate): return x.Gate\n'
    after = '__all__ = ["Limiter"]\nclass Limiter:\n    Gate = 1\ndef f(x: Limiter): return x.Gate\n'
    assert rewrite_python(before, "stoker._fetch.limiter", rewriter(), {}) == after


def test_a_relative_import_is_refused() -> None:
    with pytest.raises(ValueError, match="write it absolute"):
        rewrite_python("from .clock import now\n", "stoker.user", rewriter(), {})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('demo = "stoker.clock:now"', 'demo = "stoker._base.clock:now"'),
        ("[it](../runtime/stoker/fetch/gate.py#L3)", "[it](../runtime/stoker/_fetch/limiter.py#L3)"),
        ("COPY stoker/plan/published/deli.csv", "COPY stoker_sim/published/deli.csv"),
        ("s3://bucket/stoker/clock and stoker.clocks", "s3://bucket/stoker/clock and stoker.clocks"),
        ("https://stoker.clock.example/", "https://stoker.clock.example/"),
    ],
)
def test_a_text_follows_what_has_moved(before: str, after: str) -> None:
    assert rewriter().rewrite(before) == after


def test_what_only_reads_like_a_moved_module_is_reported() -> None:
    text = rewriter()
    assert text.rewrite("stoker.fetch.Fetched, stoker.fetch.wait, stoker.fetch") == (
        "stoker._fetch.Fetched, stoker.fetch.wait, stoker.fetch"
    )
    assert text.doubts == ["stoker.fetch.wait"]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"stoker.a": "stoker.c", "stoker.b": "stoker.c"}, "several modules move to stoker.c"),
        ({"stoker.a": "stoker.b", "stoker.b": "stoker.c"}, "stoker.b are both left and filled"),
    ],
)
def test_a_table_that_a_second_run_would_change_is_refused(modules: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Table(roots={}, modules=modules)


def test_a_second_run_over_a_repository_changes_nothing(tmp_path: Path) -> None:
    for name, text in {
        "runtime/stoker/__init__.py": "from stoker.clock import now\n",
        "runtime/stoker/clock.py": "now = 0\n",
        "runtime/stoker/new.py": "",
        "runtime/stoker/fetch/__init__.py": "",
        "runtime/stoker/fetch/gate.py": "class Gate: ...\n",
        "runtime/stoker/plan/published/a.csv": "1\n",
        "tests/golden/names.txt": "stoker.clock.now\n",
        "docs/page.md": "`stoker.fetch.gate.Gate` in runtime/stoker/fetch/gate.py\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    first = apply(tmp_path, TABLE)
    assert first.moved == 4
    assert (tmp_path / "docs/page.md").read_text() == (
        "`stoker._fetch.limiter.Limiter` in runtime/stoker/_fetch/limiter.py\n"
    )
    assert (tmp_path / "runtime/stoker/_fetch/limiter.py").read_text() == "class Limiter: ...\n"
    assert (tmp_path / "runtime/stoker_sim/published/a.csv").exists()
    assert not (tmp_path / "runtime/stoker/fetch").exists()
    assert (tmp_path / "tests/golden/names.txt").read_text() == "stoker.clock.now\n"
    second = apply(tmp_path, TABLE)
    assert (second.moved, second.rewritten) == (0, [])


def test_the_table_of_the_repository_can_be_applied() -> None:
    table = Table.load(ROOT / "tools/codemod/moves.toml")
    listed = [f"{root}/{name}" for root, names in table.roots.items() for name in names]
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
        "packages"
    ]
    assert set(packaged) <= set(listed)
    assert all(table.root_of(name) for moved in table.modules.items() for name in moved)
