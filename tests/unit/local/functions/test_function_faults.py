from __future__ import annotations

from collections import Counter

import pytest

from stoker_local.functions import FunctionFault, FunctionFaultKind, FunctionFaultPlan
from stoker_local.functions._config import FunctionFaultInjector

KILL, FREEZE = FunctionFaultKind.KILL, FunctionFaultKind.FREEZE


def test_a_script_strikes_in_order_of_arrival_then_chance_takes_over() -> None:
    kill = FunctionFault(kind=KILL)
    plan = FunctionFaultPlan(script=(None, kill), probabilities={FREEZE: 1.0}, within_seconds=2.0)
    injector = FunctionFaultInjector(plan)
    assert [injector.draw("f"), injector.draw("g")] == [None, kill]
    drawn = injector.draw("f")
    assert drawn is not None
    assert drawn.kind is FREEZE
    assert 0 <= drawn.after_seconds < 2.0


def test_what_strikes_a_function_does_not_depend_on_the_calls_of_others() -> None:
    plan = FunctionFaultPlan(probabilities={KILL: 0.3, FREEZE: 0.2}, seed=5)
    alone, beside = FunctionFaultInjector(plan), FunctionFaultInjector(plan)
    expected = [alone.draw("f") for _ in range(50)]
    found = []
    for _ in range(50):
        beside.draw("g")
        found.append(beside.draw("f"))
    assert found == expected
    assert expected != [FunctionFaultInjector(plan).draw("g") for _ in range(50)]


def test_faults_come_as_often_as_they_should() -> None:
    injector = FunctionFaultInjector(FunctionFaultPlan(probabilities={KILL: 0.25, FREEZE: 0.5}, seed=1))
    kinds = Counter(fault and fault.kind for fault in (injector.draw("f") for _ in range(4000)))
    assert 800 < kinds[KILL] < 1200
    assert 1800 < kinds[FREEZE] < 2200


def test_only_the_functions_of_a_plan_are_struck() -> None:
    injector = FunctionFaultInjector(FunctionFaultPlan(script=(FunctionFault(kind=KILL),), functions=("f",)))
    assert injector.draw("g") is None
    assert injector.draw("f") == FunctionFault(kind=KILL)


def test_another_plan_starts_at_its_beginning() -> None:
    plan = FunctionFaultPlan(probabilities={KILL: 0.5}, seed=3)
    injector = FunctionFaultInjector(plan)
    first = [injector.draw("f") for _ in range(20)]
    injector.replace(FunctionFaultPlan())
    assert injector.draw("f") is None
    injector.replace(plan)
    assert [injector.draw("f") for _ in range(20)] == first


@pytest.mark.parametrize(
    "settings",
    [
        {"probabilities": {KILL: -0.1}},
        {"probabilities": {KILL: 0.6, FREEZE: 0.6}},
        {"probabilities": {KILL: float("nan")}},
        {"within_seconds": -1.0},
        {"freeze_seconds": -1.0},
    ],
)
def test_impossible_plans_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        FunctionFaultPlan(**settings)  # type: ignore[arg-type]


def test_a_fault_in_the_past_is_refused() -> None:
    with pytest.raises(ValueError, match="after_seconds must be at least 0, not -1"):
        FunctionFault(kind=KILL, after_seconds=-1.0)
