"""CRC-32C (Castagnoli), the checksum of every byte that stoker stores."""

from __future__ import annotations

import google_crc32c
import numpy as np

__all__ = ["crc32c"]


def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Return the CRC-32C of ``data`` appended to bytes whose checksum is ``value`` (0: nothing yet).

    ``data`` is any C-contiguous buffer; it is not copied. About 25 GB/s on large buffers, 0.3 µs on small ones.
    """
    # The C function takes only buffers without a release hook: an array view of the same bytes is one.
    return int(google_crc32c.extend(value, np.frombuffer(data, np.uint8))) if len(data) else value
