"""Settings that have options of their own: the price of a run, and the worker threads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from threading import TIMEOUT_MAX
from typing import get_args

import numpy as np

from stoker._base.arguments import MovedArgument, explain_arguments
from stoker._base.meter import Egress
from stoker._cost.prices import parse_dollars
from stoker.errors import ConfigError


def validate_integer(name: str, value: object, minimum: int) -> int:
    """Return the setting as Python's ``int``, since numpy's integers cannot go into a state as JSON.

    Raises:
        ConfigError: the value is not an integer, or less than ``minimum``.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name} must be an integer of at least {minimum}, not {value!r}")
    return int(value)


@explain_arguments("Budget")
@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of the price of a run.

    Attributes:
        dollars: limit of the store's price for the whole job: ``"5 USD"`` or a number; default no limit. Each rank has
            an equal part. A loader warns at 80% of its part and raises ``CostBudgetError`` at 100%, between two
            batches. Counting begins when the loader is constructed.
        max_dollars_per_epoch: limit of the planned price of an epoch, over all ranks; construction fails above it.
        egress: where this machine is, seen from the bucket: ``"same_region"``, ``"other_region"`` or ``"internet"``.

    Raises:
        ConfigError: a value is out of range.

    Example:
        >>> budget = Budget(dollars=5, egress="internet")  # Loader(url, batch_size=64, budget=budget)
    """

    dollars: float | str | None = None
    max_dollars_per_epoch: float = 1.0
    egress: Egress = "same_region"

    def __post_init__(self) -> None:
        if self.egress not in get_args(Egress):
            raise ConfigError(f"egress must be one of {', '.join(get_args(Egress))}, not {self.egress!r}")
        if self.dollars is not None:
            parse_dollars(self.dollars)
        limit: object = self.max_dollars_per_epoch
        is_number = isinstance(limit, int | float | np.integer | np.floating) and not isinstance(limit, bool)
        if not is_number or math.isnan(self.max_dollars_per_epoch):
            raise ConfigError(
                f"max_dollars_per_epoch must be a number of dollars, float('inf') for no limit, not {limit!r:.80}"
            )

    @classmethod
    def of(cls, budget: float | str | Budget | None) -> Budget:
        """Return the budget of a setting, which is a budget or a number of dollars.

        Raises:
            ConfigError: it is neither.
        """
        return budget if isinstance(budget, Budget) else cls(dollars=budget)


@explain_arguments("WorkerOptions")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Settings of the threads that run the user's functions.

    Attributes:
        threads: number of threads; default the number of cores, and 1 in a worker process of a ``DataLoader``.
        timeout_seconds: longest wait for the functions of a batch; after it, ``SampleTimeoutError`` names the sample
            and the function that has not returned. Default 0: no limit, as in torch's ``DataLoader``. Time limits of
            the bucket are in ``fetch``.
        max_bad_samples: number of samples of the run that may fail in ``decode`` or ``transform``; each is replaced by
            another sample of its batch and counted. Default 0. An error of a whole batch is always raised.

    Raises:
        ConfigError: a value is out of range.

    Example:
        >>> workers = WorkerOptions(threads=8, timeout_seconds=300)  # Loader(url, batch_size=64, workers=workers)
    """

    threads: int | None = None
    timeout_seconds: float = 0
    max_bad_samples: int = 0

    def __post_init__(self) -> None:
        if self.threads is not None:
            object.__setattr__(self, "threads", validate_integer("threads", self.threads, 1))
        object.__setattr__(self, "max_bad_samples", validate_integer("max_bad_samples", self.max_bad_samples, 0))
        seconds: object = self.timeout_seconds
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds <= TIMEOUT_MAX:
            raise ConfigError(f"timeout_seconds must be a number of seconds, 0 for no limit, not {seconds!r}")

    @classmethod
    def of(cls, workers: int | WorkerOptions | None) -> WorkerOptions:
        """Return the options of a setting, which is options or a number of threads.

        Raises:
            ConfigError: it is neither.
        """
        if isinstance(workers, WorkerOptions):
            return workers
        return cls() if workers is None else cls(threads=validate_integer("workers", workers, 1))


MOVED_SETTINGS = {
    "timeout": MovedArgument("workers", WorkerOptions, "timeout_seconds", "threads"),
    "max_bad_samples": MovedArgument("workers", WorkerOptions, "max_bad_samples", "threads"),
    "max_dollars_per_epoch": MovedArgument("budget", Budget, "max_dollars_per_epoch", "dollars"),
    "egress": MovedArgument("budget", Budget, "egress", "dollars"),
}
"""Deprecated settings → where each one is now."""
