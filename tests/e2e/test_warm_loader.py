"""A loader whose warm tier is a proxy in this process, over node functions of the local function cloud."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker.errors import ConfigError
from stoker_local import running_server
from stoker_local.functions import FunctionCloud, FunctionCloudConfig, FunctionSpec, function_cloud
from stoker_torch import Loader, StreamDataset
from stoker_warm._auth import WarmSecret
from stoker_warm._billing import ProxyStatistics
from stoker_warm._tier import WarmTier
from support.warm_cloud import instances_of

SECRET = WarmSecret(bytes(range(32)))
NODES = 3
URL = f"warm+lambda://stoker?nodes={NODES}&code=2%2B1&listen=127.0.0.1:0"
SAMPLES = 240


@pytest.fixture
def data(tmp_path: Path) -> str:
    with stoker.Packer(tmp_path, schema={"x": stoker.Array("uint8", (1024,))}, super_sample_bytes=16 << 10) as packer:
        packer.extend({"x": np.full(1024, number % 251, np.uint8)} for number in range(SAMPLES))
    return str(tmp_path)


@contextmanager
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FunctionCloud]:
    environment = {"STOKER_WARM_SECRET": SECRET.reveal(), "STOKER_WARM_SHARD_BYTES": "16MiB"}
    functions = tuple(
        FunctionSpec(
            name=f"stoker-warm-{number}",
            handler="stoker_functions.aws.warm_node",
            environment=environment,
            memory_mb=512,
            timeout_seconds=60.0,
            concurrency=2,
        )
        for number in range(NODES)
    )
    with running_server(lambda: function_cloud(FunctionCloudConfig(functions=functions, init_seconds=60.0))) as cloud:
        for name, value in cloud.environment().items():
            monkeypatch.setenv(name, value)
        for name in ("STOKER_WARM_SECRET", "STOKER_TIER_SECRET"):
            monkeypatch.setenv(name, SECRET.reveal())
        yield cloud


def test_once_the_nodes_are_there_epochs_come_from_the_tier_and_every_sample_once_in_each(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nodes(monkeypatch), Loader(data, batch_size=16, warm=URL, with_ids=True, window=2, memory="150KB") as loader:
        deadline = time.monotonic() + 120.0
        while not loader.stats().tier_hits.get("warm") and time.monotonic() < deadline:
            batches = list(loader)
            ids = np.concatenate([batch["__id__"] for batch in batches])
            assert sorted(ids.tolist()) == list(range(SAMPLES))
            assert all((batch["x"][:, 0] == batch["__id__"] % 251).all() for batch in batches)
            time.sleep(0.2)
        assert loader.stats().tier_hits["warm"] > 0


def test_what_nodes_lose_comes_from_the_bucket_and_is_kept_again(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{URL}&keep_warm=1s&wake=60s&write=60s"
    with nodes(monkeypatch), Loader(data, batch_size=16, warm=url, window=2, memory="150KB", epochs=100_000) as loader:
        supply, super_samples = loader._resources, len(stoker.Dataset(data).manifest)

        def proxy_statistics() -> ProxyStatistics:
            assert supply.tiers is not None
            assert isinstance(supply.tiers.shared_tier, WarmTier)
            proxy = supply.tiers.shared_tier.proxy
            assert proxy is not None
            return proxy.statistics()

        assert sum(len(batch["x"]) for batch in loader) == SAMPLES
        while proxy_statistics().stored < super_samples:
            assert sum(len(batch["x"]) for batch in loader) == SAMPLES
        for number in range(NODES):
            for process in instances_of(number):
                process.kill()
        while proxy_statistics().held_bytes:  # until the proxy has noticed
            time.sleep(0.05)
        requests, stored = loader.stats().get_requests, proxy_statistics().stored
        while proxy_statistics().stored < stored + super_samples:
            assert sum(len(batch["x"]) for batch in loader) == SAMPLES
        assert loader.stats().get_requests > requests  # it is the loader's bucket that is read


def test_without_nodes_the_bucket_serves(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_TIER_SECRET", SECRET.reveal())
    with Loader(data, batch_size=16, epochs=1, warm="warm://127.0.0.1:9") as loader:
        assert sum(len(batch["x"]) for batch in loader) == SAMPLES


@pytest.mark.parametrize("reader", [Loader, StreamDataset])
def test_before_anything_is_read_a_secret_is_needed_which_is_not_shown_and_a_tier_that_there_can_be(
    data: str, monkeypatch: pytest.MonkeyPatch, reader: type[Loader] | type[StreamDataset]
) -> None:
    monkeypatch.delenv("STOKER_WARM_SECRET", raising=False)
    with pytest.raises(ConfigError, match="STOKER_WARM_SECRET is not set"):
        reader(data, batch_size=16, warm=URL)
    monkeypatch.setenv("STOKER_WARM_SECRET", "MARKER")
    with pytest.raises(ConfigError) as caught:
        reader(data, batch_size=16, warm=URL)
    assert "MARKER" not in str(caught.value)
    monkeypatch.setenv("STOKER_WARM_SECRET", SECRET.reveal())
    for wrong, message in (("warm+lambda://stoker", "lacks listen="), ("10.0.0.5:7411", "a tier must be a URL")):
        with pytest.raises(ConfigError, match=message):
            reader(data, batch_size=16, warm=wrong)


def test_several_ranks_share_a_proxy_that_is_none_of_theirs(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_WARM_SECRET", SECRET.reveal())
    with pytest.raises(ConfigError, match="stoker warm proxy"):
        Loader(data, batch_size=16, rank=0, world_size=2, warm=URL)
