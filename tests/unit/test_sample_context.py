"""A sample's random numbers: the order's own words, whatever else is drawn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from golden import make_order
from stoker import SampleContext
from stoker._order.random_words import Purpose

ONES = (1 << 64) - 1
ADDRESSES = [(0, 0, 0), (7, 3, 1_000_000_000), (ONES, 1, 2)]


def context(seed: int = 1, epoch: int = 2, sample: int = 3) -> SampleContext:
    return SampleContext(seed=seed, epoch=epoch, sample=sample)


@pytest.mark.parametrize(("seed", "epoch", "sample"), ADDRESSES)
@pytest.mark.parametrize("stream", [0, 2, 16])
def test_uniform_numbers_are_the_words_of_the_specification(seed: int, epoch: int, sample: int, stream: int) -> None:
    words = make_order.words(9, seed, Purpose.SAMPLE, epoch, sample, stream)
    drawn = context(seed, epoch, sample).uniform(9, stream=stream)
    assert drawn.dtype == np.float64
    assert drawn.tolist() == [(word >> 11) / 2**53 for word in words]


@pytest.mark.parametrize(("seed", "epoch", "sample"), ADDRESSES)
def test_the_generators_begin_at_words_of_their_own(seed: int, epoch: int, sample: int) -> None:
    numpys, torchs = (make_order.words(2, seed, Purpose.SAMPLE, epoch, sample, part) for part in (0, 1))
    of_sample = context(seed, epoch, sample)
    assert of_sample.generator().integers(0, ONES, 2, np.uint64, endpoint=True).tolist() == numpys
    assert of_sample.torch_generator().initial_seed() % 2**64 == torchs[0]


def test_a_generator_is_made_once_and_continues() -> None:
    one, other = context(), context()
    drawn = [one.generator().random(), one.generator().random()]
    assert drawn == other.generator().random(2).tolist()
    assert one.torch_generator() is one.torch_generator()
    assert torch.rand(3, generator=one.torch_generator()).shape == (3,)


def test_uniform_numbers_do_not_depend_on_what_was_drawn() -> None:
    before, after = context(), context()
    after.generator().random(100)
    after.uniform(5, stream=3)
    assert before.uniform(4, stream=2).tolist() == after.uniform(4, stream=2).tolist()


def test_every_seed_epoch_sample_and_stream_has_other_numbers() -> None:
    drawn = {
        (context(*address).uniform(1, stream=stream)[0], context(*address).generator().random())
        for address in itertools.product((0, 1), repeat=3)
        for stream in (2, 16)
    }
    assert len({number for number, _ in drawn}) == 16
    assert len({number for _, number in drawn}) == 8


def test_contexts_of_the_same_sample_are_equal_and_tell_what_they_are() -> None:
    one, other = context(), context()
    one.generator()
    assert one == other
    assert repr(one) == "SampleContext(seed=1, epoch=2, sample=3)"
