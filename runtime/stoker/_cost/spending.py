"""A limit on dollars: warns when most of it is spent, and ends the run when all of it is."""

from __future__ import annotations

import math
import re
import warnings
from contextlib import suppress

from stoker.errors import BudgetExceededError, ConfigError, SpendingWarning

__all__ = ["Allowance", "parse_dollars"]

_WARN_SHARE = 0.8
_DOLLARS = re.compile(r"\$?\s*(\d[\d_,]*(?:\.\d+)?|\.\d+)\s*(USD)?", re.ASCII | re.IGNORECASE)
_MAX_TEXT = 40


def parse_dollars(text: float | str) -> float:
    """Return an amount of US dollars that is more than nothing.

    Args:
        text: a number, or text such as ``"5 USD"``, ``"$5"`` or ``"0.25"``.

    Raises:
        ConfigError: it is no such amount.
    """
    dollars = math.nan
    if isinstance(text, int | float) and not isinstance(text, bool):
        with suppress(OverflowError):  # an integer of hundreds of digits
            dollars = float(text)
    elif isinstance(text, str) and len(text) <= _MAX_TEXT and (match := _DOLLARS.fullmatch(text.strip())):
        dollars = float(match[1].replace("_", "").replace(",", ""))
    if not 0 < dollars < math.inf:
        raise ConfigError(f"{text!r:.{_MAX_TEXT}} is not an amount of dollars; write for example '5 USD' or 5.0")
    return dollars


class Allowance:
    """What one rank of a job may spend.

    Args:
        budget_dollars: of the whole job.
        takers: how many share it evenly.
    """

    __slots__ = ("_dollars", "_has_warned", "_of")

    def __init__(self, budget_dollars: float, takers: int = 1) -> None:
        self._dollars = budget_dollars / takers
        self._of = f"${self._dollars:.6g}" + (
            f", this rank's part of a budget of ${budget_dollars:.6g} for {takers} ranks" if takers > 1 else ""
        )
        self._has_warned = False

    def check(self, spent_dollars: float) -> None:
        """Warn once when 80% are spent.

        Raises:
            BudgetExceededError: all of it is spent.
        """
        if spent_dollars >= self._dollars:
            raise BudgetExceededError(
                f"${spent_dollars:.6g} are spent of {self._of}. Nothing is lost: save state_dict(), and load it into a "
                "loader with a budget of its own to go on",
                spent_dollars=spent_dollars,
                budget_dollars=self._dollars,
            )
        if not self._has_warned and spent_dollars >= _WARN_SHARE * self._dollars:
            self._has_warned = True
            warnings.warn(f"${spent_dollars:.6g} are spent of {self._of}", SpendingWarning, stacklevel=4)
