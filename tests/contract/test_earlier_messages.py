"""Signatures, traces and messages of stoker 1 are understood by this version."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import stoker
from golden.v1.make_fixtures import COMMON, FOLDER, SEED
from golden.v1.make_function_fixtures import plan_fanout
from stoker._pack.merge import provisional_dataset
from stoker._stores.access_token import Grant, format_key
from stoker.cli import main
from stoker_functions._shuffle_job.work import ShuffleTask
from stoker_functions.serve import TokenKeys
from stoker_local import LocalBucket
from stoker_torch import Loader, StreamDataset
from support.earlier_versions import options_of, upload
from support.materialized import plan_tasks

URL = "s3://stoker/golden/messages"
JOB = json.loads((FOLDER / "job.json").read_text())
STATES = json.loads((FOLDER / "states.json").read_text())


@pytest.fixture(scope="module")
def options(local_bucket: LocalBucket) -> stoker.S3Options:
    """Options of the bucket that has the data set."""
    upload(URL, options_of(local_bucket), "dataset")
    return options_of(local_bucket)


@pytest.fixture
def exchanged_numbers(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers that this process, rank 1 of 2, exchanges with the others, one list per exchange."""
    found: list[list[int]] = []

    def all_gather(into: list[torch.Tensor], mine: torch.Tensor, group: None) -> None:
        found.append(mine.tolist())
        for target in into:
            target.copy_(mine)

    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(distributed, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(distributed, "all_gather", all_gather)
    return found


def digests(*texts: str) -> list[int]:
    return [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True) for text in texts]


ORDER = ("dataset='9f1eda263b9e71a6'", "version=2", "seed=7", "shuffle='window'", "window=2")


def test_the_ranks_of_a_loader_compare_the_same_digests(
    options: stoker.S3Options, exchanged_numbers: list[list[int]]
) -> None:
    with Loader(URL, options=options, shuffle="window", epochs=9, **COMMON) as loader:
        loader.load_state_dict(STATES["window"]["state"])
        next(iter(loader))
    place = ("lanes=2", "limit=None", "epoch=1", "position=12")
    assert exchanged_numbers == [
        digests(*ORDER, *place, "batch_size=4", "drop_last=False", "evaluation=False", "epochs=9")
    ]


def test_the_ranks_of_a_stream_compare_the_same_digests(
    options: stoker.S3Options, exchanged_numbers: list[list[int]]
) -> None:
    StreamDataset(URL, seed=SEED, window=2, lanes=4, limit=22, memory="1MB", options=options).close()
    rest = ("lanes=4", "limit=22", "drop_last=False", "evaluation=False", "epochs=None", "batch_size=None")
    assert exchanged_numbers == [digests(*ORDER, *rest)]


def test_the_tasks_of_an_epoch_are_the_same_events() -> None:
    common: dict[str, Any] = {"dataset": "s3://bucket/train", "version": 2, "seed": 7, "epoch": 3, "lanes": 2}
    way = {"way": "scattered", "slices": 2, "scatters": 1, "object_bytes": 1000}
    wanted = [
        [{**common, **way, "step": step, "part": part, "keep": 4} for part in range(parts)]
        for step, parts in (("scatter", 1), ("slice", 2), ("commit", 1))
    ]
    found = plan_tasks(
        "scattered",
        slices=2,
        scatters=1,
        object_bytes=1000,
        lanes=2,
        seed=7,
        epoch=3,
        keep=4,
        version=2,
        url="s3://bucket/train",
    )
    assert json.dumps([[task.to_event() for task in phase] for phase in found]) == json.dumps(wanted)
    assert [[ShuffleTask.from_event(event) for event in phase] for phase in wanted] == found


def test_a_pack_in_many_functions_is_the_same_job_and_the_same_parts(options: stoker.S3Options) -> None:
    assert json.dumps(asyncio.run(plan_fanout(options))) == json.dumps(JOB)


def test_a_data_set_that_functions_begin_has_the_same_id() -> None:
    assert provisional_dataset("s3://bucket/train") == "d9568ad3e4c16ae7"


def test_a_token_that_was_signed_is_verified_and_signed_the_same() -> None:
    secret = bytes(range(32))
    grant = Grant(datasets=("train", "val-2"), not_before_seconds=1_800_000_000, expires_seconds=1_800_003_600)
    token = (
        "stoker1.spring.eyJkYXRhc2V0cyI6WyJ0cmFpbiIsInZhbC0yIl0sImV4cGlyZXMiOjE4MDAwMDM2MDAsIm5vdF9iZWZvcmUiOjE4MDAwMDAw"
        "MDB9.FlZasJhLYgJFQON6uMwLy-ViKYZzSN22fl3bOBrBqqw"
    )
    keys = TokenKeys.parse(f"other:{'A' * 43} spring:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8")
    assert keys.verify(token, 1_800_000_001.0) == grant
    assert TokenKeys({"spring": secret}).sign(grant) == token
    assert format_key("spring", secret) == "spring:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"


def test_a_trace_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(FOLDER / "trace.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "view", "trace.json"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("trace.json: 8 batches in 0.039 s, of which 0.031 s (78.8%) were waited")
    for phase in ("gather", "other", "first_byte", "transfer", "queue", "start", "verify"):
        assert f"\n  {phase} " in said
    assert "8 requests; first byte after 3.8 ms (median)" in said
