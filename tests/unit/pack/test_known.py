"""Names that a data set knows: as a set of Python's would have it, in a sixth of the memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker._pack.merge import DedupIndex, collect_source_names
from stoker._pack.record import SOURCE_HASH_BYTES, SOURCE_RETENTION_SECONDS, PackRecord, empty_sources, hash_run
from support.memory import memory_of

# Zeros at either end and in between are what a comparison of texts could get wrong.
NAMES = st.lists(
    st.lists(st.sampled_from([0, 1, 255]), min_size=SOURCE_HASH_BYTES, max_size=SOURCE_HASH_BYTES), max_size=12
)


def array(names: list[list[int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.array(names, np.uint8).reshape(-1, SOURCE_HASH_BYTES)


@given(NAMES, NAMES)
def test_what_is_known_is_what_a_set_would_have(there: list[list[int]], asked: list[list[int]]) -> None:
    whole = {tuple(name) for name in there}
    assert DedupIndex(array(there)).contains(array(asked)).tolist() == [tuple(name) in whole for name in asked]


@settings(max_examples=40)
@given(NAMES, st.lists(NAMES, max_size=3))
def test_a_name_is_taken_once(there: list[list[int]], groups: list[list[list[int]]]) -> None:
    known, whole = DedupIndex(array(there)), {tuple(name) for name in there}
    for group in groups:
        expected = []
        for name in map(tuple, group):
            expected.append(name not in whole)
            whole.add(name)
        assert known.add_new(array(group)) == expected


def record(run: str, sources: list[list[int]], committed_seconds: int) -> PackRecord:
    state = "committed" if committed_seconds else "complete"
    return PackRecord(
        run=run,
        identity="0" * 64,
        source="s",
        mode="deferred",
        state=state,
        sources=array(sources),
        committed_seconds=committed_seconds,
    )


def test_a_record_is_remembered_for_its_time_and_one_without_names_by_its_own() -> None:
    a, b = [1] * SOURCE_HASH_BYTES, [2] * SOURCE_HASH_BYTES
    records = [record("a" * 16, [a], 1000), record("b" * 16, [], 1500), record("c" * 16, [b], 0)]
    everything = [bytes(a), bytes(hash_run("b" * 16)), bytes(b)]
    assert list(map(bytes, collect_source_names(records, 1000 + SOURCE_RETENTION_SECONDS))) == everything
    assert list(map(bytes, collect_source_names(records, 1001 + SOURCE_RETENTION_SECONDS))) == everything[1:]
    assert list(map(bytes, collect_source_names(records, 1501 + SOURCE_RETENTION_SECONDS))) == everything[2:]
    assert collect_source_names([], 0).tobytes() == empty_sources().tobytes()


@pytest.mark.parametrize("count", [200_000])
def test_a_name_takes_as_many_bytes_as_it_has(count: int) -> None:
    names = np.random.default_rng(1).integers(0, 256, (count, SOURCE_HASH_BYTES), np.uint8)
    assert memory_of(lambda: DedupIndex(names)).held_bytes < 17 * count
    known = DedupIndex(names)
    assert known.contains(names[::1000]).all()
    assert not known.contains(names[:1, ::-1]).any()
