"""The packer as a process that is killed: nothing is lost or doubled, and packing again gives the very same bytes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from stoker._format.manifest import POINTER_KEY, Manifest
from stoker._maintenance.garbage import collect_garbage
from stoker._maintenance.inspection import verify
from stoker._pack.record import list_records
from stoker.abc import Store
from stoker.testing import WatchedStore
from support.killed_packing import MOMENTS, Death, Moment, PackTask, pack_and_die
from support.packing import fresh_store, numbered_samples, pack, puts, read_objects
from support.processes import child_process, exit_code, wait_for_end
from support.stores import Place

SAMPLES_EACH = 3  # of the super-samples that support.packing makes
FEW, MANY = 30, 300
KILLS = 6  # so few that they never get through the many
both_stores = pytest.mark.parametrize("place", ["folder", "local-bucket"], indirect=True)
both_modes = pytest.mark.parametrize("mode", ["create", "append"])


async def prepare(store: Store, mode: str) -> None:
    """Have a data set there for what is to be appended."""
    if mode == "append":
        await pack(store, numbered_samples(10), source="base")


async def contents(store: Store) -> dict[str, Any]:
    """Return everything that a store holds, but for the tags, which differ between stores, and between equal files."""
    found: dict[str, Any] = await read_objects(store)
    for key in [key for key in found if key.startswith("manifest")]:
        manifest = Manifest.from_bytes(found[key])
        rows = replace(manifest.rows, tags=np.zeros((len(manifest), 16), np.uint8))
        found[key] = replace(manifest, rows=rows).to_bytes()
    records = {logged.key: logged.record for logged in await list_records(store)}
    return found | {key: record and (record.state, record.version, len(record)) for key, record in records.items()}


async def recorded(store: Store) -> int:
    """Return how many super-samples the record of the pack that is under way has, 0 if there is none."""
    return sum(len(item.record) for item in await list_records(store) if item.record and not item.record.is_committed)


async def finish(store: Store, mode: str, samples: int) -> None:
    """Pack to the end; check that only the rest is packed, with the result of an uninterrupted pack."""
    durable, watched = await recorded(store), WatchedStore(store)
    manifest = await pack(watched, numbered_samples(samples), mode=mode)
    assert len(puts(watched)) == samples // SAMPLES_EACH - durable
    await check_same(store, mode, samples)
    assert await verify(store, manifest, deep=True) == []


async def check_same(store: Store, mode: str, samples: int, **changes: Any) -> None:
    """Check that a store has exactly the objects of an uninterrupted pack."""
    undisturbed = fresh_store()
    await prepare(undisturbed, mode)
    await pack(undisturbed, numbered_samples(samples), mode=mode, **changes)
    assert await contents(store) == await contents(undisturbed)
    garbage = await collect_garbage(store)
    assert (garbage.objects, garbage.records, garbage.unfinished) == ((), (), {})


def kill_and_finish(place: Place, mode: str, samples: int, deaths: Sequence[Death]) -> None:
    """Pack once for each death, each time resuming where the last was killed, and once to the end."""
    place.run(lambda store: prepare(store, mode))
    for death in deaths:
        task = PackTask(place=place, samples=samples, mode=mode, death=death)
        assert exit_code(pack_and_die, task) == -signal.SIGKILL, f"{death} of {deaths}"
    place.run(lambda store: finish(store, mode, samples))
    if place.name == "folder":
        assert not list(Path(place.url).rglob(".*"))  # where what is being written is hidden


@both_stores
@both_modes
@pytest.mark.parametrize("seed", [1])
def test_a_pack_killed_at_random_operations_again_and_again_ends_in_the_same_bytes(
    place: Place, mode: str, seed: int
) -> None:
    random = Random(f"{seed} {place.name} {mode}")
    kill_and_finish(place, mode, MANY, [Death.drawn(random, calls=40) for _ in range(KILLS)])


@both_stores
@both_modes
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("key", ["packs/", "data/", "manifests/", POINTER_KEY])
def test_a_pack_killed_around_the_write_of_each_kind_of_object_ends_in_the_same_bytes(
    place: Place, mode: str, moment: Moment, key: str
) -> None:
    kill_and_finish(place, mode, FEW, [Death(moment=moment, key=key, delay_seconds=0.001)])


@both_stores
@both_modes
def test_a_permuting_pack_killed_at_random_operations_again_and_again_ends_in_the_same_bytes(
    place: Place, mode: str
) -> None:
    async def finish_permuted(store: Store) -> None:
        await pack(store, numbered_samples(FEW), mode=mode, shuffle=7)
        await check_same(store, mode, FEW, shuffle=7)

    random = Random(f"permuted {place.name} {mode}")
    place.run(lambda store: prepare(store, mode))
    at_random = [Death.drawn(random, calls=calls) for calls in (10, 20, 30)]
    for death in (*at_random, Death(moment="during", key="data/"), Death(moment="during", key="manifests/")):
        task = PackTask(place=place, samples=FEW, mode=mode, shuffle=7, death=death)
        assert exit_code(pack_and_die, task) == -signal.SIGKILL, death
    place.run(finish_permuted)


@both_stores
def test_two_processes_that_pack_the_same_at_once_do_no_harm(place: Place) -> None:
    task = PackTask(place=place, samples=MANY, mode="create")
    with child_process(pack_and_die, task) as first, child_process(pack_and_die, task) as second:
        codes = [wait_for_end(process) for process in (first, second)]
    assert 0 in codes
    place.run(lambda store: check_same(store, "create", MANY))


def test_the_command_finds_nothing_wrong_with_what_was_killed_and_resumed(tmp_path: Path) -> None:
    place = Place(name="folder", url=str(tmp_path / "ds"), missing_url="")
    kill_and_finish(place, "create", FEW, [Death(moment="during", key="data/")])
    command = [sys.executable, "-m", "stoker.cli", "verify", "--deep", place.url]
    assert subprocess.run(command, check=False, timeout=300).returncode == 0
