"""What Lambda writes at the end of an invocation's log: what it is charged for."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

__all__ = ["Bill", "bill_of"]

_BILLED = re.compile(r'(?:Billed Duration: |"billedDurationMs":\s*)([0-9]{1,9})')
_MEMORY = re.compile(r'(?:Memory Size: |"memorySizeMB":\s*)([0-9]{1,9})')
_COLD = re.compile(r"Init Duration: |Restore Duration: |\"(?:init|restore)DurationMs\"")
_REPORT = re.compile(r"^REPORT RequestId: .*$|^.*\"platform\.report\".*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What an invocation is charged for.

    Attributes:
        seconds: initialisation included.
        memory_bytes: that the function is configured with.
        is_cold: whether the instance was started for it.
    """

    seconds: float
    memory_bytes: int
    is_cold: bool


def bill_of(log_result: str) -> Bill | None:
    """Return what the end of an invocation's log says, base64-encoded as ``Invoke`` returns it.

    The report is a line of text or, for functions that log in JSON, an object. None if there is none: the platform
    does not promise one.
    """
    try:
        log = base64.b64decode(log_result, validate=True).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return None
    reports = _REPORT.findall(log)
    if not reports:
        return None
    billed, memory = _BILLED.search(reports[-1]), _MEMORY.search(reports[-1])
    if billed is None or memory is None:
        return None
    return Bill(
        seconds=int(billed[1]) / 1000,
        memory_bytes=int(memory[1]) << 20,
        is_cold=_COLD.search(reports[-1]) is not None,
    )
