"""Where the machines of a training find each other: torch's store, or the cache process of one of them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from stoker._cluster import meeting as meeting_module
from stoker._cluster.meeting import MeetingAddress
from stoker._cluster.members import Member
from stoker._cluster.secret import ClusterSecret
from stoker._cluster.shared_reads import MAX_VALUE_BYTES
from stoker._cluster.spec import ClusterSpec
from stoker._shared.address import Address
from stoker.errors import ConfigError, ConnectionLostError
from stoker_torch import _registry
from stoker_torch._registry import TorchStore, find_registry
from support.ports import reserved_port

SPEC = ClusterSpec.parse("memory:?limit=1GB")
SECRET = ClusterSecret.generate().reveal()
RANKS = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def member(number: int, port: int = 7000) -> Member:
    return Member(label=f"{number:016x}", address=Address("10.0.0.1", port), limit_bytes=1000)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1"},
        {**RANKS, "LOCAL_WORLD_SIZE": "8"},
        {**RANKS, "MASTER_ADDR": ""},
        {**RANKS, "MASTER_PORT": ""},
    ],
)
def test_one_machine_looks_for_no_others(environment: dict[str, str]) -> None:
    assert find_registry(SPEC, environment) is None


@pytest.mark.parametrize(
    ("changes", "machines"),
    [({}, 2), ({"GROUP_WORLD_SIZE": "5"}, 5), ({"LOCAL_WORLD_SIZE": ""}, 0), ({"LOCAL_WORLD_SIZE": "3"}, 3)],
)
def test_the_number_of_machines_comes_from_the_launcher(changes: dict[str, str], machines: int) -> None:
    found = find_registry(SPEC, {**RANKS, **changes})
    assert isinstance(found, TorchStore)
    assert found.machines == machines


def test_a_meeting_address_needs_a_secret() -> None:
    with pytest.raises(ConfigError, match="STOKER_CLUSTER_SECRET is not set"):
        find_registry(SPEC, {"STOKER_CLUSTER": "10.0.0.1:7400"})
    found = find_registry(SPEC, {"STOKER_CLUSTER": "10.0.0.1:7400", "STOKER_CLUSTER_SECRET": SECRET})
    assert isinstance(found, MeetingAddress)


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:0", "0.0.0.0:7400", "a b:5"])
def test_a_meeting_address_is_one_that_others_can_reach(text: str) -> None:
    with pytest.raises(ConfigError):
        find_registry(SPEC, {"STOKER_CLUSTER": text, "STOKER_CLUSTER_SECRET": SECRET})


def test_a_process_does_not_listen_everywhere() -> None:
    with pytest.raises(ConfigError, match="others cannot connect there"):
        find_registry(SPEC, {**RANKS, "STOKER_CLUSTER_LISTEN": "0.0.0.0"})  # noqa: S104 - refused


def test_a_process_listens_where_others_are_reached_and_nowhere_else() -> None:
    store = TorchStore(Address("127.0.0.1", 29500), "key", 2)
    assert store.addresses() == [Address("127.0.0.1", 0)]
    meeting = MeetingAddress(Address("127.0.0.1", 7400), SPEC, ClusterSecret.parse(SECRET), "127.0.0.2")
    assert meeting.addresses() == [Address("127.0.0.1", 7400), Address("127.0.0.2", 0)]


@pytest.mark.parametrize("answer", [b"1", b'{"a": 1}', b"[1]", b"null", b"not JSON"])
def test_an_answer_that_does_not_describe_members_is_told_as_such(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answering:
        """A connection to the process that listens at the meeting address."""

        async def send_and_receive(self, *_: object) -> bytes:
            return answer

        async def close(self) -> None:
            pass

    async def open_tcp(*_: object, **__: object) -> Answering:
        return Answering()

    monkeypatch.setattr(meeting_module, "open_tcp", open_tcp)
    meeting = MeetingAddress(Address("127.0.0.1", 7400), SPEC, ClusterSecret.parse(SECRET))
    with pytest.raises(ValueError, match=r"does not describe|Expecting value"):
        asyncio.run(meeting.join(member(1)))


def test_a_machine_whose_name_has_a_loopback_address_listens_at_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    class Probe:
        """A socket, on a machine that has the address 10.0.0.7, too."""

        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, address: tuple[str, int]) -> None:
            asked.append(address)

        def getsockname(self) -> tuple[str, int]:
            return ("127.0.0.1" if asked[-1][0].startswith("127.") else "10.0.0.7"), 5

    def look_up(host: str, port: int, **_: object) -> list[Any]:
        return [(2, 2, 17, "", ("127.0.1.1" if host == "my-machine" else host, port))]

    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    own = Address("10.0.0.7", 0)
    assert TorchStore(Address("my-machine", 29500), "key", 2).addresses() == [own]
    assert TorchStore(Address("10.0.0.9", 29500), "key", 2, None, "my-machine").addresses() == [own]
    meeting = MeetingAddress(Address("my-machine", 7400), SPEC, ClusterSecret.parse(SECRET))
    assert meeting.addresses() == [Address("10.0.0.7", 7400), own]


@pytest.fixture
def store() -> Iterator[Any]:
    """A store as a launcher runs it, and no process group."""
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False
    )
    yield store
    _registry._own_stores.clear()


def test_members_meet_in_torch_s_store(store: Any) -> None:
    async def check() -> None:
        first, second = (TorchStore(Address("127.0.0.1", store.port), "key", 2) for _ in range(2))
        other = TorchStore(Address("127.0.0.1", store.port), "other", 2)
        secrets = [await each.secret() for each in (first, second, other)]
        assert secrets[0].reveal() == secrets[1].reveal() != secrets[2].reveal()
        assert await first.join(member(1)) == [member(1)]
        assert await second.join(member(2)) == [member(1), member(2)]
        assert await first.join(member(1)) == [member(1), member(2)]
        assert await first.join(member(1, 7001)) == [member(1), member(2), member(1, 7001)]
        assert await first.join(member(1)) == [member(1), member(2), member(1, 7001), member(1)]  # the last one counts
        assert await other.join(member(3)) == [member(3)]

    asyncio.run(check())


def test_values_are_seen_by_all_and_one_of_them_replaces_another_once(store: Any) -> None:
    async def check() -> None:
        first, second = (TorchStore(Address("127.0.0.1", store.port), "key", 2) for _ in range(2))
        other = TorchStore(Address("127.0.0.1", store.port), "other", 2)
        large = os.urandom(MAX_VALUE_BYTES)
        await first.set("a", large)
        assert [await each.get("a") for each in (first, second, other)] == [large, large, b""]
        assert await first.replace("b", b"", b"1")
        assert not await second.replace("b", b"", b"2")
        assert not await second.replace("c", b"1", b"2")
        assert await second.replace("b", b"1", b"2")
        assert await second.replace("b", b"2", b"")
        assert await first.replace("b", b"", b"3")
        assert await first.get("b") == b"3"

        await first.set("d", b"\xff")
        with pytest.raises(ConnectionLostError, match="no text"):
            await first.replace("d", await first.get("d"), b"1")

    asyncio.run(check())


def test_values_are_used_where_a_store_is_for_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = TorchStore(Address("127.0.0.1", 1), "key", 2)
    assert not registry.is_there()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert registry.is_there()


def test_a_given_secret_is_not_asked_for() -> None:
    given = ClusterSecret.generate()
    registry = TorchStore(Address("127.0.0.1", 1), "key", 2, given)
    assert asyncio.run(registry.secret()) is given


def test_a_store_out_of_reach_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_registry, "_STORE_SECONDS", 0.2)
    with pytest.raises(ConnectionLostError, match=r"torch's store at 127\.0\.0\.1:1 cannot be reached"):
        asyncio.run(TorchStore(Address("127.0.0.1", 1), "key", 2).join(member(1)))


GROUP = """
import asyncio, json, sys
from torch import distributed
from stoker._cluster import meeting as meeting_module
from stoker._cluster.meeting import MeetingAddress
from stoker._cluster.members import Member
from stoker._shared.address import Address
from stoker_torch._registry import TorchStore, _own_store

port = int(sys.argv[1])
distributed.init_process_group("gloo", init_method="env://", rank=0, world_size=1)
registry = TorchStore(Address("127.0.0.1", port), "key", 2)
asyncio.run(registry.join(Member(label="0" * 16, address=Address("10.0.0.1", 7000), limit_bytes=5)))
found = _own_store(Address("127.0.0.1", port)).get("stoker/cluster/key/members/1")
print(json.loads(found)["label"])
distributed.destroy_process_group()
"""


def test_the_store_of_a_process_group_has_the_keys_that_processes_without_one_see() -> None:
    port = str(reserved_port())
    paths = [str(Path(__file__).parents[3] / folder) for folder in ("runtime", "loader")]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": os.pathsep.join(paths)}
    found = subprocess.run(
        [sys.executable, "-c", GROUP, port],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    assert json.loads(b'"' + found.stdout.strip() + b'"') == "0" * 16
