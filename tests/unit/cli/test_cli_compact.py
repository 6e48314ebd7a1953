"""``stoker compact``: effect and output."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stoker import open_store
from stoker._format import versions
from stoker.cli import main
from support.packing import contents, numbered_samples, pack


def small_versions(folder: Path, appends: int = 9) -> None:
    """Make a data set of small super-samples by appending to it."""

    async def make() -> None:
        store = open_store(str(folder))
        await pack(store, numbered_samples(6), super_sample_bytes=8 << 20)
        for number in range(1, appends + 1):
            await pack(
                store, numbered_samples(6, 6 * number), mode="append", source=str(number), super_sample_bytes=8 << 20
            )
        await store.close()

    asyncio.run(make())


def read(folder: Path, version: int | None = None) -> tuple[int, list[object]]:
    async def work() -> tuple[int, list[object]]:
        store = open_store(str(folder))
        manifest = await versions.read_manifest(store, version)
        labels = [sample["label"] for sample in await contents(store, manifest)]
        await store.close()
        return len(manifest), labels

    return asyncio.run(work())


def test_small_super_samples_become_large_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_versions(tmp_path)
    assert main(["compact", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("10 super-samples became 1: version 11;")
    assert "stoker gc --keep-versions 1 --delete" in said
    assert read(tmp_path) == (1, list(range(60)))
    assert read(tmp_path, 10) == (10, list(range(60)))
    assert main(["compact", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing to gain in version 11\n"
    assert main(["gc", "--keep-versions", "1", "--delete", str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path)]) == 0
    assert read(tmp_path) == (1, list(range(60)))


def test_their_size_can_be_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_versions(tmp_path)
    assert main(["compact", "--super-sample-bytes", "3KiB", str(tmp_path)]) == 0
    count, labels = read(tmp_path)
    assert labels == list(range(60))
    assert 1 < count < 10
    assert main(["compact", "--super-sample-bytes", "32MiB", str(tmp_path)]) == 0
    assert read(tmp_path) == (1, list(range(60)))
    capsys.readouterr()


def test_a_manifest_that_is_rebuilt_later_has_no_sample_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_versions(tmp_path)
    assert main(["compact", "--super-sample-bytes", "3KiB", str(tmp_path)]) == 0
    assert main(["compact", "--super-sample-bytes", "8MiB", str(tmp_path)]) == 0
    asyncio.run(appended(tmp_path, numbered_samples(6, 60)))
    assert main(["compact", str(tmp_path)]) == 0
    for extra in ([], ["--adopt"]):
        assert main(["rebuild-manifest", *extra, str(tmp_path)]) == 0
        assert read(tmp_path)[1] == list(range(66))
    for lost in ("manifests/00000014.safetensors", "manifests/*"):
        (tmp_path / "manifest.safetensors").unlink()
        for file in tmp_path.glob(lost):
            file.unlink()
        assert main(["rebuild-manifest", str(tmp_path)]) == 0
        assert read(tmp_path)[1] == list(range(66))
    capsys.readouterr()


async def appended(folder: Path, samples: list[dict[str, object]]) -> None:
    store = open_store(str(folder))
    await pack(store, samples, mode="append", source="more", super_sample_bytes=8 << 20)
    await store.close()


def test_a_missing_data_set_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compact", str(tmp_path)]) == 1
    assert "no data set" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compact", "--super-sample-bytes", "tiny", str(tmp_path)])
    assert "--super-sample-bytes" in capsys.readouterr().err
