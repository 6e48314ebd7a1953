"""Ranks of one training of which some see an epoch's objects and others do not: exactly once all the same."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker_torch import Loader
from support.materialized import materialize
from support.training_rank import RankReport, RankTask, run_ranks

SAMPLES = 103
BATCH_SIZE = 8
STEPS = 3


@pytest.fixture(autouse=True, scope="module")
def _loopback_only() -> Iterable[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        environment.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The same data set in two places: with its first two epochs materialized, and without."""
    folder, bare = (tmp_path_factory.mktemp("ranks") / name for name in ("with", "without"))
    schema = {"x": stoker.Array("float32", (4,)), "y": stoker.Array("float32")}
    with stoker.Packer(folder, schema=schema, super_sample_bytes=256) as packer:
        for x in np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype(np.float32):
            packer.write({"x": x, "y": x.sum()})
    for epoch in (0, 1):
        materialize(str(folder), seed=0, lanes=2, slices=2, epoch=epoch, object_bytes=256)
    bare.mkdir()
    for name in ("data", "manifests", "manifest.safetensors"):
        (bare / name).symlink_to(folder / name)
    return str(folder), str(bare)


def test_ranks_with_and_without_objects_deliver_every_sample_once_and_so_does_one_that_goes_on(
    urls: tuple[str, str], tmp_path: Path
) -> None:
    reports = run_ranks(
        [
            RankTask(
                url=url,
                rank=rank,
                world_size=2,
                rendezvous=str(tmp_path / "rendezvous"),
                batch_size=BATCH_SIZE,
                shuffle="materialized",
                epochs=1,
                steps=STEPS,
            )
            for rank, url in enumerate(urls)
        ]
    )
    assert [report.mismatch for report in reports] == ["", ""]
    assert reports[0].weights == reports[1].weights
    assert sorted(ids_of(reports, 0)) == list(range(SAMPLES))
    with Loader(urls[1], batch_size=7, shuffle="materialized", with_ids=True) as loader:
        loader.load_state_dict(reports[0].state)
        rest = [number for batch in loader for number in batch["__id__"].tolist()]
    assert sorted(ids_of(reports, 1) + rest) == list(range(SAMPLES))


def ids_of(reports: Iterable[RankReport], epoch: int) -> list[int]:
    return [number for report in reports for batch in report.epochs[epoch] for number in batch]
