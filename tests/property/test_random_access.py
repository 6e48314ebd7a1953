"""Random access returns the packed values, for any schema, columns, memory and samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker import Array, Bytes, Column, Ragged, Schema, Text
from stoker._format.tensorfile import DTYPES
from stoker._memory.budget import SampleMemory, open_head_bytes
from support.packed_objects import packed_objects
from support.same import same
from support.sample_reading import AMPLE_BYTES, SampleBench
from support.supersamples import samples_of

shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(DTYPES))
columns: st.SearchStrategy[Column] = st.one_of(
    st.just(Bytes()),
    st.just(Text()),
    st.builds(lambda dtype, shape: Array(dtype, shape), dtypes, shapes),
    st.builds(lambda dtype, shape: Ragged(dtype, shape), dtypes, shapes),
)


@dataclass(frozen=True)
class Case:
    schema: Schema
    counts: list[int]
    columns: list[str] | None
    calls: list[list[int]]
    is_tight: bool
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    schema = Schema(draw(st.dictionaries(st.sampled_from("abcdef"), columns, min_size=1)))
    counts = draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    names = draw(st.none() | st.lists(st.sampled_from(list(schema)), min_size=1, unique=True))
    calls = draw(st.lists(st.lists(st.integers(0, sum(counts) - 1), max_size=30), min_size=1, max_size=4))
    return Case(schema, counts, names, calls, draw(st.booleans()), draw(st.integers(0, 1 << 16)))


@given(cases())
def test_requested_samples_are_the_packed_ones(case: Case) -> None:
    samples = samples_of(case.schema, sum(case.counts), case.seed)
    manifest, objects = packed_objects(case.schema, samples, case.counts)
    memory_bytes = AMPLE_BYTES
    if case.is_tight:
        head_bytes = open_head_bytes(case.schema, int(manifest.rows.head_bytes.max()))
        manifest_bytes = SampleMemory.plan(manifest, 0, AMPLE_BYTES).manifest_bytes
        memory_bytes = manifest_bytes + head_bytes + manifest.largest_bytes
    reading = SampleBench(manifest, objects, columns=case.columns, memory_bytes=memory_bytes, hedge=False)
    names = case.columns or list(case.schema)
    for indices in case.calls:
        before = len(reading.store.sent_ranges)
        wanted = [{name: samples[number][name] for name in names} for number in indices]
        assert same(reading.samples(*indices), wanted)
        asked = reading.store.sent_ranges[before:]
        touched = np.unique(np.searchsorted(np.cumsum(case.counts), indices, "right")).tolist()
        assert {key for key, _, _ in asked} <= {manifest.key(row) for row in touched}
        for key, body in objects.items():
            ends = [0, *(end for where, _, end in sorted(asked) if where == key)]
            starts = [*(start for where, start, _ in sorted(asked) if where == key), len(body)]
            assert all(end <= start for end, start in zip(ends, starts, strict=True)), "no byte is read twice"
        assert reading.leaves_nothing()
