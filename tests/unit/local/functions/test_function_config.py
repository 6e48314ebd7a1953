from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import MissingExtraError
from stoker_local import KeyPair
from stoker_local.__main__ import main
from stoker_local.functions import (
    EventSource,
    FunctionCloudConfig,
    FunctionFaultKind,
    FunctionSpec,
    GoogleSpec,
    Notification,
    ObjectFinalized,
    QueueSpec,
    Schedule,
    function_cloud,
)
from support.cases import for_each

F = FunctionSpec(name="f", handler="m.f")


@for_each(
    ("changes", "message"),
    [
        ({"name": "a b"}, "function name"),
        ({"name": ""}, "function name"),
        ({"name": "x" * 65}, "function name"),
        ({"name": "é"}, "function name"),
        ({"handler": "f"}, "module.function"),
        ({"task_root": "/does/not/exist"}, "is not a folder"),
        ({"memory_mb": 127}, r"memory_mb.* must be .*, not 127"),
        ({"memory_mb": 10_241}, r"memory_mb.* must be .*, not 10241"),
        ({"tmp_mb": 511}, r"tmp_mb.* must be .*, not 511"),
        ({"timeout_seconds": 0}, r"timeout_seconds.* must be .*, not 0"),
        ({"timeout_seconds": 901}, r"timeout_seconds.* must be .*, not 901"),
        ({"timeout_seconds": float("nan")}, r"timeout_seconds.* must be .*, not nan"),
        ({"concurrency": 0}, r"concurrency.* must be .*, not 0"),
        ({"retries": 3}, r"retries.* must be .*, not 3"),
        ({"url_auth": "OPEN"}, r"url_auth.* must be .*, not 'OPEN'"),
        ({"environment": {"A": "x" * 4096}}, "4097 bytes"),
    ],
)
def test_a_function_that_lambda_would_refuse_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FunctionSpec(**{"name": "f", "handler": "m.f", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Upper"}, "service name"),
        ({"source": "/does/not/exist.py"}, "is not a file"),
        ({"target": "a.b"}, "name of a function"),
        ({"signature": "typed"}, r"signature.* must be .*, not 'typed'"),
        ({"memory_mb": 64}, r"memory_mb.* must be .*, not 64"),
        ({"concurrency": 1001}, r"concurrency.* must be .*, not 1001"),
        ({"timeout_seconds": 3601}, r"timeout_seconds.* must be .*, not 3601"),
    ],
)
def test_a_google_function_that_google_would_refuse_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GoogleSpec(**{"name": "g", "source": __file__, "target": "f", **changes})


def test_a_token_is_not_shown() -> None:
    assert "sesame" not in repr(GoogleSpec(name="g", source=__file__, target="f", token="sesame"))


@pytest.mark.parametrize("rate", ["rate(5 minutes)", "rate(1 minute)", "rate(1 second)", "rate(30 seconds)"])
def test_rates_are_read(rate: str) -> None:
    count, unit = rate[5:-1].split()
    seconds = Schedule(name="s", function="f", rate=rate).period_seconds
    assert seconds == int(count) * (60 if unit.startswith("minute") else 1)


@pytest.mark.parametrize(
    "rate", ["", "5 minutes", "rate(0 minutes)", "rate(1 minutes)", "rate(2 minute)", "rate(-1 minutes)", "cron(* *)"]
)
def test_what_is_no_rate_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="is not of the form"):
        Schedule(name="s", function="f", rate=rate)


@for_each(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "open to other machines"),  # noqa: S104  (refused)
        ({"host": "example.com"}, "open to other machines"),
        ({"port": 65536}, r"port.* must be .*, not 65536"),
        ({"keys": ()}, "keys are empty"),
        ({"idle_seconds": 0}, r"idle_seconds.* must be .*, not 0"),
        ({"event_retry_seconds": (1.0, -1.0)}, "event_retry_seconds"),
        ({"tmp": "ram"}, r"tmp.* must be .*, not 'ram'"),
        ({"functions": (F, F)}, "function is named twice: f"),
        ({"functions": (F,), "google": (GoogleSpec(name="f", source=__file__, target="f"),)}, "named twice: f"),
        ({"queues": (QueueSpec(name="q", dead_letters="d"),)}, "no queue d"),
        ({"functions": (FunctionSpec(name="f", handler="m.f", on_failure="d"),)}, "no queue d"),
        ({"notifications": (Notification(bucket="b", queue="q"),)}, "no queue q"),
        ({"schedules": (Schedule(name="s", function="g", rate="rate(1 day)"),)}, "no function g"),
        ({"queues": (QueueSpec(name="q"),), "sources": (EventSource(queue="q", function="g"),)}, "no function g"),
        (
            {"queues": (QueueSpec(name="q"),), "finalized": (ObjectFinalized(bucket="b", function="f", queue="q"),)},
            "no Google function f",
        ),
        (
            {"queues": (QueueSpec(name="a", dead_letters="b"), QueueSpec(name="b", dead_letters="a"))},
            "come back to a",
        ),
        (
            {
                "functions": (FunctionSpec(name="f", handler="m.f", timeout_seconds=31),),
                "queues": (QueueSpec(name="q", visibility_seconds=30),),
                "sources": (EventSource(queue="q", function="f"),),
            },
            "visibility_seconds=30 of q is less than timeout_seconds=31 of f",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FunctionCloudConfig(**settings)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (QueueSpec, {"name": "q", "visibility_seconds": 0}, r"visibility_seconds.* must be .*, not 0"),
        (QueueSpec, {"name": "q", "max_receives": 0}, r"max_receives.* must be .*, not 0"),
        (QueueSpec, {"name": "q", "dead_letters": "q"}, "its own queue"),
        (QueueSpec, {"name": "q", "duplicate_probability": 1.0}, r"duplicate_probability.* must be .*, not 1.0"),
        (EventSource, {"queue": "q", "function": "f", "batch_size": 0}, r"batch_size.* must be .*, not 0"),
        (EventSource, {"queue": "q", "function": "f", "window_seconds": 301}, r"window_seconds.* must be .*, not 301"),
        (ObjectFinalized, {"bucket": "b", "function": "f", "queue": "q", "concurrency": 0}, r"concurrency.* not 0"),
    ],
)
def test_impossible_triggers_are_refused(kind: type[Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)


def test_a_configuration_is_read_from_json(tmp_path: Path) -> None:
    document = {
        "keys": [{"access_key": "a", "secret_key": "s"}],
        "functions": [{"name": "f", "handler": "m.f", "task_root": str(tmp_path), "environment": {"A": "b"}}],
        "queues": [{"name": "q"}],
        "notifications": [{"bucket": "raw", "queue": "q", "suffix": ".jpg"}],
        "sources": [{"queue": "q", "function": "f"}],
        "schedules": [{"name": "s", "function": "f", "rate": "rate(1 minute)", "input": {"job": ""}}],
        "faults": {"script": [None, {"kind": "kill", "after_seconds": 0.1}], "probabilities": {"freeze": 0.5}},
        "event_retry_seconds": [0.5, 1.0],
    }
    config = FunctionCloudConfig.from_json(json.dumps(document))
    assert config.functions[0].environment == {"A": "b"}
    assert config.notifications == (Notification(bucket="raw", queue="q", suffix=".jpg"),)
    assert config.faults.probabilities == {FunctionFaultKind.FREEZE: 0.5}
    assert [fault and fault.kind for fault in config.faults.script] == [None, FunctionFaultKind.KILL]
    assert config.event_retry_seconds == (0.5, 1.0)
    assert FunctionCloudConfig.from_json("{}") == FunctionCloudConfig()


@for_each(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "the configuration is of type list, not an object"),
        ('{"warp": 9}', "has an unknown field 'warp'; the fields are: account, environment, "),
        ('{"functions": [{"name": "f"}]}', r"the configuration.functions\[0\] lacks the field 'handler'"),
        ('{"functions": 3}', "functions is of type int, not an array"),
        ('{"functions": {}}', "functions is of type dict, not an array"),
        ('{"schedules": [{"name": "s", "function": "f", "rate": "rate(1 day)", "enabled": "no"}]}', "not bool"),
        ('{"schedules": [{"name": "s", "function": "f", "rate": "rate(1 day)", "input": 3}]}', "not an object"),
        ('{"faults": {"script": [{"kind": "explode"}]}}', r"faults.script\[0\].kind is not one of 'kill', 'freeze'"),
        ('{"faults": {"script": [{"after_seconds": 1}]}}', "lacks the field 'kind'"),
        ('{"faults": {"probabilities": {"boom": 1}}}', "a name in the configuration.faults.probabilities is not one"),
        ('{"event_retry_seconds": [1]}', "event_retry_seconds has 1 elements, not 2"),
        ('{"queues": [[]]}', r"queues\[0\] is of type list"),
        ('{"host": 3}', "host is of type int, not str"),
    ],
)
def test_what_is_no_configuration_is_refused_and_the_place_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FunctionCloudConfig.from_json(text)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"colour": 1}, r"functions\[0\] has an unknown field 'colour'"),
        ({"memory_mb": "512"}, r"functions\[0\].memory_mb is of type str, not int"),
        ({"memory_mb": 512.0}, "memory_mb is of type float, not int"),
        ({"memory_mb": True}, "memory_mb is of type bool, not int"),
        ({"timeout_seconds": True}, "timeout_seconds is of type bool, not float"),
        ({"environment": {"N": 4}}, "environment.N is of type int, not str"),
        ({"environment": []}, "environment is of type list, not an object"),
        ({"url_auth": "OPEN"}, "url_auth is not one of '', 'AWS_IAM', 'NONE'"),
    ],
)
def test_a_field_of_a_function_that_has_another_type_is_refused(field: dict[str, Any], message: str) -> None:
    document = {"functions": [{"name": "f", "handler": "m.f", **field}]}
    with pytest.raises(ValueError, match=message):
        FunctionCloudConfig.from_json(json.dumps(document))


@pytest.mark.parametrize("variables", [{"A=B": "x"}, {"": "x"}, {"1": "x"}, {"A": "sesame\0"}, {"A": "sesame\ud800"}])
def test_variables_that_no_process_can_have_are_refused_without_their_values(variables: dict[str, str]) -> None:
    for make in (
        lambda: FunctionSpec(name="f", handler="m.f", environment=variables),
        lambda: GoogleSpec(name="f", source=__file__, target="f", environment=variables),
        lambda: FunctionCloudConfig(environment=variables),
    ):
        with pytest.raises(ValueError, match="in the environment of") as refusal:
            make()
        assert "sesame" not in str(refusal.value)


def test_no_representation_shows_a_variable_a_token_or_a_key() -> None:
    hidden = {"A": "sesame"}
    config = FunctionCloudConfig(
        keys=(KeyPair(access_key="stoker", secret_key="sesame"),),
        environment=hidden,
        functions=(FunctionSpec(name="f", handler="m.f", environment=hidden),),
        google=(GoogleSpec(name="g", source=__file__, target="g", environment=hidden, token="sesame"),),
    )
    assert "sesame" not in repr(config)


@pytest.mark.parametrize(
    ("config", "runtime"),
    [
        ({"functions": (F,)}, "awslambdaric"),
        ({"google": (GoogleSpec(name="g", source=__file__, target="f"),)}, "functions_framework"),
    ],
    ids=["lambda", "google"],
)
def test_a_missing_runtime_is_reported_at_the_start(
    config: dict[str, Any], runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_local.functions._cloud.find_spec", lambda name: None)

    async def run() -> None:
        async with function_cloud(FunctionCloudConfig(**config)):
            raise AssertionError

    with pytest.raises(MissingExtraError, match=rf"{runtime}; pip install 'stoker\[local\]'"):
        asyncio.run(run())


def test_a_runtime_that_nothing_needs_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker_local.functions._cloud.find_spec", lambda name: None)

    async def run() -> None:
        async with function_cloud(FunctionCloudConfig()):
            pass

    asyncio.run(run())


@pytest.mark.parametrize(
    ("content", "message"),
    [(b'{"functions": [', "not JSON"), (b'{"function": []}', "function"), (b"\xff", "decode")],
    ids=["not JSON", "unknown name", "not text"],
)
def test_a_mistake_in_a_file_of_the_program_names_the_file(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cloud.json"
    path.write_bytes(content)
    assert main(["functions", "--config", str(path)]) == 1
    said = capsys.readouterr().err
    assert f"stoker_local: {path}: " in said
    assert message in said


def test_a_missing_runtime_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stoker_local.functions._cloud.find_spec", lambda name: None)
    assert main(["functions", "--function", "f=m.f"]) == 1
    assert "awslambdaric" in capsys.readouterr().err
