"""``stoker cache warm``: what a loader then finds on the disk, and whatever is wrong with it."""

from __future__ import annotations

import errno
import os
import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from stoker import cli
from stoker._cache.disk_folder import BLOCK_BYTES
from stoker_torch import Loader
from support.cluster import own_runtime_folder
from support.ports import reserved_port

SAMPLES = 200


@pytest.fixture
def data(tmp_path: Path) -> str:
    with stoker.Packer(
        tmp_path / "data", schema={"x": stoker.Array("uint8", (500,))}, super_sample_bytes=5000
    ) as packer:
        packer.extend({"x": np.full(500, number % 251, np.uint8)} for number in range(SAMPLES))
    return str(tmp_path / "data")


def warm(data: str, cache: str, *options: str) -> int:
    return cli.main(["cache", "warm", data, "--cache", cache, *options])


def warm_cluster(data: str, cluster: str, *options: str) -> int:
    return cli.main(["cache", "warm", data, "--cluster", cluster, "--quiet", *options])


def requests_of_an_epoch(data: str, cache: str | None, **settings: Any) -> int:
    with Loader(data, batch_size=20, cache=cache, epochs=1, **settings) as loader:
        begun = loader.stats().get_requests
        assert sum(len(batch["x"]) for batch in loader) == SAMPLES
        return loader.stats().get_requests - begun


def files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.is_file())


def test_a_training_behind_it_reads_nothing_from_the_bucket(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = f"disk:{tmp_path / 'cache'}?limit=10MB"
    assert warm(data, cache) == 0
    objects = len(files(tmp_path / "cache"))
    shown = capsys.readouterr().out
    assert f"holds {objects} of {objects} super-samples of version 1" in shown
    assert f"{objects} came from the bucket, 0 were there" in shown
    assert requests_of_an_epoch(data, cache, seed=3) == 0
    assert warm(data, cache, "--quiet") == 0
    assert f"0 came from the bucket, {objects} were there" in capsys.readouterr().out


def test_what_fits_into_the_limit_is_what_the_order_needs_first(data: str, tmp_path: Path) -> None:
    cache = f"disk:{tmp_path / 'cache'}?limit={BLOCK_BYTES * 2 * 6}"
    assert warm(data, cache, "--seed", "7", "--quiet") == 0
    assert len(files(tmp_path / "cache")) == 6
    with Loader(data, batch_size=20, cache=cache, seed=7, epochs=1, memory="100KB") as loader:
        begun = loader.stats().get_requests
        next(iter(loader))
        hits = next(iter(loader.stats().caches.values())).hits
    assert hits >= 4
    assert begun == 1


def test_a_run_that_was_interrupted_continues_and_damaged_files_are_read_again(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cache = tmp_path / "cache", f"disk:{tmp_path / 'cache'}?limit=10MB"
    assert warm(data, cache, "--quiet") == 0
    whole = files(folder)
    for path in whole[:3]:
        path.unlink()
    content = bytearray(whole[3].read_bytes())
    content[100] ^= 1
    whole[3].write_bytes(content)
    capsys.readouterr()
    assert warm(data, cache, "--quiet") == 0
    assert f"4 came from the bucket, {len(whole) - 4} were there" in capsys.readouterr().out
    assert files(folder) == whole


def test_a_disk_that_is_full_is_exit_code_one(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, left = os.write, [5]

    def fail(handle: int, content: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, content)

    monkeypatch.setattr(os, "write", fail)
    assert warm(data, f"disk:{tmp_path / 'cache'}?limit=10MB", "--quiet") == 1
    assert "that fit into the limit were not cached: the disk is full or failed" in capsys.readouterr().err
    assert len(files(tmp_path / "cache")) == 5


def test_a_cache_that_a_training_writes_to_is_refused(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = f"disk:{tmp_path / 'cache'}?limit=10MB"
    with Loader(data, batch_size=20, cache=cache, epochs=1) as loader:
        next(iter(loader))
        assert warm(data, cache) == 1
    assert "another process writes to it" in capsys.readouterr().err


def test_bandwidth_is_held_to(data: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    assert warm(data, f"disk:{tmp_path / 'cache'}?limit=10MB", "--max-rate", "200KB", "--quiet") == 0
    held = sum(path.stat().st_size for path in files(tmp_path / "cache"))
    assert time.monotonic() - begun >= (held - 8000) / 200_000 - 0.1


@pytest.mark.parametrize(
    ("cache", "code", "says"),
    [
        ("memory:?limit=1GB", 2, "a cache in memory ends with its process"),
        ("disk:/nowhere?limit=1KB", 1, "which is smaller than the largest super-sample"),
        ("disk:/nowhere", 2, "limit="),
        ("/nowhere", 2, "is not a cache"),
    ],
)
def test_a_cache_that_cannot_be_is_named(
    data: str, cache: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert warm(data, cache) == code
    assert says in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_an_error(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    assert warm(data, f"disk:{tmp_path / 'file'}?limit=10MB", "--quiet") == 1
    assert "cannot be filled" in capsys.readouterr().err


def test_a_data_set_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert warm(str(tmp_path / "none"), f"disk:{tmp_path / 'cache'}?limit=10MB") == 1
    assert "there is no data set" in capsys.readouterr().err


def test_a_training_behind_it_reads_nothing_where_the_machine_keeps_objects(
    data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = "memory:?limit=10MB"
    with own_runtime_folder():
        assert warm_cluster(data, cluster) == 0
        assert f"{cluster} holds 23 of 23 super-samples" in (shown := capsys.readouterr().out)
        assert "23 came from the bucket, 0 were there" in shown
        assert requests_of_an_epoch(data, None, cluster=cluster, seed=3) == 0
        assert warm_cluster(data, cluster) == 0
        assert "0 came from the bucket, 23 were there" in capsys.readouterr().out


def test_a_machine_keeps_what_the_order_needs_first_until_it_has_no_room(
    data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = "memory:?limit=42KB"
    with own_runtime_folder():
        assert warm_cluster(data, cluster, "--seed", "7") == 0
        assert "holds 5 of 23 super-samples" in capsys.readouterr().out
        with Loader(data, batch_size=20, cluster=cluster, seed=7, epochs=1, memory="100KB") as loader:
            next(iter(loader))
            assert loader.stats().tier_hits["cluster"] >= 4


def test_machines_that_meet_fill_each_object_once(
    data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STOKER_CLUSTER", f"127.0.0.1:{reserved_port()}")
    monkeypatch.setenv("STOKER_CLUSTER_SECRET", secrets.token_urlsafe(32))
    with own_runtime_folder():
        assert warm_cluster(data, "memory:?limit=10MB") == 0
        with own_runtime_folder():  # of another machine
            assert warm_cluster(data, "memory:?limit=10MB") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "holds 23 of 23 super-samples" in first
    assert "holds 23 of 23 super-samples" in second
    assert "0 came from the bucket, 23 were there" in second


def test_a_process_that_cannot_start_is_an_error(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    with own_runtime_folder():
        assert warm_cluster(data, f"disk:{tmp_path / 'file'}?limit=10MB") == 1
    assert "the cache process of this machine cannot be reached" in capsys.readouterr().err
