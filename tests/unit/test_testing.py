"""What stoker.testing ships beside its suites: stores that fail, and an import that needs no pytest."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

import stoker.testing
from stoker import RetryingStore, open_store
from stoker.errors import ConfigError, ServerError
from stoker.testing import FaultyStore, FlakyStore, run_virtual

FAULTS = {"throttle": 0.1, "error": 0.1, "reset": 0.1, "late": 0.1}


def lived_through(seed: int) -> Counter[str]:
    async def main() -> Counter[str]:
        faulty = FaultyStore(open_store(f"memory://faulty/{seed}"), FAULTS, seed=seed)
        store = RetryingStore(faulty)
        for number in range(50):
            await store.put(f"{number}", b"x", if_absent=True)
            assert (await store.get(f"{number}"))[0] == b"x"
            await store.delete(f"{number}")
        return faulty.faults

    return run_virtual(main())


def test_a_faulty_store_is_lived_through_by_trying_again_and_fails_alike_each_time() -> None:
    faults = lived_through(1)
    assert min(faults[name] for name in FAULTS) >= 3
    assert lived_through(1) == faults != lived_through(2)


def test_a_fault_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown faults: rain; use throttle, error, late, reset"):
        FaultyStore(open_store("memory://faulty"), {"rain": 1.0})


def test_a_flaky_store_fails_once() -> None:
    async def main() -> None:
        flaky = FlakyStore(open_store("memory://flaky"), 1, late=False)
        await flaky.put("x", b"1")
        with pytest.raises(ServerError):
            await flaky.get("x")
        assert (await flaky.get("x"))[0] == b"1"
        assert flaky.calls == ["put x", "get x", "get x"]

    run_virtual(main())


def test_every_name_is_there_and_only_suites_need_pytest() -> None:
    assert all(getattr(stoker.testing, name) for name in stoker.testing.__all__)
    program = (
        "import sys, stoker.testing as t; t.run_virtual, t.FaultyStore; assert 'pytest' not in sys.modules; "
        "t.StoreTests; assert 'pytest' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
