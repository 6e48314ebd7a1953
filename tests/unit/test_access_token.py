"""Tokens: what was signed is read back, and nothing else is."""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64encode
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker._stores.access_token import DATASET_NAME, SKEW_SECONDS, Grant, format_key, parse_expiry
from stoker.errors import ConfigError, CredentialsError
from stoker_functions.serve import TokenKeys
from support.cases import for_each

OLD, NEW = b"o" * 32, b"n" * 48
KEYS = TokenKeys({"new": NEW, "old": OLD})
NOW = 1_800_000_000
GRANT = Grant(datasets=("train", "val_2"), not_before_seconds=NOW, expires_seconds=NOW + 3600)
TOKEN = KEYS.sign(GRANT)
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_."


def refused(token: str, keys: TokenKeys = KEYS, now_seconds: float = NOW + 1) -> str:
    with pytest.raises(CredentialsError) as caught:
        keys.verify(token, now_seconds)
    return str(caught.value)


grants = st.builds(
    lambda names, start, length: Grant(datasets=tuple(names), not_before_seconds=start, expires_seconds=start + length),
    st.lists(st.from_regex(DATASET_NAME, fullmatch=True), min_size=1, max_size=64),
    st.integers(0, 1 << 40),
    st.integers(1, 366 * 24 * 3600),
)


@given(grants, st.binary(min_size=32, max_size=64))
def test_what_was_signed_is_read_back_and_is_fit_for_a_header(grant: Grant, secret: bytes) -> None:
    keys = TokenKeys({"k": secret})
    token = keys.sign(grant)
    assert keys.verify(token, grant.not_before_seconds) == grant
    assert re.fullmatch(r"[A-Za-z0-9._-]+", token)


@given(st.integers(0, len(TOKEN) - 1), st.sampled_from(ALPHABET))
def test_a_token_with_another_character_anywhere_is_refused(place: int, character: str) -> None:
    changed = TOKEN[:place] + character + TOKEN[place + 1 :]
    if changed != TOKEN:
        refused(changed)


@given(st.integers(0, len(TOKEN) - 1), st.integers(0, len(TOKEN) - 1))
def test_a_token_without_some_of_its_characters_is_refused(start: int, end: int) -> None:
    start, end = sorted((start, end))
    refused(TOKEN[:start] + TOKEN[end + 1 :])


@given(st.text(max_size=200))
def test_what_is_no_token_is_refused(text: str) -> None:
    refused(text)


@pytest.mark.parametrize("behind", ["=", "==", " ", "\n", ".", "A", "\0"])
def test_there_is_one_spelling_of_a_token(behind: str) -> None:
    refused(TOKEN + behind)
    refused(behind + TOKEN)
    head, _, signature = TOKEN.rpartition(".")
    refused(f"{head}{behind}.{signature}")


def test_the_last_bits_of_a_signature_count_too() -> None:
    """The last of 43 characters carries two bits that base64url leaves unused."""
    last = TOKEN[-1]
    same_bytes = {a for a in ALPHABET[:-1] if a != last and ALPHABET.index(a) >> 2 == ALPHABET.index(last) >> 2}
    assert same_bytes
    for other in same_bytes:
        refused(TOKEN[:-1] + other)


def test_a_token_holds_from_its_start_to_its_end_give_or_take_the_clocks() -> None:
    for now_seconds in (NOW - SKEW_SECONDS, NOW, NOW + 3599, NOW + 3600 + SKEW_SECONDS - 1):
        assert KEYS.verify(TOKEN, now_seconds) == GRANT
    for now_seconds in (0.0, NOW - SKEW_SECONDS - 1, NOW + 3600 + SKEW_SECONDS, 1e12):
        refused(TOKEN, now_seconds=now_seconds)


def test_any_of_the_keys_checks_and_the_first_one_signs() -> None:
    of_old = TokenKeys({"old": OLD}).sign(GRANT)
    assert KEYS.verify(of_old, NOW) == GRANT
    assert TOKEN.split(".")[:2] == ["stoker1", "new"]
    refused(TOKEN, TokenKeys({"old": OLD}))
    refused(of_old.replace(".old.", ".new."))
    refused(of_old, TokenKeys({"old": NEW}))


def test_a_refusal_does_not_say_why() -> None:
    said = {
        refused(""),
        refused(TOKEN[:-1]),
        refused(TOKEN, now_seconds=0),
        refused(TOKEN, TokenKeys({"other": NEW})),
        refused(TOKEN, TokenKeys({"new": OLD})),
    }
    assert len(said) == 1


@pytest.mark.parametrize(
    "payload",
    [
        {},
        [],
        None,
        {"datasets": ["train"], "expires": NOW + 9},
        {"datasets": ["train"], "expires": "soon", "not_before": NOW},
        {"datasets": ["../x"], "expires": NOW + 9, "not_before": NOW},
        {"datasets": 3, "expires": NOW + 9, "not_before": NOW},
        {"datasets": [], "expires": NOW + 9, "not_before": NOW},
    ],
)
def test_a_payload_that_another_program_signed_with_our_key_is_refused(payload: Any) -> None:
    from stoker._stores import access_token

    encoded = urlsafe_b64encode(json.dumps(payload).encode()).rstrip(b"=").decode()
    signed = f"stoker1.new.{encoded}"
    refused(f"{signed}.{access_token._signature(NEW, signed)}")


def test_keys_are_read_as_they_are_written() -> None:
    text = f"{format_key('new', NEW)}  {format_key('old', OLD)}\n"
    assert TokenKeys.parse(text).verify(TOKEN, NOW) == GRANT
    assert TokenKeys.parse(text).sign(GRANT) == TOKEN
    assert "n" * 8 not in repr(KEYS)


@for_each(
    "text",
    [
        "",
        "  ",
        "MARKER-without-an-id",
        "MARKERMARKERMARKERMARKERMARKERMARKERMARKERMA",
        "k:",
        "k:MARKER!",
        "k:MARKERMARKER",
        f"k:{'MARKER' * 8}=",
        f"k:{'MARKER' * 8} k:{'MARKER' * 8}",
        f"k/1:{'MARKER' * 8}",
        f"{'k' * 33}:{'MARKER' * 8}",
    ],
)
def test_keys_that_are_none_are_refused_without_repeating_them(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TokenKeys.parse(text)
    assert "MARKER" not in str(caught.value)


@for_each(
    ("datasets", "start", "end"),
    [
        ((), 0, 1),
        (("a",) * 65, 0, 1),
        (("a/b",), 0, 1),
        (("",), 0, 1),
        (("ünïcode",), 0, 1),
        (("a\n",), 0, 1),
        (("a",), 5, 5),
        (("a",), 5, 4),
        (("a",), -1, 4),
        (("a",), 0, 367 * 24 * 3600),
    ],
)
def test_a_grant_of_nothing_or_for_ever_is_refused(datasets: tuple[str, ...], start: int, end: int) -> None:
    with pytest.raises(ConfigError):
        Grant(datasets=datasets, not_before_seconds=start, expires_seconds=end)


def test_the_expiry_of_a_token_can_be_read_without_the_key() -> None:
    grant = Grant(datasets=("train",), not_before_seconds=0, expires_seconds=86400)
    token = TokenKeys({"k": b"s" * 32}).sign(grant)
    assert parse_expiry(token) == datetime(1970, 1, 2, tzinfo=UTC)
    head, payload, signature = token.rsplit(".", 2)
    assert parse_expiry(f"{head}.{payload}.{'A' * 43}") == parse_expiry(token)
    assert [parse_expiry(text) for text in ("", "stoker1", f"{head}.{payload}", f"{head}.!.{signature}")] == [None] * 4
    late = Grant(datasets=("train",), not_before_seconds=1 << 60, expires_seconds=(1 << 60) + 1)
    assert parse_expiry(TokenKeys({"k": b"s" * 32}).sign(late)) is None
