from __future__ import annotations

import math

import pytest

from stoker.errors import ConfigError, StateError
from stoker_warm._node_state import TRANSITIONS, NodeContents, NodeEvent, NodeState, NodeStateMachine
from stoker_warm._shard import StoreVersion

FULL, NEWER, NOTHING = StoreVersion(7, 70), StoreVersion(9, 90), StoreVersion()
ONE, TWO = "1" * 16, "2" * 16


def awake(digest: StoreVersion = FULL, *, calls: int = 1) -> NodeStateMachine:
    """Return a node that was called, greeted with some contents, and whose shards were listed."""
    life = NodeStateMachine()
    for _ in range(calls):
        life.on_call_started()
    life.on_greeting(ONE, digest, 0.0)
    life.has_shard_list = True
    return life


def in_doubt() -> NodeStateMachine:
    life = awake()
    life.on_timeout()
    assert life.state is NodeState.MAYBE
    return life


def lost_node() -> NodeStateMachine:
    life = in_doubt()
    assert [life.on_timeout(), life.on_timeout()] == [False, True]
    assert life.state is NodeState.GONE
    return life


def asleep() -> NodeStateMachine:
    life = awake()
    life.on_leaving(ONE, 1.0)
    life.on_call_returned()
    assert life.state is NodeState.SLEEPING
    return life


def test_every_state_with_every_event_is_considered() -> None:
    assert set(TRANSITIONS) == {(state, event) for state in NodeState for event in NodeEvent}


TABLE = """
event              SLEEPING AWAKE    MAYBE    GONE
GREETED            AWAKE    AWAKE    AWAKE    AWAKE
GREETED_OTHER      AWAKE    refused  refused  AWAKE
GREETED_EMPTY      SLEEPING refused  refused  refused
MESSAGE            AWAKE    AWAKE    AWAKE    refused
LEAVING            SLEEPING SLEEPING SLEEPING refused
DISCONNECTED       SLEEPING MAYBE    MAYBE    refused
TIMED_OUT          SLEEPING MAYBE    MAYBE    GONE
CALLS_ENDED        SLEEPING SLEEPING SLEEPING GONE
ATTEMPTS_EXHAUSTED GONE     refused  GONE     GONE
NOTHING_DELIVERED  refused  GONE     GONE     refused
WRONG_SHARDS       GONE     GONE     GONE     refused
"""


def test_every_transition_is_the_one_that_is_meant() -> None:
    header, *rows = (line.split() for line in TABLE.strip().splitlines())
    written = {
        (NodeState[state], NodeEvent[name]): None if cell == "refused" else NodeState[cell]
        for name, *cells in rows
        for state, cell in zip(header[1:], cells, strict=True)
    }
    assert written == TRANSITIONS


def test_a_node_that_was_never_called_must_be() -> None:
    life = NodeStateMachine()
    assert (life.can_send(0.0), life.must_invoke) == (False, True)


def test_a_node_is_called_once_and_then_awaited() -> None:
    life = NodeStateMachine()
    life.on_call_started()
    assert not life.must_invoke
    life.on_timeout()
    assert life.must_invoke


def test_requests_go_out_while_the_last_word_is_fresh() -> None:
    life = NodeStateMachine(fresh_seconds=2.0)
    life.on_greeting(ONE, NOTHING, 10.0)
    assert life.can_send(12.0)
    assert not life.can_send(12.5)
    assert life.on_message(ONE, 12.5)
    assert life.can_send(14.5)


def test_a_node_that_keeps_its_memory_is_believed_and_one_that_woke_on_its_connection_is_too() -> None:
    life = asleep()
    assert life.must_invoke
    life.on_call_started()
    assert life.on_message(ONE, 5.0)
    assert life.can_send(5.0)
    assert life.expected_version == FULL
    assert life.on_greeting(ONE, FULL, 6.0) is NodeContents.EXPECTED


def test_a_fresh_instance_of_a_node_whose_connection_broke_has_lost_everything() -> None:
    life = asleep()
    life.on_disconnected(ONE)
    life.on_call_started()
    assert life.on_greeting(TWO, NOTHING, 5.0) is NodeContents.NONE
    assert (life.instance, life.expected_version, life.state) == (TWO, NOTHING, NodeState.AWAKE)


def test_a_fresh_instance_in_the_place_of_one_that_may_be_there_is_believed_at_the_second_call_only() -> None:
    life = asleep()
    life.on_call_started()
    assert life.on_greeting(TWO, NOTHING, 5.0) is NodeContents.DOUBTFUL
    assert (life.instance, life.expected_version, life.state, life.is_connected) == (
        ONE,
        FULL,
        NodeState.SLEEPING,
        False,
    )
    assert life.must_invoke
    life.on_call_started()
    assert life.on_greeting("3" * 16, NOTHING, 6.0) is NodeContents.NONE
    assert life.calls == 2


def test_the_known_instance_that_comes_by_the_second_call_has_lost_nothing() -> None:
    life = asleep()
    life.on_call_started()
    life.on_greeting(TWO, NOTHING, 5.0)
    life.on_call_started()
    assert not life.on_call_returned()
    assert life.on_greeting(ONE, FULL, 6.0) is NodeContents.EXPECTED
    assert life.failed_attempts == 0


def test_a_fresh_instance_in_the_place_of_an_empty_one_is_believed_at_once() -> None:
    life = awake(NOTHING)
    life.on_leaving(ONE, 1.0)
    life.on_call_returned()
    assert life.on_greeting(TWO, NOTHING, 5.0) is NodeContents.EXPECTED
    life = awake(NEWER)
    life.on_leaving(ONE, 1.0)
    life.on_call_returned()
    assert life.on_greeting(TWO, FULL, 5.0) is NodeContents.UNKNOWN, "it has something, which is not put at risk"


def test_an_instance_with_other_contents_is_to_be_listed_until_it_was() -> None:
    life = asleep()
    assert life.on_greeting(TWO, NEWER, 5.0) is NodeContents.UNKNOWN
    assert life.on_greeting(TWO, NEWER, 6.0) is NodeContents.UNKNOWN
    life.has_shard_list = True
    assert life.on_greeting(TWO, NEWER, 7.0) is NodeContents.EXPECTED


def test_contents_that_have_changed_as_often_are_not_taken_for_those_that_are_expected() -> None:
    assert asleep().on_greeting(TWO, StoreVersion(FULL.change_count, 71), 5.0) is NodeContents.UNKNOWN


def test_what_a_node_holds_when_the_proxy_starts_is_unknown() -> None:
    assert NodeStateMachine().on_greeting(ONE, FULL, 0.0) is NodeContents.UNKNOWN
    assert NodeStateMachine().on_greeting(ONE, NOTHING, 0.0) is NodeContents.EXPECTED


@pytest.mark.parametrize("made", [awake, in_doubt])
@pytest.mark.parametrize("digest", [NOTHING, NEWER])
def test_an_unauthenticated_peer_is_not_taken_for_a_node_that_may_still_run(
    made: type[NodeStateMachine], digest: StoreVersion
) -> None:
    life = made()
    before = repr(life)
    assert life.on_greeting(TWO, digest, 5.0) is None
    assert repr(life) == before
    assert life.on_message(ONE, 6.0)
    assert life.expected_version == FULL


@pytest.mark.parametrize("made", [awake, in_doubt, asleep])
def test_an_instance_with_the_contents_that_are_expected_takes_over(made: type[NodeStateMachine]) -> None:
    life = made()
    assert life.on_greeting(TWO, FULL, 5.0) is NodeContents.EXPECTED
    assert life.instance == TWO
    assert not life.on_message(ONE, 6.0)
    assert not life.on_leaving(ONE, 6.0)
    assert not life.on_disconnected(ONE)
    assert life.can_send(5.0)


def test_the_known_instance_may_dial_again_and_hold_more_than_it_could_say() -> None:
    life = awake()
    assert life.on_greeting(ONE, NEWER, 5.0) is NodeContents.UNKNOWN
    assert life.expected_version == NEWER


def test_a_new_instance_is_the_node_once_the_silent_one_s_call_has_ended() -> None:
    life = in_doubt()
    life.on_call_started()
    assert life.on_greeting(TWO, NOTHING, 5.0) is None
    life.on_call_returned()
    assert life.on_greeting(TWO, NOTHING, 6.0) is None
    life.on_call_returned()
    assert life.on_greeting(TWO, NOTHING, 7.0) is NodeContents.DOUBTFUL
    assert life.on_greeting(TWO, NOTHING, 8.0) is NodeContents.NONE


def test_a_node_whose_connection_broke_is_awaited_while_its_call_runs() -> None:
    life = awake()
    assert life.on_disconnected(ONE)
    assert life.state is NodeState.MAYBE
    assert not life.must_invoke
    assert life.on_greeting(ONE, FULL, 5.0) is NodeContents.EXPECTED
    life.on_disconnected(ONE)
    assert not life.on_call_failed()
    assert life.must_invoke


def test_a_node_that_said_bye_is_called_only_after_it_has_returned() -> None:
    life = awake()
    assert life.on_leaving(ONE, 5.0)
    assert not life.must_invoke
    life.on_call_returned()
    assert life.must_invoke


def test_the_end_of_an_earlier_call_says_nothing_of_the_one_that_runs() -> None:
    life = awake()
    life.on_leaving(ONE, 1.0)
    life.on_timeout()
    life.on_call_started()
    life.on_message(ONE, 2.0)
    life.on_call_returned()
    assert life.can_send(2.0)
    life.on_call_returned()
    assert life.state is NodeState.SLEEPING


def test_a_node_that_sleeps_keeps_what_it_holds_when_its_connection_breaks() -> None:
    life = asleep()
    assert life.on_disconnected(ONE)
    assert (life.state, life.expected_version) == (NodeState.SLEEPING, FULL)
    assert not life.on_message(ONE, 5.0)


def test_three_tries_in_a_row_and_what_the_node_held_is_lost() -> None:
    life = asleep()
    for attempt in (1, 2):
        life.on_call_started()
        assert not life.on_call_failed(), attempt
    life.on_call_started()
    assert life.on_call_failed()
    assert (life.state, life.instance, life.expected_version) == (NodeState.GONE, None, NOTHING)
    assert not life.must_invoke


def test_a_call_that_ends_without_a_word_is_a_try() -> None:
    life = NodeStateMachine()
    for _ in range(2):
        life.on_call_started()
        assert not life.on_call_returned()
    life.on_call_started()
    assert life.on_call_returned()


def test_a_call_that_the_platform_has_no_room_for_is_none() -> None:
    life = NodeStateMachine()
    for _ in range(9):
        life.on_call_started()
        life.on_call_throttled()
    assert (life.state, life.failed_attempts, life.must_invoke) == (NodeState.SLEEPING, 0, True)


def test_a_word_ends_a_row_of_tries() -> None:
    life = NodeStateMachine()
    for second in range(5):
        life.on_call_started()
        life.on_call_failed()
        life.on_call_started()
        life.on_timeout()
        life.on_greeting(ONE, NOTHING, float(second))
        life.on_call_returned()
    assert life.state is NodeState.SLEEPING


def test_a_call_that_fails_beside_an_instance_that_is_awake_does_not_concern_it() -> None:
    life = awake(calls=5)
    assert [life.on_call_failed() for _ in range(4)] == [False] * 4
    assert (life.state, life.failed_attempts) == (NodeState.AWAKE, 0)


def test_a_node_that_is_gone_comes_back_by_greeting_only() -> None:
    life = lost_node()
    assert not life.on_message(ONE, 5.0)
    assert not life.on_leaving(ONE, 5.0)
    assert not life.on_disconnected(ONE)
    assert not life.on_timeout()
    life.on_call_started()
    assert life.state is NodeState.GONE
    assert life.on_greeting(ONE, FULL, 9.0) is NodeContents.UNKNOWN
    assert (life.state, life.failed_attempts) == (NodeState.AWAKE, 0)


def test_an_instance_that_is_not_known_cannot_say_what_is_held() -> None:
    life = awake()
    life.on_change(TWO, NEWER)
    assert life.expected_version == FULL
    life.on_change(ONE, NEWER)
    assert life.expected_version == NEWER
    life.on_disconnected(ONE)
    life.on_change(ONE, FULL)
    assert life.expected_version == NEWER


def test_a_change_of_which_no_word_came_is_not_covered_up_by_the_next() -> None:
    life = awake()
    life.has_shard_list = False
    life.on_change(ONE, NEWER)
    assert life.on_greeting(ONE, NEWER, 5.0) is NodeContents.UNKNOWN
    life.has_shard_list = True
    assert life.on_greeting(ONE, NEWER, 6.0) is NodeContents.EXPECTED


def test_a_node_that_delivers_no_shard_is_given_up_however_often_it_answers_pings() -> None:
    life = awake()
    for second in range(2):
        assert not life.on_shard_timeout()
        assert life.on_message(ONE, float(second))
    assert life.on_shard_timeout()
    assert (life.state, life.instance, life.expected_version, life.is_connected) == (
        NodeState.GONE,
        None,
        NOTHING,
        False,
    )


def test_a_shard_that_is_delivered_ends_a_row_of_those_that_are_not() -> None:
    life = awake()
    for _ in range(5):
        assert not life.on_shard_timeout()
        assert not life.on_shard_timeout()
        life.on_shard_answer()
    assert life.state is NodeState.AWAKE


def test_a_node_that_was_given_up_for_what_it_did_not_deliver_has_to_deliver_to_be_trusted_again() -> None:
    life = awake()
    assert [life.on_shard_timeout() for _ in range(3)] == [False, False, True]
    assert life.on_greeting(ONE, FULL, 5.0) is NodeContents.UNKNOWN
    assert life.on_shard_timeout()
    assert life.on_greeting(ONE, FULL, 6.0) is NodeContents.UNKNOWN
    life.on_shard_answer()
    assert [life.on_shard_timeout() for _ in range(3)] == [False, False, True]
    assert life.on_greeting(TWO, FULL, 7.0) is NodeContents.UNKNOWN
    assert [life.on_shard_timeout() for _ in range(3)] == [False, False, True], (
        "what another has not delivered is not its"
    )


def test_a_node_that_sleeps_is_not_given_up_for_what_it_could_not_deliver() -> None:
    life = asleep()
    assert [life.on_shard_timeout() for _ in range(5)] == [False] * 5
    assert (life.state, life.expected_version) == (NodeState.SLEEPING, FULL)


def test_an_instance_that_answers_with_three_wrong_shards_is_given_up_whatever_else_it_delivers() -> None:
    life = awake()
    for _ in range(2):
        assert not life.on_wrong_shard(ONE)
        life.on_shard_answer()
        life.on_message(ONE, 2.0)
    assert not life.is_distrusted
    assert life.on_wrong_shard(ONE)
    assert (life.state, life.instance, life.expected_version, life.is_connected) == (
        NodeState.GONE,
        None,
        NOTHING,
        False,
    )


def test_an_instance_given_up_for_wrong_answers_is_given_up_at_its_next_one() -> None:
    life = awake()
    assert [life.on_wrong_shard(ONE) for _ in range(3)] == [False, False, True]
    for _ in range(2):
        assert life.on_greeting(ONE, FULL, 5.0) is NodeContents.UNKNOWN
        assert life.is_distrusted
        assert life.on_wrong_shard(ONE)
        assert life.state is NodeState.GONE
    assert life.on_greeting(TWO, FULL, 7.0) is NodeContents.UNKNOWN
    assert not life.is_distrusted
    assert [life.on_wrong_shard(TWO) for _ in range(3)] == [False, False, True]


def test_a_wrong_answer_counts_against_its_own_instance_only() -> None:
    life = asleep()
    life.on_disconnected(ONE)
    assert life.on_greeting(TWO, NOTHING, 5.0) is NodeContents.NONE
    assert [life.on_wrong_shard(ONE) for _ in range(5)] == [False] * 5
    assert [life.on_wrong_shard(TWO) for _ in range(3)] == [False, False, True]


def test_a_lie_counts_also_when_the_instance_has_gone_to_sleep_or_its_connection_broke_behind_it() -> None:
    for life in (asleep(), in_doubt()):
        assert [life.on_wrong_shard(ONE) for _ in range(3)] == [False, False, True]
        assert life.state is NodeState.GONE


def test_the_end_of_a_call_that_was_not_made_is_an_error() -> None:
    with pytest.raises(StateError, match="none is open"):
        NodeStateMachine().on_call_returned()


@pytest.mark.parametrize(("fresh_seconds", "tries"), [(-1.0, 3), (math.nan, 3), (math.inf, 3), (1.0, 0)])
def test_figures_that_make_no_sense_are_refused(fresh_seconds: float, tries: int) -> None:
    with pytest.raises(ConfigError):
        NodeStateMachine(fresh_seconds=fresh_seconds, max_attempts=tries)
