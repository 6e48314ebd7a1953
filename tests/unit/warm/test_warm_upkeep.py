from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError, StateError
from stoker_warm._upkeep import Errand, Upkeep, UpkeepConfig
from stoker_warm._wake import Task

WARM, BACKUP = Task.WARM, Task.BACKUP
ONLY_WARM = UpkeepConfig(backup_seconds=None)
ONLY_BACKUP = UpkeepConfig(warm_seconds=None)


def run(upkeep: Upkeep, until_seconds: float, *, changing: bool = False) -> list[tuple[float, Errand]]:
    """Carry out all that is due, in no time, until a time; return it with when it was due."""
    ran: list[tuple[float, Errand]] = []
    while (now_seconds := upkeep.next_due()) is not None and now_seconds <= until_seconds:
        for errand in upkeep.due(now_seconds):
            ran.append((now_seconds, errand))
            upkeep.done(errand.node, now_seconds)
            if changing:
                upkeep.changed(errand.node)
    return ran


def test_every_node_is_called_once_an_interval_and_not_all_at_once() -> None:
    ran = run(Upkeep(4, ONLY_WARM, 100.0), 100.0 + 180.0)
    assert [(seconds, errand.node) for seconds, errand in ran] == [
        (100.0 + 15.0 * turn, (turn - 1) % 4) for turn in range(1, 13)
    ]
    assert {errand.task for _, errand in ran} == {WARM}


def test_traffic_puts_off_a_call_for_a_whole_interval() -> None:
    upkeep = Upkeep(1, ONLY_WARM, 0.0)
    upkeep.contacted(0, 59.0)
    assert upkeep.due(60.0) == []
    assert upkeep.next_due() == 119.0
    upkeep.contacted(0, 10.0)  # a word that is told late puts nothing forward
    assert upkeep.due(118.9) == []
    assert upkeep.due(119.0) == [(0, WARM)]


def test_a_node_under_steady_traffic_is_never_called() -> None:
    upkeep = Upkeep(1, ONLY_WARM, 0.0)
    for second in range(0, 3600, 30):
        upkeep.contacted(0, float(second))
        assert upkeep.due(float(second)) == []


def test_only_what_has_changed_is_backed_up() -> None:
    upkeep = Upkeep(2, UpkeepConfig(warm_seconds=None, peer_seconds=None), 0.0)
    assert run(upkeep, 600.0) == []
    upkeep.changed(1)
    assert run(upkeep, 3000.0) == [(900.0, (1, BACKUP))]


def test_turns_for_back_ups_are_spread_evenly_and_stay_where_they_are() -> None:
    upkeep = Upkeep(10, UpkeepConfig(warm_seconds=None, peer_seconds=None), 0.0)
    for node in range(10):
        upkeep.changed(node)
    ran = run(upkeep, 900.0, changing=True)
    assert [seconds for seconds, _ in ran] == pytest.approx([30.0 * turn for turn in range(1, 31)])
    assert [errand.node for _, errand in ran] == list(range(10)) * 3


def test_a_back_up_that_begins_late_does_not_move_the_turns_after_it() -> None:
    upkeep = Upkeep(1, ONLY_BACKUP, 0.0)
    upkeep.changed(0)
    assert upkeep.due(350.0) == [(0, BACKUP)]
    upkeep.done(0, 380.0)
    assert upkeep.next_due() == 600.0


@pytest.mark.parametrize(("peer_seconds", "gap_seconds"), [(300.0, 300.0), (599.0, 300.0), (600.0, 600.0), (None, 0.0)])
def test_the_instance_with_the_back_up_is_kept_warm_even_if_nothing_changes(
    peer_seconds: float | None, gap_seconds: float
) -> None:
    upkeep = Upkeep(1, UpkeepConfig(warm_seconds=None, peer_seconds=peer_seconds), 0.0)
    upkeep.changed(0)
    times = [seconds for seconds, _ in run(upkeep, 3000.0)]
    assert times[0] == 300.0
    assert {after - before for before, after in pairwise(times)} == {gap_seconds} - {0}


def test_a_node_that_holds_nothing_needs_no_back_up() -> None:
    assert run(Upkeep(3, ONLY_BACKUP, 0.0), 3000.0) == []


def test_what_changes_while_it_is_backed_up_is_backed_up_at_the_next_turn() -> None:
    upkeep = Upkeep(1, UpkeepConfig(warm_seconds=None, peer_seconds=None), 0.0)
    upkeep.changed(0)
    assert upkeep.due(300.0) == [(0, BACKUP)]
    upkeep.changed(0)
    upkeep.done(0, 301.0)
    assert upkeep.due(600.0) == [(0, BACKUP)]
    upkeep.done(0, 601.0)
    assert upkeep.due(900.0) == []


def test_a_back_up_that_failed_is_tried_again_at_the_next_turn() -> None:
    upkeep = Upkeep(1, UpkeepConfig(warm_seconds=None, peer_seconds=None), 0.0)
    upkeep.changed(0)
    upkeep.due(300.0)
    upkeep.done(0, 330.0, is_well=False)
    assert upkeep.due(599.0) == []
    assert upkeep.due(600.0) == [(0, BACKUP)]


def test_a_back_up_that_is_gone_is_made_anew() -> None:
    upkeep = Upkeep(1, UpkeepConfig(warm_seconds=None, peer_seconds=None), 0.0)
    upkeep.lost_peer(0)
    assert upkeep.due(300.0) == [(0, BACKUP)]


def test_a_back_up_is_a_contact() -> None:
    upkeep = Upkeep(1, UpkeepConfig(warm_seconds=301.0), 0.0)
    upkeep.changed(0)
    assert upkeep.due(300.0) == [(0, BACKUP)]
    assert upkeep.due(302.0) == []
    upkeep.done(0, 320.0)
    assert [errand for _, errand in run(upkeep, 620.0)] == [(0, BACKUP)]


def test_a_turn_that_comes_while_a_node_is_called_is_taken_when_the_call_ends() -> None:
    upkeep = Upkeep(1, UpkeepConfig(warm_seconds=299.0), 0.0)
    upkeep.changed(0)
    assert upkeep.due(299.0) == [(0, WARM)]
    assert upkeep.due(301.0) == []
    upkeep.done(0, 302.0)
    assert upkeep.next_due() == 302.0
    assert upkeep.due(302.0) == [(0, BACKUP)]


def test_no_more_errands_are_under_way_than_allowed_and_the_longest_due_come_first() -> None:
    upkeep = Upkeep(5, UpkeepConfig(backup_seconds=None, at_once=2), 0.0)
    assert [errand.node for errand in upkeep.due(60.0)] == [0, 1]
    assert upkeep.next_due() is None
    assert upkeep.due(60.0) == []
    upkeep.done(1, 61.0)
    assert [errand.node for errand in upkeep.due(61.0)] == [2]
    assert upkeep.under_way == 2


def test_a_schedule_of_nothing_is_never_due() -> None:
    upkeep = Upkeep(3, UpkeepConfig(warm_seconds=None, backup_seconds=None), 0.0)
    assert upkeep.next_due() is None
    assert upkeep.due(1e9) == []


def test_the_end_of_an_errand_that_was_not_given_out_is_an_error() -> None:
    with pytest.raises(StateError, match="node 2"):
        Upkeep(3, UpkeepConfig(), 0.0).done(2, 1.0)


@pytest.mark.parametrize("name", ["warm_seconds", "backup_seconds", "peer_seconds", "at_once"])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_figures_that_make_no_sense_are_refused(name: str, value: float) -> None:
    if name == "at_once":
        value = 0
    with pytest.raises(ConfigError, match=name):
        UpkeepConfig(**{name: value})  # type: ignore[arg-type]


def test_there_is_a_node() -> None:
    with pytest.raises(ConfigError, match="at least 1 node"):
        Upkeep(0, UpkeepConfig(), 0.0)


@given(
    nodes=st.integers(1, 8),
    at_once=st.integers(1, 4),
    steps=st.lists(st.tuples(st.floats(0.0, 50.0), st.integers(0, 7), st.sampled_from("wcdxf")), max_size=120),
)
def test_no_node_rests_longer_than_it_should_nor_has_two_errands_whatever_happens(
    nodes: int, at_once: int, steps: list[tuple[float, int, str]]
) -> None:
    config = UpkeepConfig(warm_seconds=60.0, backup_seconds=100.0, peer_seconds=None, at_once=at_once)
    upkeep, now_seconds = Upkeep(nodes, config, 0.0), 0.0
    busy: set[int] = set()
    contacts: dict[int, float] = defaultdict(float)
    backups: Counter[int] = Counter()
    for seconds, number, what in steps:
        now_seconds, node = now_seconds + seconds, number % nodes
        if what == "w":
            upkeep.contacted(node, now_seconds)
            contacts[node] = now_seconds
        elif what == "c":
            upkeep.changed(node)
            backups[node] = 1
        elif what in "xf" and busy:
            ended = sorted(busy)[number % len(busy)]
            busy.remove(ended)
            upkeep.done(ended, now_seconds, is_well=what == "x")
            contacts[ended] = now_seconds if what == "x" else contacts[ended]
            backups[ended] |= what == "f"
        else:
            for errand in upkeep.due(now_seconds):
                assert errand.node not in busy
                if errand.task is WARM:
                    assert now_seconds - contacts[errand.node] >= 60.0 or contacts[errand.node] == 0.0
                else:
                    assert backups[errand.node]
                    backups[errand.node] = 0
                busy.add(errand.node)
                contacts[errand.node] = now_seconds
            if len(busy) < at_once:
                assert all(now_seconds - contacts[other] < 60.0 for other in range(nodes) if other not in busy)
        assert upkeep.under_way == len(busy) <= at_once
        due_seconds = upkeep.next_due()
        assert (due_seconds is None) == (len(busy) == at_once)
