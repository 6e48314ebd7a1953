"""Deprecated names: each works, warns the caller with its present name, and stands in the documentation."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from stoker import FetchConfig, RetryPolicy
from stoker._deprecation import RENAMED
from stoker.errors import ArgumentError
from stoker.fanout import FanoutConfig, Report
from stoker.trace import OpenTelemetrySink
from stoker_torch._config import MOVED_SETTINGS
from support.outside_names.python_api import python_api

PAGE = Path(__file__).parents[2] / "docs" / "api" / "index.md"
ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)

CALLABLES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "FanoutConfig": (FanoutConfig, {}),
    "FetchConfig": (FetchConfig, {}),
    "OpenTelemetrySink": (OpenTelemetrySink, {"min_wait_seconds": 0.5}),
    "Report": (Report, dict.fromkeys(Report.__dataclass_fields__, 0)),
    "RetryPolicy": (RetryPolicy, {}),
}
"""Class or function with deprecated arguments → itself, and its arguments by their present names."""

ARGUMENTS = [(owner, old, new) for owner in CALLABLES for old, new in RENAMED[owner].items()]
FIELDS = [row for row in ARGUMENTS if is_dataclass(CALLABLES[row[0]][0])]


def test_each_deprecated_name_is_in_a_table_of_this_module() -> None:
    list(python_api(PAGE))  # imports all that is public
    assert set(RENAMED) == {*CALLABLES}


@pytest.mark.parametrize(("owner", "old", "new"), ARGUMENTS)
def test_a_deprecated_argument_is_taken_with_a_warning_to_the_caller(owner: str, old: str, new: str) -> None:
    function, settings = CALLABLES[owner]
    parameter = inspect.signature(function).parameters[new]
    value = settings.get(new, parameter.default)
    others = {name: each for name, each in settings.items() if name != new}
    with pytest.warns(DeprecationWarning, match=rf"^{owner}\({old}=…\) is deprecated: write {new}=$") as caught:
        result = function(**others, **{old: value})
    assert [each.filename for each in caught] == [__file__]
    if is_dataclass(function):
        assert result == function(**others, **{new: value})
    assert old not in inspect.signature(function).parameters


@pytest.mark.parametrize(("owner", "old", "new"), ARGUMENTS)
def test_an_argument_by_both_names_is_an_error(owner: str, old: str, new: str) -> None:
    function, settings = CALLABLES[owner]
    with pytest.raises(ArgumentError, match=f"^{owner} is given {old}= beside {new}="):
        function(**{**settings, old: 1, new: 1})


@pytest.mark.parametrize(("owner", "old", "new"), FIELDS)
def test_a_deprecated_field_is_read_with_a_warning_to_the_caller(owner: str, old: str, new: str) -> None:
    kind, settings = CALLABLES[owner]
    value = kind(**settings)
    with pytest.warns(DeprecationWarning, match=rf"^{owner}\.{old} is deprecated: write {new}$") as caught:
        assert getattr(value, old) == getattr(value, new)
    assert [each.filename for each in caught] == [__file__]


def test_a_config_with_deprecated_names_is_pickled_as_before() -> None:
    config = FetchConfig(start_concurrency=5, max_concurrency=6)
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - pickled by this test


def documented() -> Iterator[tuple[str, str, str]]:
    """Yield the rows that the page must have: where, deprecated name, present name."""
    for owner, renamed in RENAMED.items():
        yield from ((owner, old, new) for old, new in renamed.items())
    for old, moved in MOVED_SETTINGS.items():
        for owner in ("Loader", "StreamDataset"):
            yield owner, old, f"{moved.setting}={moved.options.__name__}({moved.field}=…)"


def test_the_page_of_deprecated_names_has_all_of_them() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Deprecated names")[2]
    assert ROW.findall(text) == sorted(documented()), "\n".join(
        f"| `{owner}` | `{old}` | `{new}` |" for owner, old, new in sorted(documented())
    )
