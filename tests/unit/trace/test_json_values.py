"""Values of a list are read one after the other: whole ones, from any file, in little memory."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from stoker._trace.recording import read_values
from stoker.errors import ConfigError
from support.memory import memory_of

VALUES = [{"a": 'é"\\]', "b": [1, -2.5e3, True, None]}, {"c": {"d": "x,]"}}, 7, 0.25, "]", [], {}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.json"


def values(path: Path, data: str | bytes) -> list[Any]:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return list(read_values(path))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_list_is_read_however_it_is_laid_out(path: Path, indent: int | None, ascii_only: bool) -> None:
    assert values(path, json.dumps(VALUES, indent=indent, ensure_ascii=ascii_only)) == VALUES


def test_the_list_of_events_of_an_object_is_read(path: Path) -> None:
    text = json.dumps({"unit": 'ms "traceEvents": [1]', "x": [{}] * 9000, "traceEvents": VALUES, "z": 1})
    assert values(path, text) == VALUES


def test_values_one_a_line_are_read(path: Path) -> None:
    assert values(path, "\n".join(map(json.dumps, VALUES))) == VALUES
    assert values(path, "0.25\n\n0.5") == [0.25, 0.5]


@pytest.mark.parametrize("text", ["", " \n", "[]", "[\n\n]\n"])
def test_a_list_may_be_empty(path: Path, text: str) -> None:
    assert values(path, text) == []


def test_values_are_whole_wherever_the_parts_that_are_read_end(path: Path) -> None:
    """Of some hundred thousand characters, so that it takes several readings."""
    many = [{"number": number, "text": "ab" * (number % 5)} for number in range(10_000)] + [12345] * 20_000
    assert values(path, json.dumps(many)) == many


def test_a_list_that_is_cut_off_anywhere_has_what_is_whole(path: Path) -> None:
    text = json.dumps([{"a": "é\n", "b": [False, 1e-5, None]}, {"c": -0.5}])
    first = text.index("}") + 1
    for end in range(2, len(text)):
        expected = json.loads(text)[: (end >= first) + (end >= len(text) - 1)]
        assert values(path, text[:end]) == expected, text[:end]


def test_a_character_that_is_cut_off_is_left_out(path: Path) -> None:
    assert values(path, '[{"a": 1}, {"é'.encode()[:-1]) == [{"a": 1}]


def test_a_compressed_file_is_read_as_far_as_it_goes(path: Path) -> None:
    many = [{"number": number} for number in range(50_000)]
    data = gzip.compress(json.dumps(many).encode())
    assert values(path, data) == many
    found = values(path, data[: len(data) // 2])
    assert 1000 < len(found) < len(many)
    assert found == many[: len(found)]


def test_a_pipe_is_read(path: Path) -> None:
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text(json.dumps(VALUES)))
    writer.start()
    assert list(read_values(path)) == VALUES
    writer.join()


@pytest.mark.parametrize(
    "data",
    [
        "hello there", "[hello, there]", '[{"a" 1}, {"a": 1}, {"a": 1}]', '[\n{"ph":"M"},\n{"ph"\n{"ph":"M"},\n',
        "[NaN, 1]", "[Infinity, 1]", "[" * 100_000, '{"a":' * 100_000, "[" + "9" * 5000 + ", 1]",
        '["' + "x" * (2 << 20), '[{"a": "' + "\\n" * (1 << 20) + '"}]', '["\n", 1, 2, 3, 4]',
        b"\xff\xfe", b"\x00" * 100_000, b'[1, "\xff", 2]', b"\x1f\x8b\x08 something else", b"\x1f\x8b" + bytes(99),
    ],
)  # fmt: skip
def test_what_is_no_list_is_refused(path: Path, data: str | bytes) -> None:
    with pytest.raises(ConfigError, match=r"x\.json is not"):
        values(path, data)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_a_file_without_an_end_is_refused(device: str) -> None:
    if not Path(device).exists():
        pytest.skip(f"needs {device}")
    with pytest.raises(ConfigError, match=f"{device} is not"):
        list(read_values(Path(device)))


@pytest.mark.parametrize("name", [".", "none", "x\0y"])
def test_what_cannot_be_opened_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read|is not a list"):
        list(read_values(tmp_path / name))


def test_memory_does_not_grow_with_the_file(path: Path) -> None:
    with path.open("w") as file:
        file.write("[\n")
        for number in range(60_000):
            file.write(f'{{"number": {number}, "text": "{"x" * 100}"}},\n')
    counts = []
    memory = memory_of(lambda: counts.append(sum(1 for _ in read_values(path))))
    assert set(counts) == {60_000}
    assert path.stat().st_size > 7_000_000
    assert memory.peak_bytes < 1_000_000


def test_a_compressed_bomb_is_refused_in_little_memory(path: Path) -> None:
    path.write_bytes(gzip.compress(b'["' + b"x" * (64 << 20), 1))

    def refuse() -> None:
        with pytest.raises(ConfigError, match="more than 1,048,576 characters"):
            list(read_values(path))

    assert memory_of(refuse).peak_bytes < 16 << 20
