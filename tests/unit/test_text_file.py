"""Files that a person names: whatever they are, little is read of them, and an error says which one it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker import Prices
from stoker._base.fields import read_text, read_toml
from stoker.errors import ConfigError
from stoker_sim._commands.allocate import read_jobs
from stoker_sim._scenario_file import read_scenario

MIB = 1 << 20


def sparse(folder: Path) -> Path:
    """Return a file of a terabyte that takes no room."""
    path = folder / "large.toml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    return path


def test_a_text_is_read_to_its_last_byte(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("größe", "utf-8")
    assert read_text(tmp_path / "a", max_bytes=7) == "größe"
    with pytest.raises(ConfigError, match="a is larger than 6 B"):
        read_text(tmp_path / "a", max_bytes=6)


def test_toml_may_have_a_mebibyte(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("a = 1 #".ljust(MIB, "x"))
    assert read_toml(path) == {"a": 1}
    path.write_text("a = 1 #".ljust(MIB + 1, "x"))
    with pytest.raises(ConfigError, match=r"a\.toml is larger than 1\.00 MiB"):
        read_toml(path)


READERS = [
    read_toml,
    Prices.load,
    read_scenario,
    lambda path: read_jobs(path, cache_bytes=None, bytes_per_second=None),
]


@pytest.mark.parametrize("read", READERS)
def test_no_reader_waits_for_a_pipe_or_reads_what_has_no_end(tmp_path: Path, read: object) -> None:
    assert callable(read)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"{path} cannot be read: it is not a regular file"):
            read(path)
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be read: Is a directory"):
        read(tmp_path)
    with pytest.raises(ConfigError, match=r"large\.toml is larger than"):
        read(sparse(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read: no file can have this name"):
        read(tmp_path / "a\0b")


def test_bytes_that_are_no_text_are_not_toml(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match=r"a\.toml is not TOML"):
        read_toml(tmp_path / "a.toml")
