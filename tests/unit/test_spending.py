"""Amounts of dollars, and the limit on them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from stoker._cost.prices import CostBudget, parse_dollars
from stoker.errors import ConfigError, CostBudgetError, MemoryBudgetError, SpendingWarning
from support.cases import for_each


@pytest.mark.parametrize(
    ("text", "dollars"),
    [
        ("5 USD", 5.0),
        ("5usd", 5.0),
        (" $5 ", 5.0),
        ("0.25", 0.25),
        (".5 USD", 0.5),
        ("1,000 USD", 1000.0),
        ("1_000", 1000.0),
        (7, 7.0),
        (0.001, 0.001),
    ],
)
def test_an_amount_is_a_number_or_text_with_its_currency(text: float | str, dollars: float) -> None:
    assert parse_dollars(text) == dollars


@for_each(
    "text",
    [
        "",
        "0",
        0,
        -1.0,
        "-1",
        float("nan"),
        10**400,
        float("inf"),
        "5 EUR",
        "USD",
        "five",
        "1e3",
        True,
        None,
        [],
        "9" * 41,
        "5\n$",
    ],
)
def test_anything_else_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="must be a positive amount"):
        parse_dollars(text)


def test_a_budget_warns_once_at_80_percent_and_raises_at_100() -> None:
    allowance = CostBudget(5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        allowance.check(3.999)
    with pytest.warns(SpendingWarning, match=r"\$4 of \$5 has been spent$"):
        allowance.check(4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        allowance.check(4.9)
        with pytest.raises(CostBudgetError, match=r"\$5\.1 of \$5 has been spent; .*state_dict\(\)") as caught:
            allowance.check(5.1)
    assert (caught.value.spent_dollars, caught.value.budget_dollars) == (5.1, 5.0)
    assert not isinstance(caught.value, MemoryBudgetError)


def test_each_rank_has_an_equal_part() -> None:
    allowance = CostBudget(8.0, 4)
    with pytest.warns(SpendingWarning, match=r"of \$2, this rank's share of a budget of \$8 for 4 ranks"):
        allowance.check(1.7)
    with pytest.raises(CostBudgetError):
        allowance.check(2.0)
