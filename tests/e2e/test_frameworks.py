"""Exactly once under Lightning, Accelerate and Trainer on two ranks, in real processes, from a local folder."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import pytest

import stoker
from support.framework_ranks import BATCH_SIZE, CHECKPOINT_STEP, Report, run_framework

SAMPLES = 103
STEPS = -(-SAMPLES // (2 * BATCH_SIZE))
"""Of an epoch."""
SHARED = "divides its samples among the ranks, but its StreamDataset is rank {} of 2 and has only that rank's share"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("frameworks") / "train"
    with stoker.Packer(folder, schema={"x": stoker.Array("int64")}, super_sample_bytes=128) as packer:
        packer.extend({"x": number} for number in range(SAMPLES))
    return str(folder)


@pytest.fixture(scope="module")
def accelerate(url: str, tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    return run_framework("accelerate", url, tmp_path_factory.mktemp("accelerate"))


@pytest.fixture(scope="module")
def trainer(url: str, tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    return run_framework("trainer", url, tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def lightning(url: str, tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    return run_framework("lightning", url, tmp_path_factory.mktemp("lightning"))


def flat(ranks: Iterable[list[list[int]]]) -> list[int]:
    return list(chain.from_iterable(chain.from_iterable(ranks)))


def filled(ranks: list[list[list[int]]]) -> int:
    """Check that the ranks have every sample in equally many batches; return how many were there twice, to fill up."""
    numbers = flat(ranks)
    assert len({len(batches) for batches in ranks}) == 1
    assert set(numbers) == set(range(SAMPLES))
    return len(numbers) - SAMPLES


DEALT = [f"{dealing}, {workers} workers" for dealing in ("dispatched", "sharded") for workers in (0, 2)]


@pytest.mark.parametrize("case", DEALT)
def test_accelerate_deals_a_whole_stream_so_that_every_sample_comes(accelerate: list[Report], case: str) -> None:
    for epoch in range(2):
        # A whole is dealt with one last sample repeated; shards fill each worker's last batches, as Accelerate has it.
        most = 1 if case.startswith("dispatched") else 2 * BATCH_SIZE * (2 if "2 workers" in case else 1) - 1
        assert 0 < filled([report[f"{case}, whole"][epoch] for report in accelerate]) <= most
    for report in accelerate:
        assert report[f"{case}, resumed"] == report[f"{case}, whole"][1][2:]


@pytest.mark.parametrize("case", DEALT)
@pytest.mark.parametrize("name", ["share", "share in another"])
def test_a_share_that_accelerate_would_deal_again_is_refused_on_every_rank(
    accelerate: list[Report], case: str, name: str
) -> None:
    for rank, report in enumerate(accelerate):
        assert SHARED.format(rank) in report[f"{case}, {name}"]
        assert "rank=0, world_size=1, or do not prepare" in report[f"{case}, {name}"]


@pytest.mark.parametrize("case", DEALT)
def test_a_share_that_accelerate_does_not_deal_is_as_without_it(accelerate: list[Report], case: str) -> None:
    for epoch in range(2):
        assert filled([report[f"{case}, not prepared"][epoch] for report in accelerate]) == 1


def test_a_stateful_dataloader_continues_with_exactly_the_rest_where_accelerate_shards(
    accelerate: list[Report],
) -> None:
    for report in accelerate:
        whole, rest = report["sharded, stateful"]
        assert rest == whole[3:] != []


def test_a_state_that_accelerate_would_keep_ahead_of_the_training_is_refused(accelerate: list[Report]) -> None:
    for report in accelerate:
        assert "use dispatch_batches=False, or stoker_torch.Loader" in report["dispatched, stateful"]


def test_accelerate_leaves_a_loader_as_it_is(accelerate: list[Report]) -> None:
    for epoch in range(2):
        assert filled([report["loader"][epoch] for report in accelerate]) == 0


@pytest.mark.parametrize("case", ["staged", "DDP", "FSDP"])
def test_batches_on_a_device_are_those_of_the_host(accelerate: list[Report], case: str) -> None:
    for report in accelerate:
        assert report[case] == report["loader"]


def test_a_data_loader_that_accelerate_shards_is_staged(accelerate: list[Report]) -> None:
    for report in accelerate:
        assert report["sharded, staged"] == report["sharded, 0 workers, whole"]


def test_trainer_and_lightning_train_on_batches_of_a_device(trainer: list[Report], lightning: list[Report]) -> None:
    assert [report["staged"] for report in trainer] == [report["loader"] for report in trainer]
    assert [report["staged"] for report in lightning] == [report["whole"] for report in lightning]


def test_a_share_given_to_trainer_is_refused_on_every_rank(trainer: list[Report]) -> None:
    for rank, report in enumerate(trainer):
        assert SHARED.format(rank) in report["share"]
        assert "override get_train_dataloader" in report["share"]


@pytest.mark.parametrize(
    ("case", "most"), [("loader", 0), ("not prepared", 1), ("dispatched", 1), ("sharded", 2 * BATCH_SIZE - 1)]
)
def test_trainer_trains_on_every_sample(trainer: list[Report], case: str, most: int) -> None:
    for epoch in range(2):
        batches = [report[case][epoch * STEPS : (epoch + 1) * STEPS] for report in trainer]
        assert 0 <= filled(batches) <= most
    assert {len(report[case]) for report in trainer} == {2 * STEPS}


@pytest.mark.parametrize("case", ["loader", "dispatched", "sharded"])
def test_trainer_continues_from_a_checkpoint_with_exactly_the_rest(trainer: list[Report], case: str) -> None:
    for report in trainer:
        assert report[f"{case}, resumed"] == report[case][CHECKPOINT_STEP:]


@pytest.mark.parametrize(("case", "step"), [("even", 1), ("endless", 2)])
def test_trainer_makes_the_same_updates_of_several_batches_after_a_resume(
    trainer: list[Report], case: str, step: int
) -> None:
    for report in trainer:
        assert report[f"{case}, resumed at {step}"] == report[case][step:]
        assert {len(update) for update in report[case]} == {3}


def test_trainer_adds_the_rest_of_a_resumed_epoch_to_the_next_update_as_the_page_says(trainer: list[Report]) -> None:
    for report in trainer:
        batches, epoch = list(chain.from_iterable(report["rest"])), report["rest"][3:]
        assert [len(update) for update in report["rest"]] == [3, 3, 1] * 2  # of seven batches
        for step, sizes in ((1, [3, 4, 3, 1]), (2, [4, 3, 1])):
            resumed = report[f"rest, resumed at {step}"]
            assert [len(update) for update in resumed] == sizes
            assert list(chain.from_iterable(resumed)) == batches[3 * step :]
        # At its end the resumed run has made five updates of six: to Trainer, the second epoch begins behind the third.
        assert report["rest, resumed again"] == epoch[:1]


def test_lightning_trains_on_every_sample_once_though_its_sanity_check_breaks_off(lightning: list[Report]) -> None:
    for epoch in range(2):
        assert filled([report["whole"][epoch] for report in lightning]) == 0
    assert [len(report["whole, sane"]) for report in lightning] == [2, 2]


@pytest.mark.parametrize("run", ["whole", "resumed"])
def test_lightning_validates_on_every_sample_once(lightning: list[Report], run: str) -> None:
    tested = [sorted(flat(report[f"{run}, tested"][epoch] for report in lightning)) for epoch in range(2)]
    assert tested[1] == list(range(SAMPLES))
    assert tested[0] == (tested[1] if run == "whole" else [])


def test_lightning_continues_from_a_checkpoint_with_exactly_the_rest(lightning: list[Report]) -> None:
    for report in lightning:
        assert report["resumed"] == [[], report["whole"][1][CHECKPOINT_STEP - STEPS :]]


def test_nothing_of_an_unclosed_loader_outlives_lightning_s_trainer(
    lightning: list[Report],
) -> None:
    for report in lightning:
        assert "MainThread" in report["threads"]
        assert not [name for name in report["threads"] if "stoker" in name]
