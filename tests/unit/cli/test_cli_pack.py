"""``stoker pack``: what it shows, and what it refuses, before it packs."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from stoker.cli import main


def tar_of(*names: str, is_cut: bool) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 5
            tar.addfile(info, io.BytesIO(b"hello"))
    return data.getvalue()[: 1024 * len(names)] if is_cut else data.getvalue()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    return folder


def test_the_first_sample_is_shown_before_it_is_packed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "cat").mkdir()
    (source / "cat" / "1.jpg").write_bytes(b"JPEG")
    assert main(["pack", str(source), str(tmp_path / "set")]) == 0
    lines = capsys.readouterr().err.splitlines()
    at = lines.index("sample 0 (cat/1.jpg):")
    assert lines[at + 1 : at + 4] == [
        "  image  4 bytes: 4a 50 45 47",
        "  label  0 (cat)",
        '  path   "cat/1.jpg"',
    ]
    assert any(line.startswith("packed 1 sample into 1 super-sample") for line in lines[at + 4 :])
    assert main(["info", str(tmp_path / "set")]) == 0
    assert "1 class: cat" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet", "x.tar.gz"])
def test_a_table_or_archive_is_packed_only_if_it_is_declared_a_file(
    name: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / name).write_bytes(b"anything")
    command = ["pack", "--quiet", str(source), str(tmp_path / "set")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert name in said
    assert "--kind files" in said
    assert not (tmp_path / "set").exists()
    assert main([*command, "--kind", "files"]) == 0


@pytest.mark.parametrize("count", [1, 3])
def test_tars_without_an_end_marker_are_a_warning_or_with_strict_an_error(
    count: int, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "whole.tar").write_bytes(tar_of("w.txt", is_cut=False))
    for number in range(count):
        (source / f"{number}.tar").write_bytes(tar_of(f"{number}.txt", is_cut=True))
    assert main(["pack", "--strict", str(source), str(tmp_path / "set")]) == 1
    assert f"{source}/0.tar has no end marker" in capsys.readouterr().err
    assert main(["pack", "--quiet", str(source), str(tmp_path / "quiet")]) == 0
    assert f"in {count} of {count + 1} tars" in capsys.readouterr().err
    assert main(["pack", str(source), str(tmp_path / "set")]) == 0
    said = capsys.readouterr().err
    assert f"warning: no end marker in {count} of {count + 1} tars (first: 0.tar)" in said
    assert f"packed {count + 1} samples" in said


def test_links_out_of_the_source_are_packed_only_when_they_are_to_be_followed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "blob").write_bytes(b"from elsewhere")
    (source / "a.txt").symlink_to("../blob")
    (source / "b.txt").write_bytes(b"own")
    command = ["pack", str(source), str(tmp_path / "set")]
    assert main(command) == 2
    assert "1 link out of it (first: a.txt -> ../blob)" in capsys.readouterr().err
    assert main([*command, "--follow-links"]) == 0
    assert "packed 2 samples" in capsys.readouterr().err
