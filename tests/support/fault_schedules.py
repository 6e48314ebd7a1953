"""Random fault schedules, by level and seed."""

from __future__ import annotations

import warnings

from stoker.errors import CopiedBucketWarning
from stoker.testing import run_virtual
from support.fault_objects import ObjectRun
from support.fault_samples import SampleRun

__all__ = ["LEVELS", "play"]

LEVELS: dict[str, type[ObjectRun] | type[SampleRun]] = {"objects": ObjectRun, "samples": SampleRun}


def play(level: str, seed: int) -> ObjectRun | SampleRun:
    """Play one schedule to its end and return it.

    Raises:
        AssertionError: something wrong was delivered, lost, delivered twice or left behind (also in a group).
    """

    async def main() -> ObjectRun | SampleRun:
        run = LEVELS[level](seed)
        await run.play()
        return run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CopiedBucketWarning)
        return run_virtual(main())
