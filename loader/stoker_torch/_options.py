"""Options: settings that are rarely given and belong together, as one value of a loader's setting."""

from __future__ import annotations

import math
from dataclasses import dataclass
from threading import TIMEOUT_MAX
from typing import get_args

import numpy as np

from stoker._base.arguments import MovedArgument, explain_arguments
from stoker._base.meter import Egress
from stoker._cost.spending import parse_dollars
from stoker.errors import ConfigError

__all__ = ["MOVED_SETTINGS", "Budget", "WorkerOptions", "checked_integer"]


def checked_integer(name: str, value: object, least: int) -> int:
    """Return a setting that is an integer as Python's: numpy's would not go into a state as JSON.

    Raises:
        ConfigError: it is none, or less than ``least``.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} {value!r} is not an integer of at least {least}")
    return int(value)


@explain_arguments("Budget")
@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a run may cost, as ``Loader(budget=Budget(dollars=5, egress="internet"))``.

    Attributes:
        dollars: limit of the whole job for what the store asks: ``"5 USD"`` or a number; default no limit. Each rank
            has an equal part. A loader warns at 80% of it and raises ``BudgetExceededError`` at 100%, between two
            batches. Counts begin when the loader is made.
        max_dollars_per_epoch: refuse an order whose requests and bytes would cost more, over all ranks.
        egress: where the bucket is for this machine, as dollars depend on it: ``"same_region"``, ``"other_region"`` or
            ``"internet"``.

    Raises:
        ConfigError: a value is out of range.
    """

    dollars: float | str | None = None
    max_dollars_per_epoch: float = 1.0
    egress: Egress = "same_region"

    def __post_init__(self) -> None:
        if self.egress not in get_args(Egress):
            raise ConfigError(f"egress {self.egress!r} is not one of {', '.join(get_args(Egress))}")
        if self.dollars is not None:
            parse_dollars(self.dollars)
        most: object = self.max_dollars_per_epoch
        is_number = isinstance(most, int | float | np.integer | np.floating) and not isinstance(most, bool)
        if not is_number or math.isnan(self.max_dollars_per_epoch):
            raise ConfigError(
                f"max_dollars_per_epoch {most!r:.80} is not a number of dollars; for no limit write float('inf')"
            )

    @classmethod
    def of(cls, budget: float | str | Budget | None) -> Budget:
        """Return what a setting says: a budget, or its dollars.

        Raises:
            ConfigError: it is neither.
        """
        return budget if isinstance(budget, Budget) else cls(dollars=budget)


@explain_arguments("WorkerOptions")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Threads that run functions of the user, as ``Loader(workers=WorkerOptions(threads=8, timeout_seconds=300))``.

    Attributes:
        threads: how many; default the number of cores, and one in a worker process of a ``DataLoader``.
        timeout_seconds: of waiting for a batch; then ``SampleTimeoutError`` names the sample and the function that has
            not returned. Default 0: without a limit, as torch's ``DataLoader`` has it. What the bucket may take is
            ``fetch``'s.
        max_bad_samples: samples of the run that may fail in ``decode`` or ``transform``; each is replaced by another of
            its batch and counted. Default none. What fails on a whole batch is always an error.

    Raises:
        ConfigError: a value is out of range.
    """

    threads: int | None = None
    timeout_seconds: float = 0
    max_bad_samples: int = 0

    def __post_init__(self) -> None:
        if self.threads is not None:
            object.__setattr__(self, "threads", checked_integer("threads", self.threads, 1))
        object.__setattr__(self, "max_bad_samples", checked_integer("max_bad_samples", self.max_bad_samples, 0))
        seconds: object = self.timeout_seconds
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds <= TIMEOUT_MAX:
            raise ConfigError(f"timeout_seconds {seconds!r} is not a number of seconds from 0, which is no limit")

    @classmethod
    def of(cls, workers: int | WorkerOptions | None) -> WorkerOptions:
        """Return what a setting says: options, or their number of threads.

        Raises:
            ConfigError: it is neither.
        """
        if isinstance(workers, WorkerOptions):
            return workers
        return cls() if workers is None else cls(threads=checked_integer("workers", workers, 1))


MOVED_SETTINGS = {
    "timeout": MovedArgument("workers", WorkerOptions, "timeout_seconds", "threads"),
    "max_bad_samples": MovedArgument("workers", WorkerOptions, "max_bad_samples", "threads"),
    "max_dollars_per_epoch": MovedArgument("budget", Budget, "max_dollars_per_epoch", "dollars"),
    "egress": MovedArgument("budget", Budget, "egress", "dollars"),
}
"""Settings of earlier releases that are deprecated."""
