"""DELI's cost model: each equation by itself, and the paper's Table II."""

from __future__ import annotations

import pytest

from stoker_sim import _experiments as experiments
from stoker_sim._experiments.deli_costs import DeliRates, deli_cost, request_dollars

RATES = DeliRates(
    disk_dollars_per_gb_month=0.04, node_dollars_per_hour=0.5, list_dollars=0.05 / 10_000, get_dollars=0.004 / 10_000
)


def test_a_run_from_disk_pays_for_the_nodes_and_their_disks() -> None:
    cost = deli_cost(3, 16.0 + 4.0, 3000.0 + 600.0, RATES)
    assert cost["api"] == 0.0
    assert cost["storage"] == pytest.approx(3 * 0.04 * 20.0)
    assert cost["compute and loading"] == pytest.approx(3 * 0.5 * 1.0)
    assert cost["total"] == pytest.approx(cost["storage"] + cost["compute and loading"])


def test_reading_when_needed_lists_once_an_epoch_and_gets_every_sample() -> None:
    assert request_dollars(2, 42_000, RATES) == pytest.approx(2 * (42 * 5e-6 + 42_000 * 4e-7))
    assert request_dollars(1, 42_001, RATES) == pytest.approx(43 * 5e-6 + 42_001 * 4e-7)


def test_fetching_ahead_lists_everything_for_each_fetch() -> None:
    assert request_dollars(2, 42_000, RATES, fetch_size=1024) == pytest.approx(2 * (42 * 42 * 5e-6 + 42_000 * 4e-7))
    larger = request_dollars(1, 1000, RATES, fetch_size=100, listed_objects=5_500)
    assert larger == pytest.approx(6 * 10 * 5e-6 + 1000 * 4e-7)


def test_table_2_is_met_to_the_cent_but_for_one_total_that_its_own_parts_contradict() -> None:
    outcome = experiments.load_experiment("deli-table-2").run(False)
    rows = outcome.tables[0].rows
    assert len(rows) == 38
    unmet = [row[:3] for row in rows if row[6] != "yes"]
    assert unmet == [("mnist", "full fetch 2048", "total")]
    assert all(abs(float(row[3] or 0) - float(row[4] or 0)) < 0.01 for row in rows)
    remark = next(each for each in outcome.remarks if each.startswith("Not met"))
    assert "$2.10" in remark
    assert "add up to $2.11" in remark


def test_what_the_paper_prints_of_class_b_and_listings_does_not_meet_its_table() -> None:
    outcome = experiments.load_experiment("deli-table-2").run(False)
    met = {str(name): count for name, count, _ in outcome.tables[1].rows}
    here = met.pop("as here")
    assert len(met) == 3
    assert all(isinstance(count, int) and isinstance(here, int) and count < here for count in met.values())


def test_published_waits_are_taken_where_there_are_any() -> None:
    rows = experiments.load_experiment("deli-table-2").run(False).tables[0].rows
    assert {(row[1], row[8]) for row in rows} == {
        ("disk", "measured"),
        ("bucket", "measured"),
        ("full fetch 1024", "measured"),
        ("full fetch 2048", "simulated"),
        ("50/50 1024", "measured"),
    }
