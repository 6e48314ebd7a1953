"""``stoker rebuild-manifest``: what it prints, and its exit codes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import stoker
from stoker.cli import main


@pytest.fixture
def data_only(tmp_path: Path) -> Path:
    """A data set of which only the super-samples are left."""
    folder = tmp_path / "set"
    with stoker.Packer(folder, schema={"x": stoker.Array("int64")}, super_sample_bytes=400) as packer:
        packer.extend({"x": number} for number in range(200))
    (folder / "manifest.safetensors").unlink()
    for name in ("manifests", "packs"):
        shutil.rmtree(folder / name)
    return folder


def test_existing_objects_are_counted_and_the_option_to_include_them_is_named(
    data_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = len(list(data_only.glob("data/*/*")))
    assert main(["rebuild-manifest", str(data_only)]) == 1
    said = capsys.readouterr().err
    assert f"{count} super-samples of 1 run" in said
    assert f"stoker rebuild-manifest --adopt {data_only}" in said
    assert main(["rebuild-manifest", "--adopt", str(data_only)]) == 0
    assert "200 samples" in capsys.readouterr().out.splitlines()[0]


def test_a_gap_among_adopted_super_samples_exits_with_1(data_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sorted(data_only.glob("data/*/*"))[3].unlink()
    assert main(["rebuild-manifest", "--adopt", str(data_only)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "missing: 1"
    assert "/00000003: does not exist" in lines[-1]


def test_what_is_damaged_is_listed_and_dropped_by_verify(data_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rebuild-manifest", "--adopt", str(data_only)]) == 0
    damaged = min(data_only.glob("data/*/*"))
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    capsys.readouterr()
    assert main(["rebuild-manifest", "--verify", str(data_only)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["lost: 1", f"  {damaged.relative_to(data_only)}: {lines[2].partition(': ')[2]}"]
    assert "crc32c" in lines[2]
    assert main(["verify", "--quiet", str(data_only)]) == 0
