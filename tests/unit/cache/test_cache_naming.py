"""Names of cached objects, and the rows that have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stoker._cache.index import is_name, name_of, rows_of, size_of
from stoker_sim._bucket import synthetic_manifest
from support.tiers import MANIFEST


def test_a_name_says_size_and_checksum_and_differs_by_key() -> None:
    ref = MANIFEST.ref(3)
    name = name_of(ref)
    assert is_name(name)
    assert size_of(name) == ref.size_bytes
    assert int(name[:8], 16) == ref.crc32c
    others = [replace(ref, key="x"), replace(ref, size_bytes=1), replace(ref, crc32c=1)]
    assert len({name, *map(name_of, others)}) == 4
    assert name_of(replace(ref, row=-1, tag="another bucket's")) == name


def test_the_largest_object_has_a_name_like_any_other() -> None:
    name = name_of(replace(MANIFEST.ref(0), size_bytes=(1 << 32) - 1, crc32c=(1 << 32) - 1))
    assert is_name(name)
    assert size_of(name) == (1 << 32) - 1


def test_rows_are_found_by_name_also_where_contents_are_alike() -> None:
    alike = synthetic_manifest(super_samples=50, samples=3, super_sample_bytes=5000)
    for manifest in (MANIFEST, alike):
        names = [name_of(manifest.ref(row)) for row in range(len(manifest))]
        assert rows_of(names, manifest) == {name: row for row, name in enumerate(names)}
    assert rows_of([name_of(alike.ref(1)), "0" * 32], MANIFEST) == {}
    assert rows_of([], MANIFEST) == {}


def test_rows_are_those_of_the_version_that_is_asked() -> None:
    smaller = MANIFEST.remove_runs([replace(MANIFEST.runs[0], first_number=0, rows=5)])
    here, gone = name_of(MANIFEST.ref(7)), name_of(MANIFEST.ref(2))
    assert rows_of([here, gone], smaller) == {here: 2}
    assert np.array_equal(smaller.rows.crc32c[2:3], MANIFEST.rows.crc32c[7:8])


def test_other_texts_are_no_names() -> None:
    for text in ("", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "../" + "0" * 29, "\N{ARABIC-INDIC DIGIT ZERO}" * 32):
        assert not is_name(text)
