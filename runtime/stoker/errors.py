"""The errors that stoker raises on purpose, one hierarchy with retryability as a type, and its warnings.

An error names the object and the values and says the remedy. Adapters translate a foreign library's errors into
these once, where they meet it; nothing above an adapter sees another library's exception.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "ArgumentError",
    "BucketNotFoundError",
    "BudgetError",
    "BudgetExceededError",
    "ChecksumError",
    "ConfigError",
    "ConnectionLostError",
    "CopiedBucketWarning",
    "CredentialsError",
    "DatasetExistsError",
    "DeadlineError",
    "EventError",
    "FanoutError",
    "FetchError",
    "FormatError",
    "FunctionError",
    "LostShardsError",
    "MissingExtraError",
    "NotFoundError",
    "ObjectChangedError",
    "ObjectDamagedError",
    "ObjectTruncatedError",
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


class StokerError(Exception):
    """Base of every error that stoker raises on purpose."""


class ConfigError(StokerError, ValueError):
    """An argument or setting is wrong; nothing was started."""


class ArgumentError(ConfigError, TypeError):
    """An argument has a name that does not exist, is missing, or is not of a type that is taken."""


class MissingExtraError(StokerError, ImportError):
    """A feature needs an optional dependency; the message names the extra to install."""


class SchemaError(StokerError, ValueError):
    """A schema is not valid, or a sample does not match its schema."""


class EventError(StokerError, ValueError):
    """An event is not one that the function takes; the same event will never succeed. Names the field."""


class FormatError(StokerError, ValueError):
    """Bytes are not the super-sample, manifest or pack record that they should be."""


class StateError(StokerError, ValueError):
    """A saved loader state does not fit this loader."""


class BudgetError(StokerError, ValueError):
    """The memory budget, or a limit on requests or dollars, is too small; the message names the figure that fits."""


class BudgetExceededError(StokerError):
    """The dollars that a job may spend are spent. Raised between batches: the loader's state can be saved.

    Has nothing to do with :class:`BudgetError`, which is raised before anything is fetched.

    Attributes:
        spent_dollars: of this rank, so far.
        budget_dollars: that this rank had.
    """

    def __init__(self, message: str, *, spent_dollars: float, budget_dollars: float) -> None:
        super().__init__(message)
        self.spent_dollars = spent_dollars
        self.budget_dollars = budget_dollars


class RankMismatchError(StokerError):
    """The ranks of a job disagree on the data set or the order; raised on every rank before the first batch."""


class SampleError(StokerError):
    """A sample could not be decoded or transformed; names the sample and its super-sample. The cause is chained."""


class SampleTimeoutError(SampleError, TimeoutError):
    """A user's function did not return within the loader's ``timeout``; names the sample and the function."""


class PackError(StokerError):
    """A pack cannot go on; what was packed before stays and can be resumed."""


class DatasetExistsError(PackError, FileExistsError):
    """There already is a data set at the URL."""


class FunctionError(StokerError):
    """A function ended with an error of its own, and would again: the same event is not tried again.

    Attributes:
        error_type: what the function calls the error: the name of its class.
        error_message: what the error says.
    """

    def __init__(self, function: str, error_type: str, error_message: str) -> None:
        super().__init__(f"the function {function} failed with {error_type}: {error_message}")
        self.error_type = error_type
        self.error_message = error_message


class FanoutError(StokerError):
    """Some tasks of a fan-out failed for good, the others were carried out; names them and says how to go on.

    Attributes:
        failures: name of the task → its last error, in the order of the tasks.
    """

    def __init__(self, message: str, failures: Mapping[str, StokerError]) -> None:
        super().__init__(message)
        self.failures = dict(failures)


class StoreError(StokerError, OSError):
    """A store could not do what it was asked; the base of everything an adapter raises. Not retryable by itself."""


class NotFoundError(StoreError, FileNotFoundError):
    """The object does not exist."""


class BucketNotFoundError(NotFoundError):
    """The bucket (or local folder) itself does not exist."""


class PermissionDeniedError(StoreError, PermissionError):
    """The credentials are valid and do not allow this."""


class CredentialsError(StoreError, PermissionError):
    """Credentials are missing, invalid or expired and could not be refreshed."""


class WrongRegionError(StoreError):
    """The bucket lives in another region than the one that was asked; the message names it if the store told."""


class PreconditionFailedError(StoreError):
    """A conditional write lost: the object exists already, or changed since it was read."""


class ObjectChangedError(StoreError):
    """An object is not the one the manifest pinned: its size, checksum or ETag/generation differs."""


class ObjectTruncatedError(ObjectChangedError):
    """An object is shorter than the manifest says; a second request has confirmed it, and no other will help."""


class FetchError(StoreError):
    """A super-sample could not be fetched after every allowed attempt; names it, the attempts and the last cause."""


class ObjectDamagedError(ObjectChangedError, FetchError):
    """The bytes of an object are not those that were packed: each reading of them has another checksum than it."""


class TransientError(StoreError):
    """May succeed if tried again. Raised from an adapter, it is retried by the fetcher.

    Attributes:
        retry_after_seconds: how long the store asked to wait, if it said so.
    """

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ThrottledError(TransientError):
    """The store, or the platform of a function, asks to slow down (503 SlowDown, 429)."""


class ServerError(TransientError):
    """The store failed inside (500 and what is like it)."""


class UnexpectedAnswerError(ServerError):
    """An answer is not one to what was asked: another range, another format. A proxy on the way may have given it."""


class ConnectionLostError(TransientError, ConnectionError):
    """The connection could not be made, or broke."""


class TruncatedError(TransientError):
    """The body ended before the bytes that were promised."""


class RangeBeyondEndError(TruncatedError):
    """The store says that the object ends before the range that was asked for does."""


class DeadlineError(TransientError, TimeoutError):
    """An attempt did not end before its deadline."""


class WireError(TransientError):
    """A peer of the warm tier sent what its protocol does not allow; the connection was closed."""


class LostShardsError(StoreError):
    """More shards of an object are lost than its code can restore; the bucket has it still."""


class ChecksumError(TransientError):
    """Bytes arrived whole and are not those that were stored: their checksum differs."""


class CopiedBucketWarning(UserWarning):
    """Objects have the bytes that the manifest pins under another ETag or generation: the bucket was copied."""


class SpendingWarning(UserWarning):
    """Most of a budget is spent."""
