"""Many random fault schedules, in a process per processor."""

from __future__ import annotations

import gc
import logging
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Protocol

__all__ = ["Played", "play_all"]


class Played(Protocol):
    """A schedule that was played.

    Attributes:
        counts: counts of events.
    """

    counts: Counter[str]


def play_all(play: Callable[[int], Played], schedules: int, *, chunk: int = 50) -> tuple[Counter[str], dict[int, str]]:
    """Play the schedules of the seeds from 0 on.

    Args:
        play: plays the schedule of a seed, and raises an error if anything is wrong.
        schedules: number of schedules.
        chunk: number of schedules that a process plays at a time.

    Returns:
        Total counts of events; and seed → error.
    """
    counts, wrong = Counter[str](), dict[int, str]()
    chunks = [range(start, min(start + chunk, schedules)) for start in range(0, schedules, chunk)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for some_counts, some_wrong in pool.map(partial(_play_some, play), chunks):
            counts += some_counts
            wrong |= some_wrong
    return counts, wrong


def _play_some(play: Callable[[int], Played], seeds: range) -> tuple[Counter[str], dict[int, str]]:
    """Play some schedules in a process of their own, as strictly as a test: warnings are errors."""
    counts, wrong = Counter[str](), dict[int, str]()
    warnings.simplefilter("error")
    sys.unraisablehook = lambda left: wrong.setdefault(seed, f"{left.err_msg or 'ignored'}: {left.exc_value!r}")
    logging.getLogger("stoker").addHandler(logging.NullHandler())  # faults are logged
    for seed in seeds:
        try:
            counts.update(play(seed).counts)
        except Exception as error:  # noqa: BLE001 - a process's boundary
            wrong[seed] = "".join(traceback.format_exception(error))
    gc.collect()
    return counts, wrong
