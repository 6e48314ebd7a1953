"""CRC-32C (Castagnoli), the checksum of all data that stoker stores."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import google_crc32c
import numpy as np

_POLYNOMIAL = 0x82F63B78  # reflected


def _google_crc32c(data: bytes | bytearray | memoryview, value: int) -> int:
    # The C function accepts only buffers without a release hook, such as an array view of the same bytes.
    return int(google_crc32c.extend(value, np.frombuffer(data, np.uint8))) if len(data) else value


_extend: Callable[[bytes | bytearray | memoryview, int], int] = _google_crc32c


def use_awscrt() -> bool:
    """Compute checksums with awscrt from now on, if it is installed; return whether it is.

    It reads bytes that are in no cache of the processor at 12 GB/s, google-crc32c at 7, and other threads run
    meanwhile. Importing it takes 30 ms, which functions that live for a second do without.
    """
    global _extend
    try:
        from awscrt import checksums
    except ImportError:
        return False
    _extend = checksums.crc32c
    return True


def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Return the CRC-32C of ``data`` appended to bytes with the checksum ``value`` (default 0: no bytes).

    ``data`` is any C-contiguous buffer; it is not copied.
    """
    return _extend(data, value)


def combine_crc32c(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32C of two concatenated byte strings from the checksum of each and the second's length.

    A checksum is the remainder of a polynomial over GF(2); each byte that follows multiplies it by x**8.
    """
    return _multiply(_shift(second_bytes), first) ^ second


@lru_cache(maxsize=256)  # the parts of one object have few sizes
def _shift(size_bytes: int) -> int:
    """Return x**(8 size_bytes), reflected."""
    power, shift = 1 << 23, 1 << 31  # x**8 and 1
    while size_bytes:
        if size_bytes & 1:
            shift = _multiply(power, shift)
        power = _multiply(power, power)
        size_bytes >>= 1
    return shift


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials modulo that of CRC-32C, all reflected."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
