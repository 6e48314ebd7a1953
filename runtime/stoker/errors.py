"""Exceptions and warnings of stoker: one hierarchy, in which :class:`TransientError` marks what a retry may cure.

A message names the object, the values and the remedy. An adapter translates the exceptions of the library that it
wraps; no other exception of a library passes an adapter.

Example:
    Save the state when the dollars of a job are spent:

    >>> import torch
    >>> from stoker_torch import Budget, Loader
    >>> loader = Loader("s3://bucket/train", batch_size=32, epochs=90, budget=Budget(dollars=5))
    >>> try:
    ...     for batch in loader:
    ...         train_step(batch["image"], batch["label"])
    ... except stoker.CostBudgetError as error:
    ...     torch.save(loader.state_dict(), "state.pt")
    ...     print(error.spent_dollars, "of", error.budget_dollars)
    >>> loader.close()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stoker._deprecation import declare_renamed, load_renamed

__all__ = [
    "ArgumentError",
    "BucketNotFoundError",
    "ChecksumError",
    "ConfigError",
    "ConnectionLostError",
    "CopiedBucketWarning",
    "CostBudgetError",
    "CredentialsError",
    "DatasetExistsError",
    "DeadlineError",
    "EventError",
    "FanoutError",
    "FetchError",
    "FormatError",
    "FunctionError",
    "LostShardsError",
    "MemoryBudgetError",
    "MissingExtraError",
    "NotFoundError",
    "ObjectChangedError",
    "ObjectDamagedError",
    "ObjectTruncatedError",
    "OutdatedFunctionWarning",
    "PackError",
    "PermissionDeniedError",
    "PreconditionFailedError",
    "RangeBeyondEndError",
    "RankMismatchError",
    "SampleError",
    "SampleTimeoutError",
    "SchemaError",
    "ServerError",
    "SpendingWarning",
    "StateError",
    "StokerError",
    "StoreError",
    "ThrottledError",
    "TransientError",
    "TruncatedError",
    "UnexpectedAnswerError",
    "WireError",
    "WrongRegionError",
]

declare_renamed(__name__, {"BudgetError": "MemoryBudgetError", "BudgetExceededError": "CostBudgetError"})

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> Any:
        return load_renamed(__name__, name)


class StokerError(Exception):
    """Base class of all exceptions that stoker raises on purpose."""


class ConfigError(StokerError, ValueError):
    """An argument or setting is invalid. Raised before anything is started."""


class ArgumentError(ConfigError, TypeError):
    """An argument is unknown, missing, or of an unsupported type."""


class MissingExtraError(StokerError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


class SchemaError(StokerError, ValueError):
    """A schema is invalid, or a sample does not match its schema."""


class EventError(StokerError, ValueError):
    """A function's event is invalid, so a retry will never succeed; the message names the field."""


class FormatError(StokerError, ValueError):
    """Data is not a valid super-sample, manifest or pack record."""


class StateError(StokerError, ValueError):
    """A saved loader state does not fit this loader."""


class MemoryBudgetError(StokerError, ValueError):
    """The memory budget, or a limit on requests or dollars, is too small; the message names the smallest that works."""


class CostBudgetError(StokerError):
    """A job has spent its dollar budget. Raised between batches, so that the loader's state can be saved.

    Unrelated to :class:`MemoryBudgetError`, which is raised before anything is fetched.

    Example:
        >>> try:
        ...     raise stoker.CostBudgetError("5 dollars are spent", spent_dollars=5.01, budget_dollars=5.0)
        ... except stoker.CostBudgetError as error:
        ...     f"{error.spent_dollars - error.budget_dollars:.2f} USD over the budget"
        '0.01 USD over the budget'

    Attributes:
        spent_dollars: dollars that this rank has spent.
        budget_dollars: dollars that this rank was allowed to spend.
    """

    def __init__(self, message: str, *, spent_dollars: float, budget_dollars: float) -> None:
        super().__init__(message)
        self.spent_dollars = spent_dollars
        self.budget_dollars = budget_dollars


class RankMismatchError(StokerError):
    """The ranks of a job disagree on the data set or the order. Raised on every rank, before the first batch."""


class SampleError(StokerError):
    """A sample could not be decoded or transformed; the message names it and its super-sample. The cause is chained."""


class SampleTimeoutError(SampleError, TimeoutError):
    """A user function exceeded the loader's ``timeout``; the message names the sample and the function."""


class PackError(StokerError):
    """A pack cannot continue. Samples packed so far are kept, and the pack can be resumed."""


class DatasetExistsError(PackError, FileExistsError):
    """A data set already exists at the URL."""


class FunctionError(StokerError):
    """A function raised an exception that a retry would raise again, so it is not retried.

    Example:
        >>> error = FunctionError("pack", "KeyError", "'label'")
        >>> error.error_type, error.error_message
        ('KeyError', "'label'")

    Attributes:
        error_type: class name of the function's exception.
        error_message: message of the function's exception.
    """

    def __init__(self, function: str, error_type: str, error_message: str) -> None:
        super().__init__(f"the function {function} failed with {error_type}: {error_message}")
        self.error_type = error_type
        self.error_message = error_message


class FanoutError(StokerError):
    """Some tasks of a fan-out failed permanently, while the others succeeded; the message says how to continue.

    Example:
        >>> error = FanoutError("1 task failed", {"part 7": FunctionError("pack", "KeyError", "'label'")})
        >>> for name, failure in error.failures.items():
        ...     print(f"{name}: {failure.error_type}")
        part 7: KeyError

    Attributes:
        failures: last error of each failed task, by task name, in the order of the tasks.
    """

    def __init__(self, message: str, failures: Mapping[str, StokerError]) -> None:
        super().__init__(message)
        self.failures = dict(failures)


class StoreError(StokerError, OSError):
    """A request to a store failed. Base class of all exceptions of store adapters; not retryable by itself."""


class NotFoundError(StoreError, FileNotFoundError):
    """The object does not exist."""


class BucketNotFoundError(NotFoundError):
    """The bucket (or local folder) itself does not exist."""


class PermissionDeniedError(StoreError, PermissionError):
    """The credentials are valid but do not permit the operation."""


class CredentialsError(StoreError, PermissionError):
    """The credentials are missing or invalid, or are expired and could not be refreshed."""


class WrongRegionError(StoreError):
    """The request went to the wrong region; the message names the right one if the store reports it."""


class PreconditionFailedError(StoreError):
    """The condition of a write does not hold: the object exists already, or changed since it was read."""


class ObjectChangedError(StoreError):
    """An object differs from the manifest in its size, checksum, ETag or generation."""


class ObjectTruncatedError(ObjectChangedError):
    """An object is shorter than in the manifest, as a second request confirmed; a retry does not help."""


class FetchError(StoreError):
    """All attempts to fetch a super-sample failed; the message names it, the attempts and the last cause."""


class ObjectDamagedError(ObjectChangedError, FetchError):
    """An object's bytes are not those that were packed: every read of it has a wrong checksum."""


class TransientError(StoreError):
    """A failure that a retry may cure. The fetcher retries an operation whose adapter raises it.

    Example:
        >>> error = ThrottledError("503 Slow Down", retry_after_seconds=2.0)
        >>> isinstance(error, TransientError), error.retry_after_seconds
        (True, 2.0)

    Attributes:
        retry_after_seconds: delay that the store asked for, in seconds; None if it did not.
    """

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ThrottledError(TransientError):
    """The store, or a function platform, throttles requests (503 SlowDown, 429)."""


class ServerError(TransientError):
    """The store reports an internal error (500 and similar)."""


class UnexpectedAnswerError(ServerError):
    """A response does not match its request, for instance in range or format; perhaps a proxy sent it."""


class ConnectionLostError(TransientError, ConnectionError):
    """A connection could not be opened, or was lost."""


class TruncatedError(TransientError):
    """A response body ended before all announced bytes had arrived."""


class RangeBeyondEndError(TruncatedError):
    """According to the store, the object ends before the requested range does."""


class DeadlineError(TransientError, TimeoutError):
    """An attempt exceeded its deadline."""


class WireError(TransientError):
    """A peer of the warm tier violated the protocol; the connection was closed."""


class LostShardsError(StoreError):
    """More shards of an object are lost than its erasure code can restore; the bucket still has the object."""


class ChecksumError(TransientError):
    """All bytes arrived, but their checksum is wrong."""


class CopiedBucketWarning(UserWarning):
    """Objects have the manifest's bytes but other ETags or generations, because the bucket was copied."""


class OutdatedFunctionWarning(UserWarning):
    """The function that serves a data set is older than this client, and lacks a request that makes reading faster."""


class SpendingWarning(UserWarning):
    """Most of a dollar budget is spent."""
