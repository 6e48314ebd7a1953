"""Consistently wrong objects: all checksums are right, the content is not. Refused before memory is allocated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from stoker import FetchConfig
from stoker._format.manifest import POINTER_KEY, Manifest, PackRun, version_key
from stoker._format.supersample import MAX_OBJECT_BYTES
from stoker.errors import FormatError, MemoryBudgetError, StoreError
from stoker_torch import Loader
from support.memory import memory_of

MEMORY_BYTES = 1 << 20
FETCH = FetchConfig(attempts=2, checksum_attempts=2, backoff_base_seconds=0.001, backoff_cap_seconds=0.001)
Lie = Callable[[Manifest], Manifest]


def packed(folder: Path) -> Path:
    with stoker.Packer(folder, schema={"x": stoker.Array("int64")}, super_sample_bytes=100) as packer:
        packer.extend({"x": number} for number in range(40))
    return folder


def write_manifest(folder: Path, lie: Lie) -> None:
    """Put a manifest with right checksums in the place of the true one."""
    changed = lie(Manifest.from_bytes((folder / POINTER_KEY).read_bytes())).to_bytes()
    for key in (POINTER_KEY, version_key(1)):
        (folder / key).write_bytes(changed)


def rows(**columns: Any) -> Lie:
    """Return a change of columns: a number for every row, or a function of the present values."""

    def lie(manifest: Manifest) -> Manifest:
        changed = {}
        for name, value in columns.items():
            found = getattr(manifest.rows, name)
            changed[name] = (value(found) if callable(value) else np.full(len(found), value)).astype("<u4")
        return replace(manifest, rows=replace(manifest.rows, **changed))

    return lie


def read_all(folder: Path, **settings: Any) -> list[int]:
    with Loader(folder, **{"memory": MEMORY_BYTES, "batch_size": 4, "seed": 7, "fetch": FETCH, **settings}) as loader:
        return sorted(number for batch in loader for number in batch["x"].tolist())


def refuse(folder: Path, error: type[Exception], match: str, **settings: Any) -> None:
    with pytest.raises(error, match=match):
        read_all(folder, **settings)


def test_the_truth_is_read(tmp_path: Path) -> None:
    write_manifest(packed(tmp_path), lambda manifest: manifest)
    assert read_all(tmp_path) == list(range(40))


@pytest.mark.parametrize("size_bytes", [MAX_OBJECT_BYTES + 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("shuffle", ["window", "full"])
def test_objects_larger_than_any_super_sample_are_refused_whatever_the_budget(
    tmp_path: Path, size_bytes: int, shuffle: str
) -> None:
    write_manifest(packed(tmp_path), rows(size_bytes=size_bytes))
    match = "larger than any super-sample"
    memory = memory_of(lambda: refuse(tmp_path, FormatError, match, shuffle=shuffle, memory="1TB"))
    assert memory.peak_bytes < 4 << 20


@pytest.mark.parametrize("shuffle", ["none", "block", "window", "full"])
def test_objects_that_claim_to_be_large_must_fit_the_budget(tmp_path: Path, shuffle: str) -> None:
    write_manifest(packed(tmp_path), rows(size_bytes=MAX_OBJECT_BYTES, head_bytes=1 << 25))
    assert memory_of(lambda: refuse(tmp_path, MemoryBudgetError, "too small", shuffle=shuffle)).peak_bytes < 4 << 20


@pytest.mark.parametrize("shuffle", ["none", "window", "full"])
def test_samples_that_are_only_claimed_cost_no_more_than_their_objects_would(tmp_path: Path, shuffle: str) -> None:
    object_bytes = 1 << 20
    write_manifest(packed(tmp_path), rows(size_bytes=object_bytes, head_bytes=object_bytes, samples=object_bytes // 4))
    settings = {"memory": 100 * object_bytes, "shuffle": shuffle, "window": 2, "batch_size": 1 << 16}
    assert memory_of(lambda: refuse(tmp_path, StoreError, "bytes", **settings)).peak_bytes < 100 * object_bytes


@pytest.mark.parametrize("samples", [2**32 - 1, 2**31, 1000])
def test_more_samples_than_a_head_can_describe_are_refused(tmp_path: Path, samples: int) -> None:
    write_manifest(packed(tmp_path), rows(samples=samples))
    refuse(tmp_path, FormatError, "more samples than its head")


def test_the_samples_of_many_rows_do_not_wrap(tmp_path: Path) -> None:
    most = MAX_OBJECT_BYTES // 4
    many = [most] * 1000
    write_manifest(packed(tmp_path), lambda manifest: _grown(manifest, many))
    assert Manifest.from_bytes((tmp_path / POINTER_KEY).read_bytes()).samples == 1000 * most > 1 << 32
    refuse(tmp_path, MemoryBudgetError, "too small")


def _grown(manifest: Manifest, samples: list[int]) -> Manifest:
    count = len(samples)
    columns = {name: np.full(count, MAX_OBJECT_BYTES, "<u4") for name in ("size_bytes", "head_bytes")}
    columns |= {name: np.zeros(count, "<u4") for name in ("head_crc32c", "crc32c")}
    grown = replace(manifest.rows, **columns, samples=np.array(samples, "<u4"), tags=("",) * count, sha256_128=None)
    return replace(manifest, rows=grown, runs=(PackRun(manifest.runs[0].run, 0, count),))


@pytest.mark.parametrize("shuffle", ["none", "block", "window", "full"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_head_with_another_number_of_samples_than_the_manifest_is_refused(
    tmp_path: Path, change: int, shuffle: str
) -> None:
    write_manifest(packed(tmp_path), rows(samples=lambda found: found.astype(np.int64) + change))
    refuse(tmp_path, FormatError, "samples|more samples than its head", shuffle=shuffle)


@pytest.mark.parametrize("columns", [["x"], None])
def test_a_head_of_another_length_or_schema_than_the_manifest_says_is_refused(
    tmp_path: Path, columns: list[str] | None
) -> None:
    folder = packed(tmp_path)
    write_manifest(folder, rows(head_bytes=lambda found: found - 4))
    refuse(folder, FormatError, "schema, samples or head|cut off", columns=columns)
    write_manifest(folder, lambda manifest: replace(manifest, schema=stoker.Schema({"x": stoker.Array("float64")})))
    refuse(folder, FormatError, "schema, samples or head", columns=columns)


@pytest.mark.parametrize("change", [1, 1000])
def test_an_object_shorter_than_the_manifest_says_is_refused(tmp_path: Path, change: int) -> None:
    write_manifest(packed(tmp_path), rows(size_bytes=lambda found: found.astype(np.int64) + change))
    refuse(tmp_path, StoreError, "bytes|changed|checksum")


def doubled(manifest: Manifest) -> Manifest:
    """Return a manifest with an object twice, which cannot be constructed."""
    lying = copy.copy(manifest)
    object.__setattr__(lying, "runs", (PackRun("f" * 16, 0, 1), PackRun("f" * 16, 0, len(manifest) - 1)))
    return lying


def test_no_run_leads_out_of_the_bucket_or_to_another_object_twice(tmp_path: Path) -> None:
    """A key is made of two numbers, so it can have no dots, no slash and no scheme."""
    folder = packed(tmp_path)
    write_manifest(folder, lambda manifest: replace(manifest, runs=(PackRun("f" * 16, 2**32 - 1, len(manifest)),)))
    manifest = Manifest.from_bytes((folder / POINTER_KEY).read_bytes())
    assert manifest.key(len(manifest) - 1) == f"data/{'f' * 16}/{2**32 + len(manifest) - 2}"
    refuse(folder, StoreError, "does not exist")
    write_manifest(folder, doubled)
    refuse(folder, FormatError, "an object occurs twice")


@pytest.mark.parametrize("version", [None, 1])
def test_a_manifest_that_claims_to_be_endless_is_refused(tmp_path: Path, version: int | None) -> None:
    folder = packed(tmp_path)
    for key in (POINTER_KEY, version_key(1)):
        with (folder / key).open("r+b") as file:
            file.truncate(1 << 40)  # no disk is used for what was never written
    memory = memory_of(lambda: refuse(folder, StoreError, "too many to read at once", version=version))
    assert memory.peak_bytes < 4 << 20
