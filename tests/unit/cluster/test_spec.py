"""The setting of a cache process: what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker._base.machine import inspect_machine
from stoker._cluster import client as client_module
from stoker._cluster.client import ClusterTier
from stoker.errors import ConfigError
from support.cases import for_each


@for_each(
    ("text", "message"),
    [
        ("memory:", "it must have limit="),
        ("memory:/x?limit=1GB", "neither memory nor a disk"),
        ("disk:?limit=1GB", "neither memory nor a disk"),
        ("memory:?limit=much", "much"),
        ("memory:?limit=1GB&limit=2GB", "each once"),
        ("memory:?limit=1GB&policy=lru", "may have linger="),
        ("memory:?limit=1GB&tls=maybe", "tls must be yes or no, not 'maybe'"),
        ("memory:?limit=1GB&linger=-1", "linger_seconds"),
        ("https://10.0.0.1?limit=1GB", "neither memory nor a disk"),
        ("memory:?limit=900TB", r"of memory here.*; lower limit="),
    ],
)
def test_a_wrong_setting_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterTier(text)


def test_a_limit_above_the_memory_of_a_container_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(inspect_machine(), memory_bytes=1 << 30, limited_by="the control group /sys/fs/cgroup/job")
    monkeypatch.setattr(client_module, "inspect_machine", lambda: machine)
    with pytest.raises(ConfigError, match=r"1\.00 GiB of memory here \(the control group /sys/fs/cgroup/job\)"):
        ClusterTier("memory:?limit=2GB")
    ClusterTier("memory:?limit=1GB")
