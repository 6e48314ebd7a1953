"""The packer as a process that is killed: nothing is lost or doubled, and packing again gives the very same bytes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker import catalog
from stoker.maintenance import verify
from stoker.manifest import Manifest
from stoker.store import open_store
from support.packing import stored

# Packs 300 samples into the folder argv[1], in super-samples of three, and kills itself at the moment that argv[2]
# describes: "at N" before its N-th write, "behind N" after it, "at KEY" or "behind KEY" likewise; "never".
PROGRAM = """
import os, signal, sys
from stoker.pack.packer import Packer
from stoker.schema import Array, Bytes
from stoker.store.local import LocalStore

folder, mode, when, what = sys.argv[1:]
puts = 0
original = LocalStore.put

async def put(self, key, data, **conditions):
    global puts
    puts += 1
    is_now = what in (key, str(puts))
    if is_now and when == "at":
        os.kill(os.getpid(), signal.SIGKILL)
    info = await original(self, key, data, **conditions)
    if is_now and when == "behind":
        os.kill(os.getpid(), signal.SIGKILL)
    return info

LocalStore.put = put
schema = {"data": Bytes(), "label": Array("int64")}
with Packer(folder, schema=schema, super_sample_bytes=400, mode=mode, source="numbers") as packer:
    print(packer.durable_samples, flush=True)
    for i in range(300):
        packer.write({"data": f"sample {i:3d} ".encode() * 9, "label": i})
        if i % 50 == 0:
            print(i, flush=True)
"""


def packing(folder: Path, mode: str = "create", when: str = "never", what: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(folder), mode, when, what],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def pack(folder: Path, mode: str = "create", when: str = "never", what: str = "") -> tuple[int, list[str]]:
    """Run the program to its end; return its exit status and what it printed."""
    with packing(folder, mode, when, what) as process:
        printed, _ = process.communicate(timeout=60)
    return process.returncode, printed.splitlines()


def objects(folder: Path) -> dict[str, bytes]:
    return asyncio.run(stored(open_store(folder), "data/"))


def checked(folder: Path) -> Manifest:
    """Return the newest manifest, whose every object is what it says."""

    async def main() -> Manifest:
        store = open_store(folder)
        manifest = await catalog.read_manifest(store)
        assert await verify(store, manifest, deep=True) == []
        return manifest

    return asyncio.run(main())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert pack(folder)[0] == 0
    return folder


def check_same(folder: Path, undisturbed: Path) -> None:
    assert objects(folder) == objects(undisturbed)
    found, expected = checked(folder), checked(undisturbed)
    assert (found.version, found.runs, found.samples) == (1, expected.runs, 300)


@pytest.mark.parametrize(
    ("when", "what"),
    [
        ("at", "1"),
        ("behind", "1"),
        ("behind", "2"),
        ("at", "40"),
        ("behind", "90"),
        ("at", "manifests/00000001.safetensors"),
        ("behind", "manifests/00000001.safetensors"),
        ("at", "manifest.safetensors"),
        ("behind", "manifest.safetensors"),
    ],
)
def test_a_pack_that_was_killed_is_resumed_to_the_same_bytes(
    tmp_path: Path, undisturbed: Path, when: str, what: str
) -> None:
    status, _ = pack(tmp_path, "create", when, what)
    assert status == -signal.SIGKILL
    status, printed = pack(tmp_path)
    assert status == 0
    if what.startswith("manifest"):
        assert printed[0] == "300"
    elif int(what) >= 40:
        assert int(printed[0]) >= 24
    check_same(tmp_path, undisturbed)


def test_a_pack_that_is_killed_from_outside_again_and_again_gets_there(tmp_path: Path, undisturbed: Path) -> None:
    for printed_lines in (2, 4, 6):
        with packing(tmp_path) as process:
            assert process.stdout is not None
            for _ in range(printed_lines):
                process.stdout.readline()
            process.kill()
    pack(tmp_path)
    check_same(tmp_path, undisturbed)


@pytest.mark.parametrize("key", ["manifests/00000002.safetensors", "manifest.safetensors"])
def test_an_append_killed_between_version_and_pointer_is_not_appended_twice(
    tmp_path: Path, undisturbed: Path, key: str
) -> None:
    assert pack(tmp_path)[0] == 0
    assert pack(tmp_path, "append", "behind", key)[0] == -signal.SIGKILL
    assert pack(tmp_path, "append")[0] == 0
    manifest = checked(tmp_path)
    assert (manifest.version, manifest.samples) == (2, 600)


def test_two_processes_that_pack_the_same_at_once_do_no_harm(tmp_path: Path, undisturbed: Path) -> None:
    with packing(tmp_path) as first, packing(tmp_path) as second:
        first.communicate(timeout=60)
        second.communicate(timeout=60)
    assert 0 in (first.returncode, second.returncode)
    check_same(tmp_path, undisturbed)
