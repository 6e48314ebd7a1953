from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from stoker._format import tensorfile
from stoker._format.manifest import Manifest, ManifestRows, PackRun, _checksum, object_key, version_key
from stoker._format.pack_shuffle import PackShuffle
from stoker._format.supersample import MAX_OBJECT_BYTES, SuperSampleRecord
from stoker._format.tensorfile import DTYPES, DType
from stoker.abc import ObjectRef
from stoker.errors import ChecksumError, FormatError
from support.cases import for_each
from support.supersamples import EVERY_KIND, RUN, manifest_of

TAGS = {
    "hexadecimal": ["0123456789abcdef" * 2, "f" * 32, "0" * 32],
    "generations": ["1732147200123456", "1", "0"],
    "text": ['"abc-3"', "", "ETag", "0" * 31],
    "unknown": ["", "", ""],
    "mixed": ["f" * 32, "17", ""],
    "upper case": ["F" * 32, "E" * 32],
    "leading zero": ["01", "2"],
    "too large a generation": [str(1 << 63), "1"],
}


def equal(first: Manifest, second: Manifest) -> bool:
    return (first.to_bytes(), first.dataset, first.version, first.schema, first.runs) == (
        second.to_bytes(),
        second.dataset,
        second.version,
        second.schema,
        second.runs,
    )


@pytest.mark.parametrize("tags", TAGS.values(), ids=TAGS)
def test_a_manifest_comes_back_with_every_row_and_tag(tags: list[str]) -> None:
    manifest = manifest_of(tags)
    back = Manifest.from_bytes(manifest.to_bytes())
    assert equal(back, manifest)
    for row, tag in enumerate(tags):
        assert back.rows.record(row, ordinal=row) == manifest.rows.record(row, ordinal=row)
        assert back.ref(row) == ObjectRef(
            key=f"data/{RUN}/{5 + row:08d}", size_bytes=4000 + row, crc32c=2**32 - 1 - row, tag=tag
        )


@pytest.mark.parametrize("tags", TAGS.values(), ids=TAGS)
def test_safetensors_reads_a_manifest_with_equal_columns(tags: list[str]) -> None:
    manifest = manifest_of(tags)
    arrays = safetensors.numpy.load(manifest.to_bytes())
    for name in ("size_bytes", "samples", "head_bytes", "head_crc32c", "crc32c"):
        assert arrays[name].dtype == np.uint32
        assert np.array_equal(arrays[name], getattr(manifest.rows, name))
    assert arrays["run_id"].tolist() == [int(RUN, 16)]
    assert (arrays["run_first_number"].tolist(), arrays["run_rows"].tolist()) == ([5], [len(tags)])


@pytest.mark.parametrize("tags", TAGS.values(), ids=TAGS)
def test_the_size_of_the_file_is_known_without_making_it(tags: list[str]) -> None:
    assert manifest_of(tags).file_bytes == len(manifest_of(tags).to_bytes())


def test_a_thousand_rows_take_less_than_64_kb() -> None:
    assert len(manifest_of(["f" * 32] * 1000).to_bytes()) < 40_000


def test_totals_are_those_of_the_rows() -> None:
    manifest = manifest_of([""] * 4)
    assert (len(manifest), manifest.samples) == (4, 3 + 4 + 5 + 6)
    assert (manifest.size_bytes, manifest.largest_bytes) == (16_006, 4003)


def test_totals_beyond_32_bits_do_not_wrap() -> None:
    packed = SuperSampleRecord(ordinal=0, size_bytes=2**32 - 1, samples=2**31, head_bytes=9, head_crc32c=0, crc32c=0)
    rows = ManifestRows.of([packed] * 8)
    manifest = Manifest(dataset="d", version=1, schema=EVERY_KIND, rows=rows, runs=(PackRun(RUN, 0, 8),))
    assert (manifest.samples, manifest.size_bytes) == (2**34, 8 * (2**32 - 1))


def test_keys_are_computed_from_the_runs() -> None:
    manifest = manifest_of([""] * 3)
    more = manifest.append_runs(manifest.rows, PackRun("f" * 16, 0, 3))
    assert [more.key(row) for row in range(6)] == [
        *(object_key(RUN, number) for number in (5, 6, 7)),
        *(object_key("f" * 16, number) for number in (0, 1, 2)),
    ]
    for row in (-1, 6):
        with pytest.raises(IndexError, match="out of range: the manifest has 6 rows"):
            more.key(row)


def test_a_run_without_rows_changes_no_key() -> None:
    manifest = manifest_of([""] * 2)
    runs = (PackRun("a" * 16, 0, 0), *manifest.runs, PackRun("b" * 16, 0, 0))
    with_empty = Manifest(dataset="d", version=1, schema=EVERY_KIND, rows=manifest.rows, runs=runs)
    assert [with_empty.key(row) for row in range(2)] == [manifest.key(row) for row in range(2)]


def test_keys_sort_in_the_order_of_their_numbers() -> None:
    assert (object_key(RUN, 12), version_key(7)) == (f"data/{RUN}/00000012", "manifests/00000007.safetensors")
    assert sorted(map(version_key, (10, 9, 100))) == list(map(version_key, (9, 10, 100)))


@for_each("first", TAGS.values(), ids=TAGS)
@for_each("second", TAGS.values(), ids=TAGS)
def test_an_appended_run_keeps_every_tag_whatever_their_kinds(first: list[str], second: list[str]) -> None:
    manifest = manifest_of(first).append_runs(manifest_of(second).rows, PackRun("f" * 16, 0, len(second)))
    back = Manifest.from_bytes(manifest.to_bytes())
    assert back.version == 2
    assert [back.rows.tag(row) for row in range(len(back))] == [*first, *second]


def test_a_manifest_s_arrays_are_views_of_what_it_was_read_from() -> None:
    data = np.frombuffer(manifest_of(["f" * 32] * 3).to_bytes(), np.uint8)
    manifest = Manifest.from_bytes(data.data)
    assert all(np.shares_memory(data, column) for column in (manifest.rows.samples, manifest.rows.tags))


@pytest.mark.parametrize("tags", [TAGS["hexadecimal"], TAGS["text"]], ids=["hexadecimal", "text"])
def test_any_flipped_bit_is_found(tags: list[str]) -> None:
    whole = bytearray(manifest_of(tags).to_bytes())
    for bit in range(0, len(whole) * 8, 3):
        whole[bit // 8] ^= 1 << bit % 8
        with pytest.raises((FormatError, ChecksumError)):
            Manifest.from_bytes(bytes(whole))
        whole[bit // 8] ^= 1 << bit % 8


Entries = dict[str, tuple[DType, np.ndarray[Any, Any]]]


def forged(
    manifest: Manifest, change: Callable[[Entries], object] = len, metadata: dict[str, str | None] | None = None
) -> bytes:
    """Return a file with changed arrays and metadata and a correct checksum: wrong content, not damage."""
    whole = manifest.to_bytes()
    header = tensorfile.parse_header(whole, len(whole))
    arrays = safetensors.numpy.load(whole)
    entries = {tensor.name: (tensor.dtype, arrays[tensor.name]) for tensor in header.tensors}
    change(entries)
    said: dict[str, str | None] = {**header.metadata, **(metadata or {})}
    kept = {name: text for name, text in said.items() if text is not None}
    tensors = tensorfile.lay_out((name, dtype, array.shape) for name, (dtype, array) in entries.items())
    data = b"".join(array.tobytes() for _, array in entries.values())
    if "crc32c" not in (metadata or {}):
        kept["crc32c"] = _checksum(kept, tensors, data)
    return tensorfile.encode_header(kept, tensors) + data


def put(name: str, values: Sequence[Any] | int, dtype: str = "uint32") -> Callable[[Entries], object]:
    array = np.array(values, DTYPES[dtype].holder)
    return lambda entries: entries.update({name: (DTYPES[dtype], array)})


def without(name: str) -> Callable[[Entries], object]:
    return lambda entries: entries.pop(name)


def test_an_unchanged_forgery_is_the_manifest() -> None:
    manifest = manifest_of([""] * 2)
    assert equal(Manifest.from_bytes(forged(manifest)), manifest)


def test_an_unknown_column_is_passed_by() -> None:
    manifest = manifest_of([""] * 2)
    assert equal(Manifest.from_bytes(forged(manifest, put("later", [1, 2, 3], "float64"))), manifest)


LIES: list[tuple[Callable[[Entries], object], str]] = [
    *((without(name), f"no '{name}'") for name in ("samples", "crc32c", "tag", "run_id", "run_rows")),
    (without("tag.offsets"), "tags are neither"),
    (put("samples", [3]), "not uint32 of one length"),
    (put("samples", 3), "not uint32 of one length"),
    (put("samples", [3, 4], "int32"), "not uint32 of one length"),
    (put("samples", [[3, 4]]), "not uint32 of one length"),
    (put("samples", [3, 0]), "without samples"),
    (put("samples", [3, 2**32 - 1]), "more samples than its head can describe"),
    (put("samples", [3, 34]), "more samples than its head can describe"),
    (put("head_bytes", [900, 2**32 - 1]), "head larger than itself"),
    (put("size_bytes", [4000, MAX_OBJECT_BYTES + 1]), "larger than any super-sample"),
    (put("tag", [1, 2], "uint16"), "text tags have the wrong"),
    (put("tag", [[1], [2]], "uint8"), "text tags have the wrong"),
    (put("tag", [255], "uint8"), "do not rise"),
    (put("tag.offsets", [0, 0], "int64"), "text tags have the wrong"),
    (put("tag.offsets", [0, 0, 1], "int64"), "do not rise"),
    (put("tag.offsets", [0, -1, 0], "int64"), "do not rise"),
    (put("tag.offsets", [0, 1 << 62, 0], "int64"), "do not rise"),
    (put("run_id", 1, "uint64"), "runs have the wrong"),
    (put("run_id", [1]), "runs have the wrong"),
    (put("run_rows", [1, 1]), "runs have the wrong"),
    (put("run_rows", [1]), "do not match its number of rows"),
    (put("run_rows", [3]), "do not match its number of rows"),
    (put("run_rows", [2**32 - 1]), "do not match its number of rows"),
]


@for_each(("change", "problem"), LIES, ids=[f"{i}-{lie[1]}" for i, lie in enumerate(LIES)])
def test_columns_that_lie_are_a_format_error(change: Callable[[Entries], object], problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        Manifest.from_bytes(forged(manifest_of([""] * 2), change))


def test_text_tags_with_bytes_before_the_first_are_a_format_error() -> None:
    def change(entries: Entries) -> None:
        put("tag", [65], "uint8")(entries)
        put("tag.offsets", [1, 1, 1], "int64")(entries)

    with pytest.raises(FormatError, match="do not rise"):
        Manifest.from_bytes(forged(manifest_of([""] * 2), change))


@pytest.mark.parametrize("tag", ["a\r\nHost: other", "\0", "\x1b[2J", "\x85", "ü"])
def test_a_tag_that_no_header_can_carry_is_a_format_error(tag: str) -> None:
    content = tag.encode()

    def change(entries: Entries) -> None:
        put("tag", list(content), "uint8")(entries)
        put("tag.offsets", [0, 0, len(content)], "int64")(entries)

    with pytest.raises(FormatError, match="not printable"):
        Manifest.from_bytes(forged(manifest_of([""] * 2), change))
    with pytest.raises(FormatError, match="not printable"):
        manifest_of([tag])


def test_a_tag_of_half_a_surrogate_pair_is_refused_before_it_is_written() -> None:
    with pytest.raises(FormatError, match="not printable"):
        manifest_of(["\udcff"])


def test_a_generation_of_more_digits_than_python_reads_is_kept_as_text() -> None:
    tags = ["9" * 5000, "1" * 19, "1" * 20]
    manifest = Manifest.from_bytes(manifest_of(tags).to_bytes())
    assert [manifest.rows.tag(row) for row in range(3)] == tags
    assert manifest.rows.concatenate(manifest.rows).tag(3) == tags[0]


@pytest.mark.parametrize(("numbers", "rows"), [([0, 0], [1, 1]), ([5, 4], [1, 2]), ([0, 1], [2, 1])])
def test_an_object_that_is_listed_twice_is_a_format_error(numbers: list[int], rows: list[int]) -> None:
    tags = [""] * sum(rows)
    runs = tuple(PackRun(RUN, first, count) for first, count in zip(numbers, rows, strict=True))
    with pytest.raises(FormatError, match="an object occurs twice"):
        replace(manifest_of(tags), runs=runs)

    def repeat(entries: Entries) -> None:
        put("run_id", [int(RUN, 16)] * 2, "uint64")(entries)
        put("run_first_number", numbers)(entries)
        put("run_rows", rows)(entries)

    with pytest.raises(FormatError, match="an object occurs twice"):
        Manifest.from_bytes(forged(manifest_of(tags), repeat))
    apart = (runs[0], replace(runs[1], run="f" * 16))
    assert len(Manifest.from_bytes(replace(manifest_of(tags), runs=apart).to_bytes())) == len(tags)


@for_each(
    ("metadata", "problem"),
    [
        ({"stoker_manifest": None}, "not a manifest"),
        ({"stoker_manifest": "2"}, "use a newer stoker"),
        ({"dataset": None}, "no 'dataset'"),
        ({"schema": None}, "no 'schema'"),
        ({"schema": "[]"}, "schema is not valid"),
        ({"schema": "[" * 100_000}, "schema is not valid"),
        ({"crc32c": None}, "no 'crc32c'"),
        *(({"version": text}, "not a positive integer") for text in ("0", "-1", "1_0", "٣", "", "1.0", "9" * 5000)),
        ({"version": None}, "no 'version'"),
        *(
            ({"shuffles": text}, "'shuffles' is not a list of permutations")
            for text in (
                "{}",
                "[1]",
                "[" * 100_000,
                '["abcd"]',
                f'[[7,"{RUN}",0,2]]',  # there is one run
                f'[[7,"{RUN}",1,1]]',
                f'[[-1,"{RUN}",0,1]]',
                f'[[{1 << 64},"{RUN}",0,1]]',
                f'[[true,"{RUN}",0,1]]',
                '[[7,"x",0,1]]',
            )
        ),
    ],
)
def test_missing_or_wrong_metadata_is_a_format_error(metadata: dict[str, str | None], problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        Manifest.from_bytes(forged(manifest_of([""] * 2), metadata=metadata))


def test_permutations_of_consecutive_runs_come_back_and_leave_with_their_runs() -> None:
    first, second = PackShuffle(7, "a" * 16), PackShuffle((1 << 64) - 1, "b" * 16)
    runs = tuple(PackRun(f"{number:016x}", 0, 1) for number in range(4))
    shuffles = {runs[0].run: first, runs[1].run: first, runs[3].run: second, "f" * 16: first}
    manifest = replace(manifest_of([""] * 4), runs=runs, shuffles=shuffles)
    found = Manifest.from_bytes(manifest.to_bytes())
    assert found.shuffles == {run: shuffle for run, shuffle in shuffles.items() if run != "f" * 16}
    assert manifest.file_bytes == len(manifest.to_bytes())
    assert found.remove_runs(runs[:1]).shuffles.keys() == {runs[1].run, runs[3].run}


@pytest.mark.parametrize("crc32c", ["00000000", "", "x", "0x1", "9" * 5000])
def test_a_checksum_that_differs_is_a_checksum_error(crc32c: str) -> None:
    with pytest.raises(ChecksumError, match="its header says") as found:
        Manifest.from_bytes(forged(manifest_of([""] * 2), metadata={"crc32c": crc32c}))
    assert len(str(found.value)) < 200


def test_a_manifest_of_nothing_is_a_format_error() -> None:
    with pytest.raises(FormatError, match="no super-sample"):
        Manifest.from_bytes(manifest_of([]).to_bytes())
