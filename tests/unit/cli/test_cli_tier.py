"""``stoker tier serve``: errors of wrong settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker import cli
from support.shared_tier import SECRET


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "FOLDER",
        "FOLDER?",
        "?limit=1GB",
        "FOLDER?limit=",
        "FOLDER?limit=much",
        "FOLDER?limit=0",
        "~nobody-of-this-name/x?limit=1GB",
    ]
    + [f"FOLDER?limit=1GB&{more}" for more in ("limit=2GB", "policy=lru", "policy=next-use", "x=1")],
)
def test_a_disk_that_is_no_folder_with_a_limit_is_an_error_that_says_what_is_right(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STOKER_TIER_SECRET", SECRET.reveal())
    spec = spec.replace("FOLDER", str(tmp_path / "tier"))
    assert cli.main(["tier", "serve", "--memory", "1MB", "--listen", "127.0.0.1:0", "--disk", spec]) == 2
    said = capsys.readouterr().err
    assert "--disk must be FOLDER?limit=SIZE" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "tier").exists()
