"""What stoker 1 wrote is read, and what it would write today is the same: see ``tests/golden/v1``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stoker
from golden.v1 import make_fixtures
from golden.v1.make_fixtures import COMMON, CREATED, FOLDER, INTERRUPTED, SAMPLES, SCHEMA, TAGS, numbers_of, plain
from stoker._format.manifest import Manifest
from stoker.cli import main
from stoker_local import LocalBucket
from stoker_torch import Loader
from support.earlier_versions import files_of, options_of, read_objects, upload
from support.identities import in_earlier_form
from support.stores import run_check

STATES = json.loads((FOLDER / "states.json").read_text())
SAMPLES_WRITTEN = json.loads((FOLDER / "samples.json").read_text())
FILES = files_of("dataset")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The data set as files, which have other tags than they had in the bucket."""
    shutil.copytree(FOLDER / "dataset", tmp_path / "dataset")
    return tmp_path / "dataset"


@pytest.fixture
def options(local_bucket: LocalBucket) -> stoker.S3Options:
    return options_of(local_bucket)


@pytest.fixture
def url(options: stoker.S3Options, tmp_path: Path) -> str:
    """The data set in a bucket, with a materialized epoch."""
    url = f"s3://stoker/golden/{tmp_path.name}"
    upload(url, options, "dataset", "epoch")
    return url


def written(samples: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: plain(value) for name, value in sample.items()} for sample in samples]


@pytest.mark.parametrize(("version", "samples"), [(None, SAMPLES), (2, SAMPLES), (1, CREATED)])
def test_each_version_of_a_data_set_has_the_samples_that_were_packed(
    url: str, options: stoker.S3Options, version: int | None, samples: int
) -> None:
    with stoker.open(url, options=options, version=version) as dataset:
        assert dict(dataset.schema) == SCHEMA
        assert len(dataset) == samples
        assert written(iter(dataset)) == SAMPLES_WRITTEN[:samples]
        assert written(iter(dataset.samples([17, 0, samples - 1]))) == [
            SAMPLES_WRITTEN[index] for index in (17, 0, samples - 1)
        ]


def test_a_copy_of_a_data_set_is_read_and_found_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stoker.open(folder) as dataset, pytest.warns(UserWarning, match="seems to be a copy"):
        assert written(iter(dataset)) == SAMPLES_WRITTEN
    assert main(["verify", str(folder)]) == 0
    assert "5 super-samples of version 2" in capsys.readouterr().err


def test_a_data_set_is_appended_to(url: str, options: stoker.S3Options) -> None:
    with stoker.Packer(url, schema=SCHEMA, mode="append", options=options) as packer:
        packer.extend(map(make_fixtures.sample_of, range(7)))
    with stoker.open(url, options=options) as dataset:
        assert dataset.manifest.version == 3
        assert written(iter(dataset)) == SAMPLES_WRITTEN + SAMPLES_WRITTEN[:7]


@pytest.mark.parametrize("flags", [[], ["--adopt"]], ids=["manifests", "manifests and records"])
def test_a_lost_index_is_rebuilt(folder: Path, flags: list[str]) -> None:
    for path in [folder / "manifest.safetensors", *(folder / "manifests").iterdir()]:
        path.unlink()
    if flags:
        shutil.rmtree(folder / "packs")
    main(["rebuild-manifest", str(folder), *flags])
    with stoker.open(folder) as dataset:
        assert sorted(written(iter(dataset)), key=SAMPLES_WRITTEN.index) == SAMPLES_WRITTEN


def test_packed_today_a_data_set_is_the_same_to_the_byte(options: stoker.S3Options, tmp_path: Path) -> None:
    url = f"s3://stoker/golden/again-{tmp_path.name}"
    make_fixtures.pack_dataset(url, options)
    found = in_earlier_form(read_objects(url, options))
    assert found.keys() == FILES.keys()
    assert [key for key, data in found.items() if data != FILES[key]] == []


@pytest.mark.parametrize("key", [key for key in FILES if "manifest" in key])
def test_a_manifest_parsed_and_written_again_is_the_same(key: str) -> None:
    data = FILES[key]
    assert Manifest.from_bytes(data).to_bytes() == data


@pytest.mark.parametrize("name", TAGS)
def test_a_manifest_has_the_tags_that_its_store_gave(name: str) -> None:
    data = (FOLDER / "manifests" / f"{name}.safetensors").read_bytes()
    manifest = Manifest.from_bytes(data)
    tags = manifest.rows.tags
    assert tags == TAGS[name] if isinstance(tags, tuple) else (tags == TAGS[name]).all()
    assert manifest.to_bytes() == data


def test_a_materialized_epoch_is_read_without_the_objects_that_it_was_made_of(
    url: str, options: stoker.S3Options, caplog: pytest.LogCaptureFixture
) -> None:
    async def delete(store: Any) -> None:
        for key in FILES:
            if key.startswith("data/"):
                await store.delete(key)

    run_check(stoker.open_store(url, options=options), delete)
    wanted = STATES["materialized"]["delivered"] + STATES["materialized"]["rest"]
    with caplog.at_level("WARNING"), Loader(url, options=options, shuffle="materialized", **COMMON) as loader:
        assert numbers_of(loader) == wanted
    assert caplog.messages == []
    assert sorted(wanted) == list(range(SAMPLES))


def test_materialized_today_an_epoch_is_the_same_to_the_byte(options: stoker.S3Options, tmp_path: Path) -> None:
    url = f"s3://stoker/golden/again-{tmp_path.name}"
    upload(url, options, "dataset")
    make_fixtures.shuffle_epoch(url, options)
    assert in_earlier_form(read_objects(url, options, "epochs/")) == files_of("epoch")


def test_what_a_disk_cache_holds_is_not_read_from_the_bucket(
    url: str, options: stoker.S3Options, tmp_path: Path
) -> None:
    shutil.copytree(FOLDER / "cache", tmp_path / "cache")
    for path in (tmp_path / "cache").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)  # a cache that others may write to is not read
    files = sorted(path.name for path in (tmp_path / "cache").rglob("*"))
    cache = f"disk:{tmp_path / 'cache'}?limit=1MB"
    with Loader(url, batch_size=5, memory="1MB", options=options, cache=cache, epochs=1) as loader:
        assert sorted(numbers_of(loader)) == list(range(SAMPLES))
        (found,) = loader.stats().caches.values()
        assert (found.lookups, found.hits) == (5, 5)
        assert loader.stats().get_requests == 1  # the manifest
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*")) == files


@pytest.mark.parametrize("steps", [["scatter"], ["slice", "commit"]], ids=["scatter", "slice and commit"])
def test_an_epoch_is_gone_on_with_from_what_was_scattered(
    options: stoker.S3Options, tmp_path: Path, steps: list[str]
) -> None:
    url = f"s3://stoker/golden/scattered-{tmp_path.name}"
    upload(url, options, "dataset", *(["scattered"] if "slice" in steps else []))
    make_fixtures.shuffle_epoch(url, options, steps)
    found = in_earlier_form(read_objects(url, options, "epochs/"))
    assert found == files_of("scattered" if "scatter" in steps else "epoch")


def test_a_pack_that_was_interrupted_is_resumed(options: stoker.S3Options, tmp_path: Path) -> None:
    url = f"s3://stoker/golden/{tmp_path.name}"
    upload(url, options, "interrupted")
    assert make_fixtures.pack_interrupted(url, options) == INTERRUPTED - 1  # the last one was not cut yet
    with stoker.open(url, options=options) as dataset:
        assert [int(sample["number"][0]) for sample in dataset] == list(range(20))
    found = read_objects(url, options)
    written = files_of("interrupted")
    assert [key for key, data in written.items() if found[key] != data and not key.startswith("packs/")] == []
