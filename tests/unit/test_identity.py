from __future__ import annotations

import asyncio
import hashlib
import itertools
import struct
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stoker._format import identity as identity_module
from stoker._format import tensorfile
from stoker._format.identity import ObjectIdentity, compute_sha256_128, identity_of, sha256_128, weak_identity
from stoker._format.manifest import Manifest, PackRun
from stoker.abc import ObjectRef
from stoker.errors import FormatError
from support.identities import add_identities, remove_identities
from support.supersamples import manifest_of

REF = ObjectRef(key="data/0123/7", size_bytes=1001, crc32c=0xDEADBEEF, tag="etag")
WEAK: dict[str, Any] = {"dataset": "d", "key": "data/0/1", "tag": "t", "size_bytes": 11, "crc32c": 1}


def test_a_strong_identity_is_the_beginning_of_the_sha_256_of_the_bytes() -> None:
    assert sha256_128(b"abc").hex() == "ba7816bf8f01cfea414140de5dae2223"
    known = replace(REF, sha256_128=sha256_128(b"abc"))
    assert identity_of("d", known) == ObjectIdentity(hashlib.sha256(b"abc").digest()[:16], is_strong=True)
    assert known == REF


def test_without_one_the_weak_identity_is_that_of_what_the_manifest_says() -> None:
    found = identity_of("d", REF)
    assert found == ObjectIdentity(weak_identity("d", "data/0123/7", "etag", 1001, 0xDEADBEEF), is_strong=False)
    said = b"stoker weak identity 1" + b"".join(
        struct.pack("<Q", len(part)) + part for part in (b"d", b"data/0/1", b"", b"1000", b"7")
    )
    assert weak_identity("d", "data/0/1", "", 1000, 7) == hashlib.sha256(said).digest()[:16]
    assert weak_identity("d", "data/0/1", "", 1000, 7).hex() == "f44e87190ddb2895479900f8f43c9ab3"  # for ever


def test_weak_identities_differ_where_anything_does_and_where_texts_only_join_alike() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"dataset": "e"},
        {"key": "data/0/2"},
        {"tag": ""},
        {"size_bytes": 1, "crc32c": 11},
        {"size_bytes": 12},
        {"crc32c": 2},
        {"dataset": "dd", "key": "ata/0/1"},
        {"key": "data/0/1t", "tag": ""},
    ]
    assert len({weak_identity(**{**WEAK, **change}) for change in changes}) == len(changes)


@pytest.mark.parametrize("size_bytes", [0, 64 << 10, (64 << 10) + 1])
def test_only_what_takes_longer_than_a_thread_is_hashed_in_one(
    size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def hashing(data: bytes) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return sha256_128(data)

    monkeypatch.setattr(identity_module, "sha256_128", hashing)
    assert asyncio.run(compute_sha256_128(bytes(size_bytes))) == sha256_128(bytes(size_bytes))
    assert threads == [size_bytes <= 64 << 10]


@pytest.mark.parametrize("rows", [(), (0,), (1, 2), (0, 1, 2)])
def test_a_manifest_comes_back_with_the_identities_that_it_had(rows: tuple[int, ...]) -> None:
    manifest = add_identities(manifest_of(["f" * 32] * 3), rows)
    data = manifest.to_bytes()
    back = Manifest.from_bytes(data)
    wanted = [sha256_128(b"%d" % row) if row in rows else None for row in range(3)]
    assert [back.rows.strong_identity(row) for row in range(3)] == wanted
    assert [back.ref(row).sha256_128 for row in range(3)] == wanted
    assert [each.sha256_128 for _, each in back.records()] == wanted
    assert (back.rows.strong_identity_count, back.to_bytes(), back.file_bytes) == (len(rows), data, len(data))
    tensors = [tensor.name for tensor in tensorfile.parse_header(data, len(data)).tensors]
    assert tensors[-1] == ("sha256_128" if rows else "crc32c")


def test_without_any_identity_a_manifest_is_that_of_an_earlier_release() -> None:
    manifest = manifest_of(["f" * 32] * 3)
    unknown = replace(manifest, rows=replace(manifest.rows, sha256_128=np.zeros((3, 16), np.uint8)))
    assert unknown.to_bytes() == manifest.to_bytes()
    assert remove_identities(add_identities(manifest, (1,))).to_bytes() == manifest.to_bytes()
    assert Manifest.from_bytes(manifest.to_bytes()).rows.sha256_128 is None


@pytest.mark.parametrize(("first", "second"), list(itertools.product([(), (1,), (0, 1, 2)], repeat=2)))
def test_rows_that_are_joined_or_left_out_keep_their_identities(
    first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    tags = ["f" * 32] * 3
    other = PackRun("f" * 16, 0, 3)
    manifest = add_identities(manifest_of(tags), first)
    joined = manifest.append_runs(add_identities(manifest_of(tags), second).rows, other)
    wanted = [sha256_128(b"%d" % row) if row in rows else None for rows in (first, second) for row in range(3)]
    assert [joined.rows.strong_identity(row) for row in range(6)] == wanted
    left = joined.remove_runs([PackRun(manifest.runs[0].run, 6, 1), PackRun(other.run, 0, 1)])
    assert [left.rows.strong_identity(row) for row in range(4)] == [wanted[0], wanted[2], wanted[4], wanted[5]]


@pytest.mark.parametrize("wrong", [np.zeros((2, 16), np.uint8), np.zeros((3, 32), np.uint8), np.ones((3, 4), "<u4")])
def test_identities_of_another_shape_are_a_format_error(wrong: Any) -> None:
    manifest = manifest_of(["f" * 32] * 3)
    lying = replace(manifest, rows=replace(manifest.rows, sha256_128=wrong + 1))
    with pytest.raises(FormatError, match="sha256_128"):
        Manifest.from_bytes(lying.to_bytes())


def test_a_manifest_s_identities_are_views_of_what_it_was_read_from() -> None:
    data = np.frombuffer(add_identities(manifest_of(["f" * 32] * 3), (0,)).to_bytes(), np.uint8)
    hashes = Manifest.from_bytes(data.data).rows.sha256_128
    assert hashes is not None
    assert np.shares_memory(data, hashes)
