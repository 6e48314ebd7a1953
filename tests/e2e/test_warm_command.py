"""``stoker warm`` with real processes: a proxy that is a program, its node functions, and trainers that share it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

import stoker
from stoker._shared.secret import TierSecret
from stoker_local.functions import FunctionCloud
from stoker_torch import Loader
from stoker_warm._auth import Secret
from stoker_warm._client import ClientConfig, WarmClient
from stoker_warm._config import WarmLocation
from support.function_cloud import cloud_of
from support.tls import make_authority
from support.waiting import until
from support.warm_clients import loaded
from support.warm_cloud import PREFIX, SECRET, node_function, objects

NODES = 3
OBJECTS = objects(6, 1_000_000)
TIER_SECRET = TierSecret.generate()
NAMES = list(OBJECTS)
COMMAND = [sys.executable, "-m", "stoker.cli", "warm"]
SETTINGS = "code=2%2B1&linger=0.1s&ping=5s&wake=60s&read=60s&write=60s"
PATIENT = ClientConfig(read_seconds=60.0, dial_seconds=60.0)


class Proxy:
    """A proxy that runs as a program."""

    def __init__(self, process: Process, url: str) -> None:
        self.process, self.url = process, url
        self.location = WarmLocation.parse(url)

    def client(self, *, fingerprint: str | None = None, config: ClientConfig = PATIENT) -> WarmClient:
        assert self.location.proxy is not None
        shown = self.location.fingerprint if fingerprint is None else fingerprint
        return WarmClient(self.location.proxy, SECRET, fingerprint=shown, config=config)

    async def ended(self) -> tuple[int | None, str]:
        """Return how it ended, and what it said to people."""
        out, err = await asyncio.wait_for(self.process.communicate(), 60)
        assert out == b""
        return self.process.returncode, err.decode()


@asynccontextmanager
async def proxy_of(
    cloud: FunctionCloud, *arguments: str, listen: str = "127.0.0.1:0", settings: str = SETTINGS
) -> AsyncIterator[Proxy]:
    """Run a proxy of the nodes in a function cloud."""
    url = f"warm+lambda://{PREFIX}?nodes={NODES}&listen={listen}&endpoint={cloud.url}&{settings}"
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "proxy", url, *arguments, stdout=PIPE, stderr=PIPE, env=environment(cloud)
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line, (await process.communicate())[1].decode()
        yield Proxy(process, line.decode().strip())
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def environment(cloud: FunctionCloud, secret: Secret = SECRET) -> dict[str, str]:
    secrets = {"STOKER_WARM_SECRET": secret.reveal(), "STOKER_TIER_SECRET": TIER_SECRET.reveal()}
    return {**os.environ, **cloud.environment(), **secrets}


async def ran(cloud: FunctionCloud, *arguments: str, secret: Secret = SECRET) -> tuple[int | None, str, str]:
    """Run a command to its end; return its exit code, and what it wrote."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=PIPE, stderr=PIPE, env=environment(cloud, secret)
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, out.decode(), err.decode()


async def stored_in_all(client: WarmClient) -> int:
    """Wait until nothing waits to be put away, and return how many objects ever were."""
    while (told := await client.status())["pending_bytes"]:  # noqa: ASYNC110 - as anybody can ask
        await asyncio.sleep(0.02)
    stored: int = told["stored"]
    return stored


async def put(client: WarmClient) -> None:
    """Put all objects away."""
    assert await loaded(client, NAMES) == dict.fromkeys(NAMES)
    stored = await stored_in_all(client)
    for name, data in OBJECTS.items():
        client.offer(name, memoryview(data))
    assert await stored_in_all(client) == stored + len(OBJECTS)


def test_a_proxy_is_run_asked_measured_and_stopped_from_a_terminal() -> None:
    async def check() -> None:
        async with cloud_of(*map(node_function, range(NODES))) as cloud, proxy_of(cloud, "--every", "0.2") as proxy:
            code, out, err = await ran(cloud, "up", proxy.url)
            assert (code, err) == (0, "")
            assert out.startswith(f"{NODES} of {NODES} nodes came, and can hold ")
            bench = ("bench", proxy.url, "--objects", "4", "--size", "1MB", "--json")
            (code, out, err), (others_code, *_), (stranger_code, *_, strangers_err) = await asyncio.gather(
                ran(cloud, *bench), ran(cloud, *bench), ran(cloud, *bench, secret=Secret.generate())
            )
            assert (code, err) == (others_code, "") == (0, "")
            assert json.loads(out)["read"] == 4
            assert stranger_code == 1
            assert "STOKER_WARM_SECRET" in strangers_err
            code, out, err = await ran(cloud, "status", proxy.url, "--json")
            told = json.loads(out)
            assert (told["objects"], told["hits"], told["stored"]) == (8, 8, 8)
            assert told["bill"]["gb_seconds"] > 0
            code, out, err = await ran(cloud, "down", proxy.url, "--forget")
            assert (code, out, err) == (0, "", "")
            code, said = await proxy.ended()
            assert code == 0
            assert "8 objects" in said
            assert SECRET.reveal() not in said
            code, out, err = await ran(cloud, "status", proxy.url)
            assert (code, out) == (1, "")
            assert err.count("\n") == 1
            # A proxy of its own that asks the nodes: they have forgotten.
            own = f"warm+lambda://{PREFIX}?nodes={NODES}&listen=127.0.0.1:0&endpoint={cloud.url}&{SETTINGS}"
            code, out, err = await ran(cloud, "status", own, "--json")
            assert (code, json.loads(out)["objects"], err) == (0, 0, "")

    asyncio.run(check())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_proxy_ends_cleanly_on_a_signal_and_the_next_one_knows_what_nodes_hold(number: signal.Signals) -> None:
    async def check() -> None:
        async with cloud_of(*map(node_function, range(NODES))) as cloud:
            async with proxy_of(cloud) as proxy:
                client = proxy.client()
                await put(client)
                await client.close()
                proxy.process.send_signal(number)
                code, said = await proxy.ended()
                assert code == 0
                assert f"{len(OBJECTS)} objects" in said.splitlines()[-1], "it ends with what it did"
            await until(lambda: not any(figures.busy for figures in cloud.statistics().values()))
            async with proxy_of(cloud) as proxy:
                client = proxy.client()
                assert (await client.status(wakes=True))["objects"] == len(OBJECTS)
                assert await loaded(client, NAMES) == OBJECTS
                await client.close()

    asyncio.run(check())


def test_a_trainer_whose_proxy_is_killed_reads_on_and_finds_the_next_one_at_the_same_address() -> None:
    async def check() -> None:
        async with cloud_of(*map(node_function, range(NODES))) as cloud:
            async with proxy_of(cloud) as proxy:
                client, address = proxy.client(), proxy.url.removeprefix("warm://")
                await put(client)
                reading = asyncio.create_task(loaded(client, NAMES * 5))
                await until(lambda: client.statistics().hits >= 3)
                proxy.process.send_signal(signal.SIGKILL)
                found = await reading
                assert all(data in (None, OBJECTS[name]) for name, data in found.items())
                assert (await proxy.process.communicate(), proxy.process.returncode)[1] == -signal.SIGKILL
            assert await loaded(client, NAMES) == dict.fromkeys(NAMES)
            await until(lambda: not any(figures.busy for figures in cloud.statistics().values()))
            async with proxy_of(cloud, listen=address):
                told = await client.status(wakes=True)
                assert told["objects"] == len(OBJECTS)
                assert await loaded(client, NAMES) == OBJECTS
            await client.close()

    asyncio.run(check())


def test_what_one_trainer_has_read_from_the_bucket_another_reads_from_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, samples = str(tmp_path / "data"), 400
    schema = {"id": stoker.Array("int64"), "data": stoker.Array("uint8", (4096,))}
    with stoker.Packer(url, schema=schema, super_sample_bytes=128 << 10) as packer:
        for number in range(samples):
            packer.write({"id": number, "data": np.full(4096, number % 251, np.uint8)})

    def trained(warm: str, seed: int) -> tuple[int, int]:
        """Return how many super-samples a trainer took from the tier, and how many in all."""
        seen = []
        with Loader(url, batch_size=20, seed=seed, window=2, memory="3MB", epochs=1, warm=warm) as loader:
            for batch in loader:
                assert (batch["data"] == (batch["id"] % 251)[:, None]).all()
                seen += batch["id"].tolist()
            found = loader.stats()
        assert sorted(seen) == list(range(samples))
        return found.tier_hits.get("warm", 0), found.look_ups

    async def check() -> None:
        monkeypatch.setenv("STOKER_WARM_SECRET", SECRET.reveal())
        async with cloud_of(*map(node_function, range(NODES))) as cloud, proxy_of(cloud) as proxy:
            client = proxy.client()
            hits, look_ups = await asyncio.to_thread(trained, proxy.url, 1)
            assert hits == 0
            # A trainer that ends drops what it has not handed over yet: the next one does.
            for seed in range(2, 12):
                if (stored := await stored_in_all(client)) == look_ups:
                    break
                await asyncio.to_thread(trained, proxy.url, seed)
            assert stored == look_ups
            # Of the bucket, which is on this disk, is read what is there sooner.
            both = await asyncio.gather(*(asyncio.to_thread(trained, proxy.url, seed) for seed in (12, 13)))
            assert all(hits for hits, _ in both), both
            proxy.process.send_signal(signal.SIGKILL)
            await proxy.process.communicate()
            assert (await asyncio.to_thread(trained, proxy.url, 4))[0] == 0
            await client.close()

    asyncio.run(check())


def test_off_private_networks_a_proxy_shows_its_certificate_and_clients_take_no_other(tmp_path: Path) -> None:
    async def check() -> None:
        make_authority(tmp_path, "localhost")
        files = ("--certificate", str(tmp_path / "server.pem"), "--key", str(tmp_path / "server.pem"))
        async with cloud_of(*map(node_function, range(NODES))) as cloud, proxy_of(cloud, *files) as proxy:
            assert "?fingerprint=" in proxy.url
            code, out, _ = await ran(cloud, "up", proxy.url)
            assert (code, out.split(" nodes")[0]) == (0, f"{NODES} of {NODES}")
            client = proxy.client()
            await put(client)
            assert await loaded(client, NAMES) == OBJECTS
            await client.close()
            # Nor do they speak without TLS to one that has it, which waits for their greeting for ever.
            hasty, fingerprint = ClientConfig(dial_seconds=0.5), proxy.location.fingerprint[::-1]
            for wrong in ("", fingerprint):
                other = proxy.client(fingerprint=wrong, config=hasty)
                assert await loaded(other, NAMES[:1]) == {NAMES[0]: None}
                assert other.statistics().unreachable == 1
                await other.close()

    asyncio.run(check())


def test_strangers_who_talk_nonsense_or_nothing_keep_nobody_from_being_served() -> None:
    async def check() -> None:
        async with cloud_of(*map(node_function, range(NODES))) as cloud, proxy_of(cloud) as proxy:
            address, client = proxy.location.proxy, proxy.client()
            assert address is not None
            await put(client)
            crowd = [await asyncio.open_connection(address.host, address.port) for _ in range(60)]
            for number, (_, writer) in enumerate(crowd[:40]):
                writer.write((b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"SW\x02\x31" + b"\xff" * 12)[number % 3])
            assert await loaded(client, NAMES) == OBJECTS
            # Those that talk nonsense are hung up on; those that say nothing are greeted, which is all.
            for reader, _ in crowd[:40]:
                with suppress(ConnectionError):
                    assert len(await asyncio.wait_for(reader.read(), 60)) < 200
            assert await loaded(client, NAMES) == OBJECTS
            for _, writer in crowd:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for _, writer in crowd), return_exceptions=True)
            await client.close()
            proxy.process.send_signal(signal.SIGTERM)
            code, said = await proxy.ended()
            assert code == 0
            assert "Traceback" not in said

    asyncio.run(check())


def test_a_hundred_clients_share_a_proxy_whose_memory_stays_flat() -> None:
    async def check() -> None:
        async with cloud_of(*map(node_function, range(NODES))) as cloud, proxy_of(cloud) as proxy:
            first = proxy.client()
            await put(first)
            await loaded(first, NAMES)
            process = psutil.Process(proxy.process.pid)
            before_bytes, clients = process.memory_info().rss, [proxy.client() for _ in range(100)]
            for _ in range(3):
                for found in await asyncio.gather(*(loaded(client, NAMES) for client in clients)):
                    assert found == OBJECTS
            grown_bytes = process.memory_info().rss - before_bytes
            # Each took 18 MB; what they share is at most the limit for reads, and these are 6 MB.
            assert grown_bytes < 48 << 20, f"{grown_bytes:,} bytes more after 1,800 reads"
            assert (await first.status())["lent_bytes"] == 0
            await asyncio.gather(*(client.close() for client in [first, *clients]))

    asyncio.run(check())
