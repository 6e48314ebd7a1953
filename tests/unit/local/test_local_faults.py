from collections import Counter

import pytest

from stoker_local import Fault, FaultKind, FaultPlan
from stoker_local._network import FaultInjector, split_response

HEAD, BODY = b"HEAD\r\n\r\n", bytes(range(256)) * 1000


def _sent(fault: Fault | None, body: bytes = BODY) -> tuple[bytes, bytes]:
    before, after = split_response(HEAD, body, fault)
    return b"".join(before), b"".join(after)


def test_without_a_fault_the_answer_is_sent_whole() -> None:
    for body in (b"", b"small", BODY):
        assert _sent(None, body) == (HEAD + body, b"")


def test_a_small_answer_is_one_write() -> None:
    assert split_response(HEAD, b"small", None) == ([HEAD + b"small"], [])


@pytest.mark.parametrize("kind", [FaultKind.RESET, FaultKind.TRUNCATE])
def test_a_body_ends_in_the_middle(kind: FaultKind) -> None:
    assert _sent(Fault(kind=kind, position=0.25)) == (HEAD + BODY[:64_000], BODY[64_000:])


@pytest.mark.parametrize("kind", [FaultKind.RESET, FaultKind.TRUNCATE])
def test_without_a_body_the_head_ends_in_the_middle(kind: FaultKind) -> None:
    assert _sent(Fault(kind=kind), b"") == (HEAD[:4], HEAD[4:])


def test_a_stall_delays_and_then_sends_the_rest() -> None:
    before, after = _sent(Fault(kind=FaultKind.STALL, stall_seconds=3.0))
    assert (before + after, len(before)) == (HEAD + BODY, len(HEAD) + len(BODY) // 2)


@pytest.mark.parametrize("position", [0.0, 0.5, 0.999999])
def test_exactly_one_byte_is_corrupted(position: float) -> None:
    sent, after = _sent(Fault(kind=FaultKind.CORRUPT, position=position))
    wrong = [i for i, (a, b) in enumerate(zip(sent, HEAD + BODY, strict=True)) if a != b]
    assert (wrong, after) == ([len(HEAD) + int(position * len(BODY))], b"")


def test_an_empty_body_cannot_be_corrupted() -> None:
    assert _sent(Fault(kind=FaultKind.CORRUPT), b"") == (HEAD, b"")


def test_a_script_strikes_matching_requests_in_order_and_then_ends() -> None:
    slow = Fault(kind=FaultKind.SLOW_DOWN)
    injector = FaultInjector(FaultPlan(script=(None, slow), key_prefix="data/"))
    assert injector.draw("PutObject", "data/1") is None
    assert injector.draw("GetObject", "manifest") is None
    assert [injector.draw("GetObject", "data/1") for _ in range(3)] == [None, slow, None]


def test_faults_have_their_probability_and_repeat_with_their_seed() -> None:
    plan = FaultPlan(probabilities={FaultKind.RESET: 0.1, FaultKind.CORRUPT: 0.3}, seed=5)
    injectors = (FaultInjector(plan), FaultInjector(plan))
    one, other = ([injector.draw("GetObject", "k") for _ in range(4000)] for injector in injectors)
    assert one == other
    kinds = Counter(fault and fault.kind for fault in one)
    assert kinds[FaultKind.RESET] == pytest.approx(400, rel=0.2)
    assert kinds[FaultKind.CORRUPT] == pytest.approx(1200, rel=0.1)
    assert len({fault.position for fault in one if fault}) > 1000


@pytest.mark.parametrize("chances", [{FaultKind.RESET: -0.1}, {FaultKind.RESET: 0.6, FaultKind.STALL: 0.6}])
def test_impossible_chances_are_refused(chances: dict[FaultKind, float]) -> None:
    with pytest.raises(ValueError, match="probabilities"):
        FaultPlan(probabilities=chances)
