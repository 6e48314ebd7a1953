"""Exact equality of samples: types, shapes, dtypes and bits, recursively."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import torch

__all__ = ["same"]


def same(one: Any, other: Any) -> bool:
    """Return whether two samples are identical, including the sign of zeros; all of Python's NaNs are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _bits(one) == _bits(other)
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
