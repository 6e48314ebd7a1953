"""Sources of other packages: an entry point by kind, packed by the command and by a packer."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import stoker
import stoker._sources as sources
from stoker.abc import SourceListing
from stoker.cli import main
from stoker.errors import ConfigError, MissingExtraError, PackError
from support.places import look, put_all, read_all

ROWS = [
    {"text": f"line {number}", "number": number, "weight": number / 8, "even": number % 2 == 0} for number in range(9)
]


@pytest.fixture(autouse=True)
def json_lines(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the example, and install it."""
    path = Path(__file__).parents[3] / "examples/json_lines.py"
    spec = importlib.util.spec_from_file_location("json_lines", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "json_lines", module)
    spec.loader.exec_module(module)
    values = {"json-lines": "json_lines:open_json_lines", "lost": "no_such_module:open", "npy": "json_lines:no"}
    points = EntryPoints(EntryPoint(name, value, "stoker.sources") for name, value in values.items())
    installed = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: points.select(group=group) or installed(group=group))
    return module


def lines(rows: list[dict[str, Any]]) -> bytes:
    """Return rows as JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def packed(url: Path) -> list[dict[str, Any]]:
    """Return the samples of a data set, as plain values."""
    with stoker.open(url) as dataset:
        return [{"text": s["text"], **{n: s[n].item() for n in ("number", "weight", "even")}} for s in dataset]


def test_the_command_packs_a_plug_ins_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "part-0.jsonl").write_bytes(lines(ROWS[:4]))
    (raw / "part-1.jsonl").write_bytes(b"\n" + lines(ROWS[4:])[:-1])
    pattern = str(raw / "part-{0..1}.jsonl")
    assert main(["pack", "--kind", "json-lines", pattern, str(tmp_path / "data")]) == 0
    assert packed(tmp_path / "data") == ROWS
    assert "as json-lines" in capsys.readouterr().err
    assert main(["pack", "--kind", "json-lines", "--append", str(raw), str(tmp_path / "data")]) == 0
    assert packed(tmp_path / "data") == ROWS + ROWS


def test_a_pack_of_a_plug_ins_source_is_resumed(
    tmp_path: Path, json_lines: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_bytes(lines(ROWS))
    read = json_lines.JsonLines.read
    starts: list[int] = []

    async def broken(self: Any, start: int = 0) -> Any:
        starts.append(start)
        number = start
        async for sample in read(self, start):
            if len(starts) == 1 and number == 6:
                raise PackError("the disk is on fire")
            number += 1
            yield sample

    monkeypatch.setattr(json_lines.JsonLines, "read", broken)
    command = ["pack", "--kind", "json-lines", "--super-sample-bytes", "60B", str(raw), str(tmp_path / "data")]
    assert main(command) != 0
    assert main(command) == 0
    assert starts[0] == 0
    assert 0 < starts[1] <= 6
    assert packed(tmp_path / "data") == ROWS


def test_a_packer_takes_a_source(tmp_path: Path, json_lines: ModuleType) -> None:
    put_all("memory://json-lines", {"a.jsonl": lines(ROWS)})
    store = stoker.open_store("memory://json-lines")

    async def opened() -> Any:
        objects = tuple([item async for item in store.list()])
        return await json_lines.open_json_lines(SourceListing("memory://json-lines", store, objects, True))

    source = asyncio.run(opened())
    with stoker.Packer(tmp_path / "data", schema=source.schema) as packer:
        packer.write(ROWS[0])
        packer.extend(source)
        packer.extend(ROWS[:2])
    assert packed(tmp_path / "data") == [ROWS[0], *ROWS, *ROWS[:2]]


def test_a_plug_ins_source_has_what_every_source_has() -> None:
    put_all("memory://whole", {"a.jsonl": lines(ROWS), "b.jsonl": lines(ROWS)})
    source = look("memory://whole", "json-lines")
    assert (source.kind, source.samples, source.notes) == ("json-lines", None, ())
    assert source.size_bytes == 2 * len(lines(ROWS))
    assert [item.key for item in source.objects] == ["a.jsonl", "b.jsonl"]
    assert len(source.fingerprint) == 64
    assert read_all("memory://whole/b.jsonl", "json-lines", start=5) == [
        (f"b.jsonl: line {number + 1}", ROWS[number]) for number in range(5, 9)
    ]
    put_all("memory://whole", {"a.jsonl": lines(ROWS[:1])})
    assert look("memory://whole", "json-lines").fingerprint != source.fingerprint


def test_an_unknown_kind_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    known = ["image-folder", "files", "npy", "npz", "webdataset", "json-lines", "lost"]
    assert list(sources.KINDS) == known
    with pytest.raises(ConfigError, match=f"no kind of source 'parquet'; use one of {', '.join(known)}$"):
        look("memory://x", "parquet")
    with pytest.raises(SystemExit):
        main(["pack", "--kind", "parquet", "a", "b"])
    said = capsys.readouterr().err
    assert "invalid choice: 'parquet'" in said
    assert all(kind in said for kind in known)


def test_built_in_kinds_cannot_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(PackError, match=r"not an \.npy file"):
        look(str(tmp_path / "x.npy"), "npy")


def test_a_plug_in_that_cannot_be_loaded_is_named() -> None:
    put_all("memory://y", {"a": b"a"})
    with pytest.raises(MissingExtraError, match=r"source lost \(no_such_module:open\) cannot be loaded"):
        look("memory://y", "lost")


def test_a_plug_in_that_returns_no_source_is_named(json_lines: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_nothing(listing: object) -> object:
        return SimpleNamespace(schema={})

    monkeypatch.setattr(json_lines, "open_json_lines", open_nothing)
    put_all("memory://z", {"a.jsonl": b"{}"})
    with pytest.raises(ConfigError, match="returned a SimpleNamespace, which lacks 'schema' or 'read'"):
        look("memory://z", "json-lines")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "has no line"),
        (b"[1]\n", "line 1 is no JSON object"),
        (b'{"a": 1}\n{"a": ', "line 2 is not JSON"),
        (b'{"a": null}\n', "'a' is None"),
    ],
)
def test_a_malformed_line_is_reported(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_bytes(data)
    with pytest.raises(PackError, match=said):
        read_all(str(tmp_path / "raw.jsonl"), "json-lines")


def test_functions_do_not_pack_a_plug_ins_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "raw.jsonl").write_bytes(lines(ROWS))
    command = ["pack", "--on", "local", "--kind", "json-lines", str(tmp_path / "raw.jsonl"), str(tmp_path / "data")]
    assert main(command) == 2
    assert "without --on" in capsys.readouterr().err
