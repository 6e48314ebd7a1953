"""Deprecated names: each works, warns the caller with its present name, and stands in the documentation."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker import Bytes, FetchConfig, RetryPolicy, Schema
from stoker._cache.index import CacheTierStatistics
from stoker._deprecation import RENAMED
from stoker.errors import ArgumentError, ConfigError, MemoryBudgetError
from stoker.fanout import FanoutConfig, Report
from stoker.images import RandomResizedCrop
from stoker.testing import StoreLocation
from stoker.trace import Fetch, OpenTelemetrySink, Phase, Span
from stoker_local.functions import FunctionEvent, QueueSpec
from stoker_local.functions._triggers import create_queues
from stoker_sim import BucketModel, recorded_bucket, recorded_latency
from stoker_torch import CacheStatistics, LoaderPlan, LoaderStatistics, Preemption, PrefetchSampler
from stoker_torch._options import MOVED_SETTINGS
from stoker_torch._sample_cache import LookupStatistics
from support.cases import for_each
from support.outside_names.python_api import python_api

PAGE = Path(__file__).parents[2] / "docs" / "api" / "index.md"
ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)


def _zeros(kind: type[Any]) -> dict[str, Any]:
    return {field.name: 0 for field in fields(kind)}


SAMPLER = {
    "sampler": range(8),
    "dataset": SimpleNamespace(cache=SimpleNamespace(samples=8)),
    "unread_samples": 2,
}

CALLABLES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "BucketModel": (BucketModel, {}),
    "CacheStatistics": (CacheStatistics, _zeros(CacheStatistics)),
    "CacheTierStatistics": (CacheTierStatistics, _zeros(CacheTierStatistics)),
    "FanoutConfig": (FanoutConfig, {}),
    "Fetch": (Fetch, _zeros(Fetch)),
    "FetchConfig": (FetchConfig, {}),
    "FunctionEvent": (FunctionEvent, _zeros(FunctionEvent)),
    "LoaderPlan": (LoaderPlan, _zeros(LoaderPlan)),
    "LoaderPlan.check_dollars": (LoaderPlan(**_zeros(LoaderPlan)).check_dollars, {"max_dollars": 1.0}),
    "LoaderStatistics": (LoaderStatistics, _zeros(LoaderStatistics)),
    "LookupStatistics": (LookupStatistics, _zeros(LookupStatistics)),
    "OpenTelemetrySink": (OpenTelemetrySink, {"min_wait_seconds": 0.5}),
    "Preemption": (Preemption, {"save": print, "signals": (), "grace_seconds": 2.0, "wait_seconds": 1.0}),
    "PrefetchSampler.full_fetch": (PrefetchSampler.full_fetch, SAMPLER),
    "PrefetchSampler.half_and_half": (PrefetchSampler.half_and_half, SAMPLER),
    "Report": (Report, _zeros(Report)),
    "RetryPolicy": (RetryPolicy, {}),
    "recorded_bucket": (recorded_bucket, {"events": ()}),
    "recorded_latency": (recorded_latency, {"events": ()}),
}
"""Class or function with deprecated arguments → itself, and its arguments by their present names."""

OBJECTS: dict[str, object] = {
    **{owner: kind(**settings) for owner, (kind, settings) in CALLABLES.items() if is_dataclass(kind)},
    "LocalQueue": create_queues([QueueSpec(name="q")], seed=0, clock=lambda: 0.0)["q"],
    "RandomResizedCrop": RandomResizedCrop(),
    "Schema": Schema({"x": Bytes()}),
    "StoreLocation": StoreLocation(url="memory://anywhere"),
    "Span": Span(Phase.OTHER, 0.0, 1.0),
}
"""Class with deprecated attributes → an object of it."""

MODULES = (
    "stoker",
    "stoker.errors",
    "stoker.testing",
    "stoker_functions",
    "stoker_functions.serve",
    "stoker_local",
    "stoker_local.functions",
)

MEMBERS = [(owner, old, new) for owner in {**CALLABLES, **OBJECTS} for old, new in RENAMED[owner].items()]
ARGUMENTS = [
    (owner, old, new)
    for owner, old, new in MEMBERS
    if owner in CALLABLES and new in inspect.signature(CALLABLES[owner][0]).parameters
]
ATTRIBUTES = [(owner, old, new) for owner, old, new in MEMBERS if owner in OBJECTS]
NAMES = [(module, old, new) for module in MODULES for old, new in RENAMED[module].items()]


def test_each_deprecated_name_is_in_a_table_of_this_module() -> None:
    list(python_api(PAGE))  # imports all that is public
    assert set(RENAMED) == {*CALLABLES, *OBJECTS, *MODULES, "cache policy", "environment variable"}
    assert {*ARGUMENTS, *ATTRIBUTES} == {*MEMBERS}


@for_each(("owner", "old", "new"), ARGUMENTS)
def test_a_deprecated_argument_is_taken_with_a_warning_to_the_caller(owner: str, old: str, new: str) -> None:
    function, settings = CALLABLES[owner]
    value = settings.get(new, inspect.signature(function).parameters[new].default)
    others = {name: each for name, each in settings.items() if name != new}
    message = re.escape(f"{owner}({old}=…) is deprecated: write {new}=")
    with pytest.warns(DeprecationWarning, match=f"^{message}$") as caught, suppress(ConfigError):  # of an empty trace
        result = function(**others, **{old: value})
    assert [each.filename for each in caught] == [__file__]
    if is_dataclass(function):
        assert getattr(result, new) == value
    assert old not in inspect.signature(function).parameters


def test_code_without_a_module_name_is_warned_as_well() -> None:
    with pytest.warns(DeprecationWarning, match=r"write start_concurrency="):
        exec("FanoutConfig(start=1)", {"FanoutConfig": FanoutConfig})  # noqa: S102 - as an interpreter embeds code


@for_each(("owner", "old", "new"), ARGUMENTS)
def test_an_argument_by_both_names_is_an_error(owner: str, old: str, new: str) -> None:
    function, settings = CALLABLES[owner]
    with pytest.raises(
        ArgumentError, match=f"^{re.escape(owner)} got {old}=, the deprecated name of {new}=, and {new}= itself"
    ):
        function(**{**settings, old: 1, new: 1})


@for_each(("owner", "old", "new"), ATTRIBUTES)
def test_a_deprecated_attribute_is_read_with_a_warning_to_the_caller(owner: str, old: str, new: str) -> None:
    value = OBJECTS[owner]
    with pytest.warns(DeprecationWarning, match=rf"^{owner}\.{old} is deprecated: write {new}$") as caught:
        assert getattr(value, old) == getattr(value, new)
    assert [each.filename for each in caught] == [__file__]


@for_each(("module", "old", "new"), NAMES)
def test_a_deprecated_name_of_a_module_is_the_present_object_with_a_warning(module: str, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"^{module}\.{old} is deprecated: write {new}$") as caught:
        value = getattr(import_module(module), old)
    assert [each.filename for each in caught] == [__file__]
    assert value is getattr(import_module(module), new)
    assert old not in dir(import_module(module))
    with pytest.raises(AttributeError, match=f"^module '{module}' has no attribute '{old}_'$"):
        getattr(import_module(module), f"{old}_")


@for_each(("module", "old", "new"), NAMES)
def test_a_deprecated_name_is_imported_from_its_module_with_a_warning(module: str, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"^{module}\.{old} is deprecated: write {new}$") as caught:
        exec(f"from {module} import {old}", {"__name__": __name__})  # noqa: S102 - the names are ours
    assert {each.filename for each in caught} == {"<string>"}


def test_an_object_that_was_pickled_by_its_earlier_class_name_is_read() -> None:
    present = pickle.dumps(MemoryBudgetError("too small"), protocol=0)
    with pytest.warns(DeprecationWarning, match=r"^stoker\.errors\.BudgetError is deprecated"):
        error = pickle.loads(present.replace(b"MemoryBudgetError", b"BudgetError"))  # noqa: S301 - pickled by this test
    assert (type(error), error.args) == (MemoryBudgetError, ("too small",))


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
