"""A warm tier of real processes: node functions in the local function cloud, and a proxy in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

import stoker_functions
from stoker._base.checksum import crc32c
from stoker._cache.index import name_of, size_of
from stoker._shared.address import Address
from stoker.abc import Executor, ObjectRef
from stoker.fanout import ExecutorOptions, open_executor
from stoker_local.functions import FunctionCloud, FunctionCloudConfig, FunctionSpec, GoogleSpec, function_cloud
from stoker_warm._auth import WarmSecret
from stoker_warm._config import WarmConfig
from stoker_warm._listener import Listener
from stoker_warm._proxy import Proxy
from support.function_cloud import cloud_of
from support.waiting import until
from support.warm_platform import MAC

__all__ = ["PREFIX", "SECRET", "WarmCloud", "google_warm_cloud", "instances_of", "node_cloud", "objects", "warm_cloud"]

PREFIX = "stoker"
SECRET = WarmSecret(b"of the warm tier's real processes, more than 32 bytes")
_PATIENT: dict[str, Any] = {"ping_seconds": 2.0, "wake_seconds": 60.0, "read_seconds": 60.0, "write_seconds": 60.0}
"""Time limits for a busy machine, on which processes may be slow."""


def node_function(number: int, **changes: Any) -> FunctionSpec:
    """Return a node as it is deployed; ``secret`` if it differs from the proxy's."""
    secret = changes.pop("secret", SECRET.reveal())
    settings = {"memory_mb": 256, "timeout_seconds": 60.0, "concurrency": 2, **changes}
    return FunctionSpec(
        name=f"{PREFIX}-warm-{number}",
        handler="stoker_functions.aws.warm_node",
        environment={"STOKER_WARM_SECRET": secret},
        **settings,
    )


def objects(count: int, size_bytes: int = 100_000, *, seed: int = 0) -> dict[str, bytes]:
    """Return objects by name, each with different bytes."""
    rng = random.Random(seed)
    bodies = [rng.randbytes(size_bytes) for _ in range(count)]
    refs = [ObjectRef(key=f"data/{row}", size_bytes=size_bytes, crc32c=crc32c(data)) for row, data in enumerate(bodies)]
    return {name_of(ref): data for ref, data in zip(refs, bodies, strict=True)}


class WarmCloud:
    """Nodes, and the proxy that uses them.

    Attributes:
        cloud: cloud that runs the functions.
        config: configuration of the proxy.
        proxy: the current proxy.
    """

    def __init__(
        self,
        cloud: FunctionCloud,
        executor: Executor,
        config: WarmConfig,
        *,
        secret: WarmSecret = SECRET,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        self.cloud, self.config = cloud, dataclasses.replace(config, **_PATIENT)
        self._executor, self._secret, self._certificate = executor, secret, certificate
        self.proxy = self._proxy()

    def _proxy(self) -> Proxy:
        listener = Listener(Address("127.0.0.1", 0), certificate=self._certificate)
        return Proxy(self.config, self._secret, self._executor.call, listener, mac=MAC, rng=random.Random(7))

    async def restart(self) -> None:
        """Replace the proxy by one that does not know which shards nodes hold, on another port.

        Waits until all nodes are idle: beside invocations that end soon, the platform would start other instances.
        """
        await self.proxy.close()
        await self.asleep()
        self.proxy = self._proxy()
        await self.proxy.start()

    async def put(self, offered: Mapping[str, bytes]) -> None:
        """Offer objects, and wait until all are written."""
        stored = self.proxy.statistics().stored
        for name, data in offered.items():
            self.proxy.objects.offer(name, memoryview(data))
        await until(lambda: not self.proxy.statistics().pending_bytes)
        assert self.proxy.statistics().stored == stored + len(offered), self.proxy.statistics()

    async def read(self, name: str) -> bytes | None:
        """Return an object, or None if the tier does not have it."""
        into = bytearray(size_of(name))
        return bytes(into) if await self.proxy.objects.read(name, memoryview(into)) else None

    async def read_all(self, names: Iterable[str]) -> dict[str, bytes | None]:
        """Return objects by name, read concurrently."""
        names = list(names)
        return dict(zip(names, await asyncio.gather(*map(self.read, names)), strict=True))

    async def asleep(self) -> None:
        """Wait until the invocations of all nodes have ended."""
        await until(lambda: not any(figures.busy for figures in self.cloud.statistics().values()))

    async def kill(self, numbers: Sequence[int]) -> None:
        """Kill all instances of nodes, idle or running, and wait until they have ended."""
        for process in [process for number in numbers for process in instances_of(number)]:
            os.kill(process.pid, signal.SIGKILL)
        await until(lambda: not any(self.cloud.statistics()[f"{PREFIX}-warm-{each}"].instances for each in numbers))


def instances_of(number: int) -> list[psutil.Process]:
    """Return the processes of a node, oldest first."""
    name, found = f"{PREFIX}-warm-{number}", []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            environment = process.environ()
            if name in (environment.get("AWS_LAMBDA_FUNCTION_NAME"), environment.get("K_SERVICE")):
                found.append((process.create_time(), process.pid, process))
    return [process for _, _, process in sorted(found, key=lambda each: each[:2])]


@asynccontextmanager
async def node_cloud(nodes: int, *, bucket: Any = None, **changes: Any) -> AsyncIterator[FunctionCloud]:
    """Run a function cloud of ``nodes`` nodes, with ``changes`` to each, and set this process's environment for it."""
    functions = [node_function(number, **changes) for number in range(nodes)]
    async with cloud_of(*functions, bucket=bucket) as cloud:
        with patch.dict(os.environ, {**cloud.environment(), "STOKER_WARM_SECRET": SECRET.reveal()}):
            yield cloud


@asynccontextmanager
async def warm_cloud(
    config: WarmConfig, *, secret: WarmSecret = SECRET, certificate: tuple[Path, Path] | None = None, **changes: Any
) -> AsyncIterator[WarmCloud]:
    """Run a warm tier; nothing of it is left after the block.

    Args:
        config: configuration of the proxy; its timeouts are replaced by long ones.
        secret: secret of the proxy.
        certificate: certificate of the proxy.
        changes: changes to each node's function.
    """
    async with (
        node_cloud(config.nodes, **changes) as cloud,
        open_executor("lambda", ExecutorOptions(prefix=PREFIX, endpoint_url=cloud.url)) as executor,
        _proxied(WarmCloud(cloud, executor, config, secret=secret, certificate=certificate)) as warm,
    ):
        yield warm


@asynccontextmanager
async def google_warm_cloud(config: WarmConfig) -> AsyncIterator[WarmCloud]:
    """Run a warm tier of Google's functions, as :func:`warm_cloud` does."""
    nodes = tuple(
        GoogleSpec(
            name=f"{PREFIX}-{config.node_name(number)}",
            source=str(Path(stoker_functions.__file__).with_name("gcp.py")),
            target="warm_node",
            environment={"STOKER_WARM_SECRET": SECRET.reveal(), "STOKER_WARM_SHARD_BYTES": "64MiB"},
            timeout_seconds=60.0,
            instances=2,
        )
        for number in range(config.nodes)
    )
    async with (
        function_cloud(FunctionCloudConfig(google=nodes, init_seconds=60.0)) as cloud,
        open_executor("gcf", ExecutorOptions(prefix=PREFIX, endpoint_url=cloud.google_url)) as executor,
        _proxied(WarmCloud(cloud, executor, config)) as warm,
    ):
        yield warm


@asynccontextmanager
async def _proxied(warm: WarmCloud) -> AsyncIterator[WarmCloud]:
    await warm.proxy.start()
    try:
        yield warm
    finally:
        await warm.proxy.close()
