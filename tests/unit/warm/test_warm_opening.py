"""A warm tier from a setting: what cannot work is refused when the loader is made, not warned of while it reads."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from stoker import Array, Packer, open_store
from stoker._shared.client import SharedTier
from stoker._shared.secret import TierSecret
from stoker.abc import ObjectRef
from stoker.errors import ConfigError, MissingExtraError
from stoker_torch import Loader
from stoker_warm._auth import WarmSecret
from stoker_warm._config import WarmDeployment
from stoker_warm._tier import InProcessProxy, WarmTier, open_warm_tier, read_tier_secret
from support.warm_platform import MAC

FLEET = "warm+lambda://stoker?listen=127.0.0.1:0&nodes=20"
STORE = open_store("memory://data")


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_WARM_SECRET", WarmSecret.generate().reveal())
    monkeypatch.setenv("STOKER_TIER_SECRET", TierSecret.generate().reveal())


def test_a_code_that_takes_what_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zfec", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'stoker\[warm\]'"):
        open_warm_tier(f"{FLEET}&code=11+7", store=STORE)  # of which no test has the tables already
    open_warm_tier(FLEET, store=STORE)


def test_processes_with_a_proxy_each_are_advised_to_share_one() -> None:
    with pytest.raises(ConfigError, match=r"4 processes read.*`stoker warm proxy`"):
        open_warm_tier(FLEET, store=STORE, processes=4)
    open_warm_tier("warm://127.0.0.1:7411", store=STORE, processes=4)


@pytest.mark.parametrize(
    ("scheme", "remedy"), [("warm+lambda", "region="), ("warm+gcf", "region= and project=, or endpoint=")]
)
def test_functions_whose_place_is_not_known_are_named_in_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, remedy: str
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    async def start() -> None:
        await InProcessProxy(
            WarmDeployment.parse(f"{scheme}://stoker?listen=127.0.0.1:0"), WarmSecret.generate(), MAC
        ).start()

    with pytest.raises(ConfigError, match=remedy):
        asyncio.run(start())


def test_a_proxy_elsewhere_is_read_as_any_tier_server() -> None:
    assert isinstance(open_warm_tier("warm://127.0.0.1:7412", store=STORE), SharedTier)
    with pytest.raises(ConfigError, match="use https://"):
        open_warm_tier("warm://10.0.0.5:7412", store=STORE)


def test_without_a_tenant_s_secret_a_tier_is_private_to_the_process_and_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("STOKER_TIER_SECRET")
    tiers = [open_warm_tier(FLEET, store=STORE) for _ in range(2)]
    assert ["STOKER_TIER_SECRET is not set" in each for each in caplog.messages] == [True, True]
    assert "stoker tier secret" in caplog.messages[0]
    ref = ObjectRef(key="k", size_bytes=1, crc32c=0)
    assert len({tier._object_name(ref) for tier in tiers if isinstance(tier, WarmTier)}) == 2


def test_super_samples_whose_shards_could_not_be_sent_are_refused_when_the_loader_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Packer(tmp_path, schema={"x": Array("uint8", (1000,))}) as packer:
        packer.extend({"x": np.zeros(1000, np.uint8)} for _ in range(10))
    monkeypatch.setattr("stoker_warm._config.MAX_SHARD_BYTES", 4000)
    Loader(str(tmp_path), batch_size=2, tier=f"{FLEET}&code=4+2").close()
    with pytest.raises(ConfigError, match=r"at most 7.81 KiB, .* use a code with more data shards"):
        Loader(str(tmp_path), batch_size=2, tier=f"{FLEET}&code=2+2")


def test_what_an_earlier_proxy_put_away_can_be_read_with_the_same_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = TierSecret.generate(), TierSecret.generate()
    monkeypatch.setenv("STOKER_TIER_SECRET", f"{first.reveal()},{second.reveal()}")
    for _ in range(2):
        assert read_tier_secret().shards_key == first.shards_key != second.shards_key
    assert not caplog.records


def test_a_secret_that_is_not_right_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_TIER_SECRET", "short")
    with pytest.raises(ConfigError, match="create one with `stoker tier secret`"):
        open_warm_tier(FLEET, store=STORE)
