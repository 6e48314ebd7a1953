"""CRC-32C (Castagnoli), the checksum of all data that stoker stores."""

from __future__ import annotations

import google_crc32c
import numpy as np

_POLYNOMIAL = 0x82F63B78  # reflected


def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Return the CRC-32C of ``data`` appended to bytes with the checksum ``value`` (default 0: no bytes).

    ``data`` is any C-contiguous buffer; it is not copied. About 25 GB/s on large buffers, 0.3 µs on small ones.
    """
    # The C function accepts only buffers without a release hook, such as an array view of the same bytes.
    return int(google_crc32c.extend(value, np.frombuffer(data, np.uint8))) if len(data) else value


def combine_crc32c(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32C of two concatenated byte strings from the checksum of each and the second's length.

    A checksum is the remainder of a polynomial over GF(2); each byte that follows multiplies it by x**8.
    """
    power, shifted = 1 << 23, first  # x**8, reflected
    while second_bytes:
        if second_bytes & 1:
            shifted = _multiply(power, shifted)
        power = _multiply(power, power)
        second_bytes >>= 1
    return shifted ^ second


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials modulo that of CRC-32C, all reflected."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
