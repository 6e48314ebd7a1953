"""How the memory for random access is spent, and the least that works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from stoker._base.sizes import format_bytes
from stoker._format.manifest import Manifest
from stoker._format.schema import Schema
from stoker.errors import BudgetError

__all__ = ["SampleMemory", "head_bytes_held"]

_HEAD_OBJECT_BYTES = 1536
_TENSOR_OBJECT_BYTES = 256
"""What an open head takes besides its bytes: measured, and rounded up. It knows where each of its tensors starts."""


def head_bytes_held(schema: Schema, head_bytes: int) -> int:
    """Return what a head of ``head_bytes`` takes when it is open."""
    tensors = 1 + len(schema) + sum(not column.is_fixed for column in schema.values())
    return head_bytes + _HEAD_OBJECT_BYTES + _TENSOR_OBJECT_BYTES * tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMemory:
    """What random access may hold at a time, beside what it returns.

    Attributes:
        manifest_bytes: of the manifest and the index of its rows.
        hedge_slots: for hedged requests.
        slot_bytes: of one: the size of the largest super-sample.
        head_bytes: of heads, those in use and those that are kept.
        value_bytes: of values on their way.
    """

    manifest_bytes: int
    hedge_slots: int
    slot_bytes: int
    head_bytes: int
    value_bytes: int

    @classmethod
    def plan(cls, manifest: Manifest, hedge_slots: int, memory_bytes: int) -> Self:
        """Return how ``memory_bytes`` are spent: up to half of what is free on heads, the rest on values.

        Raises:
            BudgetError: one head, one super-sample and the hedges do not fit; names the figure that does.
        """
        manifest_bytes = manifest.file_bytes + 8 * (len(manifest) + 1)
        slot_bytes = manifest.largest_bytes
        largest_head_bytes = head_bytes_held(manifest.schema, int(manifest.rows.head_bytes.max()))
        free_bytes = memory_bytes - manifest_bytes - hedge_slots * slot_bytes
        if free_bytes < largest_head_bytes + slot_bytes:
            figure = memory_bytes - free_bytes + largest_head_bytes + slot_bytes
            raise BudgetError(
                f"memory {format_bytes(memory_bytes)} is too small for random access: a manifest of "
                f"{format_bytes(manifest_bytes)}, a super-sample of up to {format_bytes(slot_bytes)}, its head and "
                f"{hedge_slots} hedges must fit; give memory={figure} ({format_bytes(figure)})"
            )
        heads_bytes = head_bytes_held(manifest.schema, 0) * len(manifest) + int(
            manifest.rows.head_bytes.sum(dtype="i8")
        )
        head_bytes = max(largest_head_bytes, min(heads_bytes, free_bytes // 2, free_bytes - slot_bytes))
        return cls(
            manifest_bytes=manifest_bytes,
            hedge_slots=hedge_slots,
            slot_bytes=slot_bytes,
            head_bytes=head_bytes,
            value_bytes=free_bytes - head_bytes,
        )
