"""Training with torch.distributed (gloo) in real processes, from a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.training_rank import RankReport, RankTask, ids_of, keeping_ranks, pack_sums, run_ranks, run_training

SAMPLES = 103
STEPS_BEFORE_STATE = 3
BATCH_SIZE = 8


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    with keeping_ranks():
        yield


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("distributed") / "train"
    pack_sums(folder, SAMPLES)
    return str(folder)


@pytest.fixture(scope="module")
def two_ranks(url: str, tmp_path_factory: pytest.TempPathFactory) -> list[RankReport]:
    """One whole epoch and the beginning of the next, on two ranks."""
    rendezvous = tmp_path_factory.mktemp("two") / "rendezvous"
    return run_training([url] * 2, rendezvous, batch_size=BATCH_SIZE, epochs=1, steps=STEPS_BEFORE_STATE)


def test_an_epoch_delivers_every_sample_exactly_once_over_both_ranks(two_ranks: list[RankReport]) -> None:
    assert sorted(ids_of(two_ranks, 0)) == list(range(SAMPLES))


def test_both_ranks_take_the_same_number_of_steps(two_ranks: list[RankReport]) -> None:
    whole_steps = -(-SAMPLES // (2 * BATCH_SIZE))
    assert [[len(epoch) for epoch in report.epochs] for report in two_ranks] == [[whole_steps, STEPS_BEFORE_STATE]] * 2


def test_both_ranks_learn_the_same_model(two_ranks: list[RankReport]) -> None:
    first, second = two_ranks
    assert first.weights == second.weights
    assert sum(first.losses[-STEPS_BEFORE_STATE:]) < sum(first.losses[:STEPS_BEFORE_STATE])


def test_the_state_of_either_rank_is_the_state_of_both(two_ranks: list[RankReport]) -> None:
    assert two_ranks[0].state == two_ranks[1].state
    assert two_ranks[0].state["position"] == STEPS_BEFORE_STATE * 2 * BATCH_SIZE


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 7), (3, 5)])
def test_another_world_size_resumes_in_mid_epoch_and_delivers_exactly_the_rest(
    url: str, two_ranks: list[RankReport], tmp_path: Path, world_size: int, batch_size: int
) -> None:
    state = two_ranks[0].state
    reports = run_training([url] * world_size, tmp_path / "rendezvous", batch_size=batch_size, epochs=1, state=state)
    assert sorted(ids_of(two_ranks, 1) + ids_of(reports, 0)) == list(range(SAMPLES))
    rest = SAMPLES - STEPS_BEFORE_STATE * 2 * BATCH_SIZE
    assert {len(report.epochs[0]) for report in reports} == {-(-rest // (world_size * batch_size))}


def test_ranks_with_different_seeds_all_fail_before_the_first_batch_instead_of_hanging(
    url: str, tmp_path: Path
) -> None:
    reports = run_ranks(
        [
            RankTask(
                url=url,
                rank=rank,
                world_size=2,
                rendezvous=str(tmp_path / "rendezvous"),
                batch_size=BATCH_SIZE,
                seed=40 + rank,
                epochs=1,
            )
            for rank in range(2)
        ]
    )
    assert [report.epochs for report in reports] == [[[]], [[]]]
    for rank, report in enumerate(reports):
        assert f"seed (here {40 + rank})" in report.mismatch
