"""What a process may use is read from where Linux says it, in either version of control groups."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker._base.machine import inspect_machine, process_seconds

GB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    memory = "MemTotal:       67108864 kB\nMemFree:  1 kB\nMemAvailable:   33554432 kB\n"
    for name, text in {"proc/meminfo": memory, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    found = inspect_machine(machine(tmp_path, {}))
    assert (found.memory_bytes, found.free_bytes, found.limited_by) == (64 * GB, 32 * GB, "")


def test_the_least_of_all_control_groups_around_a_process_is_the_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pods/one\n",
        "sys/fs/cgroup/pods/one/memory.max": "max\n",
        "sys/fs/cgroup/pods/memory.max": f"{8 * GB}\n",
        "sys/fs/cgroup/pods/memory.current": f"{3 * GB}\n",
        "sys/fs/cgroup/pods/cpu.max": "50000 100000\n",
    }
    found = inspect_machine(machine(tmp_path, files))
    assert (found.memory_bytes, found.free_bytes) == (8 * GB, 5 * GB)
    assert found.limited_by == "the control group /sys/fs/cgroup/pods"
    assert found.cores == 0.5


def test_the_first_version_of_control_groups_is_known_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/box\n4:memory:/box\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GB}\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{3 * GB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    found = inspect_machine(machine(tmp_path, files))
    assert (found.memory_bytes, found.free_bytes) == (2 * GB, 0)


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}
    found = inspect_machine(machine(tmp_path, files))
    assert (found.memory_bytes, found.limited_by) == (64 * GB, "")


def test_nonsense_in_these_files_is_as_good_as_nothing(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "\x00\xff: yes\nMemTotal: lots\n",
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": "-5\n",
        "sys/fs/cgroup/a/cpu.max": "1 0\n",
    }
    found = inspect_machine(machine(tmp_path, files))
    assert found.memory_bytes > 0
    assert found.cores >= 1


def test_this_machine_has_something() -> None:
    found = inspect_machine()
    assert 0 < found.free_bytes <= found.memory_bytes
    assert found.cores > 0
    assert found.open_files == pytest.approx(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def test_a_process_has_run_since_its_start(tmp_path: Path) -> None:
    code = "import time; from stoker._base.machine import process_seconds; time.sleep(0.2); print(process_seconds())"
    begun = time.monotonic()
    found = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert 0.2 <= found <= time.monotonic() - begun + 0.02  # the system counts in steps of 10 ms
    assert 0.0 <= process_seconds(tmp_path) < process_seconds() + 0.02  # where the system does not tell
