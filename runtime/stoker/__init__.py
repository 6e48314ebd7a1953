"""Training data from object storage: pack samples into super-samples, and read them in the order of training.

The loader for PyTorch is in the package ``stoker_torch``. Other public modules are :mod:`stoker.errors`,
:mod:`stoker.files`, :mod:`stoker.images`, :mod:`stoker.fanout`, :mod:`stoker.trace` and, for authors of plug-ins,
:mod:`stoker.abc`.

Names are imported lazily, on first use, so that commands and functions start fast.
"""

from typing import TYPE_CHECKING, Any

from stoker import errors
from stoker._base.plugins import load_name
from stoker._deprecation import RENAMED, declare_renamed
from stoker._version import __version__
from stoker.errors import *  # noqa: F403 - every error and warning in stoker.errors.__all__

__all__ = [
    "Array",
    "Bytes",
    "Column",
    "Continuous",
    "Dataset",
    "FetchConfig",
    "FetchSize",
    "GcsOptions",
    "HttpOptions",
    "NextBatch",
    "Operation",
    "Order",
    "OrderConfig",
    "Packer",
    "Prices",
    "Progress",
    "Ragged",
    "RetryPolicy",
    "RetryingStore",
    "S3Options",
    "SampleContext",
    "Schedule",
    "Schema",
    "ServedOptions",
    "StoreOptions",
    "Text",
    "__version__",
    "open",
    "open_store",
]
__all__ += errors.__all__

_NAMES_OF = {
    "stoker._base.meter": "Operation",
    "stoker._base.retry": "RetryPolicy RetryingStore",
    "stoker._cost.prices": "Prices",
    "stoker._dataset": "Dataset",
    "stoker._fetch.config": "Continuous FetchConfig FetchSize NextBatch Progress Schedule",
    "stoker._format.schema": "Array Bytes Column Ragged Schema Text",
    "stoker._order.order": "Order OrderConfig",
    "stoker._order.random_words": "SampleContext",
    "stoker._pack.packer": "Packer",
    "stoker._stores": "GcsOptions HttpOptions S3Options ServedOptions StoreOptions open_store",
}
"""Module → the public names that it defines."""

declare_renamed(__name__, RENAMED[errors.__name__])

if TYPE_CHECKING:
    from stoker._base.meter import Operation
    from stoker._base.retry import RetryingStore, RetryPolicy
    from stoker._cost.prices import Prices
    from stoker._dataset import Dataset
    from stoker._fetch.config import Continuous, FetchConfig, FetchSize, NextBatch, Progress, Schedule
    from stoker._format.schema import Array, Bytes, Column, Ragged, Schema, Text
    from stoker._order.order import Order, OrderConfig
    from stoker._order.random_words import SampleContext
    from stoker._pack.packer import Packer
    from stoker._stores import GcsOptions, HttpOptions, S3Options, ServedOptions, StoreOptions, open_store

    open = Dataset  # noqa: A001 - nothing in this module opens a file
else:  # hidden from type checkers: with a module __getattr__ they would accept any name

    def __getattr__(name: str) -> Any:
        if name == "open":  # an alias, for stoker.open(url)[i]
            return __getattr__("Dataset")
        return load_name(__name__, name, _NAMES_OF)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
