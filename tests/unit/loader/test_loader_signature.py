"""What the signatures of loaders show, and that settings of earlier releases are still taken."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from stoker import FetchConfig
from stoker.errors import ArgumentError
from stoker_torch import Budget, Loader, LoaderConfig, StreamConfig, StreamDataset, WorkerOptions
from support.datasets import pack_numbers

PAIRS: list[tuple[Callable[..., Any], type[StreamConfig]]] = [(Loader, LoaderConfig), (StreamDataset, StreamConfig)]


@pytest.fixture(scope="module")
def url() -> str:
    return pack_numbers(20)


@pytest.mark.parametrize(("kind", "config"), PAIRS)
def test_a_signature_has_every_setting_with_its_type_and_default(
    kind: Callable[..., Any], config: type[StreamConfig]
) -> None:
    parameters = inspect.signature(kind).parameters
    assert list(parameters) == ["url", *(each.name for each in fields(config))]
    assert parameters["url"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {each.kind for name, each in parameters.items() if name != "url"} == {inspect.Parameter.KEYWORD_ONLY}
    assert parameters["memory"].annotation == int | str
    assert parameters["memory"].default == "512MB"
    assert parameters["fetch"].default == FetchConfig()
    assert not any(isinstance(each.annotation, str) for each in parameters.values())


@pytest.mark.parametrize(("kind", "config"), PAIRS)
def test_help_describes_every_setting(kind: Callable[..., Any], config: type[StreamConfig]) -> None:
    text = pydoc.plain(pydoc.render_doc(kind))
    assert all(f" {each.name}: " in text for each in fields(config))


@pytest.mark.parametrize(("kind", "config"), PAIRS)
def test_a_signature_reads_as_a_user_would_write_it(kind: Callable[..., Any], config: type[StreamConfig]) -> None:
    text = str(inspect.signature(kind))
    named = re.findall(r"\b(stoker\w*(?:\.\w+)*)\.(\w+)", text)
    assert {name for _, name in named} >= {"Tier", "Schedule", "FetchConfig", "S3Options", "WorkerOptions", "Budget"}
    for module, name in named:
        assert name in importlib.import_module(module).__all__, f"{module}.{name} is not public"
    assert "fetch: stoker.FetchConfig = FetchConfig()," in text
    assert "schedule: stoker.Schedule = Continuous()," in text


def test_a_batch_size_must_be_given_to_a_loader_alone() -> None:
    assert inspect.signature(Loader).parameters["batch_size"].default is inspect.Parameter.empty
    assert inspect.signature(StreamDataset).parameters["batch_size"].default is None


@pytest.mark.parametrize(
    ("construct", "said"),
    [
        (lambda url: Loader(batch_size=4), r"^Loader needs the argument url="),  # type: ignore[call-arg]
        (lambda url: Loader(url, 4), r"^Loader takes only url by position; pass the other arguments by name"),  # type: ignore[call-arg]
        (lambda url: StreamDataset(url, pin_memory=True), r"give DataLoader pin_memory=True"),  # type: ignore[call-arg]
        (lambda url: Budget(epoch=1), r"^Budget has no argument epoch="),  # type: ignore[call-arg]
    ],
)
def test_missing_and_misplaced_arguments_are_reported(url: str, construct: Callable[[str], object], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        construct(url)


@pytest.mark.parametrize(
    ("name", "value", "new"),
    [
        ("timeout", 300, WorkerOptions(timeout_seconds=300)),
        ("max_bad_samples", 3, WorkerOptions(max_bad_samples=3)),
        ("max_dollars_per_epoch", 5.0, Budget(max_dollars_per_epoch=5.0)),
        ("egress", "internet", Budget(egress="internet")),
    ],
)
@pytest.mark.parametrize(("kind", "config"), PAIRS)
def test_a_setting_that_has_moved_is_taken_with_a_warning_that_names_its_place(
    url: str, kind: Callable[..., Any], config: type[StreamConfig], name: str, value: Any, new: Any
) -> None:
    setting = "workers" if isinstance(new, WorkerOptions) else "budget"
    with pytest.warns(DeprecationWarning, match=rf"\({name}=…\) is deprecated: write {setting}=") as warned:
        made = kind(url, batch_size=4, **{name: value})
    assert warned[0].filename == __file__
    assert getattr(made.config, setting) == new
    with pytest.warns(DeprecationWarning, match=rf"\.{name} is deprecated: read \.{setting}"):
        assert getattr(made.config, name) == value
    made.close()
    with pytest.raises(ArgumentError, match=rf"got both {name}= and {setting}=; write {setting}="):
        config(**{"batch_size": 4, setting: new, name: value})


def test_settings_that_have_moved_join_the_plain_value_and_each_other() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old: Any = {"workers": 3, "timeout": 9, "max_bad_samples": 2, "budget": "5 USD", "egress": "internet"}
        config = LoaderConfig(batch_size=1, **old)
    assert config.workers == WorkerOptions(threads=3, timeout_seconds=9, max_bad_samples=2)
    assert config.budget == Budget(dollars="5 USD", egress="internet")


def test_a_plain_value_is_that_of_its_options() -> None:
    assert WorkerOptions.of(3) == WorkerOptions(threads=3)
    assert WorkerOptions.of(None) == WorkerOptions()
    assert Budget.of("5 USD") == Budget(dollars="5 USD")
