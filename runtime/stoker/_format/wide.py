"""Reading single tensors of a wide super-sample: one with many small columns, which are all in its head.

The manifest has the size of the head, and schema and sample count determine the layout of it, so the position of every
fixed column is known before anything is read. The header has the checksum of each of them, and is itself verified
by the checksum of the object: that of a concatenation follows from the checksums of its parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from stoker._base.checksum import combine_crc32c, crc32c
from stoker._format.schema import Schema
from stoker._format.supersample import COLUMN_CHECKSUMS, is_small, tensors_of_fixed_columns
from stoker._format.tensorfile import PREFIX_BYTES
from stoker.abc import ObjectRef
from stoker.errors import ChecksumError

_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLayout:
    """Positions of the fixed columns of a super-sample.

    Attributes:
        header_bytes: size of the safetensors header; offset of the data section.
        ranges: column → offsets of its first byte in the object, and behind its last; in the schema's order.
        schema_text: JSON text of the schema in the header.
    """

    header_bytes: int
    ranges: Mapping[str, tuple[int, int]]
    schema_text: str


@lru_cache(maxsize=64)  # super-samples of one size have one layout
def fixed_layout(schema: Schema, samples: int, head_bytes: int) -> FixedLayout:
    """Return the positions of the fixed columns of a super-sample, from its entry in the manifest."""
    tensors = tensors_of_fixed_columns(schema, samples)
    in_head = [tensor for tensor in tensors if tensor.name not in schema or is_small(schema[tensor.name])]
    header_bytes = head_bytes - in_head[-1].end
    by_name = {tensor.name: (header_bytes + tensor.start, header_bytes + tensor.end) for tensor in tensors}
    ranges = {name: by_name[name] for name, column in schema.items() if column.is_fixed}
    return FixedLayout(header_bytes=header_bytes, ranges=ranges, schema_text=schema.to_json())


def parse_checksums(header: memoryview, layout: FixedLayout, ref: ObjectRef) -> Mapping[str, int] | None:
    """Return fixed column → CRC-32C of its bytes, from the header alone; None if the header does not have them.

    Args:
        header: the safetensors header with its length prefix.
        layout: layout of the super-sample.
        ref: the super-sample; the header is verified by its checksum.

    Raises:
        ChecksumError: the header is not the one that was packed, or does not match the layout.
    """
    try:
        metadata = json.loads(str(header[PREFIX_BYTES:], "utf-8"))["__metadata__"]
        data_crc32c = int(metadata["crc32c"], 16)
        text = metadata.get(COLUMN_CHECKSUMS)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ChecksumError(f"{ref.key}: its header cannot be read ({str(error)[:100]})") from None
    combined = combine_crc32c(crc32c(header), data_crc32c, ref.size_bytes - len(header))
    if combined != ref.crc32c:
        raise ChecksumError(
            f"{ref.key}: its header and data have crc32c {combined:08x}, the manifest says {ref.crc32c:08x}"
        )
    if text is None:
        return None
    if metadata.get("schema") != layout.schema_text or not _is_checksums(text, len(layout.ranges)):
        raise ChecksumError(
            f"{ref.key}: its header does not have the manifest's schema, or not a checksum of each column"
        )
    values = (int(text[start : start + _DIGITS], 16) for start in range(0, len(text), _DIGITS))
    return dict(zip(layout.ranges, values, strict=True))


def _is_checksums(text: object, count: int) -> bool:
    return isinstance(text, str) and re.fullmatch(f"[0-9a-f]{{{_DIGITS * count}}}", text, re.ASCII) is not None
