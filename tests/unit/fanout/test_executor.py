from __future__ import annotations

import sys
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from stoker import errors
from stoker.errors import ConfigError, FunctionError, MissingExtraError, ServerError, ThrottledError, TransientError
from stoker.fanout import ExecutorOptions, error_of_function, executor_names, open_executor
from support.cases import for_each


def test_the_executors_of_stoker_are_installed() -> None:
    assert {"gcf", "lambda", "local", "ray"} <= set(executor_names())


def test_an_unknown_executor_is_refused_with_the_names_of_those_that_are_installed() -> None:
    with pytest.raises(ConfigError, match=r"'slurm'; installed: .*lambda, local"):
        open_executor("slurm", ExecutorOptions())


def install(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    installed = EntryPoints(EntryPoint(name, value, "stoker.executors") for name, value in points.items())
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: installed.select(group=group))


def test_an_executor_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mine="stoker_functions._executors:open_lambda")
    executor = open_executor("mine", ExecutorOptions(concurrency=3))
    assert executor.concurrency == 3
    assert executor_names() == ("mine",)


@pytest.mark.parametrize("value", ["no_such_module:thing", "stoker_functions._executors:no_such_thing"])
def test_an_entry_point_that_leads_nowhere_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    install(monkeypatch, broken=value)
    with pytest.raises(MissingExtraError, match=f"broken \\({value}\\) cannot be loaded"):
        open_executor("broken", ExecutorOptions())


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [("lambda", "botocore.auth", "aws"), ("gcf", "gcloud.aio.auth", "gcp"), ("ray", "ray", "ray")],
)
def test_an_executor_without_its_sdk_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, missing: str, extra: str
) -> None:
    ours = ("stoker_functions._executors.", "stoker._stores.google_credentials")
    for module_name in [each for each in sys.modules if each.startswith(ours)]:
        monkeypatch.delitem(sys.modules, module_name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'stoker\[{extra}\]'"):
        open_executor(name, ExecutorOptions(region="here", project="mine"))


@pytest.mark.parametrize("name", ["concurrency", "timeout_seconds", "memory_bytes", "vcpus"])
@pytest.mark.parametrize("value", [0, -1])
def test_options_that_are_not_greater_than_zero_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be more than 0"):
        ExecutorOptions(**{name: value})  # type: ignore[arg-type]


def test_credentials_in_an_endpoint_are_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        ExecutorOptions(endpoint_url="https://user:secret@host")
    assert "secret" not in str(caught.value)


def test_settings_of_functions_are_not_in_the_options_text() -> None:
    assert "hidden" not in repr(ExecutorOptions(environment={"STOKER_CATALOG_PASSWORD": "hidden"}))


@for_each("name", [each for each in errors.__all__ if issubclass(getattr(errors, each), TransientError)])
def test_a_functions_transient_error_keeps_its_class(name: str) -> None:
    error = error_of_function("pack", name, "try later")
    assert type(error).__name__ == name
    assert "pack gave up: try later" in str(error)


@pytest.mark.parametrize(
    "name",
    ["SchemaError", "BudgetError", "StokerError", "ZeroDivisionError", "annotations", "Mapping", "__name__", "", "a.b"],
)
def test_any_other_error_of_a_function_is_final(name: str) -> None:
    error = error_of_function("pack", name, "it is broken")
    assert isinstance(error, FunctionError)
    assert (error.error_type, error.error_message) == (name, "it is broken")


def test_a_very_long_message_of_a_function_is_cut() -> None:
    assert len(str(error_of_function("pack", "KeyError", "x" * 100_000))) < 3000


def test_throttling_and_failing_inside_are_different_things() -> None:
    assert isinstance(error_of_function("pack", "ThrottledError", ""), ThrottledError)
    assert not isinstance(error_of_function("pack", "ServerError", ""), ThrottledError)
    assert isinstance(error_of_function("pack", "ServerError", ""), ServerError)
