"""``stoker token``: keys from the environment, never in the arguments."""

from __future__ import annotations

import time

import pytest

from stoker import cli
from stoker_functions.serve import TokenKeys

VARIABLE = "STOKER_TOKEN_KEYS"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["token", *arguments]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_a_new_key_makes_tokens_for_the_data_sets_and_hours_that_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = printed(capsys, "--new-key", "first")
    assert key != printed(capsys, "--new-key", "first")
    monkeypatch.setenv(VARIABLE, f"{key} {printed(capsys, '--new-key', 'second')}")
    before_seconds = int(time.time())
    token = printed(capsys, "--dataset", "train", "--dataset", "val", "--hours", "1.5")
    grant = TokenKeys.parse(key).verify(token, before_seconds)
    assert grant.datasets == ("train", "val")
    assert grant.expires_seconds - grant.not_before_seconds == 5400
    assert before_seconds <= grant.not_before_seconds <= time.time()
    day = TokenKeys.parse(key).verify(printed(capsys, "--dataset", "train"), before_seconds)
    assert day.expires_seconds - day.not_before_seconds == 24 * 3600


@pytest.mark.parametrize("keys", [None, "", "nonsense", "k:c2hvcnQ"])
def test_without_a_valid_key_there_is_no_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keys: str | None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if keys is not None:
        monkeypatch.setenv(VARIABLE, keys)
    assert cli.main(["token", "--dataset", "train"]) == 2
    assert ("the key k " if keys == "k:c2hvcnQ" else VARIABLE) in capsys.readouterr().err


def test_a_name_that_cannot_be_served_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, printed(capsys, "--new-key", "first"))
    assert cli.main(["token", "--dataset", "../train"]) == 2
    assert cli.main(["token", "--new-key", "not an id"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--dataset", "a", "--new-key", "k"],
        *(["--dataset", "a", "--hours", h] for h in ("0", "-1", "x", "nan", "9999")),
    ],
)
def test_wrong_usage_of_token_is_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["token", *arguments])
    assert left.value.code == 2


def test_a_new_key_has_no_hours(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["token", "--new-key", "first", "--hours", "3"]) == 2
    assert "--hours is for tokens" in capsys.readouterr().err
