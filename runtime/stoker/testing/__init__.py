"""For tests of plug-ins: suites that say what a tier, an eviction policy or an executor does.

A suite is a class of tests for pytest. Subclass it in a module of tests, under a name that begins with ``Test``, and
override the method that creates the thing under test::

    class TestMostRecentlyUsed(EvictionPolicyTests):
        def create_policy(self, oracle: NextUseOracle[str]) -> EvictionPolicy[str]:
            return MostRecentlyUsed(oracle)
"""

from typing import TYPE_CHECKING, Any

from stoker._base.lazy_names import load_name

_NAMES_OF = {
    "stoker.testing._executors": "CONTRACT_FUNCTIONS ExecutorTests",
    "stoker.testing._policies": "EvictionPolicyTests",
    "stoker.testing._tiers": "TierTests",
}
"""Module → the public names that it defines."""

__all__ = ["CONTRACT_FUNCTIONS", "EvictionPolicyTests", "ExecutorTests", "TierTests"]

if TYPE_CHECKING:
    from stoker.testing._executors import CONTRACT_FUNCTIONS, ExecutorTests
    from stoker.testing._policies import EvictionPolicyTests
    from stoker.testing._tiers import TierTests
else:  # type checkers would take any name for one that __getattr__ has

    def __getattr__(name: str) -> Any:
        return load_name(__name__, name, _NAMES_OF)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
