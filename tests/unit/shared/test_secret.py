"""A tenant's secret, and what is derived from it."""

from __future__ import annotations

import base64
import pickle
from dataclasses import replace

import pytest

from stoker._cache.index import is_name, size_of
from stoker._shared.secret import TierSecret
from stoker.errors import ConfigError
from support.shared_tier import OTHER_SECRET, SECRET, object_of


def test_a_secret_is_read_as_it_was_printed() -> None:
    text = SECRET.reveal()
    for each in (text, f" {text}\n", base64.b64encode(bytes(range(32))).decode()):
        assert TierSecret.parse(each).token == SECRET.token


@pytest.mark.parametrize("text", ["", " ", "short", "not base64 at all!", base64.b64encode(bytes(31)).decode()])
def test_what_is_no_secret_is_an_error_that_says_how_to_make_one(text: str) -> None:
    with pytest.raises(ConfigError, match="stoker tier secret") as caught:
        TierSecret.parse(text)
    assert not text.strip() or text.strip() not in str(caught.value)


def test_a_server_has_a_secret_for_each_tenant() -> None:
    both = f"{SECRET.reveal()},{OTHER_SECRET.reveal()}"
    found = TierSecret.parse_all({"STOKER_TIER_SECRET": both})
    assert [each.tenant for each in found] == [SECRET.tenant, OTHER_SECRET.tenant]
    with pytest.raises(ConfigError, match="twice"):
        TierSecret.parse_all({"STOKER_TIER_SECRET": f"{both},{SECRET.reveal()}"})
    with pytest.raises(ConfigError, match="is not set"):
        TierSecret.parse_all({})


def test_nothing_that_is_derived_is_another_or_the_secret() -> None:
    found = {
        SECRET.token,
        SECRET.metrics_token,
        SECRET.tenant,
        SECRET.group_id("d"),
        SECRET.group_id("e"),
        SECRET.reveal(),
    }
    assert len(found | {SECRET.shards_key.hex(), SECRET._names_key.hex()}) == 8
    assert SECRET.reveal() not in repr(SECRET)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(SECRET)


def test_a_name_depends_on_secret_and_identity_and_size_and_on_whether_the_identity_is_strong() -> None:
    ref, _ = object_of(1)
    refs = [ref, replace(ref, size_bytes=9_999), replace(ref, sha256_128=None), replace(ref, sha256_128=bytes(16))]
    names = {secret.object_name(each) for secret in (SECRET, OTHER_SECRET) for each in refs}
    assert len(names) == 8
    assert all(map(is_name, names))
    assert {size_of(name) for name in names} == {10_000, 9_999}


def test_the_name_of_bytes_is_that_of_their_object() -> None:
    ref, data = object_of(1)
    name = SECRET.object_name(ref)
    assert SECRET.is_name_of(name, memoryview(data))
    assert not SECRET.is_name_of(name, memoryview(data[:-1]))
    assert not OTHER_SECRET.is_name_of(name, memoryview(data))
