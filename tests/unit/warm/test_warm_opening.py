"""A warm tier from a setting: what cannot work is refused when the loader is made, not warned of while it reads."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import numpy as np
import pytest

from stoker import Array, Packer, open_store
from stoker._shared.secret import TierSecret
from stoker.errors import ConfigError, MissingExtraError
from stoker_torch import Loader
from stoker_warm._auth import Secret
from stoker_warm._config import WarmLocation
from stoker_warm._opening import mac_of_environment, open_backend, warm_tier_at
from stoker_warm._shard import ShardId

FLEET = "warm+lambda://stoker?listen=127.0.0.1:0&nodes=20"
STORE = open_store("memory://data")


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_WARM_SECRET", Secret.generate().reveal())


def test_a_code_that_takes_what_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zfec", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'stoker\[warm\]'"):
        warm_tier_at(f"{FLEET}&code=11+7", store=STORE)  # of which no test has the tables already
    warm_tier_at(FLEET, store=STORE)


def test_processes_that_would_each_have_a_proxy_are_told_to_share_one() -> None:
    with pytest.raises(ConfigError, match=r"4 processes read.*`stoker warm proxy`"):
        warm_tier_at(FLEET, store=STORE, processes=4)
    warm_tier_at("warm://127.0.0.1:7411", store=STORE, processes=4)


@pytest.mark.parametrize(
    ("scheme", "remedy"), [("warm+lambda", "region="), ("warm+gcf", "region= and project=, or endpoint=")]
)
def test_functions_whose_place_is_not_known_are_named_in_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, remedy: str
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    location = WarmLocation.parse(f"{scheme}://stoker?listen=127.0.0.1:0")
    with pytest.raises(ConfigError, match=remedy):
        asyncio.run(open_backend(location, Secret.generate()))


def test_super_samples_whose_shards_could_not_be_sent_are_refused_when_the_loader_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Packer(tmp_path, schema={"x": Array("uint8", (1000,))}) as packer:
        packer.extend({"x": np.zeros(1000, np.uint8)} for _ in range(10))
    monkeypatch.setattr("stoker_warm._config.MAX_SHARD_BYTES", 4000)
    Loader(str(tmp_path), batch_size=2, tier=f"{FLEET}&code=4+2").close()
    with pytest.raises(ConfigError, match=r"at most 7.81 KiB, .* take a code with more data shards"):
        Loader(str(tmp_path), batch_size=2, tier=f"{FLEET}&code=2+2")


def test_what_an_earlier_proxy_put_away_can_be_read_with_the_same_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = TierSecret.generate().reveal(), TierSecret.generate().reveal()
    shard = ShardId("0" * 32, 1, 0, 0)
    monkeypatch.setenv("STOKER_TIER_SECRET", f"{first},{second}")
    mac = mac_of_environment().make(shard, b"")
    assert mac_of_environment().verify(shard, b"", mac)
    monkeypatch.setenv("STOKER_TIER_SECRET", second)
    assert not mac_of_environment().verify(shard, b"", mac)
    assert not caplog.records


def test_without_a_secret_the_key_is_random_which_is_said_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("STOKER_TIER_SECRET", raising=False)
    shard = ShardId("0" * 32, 1, 0, 0)
    with caplog.at_level(logging.WARNING):
        assert not mac_of_environment().verify(shard, b"", mac_of_environment().make(shard, b""))
    assert "STOKER_TIER_SECRET is not set" in caplog.text
    assert "`stoker tier secret`" in caplog.text


def test_a_secret_that_is_not_right_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_TIER_SECRET", "short")
    with pytest.raises(ConfigError, match="`stoker tier secret` makes one"):
        mac_of_environment()
