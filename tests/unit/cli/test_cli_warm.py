"""``stoker warm``: requests to a tier, and output."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from stoker import cli
from stoker._format.identity import sha256_128
from stoker._shared.secret import TierSecret
from stoker.abc import ObjectRef
from stoker.errors import DeadlineError
from stoker.testing import run_virtual
from stoker_warm._auth import WarmSecret
from stoker_warm._commands import warm as warm_command
from stoker_warm._commands.warm import BenchTarget, run_bench
from stoker_warm._config import WarmDeployment
from support.ports import reserved_port

VARIABLE = "STOKER_WARM_SECRET"
PROXY = "http://127.0.0.1:7412"
TENANT = "STOKER_TIER_SECRET"
FLEET = "warm+lambda://stoker?listen=127.0.0.1:7411"
TOLD: dict[str, Any] = {
    "code": "10+2",
    "hits": 1500,
    "misses": 400,
    "losses": 100,
    "restored": 7,
    "late": 40,
    "corrupt": 1,
    "rebuilt": 3,
    "stored": 400,
    "declined": 2,
    "evicted": 9,
    "pending_bytes": 8 << 20,
    "objects": 391,
    "held_bytes": 4 << 30,
    "limit_bytes": 12 << 30,
    "nodes": {"sleeping": 9, "awake": 2, "maybe": 0, "gone": 1},
    "problems": ["warm-3: \x1b[31mthere is no function stoker-warm-3"],
    "absent": 1,
    "bill": {
        "seconds": 7200.0,
        "requests": 2345,
        "unanswered": 0,
        "cold_starts": 12,
        "gb_seconds": 5432.1,
        "serve_dollars": 0.08,
        "warm_dollars": 0.002,
        "dollars": 0.082,
        "reads": 1500,
        "read_bytes": 1500 * (8 << 20),
        "bucket_dollars": 0.0006,
        "dollars_per_hour": 0.001,
        "break_even_reads_per_hour": None,
    },
}


class Kept:
    """A tier in memory, its proxy, and its statistics.

    Attributes:
        asked: requests to it, in order.
    """

    name = "kept"

    def __init__(self, told: Mapping[str, Any] = TOLD, *, spoils: bool = False, loses: int = 0) -> None:
        self.told, self.spoils, self.loses = {**told}, spoils, loses
        self.objects: dict[bytes | None, bytes] = {}
        self.asked: list[str] = []

    async def read(self, ref: ObjectRef, into: memoryview) -> bool:
        self.asked.append("read")
        if ref.sha256_128 not in self.objects:
            return False
        into[:] = self.objects[ref.sha256_128]
        if self.spoils:
            into[0] ^= 1
        return True

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        assert sha256_128(data) == ref.sha256_128
        if self.loses:
            self.loses -= 1
            self.told["declined"] += 1
            return
        self.objects[ref.sha256_128] = bytes(data)
        self.told["stored"] += 1

    async def status(self, *, wake_nodes: bool = False) -> Mapping[str, Any]:
        self.asked.append("wake" if wake_nodes else "status")
        return {**self.told}

    async def flush(self) -> int:
        return int(self.told["stored"])

    async def delete_all(self) -> list[str]:
        self.asked.append("forget")
        return list(self.told["problems"])

    async def close(self) -> None:
        self.asked.append("close")


@contextmanager
def keeping(monkeypatch: pytest.MonkeyPatch, kept: Kept) -> Iterator[list[str]]:
    """Make the command open this tier; yields the requests to it, of which the close is the last."""
    monkeypatch.setenv(VARIABLE, WarmSecret.generate().reveal())
    monkeypatch.setenv(TENANT, WarmSecret.generate().reveal())

    @asynccontextmanager
    async def opened(_: str) -> AsyncIterator[BenchTarget]:
        yield BenchTarget(kept, kept.status, kept.flush)
        await kept.close()

    @asynccontextmanager
    async def proxy_of(_: WarmDeployment, __: TierSecret) -> AsyncIterator[Kept]:
        yield kept
        await kept.close()

    monkeypatch.setattr(warm_command, "_open_bench", opened)
    monkeypatch.setattr(warm_command, "_run_proxy", proxy_of)
    yield kept.asked
    assert kept.asked.pop() == "close"


def test_a_secret_is_made_that_nodes_and_proxies_take(capsys: pytest.CaptureFixture[str]) -> None:
    made = set()
    for _ in range(2):
        assert cli.main(["warm", "secret"]) == 0
        made.add(text := capsys.readouterr().out.removesuffix("\n"))
        assert WarmSecret.parse(text).reveal() == text
    assert len(made) == 2


def test_the_status_is_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with keeping(monkeypatch, Kept()) as asked:
        assert cli.main(["warm", "status", PROXY]) == 0
        assert asked[0] == "status"
    assert capsys.readouterr().out.splitlines() == [
        "nodes   12 nodes: 2 awake, 9 asleep, 1 gone; objects cut 10+2",
        "held    391 objects, 4.00 GiB with parity, of 12.0 GiB",
        "reads   1,500 hits, 400 misses, 100 lost (75.0% hits)",
        "shards  7 reads restored from parity, 40 not waited for, 1 corrupt, 3 rebuilt",
        "writes  400 stored, 2 declined, 9 evicted, 8.00 MiB pending",
        "bill    5,432.1 GB-s in 2,345 requests, in 2.0 h",
        "        $0.082000: $0.080000 to serve, $0.002000 to keep warm",
        "bucket  1,500 reads would be $0.000600",
        "pays    never in money: a read costs no less here than a GET of the bucket",
        r"warm-3: \x1b[31mthere is no function stoker-warm-3",
    ]


@pytest.mark.parametrize(
    ("bill", "line"),
    [
        ({"break_even_reads_per_hour": 1234.5}, "pays    in money from 1,234 reads an hour on"),
        ({"reads": 0}, "pays    unknown before anything was read"),
    ],
)
def test_it_says_when_it_pays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bill: dict[str, Any], line: str
) -> None:
    with keeping(monkeypatch, Kept({**TOLD, "bill": {**TOLD["bill"], **bill}, "problems": [], "absent": 0})):
        assert cli.main(["warm", "status", PROXY]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_the_status_is_json_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with keeping(monkeypatch, Kept()):
        assert cli.main(["warm", "status", PROXY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == TOLD


@pytest.mark.parametrize("action", ["secret", "up", "proxy", "status", "bench", "down"])
def test_each_action_says_what_it_does_which_urls_it_takes_and_where_to_read_on(
    capsys: pytest.CaptureFixture[str], action: str
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["warm", action, "--help"])
    assert left.value.code == 0
    usage, description, *_, epilog, _ = capsys.readouterr().out.strip().split("\n\n")
    assert ("URL" in usage, description.count("\n") < 2) == (action != "secret", True)
    assert "docs/tiers.md" in epilog


def test_up_says_how_many_came_and_which_did_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with keeping(monkeypatch, Kept()) as asked:
        assert cli.main(["warm", "up", FLEET]) == 1
        assert asked[0] == "wake"
    assert capsys.readouterr().out.splitlines() == [
        "11 of 12 nodes joined, and can hold 12.0 GiB",
        r"warm-3: \x1b[31mthere is no function stoker-warm-3",
    ]
    problems = [f"warm-{number}: there is no function stoker-warm-{number}" for number in (3, 5)]
    with keeping(
        monkeypatch, Kept({**TOLD, "absent": 4, "problems": [problems[0], "warm-4: it is cold", problems[1]]})
    ):
        assert cli.main(["warm", "up", FLEET]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "warm-3, warm-5: there is no function stoker-warm-3",
        "warm-4: it is cold",
        "and 1 more",
    ]
    with keeping(monkeypatch, Kept({**TOLD, "absent": 0, "problems": []})):
        assert cli.main(["warm", "up", FLEET]) == 0
        capsys.readouterr()
        assert cli.main(["warm", "up", FLEET, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["absent"] == 0


def test_down_says_what_went_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for problems, code in (([], 0), (["warm-3: is gone"], 1)):
        with keeping(monkeypatch, Kept({**TOLD, "problems": problems})) as found:
            assert cli.main(["warm", "down", FLEET, "--yes"]) == code
            assert found[0] == "forget"
            capsys.readouterr()
            assert cli.main(["warm", "down", FLEET, "--forget", "--json"]) == code
            assert json.loads(capsys.readouterr().out) == {"problems": problems}


def test_the_bench_writes_and_reads_objects_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Kept({**TOLD, "pending_bytes": 0})
    arguments = ["warm", "bench", PROXY, "--objects", "5", "--size", "100KB", "--at-once", "2"]
    with keeping(monkeypatch, kept):
        assert cli.main([*arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["objects"], found["written"], found["read"], found["size_bytes"]) == (5, 5, 5, 100_000)
        assert 0 < found["read_p50_seconds"] <= found["read_p99_seconds"] <= found["read_seconds"]
        rate = 5 * 100_000 / found["read_seconds"]
        assert found["read_bytes_per_second"] == pytest.approx(rate)
    with keeping(monkeypatch, kept):
        assert cli.main(arguments) == 0
    assert len(kept.objects) == 10, "they are others each time"
    written, read = capsys.readouterr().out.splitlines()
    assert written.startswith("written  5 of 5 objects of 97.7 KiB: ")
    assert read.startswith("read     5 of 5, 2 at once: ")
    assert " ms, p99 " in read


@pytest.mark.parametrize(("kept", "read"), [(Kept(loses=2), 3), (Kept(spoils=True), 0)])
def test_what_the_bench_did_not_get_back_whole_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kept: Kept, read: int
) -> None:
    kept.told["pending_bytes"] = 0
    with keeping(monkeypatch, kept):
        assert cli.main(["warm", "bench", PROXY, "--objects", "5", "--size", "1KB", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["read"] == read


class Silent(Kept):
    """A tier that accepts offers, and neither writes nor declines them."""

    accepted = 0

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        self.accepted += 1

    async def flush(self) -> int:
        return self.accepted


def test_the_bench_does_not_wait_for_ever() -> None:
    silent = Silent()
    with pytest.raises(DeadlineError, match="has not written the offered objects"):
        run_virtual(
            run_bench(BenchTarget(silent, silent.status, silent.flush), objects=1, size_bytes=10, concurrency=1)
        )


class Refusing(Kept):
    """A tier without room, whose client drops the offers after the first."""

    def offer(self, ref: ObjectRef, data: memoryview) -> None:
        if not self.told["declined"]:
            self.told["declined"] = 1


def test_the_bench_of_a_tier_without_room_ends_at_once_and_counts_what_was_accepted() -> None:
    async def check() -> None:
        refusing = Refusing({**TOLD, "pending_bytes": 0, "declined": 0})
        begun = asyncio.get_running_loop().time()
        found = await run_bench(
            BenchTarget(refusing, refusing.status, refusing.flush), objects=4, size_bytes=10, concurrency=1
        )
        assert (found["written"], found["read"]) == (0, 0)
        assert asyncio.get_running_loop().time() - begun < 1.0

    run_virtual(check())


class Busy(Kept):
    """A tier that others offer objects to, too."""

    async def status(self, *, wake_nodes: bool = False) -> Mapping[str, Any]:
        self.told["stored"] += 5
        return await super().status(wake_nodes=wake_nodes)

    async def flush(self) -> int:
        return len(self.objects)


def test_the_bench_does_not_count_what_others_have_written() -> None:
    busy = Busy({**TOLD, "pending_bytes": 0})
    found = run_virtual(run_bench(BenchTarget(busy, busy.status, busy.flush), objects=4, size_bytes=10, concurrency=1))
    assert (found["written"], found["read"]) == (4, 4)


@pytest.mark.parametrize("action", ["proxy", "up", "status", "bench", "down"])
def test_without_a_secret_or_a_url_nothing_is_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(TENANT, WarmSecret.generate().reveal())
    more = ["--forget"] if action == "down" else []
    assert cli.main(["warm", action, FLEET, *more]) == 2
    assert VARIABLE in capsys.readouterr().err
    monkeypatch.setenv(VARIABLE, "hunter2-is-too-short")
    assert cli.main(["warm", action, FLEET, *more]) == 2
    assert "hunter2" not in capsys.readouterr().err
    monkeypatch.setenv(VARIABLE, WarmSecret.generate().reveal())
    assert cli.main(["warm", action, "s3://bucket", *more]) == 2
    assert "not the scheme of a warm tier" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([PROXY], "not the scheme of a warm tier"),
        ([FLEET, "--key", "k.pem"], "go together"),
        ([FLEET, "--certificate", "/nowhere/c.pem", "--key", "/nowhere/k.pem"], "cannot be used"),
        ([FLEET, "--listen", "0.0.0.0:0"], "--advertise"),
        ([FLEET, "--listen", "here"], "HOST:PORT"),
    ],
)
def test_a_proxy_of_which_something_is_missing_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setenv(VARIABLE, WarmSecret.generate().reveal())
    monkeypatch.setenv(TENANT, WarmSecret.generate().reveal())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    assert cli.main(["warm", "proxy", *arguments]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""


def test_a_proxy_may_have_as_many_connections_as_the_system_lets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)  # so that nothing is begun
    monkeypatch.setenv(TENANT, WarmSecret.generate().reveal())
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1, most))
    try:
        assert cli.main(["warm", "proxy", FLEET]) == 2
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@pytest.mark.parametrize("flags", [["--data", "s3://bucket"], ["--data-region", "eu-west-1"], ["--data-anonymous"]])
def test_a_removed_flag_or_setting_is_accepted_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    monkeypatch.setenv(VARIABLE, WarmSecret.generate().reveal())
    monkeypatch.setenv(TENANT, WarmSecret.generate().reveal())
    wrong = ["--certificate", "/nowhere/c.pem", "--key", "/nowhere/k.pem"]  # so that nothing is begun
    assert cli.main(["warm", "proxy", f"{FLEET}&put_back=2", *flags, *wrong]) == 2
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stoker: warning: ")]
    assert [line.split()[2:6] for line in warned] == [
        ["put_back=", "of", "a", "warm"],
        ["--data", "has", "no", "effect:"],
    ]


@pytest.mark.parametrize("action", ["status", "bench"])
def test_an_unreachable_proxy_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    monkeypatch.setenv(TENANT, WarmSecret.generate().reveal())
    assert cli.main(["warm", action, f"http://127.0.0.1:{reserved_port()}"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("stoker: error: ")
    assert told.count("\n") == 1


def test_sharing_a_proxy_needs_the_tenant_s_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(TENANT, raising=False)
    monkeypatch.setenv(VARIABLE, WarmSecret.generate().reveal())
    for arguments in (["status", PROXY], ["bench", PROXY], ["proxy", FLEET]):
        assert cli.main(["warm", *arguments]) == 2
        assert f"{TENANT} is not set" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["sleep"],
        ["status"],
        ["bench", PROXY, "--objects", "0"],
        ["bench", PROXY, "--size", "0"],
        ["bench", PROXY, "--at-once", "x"],
        ["proxy", FLEET, "--every", "0"],
        ["down", FLEET],
        ["down", FLEET, "--forget", "--secret", "x"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["warm", *arguments])
    assert left.value.code == 2
