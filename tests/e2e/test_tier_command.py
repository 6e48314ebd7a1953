"""``stoker tier`` with real processes: a server that is a program, and trainers that share it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import requests

import stoker
from stoker_torch import Loader
from support.commands import forked_commands, run_command
from support.ports import reserved_port
from support.shared_tier import OTHER_SECRET, SECRET, client_of, object_of, offered, read

COMMAND = [sys.executable, "-m", "stoker.cli", "tier"]
ROWS = 600


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_TIER_SECRET", SECRET.reveal())


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    with forked_commands():
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tier") / "data"
    rng = np.random.default_rng(0)
    with stoker.Packer(folder, schema={"x": stoker.Array("uint8", (4096,))}, super_sample_bytes=100_000) as packer:
        packer.extend({"x": rng.integers(0, 256, 4096, dtype=np.uint8)} for _ in range(ROWS))
    return folder


@contextmanager
def served(*arguments: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a server that runs, and its URL."""
    command = [*COMMAND, "serve", "--listen", f"127.0.0.1:{port}", "--memory", "64MB", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, process.stderr.read() if process.stderr else ""
        yield process, url
    finally:
        process.kill()
        process.communicate()


def epochs_of(loader: Loader, epochs: int) -> list[np.ndarray[Any, Any]]:
    return [batch["x"].numpy().copy() for _ in range(epochs) for batch in loader]


def train(dataset: Path, tier: str | None, epochs: int = 1) -> tuple[list[np.ndarray[Any, Any]], Any]:
    """Return all batches of a training, and its statistics."""
    with Loader(dataset, batch_size=50, seed=3, epochs=epochs, memory="16MB", tier=tier) as loader:
        return epochs_of(loader, epochs), loader.stats()


def same(one: list[np.ndarray[Any, Any]], other: list[np.ndarray[Any, Any]]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def metrics(url: str) -> dict[str, float]:
    headers = {"Authorization": f"Bearer {SECRET.metrics_token}"}
    lines = requests.get(f"{url}/metrics", headers=headers, timeout=10).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_a_second_training_reads_from_the_server_and_nothing_but_the_manifest_from_the_bucket(dataset: Path) -> None:
    super_samples = len(stoker.Dataset(dataset).manifest)  # on a busy machine, a training requests some of them twice
    plain, _ = train(dataset, None)
    with served() as (process, url):
        first, _ = train(dataset, url)
        while metrics(url)['stoker_tier_place_objects{place="memory"}'] < super_samples:
            train(dataset, url)  # what was still to be offered when the loader was closed
        second, found = train(dataset, url)
        assert found.tier_hits["shared"] == super_samples
        assert found.get_requests == 1
        said = run_command("tier", "status", url, is_anew=True).stdout
        assert re.search(
            r"^memory   [0-9]+ objects, [0-9.]+ MiB of 61\.0 MiB; 0 evicted, 0 declined \(no room\)$",
            said,
            re.MULTILINE,
        )
        assert re.search(r"^reads    [0-9]+ hits, [0-9]+ misses, [0-9.]+ MiB sent$", said, re.MULTILINE)
        counts = json.loads(run_command("tier", "status", url, "--json").stdout)
        assert counts['place_objects{place="memory"}'] == super_samples
        assert same(plain, first)
        assert same(plain, second)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_data_set_that_the_server_reads_through_needs_no_offers(dataset: Path) -> None:
    with served("--read-through", str(dataset)) as (_, url):
        train(dataset, url)
        train(dataset, url)
        found = metrics(url)
        assert found["stoker_tier_fetched_total"] > 0
        assert found["stoker_tier_fetch_failures_total"] == 0


def test_a_server_that_is_killed_and_replaced_costs_no_sample_and_is_used_again(dataset: Path) -> None:
    plain, _ = train(dataset, None, 3)
    port = reserved_port()
    with Loader(dataset, batch_size=50, seed=3, epochs=3, memory="16MB", tier=f"http://127.0.0.1:{port}") as loader:
        with served(port=port) as (process, _):
            batches = epochs_of(loader, 1)
            process.kill()
            process.wait(30)
            batches += epochs_of(loader, 1)
        with served(port=port) as (_, url):
            batches += epochs_of(loader, 1)
            assert same(plain, batches)
            for _ in range(20):  # a machine that is busy is late at first
                again, found = train(dataset, url)
                assert same(plain[: len(again)], again)
                if found.tier_hits["shared"]:
                    break
    assert found.tier_hits["shared"]


def test_a_tier_that_is_not_there_hurts_nothing(dataset: Path) -> None:
    plain, _ = train(dataset, None)
    batches, found = train(dataset, f"http://127.0.0.1:{reserved_port()}")
    assert same(plain, batches)
    assert found.tier_hits["shared"] == 0
    assert found.tier_states == {"shared": "open"}


def test_another_tenant_s_training_continues_without_the_tier_and_says_why(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served() as (_, url):
        monkeypatch.setenv("STOKER_TIER_SECRET", OTHER_SECRET.reveal())
        train(dataset, url)
    assert "set STOKER_TIER_SECRET to the server's secret" in caplog.text


def test_the_disk_outlives_a_server(dataset: Path, tmp_path: Path) -> None:
    disk = ["--disk", f"{tmp_path}/tier?limit=64MB", "--memory", "1"]
    with served(*disk) as (process, url):
        train(dataset, url)
        held = metrics(url)['stoker_tier_place_objects{place="disk"}']
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert held > 0
    with served(*disk) as (_, url):
        _, found = train(dataset, url)
        assert found.tier_hits["shared"] >= held


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "nowhere"], "HOST:PORT"),
        (["--listen", "0.0.0.0:0"], "--advertise"),
        (["--advertise", "https://tier.internal"], "must be a host, such as"),
        (["--advertise", "tier.internal:7412"], "must be a host, such as"),
        (["--certificate", "a.pem"], "go together"),
        (["--certificate", "a.pem", "--key", "b.pem"], "cannot be used"),
        (["--disk", "tier"], "limit=SIZE"),
        (["--disk", "?limit=1GB"], "limit=SIZE"),
        (["--disk", "~nobody-at-all/tier?limit=1GB"], "home directory"),
        (["--read-through", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(arguments: list[str], said: str) -> None:
    done = run_command("tier", "serve", "--memory", "1MB", *arguments)
    assert (done.returncode, done.stdout) == (1, "") or done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_secret_and_tokens_are_printed_for_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str) -> str:
        done = run_command("tier", *arguments, is_anew=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("secret") != run("secret")
    assert run("token") == f"{SECRET.token}\n"
    assert run("token", "--metrics") == f"{SECRET.metrics_token}\n"


def resident_bytes(process: subprocess.Popen[str]) -> int:
    return int(psutil.Process(process.pid).memory_info().rss)


def test_memory_of_a_server_is_flat_over_ten_thousand_reads() -> None:
    objects = [object_of(number, 20_000) for number in range(20)]

    async def main(process: subprocess.Popen[str], url: str) -> int:
        async with client_of(url) as tier:
            for ref, data in objects:
                await offered(tier, ref, data)

            async def reader(first: int, reads: int) -> None:
                for number in range(reads):
                    ref, data = objects[(first + number) % len(objects)]
                    assert await read(tier, ref) == data

            await asyncio.gather(*(reader(first, 250) for first in range(8)))
            before_bytes = resident_bytes(process)
            await asyncio.gather(*(reader(first, 1250) for first in range(8)))
            return resident_bytes(process) - before_bytes

    with served() as (process, url):
        assert asyncio.run(main(process, url)) < 2_000_000


def test_stalled_readers_cost_a_server_no_memory_and_others_no_time() -> None:
    ref, data = object_of(1, 8_000_000)

    async def main(process: subprocess.Popen[str], url: str) -> int:
        host, port = url.removeprefix("http://").split(":")
        async with client_of(url) as tier:
            await offered(tier, ref, data)
            before_bytes = resident_bytes(process)
            path = f"/objects/{SECRET.object_name(ref)}"
            request = f"GET {path} HTTP/1.1\r\nHost: tier\r\nAuthorization: Bearer {SECRET.token}\r\n\r\n"
            still = [socket.create_connection((host, int(port))) for _ in range(30)]
            for each in still:
                each.sendall(request.encode())
            for _ in range(20):
                assert await read(tier, ref) == data
            taken_bytes = resident_bytes(process) - before_bytes
            for each in still:
                each.close()
            assert await read(tier, ref) == data
            return taken_bytes

    with served() as (process, url):
        assert asyncio.run(main(process, url)) < 30 * 3_000_000
        process.terminate()
        assert process.communicate(timeout=30)[1] == ""


def test_two_servers_share_the_objects_and_one_that_is_gone_takes_its_own_part_only(dataset: Path) -> None:
    plain, _ = train(dataset, None, 2)
    with served() as (_, one), served() as (process, other):
        with Loader(dataset, batch_size=50, seed=3, epochs=2, memory="16MB", tier=[one, other]) as loader:
            batches = epochs_of(loader, 1)
            process.kill()
            process.wait(30)
            batches += epochs_of(loader, 1)
        held = metrics(one)['stoker_tier_place_objects{place="memory"}']
        _, found = train(dataset, f"{one},{other}")
    assert same(plain, batches)
    assert 0 < held <= found.tier_hits["shared"]
    assert set(found.tier_states) == {f"shared {one}", f"shared {other}"}
    assert found.tier_states[f"shared {one}"] == "closed"
