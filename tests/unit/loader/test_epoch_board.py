"""Which epoch an iteration is, as the processes that take part in it find out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker_torch._stream_reader import MAX_EPOCH, MAX_WORKERS, EpochBoard, EpochTurn, Worker

ALONE = Worker()


def workers_of(base_seed: int, workers: int = 3) -> list[Worker]:
    return [Worker.of(worker, workers, base_seed) for worker in range(workers)]


def epochs(board: EpochBoard, base_seed: int) -> set[int]:
    """Begin an iteration in three workers; return which epochs they take."""
    return {board.begin(worker).epoch for worker in workers_of(base_seed)}


def test_epochs_of_one_process_follow_one_another_and_looking_ahead_changes_nothing() -> None:
    board = EpochBoard()
    for epoch in range(3):
        assert board.next_turn(ALONE) == board.next_turn(ALONE) == EpochTurn(1, epoch)
        assert board.begin(ALONE) == EpochTurn(1, epoch)


@given(
    st.lists(
        st.tuples(st.permutations(range(4)), st.sets(st.integers(0, 3), max_size=3)),
        min_size=1,
        max_size=12,
    )
)
def test_workers_agree_in_whatever_order_they_begin_and_whichever_never_do(
    iterations: list[tuple[list[int], set[int]]],
) -> None:
    board = EpochBoard()
    for epoch, (order, missing) in enumerate(iterations):
        base_seed = 1000 + epoch
        begun = {board.begin(Worker.of(worker, 4, base_seed)).epoch for worker in order if worker not in missing}
        assert begun == {epoch}


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("reads", range(5))
def test_workers_agree_when_one_begins_while_another_finds_out(
    monkeypatch: pytest.MonkeyPatch, is_ordered: bool, reads: int
) -> None:
    board = EpochBoard()
    one, other = workers_of(5, 2)
    begun: list[EpochTurn] = []
    words = EpochBoard._words.fget  # type: ignore[attr-defined]
    left = iter(range(reads, -1, -1))

    def read(_: EpochBoard) -> object:
        if next(left, None) == 0:
            monkeypatch.undo()
            begun.append(board.begin(other))
        return words(board)

    if is_ordered:
        board.set_next(4)
    monkeypatch.setattr(EpochBoard, "_words", property(read))
    turn = board.begin(one)
    monkeypatch.undo()
    assert turn == (begun[0] if begun else board.begin(other))


def test_iterations_with_the_same_seed_are_distinguished() -> None:
    board = EpochBoard()
    assert [epochs(board, 7) for _ in range(9)] == [{epoch} for epoch in range(9)]


def test_two_iterations_side_by_side_keep_their_epochs() -> None:
    board = EpochBoard()
    one, other = workers_of(1), workers_of(2)
    assert [board.begin(worker).epoch for worker in (one[0], other[0], other[1], one[1], one[2], other[2])] == [
        0, 1, 1, 0, 0, 1,
    ]  # fmt: skip
    assert epochs(board, 3) == {2}


def test_what_the_parent_orders_comes_next_everywhere_also_backwards() -> None:
    board = EpochBoard()
    epochs(board, 1)
    epochs(board, 2)
    assert not board.has_next()
    board.set_next(5)
    assert board.has_next()
    assert (epochs(board, 2), epochs(board, 3)) == ({5}, {6})
    board.set_next(0)
    board.set_next(1)
    assert (epochs(board, 3), board.begin(ALONE).epoch) == ({1}, 2)


def test_workers_that_have_states_of_their_own_agree_on_their_epoch_and_continue_from_it() -> None:
    board = EpochBoard()
    for base_seed in range(4):
        epochs(board, base_seed)
    assert {board.begin(worker, 1) for worker in workers_of(9)} == {EpochTurn(2, 1)}
    assert epochs(board, 10) == {2}
    board.set_next(7)
    assert {board.begin(worker, 4) for worker in workers_of(11)} == {EpochTurn(4, 4)}
    assert epochs(board, 12) == {5}


def test_it_knows_whether_workers_began_the_latest_iteration() -> None:
    board = EpochBoard()
    assert not board.is_in_workers()
    board.begin(ALONE)
    assert not board.is_in_workers()
    epochs(board, 4)
    assert board.is_in_workers()
    board.begin(ALONE)
    assert not board.is_in_workers()
    epochs(board, 5)
    board.set_next(0)
    assert not board.is_in_workers()


def test_only_the_turn_that_was_ordered_with_a_state_needs_it() -> None:
    board = EpochBoard()
    turn = board.set_next(3, with_state=True)
    assert board.needs_state(turn)
    assert not board.needs_state(turn._replace(epoch=4))
    assert not board.needs_state(board.set_next(3))


def test_the_last_worker_and_the_last_epoch_have_room() -> None:
    board = EpochBoard()
    board.set_next(MAX_EPOCH)
    assert board.begin(Worker.of(MAX_WORKERS - 1, MAX_WORKERS, 2**63 - 1)).epoch == MAX_EPOCH
    with pytest.raises(ConfigError, match=f"worker {MAX_WORKERS}"):
        Worker.of(MAX_WORKERS, MAX_WORKERS + 1, 0)
