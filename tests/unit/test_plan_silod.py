"""SiloD's experiments, run quickly: the tables have what the remarks and panels say."""

from __future__ import annotations

from itertools import islice

import pytest

from stoker_sim import _experiments as experiments
from stoker_sim._experiments import silod as silod_estimator
from stoker_sim._experiments.silod import create_queue


def test_a_queue_is_the_same_jobs_whether_they_share_data_or_not() -> None:
    own, shared = create_queue(30, 4), create_queue(30, 4, share_data=True)
    assert [each.seconds for each in own] == [each.seconds for each in shared]
    assert [each.min_seconds for each in own] == [each.min_seconds for each in shared]
    assert len({each.job.dataset_key for each in own}) == 30
    assert len({each.job.dataset_key for each in shared}) == 5
    assert create_queue(30, 4) == own
    assert create_queue(30, 5) != own


def test_each_case_of_the_estimate_stands_beside_what_was_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = list(islice(silod_estimator.cases(quick=True), 3))
    monkeypatch.setattr(silod_estimator, "cases", lambda quick: chosen)
    outcome = experiments.load_experiment("silod-estimator").run(True)
    for row, case in zip(outcome.tables[0].rows, chosen, strict=True):
        *_, estimate, simulated, error = (float(cell or 0) for cell in row[1:])
        assert estimate == case.share.rate / 1e6
        assert simulated == pytest.approx(estimate * (1 + error))
        assert abs(error) < 0.05
    assert outcome.remarks[0].startswith("one node: 3 cases, error ")
    assert "100% of them are within 5%" in outcome.remarks[0]
