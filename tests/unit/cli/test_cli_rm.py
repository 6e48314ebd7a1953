"""``stoker rm``: asks, refuses what is no data set, and deletes nothing without an answer."""

from __future__ import annotations

import asyncio
import sys
from io import StringIO
from pathlib import Path

import pytest

import stoker
from stoker import open_store
from stoker.cli import main
from support.packing import numbered_samples, pack
from support.terminal import Terminal


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = str(tmp_path / "train")
    asyncio.run(_pack(url))
    return url


async def _pack(url: str) -> None:
    await pack(open_store(url), numbered_samples(10))


@pytest.mark.parametrize(
    ("answer", "is_gone"), [("y\n", True), ("yes\n", True), ("n\n", False), ("", False), ("\n", False)]
)
def test_it_asks_and_takes_only_a_yes(
    url: str, answer: str, is_gone: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert main(["rm", url]) == (0 if is_gone else 1)
    assert Path(url).exists() != is_gone
    shown = capsys.readouterr()
    assert "delete the data set at" in shown.out
    assert "10 samples, version 1" in shown.out
    assert ("deleted the data set" if is_gone else "nothing was deleted") in shown.err


def test_without_a_terminal_it_needs_yes(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("y\n"))
    assert main(["rm", url]) == 2
    assert "use --yes" in capsys.readouterr().err
    assert len(stoker.open(url)) == 10
    assert main(["rm", url, "--yes", "--quiet"]) == 0
    assert not Path(url).exists()
    assert capsys.readouterr().err == ""


def test_other_files_and_their_folders_stay_and_are_reported(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(url) / "data" / "mine").write_text("mine")
    (Path(url) / "notes").mkdir()
    assert main(["rm", url, "--yes"]) == 0
    assert sorted(path.name for path in Path(url).rglob("*")) == ["data", "mine", "notes"]
    assert "left alone" in capsys.readouterr().err


@pytest.mark.parametrize("linked", ["data", "data/0123456789abcdef", "epochs"])
def test_what_links_lead_to_is_not_deleted(
    url: str, tmp_path: Path, linked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "copy" / "data").mkdir(parents=True)
    for path in (tmp_path / "train").iterdir():
        if path.name != "data":
            (tmp_path / "copy" / path.name).symlink_to(path)
    target = tmp_path / "copy" / linked
    if target.is_dir():
        target.rmdir()
    target.symlink_to(tmp_path / "train" / "data")
    assert main(["rm", str(tmp_path / "copy"), "--yes"]) == 2
    assert "is a link to another folder" in capsys.readouterr().err
    with stoker.open(url) as dataset:
        assert len(list(dataset)) == 10


@pytest.mark.parametrize("what", ["", "missing", "s3:/bucket/x", "stoker+https://host/v1/x"])
def test_what_is_no_data_set_is_refused(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("mine")
    place = what if ":" in what else str(tmp_path / what)
    try:
        code = main(["rm", place, "--yes"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code in (1, 2)
    assert (tmp_path / "data" / "x").exists()
    assert capsys.readouterr().err
