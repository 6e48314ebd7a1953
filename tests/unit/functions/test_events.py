"""Events of commit and compact: what they must be, and what they are taken for."""

from __future__ import annotations

from typing import Any

import pytest

from stoker._pack.merge import FanoutJob
from stoker.errors import EventError
from stoker_functions._commit import read_commit_event, read_compact_event
from support.cases import for_each

JOB, A, B = "0123456789abcdef", "a" * 16, "b" * 16


def test_a_commit_is_of_everything_that_waits_or_of_a_job() -> None:
    assert read_commit_event({"dataset": "s3://b/train"}) == ("s3://b/train", None)
    assert read_commit_event({"dataset": "s3://b/train", "job": ""})[1] is None
    event = {"dataset": "s3://b/train", "job": JOB, "runs": [B, A]}
    assert read_commit_event(event)[1] == FanoutJob(id=JOB, runs=(B, A), creates=False)
    assert read_commit_event({**event, "mode": "append"})[1] == FanoutJob(id=JOB, runs=(B, A), creates=False)
    assert read_commit_event({**event, "mode": "create"})[1] == FanoutJob(id=JOB, runs=(B, A), creates=True)


def test_a_job_may_have_as_many_runs_as_a_fan_out_has_parts() -> None:
    runs = [f"{number:016x}" for number in range(100_000)]
    found = read_commit_event({"dataset": "d", "job": JOB, "runs": runs})[1]
    assert found is not None
    assert found.runs == tuple(runs)
    with pytest.raises(EventError, match=r"'runs' is .* at most 100000"):
        read_commit_event({"dataset": "d", "job": JOB, "runs": [*runs, A]})


@for_each(
    ("event", "problem"),
    [
        ({}, "no field 'dataset'"),
        ({"dataset": None}, "'dataset' is None"),
        ({"dataset": "d", "job": JOB}, "no field 'runs'"),
        ({"dataset": "d", "job": JOB, "runs": None}, "'runs' is None"),
        ({"dataset": "d", "job": JOB, "runs": []}, "name each run"),
        ({"dataset": "d", "job": JOB, "runs": [A, B, A]}, "name each run of the job once"),
        ({"dataset": "d", "job": JOB, "runs": [A.upper()]}, "'run' is 'AAAA"),
        ({"dataset": "d", "job": JOB, "runs": [[A]]}, "'run' is"),
        ({"dataset": "d", "job": "../packs", "runs": [A]}, "'job' is"),
        ({"dataset": "d", "runs": [A]}, "no 'job'"),
        ({"dataset": "d", "job": "", "mode": "create"}, "no 'job'"),
        ({"dataset": "d", "job": JOB, "runs": [A], "mode": "replace"}, "'mode' is 'replace'"),
        ({"dataset": "d", "jobs": JOB}, "unknown field 'jobs'"),
        ([], "not a JSON object"),
    ],
)
def test_what_is_no_commit_event_says_why(event: Any, problem: str) -> None:
    with pytest.raises(EventError, match=problem):
        read_commit_event(event)


def test_a_compaction_makes_super_samples_of_eight_mebibytes_by_default() -> None:
    assert read_compact_event({"dataset": "d"}) == ("d", 8 << 20)
    assert read_compact_event({"dataset": "d", "super_sample_bytes": 1})[1] == 1
    assert read_compact_event({"dataset": "d", "super_sample_bytes": 32 << 20})[1] == 32 << 20


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        ({"super_sample_bytes": 8}, "no field 'dataset'"),
        ({"dataset": "d", "super_sample_bytes": (32 << 20) + 1}, "'super_sample_bytes' is"),
        ({"dataset": "d", "super_sample_bytes": 8.0}, "'super_sample_bytes' is 8.0"),
        ({"dataset": "d", "version": 3}, "unknown field 'version'"),
        ("d", "not a JSON object"),
    ],
)
def test_what_is_no_compact_event_says_why(event: Any, problem: str) -> None:
    with pytest.raises(EventError, match=problem):
        read_compact_event(event)
