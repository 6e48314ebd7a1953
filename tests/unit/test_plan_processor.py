"""Processor time of loaders in predictions: known answers, and how predictions change with it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import FetchConfig, OrderConfig
from stoker._diagnostics.latency import Constant
from stoker._fetch.config import PipelineConfig
from stoker._format.manifest import Manifest
from stoker.errors import ConfigError
from stoker.testing import run_virtual
from stoker_sim import BucketModel
from stoker_sim._bucket import synthetic_manifest
from stoker_sim._predict import predict
from stoker_sim._processor import ProcessorModel, RankProcessor
from stoker_sim._scenario import simulate
from stoker_sim._training import PlannedTraining

MIB = 1 << 20


MANIFEST, SHORT = (synthetic_manifest(super_samples=count, samples=100, super_sample_bytes=MIB) for count in (120, 40))


def training(
    processor: ProcessorModel | None = None, *, rate: float = 2000.0, ranks: int = 1, manifest: Manifest = MANIFEST
) -> PlannedTraining:
    """Return a training in batches of 100, of 12,000 samples by default, whose link supplies 4,500 samples a second."""
    return PlannedTraining(
        manifest=manifest,
        feed=PipelineConfig(
            order=OrderConfig(seed=1, window=4, lanes=ranks),
            batch_size=100,
            world_size=ranks,
            memory_bytes=40 * MIB,
            fetch=FetchConfig(hedge=False),
        ),
        samples_per_second=rate,
        ranks_per_node=ranks,
        bucket=BucketModel(first_byte=Constant(0.02), connection_bytes_per_second=20e6),
        node_bytes_per_second=50e6,
        processor=processor or ProcessorModel(),
    )


def test_processor_time_of_zero_changes_nothing() -> None:
    plain = training(rate=3000.0, ranks=2)
    assert simulate(replace(plain, processor=ProcessorModel(cores=1.0, sample_bytes=1e4))) == simulate(plain)


@pytest.mark.parametrize(("ranks", "cores"), [(1, 1.0), (1, 8.0), (4, 4.0)])
def test_gathering_that_takes_less_than_a_step_is_hidden_behind_it(ranks: int, cores: float) -> None:
    processor = ProcessorModel(cores=cores, sample_seconds=0.3 / 1000)
    found = predict(training(processor, rate=1000.0 / ranks, ranks=ranks)).later
    assert found.accelerator_utilization == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("ranks", "cores", "slowdown"), [(1, 1.0, 1), (1, 8.0, 1), (4, 4.0, 1), (4, 2.0, 2), (4, 1.0, 4)]
)
def test_gathering_that_takes_longer_than_a_step_determines_the_rate(ranks: int, cores: float, slowdown: int) -> None:
    processor = ProcessorModel(cores=cores, sample_seconds=2.0 / 1000)
    found = predict(training(processor, rate=1000.0, ranks=ranks)).later
    assert found.accelerator_utilization == pytest.approx(0.5 / slowdown, rel=0.05)


@pytest.mark.parametrize(("ranks", "cores", "rate"), [(1, 1.0, 1.0), (1, 2.0, 1.0), (4, 2.0, 2.0), (4, 0.5, 0.5)])
def test_a_rank_receives_with_one_core_at_most_and_ranks_share_the_cores(ranks: int, cores: float, rate: float) -> None:
    processor = ProcessorModel(cores=cores, fetched_byte_seconds=1e-7)
    found = predict(training(processor, rate=100_000.0, ranks=ranks)).later
    assert found.seconds == pytest.approx(120 * MIB * 1e-7 / rate, rel=0.1)


def test_a_rank_fetches_and_gathers_with_one_core_together() -> None:
    processor = ProcessorModel(cores=2.0, fetched_byte_seconds=5e-8, sample_seconds=120 * MIB * 5e-8 / 12_000)
    found = predict(training(processor, rate=100_000.0)).later
    assert found.seconds == pytest.approx(120 * MIB * 1e-7, rel=0.1)


def test_new_memory_delays_the_first_epoch_alone() -> None:
    plain, slow = (
        predict(training(ProcessorModel(cores=2.0, new_byte_seconds=seconds, sample_bytes=1e4)))
        for seconds in (0.0, 1e-7)
    )
    assert slow.first_batch_seconds > plain.first_batch_seconds + 0.1
    assert slow.first.seconds > plain.first.seconds
    assert slow.later.seconds == pytest.approx(plain.later.seconds)


def test_requests_take_processor_time() -> None:
    found = predict(training(ProcessorModel(cores=1.0, request_seconds=0.1), rate=100_000.0)).later
    assert found.seconds == pytest.approx(120 * 0.1, rel=0.1)


_COSTS = st.builds(
    ProcessorModel,
    cores=st.sampled_from([0.5, 1.0, 2.0, 8.0]),
    request_seconds=st.floats(0.0, 0.02),
    fetched_byte_seconds=st.floats(0.0, 3e-8),
    sample_seconds=st.floats(0.0, 1e-3),
)


@settings(max_examples=12, deadline=None)
@given(costs=_COSTS, factor=st.floats(1.0, 10.0), ranks=st.sampled_from([1, 2]))
def test_more_processor_time_never_raises_the_utilization(costs: ProcessorModel, factor: float, ranks: int) -> None:
    more = replace(
        costs,
        request_seconds=factor * costs.request_seconds,
        fetched_byte_seconds=factor * costs.fetched_byte_seconds,
        sample_seconds=factor * costs.sample_seconds,
    )
    found = [predict(training(each, ranks=ranks, manifest=SHORT)).later for each in (ProcessorModel(), costs, more)]
    for less, greater in pairwise(found):
        assert greater.accelerator_utilization <= less.accelerator_utilization + 0.01
        assert greater.seconds >= 0.99 * less.seconds


async def _run_threads(model: ProcessorModel) -> float:
    rank = RankProcessor(model, model.share_cores(), batch_size=10)
    await asyncio.gather(rank.receive(range(1), 10, 1), rank.gather())
    return asyncio.get_running_loop().time()


def test_the_threads_of_a_rank_take_turns() -> None:
    model = ProcessorModel(cores=4.0, request_seconds=0.02, fetched_byte_seconds=0.001, sample_seconds=0.001)
    assert run_virtual(_run_threads(model)) == pytest.approx(0.02 + 0.01 + 0.01)


def test_a_machine_has_a_part_of_a_core_at_least() -> None:
    with pytest.raises(ConfigError, match="cores must be"):
        ProcessorModel(cores=0.0)
