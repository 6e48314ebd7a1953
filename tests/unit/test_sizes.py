from __future__ import annotations

import pytest

from stoker._base.sizes import format_bytes, parse_bytes, parse_rate
from stoker.errors import ConfigError
from support.cases import for_each


@for_each(
    ("text", "size_bytes"),
    [
        ("8MiB", 8 << 20),
        ("8MB", 8_000_000),
        ("16_777_216", 1 << 24),
        ("0", 0),
        ("1.5 GiB", 3 << 29),
        (" 512 mb ", 512_000_000),
        ("1b", 1),
        ("0.1KB", 100),
        ("9007199254740993", 2**53 + 1),
        ("1PiB", 1 << 50),
        (4096, 4096),
    ],
)
def test_a_size_is_read_exactly(text: str | int, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@for_each("text", ["", "8M", "-1", -1, True, "1e9", "MiB", "8 MiB 3", "٨MiB", "1.", "nan", "9" * 100])
def test_what_is_not_a_size_is_refused(text: str | int) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (8 << 20, "8.00 MiB"),
        (100 << 20, "100 MiB"),
        (1023 << 20, "1.00 GiB"),
        (12.34 * 2**30, "12.3 GiB"),
    ],
)
def test_a_size_is_printed_with_three_digits(size_bytes: float, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("10Gbit", 1.25e9),
        ("10 Gbit/s", 1.25e9),
        ("1.5 mbit", 187_500.0),
        ("8bit/s", 1.0),
        ("400MiB/s", 400 * 2.0**20),
        ("1.25GB", 1.25e9),
        ("0", 0.0),
        (1000, 1000.0),
    ],
)
def test_a_rate_is_read_in_bytes_or_bits_a_second(text: str | int, bytes_per_second: float) -> None:
    assert parse_rate(text) == bytes_per_second


@for_each("text", ["", "10G", "10Gb", "1 mb/s", "-1Gbit", -1, True, "Gbit", "1Gbit/min", "/s", "1" * 50 + "Gbit"])
def test_what_is_not_a_rate_is_refused(text: str | int) -> None:
    with pytest.raises(ConfigError, match="not a rate; write for example 10Gbit"):
        parse_rate(text)
