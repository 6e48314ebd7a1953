"""The plug-ins of docs/plugins.md, installed as the package that the page describes, do what it says."""

from __future__ import annotations

import asyncio
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module, invalidate_caches, metadata
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker import fanout
from stoker.cli import main
from stoker_torch import Loader

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text("utf-8")
SAMPLES = 40


@pytest.fixture
def my_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the modules and entry points that the page shows."""
    site = tmp_path / "site"
    about = site / "my_package-1.0.dist-info"
    (site / "my_package").mkdir(parents=True)
    about.mkdir()
    (site / "my_package" / "__init__.py").touch()
    for name, code in re.findall(r"```python\n# my_package/(\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        (site / "my_package" / name).write_text(code, "utf-8")
    (declared,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    groups: dict[str, dict[str, str]] = tomllib.loads(declared)["project"]["entry-points"]
    lines = [
        line
        for group, names in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in names.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(site)
    invalidate_caches()
    yield site
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = str(tmp_path / "numbers")
    with stoker.Packer(url, schema={"x": stoker.Array("int64")}, super_sample_bytes=400) as packer:
        packer.extend({"x": number} for number in range(SAMPLES))
    return url


def test_the_page_has_every_group_of_entry_points_and_every_entry_point_of_its_own_loads(my_package: Path) -> None:
    groups = {point.group for point in metadata.distribution("stoker").entry_points} - {
        "console_scripts",
        "fsspec.specs",
    }
    mine = metadata.distribution("my-package").entry_points
    assert groups <= {point.group for point in mine} == set(re.findall(r"\| `(stoker\.\w+)` \|", PAGE))
    assert all(point.load() for point in mine)


def test_the_command_counts_samples(my_package: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", url]) == 0
    assert capsys.readouterr().out == f"{SAMPLES} samples\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert re.search(r"^ +size +say how many samples a data set has$", capsys.readouterr().out, re.MULTILINE)


def test_a_data_set_is_packed_into_the_store_and_read_by_url_and_from_an_object(
    my_package: Path, tmp_path: Path
) -> None:
    url = f"sqlite://{tmp_path}/set.db"
    with stoker.Packer(url, schema={"x": stoker.Array("int64")}) as packer:
        packer.extend({"x": number} for number in range(SAMPLES))
    with stoker.open(url) as dataset:
        assert dataset[7]["x"] == 7
    with Loader(import_module("my_package.store").SqliteStore(url), batch_size=10) as loader:
        assert sorted(number for batch in loader for number in batch["x"].tolist()) == [*range(SAMPLES)]


@pytest.mark.parametrize("is_object", [False, True])
def test_the_tier_delivers_the_second_epoch(my_package: Path, url: str, is_object: bool) -> None:
    tier = import_module("my_package.tier").Copies(1 << 20) if is_object else "copies://1"
    with Loader(url, batch_size=10, epochs=2, tier=tier, seed=1) as loader:
        seen = [number for _ in range(2) for batch in loader for number in batch["x"].tolist()]
        figures = loader.stats().to_dict()
    assert sorted(seen) == sorted([*range(SAMPLES)] * 2)
    assert figures["tier_hits"]["copies"] > 0
    assert figures["tier_states"] == {"copies": "closed"}


def test_the_source_is_packed_from_any_line_on(my_package: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.txt").write_text("one\ntwo\n")
    (raw / "b.txt").write_text("three\n")
    assert main(["pack", "--kind", "lines", str(raw), str(tmp_path / "texts"), "--quiet"]) == 0
    with stoker.open(tmp_path / "texts") as dataset:
        assert [sample["text"] for sample in dataset] == ["one", "two", "three"]


def test_the_policy_keeps_what_came_first(my_package: Path, url: str) -> None:
    with Loader(url, batch_size=10, cache="memory:?limit=1KB&policy=mru") as loader:
        for _ in range(2):
            assert sorted(number for batch in loader for number in batch["x"].tolist()) == [*range(SAMPLES)]
        (figures,) = loader.stats().to_dict()["caches"].values()
    assert figures["added"] > 0
    assert figures["hits"] > 0


def test_the_executor_runs_a_function(my_package: Path, url: str) -> None:
    options = fanout.ExecutorOptions(environment={"STOKER_DATASETS": f"numbers={url}"})

    async def committed() -> Any:
        async with fanout.open_executor("thread", options) as executor:
            task = fanout.Task(name="one", function="commit", event={"dataset": url})
            return await fanout.Driver(executor).run([task])

    (result,) = asyncio.run(committed())
    assert result["version"] == 1


def test_the_sink_keeps_the_longest_wait(my_package: Path, url: str) -> None:
    sink: Any = import_module("my_package.sink").Longest()
    with Loader(url, batch_size=10, trace=sink) as loader:
        assert len(list(loader)) == 4
        assert str(sink.wait) == str(loader.stats().worst_waits[0])
    assert sink.fetches >= 1


def test_the_suites_pass_for_the_plug_ins_of_the_page(my_package: Path) -> None:
    (code,) = re.findall(r"```python\n# tests/test_my_package.py\n(.*?)```", PAGE, re.DOTALL)
    (my_package / "my_package" / "suites.py").write_text(code, "utf-8")
    module = import_module("my_package.suites")
    for suite in (module.TestMostRecentlyUsed(), module.TestCopies()):
        tests = [name for name in dir(suite) if name.startswith("test_")]
        assert len(tests) >= 5
        for name in tests:
            getattr(suite, name)()
