"""What a trace comes to, in memory that does not grow with it."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable
from itertools import count

from stoker._base.fetch_record import Phase
from stoker._base.recorder import WORST_WAITS, Wait
from stoker._trace.recording import Answer, Filled, Full, Held, Named, Told

__all__ = ["Quantiles", "Summary"]

_ACCURACY = 0.005
_GROWTH = math.log((1 + _ACCURACY) / (1 - _ACCURACY))
_LEAST, _MOST = 1e-9, 1e18


class Quantiles:
    """Counts positive numbers in classes that grow by a factor, so that any quantile is right within half a percent.

    C. Masson, J. Rim, H. Lee, "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error Guarantees",
    VLDB 2019, section 2. What lies outside 1e-9 to 1e18 counts as the nearer of them.
    """

    __slots__ = ("_classes", "count")

    def __init__(self) -> None:
        self._classes: Counter[int] = Counter()
        self.count = 0

    def add(self, number: float) -> None:
        """Count a number."""
        self._classes[math.ceil(math.log(min(max(number, _LEAST), _MOST)) / _GROWTH)] += 1
        self.count += 1

    def quantile(self, share: float) -> float:
        """Return what ``share``, 0 to 1, of the numbers are not above; there must be one."""
        rank = math.ceil(share * self.count)
        for place in sorted(self._classes):
            rank -= self._classes[place]
            if rank <= 0:
                break
        return math.exp(place * _GROWTH) * (1 - _ACCURACY)


class Summary:
    """Sums up what is told.

    Args:
        most_worst: waits that are kept.

    Attributes:
        names: of processes, by their number.
        batches: that were waited for.
        waited_seconds: for them, of all processes together.
        phases: the seconds of each phase, and how many batches had it.
        fetches: into the ring.
        first_bytes: seconds until answers began.
        rates: bytes a second of transfers that came whole.
        requests: that were sent.
        lost: of these, those that failed or were overtaken by a hedge.
        is_full: whether the trace reached its limit before the run ended.
    """

    def __init__(self, most_worst: int = WORST_WAITS) -> None:
        self.names: dict[int, str] = {}
        self.batches = 0
        self.waited_seconds = 0.0
        self.phases: dict[Phase, tuple[float, int]] = {}
        self.fetches = 0
        self.first_bytes, self.rates = Quantiles(), Quantiles()
        self.requests = self.lost = 0
        self.is_full = False
        self._begin_seconds, self._end_seconds = math.inf, -math.inf
        self._most_worst = most_worst
        self._worst: list[tuple[float, int, int, Wait]] = []
        self._order = count(0, -1)

    @classmethod
    def of(cls, told: Iterable[Told], most_worst: int = WORST_WAITS) -> Summary:
        """Sum up all of a trace."""
        summary = cls(most_worst)
        for process, what in told:
            match what:
                case Wait():
                    summary._add_wait(process, what)
                case Filled():
                    summary.fetches += 1
                    summary._reach(what.begin_seconds, what.end_seconds)
                case Held():
                    summary._reach(what.begin_seconds, what.end_seconds)
                case Answer():
                    summary._add_answer(what)
                case Named():
                    summary.names[process] = what.name
                case Full():
                    summary.is_full = True
        return summary

    @property
    def begin_seconds(self) -> float:
        """When the first thing that was recorded began; 0 if there is none."""
        return self._begin_seconds if self.seconds else 0.0

    @property
    def end_seconds(self) -> float:
        """When the last one ended."""
        return self._end_seconds if self.seconds else 0.0

    @property
    def seconds(self) -> float:
        """From the one to the other."""
        return max(0.0, self._end_seconds - self._begin_seconds)

    def worst(self) -> list[tuple[int, Wait]]:
        """Return the longest waits with their processes, the worst first, of those that took time."""
        return [(process, wait) for seconds, _, process, wait in sorted(self._worst, reverse=True) if seconds]

    def _add_wait(self, process: int, wait: Wait) -> None:
        seconds = wait.seconds
        self.batches += 1
        self.waited_seconds += seconds
        for phase in {span.phase for span in wait.spans if span.seconds}:
            before, batches = self.phases.get(phase, (0.0, 0))
            mine = sum(span.seconds for span in wait.spans if span.phase is phase)
            self.phases[phase] = before + mine, batches + 1
        self._reach(wait.spans[0].begin_seconds, wait.spans[-1].end_seconds)
        entry = seconds, next(self._order), process, wait
        if len(self._worst) < self._most_worst:
            heapq.heappush(self._worst, entry)
        else:
            heapq.heappushpop(self._worst, entry)

    def _add_answer(self, answer: Answer) -> None:
        self.requests += 1
        self.lost += not answer.is_whole
        if answer.is_begun:
            self.first_bytes.add(answer.first_byte_seconds)
        if answer.is_whole and answer.transfer_seconds:
            self.rates.add(answer.size_bytes / answer.transfer_seconds)

    def _reach(self, begin_seconds: float, end_seconds: float) -> None:
        self._begin_seconds = min(self._begin_seconds, begin_seconds)
        self._end_seconds = max(self._end_seconds, end_seconds)
