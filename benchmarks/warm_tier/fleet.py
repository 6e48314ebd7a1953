"""Node functions in the local function cloud, and a proxy in this process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from stoker._base.checksum import crc32c
from stoker._shared.address import Address
from stoker._shared.client import ServerAddress, SharedTier
from stoker._shared.secret import TierSecret
from stoker.abc import ObjectRef
from stoker.fanout import ExecutorOptions, open_executor
from stoker_local.functions import FunctionCloud, FunctionCloudConfig, FunctionSpec, function_cloud
from stoker_warm._auth import WarmSecret
from stoker_warm._config import WarmConfig
from stoker_warm._listener import Listener
from stoker_warm._proxy import Proxy
from stoker_warm._shard import ShardMac
from stoker_warm._tier_server import create_object_name

__all__ = ["Fleet", "Object", "fleet", "create_objects", "processor_seconds"]

_PREFIX = "stoker"
_SECRET = WarmSecret(bytes(range(32)))
_TIER_SECRET = TierSecret(bytes(range(32)))
_MAC = ShardMac(_TIER_SECRET.shards_key)


@dataclass(frozen=True, slots=True)
class Object:
    """A super-sample in the tier."""

    ref: ObjectRef
    data: bytes

    @property
    def name(self) -> str:
        return create_object_name(f"{_TIER_SECRET.tenant}/{_TIER_SECRET.object_name(self.ref)}")


def create_objects(count: int, size_bytes: int) -> list[Object]:
    """Return objects with different bytes."""
    rng = np.random.default_rng(7)
    bodies = [rng.bytes(size_bytes) for _ in range(count)]
    return [
        Object(ObjectRef(key=f"data/{row}", size_bytes=size_bytes, crc32c=crc32c(data)), data)
        for row, data in enumerate(bodies)
    ]


class Fleet:
    """A proxy and its nodes.

    Attributes:
        cloud: cloud that runs the nodes.
        proxy: proxy in this process.
        secret: secret of all of them.
        tenant: tenant whose key names the objects.
    """

    def __init__(self, cloud: FunctionCloud, proxy: Proxy) -> None:
        self.cloud, self.proxy, self.secret, self.tenant = cloud, proxy, _SECRET, _TIER_SECRET

    async def put(self, objects: Sequence[Object]) -> None:
        """Write objects, and wait until all are written."""
        for each in objects:
            self.proxy.objects.offer(each.name, memoryview(each.data))
            await self.quiet()
        assert self.proxy.statistics().stored >= len(objects), self.proxy.statistics()

    async def quiet(self) -> None:
        """Wait until all writes have ended."""
        while self.proxy.statistics().pending_bytes:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)

    def processes(self) -> list[psutil.Process]:
        """Return the nodes' processes."""
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                if process.environ().get("AWS_LAMBDA_FUNCTION_NAME", "").startswith(f"{_PREFIX}-warm-"):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def node_seconds(self) -> float:
        """Return the processor time of all nodes, in seconds, with nanoseconds if the system reports them."""
        return sum(processor_seconds(process.pid) for process in self.processes())

    @asynccontextmanager
    async def program(self) -> AsyncIterator[tuple[int, SharedTier]]:
        """Run `stoker warm proxy` instead of this process's proxy; yield its process id, and a tier that uses it."""
        config = self.proxy.config
        await self.proxy.close()
        settings = f"nodes={config.nodes}&code={config.code}&linger=30s&ping=10s&wake=120s"
        url = f"warm+lambda://{_PREFIX}?listen=127.0.0.1:0&{settings}"
        command = (sys.executable, "-m", "stoker.cli", "warm", "proxy", url, "--listen", "127.0.0.1:0")
        secrets = {"STOKER_WARM_SECRET": self.secret.reveal(), "STOKER_TIER_SECRET": self.tenant.reveal()}
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, **secrets}
        )
        try:
            assert process.stdout is not None
            said = (await process.stdout.readline()).decode().strip()
            tier = SharedTier([ServerAddress.parse(said)], self.tenant)
            try:
                yield process.pid, tier
            finally:
                await tier.close()
        finally:
            process.terminate()
            await process.wait()


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process, in seconds, with nanoseconds if the system reports them."""
    try:
        threads = Path(f"/proc/{pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    except OSError:
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system


@asynccontextmanager
async def fleet(config: WarmConfig, **spec: Any) -> AsyncIterator[Fleet]:
    """Run a fleet of real awslambdaric processes, which end with the block."""
    functions = tuple(
        FunctionSpec(
            name=f"{_PREFIX}-{config.node_name(node)}",
            handler="stoker_functions.aws.warm_node",
            environment={"STOKER_WARM_SECRET": _SECRET.reveal()},
            **{"memory_mb": 512, "timeout_seconds": 900.0, "concurrency": 2, **spec},
        )
        for node in range(config.nodes)
    )
    async with function_cloud(FunctionCloudConfig(functions=functions, init_seconds=120.0)) as cloud:
        before = dict(os.environ)
        os.environ.update(cloud.environment())
        try:
            async with AsyncExitStack() as stack:
                options = ExecutorOptions(prefix=_PREFIX, endpoint_url=cloud.url)
                executor = await stack.enter_async_context(open_executor("lambda", options))
                proxy = Proxy(config, _SECRET, executor.call, Listener(Address("127.0.0.1", 0)), mac=_MAC)
                await proxy.start()
                try:
                    yield Fleet(cloud, proxy)
                finally:
                    await proxy.close()
        finally:
            os.environ.clear()
            os.environ.update(before)
