"""Tests for plug-ins: suites for stores, tiers, sources, eviction policies and executors; test doubles; virtual time.

A suite is a class of pytest tests. Subclass it in a test module, under a name that begins with ``Test``, and override
the method that creates the object under test, or define the fixture that says where the store is.

stoker runs the same suites over its own implementations. A store lists its known limitations as :class:`Deviation`
members; the tests that depend on them are skipped. Suites need no network. Doubles take their time from the event loop,
so :func:`run_virtual` runs hours of faults in milliseconds, with the same result every time. A name is imported when it
is first used; only the suites import pytest (``pip install 'stoker[testing]'``).

Example:
    >>> import pytest
    >>> from stoker.testing import EvictionPolicyTests, StoreLocation, StoreTests
    >>> class TestMostRecentlyUsed(EvictionPolicyTests):
    ...     def create_policy(self, oracle):
    ...         return MostRecentlyUsed(oracle)
    >>> class TestMyStore(StoreTests):
    ...     @pytest.fixture
    ...     def place(self, tmp_path):
    ...         return StoreLocation(url=f"mine://{tmp_path}/bucket")
"""

from typing import TYPE_CHECKING, Any

from stoker._base.plugins import load_name
from stoker._deprecation import declare_renamed

_NAMES_OF = {
    "stoker._base.clock": "VirtualClockError VirtualClockLoop run_virtual",
    "stoker.testing._doubles": "DyingStore FaultyStore FlakyStore WatchedStore",
    "stoker.testing._executors": "CONTRACT_FUNCTIONS ExecutorTests",
    "stoker.testing._policies": "EvictionPolicyTests",
    "stoker.testing._sources": "SourceTests",
    "stoker.testing._store_places": "Deviation StoreLocation list_keys read_range run_check",
    "stoker.testing._stores": "StoreTests",
    "stoker.testing._tiers": "TierTests",
}
"""Module → the public names that it defines."""

__all__ = [
    "CONTRACT_FUNCTIONS",
    "Deviation",
    "DyingStore",
    "EvictionPolicyTests",
    "ExecutorTests",
    "FaultyStore",
    "FlakyStore",
    "SourceTests",
    "StoreLocation",
    "StoreTests",
    "TierTests",
    "VirtualClockError",
    "VirtualClockLoop",
    "WatchedStore",
    "list_keys",
    "read_range",
    "run_virtual",
    "run_check",
]

declare_renamed(__name__, {"StorePlace": "StoreLocation", "keys_of": "list_keys", "run_with": "run_check"})

if TYPE_CHECKING:
    from stoker._base.clock import VirtualClockError, VirtualClockLoop, run_virtual
    from stoker.testing._doubles import DyingStore, FaultyStore, FlakyStore, WatchedStore
    from stoker.testing._executors import CONTRACT_FUNCTIONS, ExecutorTests
    from stoker.testing._policies import EvictionPolicyTests
    from stoker.testing._sources import SourceTests
    from stoker.testing._store_places import Deviation, StoreLocation, list_keys, read_range, run_check
    from stoker.testing._stores import StoreTests
    from stoker.testing._tiers import TierTests
else:  # hidden from type checkers, which would accept any name because of __getattr__

    def __getattr__(name: str) -> Any:
        return load_name(__name__, name, _NAMES_OF)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
