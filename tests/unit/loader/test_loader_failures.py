"""An error of the bucket is raised at its batch, and a repaired run resumes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker import FetchConfig
from stoker.errors import FetchError, NotFoundError, SampleError, StoreError
from stoker_torch import Loader
from support.datasets import SCHEMA, sample_of

BATCH = 10
FETCH = FetchConfig(attempts=2, checksum_attempts=2, backoff_base_seconds=0.001, backoff_cap_seconds=0.001, hedge=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with stoker.Packer(tmp_path / "ds", schema=SCHEMA, super_sample_bytes=2000) as packer:
        packer.extend(sample_of(index) for index in range(300))
    return tmp_path / "ds"


def only_x(sample: dict[str, Any]) -> Any:
    return {"x": sample["x"]}


def loader_of(folder: Path, **settings: Any) -> Loader:
    return Loader(folder, batch_size=BATCH, shuffle="none", memory="1MB", fetch=FETCH, **settings)


def collect(loader: Loader, seen: list[int], *, interrupt_at: int | None = None) -> None:
    """Add to ``seen`` what a loop over the loader yields, until it ends somehow."""
    for batch in loader:
        seen += batch["x"].tolist()
        if len(seen) == interrupt_at:
            raise KeyboardInterrupt


def delete(file: Path) -> None:
    file.unlink()


def corrupt(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.filterwarnings("ignore::stoker.errors.CopiedBucketWarning")  # a file put back is another one
@pytest.mark.parametrize(
    "settings", [{}, {"transform": only_x}, {"batch_transform": only_x}], ids=["plain", "pool", "batch"]
)
@pytest.mark.parametrize("harm", [delete, corrupt, truncate])
def test_a_broken_object_is_raised_at_its_batch_and_a_repaired_run_continues_from_there(
    folder: Path, harm: Callable[[Path], None], settings: dict[str, Any]
) -> None:
    with loader_of(folder, **settings) as loader:
        broken = 6
        first_bad = int(loader.manifest.rows.samples[:broken].sum())
        file = folder / loader.manifest.key(broken)
        shutil.copy2(file, folder / "kept")
        harm(file)
        seen: list[int] = []
        with pytest.raises(StoreError, match=file.name):
            collect(loader, seen)
        assert seen == list(range(first_bad // BATCH * BATCH))  # every batch before the one that needs it
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (0, len(seen))
        shutil.copy2(folder / "kept", file)
        loader.load_state_dict(state)
        collect(loader, seen)
        assert seen == list(range(300))


def test_a_lost_bucket_is_an_error_that_names_it_and_coming_back_helps(folder: Path) -> None:
    with loader_of(folder) as loader:
        folder.rename(folder.with_name("away"))
        with pytest.raises((NotFoundError, FetchError), match=str(folder)):
            next(iter(loader))
        folder.with_name("away").rename(folder)
        assert next(iter(loader))["x"].tolist() == list(range(BATCH))  # nothing of the epoch was yielded: it begins


@pytest.mark.filterwarnings("ignore::stoker.errors.CopiedBucketWarning")  # a file put back is another one
@pytest.mark.parametrize("settings", [{}, {"transform": only_x}, {"epochs": 1}], ids=["plain", "pool", "last"])
def test_the_loop_after_an_error_continues_at_the_batch_that_could_not_be_had(
    folder: Path, settings: dict[str, Any]
) -> None:
    with loader_of(folder, **settings) as loader:
        broken = folder / loader.manifest.key(6)
        shutil.copy2(broken, folder / "kept")
        delete(broken)
        seen: list[int] = []
        for _ in range(2):
            with pytest.raises(StoreError):
                collect(loader, seen)
        shutil.copy2(folder / "kept", broken)
        collect(loader, seen)
        assert seen == list(range(300))
        assert loader.state_dict()["epoch"] == 1


def test_an_iteration_that_raised_is_over(folder: Path) -> None:
    with loader_of(folder) as loader:
        delete(folder / loader.manifest.key(0))
        batches = iter(loader)
        with pytest.raises(StoreError):
            next(batches)
        assert list(batches) == []


def test_a_bad_sample_behind_a_broken_object_does_not_come_first(folder: Path) -> None:
    def transform(sample: dict[str, Any]) -> Any:
        if sample["x"] == 25:
            raise ValueError("bad")
        return sample["x"]

    with loader_of(folder, transform=transform) as loader:
        bad_batch = 25 // BATCH
        delete(folder / loader.manifest.key(len(loader.manifest) - 1))
        batches = iter(loader)
        for _ in range(bad_batch):
            next(batches)
        with pytest.raises(SampleError, match="sample 25"):
            next(batches)


@pytest.mark.parametrize("settings", [{}, {"transform": only_x}], ids=["plain", "pool"])
def test_an_interrupt_inside_a_loop_body_leaves_the_loader_whole(folder: Path, settings: dict[str, Any]) -> None:
    with loader_of(folder, **settings) as loader:
        seen: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            collect(loader, seen, interrupt_at=5 * BATCH)
        loader.load_state_dict(loader.state_dict())
        collect(loader, seen)
        assert seen == list(range(300))


def test_a_state_of_a_version_that_is_gone_is_refused_and_changes_nothing(folder: Path) -> None:
    with loader_of(folder) as loader:
        next(iter(loader))
        state = loader.state_dict()
        gone = {**state, "sources": [{**state["sources"][0], "version": 7}]}
        with pytest.raises(NotFoundError):
            loader.load_state_dict(gone)
        assert loader.state_dict() == state
        loader.load_state_dict(state)
        assert next(iter(loader))["x"].tolist() == list(range(BATCH, 2 * BATCH))
