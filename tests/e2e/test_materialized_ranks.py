"""Ranks of one training of which some see an epoch's objects and others do not: exactly once all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker_torch import Loader
from support.materialized import materialize
from support.training_rank import ids_of, keeping_ranks, pack_sums, run_training

SAMPLES = 103
BATCH_SIZE = 8
STEPS = 3


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The same data set in two places: with its first two epochs materialized, and without."""
    folder, bare = (tmp_path_factory.mktemp("ranks") / name for name in ("with", "without"))
    pack_sums(folder, SAMPLES)
    for epoch in (0, 1):
        materialize(str(folder), seed=0, lanes=2, slices=2, epoch=epoch, object_bytes=256)
    bare.mkdir()
    for name in ("data", "manifests", "manifest.safetensors"):
        (bare / name).symlink_to(folder / name)
    with keeping_ranks():
        yield str(folder), str(bare)


def test_ranks_with_and_without_objects_deliver_every_sample_once_and_so_does_one_that_continues(
    urls: tuple[str, str], tmp_path: Path
) -> None:
    settings = {"shuffle": "materialized", "batch_size": BATCH_SIZE, "epochs": 1, "steps": STEPS}
    reports = run_training(urls, tmp_path / "rendezvous", **settings)
    assert [report.mismatch for report in reports] == ["", ""]
    assert reports[0].weights == reports[1].weights
    assert sorted(ids_of(reports, 0)) == list(range(SAMPLES))
    with Loader(urls[1], batch_size=7, shuffle="materialized", with_ids=True) as loader:
        loader.load_state_dict(reports[0].state)
        rest = [number for batch in loader for number in batch["__id__"].tolist()]
    assert sorted(ids_of(reports, 1) + rest) == list(range(SAMPLES))
