"""Bytes from anywhere: a reader gives what it promises or a typed error; never a crash, a hang or a large allocation.

Hostile inputs are drawn from a seed, ``support.fuzzed`` says how, and what each reader promises. Where the readers
refuse is counted: every ``raise`` in them must be reached, so no kind of mutation dies before it gets where it is meant
to. The same readers run under a coverage-guided fuzzer in ``tests/fuzz``.
"""

from __future__ import annotations

import ast
import inspect
import json
import random
import struct
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stoker._format.manifest import Manifest
from stoker._format.supersample import Head, SuperSample
from stoker.errors import FormatError
from support.cases import for_each
from support.fuzzed.files import manifests, super_samples
from support.fuzzed.reader import Outcome, Place, Reader
from support.fuzzed.registry import READERS
from support.memory import memory_of

INPUTS = {
    "framing": 1500,
    "head": 2000,
    "super-sample": 2000,
    "manifest": 4200,
    "pack record": 2400,
    "schema": 2000,
    "loader state": 1500,
    "refusal of S3": 1250,
    "refusal of GCS": 1250,
    "object of GCS": 1000,
    "frames of the warm tier": 1000,
    "handshake of the warm tier": 1500,
    "image": 1000,
}


def allowed_bytes(data: bytes) -> int:
    """Return what reading may take: JSON's objects are up to 30 times their text, and there are two of the header."""
    return 64 * len(data) + (1 << 18)


def raises_of(function: Callable[..., object]) -> Iterator[tuple[str, range]]:
    """Yield file and lines of each ``raise`` of an error in a function; a bare ``raise`` is none of its own."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    lines, first = inspect.getsourcelines(function)
    for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):
        if isinstance(node, ast.Raise) and node.exc is not None:
            assert node.end_lineno is not None
            yield inspect.getfile(function), range(first + node.lineno - 1, first + node.end_lineno)


def unreached(reader: Reader, places: Counter[Place]) -> list[str]:
    """Return the ``raise`` statements that no input has reached."""
    return [
        f"{file}:{lines.start}"
        for function in reader.refusing
        for file, lines in raises_of(function)
        if not any(places[file, line] for line in lines)
    ]


@pytest.mark.parametrize("name", READERS)
def test_a_hostile_input_is_read_or_refused_for_every_reason_there_is(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, rng, started = READERS[name], random.Random(7), time.perf_counter()
    seeds = reader.seeds()
    kinds: Counter[str] = Counter()
    places: Counter[Place] = Counter()
    for number in range(INPUTS[name]):
        data = reader.mutate(rng.choice(seeds), seeds, rng)
        outcome, peak = outcome_of(reader, data, number, enough_bytes=allowed_bytes(data))
        assert peak <= allowed_bytes(data), f"input {number} of {len(data)} bytes took {peak}"
        kinds[outcome.kind] += 1
        places.update(set(outcome.places))
    with capsys.disabled():
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        seconds = time.perf_counter() - started
        print(f"\n{name}: {INPUTS[name]} inputs in {seconds:.1f} s, refused at {len(places)} places: {counts}", end="")
    assert kinds.keys() == {*reader.kinds, *(error.__name__ for error in reader.errors)}
    assert unreached(reader, places) == []


def outcome_of(reader: Reader, data: bytes, number: int = 0, *, enough_bytes: int = 0) -> tuple[Outcome, int]:
    """Return how reading ends, and the most memory that it took."""
    outcomes: list[Outcome] = []
    try:
        memory = memory_of(lambda: outcomes.append(reader.outcome(data)), enough_bytes=enough_bytes)
    except Exception as error:
        error.add_note(f"input {number}, {len(data)} bytes: {data[:2000]!r}")
        raise
    return outcomes[-1], memory.peak_bytes


def test_there_are_many_inputs_and_a_reason_to_refuse_in_each_function_listed() -> None:
    assert sum(INPUTS.values()) >= 20_000
    assert all(list(raises_of(function)) for reader in READERS.values() for function in reader.refusing)


@for_each("name", READERS)
def test_what_is_mutated_was_readable(name: str) -> None:
    reader = READERS[name]
    assert {reader.read(seed) for seed in reader.seeds()} <= set(reader.kinds)


@pytest.mark.parametrize("data", super_samples()[:1])
def test_a_super_sample_cut_anywhere_is_a_format_error(data: bytes) -> None:
    for end in range(len(data)):
        with pytest.raises(FormatError):
            SuperSample(data[:end])
        with pytest.raises(FormatError):
            SuperSample(data[end + 1 :])


@pytest.mark.parametrize("data", manifests())
def test_a_manifest_cut_anywhere_is_a_format_error(data: bytes) -> None:
    for end in range(len(data)):
        with pytest.raises(FormatError):
            Manifest.from_bytes(data[:end])
        with pytest.raises(FormatError):
            Manifest.from_bytes(data[end + 1 :])


@pytest.mark.parametrize("data", super_samples())
def test_a_head_is_opened_from_any_prefix_that_holds_it_and_refused_from_any_other(data: bytes) -> None:
    needed = SuperSample(data).head.head_bytes
    for end in range(0, len(data), 7):
        if end >= needed:
            assert Head.parse(data[:end], len(data)).head_bytes == needed
        else:
            with pytest.raises(FormatError):
                Head.parse(data[:end], len(data))


@pytest.mark.parametrize("name", ["super-sample", "manifest"])
@pytest.mark.parametrize("claim", [2**20, 2**31, 2**40, 2**47, 2**63])
def test_a_huge_count_allocates_nothing(name: str, claim: int) -> None:
    original = READERS[name].seeds()[0]
    (length,) = struct.unpack_from("<Q", original)
    entries = json.loads(original[8 : 8 + length])
    for tensor in entries.keys() - {"__metadata__"}:
        for field, value in (("shape", [claim]), ("shape", [claim, 0]), ("data_offsets", [0, claim])):
            text = json.dumps({**entries, tensor: {**entries[tensor], field: value}}).encode()
            lying = struct.pack("<Q", len(text)) + text + original[8 + length :]
            most_bytes = 8 * len(lying) + 100_000
            outcome, peak = outcome_of(READERS[name], lying, enough_bytes=most_bytes)
            assert outcome.kind == "FormatError"
            assert peak <= most_bytes


LARGE_HEADERS = {
    "objects": b'{"a":[' + b",".join([b"{}"] * 340_000) + b"]}",
    "pairs": b'{"a":[' + b",".join([b'{"":0}'] * 145_000) + b"]}",
    "lists": b'{"a":[' + b",".join([b"[[]]"] * 200_000) + b"]}",
    "names": b"{" + b",".join(b'"%x":0' % number for number in range(100_000)) + b"}",
    "texts": b'{"a":[' + b",".join(b'"%x"' % number for number in range(115_000)) + b"]}",
    "tensors": b"{"
    + b",".join(b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % number for number in range(17_000))
    + b"}",
    "metadata": b'{"__metadata__":{' + b",".join(b'"%x":""' % number for number in range(90_000)) + b"}}",
    "digits": b'{"a":[' + b",".join([b"9" * 4300] * 240) + b"]}",
    "depth": b'{"a":' + b"[" * 1_000_000,
    "escapes": b'{"a":"' + rb"\ud83d\ude00" * 80_000 + b'"}',
}


@pytest.mark.parametrize(
    ("name", "header"),
    [*(("super-sample", header) for header in LARGE_HEADERS), ("manifest", "tensors"), ("manifest", "metadata")],
)
def test_the_largest_header_takes_no_more_memory_than_stated(name: str, header: str) -> None:
    text = LARGE_HEADERS[header]
    assert len(text) <= 1 << 20
    data = struct.pack("<Q", len(text)) + text
    outcome, peak = outcome_of(READERS[name], data, enough_bytes=allowed_bytes(data))
    assert outcome.kind in ("FormatError", "read")
    assert peak <= allowed_bytes(data)


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xff" * 8)
@example(b"\0" * 8)
@example(struct.pack("<Q", 2) + b"{}")
def test_arbitrary_bytes_are_a_format_error(data: bytes) -> None:
    for whole in (data, struct.pack("<Q", len(data)) + data):
        for name in ("super-sample", "head", "manifest", "pack record"):
            assert READERS[name].outcome(whole).kind == "FormatError"
