"""Checkpointed states of stoker 1 and messages between its processes are understood by this version."""

from __future__ import annotations

import json
from itertools import islice

import pytest

import stoker
from golden.v1.make_fixtures import COMMON, FOLDER, LOADED, SEED, numbers_of, stream_loader
from stoker_local import LocalBucket
from stoker_torch import Loader, StreamDataset, merge_states
from support.earlier_versions import options_of, upload

URL = "s3://stoker/golden/states"
STATES = json.loads((FOLDER / "states.json").read_text())
STREAMS = json.loads((FOLDER / "streams.json").read_text())


@pytest.fixture(scope="module")
def options(local_bucket: LocalBucket) -> stoker.S3Options:
    """Options of the bucket that has the data set and its materialized epoch."""
    upload(URL, options_of(local_bucket), "dataset", "epoch")
    return options_of(local_bucket)


@pytest.mark.parametrize("name", LOADED)
def test_a_loader_continues_where_a_state_was_taken(options: stoker.S3Options, name: str) -> None:
    settings, _, _ = LOADED[name]
    with Loader(URL, options=options, **COMMON, **settings) as loader:
        loader.load_state_dict(STATES[name]["state"])
        assert loader.state_dict() == STATES[name]["state"]
        assert numbers_of(loader) == STATES[name]["rest"]


@pytest.mark.parametrize("name", LOADED)
def test_a_loader_takes_the_same_state_today(options: stoker.S3Options, name: str) -> None:
    settings, batches, epoch = LOADED[name]
    with Loader(URL, options=options, **COMMON, **settings) as loader:
        loader.set_epoch(epoch)
        assert numbers_of(islice(loader, batches)) == STATES[name]["delivered"]
        assert json.dumps(loader.state_dict()) == json.dumps(STATES[name]["state"])


def test_two_ranks_continue_where_one_was(options: stoker.S3Options) -> None:
    found: list[int] = []
    for rank in range(2):
        with Loader(URL, options=options, rank=rank, world_size=2, shuffle="window", **COMMON) as loader:
            loader.load_state_dict(STATES["window"]["state"])
            found += numbers_of(loader)
    assert sorted(found) == sorted(STATES["window"]["rest"])


def test_the_states_of_workers_are_merged_and_read_by_one_process(options: stoker.S3Options) -> None:
    merged = merge_states([STREAMS["state"]])
    assert json.dumps(merged) == json.dumps(STREAMS["merged"])
    dataset = StreamDataset(URL, batch_size=3, seed=SEED, window=2, memory="1MB", options=options)
    dataset.load_state_dict(merged)
    assert dataset.state_dict() == merged
    assert numbers_of(dataset) == STREAMS["rest of merged"]
    dataset.close()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # newer Pythons' of every fork
def test_workers_continue_where_their_states_were_taken(options: stoker.S3Options) -> None:
    loader = stream_loader(URL, options)
    loader.load_state_dict(STREAMS["state"])
    assert numbers_of(loader) == STREAMS["rest"]
