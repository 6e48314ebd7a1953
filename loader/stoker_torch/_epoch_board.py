"""Which epoch an iteration is: agreed on by the worker processes that take part in it, and told by their parent.

A DataLoader says nothing to its data set when it begins an iteration: it makes processes, or tells those that it has
kept, and each finds out for itself. They share one board in memory. A worker that begins an iteration writes there
which epoch it took. All workers of one iteration know the same random seed, the DataLoader's base seed; so a worker
that finds its seed beside an epoch that it has not taken yet takes that one, and else the epoch that comes next. It
depends on no count of its own: a worker that was ended before it began does not fall behind the others.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError

__all__ = ["MAX_EPOCH", "MAX_WORKERS", "EpochBoard", "Turn"]

_TAG_BITS, _EPOCH_BITS = 20, 24
MAX_EPOCH = (1 << _EPOCH_BITS) - 1
MAX_WORKERS = 512
_KEPT = 4  # iterations over one data set may be under way side by side: a DataLoader zipped with itself
_STATE_TAG = 1


class Turn(NamedTuple):
    """An iteration's place among all.

    Attributes:
        serial: counts the commands of the parent, from 1.
        epoch: from 0.
    """

    serial: int
    epoch: int

    @property
    def word(self) -> int:
        """The turn as a number that rises from one to the next."""
        return self.serial << _EPOCH_BITS | self.epoch

    @classmethod
    def of(cls, word: int) -> Turn:
        """Return the turn that a number stands for."""
        return cls(word >> _EPOCH_BITS, word & MAX_EPOCH)


@dataclass(frozen=True, slots=True)
class Seat:
    """Who begins an iteration.

    Attributes:
        row: of the board: 0 for the process that made it, then one a worker.
        tag: what all workers of one iteration have alike; 0 is nobody's.
    """

    row: int = 0
    tag: int = 0

    @classmethod
    def of_worker(cls, worker: int, base_seed: int) -> Seat:
        """Return a worker's seat.

        Raises:
            ConfigError: the board has no row for it.
        """
        if worker >= MAX_WORKERS:
            raise ConfigError(f"worker {worker} is not in [0, {MAX_WORKERS}): use fewer workers")
        return cls(1 + worker, 1 + base_seed % ((1 << _TAG_BITS) - 1))


class EpochBoard:
    """Epochs in shared memory: it reaches workers that are forked or spawned, now or later.

    It needs no lock: a word holds turn and tag, is written at once, and each row by one process at a time.
    """

    def __init__(self) -> None:
        self._memory = RawArray(ctypes.c_uint64, 1 + (1 + MAX_WORKERS) * _KEPT)
        self._words[0] = Turn(1, 0).word << _TAG_BITS

    def __getstate__(self) -> object:
        """Return the memory itself for a process that is being spawned, and for a copy what stands there."""
        return self._memory if get_spawning_popen() is not None else self._words.copy()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, np.ndarray):
            self.__init__()  # type: ignore[misc]
            self._words[:] = state
        else:
            self._memory = state

    @property
    def _words(self) -> NDArray[np.uint64]:
        return np.ctypeslib.as_array(self._memory)

    @property
    def _rows(self) -> NDArray[np.uint64]:
        return _rows_of(self._words)

    @property
    def _ordered(self) -> int:
        return int(self._words[0]) >> _TAG_BITS

    @property
    def _latest(self) -> int:
        return int(self._rows.max()) >> _TAG_BITS

    def order(self, epoch: int, *, with_state: bool = False) -> Turn:
        """Make ``epoch`` the next that begins, for all processes, and return its turn.

        Args:
            epoch: from 0.
            with_state: whether it does not begin at its start, but where a state says.
        """
        turn = Turn(Turn.of(max(self._latest, self._ordered)).serial + 1, epoch)
        self._words[0] = turn.word << _TAG_BITS | (_STATE_TAG if with_state else 0)
        return turn

    def needs_state(self, turn: Turn) -> bool:
        """Return whether the parent has loaded a state for a turn."""
        return int(self._words[0]) == turn.word << _TAG_BITS | _STATE_TAG

    def coming(self, seat: Seat, epoch: int | None = None) -> Turn:
        """Return the turn that :meth:`begin` would."""
        words, mask = self._words.copy(), np.uint64((1 << _TAG_BITS) - 1)  # once: others begin meanwhile
        rows = _rows_of(words)
        if seat.tag:
            begun = rows[rows & mask == seat.tag] >> np.uint64(_TAG_BITS)
            mine = rows[seat.row][rows[seat.row] & mask == seat.tag] >> np.uint64(_TAG_BITS)
            others = [Turn.of(word) for word in begun.tolist() if word > max(mine.tolist(), default=-1)]
            joined = min((turn for turn in others if epoch is None or turn.epoch == epoch), default=None)
            if joined is not None:
                return joined
        latest, ordered = (Turn.of(int(word) >> _TAG_BITS) for word in (rows.max(), words[0]))
        if epoch is not None:
            return Turn(max(latest, ordered).serial + 1, epoch)
        return ordered if ordered.serial > latest.serial else latest._replace(epoch=latest.epoch + 1)

    def begin(self, seat: Seat, epoch: int | None = None) -> Turn:
        """Take part in an iteration, and return which it is.

        Args:
            seat: whose.
            epoch: that it must be, which a worker's own state says.
        """
        turn = self.coming(seat, epoch)
        row = self._rows[seat.row]
        row[int(np.argmin(row))] = turn.word << _TAG_BITS | seat.tag
        return turn

    def is_ordered(self) -> bool:
        """Return whether nothing has begun since the parent made its last order."""
        return Turn.of(self._ordered).serial > Turn.of(self._latest).serial

    def is_in_workers(self) -> bool:
        """Return whether it was a worker that began the latest iteration."""
        return not self.is_ordered() and int(self._rows[0].max()) >> _TAG_BITS < self._latest


def _rows_of(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return words[1:].reshape(1 + MAX_WORKERS, _KEPT)
