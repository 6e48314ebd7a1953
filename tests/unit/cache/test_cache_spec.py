"""How settings name caches, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker._cache.tiers import CacheSpec
from stoker.errors import ConfigError
from support.cases import for_each


@pytest.mark.parametrize(
    ("text", "path", "limit_bytes", "is_of_node", "policy"),
    [
        ("disk:/mnt/nvme/stoker?limit=20GB&policy=no-evict", "/mnt/nvme/stoker", 20 * 10**9, True, "no-evict"),
        ("disk:/mnt/my disk?limit=1GiB", "/mnt/my disk", 1 << 30, True, "next-use"),
        ("disk:/a?limit=node:5MB", "/a", 5_000_000, True, "next-use"),
        ("disk:/a:b&c?policy=lru&limit=7", "/a:b&c", 7, True, "lru"),
        ("memory:?limit=2GB", None, 2 * 10**9, False, "next-use"),
        ("memory:?limit=node:2 GB&policy=fifo", None, 2 * 10**9, True, "fifo"),
    ],
)
def test_a_cache_is_a_place_a_limit_and_a_policy(
    text: str, path: str | None, limit_bytes: int, is_of_node: bool, policy: str
) -> None:
    place = None if path is None else Path(path)
    assert CacheSpec.parse(text) == CacheSpec(
        path=place, limit_bytes=limit_bytes, is_per_node=is_of_node, policy=policy
    )


def test_a_path_is_taken_from_here_and_from_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert CacheSpec.parse("disk:cache?limit=1").path == tmp_path / "cache"
    assert CacheSpec.parse("disk:~/cache?limit=1").path == Path("/home/someone/cache")


@for_each(
    ("text", "says"),
    [
        ("", "not a cache"),
        ("20GB", "not a cache"),
        ("/mnt/nvme", "not a cache"),
        ("disk:?limit=1GB", "not a cache"),
        ("disk:/a\0b?limit=1GB", "not a cache"),
        ("memory:/a?limit=1GB", "not a cache"),
        ("tape:/a?limit=1GB", "not a cache"),
        ("disk:/a", "must have limit="),
        ("memory:", "must have limit="),
        ("disk:/a?limit=1GB&limit=2GB", "each once"),
        ("disk:/a?limit=1GB&size=2GB", "must have limit="),
        ("disk:/a?limit", "must have limit=|bad query"),
        ("disk:/a?limit=", "not a number of bytes"),
        ("disk:/a?limit=20M", "not a number of bytes"),
        ("disk:/a?limit=-1", "not a number of bytes"),
        ("disk:/a?limit=0", "limit_bytes must be at least 1"),
        ("disk:/a?limit=1GB&policy=best", "next-use, no-evict, lru, fifo"),
        ("disk:/a?limit=1GB&policy=", "next-use, no-evict, lru, fifo"),
        (None, "must be a string"),
        (7, "must be a string"),
    ],
)
def test_what_is_no_cache_is_refused_with_an_example(text: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        CacheSpec.parse(text)
    assert "disk:/mnt/nvme/stoker?limit=20GB" in str(caught.value)


@pytest.mark.parametrize("cache", [7, 1.5, True])
def test_what_is_neither_a_text_nor_several_is_refused(cache: Any) -> None:
    with pytest.raises(ConfigError, match="must be a string"):
        CacheSpec.parse_all(cache)


def test_several_are_the_nearest_first_and_in_different_places() -> None:
    assert CacheSpec.parse_all(None) == CacheSpec.parse_all(()) == ()
    memory, disk = "memory:?limit=1GB", "disk:/a?limit=1GB"
    assert CacheSpec.parse_all([memory, disk]) == (CacheSpec.parse(memory), CacheSpec.parse(disk))
    assert CacheSpec.parse_all(disk) == (CacheSpec.parse(disk),)
    for twice in ([memory, memory], [disk, memory, "disk:/a?limit=2GB"]):
        with pytest.raises(ConfigError, match="use the same memory or folder"):
            CacheSpec.parse_all(twice)


def test_a_deprecated_policy_is_the_present_one_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="^the cache policy uniform is deprecated: write no-evict$") as caught:
        spec = CacheSpec.parse("memory:?limit=2GB&policy=uniform")
    assert [each.filename for each in caught] == [__file__]
    assert spec == CacheSpec.parse("memory:?limit=2GB&policy=no-evict")
